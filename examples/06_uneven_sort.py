"""Sample sort, with collectives whose counts differ from rank to rank.

    miraccl run -n 4 examples/06_uneven_sort.py

Ranks agree on splitters from a sample of all numbers (``all_gather``), exchange how many numbers
they will send (``all_to_all``), send them (``all_to_all_v``), and sort what they received.
"""

import numpy as np

import miraccl

SAMPLES = 64

with miraccl.init() as comm:
    rng = np.random.default_rng(comm.rank)
    numbers = np.sort(
        rng.lognormal(0, 2, 20_000 + 5_000 * comm.rank)
    )  # different numbers of values per rank, unevenly distributed

    sample = comm.all_gather(rng.choice(numbers, SAMPLES))
    borders = np.quantile(sample, np.arange(1, comm.nranks) / comm.nranks)
    cuts = np.concatenate([[0], np.searchsorted(numbers, borders), [numbers.size]])
    sends = np.diff(cuts).astype(np.int64)
    receives = comm.all_to_all(sends)

    mine = np.sort(comm.all_to_all_v(numbers, sends.tolist(), receives.tolist()))

    edges = comm.all_gather(np.array([mine[0], mine[-1]])).reshape(comm.nranks, 2)
    assert (edges[1:, 0] >= edges[:-1, 1]).all(), (
        "a rank's smallest is not below the largest of the rank before"
    )
    totals = comm.all_reduce(np.array([numbers.sum(), mine.sum()]))
    assert np.isclose(totals[0], totals[1])
    counts = comm.all_gather(np.array([mine.size]))
    everything = comm.gather_v(mine, counts.tolist(), root=0)
    if comm.rank == 0:
        assert (np.diff(everything) >= 0).all()
        print(f"{everything.size} numbers in order; ranks hold {counts.tolist()} of them")
