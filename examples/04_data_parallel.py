"""Data-parallel training in forty lines: average gradients while the next layer computes.

    miraccl run -n 4 examples/04_data_parallel.py

A two-layer network learns the sine of a sum. The gradient of the second layer is reduced in the
background (``async_op=True``) while that of the first is computed. The last lines check that the
weights are equal on all ranks.
"""

import numpy as np

import miraccl

STEPS, RATE, HIDDEN, SAMPLES = 300, 0.05, 64, 4096

with miraccl.init() as comm:
    rng = np.random.default_rng(comm.rank)
    inputs = rng.uniform(-2, 2, (SAMPLES // comm.nranks, 2)).astype(np.float32)
    targets = np.sin(inputs.sum(axis=1, keepdims=True))

    first = np.random.default_rng(0).normal(0, 1, (2, HIDDEN)).astype(np.float32)
    second = np.zeros((HIDDEN, 1), np.float32)
    comm.broadcast(first, root=0)

    for step in range(STEPS):
        hidden = np.tanh(inputs @ first)
        error = hidden @ second - targets

        gradient_second = hidden.T @ error / len(inputs)
        work = comm.all_reduce(gradient_second, op=miraccl.AVG, async_op=True)
        gradient_first = inputs.T @ (error @ second.T * (1 - hidden**2)) / len(inputs)
        comm.all_reduce(gradient_first, op=miraccl.AVG)
        work.wait()

        second -= RATE * gradient_second
        first -= RATE * gradient_first
        if step % 100 == 0 or step == STEPS - 1:
            loss = comm.all_reduce(np.array([np.mean(error**2)]), op=miraccl.AVG)
            if comm.rank == 0:
                print(f"step {step:3}: mean squared error {loss[0]:.4f}")

    spread = comm.all_reduce(np.abs(second - comm.broadcast(second.copy())), op=miraccl.MAX)
    assert not spread.any(), "weights differ between ranks"
    if comm.rank == 0:
        print("weights are equal on all ranks")
