"""Schedules with aggregators: proofs, results, and what the verifier refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.schedule.aggregation import (
    count_slices,
    rail_trees,
    star,
    star_gather,
    star_scatter,
    two_level,
)
from miraccl.schedule.cost import compute_cost
from miraccl.schedule.interpret import interpret
from miraccl.schedule.ir import Op, Schedule, Step
from miraccl.schedule.steps import copy, inp, recv_reduce_all, scratch, send
from miraccl.schedule.text import dump, parse
from miraccl.schedule.verify import verify

SCHEDULES = [
    *(star(n, a) for n in (1, 2, 3, 4, 8, 33) for a in (1, 2, 3)),
    *(two_level(n, g) for n, g in ((1, 1), (4, 2), (5, 2), (8, 4), (9, 3))),
    *(rail_trees(h, k) for h, k in ((1, 1), (2, 1), (2, 4), (3, 2), (4, 8))),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name}-{s.participants}")
def test_proved_and_right(schedule: Schedule) -> None:
    ordered = schedule.name == "star"
    for in_place in (False, True):
        verify(schedule, in_place=in_place, rank_ordered=ordered)
    assert parse(dump(schedule)) == schedule
    rng = np.random.default_rng(1)
    inputs = [rng.integers(-9, 9, 101).astype(np.int64) for _ in range(schedule.nranks)]
    for output in interpret(schedule, inputs):
        assert output is not None
        assert np.array_equal(output, sum(inputs))


@pytest.mark.parametrize(("nranks", "aggregators"), [(1, 1), (2, 1), (3, 2), (8, 3)])
def test_reduce_scatter_and_all_gather(nranks: int, aggregators: int) -> None:
    rng = np.random.default_rng(1)
    inputs = [rng.integers(-9, 9, 101 * nranks).astype(np.int64) for _ in range(nranks)]
    for build in (star_scatter, star_gather):
        schedule = build(nranks, aggregators, 3)
        for in_place in (False, True):
            verify(schedule, in_place=in_place, rank_ordered=True)
        assert parse(dump(schedule)) == schedule
    total = np.sum(inputs, axis=0)
    for rank, output in enumerate(interpret(star_scatter(nranks, aggregators, 3), inputs)):
        assert output is not None
        assert np.array_equal(output, total[rank * 101 : (rank + 1) * 101])
    for output in interpret(star_gather(nranks, aggregators, 3), inputs):
        assert output is not None
        assert np.array_equal(output, np.concatenate(inputs))


def test_slices_of_a_block() -> None:
    kib = 1 << 10
    assert [count_slices(n, 1) for n in (1, 256 * kib, 256 * kib + 1, 1 << 40)] == [1, 1, 2, 128]
    assert count_slices(16384 * kib, 2) == 32
    verify(star(3, 2, 128), rank_ordered=True)
    verify(two_level(4, 2, 128))


def test_costs() -> None:
    cost = compute_cost(star(8, 2, 1))
    assert cost.latency_steps == 2
    # the aggregator is the busiest: its half goes to each of eight ranks
    assert cost.wire_blocks == 4
    assert compute_cost(two_level(8, 4, 1)).latency_steps == 4


def _aggregator(*steps: Step) -> Schedule:
    good = star(2, 1, 1)
    ranks = good.channels[0]
    return replace(good, channels=((ranks[0], ranks[1], steps),))


def test_refused() -> None:
    fold = recv_reduce_all(None, scratch(0), (0, 1))
    replies = [send(scratch(0), 0), send(scratch(0), 1)]
    verify(_aggregator(fold, *replies))
    with pytest.raises(ScheduleError, match="rank 2 is a peer of itself, but has no src to add"):
        verify(_aggregator(recv_reduce_all(None, scratch(0), (0, 1, 2)), *replies))
    with pytest.raises(ScheduleError, match=r"the input of rank 2 has 0 chunks"):
        verify(_aggregator(recv_reduce_all(inp(0), scratch(0), (0, 1, 2)), *replies))
    with pytest.raises(ScheduleError, match="before it is written"):
        verify(_aggregator(recv_reduce_all(scratch(0), scratch(0), (0, 1, 2)), *replies))
    twice = replace(fold, peers=(0,))
    wrong = Step(op=Op.RECV_REDUCE, dst=scratch(0), recv_peer=1)
    again = replace(star(2, 1, 1), channels=_twice().channels)
    with pytest.raises(ScheduleError, match="adds the contribution of rank 0 to"):
        verify(again)
    with pytest.raises(ScheduleError, match=r"holds input\[0\] of ranks 0, expected"):
        verify(_aggregator(twice, *replies, wrong))
    with pytest.raises(InvalidUsage, match="0 aggregators"):
        star(2, 0)


def _twice() -> Schedule:
    """Return a star whose aggregator gets the contribution of rank 0 twice."""
    good = star(2, 1, 1)
    first, second, third = (list(steps) for steps in good.channels[0])
    first.insert(0, first[0])
    third[1:1] = [Step(op=Op.RECV_REDUCE, dst=scratch(0), recv_peer=0)]
    return replace(good, channels=((tuple(first), tuple(second), tuple(third)),))


def test_aggregators_have_no_output() -> None:
    good = star(2, 1, 1)
    ranks = good.channels[0]
    wrong = replace(good, channels=((*ranks[:2], (*ranks[2], copy(scratch(0), inp(0)))),))
    with pytest.raises(ScheduleError, match="the input is read only"):
        verify(wrong)
    with pytest.raises(ValueError, match="channel 0 has 3 ranks, not 2"):
        replace(good, aggregators=0)
