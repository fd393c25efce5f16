"""UDP transport on loopback: the conformance kit, paths, keys, strangers and ends."""

from __future__ import annotations

import json
import os
import random
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from miraccl import clock
from miraccl.errors import ProtocolError, SystemFailure
from miraccl.proxy import Proxy
from miraccl.proxy.datagram_engine import DatagramEngine
from miraccl.transport.base import Capability, DatagramOptions, Endpoint
from miraccl.transport.datagram import (
    DatagramInfo,
    DatagramTransport,
    SocketInfo,
    paths_between,
    shared_family_first,
)
from miraccl.transport.fifo import PrivateMemory, memory_at
from miraccl.transport.registry import UDP
from miraccl.wire.datagram.seal import AES_128_GCM, common_cipher
from miraccl.wire.proxy_records import LossKind
from tests.transport.conformance import WAIT_S, TransportConformance, World, pattern
from tests.transport.socket_world import SLOT


def build_rank(
    world: World,
    rank: int,
    *,
    addresses: Sequence[str] = ("127.0.0.1",),
    secret: bytes = b"secret",
    options: DatagramOptions | None = None,
    timeout: float = WAIT_S,
    proxy_type: Any = DatagramEngine,
) -> DatagramTransport:
    """Add a rank on a host of its own to the world."""
    losses = world.losses.setdefault(rank, [])

    def on_lost(peer, loss):
        losses.append((peer, loss))
        world.news.set()

    proxy = proxy_type(
        rank=rank, wake=lambda _: world.news.set(), on_lost=on_lost, segment_bytes=1 << 17
    )
    world.cleanup.callback(proxy.close)
    transport = DatagramTransport(
        Endpoint(rank=rank, hostid=f"host{rank}", pid=os.getpid(), addresses=tuple(addresses)),
        proxy=proxy,
        secret=secret,
        job=b"test",
        slot_bytes=SLOT,
        options=options or DatagramOptions(),
        timeout=timeout,
        linger=1.0,
    )
    world.cleanup.callback(transport.abort, "the test is over")
    world.transports[rank] = transport
    return transport


def build_world(nranks: int, **options: Any) -> World:
    world = World(transports={})
    for rank in range(nranks):
        build_rank(world, rank, **options)
    return world


class TestDatagram(TransportConformance):
    """The compiled engine."""

    spec = UDP

    def build(self, nranks):
        return build_world(nranks, options=DatagramOptions(ports=2))


class TestDatagramEncrypted(TransportConformance):
    spec = UDP

    def build(self, nranks):
        return build_world(nranks, options=DatagramOptions(protection="aead", mtu=1472))


class TestDatagramCredit(TransportConformance):
    """Every rank grants what its peers send."""

    spec = UDP

    def build(self, nranks):
        options = DatagramOptions(mtu=1472, admission="credit", credit_bytes=1 << 16)
        return build_world(nranks, options=options)


class TestDatagramOff(TransportConformance):
    """Messages are cut into slots; none waits for a posted receive."""

    spec = replace(UDP, capabilities=UDP.capabilities & ~Capability.IN_PLACE)

    def build(self, nranks):
        return build_world(nranks, options=DatagramOptions(mtu=1472, admission="off"))


def test_ranks_agree_on_the_absence_of_clear_to_send() -> None:
    world = World(transports={})
    with world.cleanup:
        for rank, admission in enumerate(("off", "credit")):
            build_rank(world, rank, options=DatagramOptions(admission=admission), timeout=1.0)
        with pytest.raises(
            Exception, match=r"off on rank 0, credit on rank 1|credit on rank 1, off"
        ):
            world.connect()


class TestDatagramReference(TransportConformance):
    """The machines of ``wire.datagram`` in Python."""

    spec = UDP

    def build(self, nranks):
        return build_world(nranks, options=DatagramOptions(ports=2), proxy_type=Proxy)


def test_both_engines_admit_by_grants() -> None:
    world = World(transports={})
    options = DatagramOptions(mtu=1472, admission="credit", credit_bytes=1 << 16)
    for rank, proxy_type in enumerate((DatagramEngine, Proxy)):
        build_rank(world, rank, options=options, proxy_type=proxy_type)
    with world.cleanup:
        world.connect()
        for a, b in ((0, 1), (1, 0)):
            way, data = world.way(a, b), pattern(SLOT)
            for _ in range(1 + (3 << 16) // SLOT):  # three times the unsolicited start
                way.post(data)
                assert way.take()[0] == data


def sockets(*rows: tuple[str, int]) -> list[SocketInfo]:
    return [SocketInfo(host=h, port=p, mtu=1472, share_bytes=1 << 20) for h, p in rows]


def test_paths_are_numbered_alike_and_pair_addresses_of_one_network() -> None:
    a = sockets(("10.0.0.1", 1), ("10.0.0.1", 2), ("10.9.0.1", 3), ("10.9.0.1", 4))
    b = sockets(("10.9.0.2", 5), ("10.9.0.2", 6), ("10.0.0.2", 7), ("10.0.0.2", 8))
    there, back = paths_between(a, b, first=True), paths_between(b, a, first=False)
    assert len(there) == len(back) == 4
    for one, other in zip(there, back, strict=True):
        assert a[one.socket].host.rsplit(".", 1)[0] == one.host.rsplit(".", 1)[0]
        assert (one.host, one.port) == (b[other.socket].host, b[other.socket].port)
        assert (other.host, other.port) == (a[one.socket].host, a[one.socket].port)
    assert len({p.port for p in there}) == 4


def test_a_host_with_fewer_interfaces_uses_the_nearest_one() -> None:
    a = sockets(("10.0.0.1", 1), ("10.9.0.1", 2))
    (path,) = paths_between(a, sockets(("10.9.0.2", 3)), first=False)
    assert (path.socket, path.port) == (1, 3)


def test_ranks_of_one_host_use_loopback_alone() -> None:
    world = World(transports={})
    with world.cleanup:
        transport = build_rank(world, 0, addresses=("127.0.0.1", "127.0.0.2"))
        hosts = {s.host for s in DatagramInfo.decode(transport.setup()).sockets}
        assert hosts == {"127.0.0.1"}


def test_changed_connect_infos_are_read_or_refused() -> None:
    sockets = (SocketInfo(host="10.0.0.1", port=5, mtu=1472, share_bytes=1 << 20),)
    info = DatagramInfo(
        sockets=sockets,
        nonce=bytes(32),
        connection=7,
        protection="mac",
        ciphers=("aes-128-gcm",),
        slot_bytes=1 << 20,
    )
    assert DatagramInfo.decode(info.encode()) == info
    choose = random.Random(1)
    odd: list[Any] = [
        None,
        -1,
        0,
        float("inf"),
        float("nan"),
        "x",
        [],
        {},
        True,
        1 << 70,
        [1],
        ["a"],
    ]

    def changed(value: Any) -> Any:
        if not isinstance(value, list) or not value or choose.random() < 0.2:
            return choose.choice(odd)
        index = choose.randrange(len(value))
        return [*value[:index], changed(value[index]), *value[index + 1 :]]

    for _ in range(2000):
        data = json.dumps(changed(json.loads(info.encode()))).encode()
        with suppress(ProtocolError):
            assert all(s.share_bytes > 0 for s in DatagramInfo.decode(data).sockets)


def test_packets_fit_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(transports={})
    with world.cleanup:
        monkeypatch.setattr("miraccl.transport.datagram.payload_mtu", lambda address: 972)
        with pytest.raises(SystemFailure, match="carries 972 bytes per packet, 1232 are needed"):
            build_rank(world, 0, proxy_type=Proxy).setup()
        monkeypatch.setattr("miraccl.transport.datagram.payload_mtu", lambda address: 1472)
        large = build_rank(world, 1, proxy_type=Proxy, options=DatagramOptions(mtu=9000))
        assert DatagramInfo.decode(large.setup()).sockets[0].mtu == 1472


def test_ranks_use_a_family_that_all_have() -> None:
    def rank(number: int, *addresses: str) -> Endpoint:
        return Endpoint(rank=number, hostid=f"h{number}", pid=1, addresses=addresses)

    v4, v6 = ("10.0.0.1", "10.1.0.1"), ("fd00::1",)
    first, second = rank(0, *v4, *v6), rank(1, *v6, *v4)
    assert shared_family_first(first, [second]).addresses == (*v4, *v6)
    assert shared_family_first(second, [first]).addresses == (*v4, *v6)
    for only in (rank(2, *v6), rank(2, *v4)):
        for one, other in ((first, second), (second, first)):
            ordered = shared_family_first(one, [other, only]).addresses
            assert ordered[0] == only.addresses[0]


class EngineWithoutAegis(DatagramEngine):
    """Engine of a processor without instructions for AES."""

    ciphers = (AES_128_GCM,)


@pytest.mark.parametrize("protection", ["mac", "aead", "none"])
@pytest.mark.parametrize("other", [DatagramEngine, EngineWithoutAegis])
def test_all_protections_carry_messages(protection: str, other: type[DatagramEngine]) -> None:
    world, options = World(transports={}), DatagramOptions(protection=protection)
    build_rank(world, 0, options=options)
    build_rank(world, 1, options=options, proxy_type=other)
    with world.cleanup:
        world.connect()
        if protection != "none":
            cipher = common_cipher(*(engine_of(world, rank).ciphers for rank in (0, 1)))
            assert f"protection {protection} ({cipher})" in world.transports[0].describe(1)
        way = world.way(0, 1)
        way.post(b"x" * SLOT, 3)
        assert way.take()[0] == b"x" * SLOT


def test_a_rank_with_another_secret_is_named() -> None:
    world = World(transports={})
    with world.cleanup:
        build_rank(world, 0, timeout=0.3)
        build_rank(world, 1, timeout=0.3, secret=b"other")
        with pytest.raises(Exception, match=r"no answer from rank\(s\) [01]"):
            world.connect()


def test_strangers_are_counted_and_get_no_answer() -> None:
    world = build_world(2)
    with world.cleanup, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        world.connect()
        transport = world.transports[0]
        assert isinstance(transport, DatagramTransport)
        assert transport._info is not None
        number = transport._info.connection + 1
        port = transport._info.sockets[0].port
        valid_name = b"\x10\0\0\0" + (number & 0xFFFFFFFF).to_bytes(4, "little")
        for size in (1, 31, 32, 1400):
            stranger.sendto(bytes(size), ("127.0.0.1", port))
            stranger.sendto((valid_name + bytes(size))[:size], ("127.0.0.1", port))
        engine = transport._proxy
        assert isinstance(engine, DatagramEngine)
        world.wait(lambda: engine.strangers == 8)
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.recv(100)
        way = world.way(0, 1)
        way.post(b"goes on")
        assert way.take()[0] == b"goes on"
        assert not world.losses[0]


class Relay:
    """UDP sockets between two ranks with one port each: forwards and records all packets."""

    def __init__(self, world: World) -> None:
        self.packets: dict[int, list[bytes]] = {0: [], 1: []}
        setups = [world.transports[rank].setup() for rank in range(2)]
        self.ports = [DatagramInfo.decode(data).sockets[0].port for data in setups]
        self._sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
        for sock in self._sockets:
            sock.bind(("127.0.0.1", 0))
        self._stopping = False
        self._thread = clock.thread(self._run, name="relay")
        self._thread.start()
        world.cleanup.callback(self.close)

    def info(self, rank: int, data: bytes) -> bytes:
        """Return the connect info of a rank with the relay's port instead of its own."""
        info = DatagramInfo.decode(data)
        port = int(self._sockets[rank].getsockname()[1])
        return replace(info, sockets=(replace(info.sockets[0], port=port),)).encode()

    def send(self, rank: int, packet: bytes) -> None:
        self._sockets[rank].sendto(packet, ("127.0.0.1", self.ports[rank]))

    def _run(self) -> None:
        while not self._stopping:
            for sock in select.select(self._sockets, [], [], 0.05)[0]:
                rank = self._sockets.index(sock)
                packet = sock.recv(1 << 16)
                self.packets[rank].append(packet)
                self.send(rank, packet)

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        for sock in self._sockets:
            sock.close()


@pytest.mark.parametrize("protection", ["mac", "aead"])
def test_replayed_and_changed_packets_have_no_effect(protection: str) -> None:
    world = build_world(2, options=DatagramOptions(mtu=1472, protection=protection))
    with world.cleanup:
        relay, choose = Relay(world), random.Random(1)
        infos = {rank: relay.info(rank, t.setup()) for rank, t in world.transports.items()}
        world.in_parallel(lambda rank: world.connect_rank(rank, {1 - rank: infos[1 - rank]}))
        there, back = world.way(0, 1), world.way(1, 0)
        for turn in range(40):
            there.post(pattern(SLOT), turn)
            data, message = there.take()
            assert (data, message.signature) == (pattern(SLOT), turn)
            back.post(b"answer", turn)
            assert back.take()[0] == b"answer"
            for rank, packets in relay.packets.items():
                for _ in range(20):
                    packet = bytearray(choose.choice(packets))
                    relay.send(rank, bytes(packet))
                    packet[choose.randrange(len(packet))] ^= 1 << choose.randrange(8)
                    relay.send(rank, bytes(packet))
        world.wait(lambda: min(engine_of(world, rank).strangers for rank in range(2)) >= 700)
        assert not any(world.losses.values())


def test_a_closed_port_of_the_peer_makes_its_path_suspect() -> None:
    world = build_world(2, options=DatagramOptions(ports=2))
    with world.cleanup:
        world.connect()
        first, second = world.transports[0], world.transports[1]
        assert isinstance(first, DatagramTransport)
        assert isinstance(second, DatagramTransport)
        engine = first._proxy
        assert isinstance(engine, DatagramEngine)
        way = world.way(0, 1)

        def states() -> list[str]:
            way.post(b"x")
            way.take()
            return [report.state for report in engine.reports()]

        world.wait(lambda: states() == ["open", "open"])
        second._sockets[1].close()
        # a busy host may suspect path 0 for a moment
        world.wait(lambda: states()[0] == "open" and states()[1] != "open")


@pytest.mark.parametrize("proxy_type", [DatagramEngine, Proxy])
def test_close_does_not_wait_for_an_open_peer(proxy_type: Any) -> None:
    world = build_world(2, proxy_type=proxy_type)
    with world.cleanup:
        world.connect()
        way = world.way(0, 1)
        way.post(b"last word")
        assert way.take()[0] == b"last word"
        start = clock.monotonic()
        world.transports[0].close()
        assert clock.monotonic() - start < 0.5  # of the linger of 1 s
        world.wait(lambda: world.losses[1], "the peer did not learn of the end")
        assert world.losses[1][0][1].kind is LossKind.CLOSED


#: asm-generic/socket.h: without checksums the kernel refuses UDP_SEGMENT with EINVAL.
SO_NO_CHECK = 11


def engine_of(world: World, rank: int) -> DatagramEngine:
    transport = world.transports[rank]
    assert isinstance(transport, DatagramTransport)
    assert isinstance(transport._proxy, DatagramEngine)
    return transport._proxy


def test_an_interface_that_refuses_super_packets_gets_single_ones() -> None:
    world = build_world(2, options=DatagramOptions(mtu=1472))
    with world.cleanup:
        world.connect()
        transport = world.transports[0]
        assert isinstance(transport, DatagramTransport)
        for sock in transport._sockets:
            sock.setsockopt(socket.SOL_SOCKET, SO_NO_CHECK, 1)
        way = world.way(0, 1)
        way.post(pattern(SLOT))
        assert way.take()[0] == pattern(SLOT)
        world.wait(lambda: transport.paths()[0].sent_bytes >= SLOT)  # all are acknowledged
        (status,) = transport.paths()
        assert (status.transport, status.state, status.peer) == ("udp", "OPEN", 1)
        (report,) = engine_of(world, 0).reports()
        assert not report.gso
        assert report.send_errors == 0
        assert engine_of(world, 1).reports()[0].gso


def test_memory_is_not_written_after_an_abort_has_returned() -> None:
    world = build_world(2, options=DatagramOptions(mtu=1472))
    with world.cleanup:
        world.connect()
        nbytes = 8 << 20
        way, source, target = world.way(0, 1), PrivateMemory(nbytes), PrivateMemory(nbytes)
        memory_at(source.address, nbytes)[:] = b"x" * nbytes
        way.recv.clear_to_send(target.address, nbytes)
        assert way.send.post_address(source.address, nbytes)
        world.wait(lambda: b"x" in bytes(memory_at(target.address, nbytes)))
        world.transports[1].abort("enough")
        before = bytes(memory_at(target.address, nbytes))
        world.wait(lambda: world.losses[0], "the sender did not learn of the abort")
        assert bytes(memory_at(target.address, nbytes)) == before
        assert world.losses[0][0][1].kind is LossKind.ABORTED


def test_an_idle_engine_sleeps() -> None:
    world = build_world(2)
    with world.cleanup:
        world.connect()
        way = world.way(0, 1)
        way.post(b"x")
        way.take()
        engine = engine_of(world, 0)
        world.wait(lambda: engine._atomics.load_acquire(engine.asleep) == 1)
        rounds = engine.rounds
        clock.sleep(0.05)
        assert engine.rounds - rounds <= 3
