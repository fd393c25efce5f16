"""Plans between meshes against NumPy, their proof, and their execution by real agents."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import miraccl
from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.p2p.reshard import Mesh, Replicate, ReshardPlan, Shard, Versions, reshard
from miraccl.p2p.reshard.mesh import Box, volume
from tests.support.ranks import run_ranks


@st.composite
def meshes(draw: Any, ndim: int) -> Any:
    axes = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=axes, max_size=axes)))
    choices = [Replicate(), *(Shard(d) for d in range(ndim))]
    return Mesh(shape, [draw(st.sampled_from(choices)) for _ in shape])


def parts_of(mesh: Mesh, array: Any) -> dict[int, Any]:
    return {
        rank: array[tuple(slice(a, b) for a, b in box)].copy()
        for rank, box in mesh.boxes(array.shape).items()
    }


def apply_offsets(plan: ReshardPlan, tensors: dict[int, Any]) -> dict[int, Any]:
    """Execute the byte offsets of a plan, as the transfers do."""
    out = {
        rank: np.full(volume(box) * plan.itemsize, 0xEE, np.uint8)
        for rank, box in plan.dst_boxes.items()
    }
    for move in plan.moves:
        here, there, nbytes = plan.offsets(move)
        source = tensors[move.src].reshape(-1).view(np.uint8)
        for a, b in zip(here, there, strict=True):
            out[move.dst][b : b + nbytes] = source[a : a + nbytes]
    return out


@settings(max_examples=80, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 7), min_size=1, max_size=3))
def test_any_pair_of_meshes(data: Any, shape: list[int]) -> None:
    src, dst = data.draw(meshes(len(shape))), data.draw(meshes(len(shape)))
    plan = reshard(src=src, dst=dst, shape=shape, dtype="int32")
    plan.verify()
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    parts, wanted = parts_of(src, array), parts_of(dst, array)
    got, moved = plan.interpret(parts), apply_offsets(plan, parts)
    for rank, part in wanted.items():
        assert (got[rank] == part).all()
        assert moved[rank].tobytes() == part.tobytes()
    assert plan.bound_us() <= plan.predicted_us() + 1e-9


def test_replicas_share_the_load() -> None:
    plan = reshard(
        src=Mesh((2, 4), ("shard0", "replicate")),
        dst=Mesh(8, "shard1"),
        shape=(64, 64),
        dtype="float32",
    )
    sent, received = plan.load()
    assert set(sent.values()) == {64 * 64 * 4 // 8}
    assert set(received.values()) == {64 * 64 * 4 // 8}
    assert plan.predicted_us(transfer_us=0) == plan.bound_us()
    one = reshard(
        src=Mesh(4, "replicate"), dst=Mesh(1, "replicate"), shape=(64, 64), dtype="float32"
    )
    assert set(one.load()[0].values()) == {64 * 64}, "one target is served by all replicas"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda moves: moves[1:], "elements, its part has"),
        (lambda moves: [*moves, moves[0]], "both write the same elements"),
        (lambda moves: [replace(moves[0], src=1), *moves[1:]], "the source holds"),
        (lambda moves: [*moves[:-1], replace(moves[-1], dst=0)], "the target holds"),
    ],
)
def test_broken_plans_are_refused(change: Any, message: str) -> None:
    plan = reshard(src=Mesh(2, "shard0"), dst=Mesh(2, "shard1"), shape=(4, 4), dtype="int8")
    with pytest.raises(ScheduleError, match=message):
        replace(plan, moves=tuple(change(list(plan.moves)))).verify()


def test_uneven_and_empty_parts_are_those_of_dtensor() -> None:
    boxes = Mesh(4, Shard(0)).boxes((5,))
    assert list(boxes.values()) == [((0, 2),), ((2, 4),), ((4, 5),), ((5, 5),)]
    nested: dict[int, Box] = Mesh((2, 2), (Shard(0), Shard(0))).boxes((5,))
    assert list(nested.values()) == [((0, 2),), ((2, 3),), ((3, 4),), ((4, 5),)]


def test_wrong_meshes() -> None:
    arguments: list[tuple[Any, Any]] = [((2, 2), "shard0"), (2, "diagonal"), (0, "replicate")]
    for shape, placements in arguments:
        with pytest.raises(InvalidUsage, match="cannot make a mesh"):
            Mesh(shape, placements)
    with pytest.raises(InvalidUsage, match="shards dimension 1"):
        reshard(src=Mesh(2, "shard1"), dst=Mesh(2, "shard0"), shape=(4,), dtype="int8")
    with pytest.raises(InvalidUsage, match="dtype"):
        reshard(src=Mesh(2, "shard0"), dst=Mesh(2, "shard0"), shape=(4,), dtype="nothing")


def test_the_plan_is_explained() -> None:
    plan = reshard(src=Mesh(2, "shard0"), dst=Mesh(2, "shard1"), shape=(4, 4), dtype="bfloat16")
    text = plan.explain()
    assert "4 moves, 32 bytes" in text
    assert "rank 0 -> rank 1: [0:2, 2:4]" in text


def test_two_groups_of_agents_with_versions() -> None:
    """Two trainers and two readers; a reader that has pinned a version keeps it."""
    shape = (6, 8)
    src, dst = Mesh(2, "shard0"), Mesh(2, "shard1")
    plan = reshard(src=src, dst=dst, shape=shape, dtype="int32")
    plan.verify()
    arrays = {v: np.arange(48, dtype=np.int32).reshape(shape) * v for v in (1, 2)}
    trainers = [miraccl.Agent(f"train-{i}", secret="s", timeout=10) for i in range(2)]
    readers = [miraccl.Agent(f"serve-{i}", secret="s", timeout=10) for i in range(2)]
    weights = [Versions(agent, (6, 4), "int32") for agent in readers]
    for version, array in arrays.items():
        targets = {i: w.begin(version) for i, w in enumerate(weights)}
        with weights[0].pin() as (pinned, before):
            copy = before.copy()
            threads = [
                threading.Thread(
                    target=plan.run,
                    args=(agent, parts_of(src, array)[i]),
                    kwargs={"targets": targets, "rank": i, "version": version},
                )
                for i, agent in enumerate(trainers)
            ]
            for thread in threads:
                thread.start()
            for i, agent in enumerate(readers):
                plan.run(agent, None, rank=i, version=version)
                weights[i].publish(version)
            assert pinned == version - 1
            assert (before == copy).all()
            for thread in threads:
                thread.join()
        for i, w in enumerate(weights):
            with w.pin() as (current, part):
                assert current == version
                assert (part == parts_of(dst, array)[i]).all()
    with weights[0].pin(), pytest.raises(InvalidUsage, match="current one is 2"):
        weights[0].begin(2)
    with pytest.raises(miraccl.TransferTimeout, match=r"ranks \[0, 1\] have not finished"):
        plan.run(readers[0], None, rank=0, version=9, timeout=0.01)
    for agent in [*trainers, *readers]:
        agent.close()


def test_a_pinned_buffer_is_not_offered_for_writing() -> None:
    with miraccl.Agent("reader", secret="s") as agent:
        weights = Versions(agent, (4,), "int32")
        weights.begin(1)
        with weights.pin() as (version, _):
            assert version == 0
            weights.publish(1)
            with pytest.raises(miraccl.TransferTimeout, match="pinned"):
                weights.begin(2, timeout=0.01)
        weights.begin(2)
        weights.abandon()
        assert weights.version == 1


def reshard_in_a_communicator() -> bool:
    with miraccl.init() as comm:
        plan = reshard(
            src=Mesh(3, "shard0"), dst=Mesh(2, "shard1", [2, 0]), shape=(5, 6), dtype="int16"
        )
        array = np.arange(30, dtype=np.int16).reshape(5, 6)
        source = parts_of(plan.src, array)[comm.rank]
        wanted = parts_of(plan.dst, array).get(comm.rank)
        target = None if wanted is None else np.zeros_like(wanted)
        plan.run(comm, (source, target))
        return wanted is None or bool((target == wanted).all())


@pytest.mark.multiprocess
def test_within_a_communicator() -> None:
    assert run_ranks(reshard_in_a_communicator, 3) == [True] * 3
