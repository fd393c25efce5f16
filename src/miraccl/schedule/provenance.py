"""Provenance of chunks and access history of cells, the state of the verifier.

The content of a chunk is a symbol: the input chunk it stems from and the set of ranks whose
contributions it holds. For each cell the last write and the reads since are stored as (channel,
rank, time of that rank). This is sufficient to find two unordered accesses (epochs of FastTrack:
Flanagan and Freund, PLDI 2009).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import numpy as np

from miraccl.errors import ScheduleError
from miraccl.schedule.ir import Buffer, Ref, Schedule
from miraccl.schedule.layout import rank_cells
from miraccl.schedule.text import format_location
from miraccl.types import Collective

#: limit of the cells of all ranks in a proof, because a text may contain any number
MAX_CELLS = 1 << 24

#: rows of a cell that was not written by rows: all of them
ALL_ROWS = -1

#: vector clock: latest time of each rank that happened before the owner's current step
VectorClock = np.ndarray[Any, np.dtype[np.int32]]


class Symbol(NamedTuple):
    """Content of a chunk: input chunk ``chunk`` summed over the ranks in bit set ``ranks``."""

    chunk: int
    ranks: int

    def __str__(self) -> str:
        return f"input[{self.chunk}] of ranks {rank_list(self.ranks)}"


class Access(NamedTuple):
    """Access to a cell by step ``number`` of ``rank`` on ``channel``, at that rank's ``time``."""

    channel: int
    rank: int
    time: int
    number: int


class StepViolation(Exception):
    """Rule broken by the step in progress; the verifier adds the location."""


def rank_list(ranks: int) -> str:
    """Return the ranks of a bit set as text, such as ``0,2,3``."""
    return ",".join(str(rank) for rank in range(ranks.bit_length()) if ranks >> rank & 1)


def add(first: Symbol, second: Symbol) -> Symbol:
    """Return ``first (+) second``; raise ``StepViolation`` for different chunks or common ranks."""
    if first.chunk != second.chunk:
        raise StepViolation(f"reduces input[{first.chunk}] with input[{second.chunk}]")
    if twice := first.ranks & second.ranks:
        raise StepViolation(
            f"adds the contribution of rank {rank_list(twice)} to input[{first.chunk}] twice"
        )
    return Symbol(first.chunk, first.ranks | second.ranks)


def add_in_rank_order(first: Symbol, second: Symbol) -> Symbol:
    """Add as ``add`` does; require rank order: ``first`` holds ranks 0 to k - 1, ``second`` rank k
    alone.

    If all additions of a run satisfy this, so do those inside ``first``, and every complete sum is
    ``((x0 + x1) + x2) + ...``. Sides matter: of two NaNs, or of two zeros under ``MIN``, the result
    may be the left operand.
    """
    total = add(first, second)
    # Of two disjoint bit sets only {0 .. k-1} and {k} satisfy this equation.
    if first.ranks + 1 != second.ranks:
        from_zero = first.ranks & (first.ranks + 1) == 0
        wanted = (
            f"rank {first.ranks.bit_length()} alone is next"
            if from_zero
            else "a sum starts with rank 0 and includes every rank in between"
        )
        raise StepViolation(f"adds {second} to {first}; in rank order {wanted}")
    return total


def expected_symbol(schedule: Schedule, rank: int, chunk: int) -> Symbol:
    """Return the symbol that output chunk ``chunk`` of ``rank`` holds when the collective is
    complete.
    """
    parts, all_ranks = schedule.parts, (1 << schedule.nranks) - 1
    block, part = divmod(chunk, parts)
    match schedule.collective:
        case Collective.ALL_REDUCE | Collective.REDUCE:
            return Symbol(chunk, all_ranks)
        case Collective.REDUCE_SCATTER:
            return Symbol(rank * parts + part, all_ranks)
        case Collective.ALL_GATHER | Collective.GATHER:
            return Symbol(part, 1 << block)
        case Collective.BROADCAST:
            return Symbol(chunk, 1 << schedule.root)
        case Collective.SCATTER:
            return Symbol(rank * parts + part, 1 << schedule.root)
        case Collective.ALL_TO_ALL:
            return Symbol(rank * parts + part, 1 << block)
        case _:
            raise ScheduleError(f"{schedule.name}: {schedule.collective.label} has no schedule")


class ProofMemory:
    """All cells of all ranks under global numbers, with expected content and access history."""

    def __init__(self, schedule: Schedule, in_place: bool) -> None:
        self.schedule = schedule
        layout = [rank_cells(schedule, rank, in_place) for rank in range(schedule.participants)]
        if sum(cells.cells for cells in layout) > MAX_CELLS:
            raise ScheduleError(f"{schedule.name}: cannot verify more than {MAX_CELLS} chunks")
        self.bases: list[
            tuple[int, int, int]
        ] = []  # per rank: first cell of input, output, scratch
        self.starts: list[int] = []
        total = 0
        for cells in layout:
            inp, out, scratch = cells.bases
            self.bases.append((total + inp, total + out, total + scratch))
            self.starts.append(total)
            total += cells.cells
        self.symbols: list[Symbol | None] = [None] * total
        self.expected: list[Symbol | None] = [None] * total  # for cells of outputs
        self.scratch_part = [-1] * total  # for cells of scratch
        self.writer: list[Access | None] = [None] * total
        #: ranks whose rows a cell holds, as bits; inputs hold all rows, the zero ones included
        self.rows: list[int] = [ALL_ROWS] * total
        self.readers: list[dict[tuple[int, int], Access] | None] = [
            None
        ] * total  # since the last write, by (channel, rank)
        for rank, cells in enumerate(layout):
            ninp, nout, nscratch = cells.sizes
            inp, out, scratch = self.bases[rank]
            if schedule.shards:
                self._enter_shards(rank)
            else:
                self.symbols[inp : inp + ninp] = [Symbol(chunk, 1 << rank) for chunk in range(ninp)]
                self.expected[out : out + nout] = [
                    expected_symbol(schedule, rank, chunk) for chunk in range(nout)
                ]
            self.scratch_part[scratch : scratch + nscratch] = [
                chunk % schedule.parts for chunk in range(nscratch)
            ]

    def _enter_shards(self, rank: int) -> None:
        """Enter the chunks that a rank holds, and those that it needs.

        All holders of a chunk have the same: that of the array, which counts as the root's.
        """
        inp, out, _ = self.bases[rank]
        for chunk, ranks in enumerate(self.schedule.shards):
            symbol = Symbol(chunk, 1 << self.schedule.root)
            if ranks.holders >> rank & 1:
                self.symbols[inp + chunk] = symbol
            if ranks.targets >> rank & 1:
                self.expected[out + chunk] = symbol

    def cells(self, rank: int, ref: Ref) -> range:
        start = self.bases[rank][ref.buffer] + ref.index
        return range(start, start + ref.chunks)

    def owner(self, cell: int) -> int:
        return bisect_right(self.starts, cell) - 1

    def name(self, cell: int) -> str:
        """Return the name of a cell, such as ``output[3] of rank 1``; output takes precedence over
        input.
        """
        rank = self.owner(cell)
        for buffer in (Buffer.OUTPUT, Buffer.INPUT, Buffer.SCRATCH):
            index = cell - self.bases[rank][buffer]
            if 0 <= index < self.schedule.chunks_at(buffer, rank):
                return f"{buffer.name.lower()}[{index}] of rank {rank}"
        return f"cell {cell}"

    def track_read(self, cell: int, reader: Access, clock: VectorClock | None) -> None:
        """Record a read; raise ``StepViolation`` if the last write is unordered to it.

        ``clock`` is the reader's vector clock, None if clocks are not tracked.
        """
        writer = self.writer[cell]
        if writer is not None:
            self._require_before(writer, reader, clock, cell, "reads", "writes")
        readers = self.readers[cell]
        if readers is None:
            readers = self.readers[cell] = {}
        readers[reader.channel, reader.rank] = reader

    def track_write(self, cell: int, writer: Access, clock: VectorClock | None) -> None:
        """Record a write; raise ``StepViolation`` if an earlier access is unordered to it."""
        before = self.writer[cell]
        if before is not None:
            self._require_before(before, writer, clock, cell, "writes", "writes")
        for reader in (self.readers[cell] or {}).values():
            self._require_before(reader, writer, clock, cell, "writes", "reads")
        # All earlier reads are ordered before this write, so later writes need only be ordered
        # after this one.
        self.readers[cell] = None

    def _require_before(
        self, first: Access, then: Access, clock: VectorClock | None, cell: int, does: str, did: str
    ) -> None:
        if first.channel == then.channel and (
            first.rank == then.rank or (clock is not None and clock[first.rank] >= first.time)
        ):
            return
        other = format_location(self.schedule, first.channel, first.rank, first.number)
        why = (
            "channels are unordered"
            if first.channel != then.channel
            else "the two accesses are unordered"
        )
        raise StepViolation(f"{does} {self.name(cell)}, which {other} {did}: {why}")
