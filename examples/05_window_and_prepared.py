"""All_reduce as a plain call, as a persistent operation, and in window memory.

    miraccl run -n 2 examples/05_window_and_prepared.py

A persistent operation has its arguments checked, its plan made and its buffers bound once, which
suits small messages. Window memory is mapped by all ranks of a host, so large operations reduce in
place instead of copying; ``comm.empty`` returns an ordinary NumPy array in it.
"""

import time

import numpy as np

import miraccl

BATCHES, CALLS = 15, 20


def microseconds(comm, call, *arguments):
    """Return the median time of a call on the slowest rank."""
    times = []
    for _ in range(BATCHES):
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call(*arguments)
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    return comm.all_reduce(np.array([np.median(times)]), op=miraccl.MAX)[0]


with miraccl.init() as comm:
    if comm.rank == 0:
        print("   count     plain  prepared    window  (microseconds)")
    for count in (2, 1000, 100_000, 1_000_000):
        plain = np.zeros(count, np.float32)
        shared = comm.empty(count, np.float32)
        shared[:] = 0
        prepared = comm.all_reduce_init(plain)

        row = [
            microseconds(comm, comm.all_reduce, plain),
            microseconds(comm, prepared),
            microseconds(comm, comm.all_reduce, shared),
        ]

        plain[:], shared[:] = comm.rank, comm.rank
        total = sum(range(comm.nranks))
        assert (prepared() == total).all()
        assert (comm.all_reduce(shared) == total).all()
        if comm.rank == 0:
            print(f"{count:8} {row[0]:9.1f} {row[1]:9.1f} {row[2]:9.1f}")
