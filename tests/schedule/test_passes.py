"""Passes turn correct schedules into correct schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from miraccl.errors import InvalidUsage
from miraccl.schedule import catalog, passes
from miraccl.schedule.cost import compute_cost
from miraccl.schedule.interpret import expected_outputs, interpret
from miraccl.schedule.ir import Op, Schedule
from miraccl.schedule.layout import in_place_forms
from miraccl.schedule.steps import (
    inp,
    out,
    recv,
    recv_copy_send,
    recv_reduce,
    recv_reduce_copy,
    send,
)
from miraccl.schedule.verify import verify
from miraccl.types import Collective
from tests.schedule.helpers import BUILTIN, hand_made, make_inputs, schedules
from tests.schedule.test_verify_builtin import DEEPER, SHALLOW

C = Collective
SPLITTABLE = [
    case
    for case in BUILTIN
    if passes.supports_channels(catalog.build(*case, 8)) and case[1] is not C.BARRIER
]


def check(schedule: Schedule, fifo_depth: int = 8) -> None:
    for in_place in in_place_forms(schedule.collective):
        verify(schedule, in_place=in_place, fifo_depth=fifo_depth)
    inputs = make_inputs(schedule, 2 * schedule.parts + 1)
    for got, want in zip(
        interpret(schedule, inputs),
        expected_outputs(schedule.collective, inputs, root=schedule.root),
    ):
        assert (got is None) == (want is None)
        assert got is None or want is None or (got == want).all()


@pytest.mark.parametrize(("name", "collective"), SPLITTABLE)
def test_split_channels(name, collective):
    for schedule in schedules(name, collective, (1, 4, 8)):
        split = passes.split_channels(schedule, 3)
        assert split.nchannels == 3 * schedule.nchannels
        assert split.parts == 3 * schedule.parts
        check(split, fifo_depth=DEEPER.get(name, SHALLOW))
        assert compute_cost(split).wire_blocks == compute_cost(schedule).wire_blocks
        assert compute_cost(split).latency_steps == compute_cost(schedule).latency_steps
    assert passes.split_channels(schedule, 1) is schedule


@pytest.mark.parametrize(("name", "collective"), SPLITTABLE)
def test_pipeline(name, collective):
    for schedule in schedules(name, collective, (1, 4, 8)):
        deeper = passes.pipeline(schedule, 3)
        assert deeper.nchannels == schedule.nchannels
        check(deeper)
        assert compute_cost(deeper).wire_blocks == compute_cost(schedule).wire_blocks


@pytest.mark.parametrize("name", ["ring", "distance_doubling", "recursive_doubling"])
def test_stagger(name):
    """Slices overlap: fewer latencies in sequence than one after the other."""
    for schedule in schedules(name, C.ALL_REDUCE, (1, 2, 4)):
        staggered = passes.stagger(schedule, 4)
        check(staggered, fifo_depth=4)
        before, after = compute_cost(schedule), compute_cost(staggered)
        assert after.wire_blocks == before.wire_blocks
        assert after.messages == 4 * before.messages
        assert after.latency_steps <= max(4 * before.latency_steps * 3 // 4, 5)


def test_messages_across_blocks_must_be_split_first():
    gather = catalog.build("bruck", C.ALL_GATHER, 6)
    assert not passes.supports_channels(gather)
    with pytest.raises(InvalidUsage, match="spans blocks"):
        passes.split_channels(gather, 2)
    apart = passes.split_messages(gather)
    assert all(step.chunks <= 1 for steps in apart.channels[0] for step in steps)
    check(apart)
    check(passes.split_channels(apart, 2))


@pytest.mark.parametrize(("name", "collective"), BUILTIN)
def test_relabel(name, collective):
    order = [3, 0, 4, 1, 2]
    for schedule in schedules(name, collective, (5,)):
        moved = passes.relabel(passes.split_messages(schedule), order)
        assert moved.root == (order[schedule.root] if collective.rooted else 0)
        if collective is C.BARRIER:
            verify(moved)
        else:
            check(moved)
        if catalog.get(name).rank_ordered:
            assert all(
                step.peers == tuple(sorted(step.peers))
                for steps in moved.channels[0]
                for step in steps
                if step.op.reduces
            )
        assert passes.relabel(schedule, range(5)).channels == schedule.channels


def test_interleaved_rings_with_different_orders():
    """Two rings of opposite directions, as a channel search returns them."""
    ring = catalog.build("ring", C.ALL_GATHER, 4)
    both = passes.interleave(
        [passes.relabel(ring, order) for order in ([0, 2, 1, 3], [3, 1, 2, 0])], name="rings"
    )
    assert both.name == "rings"
    check(both)
    assert {step.send_peer for step in both.channels[0][0]} - {None} == {2}
    assert {step.send_peer for step in both.channels[1][0]} - {None} == {3}


def test_interleave_different_algorithms():
    mixed = passes.interleave(
        [
            catalog.build(name, C.ALL_REDUCE, 4)
            for name in ("ring", "double_binary_tree", "one_shot")
        ]
    )
    assert mixed.nchannels == 4
    check(mixed)


def test_interleave_keeps_scratch():
    tree = catalog.build("double_binary_tree", C.REDUCE, 9, 2)
    assert tree.scratch_chunks
    check(passes.interleave([catalog.build("chain", C.REDUCE, 9, 2), tree]))


def test_fuse():
    plain = hand_made(
        C.BROADCAST,
        [send(inp(0), 1), recv(out(0), 2)],
        [recv(out(0), 0), send(out(0), 2)],
        [recv(out(0), 1), send(out(0), 0)],
    )
    fused = passes.fuse(plain)
    assert fused.channels[0][1] == (recv_copy_send(out(0), 0, 2),)
    check(fused)
    summed = hand_made(
        C.ALL_REDUCE,
        [send(inp(0), 1), recv(out(0), 1)],
        [recv_reduce_copy(inp(0), out(0), 0), send(out(0), 0)],
    )
    assert [step.op for step in passes.fuse(summed).channels[0][1]] == [Op.RECV_REDUCE_COPY_SEND]
    check(passes.fuse(summed))
    added = replace(
        summed, channels=((summed.channels[0][0], (recv_reduce(out(0), 0), send(out(0), 0))),)
    )
    assert passes.fuse(added).channels[0][1][0].src == out(0)
    other = hand_made(C.BROADCAST, [], [recv(out(0), 0), send(out(1), 2)], [])
    assert passes.fuse(other) == other


def test_arguments():
    ring = catalog.build("ring", C.ALL_REDUCE, 3)
    for wrong in (
        lambda: passes.split_channels(ring, 0),
        lambda: passes.pipeline(ring, 0),
        lambda: passes.stagger(ring, 0),
        lambda: passes.interleave([]),
        lambda: passes.interleave([ring, catalog.build("ring", C.ALL_REDUCE, 4)]),
        lambda: passes.relabel(ring, [0, 1, 1]),
        lambda: passes.relabel(catalog.build("bruck", C.ALL_GATHER, 4), [2, 0, 1, 3]),
    ):
        with pytest.raises(InvalidUsage):
            wrong()
