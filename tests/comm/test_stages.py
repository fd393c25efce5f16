"""A communicator is made in stages by one deadline, and who waits in one of them is told what has ended it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import miraccl
from miraccl import Communicator
from miraccl.bootstrap import Session
from miraccl.comm import meeting
from miraccl.comm.stages import Stages
from miraccl.deadline import Deadline
from miraccl.errors import BootstrapError, CollectiveTimeout, CommunicatorClosed, MiracclError
from tests.comm.test_life import failing, in_threads

LIMIT_S, EACH_S = 1.0, 0.4
WAYS: dict[str, Callable[[Communicator], Communicator | None]] = {"split": lambda comm: comm.split(0), "shrink": lambda comm: comm.shrink()}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Once this is set, rank 1 takes ``EACH_S`` before each stage."""
    on, gather = threading.Event(), Session.all_gather

    def late(session: Session, data: bytes, tag: str, timeout: Any = None) -> list[bytes]:
        if on.is_set() and session.rank == 1 and tag.startswith(("fabric", "split")):
            time.sleep(EACH_S)
        return gather(session, data, tag, timeout)

    monkeypatch.setattr(Session, "all_gather", late)
    return on


def check(make: Callable[[], Any], rank: int, both_told: threading.Barrier) -> None:
    """``make`` ends in time: rank 0 knows the stage and who is late; rank 1 is late itself, and told of rank 0 or of its own deadline."""
    start = time.monotonic()
    with pytest.raises(MiracclError) as caught:
        make()
    assert time.monotonic() - start < LIMIT_S + 3 * EACH_S
    error = caught.value
    both_told.wait(20)  # a rank that leaves is one that shrink does without
    assert isinstance(error, (CollectiveTimeout if rank == 0 else (CollectiveTimeout, BootstrapError)))
    if rank == 0:
        assert error.peer == 1
        assert "'fabric " in str(error)
        assert "rank 1 of 2 did not come within 1 s" in str(error)


def test_stages_that_are_over_are_forgotten() -> None:
    def work(comm: Communicator) -> None:
        session = comm._member.session
        before = list(session._callbacks)
        with Stages(session, what="a test").follow():
            assert len(session._callbacks) == len(before) + 1
        assert session._callbacks == before

    in_threads(2, work)


@pytest.mark.parametrize("way", WAYS)
def test_all_stages_end_by_the_deadline_of_the_call(way: str, slow: threading.Event) -> None:
    both_told = threading.Barrier(2)

    def work(comm: Communicator) -> None:
        comm._member.session.timeout = LIMIT_S
        comm._member.session.all_gather(b"", "ready", 10)
        slow.set()
        check(lambda: WAYS[way](comm), comm.rank, both_told)

    in_threads(2, work)


def test_all_stages_end_by_the_deadline_for_meeting(slow: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    ident, both_told = miraccl.get_unique_id(), threading.Barrier(2)

    def work(comm: Communicator) -> None:
        comm._member.session.all_gather(b"", "ready")
        monkeypatch.setenv("MIRACCL_BOOTSTRAP_TIMEOUT", str(LIMIT_S))
        slow.set()
        check(lambda: Communicator(2, ident, comm.rank, timeout=20), comm.rank, both_told)

    in_threads(2, work)


def test_shrink_goes_on_without_a_rank_that_finalizes() -> None:
    """Its connection stays, as it has another communicator."""
    parts: dict[int, Communicator] = {}
    sizes: list[int] = []

    def work(comm: Communicator) -> None:
        part = comm.split(0)
        assert part is not None
        parts[comm.rank] = part
        comm.barrier()
        if comm.rank == 0:
            start = time.monotonic()
            sizes.append(part.shrink().nranks)
            assert time.monotonic() - start < 10
        else:
            while not parts[0]._member.underway._open:
                time.sleep(0.001)
            part.finalize()
        comm.barrier()

    in_threads(2, work)
    assert sizes == [1]


@pytest.mark.parametrize("stage", ["split 1", "fabric hello", "fabric connect", "fabric abilities", "fabric ready"])
def test_a_rank_that_does_not_come_to_a_stage_is_named_with_it(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gather, told = Session.all_gather, threading.Event()

    def absent(session: Session, data: bytes, tag: str, timeout: Any = None) -> list[bytes]:
        if session.rank == 1 and tag == stage and not told.is_set():
            assert told.wait(20)
            raise BootstrapError("for a test")
        return gather(session, data, tag, timeout)

    def work(comm: Communicator) -> None:
        comm._member.session.timeout = LIMIT_S
        comm._member.session.all_gather(b"", "ready", 10)
        if comm.rank == 0:
            monkeypatch.setattr(Session, "all_gather", absent)
        comm._member.session.all_gather(b"", "set", 10)
        with pytest.raises(MiracclError) as caught:
            comm.split(0)
        if comm.rank == 0:
            assert isinstance(caught.value, CollectiveTimeout)
            assert f"{stage!r}" in str(caught.value)
            assert "rank 1 of 2 did not come within 1 s" in str(caught.value)
            told.set()

    in_threads(2, work)


def test_what_a_machine_does_at_its_first_use_is_not_on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0

    def compile_and_measure() -> None:
        nonlocal now
        now += 500.0

    monkeypatch.setattr(meeting, "prepare", compile_and_measure)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setenv("MIRACCL_BOOTSTRAP_TIMEOUT", "7")
    deadline = meeting.begin()
    assert (deadline.seconds, deadline.left) == (7.0, 7.0)
    now += 3.0
    assert deadline.left == 4.0
    assert deadline.within(10.0) is deadline is Deadline.after(deadline)
    assert deadline.within(1.0).seconds == 1.0
    now += 5.0
    assert deadline.left == 0.0


def test_finalize_ends_a_shrink_of_another_thread() -> None:
    """The other rank takes this one for one that has left, and would never come."""
    ended = threading.Event()

    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            assert ended.wait(20)
            return
        thread, errors = failing(comm.shrink)
        while not comm._member.underway._open:
            time.sleep(0.001)
        comm.finalize()
        thread.join(5)
        ended.set()
        assert isinstance(errors[0], CommunicatorClosed)
        assert "was finalized while" in str(errors[0])

    in_threads(2, work)
