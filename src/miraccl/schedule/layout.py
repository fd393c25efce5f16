"""Layout of chunks: parts of blocks, blocks of buffers, overlap of input and output in place.

The interpreter, the verifier and the executors share these definitions, so ``output[7]`` denotes
the same elements in all of them. In place, as NCCL defines it (NCCL user guide, "In-place
Operations"):

================================== ==========================================
all_reduce, broadcast, reduce      input and output are the same buffer
all_gather, gather                 the input is block ``rank`` of the output
reduce_scatter, scatter            the output is block ``rank`` of the input
barrier                            no buffers
all_to_all                         not defined: every block would move
================================== ==========================================

On a rank that has only one of the two buffers (scatter: ranks other than the root have no input),
nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miraccl.errors import InvalidUsage
from miraccl.schedule.ir import Buffer, Ref, Schedule
from miraccl.types import Collective

_SAME = frozenset((Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE))
_INPUT_INSIDE = frozenset((Collective.ALL_GATHER, Collective.GATHER))
_OUTPUT_INSIDE = frozenset((Collective.REDUCE_SCATTER, Collective.SCATTER))


def part_bounds(count: int, part: int, parts: int) -> tuple[int, int]:
    """Return the first and one-past-last element of ``part`` in a block of ``count`` elements.

    Part sizes differ by at most one element; the larger parts come first.
    """
    size, extra = divmod(count, parts)
    start = part * size + min(part, extra)
    return start, start + size + (part < extra)


def in_place_forms(collective: Collective) -> tuple[bool, ...]:
    """Return the values of ``in_place`` that ``collective`` supports."""
    return (False,) if collective is Collective.ALL_TO_ALL else (False, True)


def check_in_place(collective: Collective) -> None:
    """Raise ``InvalidUsage`` if ``collective`` has no in-place form."""
    if True not in in_place_forms(collective):
        raise InvalidUsage(
            "cannot run all_to_all in place: it has no in-place form, input and output must not"
            " overlap"
        )


@dataclass(frozen=True, slots=True)
class RankCells:
    """Numbering of one rank's chunks: chunk ``i`` of ``buffer`` is cell ``bases[buffer] + i``.

    Overlapping chunks share a cell. ``sizes`` counts the chunks of each buffer, ``cells`` all
    cells.
    """

    bases: tuple[int, int, int]
    sizes: tuple[int, int, int]
    cells: int

    def range_of(self, ref: Ref) -> range:
        start = self.bases[ref.buffer] + ref.index
        return range(start, start + ref.chunks)


def rank_cells(schedule: Schedule, rank: int, in_place: bool) -> RankCells:
    """Return the cells of ``rank``; raise ``InvalidUsage`` if there is no in-place form."""
    collective, parts = schedule.collective, schedule.parts
    ninp, nout, nscratch = sizes = tuple(schedule.chunks_at(buffer, rank) for buffer in Buffer)
    if in_place:
        check_in_place(collective)
    if in_place and ninp and nout:
        own = rank * parts
        if collective in _SAME:
            return RankCells((0, 0, ninp), (ninp, nout, nscratch), ninp + nscratch)
        if collective in _INPUT_INSIDE:
            return RankCells((own, 0, nout), (ninp, nout, nscratch), nout + nscratch)
        if collective in _OUTPUT_INSIDE:
            return RankCells((0, own, ninp), (ninp, nout, nscratch), ninp + nscratch)
    return RankCells((0, ninp, ninp + nout), (ninp, nout, nscratch), sum(sizes))


#: counts: uniform (an int), per block, or for all_to_all ``counts[sender][receiver]``
Counts = int | Sequence[int] | Sequence[Sequence[int]]


def block_counts(schedule: Schedule, rank: int, buffer: Buffer, counts: Counts) -> list[int]:
    """Return the number of elements in each block of ``rank``'s input or output.

    ``counts`` is one number for all blocks; or for all_gather and gather one per contributing rank,
    for reduce_scatter and scatter one per receiving rank, for all_to_all a matrix
    ``counts[sender][receiver]``.
    """
    collective, nranks = schedule.collective, schedule.nranks
    nblocks = schedule.chunks_at(buffer, rank) // schedule.parts
    if isinstance(counts, int):
        return [counts] * nblocks
    if len(counts) != nranks or collective not in (
        *_INPUT_INSIDE,
        *_OUTPUT_INSIDE,
        Collective.ALL_TO_ALL,
    ):
        raise InvalidUsage(
            f"cannot use {len(counts)} block counts for {collective.label} over {nranks} ranks"
        )
    table: list[int] = []
    if collective is Collective.ALL_TO_ALL:
        for peer in range(nranks):
            row = counts[rank] if buffer is Buffer.INPUT else counts[peer]
            if isinstance(row, int):
                raise InvalidUsage(
                    "all_to_all needs a matrix of block counts, counts[sender][receiver]"
                )
            table.append(row[peer] if buffer is Buffer.INPUT else row[rank])
        return table
    for number in counts:
        if not isinstance(number, int):
            raise InvalidUsage(f"{collective.label} needs one block count per rank")
        table.append(number)
    whole = (buffer is Buffer.OUTPUT) == (collective in _INPUT_INSIDE)
    if whole:
        return table[:nblocks]
    return [table[rank]] * nblocks
