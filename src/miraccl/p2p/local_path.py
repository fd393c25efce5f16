"""Path to an agent of the same host: mapped windows, and the kernel's copies between processes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import numpy as np

from miraccl import clock
from miraccl.deadline import Deadline
from miraccl.errors import (
    AgentLost,
    InvalidUsage,
    MiracclError,
    StaleDescriptor,
    SystemFailure,
    TransferError,
    TransferTimeout,
)
from miraccl.p2p import segment_layout as layout
from miraccl.p2p.descriptors import RemoteMemory
from miraccl.p2p.extents import Extents
from miraccl.p2p.native_calls import NOTIFY, bound_entry, load_word, local, notify
from miraccl.p2p.registration import key_check
from miraccl.p2p.transfer import Background, Transfer
from miraccl.p2p.transfer_plan import Rates, TransferPlan, make_plan
from miraccl.transport.mapped_file import MappedFile
from miraccl.transport.region import Rights
from miraccl.wire.p2p import AgentWelcome

#: Constants of the prediction, in us and us per byte or extent: one core of an AMD EPYC 9V74 at
#: 2.6 GHz, Linux 6.x, ``bench/transfers.py``.
WINDOW_RATES = Rates(start_us=0.3, call_us=0.0, extent_us=0.03, us_byte=5e-5)
PROCESS_RATES = Rates(start_us=0.3, call_us=0.9, extent_us=0.25, us_byte=7.5e-5)
_ERRNO_LOST = 3  # ESRCH: the process has ended
#: Statuses in the notification ring; 0 is success.
STATUS_OK, STATUS_FAILED, STATUS_CANCELLED, STATUS_TIMEOUT = range(4)
_FAILURE = struct.Struct("<qH")  # block, bytes of the reason


def map_file(pid: int, fd: int, inode: int, nbytes: int, *, writable: bool) -> MappedFile:
    """Map the memory file behind a descriptor of another process.

    Raises:
        SystemFailure: It cannot be opened, or is another file than ``inode``.
    """
    path = f"/proc/{pid}/fd/{fd}"
    try:
        handle = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise SystemFailure(f"cannot open {path}: {error.strerror}") from error
    try:
        status = os.fstat(handle)
        if status.st_ino != inode or status.st_size < nbytes:
            raise SystemFailure(
                f"cannot map {path}: inode {status.st_ino} of {status.st_size} bytes, expected "
                f"{inode} of {nbytes}"
            )
        return MappedFile(handle, nbytes, writable=writable)
    except OSError as error:
        raise SystemFailure(f"cannot map {path}: {error.strerror}") from error
    finally:
        os.close(handle)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_word_of(pid: int, address: int) -> int | None:
    """Return a word in the memory of another process, None if the kernel does not permit it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is None:
        return None
    value = ctypes.c_uint64(0)
    here, there = _Iovec(ctypes.addressof(value), 8), _Iovec(address, 8)
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong] * 1 + [
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    call.restype = ctypes.c_ssize_t
    moved = call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return value.value if moved == 8 else None


class LocalPath:
    """Access to the regions of one agent of this host, from its table and the pair segment.

    Raises:
        SystemFailure: The segments cannot be mapped, or the process cannot be accessed.
    """

    def __init__(self, welcome: AgentWelcome, background: Background) -> None:
        if read_word_of(welcome.pid, welcome.probe) != welcome.probe_value:
            raise SystemFailure(f"cannot access the memory of process {welcome.pid}")
        self.pid, self.name, self.agent = welcome.pid, welcome.name, welcome.agent
        files = welcome.pid, welcome.table_fd, welcome.table_inode
        self._doorbell = map_file(*files, layout.PAGE_BYTES, writable=True)
        self._table = map_file(*files, layout.TABLE_BYTES, writable=False)
        pair = welcome.pid, welcome.pair_fd, welcome.pair_inode
        self._pair = map_file(*pair, layout.PAIR_BYTES, writable=True)
        self.background = background
        self.lost: MiracclError | None = None
        #: Connection whose end shows that the agent has ended.
        self.sock: socket.socket | None = None
        self._lines = [
            self._pair.address + layout.PAIR_ACCESSES + i * layout.ACCESS_BYTES
            for i in range(layout.MAX_ACCESSES)
        ]
        self._windows: dict[tuple[int, int, bool], MappedFile] = {}
        self._post = notify("post_record")
        self._run, self._step = local("run_job"), local("step_job")
        self._post_words = np.array(
            [self._pair.address, self._doorbell.address, id(bytes)], np.int64
        )
        words = int(self._post_words.__array_interface__["data"][0])
        #: ``post(data)``: send a notification without a transfer; 0 if it is unusual.
        self.post = bound_entry(NOTIFY, "post", words)
        self._lock = threading.Lock()

    def sockets(self) -> list[socket.socket]:
        return [self.sock] if self.sock is not None else []

    def uses(self, sock: socket.socket) -> bool:
        return True

    # ---- notifications

    def notify(self, data: bytes, number: int, deadline: Deadline, status: int = 0) -> None:
        """Put a notification into the peer's ring.

        Raises:
            TransferTimeout: The ring was full until the deadline.
        """
        self._check_alive()
        pair, doorbell = self._pair.address, self._doorbell.address
        if self._post(pair, doorbell, status, number, data, len(data)):
            return
        pause = 10e-6
        while not self._post(pair, doorbell, status, number, data, len(data)):
            self._check_alive()
            if not deadline.left:
                raise TransferTimeout(
                    f"cannot notify agent {self.name!r}: it has not read its notifications for "
                    f"{deadline.seconds:g} s",
                    agent=self.name,
                    reason="ring",
                )
            clock.sleep(min(pause, deadline.left))
            pause = min(2 * pause, 1e-3)

    def _check_alive(self) -> None:
        if self.lost is not None:
            raise self.lost

    # ---- jobs

    def take_line(self) -> int:
        """Return a free line for one access. Raises ``TransferError`` if all are in use."""
        for _ in range(1000):
            with contextlib.suppress(IndexError):
                return self._lines.pop()
            clock.sleep(1e-4)
        raise TransferError(
            f"cannot start a transfer: {layout.MAX_ACCESSES} threads access agent {self.name!r}",
            agent=self.name,
            reason="busy",
        )

    def give_line(self, line: int) -> None:
        self._lines.append(line)

    def entry(self, remote: RemoteMemory) -> int:
        return self._table.address + layout.TABLE_ENTRIES + remote.slot * layout.ENTRY_BYTES

    def check(self, remote: RemoteMemory, right: Rights, op_name: str) -> None:
        """Check a descriptor against the owner's table.

        Raises:
            StaleDescriptor: The region has ended, or is another one.
            InvalidUsage: The range or the rights do not permit the access.
        """
        entry, load = self.entry(remote), load_word()
        if remote.slot >= layout.MAX_REGIONS or (
            load(entry + layout.ENTRY_GENERATION) != remote.generation
        ):
            raise stale(remote, op_name, self.name)
        if load(entry + layout.ENTRY_KEY_CHECK) != key_check(remote.key):
            raise StaleDescriptor(
                f"cannot {op_name}: the key in the descriptor is not the region's",
                agent=self.name,
                reason="key",
            )
        granted = Rights(load(entry + layout.ENTRY_RIGHTS) & 3)
        if right not in granted or right not in remote.rights:
            raise InvalidUsage(
                f"cannot {op_name}: agent {self.name!r} registered the memory without the right to "
                f"{right.name.lower() if right.name else right}"
            )
        if remote.offset + remote.nbytes > load(entry + layout.ENTRY_NBYTES):
            raise InvalidUsage(
                f"cannot {op_name}: bytes {remote.offset} to {remote.offset + remote.nbytes} are "
                f"outside the region of {load(entry + layout.ENTRY_NBYTES)} bytes"
            )

    def try_fast(self, job: Job, notify: bytes | None, numbers: Iterator[int]) -> int:
        """Run a job that has one step; return its number, or 0 if anything is unusual: ``start``
        then runs it again and finds the reason.
        """
        lines = self._lines
        if self.lost is not None:
            return 0
        try:
            line = lines.pop()
        except IndexError:
            return 0
        result = self._run(job.address, line)
        lines.append(line)
        if result != layout.STEP_DONE:
            return 0
        if notify is None:
            return 1
        number = next(numbers)
        pair, doorbell = self._pair.address, self._doorbell.address
        # A full ring: the data have been moved, and moving them again does no harm.
        posted = self._post(pair, doorbell, 0, number, notify, len(notify))
        return number if posted else 0

    def job(self, remote: RemoteMemory, extents: Extents, writes: bool, op_name: str) -> Job:
        """Return a job that can run any number of times. Raises as ``check``."""
        self._check_alive()
        self.check(remote, Rights.WRITE if writes else Rights.READ, op_name)
        base = self._window_base(remote, writes)
        return Job(self, remote, extents, writes, base)

    def start(
        self,
        job: Job,
        *,
        kind: str,
        number: int,
        deadline: Deadline,
        notify: bytes | None,
        release: Callable[[Job], None],
    ) -> LocalTransfer:
        """Start a transfer; its first ``START_BYTES`` have moved when this returns."""
        self._check_alive()
        return LocalTransfer(
            job, kind=kind, number=number, deadline=deadline, notify=notify, release=release
        )

    def _window_base(self, remote: RemoteMemory, writes: bool) -> int:
        """Return the address at which the region is mapped here, 0 for private memory."""
        entry, load = self.entry(remote), load_word()
        fd, inode = load(entry + layout.ENTRY_FD), load(entry + layout.ENTRY_INODE)
        if fd < 0:
            return 0
        end = load(entry + layout.ENTRY_OFFSET) + load(entry + layout.ENTRY_NBYTES)
        # The kernel enforces the rights: without WRITE the mapping is read-only.
        key = (inode, fd, writes)
        with self._lock:
            file = self._windows.get(key)
            if file is None or file.nbytes < end:
                nbytes = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
                try:
                    file = map_file(self.pid, fd, inode, nbytes, writable=writes)
                except SystemFailure:
                    return 0  # process_vm_* reaches it as well
                self._windows[key] = file
        return file.address + int(load(entry + layout.ENTRY_OFFSET))

    def close(self) -> None:
        self.lost = self.lost or AgentLost(
            f"the connection to agent {self.name!r} was closed", agent=self.name, reason="closed"
        )
        with self._lock:
            self._windows.clear()


def stale(remote: RemoteMemory, op_name: str, name: str) -> StaleDescriptor:
    return StaleDescriptor(
        f"cannot {op_name}: agent {name!r} has deregistered this memory (slot {remote.slot}, "
        f"generation {remote.generation})",
        agent=name,
        reason="stale",
        hint="get a new descriptor from its owner",
    )


class Job:
    """Words of ``kernels.local`` for one list of extents between two processes."""

    def __init__(
        self, path: LocalPath, remote: RemoteMemory, extents: Extents, writes: bool, base: int
    ) -> None:
        self.path, self.remote, self.extents, self.writes = path, remote, extents, writes
        self.in_window = base != 0
        #: True if everything has moved when ``start`` returns.
        self.is_short = extents.total <= layout.START_BYTES
        method = (layout.WINDOW_WRITE if self.in_window else layout.PROCESS_WRITE) + (not writes)
        self.words = words = np.zeros(layout.JOB_BYTES // 8, np.int64)
        nvectors = 0 if self.in_window else min(extents.count, layout.MAX_VECTORS)
        self.vectors = np.empty(4 * nvectors, np.int64)
        for at, value in (
            (layout.JOB_METHOD, method),
            (layout.JOB_PID, path.pid),
            (layout.JOB_ENTRY, path.entry(remote)),
            (layout.JOB_GENERATION, remote.generation),
            (layout.JOB_REGION, remote.slot + 1),
            (layout.JOB_EXTENTS, extents.address),
            (layout.JOB_COUNT, extents.count),
            (layout.JOB_BASE, base),
            (layout.JOB_TOTAL, extents.total),
            (layout.JOB_VECTORS, self.vectors.__array_interface__["data"][0]),
            (layout.JOB_NVECTORS, nvectors),
        ):
            words[at // 8] = value
        self.address = int(words.__array_interface__["data"][0])

    @property
    def method(self) -> str:
        return "window" if self.in_window else "process"

    def block(self) -> int:
        """Return the index of the block that comes next, in the order of the target."""
        done = int(self.words[layout.JOB_DONE // 8])
        return done // self.extents.block_nbytes

    def explain(self, kind: str) -> TransferPlan:
        where = f"process {self.path.pid} on this host"
        if self.in_window:
            rates, reason = WINDOW_RATES, f"the memory is in a window of {where}, mapped here"
        else:
            rates, reason = PROCESS_RATES, f"private memory of {where}"
        return make_plan(
            self.extents,
            [self.extents],
            writes=self.writes,
            max_bytes=layout.STEP_BYTES,
            max_extents=max(self.extents.count, 1) if self.in_window else layout.MAX_VECTORS,
            method=self.method,
            reason=reason,
            kind=kind,
            peer=self.path.name,
            rates=rates,
        )


class LocalTransfer(Transfer):
    """Transfer by the processor, in steps that the caller or the background thread makes.

    Args:
        line: Access line of the pair segment, released at the end.
        notify: Data of the notification after the last byte, None for none.
    """

    def __init__(
        self,
        job: Job,
        *,
        kind: str,
        number: int,
        deadline: Deadline,
        notify: bytes | None,
        release: Callable[[Job], None] | None = None,
    ) -> None:
        path = job.path
        super().__init__(
            kind=kind, peer=path.name, number=number, extents=job.extents, deadline=deadline
        )
        self._job, self._notify, self._release = job, notify, release
        self._turn = threading.Lock()
        self._waiters = 0
        self._line = path.take_line()
        result = path._run(job.address, self._line)
        if result != layout.STEP_MORE:
            self._ended(result)
        else:
            path.background.add(self)

    def advance(self, wait: bool) -> None:
        if not wait and self._waiters:
            clock.sleep(0.001)  # the background thread leaves the steps to the waiting one
            return
        self._waiters += wait
        try:
            with self._turn:
                self._advance(layout.WAIT_BYTES if wait else layout.STEP_BYTES)
        finally:
            self._waiters -= wait

    def _advance(self, budget: int) -> None:
        if self._done:
            return
        path = self._job.path
        if path.lost is not None:
            self._fail(path.lost)
        elif not self._deadline.left:
            self._fail(self._timed_out(), STATUS_TIMEOUT)
        else:
            result = path._step(self._job.address, budget)
            if result != layout.STEP_MORE:
                self._ended(result)

    def stop(self) -> None:
        self._job.words[layout.JOB_CANCEL // 8] = 1  # a thread that moves ends after its step
        with self._turn:
            if not self._done:
                self._fail(self._cancelled(), STATUS_CANCELLED)

    def explain(self) -> TransferPlan:
        return self._job.explain(self.kind)

    def _ended(self, result: int) -> None:
        path = self._job.path
        if result == layout.STEP_DONE:
            try:
                if self._notify is not None:
                    path.notify(self._notify, self.number, self._deadline)
                self._finish(path.lost)
            except MiracclError as error:
                self._finish(error)
            return
        name = f"{self.kind} {self.extents.total} bytes"
        if result == layout.STEP_STALE:
            self._fail(stale(self._job.remote, name, self.peer))
            return
        code = int(self._job.words[layout.JOB_ERRNO // 8])
        if code == _ERRNO_LOST:
            self._fail(
                AgentLost(
                    f"cannot {name}: the process of agent {self.peer!r} has ended",
                    agent=self.peer,
                    reason="lost",
                    block=self._job.block(),
                )
            )
        else:
            self._fail(
                TransferError(
                    f"cannot {name} with agent {self.peer!r}: {os.strerror(code)}",
                    agent=self.peer,
                    reason="system",
                    block=self._job.block(),
                )
            )

    def _fail(self, error: MiracclError, status: int = STATUS_FAILED) -> None:
        """End with an error, and notify the target if it expects a notification."""
        if isinstance(error, TransferError) and error.block < 0:
            error.block = self._job.block()
        if self._notify is not None and self._job.path.lost is None:
            reason = str(error).encode()[:1024]
            data = _FAILURE.pack(self._job.block(), len(reason)) + reason + self._notify
            with contextlib.suppress(MiracclError):
                self._job.path.notify(data, self.number, Deadline.after(0.1), status)
        self._finish(error)

    def _finish(self, error: MiracclError | None) -> None:
        self._job.path.give_line(self._line)
        self._error = error
        self._done = True
        if self._release is not None:
            self._release(self._job)


def parse_failure(data: bytes) -> tuple[int, str, bytes]:
    """Return (block, reason, data) of the notification of a failed transfer."""
    if len(data) < _FAILURE.size:
        return -1, "unknown reason", b""
    block, length = _FAILURE.unpack_from(data)
    end = _FAILURE.size + length
    return block, data[_FAILURE.size : end].decode("utf-8", "replace"), data[end:]
