"""Transfers of GPU memory: one kernel over a table of extents, into memory that CUDA IPC maps.

Local GPU memory with CPU memory of the other side is staged: the kernel gathers it into pinned
memory, or scatters it from there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from typing import Any

import numpy as np

from miraccl import clock, params
from miraccl.deadline import Deadline
from miraccl.errors import InvalidUsage, MiracclError, SystemFailure
from miraccl.executor.cuda import toolkit
from miraccl.executor.cuda.driver import check
from miraccl.executor.cuda.gpu import Gpu
from miraccl.p2p import segment_layout as layout
from miraccl.p2p.arrays import Memory
from miraccl.p2p.descriptors import RemoteMemory
from miraccl.p2p.extents import Extents
from miraccl.p2p.local_path import LocalPath, stale
from miraccl.p2p.native_calls import exchange_word, load_word, store_word
from miraccl.p2p.transfer import Transfer
from miraccl.p2p.transfer_plan import Rates, TransferPlan, make_plan
from miraccl.transport.region import Rights

#: Threads of a block and of an extent (``scatter.cuh``), and bytes of an extent after cutting:
#: 16 KiB blocks of a KV cache are whole. A multiprocessor has one block.
THREADS, GROUP, PIECE_BYTES = 1024, 256, 1 << 16
#: Queries of an event between two looks at the transfer; one takes about a microsecond.
POLLS = 32
_HANDLE = struct.Struct("<64sQQ")  # IPC handle, offset in the allocation, process
#: Constants of the prediction: us of a launch and its completion; GB/s of a copy within an H100.
LAUNCH_US, GB_S = 8.0, 1300.0
#: From this size on one extent is copied by the copy engine, which leaves the multiprocessors to
#: other kernels: the launch of a kernel is below 1 % of the time (256 MiB: 215 us on an H100). Not
#: tuned.
ENGINE_BYTES = 64 << 20
#: GB/s between a GPU and pinned memory.
PINNED_GB_S = 25.0
RATES = Rates(start_us=LAUNCH_US, call_us=0.0, extent_us=0.0, us_byte=1 / (GB_S * 1e3))


def kernel_source() -> str:
    """Return the source of the kernel ``scatter``."""
    folder = resources.files("miraccl.executor.cuda").joinpath("source")
    parts = [folder.joinpath(name).read_text() for name in ("machine.cuh", "scatter.cuh")]
    defines = f"#define THREADS {THREADS}\n#define GROUP {GROUP}\n#define ARCH 0\n"
    return defines + "".join(parts)


def cut(table: Any) -> Any:
    """Return extents of at most ``PIECE_BYTES``; ``table``: int64 rows (source, target, bytes)."""
    counts = -(-table[:, 2] // PIECE_BYTES)
    if (counts <= 1).all():
        return np.ascontiguousarray(table)
    rows = np.repeat(table, counts, axis=0)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    skip = (np.arange(len(rows)) - first) * PIECE_BYTES
    rows[:, 0] += skip
    rows[:, 1] += skip
    rows[:, 2] = np.minimum(rows[:, 2] - skip, PIECE_BYTES)
    return rows


class BlockKernelLaunch:
    """Arguments of a launch over a table of extents, made once for any number of launches.

    Args:
        table: GPU address of the extents.
        count: Number of extents.
    """

    def __init__(self, gpu: Gpu, stream: int, table: int, count: int) -> None:
        self._words = (ctypes.c_uint64 * 2)(table, count)
        self._params = (ctypes.c_void_p * 1)(ctypes.addressof(self._words))
        grid = (launch_blocks(count, gpu.multiprocessors), 1, 1, THREADS, 1, 1, 0)
        #: Arguments of cuLaunchKernel behind the function.
        self.arguments = (*grid, gpu.cuda.CUstream(stream), ctypes.addressof(self._params), 0)


def launch_blocks(count: int, multiprocessors: int) -> int:
    """Return the number of blocks of a launch over ``count`` extents."""
    limit = params.SMS.read()
    most = limit if limit > 0 else multiprocessors
    return max(1, min(-(-count // (THREADS // GROUP)), most))


class Copier:
    """The kernel on one GPU, and the memory of other processes that is mapped there."""

    def __init__(self, ordinal: int) -> None:
        self.gpu = Gpu(ordinal)
        with self.gpu.device_guard():
            cubin = toolkit.compile_cubin(kernel_source(), self.gpu.arch, "scatter")
            self.function = self.gpu.load(cubin, "scatter")
            self.stream = self.gpu.make_stream()
        self._mapped: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def export(self, address: int) -> bytes:
        """Return the handle with which other processes map the memory at ``address``."""
        with self.gpu.device_guard():
            base, _ = check(self.gpu.cuda.cuMemGetAddressRange(address), "cuMemGetAddressRange")
            handle = self.gpu.export(int(base))
        return _HANDLE.pack(handle, address - int(base), os.getpid())

    def map(self, handle: bytes) -> int:
        """Return the address here of exported memory of another process."""
        raw, offset, _ = _HANDLE.unpack(handle)
        with self._lock, self.gpu.device_guard():
            if raw not in self._mapped:
                self._mapped[raw] = self.gpu.map_peer(raw)
            return self._mapped[raw] + int(offset)

    def upload(self, table: Any) -> int:
        """Return the GPU address of a copy of the table; free it with ``free``."""
        with self.gpu.device_guard():
            address = self.gpu.allocate(max(table.nbytes, 24))
            if table.nbytes:
                host = table.__array_interface__["data"][0]
                self.gpu.copy_from_host(address, host, table.nbytes, self.stream)
        return address

    def free(self, address: int) -> None:
        with contextlib.suppress(SystemFailure), self.gpu.device_guard():
            self.gpu.free(address)

    def prepare(self, table: int, count: int) -> BlockKernelLaunch:
        """Return the launch that copies the ``count`` extents of a table on this GPU."""
        return BlockKernelLaunch(self.gpu, self.stream, table, count)

    def start(self, launch: BlockKernelLaunch, event: Any) -> None:
        """Enqueue a copy, and record ``event`` behind it."""
        gpu = self.gpu
        with gpu.device_guard():
            check(gpu.cuda.cuLaunchKernel(self.function, *launch.arguments), "cuLaunchKernel")
            gpu.record(event, self.stream)

    def start_engine(self, target: int, source: int, nbytes: int, event: Any) -> None:
        """Enqueue the copy of one extent by the copy engine, and record ``event`` behind it."""
        with self.gpu.device_guard():
            self.gpu.copy(target, source, nbytes, self.stream)
            self.gpu.record(event, self.stream)

    def poll(self, event: Any, times: int) -> bool:
        """Return True if ``event`` has completed, after up to ``times`` queries."""
        with self.gpu.device_guard():
            return self.gpu.poll_event(event, times)

    def run(self, table: Any) -> None:
        """Copy extents and wait for the end."""
        address = self.upload(table)
        event = self.gpu.make_event()
        try:
            self.start(self.prepare(address, len(table)), event)
            while not self.poll(event, POLLS):
                clock.sleep(0)
        finally:
            self.gpu.destroy_event(event)
            self.free(address)


@functools.cache
def copier(ordinal: int) -> Copier:
    """Return the copier of a GPU of this process. Raises ``MissingDependency`` without CUDA."""
    return Copier(ordinal)


def export_memory(memory: Memory) -> bytes:
    """Return the handle of registered memory; empty for CPU memory."""
    return copier(memory.device).export(memory.address) if memory.device >= 0 else b""


class DeviceJob:
    """Transfer between GPU memory of two processes that can be started any number of times."""

    def __init__(
        self,
        path: LocalPath,
        remote: RemoteMemory,
        extents: Extents,
        writes: bool,
        device: int,
    ) -> None:
        self.path, self.remote, self.extents, self.writes = path, remote, extents, writes
        self.copier = copier(device)
        there = extents.table[:, 1] + self.copier.map(remote.handle)
        columns = [extents.table[:, 0], there] if writes else [there, extents.table[:, 0]]
        rows = np.stack([*columns, extents.table[:, 2]], axis=1)
        #: Source, target and bytes of the one extent that the copy engine moves, or None.
        self.single: tuple[int, int, int] | None = None
        # MIRACCL_SMS=0 asks for copy engines wherever they can do it.
        if len(rows) == 1 and (extents.total >= ENGINE_BYTES or params.SMS.read() == 0):
            self.single = int(rows[0, 0]), int(rows[0, 1]), extents.total
            rows = rows[:0]
        table = cut(rows)
        self.count = len(table)
        self.table = self.copier.upload(table)
        self.launch = self.copier.prepare(self.table, self.count)
        self._host = table  # read by the upload
        self.event = self.copier.gpu.make_event()

    @property
    def method(self) -> str:
        return "kernel" if self.single is None else "engine"

    def enqueue(self) -> None:
        """Start the copy on the stream of the copier."""
        if self.single is None:
            self.copier.start(self.launch, self.event)
        else:
            source, target, nbytes = self.single
            self.copier.start_engine(target, source, nbytes, self.event)

    def explain(self, kind: str) -> TransferPlan:
        if self.single is None:
            reason = f"memory of two GPUs of this host; {self.count} extents of one launch"
        else:
            reason = (
                f"memory of two GPUs of this host; one extent of {self.extents.total} bytes, which "
                "needs no multiprocessor"
            )
        return make_plan(
            self.extents,
            [self.extents],
            writes=self.writes,
            max_bytes=1 << 62,
            max_extents=max(self.extents.count, 1),
            method=self.method,
            reason=reason,
            kind=kind,
            peer=self.path.name,
            rates=RATES,
        )

    def start(
        self,
        *,
        kind: str,
        number: int,
        deadline: Deadline,
        notify: bytes | None,
        release: Callable[[Any], None],
    ) -> DeviceTransfer:
        return DeviceTransfer(
            self, kind=kind, number=number, deadline=deadline, notify=notify, release=release
        )


class DeviceTransfer(Transfer):
    """Copy by one kernel or the copy engine, which cannot be interrupted: ``cancel`` waits for the
    end.
    """

    def __init__(
        self,
        job: DeviceJob,
        *,
        kind: str,
        number: int,
        deadline: Deadline,
        notify: bytes | None,
        release: Callable[[DeviceJob], None],
    ) -> None:
        super().__init__(
            kind=kind, peer=job.path.name, number=number, extents=job.extents, deadline=deadline
        )
        self._job, self._notify, self._release = job, notify, release
        self._turn = threading.Lock()
        self._line = job.path.take_line()
        remote, entry = job.remote, job.path.entry(job.remote)
        exchange_word()(self._line, remote.slot + 1)
        if load_word()(entry + layout.ENTRY_GENERATION) != remote.generation:
            self._finish(stale(remote, f"{kind} {job.extents.total} bytes", job.path.name))
            return
        try:
            job.enqueue()
        except MiracclError as error:
            self._finish(error)
            return
        job.path.background.add(self)

    def advance(self, wait: bool) -> None:
        with self._turn:
            if self._done:
                return
            job = self._job
            if not job.copier.poll(job.event, POLLS if wait else 1):
                # The kernel holds the target's memory: the line stays until it has ended.
                clock.sleep(0 if wait else 20e-6)
                return
            error = job.path.lost if job.path.lost is not None else None
            if error is None and not self._deadline.left:
                error = self._timed_out()
            if error is None and self._notify is not None:
                try:
                    job.path.notify(self._notify, self.number, self._deadline)
                except MiracclError as problem:
                    error = problem
            self._finish(error)

    def stop(self) -> None:
        while not self._done:
            self.advance(True)

    def explain(self) -> TransferPlan:
        return self._job.explain(self.kind)

    def _finish(self, error: MiracclError | None) -> None:
        store_word()(self._line, 0)
        self._job.path.give_line(self._line)
        self._error, self._done = error, True
        self._release(self._job)


class StagedTransfer:
    """Transfer between local GPU memory and CPU memory of the other side, through pinned memory."""

    def __init__(
        self, path: Any, remote: RemoteMemory, extents: Extents, writes: bool, device: int
    ) -> None:
        self.extents, self.writes, self.copier = extents, writes, copier(device)
        self._path, self._inner_remote = path, remote
        with self.copier.gpu.device_guard():
            nbytes = max(-(-extents.total // 4) * 4, 4)
            self._pinned, self.host, self.device_address = self.copier.gpu.host_words(nbytes)
        starts = np.cumsum(extents.table[:, 2]) - extents.table[:, 2]
        here, sizes = extents.table[:, 0], extents.table[:, 2]
        columns = [here, self.device_address + starts]
        self.table = cut(np.stack([*(columns if writes else columns[::-1]), sizes], axis=1))
        staged = np.stack([self.host + starts, extents.table[:, 1], sizes], axis=1)
        moved = Extents(
            table=np.ascontiguousarray(staged),
            total=extents.total,
            blocks=extents.blocks,
            block_nbytes=extents.block_nbytes,
        )
        name = f"{'write' if writes else 'read'} {extents.total} bytes"
        self._inner = path.job(remote, moved, writes, name)

    def explain(self, kind: str) -> TransferPlan:
        plan = self._path_plan(kind)
        rates = replace(
            plan.rates,
            start_us=plan.rates.start_us + LAUNCH_US,
            copy_us=1 / (PINNED_GB_S * 1e3),
        )
        reason = (
            f"GPU memory here: one kernel {'gathers' if self.writes else 'scatters'} "
            f"{self.extents.count} extents through pinned memory, then {plan.method}, as "
            f"{plan.reason}"
        )
        return replace(plan, method="staged", reason=reason, rates=rates)

    def _path_plan(self, kind: str) -> TransferPlan:
        if hasattr(self._inner, "explain"):
            plan: TransferPlan = self._inner.explain(kind)
            return plan
        made: TransferPlan = self._path.explain(kind, self.extents)
        return made

    def start(self, *, release: Callable[[Any], None], notify: bytes | None, **common: Any) -> Any:
        if self.writes:
            self.copier.run(self.table)
            return self._path.start(
                self._inner, notify=notify, release=lambda job: release(self), **common
            )
        inner = self._path.start(self._inner, notify=None, release=lambda job: None, **common)
        return StagedRead(self, inner, notify, release, common["deadline"])

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.copier.gpu.free_host(self.host)


class StagedRead(Transfer):
    """Read into pinned memory, then one kernel into GPU memory, then the notification."""

    def __init__(
        self,
        job: StagedTransfer,
        inner: Transfer,
        notify: bytes | None,
        release: Callable[[Any], None],
        deadline: Deadline,
    ) -> None:
        super().__init__(
            kind=inner.kind,
            peer=inner.peer,
            number=inner.number,
            extents=job.extents,
            deadline=deadline,
        )
        self._job, self._inner, self._notify, self._release = job, inner, notify, release
        self._turn = threading.Lock()

    def advance(self, wait: bool) -> None:
        if not self._inner._done:
            self._inner.advance(wait)
        with self._turn:
            if self._done or not self._inner._done:
                return
            error = self._inner._error
            if error is None:
                self._job.copier.run(self._job.table)
                if self._notify is not None:
                    self._job._path.notify(self._notify, self.number, self._deadline)
            self._error, self._done = error, True
            self._release(self._job)

    def stop(self) -> None:
        self._inner.cancel()
        self.advance(True)

    def explain(self) -> TransferPlan:
        return self._job.explain(self.kind)


def make_job(
    path: Any, remote: RemoteMemory, extents: Extents, writes: bool, device: int, op_name: str
) -> Any:
    """Return the job of a transfer with GPU memory on one side or both.

    Raises:
        InvalidUsage: The two memories cannot be connected.
    """
    if remote.device < 0:
        return StagedTransfer(path, remote, extents, writes, device)
    if device < 0 or not isinstance(path, LocalPath):
        raise InvalidUsage(
            f"cannot {op_name}: the memory of agent {remote.name!r} is on a GPU, and "
            + ("local is not" if device < 0 else "the agent is not on this host"),
            hint="copy through CPU memory of that agent",
        )
    path.check(remote, Rights.WRITE if writes else Rights.READ, op_name)
    return DeviceJob(path, remote, extents, writes, device)
