"""Fault machine: the first fault stays, peers know it first, waits end before it is visible."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import miraccl
from miraccl.diagnosis.fault_machine import (
    FAULT_TRANSITIONS,
    Closed,
    EndWaits,
    FaultFound,
    FaultMachine,
    FaultOrigin,
    FaultReceived,
    FaultState,
    FinalMismatch,
    NotifyPeers,
    Publish,
    Raised,
)
from miraccl.diagnosis.faults import name_world_ranks
from miraccl.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorAborted,
    MiracclError,
    PeerDied,
)
from miraccl.sim import World

DEATH = PeerDied("rank 1 died", rank=0, peer=1)
TIMEOUT = CollectiveTimeout("late", rank=0, peer=2)
MISMATCH = CollectiveMismatch("count is 4 on rank 0, 5 on rank 1", rank=0, peer=1)
ABORT = CommunicatorAborted("rank 0 aborted the communicator", rank=0)


def test_fault_found_here() -> None:
    machine = FaultMachine()
    assert machine.handle(FaultFound(error=TIMEOUT)) == [
        NotifyPeers(error=TIMEOUT),
        EndWaits(error=TIMEOUT),
        Publish(error=TIMEOUT),
    ]
    states = [machine.state]
    assert machine.handle(FaultFound(error=ABORT)) == []
    assert machine.handle(FaultReceived(error=DEATH)) == []
    assert machine.fault is TIMEOUT
    machine.handle(Raised())
    states.append(machine.state)
    assert states == [FaultState.BROKEN, FaultState.REPORTED]


def test_fault_of_a_peer_is_not_sent_back() -> None:
    machine = FaultMachine()
    assert machine.handle(FaultReceived(error=DEATH)) == [
        EndWaits(error=DEATH),
        Publish(error=DEATH),
    ]
    assert machine.origin is FaultOrigin.PEER


def test_root_cause_of_the_engine_replaces_a_death_once() -> None:
    machine = FaultMachine()
    machine.handle(FaultReceived(error=DEATH))
    found = FaultFound(error=MISMATCH, origin=FaultOrigin.ENGINE, root_cause=True)
    assert machine.handle(found)[-1] == Publish(error=MISMATCH)
    again = CollectiveMismatch("another")
    assert machine.handle(FaultFound(error=again, origin=FaultOrigin.ENGINE, root_cause=True)) == []
    assert machine.fault is MISMATCH


def test_late_finding_that_is_not_the_root_cause() -> None:
    machine = FaultMachine()
    machine.handle(FaultReceived(error=DEATH))
    late = FaultFound(error=TIMEOUT, origin=FaultOrigin.ENGINE, counts_late=True)
    assert machine.handle(late) == []
    assert machine.fault is DEATH
    assert machine.found_by_engine


def test_abort_while_a_kernel_has_reported() -> None:
    """Its error follows and becomes the fault."""
    machine = FaultMachine()
    actions = machine.handle(FaultFound(error=ABORT, superseded=True))
    assert actions == [NotifyPeers(error=ABORT), EndWaits(error=None)]
    assert machine.state is FaultState.HEALTHY
    machine.handle(FaultFound(error=TIMEOUT, origin=FaultOrigin.ENGINE))
    assert machine.fault is TIMEOUT


def test_final_mismatch_ends_no_waits() -> None:
    machine = FaultMachine()
    assert machine.handle(FinalMismatch(error=MISMATCH)) == [Publish(error=MISMATCH)]
    assert machine.handle(FinalMismatch(error=MISMATCH)) == []


def test_closed_machine_does_nothing() -> None:
    machine = FaultMachine()
    machine.handle(Closed())
    assert machine.handle(FaultFound(error=TIMEOUT)) == []
    assert machine.fault is None


def test_reported_fault_stays_reported_after_close() -> None:
    """The end of a communicator must not report it a second time."""
    machine = FaultMachine()
    machine.handle(FaultFound(error=TIMEOUT, origin=FaultOrigin.ENGINE))
    machine.handle(Raised())
    machine.handle(Closed())
    assert machine.reported
    assert machine.unreported(already_reported=False, stopped=True) is None


@pytest.mark.parametrize(
    ("event", "already_reported", "stopped", "unreported"),
    [
        (FaultReceived(error=MISMATCH), False, False, True),
        (FaultReceived(error=MISMATCH), True, False, False),
        (FaultReceived(error=DEATH), False, False, False),  # no result of this rank is invalid
        (FaultReceived(error=DEATH), False, True, True),
        (FaultReceived(error=DEATH, origin=FaultOrigin.HOST), False, True, False),
        (FaultFound(error=TIMEOUT), False, True, False),
        (FaultFound(error=TIMEOUT, origin=FaultOrigin.ENGINE), True, False, True),
        (FaultFound(error=ABORT, origin=FaultOrigin.ENGINE), False, True, False),
        (FinalMismatch(error=MISMATCH), True, False, True),
    ],
)
def test_unreported(event: Any, already_reported: bool, stopped: bool, unreported: bool) -> None:
    machine = FaultMachine()
    machine.handle(event)
    found = machine.unreported(already_reported=already_reported, stopped=stopped)
    assert found is (machine.fault if unreported else None)
    machine.handle(Raised())
    assert machine.unreported(already_reported=already_reported, stopped=stopped) is None


_ERRORS = st.sampled_from([DEATH, TIMEOUT, MISMATCH, ABORT])
_INPUTS = st.one_of(
    st.builds(
        FaultFound,
        error=_ERRORS,
        origin=st.sampled_from(FaultOrigin),
        root_cause=st.booleans(),
        counts_late=st.booleans(),
        superseded=st.booleans(),
    ),
    st.builds(
        FaultReceived, error=_ERRORS, origin=st.sampled_from([FaultOrigin.PEER, FaultOrigin.HOST])
    ),
    st.builds(FinalMismatch, error=_ERRORS),
    st.just(Closed()),
)


@given(st.lists(_INPUTS, max_size=12))
def test_any_course_of_events(events: list[Any]) -> None:
    log: list[Any] = []
    machine = FaultMachine(log)
    published: list[MiracclError] = []
    outputs = []
    for event in events:
        actions = machine.handle(event)
        outputs.append(actions)
        machine.validate_state()
        kinds = [type(action) for action in actions]
        assert kinds == sorted(kinds, key=[NotifyPeers, EndWaits, Publish].index)
        if isinstance(event, FaultFound) and Publish in kinds:
            assert kinds == [NotifyPeers, EndWaits, Publish]
        published += [action.error for action in actions if isinstance(action, Publish)]
        assert machine.fault is (published[-1] if published else None)
        if published and machine.state is FaultState.BROKEN:
            machine.handle(Raised())
    assert len(published) <= 2, "a fault is replaced at most once"
    fresh = FaultMachine()
    assert [
        out for out, event in zip(map(fresh.handle, log), log, strict=True) if event != Raised()
    ] == outputs


def test_every_state_can_be_reached() -> None:
    reached, frontier = {FaultState.HEALTHY}, [FaultState.HEALTHY]
    while frontier:
        here = frontier.pop()
        for (state, _), then in FAULT_TRANSITIONS.items():
            if state is here and then not in reached:
                reached.add(then)
                frontier.append(then)
    assert reached == set(FaultState)


# --- numbers in the whole job ---


def test_ranks_of_a_split_communicator_are_named_as_in_the_job() -> None:
    def program(comm: miraccl.Communicator) -> list[str]:
        part = comm.split(0 if comm.rank in (2, 5, 7) else None)
        if part is None:
            return []
        session: Any = part._core.session
        error = PeerDied("rank 1 died: its process ended", rank=0, peer=1)
        name_world_ranks(error, session)
        name_world_ranks(error, session)
        several = CollectiveMismatch("count is 4 on ranks 0 and 1, 5 on rank 2", rank=0)
        own = str(name_world_ranks(PeerDied("rank 1 died", rank=0, peer=1), comm._core.session))
        return [session.name, str(error), str(name_world_ranks(several, session)), own]

    name, text, several, own = World(1, 8, engine="compiled").run(program)[5]
    assert text == (
        "rank 0: rank 1 died: its process ended "
        f"[{name}: rank 0 is rank 2, rank 1 is rank 5 of the job]"
    )
    assert "rank 2 is rank 7 of the job]" in several
    assert own == "rank 0: rank 1 died", "ranks of the world need no second number"
