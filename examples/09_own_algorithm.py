"""An algorithm of your own: written as steps, proved before it runs, compared with built-in ones.

    miraccl run -n 4 examples/09_own_algorithm.py
    miraccl schedule verify star --load examples/09_own_algorithm.py --ranks 1-8
    miraccl schedule draw star --load examples/09_own_algorithm.py --ranks 4 --out star.svg

``star``: all ranks send to rank 0, which reduces and sends the result back. It is registered as
adding in rank order, which is proved with the rest. It needs few steps but sends all bytes through
one rank, so it only serves as an example.
"""

import numpy as np

import miraccl
from miraccl.schedule.catalog import register
from miraccl.schedule.ir import Buffer, Op, Ref, Schedule, Step
from miraccl.types import Collective

HERE, RESULT = Ref(Buffer.INPUT, 0), Ref(Buffer.OUTPUT, 0)


@register(
    "star",
    collectives=[Collective.ALL_REDUCE],
    description="Everything through rank 0.",
    rank_ordered=True,
)
def build_star(collective: Collective, nranks: int, root: int) -> Schedule:
    others = range(1, nranks)
    center = [Step(op=Op.RECV_REDUCE_ALL, src=HERE, dst=RESULT, peers=tuple(range(nranks)))]
    center += [Step(op=Op.SEND, src=RESULT, send_peer=peer) for peer in others]
    leaf = (Step(op=Op.SEND, src=HERE, send_peer=0), Step(op=Op.RECV, dst=RESULT, recv_peer=0))
    channel = (tuple(center), *(leaf for _ in others))
    return Schedule(name="star", collective=collective, nranks=nranks, parts=1, channels=(channel,))


if __name__ == "__main__":
    with miraccl.init(algo="star") as comm:
        x = np.arange(1000, dtype=np.float32) + comm.rank
        result = comm.all_reduce(x, out=np.empty_like(x))
        expected = np.arange(1000) * comm.nranks + sum(range(comm.nranks))
        assert (result == expected).all()
        if comm.rank == 0:
            assert comm.last_plan is not None
            print(f"right, with {comm.last_plan.algo}")
            for candidate in comm.explain("all_reduce", 4 << 20):
                print(
                    f"  {candidate.algo:28} {candidate.predicted_us:10.1f} us predicted for 4 MiB: "
                    f"{candidate.reason}"
                )
