"""Re-shardings as schedules: meaning, proof, time, text and picture."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.p2p.reshard import Mesh, ReshardPlan, reshard
from miraccl.p2p.reshard.plan import Move
from miraccl.schedule import catalog
from miraccl.schedule.ir import ChunkRanks, Op, Schedule
from miraccl.schedule.reshard_schedule import ReshardSchedule
from miraccl.schedule.steps import inp, out, put, signal, wait
from miraccl.schedule.verify import verify
from miraccl.sim.reshard_time import simulate_reshard
from miraccl.tools.schedule_draw import draw_svg
from miraccl.types import Collective
from tests.p2p.test_reshard import meshes, parts_of


def by_number(mesh: Mesh, parts: dict[int, Any], first: int = 0) -> dict[int, Any]:
    """Return the parts of a mesh by the numbers of its ranks in a schedule."""
    return {first + number: parts[rank] for number, rank in enumerate(mesh.ranks)}


@settings(max_examples=50, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=0, max_size=3))
def test_meaning_and_time_of_any_pair_of_meshes(data: Any, shape: list[int]) -> None:
    if shape:
        src, dst = data.draw(meshes(len(shape))), data.draw(meshes(len(shape)))
    else:
        src, dst = Mesh(2, "replicate"), Mesh(3, "replicate")
    plan = reshard(src=src, dst=dst, shape=shape, dtype="int32")
    made = plan.schedule
    made.verify()
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    boxes = [*plan.src_boxes.values(), *plan.dst_boxes.values()]
    got = made.interpret(by_number(src, parts_of(src, array)), boxes)
    wanted = by_number(dst, parts_of(dst, array), src.nranks)
    for rank, part in wanted.items():
        assert rank in got or not part.size
        assert rank not in got or (got[rank] == part).all()
    assert plan.interpret(parts_of(src, array)).keys() == set(dst.ranks)
    time_us = simulate_reshard(made, gb_s=2.0).time_us
    assert time_us >= plan.bound_us(2.0) * (1 - 1e-9)
    assert time_us >= plan.predicted_us(2.0, 0.0) * (1 - 1e-9)


@pytest.mark.parametrize(("src", "dst"), [(4, 4), (8, 2), (3, 6)])
def test_a_balanced_plan_takes_the_predicted_time(src: int, dst: int) -> None:
    plan = reshard(
        src=Mesh(src, "shard0"), dst=Mesh(dst, "shard1"), shape=(48, 48), dtype="float32"
    )
    for transfer_us in (0.0, 20.0 if src == dst else 0.0):
        got = simulate_reshard(plan.schedule, gb_s=0.5, transfer_us=transfer_us).time_us
        assert got == pytest.approx(plan.predicted_us(0.5, transfer_us))


def test_the_extents_of_a_run_are_the_chunks_of_the_schedule() -> None:
    plan = reshard(
        src=Mesh((2, 2), ("shard0", "shard1")),
        dst=Mesh(3, "shard1"),
        shape=(5, 7),
        dtype="int16",
    )
    made, first = plan.schedule, plan.src.nranks
    for source in plan.src.ranks:
        for target in plan.dst.ranks:
            boxes = [
                made.box(chunk)
                for channel in made.schedule.channels
                for step in channel[source]
                if step.op is Op.PUT and step.send_peer == first + target and step.dst
                for chunk in step.dst
            ]
            moved = [move.box for move in plan.moves_from(source) if move.dst == target]
            assert byte_pairs(plan, source, target, boxes) == byte_pairs(
                plan, source, target, moved
            )


def byte_pairs(plan: ReshardPlan, source: int, target: int, boxes: Any) -> list[tuple[int, int]]:
    """Return (offset at the source, offset at the target) of every byte of some boxes."""
    found = []
    for box in boxes:
        here, there, nbytes = plan.offsets(Move(src=source, dst=target, box=box))
        found += [(a + i, b + i) for a, b in zip(here, there, strict=True) for i in range(nbytes)]
    return sorted(found)


def broken(change: Any) -> ReshardPlan:
    plan = reshard(src=Mesh(2, "shard0"), dst=Mesh(2, "shard1"), shape=(4, 4), dtype="int8")
    return replace(plan, moves=tuple(change(list(plan.moves))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda moves: moves[1:], "is not written"),
        (lambda moves: [*moves, moves[0]], "is written 2 times by one transfer"),
        (lambda moves: [*moves, replace(moves[0], src=1)], "before it is written"),
        (lambda moves: [replace(moves[0], src=1), *moves[1:]], "before it is written"),
        (lambda moves: [*moves[:-1], replace(moves[-1], dst=0)], "which does not need it"),
    ],
)
def test_the_verifier_of_collectives_refuses_broken_plans(change: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        broken(change).schedule.verify()


def test_two_sources_of_one_chunk_are_unordered() -> None:
    plan = reshard(src=Mesh(2, "replicate"), dst=Mesh(1, "replicate"), shape=(4,), dtype="int8")
    again = replace(plan.moves[0], src=1 - plan.moves[0].src)
    twice = replace(plan, moves=(*plan.moves, again))
    with pytest.raises(ScheduleError, match="unordered"):
        twice.schedule.verify()


def test_text_and_picture() -> None:
    made = reshard(
        src=Mesh(2, "shard0"), dst=Mesh(3, "shard1"), shape=(4, 6), dtype="float32"
    ).schedule
    text = made.dump()
    assert "shard 0 ranks 0 to 2" in text
    again = ReshardSchedule.parse(text)
    assert again == made
    assert again.box(4) == ((2, 4), (2, 4))
    assert "writes a chunk into the memory of the peer" in draw_svg(again.schedule)
    with pytest.raises(ScheduleError, match="cannot parse a re-sharding"):
        ReshardSchedule.parse(text.replace("# grid 1", "# nothing"))
    with pytest.raises(ScheduleError, match="ascending"):
        ReshardSchedule.parse(text.replace("bounds 0 2 4", "bounds 0 4 2"))
    with pytest.raises(ScheduleError, match="expected a shard such as"):
        ReshardSchedule.parse(text.replace("shard 0 ranks", "shard 0 rank"))


def test_arrays_that_have_no_schedule() -> None:
    plan = reshard(src=Mesh(2, "shard0"), dst=Mesh(2, "shard1"), shape=(0, 4), dtype="int8")
    plan.verify()
    with pytest.raises(InvalidUsage, match="no elements"):
        _ = plan.schedule


def two_ranks(shards: tuple[ChunkRanks, ...], **fields: Any) -> Schedule:
    steps = (
        (wait([1]), put(inp(0), out(0), 1), signal([1])),
        (signal([0]), wait([0])),
    )
    given: dict[str, Any] = {"collective": Collective.BROADCAST, "parts": 1} | fields
    return Schedule(name="mine", nranks=2, channels=(steps,), shards=shards, **given)


def test_shards_of_a_schedule() -> None:
    verify(two_ranks((ChunkRanks(1, 2),)))
    verify(two_ranks((ChunkRanks(3, 2),)))
    with pytest.raises(ScheduleError, match=r"output\[0\] of rank 0 is not written"):
        verify(two_ranks((ChunkRanks(1, 3),)))
    with pytest.raises(ValueError, match="2 shards of a broadcast of 1 chunks"):
        two_ranks((ChunkRanks(1, 2), ChunkRanks(1, 2)))
    with pytest.raises(ValueError, match="only a broadcast has shards"):
        two_ranks((ChunkRanks(1, 2),), collective=Collective.ALL_REDUCE)
    with pytest.raises(ValueError, match=r"not in 0\.\.1"):
        two_ranks((ChunkRanks(4, 2),))


def test_a_resharding_is_not_an_algorithm() -> None:
    made = two_ranks((ChunkRanks(1, 2),))
    catalog.register_schedule(made)
    try:
        with pytest.raises(ScheduleError, match="returned a re-sharding"):
            catalog.build("mine", Collective.BROADCAST, 2)
    finally:
        catalog.unregister("mine")
