"""Streams of an initiator and operations on them: in order per stream, large ones on several."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from miraccl import clock
from miraccl.deadline import Deadline
from miraccl.errors import (
    AgentLost,
    InvalidUsage,
    MiracclError,
    ProtocolError,
    StaleDescriptor,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from miraccl.p2p import stream_layout as frames
from miraccl.p2p.descriptors import RemoteMemory
from miraccl.p2p.extents import Extents
from miraccl.p2p.native_calls import REQUEST, begin_op, bound_entry, run_op
from miraccl.p2p.transfer import Transfer
from miraccl.p2p.transfer_plan import TransferPlan
from miraccl.transport.fifo import PrivateMemory

if TYPE_CHECKING:
    from miraccl.p2p.stream_path import StreamPath

#: Operations up to this size are sent by the caller; more also progress in the background.
INLINE_BYTES = 1 << 16
SPIN_NS = 50_000
WAIT_SLICE_NS, POST_SLICE_NS = 50_000_000, 20_000
#: Up to this size the caller sends for longer: a thread that is woken costs more.
BRIEF_BYTES, BRIEF_SLICE_NS = 4 << 20, 500_000
#: Operations without an answer yet on one stream; then the caller reads answers first.
MAX_PENDING = 64
_NOTIFY = struct.Struct("<8q")
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Stream:
    """TCP stream of an initiator.

    Attributes:
        lock: Held while a thread sends or receives on it.
        broken: Reason why it can no longer be used, or None.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.lock = threading.RLock()
        self.broken: MiracclError | None = None
        self.pending: deque[StreamTransfer] = deque()
        self._work = PrivateMemory(frames.WORK_BYTES)
        self.fd = sock.fileno()
        #: ``send_note(fd, data)``: bytes of a notification that the socket has taken, or -errno.
        self.send_note = bound_entry(REQUEST, "send_note", self._work.address)

    def begin(self, job: StreamJob, number: int, flags: int, notify: bytes | None) -> None:
        """Prepare the words of an operation."""
        nbytes = -1 if notify is None else len(notify)
        begin_op()(job.address, self.fd, number, flags, self._work.address, notify, nbytes)

    def post(self, transfer: StreamTransfer) -> None:
        """Send an operation, or begin to; the caller holds the lock."""
        while self.pending and (
            len(self.pending) >= MAX_PENDING
            or self.pending[-1].job.kind == frames.GET
            or not self.pending[-1].sent
        ):
            self.step(WAIT_SLICE_NS)
        if self.broken is not None:
            raise self.broken
        self.pending.append(transfer)
        transfer.begin()
        brief = transfer.job.extents.total <= BRIEF_BYTES
        self._run(transfer, BRIEF_SLICE_NS if brief else POST_SLICE_NS, sends_only=True)

    def adopt(self, transfer: StreamTransfer, result: int) -> None:
        """Continue an operation that ``StreamPath.try_fast`` has begun; the caller holds the
        lock.
        """
        self.pending.append(transfer)
        self._handle(transfer, result)

    def step(self, slice_ns: int) -> None:
        """Continue the oldest operation; the caller holds the lock."""
        if self.pending:
            self._run(self.pending[0], slice_ns, sends_only=False)

    def _run(self, transfer: StreamTransfer, slice_ns: int, *, sends_only: bool) -> None:
        self._handle(transfer, run_op()(transfer.job.address, slice_ns, int(sends_only)))

    def _handle(self, transfer: StreamTransfer, result: int) -> None:
        job = transfer.job
        if result in (frames.RUN_DONE, frames.RUN_FAILED):
            self.pending.popleft()
            transfer.ended(None)
        elif result == frames.RUN_MORE:
            if not transfer.deadline_left():
                self._late(transfer)
        elif result == frames.RUN_PROTOCOL:
            self.fail(
                ProtocolError(f"agent {transfer.peer!r} sent an answer that violates the protocol")
            )
        else:
            code = job.word(frames.OP_ERRNO)
            reason = "its process has ended" if code > 1 << 16 else os.strerror(code)
            self.fail(
                AgentLost(
                    f"the connection to agent {transfer.peer!r} broke: {reason}",
                    agent=transfer.peer,
                    reason="lost",
                )
            )

    def _late(self, transfer: StreamTransfer) -> None:
        """End an operation whose deadline has passed."""
        if transfer.sent and not transfer.done_flag:
            # Its answer is still to come: it is read and dropped when the next one is awaited.
            transfer.job.set(frames.OP_CANCEL, 1)
            transfer.abandon()
            return
        if not transfer.sent:
            # A frame is half sent, and the target does not read: nothing can follow on the stream.
            self.fail(transfer.timeout_error())

    def send_rest(self, frame: bytes, deadline: Deadline, peer: str) -> None:
        """Send the rest of a NOTIFY frame; the caller holds the lock.

        Raises:
            TransferTimeout: The socket has no space until the deadline.
            AgentLost: The connection broke.
        """
        try:
            with contextlib.suppress(BlockingIOError):  # usually there is space at once
                frame = frame[self.sock.send(frame, _AT_ONCE) :]
            if frame:
                self.sock.settimeout(max(deadline.left, 1e-3))
                self.sock.sendall(frame)
        except TimeoutError:
            error = TransferTimeout(
                f"cannot notify agent {peer!r}: it has not read its stream for "
                f"{deadline.seconds:g} s",
                agent=peer,
                reason="ring",
            )
            self.fail(error)  # a frame may be half sent
            raise error from None
        except OSError as problem:
            raise AgentLost(
                f"the connection to agent {peer!r} broke: {problem}", agent=peer, reason="lost"
            ) from problem

    def fail(self, error: MiracclError) -> None:
        """Close the stream; its operations fail."""
        self.broken = error
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        while self.pending:
            self.pending.popleft().ended(error)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class StreamJob:
    """Words of ``kernels.request`` for the extents of one operation."""

    def __init__(
        self, remote: RemoteMemory, extents: Extents, writes: bool, first_byte: int = 0
    ) -> None:
        self.remote, self.extents, self.first_byte = remote, extents, first_byte
        self.kind = frames.PUT if writes else frames.GET
        self.is_short = 0 < extents.total <= INLINE_BYTES and (
            extents.count <= frames.MAX_FRAME_EXTENTS
        )
        #: Operation that ``StreamPath.try_fast`` has begun: number, result and stream.
        self.begun: tuple[int, int, Stream] | None = None
        self._words = words = np.zeros(frames.OP_BYTES // 8, np.int64)
        self.address = int(words.__array_interface__["data"][0])
        key = np.frombuffer(remote.key, np.int64)
        for at, value in (
            (frames.OP_KIND, self.kind),
            (frames.OP_SLOT, remote.slot),
            (frames.OP_GENERATION, remote.generation),
            (frames.OP_KEY, key[0]),
            (frames.OP_KEY2, key[1]),
            (frames.OP_EXTENTS, extents.address),
            (frames.OP_COUNT, extents.count),
            (frames.OP_TOTAL, extents.total),
            (frames.OP_SPIN_NS, SPIN_NS),
            (frames.OP_BLOCK, min(extents.block_nbytes, 0xFFFFFFFF)),
        ):
            words[at // 8] = value

    def word(self, at: int) -> int:
        return int(self._words[at // 8])

    def set(self, at: int, value: int) -> None:
        self._words[at // 8] = value


class StreamTransfer(Transfer):
    """Operation on one stream."""

    def __init__(
        self,
        path: StreamPath,
        stream: Stream,
        job: StreamJob,
        *,
        kind: str,
        number: int,
        deadline: Deadline,
        notify: bytes | None,
        release: Callable[[StreamJob], None],
        flags: int = 0,
        begun: int | None = None,
    ) -> None:
        super().__init__(
            kind=kind, peer=path.name, number=number, extents=job.extents, deadline=deadline
        )
        self._path, self._stream, self.job, self._release = path, stream, job, release
        # The notification of a read is sent after its data have arrived.
        self._late_notify = notify if job.kind == frames.GET else None
        writes_notify = notify if job.kind == frames.PUT else None
        if writes_notify is not None:
            flags |= frames.NOTIFIES
        self._begin = number, flags, writes_notify
        self.waiters = 0
        self._cancelling = False
        with stream.lock:
            if begun is None:
                stream.post(self)
            else:
                stream.adopt(self, begun)
        reads = job.kind == frames.GET and job.extents.total > INLINE_BYTES
        if not self._done and (reads or not self.sent):
            path.background_of(stream).add(self)

    def begin(self) -> None:
        """Prepare the words of the operation."""
        number, flags, notify = self._begin
        self._stream.begin(self.job, number, flags, notify)

    @property
    def sent(self) -> bool:
        return self._done or self.job.word(frames.OP_PHASE) >= frames.PHASE_RECEIVE

    @property
    def done_flag(self) -> bool:
        return self._done

    def deadline_left(self) -> float:
        return self._deadline.left

    def timeout_error(self) -> TransferTimeout:
        return self._timed_out()

    def advance(self, wait: bool) -> None:
        stream = self._stream
        if not wait:
            if self.waiters or not stream.lock.acquire(blocking=False):
                return
            try:
                if not self._done:
                    stream.step(0)
            finally:
                stream.lock.release()
            return
        self.waiters += 1
        try:
            if not stream.lock.acquire(timeout=0.05):
                if not self._deadline.left and not self._done:
                    self.job.set(frames.OP_CANCEL, 1)
                return
            try:
                if not self._done:
                    stream.step(WAIT_SLICE_NS)
                if not self._done and not self._deadline.left:
                    self.job.set(frames.OP_CANCEL, 1)
                    self.abandon()
            finally:
                stream.lock.release()
        finally:
            self.waiters -= 1

    def continue_alone(self) -> None:
        """Continue in the background, unless a thread waits and does it itself."""
        if self.waiters:
            clock.sleep(0.001)
        else:
            self.advance(True)

    def stop(self) -> None:
        self._cancelling = True
        self.job.set(frames.OP_CANCEL, 1)
        deadline = Deadline.after(self._path.timeout)
        while not self._done:
            self.advance(True)
            if not deadline.left:
                raise TransferTimeout(
                    f"cannot cancel: agent {self.peer!r} has not confirmed it for "
                    f"{deadline.seconds:g} s",
                    agent=self.peer,
                    reason="cancel",
                )

    def abandon(self) -> None:
        """Report the end of the deadline; the operation stays in its place on the stream."""
        if not self._done:
            self._error, self._done = self._timed_out(), True
            self._release = lambda job: None  # its words are in use until the answer has come

    def ended(self, error: MiracclError | None) -> None:
        """Finish after the last answer, or because the stream broke."""
        if self._done:
            return
        if error is None:
            error = self._result()
        if error is None and self._late_notify is not None:
            try:
                self._path.send_notification(
                    self._stream, self._late_notify, self.number, frames.OK, 0, self._deadline
                )
            except MiracclError as problem:
                error = problem
        self._error, self._done = error, True
        self._release(self.job)

    def _result(self) -> MiracclError | None:
        status, position = self.job.word(frames.OP_STATUS), self.job.word(frames.OP_POSITION)
        block = (self.job.first_byte + position) // self.extents.block_nbytes
        if status == frames.CANCELLED or (
            self._cancelling and self.job.kind == frames.GET and status == frames.OK
        ):
            cancelled = self._cancelled()
            cancelled.block = block
            return cancelled
        if status == frames.OK:
            return None
        name = frames.STATUS_NAMES[min(max(status, 0), len(frames.STATUS_NAMES) - 1)]
        what = f"{self.kind} of {self.extents.total} bytes with agent {self.peer!r}"
        if status in (frames.STALE, frames.WRONG_KEY):
            reason = "the memory was deregistered" if status == frames.STALE else "the key is wrong"
            return StaleDescriptor(
                f"{what} failed at block {block}: {reason}",
                agent=self.peer,
                block=block,
                reason=name,
            )
        if status in (frames.NO_RIGHT, frames.OUTSIDE):
            return InvalidUsage(f"{what} was refused by the target: {name}")
        return TransferError(
            f"{what} failed at block {block}: {name}", agent=self.peer, block=block, reason=name
        )

    def explain(self) -> TransferPlan:
        return self._path.explain(self.kind, self.extents)


class StripedTransfer(Transfer):
    """Transfer whose extents are divided among the streams of a connection."""

    def __init__(
        self,
        path: StreamPath,
        parts: list[tuple[Stream, StreamJob]],
        extents: Extents,
        *,
        kind: str,
        number: int,
        deadline: Deadline,
        notify: bytes | None,
        release: Callable[[Any], None],
        job: Any,
    ) -> None:
        super().__init__(
            kind=kind, peer=path.name, number=number, extents=extents, deadline=deadline
        )
        self._path, self._notify, self._release, self._job = path, notify, release, job
        flags = frames.NOTIFIES if notify is not None else 0
        self._lock = threading.Lock()
        self._parts = [
            StreamTransfer(
                path,
                stream,
                part,
                kind=kind,
                number=number,
                deadline=deadline,
                notify=None,
                release=lambda job: None,
                flags=flags if kind.startswith("write") else 0,
            )
            for stream, part in parts
        ]

    def advance(self, wait: bool) -> None:
        for part in self._parts:
            while not part.done():
                if not wait:
                    return
                part.advance(True)
                if not self._deadline.left and not part.done_flag:
                    break
        if all(part.done_flag for part in self._parts):
            with self._lock:
                if not self._done:
                    self._finish()

    def stop(self) -> None:
        for part in self._parts:
            part.cancel()
        self.advance(True)

    def _finish(self) -> None:
        errors = [part._error for part in self._parts]
        error = next((e for e in errors if e is not None), None)
        if self._notify is not None:
            status, block = status_of(error), max(0, getattr(error, "block", 0))
            size = self.extents.block_nbytes
            try:
                self._path.send_notification(
                    self._parts[0]._stream,
                    self._notify,
                    self.number,
                    status,
                    block * size,
                    self._deadline if error is None else Deadline.after(0.1),
                    size,
                )
            except MiracclError as problem:
                error = error or problem
        self._error, self._done = error, True
        self._release(self._job)

    def explain(self) -> TransferPlan:
        return self._path.explain(self.kind, self.extents)


class EmptyTransfer(Transfer):
    """Transfer of no bytes: only its notification is sent."""

    def __init__(self, path: StreamPath, notify: bytes | None, job: StreamJob, common: Any) -> None:
        super().__init__(
            kind=common["kind"],
            peer=path.name,
            number=common["number"],
            extents=job.extents,
            deadline=common["deadline"],
        )
        self._path = path
        if notify is not None:
            path.notify(notify, self.number, self._deadline)
        self._done = True
        common["release"](job)

    def explain(self) -> TransferPlan:
        return self._path.explain(self.kind, self.extents)


def note_frame(data: bytes, number: int, status: int, position: int, block_nbytes: int) -> bytes:
    """Return a NOTIFY frame."""
    word = frames.MAGIC | frames.NOTIFY << 16
    size = min(block_nbytes, 0xFFFFFFFF) | len(data) << 32
    return _NOTIFY.pack(word, number, size, 0, 0, 0, status, position) + data


def status_of(error: MiracclError | None) -> int:
    """Return the status of a frame that reports an error."""
    if error is None:
        return frames.OK
    if isinstance(error, TransferCancelled):
        return frames.CANCELLED
    if isinstance(error, TransferTimeout):
        return frames.TIMED_OUT
    name = getattr(error, "reason", "")
    return frames.STATUS_NAMES.index(name) if name in frames.STATUS_NAMES else frames.FAILED
