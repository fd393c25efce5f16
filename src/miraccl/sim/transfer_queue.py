"""Sends and receives of virtual ranks."""

from __future__ import annotations

import zlib
from collections import Counter, deque
from dataclasses import dataclass, field

from miraccl.diagnosis.error_codec import departure_error
from miraccl.errors import CollectiveMismatch
from miraccl.runtime.exchange import Transfer
from miraccl.schedule.reduction import Array
from miraccl.schedule.verify import FIFO_DEPTH
from miraccl.sim.group import VirtualGroup, VirtualWork
from miraccl.sim.links import Route


@dataclass(eq=False)
class Half:
    """One side of a message.

    ``data`` is the copy that travels, ``arrival`` the time in us at which it is there.
    """

    transfer: Transfer
    work: VirtualWork
    data: Array | None = None
    arrival: float | None = None


@dataclass(eq=False)
class TransferQueue:
    """Messages from one rank to another, matched in the order of the calls and sent one by one.

    A message of at most ``FIFO_DEPTH`` slots leaves at once, and its sender may go on when it has
    left; a longer one waits for its receive.
    """

    group: VirtualGroup
    sender: int
    receiver: int
    sends: deque[Half] = field(default_factory=deque)
    receives: deque[Half] = field(default_factory=deque)
    _leaving: bool = False
    _last_arrival: float = 0.0

    def add(self, half: Half) -> None:
        """Add one side of a message."""
        (self.receives if half.transfer.receives else self.sends).append(half)
        self._advance()
        self.check_departures()

    def check_departures(self) -> None:
        """Break the communicator if a side waits for one that has left."""
        waits = {
            self.sender: len(self.receives) > len(self.sends),
            self.receiver: any(
                not half.work.is_over for half in list(self.sends)[len(self.receives) :]
            ),
        }
        for peer, missed in waits.items():
            if missed and peer in self.group.left:
                self.group.fail(departure_error(peer, self.group.left[peer], rank=-1, op=None))

    def _advance(self) -> None:
        """Complete what has arrived, then send the next message that may leave."""
        while self.sends and self.receives:
            send, receive = self.sends[0], self.receives[0]
            if not self._agree(send, receive):
                return
            if send.arrival is None or send.arrival > self.group.world.fabric.now:
                break
            self.sends.popleft()
            self.receives.popleft()
            self._complete(send, receive)
        for position, half in enumerate(self.sends):
            if half.data is None and not self._leaving:
                limit = FIFO_DEPTH * self.group.world.slot_bytes
                if position < len(self.receives) or half.transfer.memory.nbytes <= limit:
                    self._send(half)
                return

    def _agree(self, send: Half, receive: Half) -> bool:
        """Return True if two halves match; break the communicator if they do not."""
        sent, received = send.transfer.memory, receive.transfer.memory
        if (sent.count, sent.dtype) == (received.count, received.dtype):
            return True
        self.group.fail(
            CollectiveMismatch(
                f"a message does not match its receive: rank {self.sender} sent {sent.count}"
                f" {sent.dtype.label}, rank {self.receiver} expects {received.count}"
                f" {received.dtype.label}",
                peer=self.sender,
            )
        )
        return False

    def _send(self, half: Half) -> None:
        """Move the bytes of a message; it arrives after the latency of its route."""
        world, route = self.group.world, Route((), 0.0)
        if self.sender != self.receiver:
            route = self.group.routes.route(self.sender, self.receiver)
        half.data, self._leaving = half.transfer.memory.array.reshape(-1).copy(), True

        def leave() -> None:
            now = world.fabric.now
            world.record("sent", self.sender, self.group.name, f"send to {self.receiver}")
            self._leaving = False
            half.arrival = max(now + world.draw_latency(route.latency_us), self._last_arrival)
            self._last_arrival = half.arrival
            half.work.finish()
            if half.arrival > now:
                world.fabric.call_at(half.arrival, self._advance)
            self._advance()

        nbytes = half.transfer.memory.nbytes
        if nbytes and route.links:
            world.fabric.start(nbytes, Counter(route.links), leave)
        else:
            leave()

    def _complete(self, send: Half, receive: Half) -> None:
        assert send.data is not None
        receive.transfer.memory.array.reshape(-1)[:] = send.data
        self.group.world.record(
            "received",
            self.receiver,
            self.group.name,
            f"recv from {self.sender}",
            f"{zlib.crc32(send.data.tobytes()):08x}",
        )
        receive.work.finish()
