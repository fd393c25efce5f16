"""JAX arrays in GPU memory: inputs that are read where they lie, after what JAX still computes.
Results go to another library's arrays and become JAX's again without a copy.  Ranks share a GPU
where there is only one.
"""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest

import miraccl
from tests.gpu.gpus import NEEDS_GPU
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    NEEDS_GPU,
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed"),
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None,
        reason="results are PyTorch's tensors, and PyTorch is not installed",
    ),
]


def collectives(dtype: str) -> dict[str, list[float]]:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = (
        "false"  # the communicator and PyTorch need memory, too
    )
    import jax
    import jax.numpy as jnp
    import torch

    jax.config.update("jax_enable_x64", True)
    with miraccl.init(timeout=60.0) as comm:
        ordinal = comm.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(ordinal)
        n = comm.nranks
        with jax.default_device(jax.devices("gpu")[ordinal]):
            busy = jnp.ones((2048, 2048))
            for _ in range(20):
                busy = busy @ busy / 2048  # still under way when the operation is called
            x = (jnp.arange(4 * n) % 7 + comm.rank + busy[0, 0] - 1).astype(dtype)
            out = torch.empty(4 * n, dtype=getattr(torch, dtype), device="cuda")
            assert comm.all_reduce(x, out=out) is out
            doors = comm._device._fast_path  # type: ignore[union-attr]
            for _ in range(40):  # the same of new arrays, by compiled code
                again = x + (busy @ busy)[0, 0].astype(dtype) * 0
                out.zero_()
                comm.all_reduce(again, out=out)
                assert (
                    n == 1
                    or doors.last is not None
                    or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
                )
                del again
            gathered, scattered = (
                torch.empty(4 * n * n, dtype=out.dtype, device="cuda"),
                torch.empty(4, dtype=out.dtype, device="cuda"),
            )
            comm.all_gather(x, out=gathered)
            comm.reduce_scatter(x, out=scattered)
            results = {"out": out, "gather": gathered, "scatter": scattered}
            with pytest.raises(miraccl.InvalidUsage, match="JAX arrays are immutable"):
                comm.all_reduce(x)
            if n <= torch.cuda.device_count() and n > 1:
                other = jax.device_put(x, jax.devices("gpu")[(ordinal + 1) % n])
                with pytest.raises(miraccl.InvalidUsage, match=f"x is on GPU {(ordinal + 1) % n}"):
                    comm.all_reduce(other, out=out)
                torch.cuda.set_device(ordinal)  # JAX left the other one as the thread's
            back = {name: jax.dlpack.from_dlpack(result) for name, result in results.items()}
            assert all(
                array.unsafe_buffer_pointer() == results[name].data_ptr()
                for name, array in back.items()
            )
            return {
                name: np.asarray(array * 2).astype(np.float64).tolist()
                for name, array in back.items()
            }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_collectives(dtype: str) -> None:
    n = 2
    xs = [(np.arange(4 * n) % 7 + rank).astype(np.float64) for rank in range(n)]
    total = np.sum(xs, axis=0)
    for rank, got in enumerate(run_ranks(collectives, n, dtype, timeout=180.0)):
        assert got["out"] == (2 * total).tolist()
        assert got["gather"] == (2 * np.concatenate(xs)).tolist()
        assert got["scatter"] == (2 * total[4 * rank : 4 * rank + 4]).tolist()
