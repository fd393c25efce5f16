"""Streams that other agents have opened: one thread each, asleep in the kernel while idle."""

from __future__ import annotations

import contextlib
import ctypes
import socket
from collections.abc import Callable

import numpy as np

from miraccl import clock, trace
from miraccl.errors import AgentLost, TransferCancelled, TransferError, TransferTimeout
from miraccl.p2p import segment_layout as layout
from miraccl.p2p import stream_layout as frames
from miraccl.p2p.native_calls import load_word, serve
from miraccl.p2p.notify import Inbox, Notification, StreamRing
from miraccl.p2p.registration import RegionTable
from miraccl.transport.fifo import PrivateMemory, memory_at
from miraccl.wire.p2p import Introduction

log = trace.logger("p2p")

#: Nanoseconds that a thread polls its socket after the last byte, before it sleeps in the kernel.
SPIN_NS = 50_000
_HEADER_ROOM = frames.REQUEST_BYTES + 16 * frames.MAX_FRAME_EXTENTS


class ServedStream:
    """Stream of an initiator, served by a thread of its own.

    Args:
        sock: Proven connection; owned from now on.
        introduction: The initiator's.
    """

    def __init__(
        self,
        sock: socket.socket,
        introduction: Introduction,
        table: RegionTable,
        inbox: Inbox,
        ended: Callable[[ServedStream], None],
    ) -> None:
        self._report_end = ended
        self._sock, self._introduction = sock, introduction
        self.peer_name, self.agent = introduction.name, introduction.agent
        self._inbox, self._table = inbox, table
        sizes = {
            frames.SERVE_STAGING: frames.STAGING_BYTES,
            frames.SERVE_VECTORS: 16 * frames.NVECTORS,
            frames.SERVE_SCRATCH: frames.SCRATCH_BYTES,
            frames.SERVE_ACCESS: 64,
            frames.SERVE_DISCARD: frames.DISCARD_BYTES + _HEADER_ROOM,
        }
        self._memory = PrivateMemory(frames.SERVE_BYTES + sum(sizes.values()))
        self._words = np.frombuffer(memory_at(self._memory.address, frames.SERVE_BYTES), np.int64)
        address = self._memory.address + frames.SERVE_BYTES
        for word, nbytes in sizes.items():
            self._words[word // 8] = address
            address += nbytes
        self._ring = StreamRing(self.peer_name, self.agent, self._memory)
        for word, value in (
            (frames.SERVE_RING, self._ring.address),
            (frames.SERVE_DOORBELL, inbox.doorbell),
            (frames.SERVE_FD, sock.fileno()),
            (frames.SERVE_ENTRIES, table.segment.address + layout.TABLE_ENTRIES),
            (frames.SERVE_KEYS, table.keys.address),
            (frames.SERVE_SPIN_NS, SPIN_NS),
            (frames.SERVE_OP, -1),
            (frames.SERVE_LAST_OP, -1),
        ):
            self._words[word // 8] = value
        self._thread = clock.thread(self._main, name=f"miraccl-serve-{self.peer_name}")

    def start(self, first: bytes) -> None:
        """Serve the stream; ``first`` are bytes that were received already."""
        ctypes.memmove(self._word(frames.SERVE_STAGING), first, len(first))
        self._words[frames.SERVE_END // 8] = len(first)
        self._thread.start()

    def precedes(self, other: Introduction) -> bool:
        """Return True if ``other`` opens the connection of this stream again."""
        mine = self._introduction
        same = (mine.agent, mine.connection) == (other.agent, other.connection)
        return same and mine.attempt < other.attempt

    def _word(self, at: int) -> int:
        return int(self._words[at // 8])

    def accesses(self, slot: int) -> bool:
        return bool(load_word()(self._word(frames.SERVE_ACCESS)) == slot + 1)

    def close(self) -> None:
        """End the stream and wait for its thread. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join()

    def _main(self) -> None:
        call = serve()
        self._inbox.add_pair(self._ring)
        try:
            while (result := call(self._memory.address)) == frames.SERVE_NOTIFICATION:
                self._notified()
            self._ended(result)
        finally:
            self._inbox.remove_pair(self._ring)
            self._sock.close()
            self._report_end(self)

    def _notified(self) -> None:
        status, error = self._word(frames.SERVE_EVENT_STATUS), None
        data = ctypes.string_at(
            self._word(frames.SERVE_EVENT_DATA), self._word(frames.SERVE_EVENT_BYTES)
        )
        if status != frames.OK:
            error = failed_stream(
                self.peer_name,
                status,
                self._word(frames.SERVE_EVENT_POSITION),
                self._word(frames.SERVE_EVENT_BLOCK),
            )
        self._inbox.put_after(
            self._ring,
            Notification(
                peer=self.peer_name,
                agent=self.agent,
                tag=self._word(frames.SERVE_EVENT_NUMBER),
                data=data,
                error=error,
            ),
        )

    def _ended(self, result: int) -> None:
        if result == frames.SERVE_PROTOCOL:
            log.warning("agent %s violates the protocol; its stream is closed", self.peer_name)
        if not self._word(frames.SERVE_NOTIFIES):
            return
        # The initiator ended within a transfer of which this agent expects a notification.
        self._inbox.put_after(
            self._ring,
            Notification(
                peer=self.peer_name,
                agent=self.agent,
                tag=self._word(frames.SERVE_OP),
                data=b"",
                error=AgentLost(
                    f"agent {self.peer_name!r} ended during a transfer to this agent's memory",
                    agent=self.peer_name,
                    reason="lost",
                ),
            ),
        )


def failed_stream(peer: str, status: int, position: int, block_nbytes: int) -> TransferError:
    """Return the error of a transfer into this agent's memory, from the status of a frame."""
    name = frames.STATUS_NAMES[min(max(status, 0), len(frames.STATUS_NAMES) - 1)]
    kinds = {frames.CANCELLED: TransferCancelled, frames.TIMED_OUT: TransferTimeout}
    block = position // block_nbytes if block_nbytes else -1
    return kinds.get(status, TransferError)(
        f"a transfer of agent {peer!r} failed at block {block}: {name}",
        agent=peer,
        block=block,
        reason=name,
    )
