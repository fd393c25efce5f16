"""Receiving half of a link: places frames in memory and delivers messages in order.

The first frame of a message determines its placement: the descriptor line if it fits, the posted
receive buffer if that is large enough, else its slot. Frames are not trusted: message number, size
and segment are checked against what this side has granted.
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
    """State of the receiving direction; ``tail <= delivered`` may be read by the owner.

    Args:
        do: List to which instructions are appended.
    """

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
        """Let a message land in a receive buffer of ``room`` bytes; return True if the peer needs a
        CTS.
        """
        record = self._messages.get(message)
        if (
            message in self._posted
            or not self.delivered <= message < self.tail + self.config.nslots
        ):
            return False
        if record and record.state is not RecvState.ANNOUNCED:
            return False  # too late: its placement is fixed
        self._posted[message] = room
        if record and room < record.nbytes:
            self._reject(record, "buffer too small")
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

    # --- frames of the peer

    def on_announce(self, frame: Frame) -> None:
        message = frame.message
        if frame.nbytes <= self.config.recv_slot_bytes:
            raise Contradiction(f"it announces {frame.nbytes} bytes, which fit into a slot")
        known = self._messages.get(message)
        if known and (known.state is RecvState.ANNOUNCED or known.nbytes != frame.nbytes):
            raise Contradiction(f"it announces message {message} again")
        if known or message < self.tail:
            return  # its CTS crossed it, and the data overtook it on another stream
        self._check_window(message)
        record = self._messages[message] = IncomingMessage(frame)
        room = self._posted.get(message)
        if room is not None and room < frame.nbytes:
            return self._reject(record, "announce, buffer too small")
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
            raise Contradiction(f"it sends message {message} again")
        elif (record.signature, record.nbytes) != (frame.signature, frame.nbytes):
            raise Contradiction(f"message {message} changes on its way")
        if record.placement is None:
            record.placement = self._place(message, frame.nbytes)
        record.move("segment")
        record.claim(frame.offset, frame.offset + frame.length)
        if frame.length:
            self._arriving[stream] = (message, frame.length)
            self._instructions.append(
                ReceivePayload(stream, message, record.placement, frame.offset, frame.length)
            )
        else:
            record.move("all placed")
            self._deliver()

    # --- placement

    def _check_window(self, message: int) -> None:
        if not self.tail <= message < self.tail + self.config.nslots:
            raise Contradiction(
                f"it sends message {message}; allowed are {self.tail} to "
                f"{self.tail + self.config.nslots - 1}"
            )

    def _place(self, message: int, nbytes: int) -> Placement:
        if nbytes <= self.config.inline_bytes:
            return Placement.INLINE
        if nbytes <= self._posted.get(message, -1):
            return Placement.POSTED
        if nbytes <= self.config.recv_slot_bytes:
            return Placement.SLOT
        raise Contradiction(
            f"it sends {nbytes} bytes as message {message} without a posted receive"
        )

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
