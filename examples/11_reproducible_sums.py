"""Sums with equal bits, whatever the size and the algorithm: additions in rank order.

    miraccl run -n 4 examples/11_reproducible_sums.py

a + b = b + a, but (a + b) + c is not a + (b + c) once results are rounded: with more than two ranks
a sum depends on the order of the additions, which depends on the algorithm. ``deterministic=True``
allows only algorithms that add in rank order.
"""

import numpy as np

import miraccl

with miraccl.init(deterministic=True) as comm:
    for count in (1, 1000, 100_000, 1_000_000):
        numbers = [
            np.random.default_rng([count, rank]).normal(size=count).astype(np.float32)
            for rank in range(comm.nranks)
        ]
        x = comm.all_reduce(numbers[comm.rank].copy())

        in_order = numbers[0].copy()
        for part in numbers[1:]:
            in_order += part
        assert (x == in_order).all()

        backwards = numbers[-1].copy()
        for part in numbers[-2::-1]:
            backwards += part
        plan = comm.last_plan
        if comm.rank == 0:
            name = plan.algo if plan is not None else "nothing to do"
            differ = np.mean(backwards != in_order)
            print(
                f"{count:8} numbers ({name}): the bits of rank order; "
                f"added backwards {differ:.0%} of the sums would differ"
            )
