"""Segmentation of multi-node GPU operations, without GPUs and ranks."""

from __future__ import annotations

import dataclasses
import itertools
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miraccl.ops.device_arrays import DeviceMemory
from miraccl.runtime.gpu.operations import DeviceTransfer
from miraccl.runtime.multinode.message_rounds import ROUND_SLOTS, message_bytes, split_transfers
from miraccl.runtime.multinode.node_layout import group_by_node, node_name
from miraccl.runtime.multinode.segments import (
    ALIGN,
    MIN_SEGMENT_BYTES,
    SegmentCopy,
    StagedShape,
    split_segments,
)
from miraccl.types import Collective, DType

SLOT = 64 << 10
EVEN = [c for c in Collective if c <= Collective.SCATTER]


def copies_per_byte(copies: list[SegmentCopy], nbytes: int) -> np.ndarray:
    """Return the number of copies of each byte of the user's buffer."""
    times = np.zeros(nbytes, np.int8)
    for copy in copies:
        assert copy.nbytes > 0
        assert copy.device + copy.nbytes <= nbytes
        times[copy.device : copy.device + copy.nbytes] += 1
    return times


def disjoint(copies: tuple[SegmentCopy, ...]) -> bool:
    ends = sorted((copy.host, copy.host + copy.nbytes) for copy in copies)
    return all(a[1] <= b[0] for a, b in itertools.pairwise(ends))


@given(
    collective=st.sampled_from(EVEN),
    dtype=st.sampled_from([DType.INT8, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64]),
    nranks=st.integers(2, 9),
    count=st.one_of(st.integers(0, 40), st.integers(1, 60_000)),
    data=st.data(),
)
def test_even_collectives(
    collective: Collective, dtype: DType, nranks: int, count: int, data: Any
) -> None:
    root = data.draw(st.integers(0, nranks - 1))
    shapes = [
        StagedShape.even(collective, dtype.itemsize, rank, nranks, root, count)
        for rank in range(nranks)
    ]
    plans = [split_segments(shape, SLOT) for shape in shapes]
    assert len({len(plan) for plan in plans}) == 1, "ranks cut alike"
    assert (len(plans[0]) == 0) == (count == 0)
    for rank, (shape, plan) in enumerate(zip(shapes, plans, strict=True)):
        check_plan(shape, plan)
        down = copies_per_byte([c for p in plan for c in p.down], sum(shape.sends) * dtype.itemsize)
        up = copies_per_byte([c for p in plan for c in p.up], sum(shape.receives) * dtype.itemsize)
        gives = rank == root or collective not in (Collective.BROADCAST, Collective.SCATTER)
        gets = rank == root or collective not in (Collective.REDUCE, Collective.GATHER)
        assert (down == (1 if gives else 0)).all()
        assert (
            up == (1 if gets and not (collective is Collective.BROADCAST and rank == root) else 0)
        ).all()


def check_plan(shape: StagedShape, plan: Any) -> None:
    for piece in plan:
        assert all(copy.host + copy.nbytes <= SLOT for copy in (*piece.down, *piece.up)), (
            "a slot overflows"
        )
        assert disjoint(piece.down)
        assert disjoint(piece.up)
        for begin, counts in (
            (piece.source, piece.source_counts),
            (piece.target, piece.target_counts),
        ):
            assert begin % shape.itemsize == 0
            assert begin + sum(counts) * shape.itemsize <= SLOT


@given(
    collective=st.sampled_from(
        [Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.GATHER, Collective.SCATTER]
    ),
    counts=st.lists(st.integers(0, 20_000), min_size=2, max_size=6),
)
def test_uneven_collectives(collective: Collective, counts: list[int]) -> None:
    plans = []
    for rank, mine in enumerate(counts):
        whole, one = tuple(counts), (mine,)
        gathers = collective in (Collective.ALL_GATHER, Collective.GATHER)
        rooted = collective.rooted and rank != 0
        sends, receives = (
            (one, () if rooted else whole) if gathers else (() if rooted else whole, one)
        )
        more: dict[str, Any] = {
            "counts": whole,
            "uneven": True,
            "rank": rank,
            "nranks": len(counts),
        }
        shape = StagedShape(
            collective=collective, itemsize=4, sends=sends, receives=receives, **more
        )
        plans.append(split_segments(shape, SLOT))
        check_plan(shape, plans[-1])
        assert (copies_per_byte([c for p in plans[-1] for c in p.down], 4 * sum(sends)) == 1).all()
        assert (copies_per_byte([c for p in plans[-1] for c in p.up], 4 * sum(receives)) == 1).all()
    assert len({len(plan) for plan in plans}) == 1
    for pieces in zip(*plans, strict=True):
        assert len({piece.counts for piece in pieces}) == 1, "all ranks give the same counts"


def test_segments_are_equal_and_scale_with_size() -> None:
    def sizes(nbytes: int, slot: int = 4 << 20, **more: Any) -> list[int]:
        shape = dataclasses.replace(
            StagedShape.even(Collective.ALL_REDUCE, 4, 0, 2, 0, nbytes // 4), **more
        )
        return [sum(piece.source_counts) * 4 for piece in split_segments(shape, slot)]

    assert sizes(1 << 10) == [1 << 10]
    assert sizes(2 * MIN_SEGMENT_BYTES - 4) == [2 * MIN_SEGMENT_BYTES - 4]
    assert sizes(2 * MIN_SEGMENT_BYTES) == [MIN_SEGMENT_BYTES] * 2
    assert sizes(1 << 20) == [1 << 18] * 4
    assert sizes(1 << 20, overlaps=False) == [1 << 20]
    large = sizes(64 << 20)
    assert len(large) == 17
    assert max(large) - min(large) < 17 * 256


def test_adjacent_copies_merge_and_offsets_are_respected() -> None:
    (piece,) = split_segments(StagedShape.even(Collective.ALL_GATHER, 4, 0, 4, 0, 10), SLOT)
    assert piece.up == (SegmentCopy(1, 0, 0, 160),)
    shape = StagedShape(
        collective=Collective.ALL_GATHER,
        itemsize=4,
        rank=0,
        nranks=2,
        sends=(3,),
        receives=(3, 3),
        block_offsets=(6, 0),
    )
    (piece,) = split_segments(shape, SLOT)
    assert piece.up == (SegmentCopy(1, 24, 0, 12), SegmentCopy(1, 0, 12, 12))


groups = st.lists(
    st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 30_000)), min_size=1, max_size=8
)


@given(calls=groups, far=st.sampled_from([1, 4, 7, 40]))
def test_messages_do_not_depend_on_grouping(calls: list[tuple[bool, int, int]], far: int) -> None:
    transfers = [
        DeviceTransfer(receives=r, peer=p, memory=DeviceMemory(4096, n, DType.FLOAT32))
        for r, p, n in calls
    ]
    together, need = split_transfers(transfers, SLOT, far)
    alone = [round for transfer in transfers for round in split_transfers([transfer], SLOT, far)[0]]

    def lane(rounds: Any, receives: bool, peer: int) -> list[int]:
        return [
            m.count
            for round in rounds
            for m in round.messages
            if (m.receives, m.peer) == (receives, peer)
        ]

    for receives in (False, True):
        for peer in range(4):
            assert lane(together, receives, peer) == lane(alone, receives, peer)
    for number, transfer in enumerate(transfers):
        copies = [
            c
            for round in together
            for c in (*round.segment.down, *round.segment.up)
            if c.buffer == number
        ]
        assert (copies_per_byte(copies, transfer.memory.nbytes) == 1).all()
    for round in together:
        assert disjoint((*round.segment.down, *round.segment.up))
        assert all(
            copy.host + copy.nbytes <= need for copy in (*round.segment.down, *round.segment.up)
        )
        assert all(
            copy.nbytes <= message_bytes(SLOT, far)
            for copy in (*round.segment.down, *round.segment.up)
        )
    if 4 * sum(n for _, _, n in calls) <= SLOT:
        assert len(together) == 1, "what fits goes on together"
    if far >= 4:  # as many as there are peers here
        assert need <= ROUND_SLOTS * SLOT + 8 * ALIGN, "a round takes no more memory for more peers"


def test_node_names_follow_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = types.SimpleNamespace(rank=3, hosts=["a", "a", "b", "b"])
    assert node_name(session) == "b"
    monkeypatch.setenv("NCCL_HOSTID", "rack")
    assert node_name(session) == "rack"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert node_name(session) == "rack"
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
    assert node_name(session) == "rack/rank3"
    assert group_by_node(["b", "a", "b"]) == [(0, 2), (1,)]
