"""Distance doubling: pairs at distance 1, 2, 4, ... p/2 reduce, and back for the gather.

Source: the reduce-scatter of Rabenseifner, "Optimization of Collective Reduction Operations",
ICCS 2004, with the distances in the other order (Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005,
section 4.1); two levels of it are the hierarchical all-reduce of NCCL's trees and of MVAPICH.

Neighbours, which share a host, exchange half of the data; the farthest pairs, which do not, only
``1 / n`` of it. A host of ``g`` ranks so sends ``g / n`` of what it does in
``recursive_halving_doubling``, whose first exchange is the farthest. Every message is one chunk, so
it lands in place. Powers of two only.

============== ============= ==================
collective     latency steps blocks on the wire
============== ============= ==================
all_reduce     2 (n - 1)     2 (n - 1) / n
all_gather     n - 1         n - 1
reduce_scatter n - 1         n - 1
============== ============= ==================

The chunks of an exchange follow each other and overlap; ``latency steps`` counts them one by one.
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


def latency(collective: Collective, nranks: int) -> int:
    return (2 if collective is Collective.ALL_REDUCE else 1) * (nranks - 1)


def wire(collective: Collective, nranks: int) -> Fraction:
    return (
        Fraction(2 * (nranks - 1), nranks)
        if collective is Collective.ALL_REDUCE
        else Fraction(nranks - 1)
    )


@register(
    "distance_doubling",
    collectives=COLLECTIVES,
    description=(
        "Pairs at distance 1, 2, ..., n/2 exchange: neighbours most of the data, hosts the least."
    ),
    direct=COLLECTIVES,
    direct_in_place=COLLECTIVES,
    uneven=(Collective.ALL_GATHER,),
    condition=lambda collective, nranks: nranks & (nranks - 1) == 0,
    network=True,
    latency=latency,
    wire=wire,
)
def build(collective: Collective, nranks: int, root: int) -> Schedule:
    steps = {
        Collective.ALL_REDUCE: _all_reduce,
        Collective.ALL_GATHER: _all_gather,
        Collective.REDUCE_SCATTER: _reduce_scatter,
    }[collective]
    reduces = collective is Collective.REDUCE_SCATTER
    return one_channel(
        "distance_doubling",
        collective,
        (steps(rank, nranks) for rank in range(nranks)),
        parts=nranks if collective is Collective.ALL_REDUCE else 1,
        scratch_chunks=nranks // 2 if reduces and nranks > 2 else 0,
    )


def exchanges(rank: int, nranks: int) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield (partner, chunks sent, chunks kept) of the reduce-scatter; the last keeps ``rank``."""
    held, distance = list(range(nranks)), 1
    while distance < nranks:
        kept = [chunk for chunk in held if chunk & distance == rank & distance]
        yield rank ^ distance, [chunk ^ distance for chunk in kept], kept
        held, distance = kept, 2 * distance


def _all_reduce(rank: int, nranks: int) -> Iterator[Step]:
    if nranks == 1:
        yield copy(inp(0), out(0))
        return
    levels = list(exchanges(rank, nranks))
    for number, (partner, sent, kept) in enumerate(levels):
        for give, keep in zip(sent, kept, strict=True):
            yield send(out(give) if number else inp(give), partner)
            if number:
                yield recv_reduce(out(keep), partner)
            else:
                yield recv_reduce_copy(inp(keep), out(keep), partner)
    for partner, sent, kept in reversed(levels):
        for give, keep in zip(sent, kept, strict=True):
            yield send(out(keep), partner)
            yield recv(out(give), partner)


def _all_gather(rank: int, nranks: int) -> Iterator[Step]:
    for number, (partner, sent, kept) in enumerate(reversed(list(exchanges(rank, nranks)))):
        for give, keep in zip(sent, kept, strict=True):
            yield send(out(keep) if number else inp(0), partner)
            if not number:
                yield copy(inp(0), out(rank))
            yield recv(out(give), partner)
    if nranks == 1:
        yield copy(inp(0), out(0))


def _reduce_scatter(rank: int, nranks: int) -> Iterator[Step]:
    """Yield the steps of ``rank``; partial sums of chunk ``c`` lie at ``c // 2`` of scratch."""
    if nranks == 1:
        yield copy(inp(0), out(0))
    for number, (partner, sent, kept) in enumerate(exchanges(rank, nranks)):
        for give, keep in zip(sent, kept, strict=True):
            yield send(scratch(give // 2) if number else inp(give), partner)
            partial = scratch(keep // 2) if number else inp(keep)
            if len(kept) == 1:
                yield recv_reduce_copy(partial, out(0), partner)
            elif number:
                yield recv_reduce(scratch(keep // 2), partner)
            else:
                yield recv_reduce_copy(partial, scratch(keep // 2), partner)
