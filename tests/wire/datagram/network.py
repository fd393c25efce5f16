"""Two flows joined by virtual paths with rate, delay, queue, loss and an adversary."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from miraccl.wire.datagram.flow import DatagramFlow, validate_state
from miraccl.wire.datagram.flow_records import (
    FlowConfig,
    FrameAcknowledged,
    FrameCompleted,
    FrameStarted,
    OutgoingPacket,
    PathChanged,
    PayloadReceived,
)
from miraccl.wire.datagram.packets import Data, Packet, decode, encode
from miraccl.wire.stream import Frame, FrameType, decode_frame, encode_frame

US, MS, SECOND = 1_000, 1_000_000, 1_000_000_000
#: Bytes that IPv4 and UDP add to each packet on the wire.
IP_UDP_BYTES = 28


@dataclass(kw_only=True)
class PathModel:
    """One direction pair of a path: bits per second, one-way delay in ns, queue in bytes, loss."""

    rate: float = 500e6
    delay: int = 100 * US
    queue: int = 300_000
    loss: float = 0.0
    jitter: int = 0
    duplicate: float = 0.0
    corrupt: float = 0.0
    #: Largest UDP payload that gets through, until a time in ns.
    mtu: int = 1 << 16
    mtu_until: int = 1 << 62
    #: [start, stop) in ns during which nothing is delivered, and the sides whose packets are
    #: dropped.
    dead: tuple[int, int] = (0, 0)
    dead_sides: frozenset[int] = frozenset((0, 1))


@dataclass
class Side:
    """One end: its flow, the frames that it sends, and the frames that it received."""

    flow: DatagramFlow
    sending: dict[int, list[bytes]] = field(default_factory=dict)
    receiving: dict[int, bytearray] = field(default_factory=dict)
    received: list[tuple[int, int, bytes]] = field(default_factory=list)
    changes: list[tuple[int, PathChanged]] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    acknowledged: int = 0


class Network:
    """Event loop over two flows. ``run`` returns the virtual time in ns."""

    def __init__(
        self,
        paths: list[PathModel],
        *,
        seed: int = 0,
        congestion: str = "swift",
        mtu: int = 1472,
        nstreams: int = 16,
        granted: int | None = None,
        check: bool = False,
        log: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.paths, self.check = paths, check
        self.now = 0
        self.sent = [0, 0]
        self.dropped = [0, 0]
        self.sides: list[Side] = []
        for own, peer in ((1, 2), (2, 1)):
            config = FlowConfig(
                connection=own,
                peer_connection=peer,
                npaths=len(paths),
                mtu=mtu,
                congestion=congestion,
                nstreams=nstreams,
                granted=granted,
            )
            self.sides.append(Side(DatagramFlow(config, log=[] if log else None)))
        self._events: list[tuple[int, int, str, Any]] = []
        self._sequence = 0
        self._busy: dict[tuple[int, int], int] = {}
        self.on_receive: Callable[[int, int], None] = lambda side, now: None

    def submit(self, side: int, stream: int, payload: bytes, message: int = 0) -> None:
        """Queue one frame."""
        n = len(payload)
        frame = Frame(FrameType.DATA, stream, message, 0, n, 0, n, 0)
        self.sides[side].sending.setdefault(stream, []).append(payload)
        self.sides[side].flow.submit(stream, encode_frame(frame), n)

    def run(self, limit: int = 60 * SECOND) -> int:
        """Run until both flows are idle, or fail after ``limit`` virtual nanoseconds."""
        for side in (0, 1):
            self._pump(side)
        while not all(s.flow.idle for s in self.sides):
            assert self._events, "deadlock: no event is pending"
            self.now, _, kind, what = heapq.heappop(self._events)
            assert self.now < limit, f"not finished after {limit / SECOND:g} virtual seconds"
            if kind == "timer":
                self._on_timer(what)
            else:
                self._on_packet(*what)
        return self.now

    def _push(self, time: int, kind: str, what: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time, self._sequence, kind, what))

    def _pump(self, side: int) -> None:
        flow = self.sides[side].flow
        while (out := flow.next_packet(self.now)) is not None:
            self._transmit(side, out)
        if self.check:
            validate_state(flow)
        due = flow.timer(self.now)
        if due:
            self._push(max(due, self.now + 1), "timer", side)

    def _on_timer(self, side: int) -> None:
        flow = self.sides[side].flow
        due = flow.timer(self.now)
        if due and due <= self.now:
            self._note(side, flow.on_timer(self.now))
            self._pump(side)

    def _transmit(self, side: int, out: OutgoingPacket) -> None:
        me = self.sides[side]
        records: list[Any] = list(out.records)
        for s in out.segments:
            payload = memoryview(me.sending[s.stream][0])[s.offset : s.offset + s.length]
            records.append(Data(s.stream, s.frame, s.offset, payload, s.header))
        peer = me.flow.config.peer_connection
        raw = encode(Packet(out.path, peer, out.number, tuple(records)))
        assert len(raw) + 16 == out.size <= me.flow.config.mtu
        self.sent[side] += 1
        model, draw = self.paths[out.path], self.random.random
        dead = model.dead[0] <= self.now < model.dead[1] and side in model.dead_sides
        vanishes = out.size > model.mtu and self.now < model.mtu_until
        if dead or vanishes or draw() < model.loss:
            self.dropped[side] += 1
            return
        key = side, out.path
        start = max(self.now, self._busy.get(key, 0))
        if (start - self.now) * model.rate / 8e9 + out.size > model.queue:
            self.dropped[side] += 1
            return
        self._busy[key] = start + int((out.size + IP_UDP_BYTES) * 8e9 / model.rate)
        for _ in range(2 if draw() < model.duplicate else 1):
            data = bytearray(raw)
            if draw() < model.corrupt:  # the tag check drops it
                self.dropped[side] += 1
                continue
            late = self.random.randrange(model.jitter) if model.jitter else 0
            self._push(self._busy[key] + model.delay + late, "packet", (1 - side, bytes(data)))

    def _on_packet(self, side: int, raw: bytes) -> None:
        packet = decode(raw)
        flow = self.sides[side].flow
        self._note(side, flow.receive(self.now, packet, path=packet.path))
        self.on_receive(side, self.now)
        self._pump(side)

    def _note(self, side: int, events: list[Any]) -> None:
        me = self.sides[side]
        for event in events:
            if isinstance(event, FrameStarted):
                me.receiving[event.stream] = bytearray(decode_frame(event.header).length)
                me.arrivals.append(self.now)
            elif isinstance(event, PayloadReceived):
                stop = event.offset + len(event.payload)
                me.receiving[event.stream][event.offset : stop] = event.payload
                me.arrivals.append(self.now)
            elif isinstance(event, FrameCompleted):
                data = bytes(me.receiving.pop(event.stream))
                me.received.append((self.now, event.stream, data))
            elif isinstance(event, FrameAcknowledged):
                me.sending[event.stream].pop(0)
                me.acknowledged += 1
            elif isinstance(event, PathChanged):
                me.changes.append((self.now, event))

    def goodput_share(self, nbytes: int) -> float:
        """Payload rate as a share of what the paths can carry with their loss and overhead."""
        mtu = self.sides[0].flow.config.mtu
        payload = mtu - 16 - 12 - 16
        possible = sum(p.rate * (1 - p.loss) for p in self.paths) * payload / (mtu + IP_UDP_BYTES)
        return nbytes * 8 * SECOND / self.now / possible
