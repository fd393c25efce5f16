"""The meeting of ranks over TCP: dials, accepts and shakes hands until each asked peer has all its streams.

A ``Meeting`` is one call of ``connect``.  Its rules are in the head of ``transport.socket``; the proofs themselves are those of
``wire.stream``.  It owns sockets until they are proven; proven ones belong to its caller.

A call that fails is made again, at the peer's next address and after a growing pause, until the deadline: ports of this host may be used
up, a connection be dropped among a crowd of strangers.  Only a peer at whose addresses nobody listens is given up earlier: it has listened
since before it told them.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from miraccl import trace
from miraccl.deadline import Deadline
from miraccl.errors import (
    AuthenticationError,
    BootstrapError,
    MiracclError,
    ProtocolError,
    SystemFailure,
    as_system_failure,
)
from miraccl.sockets import finish_connect, is_transient
from miraccl.wire.stream import (
    NONCE_BYTES,
    AcceptorHandshake,
    Handshake,
    InitiatorHandshake,
    StreamIdentity,
)

log = trace.logger("socket")

HANDSHAKE_TIMEOUT_S = 5.0
MAX_STRANGERS = 64
CHECK_S = 0.2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.5
"""Between two rounds of calls at all addresses of a peer; each is twice as long as the one before."""
REFUSED_S = 3.0
"""After which a peer that nobody answers for but its kernel, which refuses, is given up."""
SHORTAGE_S = 0.01
"""Before the next look at the queue, when a connection in it cannot be taken."""
KEEPALIVE_S = (10, 5, 3)
"""Idle time, interval and count: a host that vanishes without a FIN is noticed after 25 s."""


def tune(sock: socket.socket, buffer_bytes: int) -> None:
    """Options that must be set before the connection exists (the window scale is negotiated then), and those that need not."""
    if buffer_bytes:
        buffer_bytes = min(
            buffer_bytes, (1 << 31) - 1
        )  # a C int; the kernel has a lower limit of its own
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


@dataclass(kw_only=True)
class _Call:
    """One of our streams, until it is proven. ``turn`` counts its tries, the next of which is due at the time ``due``."""

    peer: int
    stream: int
    turn: int = 0
    due: float = 0.0


class _Approach:
    """One socket on its way to being proven; ``call`` is None for a stranger, who may be a peer."""

    def __init__(
        self, sock: socket.socket, machine: Handshake, call: _Call | None = None, address: str = ""
    ) -> None:
        self.sock = sock
        self.machine = machine
        self.call = call
        self.address = address
        self.connecting = call is not None
        self.got = b""
        self.answer = b""


class Meeting:
    """One call of ``connect`` by ``rank`` for ``peers``.

    ``key`` is the job's, ``parked`` holds proven streams of peers that nobody has asked for yet: (rank, stream) -> stream.  ``deadline``
    bounds ``run``.  ``check`` is called every ``CHECK_S`` seconds and raises if there is nobody to meet any more.
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
        deadline: Deadline,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._check = check
        self._rank = rank
        self._key = key
        self._peers = peers
        self._parked = parked
        self._buffer_bytes = buffer_bytes
        self._deadline = deadline
        self._approaches: set[_Approach] = set()
        self._calls: list[_Call] = []  # those that are to be made
        self._proven: dict[tuple[int, int], Proven] = {}
        self._why: dict[int, str] = {}
        self._refused: dict[int, float] = {}  # since when nothing but refusals came
        with as_system_failure("the ranks of other hosts cannot be met", rank=rank):
            self._selector = selectors.DefaultSelector()
            try:
                for listener in listeners:
                    self._selector.register(listener, selectors.EVENT_READ, None)
            except OSError:
                self._selector.close()
                raise

    def run(self) -> dict[int, list[Proven]]:
        """Proven streams per peer, in order of their numbers."""
        for peer in self._peers:
            for stream in range(self._nstreams(peer)):
                if peer > self._rank:
                    self._calls.append(_Call(peer=peer, stream=stream))
                else:
                    parked = self._parked.pop((peer, stream), None)
                    if parked:
                        self._keep(parked, peer)
                        self._check_streams(parked.identity, peer)
        while missing := self._missing():
            self._check()
            self._dial()
            now = time.monotonic()
            if now >= self._deadline.at:
                raise self._overdue(missing)
            timers = [a.machine.deadline for a in self._approaches] + [
                call.due for call in self._calls
            ]
            for key, _ in self._selector.select(
                max(0.0, min([self._deadline.at, now + CHECK_S, *timers]) - now)
            ):
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
        return [
            p
            for p in self._peers
            if not all((p, s) in self._proven for s in range(self._nstreams(p)))
        ]

    def _overdue(self, missing: list[int]) -> MiracclError:
        reasons = "".join(f"; rank {p}: {self._why[p]}" for p in missing if p in self._why)
        return BootstrapError(
            f"no TCP connection with ranks {missing} after {self._deadline.seconds:g} s{reasons}",
            rank=self._rank,
            peer=missing[0],
            hint="MIRACCL_SOCKET_IFNAME chooses the interfaces; a firewall must let all ports through between the hosts",
        )

    # --- our calls

    def _dial(self) -> None:
        """Make the calls that are due."""
        now = time.monotonic()
        due = [call for call in self._calls if call.due <= now]
        self._calls = [call for call in self._calls if call.due > now]
        for call in due:
            addresses = self._peers[call.peer].addresses
            address, port = addresses[call.turn % len(addresses)]
            want = StreamIdentity(
                initiator=self._rank,
                acceptor=call.peer,
                stream=call.stream,
                nstreams=self._nstreams(call.peer),
            )
            deadline = min(self._deadline.at, now + HANDSHAKE_TIMEOUT_S)
            machine = InitiatorHandshake(
                key=self._key, nonce=os.urandom(NONCE_BYTES), deadline=deadline, want=want
            )
            try:
                approach = _Approach(self._connect(address, port), machine, call, address)
                approach.answer = machine.hello
                self._watch(approach, selectors.EVENT_WRITE)
            except OSError as error:
                self._fail(call, address, error)

    def _connect(self, address: str, port: int) -> socket.socket:
        sock = socket.socket(family_of(address), socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            tune(sock, self._buffer_bytes)
            status = sock.connect_ex((address, port))
            if status not in (0, errno.EINPROGRESS):
                raise OSError(status, os.strerror(status))
        except BaseException:
            sock.close()
            raise
        return sock

    def _fail(self, call: _Call, address: str, error: OSError) -> None:
        """A call has failed: it is made again later. Raises ``SystemFailure`` when the peer is given up."""
        now, peer = time.monotonic(), call.peer
        self._why[peer] = f"{address}: {error.strerror or error}"
        if error.errno != errno.ECONNREFUSED:
            self._refused.pop(peer, None)
        elif now - self._refused.setdefault(peer, now) >= REFUSED_S:
            raise SystemFailure(
                f"cannot reach rank {peer} at {self._why[peer]}", rank=self._rank, peer=peer
            )
        call.turn += 1
        lap, within = divmod(call.turn, len(self._peers[peer].addresses))
        call.due = (
            now if within else now + min(FIRST_PAUSE_S * 2.0 ** min(lap, 16), LONGEST_PAUSE_S)
        )
        self._calls.append(call)

    # --- their calls

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # it has gone again, or there are no descriptors left
            time.sleep(SHORTAGE_S)
            return
        strangers = [a for a in self._approaches if a.call is None]
        if len(strangers) >= MAX_STRANGERS + sum(self._nstreams(peer) for peer in self._peers):
            self._drop(min(strangers, key=lambda a: a.machine.deadline))
        sock.setblocking(False)
        machine = AcceptorHandshake(
            key=self._key,
            nonce=os.urandom(NONCE_BYTES),
            deadline=time.monotonic() + HANDSHAKE_TIMEOUT_S,
            rank=self._rank,
        )
        with suppress(OSError):  # no memory for one more: if it is a peer, it calls again
            self._watch(_Approach(sock, machine), selectors.EVENT_READ)

    # --- both

    def _watch(self, approach: _Approach, mask: int) -> None:
        try:
            self._selector.register(approach.sock, mask, approach)
        except OSError:
            approach.sock.close()
            raise
        self._approaches.add(approach)

    def _step(self, approach: _Approach) -> None:
        """The socket is ready for what the handshake waits for."""
        try:
            if approach.connecting:
                finish_connect(approach.sock)
                approach.connecting = False
                approach.machine.deadline = (
                    self._deadline.at
                )  # it answers once it calls connect, which may be late
            elif not approach.answer:
                self._read(approach)
            self._answer(approach)
        except (AuthenticationError, ProtocolError) as problem:
            if approach.call is not None:
                problem.rank, problem.peer = self._rank, approach.call.peer
                raise
            log.warning("dropped a connection: %s", problem.message)
            self._drop(approach)
        except OSError as error:
            if not is_transient(error):
                self._give_up(approach, error)

    def _give_up(self, approach: _Approach, error: OSError) -> None:
        self._drop(approach)
        if approach.call is not None:
            self._fail(approach.call, approach.address, error)

    def _read(self, approach: _Approach) -> None:
        data = approach.sock.recv(approach.machine.needs - len(approach.got))
        if not data:
            raise ConnectionResetError(
                errno.ECONNRESET, "it closed the connection during the handshake"
            )
        approach.got += data
        if len(approach.got) == approach.machine.needs:
            got, approach.got = approach.got, b""
            approach.answer += approach.machine.receive(got)

    def _answer(self, approach: _Approach) -> None:
        if approach.answer:
            try:
                sent = approach.sock.send(approach.answer)
                approach.answer = approach.answer[sent:]
            except OSError as error:
                if not is_transient(error):
                    raise
        if approach.answer:
            self._selector.modify(approach.sock, selectors.EVENT_WRITE, approach)
        elif approach.machine.done:
            self._finish(approach)
        else:
            self._selector.modify(approach.sock, selectors.EVENT_READ, approach)

    def _finish(self, approach: _Approach) -> None:
        identity = approach.machine.identity
        assert identity is not None
        peer = identity.acceptor if approach.call is not None else identity.initiator
        self._check_streams(identity, peer)
        self._approaches.discard(approach)
        self._selector.unregister(approach.sock)
        self._keep(Proven(sock=approach.sock, identity=identity), peer)

    def _check_streams(self, identity: StreamIdentity, peer: int) -> None:
        if peer in self._peers and identity.nstreams != self._nstreams(peer):
            raise ProtocolError(
                f"rank {peer} opens {identity.nstreams} streams instead of {self._nstreams(peer)}",
                peer=peer,
            )

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
            self._give_up(approach, OSError(errno.ETIMEDOUT, "no answer"))

    def _drop(self, approach: _Approach) -> None:
        self._approaches.discard(approach)
        self._selector.unregister(approach.sock)
        approach.sock.close()
