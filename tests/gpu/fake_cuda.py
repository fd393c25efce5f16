"""CUDA driver without a GPU: the functions that ``executor.cuda.gpu`` calls, over process memory.

Device memory is an anonymous file, so handles and descriptors work between processes like real
ones. Kernels cannot be launched. Every GPU has a context; each thread has a current one or none.
Streams, events, modules and memory belong to contexts, and mixing them is rejected as by the driver
(CUDA C++ Programming Guide, "Stream and Event Behavior" of several devices), as is memory to which
a GPU has no access. Streams are threads: work runs in order and asynchronously, values are awaited,
captured work runs when it is replayed. ``FakeLocal`` replaces a host's kernels: the stream calls
the CPU communicator.
"""

# ruff: noqa: N802, N815

from __future__ import annotations

import bisect
import contextlib
import ctypes
import enum
import functools
import mmap
import os
import queue
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from miraccl.errors import MiracclError
from miraccl.executor.cuda import driver, layout
from miraccl.executor.cuda.gpu import Gpu
from miraccl.ops.device_arrays import DeviceMemory
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import Collective, RedOp

WAIT_LIMIT_S = 60.0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_PUNCH_HOLE = 3  # linux/falloc.h: FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE; it reads as zeros
_PORTABLE = 0x01  # cuda.h CU_MEMHOSTALLOC_PORTABLE
_NONE, _READ_WRITE, _SHARED, _PRIVATE, _FIXED, _ANONYMOUS = 0, 3, 1, 2, 0x10, 0x20


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704


class CUipcMemHandle:
    """64 bytes at an address, as cuda-bindings 13.5 has it: without the field ``reserved``."""

    def __init__(self) -> None:
        self.data = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.data)


class _Record:
    """Struct with arbitrary attributes, which may be structs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Record()
        setattr(self, name, value)
        return value


def _map(fd: int, nbytes: int, at: int = 0) -> int:
    address = _libc.mmap(at or None, nbytes, _READ_WRITE, _SHARED | (_FIXED if at else 0), fd, 0)
    assert address not in (None, ctypes.c_void_p(-1).value)
    return int(address)


def _memory(name: str, nbytes: int) -> int:
    """Return an anonymous file of ``nbytes`` with arbitrary contents."""
    fd = os.memfd_create(name)
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, b"\xff" * min(nbytes, 4096), 0)
    return fd


class FakeStream:
    """Thread that runs work in order; while it is captured, work is appended to ``graph``."""

    def __init__(self, context: int) -> None:
        self.context = context
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.graph: list[Callable[[], None]] | None = None
        self.error: BaseException | None = None
        self._left, self._count = 0, threading.Lock()  # pending work
        threading.Thread(target=self._loop, daemon=True).start()

    def put(self, work: Callable[[], None]) -> None:
        if self.graph is None:
            self._enqueue(work)
        else:
            self.graph.append(work)

    def _enqueue(self, work: Callable[[], None]) -> None:
        with self._count:
            self._left += 1
        self._queue.put(work)

    def replay(self, graph: Sequence[Callable[[], None]]) -> None:
        for work in graph:
            self._enqueue(work)

    def synchronize(self) -> None:
        done = threading.Event()
        self._enqueue(done.set)
        assert done.wait(WAIT_LIMIT_S), "the stream does not come to its end"
        if self.error is not None:
            raise self.error

    @property
    def idle(self) -> bool:
        return not self._left

    def _loop(self) -> None:
        while True:
            work = self._queue.get()
            try:
                work()
            except BaseException as error:
                self.error = self.error or error
            with self._count:
                self._left -= 1


class _Streams(dict[int, FakeStream]):
    """Streams by handle; 0 and 1 are the legacy stream of the current context."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda, self.legacy = (
            cuda,
            {context_of(ordinal): FakeStream(context_of(ordinal)) for ordinal in range(cuda.ngpus)},
        )

    def __missing__(self, number: int) -> FakeStream:
        if number not in (0, 1) or self.cuda.current is None:
            raise KeyError(number)
        return self.legacy[self.cuda.current]

    def of(self, context: int) -> list[FakeStream]:
        return [
            stream
            for stream in (*self.legacy.values(), *self.values())
            if stream.context == context
        ]


class _Area(NamedTuple):
    """Memory known to the driver: owning GPU (None: host) and GPUs with access (None: all)."""

    start: int
    nbytes: int
    owner: int | None
    gpus: set[int] | None
    plain: bool = False  # of cuMemAlloc: peers need access from context to context
    fd: int = -1  # file of the memory


def context_of(ordinal: int) -> int:
    """Return the primary context of a GPU."""
    return 0xC0DA00 + ordinal


def _ordinal_of(context: int) -> int:
    return context - context_of(0)


def _needs_context(call: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Make a driver function fail in threads without a current context."""

    @functools.wraps(call)
    def checked(self: FakeCuda, *args: Any) -> tuple[Any, ...]:
        if self.current is None:
            return Result.CUDA_ERROR_INVALID_CONTEXT, None
        return (
            call(self, *args)
            if self.retained[self.current]
            else (Result.CUDA_ERROR_CONTEXT_IS_DESTROYED, None)
        )

    return checked


class FakeCuda:
    """Functions of ``cuda.bindings.driver``.

    ``refuse``: names of calls that fail; ``access(a, b)``: result of cuDeviceCanAccessPeer;
    ``home``: GPU of the application, where ``place`` puts arrays.
    """

    CUdevice_attribute = types.SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=16,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=103,
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING=118,
        CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED=124,
    )
    CUmemRangeHandleType = types.SimpleNamespace(CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD=1)
    CUdevice_P2PAttribute = types.SimpleNamespace(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED=3)
    CUmemAllocationHandleType = types.SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationType = types.SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = types.SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = types.SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = types.SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
    CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUresult = Result
    CUmemAllocationProp = CUmemAccessDesc = _Record
    CUipcMemHandle: type[Any] = CUipcMemHandle

    def __init__(
        self,
        ngpus: int = 8,
        refuse: Sequence[str] = (),
        access: Callable[[int, int], bool] = lambda a, b: True,
        home: int = 0,
    ) -> None:
        self.ngpus, self.refuse, self.access, self._home = ngpus, set(refuse), access, home
        self.live: dict[
            int, tuple[int, int]
        ] = {}  # address -> (descriptor, bytes) of cuMemAlloc and cuMemCreate's mappings
        self.placed: dict[
            int, int
        ] = {}  # address -> GPU that the driver reports instead of the real one
        self.handles: dict[int, tuple[int, int | None]] = {}  # handle -> (descriptor, GPU)
        self.pinned: set[int] = set()
        self.streams = _Streams(self)
        self.destroyed: list[FakeStream] = []  # their work continues
        self.enabled: set[tuple[int, int]] = set()  # (context, context of a peer with access)
        self.retained: Counter[int] = Counter()  # contexts
        self.faults: list[str] = []  # accesses that would fault on a GPU
        self._areas: list[_Area] = []  # sorted
        self._threads = threading.local()
        self._opened: dict[int, int] = {}
        self._host: dict[int, mmap.mmap] = {}
        self._numbers = iter(range(1000, 1 << 30))

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and name in object.__getattribute__(self, "refuse"):
            return lambda *_: (Result.CUDA_ERROR_NOT_SUPPORTED, None)
        return object.__getattribute__(self, name)

    def install(self) -> FakeCuda:
        """Make ``Gpu`` of this process use this driver."""
        vars(driver).update(bindings=lambda name: self, pointer_attribute=self.pointer_attribute)
        if self.home:  # one of GPU 0 need not have done anything yet
            self.set_current(self.home)
        return self

    @property
    def home(self) -> int:
        """GPU of the application, or of this thread of it."""
        return int(getattr(self._threads, "home", self._home))

    @home.setter
    def home(self, ordinal: int) -> None:
        self._threads.home = ordinal

    def set_current(self, ordinal: int) -> int:
        """Make a GPU's context current in this thread, as an application does."""
        context = self.cuDevicePrimaryCtxRetain(ordinal)[1]
        self.cuCtxSetCurrent(context)
        return int(context)

    # devices and contexts

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (Result.CUDA_SUCCESS,)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, 12080

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.ngpus

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return (
            (Result.CUDA_SUCCESS, ordinal)
            if ordinal < self.ngpus
            else (Result.CUDA_ERROR_INVALID_VALUE, None)
        )

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        self.retained[context_of(device)] += 1
        return Result.CUDA_SUCCESS, context_of(device)

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Any, ...]:
        self.retained[context_of(device)] -= 1
        assert self.retained[context_of(device)] >= 0
        return (Result.CUDA_SUCCESS,)

    def cuCtxSetCurrent(self, context: int | None) -> tuple[Any, ...]:
        self._threads.current = context or None
        return (Result.CUDA_SUCCESS,)

    @property
    def current(self) -> int | None:
        """Current context of this thread."""
        return getattr(self._threads, "current", None)

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.current or 0

    @_needs_context
    def cuCtxGetDevice(self) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self._ordinal

    def cuDeviceGetAttribute(self, kind: int, device: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, {75: 9, 76: 0, 16: 132, 103: 1, 118: 0, 124: 1}[kind]

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, f"0000:{device + 16:02X}:00.0".encode().ljust(length, b"\0")

    def cuDeviceGetByPCIBusId(self, bus_id: bytes) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, int(bus_id.split(b":")[1], 16) - 16

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, int(self.access(device, peer))

    def cuDeviceGetP2PAttribute(self, kind: int, device: int, peer: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, 0

    @_needs_context
    def cuCtxEnablePeerAccess(self, context: int, flags: int) -> tuple[Any, ...]:
        assert self.current is not None
        pair = self.current, context
        if pair[0] == pair[1] or not self.access(*map(_ordinal_of, pair)):
            return (Result.CUDA_ERROR_INVALID_CONTEXT,)
        again = pair in self.enabled
        self.enabled.add(pair)
        return (Result.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED if again else Result.CUDA_SUCCESS,)

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, 0

    # memory

    def _note(
        self,
        address: int,
        nbytes: int,
        owner: int | None,
        gpus: set[int] | None,
        plain: bool = False,
        fd: int = -1,
    ) -> None:
        bisect.insort(
            self._areas, _Area(address, nbytes, owner, gpus, plain, fd), key=lambda area: area.start
        )

    def _area(self, address: int) -> _Area | None:
        """Return the memory that contains an address."""
        place = bisect.bisect_right(self._areas, address, key=lambda area: area.start)
        area = self._areas[place - 1] if place else None
        return area if area is not None and address < area.start + area.nbytes else None

    def _forget(self, address: int) -> None:
        gone = [area for area in self._areas if area.start == address]
        self._areas = [area for area in self._areas if area.start != address]
        for area in gone:
            if area.fd >= 0:
                os.close(area.fd)

    def reaches(self, context: int, address: int, copies: bool = False) -> bool:
        """Return True if work of a context may access an address; copies reach plain memory of all
        GPUs.
        """
        area = self._area(address)
        if (
            area is None
            or area.gpus is None
            or _ordinal_of(context) in area.gpus
            or (copies and area.plain)
        ):
            return True
        return (
            area.plain
            and area.owner is not None
            and (context, context_of(area.owner)) in self.enabled
        )

    def _touches(self, stream: int, *addresses: int, copies: bool = False) -> bool:
        """Return True if a stream's GPU may access these addresses; record violations."""
        context = self.streams[int(stream)].context
        wrong = [address for address in addresses if not self.reaches(context, address, copies)]
        self.faults += [
            f"GPU {_ordinal_of(context)} has no access to {address:#x}: {self._area(address)}"
            for address in wrong
        ]
        return not wrong

    @property
    def _ordinal(self) -> int:
        """Return the GPU whose context is current."""
        assert self.current is not None
        return _ordinal_of(self.current)

    @_needs_context
    def cuMemAlloc(self, nbytes: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.allocate(nbytes, self._ordinal)

    def allocate(self, nbytes: int, ordinal: int) -> int:
        """Allocate memory of a GPU, whatever context is current."""
        fd = _memory("gpu", nbytes)
        address = _map(fd, nbytes)
        self.live[address] = (fd, nbytes)
        self._note(address, nbytes, ordinal, {ordinal}, plain=True, fd=fd)
        return address

    @_needs_context
    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        _, nbytes = self.live.pop(address)
        self._forget(address)
        _libc.munmap(address, nbytes)
        return (Result.CUDA_SUCCESS,)

    @_needs_context
    def cuMemGetHandleForAddressRange(
        self, address: int, nbytes: int, kind: int, flags: int
    ) -> tuple[Any, ...]:
        """Return the anonymous file of an allocation, which a simulated adapter maps."""
        fd, size = self.live[address]
        assert nbytes <= size, "a range beyond the allocation"
        return Result.CUDA_SUCCESS, os.dup(fd)

    def pointer_attribute(self, kind: int, address: int) -> int | None:
        area = self._area(address)
        owner = self.placed.get(address, area.owner if area is not None else None)
        return None if owner is None else {2: 2, 8: 0, 9: owner}[kind]

    @_needs_context
    def cuIpcGetMemHandle(self, address: int) -> tuple[Any, ...]:
        record = CUipcMemHandle()
        fd, nbytes = self.live[address]
        record.data.value = f"{os.getpid()} {fd} {nbytes}".encode()
        return Result.CUDA_SUCCESS, record

    @_needs_context
    def cuIpcOpenMemHandle(self, record: Any, flags: int) -> tuple[Any, ...]:
        pid, fd, nbytes = map(int, record.data.value.split())
        if pid == os.getpid():
            return Result.CUDA_ERROR_INVALID_VALUE, None
        handle = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        address = _map(handle, nbytes)
        os.close(handle)
        self._opened[address] = nbytes
        self._note(address, nbytes, None, {self._ordinal})
        return Result.CUDA_SUCCESS, address

    @_needs_context
    def cuIpcCloseMemHandle(self, address: int) -> tuple[Any, ...]:
        self._forget(address)
        _libc.munmap(address, self._opened.pop(address))
        return (Result.CUDA_SUCCESS,)

    def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, 2 << 20

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> tuple[Any, ...]:
        assert (properties.type, properties.requestedHandleTypes, properties.location.type) == (
            1,
            1,
            1,
        )
        assert nbytes % (2 << 20) == 0
        fd = _memory("physical", nbytes)
        return Result.CUDA_SUCCESS, self._handle(fd, properties.location.id)

    def _handle(self, fd: int, owner: int | None) -> int:
        number = next(self._numbers)
        self.handles[number] = fd, owner
        return number

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, os.dup(self.handles[handle][0])

    def cuMemImportFromShareableHandle(self, fd: int, kind: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self._handle(os.dup(fd), None)

    def cuMemAddressReserve(
        self, nbytes: int, alignment: int, at: int, flags: int
    ) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, int(
            _libc.mmap(None, nbytes, _NONE, _PRIVATE | _ANONYMOUS, -1, 0)
        )

    def cuMemMap(
        self, address: int, nbytes: int, offset: int, handle: int, flags: int
    ) -> tuple[Any, ...]:
        fd, owner = self.handles[handle]
        _map(fd, nbytes, address)
        self.live[address] = (-1, nbytes)
        self._note(address, nbytes, owner, set(), fd=os.dup(fd))
        return (Result.CUDA_SUCCESS,)

    def cuMemSetAccess(
        self, address: int, nbytes: int, records: list[Any], count: int
    ) -> tuple[Any, ...]:
        assert (len(records), count, records[0].flags) == (1, 1, 3)
        area = self._area(address)
        assert area is not None
        assert area.gpus is not None
        assert (area.start, area.nbytes) == (address, nbytes)
        area.gpus.add(records[0].location.id)
        return (Result.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[Any, ...]:
        assert self.live.pop(address)[1] == nbytes
        self._forget(address)
        return (Result.CUDA_SUCCESS,)

    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[Any, ...]:
        assert address not in self.live
        _libc.munmap(address, nbytes)
        return (Result.CUDA_SUCCESS,)

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        os.close(self.handles.pop(handle)[0])
        return (Result.CUDA_SUCCESS,)

    @_needs_context
    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[Any, ...]:
        memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._host[address] = memory
        self._note(address, nbytes, None, None if flags & _PORTABLE else {self._ordinal})
        return Result.CUDA_SUCCESS, address

    def cuMemFreeHost(self, address: int) -> tuple[Any, ...]:
        self._forget(address)
        del self._host[address]
        return (Result.CUDA_SUCCESS,)

    @_needs_context
    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[Any, ...]:
        assert self.current is not None
        return (
            (Result.CUDA_SUCCESS, address)
            if self.reaches(self.current, address)
            else (Result.CUDA_ERROR_INVALID_VALUE, None)
        )

    @_needs_context
    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[Any, ...]:
        assert (address % mmap.PAGESIZE, nbytes % mmap.PAGESIZE, flags) == (0, 0, 3)
        self.pinned.add(address)
        self._note(address, nbytes, None, None if flags & _PORTABLE else {self._ordinal})
        return (Result.CUDA_SUCCESS,)

    @_needs_context
    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:
        self.pinned.remove(address)
        self._forget(address)
        return (Result.CUDA_SUCCESS,)

    # streams

    @_needs_context
    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.make_stream(self._ordinal)

    def make_stream(self, ordinal: int | None = None) -> int:
        """Create a stream of a GPU, by default the application's, whatever context is current."""
        number = next(self._numbers)
        self.streams[number] = FakeStream(context_of(self.home if ordinal is None else ordinal))
        return number

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        self.destroyed.append(self.streams.pop(int(stream)))
        return (Result.CUDA_SUCCESS,)

    @_needs_context
    def _put(self, stream: int, work: Callable[[], None]) -> tuple[Any, ...]:
        self.streams[int(stream)].put(work)
        return (Result.CUDA_SUCCESS,)

    @_needs_context
    def _use(
        self,
        stream: int,
        addresses: tuple[int, ...],
        work: Callable[[], None],
        copies: bool = False,
    ) -> tuple[Any, ...]:
        """Check that work on memory may run in a stream."""
        if not self._touches(stream, *addresses, copies=copies):
            return (Result.CUDA_ERROR_ILLEGAL_ADDRESS,)
        return self._put(stream, work)

    @_needs_context
    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        self.streams[stream].synchronize()
        return (Result.CUDA_SUCCESS,)

    @_needs_context
    def cuStreamQuery(self, stream: int) -> tuple[Any, ...]:
        return (
            Result.CUDA_SUCCESS
            if self.streams[stream].idle
            else self.CUresult.CUDA_ERROR_NOT_READY,
        )

    @_needs_context
    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        assert self.current is not None
        for stream in [
            *self.streams.of(self.current),
            *(stream for stream in self.destroyed if stream.context == self.current),
        ]:
            stream.synchronize()
        assert not self.faults, self.faults
        return (Result.CUDA_SUCCESS,)

    @_needs_context
    def cuStreamIsCapturing(self, stream: int) -> tuple[Any, ...]:
        assert stream in (0, 1, *self.streams), "the driver ends the process"
        return Result.CUDA_SUCCESS, int(self.streams[stream].graph is not None)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, 1, id(self.streams[stream].graph), None

    @_needs_context
    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        event = types.SimpleNamespace(recorded=threading.Event(), graph=None, context=self.current)
        event.recorded.set()  # waiting for an event that was never recorded is no wait
        return Result.CUDA_SUCCESS, event

    @_needs_context
    def cuEventRecord(self, event: Any, stream: int) -> tuple[Any, ...]:
        if event.context != self.streams[stream].context:
            return (Result.CUDA_ERROR_INVALID_HANDLE,)
        recorded = event.recorded = (
            threading.Event()
        )  # who waits later waits for this record, who waits already for the one before
        event.graph = self.streams[stream].graph
        return self._put(stream, recorded.set)

    @_needs_context
    def cuStreamWaitEvent(self, stream: int, event: Any, flags: int) -> tuple[Any, ...]:
        """Order streams; a stream that waits for a captured one joins the capture."""
        recorded = event.recorded
        if event.graph is not None:
            self.streams[stream].graph = event.graph
        return self._put(stream, lambda: self._wait(recorded.is_set))

    def cuEventQuery(self, event: Any) -> tuple[Any, ...]:
        return (Result.CUDA_SUCCESS if event.recorded.is_set() else Result.CUDA_ERROR_NOT_READY,)

    def cuEventDestroy(self, event: Any) -> tuple[Any, ...]:
        return (Result.CUDA_SUCCESS,)

    def cuMemsetD32Async(self, address: int, word: int, count: int, stream: int) -> tuple[Any, ...]:
        return self._use(stream, (address,), lambda: self._fill(address, word, count))

    def _fill(self, address: int, word: int, count: int) -> None:
        """Fill memory; large parts in its file, as a rank fills 65 MiB and uses little of it.

        A page fault for each page would take 0.13 s of processor time, this takes 0.03 s.
        """
        area, nbytes = self._area(address), 4 * count
        if area is None or area.fd < 0 or nbytes < 1 << 20:
            words: Any = (ctypes.c_uint32 * count).from_address(address)
            np.frombuffer(words, np.uint32)[:] = word
        elif word == 0:
            assert _libc.fallocate(area.fd, _PUNCH_HOLE, address - area.start, nbytes) == 0
        else:
            part = np.full(1 << 18, word, np.uint32).tobytes()
            for done in range(0, nbytes, len(part)):
                os.pwrite(area.fd, part[: nbytes - done], address - area.start + done)

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> tuple[Any, ...]:
        def copy() -> None:
            ctypes.memmove(target, source, nbytes)

        return self._use(stream, (target, source), copy, True)

    cuMemcpyDtoDAsync = cuMemcpyDtoHAsync = cuMemcpyHtoDAsync = _copy

    def cuStreamWriteValue32(
        self, stream: int, address: int, value: int, flags: int
    ) -> tuple[Any, ...]:
        def write() -> None:
            ctypes.c_uint32.from_address(address).value = value

        return self._use(stream, (address,), write)

    def cuStreamWaitValue32(
        self, stream: int, address: int, value: int, flags: int
    ) -> tuple[Any, ...]:
        assert flags == 1
        return self._use(
            stream,
            (address,),
            lambda: self._wait(lambda: ctypes.c_uint32.from_address(address).value == value),
        )

    @staticmethod
    def _wait(ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_LIMIT_S
        while not ready():
            if time.monotonic() > deadline:
                raise TimeoutError("a stream has waited too long")
            time.sleep(20e-6)

    def cuModuleUnload(self, module: Any) -> tuple[Any, ...]:
        return (Result.CUDA_SUCCESS,)

    # graphs

    def cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[Any, ...]:
        self.begin_capture(stream)
        return (Result.CUDA_SUCCESS,)

    def cuStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.end_capture(stream)

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, graph

    def cuGraphLaunch(self, graph: Any, stream: int) -> tuple[Any, ...]:
        self.streams[stream].replay(graph)
        return (Result.CUDA_SUCCESS,)

    def cuGraphDestroy(self, graph: Any) -> tuple[Any, ...]:
        return (Result.CUDA_SUCCESS,)

    def cuGraphExecDestroy(self, graph: Any) -> tuple[Any, ...]:
        return (Result.CUDA_SUCCESS,)

    def begin_capture(self, stream: int) -> None:
        self.streams[stream].graph = []

    def end_capture(self, stream: int) -> list[Callable[[], None]]:
        graph = self.streams[stream].graph
        assert graph is not None
        for each in (*self.streams.legacy.values(), *self.streams.values()):
            if each.graph is graph:
                each.graph = None
        return graph


class FakeArray:
    """Array in fake device memory with ``__cuda_array_interface__``."""

    def __init__(self, cuda: FakeCuda, array: np.ndarray) -> None:
        self.memory = place(cuda, array)
        self.array = seen(self.memory)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.array.shape,
            "typestr": self.array.dtype.str,
            "data": (self.memory.address, False),
            "version": 3,
        }


def place(cuda: FakeCuda, array: np.ndarray) -> DeviceMemory:
    """Copy ``array`` to the GPU."""
    dtype = next(code for code, kind in NUMPY_DTYPE.items() if kind == array.dtype)
    address = cuda.allocate(max(4096, array.nbytes), cuda.home)
    memory = DeviceMemory(address, array.size, dtype)
    seen(memory)[:] = array.reshape(-1)
    return memory


def seen(memory: DeviceMemory) -> np.ndarray:
    """Return an array that shares GPU memory."""
    if not memory.count:
        return np.empty(0, NUMPY_DTYPE[memory.dtype])
    data: Any = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
    array: np.ndarray = np.frombuffer(data, np.uint8)
    return array.view(NUMPY_DTYPE[memory.dtype])


class CpuKernels:
    """``runtime.gpu.DeviceCommunicator`` without kernels: streams call a CPU communicator."""

    def __init__(
        self,
        session: Any,
        ordinal: int,
        options: Any,
        stages: Any,
        global_ranks: Sequence[int],
        launch_orders: Any,
    ) -> None:
        from miraccl.api.communicator import Communicator
        from miraccl.runtime.gpu.kernel_faults import DeviceFaults

        self.session, self.rank, self.nranks = session, session.rank, session.nranks
        self.gpu = Gpu(ordinal)
        self.cuda: FakeCuda = self.gpu.cuda
        name = f"{session.name}/fake"
        part = session.subgroup(range(self.nranks), name)
        self._cpu = Communicator.from_session(part, options, setup=stages.child(part))
        self._stream = -1
        self.words = np.zeros(layout.HOST_BYTES // 4, np.uint32)  # written by kernels
        callbacks: Any = {
            "read_snapshot": lambda: None,
            "describe_launch": lambda *_: "",
            "rejected_size": lambda _: None,
            "stopped": lambda: False,
        }
        self.faults = DeviceFaults(
            session, self.words, options.timeout, **callbacks, global_ranks=global_ranks
        )
        self.probe: Any = None
        self.calls: list[Collective] = []
        self.planner = types.SimpleNamespace(deterministic=options.deterministic)
        self.streams = types.SimpleNamespace(handle=lambda stream: int(stream or 0))
        self.symmetric, self.connections = types.SimpleNamespace(nbytes=0), list
        self.memory = lambda: {"device": 0, "windows": 0, "pinned": 0}
        self.any_window_offset = contextlib.nullcontext

    @property
    def closed(self) -> bool:
        return self._cpu._core.closed

    def compare_ops(self) -> None:
        """Do nothing: the CPU communicator compares operations."""

    def enter_operation(self, name: str, stream: Any) -> int:
        self.check(name)
        before, self._stream = self._stream, self.streams.handle(stream)
        if before not in (-1, self._stream):
            self.gpu.order_streams(before, self._stream)
        return self._stream

    def retain(self, views: Sequence[DeviceMemory], number: int) -> None:
        assert all(view.keep is None for view in views)

    def exchange(
        self, transfers: Sequence[Any], *, stream: int, name: str, signature: int = 0
    ) -> None:
        def run() -> None:
            works = []
            for t in transfers:
                call = self._cpu.recv if t.receives else self._cpu.send
                works.append(call(seen(t.memory), t.peer, async_op=True))
            for work in works:
                work.wait()

        self._put(Collective.SEND_RECV, stream, run)

    def _put(self, collective: Collective, stream: int, work: Callable[[], Any]) -> None:
        self.calls.append(collective)

        def run() -> None:
            with contextlib.suppress(
                MiracclError
            ):  # kernels end when their communicator is aborted; ``check`` reports it
                work()

        self.cuda.streams[stream].put(run)

    def all_reduce(self, x: DeviceMemory, out: DeviceMemory, op: RedOp, *, stream: int) -> None:
        self._put(
            Collective.ALL_REDUCE, stream, lambda: self._cpu.all_reduce(seen(x), seen(out), op)
        )

    def reduce_scatter(self, x: DeviceMemory, out: DeviceMemory, op: RedOp, *, stream: int) -> None:
        self._put(
            Collective.REDUCE_SCATTER,
            stream,
            lambda: self._cpu.reduce_scatter(seen(x), seen(out), op),
        )

    def all_gather(self, x: DeviceMemory, out: DeviceMemory, *, stream: int) -> None:
        self._put(Collective.ALL_GATHER, stream, lambda: self._cpu.all_gather(seen(x), seen(out)))

    def all_to_all(self, x: DeviceMemory, out: DeviceMemory, *, stream: int) -> None:
        self._put(Collective.ALL_TO_ALL, stream, lambda: self._cpu.all_to_all(seen(x), seen(out)))

    def broadcast(self, x: DeviceMemory, root: int, *, stream: int) -> None:
        self._put(Collective.BROADCAST, stream, lambda: self._cpu.broadcast(seen(x), root))

    def reduce(
        self, x: DeviceMemory, root: int, out: DeviceMemory | None, op: RedOp, *, stream: int
    ) -> None:
        target = seen(out) if out is not None else None
        self._put(Collective.REDUCE, stream, lambda: self._cpu.reduce(seen(x), root, target, op))

    def check(self, name: str = "") -> None:
        if self.words[layout.HOST_ERROR]:
            self.faults.check(name)
        self._cpu._core.check(0, name)

    def set_fault(self, fault: MiracclError) -> None:
        self._cpu._core.faults.set_fault(fault)

    def has_stopped(self) -> bool:
        return False

    def close(self, already_reported: bool = False) -> None:
        self._cpu.finalize()
