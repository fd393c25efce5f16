"""TCP transport on loopback: the conformance kit over IPv4 and IPv6, meeting, intruders, ends, and
processes that die.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from miraccl import clock
from miraccl.deadline import Deadline
from miraccl.errors import (
    AuthenticationError,
    BootstrapError,
    CommunicatorClosed,
    InvalidUsage,
    ProtocolError,
    SystemFailure,
)
from miraccl.proxy import Proxy
from miraccl.transport import connect_round
from miraccl.transport.base import Endpoint
from miraccl.transport.fifo import Mode, PrivateMemory, memory_at
from miraccl.transport.registry import TCP
from miraccl.transport.socket import (
    RECEIVE_WINDOW_BYTES,
    ConnectInfo,
    SocketOptions,
    SocketTransport,
)
from miraccl.wire.proxy_records import LossKind
from miraccl.wire.stream import HELLO_BYTES, InitiatorHandshake, StreamIdentity, derive_key
from tests.support.fault_injection import PARTIAL, FaultSweep, limit_descriptors, open_files
from tests.transport.conformance import WAIT_S, TransportConformance, World, pattern
from tests.transport.socket_world import SLOT, build_rank, build_world


def have_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


class TestSocketV4(TransportConformance):
    spec = TCP

    def build(self, nranks):
        return build_world(nranks)


class TestSocketOneStream(TransportConformance):
    spec = TCP

    def build(self, nranks):
        return build_world(nranks, nstreams=1)


@pytest.mark.skipif(not have_ipv6(), reason="this host has no IPv6")
class TestSocketV6(TransportConformance):
    spec = TCP

    def build(self, nranks):
        return build_world(nranks, addresses=("::1",), nstreams=3)


@pytest.fixture
def world():
    world = World(transports={})
    yield world
    world.close()


def test_ports_of_a_range(world, monkeypatch):
    first = free_ports(2)
    monkeypatch.setenv("MIRACCL_NET_PORT_RANGE", f"{first}-{first + 1}")
    infos = {rank: build_rank(world, rank).setup() for rank in range(2)}
    ports = [ConnectInfo.decode(info).addresses[0][1] for info in infos.values()]
    assert ports == [first, first + 1]
    with pytest.raises(SystemFailure, match=f"RANGE={first}-{first + 1} are in use"):
        build_rank(world, 2).setup()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda r: world.transports[r].connect({1 - r: infos[1 - r]}), range(2)))
    world.transports[0].release()  # its port is free for the next communicator
    assert ConnectInfo.decode(world.transports[2].setup()).addresses[0][1] == first


def free_ports(count):
    """Return the first of ``count`` consecutive free ports of loopback."""
    for first in range(21000, 32000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    pytest.skip("no free ports")


@pytest.fixture
def pair():
    world = build_world(2)
    world.connect()
    yield world
    world.close()


# --- data ---


def test_large_message_lands_in_place_in_pieces_on_all_streams(pair):
    nbytes = (1 << 20) + 12345
    way = pair.way(0, 1)
    source, target = PrivateMemory(nbytes), PrivateMemory(nbytes)
    memory_at(source.address, nbytes)[:] = pattern(nbytes)
    for ahead in range(3):
        way.recv.clear_to_send(target.address, nbytes, ahead=ahead)
    for i in range(3):
        memory_at(target.address, nbytes)[:] = bytes(nbytes)
        assert way.send.post_address(source.address, nbytes, signature=i)
        data, message = way.take()
        assert message.mode is Mode.LANDED
        assert message.signature == i
        assert memory_at(target.address, nbytes) == pattern(nbytes)
        assert data == pattern(nbytes)


def test_message_larger_than_a_slot_is_announced_and_waits(pair):
    way = pair.way(0, 1)
    source, target = PrivateMemory(SLOT + 1), PrivateMemory(SLOT + 1)
    assert way.send.post_address(source.address, SLOT + 1, signature=77)
    pair.wait(lambda: way.recv.announced, "no announcement")
    assert way.recv.announced == (77, SLOT + 1)
    assert way.recv.peek() is None
    way.recv.clear_to_send(target.address, SLOT + 1)
    assert way.take()[1].mode is Mode.LANDED


def test_a_receive_buffer_that_is_too_small_is_reported_and_not_written(pair):
    way = pair.way(0, 1)
    source, target = PrivateMemory(SLOT * 2), PrivateMemory(SLOT * 2)
    memory_at(source.address, SLOT * 2)[:] = b"x" * SLOT * 2
    way.recv.clear_to_send(target.address, SLOT + 1)
    assert way.send.post_address(source.address, SLOT * 2)
    message = way.next()
    assert message.mode is Mode.OVERSIZE
    assert message.nbytes == SLOT * 2
    assert memory_at(target.address, SLOT * 2) == bytes(SLOT * 2)


def test_different_slots_and_stream_counts_of_the_two_sides(world):
    build_rank(world, 0, slot_bytes=8192, nstreams=1)
    build_rank(world, 1, slot_bytes=65536, nstreams=4)
    world.connect()
    there, back = world.way(0, 1), world.way(1, 0)
    there.post(pattern(8192))
    assert there.take()[0] == pattern(8192)
    target = PrivateMemory(65536)
    back.recv.clear_to_send(target.address, 65536)
    back.post(pattern(65536))
    data, message = back.take()
    assert data == pattern(65536)
    assert message.mode is Mode.LANDED


def test_executor_that_posts_nonsense_ends_the_link_as_internal(pair):
    way = pair.way(0, 1)
    assert way.send.post_address(64, 100)
    pair.wait(lambda: pair.losses[0] and pair.losses[1], "the loss was not reported")
    assert pair.losses[0][0][1].kind is LossKind.INTERNAL
    assert pair.losses[1][0][1].kind is LossKind.ABORTED


# --- meeting ---


def test_connect_in_two_steps_keeps_an_early_caller(world):
    """Rank 1 asks for 0 and 2 at different times; rank 0 has called before it was asked for."""
    for rank in range(3):
        build_rank(world, rank)
    infos = {rank: transport.setup() for rank, transport in world.transports.items()}
    plan = {0: [[2], [1]], 1: [[2], [0]], 2: [[0, 1]]}

    def body(rank):
        for peers in plan[rank]:
            world.connect_rank(rank, {p: infos[p] for p in peers})

    world.in_parallel(body)
    for a in range(3):
        for b in range(3):
            if a != b:
                way = world.way(a, b)
                way.post(bytes([a, b]))
                assert way.take()[0] == bytes([a, b])


def test_connecting_again_returns_the_same_pair(pair):
    infos = {rank: transport.setup() for rank, transport in pair.transports.items()}
    assert pair.transports[0].connect({1: infos[1]}) == pair.pairs[0]


def test_address_that_does_not_answer_is_passed_over(world):
    for rank in range(2):
        build_rank(world, rank)
    info = ConnectInfo.decode(world.transports[1].setup())
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refused
        refused = ("127.0.0.1", unused.getsockname()[1])
        better = ConnectInfo(
            addresses=(refused, *info.addresses), nstreams=info.nstreams, slot_bytes=info.slot_bytes
        )
        infos = {0: world.transports[0].setup(), 1: better.encode()}
        world.in_parallel(lambda rank: world.connect_rank(rank, {1 - rank: infos[1 - rank]}))
    way = world.way(0, 1)
    way.post(b"x")
    assert way.take()[0] == b"x"


def test_peer_that_cannot_be_reached_is_named(world, monkeypatch):
    monkeypatch.setattr(connect_round, "REFUSED_TIMEOUT_S", 0.05)
    transport = build_rank(world, 0)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        info = ConnectInfo(
            addresses=(("127.0.0.1", unused.getsockname()[1]),), nstreams=2, slot_bytes=4096
        )
        with pytest.raises(
            SystemFailure, match=r"rank 4 at 127.0.0.1: Connection refused"
        ) as caught:
            transport.connect({4: info.encode()})
    assert caught.value.peer == 4


#: Accidents on the way to a stream, after which it is made all the same.
PASSING = {
    "socket": [errno.EMFILE],
    "connect": [errno.EADDRNOTAVAIL, errno.ECONNREFUSED, errno.EHOSTUNREACH],
    "accept": [errno.EMFILE, errno.ECONNABORTED],
    "getpeername": [errno.ENOTCONN],
    "send": [errno.EAGAIN, errno.ENOBUFS, errno.ECONNRESET, PARTIAL],
    "recv": [errno.EAGAIN, errno.ENOMEM, PARTIAL],
}


def test_accidents_on_the_way_to_a_stream_pass(monkeypatch):
    def scenario(accident=None):
        world = build_world(2)
        infos = {rank: transport.setup() for rank, transport in world.transports.items()}
        try:
            with accident or nullcontext():
                world.in_parallel(
                    lambda rank: world.connect_rank(rank, {1 - rank: infos[1 - rank]})
                )
        except Exception as error:
            raise AssertionError(accident) from error
        finally:
            world.close()

    for accident in FaultSweep(monkeypatch).faults(PASSING, scenario):
        scenario(accident)


def test_shortage_of_memory_on_streams_passes(monkeypatch):
    sizes = [5, 3 * SLOT, SLOT, 1 << 18]

    def scenario():
        world = build_world(2, proxy_type=Proxy)
        try:
            world.connect()
            way, room = world.way(0, 1), PrivateMemory(max(sizes))
            for number, nbytes in enumerate(sizes):
                source = pattern(nbytes, number)
                memory = PrivateMemory(nbytes)
                memory_at(memory.address, nbytes)[:] = source
                way.recv.clear_to_send(room.address, max(sizes))
                way.send.post_address(memory.address, nbytes)
                assert way.take()[0] == source
            assert not any(world.losses.values())
        finally:
            world.close()

    plan = {"sendmsg": [errno.ENOBUFS], "recv_into": [errno.ENOMEM], "recvmsg_into": [errno.ENOMEM]}
    for accident in FaultSweep(monkeypatch).faults(plan, scenario):
        with accident:
            scenario()


def test_no_memory_for_slots_is_a_system_failure_and_leaves_no_connection():
    files, world = open_files(), World(transports={})
    try:
        build_rank(world, 0)
        build_rank(world, 1, slot_bytes=1 << 43)
        infos = {rank: transport.setup() for rank, transport in world.transports.items()}

        def body(rank):
            if rank:
                with pytest.raises(
                    SystemFailure,
                    match=r"cannot allocate \d+ bytes of memory: Cannot allocate memory",
                ):
                    world.connect_rank(1, {0: infos[0]})
            else:
                world.connect_rank(
                    0,
                    {
                        1: ConnectInfo(
                            **{**vars(ConnectInfo.decode(infos[1])), "slot_bytes": SLOT}
                        ).encode()
                    },
                )

        world.in_parallel(body)
        world.wait(lambda: world.losses[0], "rank 0 was not told")
    finally:
        world.close()
    assert open_files() <= files


def test_call_that_reaches_itself_is_made_again(world, monkeypatch):
    """TCP's simultaneous open: nobody listens at a port of this host (any more), and the kernel
    takes the same one for the call.
    """
    original = connect_round.ConnectRound._connect
    itself: list[socket.socket] = []

    def connect(self, address, port):
        if itself:
            return original(self, address, port)
        itself.append(socket.socket())
        itself[0].bind((address, 0))
        itself[0].setblocking(False)
        itself[0].connect_ex(itself[0].getsockname())
        return itself[0]

    monkeypatch.setattr(connect_round.ConnectRound, "_connect", connect)
    for rank in range(2):
        build_rank(world, rank)
    world.connect()
    assert itself[0].fileno() < 0


def test_address_that_the_host_has_lost_is_left_out(world):
    info = build_rank(world, 0, addresses=("192.0.2.77", "127.0.0.1")).setup()
    assert [address for address, _ in ConnectInfo.decode(info).addresses] == ["127.0.0.1"]
    with pytest.raises(
        SystemFailure,
        match=r"rank 1: cannot listen on 192\.0\.2\.77: Cannot assign requested address",
    ):
        build_rank(world, 1, addresses=("192.0.2.77",)).setup()


@pytest.mark.parametrize("count", range(5))
def test_rank_that_is_short_of_descriptors_says_so_and_leaves_none(count):
    """A proxy needs 2, a listener and a meeting 1 each; for streams, a rank waits until the
    deadline.
    """
    files, world = open_files(), World(transports={})

    def connect():
        transport = build_rank(world, 0, timeout=0.1)
        transport.setup()
        transport.connect(
            {1: ConnectInfo(addresses=(("127.0.0.1", 9),), nstreams=2, slot_bytes=4096).encode()}
        )

    try:
        with (
            limit_descriptors(count),
            pytest.raises((SystemFailure, BootstrapError), match="Too many open files"),
        ):
            connect()
    finally:
        world.close()
    assert open_files() <= files


@pytest.mark.parametrize("rank", [0, 1])
def test_peer_that_never_asks_is_named_after_the_deadline(world, rank):
    for r in range(2):
        build_rank(world, r, timeout=0.2)
    infos = {r: transport.setup() for r, transport in world.transports.items()}
    with pytest.raises(
        BootstrapError, match=rf"cannot connect to ranks \[{1 - rank}\] over TCP within 0.2 s"
    ):
        world.transports[rank].connect({1 - rank: infos[1 - rank]})


def test_a_deadline_that_has_passed_leaves_connect_no_time(world):
    """Stages before have used it up; the words are about the whole."""
    transport = build_rank(world, 0, timeout=Deadline(seconds=3600.0, at=0.0))
    absent = ConnectInfo(addresses=(("127.0.0.1", 9),), nstreams=2, slot_bytes=4096).encode()
    for _ in range(2):
        with pytest.raises(
            BootstrapError, match=r"cannot connect to ranks \[1\] over TCP within 3600 s"
        ):
            transport.connect({1: absent})


def test_other_secret_is_refused_by_the_caller(world):
    build_rank(world, 0, secret=b"one")
    build_rank(world, 1, secret=b"two", timeout=0.5)
    infos = {r: transport.setup() for r, transport in world.transports.items()}
    errors = {}

    def body(rank):
        while 0 not in errors:  # the caller may be late
            try:
                return world.connect_rank(rank, {1 - rank: infos[1 - rank]})
            except Exception as error:
                errors[rank] = error

    world.in_parallel(body)
    assert isinstance(errors[0], AuthenticationError)
    assert "rank 1 does not know the secret" in str(errors[0])
    assert isinstance(errors[1], BootstrapError)


# --- unauthenticated peers


def call(transport: SocketTransport) -> socket.socket:
    (address,) = ConnectInfo.decode(transport.setup()).addresses
    return socket.create_connection(address, timeout=WAIT_S)


def test_unauthenticated_peers_and_garbage_do_not_disturb_connecting(world):
    for rank in range(2):
        build_rank(world, rank)
    intruders = [call(world.transports[1]) for _ in range(connect_round.MAX_UNAUTHENTICATED + 20)]
    for i, intruder in enumerate(intruders):
        intruder.sendall(
            [b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 9, b"\0" * 4096, pattern(HELLO_BYTES)][
                i % 4
            ]
        )
    world.connect()
    way = world.way(0, 1)
    way.post(b"x")
    assert way.take()[0] == b"x"
    for i, intruder in enumerate(intruders):
        with intruder:
            if i % 4:  # the silent ones may still sit in the queue
                assert drained(intruder) == b""


def drained(sock: socket.socket) -> bytes:
    """Return all bytes until the peer ends the connection."""
    found = b""
    try:
        while data := sock.recv(4096):
            found += data
    except ConnectionError:
        pass
    return found


def test_unauthenticated_peer_with_a_plausible_hello_gets_a_challenge_only(world, monkeypatch):
    """It does not know the secret: whatever it answers, it is dropped, and silence is dropped after
    the handshake's deadline.
    """
    jumps = [0.0]
    shifted = types.SimpleNamespace(
        monotonic=lambda: time.monotonic() + sum(jumps),
        sleep=clock.sleep,
        wait_io=clock.wait_io,
        random_bytes=clock.random_bytes,
    )
    monkeypatch.setattr(connect_round, "clock", shifted)
    transport = build_rank(world, 1)
    want = StreamIdentity(initiator=0, acceptor=1, stream=0, nstreams=2)
    hello = InitiatorHandshake(
        key=derive_key(b"guess", b"test"), nonce=b"n" * 32, deadline=1, identity=want
    ).hello
    liar, silent = call(transport), call(transport)
    absent = ConnectInfo(addresses=(("127.0.0.1", 9),), nstreams=2, slot_bytes=4096).encode()
    with liar, silent, ThreadPoolExecutor(1) as other:
        liar.sendall(hello + b"p" * 32 + b"more" * 100)
        silent.sendall(hello)
        meets = other.submit(transport.connect, {0: absent})
        assert len(silent.recv(72, socket.MSG_WAITALL)) == 72
        jumps.append(connect_round.HANDSHAKE_TIMEOUT_S)
        assert drained(silent) == b""
        assert len(drained(liar)) in (0, 72)  # bytes left unread turn the end into a reset
        jumps.append(WAIT_S)
        with pytest.raises(BootstrapError):
            meets.result()


def test_peer_with_another_number_of_streams_is_dropped_and_named(world, monkeypatch, caplog):
    """It knows the secret, but not what was agreed on; the right streams of the same rank are still
    taken.
    """
    monkeypatch.setattr(connect_round, "HANDSHAKE_TIMEOUT_S", WAIT_S)
    for rank in range(2):
        build_rank(world, rank)
    want = StreamIdentity(initiator=0, acceptor=1, stream=0, nstreams=3)
    machine = InitiatorHandshake(
        key=derive_key(b"secret", b"test"), nonce=b"n" * 32, deadline=1, identity=want
    )
    with call(world.transports[1]) as liar:
        liar.sendall(machine.hello)
        infos = {rank: transport.setup() for rank, transport in world.transports.items()}

        def body(rank):
            if rank == 1:
                world.connect_rank(1, {0: infos[0]})
                return
            liar.sendall(machine.receive(liar.recv(machine.needs, socket.MSG_WAITALL)))
            assert len(drained(liar)) == machine.needs  # the welcome, then the end
            world.connect_rank(0, {1: infos[1]})

        world.in_parallel(body)
    assert "rank 0 opens 3 streams instead of 2" in caplog.text
    way = world.way(0, 1)
    way.post(b"x")
    assert way.take()[0] == b"x"


def test_listener_is_bound_to_the_given_address_only(world):
    (address,) = ConnectInfo.decode(
        build_rank(world, 0, addresses=("127.0.0.2",)).setup()
    ).addresses
    assert address[0] == "127.0.0.2"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", address[1]), timeout=5)


# --- ends ---


def test_close_tells_the_peer_after_all_messages(world):
    for rank in range(2):
        build_rank(world, rank, linger=WAIT_S)
    world.connect()
    way = world.way(0, 1)
    for i in range(5):
        way.post(pattern(SLOT, i))
    world.transports[0].close()
    world.wait(lambda: world.losses[1], "the peer was not told")
    assert [(peer, loss.kind) for peer, loss in world.losses[1]] == [(0, LossKind.CLOSED)]
    assert world.losses[0] == []
    for i in range(5):
        assert way.take()[0] == pattern(SLOT, i)


def test_close_gives_up_on_a_receiver_that_does_not_consume(world):
    for rank in range(2):
        build_rank(world, rank, linger=0.1)
    world.connect()
    way = world.way(0, 1)
    for i in range(way.limit):
        way.post(pattern(100, i))
    world.transports[0].close()
    world.wait(lambda: world.losses[1], "the peer was not told")
    assert world.losses[1][0][1].kind is LossKind.RESET
    with pytest.raises(CommunicatorClosed):
        world.transports[0].connect({})


def test_abort_tells_the_peer_why_and_touches_no_memory_afterwards(pair):
    way = pair.way(1, 0)
    target = PrivateMemory(1 << 20)
    way.recv.clear_to_send(target.address, 1 << 20)
    pair.transports[0].abort("rank 0 had enough")
    source = PrivateMemory(1 << 20)
    memory_at(source.address, 1 << 20)[:] = b"x" * (1 << 20)
    way.send.post_address(source.address, 1 << 20)
    pair.wait(lambda: pair.losses[1], "the peer was not told")
    assert [(peer, loss.kind) for peer, loss in pair.losses[1]] == [(0, LossKind.ABORTED)]
    assert "rank 0 had enough" in str(pair.losses[1][0][1])
    assert memory_at(target.address, 1 << 20) == bytes(1 << 20)
    assert pair.losses[0] == []


# --- settings and descriptions ---


def test_streams_from_the_environment():
    assert SocketOptions.from_environment({}).nstreams == 2
    assert (
        SocketOptions.from_environment(
            {"NCCL_SOCKET_NTHREADS": "4", "MIRACCL_NSOCKS_PERTHREAD": "3"}
        ).nstreams
        == 12
    )
    assert (
        SocketOptions.from_environment(
            {"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "16"}
        ).nstreams
        == 64
    )
    assert SocketOptions.from_environment({"MIRACCL_SOCKET_BUFFER": "0"}).buffer_bytes == 0
    with pytest.raises(InvalidUsage):
        SocketOptions.from_environment({"NCCL_SOCKET_NTHREADS": "x"})
    with pytest.raises(ValueError, match="streams"):
        SocketOptions(nstreams=0)


def test_connect_info_round_trip():
    info = ConnectInfo(addresses=(("10.0.0.1", 5), ("fd00::1", 65535)), nstreams=3, slot_bytes=8192)
    assert ConnectInfo.decode(info.encode()) == info


@pytest.mark.parametrize(
    "data",
    [
        b"[[],1,4096]",
        b'[[["10.0.0.1",0]],1,4096]',
        b'[[["10.0.0.1",70000]],1,4096]',
        b'[[["example.org",5]],1,4096]',
        b'[[["10.0.0.1",5]],0,4096]',
        b'[[["10.0.0.1",5]],65,4096]',
        b'[[["10.0.0.1",5]],1,100]',
        b'[[["10.0.0.1",5]],1]',
    ],
)
def test_invalid_connect_info_is_rejected(data):
    with pytest.raises(ProtocolError, match="connect info"):
        ConnectInfo.decode(data)


def test_connects_ranks_with_addresses_of_one_family():
    same = [Endpoint(rank=r, hostid="h", pid=r, addresses=("10.0.0.1",)) for r in (0, 1)]
    assert TCP.score(*same)[0] > 0
    other = Endpoint(rank=1, hostid="h", pid=1, addresses=("fd00::1",))
    assert TCP.score(same[0], other) == (0, "no addresses of a common family")


def test_no_address_and_no_port_left_are_system_failures(world):
    with pytest.raises(SystemFailure, match="no address"):
        build_rank(world, 0, addresses=()).setup()
    with pytest.raises(SystemFailure, match=r"cannot listen on 192.0.2.1"):
        build_rank(world, 1, addresses=("192.0.2.1",)).setup()


def test_idle_proxy_makes_no_round(pair):
    """A proxy that polled would never have a quiet moment."""
    way = pair.way(0, 1)
    way.post(b"x")
    way.take()
    proxies = [transport._proxy for transport in pair.transports.values()]

    def quiet():
        before = [proxy.rounds for proxy in proxies]
        pair.news.wait(0.05)
        pair.news.clear()
        return before == [proxy.rounds for proxy in proxies]

    pair.wait(quiet, "a proxy never sleeps")
    assert all(proxy.rounds for proxy in proxies)


def test_streams_have_a_large_window_and_no_pacing_on_loopback(pair):
    """The low-water mark that enlarges the buffer is gone again: it would hide small frames."""
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    for transport in pair.transports.values():
        for stream in (sock for socks in transport._streams.values() for sock in socks):
            receive_bytes = stream.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            assert receive_bytes >= min(RECEIVE_WINDOW_BYTES, largest_receive_bytes() // 2)
            assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
            used = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert "cubic" not in allowed or used.rstrip(b"\0") == b"cubic"


def largest_receive_bytes() -> int:
    """Return the size to which the kernel enlarges a receive buffer."""
    return int(Path("/proc/sys/net/ipv4/tcp_rmem").read_text().split()[2])


def test_streams_are_spread_over_attached_networks(monkeypatch):
    """An address of a network that this host is not attached to is used only if it is named."""
    networks = [ipaddress.ip_network("10.0.0.0/24"), ipaddress.ip_network("10.0.2.0/24")]
    monkeypatch.setattr(connect_round, "local_networks", lambda: networks)
    monkeypatch.delenv("MIRACCL_SOCKET_IFNAME", raising=False)
    addresses = ["10.0.0.7", "fd00::7", "10.0.1.7", "10.0.2.7"]
    assert connect_round.rails_of(addresses) == [0, 3]
    monkeypatch.setenv("MIRACCL_SOCKET_IFNAME", "eth")
    assert connect_round.rails_of(addresses) == [0, 2, 3]
    assert connect_round.rails_of(["192.168.7.7"]) == [0]
    # ranks of one host that pretend to be on two: all its addresses are one network
    assert connect_round.rails_of(["127.0.0.1", "10.0.0.7"]) == [0]


def test_streams_count_per_rail_unless_they_are_set():
    assert SocketOptions.from_environment({}, nrails=4).nstreams == 8
    assert SocketOptions.from_environment({"NCCL_NSOCKS_PERTHREAD": "3"}, nrails=4).nstreams == 3
