"""Toy transport: one named pipe per direction, moved by one thread per peer.

An example of a complete transport in one file, registered by one line. It is ordered and needs
progress, and nothing else: payloads travel through slots. Ranks must share a machine.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import struct
import tempfile
from collections.abc import Mapping
from contextlib import suppress

from miraccl import clock
from miraccl.errors import ProtocolError
from miraccl.transport.base import Capability, Endpoint, Fifo, FifoPair, Transport, TransportContext
from miraccl.transport.ends import RecvEnd, SendEnd
from miraccl.transport.fifo import NSLOTS, PAGE_BYTES, FifoMemory, PrivateMemory, native_atomics
from miraccl.transport.registry import Score, TransportSpec, register

HEADER = struct.Struct("<qq")  # signature, bytes of the payload
CAPABILITIES = Capability.ORDERED | Capability.NEEDS_PROGRESS


class PipeLink:
    """Both directions to one peer; ``run`` is the body of its thread."""

    def __init__(self, context: TransportContext, write: int, read: int, slot_bytes: int) -> None:
        self.context, self.write, self.read = context, write, read
        self.atomics, self.words = native_atomics(), PrivateMemory(PAGE_BYTES)
        self.doorbell = os.eventfd(0, os.EFD_NONBLOCK)
        self.memory = (FifoMemory(slot_bytes), FifoMemory(slot_bytes))
        wake = {"doorbell": self.doorbell, "asleep": self.words.address}
        self.send, self.recv = (
            Fifo.from_address(m.address, slot_bytes, capabilities=CAPABILITIES, **wake)
            for m in self.memory
        )
        # The thread is the receiver of the send FIFO, and the sender of the receive FIFO.
        self.posted = RecvEnd(self.send, self.atomics)
        self.delivered = SendEnd(self.recv, self.atomics)
        self.out, self.into = b"", b""
        self.stop_at = float("inf")
        self.thread = clock.thread(self.run, name="pipes")

    def run(self) -> None:
        while clock.monotonic() < self.stop_at:
            if self.push() | self.pull():
                continue
            self.atomics.exchange(self.words.address, 1)
            if not self.push() | self.pull():
                if self.stop_at < float("inf") and not self.out:
                    return  # everything that was posted is in the pipe
                clock.wait_io(self.ready, 1.0)
            self.atomics.exchange(self.words.address, 0)
            with suppress(BlockingIOError):
                os.eventfd_read(self.doorbell)

    def ready(self, timeout: float | None) -> bool:
        full = self.delivered.posted - self.delivered.released >= NSLOTS
        reads = [self.doorbell] if full else [self.doorbell, self.read]
        return any(select.select(reads, [self.write] if self.out else [], [], timeout))

    def push(self) -> bool:
        """Write what fits of the next posted message; return True if anything moved."""
        if not self.out and (message := self.posted.peek()):
            assert message.payload is not None
            self.out = HEADER.pack(message.signature, message.nbytes) + bytes(message.payload)
        if not self.out:
            return False
        try:
            self.out = self.out[os.write(self.write, self.out) :]
        except BlockingIOError:
            return False
        if not self.out:
            self.posted.consume()
            self.context.wake(self.context.endpoint.rank)
        return True

    def pull(self) -> bool:
        """Read what has come of the next message; return True if anything moved."""
        complete = len(self.into) >= HEADER.size
        signature, nbytes = HEADER.unpack_from(self.into) if complete else (0, 0)
        missing = HEADER.size + nbytes - len(self.into)
        if complete and not missing:
            if not self.delivered.post(self.into[HEADER.size :], signature=signature):
                return False
            self.into = b""
            self.context.wake(self.context.endpoint.rank)
            return True
        try:
            self.into += os.read(self.read, missing)
        except BlockingIOError:
            return False
        return True


class PipeTransport(Transport):
    def __init__(self, context: TransportContext) -> None:
        self.context, self.links = context, list[PipeLink]()
        self.slot_bytes = min(65536, context.max_slot_bytes)  # what a pipe holds
        self.folder = tempfile.mkdtemp(prefix="miraccl-pipes-")
        for peer in context.peers:
            os.mkfifo(f"{self.folder}/{peer}", 0o600)

    def setup(self) -> bytes:
        return json.dumps([self.folder]).encode()

    def connect(self, infos: Mapping[int, bytes]) -> dict[int, FifoPair]:
        pairs: dict[int, FifoPair] = {}
        for peer, info in infos.items():
            try:
                folder = json.loads(info)[0]
                # Open for both directions: opening does not wait, and the pipe has no end.
                flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
                write = os.open(f"{folder}/{self.context.endpoint.rank}", flags)
                read = os.open(f"{self.folder}/{peer}", flags)
            except (ValueError, LookupError, TypeError, OSError) as error:
                raise ProtocolError(f"cannot connect to rank {peer}: {error}") from error
            link = PipeLink(self.context, write, read, self.slot_bytes)
            pairs[peer] = FifoPair(send=link.send, recv=link.recv, memory=link)
            self.links.append(link)
            link.thread.start()
        return pairs

    def close(self) -> None:
        links, self.links = self.links, []
        for link in links:
            link.stop_at = clock.monotonic() + 1.0
            os.eventfd_write(link.doorbell, 1)
        for link in links:
            link.thread.join()
            for descriptor in (link.write, link.read, link.doorbell):
                os.close(descriptor)
        shutil.rmtree(self.folder, ignore_errors=True)


def score(a: Endpoint, b: Endpoint) -> Score:
    return (150, "one machine") if a.machine == b.machine and a.rank != b.rank else (0, "apart")


PIPES = register(
    TransportSpec(
        name="pipes", capabilities=CAPABILITIES, score=score, open=PipeTransport, automatic=False
    )
)
