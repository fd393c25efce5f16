"""The compiled flow against its specification: the same calls give the same decisions."""

from __future__ import annotations

import ctypes
import random
import struct
from typing import Any

import pytest

from miraccl import native
from miraccl.proxy.flow_memory import FlowMemory
from miraccl.proxy.kernels import flow_layout as layout
from miraccl.proxy.kernels import link_layout
from miraccl.proxy.link_memory import write_link
from miraccl.transport.fifo import FifoMemory, PrivateMemory, memory_at
from miraccl.wire.datagram import flow_records as rec
from miraccl.wire.datagram.control import CONTROLLERS
from miraccl.wire.datagram.credit import UNSOLICITED_BYTES, Grantor
from miraccl.wire.datagram.flow import DatagramFlow
from miraccl.wire.datagram.packets import Abort, Ack, Data, Grant, Packet, Probe, encode
from miraccl.wire.proxy_records import LinkConfig
from tests.wire.datagram.network import MS, SECOND, US, Network, PathModel

KERNEL = "miraccl.proxy.kernels.flow_events"
HEADER = 16
PATH_WORDS = (
    ("in_flight", layout.PATH_IN_FLIGHT),
    ("next_number", layout.PATH_NEXT_NUMBER),
    ("largest_acked", layout.PATH_LARGEST_ACKED),
    ("timeouts", layout.PATH_TIMEOUTS),
    ("probes", layout.PATH_PROBES),
    ("lost_packets", layout.PATH_LOST_PACKETS),
    ("spurious", layout.PATH_SPURIOUS),
    ("acked_bytes", layout.PATH_ACKED_BYTES),
    ("_release", layout.PATH_RELEASE),
    ("_loss_time", layout.PATH_LOSS_TIME),
    ("_threshold", layout.PATH_THRESHOLD),
)


class CompiledFlow:
    """A compiled flow without sockets, whose calls are those of ``DatagramFlow``."""

    def __init__(self, config: rec.FlowConfig) -> None:
        links = link_layout.link_bytes(config.nstreams)
        self.link, self.engine = PrivateMemory(links), PrivateMemory(link_layout.ENGINE_BYTES)
        write_link(
            self.link.address,
            LinkConfig(nstreams=config.nstreams, send_slot_bytes=4096, recv_slot_bytes=4096),
        )
        self.fifo = FifoMemory(4096)
        for offset, value in (
            (link_layout.LINK_ENGINE, self.engine.address),
            (link_layout.LINK_SEND_TAIL, self.fifo.address + 1024),
        ):
            memory_at(self.link.address + offset, 8)[:] = struct.pack("<q", value)
        library = native.library(KERNEL)
        self.memory = FlowMemory(config, self.link.address, library.address)
        self.log, self.out = PrivateMemory(1 << 20), PrivateMemory(layout.OUT_BYTES)
        self.buffer = PrivateMemory(1 << 17)
        self.memory.store(layout.FLOW_LOG, self.log.address)
        self._library = library

    def call(self, name: str, *arguments: int) -> int:
        kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * (1 + len(arguments)))
        function = kind(self._library.address(native.PREFIX + name))
        return int(function(self.memory.address, *arguments))

    def events(self) -> list[tuple[int, ...]]:
        """Return and clear the log, in any order within a call."""
        count = struct.unpack("<q", memory_at(self.log.address, 8))[0]
        at, size = self.log.address + layout.LOG_FIRST, layout.LOG_ENTRY_BYTES
        found = [struct.unpack("<4q", memory_at(at + i * size, 32)) for i in range(count)]
        memory_at(self.log.address, 8)[:] = bytes(8)
        return sorted(found)

    def receive(self, now: int, packet: Packet, marked: bool) -> list[tuple[int, ...]]:
        raw = encode(packet)
        memory_at(self.buffer.address, len(raw))[:] = raw
        self.call("packet_in", now, self.buffer.address, 2 * len(raw) + marked)
        return self.events()

    def next_packet(self, now: int) -> tuple[Any, ...] | None:
        if not self.call("packet_out", now, self.out.address):
            return None
        path, number, size, ncontrol, nsegments = struct.unpack(
            "<5q", memory_at(self.out.address, 40)
        )
        control = bytes(memory_at(self.out.address + layout.OUT_CONTROL, ncontrol))
        at = self.out.address + layout.OUT_SEGMENTS
        segments = [
            struct.unpack("<5q", memory_at(at + i * layout.SEGMENT_BYTES, 40))
            for i in range(nsegments)
        ]
        return path, number, size, control, segments


def plain_packet(packet: rec.OutgoingPacket | None) -> tuple[Any, ...] | None:
    if packet is None:
        return None
    control = b""
    if packet.records:
        control = encode(Packet(0, 0, 0, packet.records))[HEADER:]
    segments = [(s.stream, s.frame, s.offset, s.length, len(s.header)) for s in packet.segments]
    return packet.path, packet.number, packet.size, control, segments


def plain_events(events: list[rec.FlowEvent]) -> list[tuple[int, ...]]:
    states = [state.value for state in layout.STATES]
    found: list[tuple[int, ...]] = []
    for event in events:
        if isinstance(event, rec.FrameStarted):
            found.append((layout.LOG_STARTED, event.stream, 0, 0))
        elif isinstance(event, rec.PayloadReceived):
            stop = event.offset + len(event.payload)
            found.append((layout.LOG_PAYLOAD, event.stream, event.offset, stop))
        elif isinstance(event, rec.FrameCompleted):
            found.append((layout.LOG_COMPLETED, event.stream, 0, 0))
        elif isinstance(event, rec.FrameAcknowledged):
            found.append((layout.LOG_ACKED, event.stream, 0, 0))
        elif isinstance(event, rec.PathChanged):
            change = states.index(event.before), states.index(event.after)
            found.append((layout.LOG_CHANGED, event.path, *change))
    return sorted(found)


def compare(config: rec.FlowConfig, log: list[Any]) -> int:
    """Replay a log on both flows and compare each call; return the number of packets sent."""
    specification, compiled = DatagramFlow(config), CompiledFlow(config)
    packets = 0
    for at, (name, *arguments) in enumerate(log):
        where = f"call {at}: {name}"
        if name == "submit":
            specification.submit(*arguments)
            compiled.call("submit", arguments[0], arguments[2])
        elif name == "grant":
            specification.grant(*arguments)
            compiled.call("grant", *arguments)
        elif name == "receive":
            now, packet, path, marked = arguments
            wanted = plain_events(specification.receive(now, packet, path=path, marked=marked))
            assert compiled.receive(now, packet, marked) == wanted, where
        elif name == "on_timer":
            wanted = plain_events(specification.on_timer(*arguments))
            compiled.call("on_timer", *arguments)
            assert compiled.events() == wanted, where
        else:
            sent = plain_packet(specification.next_packet(*arguments))
            assert compiled.next_packet(*arguments) == sent, where
            packets += sent is not None
            assert compiled.call("timer", *arguments) == specification.timer(*arguments), where
    for index, path in enumerate(specification.paths):
        for field, offset in PATH_WORDS:
            assert compiled.memory.path(index, offset) == getattr(path, field), field
        control = [compiled.memory.path(index, layout.PATH_CONTROL + 8 * i) for i in range(8)]
        assert control == path.control
    return packets


def admit_in_steps(network: Network, draw: random.Random) -> None:
    """Grant more bytes to both sides now and then, beginning at once."""
    totals = [20_000, 20_000]

    def grant(side: int, now: int) -> None:
        totals[side] += draw.choice((0, 3000, 20_000))
        network.sides[side].flow.grant(totals[side])

    for side in (0, 1):
        network.sides[side].flow.grant(totals[side])
    network.on_receive = grant


@pytest.mark.parametrize("rate", [0, 50_000_000])
def test_random_senders_get_the_same_grants(rate: int) -> None:
    draw, nsenders, budget = random.Random(rate), 7, 300_000
    grantor = Grantor(budget, rate)
    config = rec.FlowConfig(connection=1, peer_connection=2, nstreams=1)
    flows = [CompiledFlow(config) for _ in range(nsenders)]
    links, port = PrivateMemory(8 * nsenders), PrivateMemory(layout.PORT_BYTES)
    engine = flows[0].engine

    def store(address: int, value: int) -> None:
        memory_at(address, 8)[:] = struct.pack("<q", value)

    for i, flow in enumerate(flows):
        grantor.add(i)
        store(links.address + 8 * i, flow.link.address)
        store(flow.link.address + link_layout.LINK_FLOW, flow.memory.address)
        flow.memory.store(layout.FLOW_ADMITTED, UNSOLICITED_BYTES)
        flow.memory.store(layout.FLOW_ADMITS, 1)
    store(engine.address + link_layout.ENGINE_LINKS, links.address)
    store(engine.address + link_layout.ENGINE_NLINKS, nsenders)
    store(port.address + layout.PORT_BUDGET, budget)
    store(port.address + layout.PORT_ALLOWANCE, budget)
    store(port.address + layout.PORT_CREDIT_RATE, rate)
    flow, now, total = flows[0], 1000, 0
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)
    issue, timer = (
        kind(flow._library.address(native.PREFIX + name)) for name in ("issue", "grant_timer")
    )
    for step in range(3000):
        now += 3 * 3600 * SECOND if step == 2000 else draw.choice((0, 1000, 400_000))
        sender = draw.randrange(nsenders)
        record, memory = grantor.senders[sender], flows[sender].memory
        if draw.random() < 0.3:
            grantor.want(sender, draw.choice((100, 30_000, 500_000)))
        else:
            left = min(record.wanted, record.granted) - record.received
            grantor.on_received(sender, min(left, draw.choice((1400, 60_000))))
        memory.store(layout.FLOW_WANTED, record.wanted)
        memory.store(layout.FLOW_RECEIVED, record.received)
        total += len(grantor.issue(now))
        issue(engine.address, port.address, now)
        granted = [f.memory.word(layout.FLOW_ADMITTED) for f in flows]
        assert granted == [grantor.senders[i].granted for i in range(nsenders)]
        assert timer(engine.address, port.address, now) == grantor.timer(now)
    assert total > 100


@pytest.mark.parametrize("seed", range(16))
def test_random_networks_give_the_same_decisions(seed: int) -> None:
    draw = random.Random(seed)
    congestion = list(CONTROLLERS)[seed % len(CONTROLLERS)]
    paths = [
        PathModel(
            rate=draw.choice((50e6, 500e6)),
            delay=draw.choice((20 * US, 1 * MS)),
            queue=draw.choice((20_000, 300_000)),
            loss=draw.choice((0, 0.02, 0.2)),
            jitter=draw.choice((0, 300 * US)),
            duplicate=draw.choice((0, 0.05)),
            dead=draw.choice(((0, 0), (2 * MS, 80 * MS))),
            mtu=draw.choice((1 << 16, 1 << 16, 1300)),
            mtu_until=200 * MS,
        )
        for _ in range(draw.choice((1, 1, 2, 4)))
    ]
    granted = draw.choice((None, 0, 5000))
    network = Network(
        paths, seed=seed, congestion=congestion, nstreams=4, log=True, granted=granted
    )
    if granted is not None:
        admit_in_steps(network, draw)
    for side in (0, 1):
        for _ in range(draw.randrange(1, 12)):
            size = draw.choice((0, 1, 40, 3000, 40_000))
            network.submit(side, draw.randrange(4), bytes(size))
    network.run(600 * SECOND)
    for end in network.sides:
        assert end.flow._log is not None
        assert compare(end.flow.config, end.flow._log) > 0


def test_the_kernel_rejects_what_the_decoder_rejects() -> None:
    """Mutations of valid packets: both accept or both reject."""
    from miraccl.errors import ProtocolError
    from miraccl.wire.datagram.packets import decode

    draw = random.Random(5)
    config = rec.FlowConfig(connection=1, peer_connection=2, npaths=2, nstreams=4)
    records = (
        Probe(3, 1),
        Grant(77),
        Ack(1, ((8, 9), (2, 5)), 7, 1, 2),
        Data(1, 0, 0, b"abc", bytes(48)),
        Abort(b"bye"),
    )
    flow = CompiledFlow(config)
    accepted = 0
    for number in range(3000):
        chosen = tuple(draw.choice(records) for _ in range(draw.randrange(1, 4)))
        raw = bytearray(encode(Packet(0, 1, number, chosen)))
        for _ in range(draw.randrange(3)):
            at = draw.randrange(len(raw))
            raw[at] = draw.randrange(256)
        if draw.random() < 0.3:
            del raw[draw.randrange(1, len(raw)) :]
        try:
            decode(raw)
            valid = True
        except ProtocolError:
            valid = False
        memory_at(flow.buffer.address, len(raw) + 64)[:] = bytes(raw) + bytes(64)
        got = flow.call("well_formed_packet", flow.buffer.address, len(raw))
        assert got == valid, raw.hex()
        accepted += valid
    assert 500 < accepted < 2500
