"""Contract of transports: endpoints, capabilities, FIFOs of a pair of ranks.

A transport connects pairs of ranks. ``setup`` opens whatever peers must reach and describes it in
opaque bytes; the runtime carries these through the bootstrap's all-gather and hands everybody's to
``connect``, which returns a ``FifoPair`` per peer. From then on data move through FIFOs in memory
(``transport.fifo``). Executors branch on the ``Capability`` bits of a connection, never on the
transport behind it. ``transport.registry`` lists the transports and chooses one for each pair.

Ownership: the transport owns memory, segments, sockets and descriptors and frees them in ``close``.
Executors own nothing here and must have stopped before ``close``. Each FIFO has one writer and one
reader. Transfers are receiver-driven: a payload lands in a free slot or at an address for which the
receiver has posted a clear-to-send (CTS), nowhere else.
"""

from __future__ import annotations

import abc
import enum
import os
import socket as _socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

from miraccl.deadline import Deadline
from miraccl.transport import fifo

if TYPE_CHECKING:
    from miraccl.wire.proxy_records import Loss

OnLost: TypeAlias = "Callable[[int, Loss], None]"
"""``on_lost(peer, loss)``: called once per lost peer, possibly on the proxy's thread; must be quick
and must not raise."""
Wake = Callable[[int], None]
"""``wake(rank)``: wake this process's executor of ``rank`` if it sleeps; called after flags or
tails were published."""


class Capability(enum.IntFlag):
    """Properties of a connection. The values are those of ``layout.CAP_*`` in compiled code."""

    ORDERED = 1
    """Messages arrive in the order in which they were posted. Every connection has this bit, so 0
    is the absence of a connection."""
    IN_PLACE = 2
    """A payload can land at an address for which the receiver has posted a CTS, and the sender may
    post any address of its own memory: the transport reads and writes both."""
    NEEDS_PROGRESS = 4
    """A proxy moves the messages; it is woken by ``Fifo.doorbell``. Without this bit both ends map
    the same FIFO, and a sleeping peer is woken through its control page."""
    ONE_SIDED = 8
    """This rank loads and stores the peer's window memory."""
    DEVICE_MEMORY = 16
    """Payloads may lie in GPU memory."""
    AUTHENTICATED = 32
    """Only processes that know the job's secret, or that the kernel knows to be the peer, can be
    on the other side."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Properties of one rank from which transports decide whether they can connect it.

    Attributes:
        hostid: Name of the host; ranks with different names never share memory.
        pid: Process ID.
        addresses: Numeric IP addresses of the host that peers may use, best first.
        machine: Boot ID of the kernel (``machine_id``), equal on all ranks of a machine; "" where
            unknown.
        hcas: Kinds (``ib``, ``roce``) of the InfiniBand and RoCE ports that this rank may use.
    """

    rank: int
    hostid: str
    pid: int
    addresses: tuple[str, ...] = ()
    machine: str = ""
    hcas: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"cannot make an endpoint: rank {self.rank} is negative")


def machine_id() -> str:
    """Return the boot ID of the kernel: equal on all ranks of a machine, whatever their hostid."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


@dataclass(frozen=True, kw_only=True)
class Fifo:
    """Addresses in this process of one FIFO in the layout of ``transport.fifo``.

    Attributes:
        capabilities: Those of the connection.
        descriptors: Ring of descriptor lines.
        tail: Word with the number of consumed messages.
        cts: Ring of CTS lines; read by transports with ``IN_PLACE`` only.
        slots: First payload slot; ``slot_bytes`` is the size of one.
        doorbell: Eventfd of the proxy, -1 without ``NEEDS_PROGRESS``.
        asleep: Address of a word that is 1 while the proxy sleeps, else 0. After storing a flag, a
            tail or a CTS and a full fence, the writer reads it and writes 1 to ``doorbell`` if set.
    """

    capabilities: Capability
    descriptors: int
    tail: int
    cts: int
    slots: int
    slot_bytes: int
    doorbell: int = -1
    asleep: int = 0

    @classmethod
    def from_address(
        cls,
        address: int,
        slot_bytes: int,
        *,
        capabilities: Capability,
        doorbell: int = -1,
        asleep: int = 0,
    ) -> Fifo:
        """Return the FIFO at ``address`` in the standard layout."""
        return cls(
            capabilities=capabilities,
            descriptors=address + fifo.DESC_OFFSET,
            tail=address + fifo.TAIL_OFFSET,
            cts=address + fifo.CTS_OFFSET,
            slots=address + fifo.SLOTS_OFFSET,
            slot_bytes=slot_bytes,
            doorbell=doorbell,
            asleep=asleep,
        )


@dataclass(frozen=True, kw_only=True)
class FifoPair:
    """The two FIFOs between this rank and a peer, and what else of the peer this rank can address.

    Attributes:
        control: Address here of the peer's control page; required without ``NEEDS_PROGRESS``.
        pid: Process of the peer, if the transport knows it to be on this machine, else 0.
        window: Address here of the peer's window memory; required with ``ONE_SIDED``.
        readable: True if this process can read the peer's private memory.
        memory: Objects that keep the mapped memory alive as long as the pair.
    """

    send: Fifo
    recv: Fifo
    control: int = 0
    pid: int = 0
    window: int = 0
    readable: bool = False
    memory: Any = field(default=None, repr=False, compare=False)

    @property
    def capabilities(self) -> Capability:
        return self.send.capabilities


class Doorbell(Protocol):
    """Means to wake a proxy's thread, as ``Fifo`` names them."""

    @property
    def doorbell(self) -> int: ...
    @property
    def asleep(self) -> int: ...


def proxied_pair(
    proxy: Doorbell,
    slot_bytes: int,
    *,
    capabilities: Capability,
    addresses: tuple[int, int] | None = None,
    memory: Any = None,
) -> FifoPair:
    """Return the pair of FIFOs between this process's executor and its proxy.

    Args:
        addresses: Send and receive FIFO in memory that ``memory`` keeps alive; None allocates both.

    Raises:
        SystemFailure: The FIFOs cannot be allocated.
    """
    if addresses is None:
        memory = fifo.FifoMemory(slot_bytes), fifo.FifoMemory(slot_bytes)
        addresses = memory[0].address, memory[1].address
    send, recv = (
        Fifo.from_address(
            address,
            slot_bytes,
            capabilities=capabilities,
            doorbell=proxy.doorbell,
            asleep=proxy.asleep,
        )
        for address in addresses
    )
    return FifoPair(send=send, recv=recv, readable=True, memory=memory)


@dataclass(frozen=True, kw_only=True)
class PathStatus:
    """State of one path to a peer, as ``miraccl net watch`` shows it. Counters start at 0.

    A path is one TCP stream, one pair of UDP ports, or one queue pair.

    Attributes:
        transport: Name in the registry.
        path: Number of the path among those to this peer.
        local, remote: Address and port of the two ends, such as ``10.0.0.1:4711``.
        state: OPEN, SUSPECT, DEAD or PROBING.
        sent_bytes: Bytes that the peer has acknowledged, or, where that is unknown, bytes sent.
        received_bytes: Bytes received from the peer.
        resent_bytes: Bytes sent again.
        lost: Packets found lost.
        rtt_us: Smoothed round-trip time in microseconds; 0 while unknown.
        min_rtt_us: Smallest round-trip time; 0 while unknown.
        rate: Estimated rate of delivery in bytes per second; 0 while unknown.
        window_bytes: Bytes that congestion control allows in flight; 0 if there is no such limit.
        controller: Congestion control, such as ``cubic``.
        mtu: Largest packet of the path in bytes; 0 while unknown.
    """

    peer: int
    transport: str
    path: int
    local: str = ""
    remote: str = ""
    state: str = "OPEN"
    sent_bytes: int = 0
    received_bytes: int = 0
    resent_bytes: int = 0
    lost: int = 0
    rtt_us: float = 0.0
    min_rtt_us: float = 0.0
    rate: float = 0.0
    window_bytes: int = 0
    controller: str = ""
    mtu: int = 0


def unreachable_peers(paths: Iterable[PathStatus]) -> dict[int, list[str]]:
    """Return the states of the paths to each peer to which none is open."""
    states: dict[int, list[str]] = {}
    for path in paths:
        states.setdefault(path.peer, []).append(path.state)
    return {peer: found for peer, found in states.items() if "OPEN" not in found}


@dataclass(frozen=True, kw_only=True)
class NetConnection:
    """Authenticated streams to a peer and the FIFOs that they feed; the proxy owns the sockets.

    Attributes:
        driver: Module of the driver that moves its messages in Python (``proxy.driver``).
        peer_slot_bytes: Size of the peer's receive slots; larger messages wait for a CTS.
        rails: Networks that the streams use.
    """

    driver: ClassVar[str] = "miraccl.proxy.stream_driver"
    peer: int
    streams: Sequence[_socket.socket]
    pair: FifoPair
    peer_slot_bytes: int
    rails: int = 1


@dataclass(frozen=True, kw_only=True)
class DatagramOptions:
    """Settings of the datagram transport, as one rank uses them.

    Attributes:
        ports: UDP ports per network address.
        congestion: Name of the congestion controller (``wire.datagram.control``).
        protection: Value of ``wire.datagram.seal.Protection``.
        mtu: UDP payload of a packet; 0 asks the kernel for the route's.
        buffer_bytes: Kernel's send and receive buffer of each socket.
        admission: "off" (peers send into free slots alone), "cts" (and into posted receives) or
            "credit" (this rank also bounds and paces what all peers together have on their way).
        credit_bytes: Bytes that all peers together may have on their way to one address.
    """

    ports: int = 1
    congestion: str = "swift"
    protection: str = "mac"
    mtu: int = 0
    buffer_bytes: int = 4 << 20
    admission: str = "cts"
    credit_bytes: int = 256 << 10


@dataclass(frozen=True, kw_only=True)
class DatagramPath:
    """One path to a peer: an index into the connection's ``streams``, and the peer's address.

    Attributes:
        mtu: UDP payload of a packet.
        share_bytes: Bytes that may be on their way: this rank's share of the peer's receive buffer.
    """

    socket: int
    host: str
    port: int
    mtu: int
    share_bytes: int


@dataclass(frozen=True, kw_only=True)
class DatagramConnection(NetConnection):
    """Paths over UDP to a peer; ``streams`` are sockets that all peers share and the transport
    owns.

    Attributes:
        connection, peer_connection: Number in packets to this rank, and to the peer.
        send_key, recv_key: Keys of the two directions.
        cipher: Name of the cipher that protects packets.
        needs_grants: True if the peer admits what this rank sends by grants.
        budget: Bytes that all peers of this rank together may have on their way, 0 if this rank
            issues no grants.
    """

    driver = "miraccl.proxy.datagram_driver"
    paths: Sequence[DatagramPath]
    connection: int
    peer_connection: int
    send_key: bytes
    recv_key: bytes
    cipher: str
    options: DatagramOptions
    needs_grants: bool = False
    budget: int = 0


class WindowRange(Protocol):
    """Memory of a window, mapped as long as the communicator exists."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class WindowPort(Protocol):
    """Interface of the allocator of window memory to transports that register it.

    Attributes:
        on_release: Called with (offset, bytes) of a freed block; True takes it over.
    """

    on_release: Callable[[int, int], bool]

    @property
    def region(self) -> WindowRange: ...
    def complete_release(self, offset: int, size: int) -> None:
        """Give the pages of a block back; no access to them may follow."""


class ProxyPort(Doorbell, Protocol):
    """Interface of the proxy to network transports."""

    def attach(self, connections: Sequence[NetConnection]) -> None:
        """Take over the sockets and start to move messages."""

    def detach(self, peers: Sequence[int], *, linger: float) -> None:
        """Send what is posted for at most ``linger`` seconds, then close; memory is not touched
        afterwards.
        """

    def abort(self, text: str) -> None:
        """Send ``text`` to all peers that still read, and close; memory is not touched
        afterwards.
        """


class Driving(NamedTuple):
    """Compiled function by which a waiting executor advances network connections itself.

    Attributes:
        function: ``drive`` of a kernel, 0 for none.
        argument: Its first argument.
        sleeps: True if the executor sleeps in it too, as it shares a single core with the proxy.
    """

    function: int = 0
    argument: int = 0
    sleeps: bool = False


class NetworkProxy(ProxyPort, Protocol):
    """Interface of the proxy to its owner."""

    def driver(self, *, overlap: bool) -> Driving:
        """Return how a waiting executor advances the connections (``proxy.progress_thread``)."""

    def close(self) -> None:
        """Close all connections and end the thread; idempotent."""


class DatagramPort(ProxyPort, Protocol):
    """Interface of the proxy to the datagram transport.

    Attributes:
        ciphers: Names of the ciphers that it computes (``wire.datagram.seal.CIPHERS``).
    """

    @property
    def ciphers(self) -> Sequence[str]: ...

    def reached(self, peer: int) -> bool:
        """Return True once a path to the peer has carried a packet and its acknowledgement."""

    def paths(self) -> Sequence[PathStatus]:
        """Return the state of all paths; callable from any thread."""


@dataclass(frozen=True, kw_only=True)
class TransportContext:
    """Resources and limits that the runtime gives to a transport of one communicator and rank.

    Attributes:
        endpoint: This rank.
        peers: Ranks that this transport is to connect.
        control: Address of this rank's control page; 0 for the transport that makes it.
        window: (address, bytes) of this rank's window memory; likewise.
        memory: Objects that keep control page and window mapped.
        budget: Bytes of all send slots; 0 for the transport's default.
        max_slot_bytes: Largest slot.
        secret: Key of the job, from which connections are authenticated.
        job: Name of the communicator, unique among those with one secret.
        deadline: End of every ``connect``.
        check: Called while connecting; raises if a peer has died.
        proxy: Returns the proxy of this rank, starting it at the first call.
        wake: Wakes this rank's executor after something was delivered.
        on_lost: Called when a connection ends that was not closed here.
    """

    endpoint: Endpoint
    peers: Mapping[int, Endpoint]
    control: int = 0
    window: tuple[int, int] = (0, 0)
    memory: Any = field(default=None, repr=False, compare=False)
    budget: int = 0
    max_slot_bytes: int = fifo.MAX_SLOT_BYTES
    secret: bytes = b""
    job: bytes = b""
    deadline: float | Deadline = 60.0
    check: Callable[[], None] = lambda: None
    proxy: Callable[[], ProxyPort] | None = None
    wake: Wake = lambda rank: None
    on_lost: OnLost = lambda peer, loss: None


class Transport(abc.ABC):
    """Means to connect pairs of ranks; one object per communicator and rank."""

    @abc.abstractmethod
    def setup(self) -> bytes:
        """Open what peers need to find this rank and describe it for their ``connect``; a second
        call returns the same bytes.
        """

    @abc.abstractmethod
    def connect(self, infos: Mapping[int, bytes]) -> dict[int, FifoPair]:
        """Connect to the ranks in ``infos`` (rank -> its ``setup()``).

        Both ranks of a pair must call it; it may be called again for other ranks.

        Raises:
            ProtocolError: A description is malformed.
            AuthenticationError, SystemFailure, BootstrapError: Named peers could not be connected
                within the transport's deadline.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything, after sending what was posted within a bounded time; idempotent."""

    def abort(self, text: str) -> None:
        """Close at once, sending ``text`` to the peers where possible; no memory is touched after
        the return.
        """
        self.close()

    def paths(self) -> Sequence[PathStatus]:
        """Return the state of every path to every peer; callable from any thread.

        Empty for transports without paths, and after ``close``.
        """
        return ()

    def describe(self, peer: int) -> str:
        """Return what users should know of the connection to a peer, "" for nothing."""
        return ""

    def release(self) -> None:  # noqa: B027 (optional)
        """Free what only ``connect`` of peers needed; called when all ranks have connected."""

    def driver(self, *, overlap: bool) -> Driving:
        """Return how a waiting executor advances the connections, of a transport that moves its
        messages without the proxy of its context; called when all ranks have connected.
        """
        return Driving()

    def watch_window(self, window: WindowPort) -> None:  # noqa: B027 (optional)
        """Learn the allocator of window memory; called once, when all ranks have connected."""

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
