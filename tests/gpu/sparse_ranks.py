"""Ranks of the tests of sparse sums on GPU memory, on an emulated driver and on GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl.errors import CollectiveMismatch, InvalidUsage
from miraccl.executor.cuda import row_exchange
from miraccl.ops.spec import ALL_REDUCE_SPARSE
from miraccl.planning import device_rows
from miraccl.types import PreMulSum, RedOp
from tests.gpu.emulated_ranks import EmulatedRank, rank, same

COUNT = 20_003  # 313 rows of float32, the last one short
PER_ROW = 64


def make_rows_pay() -> None:
    """Let small arrays be exchanged by rows, with few threads."""
    vars(device_rows).update(ROWS_US=0.0, DENSE_US=0.0, MIN_WORKSPACE_BYTES=64 << 10)
    vars(row_exchange).update(THREADS=32, BLOCKS_PER_SM=1)


def data(rank: int, density: float, count: int = COUNT, dtype: str = "float32") -> np.ndarray:
    """Return an array of which ``density`` of the rows have a value; some are -0.0 or NaN."""
    rng = np.random.default_rng(rank + 1)
    x = np.zeros(count, dtype)
    for start in range(0, count, PER_ROW):
        if rng.random() < density:
            at = int(rng.integers(start, min(count, start + PER_ROW)))
            x[at] = rng.integers(1, 100)
            if x.dtype.kind == "f" and rng.random() < 0.2:
                x[at] = rng.choice([-0.0, np.nan])
    return x


def dense_sum(me: EmulatedRank, x: np.ndarray, op: Any = RedOp.SUM) -> np.ndarray:
    """Return the dense sum on GPU memory."""
    whole = me.put(x, str(x.dtype))
    me.comm.all_reduce(whole, op=op, stream=0)
    me.synchronize()
    found: np.ndarray = whole.array.copy()
    return found


def sums() -> None:
    """Sparse sums have the bits of dense ones, in place or not; the plan says what was chosen."""
    make_rows_pay()
    with rank() as me:
        comm = me.comm
        for dtype, op, density, in_place in (
            ("float32", RedOp.SUM, 0.05, True),
            ("float32", RedOp.SUM, 0.05, True),
            ("float64", RedOp.MAX, 0.1, False),
            ("float32", PreMulSum(0.5 + me.rank), 0.1, True),
            ("float32", PreMulSum(-1.0), 0.1, True),  # zeros become -0.0
            ("int32", RedOp.AVG, 0.0, False),
            ("float32", RedOp.SUM, 1.0, True),
            ("float32", RedOp.SUM, 0.05, False),
        ):
            values = data(me.rank, density, dtype=dtype)
            want = dense_sum(me, values, op)
            x = me.put(values, dtype)
            out = x if in_place else me.zeros(COUNT, dtype)
            result = comm.all_reduce_sparse(x, op, out=None if in_place else out)
            assert result is out
            me.synchronize()
            assert result.array.tobytes() == want.tobytes(), (dtype, op, density)
            if me.nranks == 1:
                continue
            plan = comm.last_plan
            assert isinstance(plan, device_rows.SparseDevicePlan)
            assert plan.block == 256 // np.dtype(dtype).itemsize
            if density == 1.0 or op == PreMulSum(-1.0):
                assert plan.algo in ("one_shot", "two_shot")
                assert plan.reason.startswith(
                    "dense: rows of 256 bytes that are not zero: more than"
                )
            else:
                assert (plan.algo, plan.proto) == ("sparse_one_shot", "rows"), plan
                assert plan.density == pytest.approx(density, abs=0.06)
        memory = comm.memory()["gpu_device"]
        comm.all_reduce_sparse(x)
        me.synchronize()
        assert comm.memory()["gpu_device"] == memory


def choices() -> None:
    """Sizes and expected densities for which the host already knows that dense is faster."""
    with rank() as me:
        comm = me.comm
        values = data(me.rank, 0.05)
        want = dense_sum(me, values)
        small = me.put(values)
        comm.all_reduce_sparse(small)
        me.synchronize()
        assert small.array.tobytes() == want.tobytes()
        assert "are too few for an exchange of rows" in comm.last_plan.reason  # type: ignore[union-attr]
        make_rows_pay()
        device_rows.break_even.cache_clear()
        full = me.put(values)
        comm.all_reduce_sparse(full, density=0.9)
        me.synchronize()
        assert full.array.tobytes() == want.tobytes()
        assert "a density of 90.0% is expected" in comm.last_plan.reason  # type: ignore[union-attr]
        rows, dense = comm.explain("all_reduce_sparse", 256 << 20, device="cuda", density=0.01)
        assert (rows.algo, rows.chosen, dense.chosen) == ("sparse_one_shot", True, False)
        dense, rows = comm.explain("all_reduce_sparse", 256 << 20, device="cuda", density=0.99)
        assert (rows.algo, rows.chosen) == ("sparse_one_shot", False)
        assert dense.reason.startswith("dense: a density of 99.00%")
        with pytest.raises(InvalidUsage, match="density is 2"):
            comm.all_reduce_sparse(full, density=2)
        with pytest.raises(InvalidUsage, match="inside a group"), miraccl.group():
            comm.all_reduce_sparse(full)
        work = comm.all_reduce_sparse(me.put(values), async_op=True)
        assert work.synchronize().array.tobytes() == want.tobytes()


def graphs() -> None:
    """A graph replays the choice: rows for one input, the dense sum for the next."""
    make_rows_pay()
    with rank() as me:
        comm = me.comm
        x = me.put(data(me.rank, 0.05))
        comm.barrier(stream=0)
        side = comm._device
        assert side is not None
        gpu = side.gpu
        stream = gpu.make_stream()
        args = (x, RedOp.SUM, None, None, None)

        def enqueue(captured: int) -> None:
            side.execute(ALL_REDUCE_SPARSE, args, captured)

        enqueue(0)
        me.synchronize()
        graph = gpu.capture(stream, enqueue)
        for density in (0.05, 1.0, 0.0, 0.1):
            values = data(me.rank, density)
            want = dense_sum(me, values)
            x.array[:] = values
            comm.barrier(stream=0)
            me.synchronize()
            gpu.launch_graph(graph, stream)
            me.synchronize()
            same(x, want)
            assert comm.all_reduce(me.put([1.0]), stream=0).array.size == 1
            me.synchronize()
        gpu.destroy_graph(graph)


def mismatch() -> str:
    """Different operators on the ranks are an error on both."""
    make_rows_pay()
    with rank(timeout=20.0) as me:
        x = me.put(data(me.rank, 0.05))
        me.comm.all_reduce_sparse(x, (RedOp.SUM, RedOp.MAX)[me.rank])
        with pytest.raises(CollectiveMismatch) as found:
            me.synchronize()
        return str(found.value)
