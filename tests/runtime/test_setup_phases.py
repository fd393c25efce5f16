"""Setup phases share one deadline, and a rank that waits in one is told what ended it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import miraccl
from miraccl import Communicator
from miraccl.bootstrap import control_link
from miraccl.bootstrap.session import LinkSession
from miraccl.clock import VirtualClock, use
from miraccl.deadline import Deadline
from miraccl.errors import (
    BootstrapError,
    CollectiveTimeout,
    CommunicatorClosed,
    MiracclError,
    PeerDied,
)
from miraccl.runtime import loss_notice, rendezvous
from miraccl.runtime.fabric import ProcessFabric
from miraccl.runtime.setup_phases import SetupPhases
from tests.runtime.test_life import failing_thread, in_threads

LIMIT_S = 20.0
WAYS: dict[str, Callable[[Communicator], Communicator | None]] = {
    "split": lambda comm: comm.split(0),
    "shrink": lambda comm: comm.shrink(),
}


class Clock:
    """Clock under which the deadline passes while rank 0 waits in the phase ``last``.

    Rank 1 stops before that phase until ``told`` is set. Active once ``on`` is set.
    """

    def __init__(self, last: str) -> None:
        self.last, self.on, self.stopped, self.told = (
            last,
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self.deadlines: list[list[Deadline]] = [[], []]
        self._gather = LinkSession.all_gather

    def all_gather(
        self, session: LinkSession, data: bytes, tag: str, timeout: Any = None
    ) -> list[bytes]:
        if self.on.is_set() and isinstance(timeout, Deadline):
            self.deadlines[session.rank].append(timeout)
            if tag == self.last and session.rank == 1:
                self.stopped.set()
                assert self.told.wait(20)
                if (
                    session.name == "world"
                ):  # which rank 0 does not leave: nobody ends this stage before the deadline
                    raise BootstrapError("for a test")
            elif tag == self.last:
                assert self.stopped.wait(20)
                timeout = replace(timeout, at=time.monotonic())
        return self._gather(session, data, tag, timeout)

    def check(self, make: Callable[[], Any], rank: int) -> None:
        """Check that ``make`` ends with the deadline, names phase and late rank, and notifies rank
        1.
        """
        with pytest.raises(MiracclError) as caught:
            make()
        error = caught.value
        if rank == 0:
            assert isinstance(error, CollectiveTimeout)
            assert error.peer == 1
            assert f"{self.last!r}" in str(error)
            assert "rank 1 of 2 did not arrive within 20 s" in str(error)
            self.told.set()
        else:
            assert isinstance(error, BootstrapError)

    def check_common_deadline(self, make: Callable[[], Any], rank: int) -> None:
        """Check that ``make`` ends with the deadline that all of its phases share."""
        begun = time.monotonic()
        self.check(make, rank)
        assert len(self.deadlines[rank]) > 3
        (deadline,) = set(self.deadlines[rank])
        assert begun <= deadline.at - LIMIT_S <= time.monotonic()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Clock:
    clock = Clock(getattr(request, "param", "fabric ready"))
    monkeypatch.setattr(LinkSession, "all_gather", lambda *args: clock.all_gather(*args))
    monkeypatch.setattr(control_link, "GRACE_SECONDS", 20.0)  # for the hub, which tells who is late
    return clock


def test_ended_phases_are_dropped() -> None:
    def work(comm: Communicator) -> None:
        session = comm._core.session
        assert isinstance(session, LinkSession)
        before = list(session._callbacks)
        with SetupPhases(session, activity="a test").cancel_on_loss():
            assert len(session._callbacks) == len(before) + 1
        assert session._callbacks == before

    in_threads(2, work)


@pytest.mark.parametrize("way", WAYS)
def test_all_phases_end_at_the_deadline_of_the_call(way: str, clock: Clock) -> None:
    done = threading.Barrier(2)  # a rank that leaves is one that shrink does without

    def work(comm: Communicator) -> None:
        comm._core.session.timeout = LIMIT_S
        comm._core.session.barrier("ready")
        clock.on.set()
        clock.check_common_deadline(lambda: WAYS[way](comm), comm.rank)
        done.wait(20)

    in_threads(2, work)


def test_all_phases_end_at_the_bootstrap_deadline(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ident = miraccl.get_unique_id()
    monkeypatch.setenv("MIRACCL_BOOTSTRAP_TIMEOUT", str(LIMIT_S))

    def work(comm: Communicator) -> None:
        comm._core.session.barrier("ready")
        clock.on.set()
        clock.check_common_deadline(
            lambda: Communicator(2, ident, comm.rank, timeout=60), comm.rank
        )

    in_threads(2, work)


def test_shrink_continues_without_a_finalizing_rank() -> None:
    """The connection of that rank stays open, since it has another communicator."""
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
            while not parts[0]._core.pending_setup._open:
                time.sleep(0.001)
            part.finalize()
        comm.barrier()

    in_threads(2, work)
    assert sizes == [1]


@pytest.mark.parametrize(
    "clock",
    ["split 1", "fabric hello", "fabric connect", "fabric abilities", "fabric ready"],
    indirect=True,
)
def test_late_rank_is_named_with_the_phase(clock: Clock) -> None:
    def work(comm: Communicator) -> None:
        comm._core.session.timeout = LIMIT_S
        comm._core.session.barrier("ready")
        clock.on.set()
        clock.check(lambda: comm.split(0), comm.rank)

    in_threads(2, work)


@pytest.mark.parametrize("clock", ["fabric abilities"], indirect=True)
def test_rank_connecting_after_a_peer_gave_up_is_told(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is over for both; locally visible is only a missing segment."""
    reach = ProcessFabric._connect_transport
    monkeypatch.setattr(loss_notice, "DEATH_NOTICE_S", 20.0)

    def late(ours: ProcessFabric, *args: Any) -> Any:
        if ours.rank == 1:
            clock.stopped.set()
            assert clock.told.wait(20)
            ours._setup.deadline = replace(ours._setup.deadline, at=time.monotonic())
        return reach(ours, *args)

    def work(comm: Communicator) -> None:
        comm._core.session.timeout = LIMIT_S
        comm._core.session.barrier("ready")
        if comm.rank == 0:
            monkeypatch.setattr(ProcessFabric, "_connect_transport", late)
        comm._core.session.barrier("late")
        clock.on.set()
        if comm.rank == 0:
            clock.check(lambda: comm.split(0), 0)
        else:
            with pytest.raises(PeerDied, match="rank 0 left while the ranks were connecting"):
                comm.split(0)

    in_threads(2, work)


def test_first_use_work_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MIRACCL_BOOTSTRAP_TIMEOUT", "7")
    with use(VirtualClock()) as virtual:
        monkeypatch.setattr(rendezvous, "prepare", lambda: virtual.advance(500.0))
        deadline = rendezvous.start_deadline()
        assert (deadline.seconds, deadline.left) == (7.0, 7.0)
        virtual.advance(3.0)
        assert deadline.left == 4.0
        assert deadline.within(10.0) is deadline is Deadline.after(deadline)
        assert deadline.within(1.0).seconds == 1.0
        virtual.advance(5.0)
        assert deadline.left == 0.0


def test_finalize_ends_a_shrink_of_another_thread() -> None:
    """The other rank believes that this one has left, and would never join."""
    ended = threading.Event()

    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            assert ended.wait(20)
            return
        thread, errors = failing_thread(comm.shrink)
        while not comm._core.pending_setup._open:
            time.sleep(0.001)
        comm.finalize()
        thread.join(20)
        ended.set()
        assert isinstance(errors[0], CommunicatorClosed)
        assert "was finalized while" in str(errors[0])

    in_threads(2, work)
