"""Dissemination barrier: in round ``k`` rank ``r`` signals ``r + 2^k`` and waits for ``r - 2^k``.

Source: Hensgen, Finkel, Manber, "Two Algorithms for Barrier Synchronization", IJPP 17(1), 1988;
MPICH ``barrier_intra_dissemination.c``.

After round ``k`` a rank depends, directly or indirectly, on the ``2^(k+1) - 1`` ranks before it.

========== ============= ==================
collective latency steps blocks on the wire
========== ============= ==================
barrier    ceil(log2 n)  0
========== ============= ==================
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from miraccl.schedule.catalog import register
from miraccl.schedule.ir import Schedule, Step
from miraccl.schedule.steps import one_channel, signal, wait
from miraccl.types import Collective


def latency(collective: Collective, nranks: int) -> int:
    return (nranks - 1).bit_length()


def wire(collective: Collective, nranks: int) -> Fraction:
    return Fraction(0)


@register(
    "dissemination",
    collectives=(Collective.BARRIER,),
    description=(
        "Barrier of log2(n) rounds in which each rank signals the rank at distance 1, 2, 4, ..."
    ),
    rank_ordered=True,
    rounds_once=True,
    direct=(Collective.BARRIER,),
    direct_in_place=(Collective.BARRIER,),
    latency=latency,
    wire=wire,
)
def build(collective: Collective, nranks: int, root: int) -> Schedule:
    return one_channel(
        "dissemination", collective, (_barrier(rank, nranks) for rank in range(nranks))
    )


def _barrier(rank: int, nranks: int) -> Iterator[Step]:
    for number in range((nranks - 1).bit_length()):
        yield signal([(rank + (1 << number)) % nranks])
        yield wait([(rank - (1 << number)) % nranks])
