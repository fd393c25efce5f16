"""A rank dies in the middle of the work; the others notice, make a smaller communicator, and go on.

    miraccl run -n 4 examples/13_survive.py

Whoever is in an operation with the dead rank raises ``PeerDied``, and so does everybody else in that communicator.  ``shrink`` makes one of
those that live.  An operation that was under way may have ended on some of them only; so each keeps the state before its last step, and all
go on from the last one that everybody had finished.
"""

import os

import numpy as np

import miraccl

STEPS, FATAL = 10, 4

with miraccl.init(timeout=30) as world:
    comm, step, state = world, 0, np.zeros(3)
    before, together = state, STEPS
    victim = world.nranks - 1 if world.nranks > 1 else None
    while step < STEPS:
        if step == FATAL and comm is world and world.rank == victim:
            os._exit(0)  # as a crash would, only that the launcher is told that all is well
        try:
            before, state = state, state + comm.all_reduce(np.ones(3))
            step += 1
        except miraccl.PeerDied as error:
            comm = comm.shrink()
            steps = comm.all_gather(np.array([step]))
            if (
                step > steps.min()
            ):  # by one: nobody begins an operation before all have come to the one before
                step, state = step - 1, before
            together = step
            if comm.rank == 0:
                print(f"at step {step}: {error}\n{comm.nranks} of {world.nranks} ranks go on")
    expected = together * world.nranks + (STEPS - together) * comm.nranks
    assert (state == expected).all()
    if comm.rank == 0:
        print(
            f"finished with {state[0]:g} = {together} x {world.nranks} + {STEPS - together} x {comm.nranks}"
        )
