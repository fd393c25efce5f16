"""Transfers between two ranks as schedules, and the extents that give their chunks memory.

Rank 0 is the initiator, rank 1 the target. The root has the bytes: rank 0 in a write, rank 1 in a
read. A transfer is a broadcast in place over these two ranks, by PUT or GET, and chunk ``i`` is
extent ``i``. As the rows of ``schedule.rows``, the extents are an argument of a run.

The target signals first, with its descriptor. A channel is a stream; a step of it is one call of
the method (a copy, a system call, a frame, a kernel). The last SIGNAL of the initiator ends its
accesses: it is the notification where there is one, and what ``deregister`` waits for.

Extents that overlap in the target are cut at their bounds, and a piece of memory that is written
twice has one chunk for each writer. The proof then finds a chunk stored where another one belongs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.schedule.interpret import UNDEFINED, run
from miraccl.schedule.ir import Buffer, Schedule, Step
from miraccl.schedule.layout import rank_cells
from miraccl.schedule.steps import copy, get, inp, out, put, scratch, signal, wait
from miraccl.schedule.text import dump, parse
from miraccl.schedule.verify import verify
from miraccl.types import Collective

INITIATOR, TARGET = 0, 1
#: int64 rows of (offset in the source, offset in the target, bytes)
ExtentTable = npt.NDArray[np.int64]

_EXTENT = re.compile(r"# extent (\d{1,9}) source (\d{1,19}) target (\d{1,19}) bytes (\d{1,19})")


@dataclass(frozen=True, kw_only=True, eq=False)
class TransferSchedule:
    """Schedule of a transfer with its extents.

    Attributes:
        schedule: Steps of the initiator and the target.
        extents: int64 array of shape (parts, 3): offset of each chunk in the memory of the root,
            offset in the memory of the other rank, bytes.
    """

    schedule: Schedule
    extents: ExtentTable

    @property
    def nbytes(self) -> int:
        """Bytes of all extents."""
        return int(self.extents[:, 2].sum())

    def step_bytes(self, step: Step) -> int:
        """Return the bytes of a step's chunks; 0 for SIGNAL and WAIT."""
        ref = step.dst or step.src
        if ref is None:
            return 0
        return int(self.extents[ref.index : ref.index + ref.chunks, 2].sum())

    def verify(self) -> None:
        """Prove that each extent is moved once, from its source, and that none overlaps another
        one in the target.

        Raises:
            ScheduleError: The message names step and chunk; ``extents`` has the chunk's memory.
        """
        if self.extents.shape != (self.schedule.parts, 3):
            raise ScheduleError(
                f"{self.schedule.name}: {len(self.extents)} extents for {self.schedule.parts}"
                " chunks"
            )
        order = np.argsort(self.extents[:, 1], kind="stable")
        starts, sizes = self.extents[order, 1], self.extents[order, 2]
        verify(self.schedule, in_place=True)
        overlaps = np.flatnonzero(starts[1:] < starts[:-1] + sizes[:-1])
        if len(overlaps):
            first, second = int(order[overlaps[0]]), int(order[overlaps[0] + 1])
            raise ScheduleError(
                f"{self.schedule.name}: chunks {first} and {second} overlap in the target"
            )

    def interpret(self, source: Any, target: Any) -> Any:
        """Return the target's memory after the transfer: the meaning of the schedule.

        Args:
            source, target: Flat uint8 arrays of the two memories; they are not changed.
        """
        memory = []
        for rank in (INITIATOR, TARGET):
            cells = rank_cells(self.schedule, rank, True)
            row: list[Any] = [UNDEFINED] * cells.cells
            if rank == self.schedule.root:
                row[: cells.sizes[Buffer.INPUT]] = [
                    source[start : start + nbytes] for start, _, nbytes in self.extents
                ]
            memory.append(row)
        chunks = run(self.schedule, memory, _no_reduction, in_place=True)
        result = np.array(target, np.uint8)
        for chunk, (_, start, nbytes) in zip(
            chunks[1 - self.schedule.root], self.extents, strict=True
        ):
            result[start : start + nbytes] = chunk
        return result

    def dump(self) -> str:
        """Return the text form: that of the schedule, with a comment line per extent."""
        lines = [
            f"# extent {number} source {source} target {target} bytes {nbytes}"
            for number, (source, target, nbytes) in enumerate(self.extents.tolist())
        ]
        return "\n".join([dump(self.schedule).rstrip("\n"), *lines]) + "\n"

    @classmethod
    def parse(cls, text: str) -> TransferSchedule:
        """Parse the result of ``dump``. Raises ``ScheduleError``."""
        schedule, rows = parse(text), list[list[int]]()
        for line in text.splitlines():
            if (match := _EXTENT.fullmatch(line.strip())) is not None:
                number, *row = (int(word) for word in match.groups())
                if number != len(rows) or max(row) >= 1 << 62:
                    raise ScheduleError(f"cannot parse {line!r}: expected extent {len(rows)}")
                rows.append(row)
        if len(rows) != schedule.parts or schedule.nranks != 2:
            raise ScheduleError(
                f"cannot parse a transfer: {len(rows)} extents for {schedule.parts} chunks, "
                f"{schedule.nranks} ranks"
            )
        return cls(schedule=schedule, extents=np.array(rows, np.int64).reshape(-1, 3))


def _no_reduction(operands: list[Any]) -> Any:
    raise ScheduleError("a transfer does not reduce")


def build(
    kind: str, table: Any, counts: Sequence[Sequence[int]], *, staged: bool = False
) -> TransferSchedule:
    """Return the schedule of a transfer.

    Args:
        kind: ``"write"`` or ``"read"``.
        table: Extents as an int64 array of shape (n, 3): offset in the source, offset in the
            target, bytes; no extent is empty.
        counts: For each stream the number of extents of each call, in the order of ``table``.
        staged: The initiator's memory is copied to or from scratch.

    Raises:
        InvalidUsage: ``kind`` is another word, there are no extents, or ``counts`` has another sum.
    """
    if kind not in ("read", "write"):
        raise InvalidUsage(f"cannot build a transfer: kind is {kind!r}; allowed are read and write")
    table = np.asarray(table, np.int64).reshape(-1, 3)
    given = sum(sum(calls) for calls in counts)
    if not len(table) or len(table) != given:
        raise InvalidUsage(f"cannot build a transfer: {len(table)} extents, {given} in its calls")
    extents, targets, ends = _number_chunks(table)
    programs, first, number = [], 0, 0
    for calls in counts:
        moves: list[_Move] = []
        for count in calls:
            number += count
            moves += _moves(targets[first : int(ends[number - 1])], first)
            first = int(ends[number - 1])
        programs.append((_initiator(kind, moves, staged), (signal([INITIATOR]), wait([INITIATOR]))))
    return TransferSchedule(
        schedule=Schedule(
            name=kind,
            collective=Collective.BROADCAST,
            nranks=2,
            parts=len(extents),
            channels=tuple(programs),
            root=INITIATOR if kind == "write" else TARGET,
            scratch_chunks=len(extents) if staged else 0,
        ),
        extents=extents,
    )


#: (first source chunk, first target chunk, chunks) of a step
_Move = tuple[int, int, int]


def _number_chunks(table: ExtentTable) -> tuple[ExtentTable, npt.NDArray[np.int64], Any]:
    """Return the extents of all chunks, in the order of ``table``; the chunk in which each one
    belongs; and for each row of ``table`` the number of chunks up to its end.

    A chunk belongs in itself, except where an earlier one has the same memory of the target.
    """
    starts, sizes = table[:, 1], table[:, 2]
    count = len(table)
    order = np.argsort(starts, kind="stable")
    if (starts[order][1:] >= (starts + sizes)[order][:-1]).all():
        return table.copy(), np.arange(count), np.arange(1, count + 1)
    bounds = np.unique(np.concatenate([starts, starts + sizes]))
    low, high = np.searchsorted(bounds, starts), np.searchsorted(bounds, starts + sizes)
    rows, targets, owners = list[tuple[int, int, int]](), list[int](), dict[int, int]()
    for (source, start, _), first, last in zip(table.tolist(), low.tolist(), high.tolist()):
        for piece in range(first, last):
            begin, end = int(bounds[piece]), int(bounds[piece + 1])
            targets.append(owners.setdefault(begin, len(rows)))
            rows.append((source + begin - start, begin, end - begin))
    return np.array(rows, np.int64), np.array(targets, np.int64), np.cumsum(high - low)


def _moves(targets: npt.NDArray[np.int64], first: int) -> list[_Move]:
    """Return the steps of one call: one for each run of chunks that are consecutive on both
    sides. ``first``: number of the call's first source chunk.
    """
    if not len(targets):
        return []
    cuts = [0, *(np.flatnonzero(np.diff(targets) != 1) + 1).tolist(), len(targets)]
    return [(first + a, int(targets[a]), b - a) for a, b in itertools.pairwise(cuts)]


def _initiator(kind: str, moves: Sequence[_Move], staged: bool) -> tuple[Step, ...]:
    """Return the steps of the initiator on one channel."""
    if kind == "write":
        before = [copy(inp(src, n), scratch(src, n)) for src, _, n in moves] if staged else []
        from_here = scratch if staged else inp
        moved = [put(from_here(src, n), out(dst, n), TARGET) for src, dst, n in moves]
        return (wait([TARGET]), *before, *moved, signal([TARGET]))
    to_here = scratch if staged else out
    moved = [get(inp(src, n), to_here(dst, n), TARGET) for src, dst, n in moves]
    after = [copy(scratch(dst, n), out(dst, n)) for _, dst, n in moves] if staged else []
    return (wait([TARGET]), *moved, signal([TARGET]), *after)
