"""Ranks as threads of one process, which meet by a unique id.

    python examples/07_threads_as_ranks.py

Collectives release the GIL while they wait and copy. The same id could be sent to other processes
or hosts by any means: it is a short text, and a secret (whoever has it may join).
"""

import threading

import numpy as np

import miraccl

NRANKS = 4
results = [0.0] * NRANKS


def work(rank: int, unique_id: miraccl.UniqueId) -> None:
    with miraccl.Communicator(NRANKS, unique_id, rank, timeout=30) as comm:
        x = np.arange(1000.0) * (rank + 1)
        comm.all_reduce(x)
        results[rank] = x[-1]


unique_id = miraccl.get_unique_id()
threads = [threading.Thread(target=work, args=(rank, unique_id)) for rank in range(NRANKS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert results == [999.0 * sum(range(1, NRANKS + 1))] * NRANKS
print(f"{NRANKS} threads of one process agree on {results[0]:g}")
