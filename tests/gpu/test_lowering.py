"""Decisions without a GPU: plans, shapes, arguments, rejections."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miraccl.errors import InvalidUsage, MissingDependency
from miraccl.executor.cuda import driver, layout, lower, schedules, toolkit
from miraccl.executor.cuda.buffer_halves import control_packets, min_slots, slot_packets
from miraccl.executor.cuda.choice import choose
from miraccl.executor.cuda.gpu import Gpu
from miraccl.executor.cuda.launch_shape import MAX_DOUBLE_BUFFERED_TILES
from miraccl.executor.cuda.plan import (
    ALGORITHMS,
    TREES,
    DevicePlan,
    Request,
    frame_of,
    kernel_spec,
    rounds_of,
    vectors_of,
)
from miraccl.schedule import catalog, passes
from miraccl.schedule.verify import FIFO_DEPTH
from miraccl.types import Collective, DType, RedOp

SHAPE = 4 + layout.MAX_CHANNELS + 1 + 3  # of PROGRAM_HEAD, up to scratch chunks

MOVED = tuple(c for c in Collective if c <= Collective.ALL_TO_ALL)


def comm_args(nranks: int, rank: int = 0) -> lower.CommArgs:
    boxes = tuple(1 << 40 | r for r in range(nranks))
    return lower.CommArgs(
        rank=rank, own=1 << 41, inboxes=boxes, outboxes=boxes, host=4096, timeout_ns=10**9
    )


def request(
    collective: Collective = Collective.ALL_REDUCE,
    dtype: DType = DType.BFLOAT16,
    count: int = 1000,
    nranks: int = 2,
    **more: object,
) -> Request:
    return Request(
        collective=collective,
        dtype=dtype,
        op=RedOp.SUM,
        count=count,
        nranks=nranks,
        **more,  # type: ignore[arg-type]
    )


def field(block: bytearray, name: str) -> int:
    return int(struct.unpack_from("<" + layout.ARGS[name].code, block, layout.ARGS[name].offset)[0])


def requests() -> Iterator[Request]:
    for nranks in (2, 3, 4, 8):
        for collective in MOVED:
            for dtype in (DType.BFLOAT16, DType.INT32, DType.FLOAT64, DType.UINT8):
                for power in range(0, 31, 3):
                    for algo in ("", TREES) if TREES in ALGORITHMS[collective] else ("",):
                        yield request(
                            collective,
                            dtype,
                            max(1, (1 << power) // dtype.itemsize),
                            nranks,
                            algo=algo,
                        )


def test_every_size_has_a_plan_that_fits() -> None:
    for asked in requests():
        plan = choose(asked)
        kernel_spec(plan, asked)
        if not plan.uses_packets:
            schedule = catalog.build(plan.algo, asked.collective, asked.nranks)
            schedules.lower_steps(schedule, plan, asked, comm_args(asked.nranks))
            continue
        block = lower.lower_packets(plan, asked, comm_args(asked.nranks))
        tile = plan.tile
        slots = field(block, "nslots") * slot_packets(
            asked, plan.algo, tile, frame_of(asked, plan.proto)
        )
        assert (slots + control_packets(asked, plan.algo, tile)) * 16 <= layout.HALF_BYTES
        assert plan.blocks <= plan.min_blocks * asked.multiprocessors, (
            "blocks that wait for one another are on the GPU together"
        )


@given(
    count=st.integers(1, 1 << 32),
    nranks=st.sampled_from([2, 3, 4, 8]),
    algo=st.sampled_from(["one_shot", "two_shot", "ring", TREES]),
)
@settings(max_examples=200, deadline=None)
def test_slots_are_reused_only_where_it_is_safe(count: int, nranks: int, algo: str) -> None:
    asked = request(count=count, nranks=nranks, algo=algo, proto="ll128")
    plan = choose(asked)
    block = lower.lower_packets(plan, asked, comm_args(nranks))
    vectors = -(-count * 2 // 16)
    if rounds_of(asked, plan.algo) == 2:
        vectors = -(-vectors // nranks)
    tiles = -(-vectors // plan.tile)
    nslots, ahead = field(block, "nslots"), field(block, "lookahead")
    assert nslots >= 1
    if plan.double_buffered and tiles > 1:  # each tile has a half
        assert (tiles <= MAX_DOUBLE_BUFFERED_TILES, nslots, ahead) == (True, 1, 0)
        assert (
            slot_packets(asked, algo, plan.tile, frame_of(asked, "ll128"))
            <= layout.HALF_BYTES // 16
        )
    elif tiles > nslots:
        assert nslots >= min_slots(algo, nranks)
        assert algo == "ring" or nslots >= (ahead if algo == TREES else 2 * ahead) + 2


def test_all_ranks_choose_the_same_plan() -> None:
    for asked in requests():
        assert choose(asked) == choose(asked)
        plan, ranks = choose(asked), range(asked.nranks)
        blocks = [
            lower.lower_packets(plan, asked, comm_args(asked.nranks, r))
            for r in ranks
            if plan.uses_packets
        ]
        assert (
            len({(field(b, "count"), field(b, "nslots"), field(b, "lookahead")) for b in blocks})
            <= 1
        )


def test_memory_regions_do_not_overlap() -> None:
    assert layout.ROW_FIFOS_OFFSET == layout.PACKETS_OFFSET + 2 * layout.HALF_BYTES
    assert layout.TOTAL_BYTES <= 64 << 20
    words = 3 * layout.MAX_RANKS * layout.BLOCKS * layout.FIFO_WORD_BYTES
    for slots in range(1, FIFO_DEPTH * layout.MAX_RANKS):
        for blocks in (1, 64, layout.BLOCKS):
            assert layout.slot_bytes(slots, blocks) >= 1024
            assert slots * blocks * layout.slot_bytes(slots, blocks) + words <= layout.HALF_BYTES


@pytest.mark.parametrize("nranks", [2, 3, 4, 8])
def test_steps_are_encoded_as_the_kernel_reads_them(nranks: int) -> None:
    asked = request(dtype=DType.INT32, count=1 << 20, nranks=nranks, algo="ring", proto="simple")
    schedule = catalog.build("ring", Collective.ALL_REDUCE, nranks)
    for rank in range(nranks):
        block = bytes(
            schedules.lower_steps(schedule, choose(asked), asked, comm_args(nranks, rank))
        )
        at = layout.args_bytes(nranks)
        part, tile, parts, channels, *first, slot, behind, scratch = struct.unpack_from(
            layout.PROGRAM_HEAD, block, at
        )[:SHAPE]
        *apart, here, there = struct.unpack_from(layout.PROGRAM_HEAD, block, at)[SHAPE:]
        steps = schedule.channels[0][rank]
        assert (parts, channels, first[:2]) == (nranks, 1, [0, len(steps)])
        assert part * nranks >= 1 << 20
        assert part * 4 % 16 == 0
        assert tile * 4 <= slot <= layout.slot_bytes(2, layout.BLOCKS)
        assert (behind, scratch, set(apart)) == (2 * layout.BLOCKS * slot, 0, {0})
        assert (here, there) == (bytes(layout.MAX_RANKS),) * 2  # each rank has one that sends to it
        at += struct.calcsize(layout.PROGRAM_HEAD)
        for step in steps:
            op, _, _, _, frm, to, chunks, whole, src, dst, _ = struct.unpack_from(
                layout.STEP, block, at
            )
            assert (op, chunks, whole) == (step.op, step.chunks, False)  # nothing to divide
            assert (frm, to) == (
                -1 if step.recv_peer is None else step.recv_peer,
                -1 if step.send_peer is None else step.send_peer,
            )
            assert (src, dst) == (
                step.src.index if step.src else 0,
                step.dst.index if step.dst else 0,
            )
            at += struct.calcsize(layout.STEP)


def test_large_sums_use_the_ring_where_allowed() -> None:
    large = (64 << 20) // 2
    assert choose(request(count=large, nranks=4)).algo == "ring"
    assert choose(request(count=large, nranks=2)).algo == "one_shot"
    others = (
        request(count=large - 1, nranks=4),
        request(count=large, nranks=4, ordered=True),
        request(count=large, nranks=4, proto="ll128"),
        request(
            count=2 * large, nranks=4, dtype=DType.FLOAT8_E4M3
        ),  # rounded at every hop, these would not be worth much
    )
    assert {choose(other).algo for other in others} == {"two_shot"}
    assert choose(request(count=(32 << 20) // 2, nranks=8)).algo == "ring"
    for collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        assert choose(request(collective, count=(8 << 20) // 2, nranks=8)).algo == "ring"
        assert choose(request(collective, count=(8 << 20) // 2 - 1, nranks=8)).algo == "one_shot"
        assert choose(request(collective, count=large, nranks=4)).algo == "ring"
        assert choose(request(collective, count=large - 1, nranks=4)).algo == "one_shot"
        assert choose(request(collective, count=1 << 29, nranks=2)).algo == "one_shot"
    for collective in (Collective.REDUCE, Collective.REDUCE_SCATTER):
        assert choose(request(collective, count=large, nranks=8, ordered=True)).algo == "one_shot"


@pytest.mark.parametrize("collective", [Collective.BROADCAST, Collective.REDUCE])
def test_many_ranks_use_trees_between_one_shot_and_chain(collective: Collective) -> None:
    names = [
        choose(request(collective, count=nbytes // 2, nranks=8)).algo
        for nbytes in (64 << 10, 65 << 10, 512 << 10, 513 << 10)
    ]
    assert names == ["one_shot", "double_binary_tree", "double_binary_tree", "chain"]
    assert choose(request(collective, count=200 << 9, nranks=4)).algo == "one_shot"
    assert choose(request(collective, count=300 << 10, nranks=4)).algo == "chain"


def test_fanout_is_used_for_a_single_tile() -> None:
    def fan(nbytes: int, nranks: int, multiprocessors: int = 128) -> int:
        plan = choose(request(count=nbytes // 2, nranks=nranks, multiprocessors=multiprocessors))
        assert plan.fanout == 1 or plan.blocks * plan.threads >= plan.fanout * -(
            -nbytes // 16 // (nranks if plan.algo == "two_shot" else 1)
        )
        return plan.fanout

    assert [fan(n << 10, 8) for n in (1, 64, 128, 1024, 1025)] == [8, 8, 8, 8, 1]
    assert [fan(n << 10, 4) for n in (1, 64, 128, 1024, 1025)] == [4, 4, 4, 4, 1]
    assert fan(1 << 10, 2) == 1
    assert fan(64 << 10, 8, multiprocessors=8) == 1  # not a single tile
    assert [
        choose(request(Collective.ALL_GATHER, count=n << 9, nranks=8)).proto for n in (64, 65)
    ] == ["ll", "ll128"]
    assert (
        choose(request(Collective.ALL_GATHER, count=64 << 9, nranks=8, multiprocessors=8)).proto
        == "ll128"
    )
    assert choose(request(Collective.ALL_GATHER, count=64 << 9, nranks=2)).proto == "ll128"


@pytest.mark.parametrize("nbytes", [1 << 20, 2 << 20, 4 << 20, 8 << 20])
def test_eight_ranks_use_a_single_tile_up_to_8_mib(nbytes: int) -> None:
    asked = request(count=nbytes // 2, nranks=8, multiprocessors=128)
    plan = choose(asked)
    assert (plan.algo, plan.blocks, kernel_spec(plan, asked).single_tile) == ("two_shot", 128, True)
    lower.lower_packets(plan, asked, comm_args(8, 3))


@pytest.mark.parametrize(
    ("nbytes", "parts"), [(9 << 20, 2), (16 << 20, 2), (20 << 20, 3), ((32 << 20) - 2, 4)]
)
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.INT32])
def test_eight_ranks_are_double_buffered_above(dtype: DType, nbytes: int, parts: int) -> None:
    asked = request(count=nbytes // dtype.itemsize, dtype=dtype, nranks=8, multiprocessors=128)
    plan = choose(asked)
    assert (plan.algo, plan.threads, kernel_spec(plan, asked).double_buffered) == (
        "two_shot",
        512,
        True,
    )
    assert -(-vectors_of(asked, plan.algo, frame_of(asked, plan.proto)) // plan.tile) == parts
    assert "double-buffered" in plan.reason
    lower.lower_packets(plan, asked, comm_args(8, 3))


def test_double_buffering_is_for_many_gpus_and_most_multiprocessors() -> None:
    assert not choose(request(count=8 << 20, nranks=4)).double_buffered
    assert not choose(request(count=8 << 20, nranks=8, multiprocessors=32)).double_buffered
    assert choose(request(count=24 << 20, nranks=8, proto="ll128")).double_buffered
    assert not choose(request(count=40 << 20, nranks=8, proto="ll128")).double_buffered


def test_double_buffered_sizes_beyond_32_bits_are_rejected() -> None:
    asked = request(count=1 << 30, nranks=8, algo="two_shot", proto="ll128")
    plan = replace(choose(asked), blocks=128, threads=512, double_buffered=True)
    with pytest.raises(InvalidUsage, match="2147483648 bytes: at most 1073741824 are allowed"):
        lower.lower_packets(plan, asked, comm_args(8, 3))


def test_steps_beyond_the_capacity_of_a_launch_are_rejected() -> None:
    ring = catalog.build("ring", Collective.ALL_REDUCE, 8)
    assert [schedules.step_capacity(passes.pipeline(ring, depth)) for depth in (1, 8, 30)] == [
        120,
        120,
        480,
    ]
    with pytest.raises(InvalidUsage, match=r"has 1500 steps of a rank, a launch holds 1280"):
        schedules.step_capacity(passes.pipeline(ring, 100))


def test_arguments_stay_below_the_limit_of_a_launch() -> None:
    head, step = (
        layout.args_bytes(layout.MAX_RANKS) + struct.calcsize(layout.PROGRAM_HEAD),
        struct.calcsize(layout.STEP),
    )
    assert head + layout.STEP_CAPACITIES[0] * step <= layout.SMALL_ARGUMENT_BYTES
    assert head + layout.STEP_CAPACITIES[-1] * step <= layout.LARGE_ARGUMENT_BYTES


@pytest.mark.parametrize(("depth", "scratch"), [(1, 0), (4, 300), (4, 3000)])
def test_slots_and_scratch_fit_a_buffer_half(depth: int, scratch: int) -> None:
    """Including fewer blocks than planned."""
    ring = catalog.build("ring", Collective.ALL_REDUCE, 8)
    schedule = replace(passes.pipeline(ring, depth), scratch_chunks=scratch)
    asked = request(dtype=DType.FLOAT32, count=1 << 24, nranks=8, algo="ring", proto="simple")
    blocks = schedules.grid_blocks(choose(asked), schedule)
    block = bytes(schedules.lower_steps(schedule, choose(asked), asked, comm_args(8)))
    _, tile, *_, slot, behind, chunks = struct.unpack_from(
        layout.PROGRAM_HEAD, block, layout.args_bytes(8)
    )[:SHAPE]
    words = 3 * layout.MAX_RANKS * layout.BLOCKS * layout.FIFO_WORD_BYTES
    assert (chunks, slot) == (scratch, 4 * tile)
    assert tile > 0
    assert behind + blocks * scratch * tile * 4 + words <= layout.HALF_BYTES


def test_unsupported_schedules_are_rejected() -> None:
    asked = request(dtype=DType.FLOAT32, nranks=4, algo="two_shot_put", proto="simple")
    with pytest.raises(InvalidUsage, match="in no window"):
        schedules.lower_steps(
            catalog.build("two_shot_put", Collective.ALL_REDUCE, 4),
            choose(asked),
            asked,
            comm_args(4),
        )


def test_bad_requests_are_rejected() -> None:
    with pytest.raises(InvalidUsage, match="protocol"):
        choose(request(proto="fast"))
    huge = DevicePlan(algo="two_shot", proto="ll128", blocks=512, threads=512, unroll=4)
    with pytest.raises(InvalidUsage, match="buffer half"):
        lower.lower_packets(huge, request(count=1 << 30, nranks=8), comm_args(8))


def test_missing_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    def refuse(name: str) -> None:
        raise ImportError(f"no module {name}")

    toolkit.bindings.cache_clear()
    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(MissingDependency, match=r"miraccl\[cuda\]"):
        toolkit.bindings("driver")
    toolkit.bindings.cache_clear()


def test_a_missing_driver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bindings:
        @staticmethod
        def cuInit(flags: int) -> None:  # noqa: N802
            raise RuntimeError('"cuda" can only be found via system search')

    monkeypatch.setattr(driver, "bindings", lambda name: Bindings)
    with pytest.raises(MissingDependency, match=r"no NVIDIA driver.*miraccl doctor"):
        Gpu(0)


@pytest.mark.parametrize("part", [1, 7, 8, 100, 4096, 1 << 20, (1 << 28) + 24, 1 << 30])
@pytest.mark.parametrize("lanes", [1, 32, 128])
@pytest.mark.parametrize("room", [4, 60, 1024, 24320])
def test_tiles_form_equal_rounds(part: int, lanes: int, room: int) -> None:
    tile = schedules.tile_elements(part, lanes, room, 4)
    assert 0 < tile <= room
    assert tile % 4 == 0
    rounds = -(-part // (lanes * tile))
    if room >= 32 and room % 32 == 0:
        assert tile % 32 == 0
        assert rounds == -(-part // (lanes * room)), "more rounds than are needed"
        assert rounds * lanes * (tile - 32) < part, "the last round is shorter than it needs to be"
