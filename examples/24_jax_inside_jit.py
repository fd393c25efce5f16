"""JAX on the CPU: an all_reduce inside ``jax.jit``, with its derivative.

    miraccl run -n 2 examples/24_jax_inside_jit.py

A compiled function calls the communicator with ``io_callback``; ``ordered=True`` keeps the calls in
program order, which must be the same on all ranks. The derivative of a sum over all ranks is the
sum of the derivatives over all ranks: another all_reduce.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import miraccl

with miraccl.init() as comm:

    def on_host(x):
        return comm.all_reduce(x, out=np.empty(x.shape, x.dtype))

    @jax.custom_vjp
    def all_reduce(x):
        return io_callback(on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)

    all_reduce.defvjp(lambda x: (all_reduce(x), None), lambda _, g: (all_reduce(g),))

    @jax.jit
    def norm(x):
        """Return the length of a vector that is distributed over the ranks."""
        return jnp.sqrt(all_reduce(jnp.sum(x**2, keepdims=True)))[0]

    part = jnp.arange(4.0) + 4 * comm.rank
    whole = np.arange(4.0 * comm.nranks)
    length, slope = jax.value_and_grad(norm)(part)
    assert np.isclose(length, np.linalg.norm(whole))
    # each rank contributes this value: the derivative of their sum is nranks times that of one
    assert np.allclose(slope, comm.nranks * part / length)
    if comm.rank == 0:
        print(
            f"{comm.nranks} ranks: length {length:.4f}, slope {[round(float(s), 4) for s in slope]}"
        )
