"""Connection of TCP streams: dials, accepts and authenticates until each peer has all its streams.

A ``ConnectRound`` is one call of ``connect``. The rules are in ``transport.socket``; the proofs are
those of ``wire.stream``. It owns sockets until they are proven; proven ones belong to its caller.

A failed connection attempt is repeated at the peer's next address and after a growing pause, until
the deadline: ports of this host may be exhausted, or the connection dropped among many
unauthenticated ones. Only a peer whose addresses all refuse is given up earlier: it has been
listening since before it published them.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from miraccl import clock, params, trace
from miraccl.deadline import Deadline
from miraccl.errors import (
    AuthenticationError,
    BootstrapError,
    MiracclError,
    ProtocolError,
    SystemFailure,
    as_system_failure,
    descriptor_hint,
)
from miraccl.sockets import finish_connect, is_transient, local_networks
from miraccl.wire.stream import (
    NONCE_BYTES,
    AcceptorHandshake,
    Handshake,
    InitiatorHandshake,
    StreamIdentity,
)

log = trace.logger("socket")

HANDSHAKE_TIMEOUT_S = 5.0
MAX_UNAUTHENTICATED = 64
CHECK_INTERVAL_S = 0.2
#: Pauses between two rounds of attempts at all addresses of a peer; each is twice the one before.
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.005, 0.5
#: Time after which a peer whose kernel refuses every connection is given up.
REFUSED_TIMEOUT_S = 3.0
#: Pause after an accept failed.
ACCEPT_RETRY_S = 0.01
#: Idle time, interval and count: a host that vanishes without a FIN is noticed after 25 s.
KEEPALIVE_S = (10, 5, 3)


def set_tcp_options(sock: socket.socket, buffer_bytes: int) -> None:
    """Set the socket options of a stream.

    Some must be set before the connection exists, because the window scale is negotiated then.
    """
    if buffer_bytes:
        # a C int; the kernel has a lower limit of its own
        buffer_bytes = min(buffer_bytes, (1 << 31) - 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    idle, interval, count = KEEPALIVE_S
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)


def family_of(address: str) -> socket.AddressFamily:
    """Return the address family of a numeric IP address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def data_addresses(addresses: Sequence[str]) -> list[str]:
    """Return the addresses of a rank that carry data: those of the family of the best one.

    Ranks that announce loopback share a host, where another address would add no network.
    """
    if addresses and ipaddress.ip_address(addresses[0].partition("%")[0]).is_loopback:
        return [addresses[0]]
    return [a for a in addresses if family_of(a) == family_of(addresses[0])]


@dataclass(frozen=True, kw_only=True)
class PeerStreams:
    """Listening addresses of a peer, and the number of streams that the two ranks agree on."""

    addresses: tuple[tuple[str, int], ...]
    nstreams: int


def rails_of(addresses: Sequence[str]) -> list[int]:
    """Return the indices of a peer's addresses over which streams are spread, the best one first.

    Further addresses of the best one's family count if this host is attached to their network, or
    if SOCKET_IFNAME names the interfaces to use: the user then vouches for their routes. A peer
    whose best address is that of loopback runs on this host: all its addresses are one network.
    """
    if ipaddress.ip_address(addresses[0]).is_loopback:
        return [0]
    named = bool(params.SOCKET_IFNAME.read())
    networks = local_networks() if len(addresses) > 1 and not named else []
    rails = [0]
    for i, address in enumerate(addresses[1:], 1):
        if family_of(address) != family_of(addresses[0]):
            continue
        if named or any(ipaddress.ip_address(address) in network for network in networks):
            rails.append(i)
    return rails


@dataclass(frozen=True, kw_only=True)
class ProvenStream:
    """Socket whose other end knows the secret."""

    sock: socket.socket
    identity: StreamIdentity


@dataclass(kw_only=True)
class _DialAttempt:
    """Outgoing stream that is not proven yet; ``turn`` counts its attempts, the next one is due at
    ``due``.
    """

    peer: int
    stream: int
    turn: int = 0
    due: float = 0.0


class _PendingStream:
    """Socket that is not proven yet; ``attempt`` is None for an accepted one."""

    def __init__(
        self,
        sock: socket.socket,
        machine: Handshake,
        attempt: _DialAttempt | None = None,
        address: str = "",
    ) -> None:
        self.sock = sock
        self.machine = machine
        self.attempt = attempt
        self.address = address
        self.connecting = attempt is not None
        self.received = b""
        self.outgoing = b""


class ConnectRound:
    """One call of ``connect`` by ``rank`` for ``peers``.

    Args:
        key: Key of the job.
        parked: (rank, stream) -> proven streams of peers that were not requested yet.
        deadline: End of ``run``.
        check: Called every ``CHECK_INTERVAL_S`` seconds; raises if the round cannot succeed.
    """

    def __init__(
        self,
        *,
        rank: int,
        key: bytes,
        peers: Mapping[int, PeerStreams],
        listeners: Sequence[socket.socket],
        parked: dict[tuple[int, int], ProvenStream],
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
        self._pending: set[_PendingStream] = set()
        self._attempts: list[_DialAttempt] = []  # to be made
        self._proven: dict[tuple[int, int], ProvenStream] = {}
        self._last_errors: dict[int, str] = {}
        self._out_of_descriptors = False
        self._refused_since: dict[int, float] = {}  # time of the first of only refusals
        with as_system_failure("cannot connect to ranks of other hosts", rank=rank):
            self._selector = selectors.DefaultSelector()
            try:
                for listener in listeners:
                    self._selector.register(listener, selectors.EVENT_READ, None)
            except OSError:
                self._selector.close()
                raise

    def run(self) -> dict[int, list[ProvenStream]]:
        """Return the proven streams of each peer, ordered by stream number."""
        for peer in self._peers:
            rails = rails_of([address for address, _ in self._peers[peer].addresses])
            for stream in range(self._nstreams(peer)):
                if peer > self._rank:
                    first = rails[stream % len(rails)]
                    self._attempts.append(_DialAttempt(peer=peer, stream=stream, turn=first))
                else:
                    parked = self._parked.pop((peer, stream), None)
                    if parked:
                        self._store_proven(parked, peer)
                        self._check_streams(parked.identity, peer)
        while missing := self._missing():
            self._check()
            self._dial()
            now = clock.monotonic()
            if now >= self._deadline.at - self._shortage_lead():
                raise self._timeout_error(missing)
            timers = [a.machine.deadline for a in self._pending] + [
                attempt.due for attempt in self._attempts
            ]
            for key, _ in clock.wait_io(
                self._selector.select,
                max(0.0, min([self._deadline.at, now + CHECK_INTERVAL_S, *timers]) - now),
            ):
                if key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                elif key.data in self._pending:
                    self._advance(key.data)
            self._expire()
        return {p: [self._proven[p, s] for s in range(self._nstreams(p))] for p in self._peers}

    def close(self) -> None:
        """Close unproven sockets; proven ones belong to the caller."""
        for stream in list(self._pending):
            self._drop(stream)
        self._selector.close()

    def close_proven(self) -> None:
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

    def _shortage_lead(self) -> float:
        """Time (seconds) before the deadline at which a rank without descriptors gives up.

        Its peers see only that it does not answer: the rank that knows the reason has to be first.
        """
        return min(1.0, 0.1 * self._deadline.seconds) if self._out_of_descriptors else 0.0

    def _timeout_error(self, missing: list[int]) -> MiracclError:
        if self._out_of_descriptors:
            return SystemFailure(
                f"cannot connect to ranks {missing}: Too many open files",
                rank=self._rank,
                peer=missing[0],
                hint=descriptor_hint(),
            )
        reasons = "".join(
            f"; rank {p}: {self._last_errors[p]}" for p in missing if p in self._last_errors
        )
        return BootstrapError(
            f"cannot connect to ranks {missing} over TCP within {self._deadline.seconds:g} s"
            f"{reasons}",
            rank=self._rank,
            peer=missing[0],
            hint="MIRACCL_SOCKET_IFNAME chooses the interfaces; firewalls between the hosts must "
            "allow all ports, or those of MIRACCL_NET_PORT_RANGE",
        )

    # --- outgoing connections

    def _dial(self) -> None:
        """Start the attempts that are due."""
        now = clock.monotonic()
        due = [attempt for attempt in self._attempts if attempt.due <= now]
        self._attempts = [attempt for attempt in self._attempts if attempt.due > now]
        for attempt in due:
            addresses = self._peers[attempt.peer].addresses
            address, port = addresses[attempt.turn % len(addresses)]
            identity = StreamIdentity(
                initiator=self._rank,
                acceptor=attempt.peer,
                stream=attempt.stream,
                nstreams=self._nstreams(attempt.peer),
            )
            deadline = min(self._deadline.at, now + HANDSHAKE_TIMEOUT_S)
            machine = InitiatorHandshake(
                key=self._key,
                nonce=clock.random_bytes(NONCE_BYTES),
                deadline=deadline,
                identity=identity,
            )
            try:
                stream = _PendingStream(self._connect(address, port), machine, attempt, address)
                stream.outgoing = machine.hello
                self._register(stream, selectors.EVENT_WRITE)
            except OSError as error:
                self._schedule_retry(attempt, address, error)

    def _connect(self, address: str, port: int) -> socket.socket:
        sock = socket.socket(family_of(address), socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            set_tcp_options(sock, self._buffer_bytes)
            status = sock.connect_ex((address, port))
            if status not in (0, errno.EINPROGRESS):
                raise OSError(status, os.strerror(status))
        except BaseException:
            sock.close()
            raise
        return sock

    def _schedule_retry(self, attempt: _DialAttempt, address: str, error: OSError) -> None:
        """Schedule the next attempt after a failure. Raises ``SystemFailure`` to give the peer
        up.
        """
        now, peer = clock.monotonic(), attempt.peer
        self._last_errors[peer] = f"{address}: {error.strerror or error}"
        self._out_of_descriptors |= error.errno == errno.EMFILE
        if error.errno != errno.ECONNREFUSED:
            self._refused_since.pop(peer, None)
        elif now - self._refused_since.setdefault(peer, now) >= REFUSED_TIMEOUT_S:
            raise SystemFailure(
                f"cannot reach rank {peer} at {self._last_errors[peer]}", rank=self._rank, peer=peer
            )
        attempt.turn += 1
        lap, within = divmod(attempt.turn, len(self._peers[peer].addresses))
        attempt.due = (
            now if within else now + min(MIN_BACKOFF_S * 2.0 ** min(lap, 16), MAX_BACKOFF_S)
        )
        self._attempts.append(attempt)

    # --- incoming connections

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # the peer closed again, or no descriptor is free
            self._out_of_descriptors |= error.errno == errno.EMFILE
            clock.sleep(ACCEPT_RETRY_S)
            return
        strangers = [a for a in self._pending if a.attempt is None]
        if len(strangers) >= MAX_UNAUTHENTICATED + sum(
            self._nstreams(peer) for peer in self._peers
        ):
            self._drop(min(strangers, key=lambda a: a.machine.deadline))
        sock.setblocking(False)
        machine = AcceptorHandshake(
            key=self._key,
            nonce=clock.random_bytes(NONCE_BYTES),
            deadline=clock.monotonic() + HANDSHAKE_TIMEOUT_S,
            rank=self._rank,
        )
        with suppress(OSError):  # out of memory: a peer will connect again
            self._register(_PendingStream(sock, machine), selectors.EVENT_READ)

    # --- both

    def _register(self, stream: _PendingStream, mask: int) -> None:
        try:
            self._selector.register(stream.sock, mask, stream)
        except OSError:
            stream.sock.close()
            raise
        self._pending.add(stream)

    def _advance(self, stream: _PendingStream) -> None:
        """Continue a handshake whose socket is ready."""
        try:
            if stream.connecting:
                finish_connect(stream.sock)
                stream.connecting = False
                # The peer answers when it calls ``connect``, which may be late.
                stream.machine.deadline = self._deadline.at
            elif not stream.outgoing:
                self._read(stream)
            self._flush(stream)
        except (AuthenticationError, ProtocolError) as problem:
            if stream.attempt is not None:
                problem.rank, problem.peer = self._rank, stream.attempt.peer
                raise
            log.warning("dropped a connection: %s", problem.message)
            self._drop(stream)
        except OSError as error:
            if not is_transient(error):
                self._abandon(stream, error)

    def _abandon(self, stream: _PendingStream, error: OSError) -> None:
        self._drop(stream)
        if stream.attempt is not None:
            self._schedule_retry(stream.attempt, stream.address, error)

    def _read(self, stream: _PendingStream) -> None:
        data = stream.sock.recv(stream.machine.needs - len(stream.received))
        if not data:
            raise ConnectionResetError(
                errno.ECONNRESET, "it closed the connection during the handshake"
            )
        stream.received += data
        if len(stream.received) == stream.machine.needs:
            got, stream.received = stream.received, b""
            stream.outgoing += stream.machine.receive(got)

    def _flush(self, stream: _PendingStream) -> None:
        if stream.outgoing:
            try:
                sent = stream.sock.send(stream.outgoing)
                stream.outgoing = stream.outgoing[sent:]
            except OSError as error:
                if not is_transient(error):
                    raise
        if stream.outgoing:
            self._selector.modify(stream.sock, selectors.EVENT_WRITE, stream)
        elif stream.machine.done:
            self._finish(stream)
        else:
            self._selector.modify(stream.sock, selectors.EVENT_READ, stream)

    def _finish(self, stream: _PendingStream) -> None:
        identity = stream.machine.identity
        assert identity is not None
        peer = identity.acceptor if stream.attempt is not None else identity.initiator
        self._check_streams(identity, peer)
        self._pending.discard(stream)
        self._selector.unregister(stream.sock)
        self._store_proven(ProvenStream(sock=stream.sock, identity=identity), peer)

    def _check_streams(self, identity: StreamIdentity, peer: int) -> None:
        if peer in self._peers and identity.nstreams != self._nstreams(peer):
            raise ProtocolError(
                f"rank {peer} opens {identity.nstreams} streams instead of {self._nstreams(peer)}",
                peer=peer,
            )

    def _store_proven(self, proven: ProvenStream, peer: int) -> None:
        """Store a stream for this call or a later one.

        A second stream of the same number replaces the first, whose initiator has given up.
        """
        shelf = self._proven if peer in self._peers else self._parked
        replaced = shelf.pop((peer, proven.identity.stream), None)
        if replaced:
            replaced.sock.close()
        shelf[peer, proven.identity.stream] = proven

    def _expire(self) -> None:
        now = clock.monotonic()
        for stream in [a for a in self._pending if a.machine.expire(now)]:
            self._abandon(stream, OSError(errno.ETIMEDOUT, "no answer"))

    def _drop(self, stream: _PendingStream) -> None:
        self._pending.discard(stream)
        self._selector.unregister(stream.sock)
        stream.sock.close()
