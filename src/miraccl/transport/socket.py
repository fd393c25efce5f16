"""TCP between hosts: finds the peer, proves the secret to each other, and hands the streams to a proxy.

This file owns listening sockets, sockets until their handshake is done, and the private memory of the FIFOs; moving messages is the
proxy's.  Rules:
- For each pair the lower rank connects and the higher accepts, ``nstreams`` times (the smaller of what the two want).
- Listening sockets are bound to the addresses given, which the bootstrap chose by SOCKET_IFNAME, and to nothing else.
- Strangers: at most ``MAX_STRANGERS`` sockets more than expected are kept without proof, each for ``HANDSHAKE_TIMEOUT_S`` and for the
  bytes of a handshake; whoever fails is dropped without an answer.  A peer that proved itself but was not asked for yet is kept for
  a later ``connect``.
- Everything in ``connect`` is bounded by ``timeout``; what it raises names the peers that are missing.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from miraccl import params, trace
from miraccl.errors import AuthenticationError, BootstrapError, CommunicatorClosed, MiracclError, ProtocolError, SystemFailure
from miraccl.transport.base import TRANSPORTS, Endpoint, Fifo, FifoKind, FifoPair, NetConnection, ProxyPort, Transport
from miraccl.transport.fifo import FifoMemory, check_slot_bytes
from miraccl.wire.stream import MAX_STREAMS, NONCE_BYTES, AcceptorHandshake, Handshake, InitiatorHandshake, StreamIdentity, derive_key

log = trace.logger("socket")

HANDSHAKE_TIMEOUT_S = 5.0
MAX_STRANGERS = 64
DIAL_ROUNDS = 3
"""A call may be dropped among a crowd of strangers, or be refused while the peer's queue is full."""
BACKLOG = 1024
LINGER_S = 5.0
KEEPALIVE_S = (10, 5, 3)
"""Idle time, interval and count: a host that vanishes without a FIN is noticed after 25 s."""


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
                addresses=tuple((str(ipaddress.ip_address(host)), int(port)) for host, port in addresses),
                nstreams=int(nstreams),
                slot_bytes=check_slot_bytes(int(slot_bytes)),
            )
        except (ValueError, TypeError) as problem:
            raise ProtocolError(f"the connect info of a socket transport cannot be read: {problem}") from None
        if not info.addresses or not 1 <= info.nstreams <= MAX_STREAMS or not all(0 < port < 1 << 16 for _, port in info.addresses):
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
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> SocketOptions:
        """NCCL's rule: SOCKET_NTHREADS x NSOCKS_PERTHREAD streams, at most 64.  One proxy thread serves them all."""
        nstreams = params.SOCKET_NTHREADS.read(environ) * params.NSOCKS_PERTHREAD.read(environ)
        return cls(nstreams=min(max(nstreams, 1), MAX_STREAMS), buffer_bytes=params.SOCKET_BUFFER.read(environ))


Route: TypeAlias = Sequence[tuple[str, int]]


def tune(sock: socket.socket, buffer_bytes: int) -> None:
    """Options that must be set before the connection exists (the window scale is negotiated then), and those that need not."""
    if buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    idle, interval, count = KEEPALIVE_S
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@TRANSPORTS.register("socket")
class SocketTransport(Transport):
    """TCP streams to ranks of other hosts.

    ``proxy`` moves the messages; ``secret`` is the job's, ``job`` names the communicator; ``slot_bytes`` is the size of a slot (a
    multiple of the page); ``timeout`` in seconds bounds ``connect``.
    """

    name = "socket"

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        proxy: ProxyPort,
        secret: bytes,
        job: bytes,
        slot_bytes: int = 1 << 19,
        options: SocketOptions | None = None,
        timeout: float = 60.0,
        linger: float = LINGER_S,
    ) -> None:
        self.rank = endpoint.rank
        self._endpoint = endpoint
        self._proxy = proxy
        self._key = derive_key(secret, job)
        self._slot_bytes = check_slot_bytes(slot_bytes)
        self._options = options or SocketOptions.from_environment()
        self._timeout = timeout
        self._linger = linger
        self._listeners: list[socket.socket] = []
        self._info: bytes | None = None
        self._parked: dict[tuple[int, int], _Proven] = {}
        self._connected: dict[int, FifoPair] = {}
        self._closed = False

    @staticmethod
    def can_connect(a: Endpoint, b: Endpoint) -> bool:
        """Both have an address of a common family."""
        return a.rank != b.rank and bool({_family(x) for x in a.addresses} & {_family(x) for x in b.addresses})

    def setup(self) -> bytes:
        """Listen on a free port of each address."""
        self._check_open()
        if self._info is None:
            for address in self._endpoint.addresses:
                self._listeners.append(self._listen(address))
            if not self._listeners:
                raise SystemFailure("there is no address to listen on", rank=self.rank)
            ports = [listener.getsockname()[1] for listener in self._listeners]
            self._info = ConnectInfo(
                addresses=tuple((a.partition("%")[0], port) for a, port in zip(self._endpoint.addresses, ports)),
                nstreams=self._options.nstreams,
                slot_bytes=self._slot_bytes,
            ).encode()
        return self._info

    def _listen(self, address: str) -> socket.socket:
        listener = socket.socket(_family(address), socket.SOCK_STREAM)
        try:
            tune(listener, self._options.buffer_bytes)  # accepted sockets inherit
            if listener.family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address, 0))
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise SystemFailure(f"cannot listen on {address}: {error.strerror}", rank=self.rank) from None
        return listener

    def connect(self, infos: Mapping[int, bytes]) -> dict[int, FifoPair]:
        """See ``Transport.connect``.  Ranks that are connected already are returned as they are."""
        self._check_open()
        self.setup()
        peers = {rank: ConnectInfo.decode(data) for rank, data in infos.items() if rank not in self._connected}
        if self.rank in peers:
            raise ValueError("a rank does not connect to itself")
        meeting = _Meeting(self, peers)
        try:
            proven = meeting.run()
        except BaseException:
            meeting.drop_all()
            raise
        finally:
            meeting.close()
        connections = [self._connection(peer, proven[peer], peers[peer]) for peer in peers]
        self._proxy.attach(connections)
        self._connected |= {c.peer: c.pair for c in connections}
        return {rank: self._connected[rank] for rank in infos}

    def _connection(self, peer: int, streams: Sequence[_Proven], info: ConnectInfo) -> NetConnection:
        send, recv = FifoMemory(self._slot_bytes), FifoMemory(self._slot_bytes)
        door: dict[str, Any] = {"kind": FifoKind.NET, "bell": self._proxy.bell, "asleep": self._proxy.asleep}
        pair = FifoPair(
            send=Fifo.at(send.address, self._slot_bytes, **door),
            recv=Fifo.at(recv.address, self._slot_bytes, **door),
            memory=(send, recv),
        )
        return NetConnection(peer=peer, streams=[s.sock for s in streams], pair=pair, peer_slot_bytes=info.slot_bytes)

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


@dataclass(frozen=True, kw_only=True)
class _Proven:
    """A socket whose other end knows the secret."""

    sock: socket.socket
    identity: StreamIdentity


class _Approach:
    """One socket on its way to being proven.  ``peer`` is None until a stranger has said who it is."""

    def __init__(
        self, sock: socket.socket, machine: Handshake, *, peer: int | None = None, address: str = "", route: Route = (), stream: int = 0
    ) -> None:
        self.sock = sock
        self.machine = machine
        self.peer = peer
        self.address = address
        self.route = route
        self.stream = stream
        self.connecting = peer is not None
        self.got = b""
        self.answer = b""


class _Meeting:
    """One call of ``connect``: dials, accepts and shakes hands until each asked peer has all its streams."""

    def __init__(self, transport: SocketTransport, peers: Mapping[int, ConnectInfo]) -> None:
        self._transport = transport
        self._peers = peers
        self._deadline = time.monotonic() + transport._timeout
        self._selector = selectors.DefaultSelector()
        self._approaches: set[_Approach] = set()
        self._proven: dict[tuple[int, int], _Proven] = {}
        self._why: dict[int, str] = {}
        for listener in transport._listeners:
            self._selector.register(listener, selectors.EVENT_READ, None)

    def run(self) -> dict[int, list[_Proven]]:
        """Proven streams per peer, in order of their numbers."""
        for peer, info in self._peers.items():
            for stream in range(self._nstreams(peer)):
                if peer > self._transport.rank:
                    self._dial(peer, info.addresses * DIAL_ROUNDS, stream)
                else:
                    parked = self._transport._parked.pop((peer, stream), None)
                    if parked:
                        self._keep(parked, peer)
        while missing := self._missing():
            now = time.monotonic()
            if now >= self._deadline:
                raise self._overdue(missing)
            timers = [a.machine.deadline for a in self._approaches]
            for key, _ in self._selector.select(max(0.0, min([self._deadline, *timers]) - now)):
                if key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                elif key.data in self._approaches:
                    self._step(key.data)
            self._expire()
        return {p: [self._proven[p, s] for s in range(self._nstreams(p))] for p in self._peers}

    def close(self) -> None:
        """Drop who is not proven; proven sockets belong to the caller."""
        for approach in list(self._approaches):
            self._drop(approach)
        self._selector.close()

    def drop_all(self) -> None:
        for proven in self._proven.values():
            proven.sock.close()

    def _nstreams(self, peer: int) -> int:
        return min(self._transport._options.nstreams, self._peers[peer].nstreams)

    def _missing(self) -> list[int]:
        return [p for p in self._peers if not all((p, s) in self._proven for s in range(self._nstreams(p)))]

    def _overdue(self, missing: list[int]) -> MiracclError:
        reasons = "".join(f"; rank {p}: {self._why[p]}" for p in missing if p in self._why)
        return BootstrapError(
            f"no TCP connection with ranks {missing} after {self._transport._timeout:g} s{reasons}",
            rank=self._transport.rank,
            peer=missing[0],
            hint="MIRACCL_SOCKET_IFNAME chooses the interfaces; a firewall must let all ports through between the hosts",
        )

    # --- our calls

    def _dial(self, peer: int, route: Route, stream: int) -> None:
        """Try the addresses of ``route`` one after the other, the last one until the deadline."""
        transport = self._transport
        while route:
            (address, port), *route = route
            machine = InitiatorHandshake(
                key=transport._key,
                nonce=os.urandom(NONCE_BYTES),
                deadline=min(self._deadline, time.monotonic() + HANDSHAKE_TIMEOUT_S) if route else self._deadline,
                want=StreamIdentity(
                    initiator=transport.rank,
                    acceptor=peer,
                    stream=stream,
                    nstreams=self._nstreams(peer),
                ),
            )
            sock = socket.socket(_family(address), socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                tune(sock, transport._options.buffer_bytes)
                status = sock.connect_ex((address, port))
            except OSError as error:
                status = error.errno or errno.EIO
            if status in (0, errno.EINPROGRESS):
                approach = _Approach(sock, machine, peer=peer, address=address, route=route, stream=stream)
                approach.answer = machine.hello
                self._approaches.add(approach)
                self._selector.register(sock, selectors.EVENT_WRITE, approach)
                return
            sock.close()
            self._why[peer] = f"{address}: {os.strerror(status)}"
        if peer not in self._why:
            self._why[peer] = "it has no address"
        raise SystemFailure(f"cannot reach rank {peer} at {self._why[peer]}", rank=transport.rank, peer=peer)

    def _redial(self, approach: _Approach, why: str) -> None:
        """The address did not work; the next one may."""
        peer = approach.peer
        assert peer is not None
        self._why[peer] = f"{approach.address}: {why}"
        self._drop(approach)
        self._dial(peer, approach.route, approach.stream)

    # --- their calls

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # it has gone again, or there are no descriptors left
            return
        transport = self._transport
        strangers = [a for a in self._approaches if a.peer is None]
        if len(strangers) >= MAX_STRANGERS + sum(self._nstreams(peer) for peer in self._peers):
            self._drop(min(strangers, key=lambda a: a.machine.deadline))
        sock.setblocking(False)
        machine = AcceptorHandshake(
            key=transport._key,
            nonce=os.urandom(NONCE_BYTES),
            deadline=time.monotonic() + HANDSHAKE_TIMEOUT_S,
            rank=transport.rank,
        )
        approach = _Approach(sock, machine)
        self._approaches.add(approach)
        self._selector.register(sock, selectors.EVENT_READ, approach)

    # --- both

    def _step(self, approach: _Approach) -> None:
        """The socket is ready for what the handshake waits for."""
        try:
            if approach.connecting:
                status = approach.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if status:
                    raise OSError(status, os.strerror(status))
                approach.connecting = False
                approach.machine.deadline = self._deadline  # it answers once it calls connect, which may be late
            elif not approach.answer:
                self._read(approach)
            self._answer(approach)
        except (AuthenticationError, ProtocolError) as problem:
            if approach.peer is not None:
                problem.rank, problem.peer = self._transport.rank, approach.peer
                raise
            log.warning("dropped a connection: %s", problem.message)
            self._drop(approach)
        except BlockingIOError:
            pass
        except OSError as error:
            if approach.peer is not None:
                self._redial(approach, f"{error.strerror or error}")
            else:
                self._drop(approach)

    def _read(self, approach: _Approach) -> None:
        data = approach.sock.recv(approach.machine.needs - len(approach.got))
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection during the handshake")
        approach.got += data
        if len(approach.got) == approach.machine.needs:
            got, approach.got = approach.got, b""
            approach.answer += approach.machine.receive(got)

    def _answer(self, approach: _Approach) -> None:
        if approach.answer:
            sent = approach.sock.send(approach.answer)
            approach.answer = approach.answer[sent:]
        if approach.answer:
            self._selector.modify(approach.sock, selectors.EVENT_WRITE, approach)
        elif approach.machine.done:
            self._finish(approach)
        else:
            self._selector.modify(approach.sock, selectors.EVENT_READ, approach)

    def _finish(self, approach: _Approach) -> None:
        identity = approach.machine.identity
        assert identity is not None
        self._approaches.discard(approach)
        self._selector.unregister(approach.sock)
        peer = identity.acceptor if approach.peer is not None else identity.initiator
        self._keep(_Proven(sock=approach.sock, identity=identity), peer)

    def _keep(self, proven: _Proven, peer: int) -> None:
        """For this call, or for a later one; a second stream of the same number replaces the first, whose peer has given up."""
        key = (peer, proven.identity.stream)
        if peer not in self._peers:
            shelf = self._transport._parked
        elif proven.identity.nstreams == self._nstreams(peer):
            shelf = self._proven
        else:
            raise ProtocolError(f"rank {peer} opens {proven.identity.nstreams} streams instead of {self._nstreams(peer)}", peer=peer)
        if key in shelf:
            shelf[key].sock.close()
        shelf[key] = proven

    def _expire(self) -> None:
        now = time.monotonic()
        for approach in [a for a in self._approaches if a.machine.expire(now)]:
            if approach.peer is not None and now < self._deadline:
                self._redial(approach, "no answer")
            else:
                self._drop(approach)

    def _drop(self, approach: _Approach) -> None:
        self._approaches.discard(approach)
        self._selector.unregister(approach.sock)
        approach.sock.close()
