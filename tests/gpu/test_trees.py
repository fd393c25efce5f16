"""Trees on packets: their shape is the schedule's, sums match bit by bit, slots are reused only
when
free.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from miraccl.executor.cuda import layout, lower
from miraccl.executor.cuda.choice import choose
from miraccl.executor.cuda.plan import TREES, DevicePlan, Request
from miraccl.schedule import catalog
from miraccl.schedule.algos.double_binary_tree import TreePosition, tree_positions
from miraccl.schedule.reduction import NUMPY_DTYPE, fold, premultiply
from miraccl.types import Collective, DType, RedOp
from tests.gpu.emulator import EmulatedMachine, needs_compiler
from tests.gpu.emulator.collective import (
    launch_each,
    machine,
    make_request,
    masked_to_ones,
    run,
    run_in_a_row,
    small_plan,
)
from tests.gpu.worker import make_input

ALONG_TREES = (Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE)


def along(
    collective: Collective,
    dtype: DType,
    count: int,
    nranks: int,
    proto: str = "ll128",
    root: int = 0,
) -> Request:
    return make_request(collective, dtype, count, nranks, TREES, proto, root)


def branches(
    request: Request, rank: int, order: Sequence[int] = ()
) -> list[tuple[int, list[int], int]]:
    """Return (parent, children, child index) of a rank in both trees, as a kernel reads them."""
    comm_args = lower.CommArgs(
        rank=rank,
        own=0,
        inboxes=(0,) * request.nranks,
        outboxes=(0,) * request.nranks,
        host=0,
        timeout_ns=1,
        order=tuple(order),
    )
    args, size = (
        lower.lower_packets(choose(request), request, comm_args),
        struct.calcsize(layout.TREE_LINKS),
    )
    found = []
    for tree in range(2):
        up, *down, child = struct.unpack_from(
            layout.TREE_LINKS, args, layout.ARGS["trees"].offset + tree * size
        )
        found.append((up, [peer for peer in down if peer != layout.NO_RANK], child))
    return found


ORDERS: dict[int, list[tuple[int, ...]]] = {
    2: [(), (1, 0)],
    3: [(), (2, 0, 1)],
    4: [(), (0, 2, 1, 3), (3, 1, 0, 2)],
    5: [(4, 2, 0, 1, 3)],
    8: [(), (5, 0, 3, 6, 1, 7, 2, 4)],
}


@pytest.mark.parametrize("collective", ALONG_TREES)
@pytest.mark.parametrize(
    ("nranks", "order"), [(nranks, order) for nranks, orders in ORDERS.items() for order in orders]
)
def test_trees_are_those_of_the_schedule(
    collective: Collective, nranks: int, order: tuple[int, ...]
) -> None:
    for root in range(nranks) if collective.rooted else (0,):
        schedule = catalog.build(TREES, collective, nranks, root, order=order)
        request = along(collective, DType.FLOAT32, 1000, nranks, root=root)
        mine = [branches(request, rank, order) for rank in range(nranks)]
        for tree, channel in enumerate(schedule.channels):
            sent = {
                (rank, step.send_peer)
                for rank in range(nranks)
                for step in channel[rank]
                if step.send_peer is not None
            }
            ups = {
                (rank, mine[rank][tree][0])
                for rank in range(nranks)
                if mine[rank][tree][0] != layout.NO_RANK
            }
            downs = {(rank, peer) for rank in range(nranks) for peer in mine[rank][tree][1]}
            assert (
                sent
                == {
                    Collective.ALL_REDUCE: ups | downs,
                    Collective.BROADCAST: downs,
                    Collective.REDUCE: ups,
                }[collective]
            )
            assert ups == {(child, parent) for parent, child in downs}
            for rank, up in ups:
                assert mine[up][tree][1][mine[rank][tree][2]] == rank


def along_trees(
    request: Request, inputs: Sequence[Any], order: Sequence[int], run_of_vectors: int
) -> Any:
    """Return the expected all_reduce: own, first and second child's data added and rounded at every
    node.

    The trees alternate between runs of ``run`` elements.
    """
    order = order or tuple(range(request.nranks))

    def sums(tree: int, position: int) -> Any:
        place = of(position)[tree]
        divisor = request.nranks if request.op is RedOp.AVG and place.up is None else None
        return fold(
            [inputs[order[position]], *(sums(tree, child) for child in place.down)],
            request.op,
            divisor,
        )

    def of(position: int) -> tuple[TreePosition, TreePosition]:
        return tree_positions(request.collective, position, request.nranks)

    roots = [
        next(position for position in range(request.nranks) if of(position)[tree].up is None)
        for tree in range(2)
    ]
    second = np.arange(request.count) // run_of_vectors % 2 == 1
    return np.where(second, sums(1, roots[1]), sums(0, roots[0]))


def check_sums(
    machine: EmulatedMachine,
    request: Request,
    plan: DevicePlan,
    order: Sequence[int] = (),
    repeat: int = 1,
) -> list[str]:
    """Run an all_reduce and compare every bit."""
    inputs = [make_input(rank, request.count, request.dtype, 1) for rank in range(request.nranks)]
    scalars = [0.5 - rank if request.dtype.is_float else rank + 2 for rank in range(request.nranks)]
    scaled = request.op is RedOp.PREMUL_SUM
    taken = [premultiply(x, s) for x, s in zip(inputs, scalars)] if scaled else inputs
    vector = (16 if plan.proto == "ll128" else 8) // request.dtype.itemsize
    want = along_trees(request, taken, order, 32 * plan.unroll * vector)
    return run(
        machine,
        request,
        plan,
        repeat=repeat,
        scalars=scalars if scaled else None,
        inputs=inputs,
        order=order,
        want=want,
    )


DTYPES = [
    (DType.FLOAT32, "ll128"),
    (DType.FLOAT64, "ll128"),
    (DType.BFLOAT16, "ll128"),
    (DType.FLOAT16, "ll"),
    (DType.FLOAT8_E4M3, "ll128"),
    (DType.FLOAT8_E5M2, "ll"),
    (DType.INT8, "ll"),
    (DType.UINT8, "ll128"),
    (DType.INT32, "ll128"),
    (DType.UINT32, "ll"),
    (DType.INT64, "ll128"),
    (DType.UINT64, "ll"),
]


@needs_compiler
@pytest.mark.parametrize(("dtype", "proto"), DTYPES)
def test_all_reduce_of_every_type(dtype: DType, proto: str) -> None:
    for count in (1, 203, 6007):
        request = along(Collective.ALL_REDUCE, dtype, count, 4, proto)
        assert check_sums(machine(4), request, small_plan(request), repeat=2) == [""] * 4


@needs_compiler
@pytest.mark.parametrize("nranks", [2, 3, 5, 8])
@pytest.mark.parametrize(
    ("dtype", "proto"), [(DType.BFLOAT16, "ll128"), (DType.INT32, "ll128"), (DType.BFLOAT16, "ll")]
)
def test_all_reduce_among_any_number(nranks: int, dtype: DType, proto: str) -> None:
    for count, unroll in ((1, 1), (4099, 1), (6007, 2)):
        request = along(Collective.ALL_REDUCE, dtype, count, nranks, proto)
        for order in ORDERS[nranks]:
            assert (
                check_sums(machine(nranks), request, small_plan(request, unroll=unroll), order)
                == [""] * nranks
            )


@needs_compiler
@pytest.mark.parametrize("op", [RedOp.PROD, RedOp.MIN, RedOp.MAX, RedOp.AVG, RedOp.PREMUL_SUM])
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.INT32])
def test_operators(op: RedOp, dtype: DType) -> None:
    request = replace(along(Collective.ALL_REDUCE, dtype, 3001, 4), op=op)
    assert check_sums(machine(4), request, small_plan(request)) == [""] * 4


@needs_compiler
def test_the_elements_of_a_tree_do_not_depend_on_the_launch() -> None:
    request = along(Collective.ALL_REDUCE, DType.BFLOAT16, 20_003, 4)
    for blocks in (1, 3, 40):
        assert (
            check_sums(machine(4), request, replace(small_plan(request), blocks=blocks)) == [""] * 4
        )


@needs_compiler
@pytest.mark.parametrize("collective", [Collective.BROADCAST, Collective.REDUCE])
@pytest.mark.parametrize(
    ("dtype", "proto"), [(DType.FLOAT32, "ll128"), (DType.INT32, "ll128"), (DType.UINT8, "ll")]
)
def test_every_root(
    monkeypatch: pytest.MonkeyPatch, collective: Collective, dtype: DType, proto: str
) -> None:
    """Integers, exact in any order; two rank orders, with reused slots."""
    monkeypatch.setattr(layout, "HALF_BYTES", 64 << 10)
    four = EmulatedMachine(4)
    inputs = [
        np.random.default_rng(rank).integers(0, 60, 6001).astype(NUMPY_DTYPE[dtype])
        for rank in range(4)
    ]
    for order in ORDERS[4]:
        for root in range(4):
            request = along(collective, dtype, 6001, 4, proto, root)
            assert (
                run(
                    four,
                    request,
                    replace(small_plan(request), blocks=1),
                    inputs=inputs,
                    order=order,
                )
                == [""] * 4
            )


@needs_compiler
@pytest.mark.parametrize("nranks", [2, 3, 8])
@pytest.mark.parametrize("collective", [Collective.BROADCAST, Collective.REDUCE])
def test_one_way_among_any_number(collective: Collective, nranks: int) -> None:
    for count, unroll in ((1, 1), (4099, 2)):
        request = along(collective, DType.FLOAT32, count, nranks, root=nranks - 1)
        assert (
            run(
                machine(nranks),
                request,
                small_plan(request, unroll=unroll),
                repeat=2,
                offset=1,
                close=True,
            )
            == [""] * nranks
        )


@needs_compiler
@pytest.mark.parametrize("nranks", [2, 3, 8])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT32])
@pytest.mark.parametrize("collective", ALONG_TREES)
def test_slots_are_reused(
    monkeypatch: pytest.MonkeyPatch, collective: Collective, dtype: DType, nranks: int
) -> None:
    """The minimum number of slots, and the maximum lag for them."""
    request = along(collective, dtype, 24_001, nranks, root=1)
    plan = replace(small_plan(request), blocks=1, lookahead=1000)
    lanes = {Collective.ALL_REDUCE: 3, Collective.REDUCE: 2, Collective.BROADCAST: 1}[collective]
    monkeypatch.setattr(
        layout,
        "HALF_BYTES",
        16 * (4 * lanes * (64 if dtype is DType.FLOAT32 and request.reduces else 68) + 20),
    )
    args = lower.lower_packets(plan, request, machine(nranks).comm_args(0))
    nslots, ahead = (
        struct.unpack_from("<I", args, layout.ARGS[name].offset)[0]
        for name in ("nslots", "lookahead")
    )
    assert (nslots, ahead) == (4, 2)
    fresh = EmulatedMachine(nranks)
    assert run(fresh, request, plan, repeat=3, close=True) == [""] * nranks


class OnlyNeighbours(EmulatedMachine):
    """Machine that drops writes to ranks that are not neighbours in a tree."""

    nowhere = np.zeros(layout.TOTAL_BYTES, np.uint8)

    def comm_args(self, rank: int, order: Sequence[int] = ()) -> lower.CommArgs:
        usual = super().comm_args(rank, order)
        request = along(Collective.ALL_REDUCE, DType.INT32, 1, self.nranks)
        near = {peer for up, down, _ in branches(request, rank, order) for peer in (up, *down)}
        boxes = (
            box if peer in near else self.nowhere.ctypes.data
            for peer, box in enumerate(usual.outboxes)
        )
        return replace(usual, outboxes=tuple(boxes))


@needs_compiler
def test_only_tree_neighbours_communicate() -> None:
    request = along(Collective.ALL_REDUCE, DType.INT32, 3001, 8)
    order = ORDERS[8][1]
    eight = OnlyNeighbours(8)
    assert sum(box == eight.nowhere.ctypes.data for box in eight.comm_args(0, order).outboxes) > 1
    assert run(eight, request, small_plan(request), order=order, repeat=3) == [""] * 8


@needs_compiler
@pytest.mark.parametrize("nranks", [3, 4])
@pytest.mark.parametrize("collective", ALONG_TREES)
def test_words_that_are_masked_to_ones(collective: Collective, nranks: int) -> None:
    """The maximum of equal words is sent unchanged, so escaped words pass every edge."""
    fresh = EmulatedMachine(nranks)
    request = replace(
        along(collective, DType.UINT32, 20_001, nranks, root=nranks - 1), op=RedOp.MAX
    )
    for launch in range(3):
        words = masked_to_ones(request.count, launch, launch)
        assert run(fresh, request, small_plan(request), inputs=[words] * nranks) == [""] * nranks


KINDS = [
    (Collective.ALL_REDUCE, TREES, "ll128"),
    (Collective.ALL_REDUCE, TREES, "ll"),
    (Collective.BROADCAST, "chain", "ll128"),
    (Collective.REDUCE, TREES, "ll"),
    (Collective.ALL_REDUCE, "one_shot", "ll128"),
    (Collective.ALL_REDUCE, TREES, "simple"),
    (Collective.BROADCAST, TREES, "ll128"),
    (Collective.BROADCAST, TREES, "ll128"),
    (Collective.ALL_REDUCE, "ring", "ll128"),
    (Collective.REDUCE, TREES, "ll128"),
]


@needs_compiler
@pytest.mark.parametrize("collective", [*ALONG_TREES, None])
def test_ranks_that_run_ahead(collective: Collective | None) -> None:
    """Unsynchronised launches in a row: halves alternate between kernels."""
    operations = []
    for turn, (kind, algo, proto) in enumerate(
        KINDS * 3 if collective is None else [(collective, TREES, "ll128")] * 30
    ):
        request = make_request(
            kind, DType.INT32, (1, 2003, 100)[turn % 3], 4, algo, proto, root=turn // 7 % 4
        )
        operations.append((request, small_plan(request)))
    assert [text for text in run_in_a_row(EmulatedMachine(4), operations) if text] == []


@needs_compiler
@pytest.mark.parametrize("collective", ALONG_TREES)
def test_the_wait_for_an_absent_rank_ends(collective: Collective) -> None:
    """Including that of a broadcast's root, which needs no data."""
    lonely = EmulatedMachine(2, timeout_s=0.2)
    launch_each(lonely, [along(collective, DType.FLOAT32, 100, 2), None])
    assert lonely.errors() == [layout.ERROR_TIMEOUT, 0]
    assert int(lonely.host[0][layout.HOST_PEER]) == 1


@needs_compiler
def test_different_sizes_are_a_mismatch() -> None:
    three = EmulatedMachine(3, timeout_s=60)
    launch_each(
        three,
        [along(Collective.ALL_REDUCE, DType.FLOAT32, count, 3) for count in (4000, 4000, 100)],
    )
    assert layout.ERROR_MISMATCH in three.errors()


def test_trees_run_on_request_and_between_one_shot_and_chain() -> None:
    """By default only if a root has more than three peers, for blocks of 64 to 512 KiB."""
    for collective in ALONG_TREES:
        for nranks in (2, 3, 4, 8):
            for power in range(0, 30, 3):
                free = replace(
                    along(collective, DType.BFLOAT16, 1 << power, nranks), algo="", proto=""
                )
                middle = (
                    nranks > 4 and collective.rooted and 64 << 10 < free.block_bytes <= 512 << 10
                )
                assert (choose(free).algo == TREES) == middle
                plan = choose(replace(free, algo=TREES))
                assert (plan.algo, plan.uses_packets) == (TREES, True)
                assert choose(replace(free, algo=TREES, proto="simple")).proto == "simple"
