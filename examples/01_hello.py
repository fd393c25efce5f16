"""Sum and gather the rank numbers.

    miraccl run -n 4 examples/01_hello.py

``torchrun``, ``mpirun`` and ``srun`` work in the place of ``miraccl run``;
``python examples/01_hello.py`` is a communicator of one rank.
"""

import numpy as np

import miraccl

with miraccl.init() as comm:
    x = np.full(4, comm.rank, np.float32)
    comm.all_reduce(x)  # in place
    everyone = comm.all_gather(np.array([comm.rank], np.int32))
    if comm.rank == 0:
        print(f"sum over {comm.nranks} ranks: {x[0]:g}, gathered: {everyone.tolist()}")
