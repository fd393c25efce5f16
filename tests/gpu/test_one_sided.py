"""Schedules with steps on peers' memory, through the public API; test_emulated.py runs the built-in
ones.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import one_sided_ranks
from tests.gpu.emulator import folder, needs_compiler
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.multiprocess, needs_compiler]


def run(target: Any, nranks: int) -> list[Any]:
    """Run ranks with two multiprocessors: few blocks, each with several rounds."""
    return run_ranks(
        target,
        nranks,
        env={"MIRACCL_SMS": "2", "MIRACCL_EMULATOR_CACHE": str(folder())},
        timeout=100.0,
    )


@pytest.mark.parametrize("nranks", [2, 3])
def test_two_shot_on_windows(nranks: int) -> None:
    run(one_sided_ranks.two_shot_put, nranks)


def test_user_schedules() -> None:
    run(one_sided_ranks.user_schedules, 3)
    run(one_sided_ranks.puts_into_scratch, 3)


def test_window_positions_that_change_in_every_call() -> None:
    run(one_sided_ranks.many_positions, 2)


def test_another_window_position_is_a_mismatch() -> None:
    answers = run(one_sided_ranks.other_positions, 2)
    assert all(answer.startswith("CollectiveMismatch") for answer in answers), answers


def test_a_wait_for_a_signal_names_the_peer() -> None:
    answer = run(one_sided_ranks.late_signal, 2)[0]
    assert answer.startswith("CollectiveTimeout")
    assert "a signal from rank 1" in answer
