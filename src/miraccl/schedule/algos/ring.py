"""Ring: every rank sends to the next one only; best for large messages.

Source: Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
JPDC 69(2), 2009; NCCL ``src/device/all_reduce.h:runRing``.

Reduce-scatter: chunk ``c`` starts at rank ``c + 1``, is accumulated rank by rank and is complete at
rank ``c``. All-gather: each rank's chunk travels once around. All-reduce is one after the other,
with the last addition and the first copy fused. All chunks travel at the same time, each on another
link.

============== ============= ==================
collective     latency steps blocks on the wire
============== ============= ==================
all_reduce     2 (n - 1)     2 (n - 1) / n
all_gather     n - 1         n - 1
reduce_scatter n - 1         n - 1
============== ============= ==================
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
    recv_copy_send,
    recv_reduce_copy,
    recv_reduce_copy_send,
    recv_reduce_send,
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
    "ring",
    collectives=COLLECTIVES,
    description=(
        "Neighbours pass chunks around a ring: fewest bytes per link, latency grows with the number"
        " of ranks."
    ),
    direct=COLLECTIVES,
    direct_in_place=COLLECTIVES,
    uneven=(Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
    latency=latency,
    wire=wire,
)
def build(collective: Collective, nranks: int, root: int) -> Schedule:
    steps = {
        Collective.ALL_REDUCE: _all_reduce,
        Collective.ALL_GATHER: _all_gather,
        Collective.REDUCE_SCATTER: _reduce_scatter,
    }[collective]
    parts = nranks if collective is Collective.ALL_REDUCE else 1
    return one_channel(
        "ring", collective, (steps(rank, nranks) for rank in range(nranks)), parts=parts
    )


def _all_reduce(rank: int, nranks: int) -> Iterator[Step]:
    before, after = (rank - 1) % nranks, (rank + 1) % nranks
    if nranks == 1:
        yield copy(inp(0), out(0))
        return
    yield send(inp(before), after)
    for distance in range(2, nranks):
        yield recv_reduce_send(inp((rank - distance) % nranks), before, after)
    yield recv_reduce_copy_send(inp(rank), out(rank), before, after)
    for distance in range(1, nranks - 1):
        yield recv_copy_send(out((rank - distance) % nranks), before, after)
    yield recv(out(after), before)


def _reduce_scatter(rank: int, nranks: int) -> Iterator[Step]:
    before, after = (rank - 1) % nranks, (rank + 1) % nranks
    if nranks == 1:
        yield copy(inp(0), out(0))
        return
    yield send(inp(before), after)
    for distance in range(2, nranks):
        yield recv_reduce_send(inp((rank - distance) % nranks), before, after)
    yield recv_reduce_copy(inp(rank), out(0), before)


def _all_gather(rank: int, nranks: int) -> Iterator[Step]:
    before, after = (rank - 1) % nranks, (rank + 1) % nranks
    if nranks == 1:
        yield copy(inp(0), out(0))
        return
    yield send(inp(0), after)
    yield copy(inp(0), out(rank))
    for distance in range(1, nranks - 1):
        yield recv_copy_send(out((rank - distance) % nranks), before, after)
    yield recv(out(after), before)
