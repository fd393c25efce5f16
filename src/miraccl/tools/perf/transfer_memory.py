"""Memory of ``miraccl perf write|read|writev``: NumPy arrays, and bytes on a GPU."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

#: Period of the test pattern: no power of two, so that a shifted block is found.
PERIOD = 253


def pattern(nbytes: int) -> Any:
    """Return the bytes that are moved."""
    return np.resize(np.arange(PERIOD, dtype=np.uint8), nbytes)


class PerfMemory(Protocol):
    """Bytes that an agent can register or move."""

    array: Any

    def part(self, nbytes: int) -> Any:
        """Return the first bytes as an array that an agent accepts."""

    def store(self, data: Any) -> None:
        """Store bytes from the start on."""

    def load(self, nbytes: int) -> Any:
        """Return the first bytes as a NumPy array."""


class HostBuffer:
    """CPU memory; ``array`` is flat, of bytes."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def part(self, nbytes: int) -> Any:
        return self.array[:nbytes]

    def store(self, data: Any) -> None:
        self.array[: len(data)] = data

    def load(self, nbytes: int) -> Any:
        return self.array[:nbytes]


class GpuBuffer:
    """Memory of a GPU. Raises ``MissingDependency`` without a driver, its package or the GPU."""

    def __init__(self, nbytes: int, ordinal: int) -> None:
        from miraccl.executor.cuda.driver import driver
        from miraccl.executor.cuda.gpu import Gpu
        from miraccl.tools.perf.device_array import PerfDeviceArray

        driver()
        self._gpu = Gpu(ordinal)
        with self._gpu.device_guard():
            self.array = PerfDeviceArray(
                self._gpu.allocate(max(nbytes, 512)), nbytes, "uint8", ordinal
            )
            self._stream = self._gpu.make_stream()

    def part(self, nbytes: int) -> Any:
        return self.array[:nbytes]

    def store(self, data: Any) -> None:
        host = np.ascontiguousarray(data)
        address = host.__array_interface__["data"][0]
        with self._gpu.device_guard():
            self._gpu.copy_from_host(self.array.address, address, host.nbytes, self._stream)
            self._gpu.synchronize()

    def load(self, nbytes: int) -> Any:
        with self._gpu.device_guard():
            self._gpu.synchronize()
            return np.frombuffer(self._gpu.read(self.array.address, nbytes), np.uint8)


def make_memory(agent: Any, nbytes: int, device: str, *, window: bool = False) -> PerfMemory:
    """Return memory of ``nbytes``.

    Args:
        device: ``cpu`` or ``cuda``, or ``cuda:N``.
        window: CPU memory that peers of the host map.
    """
    if device == "cpu":
        return HostBuffer(agent.empty(nbytes) if window else np.zeros(nbytes, np.uint8))
    return GpuBuffer(nbytes, int(device.partition(":")[2] or 0))
