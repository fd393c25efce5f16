"""Memory side of a driver: descriptors, CTS and tail of a pair of FIFOs become events of a link.

It turns what it finds in memory into events of ``wire.proxy.ProxyLink`` and executes the
instructions; subclasses move frames over a network. All addresses come from this process's own
executor; all sizes from the network were checked by the link before an instruction names them.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from miraccl import trace
from miraccl.transport import fifo
from miraccl.transport.base import Fifo, NetConnection
from miraccl.transport.fifo import INLINE_BYTES, LINE_BYTES, NSLOTS, Atomics, Mode
from miraccl.wire import proxy_records as wire
from miraccl.wire.proxy import ProxyLink
from miraccl.wire.stream import Frame, FrameType

_MODE = {
    wire.Placement.INLINE: Mode.INLINE,
    wire.Placement.SLOT: Mode.SLOT,
    wire.Placement.POSTED: Mode.LANDED,
    wire.Placement.OVERSIZE: Mode.OVERSIZE,
}
_INLINE_OFFSET = fifo.WORD_INLINE * fifo.WORD_BYTES
log = trace.logger("proxy")


class FifoDriver(abc.ABC):
    """Base of drivers that carry the frames of a ``ProxyLink``; see ``proxy.driver.Driver``.

    Args:
        connection: FIFOs and network of the peer.
        on_lost: Called once with (peer, loss) when the connection ends unexpectedly.
        nstreams: Number of streams of the link.
        segment_bytes: Largest segment of a message.
        spread: Small frames use all streams (``LinkConfig``).
    """

    def __init__(
        self,
        connection: NetConnection,
        *,
        atomics: Atomics,
        on_lost: Callable[[int, wire.Loss], None],
        nstreams: int,
        segment_bytes: int,
        spread: bool = False,
    ) -> None:
        pair = connection.pair
        self.peer = connection.peer
        self.link = ProxyLink(
            wire.LinkConfig(
                nstreams=nstreams,
                send_slot_bytes=connection.peer_slot_bytes,
                recv_slot_bytes=pair.recv.slot_bytes,
                nslots=NSLOTS,
                inline_bytes=INLINE_BYTES,
                segment_bytes=segment_bytes,
                spread=spread,
                rails=connection.rails,
            ),
        )
        self.reached = True
        self.dirty = False
        self._pair = pair  # keeps the memory alive
        self._send: Fifo = pair.send
        self._recv: Fifo = pair.recv
        self._load = atomics.load_acquire
        self._store = atomics.store_release
        self._on_lost = on_lost
        self._sources: dict[int, int] = {}
        self._receive_addresses: dict[int, int] = {}
        self._cts_flags = fifo.flags_view(self._recv.cts)
        self._seen_flags = [0] * NSLOTS
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            wire.SendFrame: self._do_send,
            wire.ReceivePayload: self._do_receive,
            wire.AnnounceMessage: self._do_announce,
            wire.DeliverMessage: self._do_deliver,
            wire.PublishTail: self._do_release,
            wire.PeerLost: self._do_lost,
            wire.AbortStreams: self._do_abort,
            wire.LinkFinished: self._do_finished,
        }

    @property
    def alive(self) -> bool:
        return self.link.alive

    # --- network

    @abc.abstractmethod
    def _queue_frame(self, frame: Frame, payload: memoryview | None) -> None:
        """Queue a frame on its stream."""

    @abc.abstractmethod
    def _place(self, stream: int, target: memoryview) -> None:
        """Let the payload of the frame on ``stream`` land in ``target``."""

    @abc.abstractmethod
    def _send_abort(self, text: str) -> None:
        """Send the reason for the end, if the network takes it at once."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the network connection; memory is not touched afterwards. Idempotent."""

    # --- memory

    def scan(self) -> bool:
        """Look for news of the executor; return True if there was any."""
        link, sender = self.link, self.link.sender
        if not link.alive:
            return False
        load = self._load
        found = False
        tail = load(self._recv.tail)
        if tail != link.receiver.tail:
            found = True
            self.handle(wire.MessagesConsumed(tail))
        line = self._send.descriptors + sender.next_post % NSLOTS * LINE_BYTES
        while link.alive and load(line) == sender.next_post + 1:
            found = True
            self._read_descriptor(sender.next_post, line)
            line = self._send.descriptors + sender.next_post % NSLOTS * LINE_BYTES
        flags = self._cts_flags.tolist()
        if flags != self._seen_flags:
            found |= self._read_cts_lines(flags)
        return found

    def _read_cts_lines(self, flags: list[int]) -> bool:
        """Process CTS flags, one of which has changed."""
        link, receiver = self.link, self.link.receiver
        found = False
        for message in range(receiver.delivered, receiver.tail + NSLOTS):
            line = self._recv.cts + message % NSLOTS * LINE_BYTES
            if (
                self._load(line) == message + 1
                and message not in self._receive_addresses
                and link.alive
            ):
                found = True
                self._read_cts_line(message, line)
        # A CTS for a message beyond the tail that was read is left for the next scan.
        if max(flags) <= receiver.tail + NSLOTS:
            self._seen_flags = flags
        return found

    def handle(self, event: wire.Event) -> None:
        for instruction in self.link.handle(event):
            self._handlers[type(instruction)](instruction)

    def _read_descriptor(self, message: int, line: int) -> None:
        descriptor = fifo.read_descriptor(line)
        source = self._payload_address(message, line, descriptor)
        if source is None:
            return self.handle(
                wire.InternalError(
                    f"posted {descriptor.nbytes} bytes in mode {descriptor.mode} at "
                    f"{descriptor.address:#x}"
                )
            )
        self._sources[message] = source
        self.handle(wire.MessagePosted(message, descriptor.signature, descriptor.nbytes))

    def _payload_address(self, message: int, line: int, descriptor: fifo.Descriptor) -> int | None:
        """Return the address of a posted payload, None if the descriptor is invalid."""
        if descriptor.mode == Mode.SLOT and 0 <= descriptor.nbytes <= self._send.slot_bytes:
            return self._send.slots + message % NSLOTS * self._send.slot_bytes
        if descriptor.mode == Mode.INLINE and 0 <= descriptor.nbytes <= INLINE_BYTES:
            return line + _INLINE_OFFSET
        if (
            descriptor.mode == Mode.ADDRESS
            and descriptor.nbytes >= 0
            and (descriptor.address >= fifo.PAGE_BYTES or not descriptor.nbytes)
        ):
            return descriptor.address
        return None

    def _read_cts_line(self, message: int, line: int) -> None:
        address, nbytes = fifo.read_words(line, fifo.WORD_CTS_ADDRESS, 2)
        if nbytes < 0 or (nbytes and address < fifo.PAGE_BYTES):
            return self.handle(
                wire.InternalError(f"posted a receive of {nbytes} bytes at {address:#x}")
            )
        self._receive_addresses[message] = address
        self.handle(wire.ReceivePosted(message, nbytes))

    def _do_announce(self, instruction: wire.AnnounceMessage) -> None:
        line = self._recv.descriptors + instruction.message % NSLOTS * LINE_BYTES
        fifo.write_words(line, fifo.WORD_SIGNATURE, [instruction.signature, instruction.nbytes])
        self._store(line, -(instruction.message + 1))
        self.dirty = True

    def _do_deliver(self, instruction: wire.DeliverMessage) -> None:
        line = self._recv.descriptors + instruction.message % NSLOTS * LINE_BYTES
        words = [instruction.signature, instruction.nbytes, _MODE[instruction.placement]]
        address = self._receive_addresses.pop(instruction.message, 0)
        if instruction.placement is wire.Placement.POSTED:
            words.append(address)
        fifo.write_words(line, fifo.WORD_SIGNATURE, words)
        self._store(line, instruction.message + 1)
        self.dirty = True

    def _do_release(self, instruction: wire.PublishTail) -> None:
        for message in [m for m in self._sources if m < instruction.tail]:
            del self._sources[message]
        self._store(self._send.tail, instruction.tail)
        self.dirty = True

    # --- frames

    def _do_send(self, instruction: wire.SendFrame) -> None:
        frame = instruction.frame
        payload = None
        if frame.type is FrameType.DATA and frame.length:
            payload = fifo.memory_at(self._sources[frame.message] + frame.offset, frame.length)
        self._queue_frame(frame, payload)

    def _do_receive(self, instruction: wire.ReceivePayload) -> None:
        if instruction.placement is wire.Placement.POSTED:
            base = self._receive_addresses[instruction.message]
        elif instruction.placement is wire.Placement.SLOT:
            base = self._recv.slots + instruction.message % NSLOTS * self._recv.slot_bytes
        else:
            base = (
                self._recv.descriptors + instruction.message % NSLOTS * LINE_BYTES + _INLINE_OFFSET
            )
        self._place(
            instruction.stream, fifo.memory_at(base + instruction.offset, instruction.length)
        )

    # --- ends

    def _do_lost(self, instruction: wire.PeerLost) -> None:
        self.close()
        self.dirty = True
        log.info(
            "rank %d is lost (%s): %s", self.peer, instruction.loss.kind.value, instruction.loss
        )
        try:
            self._on_lost(self.peer, instruction.loss)
        except Exception:
            log.exception("on_lost failed")

    def _do_abort(self, instruction: wire.AbortStreams) -> None:
        self._send_abort(instruction.text)
        self.close()

    def _do_finished(self, instruction: wire.LinkFinished) -> None:
        self.close()
