"""``miraccl net probe``: round trips, loss, distinct paths, path MTU and rate to another host.

Both ends are a pair (``net.pair``). The listening end answers UDP probes on every address of its
host; the other end sends trains of probes over several flows per address. Two flows take distinct
paths if they arrive on different interfaces or with different TTLs, or pass different routers.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import select
import socket
import statistics
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from miraccl import clock, params
from miraccl.bootstrap.interfaces import (
    Interface,
    is_loopback,
    list_interfaces,
    rank_interfaces,
    source_address,
)
from miraccl.sockets import open_in_range
from miraccl.tools.net.pair import HostPair
from miraccl.tools.net.probe_packets import HEADER_BYTES, ProbePacket, decode, encode
from miraccl.transport.connect_round import family_of

# linux/in.h, linux/in6.h, linux/errqueue.h
IP_TTL, IP_PKTINFO, IP_MTU_DISCOVER, IP_RECVERR, IP_RECVTTL, IP_MTU = 2, 8, 10, 11, 12, 14
IPV6_UNICAST_HOPS, IPV6_MTU_DISCOVER, IPV6_MTU, IPV6_RECVERR = 16, 23, 24, 25
IPV6_RECVPKTINFO, IPV6_PKTINFO, IPV6_RECVHOPLIMIT, IPV6_HOPLIMIT = 49, 50, 51, 52
PMTUDISC_PROBE = 3
SO_EE_OFFENDER = struct.Struct("IBBBBII")
#: Longest wait for the answer to the last probe of a train, in seconds.
ANSWER_TIMEOUT_S = 0.5
MIN_MTU, MAX_HOPS, MTU_TRIES = 576, 16, 3
RATE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class ProbedPath:
    """Results for one address of the other host.

    Attributes:
        rtt_us: Minimum, median and 99th percentile of the round trip in microseconds; empty if no
            probe was answered.
        loss_out, loss_back: Share of probes lost on the way there, and of answers lost.
        paths: Number of distinct paths that the flows took.
        mtu: Largest IP packet that reaches the other host in bytes; 0 while unknown.
    """

    local: str
    remote: str
    rtt_us: tuple[float, ...] = ()
    loss_out: float = 0.0
    loss_back: float = 0.0
    flows: int = 0
    paths: int = 0
    mtu: int = 0
    samples: tuple[float, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        record = asdict(self)
        del record["samples"]
        return record


class Responder:
    """Answers probes on one UDP socket per address family, in a thread of its own."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._received: dict[tuple[Any, int], int] = {}
        self._stopping = False
        self.ports: dict[int, int] = {}
        self._sockets: list[socket.socket] = []
        for family, host in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
            with contextlib.suppress(OSError):
                sock = open_in_range(
                    lambda port, family=family, host=host: _bound(family, host, port),  # type: ignore[misc]
                    params.NET_PORT_RANGE.read(),
                )
                self._sockets.append(sock)
                self.ports[int(family)] = int(sock.getsockname()[1])
        self._thread = clock.thread(self._run, name="miraccl net probe")
        self._thread.start()

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        for sock in self._sockets:
            sock.close()

    def _run(self) -> None:
        while not self._stopping:
            for sock in select.select(self._sockets, [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self._answer(sock)

    def _answer(self, sock: socket.socket) -> None:
        data, control, _, sender = sock.recvmsg(1 << 16, 256)
        packet = decode(data, self._key)
        if packet is None:
            return
        interface, ttl = arrival(control)
        key = (sender[:2], packet.flow)
        self._received[key] = self._received.get(key, 0) + 1
        answer = ProbePacket(
            flow=packet.flow,
            number=packet.number,
            sent_ns=packet.sent_ns,
            interface=interface,
            ttl=ttl,
            received=self._received[key],
        )
        sock.sendto(encode(answer, self._key), sender)


def _bound(family: int, host: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVPKTINFO, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVHOPLIMIT, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
            sock.setsockopt(socket.IPPROTO_IP, IP_RECVTTL, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def arrival(control: Sequence[tuple[int, int, bytes]]) -> tuple[int, int]:
    """Return the interface index and the TTL in the control messages of a datagram."""
    interface = ttl = 0
    for level, kind, data in control:
        if (level, kind) == (socket.IPPROTO_IP, IP_PKTINFO):
            interface = struct.unpack_from("i", data)[0]
        elif (level, kind) == (socket.IPPROTO_IPV6, IPV6_PKTINFO):
            interface = struct.unpack_from("I", data, 16)[0]
        elif (level, kind) in (
            (socket.IPPROTO_IP, IP_TTL),
            (socket.IPPROTO_IPV6, IPV6_HOPLIMIT),
        ):
            ttl = struct.unpack_from("i", data)[0]
    return interface, ttl


class ProbeFlow:
    """One UDP socket connected to one address of the other host."""

    def __init__(self, number: int, remote: str, port: int, key: bytes) -> None:
        self.number, self._key, self._sent = number, key, 0
        self.family = family_of(remote)
        self.sock = socket.socket(self.family, socket.SOCK_DGRAM)
        self.sock.setblocking(False)
        v6 = self.family == socket.AF_INET6
        self._level = socket.IPPROTO_IPV6 if v6 else socket.IPPROTO_IP
        self._ttl_option = IPV6_UNICAST_HOPS if v6 else IP_TTL
        self.sock.setsockopt(self._level, IPV6_RECVERR if v6 else IP_RECVERR, 1)
        discover = IPV6_MTU_DISCOVER if v6 else IP_MTU_DISCOVER
        self.sock.setsockopt(self._level, discover, PMTUDISC_PROBE)
        self.sock.connect((remote, port))
        self.local = str(self.sock.getsockname()[0])

    def close(self) -> None:
        self.sock.close()

    def send(self, padding: int = 0) -> int:
        """Send a probe and return its number. Raises ``OSError`` with EMSGSIZE if too large."""
        number, self._sent = self._sent, self._sent + 1
        packet = ProbePacket(flow=self.number, number=number, sent_ns=_now_ns(), padding=padding)
        try:
            self.sock.send(encode(packet, self._key))
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                raise
        return number

    def receive(self, timeout: float) -> tuple[ProbePacket, float] | None:
        """Return the next answer and its round trip in microseconds; None after ``timeout``."""
        deadline = clock.monotonic() + timeout
        while (left := deadline - clock.monotonic()) > 0:
            poller = select.poll()
            poller.register(self.sock, select.POLLIN)
            poller.poll(left * 1e3)
            try:
                data = self.sock.recv(1 << 16)
            except BlockingIOError:
                self._drain_errors()
                continue
            except OSError:  # an ICMP error was reported
                self._drain_errors()
                continue
            packet = decode(data, self._key)
            if packet is not None and packet.flow == self.number:
                return packet, (_now_ns() - packet.sent_ns) / 1e3
        return None

    def _drain_errors(self) -> str:
        """Return the router of the last ICMP error, empty if there was none."""
        router = ""
        with contextlib.suppress(OSError):
            while True:
                _, control, _, _ = self.sock.recvmsg(1, 512, socket.MSG_ERRQUEUE)
                for _, _, data in control:
                    router = offender(data) or router
        return router

    def hops(self, limit: int) -> tuple[str, ...]:
        """Return the routers between the hosts, ``?`` for one that does not answer."""
        found = []
        for ttl in range(1, limit + 1):
            self.sock.setsockopt(self._level, self._ttl_option, ttl)
            self.send()
            poller = select.poll()
            poller.register(self.sock, select.POLLERR)
            poller.poll(200)
            found.append(self._drain_errors() or "?")
        self.sock.setsockopt(self._level, self._ttl_option, 64)
        return tuple(found)

    def interface_mtu(self) -> int:
        option = IPV6_MTU if self.family == socket.AF_INET6 else IP_MTU
        return int(self.sock.getsockopt(self._level, option))

    @property
    def overhead(self) -> int:
        """Bytes of IP and UDP headers and of a probe without padding."""
        return (40 if self.family == socket.AF_INET6 else 20) + 8 + HEADER_BYTES


def offender(data: bytes) -> str:
    """Return the address of the host that sent an ICMP error (struct sock_extended_err)."""
    name = data[SO_EE_OFFENDER.size :]
    if len(name) >= 8 and struct.unpack_from("H", name)[0] == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, name[4:8])
    if len(name) >= 24 and struct.unpack_from("H", name)[0] == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, name[8:24])
    return ""


def _now_ns() -> int:
    return int(clock.perf_counter() * 1e9)


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Numbers of a probe.

    Attributes:
        count: Probes per address.
        rate: Probes per second.
        flows: UDP flows per address, to find distinct paths.
        seconds: Time of the rate measurement in each direction; 0 leaves it out.
    """

    count: int = 1000
    rate: float = 1000.0
    flows: int = 16
    seconds: float = 1.0


def probe_address(
    remote: str, port: int, key: bytes, options: ProbeOptions, advance: Callable[[], None]
) -> ProbedPath:
    """Probe one address of the other host."""
    with contextlib.ExitStack() as stack:
        flows = []
        for number in range(options.flows):
            flow = ProbeFlow(number, remote, port, key)
            stack.callback(flow.close)
            flows.append(flow)
        per_flow = max(1, options.count // len(flows))
        prints: set[tuple[Any, ...]] = set()
        samples: list[float] = []
        sent = arrived = answered = 0
        for flow in flows:
            train = list(run_train(flow, per_flow, 1 / options.rate))
            sent += per_flow
            answered += len(train)
            if train:
                last = train[-1][0]
                # A train ends with its last answer: later probes are lost on the way there.
                arrived += max(last.received, len(train))
                hops = 64 - last.ttl
                routers = flow.hops(min(hops, MAX_HOPS)) if 0 < hops < 64 else ()
                prints.add((last.interface, last.ttl, routers))
                samples += [rtt for _, rtt in train]
            advance()
        local = flows[0].local
        mtu = find_mtu(flows[0]) if samples else 0
    ordered = sorted(samples)
    quantiles: tuple[float, ...] = ()
    if ordered:
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        quantiles = (ordered[0], statistics.median(ordered), p99)
    return ProbedPath(
        local=local,
        remote=remote,
        rtt_us=quantiles,
        loss_out=1 - arrived / sent,
        loss_back=1 - answered / arrived if arrived else 0.0,
        flows=len(flows),
        paths=len(prints),
        mtu=mtu,
        samples=tuple(samples),
    )


def run_train(flow: ProbeFlow, count: int, gap: float) -> Iterator[tuple[ProbePacket, float]]:
    """Send ``count`` probes, ``gap`` seconds apart; yield their answers."""
    start = clock.monotonic()
    pending = set()
    for number in range(count):
        pending.add(flow.send())
        while True:  # answers until the next probe is due
            left = start + (number + 1) * gap - clock.monotonic()
            answer = flow.receive(left) if left > 0 else None
            if answer is None:
                break
            pending.discard(answer[0].number)
            yield answer
    while pending and (answer := flow.receive(ANSWER_TIMEOUT_S)):
        pending.discard(answer[0].number)
        yield answer


def find_mtu(flow: ProbeFlow) -> int:
    """Return the largest IP packet that reaches the other host, by binary search."""

    def passes(size: int) -> bool:
        for _ in range(MTU_TRIES):
            try:
                number = flow.send(padding=size - flow.overhead)
            except OSError:
                return False
            deadline = clock.monotonic() + 0.2
            while (left := deadline - clock.monotonic()) > 0:
                answer = flow.receive(left)
                if answer is not None and answer[0].number == number:
                    return True
        return False

    low, high = MIN_MTU, min(flow.interface_mtu(), 65535)
    if passes(high):
        return high
    if not passes(low):
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def probe_key(pair: HostPair) -> bytes:
    """Return the key of the probes of this pair."""
    return hashlib.sha256(b"miraccl net probe\0" + pair.session.data_key).digest()


def usable_addresses(via: str, interfaces: Sequence[Interface] | None = None) -> list[str]:
    """Return the addresses of this host to probe; loopback ones if the pair meets there."""
    interfaces = list_interfaces() if interfaces is None else interfaces
    ranked = rank_interfaces(interfaces, params.SOCKET_IFNAME.read())
    wanted = [i for i in ranked if i.loopback == is_loopback(via) and (i.loopback or not i.virtual)]
    return [address for interface in wanted or ranked[:1] for address in interface.addresses]


def respond(pair: HostPair, timeout: float) -> dict[str, Any]:
    """Answer the probes of the other end until it is done; return what it found."""
    responder = Responder(probe_key(pair))
    try:
        via = str(pair.exchange("", "probe via"))
        here = {"addresses": usable_addresses(via), "ports": responder.ports}
        pair.exchange(here, "probe addresses")
        seconds = float(pair.exchange(0, "probe rate", timeout))
        measure_rate(pair, seconds)
        result: dict[str, Any] = pair.exchange(None, "probe result", timeout)
    finally:
        responder.close()
    return result


def run_probe(
    pair: HostPair, options: ProbeOptions, advance: Callable[[], None]
) -> tuple[dict[str, Any], list[ProbedPath]]:
    """Probe the other end; return the result as JSON values, and the reports of its addresses."""
    pair.exchange(pair.host, "probe via")
    there = pair.exchange({}, "probe addresses")
    reports = []
    for remote in there["addresses"]:
        port = int(there["ports"].get(str(int(family_of(remote))), 0))
        if port and source_address(remote) is not None:
            with contextlib.suppress(OSError):  # no route
                reports.append(probe_address(remote, port, probe_key(pair), options, advance))
    pair.exchange(options.seconds, "probe rate", 600.0)
    rates = measure_rate(pair, options.seconds)
    result = {
        "host": pair.host,
        "transport": pair.choice.name,
        "reason": pair.choice.reason,
        "to_gbps": rates[0],
        "from_gbps": rates[1],
        "paths": sum(report.paths for report in reports),
        "addresses": [report.to_dict() for report in reports],
    }
    pair.exchange(result, "probe result", 600.0)
    return result, reports


def measure_rate(pair: HostPair, seconds: float) -> tuple[float, float]:
    """Return the rates from client to server and back in Gbit/s, by messages of 4 MiB."""
    if seconds <= 0:
        return 0.0, 0.0
    comm, peer = pair.comm, pair.peer
    buffer, token = np.zeros(RATE_BYTES, np.uint8), np.zeros(1, np.uint8)
    rates = []
    for sender in (1, 0):
        count = 2
        elapsed = 0.0
        while elapsed < seconds:
            comm.barrier()
            start = clock.perf_counter()
            for _ in range(count):
                if pair.rank == sender:
                    comm.send(buffer, peer)
                else:
                    comm.recv(buffer, peer)
            if pair.rank == sender:
                comm.recv(token, peer)
            else:
                comm.send(token, peer)
            mine = clock.perf_counter() - start
            theirs = float(pair.exchange(mine, "rate"))
            elapsed = theirs if pair.is_server else mine  # both ends count alike
            rate = 8e-9 * RATE_BYTES * count / elapsed
            count = max(count + 1, min(4 * count, int(1.2 * count * seconds / elapsed)))
        rates.append(rate)
    return rates[0], rates[1]
