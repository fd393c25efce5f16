"""Virtual ranks with the compiled engine: every collective, repeatable interleavings, faults."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorAborted,
    InvalidUsage,
    PeerDied,
)
from miraccl.sim import World
from miraccl.sim.world import RankKilled
from tests.sim.test_world import conformance_cases, run_cases


def compiled(nodes: int, ranks_per_node: int, **options: Any) -> World:
    return World(nodes, ranks_per_node, engine="compiled", **options)


@pytest.mark.parametrize(
    ("nodes", "ranks"),
    [
        (3, 2),
        pytest.param(
            8,
            8,
            marks=pytest.mark.skipif(
                not os.environ.get("TEST_SLOW"),
                reason="64 ranks twice take 33 s of processor time: TEST_SLOW=1",
            ),
        ),
    ],
)
def test_every_collective_runs_and_repeats_exactly(nodes: int, ranks: int) -> None:
    logs = []
    for _ in range(2):
        world = compiled(nodes, ranks, seed=7)
        world.run(run_cases, conformance_cases(nodes * ranks))
        logs.append((world.events, world.digest()))
        assert any(event.kind == "wait" for event in world.events)
    assert logs[0] == logs[1]


def test_seeds_change_the_interleaving_and_not_the_results() -> None:
    cases = [replace(case, count=3000) for case in conformance_cases(3)]
    digests = set()
    for seed in range(3):
        world = compiled(1, 3, seed=seed)
        world.run(run_cases, cases)
        digests.add(world.digest())
    assert len(digests) == 3


def test_the_ranks_are_communicators_of_the_library() -> None:
    def program(comm: miraccl.Communicator) -> tuple[str, float, float]:
        half = comm.split(comm.rank % 2)
        assert half is not None
        x = np.full(4, comm.rank, np.float32)
        half.all_reduce(x)
        got = np.zeros(4, np.float32)
        after, before = (comm.rank + 1) % comm.nranks, (comm.rank - 1) % comm.nranks
        comm.sendrecv(x, after, got, before)
        half.finalize()
        return type(comm).__name__, float(x[0]), float(got[0])

    results = compiled(2, 2).run(program)
    assert results == [("Communicator", 2.0, 4.0), ("Communicator", 4.0, 2.0)] * 2


def test_a_deadline_passes_at_once() -> None:
    def program(comm: miraccl.Communicator) -> None:
        if comm.rank != 1:
            comm.barrier()
        else:
            miraccl.clock.sleep(1000)

    world = compiled(1, 3, timeout=120)
    waiting, asleep, _ = world.run(program, return_exceptions=True)
    assert isinstance(waiting, CollectiveTimeout), waiting
    assert "120" in str(waiting)
    assert asleep is None
    assert world.time_us >= 120e6


def test_a_killed_rank_is_named_by_all_others() -> None:
    world = compiled(2, 2, timeout=60)
    world.kill(2, after_us=500)

    def program(comm: miraccl.Communicator) -> None:
        if comm.rank == 3:
            miraccl.clock.sleep(1)
        for _ in range(2):
            comm.barrier()

    outcomes = world.run(program, return_exceptions=True)
    assert isinstance(outcomes.pop(2), RankKilled)
    assert {type(error) for error in outcomes} == {PeerDied}, outcomes
    assert {error.peer for error in outcomes} == {2}


def test_calls_that_differ_are_named() -> None:
    def program(comm: miraccl.Communicator) -> None:
        if comm.rank == 0:
            comm.all_gather(np.zeros(4, np.float32))
        else:
            comm.all_reduce(np.zeros(4, np.float32))

    outcomes = compiled(1, 2, timeout=60).run(program, return_exceptions=True)
    assert any(isinstance(error, CollectiveMismatch) for error in outcomes), outcomes
    assert all(isinstance(error, miraccl.MiracclError) for error in outcomes), outcomes


def test_the_first_failure_ends_all_ranks() -> None:
    def program(comm: miraccl.Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("for a test")
        comm.barrier()

    with pytest.raises(KeyError, match="for a test"):
        compiled(1, 2, timeout=60).run(program)


def test_an_abort_reaches_the_waiting_ranks() -> None:
    def program(comm: miraccl.Communicator) -> None:
        if comm.rank == 1:
            comm.abort("for a test")
        comm.barrier()

    outcomes = compiled(1, 2, timeout=60).run(program, return_exceptions=True)
    assert [type(error) for error in outcomes] == [CommunicatorAborted] * 2
    assert "for a test" in str(outcomes[0])


def test_engines_that_do_not_exist_are_rejected() -> None:
    with pytest.raises(InvalidUsage, match="allowed are interpreter, compiled"):
        World(1, 2, engine="gpu")
