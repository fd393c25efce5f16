"""Hosts whose peers are datagram flows: the machines of ``wire.datagram`` on the fabric.

The adapter drives the four entry points of ``DatagramFlow`` and nothing else; the machine does not
know that its time is virtual.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from miraccl.sim.fabric.network import PacketFabric
from miraccl.sim.fabric.ports import FabricPacket, OutputPort
from miraccl.wire.datagram.credit import UNSOLICITED_BYTES, Grantor
from miraccl.wire.datagram.flow import DatagramFlow, validate_state
from miraccl.wire.datagram.flow_records import (
    FlowConfig,
    FlowEvent,
    FrameAcknowledged,
    FrameCompleted,
    FrameStarted,
    OutgoingPacket,
    PathChanged,
    PayloadReceived,
)
from miraccl.wire.datagram.packets import Data, Packet, Record
from miraccl.wire.stream import Frame, FrameType, decode_frame, encode_frame

#: Bytes that IPv4 and UDP add to each datagram.
IP_UDP_BYTES = 28


@dataclass(frozen=True)
class ReceivedFrame:
    """A frame that has arrived completely at ``time``."""

    time: int
    stream: int
    payload: bytes


@dataclass(eq=False)
class FlowEnd:
    """One end of a flow.

    ``frames`` are those that arrived; ``acknowledged`` has the times at which the peer had each
    frame sent here, ``changes`` the changes of path states. ``on_frame`` and ``on_acknowledged``
    are called after each.
    """

    number: int
    host: DatagramHost
    peer: int
    flow: DatagramFlow
    frames: list[ReceivedFrame] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    changes: list[tuple[int, PathChanged]] = field(default_factory=list)
    on_frame: Callable[[FlowEnd, ReceivedFrame], None] | None = None
    on_acknowledged: Callable[[FlowEnd, int], None] | None = None
    #: Packets handed to the network.
    sent_packets: int = 0
    #: Reason of the peer for giving up, or None.
    aborted: bytes | None = None
    _sending: dict[int, deque[bytes]] = field(default_factory=dict)
    _released: dict[int, int] = field(default_factory=dict)
    _receiving: dict[int, bytearray] = field(default_factory=dict)
    _timer_at: int = 0

    def submit(self, stream: int, payload: bytes, message: int = 0) -> None:
        """Send one frame; ``payload`` stays unchanged until it is acknowledged."""
        n = len(payload)
        frame = Frame(FrameType.DATA, stream, message, 0, n, 0, n, 0)
        self._sending.setdefault(stream, deque()).append(payload)
        self.flow.submit(stream, encode_frame(frame), n)
        self.host.pump(self)

    def expect(self, nbytes: int) -> None:
        """Post a receive of ``nbytes`` more bytes, for the host's admission."""
        if self.host.admission is not None:
            self.host.admission.want(self.number, nbytes)
            self.host.issue_grants()

    def packet(self, out: OutgoingPacket) -> Packet:
        """Build the packet that the machine has decided to send.

        Raises:
            AssertionError: It names memory of a frame that was acknowledged.
        """
        records: list[Record] = list(out.records)
        for s in out.segments:
            assert s.frame == self._released.get(s.stream, 0), "memory is released or not in flight"
            payload = memoryview(self._sending[s.stream][0])[s.offset : s.offset + s.length]
            records.append(Data(s.stream, s.frame, s.offset, payload, s.header))
        return Packet(out.path, self.flow.config.peer_connection, out.number, tuple(records))

    def process(self, now: int, events: Iterable[FlowEvent]) -> int:
        """Apply events; return the number of new payload bytes."""
        nbytes = 0
        for event in events:
            if isinstance(event, PayloadReceived):
                stop = event.offset + len(event.payload)
                self._receiving[event.stream][event.offset : stop] = event.payload
                nbytes += len(event.payload)
            elif isinstance(event, FrameStarted):
                self._receiving[event.stream] = bytearray(decode_frame(event.header).length)
            elif isinstance(event, FrameCompleted):
                frame = ReceivedFrame(now, event.stream, bytes(self._receiving.pop(event.stream)))
                self.frames.append(frame)
                if self.on_frame is not None:
                    self.on_frame(self, frame)
            elif isinstance(event, FrameAcknowledged):
                self._sending[event.stream].popleft()
                self._released[event.stream] = self._released.get(event.stream, 0) + 1
                self.acknowledged.append(now)
                if self.on_acknowledged is not None:
                    self.on_acknowledged(self, event.stream)
            elif isinstance(event, PathChanged):
                self.changes.append((now, event))
            else:
                self.aborted = event.text
        return nbytes


class Codec(Protocol):
    """Bytes of packets: encoding and protection."""

    def seal(self, packet: Packet) -> bytes:
        """Return the bytes to send."""
        ...

    def open(self, data: bytes) -> Packet | None:
        """Return the packet of received bytes, or None if it is not authentic."""
        ...


class DatagramHost:
    """Host of any number of flows.

    Args:
        fabric: Network; the host attaches itself as ``number``.
        number: Number of the host.
        admission: Grants over all flows of this host, or None.
        codec: Turns packets into bytes and back, or None to pass packets as they are.
        check: Validate the state of a flow after each of its events.

    Attributes:
        clock_offset: Difference in ns between the clock of this host and that of the fabric.
        rejected: Datagrams that were not authentic.
    """

    def __init__(
        self,
        fabric: PacketFabric,
        number: int,
        *,
        admission: Grantor | None = None,
        codec: Codec | None = None,
        check: bool = False,
    ) -> None:
        self.fabric, self.number, self.admission, self.check = fabric, number, admission, check
        self.codec = codec
        self.clock_offset = 0
        self.rejected = 0
        self.ports: list[OutputPort] = fabric.attach(number, self)
        self.ends: dict[int, FlowEnd] = {}
        self._grant_timer = 0

    @property
    def now(self) -> int:
        """Time of this host's clock in ns."""
        return self.fabric.now + self.clock_offset

    # ---- network to machine

    def receive(self, packet: FabricPacket) -> None:
        """Give a datagram to its flow; one that is not authentic is dropped."""
        datagram = self._open(packet)
        if datagram is None:
            self.rejected += 1
            return
        end = self.ends[packet.flow]
        now = self.now
        events = end.flow.receive(now, datagram, path=datagram.path, marked=packet.marked)
        nbytes = end.process(now, events)
        if nbytes and self.admission is not None:
            self.admission.on_received(end.number, nbytes)
            self.issue_grants()
        self.pump(end)

    def _open(self, packet: FabricPacket) -> Packet | None:
        if packet.trimmed or (packet.corrupted and self.codec is None):
            return None
        if self.codec is None:
            datagram: Packet = packet.content
            return datagram
        data = packet.content
        if packet.corrupted:
            changed = bytearray(data)
            at = self.fabric.draws.next()
            changed[at % len(data)] ^= 1 << (at >> 16 & 7)
            data = bytes(changed)
        return self.codec.open(data)

    # ---- machine to network

    def pump(self, end: FlowEnd) -> None:
        """Send what the machine wants to send, and set its timer."""
        now = self.now
        while (out := end.flow.next_packet(now)) is not None:
            end.sent_packets += 1
            port = self.ports[out.path % len(self.ports)]
            packet = end.packet(out)
            port.enqueue(
                FabricPacket(
                    self.number,
                    end.peer,
                    end.number,
                    out.path,
                    out.size + IP_UDP_BYTES,
                    content=packet if self.codec is None else self.codec.seal(packet),
                )
            )
        if self.check:
            validate_state(end.flow)
        due = end.flow.timer(now)
        if due and (not end._timer_at or due < end._timer_at):
            end._timer_at = max(due, now + 1)
            at = end._timer_at - self.clock_offset
            self.fabric.events.schedule(at, self._on_timer, (end, end._timer_at))

    def wake(self, end: FlowEnd) -> None:
        """Let a flow look at its clock, which has moved."""
        end.process(self.now, end.flow.on_timer(self.now))
        end._timer_at = 0
        self.pump(end)
        self.issue_grants()

    def _on_timer(self, argument: tuple[FlowEnd, int]) -> None:
        end, at = argument
        if at != end._timer_at:
            return  # replaced by an earlier one
        end._timer_at = 0
        now = self.now
        due = end.flow.timer(now)
        if due and due <= now:
            end.process(now, end.flow.on_timer(now))
        self.pump(end)

    # ---- admission

    def issue_grants(self) -> None:
        """Send the grants that are due."""
        if self.admission is None:
            return
        now = self.now
        for number, total in self.admission.issue(now):
            self.ends[number].flow.grant(total)
            self.pump(self.ends[number])
        due = self.admission.timer(now)
        if due and (self._grant_timer <= now or due < self._grant_timer):
            self._grant_timer = due
            self.fabric.events.schedule(due - self.clock_offset, self._on_grant_timer, due)

    def _on_grant_timer(self, due: int) -> None:
        if due == self._grant_timer:
            self.issue_grants()


def join(
    a: DatagramHost,
    b: DatagramHost,
    *,
    npaths: int = 1,
    mtu: int = 1472,
    congestion: str = "swift",
    nstreams: int = 16,
    log: list[Any] | None = None,
) -> tuple[FlowEnd, FlowEnd]:
    """Connect two hosts by a flow of ``npaths`` paths; return the end at ``a`` and that at ``b``.

    Path i leaves by port i of each host, or with entropy i by its only one. A host with admission
    limits its peer from the start.
    """
    number = len(a.ends) + len(b.ends) + 1
    while number in a.ends or number in b.ends:
        number += 1
    ends = []
    for host, peer, own, other in ((a, b, 1, 2), (b, a, 2, 1)):
        config = FlowConfig(
            connection=own,
            peer_connection=other,
            npaths=npaths,
            mtu=mtu,
            congestion=congestion,
            nstreams=nstreams,
            granted=UNSOLICITED_BYTES if peer.admission is not None else None,
        )
        end = FlowEnd(number, host, peer.number, DatagramFlow(config, log=log))
        host.ends[number] = end
        if host.admission is not None:
            host.admission.add(number)
        ends.append(end)
    return ends[0], ends[1]
