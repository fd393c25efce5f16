"""Segmentation of a multi-node operation on GPU memory, and the copies of each segment.

Everything follows from counts that all ranks know, so all ranks segment alike; no GPU or
communicator is involved.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from miraccl.types import Collective

ALIGN = 64  # bytes; alignment of the blocks in a slot
MIN_SEGMENT_BYTES = 128 << 10
#: least segments of an operation, unless below MIN_SEGMENT_BYTES: copies and network overlap
MIN_SEGMENTS = 4


@dataclass(frozen=True, slots=True)
class SegmentCopy:
    """Copy of ``nbytes`` between byte ``device`` of a user buffer and byte ``host`` of a slot."""

    buffer: int
    device: int
    host: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class StagedSegment:
    """Segment: its copies, and the location of input and output in the slot.

    ``source`` and ``target`` are byte offsets, ``*_counts`` the elements of each block.
    """

    down: tuple[SegmentCopy, ...] = ()
    up: tuple[SegmentCopy, ...] = ()
    source: int = 0
    source_counts: tuple[int, ...] = ()
    target: int = 0
    target_counts: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StagedShape:
    """Properties of an operation that determine its segments.

    ``sends[j]`` and ``receives[j]``: elements of block j of this rank's input and output.
    ``counts``: those of an uneven collective, as all ranks know them. ``uneven`` collectives run as
    such in every segment, even if its blocks are equal. ``block_offsets``: element offsets of the
    output's blocks; empty means consecutive. ``keeps_own_block``: this rank's own block of an
    all_to_all is not copied. ``overlaps``: smaller segments, copied while others are sent, have no
    other cost.
    """

    collective: Collective
    itemsize: int
    rank: int
    nranks: int
    root: int = 0
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    counts: tuple[int, ...] = ()
    uneven: bool = False
    block_offsets: tuple[int, ...] = ()
    keeps_own_block: bool = False
    overlaps: bool = True

    @classmethod
    @functools.lru_cache(maxsize=1024)  # called with every operation
    def even(
        cls, collective: Collective, itemsize: int, rank: int, nranks: int, root: int, count: int
    ) -> StagedShape:
        """Return the shape with blocks of ``count`` elements, counted as in ``schedule.ir``."""
        one, each = (count,), (count,) * nranks
        sends, receives = {
            Collective.ALL_GATHER: (one, each),
            Collective.REDUCE_SCATTER: (each, one),
            Collective.ALL_TO_ALL: (each, each),
            Collective.GATHER: (one, each if rank == root else ()),
            Collective.SCATTER: (each if rank == root else (), one),
        }.get(collective, (one, one))
        return cls(
            collective=collective,
            itemsize=itemsize,
            rank=rank,
            nranks=nranks,
            root=root,
            sends=sends,
            receives=receives,
        )


_SINGLE_BLOCK = (Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE)


def elements_per_segment(shape: StagedShape, slot_bytes: int) -> int:
    """Return the elements of a block per segment, the same on all ranks.

    A slot holds one block, one block of every rank, or two of every rank, depending on the
    collective. Overlapping operations are split into equal segments, smaller ones if all ranks know
    the size.
    """
    nblocks = (
        1
        if shape.collective in _SINGLE_BLOCK
        else 2 * shape.nranks
        if shape.collective is Collective.ALL_TO_ALL
        else shape.nranks
    )
    available = (slot_bytes - ALIGN) // (nblocks * shape.itemsize)
    capacity = max(1, available // ALIGN * ALIGN or available)
    if shape.uneven or not shape.overlaps:
        return capacity
    count, min_count = _count(shape), max(1, MIN_SEGMENT_BYTES // (nblocks * shape.itemsize))
    nsegments = max(-(-count // capacity), min(MIN_SEGMENTS, count // min_count), 1)
    return min(capacity, max(1, -(-count // (nsegments * ALIGN))) * ALIGN)


def _count(shape: StagedShape) -> int:
    return max((*shape.sends, *shape.receives, *shape.counts), default=0)


def split_segments(shape: StagedShape, slot_bytes: int) -> tuple[StagedSegment, ...]:
    """Return the segments of an operation in order; empty if there is nothing to move."""
    capacity = elements_per_segment(shape, slot_bytes)
    return tuple(
        _segment(shape, capacity, number) for number in range(-(-_count(shape) // capacity))
    )


def _segment(shape: StagedShape, capacity: int, number: int) -> StagedSegment:
    """Return one segment; input and output share memory if the collective has an in-place form."""
    begin, size = number * capacity, shape.itemsize

    def part(counts: Sequence[int]) -> tuple[int, ...]:
        return tuple(min(capacity, max(0, n - begin)) for n in counts)

    sends, receives = part(shape.sends), part(shape.receives)
    source = target = 0
    collective, rank = shape.collective, shape.rank
    if collective is Collective.ALL_TO_ALL:
        target = -(-sum(sends) * size // ALIGN) * ALIGN
    elif collective in (Collective.ALL_GATHER, Collective.GATHER) and len(receives) > 1:
        source = sum(receives[:rank]) * size
    elif collective in (Collective.REDUCE_SCATTER, Collective.SCATTER) and len(sends) > 1:
        target = sum(sends[:rank]) * size
    is_root, skipped = rank == shape.root, rank if shape.keeps_own_block else -1
    sends_data = is_root or collective not in (Collective.BROADCAST, Collective.SCATTER)
    receives_data = (is_root or collective not in (Collective.REDUCE, Collective.GATHER)) and not (
        is_root and collective is Collective.BROADCAST
    )
    return StagedSegment(
        down=_copies(0, _consecutive_offsets(shape.sends), sends, begin, source, size, skipped)
        if sends_data
        else (),
        up=_copies(
            1,
            shape.block_offsets or _consecutive_offsets(shape.receives),
            receives,
            begin,
            target,
            size,
            skipped,
        )
        if receives_data
        else (),
        source=source,
        source_counts=sends,
        target=target,
        target_counts=receives,
        counts=part(shape.counts),
    )


def _consecutive_offsets(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(counts, initial=0))[:-1]


def _copies(
    buffer: int,
    places: Sequence[int],
    part: Sequence[int],
    begin: int,
    host: int,
    size: int,
    skipped: int,
) -> tuple[SegmentCopy, ...]:
    """Return the copies of a segment, merging adjacent ones; block ``skipped`` is not copied."""
    copies: list[SegmentCopy] = []
    for block, (place, count) in enumerate(zip(places, part, strict=True)):
        if count and block != skipped:
            at, nbytes = (place + begin) * size, count * size
            last = copies[-1] if copies else None
            if (
                last is not None
                and last.device + last.nbytes == at
                and last.host + last.nbytes == host
            ):
                copies[-1] = SegmentCopy(buffer, last.device, last.host, last.nbytes + nbytes)
            else:
                copies.append(SegmentCopy(buffer, at, host, nbytes))
        host += count * size
    return tuple(copies)
