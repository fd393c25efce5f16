"""Path to an agent by TCP streams: operations in order per stream, large ones striped over all."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from miraccl.deadline import Deadline
from miraccl.errors import AgentLost, InvalidUsage, MiracclError, TransferTimeout
from miraccl.p2p import segment_layout as layout
from miraccl.p2p import stream_layout as frames
from miraccl.p2p.descriptors import RemoteMemory
from miraccl.p2p.extents import Extents
from miraccl.p2p.native_calls import run_op
from miraccl.p2p.stream_transfer import (
    WAIT_SLICE_NS,
    EmptyTransfer,
    Stream,
    StreamJob,
    StreamTransfer,
    StripedTransfer,
    note_frame,
)
from miraccl.p2p.transfer import Background, Transfer
from miraccl.p2p.transfer_plan import Rates, TransferPlan, make_plan
from miraccl.transport.region import Rights

#: From this size on a transfer is striped; each stripe has at least half of it.
STRIPE_BYTES = 1 << 23
#: Time in which an answer on the same network usually comes; ``start`` blocks for it, and for 1 ns
#: per byte: a read of 64 KiB takes 35 us on two cores and 85 on one.
FAST_SLICE_NS = 40_000
#: Constants of the prediction: round trip, frame, extent and byte (loopback, EPYC 9V74).
RATES = Rates(start_us=12.0, call_us=2.0, extent_us=0.05, us_byte=1.5e-4)


class StreamPath:
    """Connection to an agent by TCP.

    Args:
        redial: Opens the connection again; returns its sockets.
    """

    def __init__(
        self,
        name: str,
        sockets: list[socket.socket],
        *,
        timeout: float,
        label: str,
        redial: Callable[[Deadline], list[socket.socket]],
    ) -> None:
        self.name, self.timeout, self._label, self._redial = name, timeout, label, redial
        self.streams = [Stream(sock) for sock in sockets]
        self.lost: MiracclError | None = None
        self._backgrounds: dict[Stream, Background] = {}
        self._turn = itertools.count()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def sockets(self) -> list[socket.socket]:
        return [stream.sock for stream in self.streams]

    def uses(self, sock: socket.socket) -> bool:
        """Return False for a connection that was closed after a deadline and is replaced."""
        # One that a transfer has found broken is not replaced: the other side has ended it.
        return any(
            stream.sock is sock
            for stream in self.streams
            if stream.broken is None or getattr(stream.broken, "reason", "") == "lost"
        )

    def background_of(self, stream: Stream) -> Background:
        if stream not in self._backgrounds:
            self._backgrounds[stream] = Background(self._label)
        return self._backgrounds[stream]

    def job(self, remote: RemoteMemory, extents: Extents, writes: bool, op_name: str) -> Any:
        """Return the words of a transfer; the target makes the checks of memory and keys."""
        self._check_alive()
        right = Rights.WRITE if writes else Rights.READ
        if right not in remote.rights:
            raise InvalidUsage(
                f"cannot {op_name}: agent {self.name!r} registered the memory without the right to "
                f"{right.name.lower() if right.name else right}"
            )
        parts = self._stripes(extents)
        if len(parts) == 1:
            return StreamJob(remote, extents, writes)
        starts = itertools.accumulate((part.total for part in parts), initial=0)
        return [StreamJob(remote, part, writes, at) for part, at in zip(parts, starts)]

    def _stripes(self, extents: Extents) -> list[Extents]:
        """Return the extents of each stream that a transfer uses."""
        if extents.total < STRIPE_BYTES or len(self.streams) == 1:
            return [extents]
        return split(extents, min(len(self.streams), max(1, 2 * extents.total // STRIPE_BYTES)))

    def try_fast(self, job: StreamJob, notify: bytes | None, numbers: Iterator[int]) -> int:
        """Run a short operation on an idle stream; return its number, or 0 if it must go to
        ``start``, which also continues it after a time slice without an answer.
        """
        stream = self.streams[0]
        if self.lost is not None:
            return 0
        for other in self.streams:
            if other.pending or other.broken is not None:
                return 0
        if job.kind == frames.GET and notify is not None:
            return 0
        if not stream.lock.acquire(blocking=False):
            return 0
        if stream.pending or job.begun is not None:  # the lock is reentrant
            stream.lock.release()
            return 0
        number = next(self._numbers)
        stream.begin(job, number, 0 if notify is None else frames.NOTIFIES, notify)
        result = run_op()(job.address, FAST_SLICE_NS + job.extents.total, 0)
        if result == frames.RUN_DONE:
            stream.lock.release()
            return number
        job.begun = number, result, stream  # and the lock is held until ``start``
        return 0

    def start(
        self,
        job: Any,
        *,
        kind: str,
        number: int,
        deadline: Deadline,
        notify: bytes | None,
        release: Callable[[Any], None],
    ) -> Transfer:
        begun = not isinstance(job, list) and job.begun is not None
        if not begun:
            self._check_alive()
        # Numbers of a stream are unique: an abandoned operation may still be answered.
        number = next(self._numbers)
        common: dict[str, Any] = {
            "kind": kind,
            "number": number,
            "deadline": deadline,
            "notify": notify,
            "release": release,
        }
        if isinstance(job, list):
            extents = Extents(
                table=job[0].extents.table,
                total=sum(part.extents.total for part in job),
                blocks=job[0].extents.blocks,
                block_nbytes=job[0].extents.block_nbytes,
            )
            return StripedTransfer(
                self,
                list(zip(self._usable(deadline), job, strict=False)),
                extents,
                job=job,
                **common,
            )
        if not job.extents.total:
            return EmptyTransfer(self, notify, job, common)
        if not begun:
            return StreamTransfer(self, self._choose(deadline), job, **common)
        common["number"], result, stream = job.begun
        job.begun = None
        try:
            return StreamTransfer(self, stream, job, begun=result, **common)
        finally:
            stream.lock.release()

    def _usable(self, deadline: Deadline) -> list[Stream]:
        """Return the streams, once nothing of a transfer that passed its deadline can follow.

        Streams that a deadline has broken are opened anew; the target ends the old ones first.
        """
        for stream in self.streams:
            while stream.broken is None and stream.pending and stream.pending[0].done_flag:
                if not deadline.left:
                    raise TransferTimeout(
                        f"agent {self.name!r} has not answered a transfer that passed its deadline "
                        f"for {deadline.seconds:g} s more",
                        agent=self.name,
                        reason="deadline",
                    )
                with stream.lock:
                    stream.step(min(WAIT_SLICE_NS, int(deadline.left * 1e9)))
        if any(stream.broken is not None for stream in self.streams):
            with self._lock:
                if any(stream.broken is not None for stream in self.streams):
                    old = self.streams
                    for stream in old:
                        with stream.lock:
                            stream.fail(stream.broken or self._closed_error())
                    self.streams = [Stream(s) for s in self._redial(deadline)]
        return self.streams

    def _closed_error(self) -> AgentLost:
        return AgentLost(
            f"the connection to agent {self.name!r} was closed", agent=self.name, reason="closed"
        )

    def _choose(self, deadline: Deadline) -> Stream:
        """Return the first unused stream, or the next in turn."""
        streams = self._usable(deadline)
        for stream in streams:
            if not stream.pending:
                return stream
        return streams[next(self._turn) % len(streams)]

    def post(self, data: bytes) -> bool:
        """Send a notification without a transfer on an idle stream; return False if anything is
        unusual, and nothing was sent.
        """
        stream = self.streams[0]
        if stream.pending or stream.broken is not None or type(data) is not bytes:
            return False
        if len(data) > layout.MAX_NOTIFICATION or not stream.lock.acquire(blocking=False):
            return False
        try:
            if stream.pending:
                return False
            sent = stream.send_note(stream.fd, data)
            if sent == frames.REQUEST_BYTES + len(data):
                return True
            if sent <= 0:
                return False
            frame = note_frame(data, 0, frames.OK, 0, 0)
            stream.send_rest(frame[sent:], Deadline.after(self.timeout), self.name)
            return True
        finally:
            stream.lock.release()

    def notify(self, data: bytes, number: int, deadline: Deadline, status: int = 0) -> None:
        self._check_alive()
        self.send_notification(self._usable(deadline)[0], data, number, status, 0, deadline)

    def send_notification(
        self,
        stream: Stream,
        data: bytes,
        number: int,
        status: int,
        position: int,
        deadline: Deadline,
        block_nbytes: int = 0,
    ) -> None:
        """Send a NOTIFY frame. Raises ``AgentLost`` or ``TransferTimeout``."""
        with stream.lock:
            while stream.pending and not stream.pending[-1].sent:
                stream.step(WAIT_SLICE_NS)
            if stream.broken is not None:
                raise stream.broken
            frame = note_frame(data, number, status, position, block_nbytes)
            stream.send_rest(frame, deadline, self.name)

    def explain(self, kind: str, extents: Extents) -> TransferPlan:
        parts = self._stripes(extents)
        return make_plan(
            extents,
            parts,
            writes=kind.startswith("write"),
            max_bytes=frames.MAX_PAYLOAD,
            max_extents=frames.MAX_FRAME_EXTENTS,
            method="tcp",
            reason=f"{len(parts)} of {len(self.streams)} streams; the target checks and copies",
            kind=kind,
            peer=self.name,
            rates=RATES,
        )

    def _check_alive(self) -> None:
        if self.lost is not None:
            raise self.lost

    def mark_lost(self, error: MiracclError) -> None:
        self.lost = self.lost or error

    def close(self) -> None:
        self.lost = self.lost or self._closed_error()
        for stream in self.streams:
            stream.close()
        for background in list(self._backgrounds.values()):
            background.close()


def split(extents: Extents, count: int) -> list[Extents]:
    """Divide extents into ``count`` parts of nearly equal bytes, in order."""
    table, total = extents.table, extents.total
    ends = np.cumsum(table[:, 2])
    parts, start = [], 0
    for i in range(count):
        stop = total * (i + 1) // count // 65536 * 65536 if i + 1 < count else total
        parts.append(_cut(extents, ends, start, stop))
        start = stop
    return [part for part in parts if part.total]


def _cut(extents: Extents, ends: Any, start: int, stop: int) -> Extents:
    """Return the extents of the bytes from ``start`` to ``stop`` of a transfer."""
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, stop, side="left")) + 1
    part = extents.table[first:last].copy()
    if len(part):
        skip = start - (int(ends[first]) - int(part[0, 2]))
        part[0] += (skip, skip, -skip)
        part[-1, 2] -= int(ends[min(last, len(ends)) - 1]) - stop
    return replace(extents, table=part, total=stop - start)
