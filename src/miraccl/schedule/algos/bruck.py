"""Bruck: ceil(log2 n) steps for any number of ranks.

Source: Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient Algorithms for All-to-All Communications in
Multiport Message-Passing Systems", IEEE TPDS 8(11), 1997; MPICH ``allgather_intra_brucks.c`` and
``alltoall_intra_brucks.c``.

All-gather: before the step of distance ``k`` rank ``r`` holds blocks ``r`` to ``r + k - 1``; it
receives the next ones from rank ``r + k``, and ``k`` doubles. Blocks are stored directly at their
position in the output; a run that wraps around the end is two messages.

All-to-all: a block with ``i`` ranks to travel moves along the set bits of ``i``, lowest first. All
blocks with the same bit are packed in scratch and sent as one message, which makes the algorithm
efficient for small blocks.

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
    description="Distances 1, 2, 4, ...: log2(n) steps for any number of ranks; for small blocks.",
    rank_ordered=True,
    rounds_once=True,
    # all_to_all is not direct: packing a message overwrites the one before it
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
    """Return ``blocks`` output blocks from ``first`` on: one reference, or two around the end."""
    head = min(blocks, nranks - first)
    return [out(first, head)] + ([out(0, blocks - head)] if blocks > head else [])


def _receive_areas(sizes: list[int]) -> list[int]:
    """Return the scratch offset of each step's receive area and, last, the total.

    The send area, sized for the largest message, lies before the first receive area.
    """
    starts = [max(sizes, default=0)]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


def _all_to_all(
    rank: int, nranks: int, offsets_by_distance: dict[int, list[int]], starts: list[int]
) -> Iterator[Step]:
    """Yield the steps of ``rank``.

    - ``offsets_by_distance``: for each distance, the initial offsets (destination - source) of the
      blocks that move by it.
    """
    # Current location of the block with initial offset i.
    location = [inp((rank + i) % nranks) for i in range(nranks)]
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
