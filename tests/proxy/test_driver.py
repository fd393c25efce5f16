"""The driver of TCP streams without a proxy: conformance, and the order in which it reads
memory.
"""

from __future__ import annotations

import socket

import pytest

from miraccl.proxy import stream_driver
from miraccl.proxy.stream_driver import StreamDriver
from miraccl.transport.base import Fifo, FifoPair, NetConnection
from miraccl.transport.ends import RecvEnd, SendEnd
from miraccl.transport.fifo import NSLOTS, FifoMemory, Mode, PlainAtomics, PrivateMemory
from miraccl.transport.registry import TCP
from miraccl.wire.proxy_records import Loss, LossKind
from miraccl.wire.stream import Frame, FrameType, encode_frame
from tests.proxy.driver_conformance import DriverConformance, Side, fifo_pair

SLOT = 4096


class TestStreamDriver(DriverConformance):
    def build(self):
        sockets: list[list[socket.socket]] = [[], []]
        for _ in range(2):
            for end, sock in enumerate(socket.socketpair()):
                sockets[end].append(sock)
        return tuple(self.side(rank, sockets[rank]) for rank in range(2))

    def side(self, rank, streams):
        losses: list[tuple[int, Loss]] = []
        pair = fifo_pair()
        driver = StreamDriver(
            NetConnection(
                peer=1 - rank, streams=streams, pair=pair, peer_slot_bytes=pair.recv.slot_bytes
            ),
            atomics=PlainAtomics(),
            on_lost=lambda peer, loss: losses.append((peer, loss)),
            segment_bytes=1 << 20,
        )
        return Side(pair, driver, losses)


class StaleOnce(PlainAtomics):
    """Atomics whose load of one word may return an old value, as on a processor whose other core
    has just stored a new one.
    """

    def __init__(self):
        self.stale: dict[int, int] = {}

    def load_acquire(self, address, /):
        return self.stale.pop(address) if address in self.stale else super().load_acquire(address)


class Desk:
    def __init__(self):
        self.atomics = StaleOnce()
        self.memory = FifoMemory(SLOT), FifoMemory(SLOT)
        pair = FifoPair(
            send=Fifo.from_address(self.memory[0].address, SLOT, capabilities=TCP.capabilities),
            recv=Fifo.from_address(self.memory[1].address, SLOT, capabilities=TCP.capabilities),
        )
        here, self.there = socket.socketpair()
        self.losses: list[tuple[int, Loss]] = []
        self.driver = StreamDriver(
            NetConnection(peer=3, streams=[here], pair=pair, peer_slot_bytes=SLOT),
            atomics=self.atomics,
            on_lost=lambda peer, loss: self.losses.append((peer, loss)),
            segment_bytes=1 << 20,
        )
        self.send, self.recv = SendEnd(pair.send, self.atomics), RecvEnd(pair.recv, self.atomics)

    def advance(self):
        self.driver.streams[0].on_edge(1)
        while self.driver.poll():
            pass


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.driver.close()
    desk.there.close()


def frames(*numbers):
    return b"".join(encode_frame(Frame(FrameType.DATA, 0, n, 1, 1, 0, 1)) + b"x" for n in numbers)


def test_cts_beyond_the_tail_that_was_read_is_found_at_the_next_scan(desk):
    """Consume all messages and post a CTS between the driver's read of the tail and of
    the CTS."""
    desk.there.sendall(frames(*range(NSLOTS)))
    desk.advance()
    for _ in range(NSLOTS):
        assert desk.recv.peek()
        desk.recv.consume()
    target = PrivateMemory(1 << 16)
    desk.recv.clear_to_send(target.address, 1 << 16)
    desk.atomics.stale[desk.recv.end.tail] = 0
    desk.driver.scan()
    desk.driver.scan()
    desk.advance()
    got = desk.there.recv(4096)
    assert encode_frame(Frame(FrameType.CTS, 0, NSLOTS, 0, 1 << 16, ack=NSLOTS)) in got


def test_scan_reports_news_once(desk):
    assert not desk.driver.scan()
    desk.send.post(b"a")
    desk.recv.clear_to_send(PrivateMemory(SLOT).address, SLOT)
    assert desk.driver.scan()
    assert not desk.driver.scan()


def test_advance_says_whether_more_can_be_done_at_once(desk):
    desk.there.sendall(frames(0) + b"\0" * 7)
    desk.driver.streams[0].on_edge(1)
    assert not desk.driver.poll()  # a short read: the stream is empty
    assert desk.driver.dirty
    memory = PrivateMemory(1 << 24)
    desk.send.post_address(memory.address, 1 << 24)
    # the header begins with the 7 bytes above
    desk.there.sendall(encode_frame(Frame(FrameType.CTS, 0, 0, 0, 1 << 24))[7:])
    desk.driver.streams[0].on_edge(1)
    desk.driver.poll()
    assert desk.losses[0][1].kind is LossKind.PROTOCOL  # and with them it is no frame


def test_what_a_peer_sent_before_it_closed_counts_though_it_takes_nothing_any_more(
    desk, monkeypatch
):
    """It waited in vain for this process, which was stopped: there is more to read than in one
    round, and something to be sent.
    """
    monkeypatch.setattr(stream_driver, "CALLS_PER_ROUND", 1)
    payload = bytes(range(256)) * (SLOT // 256)
    for number in range(NSLOTS):
        desk.there.sendall(
            encode_frame(Frame(FrameType.DATA, 0, number, 1, SLOT, 0, SLOT)) + payload
        )
    desk.there.sendall(encode_frame(Frame(FrameType.CLOSE, 0, NSLOTS)))
    desk.there.close()
    desk.send.post(b"an answer")
    desk.advance()
    assert [loss.kind for _, loss in desk.losses] == [LossKind.CLOSED]
    for _ in range(NSLOTS):
        assert desk.recv.peek().payload == payload
        desk.recv.consume()


def test_stream_that_takes_nothing_any_more_says_why(desk):
    desk.there.close()
    desk.driver.streams[0].readable = False
    desk.send.post(b"an answer")
    desk.driver.poll()
    assert desk.losses == [(3, Loss(LossKind.RESET, "Broken pipe"))]


@pytest.mark.parametrize(
    ("mode", "nbytes", "address"),
    [
        (Mode.WINDOW, 10, 1 << 20),
        (Mode.LANDED, 10, 1 << 20),
        (99, 10, 1 << 20),
        (Mode.ADDRESS, 10, 5),
        (Mode.SLOT, SLOT + 1, 0),
        (Mode.INLINE, 33, 0),
    ],
)
def test_post_that_makes_no_sense_is_an_internal_loss(desk, mode, nbytes, address):
    desk.send._publish(0, nbytes, mode, [address])
    desk.driver.scan()
    assert [(peer, loss.kind) for peer, loss in desk.losses] == [(3, LossKind.INTERNAL)]
    assert not desk.driver.scan()


@pytest.mark.parametrize(("address", "room"), [(5, 10), (0, 1), (1 << 20, -1)])
def test_invalid_cts_is_an_internal_loss(desk, address, room):
    desk.recv.clear_to_send(address, room)
    desk.driver.scan()
    assert [(peer, loss.kind) for peer, loss in desk.losses] == [(3, LossKind.INTERNAL)]


def test_closed_driver_touches_nothing(desk):
    desk.driver.close()
    desk.driver.close()
    desk.there.close()
    assert not desk.driver.poll()
