"""Rank functions of the property tests."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

import miraccl
from miraccl import Communicator
from miraccl.executor.cpu.kernels import layout
from miraccl.schedule import catalog
from miraccl.types import Collective, RedOp
from tests.runtime import cases

COLLECTIVE = {
    name: Collective[name.removesuffix("_v").upper()] for name in (*cases.EVEN, *cases.UNEVEN)
}


def derived(world: Communicator, label: str, **options: Any) -> Communicator:
    """Return another communicator of the same ranks with other options."""
    member = world._core
    session = member.session.subgroup(range(world.nranks), label)
    opts = replace(member.options, **options)
    return Communicator.from_session(session, opts, parent=world)


def act_as_hosts(ranks_per_host: int) -> None:
    """Assign the ranks of this machine to different hosts; 0 leaves them on one."""
    if ranks_per_host:
        os.environ["MIRACCL_HOSTID"] = f"host{int(os.environ['MIRACCL_RANK']) // ranks_per_host}"


def random_cases(
    seed: int,
    number: int,
    algo: str,
    deterministic: bool,
    counts: list[int],
    window: bool,
    ranks_per_host: int = 0,
) -> int:
    """Run ``number`` random cases with an algorithm (or the planner's choice); return the count."""
    act_as_hosts(ranks_per_host)
    with miraccl.init(buffsize=1) as world:
        comm = derived(world, "sweep", algo=algo, deterministic=deterministic)
        rng = np.random.default_rng(seed)
        names = [*cases.EVEN, *cases.UNEVEN]
        if algo:
            algorithm = catalog.get(algo)
            names = [n for n in cases.EVEN if algorithm.supports(COLLECTIVE[n], comm.nranks)]
            names += [
                n
                for n in cases.UNEVEN
                if COLLECTIVE[n] in algorithm.uneven
                and algorithm.supports(COLLECTIVE[n], comm.nranks)
            ]

        def ordered(case: cases.Case) -> bool:
            return deterministic or bool(algo and catalog.get(algo).rank_ordered)

        done = 0
        for _ in range(number if names else 0):
            case = cases.random_case(rng, comm.nranks, counts, names, ordered=ordered)
            if not window:
                case = replace(case, window=False)
            for name in ("first", "again"):  # the second time through the door, if there is one
                del name
                cases.perform(comm, case)
            if algo:
                assert comm.last_plan is not None
                assert comm.last_plan.algo == algo, comm.last_plan
            done += 1
        comm.finalize()
        return done


def single_copy_cases(seed: int, number: int, algo: str, counts: list[int], threshold: int) -> None:
    """Run random cases with direct reads of private memory from ``threshold`` bytes."""
    with miraccl.init(buffsize=1) as world:
        comm = derived(world, "single copy", algo=algo)
        member = comm._core
        assert member.fabric.addressable
        member.planner.single_copy = member.planner.exchange_copy = threshold
        member.context.set(layout.CTX_P2P_DIRECT, threshold)
        member.planner.stream_from = 0  # and what is written goes past the caches
        member.context.set(layout.CTX_STREAM_FROM, 0)
        comm.barrier()
        rng = np.random.default_rng(seed)
        names = [
            n
            for n in cases.EVEN
            if not algo or catalog.get(algo).supports(COLLECTIVE[n], comm.nranks)
        ]

        def ordered(case: cases.Case) -> bool:
            return bool(algo and catalog.get(algo).rank_ordered)

        for _ in range(number):
            case = cases.random_case(rng, comm.nranks, counts, names, ordered=ordered)
            cases.perform(comm, case)
            cases.perform(comm, case)
        peer, frm = (comm.rank + 1) % comm.nranks, (comm.rank - 1) % comm.nranks
        for count in (100, 5000, 300_000):
            x, out = np.full(count, float(comm.rank)), np.zeros(count)
            work = comm.recv(out, frm, async_op=True)
            comm.send(x, peer)
            x[:] = -1
            work.wait()
            assert (out == frm).all()
        comm.finalize()


def rewritten() -> None:
    """Overwrite every input directly after the call; results must not change."""
    with miraccl.init() as comm:
        n = comm.nranks
        for count in (16, 20_000, 300_000):
            x = comm.empty(count * n, np.float32)
            out = comm.empty(count * n, np.float32)
            for turn in range(6):
                x[:] = comm.rank + turn
                comm.all_reduce(x, out)
                x[:] = -5
                assert (out == n * (n - 1) / 2 + n * turn).all()
                x[:] = comm.rank + turn
                comm.all_gather(x[:count], out)
                x[:] = -5
                assert (out.reshape(n, count) == np.arange(n)[:, None] + turn).all()
                x[:] = comm.rank + turn
                comm.reduce_scatter(x, out[:count])
                x[:] = -5
                assert (out[:count] == n * (n - 1) / 2 + n * turn).all()
                x[:] = comm.rank + turn
                comm.all_to_all(x, out)
                x[:] = -5
                assert (out.reshape(n, count) == np.arange(n)[:, None] + turn).all()
                x[:] = comm.rank + turn
                comm.broadcast(x, turn % n)
                assert (x == turn % n + turn).all()
                x[:] = comm.rank + turn
                got = comm.gather(x[:count], turn % n, out if comm.rank == turn % n else None)
                x[:] = -5
                assert got is None or (got.reshape(n, count) == np.arange(n)[:, None] + turn).all()
                comm.sendrecv(out[:count], (comm.rank + 1) % n, x[:count], (comm.rank - 1) % n)


def rooted_fast_calls(root: int) -> None:
    """Check that repeated gather and scatter use the fast path, which reads root arguments on the
    root.
    """
    with miraccl.init() as comm:
        n, me = comm.nranks, comm.rank
        mine, every = np.full(6, me + 1.0), np.repeat(np.arange(1.0, n + 1), 6)
        mine.flags.writeable = False
        stacked, share = np.zeros(6 * n), np.zeros(6)

        def gather_door(*counts: Any, out: Any = stacked, at_root: Any = root) -> int:
            return comm._fast.gather(
                mine, out if me == root else None, at_root, *(counts or (None, None)), False, None
            )

        def scatter_door(out: Any = share) -> int:
            return comm._fast.scatter(
                every if me == root else "not looked at", out, root, None, None, False, None
            )

        comm.gather_v(mine, [6] * n, root, stacked if me == root else None)
        assert gather_door() == layout.NOT_HANDLED  # a plan of given counts is none of equal ones
        comm.gather(mine, root, stacked if me == root else None)
        comm.scatter(every if me == root else None, root, share)
        for _ in range(2):
            stacked[:] = share[:] = 0
            assert gather_door() == scatter_door() == layout.OK
            assert me != root or np.array_equal(stacked, every)
            assert np.array_equal(share, mine)
        assert comm.gather(mine, root, stacked if me == root else None) is (
            stacked if me == root else None
        )
        assert comm.scatter(every if me == root else None, root, share) is share
        assert gather_door(None, [6] * n) == layout.NOT_HANDLED
        assert gather_door(at_root=float(root)) == layout.NOT_HANDLED
        assert scatter_door(mine) == layout.NOT_HANDLED  # read-only
        assert scatter_door(share.astype(np.float32)) == layout.NOT_HANDLED
        assert scatter_door(None) == layout.NOT_HANDLED
        if me == root:
            assert gather_door(out=stacked[:-1]) == layout.NOT_HANDLED
            assert gather_door(out=None) == layout.NOT_HANDLED
            assert (
                comm._fast.gather(stacked[:6], stacked, root, None, None, False, None)
                == layout.NOT_HANDLED
            )  # overlapping
        comm.barrier()


def reduce_fast_path(root: int, algo: str) -> None:
    """Check that a repeated reduce uses the fast path, with ``out`` on the root and inputs
    unchanged.
    """
    with miraccl.init() as world:
        comm = derived(world, "reduce door", algo=algo)
        n, me = comm.nranks, comm.rank
        mine, got = np.full(6, me + 1.0), np.zeros(6)
        mine.flags.writeable = False
        total = np.full(6, n * (n + 1) / 2)
        prepared = comm.reduce_init(mine, root, got)

        def door(x: Any = mine, out: Any = got, op: Any = RedOp.SUM, at_root: Any = root) -> int:
            return comm._fast.reduce(
                x, out if me == root else "not looked at", op, False, None, at_root
            )

        for op, want in ((RedOp.SUM, total), (RedOp.MAX, np.full(6, float(n)))):
            assert door(op=op) == layout.NOT_HANDLED
            comm.reduce(mine, root, got, op)
            for _ in range(2):
                got[:] = 0
                assert door(op=op) == layout.OK
                assert np.array_equal(got, want if me == root else np.zeros(6))
        got[:] = 0
        prepared()
        assert np.array_equal(got, total if me == root else np.zeros(6))
        assert np.array_equal(mine, np.full(6, me + 1.0))
        for _ in range(2):
            x = np.full(6, me + 1.0)
            assert comm.reduce(x, root) is x
            assert np.array_equal(x, total if me == root else np.full(6, me + 1.0))
        assert door(op="sum") == layout.NOT_HANDLED
        assert door(at_root=n) == layout.NOT_HANDLED
        assert door(mine[::2]) == layout.NOT_HANDLED
        if me == root:
            assert door(mine, None) == layout.NOT_HANDLED  # read-only
            assert door(out=got[:-1]) == layout.NOT_HANDLED
            assert door(out=got.astype(np.float32)) == layout.NOT_HANDLED
            assert (
                comm._fast.reduce(got[:5], got[1:], RedOp.SUM, False, None, root)
                == layout.NOT_HANDLED
            )  # overlapping
        comm.barrier()
        comm.finalize()
