"""User-defined schedules on CPU ranks: with addressable memory, and composed of built-in ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl.api.communicator import Communicator
from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.schedule import catalog, passes
from miraccl.schedule.catalog import register
from miraccl.schedule.interpret import expected_outputs
from miraccl.schedule.ir import Schedule, Step
from miraccl.schedule.steps import (
    barrier,
    copy,
    get,
    inp,
    one_channel,
    out,
    peers_after,
    put,
    recv,
    recv_reduce_all,
    recv_reduce_copy,
    reduce_from_peers,
    scratch,
    send,
    signal,
    wait,
)
from miraccl.types import Collective
from tests.schedule.helpers import BUILTIN
from tests.support.ranks import run_ranks

COUNT = 50_000
"""Elements: several rounds."""


def read_peer_outputs(collective: Collective, nranks: int, root: int) -> Schedule:
    """Read the outputs of all peers, which hold the inputs, then overwrite one's own."""

    def steps(rank: int) -> Iterator[Step]:
        peers = peers_after(rank, nranks)
        yield copy(inp(0), out(0))
        yield signal(peers)
        yield wait(peers)
        yield reduce_from_peers(out(0), scratch(0), range(nranks))
        yield signal(peers)
        yield wait(peers)
        yield copy(scratch(0), out(0))

    return one_channel("out_of_outputs", collective, map(steps, range(nranks)), scratch_chunks=1)


def sums(input_in_window: bool, output_in_window: bool) -> None:
    register(
        "out_of_outputs",
        collectives=[Collective.ALL_REDUCE],
        description="",
        needs_addressable_memory=True,
    )(read_peer_outputs)
    with miraccl.init(algo="out_of_outputs") as comm:
        x = comm.empty(COUNT) if input_in_window else np.empty(COUNT, np.float32)
        y = comm.empty(COUNT) if output_in_window else np.empty(COUNT, np.float32)
        x[:] = np.arange(COUNT) + comm.rank
        for _ in range(2):
            assert comm.all_reduce(x, y) is y
            assert (y == np.arange(COUNT) * comm.nranks + sum(range(comm.nranks))).all()


@pytest.mark.parametrize("input_in_window", [False, True])
@pytest.mark.parametrize("output_in_window", [False, True])
def test_outputs_of_peers_are_read_in_place(input_in_window: bool, output_in_window: bool) -> None:
    run_ranks(sums, 3, input_in_window, output_in_window)


def through_peer_scratch(way: str) -> Schedule:
    """Build an all-gather of two ranks, valid for the verifier, that accesses the peer's scratch
    memory.
    """

    def steps(rank: int) -> Iterator[Step]:
        peer = 1 - rank
        if way == "get":
            yield copy(inp(0), scratch(0))
        yield signal([peer])
        yield wait([peer])
        yield get(scratch(0), out(peer), peer) if way == "get" else put(inp(0), scratch(0), peer)
        yield signal([peer])
        yield wait([peer])
        if way == "put":
            yield copy(scratch(0), out(peer))
        yield copy(inp(0), out(rank))

    return one_channel(
        "through_scratch", Collective.ALL_GATHER, map(steps, range(2)), scratch_chunks=1
    )


def gathers(way: str) -> None:
    register(
        "through_scratch",
        collectives=[Collective.ALL_GATHER],
        description="",
        needs_addressable_memory=True,
    )(lambda collective, nranks, root: through_peer_scratch(way))
    with miraccl.init(algo="through_scratch") as comm:
        x = np.full(3, comm.rank, np.int32)
        with pytest.raises(
            InvalidUsage,
            match=f"channel 0, rank 0, step . \\({way} .*peers cannot address scratch memory",
        ):
            comm.all_gather(x)
        assert comm.all_reduce(x).tolist() == [
            1,
            1,
            1,
        ]  # nothing was sent, and the communicator goes on


@pytest.mark.parametrize("way", ["get", "put"])
def test_peer_scratch_is_rejected_on_all_ranks(way: str) -> None:
    run_ranks(gathers, 2, way)


def sums_of_two_chunks(way: str) -> Schedule:
    """Build an all-reduce whose sums cover two chunks at once."""

    def steps(rank: int, nranks: int) -> Iterator[Step]:
        peers = peers_after(rank, nranks)
        if way == "messages":
            yield from (send(inp(0, 2), peer) for peer in peers)
            yield recv_reduce_all(inp(0, 2), out(0, 2), range(nranks))
        else:
            yield signal(peers)
            yield wait(peers)
            yield reduce_from_peers(inp(0, 2), out(0, 2), range(nranks))
            yield signal(peers)
            yield wait(peers)

    return one_channel(
        "in_two_chunks", Collective.ALL_REDUCE, (steps(rank, 3) for rank in range(3)), parts=2
    )


def adds_in_two_chunks(way: str, count: int) -> None:
    needs = way != "messages"
    register(
        "in_two_chunks",
        collectives=[Collective.ALL_REDUCE],
        description="",
        needs_addressable_memory=needs,
    )(lambda collective, nranks, root: sums_of_two_chunks(way))
    with miraccl.init(algo="in_two_chunks") as comm:
        x = np.arange(count, dtype=np.float32) + comm.rank
        assert (comm.all_reduce(x, np.empty_like(x)) == np.arange(count) * 3 + 3).all()


@pytest.mark.parametrize("way", ["messages", "memory"])
@pytest.mark.parametrize("count", [3, COUNT])
def test_sums_of_several_chunks(way: str, count: int) -> None:
    run_ranks(adds_in_two_chunks, 3, way, count)


def broadcast_by_message_and_read(collective: Collective, nranks: int, root: int) -> Schedule:
    """Build a broadcast by message to rank 1 and by direct read on rank 2, with signals and a
    barrier.
    """
    programs = [
        [send(inp(0), 1), copy(inp(0), out(0)), signal([1, 2]), wait([2]), barrier()],
        [recv(out(0), 0), wait([0]), barrier()],
        [wait([0]), get(out(0), out(0), 0), signal([0]), barrier()],
    ]
    return one_channel("handed_over", collective, programs)


def hands_over() -> None:
    register(
        "handed_over",
        collectives=[Collective.BROADCAST],
        description="",
        needs_addressable_memory=True,
    )(broadcast_by_message_and_read)
    with miraccl.init(algo="handed_over") as comm:
        for count in (3, COUNT):
            x = np.full(count, 1 + comm.rank, np.float32)
            assert (comm.broadcast(x) == 1).all()


def test_signals_among_messages() -> None:
    run_ranks(hands_over, 3)


def signals_in_different_places(collective: Collective, nranks: int, root: int) -> Schedule:
    """Build a schedule whose signals precede, split and follow the data, differently on each
    rank.
    """
    if collective is Collective.GATHER:  # the root reads; the others have no data to move
        programs = [
            [
                wait([1, 2]),
                copy(inp(0), out(0)),
                get(inp(0), out(1), 1),
                get(inp(0), out(2), 2),
                signal([2, 1]),
            ],
            *[[signal([0]), wait([0])]] * 2,
        ]
    elif collective is Collective.ALL_GATHER:
        programs = [
            [
                signal([1, 2]),
                copy(inp(0), out(0)),
                wait([1]),
                get(inp(0), out(1), 1),
                wait([2]),
                get(inp(0), out(2), 2),
            ],
            [
                copy(inp(0), out(1)),
                signal([0, 2]),
                wait([2, 0]),
                get(inp(0), out(2), 2),
                get(inp(0), out(0), 0),
            ],
            [
                wait([1, 0]),
                get(inp(0), out(1), 1),
                signal([1, 0]),
                get(inp(0), out(0), 0),
                copy(inp(0), out(2)),
            ],
        ]
        programs = [[*steps, barrier()] for steps in programs]
    else:  # rank 1, which moves nothing, tells rank 2 what rank 0 tells it
        programs = [
            [copy(inp(0), out(0)), wait([1]), put(inp(0), out(0), 1), signal([1])],
            [signal([0]), wait([0]), signal([2]), wait([2])],
            [wait([1]), get(out(0), out(0), 1), signal([1])],
        ]
    return one_channel("signalled_apart", collective, programs)


def signals_apart() -> None:
    collectives = [Collective.GATHER, Collective.ALL_GATHER, Collective.BROADCAST]
    register(
        "signalled_apart", collectives=collectives, description="", needs_addressable_memory=True
    )(signals_in_different_places)
    with miraccl.init(algo="signalled_apart") as comm:
        for count in (3, 1 << 20):  # one round, many rounds
            x, want = np.full(count, 1 + comm.rank, np.float32), [[1], [2], [3]]
            assert (comm.all_gather(x).reshape(3, count) == want).all()
            together = comm.gather(x)
            assert (together is None) == (comm.rank > 0)
            assert together is None or (together.reshape(3, count) == want).all()
            assert (comm.broadcast(x) == 1).all()


def test_signals_in_different_places_of_the_ranks() -> None:
    run_ranks(signals_apart, 3)


def read_peer_inputs(collective: Collective, nranks: int, root: int) -> Schedule:
    """Read the inputs of all peers without regard to their sizes."""

    def steps(rank: int) -> Iterator[Step]:
        peers = peers_after(rank, nranks)
        yield from (signal(peers), wait(peers), copy(inp(0), out(rank)))
        yield from (get(inp(0), out(peer), peer) for peer in peers)
        yield from (signal(peers), wait(peers))

    return one_channel("read_by_all", collective, map(steps, range(nranks)))


def reads_uneven_blocks() -> None:
    gather, counts = Collective.ALL_GATHER, [1, 5, 2]
    register(
        "read_by_all",
        collectives=[gather],
        uneven=[gather],
        description="",
        needs_addressable_memory=True,
    )(read_peer_inputs)
    with miraccl.init(algo="read_by_all") as comm:
        x = np.full(counts[comm.rank], comm.rank, np.int32)
        with pytest.raises(
            InvalidUsage,
            match="read_by_all addresses blocks of peers, whose offsets are unknown",
        ):
            comm.all_gather_v(x, counts)
        assert comm.all_gather(x[:1]).tolist() == [0, 1, 2]
        comm._core.planner.overrides = replace(comm._core.planner.overrides, algo="")
        assert comm.all_gather_v(x, counts).tolist() == [0, 1, 1, 1, 1, 1, 2, 2]


def test_uneven_blocks_of_peers_are_not_addressed() -> None:
    run_ranks(reads_uneven_blocks, 3)


def right_out_of_place(collective: Collective, nranks: int, root: int) -> Schedule:
    """Build a schedule valid out of place only: rank 0 sends its input after writing the sum."""
    programs = [
        [recv_reduce_copy(inp(0), out(0), 1), send(inp(0), 1)],
        [send(inp(0), 0), recv_reduce_copy(inp(0), out(0), 0)],
    ]
    return one_channel("right_apart", collective, programs)


def keeps_apart() -> None:
    register("right_apart", collectives=[Collective.ALL_REDUCE], description="")(right_out_of_place)
    with miraccl.init(algo="right_apart") as comm:
        x = np.full(3, 1 + comm.rank, np.int32)
        assert comm.all_reduce(x, np.empty_like(x)).tolist() == [3, 3, 3]
        with pytest.raises(ScheduleError, match="twice"):
            comm.all_reduce(x)
        assert x.tolist() == [1 + comm.rank] * 3


def test_each_form_is_verified_before_it_runs() -> None:
    run_ranks(keeps_apart, 2)


def wrong(collective: Collective, nranks: int, root: int) -> Schedule:
    """Build schedules in which every rank keeps its data and barriers do not wait."""
    barrier = collective is Collective.BARRIER
    return one_channel(
        "wrong", collective, ([] if barrier else [copy(inp(0), out(0))] for rank in range(nranks))
    )


def does_without() -> None:
    everything = (Collective.ALL_REDUCE, Collective.BARRIER)
    register("wrong", collectives=everything, description="", latency=lambda collective, nranks: 0)(
        wrong
    )
    with miraccl.init() as comm:
        x = np.full(3, comm.rank, np.int32)
        comm.barrier()
        assert comm.all_reduce(x).tolist() == [1, 1, 1]
        (row,) = [
            row for row in comm.explain("all_reduce", x.nbytes, "int32") if row.algo == "wrong"
        ]
        assert row.reason.startswith("excluded: wrong: channel 0, rank 0, step 0")
        options = replace(comm._core.options, algo="wrong")
        with pytest.raises(
            ScheduleError, match="rank 0 may leave the barrier before rank 1 has arrived"
        ):  # a communicator plans its barrier at once
            Communicator.from_session(
                comm._core.session.subgroup(range(comm.nranks), "asked"), options, parent=comm
            )


def test_wrong_algorithm_is_used_only_on_request() -> None:
    run_ranks(does_without, 2)


def nine_signals_first(collective: Collective, nranks: int, root: int) -> Schedule:
    """Send nine signals to a peer before it consumes one."""
    waits = [*[signal([1])] * 9, *[wait([1])] * 9]
    if collective is Collective.BARRIER:
        return one_channel(
            "signalled_first", collective, [waits, [*[signal([0])] * 9, *[wait([0])] * 9]]
        )
    programs = [
        [copy(inp(0), out(0)), *[signal([1])] * 9, wait([1])],
        [*[wait([0])] * 9, get(out(0), out(0), 0), signal([0])],
    ]
    return one_channel("signalled_first", collective, programs)


def signals_first() -> None:
    collectives = [Collective.BARRIER, Collective.BROADCAST]
    register(
        "signalled_first", collectives=collectives, description="", needs_addressable_memory=True
    )(nine_signals_first)
    with miraccl.init() as comm:
        member, session = comm._core, comm._core.session
        options = replace(member.options, algo="signalled_first")
        with pytest.raises(
            InvalidUsage,
            match=r"channel 0, rank 0, step 8 .*gets stuck on CPUs: at most 8 messages",
        ):
            Communicator.from_session(
                session.subgroup(range(2), "asked"), options, parent=comm
            )  # which plans its barrier
        member.planner.overrides = replace(member.planner.overrides, algo="signalled_first")
        assert comm.broadcast(np.full(COUNT, 1 + comm.rank, np.float32)).tolist() == [1] * COUNT


def test_more_signals_than_slots() -> None:
    run_ranks(signals_first, 2)


def composed_schedules(schedule: Schedule) -> Iterator[Schedule]:
    """Return valid schedules of the same collective with several channels, parts and messages in
    flight.
    """
    apart = passes.split_messages(schedule)
    yield passes.pipeline(passes.split_channels(apart, 2), 3)
    yield passes.fuse(
        passes.split_channels(passes.relabel(apart, [*range(1, schedule.nranks), 0]), 3)
    )


def run_passes() -> int:
    """Run every built-in algorithm through the passes; return the number of correct calls."""
    calls = 0
    with miraccl.init() as comm:
        me, n = comm.rank, comm.nranks
        operations: dict[Collective, Callable[[Communicator, np.ndarray, int], Any]] = {
            Collective.ALL_REDUCE: lambda sub, x, root: sub.all_reduce(x),
            Collective.ALL_GATHER: lambda sub, x, root: sub.all_gather(x),
            Collective.REDUCE_SCATTER: lambda sub, x, root: sub.reduce_scatter(x),
            Collective.BROADCAST: lambda sub, x, root: sub.broadcast(x, root),
            Collective.REDUCE: lambda sub, x, root: sub.reduce(x, root),
            Collective.ALL_TO_ALL: lambda sub, x, root: sub.all_to_all(x),
            Collective.GATHER: lambda sub, x, root: sub.gather(x, root),
            Collective.SCATTER: lambda sub, x, root: sub.scatter(
                x, root, np.empty(x.size // n, x.dtype)
            ),
        }
        for name, kind in BUILTIN:
            if kind not in operations or not catalog.get(name).supports(kind, n):
                continue
            for number, made in enumerate(composed_schedules(catalog.build(name, kind, n, 1))):
                schedule = replace(made, name=f"{name}_{kind.label}_{number}")
                catalog.register_schedule(schedule)
                options = replace(comm._core.options, algo=schedule.name)
                with Communicator.from_session(
                    comm._core.session.subgroup(range(n), schedule.name), options, parent=comm
                ) as sub:
                    for count in (0, 5, COUNT):
                        whole = (
                            count * n
                            if kind
                            in (
                                Collective.REDUCE_SCATTER,
                                Collective.ALL_TO_ALL,
                                Collective.SCATTER,
                            )
                            else count
                        )
                        inputs = [
                            (np.arange(whole) % 97 + rank).astype(np.float32) for rank in range(n)
                        ]
                        want = expected_outputs(kind, inputs, root=schedule.root)[me]
                        got = operations[kind](sub, inputs[me].copy(), schedule.root)
                        assert sub.last_plan is not None
                        assert sub.last_plan.algo == schedule.name
                        assert want is None or (got == want).all(), (schedule.name, count)
                        calls += 1
    return calls


def test_schedules_composed_of_built_in_ones() -> None:
    assert min(run_ranks(run_passes, 3)) > 100
