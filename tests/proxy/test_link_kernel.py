"""The compiled link against its specification: the same events give the same instructions."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Sequence

import pytest

from miraccl import native
from miraccl.proxy.kernels import link_layout as layout
from miraccl.proxy.link_memory import FAULT_TEXTS, write_link
from miraccl.proxy.stream_engine import KERNEL
from miraccl.transport.fifo import FifoMemory, PrivateMemory, memory_at
from miraccl.wire import proxy_records as rec
from miraccl.wire.proxy import ProxyLink
from miraccl.wire.stream import Frame, FrameType, encode_frame
from miraccl.wire.verbs.policy import PIECES, ROTATE, SHARES, SPLIT
from tests.wire.link_world import World

SLOT_BYTES = 1 << 17
PLACEMENTS = {
    layout.PLACE_INLINE: rec.Placement.INLINE,
    layout.PLACE_SLOT: rec.Placement.SLOT,
    layout.PLACE_POSTED: rec.Placement.POSTED,
    layout.PLACE_OVERSIZE: rec.Placement.OVERSIZE,
}
LOSSES = {
    layout.FAULT_CLOSED: rec.LossKind.CLOSED,
    layout.FAULT_RESET: rec.LossKind.RESET,
    layout.FAULT_PROTOCOL: rec.LossKind.PROTOCOL,
    layout.FAULT_ABORTED: rec.LossKind.ABORTED,
    layout.FAULT_INTERNAL: rec.LossKind.INTERNAL,
}


class CompiledLink:
    """A compiled link without sockets; ``handle`` takes and returns what ``ProxyLink.handle``
    does.
    """

    def __init__(self, config: rec.LinkConfig) -> None:
        self.memory = PrivateMemory(layout.link_bytes(config.nstreams))
        self.engine = PrivateMemory(layout.ENGINE_BYTES)
        self.log = PrivateMemory(1 << 16)
        self.arguments = PrivateMemory(256)
        self.fifos = FifoMemory(SLOT_BYTES), FifoMemory(SLOT_BYTES)
        write_link(self.memory.address, config)
        send, recv = (f.address for f in self.fifos)
        for offset, value in (
            (layout.LINK_ENGINE, self.engine.address),
            (layout.LINK_LOG, self.log.address),
            (layout.LINK_SEND_DESCRIPTORS, send),
            (layout.LINK_SEND_TAIL, send + 1024),
            (layout.LINK_SEND_SLOTS, send + 4096),
            (layout.LINK_RECV_DESCRIPTORS, recv),
            (layout.LINK_RECV_TAIL, recv + 1024),
            (layout.LINK_RECV_CTS, recv + 512),
            (layout.LINK_RECV_SLOTS, recv + 4096),
        ):
            memory_at(self.memory.address + offset, 8)[:] = struct.pack("<q", value)
        kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        self._event = kind(native.library(KERNEL).address(native.PREFIX + "event"))

    def handle(self, event: rec.Event) -> list[object]:
        numbers, header = self._arguments(event)
        data = struct.pack("<5q", *numbers, *[0] * (5 - len(numbers))) + header
        memory_at(self.arguments.address, len(data))[:] = data
        memory_at(self.log.address, 8)[:] = bytes(8)
        self._event(self.memory.address, self.arguments.address)
        count = struct.unpack("<q", memory_at(self.log.address, 8))[0]
        at = self.log.address + layout.LOG_FIRST
        size = layout.LOG_ENTRY_BYTES
        return [self._entry(bytes(memory_at(at + i * size, size))) for i in range(count)]

    @staticmethod
    def _arguments(event: rec.Event) -> tuple[list[int], bytes]:
        if isinstance(event, rec.MessagePosted):
            return [1, *event, 4096], b""
        if isinstance(event, rec.ReceivePosted):
            return [2, *event], b""
        if isinstance(event, rec.MessagesConsumed):
            return [3, event.tail], b""
        if isinstance(event, rec.FrameReceived):
            return [4, event.stream], encode_frame(event.frame)
        if isinstance(event, rec.PayloadPlaced):
            return [5, event.stream], b""
        if isinstance(event, rec.FramesWritten):
            return [6, *event], b""
        if isinstance(event, rec.StreamEnded):
            return [7, event.stream, 104], b""
        if isinstance(event, rec.Garbage):
            return [8, event.stream], b""
        if isinstance(event, rec.CloseRequested):
            return [9], b""
        if isinstance(event, rec.StreamMeasured):
            return [11, *event], b""
        assert isinstance(event, rec.InternalError)
        return [10], b""

    @staticmethod
    def _entry(data: bytes) -> object:
        kind, a, b, c, d, _e = struct.unpack_from("<6q", data)
        if kind == layout.LOG_SEND:
            return "send", data[48:]
        if kind == layout.LOG_RECEIVE:
            return rec.ReceivePayload(a, b, PLACEMENTS[c], d, _e)
        if kind == layout.LOG_ANNOUNCE:
            return rec.AnnounceMessage(a, b, c)
        if kind == layout.LOG_DELIVER:
            return rec.DeliverMessage(a, b, c, PLACEMENTS[d])
        if kind == layout.LOG_TAIL:
            return rec.PublishTail(a)
        if kind == layout.LOG_LOST:
            return "lost", LOSSES[a]
        return "abort" if kind == layout.LOG_ABORT else "finished"


def plain(instruction: rec.Instruction) -> object:
    """The part of an instruction that does not depend on texts."""
    if isinstance(instruction, rec.SendFrame):
        return "send", encode_frame(instruction.frame)
    if isinstance(instruction, rec.PeerLost):
        return "lost", instruction.loss.kind
    if isinstance(instruction, rec.AbortStreams):
        return "abort"
    return "finished" if isinstance(instruction, rec.LinkFinished) else instruction


def compare(config: rec.LinkConfig, events: Sequence[rec.Event]) -> None:
    """Feed the same events to both and compare the instructions of each."""
    specification, compiled = ProxyLink(config), CompiledLink(config)
    for number, event in enumerate(events):
        wanted = [plain(i) for i in specification.handle(event)]
        assert compiled.handle(event) == wanted, f"event {number}: {event}"


def config_of(
    nstreams: int,
    *,
    spread: bool = False,
    policy: int = SHARES,
    rails: int = 1,
    control: int = 0,
) -> rec.LinkConfig:
    return rec.LinkConfig(
        nstreams=nstreams,
        send_slot_bytes=SLOT_BYTES,
        recv_slot_bytes=SLOT_BYTES,
        segment_bytes=1 << 17,
        spread=spread,
        policy=policy,
        rails=rails,
        control_streams=control,
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_traffic_gives_the_same_instructions(seed: int) -> None:
    draw = random.Random(seed)
    policy = (SHARES, SPLIT, ROTATE, PIECES)[seed % 4]
    rails = 1 + seed // 4 % 2
    control = seed // 8 % 3
    config = config_of(
        draw.choice((1, 2, 5)) + control,
        spread=seed % 3 == 1,
        policy=policy,
        rails=rails,
        control=control,
    )
    sizes = [
        [
            draw.choice((0, 1, 32, 33, 5000, 65536, 65537, 131072, 400_000))
            for _ in range(draw.randrange(25))
        ]
        for _ in (0, 1)
    ]
    rooms = [
        {
            m: n + draw.choice((0, 0, 1, -1))
            for m, n in enumerate(sizes[1 - i])
            if n > SLOT_BYTES or draw.random() < 0.3
        }
        for i in (0, 1)
    ]
    rooms = [{m: max(n, 0) for m, n in r.items()} for r in rooms]
    world = World(config, (sizes[0], sizes[1]), (rooms[0], rooms[1]))
    closes = {draw.randrange(200): draw.randrange(2) for _ in range(draw.randrange(3))}
    steps = 0

    def choose(n: int) -> int:
        nonlocal steps
        steps += 1
        return draw.randrange(n)

    for _ in range(5000):
        moves = world.moves()
        if steps in closes:
            world.handle(closes.pop(steps), rec.CloseRequested())
            continue
        if not moves:
            break
        if rails > 1 and draw.random() < 0.2:
            stream, rate = draw.randrange(config.nstreams), draw.choice((0, 10, 1000, 1000))
            measured = rec.StreamMeasured(stream, draw.choice((0, 5000, 300_000)), rate)
            world.handle(draw.randrange(2), measured)
        moves[choose(len(moves))]()
    for side in world.sides:
        assert side.link.log is not None
        compare(config, side.link.log)


@pytest.mark.parametrize("seed", range(60))
def test_invalid_traffic_gives_the_same_faults(seed: int) -> None:
    """Random frames and events, most of which contradict what was said before."""
    draw = random.Random(seed)
    config = config_of(2)
    events: list[rec.Event] = []
    small = (0, 1, 2, 7, 8, 9)
    for _ in range(60):
        kind = draw.randrange(8)
        if kind <= 3:
            nbytes = draw.choice((0, 1, 40, 65536, 100_000, 140_000, 200_000))
            offset = draw.choice((0, 0, 0, 65536)) if nbytes > 65536 else 0
            type_ = draw.choice([t for t in FrameType if t is not FrameType.ABORT])
            data = type_ is FrameType.DATA
            frame = Frame(
                type_,
                draw.randrange(2),
                draw.choice(small) if type_ is not FrameType.CREDIT else 0,
                5 if type_ in (FrameType.DATA, FrameType.ANNOUNCE) else 0,
                nbytes if type_ in (FrameType.DATA, FrameType.ANNOUNCE, FrameType.CTS) else 0,
                offset if data else 0,
                nbytes - offset if data else 0,
                draw.choice((0, 0, 0, 1, 2)),
            )
            if (
                frame.type is FrameType.DATA
                and frame.length
                and any(
                    isinstance(e, rec.FrameReceived)
                    and e.frame.type is FrameType.DATA
                    and e.stream == frame.stream
                    for e in events
                )
            ):
                events.append(rec.PayloadPlaced(frame.stream))
                if not _placeable(config, events):
                    events.pop()
                    continue
            events.append(rec.FrameReceived(frame.stream if draw.random() < 0.97 else 1, frame))
        elif kind == 4:
            posted = sum(isinstance(e, rec.MessagePosted) for e in events)
            events.append(rec.MessagePosted(posted, 3, draw.choice((0, 50, 70_000, 150_000))))
        elif kind == 5:
            events.append(rec.ReceivePosted(draw.choice(small), draw.choice((0, 100, 300_000))))
        elif kind == 6:
            events.append(rec.MessagesConsumed(draw.choice((0, 0, 1))))
        else:
            events.append(
                draw.choice((rec.StreamEnded(0, "x"), rec.CloseRequested(), rec.Garbage(0, "y")))
            )
    events = (
        [e for e in events if not isinstance(e, rec.PayloadPlaced)]
        if draw.random() < 0.2
        else events
    )
    compare(config, _valid(config, events))


def _placeable(config: rec.LinkConfig, events: list[rec.Event]) -> bool:
    return len(_valid(config, events)) == len(events)


def _valid(config: rec.LinkConfig, events: list[rec.Event]) -> list[rec.Event]:
    """The events without those that no driver produces: payload placed, or headers, out of turn."""
    link, arriving, kept = ProxyLink(config), set[int](), []
    for event in events:
        if isinstance(event, rec.PayloadPlaced):
            if event.stream not in arriving:
                continue
            arriving.discard(event.stream)
        elif isinstance(event, rec.FrameReceived) and event.stream in arriving:
            continue
        kept.append(event)
        for instruction in link.handle(event):
            if isinstance(instruction, rec.ReceivePayload):
                arriving.add(instruction.stream)
    return kept


def test_the_rate_of_a_stream_is_that_of_its_busy_time() -> None:
    """A burst after a pause, which a token bucket lets through, says little about the rate."""
    link = CompiledLink(config_of(1, rails=2))

    def rate(acked: int, busy_us: int) -> int:
        memory_at(link.arguments.address, 40)[:] = struct.pack("<5q", 12, 0, acked, busy_us, 0)
        link._event(link.memory.address, link.arguments.address)
        at = link.memory.address + layout.LINK_STREAMS + layout.STREAM_RATE
        return int(struct.unpack("<q", memory_at(at, 8))[0])

    assert rate(36_000, 300) == 0  # unknown
    assert rate(36_000 + 3_000 * 10, 10_300) == 66_000 * 1000 // 10_300
    assert rate(66_000 + 36_000, 10_600) == 6407  # another burst: not before 10 ms of work
    assert rate(66_000 + 30_000, 20_300) == (6407 + 3000 + 1) // 2
    assert rate(96_000, 40_300) == (4704 + 1 + 1) // 2  # it stalls


def test_every_fault_has_a_text() -> None:
    codes = {v for k, v in vars(layout).items() if k.isupper() and 1 <= v <= 25 and k in _NAMES}
    assert codes == set(FAULT_TEXTS)
    for text in FAULT_TEXTS.values():
        text.format(1, 2, 3)


_NAMES = frozenset(
    [
        "BAD_MAGIC",
        "BAD_TYPE",
        "BAD_HEADER",
        "WRONG_STREAM",
        "AFTER_CLOSE",
        "DIFFERENT_TOTALS",
        "CLOSED_EARLY",
        "CONSUMED_UNSENT",
        "CONSUMED_EARLY",
        "CTS_BEYOND",
        "CTS_SMALL",
        "ANNOUNCE_SMALL",
        "ANNOUNCED_TWICE",
        "OUTSIDE_WINDOW",
        "SENT_TWICE",
        "CHANGED",
        "OVERLAP",
        "UNREQUESTED",
        "POSTED_ORDER",
        "POSTED_BYTES",
        "CONSUMED_UNKNOWN",
        "BAD_DESCRIPTOR",
        "BAD_CTS",
        "TOO_MANY_RANGES",
        "BAD_PACKET",
    ]
)
