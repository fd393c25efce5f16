"""Recursive halving and doubling over pairs at distance p/2, p/4, ... 1 and back (Rabenseifner 2004; Thakur et al. 2005).

Reduce-scatter halves, at each step, the range a rank is responsible for: it sends the other half to its partner and adds what the
partner sends.  All-gather doubles the range it has.  All-reduce is both.  With ``p`` the largest power of two up to ``n``, the
first ``2 (n - p)`` ranks pair up before: the odd one gives its input to the even one and gets the result at the end.  The other
two collectives are for powers of two only.

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
    """The largest power of two up to ``nranks``."""
    return 1 << (nranks.bit_length() - 1)


class Folding:
    """How ``nranks`` ranks become ``power`` players: among the first ``2 (nranks - power)`` only the even ones play."""

    def __init__(self, nranks: int) -> None:
        self.core_size = largest_power_of_two(nranks)
        self.extra = nranks - self.core_size

    def core_index(self, rank: int) -> int | None:
        """The player that ``rank`` is, if it plays."""
        if rank >= 2 * self.extra:
            return rank - self.extra
        return rank // 2 if rank % 2 == 0 else None

    def core_rank(self, index: int) -> int:
        return 2 * index if index < self.extra else index + self.extra

    def folded_rank(self, rank: int) -> int | None:
        """The rank whose input ``rank`` takes over."""
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
    description="Pairs at distance n/2, n/4, ... 1 exchange halves, then double them back: few steps and, for powers of two, least bytes.",
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
    """For each step of halving: (partner, first chunk of the half kept, of the half sent, chunks of a half)."""
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
    """Partial sums lie in scratch: at each step in the half of the scratch range kept."""
    if nranks == 1:
        yield copy(inp(0), out(0))
        return
    base = 0  # the block at the start of scratch
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
