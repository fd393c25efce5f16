"""JAX on the CPU: data-parallel training with gradients as JAX arrays.

    miraccl run -n 2 examples/23_jax.py

JAX arrays are read in place through DLPack. They are immutable, so a result needs ``out=``, a
writable array (NumPy's here), which is converted to a JAX array again; an in-place call is an error
that says so. All gradients form one vector: one message instead of one for every layer.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import miraccl

STEPS, RATE, SAMPLES = 60, 0.1, 512


def average(comm, tree):
    """Return the mean of a tree of arrays over all ranks."""
    vector, unravel = ravel_pytree(tree)
    mean = comm.all_reduce(vector, out=np.empty(vector.shape, vector.dtype), op=miraccl.AVG)
    return unravel(jnp.asarray(mean))


def loss(weights, x, y):
    return jnp.mean((jnp.tanh(x @ weights["in"]) @ weights["out"] - y) ** 2)


with miraccl.init() as comm:
    mine = (
        np.random.default_rng(comm.rank)
        .uniform(-2, 2, (SAMPLES // comm.nranks, 2))
        .astype(np.float32)
    )
    x, y = jnp.asarray(mine), jnp.asarray(np.sin(mine.sum(axis=1, keepdims=True)))
    first = (
        np.random.default_rng(0).normal(0, 1, (2, 32)).astype(np.float32)
    )  # the same on all ranks
    weights = {"in": jnp.asarray(first), "out": jnp.zeros((32, 1))}

    gradient = jax.jit(jax.grad(loss))
    before = average(comm, loss(weights, x, y))
    for _ in range(STEPS):
        weights = jax.tree.map(
            lambda w, g: w - RATE * g, weights, average(comm, gradient(weights, x, y))
        )
    after = average(comm, loss(weights, x, y))
    assert after < before / 2

    everyone = comm.all_gather(weights["out"])  # new arrays are NumPy arrays
    assert (everyone.reshape(comm.nranks, -1) == np.asarray(weights["out"]).reshape(-1)).all()

    try:
        comm.all_reduce(x)
    except miraccl.InvalidUsage as error:
        if comm.rank == 0:
            print(
                f"{comm.nranks} ranks: error {before:.3f} before, {after:.3f} after {STEPS} steps; "
                f"in place: {error.message}"
            )
