"""Communicators of rows and columns: a matrix product on a grid of ranks.

    miraccl run -n 4 examples/08_split.py

Rank (i, j) of the grid has block (i, j) of A and block j of B's rows, and multiplies them. The sum
over a row of the grid is that row's part of the product; a column of the grid has all parts.
"""

import numpy as np

import miraccl

with miraccl.init() as comm:
    height = max(
        d for d in range(1, comm.nranks + 1) if comm.nranks % d == 0 and d * d <= comm.nranks
    )
    width = comm.nranks // height
    i, j = divmod(comm.rank, width)
    row = comm.split(color=i, key=j)
    column = comm.split(color=j, key=i)
    assert (row.nranks, row.rank, column.nranks, column.rank) == (width, j, height, i)

    rng = np.random.default_rng(0)  # the same on all ranks, so that the result can be checked
    a = rng.integers(-5, 6, (60 * height, 40 * width)).astype(np.float64)
    b = rng.integers(-5, 6, (40 * width, 50)).astype(np.float64)

    part = a[60 * i : 60 * (i + 1), 40 * j : 40 * (j + 1)] @ b[40 * j : 40 * (j + 1)]
    row.all_reduce(part)
    product = column.all_gather(part)

    assert (product == a @ b).all()
    if comm.rank == 0:
        print(f"a grid of {height} x {width} ranks has multiplied {a.shape} by {b.shape}")
    row.finalize()
    column.finalize()
