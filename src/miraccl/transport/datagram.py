"""UDP transport between hosts: sockets, paths and keys of ``wire.datagram``.

Each rank opens ``ports`` sockets per address, which all its peers share. A path to a peer is a pair
of sockets: addresses of both sides are paired by common network, ports by position, so both ranks
number their paths alike. Keys are derived from the job's secret and from nonces of both ranks,
which travel with the connect info over the authenticated control plane; nothing is negotiated over
UDP itself.

``connect`` ends when each peer has acknowledged a packet on some path, or by ``timeout`` with the
names of the peers that did not.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from miraccl import clock, params
from miraccl.deadline import Deadline
from miraccl.errors import (
    BootstrapError,
    CommunicatorClosed,
    InvalidUsage,
    PlanMismatch,
    ProtocolError,
    SystemFailure,
    as_system_failure,
)
from miraccl.sockets import open_in_range
from miraccl.transport import registry
from miraccl.transport.base import (
    Capability,
    DatagramConnection,
    DatagramOptions,
    DatagramPath,
    DatagramPort,
    Endpoint,
    FifoPair,
    PathStatus,
    Transport,
    TransportContext,
    proxied_pair,
)
from miraccl.transport.connect_round import data_addresses, family_of
from miraccl.transport.fifo import check_slot_bytes, slot_bytes_for
from miraccl.wire.datagram.control import controller
from miraccl.wire.datagram.credit import UNSOLICITED_BYTES
from miraccl.wire.datagram.packets import MAX_PATHS, MIN_MTU
from miraccl.wire.datagram.seal import (
    CIPHERS,
    SETUP_NONCE_BYTES,
    Protection,
    common_cipher,
    derive_key,
)

CAPABILITIES = registry.UDP.capabilities
LINGER_S = 5.0
CHECK_INTERVAL_S = 0.2
#: Values of MIRACCL_UDP_ADMISSION.
OFF, CTS, CREDIT = ADMISSIONS = "off", "cts", "credit"
POLL_INTERVAL_S = 0.0005
#: Largest UDP payload: a packet is copied and checked as a whole, and a lost one is resent. Two of
#: them fit into one call with UDP_SEGMENT.
MAX_MTU = 32_736
#: Smallest share of a receive buffer: ten packets of 1500 bytes.
MIN_SHARE_BYTES = 16 << 10
#: linux/in.h, in6.h: path MTU discovery that ignores ICMP, and the MTU of a connected route.
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE, IP_MTU = 10, 3, 14
IPV6_MTU_DISCOVER, IPV6_MTU = 23, 24
#: asm-generic/socket.h: buffer beyond net.core.rmem_max, for processes with CAP_NET_ADMIN.
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
#: linux/udp.h, asm-generic/socket.h, RFC 3168: ECN-capable transport.
IP_RECVERR, IPV6_RECVERR = 11, 25
UDP_GRO, SO_RXQ_OVFL, SO_TIMESTAMPNS, ECN_ECT0 = 104, 40, 35, 2


@dataclass(frozen=True, kw_only=True)
class SocketInfo:
    """One UDP socket of a rank.

    Attributes:
        mtu: Payload that its interface carries.
        share_bytes: Bytes that each peer may have on their way to it.
    """

    host: str
    port: int
    mtu: int
    share_bytes: int


@dataclass(frozen=True, kw_only=True)
class DatagramInfo:
    """Description of a rank's sockets for its peers.

    Attributes:
        sockets: All sockets, address by address, with as many ports each.
        nonce: Random bytes of this rank, mixed into all keys.
        connection: Number in packets from rank 0; that of rank n is larger by n.
        protection: ``Protection`` value, equal on all ranks.
        ciphers: Names of the ciphers that this rank computes.
        slot_bytes: Size of the slots into which this rank receives.
        admission: Value of ADMISSIONS.
    """

    sockets: tuple[SocketInfo, ...]
    nonce: bytes
    connection: int
    protection: str
    ciphers: tuple[str, ...]
    slot_bytes: int
    admission: str = CTS

    def encode(self) -> bytes:
        rows = [[s.host, s.port, s.mtu, s.share_bytes] for s in self.sockets]
        return json.dumps(
            [
                rows,
                self.nonce.hex(),
                self.connection,
                self.protection,
                self.ciphers,
                self.slot_bytes,
                self.admission,
            ]
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> DatagramInfo:
        """Parse the result of ``encode``. Raises ``ProtocolError`` for anything else."""
        try:
            rows, nonce, connection, protection, ciphers, slot_bytes, admission = json.loads(data)
            info = cls(
                sockets=tuple(
                    SocketInfo(
                        host=str(ipaddress.ip_address(host)),
                        port=int(port),
                        mtu=int(mtu),
                        share_bytes=int(share_bytes),
                    )
                    for host, port, mtu, share_bytes in rows
                ),
                nonce=bytes.fromhex(nonce),
                connection=int(connection),
                protection=Protection(protection).value,
                ciphers=tuple(name for name in CIPHERS if name in ciphers),
                slot_bytes=check_slot_bytes(int(slot_bytes)),
                admission=str(admission),
            )
        except (ValueError, TypeError, OverflowError) as problem:
            raise ProtocolError(
                f"cannot read the connect info of a UDP transport: {problem}"
            ) from None
        if (
            not 1 <= len(info.sockets) <= MAX_PATHS
            or len(info.nonce) != SETUP_NONCE_BYTES
            or info.admission not in ADMISSIONS
            or not all(0 < s.port < 1 << 16 and MIN_MTU <= s.mtu <= MAX_MTU for s in info.sockets)
            or not all(0 < s.share_bytes < 1 << 40 for s in info.sockets)
        ):
            raise ProtocolError(
                "cannot use the connect info of a UDP transport: a value is out of range"
            )
        return info


def options_from_environment(environ: Mapping[str, str] | None = None) -> DatagramOptions:
    """Read the settings UDP_*.

    Raises:
        InvalidUsage: A name is unknown or a number out of range.
    """
    ports, mtu = params.UDP_PORTS.read(environ), params.UDP_MTU.read(environ)
    if not 1 <= ports <= MAX_PATHS:
        raise InvalidUsage(f"cannot use MIRACCL_UDP_PORTS={ports}: allowed are 1 to {MAX_PATHS}")
    if mtu and not MIN_MTU <= mtu <= MAX_MTU:
        raise InvalidUsage(
            f"cannot use MIRACCL_UDP_MTU={mtu}: allowed are 0 and {MIN_MTU} to {MAX_MTU}"
        )
    protection = params.UDP_PROTECTION.read(environ)
    allowed = [p.value for p in Protection]
    if protection not in allowed:
        raise InvalidUsage(
            f"cannot use MIRACCL_UDP_PROTECTION={protection}: allowed are {', '.join(allowed)}"
        )
    admission, credit = params.UDP_ADMISSION.read(environ), params.UDP_CREDIT.read(environ)
    if admission not in ADMISSIONS:
        raise InvalidUsage(
            f"cannot use MIRACCL_UDP_ADMISSION={admission}: allowed are {', '.join(ADMISSIONS)}"
        )
    if credit < UNSOLICITED_BYTES:
        raise InvalidUsage(
            f"cannot use MIRACCL_UDP_CREDIT={credit}: at least {UNSOLICITED_BYTES} bytes are needed"
        )
    return DatagramOptions(
        ports=ports,
        congestion=controller(params.UDP_CC.read(environ)).name,
        protection=protection,
        mtu=mtu,
        buffer_bytes=params.SOCKET_BUFFER.read(environ),
        admission=admission,
        credit_bytes=credit,
    )


class DatagramTransport(Transport):
    """UDP paths to ranks of other hosts.

    Args:
        proxy: Moves the messages.
        secret: Key of the job.
        job: Name of the communicator, mixed into the keys.
        slot_bytes: Size of a slot, a multiple of the page.
        npeers: Ranks that this one will connect, which share its receive buffers.
        timeout: Seconds that bound each ``connect``, or a deadline of all of them.
        linger: Seconds in which ``close`` sends what was posted.
        check: Called while connecting; raises if a peer has died.
    """

    network = "UDP"
    """Name of the network in errors."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        proxy: DatagramPort,
        secret: bytes,
        job: bytes,
        slot_bytes: int = 1 << 19,
        options: DatagramOptions | None = None,
        npeers: int = 1,
        timeout: float | Deadline = 60.0,
        linger: float = LINGER_S,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = endpoint.rank
        self._endpoint, self._proxy, self._check = endpoint, proxy, check
        self._secret, self._job = secret, job
        self._slot_bytes = check_slot_bytes(slot_bytes)
        self._options = options or options_from_environment()
        self._timeout, self._linger, self._npeers = timeout, linger, npeers
        self._sockets: list[socket.socket] = []
        self._info: Any = None
        self._connected: dict[int, FifoPair] = {}
        self._paths: dict[int, tuple[Sequence[DatagramPath], str]] = {}
        self._closed = False

    def setup(self) -> bytes:
        """Open the sockets, leaving out addresses that cannot be bound."""
        self._check_open()
        if self._info is None:
            self._info = DatagramInfo(
                sockets=self._open_sockets(),
                nonce=clock.random_bytes(SETUP_NONCE_BYTES),
                connection=int.from_bytes(clock.random_bytes(4), "little"),
                protection=self._options.protection,
                ciphers=tuple(self._proxy.ciphers),
                slot_bytes=self._slot_bytes,
                admission=self._options.admission,
            )
        encoded: bytes = self._info.encode()
        return encoded

    def _open_sockets(self) -> tuple[SocketInfo, ...]:
        rails = data_addresses(self._endpoint.addresses)
        opened: list[SocketInfo] = []
        problem = SystemFailure("cannot open UDP sockets: the host has no address", rank=self.rank)
        for address in rails[: max(1, MAX_PATHS // self._options.ports)]:
            try:
                with as_system_failure(f"cannot bind UDP to {address}", rank=self.rank):
                    found = [self._open_socket(address) for _ in range(self._options.ports)]
            except SystemFailure as error:
                problem = error
                continue
            self._sockets += [sock for sock, _ in found]
            opened += [info for _, info in found]
        if not opened:
            raise problem
        return tuple(opened)

    def _open_socket(self, address: str) -> tuple[socket.socket, SocketInfo]:
        sock = socket.socket(family_of(address), socket.SOCK_DGRAM)
        try:
            set_udp_options(sock, self._options.buffer_bytes)
            ports = params.NET_PORT_RANGE.read()
            open_in_range(lambda port: sock.bind((address, port)), ports)
            sock.setblocking(False)
            info = SocketInfo(
                host=address.partition("%")[0],
                port=int(sock.getsockname()[1]),
                mtu=self._packet_bytes(address),
                share_bytes=self._share_of(sock),
            )
        except BaseException:
            sock.close()
            raise
        return sock, info

    def _packet_bytes(self, address: str) -> int:
        """Return the payload of packets from an address: UDP_MTU, or what its interface carries."""
        carried = payload_mtu(address)
        if carried < MIN_MTU:
            raise SystemFailure(
                f"cannot use {address} for UDP: its interface carries {carried} bytes per packet, "
                f"{MIN_MTU} are needed",
                rank=self.rank,
                hint="raise the MTU of the interface to 1280, or set MIRACCL_NET=tcp",
            )
        return min(self._options.mtu or MAX_MTU, carried)

    def _share_of(self, sock: socket.socket) -> int:
        """Return each peer's share of a receive buffer.

        All shares together fill half of it: the kernel counts its own structures too, up to as
        much again. So packets are not lost for want of room, however many peers send.
        """
        nbytes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        return max(MIN_SHARE_BYTES, nbytes // (4 * max(1, self._npeers)))

    def _budget(self) -> int:
        """Return the bytes that all peers may have on their way to this rank; 0 without grants.

        At most half of the real receive buffers, of which the kernel's own structures take as much
        again as the data.
        """
        if self._options.admission != CREDIT:
            return 0
        sizes = [s.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) for s in self._sockets]
        addresses = len(self._sockets) // self._options.ports
        return max(UNSOLICITED_BYTES, min(sum(sizes) // 4, addresses * self._options.credit_bytes))

    def connect(self, infos: Mapping[int, bytes]) -> dict[int, FifoPair]:
        """Connect to ranks; see ``Transport.connect``. Existing pairs are returned as they are."""
        self._check_open()
        self.setup()
        peers = {
            rank: self._decode(data) for rank, data in infos.items() if rank not in self._connected
        }
        if self.rank in peers:
            raise ValueError(f"cannot connect rank {self.rank} to itself")
        deadline = Deadline.after(self._timeout)
        connections = [self._connection(peer, info) for peer, info in peers.items()]
        with as_system_failure("cannot serve the connections to other ranks", rank=self.rank):
            self._proxy.attach(connections)
        try:
            self._wait_reached(peers, deadline)
        except BaseException:
            self._proxy.detach(list(peers), linger=0.0)
            raise
        self._connected |= {c.peer: c.pair for c in connections}
        self._paths |= {c.peer: (c.paths, c.cipher) for c in connections}
        return {rank: self._connected[rank] for rank in infos}

    def _decode(self, data: bytes) -> Any:
        """Return a peer's description; it has the attributes that ``_connection`` uses."""
        return DatagramInfo.decode(data)

    def _wait_reached(self, peers: Mapping[int, Any], deadline: Deadline) -> None:
        """Wait until each peer has acknowledged a packet."""
        next_check = clock.monotonic() + CHECK_INTERVAL_S
        while missing := [peer for peer in peers if not self._proxy.reached(peer)]:
            if clock.monotonic() >= next_check:
                self._check()
                next_check = clock.monotonic() + CHECK_INTERVAL_S
            if not deadline.left:
                ranks = ", ".join(map(str, missing))
                raise BootstrapError(
                    f"cannot connect over {self.network}: no answer from rank(s) {ranks}",
                    rank=self.rank,
                    peer=missing[0],
                    hint=self._advice(missing[0], peers[missing[0]]),
                )
            clock.sleep(POLL_INTERVAL_S)

    def _advice(self, peer: int, info: Any) -> str:
        """Return where a peer that did not answer receives, and what may drop packets."""
        at = ", ".join(f"{s.host}:{s.port}" for s in info.sockets)
        return (
            f"rank {peer} receives at {at}; a firewall may drop UDP: MIRACCL_NET_PORT_RANGE fixes "
            "the ports, MIRACCL_NET=tcp does without UDP"
        )

    def _connection(self, peer: int, info: Any) -> DatagramConnection:
        own = self._info
        assert own is not None
        self._check_protection(peer, info)
        capabilities = CAPABILITIES
        if OFF in (own.admission, info.admission):
            if own.admission != info.admission:
                raise PlanMismatch(
                    f"ranks disagree on the admission of UDP messages: {own.admission} on rank "
                    f"{self.rank}, {info.admission} on rank {peer}",
                    hint="give all ranks the same MIRACCL_UDP_ADMISSION, or none of them off",
                )
            capabilities &= ~Capability.IN_PLACE  # a message is cut into slots
        return DatagramConnection(
            streams=self._sockets,
            paths=paths_between(own.sockets, info.sockets, first=self.rank < peer),
            needs_grants=info.admission == CREDIT,
            budget=self._budget(),
            **self._shared_fields(peer, info, capabilities),
        )

    def _check_protection(self, peer: int, info: Any) -> None:
        own = self._info
        assert own is not None
        if info.protection != own.protection:
            raise PlanMismatch(
                f"ranks disagree on the protection of UDP packets: {own.protection} on rank "
                f"{self.rank}, {info.protection} on rank {peer}",
                hint="give all ranks the same MIRACCL_UDP_PROTECTION",
            )

    def _shared_fields(self, peer: int, info: Any, capabilities: Capability) -> dict[str, Any]:
        """Return the fields of a connection that do not depend on the network."""
        own = self._info
        assert own is not None
        return {
            "peer": peer,
            "pair": proxied_pair(self._proxy, self._slot_bytes, capabilities=capabilities),
            "peer_slot_bytes": info.slot_bytes,
            "connection": (own.connection + peer) & 0xFFFFFFFF,
            "peer_connection": (info.connection + self.rank) & 0xFFFFFFFF,
            "send_key": derive_key(
                self._secret, self._job, self.rank, peer, (own.nonce, info.nonce)
            ),
            "recv_key": derive_key(
                self._secret, self._job, peer, self.rank, (info.nonce, own.nonce)
            ),
            "cipher": common_cipher(own.ciphers, info.ciphers),
            "options": self._options,
        }

    def paths(self) -> Sequence[PathStatus]:
        return () if self._closed else self._proxy.paths()

    def describe(self, peer: int) -> str:
        """Return the paths and settings of the connection to a peer."""
        (paths, cipher), options = self._paths[peer], self._options
        by = "" if options.protection == Protection.NONE.value else f" ({cipher})"
        smallest = min(path.mtu for path in paths)
        return (
            f"{len(paths)} path{'s' * (len(paths) > 1)}{self._origin(paths)}, "
            f"congestion control {options.congestion} "
            f"({controller(options.congestion).summary}), protection {options.protection}{by}, "
            f"admission {options.admission}, packets of {smallest} bytes, GPU data staged in host "
            "memory over the same paths"
        )

    def _origin(self, paths: Sequence[DatagramPath]) -> str:
        """Return the addresses of this rank that the paths use, for ``describe``."""
        used = dict.fromkeys(self._info.sockets[path.socket].host for path in paths)
        return f" from {', '.join(used)}"

    def close(self) -> None:
        """Send what was posted, for at most ``linger`` seconds, and close all sockets."""
        if not self._closed and self._connected:
            self._proxy.detach(list(self._connected), linger=self._linger)
        self._free()

    def abort(self, text: str) -> None:
        if not self._closed and self._connected:
            self._proxy.abort(text)
        self._free()

    def _free(self) -> None:
        self._closed = True
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise CommunicatorClosed(f"the {self.network} transport is closed", rank=self.rank)


def _set_receive_options(sock: socket.socket) -> None:
    """Let the kernel aggregate packets, and report times, ECN marks and own drops if it can."""
    ipv6 = sock.family == socket.AF_INET6
    options = [
        (socket.IPPROTO_UDP, UDP_GRO),
        (socket.SOL_SOCKET, SO_RXQ_OVFL),
        (socket.SOL_SOCKET, SO_TIMESTAMPNS),
        (socket.IPPROTO_IPV6, socket.IPV6_RECVTCLASS)
        if ipv6
        else (socket.IPPROTO_IP, socket.IP_RECVTOS),
        (socket.IPPROTO_IPV6, IPV6_RECVERR) if ipv6 else (socket.IPPROTO_IP, IP_RECVERR),
        (socket.IPPROTO_IPV6, socket.IPV6_TCLASS) if ipv6 else (socket.IPPROTO_IP, socket.IP_TOS),
    ]
    for level, option in options:
        with suppress(OSError):
            value = ECN_ECT0 if option in (socket.IP_TOS, socket.IPV6_TCLASS) else 1
            sock.setsockopt(level, option, value)


def set_udp_options(sock: socket.socket, buffer_bytes: int) -> None:
    """Set buffers, and path MTU discovery that neither fragments nor trusts ICMP."""
    if buffer_bytes:
        buffer_bytes = min(buffer_bytes, (1 << 31) - 1)
        for forced, plain in (
            (SO_SNDBUFFORCE, socket.SO_SNDBUF),
            (SO_RCVBUFFORCE, socket.SO_RCVBUF),
        ):
            try:
                sock.setsockopt(socket.SOL_SOCKET, forced, buffer_bytes)
            except OSError:  # needs CAP_NET_ADMIN
                sock.setsockopt(socket.SOL_SOCKET, plain, buffer_bytes)
    level, option = (
        (socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER)
        if sock.family == socket.AF_INET6
        else (socket.IPPROTO_IP, IP_MTU_DISCOVER)
    )
    sock.setsockopt(level, option, IP_PMTUDISC_PROBE)
    _set_receive_options(sock)


def payload_mtu(address: str) -> int:
    """Return the UDP payload that the interface of an address carries, at most ``MAX_MTU``; the
    smallest of all where that is unknown.
    """
    ipv6 = family_of(address) == socket.AF_INET6
    mtu = MIN_MTU
    with suppress(OSError), socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        # a neighbour in the address's own network: the route of the interface, not of loopback
        probe.connect((_neighbour(address), 9))
        option = (socket.IPPROTO_IPV6, IPV6_MTU) if ipv6 else (socket.IPPROTO_IP, IP_MTU)
        mtu = probe.getsockopt(*option) - (48 if ipv6 else 28)
    return min(mtu, MAX_MTU)


def _neighbour(address: str) -> str:
    """Return another address that is probably routed over the same interface."""
    plain = ipaddress.ip_address(address.partition("%")[0])
    if plain.is_loopback:
        return str(plain)
    return str(type(plain)(int(plain) ^ 1))


def paths_between(
    own: Sequence[SocketInfo], peer: Sequence[SocketInfo], *, first: bool
) -> tuple[DatagramPath, ...]:
    """Return the paths between two ranks, numbered alike on both sides.

    Addresses are paired greedily by the longest common prefix, ports by position. ``first``: the
    caller is the lower rank, whose order decides.
    """
    low, high = (own, peer) if first else (peer, own)
    pairs = sorted(
        (-_common_bits(a, b), low.index(x), high.index(y), a, b)
        for a, x in _by_host(low).items()
        for b, y in _by_host(high).items()
    )
    used: set[str] = set()
    paths: list[DatagramPath] = []
    for _, _, _, a, b in pairs:
        if "low " + a in used or "high " + b in used:
            continue
        used |= {"low " + a, "high " + b}
        ports = ([s for s in low if s.host == a], [s for s in high if s.host == b])
        for i in range(max(map(len, ports))):
            mine, other = (ports[k][i % len(ports[k])] for k in ((0, 1) if first else (1, 0)))
            paths.append(
                DatagramPath(
                    socket=own.index(mine),
                    host=other.host,
                    port=other.port,
                    mtu=min(mine.mtu, other.mtu),
                    share_bytes=other.share_bytes,
                )
            )
    return tuple(paths[:MAX_PATHS])


def _by_host(sockets: Sequence[SocketInfo]) -> dict[str, SocketInfo]:
    """Return the first socket of each address."""
    found: dict[str, SocketInfo] = {}
    for each in sockets:
        found.setdefault(each.host, each)
    return found


def _common_bits(a: str, b: str) -> int:
    x, y = ipaddress.ip_address(a), ipaddress.ip_address(b)
    return x.max_prefixlen - (int(x) ^ int(y)).bit_length() if x.version == y.version else -1


def shared_family_first(endpoint: Endpoint, peers: Iterable[Endpoint]) -> Endpoint:
    """Return ``endpoint`` with the addresses first whose family all ranks use.

    It is that of the lowest rank's best address if all ranks have it: the best addresses of two
    hosts differ in family where each finds the rendezvous by another one.
    """
    ranks = sorted([endpoint, *peers], key=lambda e: e.rank)
    families = [{family_of(a) for a in each.addresses} for each in ranks]
    first = family_of(ranks[0].addresses[0])
    if not all(first in each for each in families):
        first = min(set.intersection(*families), default=first)
    ordered = sorted(endpoint.addresses, key=lambda a: family_of(a) != first)
    return replace(endpoint, addresses=tuple(ordered))


def open_transport(context: TransportContext) -> DatagramTransport:
    """Open UDP for ``context``; see ``registry.TransportSpec``."""
    assert context.proxy is not None, "UDP needs a proxy"
    return DatagramTransport(
        shared_family_first(context.endpoint, context.peers.values()),
        proxy=cast(DatagramPort, context.proxy()),
        secret=context.secret,
        job=context.job,
        slot_bytes=slot_bytes_for(len(context.peers), context.budget, context.max_slot_bytes),
        npeers=len(context.peers),
        timeout=context.deadline,
        check=context.check,
    )
