"""Where the program of a process waits, as far as that is certain."""

from __future__ import annotations

import asyncio
import signal
import socketserver
import sys
import threading
from typing import Any

from miraccl.bootstrap import Session, solo, stacks
from miraccl.diagnosis import blocked_ops
from miraccl.diagnosis.detector import deadlock_detector
from miraccl.diagnosis.waits import (
    BlockedState,
    RankProgress,
    Wait,
    WaitForControlOp,
    WaitForOperation,
)
from miraccl.runtime.work import Work

HERE = WaitForOperation(key="a", awaited=("1",), op="all_reduce")
INSIDE = WaitForControlOp(key="b", awaited=("1",), op="split")


def test_only_a_program_with_one_thread_is_in_one_place() -> None:
    me = threading.get_ident()
    begun, end = threading.Event(), threading.Event()

    def thread() -> None:
        begun.set()
        end.wait()

    with blocked_ops.BlockedScope(lambda: HERE), blocked_ops.BlockedScope(lambda: INSIDE):
        assert blocked_ops.only_application_thread() == me
        assert blocked_ops.current_wait() is HERE  # the outer one ends last
        for make in (threading.Thread(target=thread), threading.Timer(0, thread)):
            make.start()
            begun.wait()
            assert blocked_ops.current_wait() is None
            end.set()
            make.join()
            begun.clear()
            end.clear()
        library = threading.Thread(target=end.wait)  # runs no line of the program's
        library.start()
        assert blocked_ops.current_wait() is HERE
        end.set()
        library.join()
    assert not blocked_ops._blocked


def test_threads_that_serve_events_are_the_programs() -> None:
    loop, idle = asyncio.new_event_loop(), threading.Event()
    server = socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler)
    with server, blocked_ops.BlockedScope(lambda: HERE):
        for serve, stop in (
            (loop.run_forever, lambda: loop.call_soon_threadsafe(loop.stop)),
            (server.serve_forever, server.shutdown),
        ):
            assert blocked_ops.current_wait() is HERE
            thread = threading.Thread(target=serve)
            thread.start()
            while (
                "select" not in sys._current_frames()[thread.ident or 0].f_code.co_name
            ):  # no line of the program's
                idle.wait(0.001)
            assert blocked_ops.current_wait() is None
            stop()
            thread.join()
    loop.close()


def test_a_thread_that_is_about_to_begin_is_the_programs() -> None:
    """It is where those of libraries are."""
    end = threading.Event()
    library = threading.Thread(target=end.wait)
    library.start()
    with stacks.Frames() as innermost:
        frame = innermost[library.ident or 0]
        assert not stacks.may_call_user_code(frame, library)
        assert stacks.may_call_user_code(frame, threading.Thread(target=told))
        assert stacks.may_call_user_code(frame, type("Own", (threading.Thread,), {"run": told})())
    end.set()
    library.join()


def test_a_signal_handler_is_in_another_place() -> None:
    """It may call what others wait for."""
    seen: list[Wait | None] = []
    work = Work("all_reduce", lambda: HERE)

    def handle(number: int, frame: Any) -> None:
        seen.append(blocked_ops.current_wait())
        work._finish(None, None)

    usual = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        work.wait()
    finally:
        signal.signal(signal.SIGALRM, usual)
    assert seen == [None]


def test_a_program_in_two_waits_is_in_neither() -> None:
    """The inner one is of a signal handler."""
    first, second = Seat("first"), Seat("second")
    blocked_ops.providers.add(first)
    assert blocked_ops.current_wait() == first.wait()
    blocked_ops.providers.add(second)
    assert blocked_ops.current_wait() is None


class Seat:
    """That of a rank which waits in its communicator."""

    session: Session | None = None

    def __init__(self, key: str) -> None:
        self.key = key

    def wait(self) -> Wait | None:
        return WaitForOperation(key=self.key, awaited=("1",), op="all_reduce")

    def come(self) -> RankProgress:
        return RankProgress(operations=3)


def told() -> BlockedState:
    """Where the program is, as others are told."""
    report: dict[str, Any] = blocked_ops.local_report()
    return blocked_ops.decode_states({report["token"]: report})[report["token"]]


def test_those_who_live_and_have_not_left_are_told_of() -> None:
    first, second = Seat("first"), Seat("second")
    blocked_ops.providers.add(first)
    blocked_ops.providers.add(second)
    assert {"first", "second"} <= set(told().progress)
    blocked_ops.providers.remove(first)
    blocked_ops.providers.remove(first)
    del second
    assert not {"first", "second"} & set(told().progress)


def test_of_ranks_of_one_process_nobody_says_how_far_they_have_come() -> None:
    first, second = Seat("same"), Seat("same")
    blocked_ops.providers.add(first)
    assert told().progress["same"].operations == 3
    blocked_ops.providers.add(second)
    assert "same" not in told().progress


def test_a_communicator_that_is_closed_before_others_are_asked() -> None:
    """What its program waits in now is looked at next."""
    session = solo()
    session.close()
    assert not deadlock_detector._check(session, session.tokens[0])
