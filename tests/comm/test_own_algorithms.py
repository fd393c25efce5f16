"""Schedules of users on memory that peers can address, with every mixture of window and private memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import miraccl
from miraccl.errors import InvalidUsage
from miraccl.schedule.catalog import register
from miraccl.schedule.ir import Schedule, Step
from miraccl.schedule.steps import copy, get, inp, one_channel, others, out, put, reduce_from_peers, scratch, signal, wait
from miraccl.types import Collective
from tests.support.ranks import run_ranks

COUNT = 50_000
"""Elements: several rounds."""


def out_of_outputs(collective: Collective, nranks: int, root: int) -> Schedule:
    """Everybody reads all outputs, which hold the inputs, and overwrites its own when all have read."""

    def steps(rank: int) -> Iterator[Step]:
        peers = others(rank, nranks)
        yield copy(inp(0), out(0))
        yield signal(peers)
        yield wait(peers)
        yield reduce_from_peers(out(0), scratch(0), range(nranks))
        yield signal(peers)
        yield wait(peers)
        yield copy(scratch(0), out(0))

    return one_channel("out_of_outputs", collective, map(steps, range(nranks)), scratch_chunks=1)


def sums(input_in_window: bool, output_in_window: bool) -> None:
    register("out_of_outputs", collectives=[Collective.ALL_REDUCE], sentence="", needs_addressable_memory=True)(out_of_outputs)
    with miraccl.init(algo="out_of_outputs") as comm:
        x = comm.empty(COUNT) if input_in_window else np.empty(COUNT, np.float32)
        y = comm.empty(COUNT) if output_in_window else np.empty(COUNT, np.float32)
        x[:] = np.arange(COUNT) + comm.rank
        for _ in range(2):
            assert comm.all_reduce(x, y) is y
            assert (y == np.arange(COUNT) * comm.nranks + sum(range(comm.nranks))).all()


@pytest.mark.parametrize("input_in_window", [False, True])
@pytest.mark.parametrize("output_in_window", [False, True])
def test_outputs_of_peers_are_read_where_they_lie(input_in_window: bool, output_in_window: bool) -> None:
    run_ranks(sums, 3, input_in_window, output_in_window)


def through_scratch(way: str) -> Schedule:
    """An all-gather of two ranks, right by the interpreter and the verifier, in which the peer's scratch memory is read or written."""

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

    return one_channel("through_scratch", Collective.ALL_GATHER, map(steps, range(2)), scratch_chunks=1)


def gathers(way: str) -> None:
    register("through_scratch", collectives=[Collective.ALL_GATHER], sentence="", needs_addressable_memory=True)(
        lambda collective, nranks, root: through_scratch(way)
    )
    with miraccl.init(algo="through_scratch") as comm:
        x = np.full(3, comm.rank, np.int32)
        with pytest.raises(InvalidUsage, match=f"channel 0, rank 0, step . \\({way} .*peers cannot address scratch memory on CPUs"):
            comm.all_gather(x)
        assert comm.all_reduce(x).tolist() == [1, 1, 1]  # nothing was sent, and the communicator goes on


@pytest.mark.parametrize("way", ["get", "put"])
def test_scratch_of_peers_is_refused_by_all(way: str) -> None:
    run_ranks(gathers, 2, way)
