"""Bruck: logarithmically many steps for any number of ranks (Bruck, Ho, Kipnis, Upfal, Weathersby 1997).

All-gather: rank ``r`` has blocks ``r`` to ``r + k - 1`` and fetches the next ones from rank ``r + k``; ``k`` doubles.  Blocks go
straight to their place in the output; a run that wraps around the end is two messages.

All-to-all: a block that has ``i`` ranks to go travels along the bits of ``i``, lowest first; all blocks with that bit go in one
message.  They are collected in scratch, so that the message is one, which is the point for small blocks.

========== ============= =======================================================
collective latency steps blocks on the wire
========== ============= =======================================================
all_gather ceil(log2 n)  n - 1
all_to_all ceil(log2 n)  set bits of 1, ..., n - 1; n / 2 log2 n for powers of 2
========== ============= =======================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from miraccl.schedule.catalog import register
from miraccl.schedule.ir import Ref, Schedule, Step
from miraccl.schedule.steps import copy, inp, one_channel, out, recv, scratch, send
from miraccl.types import Collective

COLLECTIVES = (Collective.ALL_GATHER, Collective.ALL_TO_ALL)


def latency(collective: Collective, nranks: int) -> int:
    return (nranks - 1).bit_length()


def wire(collective: Collective, nranks: int) -> Fraction:
    return Fraction(
        nranks - 1
        if collective is Collective.ALL_GATHER
        else sum(i.bit_count() for i in range(nranks))
    )


@register(
    "bruck",
    collectives=COLLECTIVES,
    description="Distances 1, 2, 4 ...: log2(n) steps for any number of ranks; for small blocks.",
    rank_ordered=True,
    rounds_once=True,
    # all_to_all is not direct: the collected blocks of the next message overwrite those of the last
    direct=(Collective.ALL_GATHER,),
    direct_in_place=(Collective.ALL_GATHER,),
    uneven=(Collective.ALL_GATHER,),
    latency=latency,
    wire=wire,
)
def build(collective: Collective, nranks: int, root: int) -> Schedule:
    if collective is Collective.ALL_GATHER:
        return one_channel(
            "bruck", collective, (_all_gather(rank, nranks) for rank in range(nranks))
        )
    offsets_by_distance = {
        distance: [i for i in range(nranks) if i & distance] for distance in _distances(nranks)
    }
    starts = _receive_areas([len(moving) for moving in offsets_by_distance.values()])
    ranks = (_all_to_all(rank, nranks, offsets_by_distance, starts) for rank in range(nranks))
    return one_channel("bruck", collective, ranks, scratch_chunks=starts[-1])


def _distances(nranks: int) -> list[int]:
    return [1 << number for number in range((nranks - 1).bit_length())]


def _all_gather(rank: int, nranks: int) -> Iterator[Step]:
    yield copy(inp(0), out(rank))
    for have in _distances(nranks):
        more = min(have, nranks - have)
        frm = (rank + have) % nranks
        for piece in _wrapped(rank, more, nranks):
            yield send(piece, (rank - have) % nranks)
        for piece in _wrapped(frm, more, nranks):
            yield recv(piece, frm)


def _wrapped(first: int, blocks: int, nranks: int) -> list[Ref]:
    """Blocks ``first``, ``first + 1`` ... of the output, in one piece or, around the end, two."""
    head = min(blocks, nranks - first)
    return [out(first, head)] + ([out(0, blocks - head)] if blocks > head else [])


def _receive_areas(sizes: list[int]) -> list[int]:
    """Scratch: one area to collect what is sent, then one per step for what is received; the last number is the total."""
    starts = [max(sizes, default=0)]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


def _all_to_all(
    rank: int, nranks: int, offsets_by_distance: dict[int, list[int]], starts: list[int]
) -> Iterator[Step]:
    """``moves``: for each distance, how far the blocks that move by it had to go at the start."""
    location = [
        inp((rank + i) % nranks) for i in range(nranks)
    ]  # the block that started with i ranks to go
    yield copy(location[0], out(rank))
    for (distance, moving), start in zip(offsets_by_distance.items(), starts, strict=False):
        for slot, i in enumerate(moving):
            yield copy(location[i], scratch(slot))
        yield send(scratch(0, len(moving)), (rank + distance) % nranks)
        yield recv(scratch(start, len(moving)), (rank - distance) % nranks)
        for slot, i in enumerate(moving):
            location[i] = scratch(start + slot)
            if i < 2 * distance:  # no higher bit: this block has arrived
                yield copy(location[i], out((rank - i) % nranks))
