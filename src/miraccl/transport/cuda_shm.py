"""Host memory between GPUs without peer access: an anonymous file that both processes map and pin for their GPUs.

The segment belongs to the receiver and has the layout of its device memory, so kernels do not know the difference: they write to
an outbox and read from an inbox.  A peer gets the file's descriptor over ``cuda_fds``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from miraccl.transport.shm import ShmSegment

PAGE_BYTES = 4096
Fills = Sequence[tuple[int, int, int]]


class PinningGpu(Protocol):
    """What is needed of a GPU (``executor.cuda.gpu.Gpu``)."""

    def pin(self, address: int, nbytes: int) -> int: ...
    def unpin(self, address: int) -> None: ...


class HostSegment:
    """A mapped and pinned segment. ``address`` is where it lies for the CPU, ``on_gpu`` for this rank's GPU."""

    def __init__(self, gpu: PinningGpu, segment: ShmSegment) -> None:
        """Takes ``segment`` over, also when pinning fails."""
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
        """A new segment; ``fills`` are (offset, bytes, 32-bit word) that it begins with, over zeros."""
        segment = ShmSegment.create(label, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)
        words = np.frombuffer(segment.file.memory(0, segment.nbytes), np.uint32)
        for offset, size, word in fills:
            words[offset // 4 : (offset + size) // 4] = word
        return cls(gpu, segment)

    @classmethod
    def from_descriptor(cls, gpu: PinningGpu, descriptor: int, nbytes: int) -> HostSegment:
        """A peer's segment. Closes ``descriptor``."""
        try:
            segment = ShmSegment.open(
                os.getpid(), descriptor, -(-nbytes // PAGE_BYTES) * PAGE_BYTES
            )
        finally:
            os.close(descriptor)
        return cls(gpu, segment)

    @property
    def descriptor(self) -> int:
        """Of the file; only where the segment was made."""
        return self.segment.fd

    def close(self) -> None:
        """May be called twice."""
        on_gpu, self.on_gpu = self.on_gpu, 0
        if on_gpu:
            self._gpu.unpin(self.address)
            self.segment.release()
