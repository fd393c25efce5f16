"""The meeting of ranks over TCP: dials, accepts and shakes hands until each asked peer has all its streams.

A ``Meeting`` is one call of ``connect``.  Its rules are in the head of ``transport.socket``; the proofs themselves are those of
``wire.stream``.  It owns sockets until they are proven; proven ones belong to its caller.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from miraccl import trace
from miraccl.errors import AuthenticationError, BootstrapError, MiracclError, ProtocolError, SystemFailure
from miraccl.wire.stream import NONCE_BYTES, AcceptorHandshake, Handshake, InitiatorHandshake, StreamIdentity

log = trace.logger("socket")

HANDSHAKE_TIMEOUT_S = 5.0
MAX_STRANGERS = 64
CHECK_S = 0.2
DIAL_ROUNDS = 3
"""A call may be dropped among a crowd of strangers, or be refused while the peer's queue is full."""
KEEPALIVE_S = (10, 5, 3)
"""Idle time, interval and count: a host that vanishes without a FIN is noticed after 25 s."""

Route: TypeAlias = Sequence[tuple[str, int]]


def tune(sock: socket.socket, buffer_bytes: int) -> None:
    """Options that must be set before the connection exists (the window scale is negotiated then), and those that need not."""
    if buffer_bytes:
        buffer_bytes = min(buffer_bytes, (1 << 31) - 1)  # a C int; the kernel has a lower limit of its own
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    idle, interval, count = KEEPALIVE_S
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """A peer to meet: where it listens, and how many streams the two agree on."""

    addresses: tuple[tuple[str, int], ...]
    nstreams: int


@dataclass(frozen=True, kw_only=True)
class Proven:
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


class Meeting:
    """One call of ``connect`` by ``rank`` for ``peers``.

    ``key`` is the job's, ``parked`` holds proven streams of peers that nobody has asked for yet: (rank, stream) -> stream.  ``timeout``
    in seconds bounds ``run``.  ``check`` is called every ``CHECK_S`` seconds and raises if there is nobody to meet any more.
    """

    def __init__(
        self,
        *,
        rank: int,
        key: bytes,
        peers: Mapping[int, Invitation],
        listeners: Sequence[socket.socket],
        parked: dict[tuple[int, int], Proven],
        buffer_bytes: int,
        timeout: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._check = check
        self._rank = rank
        self._key = key
        self._peers = peers
        self._parked = parked
        self._buffer_bytes = buffer_bytes
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._selector = selectors.DefaultSelector()
        self._approaches: set[_Approach] = set()
        self._proven: dict[tuple[int, int], Proven] = {}
        self._why: dict[int, str] = {}
        for listener in listeners:
            self._selector.register(listener, selectors.EVENT_READ, None)

    def run(self) -> dict[int, list[Proven]]:
        """Proven streams per peer, in order of their numbers."""
        for peer, info in self._peers.items():
            for stream in range(self._nstreams(peer)):
                if peer > self._rank:
                    self._dial(peer, info.addresses * DIAL_ROUNDS, stream)
                else:
                    parked = self._parked.pop((peer, stream), None)
                    if parked:
                        self._keep(parked, peer)
                        self._check_streams(parked.identity, peer)
        while missing := self._missing():
            self._check()
            now = time.monotonic()
            if now >= self._deadline:
                raise self._overdue(missing)
            timers = [a.machine.deadline for a in self._approaches]
            for key, _ in self._selector.select(max(0.0, min([self._deadline, now + CHECK_S, *timers]) - now)):
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
        return self._peers[peer].nstreams

    def _missing(self) -> list[int]:
        return [p for p in self._peers if not all((p, s) in self._proven for s in range(self._nstreams(p)))]

    def _overdue(self, missing: list[int]) -> MiracclError:
        reasons = "".join(f"; rank {p}: {self._why[p]}" for p in missing if p in self._why)
        return BootstrapError(
            f"no TCP connection with ranks {missing} after {self._timeout:g} s{reasons}",
            rank=self._rank,
            peer=missing[0],
            hint="MIRACCL_SOCKET_IFNAME chooses the interfaces; a firewall must let all ports through between the hosts",
        )

    # --- our calls

    def _dial(self, peer: int, route: Route, stream: int) -> None:
        """Try the addresses of ``route`` one after the other, the last one until the deadline."""
        while route:
            (address, port), *route = route
            machine = InitiatorHandshake(
                key=self._key,
                nonce=os.urandom(NONCE_BYTES),
                deadline=min(self._deadline, time.monotonic() + HANDSHAKE_TIMEOUT_S) if route else self._deadline,
                want=StreamIdentity(
                    initiator=self._rank,
                    acceptor=peer,
                    stream=stream,
                    nstreams=self._nstreams(peer),
                ),
            )
            sock = socket.socket(family_of(address), socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                tune(sock, self._buffer_bytes)
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
        raise SystemFailure(f"cannot reach rank {peer} at {self._why[peer]}", rank=self._rank, peer=peer)

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
        strangers = [a for a in self._approaches if a.peer is None]
        if len(strangers) >= MAX_STRANGERS + sum(self._nstreams(peer) for peer in self._peers):
            self._drop(min(strangers, key=lambda a: a.machine.deadline))
        sock.setblocking(False)
        machine = AcceptorHandshake(
            key=self._key,
            nonce=os.urandom(NONCE_BYTES),
            deadline=time.monotonic() + HANDSHAKE_TIMEOUT_S,
            rank=self._rank,
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
                problem.rank, problem.peer = self._rank, approach.peer
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
        peer = identity.acceptor if approach.peer is not None else identity.initiator
        self._check_streams(identity, peer)
        self._approaches.discard(approach)
        self._selector.unregister(approach.sock)
        self._keep(Proven(sock=approach.sock, identity=identity), peer)

    def _check_streams(self, identity: StreamIdentity, peer: int) -> None:
        if peer in self._peers and identity.nstreams != self._nstreams(peer):
            raise ProtocolError(f"rank {peer} opens {identity.nstreams} streams instead of {self._nstreams(peer)}", peer=peer)

    def _keep(self, proven: Proven, peer: int) -> None:
        """For this call, or for a later one; a second stream of the same number replaces the first, whose caller has given up."""
        shelf = self._proven if peer in self._peers else self._parked
        replaced = shelf.pop((peer, proven.identity.stream), None)
        if replaced:
            replaced.sock.close()
        shelf[peer, proven.identity.stream] = proven

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
