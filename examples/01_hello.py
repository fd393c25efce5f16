"""Every rank contributes its number; every rank gets the sum, and all numbers in a row.

    miraccl run -n 4 examples/01_hello.py

``torchrun``, ``mpirun`` and ``srun`` in the place of ``miraccl run`` do as well; ``python examples/01_hello.py`` is one rank alone.
"""

import numpy as np

import miraccl

with miraccl.init() as comm:
    x = np.full(4, comm.rank, np.float32)
    comm.all_reduce(x)  # in place
    everyone = comm.all_gather(np.array([comm.rank], np.int32))
    if comm.rank == 0:
        print(f"sum over {comm.nranks} ranks: {x[0]:g}, gathered: {everyone.tolist()}")
