"""Every built-in algorithm computes its collective in the interpreter."""

from __future__ import annotations

import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from miraccl.schedule import catalog
from miraccl.schedule.interpret import expected_outputs, interpret
from miraccl.schedule.ir import Buffer, Op
from miraccl.schedule.layout import in_place_forms
from miraccl.schedule.reduction import reference
from miraccl.types import Collective, RedOp
from tests.schedule.helpers import BUILTIN, make_inputs, schedules
from tests.schedule.test_verify_builtin import DEEPER, SHALLOW


def agree(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(a, b)


PLACED = [
    (name, collective, in_place)
    for name, collective in BUILTIN
    for in_place in in_place_forms(collective)
]


@pytest.mark.parametrize(("name", "collective", "in_place"), PLACED)
def test_computes_its_collective(name, collective, in_place):
    for number, schedule in enumerate(schedules(name, collective, range(1, 10))):
        count = (0, 1, 13, 40)[number % 4] if collective is not Collective.BARRIER else 0
        inputs = make_inputs(schedule, count)
        got = interpret(schedule, inputs, in_place=in_place, fifo_depth=DEEPER.get(name, SHALLOW))
        agree(got, expected_outputs(collective, inputs, root=schedule.root))


@pytest.mark.parametrize(("name", "collective"), [case for case in BUILTIN if case[1].rooted])
def test_every_root(name, collective):
    for schedule in schedules(name, collective, (5, 6), roots="all"):
        inputs = make_inputs(schedule, 9)
        agree(interpret(schedule, inputs), expected_outputs(collective, inputs, root=schedule.root))


@pytest.mark.parametrize(
    ("name", "collective", "in_place"),
    [c for c in PLACED if catalog.supports_direct(c[0], c[1], 2, in_place=c[2])],
)
def test_direct_and_shuffled(name, collective, in_place):
    """Direct runs give the same results in any order of ranks, if the catalog declares so."""
    rng = random.Random(name)
    for schedule in schedules(name, collective, (2, 5, 8)):
        inputs = make_inputs(schedule, 0 if collective is Collective.BARRIER else 11)
        got = interpret(schedule, inputs, in_place=in_place, direct=True, shuffle=rng.shuffle)
        agree(got, expected_outputs(collective, inputs, root=schedule.root))


def test_in_place_one_shot_is_not_direct():
    """A peer's input is overwritten before it is read in at least one order of ranks."""
    schedule = catalog.build("one_shot", Collective.ALL_REDUCE, 3)
    inputs = make_inputs(schedule, 4)
    want: list[Any] = expected_outputs(Collective.ALL_REDUCE, inputs)
    got: list[Any] = interpret(schedule, inputs, in_place=True, direct=True)
    assert any(not np.array_equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize(
    ("name", "collective"), [case for case in BUILTIN if case[1] in catalog.get(case[0]).uneven]
)
def test_uneven_blocks(name, collective):
    for schedule in schedules(name, collective, (2, 3, 4, 7, 8)):
        n = schedule.nranks
        counts: Any = [(3 * r + 1) % 5 for r in range(n)]
        if collective is Collective.ALL_TO_ALL:
            counts = [[(2 * r + 3 * c) % 4 for c in range(n)] for r in range(n)]
        inputs = make_inputs(schedule, counts)
        for in_place in in_place_forms(collective):
            got = interpret(schedule, inputs, counts=counts, in_place=in_place)
            agree(got, expected_outputs(collective, inputs, root=schedule.root, counts=counts))


def test_no_scratch_where_uneven():
    """Executors size scratch for even blocks."""
    for name, collective in BUILTIN:
        if collective in catalog.get(name).uneven:
            assert all(s.scratch_chunks == 0 for s in schedules(name, collective, (1, 2, 7, 8)))


REDUCING = [case for case in BUILTIN if case[1].reduces]


@pytest.mark.parametrize(("name", "collective"), REDUCING)
def test_operators(name, collective):
    for schedule in schedules(name, collective, (1, 4, 5)):
        n = schedule.nranks
        inputs = make_inputs(schedule, 6)
        for op in (RedOp.PROD, RedOp.MIN, RedOp.MAX, RedOp.AVG):
            agree(
                interpret(schedule, inputs, op=op),
                expected_outputs(collective, inputs, root=schedule.root, op=op),
            )
        scalars = [float(r + 1) for r in range(n)]
        floats = [x.astype(np.float64) for x in inputs]
        got = interpret(schedule, floats, op=RedOp.PREMUL_SUM, scalars=scalars)
        agree(
            got,
            expected_outputs(
                collective, floats, root=schedule.root, op=RedOp.PREMUL_SUM, scalars=scalars
            ),
        )


@pytest.mark.parametrize(("name", "collective"), REDUCING)
def test_rounding_and_order_are_as_declared(name, collective):
    """bfloat16 sums show every rounding, float32 sums the order of additions."""
    algorithm = catalog.get(name)
    for schedule in schedules(name, collective, (6, 8)):
        n = schedule.nranks
        rng = np.random.default_rng(n)
        size = (n if collective is Collective.REDUCE_SCATTER else 1) * 50
        low = [rng.standard_normal(size).astype(ml_dtypes.bfloat16) for _ in range(n)]
        single = [
            (rng.standard_normal(size) * 10.0 ** rng.integers(-4, 4, size)).astype(np.float32)
            for _ in range(n)
        ]
        for inputs, claim in ((low, algorithm.rounds_once), (single, algorithm.rank_ordered)):
            whole = reference(inputs, RedOp.SUM)
            got: list[Any] = interpret(schedule, inputs)
            if collective is Collective.REDUCE_SCATTER:
                same = np.array_equal(np.concatenate(got), whole)
            else:
                same = all(np.array_equal(out, whole) for out in got if out is not None)
            assert same == claim


@pytest.mark.parametrize(
    ("name", "collective"), [case for case in BUILTIN if case[1] is Collective.ALL_REDUCE]
)
def test_all_ranks_get_the_same_bits(name, collective):
    for schedule in schedules(name, collective, (3, 7, 8)):
        rng = np.random.default_rng(schedule.nranks)
        inputs = [rng.standard_normal(60).astype(np.float16) for _ in range(schedule.nranks)]
        first, *rest = interpret(schedule, inputs)
        for other in rest:
            np.testing.assert_array_equal(other, first)


def test_ring_uses_neighbours_only():
    for collective in catalog.get("ring").collectives:
        schedule = catalog.build("ring", collective, 7)
        for rank, steps in enumerate(schedule.channels[0]):
            assert {s.send_peer for s in steps} <= {None, (rank + 1) % 7}
            assert {s.recv_peer for s in steps} <= {None, (rank - 1) % 7}


def test_trees_match_nccl():
    """Trees of the comments in NCCL's ``trees.cc``: 14 ranks, double trees of 4 and 5 ranks."""
    from miraccl.schedule.algos.double_binary_tree import binary_tree, double_tree

    parents = [binary_tree(rank, 14).up for rank in range(14)]
    assert parents == [None, 2, 4, 2, 8, 6, 4, 6, 0, 10, 12, 10, 8, 12]
    assert binary_tree(0, 14).down == (8,)
    assert binary_tree(8, 14).down == (4, 12)
    assert binary_tree(12, 14).down == (10, 13)
    assert binary_tree(13, 14).down == ()
    assert [double_tree(rank, 4)[1].up for rank in range(4)] == [1, 3, 1, None]
    assert [binary_tree(rank, 5).up for rank in range(5)] == [None, 2, 4, 2, 0]
    assert [double_tree(rank, 5)[1].up for rank in range(5)] == [1, None, 3, 0, 3]


@pytest.mark.parametrize("nranks", [*range(1, 40), 64, 100])
def test_trees_are_trees(nranks):
    from miraccl.schedule.algos.double_binary_tree import double_tree, rooted_double_tree

    for pick in (double_tree, lambda rank, n: rooted_double_tree(rank, n, n // 3)):
        for tree in range(2):
            nodes = [pick(rank, nranks)[tree] for rank in range(nranks)]
            roots = [rank for rank, node in enumerate(nodes) if node.up is None]
            assert len(roots) == 1
            for rank, node in enumerate(nodes):
                assert len(node.down) <= 2
                assert all(nodes[child].up == rank for child in node.down)
            assert sum(len(node.down) for node in nodes) == nranks - 1
    if nranks > 2:
        inner = [
            [len(double_tree(rank, nranks)[tree].down) == 2 for tree in range(2)]
            for rank in range(nranks)
        ]
        assert not any(
            first and second for first, second in inner
        )  # no rank has two children in both


def test_rooted_trees_share_their_root():
    from miraccl.schedule.algos.double_binary_tree import rooted_double_tree

    for nranks in (2, 5, 8):
        for root in range(nranks):
            assert [place.up for place in rooted_double_tree(root, nranks, root)] == [None, None]


def test_pat_distances_decrease_with_one_or_two_messages_per_round():
    from miraccl.schedule.algos.pat import plan_rounds

    for nranks in (*range(1, 40), 100, 128):
        offsets, rounds = plan_rounds(nranks)
        assert sorted(offsets) == list(range(nranks))
        assert [r.distance for r in rounds] == sorted((r.distance for r in rounds), reverse=True)
        assert all(1 <= len(r.runs) <= 2 for r in rounds)
        assert len(rounds) == (nranks - 1).bit_length()


def test_messages_start_at_the_next_rank():
    # Otherwise all ranks would address rank 0 first.
    for name, collective in (
        ("one_shot", Collective.ALL_REDUCE),
        ("two_shot", Collective.ALL_REDUCE),
        ("one_shot", Collective.ALL_GATHER),
    ):
        for rank, steps in enumerate(catalog.build(name, collective, 5).channels[0]):
            sends = [s.send_peer for s in steps if s.op is Op.SEND][:4]
            assert sends == [(rank + d) % 5 for d in range(1, 5)]


def test_one_rank_only_copies():
    for name, collective in BUILTIN:
        for schedule in schedules(name, collective, (1,)):
            steps = [s for ranks in schedule.channels for steps in ranks for s in steps]
            assert {s.op for s in steps} <= {Op.COPY}
            assert all(
                s.src and s.dst and s.src.buffer is Buffer.INPUT and s.dst.buffer is Buffer.OUTPUT
                for s in steps
            )
