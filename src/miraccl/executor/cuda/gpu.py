"""One GPU through the CUDA driver: memory, modules, streams.

Failures raise ``SystemFailure`` with CUDA's error name. Calls that create something (a module,
memory) are allowed while a stream is captured; they do not become part of the capture.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from miraccl.errors import SystemFailure
from miraccl.executor.cuda import driver, toolkit
from miraccl.executor.cuda.contexts import PrimaryContext
from miraccl.executor.cuda.driver import check
from miraccl.executor.cuda.fast_call_layout import POINTER_DEVICE_ORDINAL

MEMHOSTALLOC_PORTABLE_MAPPED = 0x01 | 0x02  # the same bits for cuMemHostRegister
PEER_ACCESS_ALREADY_ENABLED = 704  # cuda.h CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
WAIT_VALUE_EQ = 0x01  # cuda.h CU_STREAM_WAIT_VALUE_EQ
IPC_LAZY_ENABLE_PEER_ACCESS = 0x01
IPC_HANDLE_BYTES = 64  # cuda.h CU_IPC_HANDLE_SIZE
EVENT_DISABLE_TIMING = 0x02
STREAM_NON_BLOCKING = 0x01


class _Modules:
    """Modules loaded in the context of a GPU, once for all communicators of this process.

    Loading waits for the GPU's current work and takes GPU memory.
    """

    _by_context: ClassVar[dict[int, _Modules]] = {}
    _lock: ClassVar[threading.RLock] = (
        threading.RLock()
    )  # reentrant: a signal handler may close a communicator while it is held

    def __init__(self) -> None:
        self.users = 0
        self.functions: dict[
            tuple[bytes, str], Any
        ] = {}  # by digest of the code and function name; read without the lock
        self.loading = threading.RLock()
        self.modules: list[Any] = []

    @classmethod
    def acquire(cls, context: int) -> _Modules:
        with cls._lock:
            modules = cls._by_context.setdefault(context, cls())
            modules.users += 1
            return modules

    def release(self, context: int) -> list[Any]:
        """Give up one use of the context; return the modules to unload after the last one."""
        with self._lock:
            self.users -= 1
            if self.users:
                return []
            del self._by_context[context]
            return self.modules


class Gpu(PrimaryContext):
    """GPU ``ordinal`` of this process, until ``close``."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self.make_current()
        kinds = self.cuda.CUdevice_attribute
        self.arch = 10 * self._attribute(
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        ) + self._attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.multiprocessors = self._attribute(kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self._modules = _Modules.acquire(self.context)
        self._side = check(
            self.cuda.cuStreamCreate(1), "cuStreamCreate"
        )  # non-blocking: independent of the legacy stream

    def _attribute(self, kind: Any) -> int:
        return int(
            check(self.cuda.cuDeviceGetAttribute(kind, self._device), "cuDeviceGetAttribute")
        )

    @functools.cached_property
    def driver_version(self) -> int:
        """CUDA version of the driver: 12030 is 12.3."""
        return int(check(self.cuda.cuDriverGetVersion(), "cuDriverGetVersion"))

    @contextlib.contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """Allow calls inside the block that a capture of this thread would forbid."""
        mode = self.cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = check(
            self.cuda.cuThreadExchangeStreamCaptureMode(mode), "cuThreadExchangeStreamCaptureMode"
        )
        try:
            yield
        finally:
            check(
                self.cuda.cuThreadExchangeStreamCaptureMode(before),
                "cuThreadExchangeStreamCaptureMode",
            )

    # ---- memory

    def owner(self, address: int) -> int:
        """Return the ordinal of the GPU whose memory is at ``address``; this GPU for memory that
        all
        see.
        """
        if driver.pointer_attribute(POINTER_DEVICE_ORDINAL, address) == self.ordinal:
            return self.ordinal
        found = driver.ordinal_at(address)
        return self.ordinal if found is None else found

    def allocate(self, nbytes: int) -> int:
        return int(check(self.cuda.cuMemAlloc(nbytes), f"cuMemAlloc of {nbytes} bytes"))

    def free(self, address: int) -> None:
        check(self.cuda.cuMemFree(address), "cuMemFree")

    def fill(self, address: int, nbytes: int, word: int) -> None:
        """Fill memory with a 32-bit word and wait for completion."""
        check(
            self.cuda.cuMemsetD32Async(address, word, nbytes // 4, self._side), "cuMemsetD32Async"
        )
        check(self.cuda.cuStreamSynchronize(self._side), "cuStreamSynchronize")

    def set_words(self, address: int, count: int, word: int, stream: int) -> None:
        """Enqueue filling memory with a 32-bit word."""
        check(self.cuda.cuMemsetD32Async(address, word, count, stream), "cuMemsetD32Async")

    def read(self, address: int, nbytes: int) -> bytes:
        """Return ``nbytes`` of memory that this GPU accesses; waits for the copy only."""
        buffer = ctypes.create_string_buffer(nbytes)
        with self.relaxed_capture():
            check(
                self.cuda.cuMemcpyDtoHAsync(ctypes.addressof(buffer), address, nbytes, self._side),
                "cuMemcpyDtoHAsync",
            )
            check(self.cuda.cuStreamSynchronize(self._side), "cuStreamSynchronize")
        return buffer.raw

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy on this GPU."""
        check(self.cuda.cuMemcpyDtoDAsync(target, source, nbytes, stream), "cuMemcpyDtoDAsync")

    def host_words(self, nbytes: int) -> tuple[Any, int, int]:
        """Allocate pinned host memory.

        Returns:
            (array of 32-bit words, host address, GPU address). Free with ``free_host(host
            address)``.
        """
        host = int(
            check(self.cuda.cuMemHostAlloc(nbytes, MEMHOSTALLOC_PORTABLE_MAPPED), "cuMemHostAlloc")
        )
        device = int(
            check(self.cuda.cuMemHostGetDevicePointer(host, 0), "cuMemHostGetDevicePointer")
        )
        words = (ctypes.c_uint32 * (nbytes // 4)).from_address(host)
        ctypes.memset(host, 0, nbytes)
        return words, host, device

    def free_host(self, address: int) -> None:
        check(self.cuda.cuMemFreeHost(address), "cuMemFreeHost")

    def export(self, address: int) -> bytes:
        """Return the IPC handle with which another process maps an allocation."""
        handle = check(self.cuda.cuIpcGetMemHandle(address), "cuIpcGetMemHandle")
        # By address: cuda-bindings 13.5 no longer has the field ``reserved``.
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)

    def map_peer(self, handle: bytes) -> int:
        """Map an allocation of another process; peer access is enabled as needed."""
        record = self.cuda.CUipcMemHandle()
        ctypes.memmove(record.getPtr(), handle, IPC_HANDLE_BYTES)
        return int(
            check(
                self.cuda.cuIpcOpenMemHandle(record, IPC_LAZY_ENABLE_PEER_ACCESS),
                "cuIpcOpenMemHandle",
            )
        )

    def unmap_peer(self, address: int) -> None:
        check(self.cuda.cuIpcCloseMemHandle(address), "cuIpcCloseMemHandle")

    # ---- other GPUs

    @functools.cached_property
    def bus_id(self) -> str:
        """PCI bus address such as ``0000:1b:00.0``, the same in every process despite
        CUDA_VISIBLE_DEVICES.
        """
        text = check(self.cuda.cuDeviceGetPCIBusId(32, self._device), "cuDeviceGetPCIBusId")
        return bytes(text).split(b"\0")[0].decode().lower()

    def reaches(self, bus_id: str) -> int | None:
        """Return the access of this GPU's kernels to another GPU's memory.

        0: none; 1: loads and stores; 2: atomics as well, hence NVLink (values of
        ``transport.cuda_pairs.Access``). None if this process does not see the GPU.
        """
        code, peer = self.cuda.cuDeviceGetByPCIBusId(bus_id.encode())
        if int(code) != 0:
            return None
        if int(peer) == int(self._device):
            return 2
        if not int(
            check(self.cuda.cuDeviceCanAccessPeer(self._device, peer), "cuDeviceCanAccessPeer")
        ):
            return 0
        atomics = self.cuda.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        return 1 + bool(
            int(
                check(
                    self.cuda.cuDeviceGetP2PAttribute(atomics, self._device, peer),
                    "cuDeviceGetP2PAttribute",
                )
            )
        )

    def enable_peer(self, ordinal: int) -> None:
        """Let kernels of this GPU access this process's memory on GPU ``ordinal``, while the
        context
        lives.
        """
        if ordinal == self.ordinal:
            return
        peer = check(self.cuda.cuDeviceGet(ordinal), f"cuDeviceGet({ordinal})")
        context = check(self.cuda.cuDevicePrimaryCtxRetain(peer), "cuDevicePrimaryCtxRetain")
        try:
            result = self.cuda.cuCtxEnablePeerAccess(context, 0)
            if int(result[0]) != PEER_ACCESS_ALREADY_ENABLED:
                check(result, f"cuCtxEnablePeerAccess of GPU {ordinal}")
        finally:
            self.cuda.cuDevicePrimaryCtxRelease(peer)  # its own rank retains it

    # ---- allocations exported as file descriptors (CUDA driver API, "Virtual Memory Management")

    @functools.cached_property
    def exports_descriptors(self) -> bool:
        """True if allocations of this GPU can be shared as POSIX file descriptors."""
        kinds = self.cuda.CUdevice_attribute
        return bool(
            self._attribute(kinds.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
        )

    def _descriptor_kind(self) -> Any:
        return self.cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _properties(self) -> Any:
        properties = self.cuda.CUmemAllocationProp()
        properties.type = self.cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._descriptor_kind()
        properties.location.type = self.cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(self._device)
        return properties

    def granularity(self) -> int:
        """Return the bytes of which a physical allocation's size is a multiple."""
        option = self.cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(
            check(
                self.cuda.cuMemGetAllocationGranularity(self._properties(), option),
                "cuMemGetAllocationGranularity",
            )
        )

    def create_physical(self, nbytes: int) -> int:
        """Allocate physical memory without an address; return its handle."""
        return int(
            check(
                self.cuda.cuMemCreate(nbytes, self._properties(), 0),
                f"cuMemCreate of {nbytes} bytes",
            )
        )

    def export_descriptor(self, handle: int) -> int:
        """Return a file descriptor with which any process that receives it maps the memory; the
        caller
        closes it.
        """
        return int(
            check(
                self.cuda.cuMemExportToShareableHandle(handle, self._descriptor_kind(), 0),
                "cuMemExportToShareableHandle",
            )
        )

    def import_descriptor(self, descriptor: int) -> int:
        """Return the handle of imported memory; the descriptor may be closed afterwards."""
        result = self.cuda.cuMemImportFromShareableHandle(descriptor, self._descriptor_kind())
        return int(check(result, "cuMemImportFromShareableHandle"))

    def map_physical(self, handle: int, nbytes: int) -> int:
        """Map memory into this process, readable and writable by this GPU; return its address.

        ``nbytes`` is a multiple of the granularity.
        """
        address = int(
            check(
                self.cuda.cuMemAddressReserve(nbytes, 0, 0, 0),
                f"cuMemAddressReserve of {nbytes} bytes",
            )
        )
        try:
            check(self.cuda.cuMemMap(address, nbytes, 0, handle, 0), "cuMemMap")
        except SystemFailure:
            self.cuda.cuMemAddressFree(address, nbytes)
            raise
        access = self.cuda.CUmemAccessDesc()
        access.location.type = self.cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = int(self._device)
        access.flags = self.cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            check(self.cuda.cuMemSetAccess(address, nbytes, [access], 1), "cuMemSetAccess")
        except SystemFailure:
            self.unmap_physical(address, nbytes)
            raise
        return address

    def unmap_physical(self, address: int, nbytes: int) -> None:
        """Unmap and free the address range; the last handle and mapping free the memory."""
        check(self.cuda.cuMemUnmap(address, nbytes), "cuMemUnmap")
        check(self.cuda.cuMemAddressFree(address, nbytes), "cuMemAddressFree")

    def release_physical(self, handle: int) -> None:
        check(self.cuda.cuMemRelease(handle), "cuMemRelease")

    # ---- memory that network adapters use

    @functools.cached_property
    def exports_dma_buf(self) -> bool:
        """True if adapters can access memory of this GPU through a dma-buf."""
        kinds = self.cuda.CUdevice_attribute
        return bool(self._attribute(kinds.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED))

    @functools.cached_property
    def writes_ordering(self) -> int:
        """Order in which writes of adapters become visible: 0 none, 100 for this GPU, 200 for
        all.
        """
        kinds = self.cuda.CUdevice_attribute
        return self._attribute(kinds.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)

    def export_dma_buf(self, address: int, nbytes: int) -> int:
        """Return a dma-buf of memory that begins at a page of the host; the caller closes it."""
        kind = self.cuda.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        result = self.cuda.cuMemGetHandleForAddressRange(address, nbytes, kind, 0)
        return int(check(result, f"cuMemGetHandleForAddressRange of {nbytes} bytes"))

    # ---- host memory that the GPU uses

    def pin(self, address: int, nbytes: int) -> int:
        """Pin existing host memory (whole pages) for all GPUs of this process; return its GPU
        address.
        """
        check(
            self.cuda.cuMemHostRegister(address, nbytes, MEMHOSTALLOC_PORTABLE_MAPPED),
            f"cuMemHostRegister of {nbytes} bytes",
        )
        return int(
            check(self.cuda.cuMemHostGetDevicePointer(address, 0), "cuMemHostGetDevicePointer")
        )

    def unpin(self, address: int) -> None:
        check(self.cuda.cuMemHostUnregister(address), "cuMemHostUnregister")

    def copy_to_host(self, host: int, device: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy to pinned memory."""
        check(self.cuda.cuMemcpyDtoHAsync(host, device, nbytes, stream), "cuMemcpyDtoHAsync")

    def copy_from_host(self, device: int, host: int, nbytes: int, stream: int) -> None:
        check(self.cuda.cuMemcpyHtoDAsync(device, host, nbytes, stream), "cuMemcpyHtoDAsync")

    def write_word(self, address: int, value: int, stream: int) -> None:
        """Enqueue a store of a 32-bit word, after all earlier work of the stream is visible to the
        host.
        """
        check(self.cuda.cuStreamWriteValue32(stream, address, value, 0), "cuStreamWriteValue32")

    def wait_word(self, address: int, value: int, stream: int) -> None:
        """Make the stream wait until the 32-bit word has this value."""
        check(
            self.cuda.cuStreamWaitValue32(stream, address, value, WAIT_VALUE_EQ),
            "cuStreamWaitValue32",
        )

    # ---- kernels and streams

    def load(self, cubin: bytes, entry: str) -> Any:
        """Return function ``entry`` of a module, loaded on first use in this process."""
        name = hashlib.sha256(cubin).digest(), entry
        known = self._modules.functions
        if name not in known:
            with self._modules.loading:
                if name not in known:
                    known[name] = self._load(cubin, entry)
        return known[name]

    def _load(self, cubin: bytes, entry: str) -> Any:
        with self.relaxed_capture():
            try:
                module = check(self.cuda.cuModuleLoadData(cubin), "cuModuleLoadData")
            except SystemFailure as error:
                if toolkit.version()[0] > self.driver_version // 1000:
                    error.hint = (
                        f"the driver supports CUDA {self.driver_version // 1000}: install a newer "
                        f"driver, or run {toolkit.INSTALL_12}"
                    )
                raise
            self._modules.modules.append(module)
            return check(
                self.cuda.cuModuleGetFunction(module, entry.encode()),
                f"cuModuleGetFunction({entry})",
            )

    def is_capturing(self, stream: int) -> bool:
        return int(check(self.cuda.cuStreamIsCapturing(stream), "cuStreamIsCapturing")) != 0

    def order_streams(self, before: int, after: int) -> None:
        """Make later work of stream ``after`` wait for current work of stream ``before``."""
        event = check(self.cuda.cuEventCreate(EVENT_DISABLE_TIMING), "cuEventCreate")
        try:
            check(self.cuda.cuEventRecord(event, before), "cuEventRecord")
            check(self.cuda.cuStreamWaitEvent(after, event, 0), "cuStreamWaitEvent")
        finally:
            self.cuda.cuEventDestroy(event)

    def make_event(self) -> Any:
        """Create an event without timing; the caller destroys it."""
        return check(self.cuda.cuEventCreate(EVENT_DISABLE_TIMING), "cuEventCreate")

    def record(self, event: Any, stream: int) -> None:
        check(self.cuda.cuEventRecord(event, stream), "cuEventRecord")

    def wait_event(self, stream: int, event: Any) -> None:
        """Make later work of ``stream`` wait for the last record of ``event``."""
        check(self.cuda.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent")

    def is_done(self, stream: int) -> bool:
        """Return True if the GPU has completed all work of a stream; does not wait."""
        return self._has_ended("cuStreamQuery", stream)

    def has_completed(self, event: Any) -> bool:
        """Return True if the GPU has completed the event; does not wait."""
        return self._has_ended("cuEventQuery", event)

    def poll_event(self, event: Any, times: int) -> bool:
        """Return True if the GPU has completed the event before ``times`` queries were made."""
        query, not_ready = self.cuda.cuEventQuery, self.cuda.CUresult.CUDA_ERROR_NOT_READY
        with self.relaxed_capture():
            for _ in range(times):
                result = query(event)
                if result[0] != not_ready:
                    check(result, "cuEventQuery")
                    return True
        return False

    def _has_ended(self, query: str, what: Any) -> bool:
        with self.relaxed_capture():  # another stream of this thread may be captured
            result = getattr(self.cuda, query)(what)
        if result[0] == self.cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check(result, query)
        return True

    def destroy_event(self, event: Any) -> None:
        self.cuda.cuEventDestroy(event)

    def make_stream(self) -> int:
        """Create a stream that does not synchronise with the legacy default stream."""
        return int(check(self.cuda.cuStreamCreate(STREAM_NON_BLOCKING), "cuStreamCreate"))

    def destroy_stream(self, stream: int) -> None:
        self.cuda.cuStreamDestroy(stream)

    def capture_id(self, stream: int) -> int:
        """Return the id of the capture that a stream is part of; 0 if none."""
        result = self.cuda.cuStreamIsCapturing(stream)
        if (
            result[0] == self.cuda.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        ):  # the legacy stream, while a stream that it waits for is captured
            return 0
        if not int(check(result, "cuStreamIsCapturing")):
            return 0
        return int(check(self.cuda.cuStreamGetCaptureInfo(stream), "cuStreamGetCaptureInfo")[1])

    def capture(self, stream: int, enqueue: Callable[[int], None]) -> Any:
        """Capture the work of ``enqueue(stream)`` and return an instantiated graph.

        Calls that other threads make in the block are not part of it.
        """
        cuda = self.cuda
        check(
            cuda.cuStreamBeginCapture(
                stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            ),
            "cuStreamBeginCapture",
        )
        try:
            enqueue(stream)
        except BaseException:
            _, graph = cuda.cuStreamEndCapture(stream)
            if graph:
                cuda.cuGraphDestroy(graph)
            raise
        graph = check(cuda.cuStreamEndCapture(stream), "cuStreamEndCapture")
        try:
            return check(cuda.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
        finally:
            cuda.cuGraphDestroy(graph)

    def launch_graph(self, graph: Any, stream: int) -> None:
        check(self.cuda.cuGraphLaunch(graph, stream), "cuGraphLaunch")

    def destroy_graph(self, graph: Any) -> None:
        """Destroy a graph; a running launch of it completes first."""
        self.cuda.cuGraphExecDestroy(graph)

    def synchronize(self) -> None:
        check(self.cuda.cuCtxSynchronize(), "cuCtxSynchronize")

    def close(self) -> None:
        """Release modules and the context; may be called twice."""
        if self._context is None:
            return
        for module in self._modules.release(self.context):
            self.cuda.cuModuleUnload(module)
        self.cuda.cuStreamDestroy(self._side)
        self.release()
