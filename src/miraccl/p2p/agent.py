"""The agent: registered memory, connections to other agents, and notifications from them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from miraccl import clock, params, trace
from miraccl.deadline import Deadline
from miraccl.errors import (
    AgentLost,
    InvalidUsage,
    MiracclError,
    as_system_failure,
)
from miraccl.p2p.arrays import Memory, memory_of, windows
from miraccl.p2p.connector import Connector, Identity, PeerPath, agent_secret
from miraccl.p2p.control import ControlThread
from miraccl.p2p.descriptors import RemoteMemory, parse_access
from miraccl.p2p.notify import Inbox, Notification, PairSegment, nanoseconds
from miraccl.p2p.peer import Peer
from miraccl.p2p.registration import AccessLines, RegionTable, Registration
from miraccl.p2p.serving import ServedStream
from miraccl.p2p.transfer import Background
from miraccl.sockets import open_in_range
from miraccl.wire.p2p import AGENT_BYTES, AgentWelcome, Introduction, Ready

log = trace.logger("p2p")
MAX_NAME_BYTES = 100


class Agent:
    """Endpoint of one-sided transfers; a context manager that closes it.

    Agents with the same secret can connect to each other. An agent registers memory, whose
    descriptors other agents need for reads and writes. It may be used from several threads.

    Args:
        name: Name that peers see in errors and notifications, up to 100 bytes.
        secret: Text or 32 bytes that all agents of the job share, default MIRACCL_SECRET.
        timeout: Default deadline of every call and transfer, in seconds; default MIRACCL_TIMEOUT.
        host: Address to listen at, default MIRACCL_P2P_HOST.
        port: Port to listen at; 0 chooses one, of MIRACCL_NET_PORT_RANGE.

    Attributes:
        address: The ``host:port`` for ``connect`` of other agents.

    Raises:
        InvalidUsage: An argument is not allowed.
        SystemFailure: A socket, memory or a thread cannot be had.
    """

    def __init__(
        self,
        name: str,
        *,
        secret: bytes | str | None = None,
        timeout: float | None = None,
        host: str | None = None,
        port: int = 0,
    ) -> None:
        trace.configure()
        if not name or len(name.encode()) > MAX_NAME_BYTES:
            raise InvalidUsage(
                f"cannot make an agent: the name {name!r} is empty or longer than "
                f"{MAX_NAME_BYTES} bytes"
            )
        self.name = name
        self.timeout = params.TIMEOUT.read() if timeout is None else float(timeout)
        if not self.timeout > 0:
            raise InvalidUsage(f"cannot make an agent: timeout is {timeout}; it must be positive")
        self._secret = agent_secret(secret)
        self._trust = params.P2P_TRUST.read()
        self.agent = clock.random_bytes(AGENT_BYTES)
        self._table = RegionTable()
        self._inbox = Inbox(self._table)
        self._background = Background(name)
        self._registrations: set[Registration] = set()
        self._peers: set[Peer] = set()
        self._served: set[ServedStream] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._probe = ctypes.c_uint64(int.from_bytes(clock.random_bytes(7), "little"))
        listener = self._listen(host or params.P2P_HOST.read(), port)
        self.address = _address_text(listener)
        self._identity = Identity(name=name, agent=self.agent, address=self.address)
        self._connector = Connector(
            self._identity,
            self._secret,
            background=self._background,
            trusting=self._trust == "job",
            timeout=self.timeout,
            watch=self._watch,
        )
        self._control = ControlThread(
            listener,
            self._secret,
            name=name,
            welcome=self._welcome,
            arrived=self._arrived,
            dropped=self._dropped,
        )

    def _listen(self, host: str, port: int) -> socket.socket:
        def listen_at(port: int) -> socket.socket:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((host, port))
                listener.listen(128)
            except OSError:
                listener.close()
                raise
            return listener

        with as_system_failure(f"cannot listen at {host}:{port}"):
            if port:
                return listen_at(port)
            return open_in_range(listen_at, params.NET_PORT_RANGE.read())

    # ---- memory

    def register(self, array: Any, access: str = "rw", *, block_nbytes: int = 0) -> Registration:
        """Offer memory to other agents.

        Args:
            array: Contiguous array of NumPy, PyTorch or CuPy, or with the buffer protocol; window
                memory of ``empty`` is fastest. The registration keeps it alive.
            access: ``"r"``, ``"w"`` or ``"rw"``: what peers may do.
            block_nbytes: Size of a block of ``writev`` and ``readv``; 0: a row of the array.

        Raises:
            InvalidUsage: The array cannot be registered.
            SystemFailure: The agent has too many registrations.
        """
        self._check_open("register")
        memory = memory_of(array, "array", "register")
        if "w" in access and not memory.writable:
            raise InvalidUsage("cannot register: the array is read-only, and access is " + access)
        return self.register_memory(memory, access, block_nbytes=block_nbytes)

    def register_memory(
        self, memory: Memory, access: str = "rw", *, block_nbytes: int = 0
    ) -> Registration:
        """Offer memory by its address.

        Args:
            memory: Address, bytes and device.
            access: ``"r"``, ``"w"`` or ``"rw"``: accesses that other agents may make.
            block_nbytes: Bytes of a block, for transfers of lists of blocks; 0: none.

        Raises:
            InvalidUsage: ``access`` is another word, or the agent is closed.
            SystemFailure: The driver cannot export GPU memory.
        """
        self._check_open("register")
        rights = parse_access(access)
        registration = Registration(
            self._table,
            memory,
            rights,
            identity=lambda: (self.agent, self.name, self.address),
            lines=self._lines,
            timeout=self.timeout,
            block_nbytes=block_nbytes,
            ended=self._registrations.discard,
            handle=self._export(memory),
        )
        self._registrations.add(registration)
        return registration

    @staticmethod
    def _export(memory: Memory) -> bytes:
        """Return the handle of GPU memory for other processes; empty for CPU memory."""
        if memory.device < 0:
            return b""
        from miraccl.p2p.device import export_memory  # loads the CUDA driver

        return export_memory(memory)

    def empty(self, shape: Any, dtype: Any = "uint8") -> Any:
        """Return an array of zeros in window memory, which agents of this host can map.

        Args:
            shape, dtype: As for ``numpy.zeros``.

        Raises:
            SystemFailure: There is not enough memory.
        """
        return windows.empty(shape, dtype)

    def _lines(self) -> Iterable[AccessLines]:
        with self._lock:
            served = list(self._served)
        return [*self._inbox.pairs, *served]

    # ---- peers

    def connect(self, address: str, *, timeout: float | None = None) -> Peer:
        """Connect to another agent.

        Args:
            address: Its ``host:port``.
            timeout: Seconds, default the agent's.

        Raises:
            InvalidUsage: The address is not one.
            AuthenticationError: The other agent has another secret.
            BootstrapError: It cannot be reached in time.
        """
        self._check_open("connect")
        deadline = Deadline.after(self.timeout if timeout is None else timeout)
        welcome, path = self._connector.connect(address, deadline)
        peer = Peer(self, welcome.name, welcome.agent, address, path)
        with self._lock:
            self._peers.add(peer)
        for sock in path.sockets():
            self._watch(path, sock)
        return peer

    def peer_of(self, remote: RemoteMemory) -> Peer:
        """Return the connection to the owner of some memory, opened if there is none.

        Args:
            remote: The memory, from an advertisement.

        Raises:
            AuthenticationError, BootstrapError: As ``connect``.
        """
        with self._lock:
            found = next(
                (p for p in self._peers if p.agent == remote.agent and p.lost is None), None
            )
        return found or self.connect(remote.address)

    def peer_named(self, name: str, address: str) -> Peer:
        """Return the connection to an agent by its name, opened if there is none.

        Args:
            name: Name of the agent.
            address: Its ``host:port``, used if there is no connection.

        Raises:
            AuthenticationError, BootstrapError: As ``connect``.
        """
        with self._lock:
            found = next((p for p in self._peers if p.name == name and p.lost is None), None)
        return found or self.connect(address)

    def _watch(self, path: PeerPath, sock: socket.socket) -> None:
        self._control.watch(sock, functools.partial(self._lost, path, sock))

    def forget_peer(self, peer: Peer) -> None:
        """Stop watching the connections of a peer that closes; used by ``Peer.close``."""
        with self._lock:
            self._peers.discard(peer)
        for sock in peer._path.sockets():
            self._control.forget(sock)

    def _lost(self, path: PeerPath, sock: socket.socket) -> None:
        """Note on the control thread that a connection has ended at its other side."""
        if not path.uses(sock):
            return  # this agent has closed it after a deadline, and opens a new one
        path.lost = path.lost or AgentLost(
            f"agent {path.name!r} has closed the connection, or its process has ended",
            agent=path.name,
            reason="lost",
        )

    # ---- notifications

    def notifications(self, timeout: float = 0.0) -> Iterator[Notification]:
        """Iterate over the notifications that have arrived.

        Args:
            timeout: Seconds to wait for the first one if there is none.

        Never raises: a peer that is lost is found by ``Peer.lost`` and by its transfers.
        """
        found = self._inbox.pop()
        if found is None and timeout > 0:
            found = self.wait_notification(timeout)
        while found is not None:
            yield found
            found = self._inbox.pop()

    def wait_notification(
        self,
        timeout: float | None = None,
        *,
        match: Callable[[Notification], bool] | None = None,
    ) -> Notification | None:
        """Return the next notification, None after ``timeout`` seconds.

        Args:
            timeout: Seconds, default the agent's.
            match: Returns True for the notification that is wanted; others stay in their order.

        Never raises by itself; exceptions of ``match`` pass through.
        """
        inbox = self._inbox
        seconds = self.timeout if timeout is None else timeout
        if match is None and not inbox.queue and not self._closed:
            given = inbox.await_one(nanoseconds(seconds))
            if given.__class__ is Notification:
                return given
            seconds = given * 1e-9
        found = inbox.pop(match)
        if found is None:
            deadline = Deadline.after(seconds)
            while found is None and (left := deadline.left) and not self._closed:
                inbox.wait(left, match)
                found = inbox.pop(match)
        return found

    # ---- connections from other agents; on the control thread

    def _welcome(self, introduction: Introduction) -> tuple[AgentWelcome, object]:
        pair = None
        local = introduction.host == self._identity.host and introduction.stream == 0
        if self._trust == "job" and local:
            pair = PairSegment(introduction.name, introduction.agent)
        message = AgentWelcome(
            name=self.name,
            agent=self.agent,
            host=self._identity.host,
            pid=self._identity.pid,
            table_fd=self._table.segment.fd,
            table_inode=self._table.inode if pair else 0,
            pair_fd=pair.segment.fd if pair else 0,
            pair_inode=pair.inode if pair else 0,
            probe=ctypes.addressof(self._probe) if pair else 0,
            probe_value=self._probe.value if pair else 0,
        )
        if pair is not None:  # before the peer can access anything
            self._inbox.add_pair(pair)
        return message, (introduction, pair)

    def _arrived(self, token: Any, sock: socket.socket, ready: Ready, rest: bytes) -> None:
        introduction, pair = token
        if pair is not None and ready.mapped:
            pair.segment.release()
            self._control.watch(sock, lambda: self._inbox.remove_pair(pair))
            return
        self._dropped(token)
        with self._lock:
            earlier = [stream for stream in self._served if stream.precedes(introduction)]
        for stream in earlier:
            stream.close()
        try:
            served = ServedStream(
                sock,
                introduction,
                self._table,
                self._inbox,
                self._served_ended,
            )
            with self._lock:
                self._served.add(served)
            served.start(rest)
        except (MiracclError, RuntimeError) as error:  # no memory, or no thread
            log.warning("cannot serve agent %s: %s", introduction.name, error)
            sock.close()

    def _served_ended(self, served: ServedStream) -> None:
        with self._lock:
            self._served.discard(served)

    def _dropped(self, token: Any) -> None:
        _, pair = token
        if pair is not None:
            self._inbox.remove_pair(pair)
            pair.segment.release()

    # ---- end

    def close(self) -> None:
        """End all transfers, connections and registrations. Idempotent.

        Raises:
            TransferTimeout: A peer still accesses registered memory.
        """
        with self._lock:
            self._closed, peers = True, list(self._peers)
        for peer in peers:
            peer.close()
        self._background.close()
        for registration in list(self._registrations):
            registration.deregister()
        self._control.close()
        with self._lock:
            served = list(self._served)
        for stream in served:
            stream.close()
        self._table.close()
        with contextlib.suppress(OSError):
            self._inbox._ring(self._table.doorbell)

    def _check_open(self, op_name: str) -> None:
        if self._closed:
            raise InvalidUsage(f"cannot {op_name}: agent {self.name!r} is closed")

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


def _address_text(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
