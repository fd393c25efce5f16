"""The algorithm that an operation would use, its predicted time, and the reasons against others.

    miraccl run -n 4 examples/10_explain.py

``explain`` communicates nothing. ``last_plan`` is the plan that ran; ``init(algo=...)`` or
MIRACCL_ALGO overrides the choice.
"""

import numpy as np

import miraccl

with miraccl.init() as comm:
    if comm.rank == 0:
        for collective in ("all_reduce", "all_gather"):
            print(f"{collective} over {comm.nranks} ranks:")
            for nbytes in (8, 4 << 10, 256 << 10, 16 << 20):
                chosen = comm.explain(collective, nbytes)[0]
                print(
                    f"  {nbytes:9} bytes: {chosen.algo:27} {chosen.proto:7} "
                    f"{chosen.predicted_us:10.1f} us predicted"
                )
        print("all candidates for an all_reduce of 256 KiB:")
        for candidate in comm.explain("all_reduce", 256 << 10):
            print(f"  {candidate.algo:27} {candidate.predicted_us:10.1f} us  {candidate.reason}")

    x = np.ones(64 << 10, np.float32)
    comm.all_reduce(x)
    plan = comm.last_plan
    assert (x == comm.nranks).all()
    if comm.rank == 0 and plan is not None:
        assert comm.nranks == 1 or plan.algo == comm.explain("all_reduce", x.nbytes)[0].algo
        print(f"the last one ran with {plan.algo}")
