"""Unreliable queue pairs (UD and UC) that carry the packets of datagram flows.

A packet is one SEND: it leaves from a registered buffer of this transport and arrives in a receive
buffer that the peer's transport has posted. The network is never given an address in memory of an
application, so a copy that arrives late cannot write there (docs/design/verbs.md).
"""

from __future__ import annotations

import ctypes
import enum
import struct
from dataclasses import dataclass, field

from miraccl import clock
from miraccl.native import verbs_abi as abi
from miraccl.native.verbs_abi import word32
from miraccl.transport.fifo import PrivateMemory
from miraccl.transport.verbs_device import (
    ACCESS_LOCAL,
    PeerQp,
    QpSettings,
    VerbsDevice,
    address_vector,
)

#: Global route header in front of every received UD packet (IBTA 8.3).
GRH_BYTES = 40
#: A UC packet is a message of several network packets, which the adapter cuts and joins.
UC_NETWORK_PACKETS = 4
MAX_PACKET_BYTES = 1 << 15
SEND_SLOTS = 256
UD_RECEIVES, UC_RECEIVES = 1024, 128
_ADDRESS = struct.Struct("<QII")


class PairKind(enum.Enum):
    """Kind of an unreliable queue pair."""

    UD = "ud"
    UC = "uc"


def packet_bytes(kind: PairKind, mtu: int) -> int:
    """Return the largest packet for an active MTU, as ``ibv_port_attr`` encodes it."""
    network = 128 << mtu
    return network if kind is PairKind.UD else min(MAX_PACKET_BYTES, network * UC_NETWORK_PACKETS)


def _pages(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


@dataclass(eq=False)
class PacketDevice:
    """Port of a device with the completion queues of its unreliable queue pairs."""

    device: VerbsDevice
    send_queue: int = 0
    recv_queue: int = 0

    @classmethod
    def open(cls, device: VerbsDevice, sends: int, receives: int) -> PacketDevice:
        """Make completion queues for this many posted sends and receives."""
        made = cls(device)
        made.send_queue = device.create_queue(sends)
        made.recv_queue = device.create_queue(receives)
        return made

    def close(self) -> None:
        """Destroy the queues and the device's objects; queue pairs must be gone. Idempotent."""
        for queue in (self.send_queue, self.recv_queue):
            if queue:
                self.device.library.call("ibv_destroy_cq", queue)
        self.send_queue = self.recv_queue = 0
        self.device.close()


@dataclass(eq=False)
class PacketPair:
    """Unreliable queue pair with its packet buffers.

    Attributes:
        slot_bytes: Size of a send buffer, the largest packet.
        recv_bytes: Size of a receive buffer.
        qkey: Q_Key of UD, which a packet must carry to be accepted.
        end: The other end of UC.
    """

    on: PacketDevice
    kind: PairKind
    settings: QpSettings
    qkey: int = 0
    slot_bytes: int = 0
    receives: int = 0
    pointer: int = 0
    psn: int = 0
    end: PeerQp | None = None
    memory: PrivateMemory | None = None
    key: int = 0
    handles: list[int] = field(default_factory=list)

    @property
    def header_bytes(self) -> int:
        return GRH_BYTES if self.kind is PairKind.UD else 0

    @property
    def recv_bytes(self) -> int:
        return -(-(self.slot_bytes + self.header_bytes) // 64) * 64

    @property
    def send_buffer(self) -> int:
        assert self.memory is not None
        return self.memory.address

    @property
    def recv_buffer(self) -> int:
        return self.send_buffer + _pages(SEND_SLOTS * self.slot_bytes)

    @property
    def number(self) -> int:
        return word32(self.pointer + abi.QP_NUMBER)

    @property
    def name(self) -> str:
        """Device, port and queue pair number, for reports."""
        return f"{self.on.device.name}/{self.number:#x}"

    def create(self) -> None:
        """Create it in state INIT, with registered buffers."""
        device = self.on.device
        self.slot_bytes = packet_bytes(self.kind, device.mtu)
        self.receives = UD_RECEIVES if self.kind is PairKind.UD else UC_RECEIVES
        size = _pages(SEND_SLOTS * self.slot_bytes) + _pages(self.receives * self.recv_bytes)
        self.memory = PrivateMemory(size)
        self.key = device.register(self.memory.address, size, ACCESS_LOCAL)[0]
        self.psn = int.from_bytes(clock.random_bytes(3), "little")
        init = abi.QpInit(
            send_cq=self.on.send_queue,
            recv_cq=self.on.recv_queue,
            cap=abi.QpCap(send_wr=SEND_SLOTS, recv_wr=self.receives, send_sge=1, recv_sge=1),
            qp_type=abi.QPT_UD if self.kind is PairKind.UD else abi.QPT_UC,
        )
        self.pointer = device.library.make(
            f"a {self.kind.name} queue pair on {device.hca.name}",
            "ibv_create_qp",
            device.pd,
            ctypes.addressof(init),
        )
        self.to_init()

    def _modify(self, what: str, attributes: abi.QpAttr, mask: int) -> None:
        self.on.device.library.do(
            f"move a queue pair of {self.on.device.name} to {what}",
            "ibv_modify_qp",
            self.pointer,
            ctypes.addressof(attributes),
            mask | abi.ATTR_STATE,
        )

    def to_init(self) -> None:
        attributes = abi.QpAttr(
            qp_state=abi.QPS_INIT,
            port_num=self.on.device.port.number,
            pkey_index=self.settings.pkey_index,
            qkey=self.qkey,
        )
        # A UC queue pair allows no remote access: its peer can only SEND.
        last = abi.ATTR_QKEY if self.kind is PairKind.UD else abi.ATTR_ACCESS
        self._modify("INIT", attributes, abi.ATTR_PKEY | abi.ATTR_PORT | last)

    def to_ready(self) -> None:
        """Move it to RTR and RTS. Receives must be posted; UC needs its ``end``."""
        attributes, mask = abi.QpAttr(qp_state=abi.QPS_RTR), 0
        if self.kind is PairKind.UC:
            assert self.end is not None
            attributes.path_mtu = min(self.on.device.mtu, self.end.mtu)
            attributes.dest_qp_num, attributes.rq_psn = self.end.number, self.end.psn
            attributes.ah = address_vector(self.on.device, self.settings, self.end)
            mask = abi.ATTR_AV | abi.ATTR_MTU | abi.ATTR_DEST_QPN | abi.ATTR_RQ_PSN
        self._modify("RTR", attributes, mask)
        self._modify("RTS", abi.QpAttr(qp_state=abi.QPS_RTS, sq_psn=self.psn), abi.ATTR_SQ_PSN)

    def to_error(self) -> None:
        """Stop it: all posted work requests complete."""
        self._modify("ERR", abi.QpAttr(qp_state=abi.QPS_ERR), 0)

    def to_reset(self) -> None:
        self._modify("RESET", abi.QpAttr(qp_state=abi.QPS_RESET), 0)

    def address_of(self, end: PeerQp) -> bytes:
        """Return the address of a peer in a work request; UC has its own end for it."""
        if self.kind is PairKind.UC:
            self.end = end
            return bytes(_ADDRESS.size)
        vector = address_vector(self.on.device, self.settings, end)
        handle = self.on.device.library.make(
            f"an address handle on {self.on.device.name}",
            "ibv_create_ah",
            self.on.device.pd,
            ctypes.addressof(vector),
        )
        self.handles.append(handle)
        return _ADDRESS.pack(handle, end.number, self.qkey)

    def close(self) -> None:
        """Destroy it; its memory is given back when the device has let go of it. Idempotent."""
        library = self.on.device.library
        pointer, self.pointer = self.pointer, 0
        if pointer:
            library.call("ibv_destroy_qp", pointer)
        for handle in self.handles:
            library.call("ibv_destroy_ah", handle)
        self.handles.clear()
        if self.memory is not None:
            self.on.device.deregister(self.memory.address, ACCESS_LOCAL)
            self.memory = None
