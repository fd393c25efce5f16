"""Costs counted from schedules equal the formulas of the algorithms."""

from __future__ import annotations

from fractions import Fraction

import pytest

from miraccl.errors import ScheduleError
from miraccl.schedule import catalog
from miraccl.schedule.cost import compute_cost
from miraccl.schedule.steps import (
    barrier,
    copy,
    get,
    inp,
    out,
    recv,
    reduce_from_peers,
    scratch,
    send,
    signal,
    wait,
)
from miraccl.types import Collective
from tests.schedule.helpers import BUILTIN, SIZES, hand_made, schedules

C = Collective


@pytest.mark.parametrize(("name", "collective"), BUILTIN)
def test_formulas_equal_counted_costs(name, collective):
    algorithm = catalog.get(name)
    assert algorithm.latency is not None
    assert algorithm.wire is not None
    for schedule in schedules(name, collective, (*SIZES, 47)):
        cost = compute_cost(schedule)
        assert cost.latency_steps == algorithm.latency(collective, schedule.nranks)
        assert cost.wire_blocks == algorithm.wire(collective, schedule.nranks)


def test_lower_bounds():
    """No all-reduce sends fewer bytes than a ring."""
    for n in (2, 3, 8, 13, 16):
        for algorithm in catalog.algorithms_for(C.ALL_REDUCE, n):
            assert compute_cost(algorithm.build(C.ALL_REDUCE, n)).wire_blocks >= Fraction(
                2 * (n - 1), n
            )


def test_counts_of_a_hand_made_schedule():
    schedule = hand_made(
        C.BROADCAST,
        [send(inp(0, 2), 1), copy(inp(0, 2), out(0, 2)), send(inp(0), 2), recv(scratch(0), 2)],
        [recv(out(0, 2), 0), send(out(1), 2)],
        [recv(out(1), 1), recv(out(0), 0), send(out(0), 0)],
        parts=2,
        scratch=1,
    )
    cost = compute_cost(schedule)
    assert cost.latency_steps == 3  # 0 to 1 to 2 to 0
    assert cost.wire_blocks == Fraction(3, 2)
    assert cost.messages == 2
    assert cost.copy_blocks == 1
    assert cost.reduce_blocks == 0


def test_remote_reads_signals_and_barriers_are_steps():
    reads = hand_made(
        C.REDUCE,
        [wait([1]), reduce_from_peers(inp(0), out(0), (0, 1)), signal([1])],
        [signal([0]), wait([0])],
    )
    cost = compute_cost(reads)
    assert (cost.latency_steps, cost.messages) == (3, 1)
    assert cost.wire_blocks == cost.reduce_blocks == 1
    fetch = hand_made(
        C.ALL_GATHER,
        *(
            [barrier(), get(inp(0), out(1 - r), 1 - r), copy(inp(0), out(r)), barrier()]
            for r in range(2)
        ),
    )
    assert compute_cost(fetch).latency_steps == 3


def test_additions_are_counted():
    assert compute_cost(catalog.build("one_shot", C.ALL_REDUCE, 5)).reduce_blocks == 4
    assert compute_cost(catalog.build("ring", C.ALL_REDUCE, 5)).reduce_blocks == Fraction(4, 5)


def test_deadlock():
    with pytest.raises(ScheduleError, match="channel 0, rank 1, step 0: deadlock"):
        compute_cost(hand_made(C.BROADCAST, [], [recv(out(0), 0)]))
