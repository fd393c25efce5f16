"""The wait of the host program, reported only where it is certain."""

from __future__ import annotations

import asyncio
import signal
import socketserver
import sys
import threading
from typing import Any

from miraccl.bootstrap import Session, single_rank_session, stacks
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

IN_REDUCE = WaitForOperation(key="a", awaited=("1",), op="all_reduce")
IN_SPLIT = WaitForControlOp(key="b", awaited=("1",), op="split")


def test_wait_is_reported_with_a_single_application_thread() -> None:
    me = threading.get_ident()
    begun, end = threading.Event(), threading.Event()

    def thread() -> None:
        begun.set()
        end.wait()

    with blocked_ops.BlockedScope(lambda: IN_REDUCE), blocked_ops.BlockedScope(lambda: IN_SPLIT):
        assert blocked_ops.only_application_thread() == me
        assert blocked_ops.current_wait() is IN_REDUCE  # the outer scope ends last
        for make in (threading.Thread(target=thread), threading.Timer(0, thread)):
            make.start()
            begun.wait()
            assert blocked_ops.current_wait() is None
            end.set()
            make.join()
            begun.clear()
            end.clear()
        library = threading.Thread(target=end.wait)  # runs no application code
        library.start()
        assert blocked_ops.current_wait() is IN_REDUCE
        end.set()
        library.join()
    assert not blocked_ops._blocked


def test_event_loops_count_as_application_threads() -> None:
    loop, idle = asyncio.new_event_loop(), threading.Event()
    server = socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler)
    with server, blocked_ops.BlockedScope(lambda: IN_REDUCE):
        for serve, stop in (
            (loop.run_forever, lambda: loop.call_soon_threadsafe(loop.stop)),
            (server.serve_forever, server.shutdown),
        ):
            assert blocked_ops.current_wait() is IN_REDUCE
            thread = threading.Thread(target=serve)
            thread.start()
            while (
                "select" not in sys._current_frames()[thread.ident or 0].f_code.co_name
            ):  # it runs no application code now
                idle.wait(0.001)
            assert blocked_ops.current_wait() is None
            stop()
            thread.join()
    loop.close()


def test_starting_threads_count_as_application_threads() -> None:
    """Their stack is the same as that of a library's thread."""
    end = threading.Event()
    library = threading.Thread(target=end.wait)
    library.start()
    with stacks.SampledFrames() as innermost:
        frame = innermost[library.ident or 0]
        assert not stacks.may_call_user_code(frame, library)
        assert stacks.may_call_user_code(frame, threading.Thread(target=reported))
        assert stacks.may_call_user_code(
            frame, type("Own", (threading.Thread,), {"run": reported})()
        )
    end.set()
    library.join()


def test_signal_handler_inside_a_wait_hides_it() -> None:
    """The handler may call what the others wait for."""
    seen: list[Wait | None] = []
    work = Work("all_reduce", lambda: IN_REDUCE)

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


def test_two_waits_of_one_thread_are_ambiguous() -> None:
    """The inner wait belongs to a signal handler."""
    first, second = FakeProvider("first"), FakeProvider("second")
    blocked_ops.providers.add(first)
    assert blocked_ops.current_wait() == first.current_wait()
    blocked_ops.providers.add(second)
    assert blocked_ops.current_wait() is None


class FakeProvider:
    """Wait state of a rank that is blocked in an all_reduce."""

    session: Session | None = None

    def __init__(self, key: str) -> None:
        self.key = key

    def current_wait(self) -> Wait | None:
        return WaitForOperation(key=self.key, awaited=("1",), op="all_reduce")

    def progress(self) -> RankProgress:
        return RankProgress(operations=3)


def reported() -> BlockedState:
    """State of the host program as other processes decode it."""
    report: dict[str, Any] = blocked_ops.local_report()
    return blocked_ops.decode_states({report["token"]: report})[report["token"]]


def test_live_and_registered_providers_are_reported() -> None:
    first, second = FakeProvider("first"), FakeProvider("second")
    blocked_ops.providers.add(first)
    blocked_ops.providers.add(second)
    assert {"first", "second"} <= set(reported().progress)
    blocked_ops.providers.remove(first)
    blocked_ops.providers.remove(first)
    del second
    assert not {"first", "second"} & set(reported().progress)


def test_progress_of_ranks_that_share_a_process_is_left_out() -> None:
    first, second = FakeProvider("same"), FakeProvider("same")
    blocked_ops.providers.add(first)
    assert reported().progress["same"].operations == 3
    blocked_ops.providers.add(second)
    assert "same" not in reported().progress


def test_session_closed_before_the_query() -> None:
    """The detector then looks anew at the wait of the program."""
    session = single_rank_session()
    session.close()
    assert not deadlock_detector._check(session, session.tokens[0])
