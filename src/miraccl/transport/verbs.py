"""Verbs transport between hosts: InfiniBand and RoCE by reliable connected queue pairs.

This file makes queue pairs and registers the memory of FIFOs; an engine (``proxy.verbs``) posts and
polls. Rules:

- ``setup`` makes the queue pairs for all peers, because their numbers must be in its description;
  ``connect`` moves them to ready and waits for a row of the peer on each.
- Queue pair i is on device ``i % ndevices`` of each side; the number of pairs is the setting times
  the larger number of devices, so that ranks with different numbers of devices agree.
- A peer may write the slots and rows of its connection and posted receives, nothing else.
- At least one queue pair must connect; others may follow or fail (``proxy.verbs.recovery``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from miraccl import clock
from miraccl.deadline import Deadline
from miraccl.errors import CommunicatorClosed, ProtocolError, SystemFailure
from miraccl.native.verbs_abi import VerbsLibrary
from miraccl.topo.hca import Hca, Port
from miraccl.transport import registry
from miraccl.transport.base import (
    Doorbell,
    Driving,
    FifoPair,
    Transport,
    TransportContext,
    WindowPort,
    proxied_pair,
)
from miraccl.transport.fifo import (
    NSLOTS,
    SLOTS_OFFSET,
    PrivateMemory,
    fifo_bytes,
    slot_bytes_for,
)
from miraccl.transport.verbs_address import choose_address
from miraccl.transport.verbs_device import (
    ACCESS_LOCAL,
    ACCESS_REMOTE,
    PeerQp,
    QpSettings,
    QueuePair,
    VerbsDevice,
    device_counts,
)
from miraccl.transport.verbs_gpu_memory import GpuRange
from miraccl.transport.verbs_info import PeerInfo, PortInfo, VerbsInfo
from miraccl.wire.verbs.gids import GidWish
from miraccl.wire.verbs.policy import SPLIT
from miraccl.wire.verbs.rows import MAX_DEVICES, MAX_STREAMS, NROWS, ROW_BYTES

CAPABILITIES = registry.VERBS.capabilities
LINGER_S = 5.0
TEXT_BYTES = 256
SEND_DEPTH, RECV_DEPTH = 256, 2 * NROWS


@dataclass(frozen=True, kw_only=True)
class VerbsOptions:
    """Settings of the transport.

    Attributes:
        qps_per_connection: Queue pairs per connection and device.
        policy: Distribution of large messages (``wire.verbs.policy``).
        piece_bytes: Largest piece of a message.
        gid: Restrictions on addresses.
        copy_bytes: Payloads in the caller's memory up to this size are copied to a slot; larger
            ones are registered for the transfer.
        control_class: Traffic class of an own queue pair for CTS and other frames without payload;
            -1: they share queue pairs and class with payloads.
        adaptive: The network may reorder the packets of a queue pair: 0 no, 1 yes, -1 if it is
            InfiniBand, as NCCL assumes.
        adaptive_bytes: Payloads of more bytes leave the immediate to a request of its own then.
        in_place_only: No payload of more than 32 bytes passes a slot: a message waits for its CTS
            and goes from the sender's memory to the receiver's, which a CPU need not be able to
            access. The same on both ranks.
    """

    qps_per_connection: int = 2
    policy: int = SPLIT
    piece_bytes: int = 1 << 22
    gid: GidWish = field(default_factory=GidWish)
    qp: QpSettings = field(default_factory=QpSettings)
    copy_bytes: int = 1 << 15
    control_class: int = -1
    adaptive: int = -1
    adaptive_bytes: int = 8192
    in_place_only: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.qps_per_connection <= MAX_STREAMS:
            raise ValueError(
                f"cannot use {self.qps_per_connection} queue pairs: allowed are 1 to {MAX_STREAMS}"
            )

    @property
    def control_pairs(self) -> int:
        """Number of queue pairs per connection for frames without payload."""
        return int(self.control_class not in (-1, self.qp.traffic_class))

    def apart_bytes(self, kind: str) -> int:
        """Return the size of a payload above which the immediate has a request of its own.

        Args:
            kind: Kind of the port, as ``Port.kind``.
        """
        adaptive = kind == "ib" if self.adaptive < 0 else self.adaptive > 0
        return self.adaptive_bytes if adaptive else 1 << 62

    def pair_settings(self, index: int, count: int) -> QpSettings:
        """Return the settings of queue pair ``index`` of ``count``."""
        if index < count - self.control_pairs:
            return self.qp
        return replace(self.qp, traffic_class=self.control_class)


class ConnectionMemory:
    """Memory of one connection: both FIFOs, the rows of both directions, texts of an ABORT.

    It has two parts: the peer can write the second one only.
    """

    def __init__(self, slot_bytes: int, nstreams: int) -> None:
        self.slot_bytes = slot_bytes
        fifo, rows = fifo_bytes(slot_bytes), _pages(nstreams * NROWS * ROW_BYTES + TEXT_BYTES)
        self._memory = PrivateMemory(2 * (fifo + rows))
        self.send_fifo = self._memory.address
        self.rows_out = self.send_fifo + fifo
        self.recv_fifo = self.rows_out + rows
        self.slots_in = self.recv_fifo + SLOTS_OFFSET
        self.rows_in = self.recv_fifo + fifo
        text = nstreams * NROWS * ROW_BYTES
        self.text_out, self.text_in = self.rows_out + text, self.rows_in + text
        self.local = (self.send_fifo, fifo + rows)
        self.remote = (self.slots_in, fifo - SLOTS_OFFSET + rows)
        self.slots_out = (
            self.send_fifo + SLOTS_OFFSET,
            self.send_fifo + SLOTS_OFFSET + NSLOTS * slot_bytes,
        )


def _pages(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


@dataclass(eq=False)
class VerbsConnection:
    """Queue pairs to one peer, and the memory that they use; the engine runs it.

    Attributes:
        keys: (local key of the first part, remote key of the second) per device.
        queues: Completion queue per device, 0 for a device without a queue pair.
        remote: The peer's description, once it is known.
        ready: Set when the peer's packets have arrived on every working queue pair, or none works.
        connect_until: Time until which a peer that does not answer may still be connecting.
    """

    peer: int
    devices: Sequence[VerbsDevice]
    qps: list[QueuePair]
    queues: list[int]
    memory: ConnectionMemory
    keys: list[tuple[int, int]]
    pair: FifoPair
    options: VerbsOptions
    remote: PeerInfo | None = None
    peer_slot_bytes: int = 0
    ends: list[PeerQp] = field(default_factory=list)
    edges: list[str] = field(default_factory=list)
    ready: clock.Event = field(default_factory=clock.event)
    connect_until: float = 0.0

    def describe(self) -> PeerInfo:
        return PeerInfo(
            qps=tuple((qp.number, qp.psn) for qp in self.qps),
            slots=self.memory.slots_in,
            rows=self.memory.rows_in,
            text=self.memory.text_in,
            keys=tuple(remote for _, remote in self.keys),
        )

    def close(self) -> None:
        """Destroy queue pairs, queues and registrations; idempotent."""
        for qp in self.qps:
            qp.close()
        for device, queue in zip(self.devices, self.queues, strict=True):
            if queue:
                device.library.call("ibv_destroy_cq", queue)
            device.deregister(self.memory.local[0], ACCESS_LOCAL)
            device.deregister(self.memory.remote[0], ACCESS_REMOTE)
        self.queues = [0] * len(self.devices)


class VerbsPort(Doorbell, Protocol):
    """Interface of the engine to this transport."""

    def add_devices(self, devices: Sequence[VerbsDevice]) -> None:
        """Watch the channels and events of opened devices; called once."""

    def add_region(self, address: int, nbytes: int) -> None:
        """Keep memory registered on all devices until ``remove_region`` or the end."""

    def working_devices(self) -> set[int]:
        """Return the devices with a queue pair that has not failed; any thread may call it."""

    def add_gpu_region(self, memory: GpuRange) -> list[int]:
        """Keep GPU memory registered until the end; return its remote key on each device."""

    def watch_window(self, window: WindowPort) -> None:
        """Keep payloads in window memory registered, each until its block is freed."""

    def attach(self, connections: Sequence[VerbsConnection]) -> None:
        """Post receives, connect the queue pairs and start to move messages."""

    def driver(self, *, overlap: bool) -> Driving:
        """Return how a waiting executor advances the connections."""

    def failure(self, peer: int) -> str:
        """Return why no queue pair to a peer works, "" if one may."""

    def detach(self, peers: Sequence[int], *, linger: float) -> None:
        """Send what is posted for at most ``linger`` seconds, then close."""

    def abort(self, text: str) -> None:
        """Send ``text`` to all peers that can be reached, and close."""

    def close(self) -> None: ...


class VerbsTransport(Transport):
    """Verbs connections of one communicator and rank.

    Args:
        ports: Ports to use, each of an own device object.
        engine: Opens the engine that posts and polls.
    """

    def __init__(
        self,
        context: TransportContext,
        *,
        library: VerbsLibrary,
        ports: Sequence[tuple[Hca, Port]],
        engine: Callable[[], VerbsPort],
        options: VerbsOptions | None = None,
        linger: float = LINGER_S,
    ) -> None:
        self.context, self.options = context, options or VerbsOptions()
        self.rank = context.endpoint.rank
        self.slot_bytes = slot_bytes_for(len(context.peers), context.budget, context.max_slot_bytes)
        self._library, self._ports = library, list(ports)[:MAX_DEVICES]
        self._make_engine, self._linger = engine, linger
        self._engine: VerbsPort | None = None
        self._devices: list[VerbsDevice] = []
        self._connections: dict[int, VerbsConnection] = {}
        self._attached: set[int] = set()
        self._info: bytes | None = None
        self._closed = False

    def setup(self) -> bytes:
        self._check_open()
        if self._info is None:
            try:
                self._info = self._setup()
            except BaseException:
                self._free()
                raise
        return self._info

    def _setup(self) -> bytes:
        relaxed = self.options.qp.relaxed_ordering
        for hca, port in self._ports:
            device = VerbsDevice.open(self._library, hca, port, relaxed_ordering=relaxed)
            self._devices.append(device)
        self._engine = self._make_engine()
        self._engine.add_devices(self._devices)
        for peer, endpoint in self.context.peers.items():
            self._connections[peer] = self._prepare(peer, max(1, len(endpoint.hcas)))
        return VerbsInfo(
            slot_bytes=self.slot_bytes,
            ports=tuple(
                PortInfo(
                    name=device.name,
                    kind=device.port.kind,
                    lid=device.lid,
                    mtu=device.mtu,
                    gids=tuple(device.gids()),
                )
                for device in self._devices
            ),
            peers={peer: conn.describe() for peer, conn in self._connections.items()},
        ).encode()

    def _prepare(self, peer: int, peer_devices: int) -> VerbsConnection:
        """Make the queue pairs and the memory of one connection."""
        assert self._engine is not None
        devices = self._devices
        count = self.options.qps_per_connection * min(max(len(devices), peer_devices), MAX_DEVICES)
        extra = self.options.control_pairs
        count = min(count, MAX_STREAMS - extra) + extra
        memory = ConnectionMemory(self.slot_bytes, count)
        queues = [
            device.create_queue(pairs * (SEND_DEPTH + RECV_DEPTH)) if pairs else 0
            for device, pairs in zip(devices, device_counts(devices, count), strict=True)
        ]
        keys = [
            (
                device.register(*memory.local, ACCESS_LOCAL)[0],
                device.register(*memory.remote, ACCESS_REMOTE)[1],
            )
            for device in devices
        ]
        conn = VerbsConnection(
            peer=peer,
            devices=devices,
            qps=[],
            queues=queues,
            memory=memory,
            keys=keys,
            pair=proxied_pair(
                self._engine,
                memory.slot_bytes,
                capabilities=CAPABILITIES,
                addresses=(memory.send_fifo, memory.recv_fifo),
                memory=memory,
            ),
            options=self.options,
        )
        self._connections[peer] = conn  # closed with the others if the next one fails
        for i in range(count):
            qp = QueuePair(
                device=devices[i % len(devices)],
                queue=queues[i % len(devices)],
                send_depth=SEND_DEPTH,
                recv_depth=RECV_DEPTH,
                settings=self.options.pair_settings(i, count),
                psn=int.from_bytes(clock.random_bytes(3), "little"),
            )
            conn.qps.append(qp)
            qp.create()
        return conn

    def connect(self, infos: Mapping[int, bytes]) -> dict[int, FifoPair]:
        self._check_open()
        self.setup()
        peers = {rank: VerbsInfo.decode(data) for rank, data in infos.items()}
        fresh = [rank for rank in peers if rank not in self._attached]
        for rank in fresh:
            self._match(rank, peers[rank])
        assert self._engine is not None
        deadline = Deadline.after(self.context.deadline)
        for rank in fresh:
            self._connections[rank].connect_until = deadline.at
        self._engine.attach([self._connections[rank] for rank in fresh])
        self._attached.update(fresh)
        for rank in fresh:
            self._await(rank, deadline)
        return {rank: self._connections[rank].pair for rank in infos}

    def _match(self, rank: int, info: VerbsInfo) -> None:
        """Pair the queue pairs of both sides, and choose the addresses of each pair."""
        conn, remote = self._connections.get(rank), info.peers.get(self.rank)
        if conn is None or remote is None:
            raise ProtocolError(
                f"cannot connect to rank {rank}: it has prepared nothing for this rank",
                rank=self.rank,
                peer=rank,
            )
        if len(conn.qps) != len(remote.qps):
            raise SystemFailure(
                f"cannot connect to rank {rank}: it has {len(remote.qps)} queue pairs for "
                f"{len(conn.qps)} here",
                rank=self.rank,
                peer=rank,
                hint="MIRACCL_IB_QPS_PER_CONNECTION and MIRACCL_IB_FIFO_TC must be the same on all "
                "ranks",
            )
        conn.remote, conn.peer_slot_bytes = remote, info.slot_bytes
        for i, (qp, (number, psn)) in enumerate(zip(conn.qps, remote.qps, strict=True)):
            device = i % len(info.ports)
            port = info.ports[device]
            found = choose_address(self.rank, rank, qp.device, port, self.options.gid)
            conn.ends.append(
                PeerQp(
                    device=device,
                    number=number,
                    psn=psn,
                    lid=port.lid,
                    mtu=port.mtu,
                    gid=found.gid,
                    gid_index=found.gid_index,
                )
            )
            conn.edges.append(f"{qp.device.name} to {port.name} of rank {rank} ({found.reason})")

    @property
    def devices(self) -> Sequence[VerbsDevice]:
        """Opened devices, from ``setup`` to the end."""
        return self._devices

    def working_devices(self) -> set[int]:
        """Return the numbers of the devices with a queue pair that has not failed."""
        return self._engine.working_devices() if self._engine is not None else set()

    def register_gpu(self, memory: GpuRange) -> list[int]:
        """Register GPU memory for payloads until the end; return its remote key on each device.

        Raises:
            SystemFailure: A device refuses it.
        """
        self._check_open()
        assert self._engine is not None
        return self._engine.add_gpu_region(memory)

    def driver(self, *, overlap: bool) -> Driving:
        return self._engine.driver(overlap=overlap) if self._engine else Driving()

    def watch_window(self, window: WindowPort) -> None:
        if self._engine is not None and not self._closed:
            self._engine.watch_window(window)

    def _await(self, rank: int, deadline: Deadline) -> None:
        """Wait until a queue pair to a peer works."""
        conn = self._connections[rank]
        assert self._engine is not None
        while not conn.ready.wait(min(deadline.left, 0.1)):
            self.context.check()
            reason = self._engine.failure(rank)
            if reason or not deadline.left:
                reason = reason or "the peer did not answer within the deadline"
                raise SystemFailure(
                    f"cannot connect to rank {rank}: {conn.edges[0]}: {reason}",
                    rank=self.rank,
                    peer=rank,
                    hint="check addresses and routes of the ports, or set MIRACCL_NET=tcp",
                )

    def close(self) -> None:
        """Send what was posted, for at most ``linger`` seconds, and free everything."""
        if not self._closed and self._engine:
            self._engine.detach(sorted(self._attached), linger=self._linger)
        self._free()

    def abort(self, text: str) -> None:
        if not self._closed and self._engine:
            self._engine.abort(text)
        self._free()

    def _free(self) -> None:
        self._closed = True
        engine, self._engine = self._engine, None
        if engine:
            engine.close()
        for conn in self._connections.values():
            conn.close()
        for device in self._devices:
            device.close()
        self._devices = []

    def _check_open(self) -> None:
        if self._closed:
            raise CommunicatorClosed(
                "cannot connect: the verbs transport is closed", rank=self.rank
            )
