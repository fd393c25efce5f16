"""JAX arrays in CPU memory: read where they lie, never written to."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl.executor.cuda import fast_call_layout
from miraccl.fastpath.cuda.foreign_types import ArrayProtocol, foreign_record
from miraccl.ops.dlpack import DLTensor, capsule_of
from miraccl.ops.host_arrays import view
from tests.support.ranks import run_ranks

jax = pytest.importorskip("jax")
jax.config.update("jax_platforms", "cpu")
jnp = jax.numpy
DTYPES = [
    "int8",
    "uint8",
    "int32",
    "uint32",
    "float16",
    "bfloat16",
    "float32",
    "float8_e4m3fn",
    "float8_e5m2",
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_are_viewed_where_they_lie(dtype: str) -> None:
    x = jnp.arange(6, dtype=dtype).reshape(2, 3)
    memory = view(x, "x", writes=False, where="test")
    assert memory.address == x.unsafe_buffer_pointer()
    assert memory.dtype.label.startswith(dtype[:11])
    np.testing.assert_array_equal(memory.array.astype(np.float32), np.asarray(x, np.float32))
    assert not memory.array.flags.writeable


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_writes_to_a_constant(dtype: str) -> None:
    x = jnp.ones(4, dtype)
    with miraccl.init() as comm:
        for call in (
            lambda: comm.all_reduce(x),
            lambda: comm.reduce(x),
            lambda: comm.recv(x, src=0),
            lambda: comm.all_reduce_init(x),
            lambda: comm.all_reduce(np.ones(4, x.dtype), out=x),
        ):
            with pytest.raises(
                miraccl.InvalidUsage, match="is read-only, but the result is written to it"
            ):
                call()
    assert np.asarray(x, np.float32).tolist() == [1.0] * 4


def test_values_that_are_not_there_yet() -> None:
    def inside(x: Any) -> Any:
        with pytest.raises(
            miraccl.InvalidUsage, match="cannot read x by DLPack: Abstract tracer value"
        ):
            comm.all_reduce(x, out=np.empty(3, np.float32))
        return x

    with miraccl.init() as comm:
        jax.jit(inside)(jnp.ones(3))


def test_the_function_that_doors_on_gpu_memory_call() -> None:
    """``__dlpack__`` is a wrapper around it.  Of an array in several parts it gives the first one,
    so doors look at the sharding.
    """
    x = jnp.arange(4.0)
    words, (_, export, _) = foreign_record(type(x), ArrayProtocol(dlpack=True, immutable=True))
    assert words[fast_call_layout.FOREIGN_EXPORT] == id(export)
    assert words[fast_call_layout.FOREIGN_SHARDING] == id(type(x.sharding))
    _, tensor, _ = capsule_of(types.SimpleNamespace(__dlpack__=lambda: export(x, stream=None)))
    assert DLTensor.from_address(tensor).data == x.unsafe_buffer_pointer()
    mesh = jax.make_mesh((1,), ("i",))
    spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))
    assert type(spread) is type(x)
    assert type(spread.sharding) is not type(x.sharding)


def collectives() -> dict[str, list[Any]]:
    """Everything with JAX arrays as input; results go to NumPy's and are made JAX arrays without a
    copy where they are aligned.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    import jax.numpy as jnp

    with miraccl.init() as comm:
        n = comm.nranks
        x = jnp.arange(2.0 * n) + 100 * comm.rank
        y = np.empty(x.shape, x.dtype)
        results = {
            "all_reduce": comm.all_reduce(x, out=y),
            "background": comm.all_reduce(
                x, out=np.empty_like(y), op=miraccl.MAX, async_op=True
            ).wait(),
            "all_gather": comm.all_gather(x),
            "reduce_scatter": comm.reduce_scatter(x),
            "all_to_all": comm.all_to_all(x),
            "prepared": comm.all_reduce_init(x, out=np.empty_like(y))(),
            "send": comm.sendrecv(x, (comm.rank + 1) % n, np.empty_like(y), (comm.rank - 1) % n),
            "broadcast": comm.broadcast(x if comm.rank == 0 else np.empty_like(y)),
        }
        assert results["broadcast"] is x or comm.rank, "a root only reads"
        back = jax.dlpack.from_dlpack(results["all_gather"])
        assert (back == jnp.asarray(results["all_gather"])).all()
        assert (x == jnp.arange(2.0 * n) + 100 * comm.rank).all(), "inputs never change"
        return {name: np.asarray(value).tolist() for name, value in results.items()}


@pytest.mark.multiprocess
def test_collectives() -> None:
    n = 3
    xs = [np.arange(2.0 * n) + 100 * rank for rank in range(n)]
    total = np.sum(xs, axis=0)
    for rank, got in enumerate(run_ranks(collectives, n, timeout=90.0)):
        right: dict[str, np.ndarray] = {
            "all_reduce": total,
            "background": xs[-1],
            "all_gather": np.concatenate(xs),
            "reduce_scatter": total[2 * rank : 2 * rank + 2],
            "all_to_all": np.concatenate([x[2 * rank : 2 * rank + 2] for x in xs]),
            "prepared": total,
            "send": xs[rank - 1],
            "broadcast": xs[0],
        }
        assert got == {name: value.tolist() for name, value in right.items()}
