"""Verbs over unreliable queue pairs: UD and UC under the datagram machine (``wire.datagram``).

The flows are those of the UDP transport, with its paths, loss detection, congestion control, keys
and credit; packets travel as SENDs between queue pairs instead of sockets (``verbs_packets``).

- UD: each rank has ``qps_per_connection`` queue pairs per device, which all its peers share.
- UC: each pair of ranks has its own queue pairs, as with reliable connections.

Path k to a peer is on device ``k % ndevices`` of each side; there are as many paths as the side
with more devices needs.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from miraccl import clock
from miraccl.errors import InvalidUsage, PlanMismatch, ProtocolError, SystemFailure
from miraccl.transport import registry
from miraccl.transport.base import (
    DatagramConnection,
    DatagramOptions,
    DatagramPath,
    DatagramPort,
    Driving,
    TransportContext,
)
from miraccl.transport.datagram import CTS, DatagramTransport
from miraccl.transport.fifo import slot_bytes_for
from miraccl.transport.verbs_address import choose_address
from miraccl.transport.verbs_datagram_info import VerbsDatagramInfo
from miraccl.transport.verbs_device import PeerQp, VerbsDevice
from miraccl.transport.verbs_info import PortInfo
from miraccl.transport.verbs_packets import (
    SEND_SLOTS,
    UC_RECEIVES,
    UD_RECEIVES,
    PacketDevice,
    PacketPair,
    PairKind,
    packet_bytes,
)
from miraccl.wire.datagram.packets import MAX_PATHS
from miraccl.wire.datagram.seal import SETUP_NONCE_BYTES
from miraccl.wire.verbs.rows import MAX_DEVICES

if TYPE_CHECKING:
    from miraccl.native.verbs_abi import VerbsLibrary
    from miraccl.topo.hca import Hca, Port
    from miraccl.transport.verbs import VerbsOptions

MIN_SHARE_BYTES = 16 << 10


class VerbsDatagramPort(DatagramPort, Protocol):
    """Interface of the engine to this transport."""

    def driver(self, *, overlap: bool) -> Driving:
        """Return how a waiting executor advances the connections."""

    def close(self, *, linger: float = 0.0) -> None:
        """Stop to post and poll; queue pairs may be destroyed afterwards."""


@dataclass(frozen=True, kw_only=True)
class VerbsDatagramConnection(DatagramConnection):
    """Paths over unreliable queue pairs to a peer.

    Attributes:
        devices: Devices of the transport.
        pairs: Queue pair of each path.
        addresses: Address of the peer's end of each path, as a work request has it.
    """

    devices: Sequence[PacketDevice]
    pairs: Sequence[PacketPair]
    addresses: Sequence[bytes]


class VerbsDatagramTransport(DatagramTransport):
    """Connections of one communicator and rank over unreliable queue pairs.

    Args:
        ports: Ports to use, each of an own device object.
        engine: Opens the engine that posts and polls; the transport closes it.
        kind: Kind of the queue pairs.
        datagram: Congestion control and protection.
    """

    def __init__(
        self,
        context: TransportContext,
        *,
        library: VerbsLibrary,
        ports: Sequence[tuple[Hca, Port]],
        engine: Callable[[], VerbsDatagramPort],
        kind: PairKind,
        options: VerbsOptions,
        datagram: DatagramOptions,
        linger: float = 5.0,
    ) -> None:
        self._engine = engine()
        super().__init__(
            context.endpoint,
            proxy=self._engine,
            secret=context.secret,
            job=context.job,
            slot_bytes=slot_bytes_for(len(context.peers), context.budget, context.max_slot_bytes),
            options=replace(datagram, admission=CTS),
            npeers=len(context.peers),
            timeout=context.deadline,
            linger=linger,
            check=context.check,
        )
        self.network = kind.name
        self.context, self.options, self.kind = context, options, kind
        self._library, self._ports = library, list(ports)[:MAX_DEVICES]
        self._devices: list[PacketDevice] = []
        self._pairs: dict[int, list[PacketPair]] = {}
        self._qkey = int.from_bytes(clock.random_bytes(4), "little") & 0x7FFFFFFF

    def setup(self) -> bytes:
        self._check_open()
        if self._info is None:
            try:
                self._info = self._prepare()
            except BaseException:
                self._free()
                raise
        encoded: bytes = self._info.encode()
        return encoded

    def _prepare(self) -> VerbsDatagramInfo:
        """Open the devices and make all queue pairs, whose numbers the peers need."""
        ud = self.kind is PairKind.UD
        per_peer = {-1: 1} if ud else {p: len(e.hcas) for p, e in self.context.peers.items()}
        total = sum(self._npaths(n) for n in per_peer.values())
        for hca, port in self._ports:
            device = VerbsDevice.open(
                self._library, hca, port, relaxed_ordering=self.options.qp.relaxed_ordering
            )
            try:
                pairs = -(-total // len(self._ports))
                receives = UD_RECEIVES if ud else UC_RECEIVES
                self._devices.append(
                    PacketDevice.open(device, pairs * SEND_SLOTS, pairs * receives)
                )
            except BaseException:
                device.close()
                raise
        for peer, ndevices in per_peer.items():
            self._pairs[peer] = made = []
            for i in range(self._npaths(ndevices)):
                pair = PacketPair(
                    on=self._devices[i % len(self._devices)],
                    kind=self.kind,
                    settings=self.options.qp,
                    qkey=self._qkey,
                )
                made.append(pair)
                pair.create()
        pair = next(iter(self._pairs.values()))[0]
        sharing = max(1, len(self.context.peers)) if ud else 1
        return VerbsDatagramInfo(
            kind=self.kind.value,
            ports=tuple(
                PortInfo(
                    name=each.device.name,
                    kind=each.device.port.kind,
                    lid=each.device.lid,
                    mtu=each.device.mtu,
                    gids=tuple(each.device.gids()),
                )
                for each in self._devices
            ),
            pairs={
                peer: tuple((pair.number, pair.psn) for pair in pairs)
                for peer, pairs in self._pairs.items()
            },
            qkey=self._qkey,
            # Half of the receive buffers, as a packet may be smaller than its buffer.
            share_bytes=max(MIN_SHARE_BYTES, pair.receives * pair.slot_bytes // (2 * sharing)),
            nonce=clock.random_bytes(SETUP_NONCE_BYTES),
            connection=int.from_bytes(clock.random_bytes(4), "little"),
            protection=self._options.protection,
            ciphers=tuple(self._engine.ciphers),
            slot_bytes=self._slot_bytes,
        )

    def _npaths(self, peer_devices: int) -> int:
        ndevices = max(len(self._ports), peer_devices, 1)
        return min(MAX_PATHS, self.options.qps_per_connection * ndevices)

    def _decode(self, data: bytes) -> VerbsDatagramInfo:
        return VerbsDatagramInfo.decode(data)

    def _advice(self, peer: int, info: Any) -> str:
        names = ", ".join(port.name for port in info.ports)
        return (
            f"rank {peer} receives on {names}: check with ibv_{self.kind.value}_pingpong, or set "
            "MIRACCL_IB_QP_TYPE=rc"
        )

    def _connection(self, peer: int, info: VerbsDatagramInfo) -> DatagramConnection:
        if info.kind != self.kind.value:
            raise PlanMismatch(
                f"ranks disagree on the kind of queue pairs: {self.kind.value} on rank "
                f"{self.rank}, {info.kind} on rank {peer}",
                hint="give all ranks the same MIRACCL_IB_QP_TYPE",
            )
        self._check_protection(peer, info)
        ends = info.pairs.get(-1 if self.kind is PairKind.UD else self.rank)
        if not ends:
            raise ProtocolError(
                f"cannot connect to rank {peer}: it has prepared nothing for this rank",
                rank=self.rank,
                peer=peer,
            )
        own = self._pairs[-1 if self.kind is PairKind.UD else peer]
        if self.kind is PairKind.UC and len(own) != len(ends):
            raise SystemFailure(
                f"cannot connect to rank {peer}: it has {len(ends)} queue pairs for {len(own)} "
                "here",
                rank=self.rank,
                peer=peer,
                hint="MIRACCL_IB_QPS_PER_CONNECTION must be the same on all ranks",
            )
        count = max(len(own), len(ends))
        routes = [self._route(peer, info, own, ends, i) for i in range(count)]
        return VerbsDatagramConnection(
            streams=(),
            paths=tuple(path for path, _, _ in routes),
            devices=tuple(self._devices),
            pairs=tuple(pair for _, pair, _ in routes),
            addresses=tuple(address for _, _, address in routes),
            **self._shared_fields(peer, info, registry.VERBS.capabilities),
        )

    def _route(
        self,
        peer: int,
        info: VerbsDatagramInfo,
        own: Sequence[PacketPair],
        ends: Sequence[tuple[int, int]],
        index: int,
    ) -> tuple[DatagramPath, PacketPair, bytes]:
        """Return path ``index`` to a peer, its queue pair, and the peer's address."""
        pair, (number, psn) = own[index % len(own)], ends[index % len(ends)]
        port = info.ports[index % len(ends) % len(info.ports)]
        found = choose_address(self.rank, peer, pair.on.device, port, self.options.gid)
        end = PeerQp(
            device=index % len(info.ports),
            number=number,
            psn=psn,
            lid=port.lid,
            mtu=port.mtu,
            gid=found.gid,
            gid_index=found.gid_index,
        )
        size = min(packet_bytes(self.kind, mtu) for mtu in (pair.on.device.mtu, port.mtu))
        if self._options.mtu:
            size = min(size, self._options.mtu)
        host = str(ipaddress.IPv6Address(found.gid)) if found.gid else port.name
        path = DatagramPath(
            socket=0, host=host, port=number, mtu=size, share_bytes=info.share_bytes
        )
        address = replace_qkey(pair.address_of(end), info.qkey)
        return path, pair, address

    def driver(self, *, overlap: bool) -> Driving:
        return self._engine.driver(overlap=overlap)

    def describe(self, peer: int) -> str:
        """Return the paths and settings of the connection to a peer."""
        return f"{self.kind.name} queue pairs, {super().describe(peer)}"

    def _origin(self, paths: Sequence[DatagramPath]) -> str:
        return ""

    def _free(self) -> None:
        if self._closed:
            return
        self._engine.close()
        for pairs in self._pairs.values():
            for pair in pairs:
                pair.close()
        self._pairs.clear()
        for device in self._devices:
            device.close()
        self._devices.clear()
        super()._free()


def replace_qkey(address: bytes, qkey: int) -> bytes:
    """Return an address with the Q_Key of the peer."""
    return address[:12] + qkey.to_bytes(4, "little")


def kind_of(text: str) -> PairKind | None:
    """Return the kind that ``MIRACCL_IB_QP_TYPE`` names, None for reliable connections.

    Raises:
        InvalidUsage: The name is unknown.
    """
    if text == "rc":
        return None
    try:
        return PairKind(text)
    except ValueError:
        raise InvalidUsage(
            f"cannot use MIRACCL_IB_QP_TYPE={text}: allowed are rc, uc, ud"
        ) from None
