"""The half of a link that receives: frames to their places in memory, and messages in order to the executor.

The first frame of a message fixes its place: in the line if it fits, at the wanted address if there is enough room, else in its slot.
Nothing is ever placed elsewhere, and no frame is believed: message number, size and piece are all checked against what this side has
granted.
"""

from __future__ import annotations

from miraccl.wire.proxy_messages import Contradiction, Impossible, IncomingMessage
from miraccl.wire.proxy_records import (
    AnnounceMessage,
    DeliverMessage,
    Instruction,
    LinkConfig,
    PayloadPlaced,
    Placement,
    ReceivePayload,
)
from miraccl.wire.proxy_states import RecvState
from miraccl.wire.stream import Frame


class ReceiveHalf:
    """``do`` takes the instructions.  Attributes without underscore may be read: tail <= delivered."""

    def __init__(self, config: LinkConfig, do: list[Instruction]) -> None:
        self.config = config
        self.tail = 0
        self.delivered = 0
        self._messages: dict[int, IncomingMessage] = {}
        self._posted: dict[int, int] = {}
        self._arriving: list[tuple[int, int] | None] = [None] * config.nstreams
        self._instructions = do

    # --- this side

    def post_receive(self, message: int, room: int) -> bool:
        """Let a message land where there is so much room; whether the peer has to know that."""
        record = self._messages.get(message)
        if (
            message in self._posted
            or not self.delivered <= message < self.tail + self.config.nslots
        ):
            return False
        if record and record.state is not RecvState.ANNOUNCED:
            return False  # too late, the message has its place
        self._posted[message] = room
        if record and room < record.nbytes:
            self._reject(record, "want too small")
            return False
        return room > self.config.recv_slot_bytes

    def consume(self, tail: int) -> None:
        if not self.tail <= tail <= self.delivered:
            raise Impossible(f"consumed {tail} of {self.delivered} messages")
        for message in range(self.tail, tail):
            del self._messages[message]
            self._posted.pop(message, None)
        self.tail = tail

    def on_placed(self, event: PayloadPlaced) -> None:
        arriving = self._arriving[event.stream]
        assert arriving is not None, f"no payload was arriving on stream {event.stream}"
        self._arriving[event.stream] = None
        message, length = arriving
        record = self._messages[message]
        record.missing -= length
        if not record.missing:
            record.move("all placed")
            self._deliver()

    # --- what the peer says

    def on_announce(self, frame: Frame) -> None:
        message = frame.message
        if frame.nbytes <= self.config.recv_slot_bytes:
            raise Contradiction(f"announces {frame.nbytes} bytes, which fit into a slot")
        known = self._messages.get(message)
        if known and (known.state is RecvState.ANNOUNCED or known.nbytes != frame.nbytes):
            raise Contradiction(f"announces message {message} again")
        if known or message < self.tail:
            return  # it crossed with a want, and the data on another stream have overtaken it
        self._check_window(message)
        record = self._messages[message] = IncomingMessage(frame)
        room = self._posted.get(message)
        if room is not None and room < frame.nbytes:
            return self._reject(record, "announce, want too small")
        record.move("announce")
        if room is None:
            self._instructions.append(AnnounceMessage(message, frame.signature, frame.nbytes))

    def on_data(self, stream: int, frame: Frame) -> None:
        message = frame.message
        record = self._messages.get(message)
        if record is None:
            self._check_window(message)
            record = self._messages[message] = IncomingMessage(frame)
        elif record.state in (RecvState.COMPLETE, RecvState.DELIVERED):
            raise Contradiction(f"sends message {message} again")
        elif (record.signature, record.nbytes) != (frame.signature, frame.nbytes):
            raise Contradiction(f"message {message} changes on its way")
        if record.placement is None:
            record.placement = self._place(message, frame.nbytes)
        record.move("piece")
        record.claim(frame.offset, frame.offset + frame.length)
        if frame.length:
            self._arriving[stream] = (message, frame.length)
            self._instructions.append(
                ReceivePayload(stream, message, record.placement, frame.offset, frame.length)
            )
        else:
            record.move("all placed")
            self._deliver()

    # --- places

    def _check_window(self, message: int) -> None:
        if not self.tail <= message < self.tail + self.config.nslots:
            raise Contradiction(
                f"sends message {message}, allowed are {self.tail} to {self.tail + self.config.nslots - 1}"
            )

    def _place(self, message: int, nbytes: int) -> Placement:
        if nbytes <= self.config.inline_bytes:
            return Placement.INLINE
        if nbytes <= self._posted.get(message, -1):
            return Placement.POSTED
        if nbytes <= self.config.recv_slot_bytes:
            return Placement.SLOT
        raise Contradiction(f"sends {nbytes} bytes as message {message} without being asked for")

    def _reject(self, record: IncomingMessage, trigger: str) -> None:
        record.placement = Placement.OVERSIZE
        record.move(trigger)
        self._deliver()

    def _deliver(self) -> None:
        while (record := self._messages.get(self.delivered)) and record.state is RecvState.COMPLETE:
            assert record.placement is not None
            record.move("all before delivered")
            self._instructions.append(
                DeliverMessage(self.delivered, record.signature, record.nbytes, record.placement)
            )
            self.delivered += 1
