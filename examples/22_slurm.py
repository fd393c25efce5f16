"""Slurm: ranks started by ``srun`` find each other without configuration.

    srun -n 2 python examples/22_slurm.py

On several nodes the ranks meet at the first one, at a port derived from the numbers of job and
step. As a batch script:

    #!/bin/bash
    #SBATCH --nodes=2 --ntasks-per-node=8 --time=10
    export MIRACCL_SECRET=$(head -c 24 /dev/urandom | base64)    # on networks with untrusted users
    srun python examples/22_slurm.py
"""

import os

import numpy as np

import miraccl

with miraccl.init() as comm:
    node = int(os.environ.get("SLURM_NODEID", "0"))
    places = comm.all_gather(np.array([node, comm.local_rank])).reshape(-1, 2)
    total = comm.all_reduce(np.array([1]))
    if comm.rank == 0:
        for rank, (where, local) in enumerate(places):
            print(f"rank {rank} of {total[0]} is rank {local} on node {where}")
