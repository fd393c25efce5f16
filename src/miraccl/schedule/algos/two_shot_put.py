"""Two-shot on memory that peers can address: no FIFO, no slots, no copies.

Source: MSCCL++ ``allreduce.hpp``; vLLM ``custom_all_reduce.cuh`` (``cross_device_reduce_2stage``).

Every rank signals that its input is ready. Rank ``p`` reads chunk ``p`` of every input, adds in
rank order, rounds once, and puts the sum into every output. Every rank signals that it has
finished. This is also correct in place: chunk ``p`` of any input is read by rank ``p`` only, before
rank ``p`` puts the sum there.

============== ============= ==================
collective     latency steps blocks on the wire
============== ============= ==================
all_reduce     3             2 (n - 1) / n
reduce_scatter 3             n - 1
all_gather     2             n - 1
============== ============= ==================

All are 0 for n = 1. A round of signals is one step, and so is a read of remote memory.
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
    peers_after,
    put,
    reduce_from_peers,
    signal,
    wait,
)
from miraccl.types import Collective

COLLECTIVES = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER)


def latency(collective: Collective, nranks: int) -> int:
    return (2 if collective is Collective.ALL_GATHER else 3) * (nranks > 1)


def wire(collective: Collective, nranks: int) -> Fraction:
    return (
        Fraction(2 * (nranks - 1), nranks)
        if collective is Collective.ALL_REDUCE
        else Fraction(nranks - 1)
    )


@register(
    "two_shot_put",
    collectives=COLLECTIVES,
    description=(
        "Each rank reduces one chunk from all ranks' memory and puts it into all ranks' memory: no"
        " FIFO, no copies."
    ),
    rank_ordered=True,
    rounds_once=True,
    direct=COLLECTIVES,
    direct_in_place=COLLECTIVES,
    needs_addressable_memory=True,
    uneven=(Collective.REDUCE_SCATTER, Collective.ALL_GATHER),
    latency=latency,
    wire=wire,
)
def build(collective: Collective, nranks: int, root: int) -> Schedule:
    parts = nranks if collective is Collective.ALL_REDUCE else 1
    return one_channel(
        "two_shot_put",
        collective,
        (_steps(collective, rank, nranks) for rank in range(nranks)),
        parts=parts,
    )


def _steps(collective: Collective, rank: int, nranks: int) -> Iterator[Step]:
    if nranks == 1:
        yield copy(inp(0), out(0))
        return
    peers = peers_after(rank, nranks)
    # Two rounds of signals, even where little is done between them: a rank must not access the
    # memory of a peer that has not started this operation or has finished it.
    yield signal(peers)
    yield wait(peers)
    match collective:
        case Collective.ALL_REDUCE:
            yield reduce_from_peers(inp(rank), out(rank), range(nranks))
            yield from (put(out(rank), out(rank), peer) for peer in peers)
        case Collective.REDUCE_SCATTER:
            yield reduce_from_peers(inp(rank), out(0), range(nranks))
        case _:
            yield from (put(inp(0), out(rank), peer) for peer in peers)
            yield copy(inp(0), out(rank))
    yield signal(peers)
    yield wait(peers)
