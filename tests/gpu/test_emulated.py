"""Kernels on emulated GPUs: every collective and protocol matches its definition and restores
memory.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from miraccl.executor.cuda import layout, lower, schedules
from miraccl.executor.cuda.buffer_halves import min_slots, slot_packets
from miraccl.executor.cuda.choice import choose
from miraccl.executor.cuda.plan import ALGORITHMS, DevicePlan, frame_of, kernel_spec, vectors_of
from miraccl.executor.cuda.source import Framing, KernelSpec, fanout_threads, write_source
from miraccl.schedule import catalog, passes
from miraccl.schedule.ir import Schedule
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.schedule.steps import inp, one_channel, out, recv_reduce_copy, send
from miraccl.types import Collective, DType, RedOp
from tests.gpu import emulator
from tests.gpu.emulator import EmulatedMachine, EmulatorClock, needs_compiler
from tests.gpu.emulator.collective import (
    launch_each,
    machine,
    make_request,
    masked_to_ones,
    run,
    small_plan,
)

pytestmark = needs_compiler


ALL_REDUCE = [
    ("one_shot", "ll128", DType.FLOAT32),
    ("one_shot", "ll", DType.INT8),
    ("one_shot", "ll128", DType.INT64),
    ("two_shot", "ll128", DType.BFLOAT16),
    ("two_shot", "ll", DType.INT64),
    ("two_shot", "ll128", DType.INT32),
    ("two_shot", "ll128", DType.FLOAT8_E4M3),
    ("two_shot", "simple", DType.FLOAT8_E5M2),
    ("ring", "ll128", DType.FLOAT16),
    ("ring", "ll128", DType.UINT8),
    ("ring", "simple", DType.FLOAT64),
]


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize(("algo", "proto", "dtype"), ALL_REDUCE)
def test_all_reduce(algo: str, proto: str, dtype: DType, nranks: int) -> None:
    for count in (1, 3001):
        request = make_request(Collective.ALL_REDUCE, dtype, count, nranks, algo, proto)
        assert (
            run(machine(nranks), request, small_plan(request), repeat=2, close=algo == "ring")
            == [""] * nranks
        )


ONE_PIECE = [
    (Collective.ALL_REDUCE, "one_shot"),
    (Collective.ALL_REDUCE, "two_shot"),
    (Collective.ALL_GATHER, "one_shot"),
    (Collective.REDUCE_SCATTER, "one_shot"),
    (Collective.ALL_TO_ALL, "one_shot"),
    (Collective.BROADCAST, "one_shot"),
    (Collective.REDUCE, "one_shot"),
]


@pytest.mark.parametrize(
    ("dtype", "proto"), [(DType.BFLOAT16, "ll128"), (DType.INT32, "ll"), (DType.INT32, "ll128")]
)
@pytest.mark.parametrize(("collective", "algo"), ONE_PIECE)
def test_single_tile(collective: Collective, algo: str, dtype: DType, proto: str) -> None:
    """The single-tile kernel alternates with the tiled one, which uses the same memory."""
    for count, offset, single in ((203, 0, True), (203, 1, True), (6001, 0, False), (96, 0, True)):
        request = make_request(collective, dtype, count, 3, algo, proto, root=1)
        plan = small_plan(request)
        assert kernel_spec(plan, request).single_tile is single
        assert run(machine(3), request, plan, offset=offset, close=True) == [""] * 3
    assert machine(3).packets_are_cleared()


FRAMES = ((DType.BFLOAT16, "ll128"), (DType.INT32, "ll128"), (DType.INT8, "ll"))
IN_PARTS = [(dtype, proto, 1, nranks) for dtype, proto in FRAMES for nranks in (2, 3, 8)]
IN_PARTS += [(DType.FLOAT64, "ll128", 2, 3), (DType.INT8, "ll128", 2, 3)]


@pytest.mark.parametrize(("dtype", "proto", "unroll", "nranks"), IN_PARTS)
def test_double_buffered(nranks: int, dtype: DType, proto: str, unroll: int) -> None:
    """Two to five tiles of various sizes alternate with single-tile and tiled launches on the same
    halves.
    """
    plan = DevicePlan(
        algo="two_shot", proto=proto, blocks=2, threads=64, unroll=unroll, double_buffered=True
    )
    part = plan.tile * (8 if proto == "ll" else 16) // dtype.itemsize * nranks
    for count, launches in ((part + 1, 2), (2 * part, 2), (2 * part + 100, 3), (5 * part - 77, 5)):
        request = make_request(Collective.ALL_REDUCE, dtype, count, nranks, "two_shot", proto)
        assert kernel_spec(plan, request).double_buffered
        before = machine(nranks).launches(0)
        assert run(machine(nranks), request, plan, offset=count % 2) == [""] * nranks
        assert machine(nranks).launches(0) == before + launches
        for other in (203, 6001):
            request = make_request(Collective.ALL_REDUCE, dtype, other, nranks, "one_shot", proto)
            assert run(machine(nranks), request, small_plan(request)) == [""] * nranks
    request = make_request(Collective.ALL_REDUCE, dtype, part, nranks, "two_shot", proto)
    assert kernel_spec(plan, request).single_tile


OTHERS = [
    (Collective.ALL_GATHER, "one_shot"),
    (Collective.REDUCE_SCATTER, "one_shot"),
    (Collective.ALL_TO_ALL, "one_shot"),
    (Collective.BROADCAST, "one_shot"),
    (Collective.BROADCAST, "chain"),
    (Collective.REDUCE, "one_shot"),
    (Collective.REDUCE, "chain"),
]


EIGHT = [
    (Collective.ALL_REDUCE, DType.BFLOAT16, "one_shot", "ll128"),
    (Collective.ALL_REDUCE, DType.BFLOAT16, "two_shot", "ll128"),
    (Collective.ALL_REDUCE, DType.INT32, "two_shot", "ll"),
    (Collective.ALL_GATHER, DType.FLOAT32, "one_shot", "ll128"),
    (Collective.REDUCE_SCATTER, DType.FLOAT32, "one_shot", "ll128"),
    (Collective.ALL_TO_ALL, DType.FLOAT32, "one_shot", "ll"),
    (Collective.BROADCAST, DType.FLOAT32, "chain", "ll128"),
    (Collective.REDUCE, DType.FLOAT32, "one_shot", "ll128"),
    (Collective.ALL_REDUCE, DType.BFLOAT16, "ring", "simple"),
    (Collective.ALL_REDUCE, DType.FLOAT32, "double_binary_tree", "simple"),
]


@pytest.mark.parametrize(("collective", "dtype", "algo", "proto"), EIGHT)
def test_eight_ranks(collective: Collective, dtype: DType, algo: str, proto: str) -> None:
    """The maximum number of ranks, with a single tile and several."""
    for count in (8, 203, 4001):
        request = make_request(collective, dtype, count, 8, algo, proto, root=5)
        assert run(machine(8), request, small_plan(request), repeat=2, close=True) == [""] * 8
    assert machine(8).packets_are_cleared()


FANS = [
    (collective, algo, dtype, proto)
    for collective, algo in ONE_PIECE
    for dtype, proto in ((DType.BFLOAT16, "ll128"), (DType.FLOAT64, "ll128"), (DType.INT32, "ll"))
    if frame_of(make_request(collective, dtype, 1, 3, algo, proto), proto)
    is not Framing.MASK  # masked packets are the work of whole warps
]


# fans of 4 threads with one to spare and without, of 8; those without one to spare of one type
OF_RANKS = [
    (*fan, nranks) for fan in FANS for nranks in (3, 4, 8) if nranks != 4 or DType.BFLOAT16 in fan
]


@pytest.mark.parametrize(("collective", "algo", "dtype", "proto", "nranks"), OF_RANKS)
def test_fanout(collective: Collective, algo: str, dtype: DType, proto: str, nranks: int) -> None:
    """Fanout kernels alternate with the tiled kernel, which uses the same memory."""
    for count, offset in ((1, 0), (203, 1), (4001, 0), (96, 0)):
        request = make_request(collective, dtype, count, nranks, algo, proto, root=nranks - 1)
        packets = vectors_of(request, algo, frame_of(request, proto))
        plan = small_plan(request)
        if packets * fanout_threads(nranks) <= 1024:
            plan = replace(
                plan,
                threads=64,
                unroll=1,
                fanout=fanout_threads(nranks),
                blocks=-(-packets * fanout_threads(nranks) // 64),
            )
        assert kernel_spec(plan, request).fanout == plan.fanout
        assert run(machine(nranks), request, plan, repeat=2, offset=offset) == [""] * nranks


@pytest.mark.parametrize(("collective", "algo"), OTHERS)
@pytest.mark.parametrize("proto", ["ll", "ll128", "simple"])
def test_other_collectives(collective: Collective, algo: str, proto: str) -> None:
    for dtype, count, root, offset in (
        (DType.FLOAT32, 1, 0, 0),
        (DType.FLOAT32, 1501, 2, 1),
        (DType.INT32, 1501, 1, 0),
    ):
        request = make_request(collective, dtype, count, 3, algo, proto, root=root)
        assert (
            run(machine(3), request, small_plan(request), repeat=2, offset=offset, close=True)
            == [""] * 3
        )


EVERY = [
    (name, collective, nranks)
    for name in catalog.names()
    for collective in sorted(catalog.get(name).collectives & set(ALGORITHMS))
    for nranks in (2, 3, 4)
    if catalog.get(name).builtin and catalog.get(name).supports(collective, nranks)
]


@pytest.mark.parametrize(("name", "collective", "nranks"), EVERY)
def test_every_schedule(name: str, collective: Collective, nranks: int) -> None:
    """Protocol Simple: FIFOs, scratch memory, steps on peers' memory."""
    for count, blocks in (
        (1, 1),
        (2003, 3),
        (90_001, 1),
    ):  # the last in several tiles, with FIFOs or scratch memory
        request = make_request(
            collective, DType.INT32, count, nranks, name, "simple", root=nranks - 1
        )
        plan = replace(choose(request), blocks=blocks, threads=64)
        assert run(machine(nranks), request, plan, repeat=2) == [""] * nranks


REUSED = [
    (Collective.ALL_REDUCE, "one_shot"),
    (Collective.ALL_REDUCE, "two_shot"),
    (Collective.ALL_REDUCE, "ring"),
    (Collective.ALL_GATHER, "one_shot"),
    (Collective.BROADCAST, "chain"),
    (Collective.REDUCE, "chain"),
]


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize(("collective", "algo"), REUSED)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT32])
def test_slots_are_reused(
    monkeypatch: pytest.MonkeyPatch, collective: Collective, algo: str, dtype: DType, nranks: int
) -> None:
    """Buffer halves that hold a fraction of the operation."""
    monkeypatch.setattr(layout, "HALF_BYTES", 64 << 10)
    request = make_request(collective, dtype, 40001, nranks, algo, "ll128", root=1)
    plan = replace(small_plan(request), blocks=1)
    args = lower.lower_packets(plan, request, machine(nranks).comm_args(0))
    field = layout.ARGS["nslots"]
    (nslots,) = struct.unpack_from("<" + field.code, args, field.offset)
    tiles = -(
        -vectors_of(request, algo, frame_of(request, "ll128")) // (plan.threads * plan.unroll)
    )
    assert nslots < tiles
    assert run(machine(nranks), request, plan, repeat=2, close=True) == [""] * nranks


@pytest.mark.parametrize("nranks", [2, 3, 4])
def test_a_ring_with_the_minimum_of_slots(monkeypatch: pytest.MonkeyPatch, nranks: int) -> None:
    request = make_request(Collective.ALL_REDUCE, DType.FLOAT32, 20001, nranks, "ring", "ll128")
    plan = replace(small_plan(request), blocks=1)
    least = min_slots("ring", nranks)
    monkeypatch.setattr(
        layout,
        "HALF_BYTES",
        16 * least * slot_packets(request, "ring", plan.tile, frame_of(request, "ll128")),
    )
    args = lower.lower_packets(plan, request, machine(nranks).comm_args(0))
    assert struct.unpack_from(
        "<" + layout.ARGS["nslots"].code, args, layout.ARGS["nslots"].offset
    ) == (least,)
    assert run(EmulatedMachine(nranks), request, plan, repeat=3, close=True) == [""] * nranks


@pytest.fixture
def sends_first() -> Iterator[str]:
    """Return a user schedule in which both ranks send more messages than a FIFO holds before they
    receive.
    """
    name, parts = "sends_first", range(layout.FIFO_SLOTS + 1)

    @catalog.register(name, collectives=[Collective.ALL_REDUCE], description="For a test.")
    def build(collective: Collective, nranks: int, root: int) -> Schedule:
        both = (1, 0)
        ranks = (
            [
                *(send(inp(p), to) for p in parts),
                *(recv_reduce_copy(inp(p), out(p), to) for p in parts),
            ]
            for to in both
        )
        return one_channel(name, collective, ranks, parts=len(parts))

    yield name
    catalog.unregister(name)


def test_a_schedule_gets_the_slots_it_needs(sends_first: str) -> None:
    for count in (5, 3001):
        request = make_request(
            Collective.ALL_REDUCE, DType.FLOAT32, count, 2, sends_first, "simple"
        )
        assert run(machine(2), request, small_plan(request), repeat=2) == [""] * 2


def halves(schedule: Schedule) -> Schedule:
    return passes.interleave([schedule, passes.pipeline(schedule, 2)])


MADE = {
    "pipeline": (lambda s: passes.pipeline(s, 4), "ring", Collective.ALL_REDUCE),
    "channels": (
        lambda s: passes.split_channels(s, 2),
        "double_binary_tree",
        Collective.ALL_REDUCE,
    ),
    "many channels": (
        lambda s: passes.pipeline(passes.split_channels(s, 16), 4),
        "ring",
        Collective.ALL_REDUCE,
    ),
    "scratch in channels": (
        lambda s: passes.split_channels(passes.split_messages(s), 2),
        "pat",
        Collective.ALL_GATHER,
    ),
    "side by side": (halves, "two_shot_put", Collective.ALL_REDUCE),
    "order": (lambda s: passes.relabel(s, (2, 0, 3, 1)), "pat", Collective.REDUCE_SCATTER),
    "fused": (lambda s: passes.fuse(passes.split_messages(s)), "pairwise", Collective.ALL_TO_ALL),
}


@pytest.mark.parametrize("made", MADE)
def test_composed_schedules(made: str) -> None:
    change, algo, collective = MADE[made]
    schedule = replace(change(catalog.build(algo, collective, 4)), name=f"made: {made}")
    catalog.register_schedule(schedule)
    try:
        for count in (3, 20_001):
            request = make_request(collective, DType.INT32, count, 4, schedule.name, "simple")
            plan = replace(choose(request), blocks=2 * schedule.nchannels, threads=64)
            assert run(machine(4), request, plan, repeat=2) == [""] * 4
    finally:
        catalog.unregister(schedule.name)


IN_ORDER = [
    (Collective.ALL_REDUCE, "ring", "ll128"),
    (Collective.ALL_REDUCE, "ring", "simple"),
    (Collective.REDUCE_SCATTER, "ring", "simple"),
    (Collective.ALL_GATHER, "ring", "simple"),
    (Collective.BROADCAST, "chain", "ll128"),
    (Collective.BROADCAST, "chain", "simple"),
    (Collective.REDUCE, "chain", "ll128"),
    (Collective.REDUCE, "chain", "simple"),
]


@pytest.mark.parametrize(("collective", "algo", "proto"), IN_ORDER)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT32])
def test_ring_orders_other_than_rank_order(
    monkeypatch: pytest.MonkeyPatch, collective: Collective, algo: str, proto: str, dtype: DType
) -> None:
    """Rings and chains in other orders, from every root, with reused slots."""
    monkeypatch.setattr(layout, "HALF_BYTES", 64 << 10)
    four = EmulatedMachine(4)
    inputs = [
        np.random.default_rng(r).integers(
            -100, 100, 6001 * (4 if collective is Collective.REDUCE_SCATTER else 1)
        )
        for r in range(4)
    ]
    typed = [
        x.astype(np.float32 if dtype is DType.FLOAT32 else np.int32) for x in inputs
    ]  # whole numbers: sums are exact in any order
    for order in ((0, 2, 1, 3), (3, 1, 0, 2)):
        for root in range(4) if collective.rooted else (0,):
            request = make_request(collective, dtype, 6001, 4, algo, proto, root=root)
            assert (
                run(
                    four, request, replace(small_plan(request), blocks=1), inputs=typed, order=order
                )
                == [""] * 4
            )


def test_only_neighbours_of_the_order_communicate() -> None:
    """In the order 0 2 1 3 a chain from rank 2 is 2 1 3 0: other pairs need no FIFO."""
    request = make_request(Collective.BROADCAST, DType.INT32, 500, 4, "chain", "simple", root=2)
    schedule = schedules.schedule_of(small_plan(request), request, (0, 2, 1, 3))
    assert schedule is not None
    assert schedules.senders_of(schedule) == [[3], [2], [], [1]]


class OneWay(EmulatedMachine):
    """Machine that drops writes to ranks other than the next one of the ring."""

    def comm_args(self, rank: int, order: Sequence[int] = ()) -> lower.CommArgs:
        usual, nowhere = super().comm_args(rank, order), self.nowhere.ctypes.data
        following = order[(order.index(rank) + 1) % self.nranks]
        return replace(
            usual,
            outboxes=tuple(
                box if peer == following else nowhere for peer, box in enumerate(usual.outboxes)
            ),
        )

    nowhere = np.zeros(layout.TOTAL_BYTES, np.uint8)


def test_a_ring_writes_to_the_next_of_the_order_only() -> None:
    request = make_request(Collective.ALL_REDUCE, DType.INT32, 3001, 4, "ring", "ll128")
    assert run(OneWay(4), request, small_plan(request), order=(0, 2, 1, 3)) == [""] * 4


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize(("collective", "algo"), REUSED)
def test_fifos_wrap_around(
    monkeypatch: pytest.MonkeyPatch, collective: Collective, algo: str, nranks: int
) -> None:
    """Protocol Simple with slots that hold a fraction of the operation; the halves are full of ones
    afterwards.
    """
    monkeypatch.setattr(layout, "HALF_BYTES", 64 << 10)
    request = make_request(collective, DType.INT32, 30001, nranks, algo, "simple", root=1)
    plan = replace(small_plan(request), blocks=2)
    assert run(machine(nranks), request, plan, repeat=3, close=True) == [""] * nranks
    assert machine(nranks).packets_are_cleared()


MASKED = [
    (Collective.ALL_GATHER, "one_shot"),
    (Collective.BROADCAST, "one_shot"),
    *(
        (collective, algo)
        for collective in (Collective.BROADCAST, Collective.REDUCE)
        for algo in ("chain", "double_binary_tree")
    ),
    *(
        (Collective.ALL_REDUCE, algo)
        for algo in ("one_shot", "two_shot", "ring", "double_binary_tree")
    ),
]


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize(("collective", "algo"), MASKED)
def test_words_that_are_masked_to_ones(
    monkeypatch: pytest.MonkeyPatch, collective: Collective, algo: str, nranks: int
) -> None:
    """Several tiles with reused slots; in sums all other ranks have zeros."""
    monkeypatch.setattr(layout, "HALF_BYTES", 128 << 10)
    fresh = EmulatedMachine(nranks)
    for launch in range(3):
        request = make_request(
            collective,
            DType.UINT32,
            1201 if algo == "one_shot" else 20001,
            nranks,
            algo,
            "ll128",
            root=nranks - 1,
        )
        inputs = [
            masked_to_ones(request.count, launch, 2 * launch + rank) for rank in range(nranks)
        ]
        if request.reduces:
            inputs[1:] = [np.zeros_like(x) for x in inputs[1:]]
        plan = small_plan(request, 2 if algo in ("chain", "double_binary_tree") else 1)
        assert run(fresh, request, plan, inputs=inputs) == [""] * nranks


@pytest.mark.parametrize("nranks", [2, 3])
def test_words_that_are_masked_to_ones_double_buffered(nranks: int) -> None:
    """Every tile is masked as a launch of its own."""
    fresh, plan = (
        EmulatedMachine(nranks),
        DevicePlan(
            algo="two_shot", proto="ll128", blocks=2, threads=64, unroll=2, double_buffered=True
        ),
    )
    request = make_request(
        Collective.ALL_REDUCE,
        DType.UINT32,
        3 * 4 * plan.tile * nranks,
        nranks,
        "two_shot",
        "ll128",
    )
    for seed in range(3):
        launch = fresh.launches(0)
        x = np.concatenate(
            [
                masked_to_ones(request.count // nranks, launch, seed + chunk)
                for chunk in range(nranks)
            ]
        )
        for part in (1, 2):
            places = slice(part * 4 * plan.tile, (part + 1) * 4 * plan.tile)
            x.reshape(nranks, -1)[:, places] = masked_to_ones(
                request.count // nranks, launch + part, seed
            )[places]
        inputs = [np.zeros_like(x) for _ in range(nranks)]
        inputs[seed % nranks] = x
        assert run(fresh, request, plan, inputs=inputs) == [""] * nranks
        assert fresh.launches(0) == launch + 3


def _late(condition: str, seconds: float) -> str:
    return (
        f"if ({condition}) {{ u64 until = now_ns() + {int(seconds * 1e9)}ull; "
        "while (now_ns() < until) poll_pause(); }\n"
    )


@pytest.mark.parametrize(
    ("begins", "sends"),
    [
        ("a.rank == 0 && blockIdx.x == 1", "k == 3 && a.rank == 0 && blockIdx.x == 0"),
        ("a.rank == 1 && blockIdx.x == 0", "k == 1 && a.rank == 0"),
    ],
    ids=["a block that is tiles behind", "a block that is ahead of the op records"],
)
def test_double_buffered_blocks_may_be_tiles_apart(
    monkeypatch: pytest.MonkeyPatch, begins: str, sends: str
) -> None:
    """Waiting blocks compare the own op record, which block 0 writes tile by tile."""

    def write_delayed(spec: KernelSpec, arch: int, machine: str = "") -> str:
        text = write_source(spec, arch, machine)
        if spec.double_buffered:
            text = text.replace(
                "  if (active) send_tile(a, g, w, 0);\n",
                _late(begins, 0.4) + "  if (active) send_tile(a, g, w, 0);\n",
            )
            text = text.replace(
                "      send_tile(a, g, w, k);\n",
                _late(sends, 0.15) + "      send_tile(a, g, w, k);\n",
            )
        return text

    monkeypatch.setattr(emulator, "write_source", write_delayed)
    fresh, plan = (
        EmulatedMachine(2),
        DevicePlan(
            algo="two_shot", proto="ll128", blocks=2, threads=64, unroll=1, double_buffered=True
        ),
    )
    before = make_request(Collective.ALL_REDUCE, DType.FLOAT32, 203, 2, "one_shot", "ll128")
    for _ in range(layout.OP_LOG_ENTRIES + 1):
        assert run(fresh, before, small_plan(before)) == ["", ""]
    request = make_request(
        Collective.ALL_REDUCE, DType.FLOAT32, 4 * 2 * 4 * plan.tile, 2, "two_shot", "ll128"
    )
    assert run(fresh, request, plan) == ["", ""]


@pytest.mark.parametrize(
    ("algo", "proto"),
    [("one_shot", "ll128"), ("two_shot", "ll"), ("ring", "simple"), ("one_shot", "simple")],
)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.INT32])
def test_premultiplied_sum(algo: str, proto: str, dtype: DType) -> None:
    request = replace(
        make_request(Collective.ALL_REDUCE, dtype, 2001, 3, algo, proto), op=RedOp.PREMUL_SUM
    )
    assert (
        run(
            machine(3),
            request,
            small_plan(request),
            scalars=[2.0, -1.5 if dtype.is_float else 5, 0.5],
            close=algo == "ring",
        )
        == [""] * 3
    )


@pytest.mark.parametrize("dtype", [DType.INT64, DType.UINT64])
def test_scalars_of_integers_are_exact(dtype: DType) -> None:
    """Including values that a float64 cannot represent."""
    request = replace(
        make_request(Collective.ALL_REDUCE, dtype, 203, 3, "one_shot", "ll128"), op=RedOp.PREMUL_SUM
    )
    inputs = [np.arange(203).astype(NUMPY_DTYPE[dtype]) + rank for rank in range(3)]
    scalars = [(1 << 53) + 1, int(np.iinfo(NUMPY_DTYPE[dtype]).max), 3]
    assert run(machine(3), request, small_plan(request), inputs=inputs, scalars=scalars) == [""] * 3


AVERAGED = [
    ("ring", Collective.ALL_REDUCE),
    ("double_binary_tree", Collective.ALL_REDUCE),
    ("chain", Collective.REDUCE),
]


@pytest.mark.parametrize(("algo", "collective"), AVERAGED)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT32])
def test_an_average_divides_once(algo: str, collective: Collective, dtype: DType) -> None:
    """Partial sums of integers pass through other ranks, so dividing at every hop, or never, is
    detected.
    """
    request = replace(
        make_request(collective, dtype, 3001, 4, algo, "simple", root=2), op=RedOp.AVG
    )
    inputs = [(1000 * np.arange(3001) + 8 * rank).astype(NUMPY_DTYPE[dtype]) for rank in range(4)]
    assert run(machine(4), request, small_plan(request), inputs=inputs) == [""] * 4


def test_the_wait_for_an_absent_rank_ends() -> None:
    lonely = EmulatedMachine(2, timeout_s=0.2)
    launch_each(
        lonely,
        [make_request(Collective.ALL_REDUCE, DType.FLOAT32, 100, 2, "one_shot", "ll128"), None],
    )
    assert lonely.errors() == [layout.ERROR_TIMEOUT, 0]
    assert [
        int(lonely.host[0][word])
        for word in (layout.HOST_PEER, layout.HOST_AWAITED, layout.HOST_LAUNCH)
    ] == [1, layout.AWAIT_PACKET, 1]


@pytest.mark.parametrize("seconds", [-5, 1000])
def test_a_clock_that_jumps_ends_no_wait(seconds: int) -> None:
    """A clock that stepped back a little was once read as a wrap-around, which exceeded any
    deadline.
    """
    two, clock = EmulatedMachine(2, timeout_s=60), EmulatorClock()
    request = make_request(
        Collective.ALL_REDUCE, DType.FLOAT32, 1, 2, "one_shot", "ll128"
    )  # one thread waits
    with ThreadPoolExecutor(1) as other:
        waits = other.submit(launch_each, two, [request, None])

        def wait_for_looks(looks: int) -> None:
            before = clock.reads()
            while clock.reads() < before + looks and not waits.done():
                os.sched_yield()

        wait_for_looks(1)
        clock.jump(seconds)
        wait_for_looks(2)
        launch_each(two, [None, request])
        waits.result()
    assert two.errors() == [0, 0]


def test_the_wait_for_an_exited_rank_ends() -> None:
    three = EmulatedMachine(3, timeout_s=60)
    three.host[0][layout.HOST_EXITED] = 1 << 2
    request = make_request(Collective.ALL_REDUCE, DType.FLOAT32, 1, 3, "one_shot", "ll128")
    launch_each(three, [request, None, None])
    assert three.errors() == [layout.ERROR_EXITED, 0, 0]


def test_data_sent_before_an_exit_are_received() -> None:
    """Including data that arrived after the last poll before the exit was known."""
    two, clock = EmulatedMachine(2, timeout_s=60), EmulatorClock()
    request = make_request(Collective.ALL_REDUCE, DType.FLOAT32, 1, 2, "one_shot", "ll128")
    with ThreadPoolExecutor(1) as other:
        with clock.paused():
            before = clock.reads()
            waits = other.submit(launch_each, two, [request, None])
            while clock.reads() == before and not waits.done():
                os.sched_yield()
            launch_each(two, [None, request])
            two.host[0][layout.HOST_EXITED] = 1 << 1
        waits.result()
    assert two.errors() == [0, 0]


def meeting(nranks: int) -> KernelSpec:
    return KernelSpec(
        family="device_barrier", nranks=nranks, dtype=DType.UINT8, reduces=False, threads=32
    )


def test_device_barrier() -> None:
    four = machine(4)
    for _ in range(6):
        args = [lower.pack_args(four.comm_args(rank), count=4096, signature=7) for rank in range(4)]
        four.launch(meeting(4), args, 1)
        request = make_request(Collective.ALL_REDUCE, DType.FLOAT32, 100, 4, "one_shot", "ll128")
        assert run(four, request, small_plan(request)) == [""] * 4


@pytest.mark.parametrize("field", ["signature", "count"])
def test_a_barrier_of_different_operations_is_a_mismatch(field: str) -> None:
    three = EmulatedMachine(3)
    said: list[dict[str, Any]] = [
        {"signature": 7, "count": 4096} | {field: 8 if rank == 1 else 9} for rank in range(3)
    ]
    args = [lower.pack_args(three.comm_args(rank), **said[rank]) for rank in range(3)]
    three.launch(meeting(3), args, 1)
    assert three.errors() == [layout.ERROR_MISMATCH] * 3
    assert int(three.host[0][layout.HOST_PEER]) == 1


def recorded_needs(where: EmulatedMachine, by: int, to: int, launch: int) -> int:
    """Return the needed ranks in a peer's op record of this launch; -1 without a record."""
    place = (by * layout.OP_LOG_ENTRIES + launch % layout.OP_LOG_ENTRIES) * 16
    number, _, _, word = struct.unpack(
        "<IIII",
        ctypes.string_at(where.comm_args(to).inboxes[by] + layout.OP_LOG_OFFSET + place, 16),
    )
    above = layout.NEEDS_ALL_SHIFT + 1
    return (
        word & (1 << above) - 1
        if (number, word >> above) == (launch, launch & (1 << 32 - above) - 1)
        else -1
    )


@pytest.mark.parametrize(
    ("collective", "algo", "proto"),
    [
        (Collective.ALL_REDUCE, "two_shot", "ll128"),
        (Collective.ALL_GATHER, "one_shot", "ll"),
        (Collective.BROADCAST, "one_shot", "ll"),
        (Collective.BROADCAST, "chain", "ll128"),
        (Collective.BROADCAST, "one_shot", "simple"),
        (Collective.REDUCE, "one_shot", "ll"),
        (Collective.REDUCE, "double_binary_tree", "ll128"),
    ],
)
def test_op_records_contain_needed_ranks(collective: Collective, algo: str, proto: str) -> None:
    three, every = EmulatedMachine(3), layout.NEEDS_ALL
    request = make_request(
        collective, DType.INT32, 1000, 3, algo, proto, root=1 if collective.rooted else 0
    )
    assert run(three, request, small_plan(request), repeat=2) == [""] * 3
    needs = {Collective.BROADCAST: [2, 0, 2], Collective.REDUCE: [0, every, 0]}.get(
        collective, [every] * 3
    )
    if proto == "simple":  # its ranks wait for all op records at the end
        needs = [every] * 3
    for by, to in itertools.permutations(range(3), 2):
        assert [recorded_needs(three, by, to, launch) for launch in (1, 2, 3)] == [
            needs[by],
            needs[by],
            -1,
        ], (by, to)


def test_barriers_need_all_ranks() -> None:
    two = EmulatedMachine(2)
    two.launch(
        meeting(2),
        [
            lower.pack_args(two.comm_args(rank), count=(1 << 40) + 4096, signature=7)
            for rank in range(2)
        ],
        1,
    )
    assert recorded_needs(two, 0, 1, 1) & layout.NEEDS_ALL


@pytest.mark.parametrize("left", [False, True])
def test_a_mismatch_ends_the_wait_of_the_rank_that_expects_more(left: bool) -> None:
    """Also if the peer, which found the mismatch first, has ended since."""
    for _ in range(10):
        two = EmulatedMachine(2, timeout_s=60)
        two.host[0][layout.HOST_ABORT] = left
        launch_each(
            two,
            [
                make_request(Collective.ALL_REDUCE, DType.FLOAT32, count, 2, "one_shot", "ll128")
                for count in (4000, 100)
            ],
        )
        if two.errors()[0] != 0:
            break  # else the peer's threads were late and had seen the end before
    assert two.errors()[0] == layout.ERROR_MISMATCH
    assert int(two.host[0][layout.HOST_PEER]) == 1


def test_a_mismatch_is_reported_to_a_rank_that_continues() -> None:
    """Rank 0 has received everything; rank 1 has not, finds the mismatch, and skips the next
    launch.
    """
    less, more = (
        make_request(Collective.ALL_REDUCE, DType.FLOAT32, count, 2, "one_shot", "ll128")
        for count in (500, 501)
    )
    for _ in range(100):
        two = EmulatedMachine(2, timeout_s=60)
        launch_each(two, [less, more])
        assert two.errors()[1] == layout.ERROR_MISMATCH
        if two.errors()[0] == 0:
            break  # else its threads were late and got the error as well
    assert two.errors()[0] == 0
    launch_each(two, [less, None])
    assert two.errors()[0] == layout.ERROR_MISMATCH
    assert [int(two.host[0][word]) for word in (layout.HOST_PEER, layout.HOST_LAUNCH)] == [1, 1]


def test_a_mismatch_without_a_wait_is_reported_one_launch_later() -> None:
    for _ in range(100):
        two = EmulatedMachine(2)
        launch_each(
            two,
            [
                make_request(Collective.ALL_REDUCE, DType.FLOAT32, count, 2, "one_shot", "ll128")
                for count in (99, 100)
            ],
        )
        if two.errors() == [0, 0]:
            break  # else one has waited, as the other's threads came late
    assert two.errors() == [0, 0]
    launch_each(
        two, [make_request(Collective.ALL_REDUCE, DType.FLOAT32, 100, 2, "one_shot", "ll128")] * 2
    )
    assert two.errors() == [layout.ERROR_MISMATCH] * 2
    assert int(two.host[0][layout.HOST_LAUNCH]) == 1


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"count": 4000}, {"count": 100}),  # other numbers of messages
        ({"count": 99}, {"count": 100}),  # the same messages
        (
            {"collective": Collective.BROADCAST, "algo": "chain"},
            {"collective": Collective.BROADCAST, "algo": "chain", "root": 1},
        ),
    ],
)
def test_a_mismatch_in_steps_is_reported_in_the_same_launch(
    mine: dict[str, Any], theirs: dict[str, Any]
) -> None:
    three = EmulatedMachine(3, timeout_s=60)
    usual = make_request(Collective.ALL_REDUCE, DType.FLOAT32, 100, 3, "two_shot", "simple")
    launch_each(three, [replace(usual, **mine), replace(usual, **mine), replace(usual, **theirs)])
    assert three.errors() == [layout.ERROR_MISMATCH] * 3
    assert [int(words[layout.HOST_PEER]) for words in three.host[:2]] == [2, 2]


def test_steps_and_packets_alternate() -> None:
    """Buffer halves alternate between launches of any kernels."""
    fresh = EmulatedMachine(3)
    for turn, (collective, algo, proto) in enumerate(
        [
            (Collective.BROADCAST, "chain", "ll128"),
            (Collective.BROADCAST, "chain", "simple"),
            (Collective.ALL_REDUCE, "one_shot", "ll128"),
            (Collective.REDUCE, "chain", "simple"),
            (Collective.REDUCE, "chain", "ll128"),
            (Collective.ALL_REDUCE, "two_shot", "simple"),
        ]
        * 2
    ):
        request = make_request(collective, DType.INT32, 1001, 3, algo, proto, root=turn % 3)
        assert run(fresh, request, small_plan(request)) == [""] * 3
        numbers = [
            int(memory[layout.STATE_OFFSET :][:8].view(np.uint64)[0]) for memory in fresh.memory
        ]
        assert numbers == [turn + 1] * 3
