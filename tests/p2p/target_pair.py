"""The compiled target of a stream and its specification, fed the same bytes."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np

from miraccl.p2p.arrays import memory_of
from miraccl.p2p.notify import Inbox
from miraccl.p2p.registration import RegionTable
from miraccl.p2p.serving import ServedStream
from miraccl.transport.region import Rights
from miraccl.wire.p2p import Introduction
from miraccl.wire.p2p_target import Notify, Place, SendBytes, SendMemory, Target, TargetRegion

#: Bytes before and after each region that nothing may write.
GUARD = 4096
SIZES = {"rw": 3000, "r": 500, "w": 64}
PATTERN = 0xA5


INTRODUCTION = Introduction(
    name="test", agent=bytes(32), address="", host="", pid=1, connection=1, stream=0
)


class Regions:
    """Registered memory between guards, and a second copy for the specification."""

    def __init__(self) -> None:
        self.table = RegionTable()
        self.inbox = Inbox(self.table)
        self.memory: dict[int, Any] = {}
        self.whole: dict[int, Any] = {}
        self.model: dict[int, bytearray] = {}
        self.regions: dict[int, TargetRegion] = {}
        for access, nbytes in SIZES.items():
            whole = np.full(nbytes + 2 * GUARD, PATTERN, np.uint8)
            part = whole[GUARD : GUARD + nbytes]
            rights = {"rw": Rights.READ | Rights.WRITE, "r": Rights.READ, "w": Rights.WRITE}[access]
            key = bytes([len(access)]) * 16
            slot, generation = self.table.publish(memory_of(part, "x", "test"), rights, key)
            self.whole[slot], self.memory[slot] = whole, part
            self.regions[slot] = TargetRegion(
                generation=generation, key=key, rights=int(rights), nbytes=nbytes
            )
        self.reset()

    def reset(self) -> None:
        for slot, part in self.memory.items():
            part[:] = np.arange(part.size) % 199
            self.model[slot] = bytearray(part.tobytes())

    def intact(self) -> bool:
        """Return True if the guards are as they were made."""
        return all(
            (w[:GUARD] == PATTERN).all() and (w[-GUARD:] == PATTERN).all()
            for w in self.whole.values()
        )

    def run_model(self, data: bytes) -> tuple[bytes, list[tuple[int, int, bytes]], bool]:
        """Return (replies, notifications as (number, status, data), protocol kept)."""
        target, replies = Target(regions=self.regions), b""
        notes: list[tuple[int, int, bytes]] = []
        for at in range(0, len(data), 1000):
            for instruction in target.receive(data[at : at + 1000]):
                replies += self._apply(instruction, notes)
        for instruction in target.flush():
            self._apply(instruction, notes)
        return replies, notes, target.violation is None

    def _apply(self, instruction: Any, notes: list[tuple[int, int, bytes]]) -> bytes:
        match instruction:
            case Place(slot=slot, offset=offset, data=data):
                self.model[slot][offset : offset + len(data)] = data
            case SendBytes(data=data):
                return bytes(data)
            case SendMemory(slot=slot, extents=extents, head=head, tail=tail):
                memory = self.model[slot]
                return bytes(head + b"".join(memory[o : o + n] for o, n in extents) + tail)
            case Notify(number=number, status=status, data=data):
                notes.append((number, status, bytes(data)))
        return b""

    def run_compiled(self, data: bytes) -> tuple[bytes, list[tuple[int, int, bytes]]]:
        """Send bytes to the compiled target, then the end; return (replies, notifications)."""
        ours, theirs = socket.socketpair()
        stream = ServedStream(theirs, INTRODUCTION, self.table, self.inbox, lambda s: None)
        stream.start(b"")
        replies = b""
        ours.settimeout(10)
        try:
            ours.sendall(data)
            ours.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has closed the stream after a violation
        try:
            while part := ours.recv(1 << 16):
                replies += part
        except ConnectionResetError:
            pass
        stream.close()
        ours.close()
        notes = []
        while (found := self.inbox.pop()) is not None:
            lost = found.error is not None and found.error.reason == "lost"
            if not lost:
                notes.append((found.tag, int(found.error is not None), found.data))
        return replies, notes
