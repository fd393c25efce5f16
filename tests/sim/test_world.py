"""The virtual cluster: the conformance cases of the collectives, repeatable runs, and faults."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorAborted,
    CommunicatorClosed,
    DType,
    InvalidUsage,
    PeerDied,
    RedOp,
    clock,
)
from miraccl.schedule import catalog
from miraccl.sim import World
from miraccl.sim.clock import simulate
from miraccl.sim.links import cluster, switch
from miraccl.types import Collective
from tests.runtime.cases import EVEN, IN_PLACE, ROOTED, UNEVEN, Case, perform, random_case

EVERY = (*EVEN, *UNEVEN)
SLOW = pytest.mark.skipif(
    not os.environ.get("TEST_SLOW"), reason="64 ranks take 16 s of processor time: TEST_SLOW=1"
)


def conformance_cases(nranks: int) -> list[Case]:
    """Return each collective, with odd roots; every second one in place where that exists."""
    return [
        Case(
            name=name,
            dtype=DType.FLOAT32,
            count=3,
            seed=number,
            root=(7 * number + 3) % nranks if name in ROOTED else 0,
            in_place=name in IN_PLACE and number % 2 == 1,
        )
        for number, name in enumerate(EVERY)
    ]


def run_cases(comm: miraccl.Communicator, cases: list[Case]) -> None:
    for case in cases:
        perform(comm, case)
    comm.barrier()


# ---- many ranks


@pytest.mark.parametrize("nodes", [4, pytest.param(8, marks=SLOW)])
def test_nodes_of_8_ranks_run_every_collective_and_repeat_exactly(nodes: int) -> None:
    digests = []
    for _ in range(2):
        world = World(nodes, 8, seed=24)
        world.run(run_cases, conformance_cases(8 * nodes))
        digests.append(world.digest())
        assert {event.operation.split()[0] for event in world.events if event.kind == "end"} == {
            *EVEN,
            "barrier",
        }
    assert digests[0] == digests[1]


# ---- conformance


@pytest.mark.parametrize("nranks", [1, 2, 3, 5, 8])
def test_random_cases_match_the_reference_bit_by_bit(nranks: int) -> None:
    """In rank order the result is defined for any input, NaN and overflow included."""
    rng = np.random.default_rng(nranks)
    cases = [
        random_case(rng, nranks, [0, 1, 7, 100, 1000], EVERY, ordered=lambda case: True)
        for _ in range(40)
    ]
    World(1, nranks, seed=nranks, deterministic=True, slot_bytes=512).run(run_cases, cases)


@pytest.mark.parametrize("seed", range(3))
def test_random_cases_over_nodes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes, ranks = [(2, 3), (3, 2), (4, 4)][seed]
    cases = [
        random_case(rng, nodes * ranks, [1, 9, 500], EVERY, ordered=lambda case: False)
        for _ in range(20)
    ]
    World(nodes, ranks, seed=seed, jitter=0.5, slot_bytes=1024).run(run_cases, cases)


ALGORITHMS = [
    (name, collective)
    for name in catalog.names()
    for collective in sorted(catalog.get(name).collectives)
    if collective is not Collective.BARRIER and catalog.get(name).supports(collective, 8)
]


@pytest.mark.parametrize(("name", "collective"), ALGORITHMS)
def test_every_algorithm_moves_data_as_its_schedule_says(name: str, collective: Collective) -> None:
    algorithm = catalog.get(name)
    cases = [Case(name=collective.label, dtype=DType.FLOAT64, count=n, seed=n) for n in (1, 50)]
    if collective in algorithm.uneven and collective.label + "_v" in UNEVEN:
        cases.append(Case(name=collective.label + "_v", dtype=DType.INT8, count=9, seed=5))
    if collective.reduces:
        cases.append(
            Case(name=collective.label, dtype=DType.FLOAT32, count=20, seed=2, op=RedOp.AVG)
        )

    def program(comm: miraccl.Communicator) -> str:
        for case in cases[:-1]:
            perform(comm, case)
        perform(comm, cases[-1])
        plan = comm.last_plan
        assert plan is not None
        return plan.algo

    used = World(2, 4, seed=1, algo=name, slot_bytes=256).run(program)
    assert len(set(used)) == 1


def test_the_time_of_a_collective_is_that_of_its_simulated_schedule() -> None:
    world = World(1, 8, algo="ring", links=switch(8, 100.0, 2.0), slot_bytes=1 << 20)
    world.run(lambda comm: comm.all_reduce(np.zeros(80_000, np.float32)))
    schedule = catalog.build("ring", Collective.ALL_REDUCE, 8)
    expected = simulate(schedule, switch(8, 100.0, 2.0), 320_000)
    assert world.time_us == pytest.approx(expected.time_us)


# ---- repeatability


def mixed(comm: miraccl.Communicator) -> list[float]:
    clock.sleep(1e-6 * (comm.rank % 3))
    x = np.full(300, comm.rank, np.float32)
    work = comm.all_reduce(x, async_op=True)
    y = np.empty(1, np.float32)
    comm.sendrecv(x[:1].copy(), (comm.rank + 1) % comm.nranks, y, (comm.rank - 1) % comm.nranks)
    half = comm.split(comm.rank % 2)
    assert half is not None
    work.wait()
    return [float(x[0]), float(half.all_reduce(np.ones(1))[0])]


def test_seeds_change_the_order_and_not_the_results() -> None:
    worlds = [World(2, 4, seed=seed, jitter=0.3) for seed in (1, 1, 2)]
    results = [world.run(mixed) for world in worlds]
    assert results[0] == results[1] == results[2] == [[28.0, 4.0]] * 8
    digests = [world.digest() for world in worlds]
    assert digests[0] == digests[1] != digests[2]


def test_a_program_draws_from_the_seed() -> None:
    draws = [World(1, 2, seed=seed).run(lambda comm: clock.random_hex(4)) for seed in (5, 5, 6)]
    assert draws[0] == draws[1] != draws[2]


def test_virtual_time_passes_at_once() -> None:
    def program(comm: miraccl.Communicator) -> float:
        before = clock.monotonic()
        clock.sleep(3600)
        comm.barrier()
        return clock.monotonic() - before

    world = World(2, 2)
    assert world.run(program) == pytest.approx([3600] * 4, abs=1e-3)
    assert world.time_us == pytest.approx(3600e6, rel=1e-6)


def test_a_trace_has_the_collectives_and_steps_of_each_rank() -> None:
    world = World(1, 2, algo="one_shot")
    world.run(lambda comm: comm.all_reduce(np.zeros(10)))
    spans = [event for event in world.trace()["traceEvents"] if event["ph"] == "X"]
    collectives = [span for span in spans if span["tid"] == 0]
    assert [
        (span["name"], span["pid"]) for span in sorted(collectives, key=lambda s: s["pid"])
    ] == [
        ("all_reduce #1", 0),
        ("all_reduce #1", 1),
    ]
    assert {span["name"] for span in spans if span["tid"] == 1} <= {"send", "recv_reduce_all"}
    assert max(span["ts"] + span["dur"] for span in spans) == world.time_us


# ---- other operations


def test_messages_keep_their_order_and_match_their_receives() -> None:
    def program(comm: miraccl.Communicator) -> list[int]:
        big, small = np.arange(200_000), np.arange(3)
        if comm.rank == 0:
            comm.send(big, 1)
            comm.send(small, 1)
            comm.send(small + 10, 1)
            return []
        got = [np.empty(200_000, np.int64), np.empty(3, np.int64), np.empty(3, np.int64)]
        works = [comm.recv(x, 0, async_op=True) for x in got]
        for work in reversed(works):
            work.wait()
        return [int(x[-1]) for x in got]

    assert World(1, 2).run(program)[1] == [199_999, 2, 12]


def test_groups_persistent_operations_and_queries() -> None:
    def program(comm: miraccl.Communicator) -> tuple[Any, ...]:
        x, y = np.full(4, comm.rank, np.float32), np.empty(4, np.float32)
        with miraccl.group():
            comm.send(x, comm.rank)
            comm.recv(y, comm.rank)
        run = comm.all_reduce_init(x)
        run()
        run()
        work = comm.barrier(async_op=True)
        while not work.done():
            pass
        chosen = comm.explain("all_reduce", 1 << 20)[0]
        with comm.split(0, -comm.rank) as reverse:  # type: ignore[union-attr]
            return float(y[0]), float(x[0]), chosen.chosen, reverse.rank, comm.local_rank

    assert World(2, 2).run(program) == [(r, 24.0, True, 3 - r, r % 2) for r in (0.0, 1.0, 2.0, 3.0)]


def test_gpu_arguments_are_rejected() -> None:
    def program(comm: miraccl.Communicator) -> None:
        for call in (
            lambda: comm.empty(3, device="cuda"),
            lambda: comm.barrier(stream=1),
            lambda: comm.all_reduce(np.ones(1), stream=1),
        ):
            with pytest.raises(InvalidUsage):
                call()

    World(1, 2).run(program)


# ---- faults


def outcomes(world: World, program: Callable[[Any], Any]) -> list[Any]:
    return world.run(program, return_exceptions=True)


def test_a_killed_rank_is_reported_to_all_others() -> None:
    world = World(2, 4)
    world.kill(5, after_us=20)

    def program(comm: miraccl.Communicator) -> Any:
        try:
            while True:
                comm.all_reduce(np.zeros(1000, np.float32))
        except PeerDied as error:
            rest = comm.shrink()
            return error.peer, float(rest.all_reduce(np.ones(1))[0])

    results = outcomes(world, program)
    assert [r for rank, r in enumerate(results) if rank != 5] == [(5, 7.0)] * 7
    assert type(results[5]).__name__ == "RankKilled"
    assert world.time_us < 1000


def test_the_first_failure_is_raised_with_its_rank() -> None:
    def program(comm: miraccl.Communicator) -> None:
        if comm.rank == 3:
            raise ValueError("no data")
        comm.barrier()

    with pytest.raises(ValueError, match="no data") as caught:
        World(2, 2).run(program)
    assert "on rank 3" in caught.value.__notes__[0]


def test_mismatched_calls_are_named() -> None:
    def program(comm: miraccl.Communicator) -> None:
        comm.all_reduce(np.zeros(5 if comm.rank == 1 else 4, np.float32))

    results = outcomes(World(1, 3), program)
    assert all(isinstance(error, CollectiveMismatch) for error in results)
    assert "ranks disagree on the count of operation 1" in str(results[0])


def test_mismatched_messages_are_named() -> None:
    def program(comm: miraccl.Communicator) -> None:
        x = np.zeros(4 + comm.rank, np.float32)
        comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)
        comm.barrier()

    results = outcomes(World(1, 2), program)
    assert all(isinstance(error, CollectiveMismatch) for error in results)
    assert "rank 0 sent 4 float32, rank 1 expects 5 float32" in str(results[1])


def test_a_missing_rank_ends_in_a_timeout_with_the_waits_of_all() -> None:
    def program(comm: miraccl.Communicator) -> None:
        if comm.rank == 2:
            comm.recv(np.zeros(1), 0)
        comm.barrier()

    world = World(1, 3, timeout=60)
    results = outcomes(world, program)
    assert all(isinstance(error, CollectiveTimeout) for error in results)
    text = str(results[0])
    assert "passed the deadline of 60 s" in text
    assert "rank 2 is in recv" in text
    assert "rank 0 is in barrier #1: barrier #1: channel 0" in text
    assert world.time_us == pytest.approx(60e6, rel=1e-3)


def test_a_departed_rank_is_missed() -> None:
    def program(comm: miraccl.Communicator) -> None:
        if comm.rank:
            comm.barrier()

    results = outcomes(World(1, 2), program)
    assert isinstance(results[1], PeerDied)
    assert "has left the communicator" in str(results[1])


def test_abort_and_finalize() -> None:
    def program(comm: miraccl.Communicator) -> str:
        if comm.rank == 0:
            clock.sleep(1)
            comm.abort("enough")
        with pytest.raises(CommunicatorAborted, match="enough"):
            comm.barrier()
        comm.finalize()
        with pytest.raises(CommunicatorClosed):
            comm.barrier()
        return "done"

    assert World(1, 2).run(program) == ["done"] * 2


def test_arguments_are_checked() -> None:
    with pytest.raises(InvalidUsage, match="the links join 4 ranks"):
        World(1, 2, links=cluster(2, 2))
    with pytest.raises(InvalidUsage, match="must be at least 1"):
        World(0, 2)
    with pytest.raises(InvalidUsage, match="unknown option"):
        World(1, 2, colour=3)
    with pytest.raises(InvalidUsage, match="allowed are 0 to 1"):
        World(1, 2).kill(2)
