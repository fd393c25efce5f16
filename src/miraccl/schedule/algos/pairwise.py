"""Pairwise exchange: in round ``s`` rank ``r`` sends to ``r + s`` and receives from ``r - s``.

Source: MPICH ``alltoall_intra_pairwise.c``; gloo ``alltoall.cc``.

Each round is a permutation, so every link carries one message at a time. A send of round ``s``
follows the receive of round ``s - 1`` in the program; rounds overlap only as far as the FIFOs
allow.

========== ============= ==================
collective latency steps blocks on the wire
========== ============= ==================
all_to_all n - 1         n - 1
========== ============= ==================
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from miraccl.schedule.catalog import register
from miraccl.schedule.ir import Schedule, Step
from miraccl.schedule.steps import copy, inp, one_channel, out, recv, send
from miraccl.types import Collective

COLLECTIVES = (Collective.ALL_TO_ALL,)


def latency(collective: Collective, nranks: int) -> int:
    return nranks - 1


def wire(collective: Collective, nranks: int) -> Fraction:
    return Fraction(nranks - 1)


@register(
    "pairwise",
    collectives=COLLECTIVES,
    description=(
        "Exchanges with the ranks at distance 1, 2, 3, ...: each block crosses the wire once."
    ),
    rank_ordered=True,
    rounds_once=True,
    direct=COLLECTIVES,
    uneven=COLLECTIVES,
    latency=latency,
    wire=wire,
)
def build(collective: Collective, nranks: int, root: int) -> Schedule:
    return one_channel(
        "pairwise", collective, (_all_to_all(rank, nranks) for rank in range(nranks))
    )


def _all_to_all(rank: int, nranks: int) -> Iterator[Step]:
    yield copy(inp(rank), out(rank))
    for distance in range(1, nranks):
        to, frm = (rank + distance) % nranks, (rank - distance) % nranks
        yield send(inp(to), to)
        yield recv(out(frm), frm)
