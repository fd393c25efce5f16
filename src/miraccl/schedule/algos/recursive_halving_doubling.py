"""Recursive halving and doubling over pairs at distance p/2, p/4, ... 1 and back.

Source: Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004; Thakur,
Rabenseifner, Gropp, IJHPCA 19(1), 2005; MPICH ``allreduce_intra_reduce_scatter_allgather.c``; gloo
``allreduce_halving_doubling.h``.

Reduce-scatter halves, at each step, the range a rank is responsible for: the rank sends the other
half to its partner and adds what the partner sends. All-gather doubles the range. All-reduce is
both. With ``p`` the largest power of two up to ``n``, the first ``2 (n - p)`` ranks form pairs in
advance: the odd rank sends its input to the even one and receives the result at the end. The other
two collectives support powers of two only.

============== =========================== ================================
collective     latency steps               blocks on the wire
============== =========================== ================================
all_reduce     2 log2 p (+ 2 for n != p)   2 (p - 1) / p (+ 1 for n != p)
all_gather     log2 n                      n - 1
reduce_scatter log2 n                      n - 1
============== =========================== ================================
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

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
    scratch,
    send,
)
from miraccl.types import Collective

COLLECTIVES = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


def largest_power_of_two(nranks: int) -> int:
    """Return the largest power of two up to ``nranks``."""
    return 1 << (nranks.bit_length() - 1)


class Folding:
    """Reduction of ``nranks`` ranks to a core of ``core_size``, the largest power of two.

    Among the first ``2 (nranks - core_size)`` ranks only the even ones belong to the core; each
    stands for the odd rank after it (MPICH's ``newrank``).
    """

    def __init__(self, nranks: int) -> None:
        self.core_size = largest_power_of_two(nranks)
        self.extra = nranks - self.core_size

    def core_index(self, rank: int) -> int | None:
        """Return the index of ``rank`` in the core, None if it is folded into its neighbour."""
        if rank >= 2 * self.extra:
            return rank - self.extra
        return rank // 2 if rank % 2 == 0 else None

    def core_rank(self, index: int) -> int:
        """Return the rank at ``index`` of the core."""
        return 2 * index if index < self.extra else index + self.extra

    def folded_rank(self, rank: int) -> int | None:
        """Return the rank whose input ``rank`` adds to its own, None if there is none."""
        return rank + 1 if rank < 2 * self.extra and rank % 2 == 0 else None


def latency(collective: Collective, nranks: int) -> int:
    power = largest_power_of_two(nranks)
    steps = power.bit_length() - 1
    return 2 * steps + 2 * (power != nranks) if collective is Collective.ALL_REDUCE else steps


def wire(collective: Collective, nranks: int) -> Fraction:
    power = largest_power_of_two(nranks)
    return (
        Fraction(2 * (power - 1), power) + (power != nranks)
        if collective is Collective.ALL_REDUCE
        else Fraction(nranks - 1)
    )


def supports(collective: Collective, nranks: int) -> bool:
    return collective is Collective.ALL_REDUCE or nranks == largest_power_of_two(nranks)


@register(
    "recursive_halving_doubling",
    collectives=COLLECTIVES,
    description=(
        "Pairs at distance n/2, n/4, ..., 1 exchange halves, then double them back: few steps,"
        " fewest bytes for powers of two."
    ),
    direct=COLLECTIVES,
    direct_in_place=COLLECTIVES,
    uneven=(Collective.ALL_GATHER,),
    condition=supports,
    latency=latency,
    wire=wire,
)
def build(collective: Collective, nranks: int, root: int) -> Schedule:
    name = "recursive_halving_doubling"
    if collective is Collective.ALL_REDUCE:
        folding = Folding(nranks)
        ranks = (_all_reduce(rank, nranks, folding) for rank in range(nranks))
        return one_channel(name, collective, ranks, parts=folding.core_size)
    if collective is Collective.ALL_GATHER:
        return one_channel(name, collective, (_all_gather(rank, nranks) for rank in range(nranks)))
    ranks = (_reduce_scatter(rank, nranks) for rank in range(nranks))
    return one_channel(name, collective, ranks, scratch_chunks=nranks // 2 if nranks > 2 else 0)


def halves(index: int, power: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (partner, first chunk retained, first chunk sent, chunks of a half) per step."""
    low, size = 0, power
    while size > 1:
        size //= 2
        upper = bool(index & size)
        keep, give = (low + size, low) if upper else (low, low + size)
        yield index ^ size, keep, give, size
        low = keep


def _all_reduce(rank: int, nranks: int, folding: Folding) -> Iterator[Step]:
    power, index, other = folding.core_size, folding.core_index(rank), folding.folded_rank(rank)
    if nranks == 1:
        yield copy(inp(0), out(0))
        return
    if index is None:
        yield send(inp(0, power), rank - 1)
        yield recv(out(0, power), rank - 1)
        return
    source = inp
    if other is not None:
        yield recv_reduce_copy(inp(0, power), out(0, power), other)
        source = out
    steps = list(halves(index, power))
    for partner, keep, give, size in steps:
        peer = folding.core_rank(partner)
        yield send(source(give, size), peer)
        yield (
            recv_reduce(out(keep, size), peer)
            if source is out
            else recv_reduce_copy(inp(keep, size), out(keep, size), peer)
        )
        source = out
    for partner, keep, give, size in reversed(steps):
        yield send(out(keep, size), folding.core_rank(partner))
        yield recv(out(give, size), folding.core_rank(partner))
    if other is not None:
        yield send(out(0, power), other)


def _all_gather(rank: int, nranks: int) -> Iterator[Step]:
    yield copy(inp(0), out(rank))
    for partner, keep, give, size in reversed(list(halves(rank, nranks))):
        yield send(out(keep, size), partner)
        yield recv(out(give, size), partner)


def _reduce_scatter(rank: int, nranks: int) -> Iterator[Step]:
    """Yield the steps of ``rank``; partial sums lie in the kept half of the scratch range."""
    if nranks == 1:
        yield copy(inp(0), out(0))
        return
    base = 0  # block at the start of scratch
    for number, (partner, keep, give, size) in enumerate(halves(rank, nranks)):
        first = number == 0
        base = keep if first else base
        yield send(inp(give, size) if first else scratch(give - base, size), partner)
        kept = inp(keep, size) if first else scratch(keep - base, size)
        if size == 1:
            yield recv_reduce_copy(kept, out(0), partner)
        elif first:
            yield recv_reduce_copy(kept, scratch(0, size), partner)
        else:
            yield recv_reduce(kept, partner)
