"""The backend MIRACCL of ray.util.collective: every call of that interface, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray")
pytest.importorskip(
    "ray.util.collective.backend_registry",
    reason="this version of Ray does not accept custom backends",
)

import ray.util.collective as col  # noqa: E402
from ray.util.collective.types import ReduceOp  # noqa: E402

import miraccl.ray  # noqa: E402
from miraccl.errors import InvalidUsage  # noqa: E402
from tests.ray.cluster import actors, get  # noqa: E402

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("cluster")]
OPS: dict[Any, Any] = {
    ReduceOp.SUM: np.sum,
    ReduceOp.PRODUCT: np.prod,
    ReduceOp.MIN: np.min,
    ReduceOp.MAX: np.max,
}


class Worker:
    """Registers the backend, as every process must; the group is declared by the driver or joined
    by hand.
    """

    def __init__(self) -> None:
        miraccl.ray.register_backend()
        miraccl.ray.register_backend()

    def join(self, nranks: int, rank: int, group: str) -> None:
        col.init_collective_group(nranks, rank, "miraccl", group)

    def leave(self, group: str) -> None:
        col.destroy_collective_group(group)

    def place(self, group: str) -> tuple[int, int, str]:
        handle = col.get_group_handle(group)
        assert handle.communicator.rank == handle.rank
        return col.get_rank(group), col.get_collective_group_size(group), handle.backend()

    def run(self, name: str, group: str, x: np.ndarray, *args: Any) -> Any:
        """One call of ray.util.collective on a copy of ``x``, which it changes; for lists, the
        list.
        """
        x = x.copy()
        if name == "allgather":
            row = [np.zeros_like(x) for _ in range(col.get_collective_group_size(group))]
            col.allgather(row, x, group)
            return row
        if name == "reducescatter":
            row = list(x.reshape(col.get_collective_group_size(group), -1))
            out = np.zeros_like(row[0])
            col.reducescatter(out, row, group, *args)
            return out
        getattr(col, name)(x, *args[:-1], group_name=group, **args[-1]) if args else getattr(
            col, name
        )(x, group)
        return x

    def barrier(self, group: str) -> None:
        col.barrier(group)

    def exchange(self, group: str) -> float:
        """Rank 0 sends to 1, which answers."""
        x = np.full(3, 7.0 + col.get_rank(group))
        if col.get_rank(group) == 0:
            col.send(x, 1, group)
            col.recv(x, 1, group)
        else:
            mine = np.empty(3)
            col.recv(mine, 0, group)
            col.send(mine + x, 0, group)
        return float(x[0])

    def torch_sum(self, group: str) -> Any:
        torch = __import__("torch")
        x = torch.full((4,), col.get_rank(group) + 1.0, dtype=torch.bfloat16)
        col.allreduce(x, group)
        row = [
            torch.zeros(4, dtype=torch.bfloat16)
            for _ in range(col.get_collective_group_size(group))
        ]
        col.allgather(row, x, group)
        assert all(bool((part == x).all()) for part in row)
        return x.tolist()

    def refused(self, group: str) -> list[str]:
        handle, texts, x = col.get_group_handle(group), [], np.ones(4)
        for call in (
            lambda: handle.allreduce([x, x]),
            lambda: handle.allgather([[x]], [x]),
            lambda: handle.allgather([[np.ones(3)] * 2], [x]),
            lambda: handle.allreduce([x[::2]]),
            lambda: col.allreduce(x, group, "sum"),
        ):
            with pytest.raises(InvalidUsage) as caught:
                call()
            texts.append(str(caught.value))
        return texts


@pytest.fixture(scope="module")
def pair(cluster: Any) -> Iterator[list[Any]]:
    """Two workers in a group that the driver declared."""
    miraccl.ray.register_backend()
    made = actors(2, Worker)
    col.create_collective_group(made, 2, [0, 1], backend="MIRACCL", group_name="declared")
    yield made
    for actor in made:
        ray.kill(actor)


def test_places(pair: list[Any]) -> None:
    get([actor.barrier.remote("declared") for actor in pair])  # the first use makes the group
    assert get([actor.place.remote("declared") for actor in pair]) == [
        (0, 2, "MIRACCL"),
        (1, 2, "MIRACCL"),
    ]


def _all(pair: list[Any], name: str, xs: list[np.ndarray], *args: Any) -> Any:
    return get([actor.run.remote(name, "declared", x, *args) for actor, x in zip(pair, xs)])


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_reductions(pair: list[Any], op: Any) -> None:
    xs = [np.random.default_rng(rank).integers(1, 9, 10).astype(np.float32) for rank in range(2)]
    right = OPS[op](xs, axis=0)
    for got in _all(pair, "allreduce", xs, {"op": op}):
        np.testing.assert_array_equal(got, right)
    first, second = _all(pair, "reduce", xs, 1, {"op": op})
    np.testing.assert_array_equal(first, xs[0])
    np.testing.assert_array_equal(second, right)
    np.testing.assert_array_equal(np.concatenate(_all(pair, "reducescatter", xs, op)), right)


def test_the_others(pair: list[Any]) -> None:
    xs = [np.arange(6, dtype=np.int64).reshape(2, 3) + 10 * rank for rank in range(2)]
    for got in _all(pair, "broadcast", xs, 1, {}):
        np.testing.assert_array_equal(got, xs[1])
    for row in _all(pair, "allgather", xs):
        np.testing.assert_array_equal(row, xs)
    assert get([actor.exchange.remote("declared") for actor in pair]) == [15.0, 8.0]


def test_torch_tensors(pair: list[Any]) -> None:
    pytest.importorskip("torch")
    assert get([actor.torch_sum.remote("declared") for actor in pair]) == [[3.0] * 4] * 2


def test_refusals(pair: list[Any]) -> None:
    several, short, unlike, strided, op = get([actor.refused.remote("declared") for actor in pair])[
        0
    ]
    assert "2 tensors from one process" in several
    assert "1 tensors for 2 ranks" in short
    assert "has 3 elements of float64, but tensor has 4" in unlike
    assert "not contiguous" in strided
    assert "op is 'sum'; allowed are ReduceOp.SUM, ReduceOp.PRODUCT" in op


def test_groups_joined_by_hand_and_again(pair: list[Any]) -> None:
    for _ in range(2):
        get([actor.join.remote(2, 1 - rank, "by hand") for rank, actor in enumerate(pair)])
        assert [place[0] for place in get([actor.place.remote("by hand") for actor in pair])] == [
            1,
            0,
        ]
        get([actor.leave.remote("by hand") for actor in pair])
