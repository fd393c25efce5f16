"""GPU memory of CUDA's virtual memory management: physical memory, mapped, exported as descriptors.

Order of release: unmap, free the address, release the handle; the driver frees the memory with the
last handle and mapping anywhere. Only plain device memory is made here, never multicast objects.
"""

from __future__ import annotations

import os
from typing import Protocol


class VmmGpu(Protocol):
    """Operations required of a GPU (``executor.cuda.gpu.Gpu``)."""

    def granularity(self) -> int: ...
    def create_physical(self, nbytes: int) -> int: ...
    def export_descriptor(self, handle: int) -> int: ...
    def import_descriptor(self, descriptor: int) -> int: ...
    def map_physical(self, handle: int, nbytes: int) -> int: ...
    def unmap_physical(self, address: int, nbytes: int) -> None: ...
    def release_physical(self, handle: int) -> None: ...


def allocation_bytes(nbytes: int, granularity: int) -> int:
    """Return the bytes of the allocation that holds ``nbytes``."""
    return max(1, -(-nbytes // granularity)) * granularity


class VmmMapping:
    """Memory of this rank (``create``) or of a peer (``from_descriptor``), mapped for this GPU."""

    def __init__(self, gpu: VmmGpu, handle: int, nbytes: int) -> None:
        """Take ``handle`` over, also if mapping fails."""
        self._gpu, self._handle, self.nbytes = gpu, handle, nbytes
        self.address = 0
        try:
            self.address = gpu.map_physical(handle, nbytes)
        except BaseException:
            gpu.release_physical(handle)
            raise

    @classmethod
    def create(cls, gpu: VmmGpu, nbytes: int) -> VmmMapping:
        """Allocate and map at least ``nbytes``."""
        size = allocation_bytes(nbytes, gpu.granularity())
        return cls(gpu, gpu.create_physical(size), size)

    @classmethod
    def from_descriptor(cls, gpu: VmmGpu, descriptor: int, nbytes: int) -> VmmMapping:
        """Map memory that a peer exported; ``nbytes`` is the size of its allocation. Closes
        ``descriptor``.
        """
        try:
            handle = gpu.import_descriptor(descriptor)
        finally:
            os.close(descriptor)
        return cls(gpu, handle, nbytes)

    def export(self) -> int:
        """Return a new descriptor for peers; the caller closes it when all have received theirs."""
        return self._gpu.export_descriptor(self._handle)

    def close(self) -> None:
        """Unmap and release; idempotent."""
        address, self.address = self.address, 0
        if address:
            self._gpu.unmap_physical(address, self.nbytes)
            self._gpu.release_physical(self._handle)
