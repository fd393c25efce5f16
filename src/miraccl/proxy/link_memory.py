"""Compiled state of a link (``kernels.link_layout``), as Python reads and writes it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from miraccl.errors import ProtocolError
from miraccl.proxy.kernels import link_layout as layout
from miraccl.transport.base import FifoPair
from miraccl.transport.fifo import PrivateMemory, memory_at
from miraccl.wire.proxy_records import CLOSED_WITHOUT_CLOSE_FRAME, LinkConfig, Loss, LossKind
from miraccl.wire.stream import decode_frame

#: Texts of faults by code (``link_layout``).
FAULT_TEXTS = {
    layout.BAD_MAGIC: "it sent bytes that are not a frame",
    layout.BAD_TYPE: "it sent a frame of unknown type",
    layout.BAD_HEADER: "it sent a frame with invalid fields",
    layout.WRONG_STREAM: "a frame of stream {0} on stream {1}",
    layout.AFTER_CLOSE: "a frame of type {0} after CLOSE",
    layout.DIFFERENT_TOTALS: "streams close with different numbers of messages: {0} and {1}",
    layout.CLOSED_EARLY: "it closes after {0} messages, but {1} arrived",
    layout.CONSUMED_UNSENT: "it consumed {0} messages of {1}",
    layout.CONSUMED_EARLY: "it consumed message {0} before it was sent",
    layout.CTS_BEYOND: "it clears message {0} to send after consuming {1}",
    layout.CTS_SMALL: "it clears message {0} to send with {1} bytes of room, less than a slot",
    layout.ANNOUNCE_SMALL: "it announces {0} bytes, which fit into a slot",
    layout.ANNOUNCED_TWICE: "it announces message {0} again",
    layout.OUTSIDE_WINDOW: "it sends message {0}; allowed are {1} to {2}",
    layout.SENT_TWICE: "it sends message {0} again",
    layout.CHANGED: "message {0} changes on its way",
    layout.OVERLAP: "it sends bytes [{0}, {1}) twice",
    layout.UNREQUESTED: "it sends {0} bytes as message {1} without a posted receive",
    layout.POSTED_ORDER: "posted message {0} instead of {1}",
    layout.POSTED_BYTES: "posted {0} bytes",
    layout.CONSUMED_UNKNOWN: "consumed {0} of {1} messages",
    layout.BAD_DESCRIPTOR: "posted {0} bytes in mode {1} at {2:#x}",
    layout.BAD_CTS: "posted a receive of {0} bytes at {1:#x}",
    layout.TOO_MANY_RANGES: "it scatters a message over more than {0} ranges",
    layout.BAD_PACKET: "it sent a packet that no peer would send ({0}, {1})",
}


class LinkMemory(PrivateMemory):
    """Memory of the compiled state of one link.

    Args:
        engine: Address of the engine's state.
        peer: Rank of the peer.
        pair: FIFOs between the executor and the engine.
    """

    def __init__(self, config: LinkConfig, *, engine: int, peer: int, pair: FifoPair) -> None:
        super().__init__(layout.link_bytes(config.nstreams))
        write_link(self.address, config)
        for offset, value in (
            (layout.LINK_ENGINE, engine),
            (layout.LINK_PEER, peer),
            (layout.LINK_SEND_DESCRIPTORS, pair.send.descriptors),
            (layout.LINK_SEND_TAIL, pair.send.tail),
            (layout.LINK_SEND_SLOTS, pair.send.slots),
            (layout.LINK_RECV_DESCRIPTORS, pair.recv.descriptors),
            (layout.LINK_RECV_TAIL, pair.recv.tail),
            (layout.LINK_RECV_CTS, pair.recv.cts),
            (layout.LINK_RECV_SLOTS, pair.recv.slots),
        ):
            self.store(offset, value)

    def word(self, offset: int) -> int:
        """Return one word of the state."""
        return int.from_bytes(memory_at(self.address + offset, 8), "little", signed=True)

    def store(self, offset: int, value: int) -> None:
        """Set one word of the state."""
        memory_at(self.address + offset, 8)[:] = value.to_bytes(8, "little", signed=True)

    @property
    def alive(self) -> bool:
        """True while streams and memory are in use."""
        return self.word(layout.LINK_STATE) <= layout.STATE_CLOSING

    def take_end(self) -> bool:
        """Return True once, when the link has ended."""
        if self.alive or self.word(layout.LINK_REPORTED):
            return False
        self.store(layout.LINK_REPORTED, 1)
        return True

    @property
    def lost(self) -> bool:
        """True if the link ended otherwise than by CLOSE on both sides."""
        return self.word(layout.LINK_STATE) == layout.STATE_LOST

    def loss(self, texts: Mapping[int, str] | None = None) -> Loss:
        """Return why the link ended, in the words of ``wire.proxy``.

        Args:
            texts: Texts of faults by code, besides ``FAULT_TEXTS``.
        """
        kind = self.word(layout.LINK_FAULT)
        a = self.word(layout.LINK_FAULT_A)
        if kind == layout.FAULT_CLOSED:
            return Loss(LossKind.CLOSED, "closed its communicator")
        if kind == layout.FAULT_RESET:
            return Loss(LossKind.RESET, os.strerror(a) if a else CLOSED_WITHOUT_CLOSE_FRAME)
        if kind == layout.FAULT_ABORTED:
            text = bytes(memory_at(self.address + layout.LINK_TEXT, a)).decode("utf-8", "replace")
            return Loss(LossKind.ABORTED, f"gave up: {text}")
        detail = self._detail(FAULT_TEXTS | dict(texts or {}))
        if kind == layout.FAULT_PROTOCOL:
            return Loss(LossKind.PROTOCOL, f"violated the protocol: {detail}")
        return Loss(LossKind.INTERNAL, detail)

    def _detail(self, texts: Mapping[int, str]) -> str:
        code = self.word(layout.LINK_FAULT_CODE)
        if code in (layout.BAD_MAGIC, layout.BAD_TYPE, layout.BAD_HEADER):
            header = bytes(memory_at(self.address + layout.LINK_TEXT, layout.FRAME_BYTES))
            try:
                decode_frame(header)
            except ProtocolError as error:
                return error.message
        words = (layout.LINK_FAULT_A, layout.LINK_FAULT_B, layout.LINK_FAULT_C)
        return texts.get(code, "fault {0}").format(*(self.word(w) for w in words))


def write_link(address: int, config: LinkConfig) -> None:
    """Write the numbers of a link into its zeroed state."""
    for offset, value in (
        (layout.LINK_NSTREAMS, config.nstreams),
        (layout.LINK_SEND_SLOT_BYTES, config.send_slot_bytes),
        (layout.LINK_RECV_SLOT_BYTES, config.recv_slot_bytes),
        (layout.LINK_SEGMENT_BYTES, config.segment_bytes),
        (layout.LINK_QUEUE_BYTES, config.queue_bytes),
        (layout.LINK_QUEUE_FRAMES, config.queue_frames),
        (layout.LINK_PEER_TOTAL, -1),
        (layout.LINK_SPREAD, int(config.spread)),
        (layout.LINK_POLICY, config.policy),
        (layout.LINK_RAILS, config.rails),
        (layout.LINK_DATA_STREAMS, config.data_streams),
        (layout.LINK_CONTROL_STREAM, config.data_streams if config.control_streams else 0),
    ):
        memory_at(address + offset, 8)[:] = value.to_bytes(8, "little", signed=True)
    for i in range(config.nstreams):
        stream = address + layout.LINK_STREAMS + i * layout.STREAM_BYTES
        memory_at(stream + layout.STREAM_INDEX, 8)[:] = i.to_bytes(8, "little")
        memory_at(stream + layout.STREAM_LOW_WATER, 8)[:] = (1).to_bytes(8, "little")
