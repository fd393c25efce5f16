"""A rank dies during the work; the others detect it, shrink the communicator, and go on.

    miraccl run -n 4 examples/13_survive.py

Ranks in an operation with the dead rank raise ``PeerDied``, as do all others of that communicator.
``shrink`` creates one of the live ranks. An operation that was in progress may have completed on
some ranks only, so each rank keeps the state before its last step, and all continue from the last
step that all of them had finished.
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
            # like a crash, but with status 0, so that the launcher does not end the job
            os._exit(0)
        try:
            before, state = state, state + comm.all_reduce(np.ones(3))
            step += 1
        except miraccl.PeerDied as error:
            comm = comm.shrink()
            steps = comm.all_gather(np.array([step]))
            # at most one step ahead: all ranks had started the previous operation
            if step > steps.min():
                step, state = step - 1, before
            together = step
            if comm.rank == 0:
                print(f"at step {step}: {error}\n{comm.nranks} of {world.nranks} ranks go on")
    expected = together * world.nranks + (STEPS - together) * comm.nranks
    assert (state == expected).all()
    if comm.rank == 0:
        print(
            f"finished with {state[0]:g} = {together} x {world.nranks} "
            f"+ {STEPS - together} x {comm.nranks}"
        )
