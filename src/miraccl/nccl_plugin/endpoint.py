"""Connections of the exported plugin: one two-rank use of a transport for each of NCCL's.

NCCL connects one direction at a time: the receiver listens and hands out a handle of 128 bytes, the
sender connects to it. The two processes then are ranks of one transport from the registry, so
whatever ``MIRACCL_NET`` chooses carries the data. Before that, they exchange what the transport's
``setup`` returned over a control connection to the listener:

    sender    ->  key id 16, HMAC 32, length, JSON {"rank", "hcas"}
    receiver  ->  HMAC 32, length, JSON {"rank", "hcas"}
    both then     HMAC 32, length, JSON {"info"}

Each message carries an HMAC-SHA-256 over its number, its side and its content. The key comes from
``MIRACCL_SECRET`` and 32 random bytes in the handle, which travels through NCCL's own bootstrap:
who can read that can connect.

Connecting takes threads, because NCCL's entries must not block. Data do not come through here
(``kernels.entries``).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import itertools
import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from miraccl import clock, params, trace
from miraccl.bootstrap.interfaces import choose_addresses, list_interfaces, rail_addresses
from miraccl.errors import (
    AuthenticationError,
    InvalidUsage,
    MiracclError,
    ProtocolError,
    SystemFailure,
    as_system_failure,
)
from miraccl.native.nccl_net_abi import HANDLE_BYTES, Result
from miraccl.nccl_plugin.kernels import comm_layout as layout
from miraccl.transport import registry
from miraccl.transport.base import (
    Capability,
    Endpoint,
    FifoPair,
    NetworkProxy,
    Transport,
    TransportContext,
)
from miraccl.transport.connect_round import family_of
from miraccl.transport.fifo import PAGE_BYTES, PrivateMemory, memory_at, native_atomics
from miraccl.transport.verbs_ports import usable_kinds
from miraccl.wire.proxy_records import Loss

log = trace.logger("nccl_plugin")

ID_BYTES, TOKEN_BYTES, MAC_BYTES = 16, 32, 32
_HANDLE = struct.Struct(f"<8s{ID_BYTES}s{TOKEN_BYTES}sHB16s")
_MAGIC = b"MIRANET1"
PENDING_OFFSET = HANDLE_BYTES - 8
"""Bytes of the handle in which the connecting side keeps the number of its attempt."""
MAX_JSON_BYTES = 1 << 16
HELLO_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 60.0
MAX_UNAUTHENTICATED = 64
#: Time in which a connection that is closed with requests in progress may still move them.
CUT_OFF_S = 0.1
#: Initiators of TCP streams have the lower rank: senders count from 0, receivers from here.
RECEIVER_RANKS = 1 << 24
SLOT_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Handle:
    """Content of NCCL's connection handle.

    Attributes:
        id: Number of the listening object.
        token: Random part of the key.
        address: Numeric IP address and port of the control listener.
    """

    id: bytes
    token: bytes
    address: tuple[str, int]

    def encode(self) -> bytes:
        """Return the first bytes of the handle; the rest is 0."""
        packed = ipaddress.ip_address(self.address[0]).packed
        return _HANDLE.pack(
            _MAGIC, self.id, self.token, self.address[1], len(packed), packed
        ).ljust(HANDLE_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Handle:
        """Parse a handle. Raises ``ProtocolError`` for one of another plugin."""
        magic, key_id, token, port, nbytes, packed = _HANDLE.unpack_from(data)
        if magic != _MAGIC or nbytes not in (4, 16) or not port:
            raise ProtocolError("cannot connect: the handle is not one of this plugin")
        return cls(
            id=key_id, token=token, address=(str(ipaddress.ip_address(packed[:nbytes])), port)
        )


class ControlChannel:
    """Authenticated JSON messages between the two processes of a connection.

    Args:
        key: Shared by both.
        side: b"send" or b"recv": this side.
    """

    def __init__(self, sock: socket.socket, key: bytes, side: bytes) -> None:
        self._sock, self._key, self._side = sock, key, side
        self._sent = self._received = 0

    def send(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self._sock.sendall(
            self._mac(self._side, self._sent, data) + struct.pack("<I", len(data)) + data
        )
        self._sent += 1

    def receive(self) -> Any:
        """Return the next message. Raises ``AuthenticationError``, ``ProtocolError``."""
        mac = receive_exactly(self._sock, MAC_BYTES)
        (nbytes,) = struct.unpack("<I", receive_exactly(self._sock, 4))
        if nbytes > MAX_JSON_BYTES:
            raise ProtocolError(f"a control message has {nbytes} bytes, at most {MAX_JSON_BYTES}")
        data = receive_exactly(self._sock, nbytes)
        side = b"recv" if self._side == b"send" else b"send"
        if not hmac.compare_digest(mac, self._mac(side, self._received, data)):
            raise AuthenticationError("the peer of a connection does not know its key")
        self._received += 1
        return json.loads(data)

    def _mac(self, side: bytes, number: int, data: bytes) -> bytes:
        return hmac.digest(self._key, side + number.to_bytes(8, "little") + data, "sha256")


def receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Read ``nbytes`` bytes. Raises ``OSError`` if the stream ends before."""
    data = bytearray()
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        if not part:
            raise ConnectionResetError("the peer closed the control connection")
        data += part
    return bytes(data)


def connection_key(token: bytes) -> bytes:
    return hmac.digest(
        params.SECRET.read().encode() + token, b"miraccl nccl net plugin 1", "sha256"
    )


@dataclass(eq=False)
class Connection:
    """One direction between two processes, as NCCL's sendComm or recvComm.

    Attributes:
        memory: Its compiled state; NCCL holds the address.
        peer: Number of the other side on this process's proxy.
    """

    memory: PrivateMemory
    peer: int
    transport: Transport
    pair: FifoPair

    @property
    def address(self) -> int:
        return self.memory.address

    @property
    def in_progress(self) -> bool:
        """True if a request may still access the caller's memory."""
        load = native_atomics().load_acquire
        return load(self.address + layout.POSTED) > load(load(self.address + layout.TAIL))


def new_connection(pair: FifoPair, peer: int, transport: Transport, sends: bool) -> Connection:
    """Return the connection whose requests are messages of one direction of ``pair``."""
    end = pair.send if sends else pair.recv
    needed = Capability.IN_PLACE | Capability.NEEDS_PROGRESS
    if needed not in end.capabilities:
        raise InvalidUsage("cannot serve NCCL over a transport that does not land data in place")
    connection = Connection(PrivateMemory(layout.COMM_BYTES), peer, transport, pair)
    for offset, value in (
        (layout.DESCRIPTORS, end.descriptors),
        (layout.TAIL, end.tail),
        (layout.CTS, end.cts),
        (layout.SLOTS, end.slots),
        (layout.SLOT_BYTES, end.slot_bytes),
        (layout.DOORBELL, end.doorbell),
        (layout.ASLEEP, end.asleep),
        (layout.ONE, 1),
    ):
        memory_at(connection.address + offset, 8)[:] = value.to_bytes(8, "little", signed=True)
    return connection


@dataclass(eq=False)
class Listening:
    """NCCL's listenComm: connections to one handle.

    Attributes:
        ready: Connections that accept has not returned yet.
    """

    id: bytes
    token: bytes
    number: int
    ready: deque[Connection] = field(default_factory=deque)
    closed: bool = False


class PluginEndpoint:
    """All connections of this process: one control listener, one proxy, one table of connections.

    Raises:
        SystemFailure: The control listener cannot be opened.
    """

    def __init__(self) -> None:
        addresses, _ = choose_addresses()
        self.addresses = (*addresses, *rail_addresses(addresses))
        name = params.NET.read()
        self.spec = registry.TCP if name == registry.AUTO else registry.spec_of(name)
        if self.spec not in registry.allowed(name) or not self.spec.network:
            raise InvalidUsage(f"cannot export MIRACCL_NET={name}: it is not a network transport")
        #: Kinds of the ports that verbs uses here; the peers of a connection exchange theirs.
        self.hcas = usable_kinds(name) if self.spec is registry.VERBS else ()
        if self.spec is registry.VERBS and not self.hcas:
            raise SystemFailure(
                "cannot export MIRACCL_NET=verbs: there is no usable InfiniBand or RoCE port",
                hint="miraccl net devices says why",
            )
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._control_page = PrivateMemory(PAGE_BYTES)
        self._proxy: NetworkProxy | None = None
        self._listening: dict[bytes, Listening] = {}
        self._by_number: dict[int, Listening] = {}
        self._connections: dict[int, Connection] = {}
        self._pending: dict[int, Connection | MiracclError | None] = {}
        self._early: set[int] = set()
        self._unauthenticated = threading.Semaphore(MAX_UNAUTHENTICATED)
        self._listener = socket.socket(family_of(addresses[0]), socket.SOCK_STREAM)
        with as_system_failure(f"cannot listen on {addresses[0]}"):
            self._listener.bind((addresses[0], 0))
            self._listener.listen(1024)
        #: Number of the device for NCCL's topology: equal addresses are one device.
        self.guid = hashlib.sha256(repr(self.addresses).encode()).digest()[:8]
        #: Sum over the interfaces that carry data, 0 if the kernel does not know it.
        self.speed_mbps = _speed_mbps(self.addresses)
        self._address = (addresses[0].partition("%")[0], self._listener.getsockname()[1])
        clock.thread(target=self._serve, name="miraccl-nccl-listener", daemon=True).start()

    # --- entries

    def listen(self) -> tuple[bytes, int]:
        """Return a handle of 128 bytes and the number of the listening object."""
        listening = Listening(
            id=clock.random_bytes(ID_BYTES),
            token=clock.random_bytes(TOKEN_BYTES),
            number=next(self._numbers),
        )
        with self._lock:
            self._listening[listening.id] = self._by_number[listening.number] = listening
        handle = Handle(id=listening.id, token=listening.token, address=self._address)
        return handle.encode(), listening.number

    def start_connect(self, data: bytes) -> int:
        """Begin to connect to a handle; return the number for ``poll_connect``."""
        handle = Handle.decode(data)
        number = next(self._numbers)
        self._pending[number] = None
        clock.thread(
            target=self._connect,
            args=(handle, number),
            name=f"miraccl-nccl-connect-{number}",
            daemon=True,
        ).start()
        return number

    def poll_connect(self, number: int) -> Connection | None:
        """Return the connection, or None while it is being made.

        Raises what ended the attempt.
        """
        outcome = self._pending[number]
        if outcome is None:
            return None
        del self._pending[number]
        if isinstance(outcome, MiracclError):
            raise outcome
        return outcome

    def poll_accept(self, number: int) -> Connection | None:
        """Return the next connection to a listening object, or None."""
        ready = self._by_number[number].ready
        return ready.popleft() if ready else None

    def close_listening(self, number: int) -> None:
        with self._lock:
            listening = self._by_number.pop(number, None)
            if listening:
                listening.closed = True
                del self._listening[listening.id]
        while listening and listening.ready:
            self.close(listening.ready.popleft().address)

    def close(self, address: int) -> None:
        """Close a connection. The caller may free the memory of all requests afterwards: those in
        progress are cut off within ``CUT_OFF_S``.
        """
        connection = next((c for c in self._connections.values() if c.address == address), None)
        if connection is None:
            return
        del self._connections[connection.peer]
        if connection.in_progress:
            if self._proxy is not None:
                self._proxy.detach([connection.peer], linger=CUT_OFF_S)
            else:  # verbs: an engine per connection
                connection.transport.abort("closed with requests in progress")
        # Waits for the peer to close as well, which NCCL's thread must not.
        clock.thread(
            target=connection.transport.close, name="miraccl-nccl-close", daemon=True
        ).start()

    # --- threads

    def _connect(self, handle: Handle, number: int) -> None:
        def run() -> Connection:
            with socket.create_connection(handle.address, CONNECT_TIMEOUT_S) as sock:
                sock.settimeout(CONNECT_TIMEOUT_S)
                sock.sendall(handle.id)
                channel = ControlChannel(sock, connection_key(handle.token), b"send")
                return self._open(channel, handle.id, handle.token, number, sends=True)

        self._pending[number] = self._attempt(run, f"connect to {handle.address}")

    def _attempt(self, run: Callable[[], Connection], what: str) -> Connection | MiracclError:
        try:
            return run()
        except MiracclError as error:
            log.warning("cannot %s: %s", what, error)
            return error
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("cannot %s: %s", what, error)
            return SystemFailure(f"cannot {what}: {error}")

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                log.info("the control listener ended: %s", error)
                return
            if not self._unauthenticated.acquire(blocking=False):
                sock.close()
                continue
            clock.thread(
                target=self._answer, args=(sock,), name="miraccl-nccl-accept", daemon=True
            ).start()

    def _answer(self, sock: socket.socket) -> None:
        """Serve one control connection; who does not know a handle gets no answer."""
        try:
            with sock:
                sock.settimeout(HELLO_TIMEOUT_S)
                with suppress(OSError):
                    listening = self._listening.get(receive_exactly(sock, ID_BYTES))
                    if listening is None:
                        return
                    channel = ControlChannel(sock, connection_key(listening.token), b"recv")
                    number = next(self._numbers)
                    made = self._attempt(
                        lambda: self._open(
                            channel, listening.id, listening.token, number, sends=False
                        ),
                        "accept a connection",
                    )
                    if isinstance(made, Connection):
                        listening.ready.append(made)
                        if listening.closed:
                            self.close(made.address)
        finally:
            self._unauthenticated.release()

    def _open(
        self, channel: ControlChannel, job: bytes, token: bytes, number: int, *, sends: bool
    ) -> Connection:
        """Agree on ranks, exchange what the transports need, and connect them.

        Each process numbers its peers itself, because one proxy serves all of them: the sender's
        rank is chosen by the receiver and vice versa.
        """
        peer = RECEIVER_RANKS + number if sends else number
        hello = {"rank": peer, "hcas": self.hcas}
        if sends:
            channel.send(hello)
        answer = channel.receive()
        if not sends:
            channel.send(hello)
        secret = connection_key(token)
        transport = self._open_transport(
            replace(self._endpoint(int(answer["rank"])), hcas=self.hcas),
            replace(self._endpoint(peer), hcas=tuple(map(str, answer["hcas"]))),
            job,
            secret,
        )
        try:
            info = transport.setup()
            channel.send({"info": info.hex()})
            theirs = bytes.fromhex(channel.receive()["info"])
            pair = transport.connect({peer: theirs})[peer]
            transport.release()
        except BaseException:
            transport.close()
            raise
        connection = new_connection(pair, peer, transport, sends)
        with self._lock:
            self._connections[peer] = connection
            if peer in self._early:
                self._fail(connection)
        return connection

    def _endpoint(self, rank: int) -> Endpoint:
        return Endpoint(rank=rank, hostid=str(rank), pid=0, addresses=self.addresses)

    def _open_transport(
        self, me: Endpoint, other: Endpoint, job: bytes, secret: bytes
    ) -> Transport:
        return self.spec.open_for(
            TransportContext(
                endpoint=me,
                peers={other.rank: other},
                control=self._control_page.address,
                max_slot_bytes=SLOT_BYTES,
                secret=secret,
                job=job,
                deadline=CONNECT_TIMEOUT_S,
                proxy=self._open_proxy,
                wake=lambda rank: None,
                on_lost=self._lost,
            )
        )

    def _open_proxy(self) -> NetworkProxy:
        with self._lock:
            if self._proxy is None:
                self._proxy = self.spec.open_proxy(
                    rank=0,
                    wake=lambda rank: None,
                    on_lost=self._lost,
                    control=self._control_page.address,
                )
            return self._proxy

    def _lost(self, peer: int, loss: Loss) -> None:
        """Make the requests of a lost connection fail; called by the proxy."""
        with self._lock:
            connection = self._connections.get(peer)
            if connection is None:
                self._early.add(peer)
                return
        log.info("connection %d is lost: %s", peer, loss)
        self._fail(connection)

    def _fail(self, connection: Connection) -> None:
        native_atomics().store_release(connection.address + layout.FAULT, Result.REMOTE_ERROR)


def _speed_mbps(addresses: Sequence[str]) -> int:
    """Return the sum of the speeds that sysfs gives for the interfaces with these addresses."""
    total = 0
    for interface in list_interfaces():
        if set(addresses) & set(interface.addresses):
            with suppress(OSError, ValueError):
                speed = int(Path(f"/sys/class/net/{interface.name}/speed").read_text())
                total += max(speed, 0)
    return total
