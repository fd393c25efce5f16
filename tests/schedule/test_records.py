"""Illegal records cannot be constructed; blocks, parts and overlaps match the tables."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miraccl.errors import InvalidUsage
from miraccl.schedule import catalog
from miraccl.schedule.ir import OPERANDS, Buffer, Op, Ref, Step, input_blocks, output_blocks
from miraccl.schedule.layout import block_counts, part_bounds, rank_cells
from miraccl.schedule.steps import copy, inp, out, recv, send
from miraccl.types import Collective
from tests.schedule.helpers import COLLECTIVES, hand_made

C = Collective


def test_refs():
    assert list(Ref(Buffer.INPUT, 3, 2)) == [3, 4]
    assert str(Ref(Buffer.OUTPUT, 3, 2)) == "output[3+2]"
    for index, chunks in ((-1, 1), (0, 0)):
        with pytest.raises(ValueError, match="cannot make a reference"):
            Ref(Buffer.INPUT, index, chunks)


@pytest.mark.parametrize("op", list(Op))
def test_operands_of_steps(op):
    every: dict[str, Any] = {
        "src": inp(0),
        "dst": out(0),
        "recv_peer": 0,
        "send_peer": 1,
        "peers": (0, 1),
    }
    mine = {name: value for (name, value), has in zip(every.items(), OPERANDS[op]) if has}
    assert Step(op=op, **mine).chunks == (1 if "src" in mine or "dst" in mine else 0)
    for name, value in every.items():
        if (op, name) == (Op.RECV_REDUCE_ALL, "src"):
            continue  # an aggregator has none
        wrong = (
            {k: v for k, v in mine.items() if k != name} if name in mine else {**mine, name: value}
        )
        with pytest.raises(ValueError, match=f"{op.name} (needs|has no) {name}"):
            Step(op=op, **wrong)


def test_src_and_dst_must_have_the_same_size():
    with pytest.raises(ValueError, match="src has 2 chunks, dst 1"):
        copy(inp(0, 2), out(0))


def test_kinds_of_primitives():
    assert [op.name for op in Op if op.sends] == [
        "SEND",
        "RECV_COPY_SEND",
        "RECV_REDUCE_SEND",
        "RECV_REDUCE_COPY_SEND",
    ]
    assert all(op.receives == op.name.startswith("RECV") for op in Op)
    assert all(op.reduces == ("REDUCE" in op.name) for op in Op)
    assert [op.name for op in Op if op.needs_addressable_memory] == [
        "PUT",
        "GET",
        "REDUCE_FROM_PEERS",
    ]


def test_schedules_are_complete():
    with pytest.raises(ValueError, match="root 2 is not in"):
        hand_made(C.REDUCE, [], [], root=2)
    with pytest.raises(ValueError, match="at least 1"):
        hand_made(C.REDUCE, [], parts=0)
    good = hand_made(C.REDUCE, [recv(out(0), 1)], [send(inp(0), 0)])
    with pytest.raises(ValueError, match="channel 1 has 1 ranks, not 2"):
        type(good)(
            name="x", collective=C.REDUCE, nranks=2, parts=1, channels=(good.channels[0], ((),))
        )


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_blocks(collective):
    assert input_blocks(collective, 5) in (0, 1, 5)
    assert output_blocks(collective, 5) in (0, 1, 5)
    assert (input_blocks(collective, 5) == 5) == (
        collective in (C.REDUCE_SCATTER, C.SCATTER, C.ALL_TO_ALL)
    )
    assert (output_blocks(collective, 5) == 5) == (
        collective in (C.ALL_GATHER, C.GATHER, C.ALL_TO_ALL)
    )


@given(count=st.integers(0, 1000), parts=st.integers(1, 40))
@settings(deadline=None)
def test_parts_tile_a_block_evenly(count, parts):
    bounds = [part_bounds(count, part, parts) for part in range(parts)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    sizes = [high - low for low, high in bounds]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_root_only_buffers():
    schedule = catalog.build("one_shot", C.GATHER, 3, 1)
    assert [schedule.chunks_at(Buffer.OUTPUT, rank) for rank in range(3)] == [0, 3, 0]
    schedule = catalog.build("one_shot", C.SCATTER, 3, 1)
    assert [schedule.chunks_at(Buffer.INPUT, rank) for rank in range(3)] == [0, 3, 0]


@pytest.mark.parametrize("collective", [c for c in COLLECTIVES if c is not C.ALL_TO_ALL])
def test_in_place_overlap_matches_nccl(collective):
    name = catalog.algorithms_for(collective, 3)[0].name
    schedule = catalog.build(name, collective, 3, 2)
    parts = schedule.parts
    for rank in range(3):
        apart, cells = rank_cells(schedule, rank, False), rank_cells(schedule, rank, True)
        assert apart.cells == sum(apart.sizes)
        if cells.sizes[0] and cells.sizes[1]:
            assert cells.cells == max(cells.sizes[0], cells.sizes[1]) + cells.sizes[2]
            first_in, first_out = cells.range_of(inp(0))[0], cells.range_of(out(0))[0]
            own = rank * parts
            want = {C.ALL_GATHER: own, C.GATHER: own, C.REDUCE_SCATTER: -own, C.SCATTER: -own}.get(
                collective, 0
            )
            assert first_in - first_out == want


def test_all_to_all_has_no_in_place_form():
    with pytest.raises(InvalidUsage, match="no in-place form"):
        rank_cells(catalog.build("pairwise", C.ALL_TO_ALL, 2), 0, True)


def test_block_counts():
    gather = catalog.build("ring", C.ALL_GATHER, 3)
    assert block_counts(gather, 1, Buffer.OUTPUT, [4, 5, 6]) == [4, 5, 6]
    assert block_counts(gather, 1, Buffer.INPUT, [4, 5, 6]) == [5]
    scatter = catalog.build("ring", C.REDUCE_SCATTER, 3)
    assert block_counts(scatter, 1, Buffer.OUTPUT, [4, 5, 6]) == [5]
    assert block_counts(scatter, 1, Buffer.INPUT, [4, 5, 6]) == [4, 5, 6]
    exchange = catalog.build("pairwise", C.ALL_TO_ALL, 2)
    assert block_counts(exchange, 1, Buffer.INPUT, [[1, 2], [3, 4]]) == [3, 4]
    assert block_counts(exchange, 1, Buffer.OUTPUT, [[1, 2], [3, 4]]) == [2, 4]
    assert block_counts(exchange, 1, Buffer.OUTPUT, 7) == [7, 7]
    assert block_counts(catalog.build("one_shot", C.GATHER, 3), 1, Buffer.OUTPUT, [4, 5, 6]) == []
    for schedule, counts in (
        (gather, [1, 2]),
        (exchange, [1, 2]),
        (gather, [[1], [2], [3]]),
        (catalog.build("ring", C.ALL_REDUCE, 2), [1, 2]),
    ):
        with pytest.raises(InvalidUsage):
            block_counts(schedule, 0, Buffer.INPUT, counts)
