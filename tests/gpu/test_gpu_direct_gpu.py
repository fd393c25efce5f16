"""Messages from and to the memory of a real GPU: its driver exports, simulated adapters move.

Two ranks are threads that share the GPU, on hosts that exist in the job only.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from dataclasses import replace
from typing import Any

import pytest

from miraccl.executor.cuda.gpu import Gpu
from miraccl.ops.device_arrays import DeviceMemory
from miraccl.runtime.gpu.operations import DeviceTransfer
from miraccl.runtime.multinode.communicator import MultiNodeCommunicator
from miraccl.sim.verbs import SimulatedVerbs
from miraccl.sim.verbs_wire import Region
from miraccl.types import DType
from tests.gpu.direct_ranks import in_job
from tests.gpu.gpus import ON_GPUS

pytestmark = ON_GPUS


class GpuRegion(Region):
    """Registered memory of GPU 0, which the adapter reaches by copies of the driver."""

    def load(self, address: int, nbytes: int) -> bytes:
        gpu = Adapters.gpu
        gpu.make_current()
        return gpu.read(address, nbytes)

    def store(self, address: int, data: bytes) -> None:
        gpu = Adapters.gpu
        gpu.make_current()
        assert int(gpu.cuda.cuMemcpyHtoD(address, data, len(data))[0]) == 0


class Adapters(SimulatedVerbs):
    """Adapters that register dma-bufs of GPU 0; ``exported``: their sizes."""

    gpu: Gpu

    def __init__(self, count: int) -> None:
        super().__init__([f"adapter{rank}" for rank in range(count)], flush=True)
        self.exported: list[int] = []

    def _reg_dmabuf_mr(
        self, pd: int, offset: int, nbytes: int, iova: int, descriptor: int, access: int
    ) -> int:
        self.exported.append(os.fstat(descriptor).st_size)
        mr = self._reg_mr(pd, iova, nbytes, access)
        key = self._object(mr)
        found = self.wire.regions[key]
        fields: dict[str, Any] = vars(replace(found, posted=True))
        self.wire.regions[key] = GpuRegion(**fields)
        return mr


def operations() -> dict[str, Any]:
    """Run operations of two ranks on one GPU; return the algorithms and facts of the driver."""
    import torch

    Adapters.gpu = gpu = Gpu(0)
    adapters, used = Adapters(2), dict[str, Any]()
    # Waiting for the GPU includes what the other rank has enqueued, and that waits for this one.
    together = threading.Barrier(2)

    def memory(tensor: Any) -> DeviceMemory:
        return DeviceMemory(tensor.data_ptr(), tensor.numel(), DType.FLOAT32)

    def work(comm: MultiNodeCommunicator) -> None:
        n, r = comm.nranks, comm.rank
        stream = torch.cuda.Stream()  # they share a context, and so the default stream

        def check(name: str, got: Any, want: Any) -> None:
            comm.synchronize()
            together.wait(60.0)
            assert torch.equal(got.cpu(), want), name
            used[name] = comm.last_plan.algo if comm.last_plan else ""

        # More fills the stream: its thread then waits in the driver, and so do the adapters.
        for count in (17, 50_001, 300_000):
            x = torch.arange(count, dtype=torch.float32, device="cuda") + 1000 * r
            y, every = torch.zeros_like(x), torch.zeros(n * count, device="cuda")
            rows = torch.arange(n * count, dtype=torch.float32, device="cuda") + 1000 * r
            base = torch.arange(count, dtype=torch.float32)
            torch.cuda.synchronize()
            together.wait(60.0)
            # Once each: a graph that one rank captures forbids the other's calls in this context.
            comm.exchange(
                [
                    DeviceTransfer(False, 1 - r, memory(x)),
                    DeviceTransfer(True, 1 - r, memory(y)),
                ],
                stream=stream,
            )
            check("send/recv", y, base + 1000 * (1 - r))
            comm.all_gather(x, every, stream=stream)
            check("all_gather", every, torch.cat([base, base + 1000]))
            comm.all_to_all(rows, every, stream=stream)
            own = torch.arange(n * count, dtype=torch.float32).reshape(n, count)[r]
            check("all_to_all", every, torch.cat([own, own + 1000]))
            comm.all_reduce(x, y, stream=stream)
            check("all_reduce", y, 2 * base + 1000)
        used["why"] = comm.runtime.gpu_direct_reason

    in_job("AB", adapters, work, lambda rank: torch.cuda.set_device(0), lambda rank: 0)
    adapters.close()
    return used | {
        "exported": adapters.exported,
        "dma_buf": gpu.exports_dma_buf,
        "ordering": gpu.writes_ordering,
    }


def test_operations() -> None:
    # A process that has initialised CUDA cannot be forked.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        used = pool.apply_async(operations).get(240.0)
    if not used["dma_buf"]:
        pytest.skip("the driver exports no dma-buf")
    assert used["send/recv"] == used["all_gather"] == used["all_to_all"] == "direct", used
    assert used["all_reduce"] == "staged"
    assert all(size >= 4 * (64 << 10) for size in used["exported"])
