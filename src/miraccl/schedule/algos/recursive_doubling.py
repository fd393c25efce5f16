"""Recursive doubling: pairs at distance 1, 2, 4 ... exchange their whole partial sums.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
IJHPCA 19(1), 2005; MPICH ``allreduce_intra_recursive_doubling.c``.

Half the steps of ``recursive_halving_doubling`` and more bytes: for small all-reduces over a
network. All ranks obtain the same bits, because additions are paired in the same way everywhere and
(+) commutes. With ``p`` the largest power of two up to ``n``, ``Folding`` reduces other numbers of
ranks to ``p``.

========== ========================================== ==========================
collective latency steps                              blocks on the wire
========== ========================================== ==========================
all_reduce log2 p (+ 1 for n > p, + 2 for 2 n > 3 p)  log2 p (+ 1 for n > p)
========== ========================================== ==========================
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from miraccl.schedule.algos.recursive_halving_doubling import Folding, largest_power_of_two
from miraccl.schedule.catalog import register
from miraccl.schedule.ir import Schedule, Step
from miraccl.schedule.steps import (
    copy,
    inp,
    one_channel,
    out,
    recv,
    recv_reduce,
    recv_reduce_copy,
    send,
)
from miraccl.types import Collective

COLLECTIVES = (Collective.ALL_REDUCE,)


def latency(collective: Collective, nranks: int) -> int:
    folding = Folding(nranks)
    power, extra = folding.core_size, folding.extra
    # The longest chain crosses all log2(p) distances; ranks at both of its ends may be folded.
    return power.bit_length() - 1 + (extra > 0) + (2 * extra > power)


def wire(collective: Collective, nranks: int) -> Fraction:
    power = largest_power_of_two(nranks)
    return Fraction(power.bit_length() - 1 + (power != nranks))


@register(
    "recursive_doubling",
    collectives=COLLECTIVES,
    description=(
        "Pairs at distance 1, 2, 4, ... exchange whole sums: log2(n) steps, for small messages."
    ),
    # not direct: a rank adds to the sum it has just sent to its partner
    latency=latency,
    wire=wire,
)
def build(collective: Collective, nranks: int, root: int) -> Schedule:
    folding = Folding(nranks)
    return one_channel(
        "recursive_doubling",
        collective,
        (_all_reduce(rank, nranks, folding) for rank in range(nranks)),
    )


def _all_reduce(rank: int, nranks: int, folding: Folding) -> Iterator[Step]:
    index, other = folding.core_index(rank), folding.folded_rank(rank)
    if nranks == 1:
        yield copy(inp(0), out(0))
        return
    if index is None:
        yield send(inp(0), rank - 1)
        yield recv(out(0), rank - 1)
        return
    source = inp
    if other is not None:
        yield recv_reduce_copy(inp(0), out(0), other)
        source = out
    distance = 1
    while distance < folding.core_size:
        peer = folding.core_rank(index ^ distance)
        yield send(source(0), peer)
        yield recv_reduce(out(0), peer) if source is out else recv_reduce_copy(inp(0), out(0), peer)
        source = out
        distance *= 2
    if other is not None:
        yield send(out(0), other)
