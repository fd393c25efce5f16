"""Reference implementation of both ends of a FIFO: slow, obvious, the definition for executors.

Nothing here waits: each method does its part if it can be done now and returns whether it did.
Tests, benchmarks and tools without a compiled executor use it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from miraccl.transport import fifo
from miraccl.transport.base import Capability, Fifo
from miraccl.transport.fifo import INLINE_BYTES, LINE_BYTES, NSLOTS, Atomics, Mode, memory_at


def ring_doorbell(atomics: Atomics, end: Fifo) -> None:
    """Wake the proxy of ``end`` if it sleeps; called after a flag, tail or CTS was stored."""
    # The exchange is the full fence, and makes only one of two concurrent writers write.
    if end.doorbell >= 0 and atomics.exchange(end.asleep, 0):
        os.eventfd_write(end.doorbell, 1)


class SendEnd:
    """Sending end of a FIFO.

    Attributes:
        posted: Number of messages posted so far.
    """

    def __init__(self, end: Fifo, atomics: Atomics) -> None:
        self.end = end
        self.posted = 0
        self._atomics = atomics

    @property
    def released(self) -> int:
        """Number of messages whose memory may be used again."""
        return self._atomics.load_acquire(self.end.tail)

    def post(
        self, payload: bytes | memoryview, *, signature: int = 0, mode: Mode | None = None
    ) -> bool:
        """Copy ``payload`` into the descriptor line or slot and post it; False if the ring is full.

        Args:
            mode: INLINE or SLOT; by default INLINE for payloads that fit.
        """
        nbytes = len(payload)
        if mode is None:
            mode = Mode.INLINE if nbytes <= INLINE_BYTES else Mode.SLOT
        if self.posted - self.released >= NSLOTS:
            return False
        if mode is Mode.INLINE:
            address = self._line() + fifo.WORD_INLINE * fifo.WORD_BYTES
        elif mode is Mode.SLOT and nbytes <= self.end.slot_bytes:
            address = self.end.slots + self.posted % NSLOTS * self.end.slot_bytes
        else:
            raise ValueError(f"cannot post {nbytes} bytes in mode {mode.name}")
        memory_at(address, nbytes)[:] = payload
        self._publish(signature, nbytes, mode, [])
        return True

    def post_address(self, address: int, nbytes: int, *, signature: int = 0) -> bool:
        """Post memory of this process, which must not change until ``released`` passes it."""
        if self.posted - self.released >= NSLOTS:
            return False
        self._publish(signature, nbytes, Mode.ADDRESS, [address])
        return True

    def _line(self) -> int:
        return self.end.descriptors + self.posted % NSLOTS * LINE_BYTES

    def _publish(self, signature: int, nbytes: int, mode: Mode, more: list[int]) -> None:
        line = self._line()
        fifo.write_words(line, fifo.WORD_SIGNATURE, [signature, nbytes, mode, *more])
        self.posted += 1
        self._atomics.store_release(line, self.posted)
        ring_doorbell(self._atomics, self.end)


@dataclass(frozen=True, kw_only=True)
class ReceivedMessage:
    """Received message.

    Attributes:
        payload: View of the payload, valid until ``consume``; None for OVERSIZE.
    """

    number: int
    signature: int
    mode: Mode
    nbytes: int
    payload: memoryview | None


class RecvEnd:
    """Receiving end of a FIFO, in the order of the messages.

    Attributes:
        consumed: Number of messages consumed so far.
    """

    def __init__(self, end: Fifo, atomics: Atomics) -> None:
        self.end = end
        self.consumed = 0
        self._atomics = atomics

    def clear_to_send(self, address: int, nbytes: int, *, ahead: int = 0) -> None:
        """Let a message land at ``address``; without effect if the FIFO lacks ``IN_PLACE``.

        Args:
            nbytes: Size of the receive buffer.
            ahead: Number of messages before it that are not consumed yet, less than NSLOTS.
        """
        if Capability.IN_PLACE not in self.end.capabilities:
            return
        message = self.consumed + ahead
        line = self.end.cts + message % NSLOTS * LINE_BYTES
        fifo.write_words(line, fifo.WORD_CTS_ADDRESS, [address, nbytes])
        self._atomics.store_release(line, message + 1)
        ring_doorbell(self._atomics, self.end)

    @property
    def announced(self) -> tuple[int, int] | None:
        """(signature, nbytes) of the next message if it waits for a CTS, else None."""
        line = self._line()
        if self._atomics.load_acquire(line) != -(self.consumed + 1):
            return None
        signature, nbytes = fifo.read_words(line, fifo.WORD_SIGNATURE, 2)
        return signature, nbytes

    def peek(self) -> ReceivedMessage | None:
        """Return the next message, or None if it has not arrived.

        ADDRESS is resolved as memory of this process: the sender is one of its threads.
        """
        line = self._line()
        if self._atomics.load_acquire(line) != self.consumed + 1:
            return None
        descriptor = fifo.read_descriptor(line)
        mode = Mode(descriptor.mode)
        address = {
            Mode.SLOT: self.end.slots + self.consumed % NSLOTS * self.end.slot_bytes,
            Mode.INLINE: line + fifo.WORD_INLINE * fifo.WORD_BYTES,
            Mode.ADDRESS: descriptor.address,
            Mode.LANDED: descriptor.address,
        }.get(mode)
        return ReceivedMessage(
            number=self.consumed,
            signature=descriptor.signature,
            mode=mode,
            nbytes=descriptor.nbytes,
            payload=None if address is None else memory_at(address, descriptor.nbytes),
        )

    def consume(self) -> None:
        """Give line and slot of the current message back."""
        self.consumed += 1
        self._atomics.store_release(self.end.tail, self.consumed)
        ring_doorbell(self._atomics, self.end)

    def _line(self) -> int:
        return self.end.descriptors + self.consumed % NSLOTS * LINE_BYTES
