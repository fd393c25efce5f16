"""A Ray cluster of two nodes on this host, and actors that use miraccl."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import miraccl
import miraccl.ray
from miraccl.ray import members

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0
SMALL = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}


@contextmanager
def two_nodes() -> Iterator[Cluster]:
    """Workers inherit the environment of their node: they find miraccl and the tests as this
    process does, and wait no longer.
    """
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    )
    os.environ["MIRACCL_TIMEOUT"] = "60"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args=SMALL)
    try:
        cluster.add_node(**SMALL)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


class Plain:
    """An actor as people have it: it knows nothing of groups but ``get_group``."""

    def where(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def total(self, count: int, group: str = "default") -> Any:
        comm = miraccl.ray.get_group(group)
        return comm.all_reduce(np.full(count, comm.rank + 1.0, np.float32)).tolist()

    def tensors(self) -> Any:
        torch = __import__("torch")
        comm = miraccl.ray.get_group()
        x = torch.full((5,), float(comm.rank))
        comm.all_reduce(x)
        return x.tolist()

    def fail_when_alone(self) -> str:
        """Waits for a rank that is going to die."""
        comm = miraccl.ray.get_group()
        comm.all_reduce(np.ones(4))
        return "nobody died"

    def divide_by_zero(self) -> float:
        return 1 / (miraccl.ray.get_group().nranks - 3)

    def total_of_the_living(self) -> Any:
        with miraccl.ray.get_group().shrink() as comm:
            return [*comm.all_reduce(np.full(1, 1.0)).tolist(), comm.rank]

    def read_only(self, x: np.ndarray) -> Any:
        """An array from Ray's object store may not be written to."""
        comm = miraccl.ray.get_group()
        with pytest.raises(miraccl.InvalidUsage, match="read-only"):
            comm.all_reduce(x)
        return comm.all_reduce(x, out=np.empty_like(x)).tolist()

    def leave(self, group: str) -> None:
        miraccl.ray.destroy_group(group)

    def hold(self, gate: Any) -> None:
        """Busy until the gate is opened."""
        ray.get(gate.passed.remote())

    def join(self, nranks: int, rank: int, **options: Any) -> Any:
        comm = miraccl.ray.join_group(nranks, rank, "by hand", **options)
        return comm.all_gather(np.array([10 + comm.rank])).tolist()

    def join_without_store(self, nranks: int, rank: int, calls: int) -> Any:
        """Ray's store refuses so many calls of this rank, as while its head node starts again."""
        refused: list[Any] = []

        def refusing(call: Any) -> Any:
            def or_refuse(*args: Any, **options: Any) -> Any:
                if len(refused) < calls:
                    refused.append(call)
                    raise ray.exceptions.RpcError("UNAVAILABLE")
                return call(*args, **options)

            return or_refuse

        with pytest.MonkeyPatch.context() as patch:
            for name in ("_internal_kv_get", "_internal_kv_put", "_internal_kv_del"):
                patch.setattr(internal_kv, name, refusing(getattr(internal_kv, name)))
            return self.join(nranks, rank, meet_timeout=10.0)

    def make_group_with(self, others: list[Any]) -> None:
        miraccl.ray.create_group(
            [*others, ray.get_runtime_context().current_actor], meet_timeout=0.5
        )

    def die_when_told_to_meet(self) -> None:
        members.__dict__["connect"] = lambda *_args, **_options: os._exit(1)

    def has_a_hub(self) -> bool:
        return any(thread.name == "miraccl-hub" for thread in threading.enumerate())


class Gate:
    """Lets callers wait until it is opened; an asynchronous actor."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    async def passed(self) -> None:
        await self.event.wait()

    async def open(self) -> None:
        self.event.set()

    async def total(self) -> Any:
        comm = miraccl.ray.get_group()
        work = comm.all_reduce(np.full(3, comm.rank + 1.0), async_op=True)
        return (await asyncio.to_thread(work.wait)).tolist()


def actors(count: int, cls: Any = Plain, **options: Any) -> list[Any]:
    """Actors on the two nodes in turns; they take no CPU, of which the nodes have one each."""
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    made = ray.remote(num_cpus=0, **options)(cls)
    return [
        made.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[i % len(nodes)], soft=False)
        ).remote()
        for i in range(count)
    ]


def get(call: Any) -> Any:
    return ray.get(call, timeout=PATIENCE)
