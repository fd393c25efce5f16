"""Schedules of rows: proof for all tables, the check of one run's tables, text, interpretation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.schedule import catalog, row_schedules
from miraccl.schedule.ir import Op, Schedule, Step
from miraccl.schedule.rows import by_rows, check_tables, interpret_rows, select_rows
from miraccl.schedule.text import dump, parse
from miraccl.schedule.verify import verify
from miraccl.types import Collective, RedOp


def test_built_for_every_number_of_ranks() -> None:
    for nranks in (*range(1, 10), 16, 33):
        schedule = row_schedules.build(nranks)
        verify(schedule, rank_ordered=True)
        verify(schedule, in_place=True, rank_ordered=True)
        assert parse(dump(schedule)) == schedule
    for nranks, segments in ((1, 4), (2, 16), (3, 4), (8, 16), (32, 4)):
        schedule = row_schedules.build(nranks, segments)
        verify(schedule, rank_ordered=True)
        verify(schedule, in_place=True, rank_ordered=True)
        assert schedule.parts == (nranks * segments if nranks > 1 else 1)


def test_segments_of_a_sum() -> None:
    kib = 1 << 10
    assert row_schedules.count_segments(2, 100 * kib) == 1
    assert row_schedules.count_segments(2, 4 * 2 * 32 * kib) == 4
    assert row_schedules.count_segments(2, 1 << 30) == 16
    assert row_schedules.count_segments(32, 1 << 30) == 4
    assert row_schedules.count_segments(64, 1 << 30) == 1


@pytest.mark.parametrize("algo", ["one_shot", "two_shot", "overlapped"])
def test_sum_of_rows(algo: str) -> None:
    rng = np.random.default_rng(3)
    for nranks in (1, 2, 3, 5):
        if algo == "overlapped":
            schedule = row_schedules.build(nranks, 4)
        else:
            schedule = by_rows(catalog.build(algo, Collective.ALL_REDUCE, nranks), "rows")
        count, row = 211, 7
        bitmaps = rng.random((nranks, -(-count // row))) < 0.4
        masks = np.repeat(bitmaps, row, axis=1)[:, :count]
        inputs = [np.where(m, rng.integers(-9, 9, count), 0).astype(np.int32) for m in masks]
        tables = select_rows(schedule, bitmaps, row, count)
        check_tables(schedule, tables)
        for op, want in ((RedOp.SUM, sum(inputs)), (RedOp.MAX, np.max(inputs, axis=0))):
            for output in interpret_rows(schedule, inputs, tables, op=op):
                assert np.array_equal(output, want), (algo, nranks, op)


def _changed(schedule: Schedule, rank: int, number: int, step: Step) -> Schedule:
    channels = [[list(steps) for steps in ranks] for ranks in schedule.channels]
    channels[0][rank][number] = step
    return replace(
        schedule, channels=tuple(tuple(tuple(steps) for steps in ranks) for ranks in channels)
    )


def test_refuses_tables_that_lack_rows() -> None:
    schedule = row_schedules.build(3)
    steps = schedule.channels[0][0]
    send = next(i for i, step in enumerate(steps) if step.op is Op.SEND)
    src = steps[send].src
    assert src is not None
    other = replace(steps[send], src=replace(src, table=1))
    with pytest.raises(ScheduleError, match=r"table 1 has no rows of ranks 0, which input\[1\]"):
        verify(_changed(schedule, 0, send, other))
    fold = next(i for i, step in enumerate(steps) if step.op is Op.RECV_REDUCE_ALL)
    dst = steps[fold].dst
    assert dst is not None
    with pytest.raises(ScheduleError, match=r"table 0 has no rows of ranks 1,2"):
        verify(_changed(schedule, 0, fold, replace(steps[fold], dst=replace(dst, table=0))))
    last = steps[-1]
    assert last.dst is not None
    with pytest.raises(ScheduleError, match="stores the rows of table 0, but has those of table 3"):
        verify(_changed(schedule, 0, -1, replace(last, dst=replace(last.dst, table=0))))
    with pytest.raises(ScheduleError, match="names table 9; the schedule has 4 tables"):
        verify(_changed(schedule, 0, -1, replace(last, dst=replace(last.dst, table=9))))
    with pytest.raises(ScheduleError, match="names no table of rows"):
        verify(_changed(schedule, 0, -1, replace(last, dst=replace(last.dst, table=None))))


def test_refuses_stale_rows() -> None:
    # The second step of recursive doubling reads more rows than the first one wrote.
    dense = catalog.build("recursive_doubling", Collective.ALL_REDUCE, 4)
    with pytest.raises(ScheduleError, match="which was written without them"):
        verify(by_rows(dense, "rows"))
    with pytest.raises(InvalidUsage, match="RECV_REDUCE_SEND stores no sum"):
        by_rows(catalog.build("ring", Collective.ALL_REDUCE, 3), "rows")


def test_tables_of_a_run_are_checked() -> None:
    schedule = row_schedules.build(2)
    bitmaps = np.array([[1, 1, 0, 0, 1], [0, 1, 0, 1, 0]], bool)
    good = select_rows(schedule, bitmaps, 4, 18)
    check_tables(schedule, good)

    def with_list(table: int, part: int, rows: list[int]) -> object:
        lists = [list(parts) for parts in good.lists]
        lists[table][part] = np.array(rows, np.int64)
        return replace(good, lists=tuple(map(tuple, lists)))

    for table, part, rows, text in (
        (2, 1, [3, 5], "row 5 is not in 0..4"),
        (0, 0, [1, 0], "row 0 follows row 1; rows must ascend"),
        (0, 0, [1, 1], "row 1 follows row 1"),
        (0, 0, [0, 1, 3], "row 3 is missing in table 2"),
        (2, 1, [1, 3, 4], "row 1 is in two parts of table 2"),
    ):
        with pytest.raises(InvalidUsage, match=text):
            check_tables(schedule, with_list(table, part, rows))  # type: ignore[arg-type]
    with pytest.raises(InvalidUsage, match="2 tables of rows are given, 3 are needed"):
        check_tables(schedule, replace(good, lists=good.lists[:2]))


def test_text_of_tables() -> None:
    text = dump(row_schedules.build(2))
    assert "table 2 ranks 0 1" in text
    assert "send input[1]@0 to 1" in text
    with pytest.raises(ScheduleError, match="expected a table such as: table 0 ranks"):
        parse(text.replace("table 0", "table 4"))
    with pytest.raises(ScheduleError, match="rank 70000 is too large"):
        parse(text.replace("table 0 ranks 0", "table 0 ranks 70000"))
