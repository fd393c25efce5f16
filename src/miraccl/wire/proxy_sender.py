"""Sending half of a link: from the executor's posts to frames in the queues of streams.

A message is SENDING as soon as the peer can hold it: message m needs ``m - credit < nslots``
(credit: messages that the peer's executor has consumed, carried as ``ack`` by every frame), and one
larger than the peer's slots needs a CTS for a large enough buffer; without one, an ANNOUNCE asks
for it. Small messages are sent whole over stream 0, larger ones in segments over whichever stream
has capacity, lowest message first; over several networks of known rates, both over the stream that
is expected to deliver them first. When the kernel has all bytes of all messages up to m,
``PublishTail(m + 1)`` returns the sender's memory.
"""

from __future__ import annotations

from collections import deque

from miraccl.wire.proxy_messages import Contradiction, Impossible, OutgoingMessage
from miraccl.wire.proxy_records import (
    FramesWritten,
    Instruction,
    LinkConfig,
    MessagePosted,
    PublishTail,
    SendFrame,
    StreamMeasured,
)
from miraccl.wire.proxy_states import SendState
from miraccl.wire.stream import (
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    MIN_SEGMENT_BYTES,
    Frame,
    FrameType,
)
from miraccl.wire.verbs.policy import SHARES, piece_bytes, stream_of_piece

# in place of a message number in the queue of a stream
_CONTROL, _CLOSE = -1, -2
#: Payload bytes that a queued frame counts for in the load of a stream with ``spread``.
FRAME_COST = 1024
#: Segments of a message over several networks, if they are not smaller than ``MIN_SEGMENT_BYTES``
#: then. Bounds the ranges that a receiver keeps (``link_layout.MAX_RANGES``).
RAIL_SEGMENTS = 128
#: Bytes left to send beyond which the expected end of a message is not told apart; keeps products
#: with a rate within 63 bits.
MAX_LEFT_BYTES = 1 << 36
#: Factor on the time that a stream is expected to take for a segment, where another one would be
#: sooner: the kernel resends what a slow network loses late. Four networks, one at a tenth of the
#: rate, messages of 16 MiB: 757 instead of 709 Mbit/s with 1, both ways 704 instead of 580.
RAIL_MARGIN = 3


class SendHalf:
    """State of the sending direction.

    Args:
        do: List to which instructions are appended.

    Attributes:
        released, next_post: ``released <= next_post`` may be read by the owner.
        last_ack: Last acknowledgement that was sent.
        closing: Number of CLOSE frames that the kernel does not have yet.
    """

    def __init__(self, config: LinkConfig, do: list[Instruction]) -> None:
        self.config = config
        self.next_post = 0
        self.released = 0
        self.credit = 0
        self.last_ack = 0
        self.closing = 0
        self._sendable = 0  # released <= sendable <= next_post
        self._messages: dict[int, OutgoingMessage] = {}
        self._grants: dict[int, int] = {}
        self._to_send: deque[int] = deque()
        self._control: deque[tuple[FrameType, int, int, int]] = deque()
        self._queued: list[deque[tuple[int, int]]] = [deque() for _ in range(config.nstreams)]
        self._queued_bytes = [0] * config.nstreams
        self._dropped: set[int] = set()
        self._backlog = [0] * config.nstreams  # bytes that the kernel holds
        self._rate = [0] * config.nstreams  # bytes per millisecond, 0: unknown
        self._instructions = do

    @property
    def done(self) -> bool:
        """True if the kernel has everything that was posted."""
        return not self._messages

    @property
    def has_control_frames(self) -> bool:
        """True if a control frame is queued, which carries an acknowledgement as well."""
        return bool(self._control)

    # --- this side

    def on_posted(self, event: MessagePosted) -> None:
        if event.message != self.next_post or event.message - self.released >= self.config.nslots:
            raise Impossible(f"posted message {event.message} instead of {self.next_post}")
        if not 0 <= event.nbytes <= MAX_MESSAGE_BYTES:
            raise Impossible(f"posted {event.nbytes} bytes")
        self._messages[event.message] = OutgoingMessage(event)
        self.next_post += 1
        self._use_credit()

    def queue_control(
        self, kind: FrameType, message: int = 0, signature: int = 0, nbytes: int = 0
    ) -> None:
        """Queue a control frame, ahead of all messages."""
        self._control.append((kind, message, signature, nbytes))

    def on_written(self, event: FramesWritten) -> None:
        """Account for frames that the kernel has; those of a dropped stream are ignored."""
        if event.stream in self._dropped:
            return
        queue = self._queued[event.stream]
        for _ in range(event.frames):
            message, nbytes = queue.popleft()
            self._queued_bytes[event.stream] -= nbytes
            self._backlog[event.stream] += nbytes
            if message < 0:
                self.closing -= message == _CLOSE
                continue
            record = self._messages[message]
            record.unwritten -= 1
            if record.state is SendState.QUEUED and not record.unwritten:
                record.move("all frames written")
        self._release()

    def on_measured(self, event: StreamMeasured) -> None:
        """Replace the estimate of what the kernel holds of a stream, and of its rate."""
        self._backlog[event.stream] = event.backlog
        self._rate[event.stream] = event.rate

    def close(self, ack: int) -> None:
        """Queue the last frame of every stream."""
        self.closing = self.config.nstreams
        for stream in range(self.config.nstreams):
            self._send(Frame(FrameType.CLOSE, stream, self.next_post, ack=ack), _CLOSE)

    def drop(self, stream: int) -> None:
        """Discard the queue of a stream."""
        self.closing -= sum(message == _CLOSE for message, _ in self._queued[stream])
        self._dropped.add(stream)
        self._queued[stream].clear()
        self._queued_bytes[stream] = 0

    # --- frames of the peer

    def on_ack(self, ack: int) -> None:
        """Process an acknowledgement of the peer; credit never decreases."""
        if ack <= self.credit:
            return
        for message in range(self.credit, ack):
            record = self._messages.get(message)
            if record is None:
                if message >= self.next_post:
                    raise Contradiction(f"it consumed {ack} messages of {self.next_post}")
            elif record.state is SendState.WAIT_CTS:
                record.move("consumed unseen")
            elif record.state not in (SendState.QUEUED, SendState.WRITTEN):
                raise Contradiction(f"it consumed message {message} before it was sent")
        self.credit = ack
        self._release()
        self._use_credit()

    def on_cts(self, message: int, room: int) -> None:
        """Process a CTS: the peer has a buffer for a message that exceeds its slots."""
        if message >= self.credit + self.config.nslots:
            raise Contradiction(
                f"it clears message {message} to send after consuming {self.credit}"
            )
        if room <= self.config.send_slot_bytes:
            raise Contradiction(
                f"it clears message {message} to send with {room} bytes of room, less than a slot"
            )
        record = self._messages.get(message)
        if record is None and message < self.next_post:
            return  # already sent
        if record is None or record.state is SendState.WAIT_CREDIT:
            self._grants[message] = room
        elif record.state is SendState.WAIT_CTS and record.nbytes <= room:
            record.move("CTS")
            self._queue_message(message)

    # --- from messages to frames

    def _use_credit(self) -> None:
        limit = min(self.next_post, self.credit + self.config.nslots)
        while self._sendable < limit:
            message = self._sendable
            record = self._messages[message]
            self._sendable += 1
            room = self._grants.pop(message, 0)
            if record.nbytes <= self.config.send_slot_bytes or record.nbytes <= room:
                record.move("credit")
                self._queue_message(message)
            else:
                record.move("credit, no CTS")
                self.queue_control(FrameType.ANNOUNCE, message, record.signature, record.nbytes)

    def _queue_message(self, message: int) -> None:
        """Insert a message into the queue, lowest first; CTS may arrive out of order."""
        position = len(self._to_send)
        while position and self._to_send[position - 1] > message:
            position -= 1
        self._to_send.insert(position, message)

    def _release(self) -> None:
        before = self.released
        while (record := self._messages.get(self.released)) and record.state is SendState.WRITTEN:
            del self._messages[self.released]
            self.released += 1
        if self.released != before:
            self._instructions.append(PublishTail(self.released))

    def pump(self, ack: int) -> None:
        """Queue frames on the streams that have capacity."""
        while self._control or self._to_send:
            if not (self._send_control(ack) if self._control else self._send_segment(ack)):
                return

    def _has_capacity(self, stream: int) -> bool:
        return (
            self._queued_bytes[stream] < self.config.queue_bytes
            and len(self._queued[stream]) < self.config.queue_frames
        )

    def _least_loaded(self) -> int:
        """Return the stream for a piece of data with the least queued."""
        streams = range(self.config.data_streams)
        key = self._load if self.config.spread else self._queued_bytes.__getitem__
        return min(streams, key=key)

    def _control_stream(self) -> int:
        """Return the stream for a control frame: over several networks the one that is expected to
        deliver it first, as it may wait behind data that the kernel holds.
        """
        if self.config.control_streams:
            return min(range(self.config.data_streams, self.config.nstreams), key=self._load)
        if self.config.rails == 1 or not all(self._rate):
            return self._least_loaded()
        loads, first = self._loads(), 0
        for stream in range(1, self.config.nstreams):
            if self._ends_before(loads, HEADER_BYTES, stream, first):
                first = stream
        return first

    def _load(self, stream: int) -> int:
        return self._queued_bytes[stream] + FRAME_COST * len(self._queued[stream])

    def _send_control(self, ack: int) -> bool:
        stream = self._control_stream()
        if len(self._queued[stream]) >= 2 * self.config.queue_frames:
            return False
        kind, message, signature, nbytes = self._control.popleft()
        self._send(Frame(kind, stream, message, signature, nbytes, ack=ack), _CONTROL)
        return True

    def _send_segment(self, ack: int) -> bool:
        message = self._to_send[0]
        record = self._messages[message]
        left = record.nbytes - record.queued
        small = record.nbytes <= MIN_SEGMENT_BYTES
        first = (small and not self.config.spread) or self.config.data_streams == 1
        stream = 0 if first else self._least_loaded()
        length = left if small else min(left, self._segment_bytes(record.nbytes))
        if not small and self.config.policy != SHARES:
            stream, length = self._piece(message, record, left)
        elif self.config.rails > 1 and all(self._rate[: self.config.data_streams]):
            stream = self._earliest(length)
        if stream < 0 or not self._has_capacity(stream):
            return False
        frame = Frame(
            FrameType.DATA,
            stream,
            message,
            record.signature,
            record.nbytes,
            record.queued,
            length,
            ack,
        )
        record.queued += length
        record.unwritten += 1
        if record.queued == record.nbytes:
            record.move("last segment queued")
            self._to_send.popleft()
        self._send(frame, message)
        return True

    def _earliest(self, length: int) -> int:
        """Return the stream with capacity that is expected to deliver ``length`` more bytes first.

        Returns -1 to wait for another stream, which is at work and will end sooner, if this one
        might end after all streams together have sent what is left (``RAIL_MARGIN``).
        """
        count = self.config.data_streams
        loads = self._loads()[:count]
        first, best = -1, -1
        for stream in range(count):
            if first < 0 or self._ends_before(loads, length, stream, first):
                first = stream
            if self._has_capacity(stream) and (
                best < 0 or self._ends_before(loads, length, stream, best)
            ):
                best = stream
        if best == first:
            return best
        left = sum(self._messages[m].nbytes - self._messages[m].queued for m in self._to_send)
        together = (min(left, MAX_LEFT_BYTES) + sum(loads)) * self._rate[best]
        alone = RAIL_MARGIN * (loads[best] + length) * sum(self._rate[:count])
        return best if alone <= together else -1

    def _loads(self) -> list[int]:
        """Return the bytes of each stream that are queued, or held by the kernel."""
        return [q + b for q, b in zip(self._queued_bytes, self._backlog, strict=True)]

    def _ends_before(self, loads: list[int], length: int, a: int, b: int) -> bool:
        return (loads[a] + length) * self._rate[b] < (loads[b] + length) * self._rate[a]

    def _piece(self, message: int, record: OutgoingMessage, left: int) -> tuple[int, int]:
        """Return stream and size of the next piece of a message, by the policy."""
        policy, nstreams = self.config.policy, self.config.data_streams
        piece = piece_bytes(
            policy, record.nbytes, nstreams, MIN_SEGMENT_BYTES, self.config.segment_bytes
        )
        stream = stream_of_piece(policy, message, record.queued, piece, nstreams)
        return (stream if stream >= 0 else self._least_loaded()), min(left, piece)

    def _segment_bytes(self, nbytes: int) -> int:
        """Return an equal share per stream, between the smallest and largest segment, in whole
        pages; smaller shares over several networks.
        """
        shares = self.config.data_streams if self.config.rails == 1 else RAIL_SEGMENTS
        share = -(-nbytes // shares)
        return min(self.config.segment_bytes, max(MIN_SEGMENT_BYTES, -(-share // 4096) * 4096))

    def _send(self, frame: Frame, message: int) -> None:
        self.last_ack = frame.ack
        self._queued[frame.stream].append((message, frame.length))
        self._queued_bytes[frame.stream] += frame.length
        self._instructions.append(SendFrame(frame))
