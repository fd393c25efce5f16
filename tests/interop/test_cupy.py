"""CuPy arrays in GPU memory: used where they lie, in CuPy's current stream.  Ranks share a GPU
where there is only one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import miraccl
from tests.gpu.gpus import NEEDS_GPU
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    NEEDS_GPU,
    pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="cupy is not installed"),
]


def collectives(dtype: str) -> dict[str, list[float]]:
    import cupy

    with miraccl.init(timeout=60.0) as comm:
        cupy.cuda.Device(comm.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
        n = comm.nranks
        x = (cupy.arange(4 * n) % 7 + comm.rank).astype(dtype)
        kept = x.copy()
        out = cupy.empty_like(x)
        results = {
            "out": comm.all_reduce(x, out=out),
            "gather": comm.all_gather(x),
            "scatter": comm.reduce_scatter(x),
        }
        assert results["out"] is out
        assert all(isinstance(result, cupy.ndarray) for result in results.values())
        with cupy.cuda.Stream(non_blocking=True) as stream:
            y = x.copy()
            y += 1
            results["stream"] = comm.all_reduce(y, op=miraccl.MAX)
            y *= 2  # after the operation, in the same stream
            stream.synchronize()
        assert results["stream"] is y
        assert bool((x == kept).all())
        with pytest.raises(miraccl.InvalidUsage, match="not contiguous"):
            comm.all_reduce(x[::2])
        return {
            name: cupy.asnumpy(result).astype(np.float64).reshape(-1).tolist()
            for name, result in results.items()
        }


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int32", "uint8"])
def test_collectives(dtype: str) -> None:
    n = 2
    xs = [(np.arange(4 * n) % 7 + rank).astype(np.float64) for rank in range(n)]
    total = np.sum(xs, axis=0)
    for rank, got in enumerate(run_ranks(collectives, n, dtype, timeout=180.0)):
        assert got["out"] == total.tolist()
        assert got["gather"] == np.concatenate(xs).tolist()
        assert got["scatter"] == total[4 * rank : 4 * rank + 4].tolist()
        assert got["stream"] == (2 * (xs[-1] + 1)).tolist()


def beside_torch() -> dict[str, float]:
    """In a stream of CuPy's that is not PyTorch's current one, after and before much work there."""
    import cupy
    import torch

    with miraccl.init(timeout=60.0) as comm:
        device = comm.local_rank % cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(device).use()
        torch.cuda.set_device(device)
        comm.all_reduce(torch.ones(9, device="cuda"))
        found = {}
        forms: dict[str, Callable[[Any], Any]] = {
            "plain": comm.all_reduce,
            "in the background": lambda x: comm.all_reduce(x, async_op=True).wait(),
            "message": lambda x: comm.sendrecv(x.copy(), 1 - comm.rank, x, 1 - comm.rank),
        }
        busy = cupy.ones((4096, 4096), "float32")
        for name, call in forms.items():
            for _ in range(3):
                with cupy.cuda.Stream(non_blocking=True) as stream:
                    x = cupy.zeros(1 << 20, "float32")
                    for _ in range(4):
                        busy = busy @ busy * 0 + 1
                    x += busy[0, 0] + comm.rank
                    call(x)
                    x *= 2
                    found[name] = float(x.sum())
                    stream.synchronize()
        return {name: total / (1 << 20) for name, total in found.items()} | {"rank": comm.rank}


def test_in_the_current_stream_beside_pytorch() -> None:
    pytest.importorskip("torch")
    for got in run_ranks(beside_torch, 2, timeout=180.0):
        other = 2.0 * (1 - got["rank"] + 1)
        assert got == {
            "plain": 6.0,
            "in the background": 6.0,
            "message": other,
            "rank": got["rank"],
        }


def streams_that_end(given: bool) -> list[float]:
    """An operation in each of many streams, which CuPy destroys with their objects, the arrays'
    last.
    """
    import cupy

    with miraccl.init(timeout=60.0) as comm:
        cupy.cuda.Device(comm.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
        arrays = []
        for turn in range(40):
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                arrays.append(cupy.full(1000, turn + comm.rank, "float32"))
                if not given:
                    comm.all_reduce(arrays[-1])
            if given:
                comm.all_reduce(arrays[-1], stream=stream)
            del stream
        comm.all_reduce(last := cupy.full(1000, 100, "float32"))
        comm.synchronize()
        return [float(array[999]) for array in [*arrays, last]]


@pytest.mark.parametrize("given", [False, True])
def test_streams_that_end_after_their_last_operation(given: bool) -> None:
    for got in run_ranks(streams_that_end, 2, given, timeout=180.0):
        assert got == [*(2.0 * turn + 1 for turn in range(40)), 200.0]
