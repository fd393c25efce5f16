"""The tensor transport of Ray: tensors that stay in an actor, and that others read."""

from __future__ import annotations

from typing import Any

import pytest

ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")

import miraccl.ray  # noqa: E402


def owner_class() -> Any:
    """Return a class of actors that make tensors, and read those of another one."""

    class Owner:
        def make(self, count: int) -> Any:
            return torch.arange(count, dtype=torch.float32).reshape(2, -1) * 0.5

        def several(self) -> Any:
            return {"a": torch.full((3,), 7, dtype=torch.int64), "b": torch.empty(0, 4)}

        def strided(self) -> Any:
            return torch.zeros(4, 4).t()[1:]

        def total(self, tensor: Any) -> float:
            return float(tensor.double().sum())

        def shapes(self, tensors: Any) -> Any:
            return {name: (tuple(t.shape), t.sum().item()) for name, t in tensors.items()}

        def registrations(self) -> int:
            from ray.experimental.rdt.util import get_tensor_transport_manager

            return len(get_tensor_transport_manager("MIRACCL").agent._registrations)

    # Decorators of which mypy knows nothing without Ray.
    stays: Any = ray.method(tensor_transport="MIRACCL")
    for name in ("make", "several", "strided"):
        setattr(Owner, name, stays(getattr(Owner, name)))
    remote: Any = ray.remote(num_cpus=0, enable_tensor_transport=True)
    return remote(Owner)


@pytest.fixture(scope="module")
def actors(cluster: Any) -> Any:
    miraccl.ray.register_tensor_transport()
    miraccl.ray.register_tensor_transport()  # idempotent

    made = [actor.remote() for actor in [owner_class()] * 2]
    yield made
    for actor in made:
        ray.kill(actor)


@pytest.mark.parametrize("count", [2, 1 << 20])
def test_tensor_of_another_actor(actors: Any, count: int) -> None:
    owner, reader = actors
    made = owner.make.remote(count)
    assert ray.get(reader.total.remote(made), timeout=60) == 0.5 * count * (count - 1) / 2
    # Several readers, and the owner itself.
    again = [actor.total.remote(made) for actor in (reader, owner)]
    assert len(set(ray.get(again, timeout=60))) == 1


def test_several_tensors_and_an_empty_one(actors: Any) -> None:
    owner, reader = actors
    found = ray.get(reader.shapes.remote(owner.several.remote()), timeout=60)
    assert found == {"a": ((3,), 21), "b": ((0, 4), 0.0)}


def test_tensors_that_are_not_contiguous_are_refused(actors: Any) -> None:
    owner, reader = actors
    with pytest.raises(Exception, match="not contiguous"):
        ray.get(reader.total.remote(owner.strided.remote()), timeout=60)


def test_a_freed_object_is_deregistered(actors: Any) -> None:
    owner, reader = actors
    made = owner.make.remote(1024)
    ray.get(reader.total.remote(made), timeout=60)
    before = ray.get(owner.registrations.remote(), timeout=60)
    del made
    # Ray frees objects in the background; each call of the actor gives it time.
    assert any(ray.get(owner.registrations.remote(), timeout=60) < before for _ in range(2000)), (
        "the registration is still there"
    )
