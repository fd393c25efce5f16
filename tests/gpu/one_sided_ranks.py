"""Ranks of the tests of schedules with steps on peers' memory, on an emulated driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from miraccl.api.communicator import Communicator
from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import one_sided
from miraccl.runtime.gpu.communicator import DeviceCommunicator
from miraccl.runtime.options import Options
from miraccl.schedule import catalog
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
    scratch,
    signal,
    wait,
)
from miraccl.types import Collective, RedOp
from tests.gpu.emulated_faults import outcome
from tests.gpu.emulated_ranks import ArraySlice, EmulatedRank, same
from tests.gpu.fake_ranks import session

COUNT = 20_001


def register() -> None:
    """Register user schedules: gets between barriers, puts into scratch memory."""

    def gather(rank: int, nranks: int) -> Iterator[Step]:
        yield barrier()
        for peer in peers_after(rank, nranks):
            yield get(inp(0), out(peer), peer)
        yield copy(inp(0), out(rank))
        yield barrier()

    def exchange(rank: int, nranks: int) -> Iterator[Step]:
        peers = peers_after(rank, nranks)
        yield signal(peers)
        yield wait(peers)
        for peer in peers:
            yield put(inp(peer), scratch(rank), peer)
        yield signal(peers)
        yield wait(peers)
        for peer in peers:
            yield copy(scratch(peer), out(peer))
        yield copy(inp(rank), out(rank))

    def add(
        name: str,
        collective: Collective,
        steps: Callable[[int, int], Iterator[Step]],
        chunks: Callable[[int], int],
    ) -> None:
        @catalog.register(
            name, collectives=[collective], description="For a test.", needs_addressable_memory=True
        )
        def build(asked: Collective, nranks: int, root: int) -> Schedule:
            return one_channel(
                name,
                asked,
                (steps(rank, nranks) for rank in range(nranks)),
                scratch_chunks=chunks(nranks),
            )

    if "gets" not in catalog.names():
        add("gets", Collective.ALL_GATHER, gather, lambda _: 0)
        add("puts_into_scratch", Collective.ALL_TO_ALL, exchange, lambda nranks: nranks)


class OneSided(EmulatedRank):
    """Rank whose communicator uses the requested algorithm."""

    def __init__(self, world: Any, algo: str, timeout: float = 60.0) -> None:
        register()
        super().__init__(world, timeout)
        self.comm = Communicator.from_session(world, Options.create(timeout=timeout, algo=algo))

    def window(self, count: int, dtype: str = "float32") -> Any:
        return self.comm.empty(count, dtype, device="cuda")

    def part(self, window: Any, first: int, values: Any) -> Any:
        """Return these values in a window from element ``first`` on."""
        part = ArraySlice(window.miraccl_view.slice(first, len(values)), np.dtype("float32"))
        part.array[:] = values
        return part

    def expect(self, name: str) -> None:
        assert self.comm._device is not None
        plan = self.comm._device.last_plan
        assert plan is not None
        assert (plan.algo, plan.proto) == (name, "simple")


def two_shot_put() -> None:
    """Sums, averages and gathers by peers' reads and writes, at any window position, in place,
    repeated.
    """
    with session() as world:
        me = OneSided(world, "two_shot_put")
        comm, n = me.comm, me.nranks
        first, second = me.window(COUNT + 100), me.window(COUNT * n)
        total = sum(me.data(r, COUNT) for r in range(n))
        for at in (0, 64, 3):  # the last on no boundary of 16 bytes
            x, y = me.part(first, at, me.data(me.rank, COUNT)), me.part(second, at, np.zeros(COUNT))
            for op, want in (
                (RedOp.SUM, total),
                (RedOp.AVG, total / np.float32(n)),
                (RedOp.MAX, me.data(n - 1, COUNT)),
            ):
                comm.all_reduce(x, y, op, stream=0)
                me.synchronize()
                np.testing.assert_allclose(y.array, want, rtol=1e-6)
                me.expect("two_shot_put")
            comm.all_reduce(x, stream=0)
            me.synchronize()
            np.testing.assert_array_equal(x.array, total)
            world.barrier("seen")
        share = me.put(me.data(me.rank, COUNT))
        whole = me.part(second, 0, np.zeros(COUNT * n))
        world.barrier("cleared")
        comm.all_gather(share, whole, stream=0)  # only outputs are addressed
        me.synchronize()
        np.testing.assert_array_equal(
            whole.array, np.concatenate([me.data(r, COUNT) for r in range(n)])
        )
        mine = me.zeros(COUNT)
        comm.reduce_scatter(whole, mine, stream=0)  # only inputs
        me.synchronize()
        same(mine, n * me.data(me.rank, COUNT))
        small = me.put(np.ones(10))
        with pytest.raises(InvalidUsage, match="peers access the input, which is in no window"):
            comm.all_reduce(small, stream=0)
        with pytest.raises(InvalidUsage, match="peers access the output, which is in no window"):
            comm.all_reduce(me.part(first, 0, np.ones(10)), me.zeros(10), stream=0)
        comm.broadcast(small, stream=0)  # which that algorithm does not know
        me.synchronize()
        comm.finalize()


def many_positions() -> None:
    """Launches belong to window positions, and a bounded number is cached."""
    vars(one_sided)["MAX_POSITIONS"] = 2
    with session() as world:
        me = OneSided(world, "two_shot_put")
        comm, n = me.comm, me.nranks
        window = me.window(1000)

        def places() -> list[int]:
            assert isinstance(comm._device, DeviceCommunicator)
            return [
                len(launch._launches)
                for launch in comm._device._launches.values()
                if isinstance(launch, one_sided.OneSidedLaunch)
            ]

        found: list[int] = []
        for at in (0, 0, 4, 3, 0):
            whole, share = me.part(window, at, np.zeros(100 * n)), me.put(me.data(me.rank, 100))
            world.barrier("cleared")
            comm.all_gather(share, whole, stream=0)
            me.synchronize()
            np.testing.assert_array_equal(
                whole.array, np.concatenate([me.data(r, 100) for r in range(n)])
            )
            found += places()
            world.barrier("seen")
        assert found == [1, 1, 2, 1, 2]
        comm.finalize()


def user_schedules() -> None:
    with session() as world:
        gets = OneSided(world, "gets")
        comm, n = gets.comm, gets.nranks
        window = gets.window(COUNT)
        x, whole = gets.part(window, 0, gets.data(gets.rank, COUNT)), gets.zeros(COUNT * n)
        world.barrier("filled")
        comm.all_gather(x, whole, stream=0)
        gets.synchronize()
        same(whole, np.concatenate([gets.data(r, COUNT) for r in range(n)]))
        gets.expect("gets")
        comm.finalize()


def puts_into_scratch() -> None:
    """Puts into scratch memory work on any array."""
    with session() as world:
        me = OneSided(world, "puts_into_scratch")
        n = me.nranks
        for count in (10, COUNT):
            mine = me.put(np.concatenate([me.data(me.rank * 10 + r, count) for r in range(n)]))
            got = me.zeros(count * n)
            for _ in range(3):
                me.comm.all_to_all(mine, got, stream=0)
            me.synchronize()
            same(got, np.concatenate([me.data(r * 10 + me.rank, count) for r in range(n)]))
            me.expect("puts_into_scratch")
        me.comm.finalize()


def other_positions() -> str:
    """Rank 1 passes another window position than the others."""
    with session() as world:
        me = OneSided(world, "two_shot_put")
        window = me.window(100)
        x = me.part(window, 10 if me.rank == 1 else 0, np.ones(10))
        me.comm.all_reduce(x, stream=0)
        return outcome(me)


def late_signal() -> str:
    """Rank 1 does not arrive; the others report the signal they wait for."""
    with session() as world:
        me = OneSided(world, "two_shot_put", 1.0 if world.rank != 1 else 60.0)
        window = me.window(100)
        world.barrier("made")
        if me.rank == 1:
            world.barrier("told")
            return ""
        try:
            me.comm.all_reduce(me.part(window, 0, np.ones(10)), stream=0)
            return outcome(me)
        finally:
            world.barrier("told")
