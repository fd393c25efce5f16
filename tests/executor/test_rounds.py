"""Signals are left out of rounds together with their waits, and only where nothing hangs on their
order.
"""

from __future__ import annotations

import pytest

from miraccl.executor.cpu.kernels.layout import EVERY_ROUND, FIRST_ROUND, LAST_ROUND, NEVER
from miraccl.executor.cpu.rounds import rounds_of
from miraccl.schedule import catalog
from miraccl.schedule.ir import Step
from miraccl.schedule.steps import barrier, copy, inp, one_channel, out, signal, wait
from miraccl.types import Collective

MOVE = copy(inp(0), out(0))
LETTERS = {FIRST_ROUND: "f", EVERY_ROUND: ".", LAST_ROUND: "l", NEVER: "n"}


def letters(*programs: list[Step], opened: bool = False) -> list[str]:
    schedule = one_channel("mine", Collective.ALL_REDUCE, programs)
    return ["".join(LETTERS[when] for when in row) for row in rounds_of(schedule, signalled=opened)]


def test_what_says_ready_and_what_says_done_are_done_once() -> None:
    for peers in (2, 5):
        rows = rounds_of(
            catalog.build("two_shot_put", Collective.ALL_REDUCE, peers), signalled=False
        )
        assert {(row[:2] == [FIRST_ROUND] * 2, row[-2:] == [LAST_ROUND] * 2) for row in rows} == {
            (True, True)
        }
        assert {when for row in rows for when in row[2:-2]} <= {EVERY_ROUND}
    around = [signal([1]), wait([1]), MOVE, barrier()], [signal([0]), wait([0]), MOVE, barrier()]
    assert letters(*around) == ["ff.l"] * 2
    assert letters(*around, opened=True) == ["nn.l"] * 2


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        (([signal([1]), MOVE, wait([1])], [wait([0]), MOVE, signal([0])]), ["f.l", "f.l"]),
        (
            ([signal([1]), MOVE], [MOVE, wait([0]), MOVE]),
            ["..", "..."],
        ),  # a signal before data for a wait between data
        (
            ([MOVE, signal([1])], [wait([0]), MOVE]),
            ["..", ".."],
        ),  # one after data for a wait before data: a piece at a time
        (([MOVE, barrier()], [barrier(), MOVE]), ["..", ".."]),
        (([signal([1]), barrier(), MOVE], [wait([0]), MOVE, barrier()]), ["f..", "f.."]),
        (
            ([wait([1]), MOVE, signal([1])], [signal([0]), wait([0])]),
            ["f.l", "fl"],
        ),  # rank 1 has no data
        (([signal([1]), barrier()], [wait([0]), barrier()]), ["ff", "ff"]),  # nobody has
        (([signal([1]), signal([1]), MOVE], [wait([0]), MOVE, wait([0])]), ["f..", "f.."]),
        (
            ([MOVE, signal([1])], [wait([0]), signal([2])], [wait([1]), MOVE]),
            ["..", "..", ".."],
        ),  # handed on by rank 1
        (
            ([signal([1, 2]), MOVE], [wait([0]), MOVE], [MOVE, wait([0]), MOVE]),
            ["..", "..", "..."],
        ),  # one of a step's two ends
        (
            (
                [signal([1]), MOVE],
                [wait([0]), wait([2]), signal([2]), MOVE],
                [MOVE, signal([1]), wait([1])],
            ),
            ["f.", "f...", "..."],
        ),
    ],
)
def test_a_signal_and_its_wait_are_done_in_the_same_rounds(
    programs: tuple[list[Step], ...], expected: list[str]
) -> None:
    assert letters(*programs) == expected
