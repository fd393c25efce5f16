"""Re-sharding between two groups of ranks as a schedule, and the grid that gives its chunks memory.

The ranks of the source come first, those of the target follow: a process in both groups is two
ranks. The bounds of all parts and moves cut the array into a grid. Chunk ``i`` is cell ``i`` of it,
in row-major order; as the extents of ``schedule.transfer_schedule``, the grid is an argument of a
run. The schedule is a broadcast with shards: each chunk begins on the ranks whose part has it, and
must end on those whose part needs it.

A target signals first, with its descriptor. Channel ``k`` has the ``k``-th transfer of each source:
PUTs of runs of chunks, then a SIGNAL, which is the notification. Transfers of one source are
unordered, so the proof finds a chunk that two of them write.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.schedule.interpret import UNDEFINED, run
from miraccl.schedule.ir import ChunkRanks, Op, Schedule, Step
from miraccl.schedule.layout import rank_cells
from miraccl.schedule.steps import inp, out, put, signal, wait
from miraccl.schedule.text import dump, parse
from miraccl.schedule.verify import verify
from miraccl.types import Collective

Box = tuple[tuple[int, int], ...]
"""Part of an array: (start, stop) in each dimension."""

#: Largest number of chunks times ranks of a schedule; the proof of so many takes some 5 s.
MAX_CELLS = 1 << 20

_GRID = re.compile(r"# grid (\d{1,3}) bounds((?: \d{1,18})+)")
_ITEM = re.compile(r"# element bytes (\d{1,9})")


@dataclass(frozen=True, kw_only=True)
class ReshardSchedule:
    """Schedule of a re-sharding with the grid of its chunks.

    Attributes:
        schedule: Steps of the source ranks, then those of the target ranks.
        bounds: For each dimension of the array the bounds of the grid, ascending.
        itemsize: Bytes of an element.
    """

    schedule: Schedule
    bounds: tuple[tuple[int, ...], ...]
    itemsize: int

    @property
    def grid(self) -> tuple[int, ...]:
        """Cells of the grid in each dimension."""
        return tuple(len(bounds) - 1 for bounds in self.bounds)

    def box(self, chunk: int) -> Box:
        """Return the part of the array that is a chunk."""
        cell = np.unravel_index(chunk, self.grid) if self.bounds else ()
        return tuple((b[int(i)], b[int(i) + 1]) for b, i in zip(self.bounds, cell, strict=True))

    @cached_property
    def chunk_bytes(self) -> tuple[int, ...]:
        """Bytes of each chunk."""
        return tuple(
            self.itemsize * math.prod(b - a for a, b in self.box(chunk))
            for chunk in range(self.schedule.parts)
        )

    def step_bytes(self, step: Step) -> int:
        """Return the bytes of a step's chunks; 0 for SIGNAL and WAIT."""
        ref = step.dst or step.src
        return sum(self.chunk_bytes[ref.index : ref.index + ref.chunks]) if ref is not None else 0

    def verify(self) -> None:
        """Prove that each target rank gets every chunk of its part once, from a rank that holds it.

        Raises:
            ScheduleError: The message names step and chunk; ``box`` has the chunk's part.
        """
        if math.prod(self.grid) != self.schedule.parts:
            raise ScheduleError(
                f"{self.schedule.name}: a grid of {self.grid} cells for {self.schedule.parts}"
                " chunks"
            )
        verify(self.schedule)
        for channel in self.schedule.channels:
            for steps in channel:
                written = Counter(
                    (step.send_peer, chunk)
                    for step in steps
                    if step.op is Op.PUT and step.dst is not None
                    for chunk in step.dst
                )
                for (rank, chunk), times in written.items():
                    if times > 1:
                        raise ScheduleError(
                            f"{self.schedule.name}: output[{chunk}] of rank {rank} is written"
                            f" {times} times by one transfer"
                        )

    def interpret(self, parts: Mapping[int, Any], part_boxes: Sequence[Box]) -> dict[int, Any]:
        """Return the part of each target rank: the meaning of the schedule.

        Args:
            parts: Array of each source rank, by its number in the schedule.
            part_boxes: Part of each rank of the schedule; empty ones have no elements.
        """
        memory = []
        for rank in range(self.schedule.nranks):
            row: list[Any] = [UNDEFINED] * rank_cells(self.schedule, rank, False).cells
            for chunk, ranks in enumerate(self.schedule.shards):
                if ranks.holders >> rank & 1:
                    row[chunk] = parts[rank][_indices(self.box(chunk), part_boxes[rank])]
            memory.append(row)
        chunks = run(self.schedule, memory, _no_reduction)
        dtype, result = next(iter(parts.values())).dtype, {}
        for rank, box in enumerate(part_boxes):
            needed = [c for c, r in enumerate(self.schedule.shards) if r.targets >> rank & 1]
            if not needed:
                continue
            result[rank] = np.zeros([b - a for a, b in box], dtype)
            for chunk in needed:
                result[rank][_indices(self.box(chunk), box)] = chunks[rank][chunk]
        return result

    def dump(self) -> str:
        """Return the text form: that of the schedule, with comment lines for the grid."""
        lines = [
            f"# grid {dim} bounds {' '.join(map(str, bounds))}"
            for dim, bounds in enumerate(self.bounds)
        ]
        tail = f"# element bytes {self.itemsize}"
        return "\n".join([dump(self.schedule).rstrip("\n"), *lines, tail]) + "\n"

    @classmethod
    def parse(cls, text: str) -> ReshardSchedule:
        """Parse the result of ``dump``. Raises ``ScheduleError``."""
        schedule, bounds, itemsize = parse(text), list[tuple[int, ...]](), 0
        for line in map(str.strip, text.splitlines()):
            if (match := _GRID.fullmatch(line)) is not None:
                row = tuple(map(int, match[2].split()))
                if int(match[1]) != len(bounds) or len(row) < 2 or list(row) != sorted({*row}):
                    raise ScheduleError(f"cannot parse {line!r}: expected ascending bounds")
                bounds.append(row)
            elif (match := _ITEM.fullmatch(line)) is not None:
                itemsize = int(match[1])
        made = cls(schedule=schedule, bounds=tuple(bounds), itemsize=itemsize)
        if not schedule.shards or not itemsize or math.prod(made.grid) != schedule.parts:
            raise ScheduleError(
                f"cannot parse a re-sharding: {len(schedule.shards)} shards, a grid of {made.grid} "
                f"cells and elements of {itemsize} bytes"
            )
        return made


def _no_reduction(operands: list[Any]) -> Any:
    raise ScheduleError("a re-sharding does not reduce")


def _indices(box: Box, part: Box) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, part, strict=True))


@dataclass(frozen=True)
class _Grid:
    """Grid over an array, which cuts no part and no move."""

    bounds: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, shape: Sequence[int], boxes: Sequence[Box]) -> _Grid:
        bounds = [{0, size} for size in shape]
        for box in boxes:
            for dim, (start, stop) in enumerate(box):
                bounds[dim] |= {start, stop}
        return cls(tuple(tuple(sorted(each)) for each in bounds))

    def chunks(self, box: Box) -> Any:
        """Return the numbers of the chunks in a box, ascending."""
        numbers = np.zeros(1, np.int64)
        for (start, stop), bounds in zip(box, self.bounds, strict=True):
            first, last = bisect_left(bounds, start), bisect_left(bounds, stop)
            numbers = (numbers[:, None] * (len(bounds) - 1) + np.arange(first, last)).reshape(-1)
        return numbers


def build(
    shape: Sequence[int],
    itemsize: int,
    sources: Sequence[Box],
    targets: Sequence[Box],
    moves: Sequence[tuple[int, int, Box]],
) -> ReshardSchedule:
    """Return the schedule of a re-sharding.

    Args:
        shape: Shape of the array.
        itemsize: Bytes of an element.
        sources, targets: Part of each source rank, and of each target rank.
        moves: (source rank, target rank, box), each rank numbered in its group.

    Raises:
        InvalidUsage: The array has no elements, or the grid is too large.
    """
    grid = _Grid.of(shape, [*sources, *targets, *(box for _, _, box in moves)])
    parts, first = math.prod(len(bounds) - 1 for bounds in grid.bounds), len(sources)
    nranks = first + len(targets)
    if not math.prod(shape):
        raise InvalidUsage(
            f"cannot build a re-sharding: an array of {tuple(shape)} has no elements"
        )
    if parts * nranks > MAX_CELLS:
        raise InvalidUsage(
            f"cannot build a re-sharding: {parts} chunks on {nranks} ranks; allowed are"
            f" {MAX_CELLS} chunks on all ranks together"
        )
    transfers: dict[tuple[int, int], list[Box]] = {}
    for source, target, box in moves:
        transfers.setdefault((source, target), []).append(box)
    channels: list[list[tuple[Step, ...]]] = []
    counts: Counter[int] = Counter()
    writers: dict[tuple[int, int], list[int]] = {}
    for (source, target), boxes in transfers.items():
        channel, counts[source] = counts[source], counts[source] + 1
        if channel == len(channels):
            channels.append([() for _ in range(nranks)])
        writers.setdefault((channel, target), []).append(source)
        puts = [
            put(inp(start, count), out(start, count), first + target)
            for box in boxes
            for start, count in _runs(grid.chunks(box))
        ]
        channels[channel][source] = (wait([first + target]), *puts, signal([first + target]))
    for (channel, target), peers in writers.items():
        channels[channel][first + target] = (signal(peers), wait(peers))
    return ReshardSchedule(
        schedule=Schedule(
            name="reshard",
            collective=Collective.BROADCAST,
            nranks=nranks,
            parts=parts,
            channels=tuple(map(tuple, channels)) or (tuple(() for _ in range(nranks)),),
            shards=_shards(grid, parts, sources, targets),
        ),
        bounds=grid.bounds,
        itemsize=itemsize,
    )


def _runs(chunks: Any) -> list[tuple[int, int]]:
    """Return (first chunk, chunks) of the runs of consecutive chunks."""
    if not len(chunks):
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(chunks) != 1) + 1])
    counts = np.diff(np.append(starts, len(chunks)))
    return list(zip(chunks[starts].tolist(), counts.tolist(), strict=True))


def _shards(
    grid: _Grid, parts: int, sources: Sequence[Box], targets: Sequence[Box]
) -> tuple[ChunkRanks, ...]:
    """Return the ranks that hold each chunk, and those that need it."""
    holders, needers = [0] * parts, [0] * parts
    for bits, boxes, first in ((holders, sources, 0), (needers, targets, len(sources))):
        for rank, box in enumerate(boxes):
            for chunk in grid.chunks(box):
                bits[chunk] |= 1 << (first + rank)
    return tuple(itertools.starmap(ChunkRanks, zip(holders, needers, strict=True)))
