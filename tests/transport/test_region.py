"""Regions of one process, of one host, and of GPUs (without a GPU), in the conformance tests."""

from __future__ import annotations

import threading

import pytest

from miraccl.errors import SystemFailure
from miraccl.executor.cuda import driver
from miraccl.executor.cuda.gpu import Gpu
from miraccl.transport.cuda_p2p import SymmetricMemory, WindowMemory
from miraccl.transport.cuda_pairs import P2pSettings
from miraccl.transport.memory import MemoryRegions
from miraccl.transport.region import copy_memory, fence
from miraccl.transport.shm import ShmRegions
from tests.gpu.fake_cuda import FakeCuda
from tests.gpu.thread_rendezvous import ThreadRendezvous
from tests.support.ranks import run_ranks
from tests.transport.region_conformance import Exposed, ProviderConformance, RegionConformance


class TestMemoryRegions(ProviderConformance):
    provider = MemoryRegions()


class TestShmRegions(ProviderConformance):
    provider = ShmRegions()

    def test_memory_is_mapped_apart(self, region):
        assert self.provider.attach(region.descriptor()).address != region.address


class TestCudaWindow(RegionConformance):
    """Window memory of two ranks that are threads, over process memory instead of a GPU's."""

    @pytest.fixture(autouse=True)
    def cuda(self, monkeypatch):
        monkeypatch.setattr(driver, "bindings", driver.bindings)  # type: ignore[attr-defined]
        return FakeCuda().install()

    def build(self, nbytes: int) -> Exposed:
        rendezvous = ThreadRendezvous(2)
        windows: list[WindowMemory | None] = [None, None]

        def rank(number: int) -> None:
            stages = rendezvous.stages(number)
            memory = SymmetricMemory(
                Gpu(number), number, 2, 4096, stages=stages, settings=P2pSettings()
            )
            windows[number] = memory.window(nbytes, stages)

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        first, second = windows
        assert first is not None
        assert second is not None
        remote = first.region(1, copy_memory, fence)
        assert remote.descriptor.key == second.region(1, copy_memory, fence).descriptor.key
        return Exposed(remote, second.own, first.close)


def put_to_next() -> list[bytes]:
    """Each rank puts its number into the region of the next one; return the own memory."""
    import miraccl
    from miraccl.transport.fifo import PrivateMemory, memory_at

    with miraccl.init() as comm:
        session, regions = comm._core.session, ShmRegions()
        region = regions.register(4096)
        descriptors = session.all_gather(region.descriptor(), "regions")
        remote = regions.attach(descriptors[(comm.rank + 1) % comm.nranks])
        source = PrivateMemory(4)
        memory_at(source.address, 4)[:] = b"%4d" % comm.rank
        remote.put(8 * comm.rank, source.address, 4)
        remote.flush()
        comm.barrier()
        return [bytes(memory_at(region.address + 8 * r, 4)) for r in range(comm.nranks)]


@pytest.mark.multiprocess
def test_regions_between_processes() -> None:
    for rank, got in enumerate(run_ranks(put_to_next, 3)):
        before = (rank - 1) % 3
        assert got == [b"%4d" % r if r == before else bytes(4) for r in range(3)]


def test_a_released_region_cannot_be_attached() -> None:
    region = ShmRegions().register(4096)
    descriptor = region.descriptor()
    region.release()
    with pytest.raises(SystemFailure, match="cannot open the segment"):
        ShmRegions().attach(descriptor)
