"""Heat equation on a plate cut into strips: neighbours exchange their border rows in every step.

    miraccl run -n 4 examples/03_halo_exchange.py

Each rank has some rows, and one row of the neighbour above and below (the halo). Two sends and two
receives form a group: they start together, so no order can deadlock, also at the ends with only one
neighbour. The last lines compare the plate with one that a single rank has computed.
"""

import numpy as np

import miraccl

ROWS, COLUMNS, STEPS = 240, 200, 300


def warm(rows: np.ndarray) -> np.ndarray:
    """Return the inner rows after one step: each point becomes the mean of its neighbours."""
    inner = rows[1:-1].copy()
    inner[:, 1:-1] = (rows[:-2, 1:-1] + rows[2:, 1:-1] + rows[1:-1, :-2] + rows[1:-1, 2:]) / 4
    return inner


def make_plate() -> np.ndarray:
    plate = np.zeros((ROWS + 2, COLUMNS))  # with a cold row above and below
    plate[:, 0] = 100.0
    return plate


with miraccl.init() as comm:
    above, below = comm.rank - 1, comm.rank + 1
    cuts = [ROWS * r // comm.nranks for r in range(comm.nranks + 1)]
    first, last = cuts[comm.rank], cuts[comm.rank + 1]
    mine = make_plate()[first : last + 2]  # rows first..last, and a halo row on either side

    for _ in range(STEPS):
        with miraccl.group():
            if above >= 0:
                comm.send(mine[1], dst=above)
                comm.recv(mine[0], src=above)
            if below < comm.nranks:
                comm.send(mine[-2], dst=below)
                comm.recv(mine[-1], src=below)
        mine[1:-1] = warm(mine)

    counts = [(cuts[r + 1] - cuts[r]) * COLUMNS for r in range(comm.nranks)]
    plate = comm.gather_v(np.ascontiguousarray(mine[1:-1]), counts, root=0)
    if comm.rank == 0:
        alone = make_plate()
        for _ in range(STEPS):
            alone[1:-1] = warm(alone)
        assert (plate.reshape(ROWS, COLUMNS) == alone[1:-1]).all()
        print(
            f"{comm.nranks} strips give the plate that one rank computes; "
            f"its mean is {plate.mean():.4f} degrees"
        )
