"""Two mistakes that make other libraries hang, and the errors that miraccl raises.

    miraccl run -n 3 examples/12_hang_explained.py

First, ranks call an operation with different counts: all of them raise ``CollectiveMismatch`` at
once. Then one rank is late: after the deadline (here two seconds) the others raise
``CollectiveTimeout`` with the wait-for graph: who waits for whom, and the source line of the
missing rank.
"""

import sys
import time

import numpy as np

import miraccl


def load_next_batch(seconds):
    """Stand-in for slow work of one rank."""
    time.sleep(seconds)


def error_of(call, *arguments):
    """Return the error that a call raises, or None."""
    try:
        call(*arguments)
    except miraccl.MiracclError as error:
        return error
    return None


with miraccl.init(timeout=2.0) as comm:
    if comm.nranks == 1:
        print("one rank waits for nobody: start it with more")
        sys.exit()

    other = comm.split(0)  # an error breaks one communicator, not the program
    error = error_of(other.all_reduce, np.ones(5 if comm.rank == 1 else 4))
    assert isinstance(error, miraccl.CollectiveMismatch)
    if comm.rank == 0:
        print(f"1. {error}\n")

    comm.barrier()
    last = comm.nranks - 1
    if comm.rank == last:
        load_next_batch(seconds=4.0)
    error = error_of(
        comm.all_reduce, np.ones(4)
    )  # the last rank is late: the communicator is broken
    assert isinstance(error, miraccl.CollectiveTimeout) or comm.rank == last
    if comm.rank == 0:
        print(f"2. {error}")
        assert "load_next_batch" in error.graph[last]
