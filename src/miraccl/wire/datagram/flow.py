"""Reliable transfer of frames to one peer over several paths.

The owner submits frames (a 48-byte header and a payload that stays in its memory) to streams; the
peer's owner sees the header first and decides where the payload lands, then gets every byte once,
by offset. One frame per stream is in flight, so frames of one stream arrive in order and need no
buffer.

Four entry points, all with the current time: ``receive`` (data in), ``next_packet`` (data out),
``on_timer`` with ``timer``, and ``submit``.  Everything returned or reported is a record.

A frame stays the sender's memory until ``FrameAcknowledged``: any path may still need to resend it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from miraccl.errors import ProtocolError
from miraccl.wire.datagram.control import controller
from miraccl.wire.datagram.flow_records import (
    FlowConfig,
    FlowEvent,
    FrameAcknowledged,
    FrameCompleted,
    FrameStarted,
    OutgoingPacket,
    PathChanged,
    PayloadReceived,
    PeerAborted,
    Segment,
)
from miraccl.wire.datagram.packets import (
    ABORT_BYTES,
    DATA_BYTES,
    HEADER_BYTES,
    PROBE_BYTES,
    TAG_BYTES,
    Abort,
    Ack,
    Data,
    Grant,
    Packet,
    Probe,
)
from miraccl.wire.datagram.path import FlowPath, SentPacket, Span
from miraccl.wire.datagram.path_states import PathState
from miraccl.wire.datagram.ranges import RangeSet
from miraccl.wire.stream import HEADER_BYTES as FRAME_BYTES
from miraccl.wire.stream import decode_frame

#: Bytes of an acknowledgement record with ``n`` ranges: 23 + 8 n.
_ACK_BYTES, _RANGE_BYTES, _GRANT_BYTES = 23, 8, 9
#: Ranges in an acknowledgement that shares its packet with data.
_SHORT_ACK_RANGES = 4
#: Packets of each path that carry the header of a frame before it is acknowledged; all that are
#: sent again carry it. A header in every packet of the first round trip takes 1.4 % of a path of
#: 500 Mbit/s with frames of 64 KiB.
HEADED_PACKETS = 4
#: A packet carries at most this many data records, so that small frames share packets.
_MAX_SEGMENTS = 8


@dataclass(slots=True)
class OutgoingFrame:
    """A frame to send: what was sent once, what must be resent, what the peer has."""

    number: int
    header: bytes
    length: int
    sent: int = 0
    header_sent: bool = False
    header_acked: bool = False
    acked: RangeSet = field(default_factory=RangeSet)
    resend: RangeSet = field(default_factory=RangeSet)
    resend_header: bool = False
    #: Packets with the header by path, four bits each.
    headed: int = 0

    @property
    def has_new(self) -> bool:
        """True if some of it was never sent."""
        return not self.header_sent or self.sent < self.length

    @property
    def has_resend(self) -> bool:
        """True if some of it was lost and must be sent again."""
        return self.resend_header or bool(self.resend)

    def header_for(self, path: int, again: bool) -> bytes:
        """Return the header if a packet on ``path`` is to carry it, or nothing."""
        enough = self.headed >> 4 * path & 15 >= HEADED_PACKETS
        return b"" if self.header_acked or (enough and not again) else self.header

    def count_header(self, path: int) -> None:
        """Count a packet with the header."""
        self.header_sent, self.resend_header = True, False
        if self.headed >> 4 * path & 15 < HEADED_PACKETS:
            self.headed += 1 << 4 * path

    @property
    def done(self) -> bool:
        """True if the peer has acknowledged all of it."""
        return self.header_acked and self.acked.total == self.length


@dataclass(slots=True)
class OutgoingStream:
    """Frames of one stream in order; the first is in flight."""

    next_number: int = 0
    frames: deque[OutgoingFrame] = field(default_factory=deque)


@dataclass(slots=True)
class IncomingStream:
    """The frame that arrives on one stream; ``number`` is the next or current frame."""

    number: int = 0
    length: int = -1
    received: RangeSet = field(default_factory=RangeSet)


class DatagramFlow:
    """State of the transfer to and from one peer.

    Attributes without underscore may be read by the owner.  ``log``, if given, records every call
    with its arguments, so that a run can be replayed.
    """

    def __init__(self, config: FlowConfig, *, log: list[Any] | None = None) -> None:
        self.config = config
        control = controller(config.congestion)
        self.paths = [
            FlowPath(i, control, config.mtu, config.max_in_flight) for i in range(config.npaths)
        ]
        self.granted = config.granted
        self.new_bytes = 0
        self.rejected = 0
        self._outgoing = [OutgoingStream() for _ in range(config.nstreams)]
        self._incoming = [IncomingStream() for _ in range(config.nstreams)]
        self._turn = 0
        self._grant_total = 0
        self._grant_due = False
        self._arrived_on = 0
        self._log = log

    # ---- frames

    def submit(self, stream: int, header: bytes, length: int) -> None:
        """Queue a frame of ``length`` payload bytes on a stream."""
        if self._log is not None:
            self._log.append(("submit", stream, header, length))
        queue = self._outgoing[stream]
        queue.frames.append(OutgoingFrame(queue.next_number, header, length))
        queue.next_number += 1

    def validate_paths(self, now: int) -> None:
        """Carry probes only on each path until one of them is acknowledged; called once, first."""
        if self._log is not None:
            self._log.append(("validate_paths", now))
        for path in self.paths:
            path.validate(now)

    def grant(self, total: int) -> None:
        """Admit ``total`` bytes of new data from the peer since the start."""
        if self._log is not None:
            self._log.append(("grant", total))
        if total > self._grant_total:
            self._grant_total, self._grant_due = total, True

    def queued(self, stream: int) -> int:
        """Number of frames of a stream that the peer has not acknowledged."""
        return len(self._outgoing[stream].frames)

    @property
    def idle(self) -> bool:
        """True if the peer has acknowledged every frame."""
        return not any(s.frames for s in self._outgoing)

    # ---- data in

    def receive(
        self, now: int, packet: Packet, *, path: int, marked: bool = False
    ) -> list[FlowEvent]:
        """Process an authenticated packet that arrived on ``path``; return what it means.

        A packet that cannot be placed yet (a frame whose header is still missing) is dropped
        without acknowledgement.

        Raises:
            ProtocolError: The peer violates the protocol; the connection must end.
        """
        if self._log is not None:
            self._log.append(("receive", now, packet, path, marked))
        if packet.connection != self.config.connection or packet.path >= len(self.paths):
            raise ProtocolError(f"packet of connection {packet.connection}, path {packet.path}")
        received = self.paths[packet.path].received
        self._arrived_on = path
        if not received.is_new(packet.number):
            received.duplicates += 1
            received.due, received.repeats = now, 2
            received.pending = max(1, received.pending)
            return []
        data = [r for r in packet.records if isinstance(r, Data)]
        if not self._placeable(data):
            self.rejected += 1
            return []
        events: list[FlowEvent] = []
        for record in packet.records:
            if isinstance(record, Ack):
                events += self._on_ack(now, record)
            elif isinstance(record, Grant) and self.granted is not None:
                self.granted = max(self.granted, record.total)
            elif isinstance(record, Abort):
                events.append(PeerAborted(record.text))
        completed = False
        for record in data:
            found = self._on_data(record)
            completed |= any(isinstance(e, FrameCompleted) for e in found)
            events += found
        received.add(
            now,
            packet.number,
            eliciting=packet.ack_eliciting,
            marked=marked,
            urgent=completed or any(isinstance(r, Probe) for r in packet.records),
        )
        return events

    def _placeable(self, data: Iterable[Data]) -> bool:
        headed: set[int] = set()
        for record in data:
            if record.stream >= len(self._incoming):
                raise ProtocolError(f"data of stream {record.stream} of {len(self._incoming)}")
            stream = self._incoming[record.stream]
            ahead = (record.frame - stream.number) & 0xFFFFFFFF
            if ahead == 0 and record.header:
                headed.add(record.stream)
            elif ahead == 0 and stream.length < 0 and record.stream not in headed:
                return False
            elif 0 < ahead < 1 << 31:
                raise ProtocolError(f"stream {record.stream}: frame {record.frame} too early")
        return True

    def _on_data(self, record: Data) -> list[FlowEvent]:
        stream = self._incoming[record.stream]
        if record.frame != stream.number & 0xFFFFFFFF:
            return []  # an old frame, already complete
        events: list[FlowEvent] = []
        if stream.length < 0:
            stream.length = decode_frame(record.header).length
            events.append(FrameStarted(record.stream, record.header))
        stop = record.offset + len(record.payload)
        if stop > stream.length:
            raise ProtocolError(
                f"stream {record.stream}: bytes [{record.offset}, {stop}) of a frame "
                f"of {stream.length}"
            )
        payload = memoryview(record.payload)
        for low, high in list(stream.received.missing(record.offset, stop)):
            part = payload[low - record.offset : high - record.offset]
            events.append(PayloadReceived(record.stream, low, part))
        stream.received.add(record.offset, stop)
        if stream.received.total == stream.length:
            stream.number += 1
            stream.length, stream.received = -1, RangeSet()
            events.append(FrameCompleted(record.stream))
        return events

    def _on_ack(self, now: int, ack: Ack) -> list[FlowEvent]:
        if ack.path >= len(self.paths):
            raise ProtocolError(f"acknowledgement of path {ack.path} of {len(self.paths)}")
        path = self.paths[ack.path]
        if ack.ranges[0][1] > path.next_number:
            raise ProtocolError(
                f"path {ack.path}: packet {ack.ranges[0][1] - 1} acknowledged, "
                f"{path.next_number} were sent"
            )
        before = path.state
        acked, lost = path.on_ack(now, ack)
        events: list[FlowEvent] = self._changed(path, before)
        for packet in acked:
            for span in packet.spans:
                events += self._on_span_acked(span)
        self._requeue(lost)
        return events

    def _on_span_acked(self, span: Span) -> list[FlowEvent]:
        queue = self._outgoing[span.stream].frames
        if not queue or queue[0].number != span.frame:
            return []
        frame = queue[0]
        frame.acked.add(span.start, span.stop)
        frame.resend.remove(span.start, span.stop)
        if span.headed:
            frame.header_acked, frame.resend_header = True, False
        if not frame.done:
            return []
        queue.popleft()
        return [FrameAcknowledged(span.stream)]

    def _requeue(self, packets: Iterable[SentPacket]) -> None:
        """Queue the unacknowledged bytes of lost or suspect packets again."""
        for packet in packets:
            if packet.grant:
                self._grant_due = True
            if packet.requeued:
                continue
            packet.requeued = True
            for span in packet.spans:
                queue = self._outgoing[span.stream].frames
                if not queue or queue[0].number != span.frame:
                    continue
                frame = queue[0]
                for low, high in list(frame.acked.missing(span.start, span.stop)):
                    frame.resend.add(low, high)
                if span.headed and not frame.header_acked:
                    frame.resend_header = True

    @staticmethod
    def _changed(path: FlowPath, before: PathState) -> list[FlowEvent]:
        if path.state is before:
            return []
        return [PathChanged(path.index, before.value, path.state.value)]

    # ---- timers

    def timer(self, now: int) -> int:
        """Time at which ``on_timer`` or ``next_packet`` has something to do; 0 for none."""
        times = [t for path in self.paths if (t := path.timer())]
        times += [p.received.due for p in self.paths if p.received.pending]
        times += [p.mtu_probe_at for p in self.paths if p.usable and p.mtu < p.full_mtu]
        if self._has_data() or self._grant_due:
            times += [p.release_time(now) for p in self.paths if p.usable and p.has_room(p.mtu)]
        return max(now, min(times)) if times else 0

    def on_timer(self, now: int) -> list[FlowEvent]:
        """Handle expired timers of all paths."""
        if self._log is not None:
            self._log.append(("on_timer", now))
        events: list[FlowEvent] = []
        for path in self.paths:
            due = path.timer()
            if not due or now < due:
                continue
            before = path.state
            self._requeue(path.on_timer(now))
            if path.state is PathState.SUSPECT and any(p.usable for p in self.paths):
                # sendable on other paths at once; a late acknowledgement still counts for this path
                self._requeue(path.sent.values())
            events += self._changed(path, before)
        return events

    def on_unreachable(self, path: int) -> list[FlowEvent]:
        """Note an ICMP error on a path."""
        before = self.paths[path].state
        self.paths[path].on_unreachable()
        return self._changed(self.paths[path], before)

    # ---- data out

    def next_packet(self, now: int) -> OutgoingPacket | None:
        """Return the next packet to send now, or None; call until None."""
        if self._log is not None:
            self._log.append(("next_packet", now))
        for path in self.paths:
            if path.probes:
                return self._probe(now, path)
            if path.wants_mtu_probe(now):
                return self._mtu_probe(now, path)
        if self._has_data() and (chosen := self._choose_path(now)) is not None:
            return self._data_packet(now, chosen)
        if self._grant_due and (chosen := self._choose_path(now)) is not None:
            return self._grant_packet(now, chosen)
        due = [p for p in self.paths if p.received.pending and p.received.due <= now]
        if due:
            return self._ack_packet(now)
        return None

    def abort(self, text: bytes) -> list[OutgoingPacket]:
        """Return one packet per path with the reason why this side gives up."""
        record = Abort(text)
        size = HEADER_BYTES + TAG_BYTES + ABORT_BYTES + len(text)
        return [
            OutgoingPacket(path.index, path.take_number(), size, (record,), ())
            for path in self.paths
        ]

    def _has_data(self) -> bool:
        return any(
            queue.frames and (queue.frames[0].has_resend or self._may_start(queue.frames[0]))
            for queue in self._outgoing
        )

    def _may_start(self, frame: OutgoingFrame) -> bool:
        """Return True if the frame has something new that the receiver admits.

        A header needs no grant: it contains the number of bytes that wait for one.
        """
        if not frame.has_new:
            return False
        if not frame.header_sent or self.granted is None:
            return True
        return self.new_bytes < self.granted

    def _choose_path(self, now: int) -> FlowPath | None:
        """Return the open path with room and the least expected finish time."""
        best: FlowPath | None = None
        for path in self.paths:
            if not path.usable or not path.has_room(path.mtu) or path.release_time(now) > now:
                continue
            if best is None or path.expected_finish(path.mtu) < best.expected_finish(best.mtu):
                best = path
        return best

    def _data_packet(self, now: int, path: FlowPath) -> OutgoingPacket:
        records = self._control_records(now, path, _SHORT_ACK_RANGES)
        room = path.mtu - HEADER_BYTES - TAG_BYTES - _size_of(records)
        segments, spans = self._fill(room, path.index)
        limited = not self._has_data()
        return self._emit(now, path, records, segments, spans, limited=limited)

    def _probe(self, now: int, path: FlowPath) -> OutgoingPacket:
        """A packet that must be acknowledged whatever the window: oldest data in flight, or a
        probe if another path can carry the data.

        Data in a probe of a dying path would wait for its next timeout, which doubles.
        """
        path.probes = max(0, path.probes - 1)
        others = any(p.usable for p in self.paths if p is not path)
        alive = path.state in (PathState.OPEN, PathState.SUSPECT) and not others
        if alive and not any(q.frames and q.frames[0].has_resend for q in self._outgoing):
            oldest = next((p for p in path.sent.values() if not p.requeued), None)
            if oldest is not None:
                self._requeue([oldest])
        records = self._control_records(now, path, _SHORT_ACK_RANGES)
        room = path.mtu - HEADER_BYTES - TAG_BYTES - _size_of(records)
        segments, spans = self._fill(room, path.index) if alive else ((), [])
        if not segments:
            records += (Probe(0, path.index),)
        return self._emit(now, path, records, segments, spans, limited=True, probe=True)

    def _grant_packet(self, now: int, path: FlowPath) -> OutgoingPacket:
        """Build a packet for a grant alone; the probe in it asks for an acknowledgement."""
        records = self._control_records(now, path, _SHORT_ACK_RANGES)
        records += (Probe(0, path.index),)
        return self._emit(now, path, records, (), [], limited=True, probe=True)

    def _mtu_probe(self, now: int, path: FlowPath) -> OutgoingPacket:
        """Build a packet of the full size of a path whose packets have shrunk."""
        path.take_mtu_probe(now)
        padding = path.full_mtu - HEADER_BYTES - TAG_BYTES - PROBE_BYTES
        records = (Probe(padding, path.index),)
        return self._emit(now, path, records, (), [], limited=True, probe=True)

    def _ack_packet(self, now: int) -> OutgoingPacket:
        path = self._reply_path()
        ranges = (path.mtu - HEADER_BYTES - TAG_BYTES) // (len(self.paths) * _RANGE_BYTES) - 4
        records = self._control_records(now, path, max(1, ranges))
        size = HEADER_BYTES + TAG_BYTES + _size_of(records)
        return OutgoingPacket(path.index, path.take_number(), size, records, ())

    def _reply_path(self) -> FlowPath:
        """Return the path on which the last packet arrived, unless it is known to fail."""
        path = self.paths[self._arrived_on]
        if path.state in (PathState.OPEN, PathState.PROBING):
            return path
        return next((p for p in self.paths if p.usable), path)

    def _control_records(
        self, now: int, on: FlowPath, ranges: int
    ) -> tuple[Ack | Grant | Probe, ...]:
        """Acknowledgements that are due, repeated on other paths in case this one fails, and
        grants.
        """
        records: list[Ack | Grant | Probe] = []
        for path in self.paths:
            received = path.received
            if not received.pending and not (path is not on and received.repeats):
                continue
            ack = received.record(path.index, now)
            records.append(Ack(ack.path, ack.ranges[:ranges], ack.delay_us, ack.ce, ack.duplicates))
            received.pending = 0
            if path is not on:
                received.repeats = max(0, received.repeats - 1)
        if self._grant_due:
            records.append(Grant(self._grant_total))
        return tuple(records)

    def _fill(self, room: int, path: int) -> tuple[tuple[Segment, ...], list[Span]]:
        """Choose data for a packet on a path: lost bytes first, then new ones, streams in turn."""
        segments: list[Segment] = []
        spans: list[Span] = []
        n = len(self._outgoing)
        order = [(self._turn + i) % n for i in range(n)]
        for again in (True, False):
            for stream in order:
                queue = self._outgoing[stream].frames
                while queue and len(segments) < _MAX_SEGMENTS:
                    segment = self._segment(stream, queue[0], room, path, again)
                    if segment is None:
                        break
                    used = DATA_BYTES + len(segment.header) + segment.length
                    room -= used
                    segments.append(segment)
                    stop = segment.offset + segment.length
                    headed = bool(segment.header)
                    spans.append(Span(stream, segment.frame, segment.offset, stop, headed))
                    self._turn = stream if queue[0].has_new else (stream + 1) % n
        return tuple(segments), spans

    def _segment(
        self, stream: int, frame: OutgoingFrame, room: int, path: int, again: bool
    ) -> Segment | None:
        if not (frame.has_resend if again else self._may_start(frame)):
            return None
        header = frame.header_for(path, again)
        space = room - DATA_BYTES - len(header)
        if space < 0 or (frame.length and space < min(64, frame.length)):
            return None
        if again and frame.resend:
            start, stop = frame.resend.first
            stop = min(stop, start + space)
            frame.resend.remove(start, stop)
        elif again:
            start = stop = 0
        else:
            start = frame.sent
            stop = min(frame.length, start + space)
            if self.granted is not None:
                stop = min(stop, start + max(0, self.granted - self.new_bytes))
            self.new_bytes += stop - start
            frame.sent = stop
        if header:
            frame.count_header(path)
        return Segment(stream, frame.number, start, stop - start, header)

    def _emit(
        self,
        now: int,
        path: FlowPath,
        records: tuple[Ack | Grant | Probe, ...],
        segments: tuple[Segment, ...],
        spans: list[Span],
        *,
        limited: bool,
        probe: bool = False,
    ) -> OutgoingPacket:
        data = sum(DATA_BYTES + len(s.header) + s.length for s in segments)
        size = HEADER_BYTES + TAG_BYTES + _size_of(records) + data
        grant = any(isinstance(r, Grant) for r in records)
        if grant:
            self._grant_due = False
        path.on_sent(now, size, spans, probe=probe, grant=grant, limited=limited)
        return OutgoingPacket(path.index, path.take_number(), size, records, segments)


def _size_of(records: Iterable[Ack | Grant | Probe]) -> int:
    size = 0
    for record in records:
        if isinstance(record, Ack):
            size += _ACK_BYTES + _RANGE_BYTES * len(record.ranges)
        elif isinstance(record, Grant):
            size += _GRANT_BYTES
        else:
            size += PROBE_BYTES + record.padding
    return size


def validate_state(flow: DatagramFlow) -> None:
    """Raise ``AssertionError`` unless the accounting of a flow is consistent; for tests."""
    for path in flow.paths:
        assert path.in_flight == sum(p.size for p in path.sent.values()) >= 0
        assert len(path.received.numbers) <= 32
        assert all(n < path.next_number for n in path.sent)
    for queue in flow._outgoing:
        for i, frame in enumerate(queue.frames):
            assert i == 0 or not (frame.sent or frame.header_sent), "one frame in flight per stream"
            assert frame.sent <= frame.length
            assert not any(True for low, high in frame.resend if high > frame.sent)
            assert not frame.done
    if flow.granted is not None:
        assert flow.new_bytes <= flow.granted


def payload_bytes(mtu: int) -> int:
    """Return the payload of a full packet at ``mtu`` with its frame header."""
    return mtu - HEADER_BYTES - DATA_BYTES - FRAME_BYTES - TAG_BYTES
