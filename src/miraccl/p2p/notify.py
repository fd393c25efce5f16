"""Notifications: what peers have sent to an agent, in order per peer."""

from __future__ import annotations

import itertools
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from miraccl.errors import AgentLost, TransferCancelled, TransferError, TransferTimeout
from miraccl.p2p import segment_layout as layout
from miraccl.p2p.local_path import (
    STATUS_CANCELLED,
    STATUS_OK,
    STATUS_TIMEOUT,
    parse_failure,
)
from miraccl.p2p.native_calls import RECEIVE, bound_entry, load_word, notify
from miraccl.transport.fifo import PrivateMemory
from miraccl.transport.shared_segment import ShmSegment

if TYPE_CHECKING:
    from miraccl.p2p.registration import RegionTable

#: Longest sleep of a receiver that waits for one notification among others.
MATCH_SLICE_S = 0.02
#: Longest wait in compiled code, whose times are 64-bit numbers of nanoseconds.
MAX_WAIT_S = 1e6
_RECORD = struct.Struct("<IIq")


class Notification(NamedTuple):
    """Notification of a peer.

    Attributes:
        peer: Name of the agent that sent it.
        agent: Random identifier of that agent.
        tag: Number of the transfer at the sender; 0 for ``peer.notify``.
        data: Bytes that the sender gave.
        error: Why the transfer failed, None if all its bytes have arrived.
    """

    peer: str
    agent: bytes
    tag: int
    data: bytes
    error: TransferError | None = None


def failed(peer: str, status: int, reason: str, block: int) -> TransferError:
    """Return the error of a transfer into this agent's memory that did not succeed."""
    kinds = {STATUS_CANCELLED: TransferCancelled, STATUS_TIMEOUT: TransferTimeout}
    return kinds.get(status, TransferError)(
        f"a transfer of agent {peer!r} failed at block {block}: {reason}",
        agent=peer,
        block=block,
        reason={STATUS_CANCELLED: "cancelled", STATUS_TIMEOUT: "deadline"}.get(status, "failed"),
    )


def nanoseconds(seconds: float) -> int:
    """Return a time for compiled code."""
    return int((seconds if seconds < MAX_WAIT_S else MAX_WAIT_S) * 1e9)


class PairSegment:
    """Segment of one connection within the host, at its target."""

    #: Words of a served stream: none fills this ring.
    stream = 0

    def __init__(self, name: str, agent: bytes) -> None:
        self.segment = ShmSegment.create("miraccl-p2p-pair", layout.PAIR_BYTES)
        self.inode = os.fstat(self.segment.fd).st_ino
        self.peer_name, self.agent = name, agent

    @property
    def address(self) -> int:
        return self.segment.address

    def accesses(self, slot: int) -> bool:
        load, first = load_word(), self.address + layout.PAIR_ACCESSES
        return any(
            load(first + i * layout.ACCESS_BYTES) == slot + 1 for i in range(layout.MAX_ACCESSES)
        )

    def accessed(self) -> bool:
        """Return True if any access was under way when the peer ended."""
        load, first = load_word(), self.address + layout.PAIR_ACCESSES
        return any(load(first + i * layout.ACCESS_BYTES) for i in range(layout.MAX_ACCESSES))


class StreamRing:
    """Ring of one served stream, in private memory, filled without Python.

    Args:
        memory: Memory that begins with the words of the stream.
    """

    def __init__(self, name: str, agent: bytes, memory: PrivateMemory) -> None:
        self._memory = PrivateMemory(layout.PAIR_BYTES)
        self._stream = memory
        self.peer_name, self.agent = name, agent

    @property
    def address(self) -> int:
        return self._memory.address

    @property
    def stream(self) -> int:
        """Address of the words of the stream."""
        return self._stream.address

    def accesses(self, slot: int) -> bool:
        """Return False: accesses of a stream are those of its ``ServedStream``."""
        return False

    def accessed(self) -> bool:
        return False


Ring = PairSegment | StreamRing


class Inbox:
    """Notifications that have arrived, from the rings of pairs and streams."""

    def __init__(self, table: RegionTable) -> None:
        self._table = table
        self.queue: deque[Notification] = deque()
        self._pairs: list[Ring] = []
        self._kept: list[Any] = []
        self._lock = threading.Lock()
        self._take, self._ring = (notify(name) for name in ("take_record", "ring_doorbell"))
        self._words = np.zeros(layout.INBOX_BYTES // 8, np.int64)
        address = int(self._words.__array_interface__["data"][0])
        self._words[layout.INBOX_DOORBELL // 8] = table.doorbell
        self._words[layout.INBOX_NONE // 8] = id(None)
        self._words[layout.INBOX_TYPE // 8] = id(Notification)
        self._set_addresses()
        self._await = bound_entry(RECEIVE, "await_records", address)
        #: ``await_one(ns)``: the next notification in a ring, or the nanoseconds that are left for
        #: ``wait`` and ``pop``. Those in the queue come first.
        self.await_one = bound_entry(RECEIVE, "await_one", address)

    @property
    def doorbell(self) -> int:
        """Address of the words that wake a waiting thread."""
        return self._table.doorbell

    def add_pair(self, pair: Ring) -> None:
        with self._lock:
            self._pairs = [*self._pairs, pair]
            self._set_addresses()
        self._ring(self._table.doorbell)

    def remove_pair(self, pair: Ring) -> None:
        """Read the last notifications of a pair and forget it."""
        with self._lock:
            self._drain([pair])
            self._pairs = [p for p in self._pairs if p is not pair]
            self._set_addresses()
        # A thread between its last look at the queue and its sleep no longer finds a record.
        self._ring(self._table.doorbell)
        if pair.accessed():
            self.put(
                Notification(
                    peer=pair.peer_name,
                    agent=pair.agent,
                    tag=0,
                    data=b"",
                    error=AgentLost(
                        f"agent {pair.peer_name!r} ended during an access to this agent's memory",
                        agent=pair.peer_name,
                        reason="lost",
                    ),
                )
            )

    def _set_addresses(self) -> None:
        entries = [(p.address, id(p.peer_name), id(p.agent), p.stream) for p in self._pairs]
        words = np.array([len(entries), *itertools.chain(*entries)], np.int64)
        # Threads may still wait with the former list: the last ones are kept, with their objects.
        self._kept = [*self._kept[-64:], (words, self._pairs)]
        self._words[layout.INBOX_RINGS // 8] = words.__array_interface__["data"][0]
        self._words[layout.INBOX_STREAMS // 8] = sum(p.stream != 0 for p in self._pairs)

    @property
    def pairs(self) -> list[Ring]:
        return self._pairs

    def put(self, notification: Notification) -> None:
        """Add a notification that came by the network."""
        self._enqueue(notification)
        self._ring(self._table.doorbell)

    def _enqueue(self, notification: Notification) -> None:
        # A thread in ``await_one`` then leaves the records that follow to ``pop``.
        self._words[layout.INBOX_QUEUED // 8] += 1
        self.queue.append(notification)

    def put_after(self, ring: Ring, notification: Notification) -> None:
        """Add a notification behind those in a ring."""
        with self._lock:
            self._drain([ring])
            self._enqueue(notification)
        self._ring(self._table.doorbell)

    def pop(self, match: Callable[[Notification], bool] | None = None) -> Notification | None:
        """Return the next notification that matches, None if there is none."""
        moved = False
        if not self.queue or match is not None:
            with self._lock:
                moved = self._drain(self._pairs)
        try:
            if match is None:
                return self.queue.popleft()
            found = next((n for n in list(self.queue) if match(n)), None)
            if found is not None:
                self.queue.remove(found)
            return found
        except (IndexError, ValueError):  # another thread has received it
            return None
        finally:
            if moved and self.queue:  # of another thread, which may be about to sleep
                self._ring(self._table.doorbell)

    def wait(self, seconds: float, match: Callable[[Notification], bool] | None = None) -> None:
        """Wait for a notification, for ``seconds`` at most; may return without one.

        With ``match`` the caller has seen those that have arrived, so they do not end the wait.
        """
        if self.queue and match is None:
            return
        if match is not None:  # a notification by the network may have come meanwhile
            seconds = min(seconds, MATCH_SLICE_S)
        self._await(nanoseconds(seconds))

    def _drain(self, pairs: Sequence[Ring]) -> bool:
        """Move the records of rings to the queue; return True if there were any.

        The caller holds the lock.
        """
        self._words[layout.INBOX_DRAINING // 8] = 1
        try:
            moved = [self._drain_one(pair) for pair in pairs]
            return any(moved)
        finally:
            self._words[layout.INBOX_DRAINING // 8] = 0

    def _drain_one(self, pair: Ring) -> bool:
        take, address, moved = self._take, pair.address, False
        while record := take(address):
            moved = True
            if record == -1:
                self._enqueue(
                    Notification(
                        peer=pair.peer_name,
                        agent=pair.agent,
                        tag=0,
                        data=b"",
                        error=TransferError(
                            f"the notification ring of agent {pair.peer_name!r} is damaged",
                            agent=pair.peer_name,
                            reason="protocol",
                        ),
                    )
                )
                self._pairs = [p for p in self._pairs if p is not pair]
                self._set_addresses()
                return True
            _, status, number = _RECORD.unpack_from(record)
            data, error = record[layout.RECORD_BYTES :], None
            if status != STATUS_OK:
                block, reason, data = parse_failure(data)
                error = failed(pair.peer_name, status, reason, block)
            self._enqueue(
                Notification(
                    peer=pair.peer_name, agent=pair.agent, tag=number, data=data, error=error
                )
            )
        return moved
