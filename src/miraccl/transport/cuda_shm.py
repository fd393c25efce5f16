"""Host memory between GPUs without peer access: an anonymous file that both processes map and pin.

The segment belongs to the receiver and has the layout of its device memory, so that kernels see no
difference: they write to an outbox and read from an inbox. A peer gets the file's descriptor over
``cuda_fds``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from miraccl.transport.shared_segment import ShmSegment

PAGE_BYTES = 4096
Fills = Sequence[tuple[int, int, int]]


class PinningGpu(Protocol):
    """Operations required of a GPU (``executor.cuda.gpu.Gpu``)."""

    def pin(self, address: int, nbytes: int) -> int: ...
    def unpin(self, address: int) -> None: ...


class HostSegment:
    """Mapped and pinned segment: ``address`` for the CPU, ``on_gpu`` for this rank's GPU."""

    def __init__(self, gpu: PinningGpu, segment: ShmSegment) -> None:
        """Take ``segment`` over, also if pinning fails."""
        self._gpu, self.segment = gpu, segment
        self.address, self.nbytes = segment.address, segment.nbytes
        self.on_gpu = 0
        try:
            self.on_gpu = gpu.pin(segment.address, segment.nbytes)
        except BaseException:
            segment.release()
            raise

    @classmethod
    def create(
        cls, gpu: PinningGpu, nbytes: int, fills: Fills = (), label: str = "miraccl-gpu"
    ) -> HostSegment:
        """Make a segment of zeros with ``fills`` of (offset, bytes, 32-bit word)."""
        segment = ShmSegment.create(label, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)
        words = np.frombuffer(segment.file.memory(0, segment.nbytes), np.uint32)
        for offset, size, word in fills:
            words[offset // 4 : (offset + size) // 4] = word
        return cls(gpu, segment)

    @classmethod
    def from_descriptor(cls, gpu: PinningGpu, descriptor: int, nbytes: int) -> HostSegment:
        """Map a peer's segment; closes ``descriptor``."""
        try:
            segment = ShmSegment.open(
                os.getpid(), descriptor, -(-nbytes // PAGE_BYTES) * PAGE_BYTES
            )
        finally:
            os.close(descriptor)
        return cls(gpu, segment)

    @property
    def descriptor(self) -> int:
        """Descriptor of the file, on the rank that made it."""
        return self.segment.fd

    def close(self) -> None:
        """Unpin and unmap; idempotent."""
        on_gpu, self.on_gpu = self.on_gpu, 0
        if on_gpu:
            self._gpu.unpin(self.address)
            self.segment.release()
