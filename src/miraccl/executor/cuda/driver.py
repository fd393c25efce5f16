"""One GPU through the CUDA driver: context, memory, modules, streams.

Everything that can fail raises ``SystemFailure`` with CUDA's name for the error.  The primary context is used, so that memory and streams
of PyTorch, CuPy and others are ours too.  Calls that make something (a module, memory) are allowed while a stream is captured: they are
not part of what is captured.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

from miraccl.errors import SystemFailure
from miraccl.executor.cuda.toolkit import bindings

MEMHOSTALLOC_PORTABLE_MAPPED = 0x01 | 0x02
IPC_LAZY_ENABLE_PEER_ACCESS = 0x01
EVENT_DISABLE_TIMING = 0x02


def check(result: tuple[Any, ...], what: str) -> Any:
    """The values of a driver call, or ``SystemFailure``."""
    code = result[0]
    if int(code) != 0:
        raise SystemFailure(f"{what}: {getattr(code, 'name', code)}")
    rest = result[1:]
    return rest[0] if len(rest) == 1 else tuple(rest)


def device_count() -> int:
    """GPUs that this process sees; 0 where there is no driver."""
    try:
        cuda = bindings("driver")
        check(cuda.cuInit(0), "cuInit")
        return int(check(cuda.cuDeviceGetCount(), "cuDeviceGetCount"))
    except Exception:  # no package, no library, no driver, no device: all the same to who asks
        return 0


class Gpu:
    """The GPU with number ``ordinal`` in this process, with its primary context retained until ``close``."""

    def __init__(self, ordinal: int) -> None:
        self.cuda = bindings("driver")
        self.ordinal = ordinal
        check(self.cuda.cuInit(0), "cuInit")
        self._device = check(self.cuda.cuDeviceGet(ordinal), f"cuDeviceGet({ordinal})")
        self._context = check(self.cuda.cuDevicePrimaryCtxRetain(self._device), "cuDevicePrimaryCtxRetain")
        self.make_current()
        kinds = self.cuda.CUdevice_attribute
        self.arch = 10 * self._attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) + self._attribute(
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
        )
        self.multiprocessors = self._attribute(kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self._modules: list[Any] = []
        self._side = check(self.cuda.cuStreamCreate(1), "cuStreamCreate")  # non-blocking: independent of the legacy stream

    def _attribute(self, kind: Any) -> int:
        return int(check(self.cuda.cuDeviceGetAttribute(kind, self._device), "cuDeviceGetAttribute"))

    def make_current(self) -> None:
        """Make the context current in the calling thread."""
        check(self.cuda.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    @contextlib.contextmanager
    def outside_of_capture(self) -> Iterator[None]:
        """Calls within are made even if this thread captures a stream."""
        mode = self.cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = check(self.cuda.cuThreadExchangeStreamCaptureMode(mode), "cuThreadExchangeStreamCaptureMode")
        try:
            yield
        finally:
            check(self.cuda.cuThreadExchangeStreamCaptureMode(before), "cuThreadExchangeStreamCaptureMode")

    # ---- memory

    def allocate(self, nbytes: int) -> int:
        return int(check(self.cuda.cuMemAlloc(nbytes), f"cuMemAlloc of {nbytes} bytes"))

    def free(self, address: int) -> None:
        check(self.cuda.cuMemFree(address), "cuMemFree")

    def fill(self, address: int, nbytes: int, word: int) -> None:
        """Fill memory with a 32-bit word and wait for it."""
        check(self.cuda.cuMemsetD32Async(address, word, nbytes // 4, self._side), "cuMemsetD32Async")
        check(self.cuda.cuStreamSynchronize(self._side), "cuStreamSynchronize")

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy on this GPU."""
        check(self.cuda.cuMemcpyDtoDAsync(target, source, nbytes, stream), "cuMemcpyDtoDAsync")

    def host_words(self, nbytes: int) -> tuple[Any, int, int]:
        """Pinned memory that GPU and CPU see: (array of 32-bit words, its address here, its address on the GPU)."""
        host = int(check(self.cuda.cuMemHostAlloc(nbytes, MEMHOSTALLOC_PORTABLE_MAPPED), "cuMemHostAlloc"))
        device = int(check(self.cuda.cuMemHostGetDevicePointer(host, 0), "cuMemHostGetDevicePointer"))
        words = (ctypes.c_uint32 * (nbytes // 4)).from_address(host)
        ctypes.memset(host, 0, nbytes)
        return words, host, device

    def free_host(self, address: int) -> None:
        check(self.cuda.cuMemFreeHost(address), "cuMemFreeHost")

    def export(self, address: int) -> bytes:
        """The handle with which another process maps an allocation."""
        handle = check(self.cuda.cuIpcGetMemHandle(address), "cuIpcGetMemHandle")
        return bytes(handle.reserved)

    def map_peer(self, handle: bytes) -> int:
        """Map an allocation of another process; peer access is enabled as needed."""
        record = self.cuda.CUipcMemHandle()
        record.reserved = handle
        return int(check(self.cuda.cuIpcOpenMemHandle(record, IPC_LAZY_ENABLE_PEER_ACCESS), "cuIpcOpenMemHandle"))

    def unmap_peer(self, address: int) -> None:
        check(self.cuda.cuIpcCloseMemHandle(address), "cuIpcCloseMemHandle")

    # ---- kernels and streams

    def load(self, cubin: bytes, entry: str) -> Any:
        """The function ``entry`` of a module."""
        with self.outside_of_capture():
            module = check(self.cuda.cuModuleLoadData(cubin), "cuModuleLoadData")
            self._modules.append(module)
            return check(self.cuda.cuModuleGetFunction(module, entry.encode()), f"cuModuleGetFunction({entry})")

    def blocks_at_once(self, function: Any, threads: int) -> int:
        """How many blocks of a kernel the GPU holds at a time."""
        per = check(self.cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, 0), "cuOccupancyMaxActiveBlocks")
        return int(per) * self.multiprocessors

    def is_capturing(self, stream: int) -> bool:
        return int(check(self.cuda.cuStreamIsCapturing(stream), "cuStreamIsCapturing")) != 0

    def order_streams(self, before: int, after: int) -> None:
        """What follows in ``after`` waits for what is in ``before`` now."""
        event = check(self.cuda.cuEventCreate(EVENT_DISABLE_TIMING), "cuEventCreate")
        try:
            check(self.cuda.cuEventRecord(event, before), "cuEventRecord")
            check(self.cuda.cuStreamWaitEvent(after, event, 0), "cuStreamWaitEvent")
        finally:
            self.cuda.cuEventDestroy(event)

    def synchronize(self) -> None:
        check(self.cuda.cuCtxSynchronize(), "cuCtxSynchronize")

    def close(self) -> None:
        """Release modules and the context; may be called twice."""
        if self._context is None:
            return
        for module in self._modules:
            self.cuda.cuModuleUnload(module)
        self.cuda.cuStreamDestroy(self._side)
        self.cuda.cuDevicePrimaryCtxRelease(self._device)
        self._context = None
