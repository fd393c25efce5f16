"""Tables of rows: the argument of a run that a schedule with ``tables`` needs.

The block of such a schedule is an array of rows, of which most are zero on most ranks. A rank's
rows are those in which any bit of its input is set. The union of all ranks' rows is cut into
``schedule.parts`` contiguous lists, the parts, and table ``t`` lists those rows of a part that are
rows of the ranks ``schedule.tables[t]``. A row that a table does not list is zero in every sum of
those ranks, so a message or a sum over them needs no other rows. This holds for all tables at once,
which is how the verifier proves a schedule before there are any: the ranks whose contributions a
chunk holds must be ranks of every table by which it is read or stored (``proof``).

``check_tables`` checks what is left, the tables of one run: rows in range, each at most once, parts
disjoint, and the rows of fewer ranks among those of more. ``select_rows`` makes tables from bitmaps
and is the specification of the compiled version (``executor.cpu.kernels.row_scan``).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.schedule.interpret import UNDEFINED, InterpreterState, Shuffle, run
from miraccl.schedule.ir import Buffer, Op, Ref, Schedule
from miraccl.schedule.layout import rank_cells
from miraccl.schedule.reduction import Array, fold
from miraccl.schedule.steps import sent_table
from miraccl.types import RedOp

RowList = npt.NDArray[np.int64]
Bitmaps = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class RowTables:
    """Rows of one run.

    Attributes:
        count: Elements of the block.
        row: Elements of a row; the last one may be shorter.
        lists: ``lists[table][part]``, the rows of a table in a part, ascending.
    """

    count: int
    row: int
    lists: tuple[tuple[RowList, ...], ...]

    @property
    def nrows(self) -> int:
        """Rows of the block."""
        return -(-self.count // self.row)

    def elements(self, table: int, part: int) -> npt.NDArray[np.int64]:
        """Return the indices of the elements of a table's rows, in order."""
        rows = self.lists[table][part]
        found = (rows[:, None] * self.row + np.arange(self.row)).ravel()
        return found[found < self.count]


def union_table(schedule: Schedule) -> int:
    """Return the number of the table that lists the rows of all ranks."""
    everybody = (1 << schedule.nranks) - 1
    if everybody not in schedule.tables:
        raise InvalidUsage(
            f"cannot use the tables of {schedule.name}: none of them lists the rows of all ranks"
        )
    return schedule.tables.index(everybody)


def select_rows(schedule: Schedule, bitmaps: Bitmaps, row: int, count: int) -> RowTables:
    """Return the tables of a run from ``bitmaps[rank, row]``, true for rows that are not zero."""
    union = np.flatnonzero(bitmaps.any(axis=0))
    parts = [union[low:high] for low, high in part_ranges(len(union), schedule.parts)]
    lists = []
    for ranks in schedule.tables:
        members = [rank for rank in range(schedule.nranks) if ranks >> rank & 1]
        held = np.flatnonzero(np.any(bitmaps[members], axis=0))
        lists.append(tuple(part[np.isin(part, held)] for part in parts))
    return RowTables(count=count, row=row, lists=tuple(lists))


def part_ranges(length: int, parts: int) -> list[tuple[int, int]]:
    """Return the first and one-past-last position of each part in a list of ``length`` rows."""
    ends = [length * part // parts for part in range(parts + 1)]
    return list(pairwise(ends))


def check_tables(schedule: Schedule, tables: RowTables) -> None:
    """Check the tables of one run. Raises ``InvalidUsage`` naming table, part and row."""
    if len(tables.lists) != len(schedule.tables):
        raise InvalidUsage(
            f"cannot run {schedule.name}: {len(tables.lists)} tables of rows are given,"
            f" {len(schedule.tables)} are needed"
        )
    union = union_table(schedule)
    listed: set[int] = set()
    for part in range(schedule.parts):
        held = [set(map(int, lists[part])) for lists in tables.lists]
        for number, lists in enumerate(tables.lists):
            rows = lists[part]
            where = f"cannot run {schedule.name}: table {number}, part {part}"
            if len(rows) and not (rows[0] >= 0 and rows[-1] < tables.nrows):
                wrong = rows[0] if rows[0] < 0 else rows[-1]
                raise InvalidUsage(f"{where}: row {wrong} is not in 0..{tables.nrows - 1}")
            if (np.diff(rows) <= 0).any():
                at = int(np.flatnonzero(np.diff(rows) <= 0)[0])
                raise InvalidUsage(
                    f"{where}: row {rows[at + 1]} follows row {rows[at]}; rows must ascend"
                )
        for number in range(len(tables.lists)):
            where = f"cannot run {schedule.name}: table {number}, part {part}"
            for other, ranks in enumerate(schedule.tables):
                fewer = schedule.tables[number] & ~ranks == 0
                if fewer and (missing := held[number] - held[other]):
                    raise InvalidUsage(
                        f"{where}: row {min(missing)} is missing in table {other}, which lists the"
                        " rows of more ranks"
                    )
        if twice := listed & held[union]:
            raise InvalidUsage(
                f"cannot run {schedule.name}: row {min(twice)} is in two parts of table {union}"
            )
        listed |= held[union]


def by_rows(schedule: Schedule, name: str) -> Schedule:
    """Return a schedule of whole chunks as one of rows.

    Each reference gets the table of the ranks whose contributions its chunks hold there: that of
    one rank for inputs, more for partial sums. ``verify`` proves the result.

    Raises:
        InvalidUsage: A step sends a sum that it does not store (RECV_REDUCE_SEND).
    """
    if Op.RECV_REDUCE_SEND in schedule.ops:
        raise InvalidUsage(
            f"cannot run {schedule.name} by rows: RECV_REDUCE_SEND stores no sum that a table could"
            " be named for"
        )
    tables: dict[int, int] = {1 << rank: rank for rank in range(schedule.nranks)}
    channels = [[list(steps) for steps in ranks] for ranks in schedule.channels]
    cells = [rank_cells(schedule, rank, False) for rank in range(schedule.participants)]
    memory: list[list[Any]] = [[UNDEFINED] * row.cells for row in cells]
    for rank, (row, cell) in enumerate(zip(memory, cells, strict=True)):
        base, size = cell.bases[Buffer.INPUT], cell.sizes[Buffer.INPUT]
        row[base : base + size] = [1 << rank] * size
    state = InterpreterState(schedule, memory, cells, lambda held: _join(held), None, False)

    def named(ref: Ref | None, owner: int) -> Ref | None:
        if ref is None:
            return None
        ranks = _join(state.load(owner, ref))
        return replace(ref, table=tables.setdefault(ranks, len(tables)))

    going = True
    while going:
        going = False
        for channel, ranks in enumerate(channels):
            for rank, steps in enumerate(ranks):
                number = state.position[channel][rank]
                if number == len(steps) or not state.can_run(steps[number], channel, rank):
                    continue
                step = steps[number]
                src = named(step.src, step.recv_peer or 0 if step.op is Op.GET else rank)
                state.try_step(channel, rank)
                to = step.send_peer if step.op is Op.PUT and step.send_peer is not None else rank
                steps[number] = replace(step, src=src, dst=named(step.dst, to))
                going = True
    if problem := state.describe_unfinished():
        raise ScheduleError(f"{schedule.name}: {problem}")
    union = (1 << schedule.nranks) - 1
    tables.setdefault(union, len(tables))
    return replace(
        schedule,
        name=name,
        channels=tuple(tuple(tuple(steps) for steps in ranks) for ranks in channels),
        tables=tuple(tables),
    )


def _join(held: Sequence[int]) -> int:
    total = 0
    for ranks in held:
        total |= ranks
    return total


def operand_tables(schedule: Schedule) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """Return the tables of what each receiving step (channel, rank, position) receives.

    One table per sender; RECV_REDUCE_ALL has one per peer in its order, its own being that of
    ``src``. A FIFO keeps the order of messages, so the n-th receive gets the n-th message.
    """
    found: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for channel, ranks in enumerate(schedule.channels):
        sent: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
        for rank, steps in enumerate(ranks):
            for step in steps:
                if step.op.sends and step.send_peer is not None:
                    table = sent_table(step)
                    sent[rank, step.send_peer].append(-1 if table is None else table)
        for rank, steps in enumerate(ranks):
            for number, step in enumerate(steps):
                if not step.op.receives:
                    continue
                own = step.src.table if step.src is not None else None
                if step.op is Op.RECV_REDUCE_ALL:
                    sources = step.peers
                else:
                    sources = tuple(step.senders(rank))
                found[channel, rank, number] = tuple(
                    (-1 if own is None else own) if peer == rank else sent[peer, rank].popleft()
                    for peer in sources
                )
    return found


def interpret_rows(
    schedule: Schedule,
    inputs: Sequence[Array],
    tables: RowTables,
    *,
    op: RedOp = RedOp.SUM,
    shuffle: Shuffle | None = None,
) -> list[Array]:
    """Run an all_reduce of rows on one flat array per rank and return each rank's output.

    The rows of the union go through the schedule, each message without the rows that its table does
    not list; all other rows of the outputs are zero. Defines what executors must compute.
    """
    union = union_table(schedule)
    wholes = [tables.elements(union, part) for part in range(schedule.parts)]
    masks = [
        [np.isin(whole, tables.elements(table, part)) for part, whole in enumerate(wholes)]
        for table in range(len(schedule.tables))
    ]

    def restrict(value: Array, part: int, table: int) -> Array:
        return np.where(masks[table][part], value, np.zeros((), value.dtype))

    def combine(operands: list[Any]) -> Array:
        divisor = schedule.nranks if op is RedOp.AVG and len(operands) == schedule.nranks else None
        return fold(operands, op, divisor)

    memory: list[list[Any]] = []
    for rank in range(schedule.participants):
        cells = rank_cells(schedule, rank, False)
        row: list[Any] = [UNDEFINED] * cells.cells
        if cells.sizes[Buffer.INPUT]:
            row[: cells.sizes[Buffer.INPUT]] = [inputs[rank][whole] for whole in wholes]
        memory.append(row)
    results = run(schedule, memory, combine, restrict=restrict, shuffle=shuffle)
    outputs = []
    for chunks in results[: schedule.nranks]:
        output = np.zeros_like(inputs[0])
        for whole, chunk in zip(wholes, chunks, strict=True):
            output[whole] = chunk
        outputs.append(output)
    return outputs
