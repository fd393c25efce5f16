"""Point-to-point: a token goes around a ring, then neighbours exchange blocks in a group.

    miraccl run -n 3 examples/02_send_and_receive.py

Outside a group a large ``send`` waits for its ``recv``, so the order of the calls matters; inside a
group it does not.
"""

import numpy as np

import miraccl

with miraccl.init() as comm:
    following, previous = (comm.rank + 1) % comm.nranks, (comm.rank - 1) % comm.nranks
    token = np.zeros(1, np.int64)
    if comm.nranks > 1:
        if comm.rank == 0:
            comm.send(token, dst=following)
            comm.recv(token, src=previous)
        else:
            comm.recv(token, src=previous)
            token += comm.rank
            comm.send(token, dst=following)

    left, right = np.empty(2, np.float32), np.empty(2, np.float32)
    mine = np.full(2, comm.rank, np.float32)
    with miraccl.group():  # all four at once: no order can deadlock
        comm.send(mine, dst=following)
        comm.send(mine, dst=previous)
        comm.recv(left, src=previous)
        comm.recv(right, src=following)
    assert (left[0], right[0]) == (previous, following)
    if comm.rank == 0:
        print(
            f"the token came back as {token[0]}, the sum of all other ranks; "
            f"neighbours are {left[0]:g} and {right[0]:g}"
        )
