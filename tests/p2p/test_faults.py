"""Faults by TCP, the handshake against strangers and replays, and block lists against NumPy."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import miraccl
from miraccl.errors import AuthenticationError, InvalidUsage, MiracclError, ProtocolError
from miraccl.p2p import extents
from miraccl.p2p.descriptors import RemoteMemory
from miraccl.transport.region import Rights
from miraccl.wire.p2p import AgentWelcome, InitiatorSide, Introduction, TargetSide, protocol_secret
from tests.p2p.kit import remote_agent


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[miraccl.Agent]:
    monkeypatch.setenv("MIRACCL_P2P_TRUST", "target")
    with miraccl.Agent("initiator", secret="test", timeout=10) as made:
        yield made


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["write", "read"])
@pytest.mark.parametrize("nbytes", [64, 32 << 20])
def test_stopped_target(agent: miraccl.Agent, kind: str, nbytes: int) -> None:
    """The deadline holds, and the connection is made again once the target continues."""
    with remote_agent(MIRACCL_P2P_TRUST="target") as target:
        blob = target.offer("x", (nbytes,))
        with agent.connect(target.address) as peer:
            data = np.full(nbytes, 7, np.uint8)
            move = getattr(peer, kind)
            peer.write(data, blob).wait()
            target.signal(signal.SIGSTOP)
            start = time.monotonic()
            with pytest.raises(miraccl.TransferTimeout):
                move(data, blob, deadline=0.2).wait()
            assert time.monotonic() - start < 5
            target.signal(signal.SIGCONT)
            data[:] = 8
            peer.write(data, blob).wait()
            back = np.zeros_like(data)
            peer.read(back, blob).wait()
            assert (back == 8).all()


@pytest.mark.multiprocess
def test_target_killed_in_a_transfer(agent: miraccl.Agent) -> None:
    nbytes = 64 << 20
    with remote_agent(MIRACCL_P2P_TRUST="target") as target:
        blob = target.offer("x", (nbytes,))
        peer = agent.connect(target.address)
        transfer = peer.write(np.zeros(nbytes, np.uint8), blob)
        target.signal(signal.SIGKILL)
        error = transfer.exception()
        assert error is None or isinstance(error, miraccl.AgentLost)
        while peer.lost is None:
            pass
        with pytest.raises(miraccl.AgentLost):
            peer.write(np.zeros(nbytes, np.uint8), blob).wait()


def test_a_stream_that_a_transfer_found_broken_is_lost(agent: miraccl.Agent) -> None:
    with miraccl.Agent("target", secret="test", timeout=10) as target:
        peer = agent.connect(target.address)
        path = peer._path
        if peer.method != "tcp":
            pytest.skip("a connection within the host is lost at once")
        (stream, *_) = path.streams
        assert path.uses(stream.sock)
        stream.broken = miraccl.AgentLost("ended", agent="target", reason="lost")
        assert path.uses(stream.sock), "its end is that of the other agent"
        stream.broken = miraccl.TransferTimeout("late", agent="target", reason="deadline")
        assert not path.uses(stream.sock), "this agent opens it again"
        stream.broken = None


def test_cut_connection(agent: miraccl.Agent) -> None:
    with miraccl.Agent("target", secret="test", timeout=10) as target:
        memory = np.zeros(1 << 20, np.uint8)
        blob = target.register(memory).advertise()
        peer = agent.connect(target.address)
        peer.write(np.ones(1 << 20, np.uint8), blob).wait()
        for stream in list(target._served):
            stream.close()
        while peer.lost is None:
            pass
        with pytest.raises(miraccl.AgentLost):
            peer.write(np.ones(1 << 20, np.uint8), blob).wait()
        again = agent.connect(target.address)
        again.write(np.full(1 << 20, 2, np.uint8), blob).wait()
        assert (memory == 2).all()


def test_initiator_that_ends_in_a_transfer_is_reported() -> None:
    """A raw stream announces a notification, sends half a frame and ends."""
    from miraccl.wire import p2p_target as wire

    with miraccl.Agent("target", secret="test", timeout=10) as target:
        registration = target.register(np.zeros(4096, np.uint8))
        sock, _ = handshake(target)
        put = wire.TargetRequest(
            kind=wire.PUT,
            flags=wire.LAST | wire.NOTIFIES,
            number=5,
            slot=registration.slot,
            payload=4096,
            generation=registration.generation,
            key=registration.key,
            extents=((0, 4096),),
        )
        sock.sendall(put.encode() + bytes(100))
        sock.close()
        found = target.wait_notification(10)
        assert found is not None
        assert found.tag == 5
        assert isinstance(found.error, miraccl.AgentLost)
        registration.deregister(5)


# ---- handshake


INTRODUCTION = Introduction(
    name="raw", agent=bytes(32), address="127.0.0.1:1", host="", pid=1, connection=1, stream=1
)


def secret_of(text: str) -> bytes:
    import hashlib

    return protocol_secret(hashlib.sha256(text.encode()).digest())


def handshake(target: miraccl.Agent) -> tuple[socket.socket, list[bytes]]:
    """Prove the secret over a plain socket; return it and the bytes that were sent."""
    host, port = target.address.split(":")
    sock = socket.create_connection((host, int(port)))
    sock.settimeout(10)
    side, sent = InitiatorSide(secret_of("test"), b"n" * 32, INTRODUCTION), []
    sent.append(side.start())
    sock.sendall(sent[0])
    while side.welcome is None:
        reply = side.receive(sock.recv(4096))
        if reply:
            sent.append(reply)
            sock.sendall(reply)
    sent.append(side.ready(False))
    sock.sendall(sent[-1])
    return sock, sent


def test_a_replayed_session_is_refused() -> None:
    with miraccl.Agent("target", secret="test", timeout=10) as target:
        first, sent = handshake(target)
        host, port = target.address.split(":")
        replay = socket.create_connection((host, int(port)))
        replay.settimeout(10)
        replay.sendall(b"".join(sent))
        received = b""
        try:
            while part := replay.recv(4096):
                received += part
        except ConnectionResetError:
            pass
        assert len(received) <= 84, "more than a challenge was revealed"
        first.close()


def test_sides_agree_and_mutations_are_refused() -> None:
    welcome = AgentWelcome(
        name="t",
        agent=bytes(32),
        host="h",
        pid=1,
        table_fd=0,
        table_inode=0,
        pair_fd=0,
        pair_inode=0,
        probe=0,
        probe_value=0,
    )

    def run(change: Any = lambda number, data: data) -> TargetSide:
        a = InitiatorSide(secret_of("s"), b"a" * 32, INTRODUCTION)
        b = TargetSide(secret_of("s"), b"b" * 32)
        reply = b.receive(change(0, a.start()))
        reply = b.receive(change(1, a.receive(reply)))
        assert b.introduction == INTRODUCTION
        a.receive(b.welcome(welcome))
        b.receive(change(2, a.ready(True)) + b"rest")
        return b

    done = run()
    assert done.ready is not None
    assert done.rest == b"rest"
    for number in range(3):
        for at in (4, 5, 20, -1):

            def flip(n: int, data: bytes, number: int = number, at: int = at) -> bytes:
                if n != number:
                    return data
                changed = bytearray(data)
                changed[at] ^= 1
                return bytes(changed)

            with pytest.raises((MiracclError, AssertionError)):
                run(flip)
    other = InitiatorSide(secret_of("other"), b"a" * 32, INTRODUCTION)
    challenge = TargetSide(secret_of("s"), b"b" * 32).receive(other.start())
    with pytest.raises(AuthenticationError):
        other.receive(challenge)


# ---- descriptors and block lists


def test_changed_descriptors_are_refused() -> None:
    good = RemoteMemory(
        agent=bytes(32),
        slot=1,
        generation=3,
        key=bytes(16),
        offset=0,
        nbytes=64,
        block_nbytes=8,
        rights=Rights.READ,
        shape=(8, 8),
        dtype="uint8",
        name="a",
        address="h:1",
    )
    data = good.encode()
    assert RemoteMemory.decode(data) == good
    for at in range(len(data)):
        with pytest.raises(ProtocolError):
            RemoteMemory.decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ProtocolError):
            RemoteMemory.decode(data[:at])


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    count=st.integers(0, 40),
    block=st.integers(1, 9),
    writes=st.booleans(),
)
def test_block_lists(data: Any, count: int, block: int, writes: bool) -> None:
    nlocal, nremote = (data.draw(st.integers(1, 6000)) for _ in range(2))
    here = data.draw(st.lists(st.integers(0, nlocal - 1), min_size=count, max_size=count))
    there = data.draw(st.lists(st.integers(0, nremote - 1), min_size=count, max_size=count))
    local_blocks = extents.block_list(here, "local", nlocal, "test")
    remote_blocks = extents.block_list(there, "remote", nremote, "test")
    targets = there if writes else here
    arguments: dict[str, Any] = {
        "local": 1 << 20,
        "local_blocks": local_blocks,
        "local_count": nlocal,
        "remote_blocks": remote_blocks,
        "remote_count": nremote,
        "block_nbytes": block,
        "writes": writes,
        "op_name": "test",
    }
    if len(set(targets)) < count:
        with pytest.raises(InvalidUsage, match="is the target of two blocks"):
            extents.from_blocks(**arguments)
        return
    made = extents.from_blocks(**arguments)
    pairs = []
    for address, offset, nbytes in made.table.tolist():
        assert nbytes % block == 0
        first = (address - (1 << 20)) // block, offset // block
        pairs += [(first[0] + i, first[1] + i) for i in range(nbytes // block)]
    assert sorted(pairs) == sorted(zip(here, there, strict=True))
    order = [pair[1] if writes else pair[0] for pair in pairs]
    assert order == sorted(order), "extents are sorted by target"
    merged = sum(
        (b[0], b[1]) != (a[0] + 1, a[1] + 1)
        for a, b in zip(pairs, pairs[1:], strict=False)  # noqa: RUF007
    )
    assert made.count == (merged + 1 if count else 0), "neighbours on both sides are one extent"
