"""The hub of a job: one thread with the listening sockets, around
``wire.bootstrap_hub.HubMachine``.

It runs in the process that created the unique id, serves one job, and ends when all ranks have
left. Its creator owns it (``HubServer.close``, ``HubServer.join``). At the exit of the interpreter
it waits a moment for ranks that are about to leave as well. The hub of a launcher serves many jobs,
with a machine for each: newcomers belong to the job whose ranks still arrive, and it ends when it
is closed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miraccl import clock, params, trace
from miraccl.bootstrap import lifetime
from miraccl.bootstrap.eventfd import EventFd
from miraccl.bootstrap.interfaces import choose_addresses
from miraccl.bootstrap.unique_id import UniqueId
from miraccl.errors import InvalidUsage, SystemFailure, as_system_failure
from miraccl.host import network_fingerprint, process_token
from miraccl.sockets import is_transient, open_in_range
from miraccl.wire.auth import NONCE_BYTES, SECRET_BYTES
from miraccl.wire.bootstrap import (
    CloseHub,
    Connected,
    Disconnected,
    Drop,
    Finished,
    JobState,
    RankDead,
    Received,
    Send,
    Tick,
)
from miraccl.wire.bootstrap_hub import HubMachine

_log = trace.logger("bootstrap")
BACKLOG = 1024
#: Pauses of listening: too many unauthenticated connections; no descriptors or memory left.
FULL_SECONDS, SHORTAGE_SECONDS = 0.003, 0.02
ACCEPTS_PER_WAKEUP = 64  # so that a flood of connections does not delay the ranks
READ_BYTES = 1 << 18
#: A rank with more unsent bytes counts as lost: it has not read for a long time.
MAX_UNSENT_BYTES = 512 << 20
#: Interval (seconds) at which a successor looks whether missing ranks are dead.
PROBE_SECONDS = 0.25
MAX_SELECT_SECONDS = 3600.0  # epoll counts milliseconds in 32 bits
CLOSE_SECONDS = 2.0  # for a rank to read its last message and hang up

_unowned: list[HubServer] = []  # hubs of get_unique_id()


@dataclass(kw_only=True)
class _Connection:
    """A connection of the hub to one rank of the job of ``machine``.

    ``closing``: it ends once ``unsent`` is out; ``linger``: it then waits until the other side
    hangs up too; ``shut``: our direction is closed; ``broken``: reason why nothing can be sent.
    """

    conn: int
    sock: socket.socket
    machine: HubMachine
    unsent: bytearray = field(default_factory=bytearray)
    closing: bool = False
    linger: bool = False
    shut: bool = False
    broken: str = ""
    close_by: float = 0.0


@dataclass(kw_only=True, eq=False)
class _Probe:
    """A connection to a standby port, which shows whether a process lives."""

    rank: int
    sock: socket.socket
    done: bool = False
    refused: bool = False


class HubServer:
    """A running hub. It owns the listening sockets.

    ``addresses``: (host, port) of the listening sockets. ``next_machine`` creates the machine of
    the next job, if it serves many. Raises ``SystemFailure``.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        machine: HubMachine,
        next_machine: Callable[[], HubMachine] | None = None,
        standby: Mapping[int, Sequence[tuple[str, int]]] | None = None,
    ) -> None:
        self._machine, self._next_machine = machine, next_machine
        self._formed: list[HubMachine] = []  # machines of earlier jobs that still run
        self._listeners = list(listeners)
        self._connections: dict[int, _Connection] = {}
        self._standby = standby or {}
        self._probes: dict[int, list[_Probe]] = {}  # by rank
        self._probe_at = clock.monotonic() + PROBE_SECONDS if standby else None
        self._next_conn = 1
        self._close_reason: str | None = None
        self._listen_again_at: float | None = None
        self._finished = False
        self._thread = clock.thread(target=self._run, name="miraccl-hub", daemon=True)
        with (
            as_system_failure("cannot start the control plane of the job"),
            contextlib.ExitStack() as unless_it_runs,
        ):
            for sock in listeners:
                unless_it_runs.callback(sock.close)
            self.addresses = tuple(
                (str(s.getsockname()[0]), int(s.getsockname()[1])) for s in listeners
            )
            self._selector = unless_it_runs.enter_context(selectors.DefaultSelector())
            self._wakeup = EventFd()
            unless_it_runs.callback(self._wakeup.close)
            for sock in listeners:
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ, sock)
            self._selector.register(self._wakeup, selectors.EVENT_READ, None)
            self._thread.start()
            unless_it_runs.pop_all()
        lifetime.hubs.add(self)

    @property
    def alive(self) -> bool:
        """True while the hub serves its job."""
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds until all ranks have left; return True if the hub has
        ended.
        """
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self, reason: str = "closed by its owner", timeout: float = 2.0) -> None:
        """End the hub now and notify the ranks that are still there. May be called twice."""
        self._close_reason = self._close_reason or reason
        self._wakeup.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def close_after_error(self, error: BaseException) -> None:
        """Close the hub because rank 0, its owner, failed to join with ``error``."""
        self.close(f"rank 0 failed to join: {type(error).__name__}")

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- thread ---

    def _run(self) -> None:
        try:
            while not self._finished or self._connections:
                ready = clock.wait_io(self._selector.select, self._select_timeout())
                # Connections before listeners: a flood of newcomers must not evict a rank that is
                # in
                # its handshake.
                for key, mask in sorted(
                    ready, key=lambda item: isinstance(item[0].data, socket.socket)
                ):
                    self._handle_ready(key.data, mask)
                if self._close_reason is not None and not self._finished:
                    for machine in [*self._formed, self._machine]:
                        self._feed(
                            machine, CloseHub(now=clock.monotonic(), reason=self._close_reason)
                        )
                self._run_timers()
        except Exception:  # its connections close, so every rank sees it
            _log.exception("the hub of the job failed")
        finally:
            for sock in [
                *self._listeners,
                *(connection.sock for connection in self._connections.values()),
            ]:
                sock.close()
            self._wakeup.close()
            self._selector.close()

    def _select_timeout(self) -> float | None:
        times = [
            connection.close_by for connection in self._connections.values() if connection.closing
        ]
        times += [
            t
            for t in (
                self._machine.deadline(),
                *(m.deadline() for m in self._formed),
                self._listen_again_at,
                self._probe_at,
            )
            if t is not None
        ]
        return min(max(0.0, min(times) - clock.monotonic()), MAX_SELECT_SECONDS) if times else None

    def _run_timers(self) -> None:
        now = clock.monotonic()
        if self._listen_again_at is not None and now >= self._listen_again_at:
            self._listen_again()
        if self._probe_at is not None and now >= self._probe_at:
            self._probe_missing(now)
        for machine in [*self._formed, self._machine]:
            deadline = machine.deadline()
            if deadline is not None and deadline <= now:
                self._feed(machine, Tick(now=now))
        for connection in [
            connection
            for connection in self._connections.values()
            if connection.closing and connection.close_by <= now
        ]:
            self._hang_up(connection)

    def _handle_ready(self, data: Any, mask: int) -> None:
        if data is None:
            self._wakeup.clear()
        elif isinstance(data, socket.socket):
            self._accept(data)
        elif isinstance(data, _Probe):
            self._end_probe(data)
        elif data.conn in self._connections:
            if mask & selectors.EVENT_WRITE:
                self._flush(data)
            if mask & selectors.EVENT_READ and data.conn in self._connections:
                self._read(data)

    def _accept(self, listener: socket.socket) -> None:
        if self._next_machine is not None and self._machine.state is JobState.FORMED:
            self._formed.append(self._machine)
            self._machine = self._next_machine()
        for _ in range(ACCEPTS_PER_WAKEUP):
            if not self._machine.may_accept(clock.monotonic()):
                self._pause_listening(FULL_SECONDS)
                return
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._make_room():
                    return  # connections that are here come first, then the next one is accepted
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause_listening(SHORTAGE_SECONDS)
                return
            sock.setblocking(False)
            tune(sock)
            connection = _Connection(conn=self._next_conn, sock=sock, machine=self._machine)
            try:
                self._selector.register(sock, selectors.EVENT_READ, connection)
            except OSError:  # no kernel memory for it: the peer will retry
                sock.close()
                self._pause_listening(SHORTAGE_SECONDS)
                return
            self._next_conn += 1
            self._connections[connection.conn] = connection
            peer = f"{address[0]}:{address[1]}"
            self._feed(
                connection.machine,
                Connected(
                    now=clock.monotonic(),
                    conn=connection.conn,
                    nonce=clock.random_bytes(NONCE_BYTES),
                    peer=peer,
                ),
            )

    def _make_room(self) -> bool:
        """Free a descriptor for a newcomer: a flood must not keep the ranks out."""
        before = len(self._connections)
        now = clock.monotonic()
        self._apply(self._machine, self._machine.make_room(now), now)
        return len(self._connections) < before

    def _pause_listening(self, seconds: float) -> None:
        # A listening socket that is not accepted from would be ready for ever. Its connections
        # wait in the kernel's queue.
        if self._listen_again_at is None:
            for sock in self._listeners:
                self._selector.unregister(sock)
            self._listen_again_at = clock.monotonic() + seconds

    def _listen_again(self) -> None:
        self._listen_again_at = None
        try:
            for sock in self._listeners:
                self._selector.register(sock, selectors.EVENT_READ, sock)
        except OSError:
            for sock in self._listeners:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(sock)
            self._listen_again_at = clock.monotonic() + SHORTAGE_SECONDS

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(READ_BYTES)
        except OSError as error:
            if not is_transient(error):
                self._lost(connection, f"its connection broke ({error.strerror})")
            return
        if not data:
            self._lost(
                connection, connection.broken or "its process ended or closed the connection"
            )
        elif not connection.closing:
            self._feed(
                connection.machine, Received(now=clock.monotonic(), conn=connection.conn, data=data)
            )

    def _lost(self, connection: _Connection, reason: str) -> None:
        self._hang_up(connection)
        if not connection.closing:
            self._feed(
                connection.machine,
                Disconnected(now=clock.monotonic(), conn=connection.conn, reason=reason),
            )

    def _hang_up(self, connection: _Connection) -> None:
        if self._connections.pop(connection.conn, None) is not None:
            self._selector.unregister(connection.sock)
            connection.sock.close()

    def _feed(self, machine: HubMachine, event: Any) -> None:
        """Pass one input to a machine and apply its outputs."""
        self._apply(machine, machine.handle(event), event.now)

    def _apply(self, machine: HubMachine, outputs: Sequence[Any], now: float) -> None:
        touched: dict[int, _Connection] = {}
        for output in outputs:
            if isinstance(output, Finished):
                self._finish(machine)
                continue
            connection = self._connections.get(output.conn)
            if connection is None:
                continue
            touched[connection.conn] = connection
            if isinstance(output, Send):
                connection.unsent += output.data
            elif isinstance(output, Drop) and not connection.closing:
                connection.closing, connection.linger = True, output.linger
                connection.close_by = now + CLOSE_SECONDS
        for connection in touched.values():
            self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        if connection.conn not in self._connections:
            return
        while connection.unsent:
            try:
                sent = connection.sock.send(connection.unsent)
            except OSError as error:
                if not is_transient(error):  # what it sent before it ended is still to be read
                    connection.unsent.clear()
                    connection.broken = f"its connection broke ({error.strerror})"
                    end_sending(connection.sock)
                break
            del connection.unsent[:sent]
        if connection.closing and not connection.unsent and not connection.linger:
            self._hang_up(connection)
            return
        if connection.closing and not connection.unsent and not connection.shut:
            connection.shut = True
            end_sending(connection.sock)
        if len(connection.unsent) > MAX_UNSENT_BYTES:
            self._lost(connection, "it does not read what it is sent")
        else:
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
            self._selector.modify(connection.sock, mask, connection)

    def _finish(self, machine: HubMachine) -> None:
        """End a job, and the hub with it unless it serves others."""
        for connection in self._connections.values():
            if connection.machine is machine and not connection.closing:
                connection.closing, connection.close_by = True, clock.monotonic() + CLOSE_SECONDS
        if machine in self._formed:
            self._formed.remove(machine)
        elif self._next_machine is not None and self._close_reason is None:
            self._machine = self._next_machine()
        else:
            self._stop_listening()

    def _stop_listening(self) -> None:
        self._finished = True
        for sock in self._listeners:
            if self._listen_again_at is None:
                self._selector.unregister(sock)
            sock.close()
        self._listeners.clear()
        self._listen_again_at = None

    # --- ranks that have not come to a successor ---

    def _probe_missing(self, now: float) -> None:
        """Connect to the standby ports of the missing ranks: a dead process refuses that."""
        missing = self._machine.missing
        for rank in [rank for rank in missing if rank not in self._probes]:
            self._probes[rank] = [
                probe
                for address in self._standby.get(rank, ())
                if (probe := self._start_probe(rank, address)) is not None
            ]
            self._evaluate_probes(rank)
        self._probe_at = now + PROBE_SECONDS if missing else None

    def _start_probe(self, rank: int, address: tuple[str, int]) -> _Probe | None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with contextlib.suppress(OSError):
            probe = _Probe(rank=rank, sock=socket.socket(family, socket.SOCK_STREAM))
            probe.sock.setblocking(False)
            problem = probe.sock.connect_ex(address)
            probe.done, probe.refused = problem != errno.EINPROGRESS, problem == errno.ECONNREFUSED
            if not probe.done:
                self._selector.register(probe.sock, selectors.EVENT_WRITE, probe)
            return probe
        return None

    def _end_probe(self, probe: _Probe) -> None:
        problem = probe.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        probe.done, probe.refused = True, problem == errno.ECONNREFUSED
        self._selector.unregister(probe.sock)
        self._evaluate_probes(probe.rank)

    def _evaluate_probes(self, rank: int) -> None:
        """Count a rank as dead if no address answers and one refuses the connection."""
        probes = self._probes[rank]
        if not all(probe.done for probe in probes):
            return
        del self._probes[rank]
        dead = any(probe.refused for probe in probes)
        for probe in probes:
            with contextlib.suppress(OSError):  # of an address that answered
                probe.sock.getpeername()
                dead = False
            probe.sock.close()
        if dead:
            reason = "its process has ended"
            self._feed(self._machine, RankDead(now=clock.monotonic(), rank=rank, reason=reason))

    # --- fork ---

    def forked(self) -> None:
        """Close the descriptors in a forked child, so that the parent's death is still seen."""
        self._selector.close()
        for sock in [
            *self._listeners,
            *(connection.sock for connection in self._connections.values()),
        ]:
            sock.close()
        self._wakeup.close()


def tune(sock: socket.socket) -> None:
    """Set the options of a control connection.

    No delay for small messages. A host that lost power is detected after some 15 s by keepalive
    probes; the death of a process is seen at once.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15000)


def end_sending(sock: socket.socket) -> None:
    """Close our direction; the other side reads what is in flight, then the end."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket on one numeric address.

    ``host`` "": all addresses of both families. ``port`` 0: a free port of NET_PORT_RANGE. Raises
    ``OSError``.
    """
    if port == 0:
        return open_in_range(lambda free: _listen_at(host, free), params.NET_PORT_RANGE.read())
    return _listen_at(host, port)


def _listen_at(host: str, port: int) -> socket.socket:
    if not host:
        if socket.has_dualstack_ipv6():
            try:
                return socket.create_server(
                    ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
                )
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise
        return socket.create_server(("", port), backlog=BACKLOG)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def _listen_on(hosts: Iterable[str], port: int) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    problem: OSError | None = None
    for host in dict.fromkeys(hosts):
        try:
            listeners.append(listen(host, port))
        except OSError as error:
            problem = error
            if (
                error.errno == errno.EADDRINUSE
            ):  # one address family would be found by half of the ranks
                for sock in listeners:
                    sock.close()
                listeners.clear()
                break
    if not listeners:
        reason = problem.strerror if problem else "no address"
        raise SystemFailure(
            f"cannot listen for the ranks of the job on {', '.join(hosts)} port {port}: {reason}"
        )
    return listeners


def create_hub(
    *,
    nranks: int | None = None,
    hosts: Sequence[str] | None = None,
    port: int = 0,
    secret: bytes | None = None,
    reusable: bool = False,
    log: list[Any] | None = None,
) -> tuple[UniqueId, HubServer]:
    """Start the hub of a job in this process.

    Returns the unique id for all ranks, and the hub, which must be kept until they have left.
    ``nranks``: learnt from the first rank if it is not given. ``hosts``: numeric addresses to
    listen on, default those of the chosen interface and loopback. ``port``: 0 lets the kernel
    choose. ``secret``: 32 bytes, default random. ``reusable``: the id serves one job after another
    until the hub is closed. Raises ``SystemFailure`` if no address can be listened on.
    """
    if nranks is not None and nranks < 1:
        raise InvalidUsage(f"cannot create a job with nranks={nranks}: a job has at least 1 rank")
    if hosts is None:
        chosen, loopback = choose_addresses()
        hosts = [*chosen, *(["127.0.0.1"] if loopback else [])]
    secret = clock.random_bytes(SECRET_BYTES) if secret is None else secret
    job = functools.partial(
        HubMachine, secret=secret, token=process_token(), nranks=nranks, log=log
    )
    hub = HubServer(_listen_on(hosts, port), job(), job if reusable else None)
    return UniqueId(addresses=hub.addresses, secret=secret, host=network_fingerprint()), hub


def get_unique_id() -> UniqueId:
    """Start the rendezvous of a new job in this process and return its id (``ncclGetUniqueId``).

    All ranks need the id; ``str(id)`` fits into an environment variable. The rendezvous ends when
    all ranks have left.

    Raises:
        SystemFailure: A socket or thread cannot be created.
        InvalidUsage: SOCKET_IFNAME matches no usable interface.
    """
    unique_id, hub = create_hub()
    _unowned[:] = [other for other in _unowned if other.alive]
    _unowned.append(hub)
    return unique_id
