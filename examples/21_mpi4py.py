"""mpi4py: communicators over MPI communicators, used side by side with MPI calls.

    mpirun -n 2 python examples/21_mpi4py.py

``miraccl.init()`` without an argument would work as well, without mpi4py: it reads the variables
that mpirun sets. With an MPI communicator it has the same ranks in the same order, so a program can
replace one call at a time, also on parts of the world.
"""

import numpy as np
from mpi4py import MPI

import miraccl

world = MPI.COMM_WORLD
half = world.Split(color=world.rank % 2, key=world.rank)
with miraccl.init(world) as comm, miraccl.init(half) as mine:
    x = np.full(1000, comm.rank + 1.0)
    theirs = np.empty_like(x)
    world.Allreduce(x, theirs, op=MPI.SUM)
    ours = comm.all_reduce(x, out=np.empty_like(x))
    assert (ours == theirs).all()
    ranks = mine.all_gather(np.array([world.rank]))
    assert ranks.tolist() == half.allgather(world.rank)
    if comm.rank == 0:
        print(f"{comm.nranks} ranks agree: {ours[0]:g}; my half of the world is {ranks.tolist()}")
