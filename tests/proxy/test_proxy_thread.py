"""The proxy thread against a peer that this test plays byte by byte over a socket pair."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miraccl.errors import CommunicatorClosed, MiracclError
from miraccl.proxy import commands, compiled_thread
from miraccl.proxy.kernels import link_layout
from miraccl.proxy.stream_engine import ProgressEngine
from miraccl.transport.base import Fifo, FifoPair, NetConnection
from miraccl.transport.ends import RecvEnd, SendEnd
from miraccl.transport.fifo import FifoMemory, Mode, PrivateMemory, memory_at, native_atomics
from miraccl.transport.registry import TCP
from miraccl.wire.proxy_records import LossKind
from miraccl.wire.stream import (
    HEADER_BYTES,
    MAX_TEXT_BYTES,
    Frame,
    FrameType,
    decode_frame,
    encode_frame,
)

SLOT = 8192
WAIT_S = 20.0


class Rig:
    """A proxy of rank 0 with rank 7 attached; the test holds the other ends of the streams."""

    def __init__(self, nstreams=1, on_lost=None):
        self.atomics = native_atomics()
        self.news = threading.Condition()
        self.losses = []
        self.woken = 0
        self.proxy = ProgressEngine(rank=0, wake=self.on_wake, on_lost=on_lost or self.on_lost)
        self.peers = []
        self.pair = self.attach(7, nstreams)
        self.send = SendEnd(self.pair.send, self.atomics)
        self.recv = RecvEnd(self.pair.recv, self.atomics)

    def attach(self, rank, nstreams=1):
        ends = [socket.socketpair() for _ in range(nstreams)]
        memory = FifoMemory(SLOT), FifoMemory(SLOT)
        wake_args: Any = {
            "capabilities": TCP.capabilities,
            "doorbell": self.proxy.doorbell,
            "asleep": self.proxy.asleep,
        }
        pair = FifoPair(
            send=Fifo.from_address(memory[0].address, SLOT, **wake_args),
            recv=Fifo.from_address(memory[1].address, SLOT, **wake_args),
            memory=memory,
        )
        for _, there in ends:
            there.settimeout(WAIT_S)
            self.peers.append(there)
        self.proxy.attach(
            [
                NetConnection(
                    peer=rank, streams=[here for here, _ in ends], pair=pair, peer_slot_bytes=SLOT
                )
            ]
        )
        return pair

    def on_wake(self, rank):
        assert rank == 0
        with self.news:
            self.woken += 1
            self.news.notify_all()

    def on_lost(self, peer, loss):
        with self.news:
            self.losses.append((peer, loss))
            self.news.notify_all()

    def wait(self, condition, what="nothing happened"):
        with self.news:
            assert self.news.wait_for(condition, WAIT_S), what

    def loss(self):
        self.wait(lambda: self.losses, "no loss was reported")
        assert len(self.losses) == 1
        assert self.losses[0][0] == 7
        return self.losses[0][1]

    def frame(self, stream=0):
        head = self.exactly(HEADER_BYTES, stream)
        frame = decode_frame(head)
        return frame, self.exactly(frame.length, stream)

    def exactly(self, nbytes, stream=0):
        data = b""
        while len(data) < nbytes:
            more = self.peers[stream].recv(nbytes - len(data))
            assert more, "the proxy closed the stream"
            data += more
        return data

    def close(self):
        self.proxy.close()
        for peer in self.peers:
            peer.close()


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()


def message(number, payload, signature=1, ack=0):
    return (
        encode_frame(
            Frame(FrameType.DATA, 0, number, signature, len(payload), 0, len(payload), ack)
        )
        + payload
    )


@pytest.mark.parametrize("one_core", [False, True])
def test_engine_with_a_single_core_does_not_poll(
    one_core: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_thread, "has_one_core", lambda: one_core)
    rig = Rig()
    spin_ns = rig.proxy._get(link_layout.ENGINE_SPIN_NS)
    rig.close()
    assert spin_ns == (0 if one_core else compiled_thread.SPIN_NS)


def test_frames_that_come_byte_by_byte(rig):
    for byte in message(0, b"abc") + message(1, b"d" * 100) + message(2, b""):
        rig.peers[0].sendall(bytes([byte]))
    for expected, mode in ((b"abc", Mode.INLINE), (b"d" * 100, Mode.SLOT), (b"", Mode.INLINE)):
        rig.wait(rig.recv.peek)
        got = rig.recv.peek()
        assert (got.payload, got.mode) == (expected, mode)
        rig.recv.consume()


def test_many_frames_in_one_segment(rig):
    rig.peers[0].sendall(
        b"".join(message(i, bytes([i]) * (i * 700), signature=i) for i in range(8))
    )
    for i in range(8):
        rig.wait(rig.recv.peek)
        got = rig.recv.peek()
        assert (got.payload, got.signature) == (bytes([i]) * (i * 700), i)
        rig.recv.consume()


def test_posts_come_out_as_frames_and_memory_comes_back(rig):
    assert rig.send.post(b"hello", signature=-2)
    assert rig.send.post(b"x" * SLOT, signature=3)
    for number, payload, signature in ((0, b"hello", -2), (1, b"x" * SLOT, 3)):
        frame, data = rig.frame()
        assert (frame.message, frame.signature, data) == (number, signature, payload)
    rig.wait(lambda: rig.send.released == 2)


def test_executor_rings_only_while_the_proxy_sleeps(rig):
    """Eight posts into a sleeping proxy: the first rings; all are sent although nobody rings for a
    proxy that is awake.
    """
    for _ in range(50):
        for i in range(8):
            rig.wait(lambda i=i: rig.send.post(bytes([i])))
        for i in range(8):
            frame, data = rig.frame()
            assert data == bytes([i])
        rig.peers[0].sendall(encode_frame(Frame(FrameType.CREDIT, 0, ack=frame.message + 1)))


# --- a peer that misbehaves ---

BAD = {
    "noise": b"\xa5" * 4096,
    "another protocol": b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n",
    "piece too long": encode_frame(Frame(FrameType.DATA, 0, 0, 1, 10, 5, 6)),
    "message too large for a slot": encode_frame(
        Frame(FrameType.DATA, 0, 0, 1, SLOT + 1, 0, SLOT + 1)
    ),
    "message number": encode_frame(Frame(FrameType.DATA, 0, 8, 1, 1, 0, 1)),
    "stream": encode_frame(Frame(FrameType.DATA, 1, 0, 1, 1, 0, 1)),
    "credit": encode_frame(Frame(FrameType.CREDIT, 0, ack=1)),
    "second time": message(0, b"a") + message(0, b"a"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_frames_end_the_connection_as_protocol_error(rig, name):
    rig.peers[0].sendall(BAD[name])
    loss = rig.loss()
    assert loss.kind is LossKind.PROTOCOL
    frame, text = rig.frame()
    assert frame.type is FrameType.ABORT
    assert text.decode() == loss.detail[:MAX_TEXT_BYTES]
    assert rig.peers[0].recv(1) == b""


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_frames_never_crash_hang_or_write_elsewhere(data):
    """One byte of a valid conversation is changed: all is delivered, or the link ends with a named
    loss; guard bytes stay.
    """
    good = bytearray(b"".join(message(i, b"m" * n) for i, n in enumerate((5, 100, SLOT))))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] ^= data.draw(st.integers(1, 255))
    with ExitStack() as stack:
        rig = Rig()
        stack.callback(rig.close)
        rig.peers[0].sendall(good)
        rig.peers[0].close()
        loss = rig.loss()
        assert loss.kind in (LossKind.PROTOCOL, LossKind.RESET, LossKind.ABORTED)
        got = rig.recv.peek()
        while got:
            assert got.nbytes <= SLOT
            rig.recv.consume()
            got = rig.recv.peek()


@pytest.mark.parametrize("cut", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 50])
def test_end_without_a_word_is_a_reset_wherever_it_comes(rig, cut):
    rig.peers[0].sendall(message(0, b"z" * 100)[:cut])
    rig.peers[0].close()
    assert rig.loss().kind is LossKind.RESET
    assert rig.recv.peek() is None


def test_message_before_the_end_is_still_there(rig):
    rig.peers[0].sendall(message(0, b"last"))
    rig.peers[0].close()
    assert rig.loss().kind is LossKind.RESET
    assert rig.recv.peek().payload == b"last"


def test_abort_text_of_the_peer_is_reported(rig):
    text = b"rank 7: out of memory"
    whole = encode_frame(Frame(FrameType.ABORT, 0, length=len(text))) + text
    rig.peers[0].sendall(whole[:50])
    rig.peers[0].sendall(whole[50:])
    loss = rig.loss()
    assert loss.kind is LossKind.ABORTED
    assert "out of memory" in loss.detail


def test_loss_of_one_peer_leaves_the_others_alone(rig):
    other = rig.attach(9)
    rig.peers[0].sendall(b"\0" * HEADER_BYTES)
    rig.loss()
    rig.peers[1].sendall(message(0, b"fine"))
    recv = RecvEnd(other.recv, rig.atomics)
    rig.wait(recv.peek)
    got = recv.peek()
    assert got is not None
    assert bytes(got.payload or b"") == b"fine"


def test_wake_follows_a_loss(rig):
    rig.wait(lambda: True)
    before = rig.woken
    rig.peers[0].close()
    rig.wait(lambda: rig.losses and rig.woken > before, "the executor was not woken")


# --- failures of our own ---


def test_on_lost_that_raises_does_not_stop_the_proxy(caplog):
    called = threading.Event()

    def explode(peer, loss):
        called.set()
        raise RuntimeError("callback")

    rig = Rig(on_lost=explode)
    try:
        other = rig.attach(9)
        rig.peers[0].close()
        rig.peers[1].sendall(message(0, b"fine"))
        recv = RecvEnd(other.recv, rig.atomics)
        rig.wait(recv.peek)
        assert called.wait(WAIT_S)
    finally:
        rig.close()
    assert "on_lost failed" in caplog.text


def break_engine(monkeypatch):
    """Make the Python part of the engine fail when a link has ended."""

    def broken(self):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(ProgressEngine, "_report_ended", broken)


def test_bug_in_the_engine_is_reported_as_internal_loss(rig, monkeypatch, caplog):
    break_engine(monkeypatch)
    rig.peers[0].close()
    loss = rig.loss()
    assert loss.kind is LossKind.INTERNAL
    assert "a bug" in loss.detail
    assert "the progress engine failed" in caplog.text


@pytest.mark.parametrize("command", ["detach", "abort", "close", "attach"])
def test_no_command_waits_for_an_engine_that_has_failed(monkeypatch, command):
    """Send a command between the failure and the end of the thread."""
    calls = {"detach": ([7],), "abort": ("enough",), "close": (), "attach": ([],)}
    caught: list[CommunicatorClosed] = []

    def give() -> None:
        try:
            getattr(rig.proxy, command)(
                *calls[command], **({"linger": 10 * WAIT_S} if command == "detach" else {})
            )
        except CommunicatorClosed as error:
            caught.append(error)

    def lost(peer, loss):
        giver.start()
        while not rig.proxy._commands.pending:
            pass

    giver = threading.Thread(target=give)
    rig = Rig(nstreams=2, on_lost=lost)
    try:
        break_engine(monkeypatch)
        monkeypatch.setattr(commands, "COMMAND_TIMEOUT_S", 10 * WAIT_S)
        rig.peers[1].close()
        rig.proxy._thread.join(WAIT_S)
        giver.join(WAIT_S)
        assert not giver.is_alive()
        assert len(caught) == (command == "attach")
        while rig.peers[0].recv(4096):  # and no stream stays open
            pass
    finally:
        rig.close()


# --- life ---


def test_close_twice_and_nothing_after(rig):
    rig.proxy.close()
    rig.proxy.close()
    rig.proxy.abort("too late")
    rig.proxy.detach([7], linger=1)
    with pytest.raises(CommunicatorClosed):
        rig.proxy.attach([])
    assert not [t for t in threading.enumerate() if t.name == "miraccl-engine-0"]


def test_descriptors_are_given_back(rig):
    before = len(os.listdir("/proc/self/fd"))
    extra = Rig()
    extra.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_same_peer_twice_is_refused(rig):
    with pytest.raises(MiracclError, match="cannot attach rank 7: it is attached already"):
        rig.attach(7)


def test_connections_that_cannot_all_be_served_are_closed(rig):
    good, bad = socket.socketpair(), socket.socketpair()
    streams = {8: [good[0]], 9: [bad[0], bad[0]]}
    connections = [
        NetConnection(peer=peer, streams=socks, pair=rig.pair, peer_slot_bytes=SLOT)
        for peer, socks in streams.items()
    ]
    with pytest.raises(FileExistsError):
        rig.proxy.attach(connections)
    for _, there in (good, bad):
        with there:
            there.settimeout(WAIT_S)
            assert there.recv(1) == b""
    rig.attach(9)
    rig.send.post(b"still there")
    assert rig.frame()[1] == b"still there"


def test_detach_sends_what_is_posted_then_close(rig):
    rig.send.post(b"posted")
    done = threading.Thread(target=rig.proxy.detach, args=([7],), kwargs={"linger": WAIT_S})
    done.start()
    frame, data = rig.frame()
    assert (frame.type, data) == (FrameType.DATA, b"posted")
    assert rig.frame()[0].type is FrameType.CLOSE
    assert done.is_alive()  # the peer's end is waited for
    rig.peers[0].close()
    done.join(WAIT_S)
    assert not done.is_alive()
    assert rig.losses == []


def test_large_payload_is_sent_from_and_received_into_memory_without_a_copy(rig):
    """The buffers are larger than any socket buffer: what is on the way lies in the two memories
    only.
    """
    nbytes = 9 << 20
    memory = PrivateMemory(nbytes)
    memory_at(memory.address, nbytes)[:] = os.urandom(nbytes)
    assert rig.send.post_address(memory.address, nbytes, signature=4)
    announce = rig.frame()[0]
    assert (announce.type, announce.nbytes) == (FrameType.ANNOUNCE, nbytes)
    rig.peers[0].sendall(encode_frame(Frame(FrameType.CTS, 0, 0, 0, nbytes)))
    got = bytearray(nbytes)
    covered = 0
    while covered < nbytes:
        frame, data = rig.frame()
        got[frame.offset : frame.offset + frame.length] = data
        covered += frame.length
    assert got == memory_at(memory.address, nbytes)
    rig.wait(lambda: rig.send.released == 1)
    target = PrivateMemory(nbytes)
    rig.recv.clear_to_send(target.address, nbytes)
    assert rig.frame()[0].type is FrameType.CTS
    for at in range(0, nbytes, 1 << 20):
        rig.peers[0].sendall(
            encode_frame(Frame(FrameType.DATA, 0, 0, 4, nbytes, at, 1 << 20))
            + got[at : at + (1 << 20)]
        )
    rig.wait(rig.recv.peek)
    assert rig.recv.peek().mode is Mode.LANDED
    assert memory_at(target.address, nbytes) == got
