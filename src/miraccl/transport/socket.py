"""TCP between hosts: finds the peer, proves the secret to each other, and hands the streams to a proxy.

This file owns listening sockets and the private memory of the FIFOs; ``transport.meeting`` makes the streams, and moving messages is the
proxy's.  Rules:
- For each pair the lower rank connects and the higher accepts, ``nstreams`` times (the smaller of what the two want).
- Listening sockets are bound to the addresses given, which the bootstrap chose by SOCKET_IFNAME, and to nothing else.
- Strangers: at most ``MAX_STRANGERS`` sockets more than expected are kept without proof, each for ``HANDSHAKE_TIMEOUT_S`` and for the
  bytes of a handshake; whoever fails is dropped without an answer.  A peer that proved itself but was not asked for yet is kept for
  a later ``connect``.
- Everything in ``connect`` is bounded by ``timeout``; what it raises names the peers that are missing.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miraccl import params
from miraccl.deadline import Deadline
from miraccl.errors import CommunicatorClosed, ProtocolError, SystemFailure, as_system_failure
from miraccl.transport.base import (
    Endpoint,
    Fifo,
    FifoKind,
    FifoPair,
    NetConnection,
    ProxyPort,
    Transport,
)
from miraccl.transport.connect_round import (
    ConnectRound,
    PeerStreams,
    ProvenStream,
    family_of,
    set_tcp_options,
)
from miraccl.transport.fifo import FifoMemory, check_slot_bytes
from miraccl.wire.stream import MAX_STREAMS, derive_key

BACKLOG = 1024
LINGER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class ConnectInfo:
    """What peers need: ``addresses`` are (numeric IP, port), best first; sizes are of the slots into which this rank receives."""

    addresses: tuple[tuple[str, int], ...]
    nstreams: int
    slot_bytes: int

    def encode(self) -> bytes:
        return json.dumps([self.addresses, self.nstreams, self.slot_bytes]).encode()

    @classmethod
    def decode(cls, data: bytes) -> ConnectInfo:
        """Raises ``ProtocolError`` for what ``encode`` does not produce."""
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
                f"the connect info of a socket transport cannot be read: {problem}"
            ) from None
        if (
            not info.addresses
            or not 1 <= info.nstreams <= MAX_STREAMS
            or not all(0 < port < 1 << 16 for _, port in info.addresses)
        ):
            raise ProtocolError("the connect info of a socket transport makes no sense")
        return info


@dataclass(frozen=True, kw_only=True)
class SocketOptions:
    """``buffer_bytes`` of the kernel's send and receive buffers per stream (0: the kernel's own tuning)."""

    nstreams: int = 2
    buffer_bytes: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.nstreams <= MAX_STREAMS:
            raise ValueError(f"1 to {MAX_STREAMS} streams are allowed, got {self.nstreams}")

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

    ``proxy`` moves the messages; ``secret`` is the job's, ``job`` names the communicator; ``slot_bytes`` is the size of a slot (a
    multiple of the page); ``timeout`` in seconds bounds each ``connect``, a deadline all of them; ``check`` is called
    during it and raises where a peer has died meanwhile.
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
        self._options = options or SocketOptions.from_environment(nrails=len(self._rails()))
        self._timeout = timeout
        self._linger = linger
        self._listeners: list[socket.socket] = []
        self._info: bytes | None = None
        self._parked: dict[tuple[int, int], ProvenStream] = {}
        self._connected: dict[int, FifoPair] = {}
        self._closed = False

    def _rails(self) -> list[str]:
        """Addresses of this rank that carry data: those of the family of the best one."""
        addresses = self._endpoint.addresses
        return [a for a in addresses if family_of(a) == family_of(addresses[0])]

    @staticmethod
    def can_connect(a: Endpoint, b: Endpoint) -> bool:
        """Both have an address of a common family."""
        return a.rank != b.rank and bool(
            {family_of(x) for x in a.addresses} & {family_of(x) for x in b.addresses}
        )

    def setup(self) -> bytes:
        """Listen on a free port of each address; one that the host has lost, or is not sure of yet (IPv6), is left out."""
        self._check_open()
        if self._info is None:
            found: list[tuple[str, int]] = []
            problem = SystemFailure("there is no address to listen on", rank=self.rank)
            for address in self._endpoint.addresses:
                try:
                    with as_system_failure(f"cannot listen on {address}", rank=self.rank):
                        found.append((address.partition("%")[0], self._listen(address)))
                except SystemFailure as error:
                    problem = error
            if not found:
                raise problem
            self._info = ConnectInfo(
                addresses=tuple(found),
                nstreams=self._options.nstreams,
                slot_bytes=self._slot_bytes,
            ).encode()
        return self._info

    def _listen(self, address: str) -> int:
        """The port of a new listening socket."""
        listener = socket.socket(family_of(address), socket.SOCK_STREAM)
        try:
            set_tcp_options(listener, self._options.buffer_bytes)  # accepted sockets inherit
            if listener.family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address, 0))
            listener.listen(BACKLOG)
            listener.setblocking(False)
            port = int(listener.getsockname()[1])
        except OSError:
            listener.close()
            raise
        self._listeners.append(listener)
        return port

    def connect(self, infos: Mapping[int, bytes]) -> dict[int, FifoPair]:
        """See ``Transport.connect``.  Ranks that are connected already are returned as they are."""
        self._check_open()
        self.setup()
        peers = {
            rank: ConnectInfo.decode(data)
            for rank, data in infos.items()
            if rank not in self._connected
        }
        if self.rank in peers:
            raise ValueError("a rank does not connect to itself")
        meeting = ConnectRound(
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
            proven = meeting.run()
            connections = [self._connection(peer, proven[peer], peers[peer]) for peer in peers]
            with as_system_failure(
                "the connections to other ranks cannot be served", rank=self.rank
            ):
                self._proxy.attach(connections)
        except BaseException:
            meeting.close_proven()
            raise
        finally:
            meeting.close()
        self._connected |= {c.peer: c.pair for c in connections}
        return {rank: self._connected[rank] for rank in infos}

    def _connection(
        self, peer: int, streams: Sequence[ProvenStream], info: ConnectInfo
    ) -> NetConnection:
        send, recv = FifoMemory(self._slot_bytes), FifoMemory(self._slot_bytes)
        wake_args: dict[str, Any] = {
            "kind": FifoKind.NET,
            "doorbell": self._proxy.doorbell,
            "asleep": self._proxy.asleep,
        }
        pair = FifoPair(
            send=Fifo.from_address(send.address, self._slot_bytes, **wake_args),
            recv=Fifo.from_address(recv.address, self._slot_bytes, **wake_args),
            memory=(send, recv),
        )
        return NetConnection(
            peer=peer, streams=[s.sock for s in streams], pair=pair, peer_slot_bytes=info.slot_bytes
        )

    def close(self) -> None:
        """Send what is posted (for at most ``linger`` seconds), close all connections and listeners."""
        if not self._closed and self._connected:
            self._proxy.detach(list(self._connected), linger=self._linger)
        self._free()

    def abort(self, text: str) -> None:
        if not self._closed and self._connected:
            self._proxy.abort(text)
        self._free()

    def _free(self) -> None:
        self._closed = True
        for listener in self._listeners:
            listener.close()
        for parked in self._parked.values():
            parked.sock.close()
        self._listeners.clear()
        self._parked.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise CommunicatorClosed("the socket transport is closed", rank=self.rank)
