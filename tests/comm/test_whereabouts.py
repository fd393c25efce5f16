"""Where the program of a process waits, as far as that is certain."""

from __future__ import annotations

import threading
from typing import Any

from miraccl.bootstrap import Session, solo
from miraccl.comm import whereabouts
from miraccl.comm.lookout import lookout
from miraccl.comm.waits import Come, ForMeeting, ForOperation, Place, Wait

HERE = ForOperation(key="a", awaited=("1",), op="all_reduce")
INSIDE = ForMeeting(key="b", awaited=("1",), op="split")


def test_only_a_program_with_one_thread_is_in_one_place() -> None:
    me = threading.get_ident()
    begun, end = threading.Event(), threading.Event()

    def thread() -> None:
        begun.set()
        end.wait()

    with whereabouts.Waiting(lambda: HERE), whereabouts.Waiting(lambda: INSIDE):
        assert whereabouts.only_thread() == me
        assert whereabouts.current() is HERE  # the outer one ends last
        for make in (threading.Thread(target=thread), threading.Timer(0, thread)):
            make.start()
            begun.wait()
            assert whereabouts.current() is None
            end.set()
            make.join()
            begun.clear()
            end.clear()
        library = threading.Thread(target=end.wait)  # runs no line of the program's
        library.start()
        assert whereabouts.current() is HERE
        end.set()
        library.join()
    assert not whereabouts._waits


class Seat:
    """That of a rank which waits in its communicator."""

    session: Session | None = None

    def __init__(self, key: str) -> None:
        self.key = key

    def wait(self) -> Wait | None:
        return ForOperation(key=self.key, awaited=("1",), op="all_reduce")

    def come(self) -> Come:
        return Come(operations=3)


def told() -> Place:
    """Where the program is, as others are told."""
    report: dict[str, Any] = whereabouts.report()
    return whereabouts.places({report["token"]: report})[report["token"]]


def test_those_who_live_and_have_not_left_are_told_of() -> None:
    first, second = Seat("first"), Seat("second")
    whereabouts.seats.take(first)
    whereabouts.seats.take(second)
    assert {"first", "second"} <= set(told().come)
    whereabouts.seats.leave(first)
    whereabouts.seats.leave(first)
    del second
    assert not {"first", "second"} & set(told().come)


def test_a_communicator_that_is_closed_before_others_are_asked() -> None:
    """What its program waits in now is looked at next."""
    session = solo()
    session.close()
    assert not lookout._ask(session, session.tokens[0])
