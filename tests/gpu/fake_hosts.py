"""Ranks of the tests of ``runtime.multinode`` without GPUs: collectives over simulated hosts on a
fake
driver.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from miraccl import PreMulSum, params
from miraccl.api.communicator import Communicator
from miraccl.bootstrap import Session
from miraccl.diagnosis import blocked_ops, detector
from miraccl.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorAborted,
    InvalidUsage,
    MiracclError,
    PeerDied,
    SystemFailure,
)
from miraccl.executor.cpu.kernels.nogil import offsets
from miraccl.executor.cuda import layout
from miraccl.ops.device_arrays import DeviceMemory
from miraccl.ops.spec import ALL_REDUCE_SPARSE, RECV, SEND
from miraccl.runtime.gpu.communicator import DeviceCommunicator
from miraccl.runtime.gpu.operations import DeviceTransfer
from miraccl.runtime.multinode import communicator as several
from miraccl.runtime.multinode import graph_cache
from miraccl.runtime.multinode import runtime as hosts_jobs
from miraccl.runtime.multinode.communicator import MultiNodeCommunicator
from miraccl.runtime.multinode.staging import STAGING_THREADS
from miraccl.runtime.options import Options
from miraccl.schedule.interpret import expected_outputs
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import Collective, DType, RedOp
from tests.gpu.emulated_cuda import EmulatedCuda
from tests.gpu.fake_cuda import CpuKernels, FakeArray, FakeCuda, place, seen
from tests.gpu.fake_ranks import session
from tests.runtime.pair_ranks import await_two, status_queries

BIG = 50_001  # float32: several segments of the smallest slots


class SimulatedRank:
    """Rank with its communicator.

    ``kernels``: a host's kernels run in the emulator, else the CPU replaces them. ``apart``: the
    CPU communicators treat the ranks as several hosts as well and connect by MIRACCL_NET.
    """

    def __init__(
        self,
        world: Session,
        hosts: str,
        timeout: float = 120.0,
        kernels: bool = False,
        apart: bool = False,
    ) -> None:
        self.cuda: FakeCuda
        if kernels:
            self.cuda = EmulatedCuda(home=world.rank).install()
        else:
            vars(several)["DeviceCommunicator"] = CpuKernels
            self.cuda = FakeCuda(home=world.rank).install()
        names = [f"host {letter}" for letter in hosts]
        if apart:
            os.environ["MIRACCL_HOSTID"] = names[world.rank]
        options = Options.create(timeout=timeout)
        self.comm = MultiNodeCommunicator(
            world,
            world.rank,
            names,
            options,
            open_cpu=lambda sub, stages: Communicator.from_session(sub, options, setup=stages),
        )
        self.rank, self.nranks = world.rank, world.nranks
        even = len({hosts.count(letter) for letter in hosts}) == 1
        streams = apart and params.NET.read() != "udp"  # of staging threads
        assert len(self.comm.runtime.direct) == (STAGING_THREADS if streams and even else 0)
        assert (self.comm.runtime.messages is not None) == streams

    def put(self, array: np.ndarray) -> DeviceMemory:
        return place(self.cuda, array)

    def zeros(self, count: int, dtype: DType) -> DeviceMemory:
        return self.put(np.zeros(count, NUMPY_DTYPE[dtype]))

    def finish(self) -> None:
        self.comm.synchronize()
        assert self.comm.close() is None
        assert self.comm.close() is None


def numbers(rank: int, count: int, dtype: DType, seed: int = 0) -> np.ndarray:
    """Return small integers, whose sums are exact in every order."""
    rng = np.random.default_rng((seed, rank))
    return rng.integers(0, 4, count).astype(NUMPY_DTYPE[dtype])


_drawn = functools.lru_cache(maxsize=64)(numbers)  # not to be written


def check(got: DeviceMemory, want: np.ndarray | None, what: str) -> None:
    if want is not None:
        found = seen(got).astype(np.float64)
        assert (found == want.astype(np.float64)).all(), (
            f"{what}: {found[:8]} instead of {want[:8]}"
        )


def even_collectives(hosts: str, sizes: Sequence[int], apart: bool = False) -> dict[str, str]:
    """Run every collective with every size, type and form; return the algorithms used.

    Types other than float32 have the last size only; TEST_SLOW=1 runs all.
    """
    used: dict[str, str] = {}
    with session() as world:
        w = SimulatedRank(world, hosts, apart=apart)
        for count in sizes:
            for root in (0, w.nranks - 1):
                _even(w, count, DType.FLOAT32, root, used)
        for dtype in (DType.BFLOAT16, DType.INT8, DType.FLOAT8_E4M3):
            for count in sizes if os.environ.get("TEST_SLOW") else sizes[-1:]:
                for root in (0, w.nranks - 1):
                    _even(w, min(count, 999), dtype, root, used)
        w.finish()
    return used


def _even(
    w: SimulatedRank,
    count: int,
    dtype: DType,
    root: int,
    used: dict[str, str],
    ops: Sequence[RedOp] = (RedOp.SUM, RedOp.MAX),
) -> None:
    comm, n = w.comm, w.nranks

    def run(
        collective: Collective,
        blocks: int,
        op: RedOp,
        call: Callable[[DeviceMemory, np.ndarray], DeviceMemory | None],
    ) -> None:
        inputs = [_drawn(r, count * blocks, dtype, count) for r in range(n)]
        want = expected_outputs(collective, list(inputs), op=op, root=root)[w.rank]
        x = w.put(inputs[w.rank])
        out = call(x, np.zeros(0 if want is None else want.size, NUMPY_DTYPE[dtype]))
        comm.synchronize()
        what = (
            f"{collective.label} of {count} x {dtype.label}, {op.name}, root {root}, rank {w.rank}"
        )
        if out is not None:
            check(out, want, what)
        if out is not x:
            check(x, inputs[w.rank], f"input of {what}")
        if comm.last_plan is not None:
            used[collective.label] = comm.last_plan.algo
        if count >= n and collective not in (Collective.GATHER, Collective.SCATTER):
            explained = comm.explain(collective, count * dtype.itemsize, dtype, op)[0]
            assert comm.last_plan is not None
            assert (explained.algo, explained.reason) == (
                comm.last_plan.algo,
                comm.last_plan.reason,
            ), what
            assert all(
                w.rank in pair or kind != "staging" for pair, kind, _ in explained.connections
            )

    def reductions(op: RedOp) -> None:
        run(Collective.ALL_REDUCE, 1, op, lambda x, like: comm.all_reduce(x, w.put(like), op))
        run(Collective.ALL_REDUCE, 1, op, lambda x, like: comm.all_reduce(x, None, op))
        run(
            Collective.REDUCE_SCATTER,
            n,
            op,
            lambda x, like: comm.reduce_scatter(x, w.put(like), op),
        )
        run(
            Collective.REDUCE,
            1,
            op,
            lambda x, like: comm.reduce(x, root, w.put(like) if like.size else None, op),
        )

    for op in ops:
        reductions(op)
    run(Collective.ALL_GATHER, 1, RedOp.SUM, lambda x, like: comm.all_gather(x, w.put(like)))
    run(Collective.ALL_TO_ALL, n, RedOp.SUM, lambda x, like: comm.all_to_all(x, w.put(like)))
    run(Collective.BROADCAST, 1, RedOp.SUM, lambda x, like: comm.broadcast(x, root))
    run(
        Collective.GATHER,
        1,
        RedOp.SUM,
        lambda x, like: comm.gather(x, root, w.put(like) if like.size else None),
    )
    run(
        Collective.SCATTER,
        n,
        RedOp.SUM,
        lambda x, like: comm.scatter(x if w.rank == root else None, root, w.put(like)),
    )


def in_rank_order(hosts: str, apart: bool) -> None:
    """``deterministic``: float sums do not depend on the distribution of ranks over hosts."""
    os.environ["MIRACCL_DETERMINISTIC"] = "1"
    with session() as world:
        w = SimulatedRank(world, hosts, apart=apart)
        comm, n = w.comm, w.nranks
        for dtype, count in itertools.product((DType.FLOAT32, DType.BFLOAT16), (n, 1000 * n)):
            rng = np.random.default_rng(count)
            inputs = [
                (rng.normal(size=count) * 10.0 ** rng.integers(-3, 8, count)).astype(
                    NUMPY_DTYPE[dtype]
                )
                for _ in range(n)
            ]
            want = functools.reduce(np.add, [x.astype(np.float32) for x in inputs]).astype(
                NUMPY_DTYPE[dtype]
            )
            out, part, share = (
                w.zeros(count, dtype),
                w.zeros(count, dtype),
                w.zeros(count // n, dtype),
            )
            comm.all_reduce(w.put(inputs[w.rank]), out)
            assert comm.last_plan is not None
            assert (comm.last_plan.algo, "deterministic" in comm.last_plan.reason) == (
                "staged",
                len(set(hosts)) < n,
            )
            comm.reduce(w.put(inputs[w.rank]), 0, part)
            comm.reduce_scatter(w.put(inputs[w.rank]), share)
            comm.synchronize()
            mine = slice(w.rank * (count // n), (w.rank + 1) * (count // n))
            for got, expected_bits in (
                (out, want),
                (share, want[mine]),
                *([(part, want)] if w.rank == 0 else []),
            ):
                assert seen(got).tobytes() == expected_bits.tobytes(), (dtype, count)
        x = numbers(w.rank, 1000, DType.INT32)
        comm.all_reduce(w.put(x), w.zeros(1000, DType.INT32))
        assert comm.last_plan is not None
        assert comm.last_plan.algo == ("hierarchical" if len(set(hosts)) < n else "staged")
        w.finish()


def with_kernels(hosts: str, apart: bool) -> None:
    """Emulated kernels inside hosts: hierarchical collectives, messages, uneven blocks."""
    with session() as world:
        w = SimulatedRank(world, hosts, kernels=True, apart=apart)
        used: dict[str, str] = {}
        _even(w, 515, DType.FLOAT32, 1, used, (RedOp.SUM,))
        for collective in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"):
            assert used[collective] == "hierarchical"
        comm, n, r = w.comm, w.nranks, w.rank
        near = [((a, b), kind) for (a, b), kind, _ in comm.connections() if hosts[a] == hosts[b]]
        assert [kind for _, kind in near] == ["vmm"]
        everybody = [
            DeviceTransfer(receives=k, peer=p, memory=w.put(numbers(r, 3000, DType.INT8)))
            for p in range(n)
            for k in (False, True)
        ]
        comm.exchange([t for t in everybody if t.peer != r])
        comm.synchronize()
        for transfer in everybody:
            check(
                transfer.memory,
                numbers(transfer.peer if transfer.receives else r, 3000, DType.INT8),
                "everybody",
            )
        table = [
            [700 * ((i + 2 * j) % 4) for j in range(n)] for i in range(n)
        ]  # elements from i to j
        blocks = [
            [numbers(10 * i + j, table[i][j], DType.INT32) for j in range(n)] for i in range(n)
        ]
        receives = [table[i][r] for i in range(n)]
        out = comm.all_to_all_v(
            w.put(np.concatenate(blocks[r])),
            table[r],
            receives,
            w.zeros(sum(receives), DType.INT32),
        )
        comm.synchronize()
        check(out, np.concatenate([blocks[i][r] for i in range(n)]), "all_to_all_v")
        w.finish()


def one_host(kind: str) -> None:
    """Emulated kernels over one kind of connection between the ranks of a host."""
    with session() as world:
        cuda = EmulatedCuda(home=world.rank).install()
        comm = DeviceCommunicator(world, world.rank, Options.create(timeout=60))
        assert set(comm.symmetric.kinds) == {"self", kind}
        n, r = world.nranks, world.rank
        inputs = [numbers(i, 700, DType.FLOAT32) for i in range(n)]
        x, y = place(cuda, inputs[r]), place(cuda, np.zeros(700 * n, np.float32))
        comm.all_reduce(x)
        comm.all_gather(place(cuda, inputs[r]), y)
        z = place(cuda, np.zeros(700, np.float32))
        comm.sendrecv(place(cuda, inputs[r]), (r + 1) % n, z, (r - 1) % n)
        comm.synchronize()
        check(x, np.sum(inputs, axis=0), "all_reduce")
        check(y, np.concatenate(inputs), "all_gather")
        check(z, inputs[(r - 1) % n], "sendrecv")
        comm.close()


def in_place(hosts: str, count: int) -> None:
    """Output within input, or input within output."""
    with session() as world:
        w = SimulatedRank(world, hosts)
        comm, n = w.comm, w.nranks
        inputs = [numbers(r, count * n, DType.FLOAT32) for r in range(n)]
        whole = w.put(inputs[w.rank])
        comm.reduce_scatter(whole, whole.slice(w.rank * count, count))
        comm.synchronize()
        check(
            whole.slice(w.rank * count, count),
            expected_outputs(Collective.REDUCE_SCATTER, list(inputs))[w.rank],
            "reduce_scatter",
        )
        gathered = w.zeros(count * n, DType.FLOAT32)
        mine = gathered.slice(w.rank * count, count)
        seen(mine)[:] = inputs[w.rank][:count]
        comm.all_gather(mine, gathered)
        comm.synchronize()
        check(gathered, np.concatenate([i[:count] for i in inputs]), "all_gather")
        w.finish()


def sparse_sums(hosts: str, apart: bool) -> None:
    """Sparse sums over hosts, in place and not, in several segments."""
    with session() as world:
        w = SimulatedRank(world, hosts, apart=apart)
        for density in (0.0, 0.05, 1.0):
            inputs = []
            for rank in range(w.nranks):
                rng = np.random.default_rng((rank, 3))
                rows = np.repeat(rng.random(-(-BIG // 256)) < density, 256)[:BIG]
                inputs.append(numbers(rank, BIG, DType.FLOAT32) * rows)
            x, out = w.put(inputs[w.rank]), w.zeros(BIG, DType.FLOAT32)
            w.comm.execute(ALL_REDUCE_SPARSE, (x, RedOp.SUM, out, None, None))
            w.comm.execute(ALL_REDUCE_SPARSE, (x, RedOp.SUM, None, None, None))
            w.comm.synchronize()
            for result in (x, out):
                check(result, sum(inputs[1:], inputs[0]), f"density {density}")
            plan = w.comm.last_plan
            assert plan is not None
            assert (plan.algo, plan.segments > 1) == ("staged", True), plan
        first, second = w.comm.explain_rows(4 * BIG, DType.FLOAT32, 0.01)
        assert (first.chosen, second.chosen) == (True, False)
        w.finish()


def uneven_collectives(hosts: str, apart: bool) -> None:
    with session() as world:
        w = SimulatedRank(world, hosts, apart=apart)
        comm, n, r = w.comm, w.nranks, w.rank
        for counts in (
            [0] * n,
            [5 * i for i in range(n)],
            [BIG if i == 1 else 0 for i in range(n)],
        ):
            parts = [numbers(i, counts[i], DType.FLOAT32) for i in range(n)]
            got = comm.all_gather_v(w.put(parts[r]), counts, w.zeros(sum(counts), DType.FLOAT32))
            gathered = comm.gather_v(
                w.put(parts[r]), counts, 1, w.zeros(sum(counts), DType.FLOAT32) if r == 1 else None
            )
            whole = numbers(7, sum(counts), DType.FLOAT32)
            share = comm.scatter_v(
                w.put(whole) if r == 0 else None, counts, 0, w.zeros(counts[r], DType.FLOAT32)
            )
            wholes = [numbers(i, sum(counts), DType.FLOAT32) for i in range(n)]
            summed = comm.reduce_scatter_v(
                w.put(wholes[r]), counts, w.zeros(counts[r], DType.FLOAT32)
            )
            comm.synchronize()
            begin = sum(counts[:r])
            places = w.zeros(sum(counts), DType.FLOAT32)
            mine = places.slice(begin, counts[r])
            seen(mine)[:] = parts[r]
            comm.gather_v(mine, counts, 1, places if r == 1 else None)
            comm.synchronize()
            check(
                places if r == 1 else mine,
                np.concatenate(parts) if r == 1 else parts[r],
                "gather_v in place",
            )
            check(got, np.concatenate(parts), "all_gather_v")
            if r == 1:
                check(gathered, np.concatenate(parts), "gather_v")
            else:
                assert gathered is None
            check(share, whole[begin : begin + counts[r]], "scatter_v")
            check(summed, np.sum(wholes, axis=0)[begin : begin + counts[r]], "reduce_scatter_v")
        for scale in (0, 1, 9001):
            table = [
                [scale * ((3 * i + j) % 4) for j in range(n)] for i in range(n)
            ]  # elements from i to j
            blocks = [
                [numbers(10 * i + j, table[i][j], DType.INT32) for j in range(n)] for i in range(n)
            ]
            x = w.put(np.concatenate(blocks[r]))
            receives = [table[i][r] for i in range(n)]
            out = comm.all_to_all_v(x, table[r], receives, w.zeros(sum(receives), DType.INT32))
            comm.synchronize()
            check(
                out, np.concatenate([blocks[i][r] for i in range(n)]), f"all_to_all_v times {scale}"
            )
        w.finish()


def anywhere_in_windows(hosts: str) -> None:
    """Ranks pass different window positions and plain memory, as allowed on one host."""
    with session() as world:
        w = SimulatedRank(world, hosts, kernels=True, apart=True)
        count, total = 1001, w.nranks * (w.nranks + 1) / 2
        window: DeviceMemory = w.comm.empty(4 * count, "float32").miraccl_view
        x = w.put(np.full(count, w.rank + 1.0, np.float32))
        for y in (
            window.slice(w.rank * count, count),
            window.slice(0, count) if w.rank == 1 else w.zeros(count, DType.FLOAT32),
        ):
            for root in range(2):  # the second time as a graph
                w.comm.all_reduce(x, y)
                w.comm.synchronize()
                check(y, np.full(count, total), "all_reduce")
                seen(y)[:] = w.rank
                w.comm.broadcast(y, root)
                w.comm.synchronize()
                check(y, np.full(count, root), "broadcast")
        w.finish()


def changing_counts(hosts: str, apart: bool) -> None:
    """Counts that change between calls, among repeated calls: as graphs, captured, and neither."""
    vars(hosts_jobs)["MAX_JOBS"] = 4
    with session() as world:
        w = SimulatedRank(world, hosts, apart=apart)
        comm, n, r = w.comm, w.nranks, w.rank
        stream = w.cuda.make_stream()
        x, y = w.zeros(BIG * n, DType.FLOAT32), w.zeros(BIG * n, DType.FLOAT32)
        fixed = w.zeros(10, DType.FLOAT32)
        w.cuda.begin_capture(stream)
        comm.all_reduce(fixed, stream=stream)
        graph = w.cuda.end_capture(stream)
        for step in range(20):
            count = 1 + 700 * step
            seen(x)[:] = r + step
            seen(fixed)[:] = step
            comm.all_to_all_v(
                x.slice(0, n * count), [count] * n, [count] * n, y.slice(0, n * count)
            )
            comm.all_to_all_v(
                x.slice(0, n * BIG), [BIG] * n, [BIG] * n, y
            )  # larger than graphs are
            comm.all_reduce(x.slice(0, 99))
            comm.synchronize()
            w.cuda.streams[stream].replay(graph)
            comm.synchronize()
            check(y, np.repeat(np.arange(n) + step, BIG), f"step {step}")
            check(x.slice(0, 99), np.full(99, sum(range(n)) + n * step), f"all_reduce {step}")
            check(fixed, np.full(10, n * step), f"replay {step}")
            assert len(comm.runtime._jobs) <= 8
        assert max(len(proxy._jobs) for proxy in comm.runtime.staging.proxies) <= 9
        w.finish()


def sends_and_receives(hosts: str, apart: bool) -> None:
    with session() as world:
        w = SimulatedRank(world, hosts, apart=apart)
        comm, n, r = w.comm, w.nranks, w.rank
        to, frm = (r + 1) % n, (r - 1) % n
        for count in (1, BIG):
            out = w.zeros(count, DType.FLOAT32)
            comm.sendrecv(w.put(numbers(r, count, DType.FLOAT32)), to, out, frm)
            comm.synchronize()
            check(out, numbers(frm, count, DType.FLOAT32), "sendrecv")
        if r < 2:  # one end groups the calls, the other does not
            arrays = [numbers(r, size, DType.INT32, size) for size in (5000, 3, 7000)]
            outs = [w.zeros(size, DType.INT32) for size in (5000, 3, 7000)]
            peer = 1 - r
            if r == 0:
                sends = [DeviceTransfer(receives=False, peer=1, memory=w.put(a)) for a in arrays]
                comm.exchange(
                    [*sends, *(DeviceTransfer(receives=True, peer=1, memory=o) for o in outs)]
                )
            else:
                for o in outs:
                    comm.recv(o, 0)
                for a in arrays:
                    comm.send(w.put(a), 0)
            comm.synchronize()
            for o in outs:
                check(o, numbers(peer, o.count, DType.INT32, o.count), "grouped and not")
        everybody = [
            DeviceTransfer(receives=k, peer=p, memory=w.put(numbers(r, 20_000, DType.INT8)))
            for p in range(n)
            for k in (False, True)
        ]
        comm.exchange([t for t in everybody if t.peer != r])
        comm.synchronize()
        for transfer in everybody:
            check(
                transfer.memory,
                numbers(transfer.peer if transfer.receives else r, 20_000, DType.INT8),
                "everybody",
            )
        _many(w)
        w.finish()


def _many(w: SimulatedRank) -> None:
    """Exchange messages of all sizes with other hosts, some empty; even ranks group them."""
    hosts = {rank: number for number, ranks in enumerate(w.comm.nodes) for rank in ranks}
    sizes = (3, 0, 20_000, 1, 7, 40_000)
    for low, high in [
        (a, b) for a in range(w.nranks) for b in range(a) if hosts[a] != hosts[b] and (a + b) % 2
    ]:
        if w.rank not in (low, high):
            continue
        peer = low + high - w.rank
        transfers = [
            DeviceTransfer(
                receives=receives,
                peer=peer,
                memory=w.put(numbers(w.rank, size, DType.FLOAT16, number)),
            )
            for number, size in enumerate(sizes)
            for receives in (w.rank % 2 == 0, w.rank % 2 == 1)
        ]
        for group in [transfers] if w.rank % 2 == 0 else [[t] for t in transfers]:
            w.comm.exchange(group)
        w.comm.synchronize()
        for number, transfer in enumerate(transfers):
            rank = peer if transfer.receives else w.rank
            check(
                transfer.memory,
                numbers(rank, transfer.memory.count, DType.FLOAT16, number // 2),
                f"message {number} with rank {peer}",
            )


def graphs(hosts: str, apart: bool) -> None:
    """Captured operations run at each replay, among others, in several streams."""
    with session() as world:
        w = SimulatedRank(world, hosts, apart=apart)
        comm, n, r = w.comm, w.nranks, w.rank
        to, frm = (r + 1) % n, (r - 1) % n
        stream = w.cuda.make_stream()
        x, y, passed = (
            w.zeros(BIG, DType.FLOAT32),
            w.zeros(BIG * n, DType.FLOAT32),
            w.zeros(BIG, DType.FLOAT32),
        )
        w.cuda.begin_capture(stream)
        comm.all_reduce(x, stream=stream)
        comm.all_gather(x, y, stream=stream)
        comm.broadcast(x.slice(0, 10), 1, stream=stream)
        comm.sendrecv(x, to, passed, frm, stream=stream)
        graph = w.cuda.end_capture(stream)
        comm.synchronize()
        for round in range(5):
            seen(x)[:] = r + round
            w.cuda.streams[stream].replay(graph)
            w.cuda.cuStreamSynchronize(stream)
            total = sum(range(n)) + n * round
            check(x, np.full(BIG, total), f"replay {round}")
            check(y, np.full(BIG * n, total), f"replay {round}, gathered")
            check(passed, np.full(BIG, total), f"replay {round}, sent")
            z = w.put(np.full(100 + round, r))
            comm.all_reduce(z)
            comm.sendrecv(w.put(np.full(3, r)), to, last := w.zeros(3, DType.INT64), frm)
            comm.synchronize()
            check(z, np.full(100 + round, sum(range(n))), "in between")
            check(last, np.full(3, frm), "sent in between")
        seen(x)[:] = 0.0
        for _ in range(3):
            w.cuda.streams[stream].replay(graph)
        comm.synchronize()
        w.finish()


def repeated_operations(hosts: str, kernels: bool) -> None:
    """Small repeated operations run as graphs in two streams, among others."""
    with session() as world:
        w = SimulatedRank(world, hosts, kernels=kernels, apart=not kernels)
        comm, n, r = w.comm, w.nranks, w.rank
        vars(graph_cache)["MAX_GRAPHS"] = 7  # some are evicted and captured again
        launched: list[int] = []
        launch = w.cuda.cuGraphLaunch

        def counted(graph: object, stream: int) -> tuple[object, ...]:
            launched.append(stream)
            return launch(graph, stream)

        vars(w.cuda)["cuGraphLaunch"] = counted
        streams = [0, w.cuda.make_stream()]
        ones, many = w.zeros(60, DType.FLOAT32), w.zeros(60 * n, DType.FLOAT32)
        every, part = w.zeros(60 * n, DType.FLOAT32), w.zeros(60, DType.FLOAT32)
        before = w.zeros(60 * n, DType.FLOAT32)
        total = sum(range(n))
        rounds = 6
        for round in range(rounds):
            stream = streams[round // 2 % 2]
            seen(ones)[:], seen(many)[:] = r + round, r
            comm.all_gather(ones, every, stream=stream)
            comm.reduce_scatter(many, part, stream=stream)
            comm.all_to_all(
                many, many_out := w.zeros(60 * n, DType.FLOAT32), stream=stream
            )  # another place each time
            comm.all_reduce(ones, stream=stream)
            comm.broadcast(ones, n - 1, stream=stream)
            around = [
                comm.transfers(RECV if d < 0 else SEND, (mine, (r + d) % n))[0]
                for d, mine in ((1, many), (-1, before))
            ]
            comm.exchange(around, stream=stream)
            comm.synchronize()
            check(before, np.full(60 * n, (r - 1) % n), f"round {round}, around")
            check(every, np.repeat(np.arange(n) + round, 60), f"round {round}, gathered")
            check(part, np.full(60, total), f"round {round}, scattered")
            check(many_out, np.repeat(np.arange(n), 60), f"round {round}, exchanged")
            check(ones, np.full(60, total + n * round), f"round {round}, summed up")
            assert comm.last_plan is not None
        assert len(launched) == 5 * (rounds - 1), (
            "from the second time on, but for what is at another place each time"
        )
        assert set(launched) == set(streams)
        with_others = [w.zeros(8, DType.FLOAT32) for _ in range(8)]
        for _ in range(3):
            for x in with_others:
                comm.all_reduce(x)
        comm.synchronize()
        w.finish()


def special(hosts: str, apart: bool) -> None:
    """Averages, pre-multiplied sums, empty arrays, rejected arguments, explanations."""
    with session() as world:
        w = SimulatedRank(world, hosts, apart=apart)
        comm, n, r = w.comm, w.nranks, w.rank
        arrays = [numbers(i, 1000, DType.INT32) + i for i in range(n)]
        x = w.put(arrays[r].astype(np.int32))
        comm.all_reduce(x, None, RedOp.AVG)
        y = w.put(np.full(1000, 8.0 * (r + 1), np.float32))
        comm.all_reduce(y, None, RedOp.AVG)
        z = w.put(np.ones(500, np.float32))
        comm.all_reduce(z, None, PreMulSum(r + 1.0))
        odd = [(1 << 53) + 1 + 4 * i for i in range(n)]  # no float64s: all would be rounded down
        whole = w.put(np.arange(500))
        comm.all_reduce(whole, None, PreMulSum(odd[r]))
        empty, constant = (
            w.zeros(0, DType.FLOAT32),
            w.zeros(0, DType.FLOAT32)._replace(read_only=True),
        )
        ones, zeros = w.put(np.ones(5, np.float32)), w.zeros(5, DType.FLOAT32)
        for factor in (0.0, 0.0, -0.0, -0.0):  # repeated calls are replayed
            comm.all_reduce(ones, zeros, PreMulSum(factor))
            comm.synchronize()
            assert (np.signbit(seen(zeros)) == np.signbit(factor)).all(), (
                "a factor that is equal to the one before as a number only"
            )
        comm.all_reduce(empty)
        comm.barrier()
        comm.synchronize()
        check(x, np.sum(arrays, axis=0) // n, "average of integers")
        check(y, np.full(1000, 8.0 * (n + 1) / 2), "average")
        check(z, np.full(500, sum(range(1, n + 1))), "pre-multiplied sum")
        assert (seen(whole) == np.arange(500) * sum(odd)).all(), "pre-multiplied sum of integers"
        for call in (
            lambda: comm.all_reduce(x, None, "sum"),  # type: ignore[arg-type]
            lambda: comm.all_reduce(empty, None, "sum"),  # type: ignore[arg-type]
            lambda: comm.all_reduce(constant),
            lambda: comm.broadcast(x, n),
            lambda: comm.send(x, -1),
            lambda: comm.reduce_scatter(w.zeros(n + 1, DType.FLOAT32)),
            lambda: comm.all_gather_v(x, [1] * n, w.zeros(n, DType.INT32)),
            lambda: comm.all_to_all(x, x),
            lambda: comm.sendrecv(x.slice(0, 2), (r + 1) % n, x.slice(1, 2), (r - 1) % n),
            lambda: comm.gather(
                x.slice(1, 2), r, x.slice(0, 2 * n)
            ),  # an overlap that is not "in place"
            lambda: comm.scatter(None, (r + 1) % n),
            lambda: comm.scatter_v(None, [0] * n, (r + 1) % n, constant),
        ):
            try:
                call()
            except InvalidUsage:
                continue
            raise AssertionError("not refused")
        assert all(kind == "staging" for _, kind, _ in comm.connections())
        assert comm.memory()["pinned"] > 0
        w.finish()


def public_way() -> None:
    """``Communicator`` with arrays on GPUs of two hosts of one rank each; CPU arrays work as
    before.
    """
    os.environ["MIRACCL_HOSTID"] = f"host{os.environ['MIRACCL_RANK']}"
    cuda = FakeCuda(home=int(os.environ["MIRACCL_RANK"])).install()
    with session() as world:
        comm = Communicator.from_session(world, Options.create(timeout=30))
        x = FakeArray(cuda, np.full(BIG, comm.rank + 1.0, np.float32))
        assert comm.all_reduce(x) is x
        cpu = np.ones(10, np.float32)
        comm.all_reduce(cpu)
        comm._device.synchronize()  # type: ignore[union-attr]
        assert (x.array == 3).all()
        assert (cpu == 2).all()
        wrong_op: Any = 7
        for refused in (
            lambda: comm.broadcast_init(x, 2),
            lambda: comm.all_reduce_init(x, op=wrong_op),
            lambda: comm.all_reduce_init(x, cpu),
        ):
            try:
                refused()
            except InvalidUsage:
                continue
            raise AssertionError("was prepared")
        prepared = comm.all_reduce_init(x, op=RedOp.MAX)
        assert prepared() is x
        comm.synchronize()
        assert (x.array == 3).all()
        chosen = cuda.set_current(7)
        for call in (
            prepared,
            lambda: comm.all_reduce(x, op=RedOp.MAX),
            lambda: comm.all_reduce(x, op=RedOp.MAX, async_op=True).wait(),
        ):
            for _ in range(3):  # at once, to be captured, as a graph
                call()
                comm.synchronize()
                assert cuda.current == chosen
        assert (x.array == 3).all()
        comm.finalize()
        assert cuda.current == chosen
        try:
            comm.all_reduce(x)
        except MiracclError:
            return
        raise AssertionError("a finalized communicator went on")


def has_ended() -> list[str]:
    """A forked child and an application after ``finalize`` get an error."""
    os.environ["MIRACCL_HOSTID"] = f"host{os.environ['MIRACCL_RANK']}"
    cuda = FakeCuda(home=int(os.environ["MIRACCL_RANK"])).install()
    with session() as world:
        comm = Communicator.from_session(world, Options.create(timeout=30))
        x = FakeArray(cuda, np.ones(10, np.float32))
        works = [comm.all_reduce(x, async_op=True)]
        comm.synchronize()
        calls: tuple[Callable[[], Any], ...] = (lambda: comm.all_reduce(x), comm.synchronize)

        def told() -> list[str]:
            del comm._device.gpu.cuda  # type: ignore[union-attr]  # no more driver calls
            lines = []
            for call in (*calls, works.clear):
                try:
                    call()
                except Exception as error:
                    lines.append(f"{type(error).__name__}: {error}")
            return lines

        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            with open(writer, "w") as out:
                sys.unraisablehook = lambda what: print(what.exc_value, file=out)
                print(*told(), sep="\n", file=out)
            os._exit(0)
        os.close(writer)
        with open(reader) as child:
            lines = child.read().splitlines()
        assert os.waitpid(pid, 0)[1] == 0
        comm.finalize()
        return [*lines, *told()]


def abort(hosts: str, apart: bool, sends: bool) -> str:
    """Rank 0 waits alone and is aborted by another thread; its stream ends and all ranks get the
    error.
    """
    with session() as world:
        w = SimulatedRank(world, hosts, apart=apart)
        x = w.zeros(BIG, DType.FLOAT32)
        if w.rank == 0:
            _begin(w, x, sends)
            threading.Timer(0.1, w.comm.abort).start()
            w.cuda.cuCtxSynchronize()
        return _fault(w, x, (CommunicatorAborted,))


def _begin(w: SimulatedRank, x: DeviceMemory, sends: bool) -> None:
    """Start an operation in which another rank waits for the last one."""
    if sends:
        w.comm.recv(x, w.nranks - 1)
    else:
        w.comm.all_reduce(x)


def driver_fails(hosts: str, apart: bool) -> str:
    """A copy that rank 1 cannot enqueue ends the operation on all ranks."""
    with session() as world:
        w = SimulatedRank(world, hosts, apart=apart)
        x = w.zeros(BIG, DType.FLOAT32)
        w.comm.all_reduce(x)
        w.comm.synchronize()
        world.barrier("before the failure")
        if w.rank == 1:
            w.cuda.refuse.add("cuMemcpyDtoHAsync")
        with contextlib.suppress(SystemFailure):  # rank 0 may have the error already
            w.comm.all_reduce(x)
        w.cuda.refuse.clear()
        w.cuda.cuCtxSynchronize()
        return _fault(w, x, (SystemFailure,))


def kernel_deadline(hosts: str) -> str:
    """A kernel of rank 3 exceeds its deadline while it waits for the first rank of its host."""
    with session() as world:
        w = SimulatedRank(world, hosts)
        x = w.zeros(BIG, DType.FLOAT32)
        if w.rank == 3:
            words: Any = w.comm.local.faults._words
            words[layout.HOST_PEER], words[layout.HOST_ERROR] = 0, layout.ERROR_TIMEOUT
        return _fault(w, x, (CollectiveTimeout,))


def waits_alone(hosts: str, apart: bool, sends: bool) -> str:
    """Rank 0 waits alone until the deadline."""
    with session() as world:
        w = SimulatedRank(world, hosts, apart=apart, timeout=0.5)
        x = w.zeros(BIG, DType.FLOAT32)
        if w.rank == 0:
            _begin(w, x, sends)
            w.cuda.cuCtxSynchronize()
        return _fault(w, x, (MiracclError,))


def mismatched_operators(hosts: str, apart: bool) -> str:
    """The ranks of the first host add, the others take the maximum."""
    with session() as world:
        w = SimulatedRank(world, hosts, apart=apart)
        x = w.zeros(100, DType.FLOAT32)
        w.comm.all_reduce(x)
        w.comm.synchronize()
        w.comm.all_reduce(x, None, RedOp.SUM if w.comm.layout.node == 0 else RedOp.MAX)
        w.cuda.cuCtxSynchronize()
        return _fault(w, x, (CollectiveMismatch,))


def mismatched_counts(hosts: str, apart: bool, count: int) -> str:
    """The ranks of the first host add 4 elements more."""
    with session() as world:
        w = SimulatedRank(world, hosts, apart=apart)
        x = w.zeros(count + 4, DType.FLOAT32)
        w.comm.all_reduce(x)
        w.comm.synchronize()
        w.comm.all_reduce(x if w.comm.layout.node == 0 else x.slice(0, count))
        w.cuda.cuCtxSynchronize()
        return _fault(w, x, (CollectiveMismatch,))


def deadlocks_in_different_calls(
    hosts: str, cases: Sequence[str], kernels: bool = False
) -> list[str]:
    """Ranks of several hosts block on each other in calls that no message compares; return each
    error.
    """
    detector.FIRST_STREAM_PROBE_S = 0.05
    with session() as world:
        return [
            _in_different_calls(SimulatedRank(_sub(world, case), hosts, 600.0, kernels, True), case)
            for case in cases
        ]


def _sub(world: Session, name: str) -> Session:
    return world.subgroup(range(world.nranks), name)


def _in_different_calls(w: SimulatedRank, case: str) -> str:
    """Run one case; most ranks continue with an all_reduce."""
    comm, n, r = w.comm, w.nranks, w.rank
    x, large, ones, few = (
        w.zeros(1000, DType.FLOAT32),
        w.zeros(1 << 22, DType.FLOAT32),
        [1] * n,
        w.zeros(n, DType.FLOAT32),
    )
    first: dict[str, Callable[[], Any]] = {
        **dict.fromkeys(("recv", "reduce"), lambda: comm.recv(x, n - 1)),
        "send": lambda: comm.send(large, n - 1),
        "barrier": comm.barrier,
        "root": comm.barrier,
        "all_to_all_v": lambda: comm.all_to_all_v(few, ones, ones, w.zeros(n, DType.FLOAT32)),
    }
    others: dict[str, Callable[[], Any]] = {
        "root": lambda: comm.broadcast(x, n - 1),  # the root does not wait
        "reduce": lambda: comm.reduce(x, n - 1),
        "all_to_all_v": lambda: comm.all_to_all(few, w.zeros(n, DType.FLOAT32)),
    }
    for _ in range(2):  # the second time as a graph
        comm.all_reduce(x)
    comm.synchronize()
    comm.session.barrier("before they differ")
    with contextlib.suppress(CollectiveMismatch):  # it may be known by now
        if case == "ring":
            comm.recv(x, (r + 1) % n)
        elif r == 0:
            first[case]()
        else:
            others.get(case, lambda: comm.all_reduce(x))()
    w.cuda.cuCtxSynchronize()
    return _fault(w, x, (CollectiveMismatch,))


def gpu_and_cpu_calls(
    hosts: str, calls: Sequence[tuple[str, str]], kernels: bool = False
) -> list[str]:
    """Rank 1 calls a CPU operation and the others a GPU one, or vice versa; return each pair of
    errors.
    """
    detector.FIRST_STREAM_PROBE_S, detector.HOST_POLL_S = 0.05, 0.1
    vars(blocked_ops)["only_application_thread"] = lambda: (
        threading.main_thread().ident
    )  # those of the pretended driver are no program's
    errors = []
    with session() as world:
        os.environ["MIRACCL_HOSTID"] = f"host {hosts[world.rank]}"
        cuda = (
            EmulatedCuda(home=world.rank).install()
            if kernels
            else FakeCuda(home=world.rank).install()
        )
        for pair in calls:
            comm = Communicator.from_session(
                _sub(world, "/".join(pair)), Options.create(timeout=600.0)
            )
            x, y = FakeArray(cuda, np.ones(10, np.float32)), np.ones(10, np.float32)
            made: dict[str, Callable[..., Any]] = {
                "synchronize": Communicator.synchronize,
                "all_reduce": functools.partial(Communicator.all_reduce, x=y),
                "split": functools.partial(Communicator.split, color=0),
            }
            for _ in range(3):  # the last times as a graph
                comm.all_reduce(x)
            comm.synchronize()
            world.barrier("before they differ")
            name = pair[comm.rank == 1]
            try:
                if name == "synchronize":
                    comm.all_reduce(x)
                made[name](comm)
            except MiracclError as error:
                errors.append(f"{type(error).__name__}: {error}")
            else:
                errors.append("nothing")
            with contextlib.suppress(MiracclError):
                comm.finalize()
    return errors


def late_rank(hosts: str) -> None:
    """Rank 0 is late, its application or its stream, until the others have probed it twice."""
    detector.FIRST_STREAM_PROBE_S = 0.05
    with session() as world:
        w = SimulatedRank(world, hosts, apart=True)
        n, r = w.nranks, w.rank
        cpu: Any = w.comm.runtime.world
        for in_stream in (False, True):
            asked = status_queries(cpu._core.session)
            x, y = w.put(np.full(1000, r, np.float32)), w.zeros(1000, DType.FLOAT32)
            if r == 0 and in_stream:
                w.cuda._put(0, functools.partial(await_two, asked))
            elif r == 0:
                await_two(asked)
            if r == 0:
                w.comm.recv(y, n - 1)
            elif r == n - 1:
                w.comm.send(x, 0)  # which the network takes
            w.comm.all_reduce(x)
            w.comm.synchronize()
            check(x, np.full(1000, sum(range(n))), "all_reduce")
            check(y, np.full(1000, n - 1 if r == 0 else 0), "recv")
        w.finish()


def stalled_transfer() -> None:
    """A message from rank 0 to rank 1 stalls until others have probed twice.

    Rank 2 waits for rank 0's next message, and rank 1, in the same group, for rank 2's.
    """
    detector.FIRST_STREAM_PROBE_S = 0.05
    with session() as world:
        w = SimulatedRank(world, "ABC", apart=True)
        comm, r = w.comm, w.rank
        large, y, z = (w.put(np.full(count, r, np.float32)) for count in (800_000, 10, 10))
        cpu: Any = comm.runtime.world
        asked = status_queries(cpu._core.session)
        if r == 0:
            comm.send(large, 1)
            comm.send(y, 2)
        elif r == 1:
            _through_python(
                comm.runtime.messages, 0, 2_080_000, functools.partial(await_two, asked)
            )
            both = ((large, 0), (z, 2))
            comm.exchange(
                [DeviceTransfer(receives=True, peer=peer, memory=memory) for memory, peer in both]
            )
        else:
            comm.recv(y, 0)
            comm.send(z, 1)
        comm.synchronize()
        check(large, np.full(800_000, {0: 0, 1: 0, 2: 2}[r]), "large")
        check(z, np.full(10, {0: 0, 1: 2, 2: 2}[r]), "z")
        w.finish()


def _through_python(streams: Any, peer: int, first: int, pause: Callable[[], None]) -> None:
    """Route data of ``peer`` through a thread that calls ``pause()`` after ``first`` bytes."""
    real = streams._streams.sockets[peer]
    here, there = socket.socketpair()
    real.setblocking(True)
    usual = streams._streams.descriptor
    streams._streams.descriptor = lambda rank: there.fileno() if rank == peer else usual(rank)

    def carry() -> None:
        with here, there:
            left = first
            while data := real.recv(max(1, min(left, 1 << 16)) if left >= 0 else 1 << 16):
                here.sendall(data)
                left -= len(data)
                if left == 0:
                    pause()
                    left = -1

    threading.Thread(target=carry, daemon=True).start()


def mismatched_messages(hosts: str, count: int, dtype: DType) -> str:
    """Rank 0 sends ``BIG`` float32 after a valid message; rank 1 receives something else."""
    with session() as world:
        w = SimulatedRank(world, hosts, apart=True)
        x, y = w.zeros(BIG, DType.FLOAT32), w.zeros(count, dtype)
        for memory in (x, x if w.rank == 0 else y):
            if w.rank == 0:
                w.comm.send(memory, 1)
            else:
                w.comm.recv(memory, 0)
        w.cuda.cuCtxSynchronize()
        return _fault(w, x, (CollectiveMismatch,))


def mismatched_collectives(hosts: str, kernels: bool, case: str) -> str:
    """Ranks call different message collectives, or with different roots or counts, among valid
    ones.
    """
    with session() as world:
        w = SimulatedRank(world, hosts, kernels=kernels, apart=True, timeout=600.0)
        comm, n, r = w.comm, w.nranks, w.rank
        one, every = w.put(np.full(1, float(r))), w.zeros(n, DType.FLOAT64)
        ones, own = [1] * n, int(r == 0)
        _begin_at(w, offsets.MARK_MASK + 1)

        def scatter(root: int) -> None:
            comm.scatter_v(every if r == root else None, ones, root, one, stream=stream)

        def gather(root: int) -> None:
            comm.gather_v(one, ones, root, every if r == root else None, stream=stream)

        def captured() -> None:
            w.cuda.streams[stream].replay(graph)

        stream = w.cuda.make_stream()
        w.cuda.begin_capture(stream)
        comm.gather_v(one, ones, 1, every if r == 1 else None, stream=stream)
        graph = w.cuda.end_capture(stream)
        comm.synchronize()
        calls: dict[str, Callable[[], Any]] = {
            "roots": lambda: scatter(1 if r == 1 else 0),
            "collectives": lambda: gather(1) if r == 0 else scatter(1),
            "counts": lambda: comm.all_to_all_v(
                every.slice(0, n * own),
                [own] * n,
                [own] + [0] * (n - 1),
                one.slice(0, own),
                stream=stream,
            ),
            "one message": lambda: comm.all_to_all_v(
                every.slice(0, own),
                [0, own] + [0] * (n - 2),
                [0] * n,
                one.slice(0, 0),
                stream=stream,
            ),
            "send": lambda: comm.send(one, n - 1, stream=stream) if r == 0 else None,
            "graph": lambda: captured() if r == 0 else scatter(1),
        }
        for root in (1, 1, 1, 0):  # also as graphs
            scatter(root)
            captured()
        comm.synchronize()
        world.barrier("before they differ")
        with contextlib.suppress(CollectiveMismatch):  # it may be known by now
            calls[case]()
            for root in (1, 1, n - 1):
                gather(root)
                scatter(root)
        w.cuda.cuCtxSynchronize()
        return _fault(w, w.zeros(10, DType.FLOAT32), (CollectiveMismatch,))


def mismatch_at_the_end(hosts: str) -> str:
    """Rank 0 gathers to the last rank, the others to rank 0, then all finalize: messages stay
    unmatched.
    """
    with session() as world:
        w = SimulatedRank(world, hosts, kernels=True, apart=True)
        root = w.nranks - 1 if w.rank == 0 else 0
        every = w.zeros(w.nranks, DType.FLOAT32) if w.rank == root else None
        w.comm.gather_v(w.zeros(1, DType.FLOAT32), [1] * w.nranks, root, every)
        error = w.comm.close()
        return f"{type(error).__name__}: {error}"


def uneven_again(hosts: str, kernels: bool) -> None:
    """Repeated message collectives with counts, as graphs and captured; some ranks have no data."""
    with session() as world:
        w = SimulatedRank(world, hosts, kernels=kernels, apart=True)
        comm, n, r = w.comm, w.nranks, w.rank
        counts = [0 if i == n - 1 else 3 + i for i in range(n)]
        counts[0] = 40_000  # several rounds of the smallest slots
        begin, total = sum(counts[:r]), sum(counts)
        whole, mine, spread = (
            w.zeros(total, DType.FLOAT32),
            w.zeros(counts[r], DType.FLOAT32),
            w.zeros(counts[r], DType.FLOAT32),
        )
        sends, receives = (
            [2 * (r == 0 and j == n - 1) for j in range(n)],
            [2 * (r == n - 1 and i == 0) for i in range(n)],
        )
        few, got = w.put(np.full(sum(sends), 7, np.int32)), w.zeros(sum(receives), DType.INT32)
        gathered = w.zeros(total, DType.FLOAT32)
        _begin_at(w, offsets.MARK_MASK - 6)

        def run(root: int, stream: int) -> None:
            comm.gather_v(mine, counts, root, whole if r == root else None, stream=stream)
            comm.scatter_v(whole if r == root else None, counts, root, spread, stream=stream)
            comm.all_to_all_v(few, sends, receives, got, stream=stream)
            comm.all_gather_v(spread, counts, gathered, stream=stream)

        stream = w.cuda.make_stream()
        w.cuda.begin_capture(stream)
        run(n - 1, stream)
        graph = w.cuda.end_capture(stream)
        comm.synchronize()
        for round in range(4):
            for root in (0, n - 1, -1):
                seen(mine)[:], seen(whole)[:], seen(got)[:] = r + round, -1, 0
                for memory in (spread, gathered):
                    seen(memory)[:] = -1
                if root < 0:
                    w.cuda.streams[stream].replay(graph)
                else:
                    run(root, 0)
                comm.synchronize()
                want = np.repeat(np.arange(n) + round, counts)
                what = f"round {round}, root {root}"
                if r == (root if root >= 0 else n - 1):
                    check(whole, want, what)
                check(spread, want[begin : begin + counts[r]], what)
                check(gathered, want, what)
                check(got, np.full(sum(receives), 7), what)
        alone = comm.layout.local_size == 1 and comm.layout.uniform
        assert _begin_at(w, 0) == offsets.MARK_MASK - 6 + 4 * 3 * (4 if alone else 3)
        w.finish()


def _begin_at(w: SimulatedRank, number: int) -> int:
    """Set the number of the next message collective; return the previous one."""
    streams = w.comm.runtime.messages
    assert streams is not None
    counted, streams._collectives[0] = int(streams._collectives[0]), number
    return counted


def death(hosts: str, apart: bool, sends: bool, kernels: bool = False) -> str:
    """The last rank dies, with ``kernels`` after the others have started: all that wait end."""
    with session() as world:
        w = SimulatedRank(world, hosts, apart=apart, kernels=kernels)
        x = w.zeros(BIG // 4 if kernels else BIG, DType.FLOAT32)  # kernels are emulated
        w.comm.all_reduce(x)
        w.comm.synchronize()
        dies = w.rank == w.nranks - 1
        if kernels and not dies:
            w.comm.all_reduce(x)
        world.barrier("before the death")
        if dies:
            os._exit(3)
        with contextlib.suppress(PeerDied):  # it may be known by now
            if not kernels:
                _begin(w, x, sends)
        w.cuda.cuCtxSynchronize()
        return _fault(w, x, (PeerDied,))


def exiting_rank(hosts: str, what: str, kernels: bool = False) -> str:
    """The last rank closes and waits for the others, which wait for it in vain."""
    vars(several)["CLOSE_WAIT_S"] = 600.0
    with session() as world:
        w = SimulatedRank(world, hosts, apart=True, kernels=kernels, timeout=30.0)
        x, big, last = w.zeros(1000, DType.FLOAT32), w.zeros(1 << 22, DType.FLOAT32), w.nranks - 1
        w.comm.all_reduce(x)
        w.comm.synchronize()
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: w.comm.all_reduce(x),
            "recv": lambda: w.comm.recv(x, last),
            "send": lambda: w.comm.send(big, last),  # more than the kernel takes
            "large": lambda: w.comm.all_reduce(big),
        }
        try:
            if w.rank != last:
                calls[what]()
                w.comm.synchronize()
        except MiracclError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            w.comm.close()
        return ""


def reported_between_checks() -> str:
    """A call without an error of its own reports a peer's; finalize does not repeat it."""
    with session() as world:
        w = SimulatedRank(world, "AB", kernels=True)
        check = w.comm.faults.check

        def late(name: str = "") -> None:
            check(name)
            w.comm.faults.fail_staging(PeerDied("rank 5 died: for a test", rank=w.rank, peer=5))

        vars(w.comm.faults)["check"] = late
        try:
            w.comm.check("all_reduce")
        except MiracclError as error:
            assert w.comm.close() is None, "it was told"
            return f"{type(error).__name__}: {error}"
        return ""


def reported_by_a_staging_thread() -> str:
    """A new kind of call reports a broken network before the staging thread does; finalize does not
    repeat it.
    """
    with session() as world:
        w = SimulatedRank(world, "AB")
        broken = w.comm.runtime.world._core.faults.set_fault(
            PeerDied("rank 5 died: for a test", rank=w.rank, peer=5)
        )
        try:
            w.comm.all_reduce(w.zeros(10, DType.FLOAT32))
        except MiracclError as error:
            w.comm.faults.fail_staging(broken)
            assert w.comm.close() is None, "it was told"
            return f"{type(error).__name__}: {error}"
        return ""


def broken_connection(sends: bool) -> str:
    """The connection that an operation uses breaks between living ranks."""
    with session() as world:
        w = SimulatedRank(world, "AB", apart=True)
        x = w.zeros(BIG, DType.FLOAT32)
        w.comm.all_reduce(x)
        w.comm.synchronize()
        world.barrier("before the end of the stream")
        if w.rank == 1:
            assert w.comm.runtime.messages is not None
            for streams in (
                w.comm.runtime.messages._streams,
                *(direct._streams for direct in w.comm.runtime.direct),
            ):
                streams._collector.streams[0].shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(MiracclError):  # rank 1 may have reported it
            _begin(w, x, sends)
        w.cuda.cuCtxSynchronize()
        return _fault(w, x, (PeerDied,))


def _fault(w: SimulatedRank, x: DeviceMemory, kinds: tuple[type[MiracclError], ...]) -> str:
    """Return the error of the next calls; the streams are free."""
    told = threading.Event()
    for _ in range(3000):
        try:
            w.comm.check()
        except kinds:
            break
        told.wait(0.01)
    try:
        w.comm.all_reduce(x)
    except kinds as error:
        w.cuda.cuCtxSynchronize()
        assert w.comm.close() is None, "it was told"
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")
