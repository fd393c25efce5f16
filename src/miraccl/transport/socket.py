"""TCP transport between hosts: listens, authenticates peers and hands the streams to a proxy.

This file owns listening sockets and the private memory of the FIFOs; ``transport.connect_round``
makes the streams, and the proxy moves the messages. Rules:

- For each pair the lower rank connects and the higher accepts, ``nstreams`` times (the smaller of
  the two ranks' settings).
- Listening sockets are bound to the given addresses only, which the bootstrap chose by
  SOCKET_IFNAME.
- At most ``MAX_UNAUTHENTICATED`` sockets beyond the expected ones are kept without proof, each for
  ``HANDSHAKE_TIMEOUT_S`` and for the bytes of a handshake; failures are dropped without an answer.
  A peer that proved itself before this rank asked for it is parked for a later ``connect``.
- Everything in ``connect`` ends by ``timeout``; its errors name the missing peers.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from miraccl import params
from miraccl.deadline import Deadline
from miraccl.errors import CommunicatorClosed, ProtocolError, SystemFailure, as_system_failure
from miraccl.sockets import open_in_range
from miraccl.transport import registry
from miraccl.transport.base import (
    Endpoint,
    FifoPair,
    NetConnection,
    PathStatus,
    ProxyPort,
    Transport,
    TransportContext,
    proxied_pair,
)
from miraccl.transport.connect_round import (
    ConnectRound,
    PeerStreams,
    ProvenStream,
    data_addresses,
    family_of,
    set_tcp_options,
)
from miraccl.transport.fifo import check_slot_bytes, slot_bytes_for
from miraccl.transport.tcp_info import path_status
from miraccl.wire.stream import MAX_STREAMS, derive_key

CAPABILITIES = registry.TCP.capabilities
BACKLOG = 1024
LINGER_S = 5.0
TCP_NOTSENT_LOWAT = 25  # include/uapi/linux/tcp.h; the socket module has it from Python 3.12 on
#: Bytes per stream that the kernel accepts ahead of what it may send, where streams use several
#: networks: what a slow network has accepted cannot go over another one.
RAIL_UNSENT_BYTES = 1 << 16
TCP_RTO_MIN_US = 45  # include/uapi/linux/tcp.h, Linux 6.15
#: Least retransmission timeout of a stream where streams use several networks. A message waits that
#: long if the last packet of one of its streams is lost; the kernel's is 200 ms.
RAIL_RTO_MIN_US = 10_000
#: Bytes for which a new connection has a receive buffer.
RECEIVE_WINDOW_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ConnectInfo:
    """Description of a rank's listening sockets for its peers.

    Attributes:
        addresses: (numeric IP, port), best first.
        slot_bytes: Size of the slots into which this rank receives.
    """

    addresses: tuple[tuple[str, int], ...]
    nstreams: int
    slot_bytes: int

    def encode(self) -> bytes:
        return json.dumps([self.addresses, self.nstreams, self.slot_bytes]).encode()

    @classmethod
    def decode(cls, data: bytes) -> ConnectInfo:
        """Parse the result of ``encode``. Raises ``ProtocolError`` for anything else."""
        try:
            addresses, nstreams, slot_bytes = json.loads(data)
            info = cls(
                addresses=tuple(
                    (str(ipaddress.ip_address(host)), int(port)) for host, port in addresses
                ),
                nstreams=int(nstreams),
                slot_bytes=check_slot_bytes(int(slot_bytes)),
            )
        except (ValueError, TypeError) as problem:
            raise ProtocolError(
                f"cannot read the connect info of a TCP transport: {problem}"
            ) from None
        if (
            not info.addresses
            or not 1 <= info.nstreams <= MAX_STREAMS
            or not all(0 < port < 1 << 16 for _, port in info.addresses)
        ):
            raise ProtocolError(
                "cannot use the connect info of a TCP transport: a value is out of range"
            )
        return info


@dataclass(frozen=True, kw_only=True)
class SocketOptions:
    """Options of the streams.

    Attributes:
        nstreams: TCP streams between two ranks.
        buffer_bytes: Kernel's send and receive buffer per stream; 0 leaves it to the kernel.
    """

    nstreams: int = 2
    buffer_bytes: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.nstreams <= MAX_STREAMS:
            raise ValueError(f"cannot use {self.nstreams} streams: allowed are 1 to {MAX_STREAMS}")

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, *, nrails: int = 1
    ) -> SocketOptions:
        """Read the settings: SOCKET_NTHREADS x NSOCKS_PERTHREAD streams per rail, at most 64.

        NCCL's rule with one rail.  With one of the settings given, ``nrails`` does not count.
        """
        settings = params.SOCKET_NTHREADS, params.NSOCKS_PERTHREAD
        nstreams = settings[0].read(environ) * settings[1].read(environ)
        if all(setting.resolve(environ)[1] == "default" for setting in settings):
            nstreams *= nrails
        return cls(
            nstreams=min(max(nstreams, 1), MAX_STREAMS),
            buffer_bytes=params.SOCKET_BUFFER.read(environ),
        )


class SocketTransport(Transport):
    """TCP streams to ranks of other hosts.

    Args:
        proxy: Moves the messages.
        secret: Key of the job.
        job: Name of the communicator, mixed into the key of its streams.
        slot_bytes: Size of a slot, a multiple of the page.
        timeout: Seconds that bound each ``connect``, or a deadline of all of them.
        linger: Seconds in which ``close`` sends what was posted.
        check: Called while connecting; raises if a peer has died.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        proxy: ProxyPort,
        secret: bytes,
        job: bytes,
        slot_bytes: int = 1 << 19,
        options: SocketOptions | None = None,
        timeout: float | Deadline = 60.0,
        linger: float = LINGER_S,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._check = check
        self.rank = endpoint.rank
        self._endpoint = endpoint
        self._proxy = proxy
        self._key = derive_key(secret, job)
        self._slot_bytes = check_slot_bytes(slot_bytes)
        self._options = options or SocketOptions.from_environment(
            nrails=len(data_addresses(endpoint.addresses))
        )
        self._timeout = timeout
        self._linger = linger
        self._listeners: list[socket.socket] = []
        self._info: bytes | None = None
        self._parked: dict[tuple[int, int], ProvenStream] = {}
        self._connected: dict[int, FifoPair] = {}
        self._streams: dict[int, list[socket.socket]] = {}
        self._closed = False

    def setup(self) -> bytes:
        """Listen on a free port of each address, leaving out addresses that cannot be bound.

        NET_PORT_RANGE limits the ports.

        An address may have left the host since, or be a tentative IPv6 one.
        """
        self._check_open()
        if self._info is None:
            bound: list[tuple[str, int]] = []
            problem = SystemFailure("cannot listen: the host has no address", rank=self.rank)
            for address in self._endpoint.addresses:
                try:
                    with as_system_failure(f"cannot listen on {address}", rank=self.rank):
                        bound.append((address.partition("%")[0], self._listen(address)))
                except SystemFailure as error:
                    problem = error
            if not bound:
                raise problem
            self._info = ConnectInfo(
                addresses=tuple(bound),
                nstreams=self._options.nstreams,
                slot_bytes=self._slot_bytes,
            ).encode()
        return self._info

    def _listen(self, address: str) -> int:
        """Open a listening socket and return its port."""
        ports = params.NET_PORT_RANGE.read()
        listener = open_in_range(lambda port: self._listen_at(address, port), ports)
        self._listeners.append(listener)
        return int(listener.getsockname()[1])

    def _listen_at(self, address: str, port: int) -> socket.socket:
        listener = socket.socket(family_of(address), socket.SOCK_STREAM)
        try:
            set_tcp_options(listener, self._options.buffer_bytes)  # accepted sockets inherit them
            if listener.family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if port:  # connections of an earlier job in TIME_WAIT do not block the port
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        return listener

    def connect(self, infos: Mapping[int, bytes]) -> dict[int, FifoPair]:
        """Connect to ranks; see ``Transport.connect``. Existing pairs are returned as they are."""
        self._check_open()
        self.setup()
        peers = {
            rank: ConnectInfo.decode(data)
            for rank, data in infos.items()
            if rank not in self._connected
        }
        if self.rank in peers:
            raise ValueError(f"cannot connect rank {self.rank} to itself")
        connect_round = ConnectRound(
            rank=self.rank,
            key=self._key,
            peers={
                peer: PeerStreams(
                    addresses=info.addresses, nstreams=min(info.nstreams, self._options.nstreams)
                )
                for peer, info in peers.items()
            },
            listeners=self._listeners,
            parked=self._parked,
            buffer_bytes=self._options.buffer_bytes,
            deadline=Deadline.after(self._timeout),
            check=self._check,
        )
        try:
            proven = connect_round.run()
            connections = [self._connection(peer, proven[peer], peers[peer]) for peer in peers]
            with as_system_failure("cannot serve the connections to other ranks", rank=self.rank):
                self._proxy.attach(connections)
        except BaseException:
            connect_round.close_proven()
            raise
        finally:
            connect_round.close()
        self._connected |= {c.peer: c.pair for c in connections}
        self._streams |= {c.peer: list(c.streams) for c in connections}
        return {rank: self._connected[rank] for rank in infos}

    def _connection(
        self, peer: int, streams: Sequence[ProvenStream], info: ConnectInfo
    ) -> NetConnection:
        pair = proxied_pair(self._proxy, self._slot_bytes, capabilities=CAPABILITIES)
        socks = [s.sock for s in streams]
        if not self._options.buffer_bytes:
            for sock in socks:
                grow_receive_buffer(sock)
        for sock in socks:
            disable_pacing(sock)
        rails = count_rails(socks)
        if rails > 1:
            for sock in socks:
                sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, RAIL_UNSENT_BYTES)
                with contextlib.suppress(OSError):  # an older kernel
                    sock.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MIN_US, RAIL_RTO_MIN_US)
        return NetConnection(
            peer=peer, streams=socks, pair=pair, peer_slot_bytes=info.slot_bytes, rails=rails
        )

    def paths(self) -> list[PathStatus]:
        return [
            path_status(sock, peer, number)
            for peer, streams in list(self._streams.items())
            for number, sock in enumerate(streams)
        ]

    def describe(self, peer: int) -> str:
        """Return the streams to a peer, and the addresses of this rank that they use."""
        streams = self._streams[peer]
        with contextlib.suppress(OSError):  # the peer has died since
            used = dict.fromkeys(str(sock.getsockname()[0]) for sock in streams)
            return f"{len(streams)} stream{'s' * (len(streams) > 1)} from {', '.join(used)}"
        return ""

    def release(self) -> None:
        """Close the listening sockets: their ports are free for other communicators."""
        self._close_listeners()

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
        self._close_listeners()
        self._streams.clear()
        for parked in self._parked.values():
            parked.sock.close()
        self._parked.clear()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise CommunicatorClosed("the TCP transport is closed", rank=self.rank)


def grow_receive_buffer(sock: socket.socket) -> None:
    """Have the kernel start with a receive buffer of ``2 * RECEIVE_WINDOW_BYTES``, which it may
    enlarge on demand as before.
    """
    # A new connection advertises 64 KiB, and the kernel enlarges that only while more arrives
    # within a round trip: a message of 64 KiB and its header waited for an update of the window,
    # for as long as messages were no larger.  A low-water mark enlarges the buffer and, unlike
    # SO_RCVBUF, does not fix its size (tcp_set_rcvlowat, net/ipv4/tcp.c).
    with contextlib.suppress(OSError):  # the peer has left, which the proxy will see
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, RECEIVE_WINDOW_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def disable_pacing(sock: socket.socket) -> None:
    """Have a connection within this machine use a congestion control that does not pace."""
    # BBR spaces packets by the rate that it has seen.  A message of 64 KiB and its header is two
    # packets on loopback, and the second waited as long as the first one takes at that rate, which
    # a ping-pong never raises.
    with contextlib.suppress(OSError):  # cubic may be missing or not allowed
        host = sock.getpeername()[0].partition("%")[0]
        if ipaddress.ip_address(host).is_loopback:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def count_rails(streams: Sequence[socket.socket]) -> int:
    """Return the number of networks that connected streams use: their pairs of addresses."""
    pairs = set()
    for stream in streams:
        with contextlib.suppress(OSError):  # the peer has left, which the proxy will see
            pairs.add((stream.getsockname()[0], stream.getpeername()[0]))
    return max(1, len(pairs))


def open_transport(context: TransportContext) -> SocketTransport:
    """Open TCP for ``context``; see ``registry.TransportSpec``."""
    assert context.proxy is not None, "TCP needs a proxy"
    return SocketTransport(
        context.endpoint,
        proxy=context.proxy(),
        secret=context.secret,
        job=context.job,
        slot_bytes=slot_bytes_for(len(context.peers), context.budget, context.max_slot_bytes),
        timeout=context.deadline,
        check=context.check,
    )
