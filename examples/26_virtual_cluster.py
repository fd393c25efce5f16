"""64 virtual ranks on 8 virtual nodes in one process: a program without its cluster, repeatably.

    python examples/26_virtual_cluster.py

Each rank runs ``program`` with the communicator of all ranks. Messages share virtual links, so the
times are those of the links, not of this machine. The second world has the same seed, so its
events are the same; in the third a rank dies, and the others go on without it.
"""

import numpy as np

import miraccl
from miraccl import clock
from miraccl.sim import World


def program(comm: miraccl.Communicator) -> tuple[float, str]:
    node = comm.split(comm.rank // 8)  # the ranks of one node
    gradients = np.full(25_000, comm.rank, np.float32)
    clock.sleep(5e-6 * (comm.rank % 8))  # ranks arrive at different times
    comm.all_reduce(gradients)
    node.barrier()
    return float(gradients[0]), comm.last_plan.algo


def survive(comm: miraccl.Communicator) -> int:
    try:
        while True:
            comm.all_reduce(np.zeros(1000, np.float32))
    except miraccl.PeerDied:
        return comm.shrink().nranks


world = World(nodes=8, ranks_per_node=8, seed=7)
results = world.run(program)
assert results == [(2016.0, results[0][1])] * 64
print(f"all_reduce of 100 kB over 64 ranks by {results[0][1]}: {world.time_us:.0f} us")

again = World(nodes=8, ranks_per_node=8, seed=7)
again.run(program)
assert again.digest() == world.digest()
print(f"{len(world.events)} events, twice the same: {world.digest()[:16]}")

broken = World(nodes=2, ranks_per_node=2)
broken.kill(3, after_us=50)
print("ranks left after rank 3 died:", broken.run(survive, return_exceptions=True)[:3])
