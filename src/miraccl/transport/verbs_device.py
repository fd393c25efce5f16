"""Opened devices and queue pairs of the verbs transport: objects over ``native.verbs_abi``."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from miraccl.errors import SystemFailure
from miraccl.native import verbs_abi as abi
from miraccl.native.verbs_abi import VerbsLibrary, word32
from miraccl.topo.hca import Hca, Port
from miraccl.transport.fifo import PAGE_BYTES, PrivateMemory
from miraccl.wire.verbs.gids import PortGid

ACCESS_LOCAL = abi.ACCESS_LOCAL_WRITE
ACCESS_REMOTE = abi.ACCESS_LOCAL_WRITE | abi.ACCESS_REMOTE_WRITE


@dataclass(frozen=True, kw_only=True)
class QpSettings:
    """Settings of queue pairs, by the names of NCCL's variables.

    Attributes:
        timeout: Local ACK timeout, 4.096 us * 2**timeout.
        retry_count: Repetitions of a request before the queue pair fails.
        traffic_class, service_level: Quality of service of RoCE and of InfiniBand.
        inline_bytes: Bytes that are written into a work request, 0 for none.
        relaxed_ordering: See ``VerbsDevice.open``.
    """

    timeout: int = 14
    retry_count: int = 7
    traffic_class: int = 0
    service_level: int = 0
    pkey_index: int = 0
    inline_bytes: int = 128
    relaxed_ordering: int = 2


@dataclass(eq=False)
class VerbsDevice:
    """One port of an opened device, with its protection domain and completion channel.

    Raises:
        SystemFailure: The device cannot be opened or used.
    """

    library: VerbsLibrary
    hca: Hca
    port: Port
    context: int = 0
    pd: int = 0
    channel: int = 0
    mtu: int = 0
    lid: int = 0
    max_message: int = 0
    operations: dict[int, int] = field(default_factory=dict)
    regions: dict[tuple[int, int], int] = field(default_factory=dict)
    limits: Any = None
    extra_access: int = 0

    @classmethod
    def open(
        cls, library: VerbsLibrary, hca: Hca, port: Port, *, relaxed_ordering: int = 0
    ) -> VerbsDevice:
        """Open a device.

        Args:
            relaxed_ordering: 1 registers all memory with relaxed ordering of PCI writes, 2 where
                the device accepts that, 0 without. A row is processed after its completion, which
                is never reordered, so neither rows nor payloads need the strict order.
        """
        device = cls(library=library, hca=hca, port=port)
        try:
            device._open()
            if relaxed_ordering and (device.accepts_relaxed_ordering() or relaxed_ordering == 1):
                device.extra_access = abi.ACCESS_RELAXED_ORDERING
        except BaseException:
            device.close()
            raise
        return device

    @property
    def name(self) -> str:
        return f"{self.hca.name}:{self.port.number}"

    @property
    def channel_fd(self) -> int:
        return word32(self.channel + abi.CHANNEL_FD)

    @property
    def async_fd(self) -> int:
        return word32(self.context + abi.CONTEXT_ASYNC_FD)

    def _open(self) -> None:
        self.context = self.library.make(
            f"a context of {self.hca.name}", "ibv_open_device", self._find()
        )
        self.operations = self.library.operations(self.context)
        self.limits = abi.DeviceAttr()
        self.library.do(
            f"query {self.hca.name}",
            "ibv_query_device",
            self.context,
            ctypes.addressof(self.limits),
        )
        attributes = (abi.PortAttr * 2)()  # newer libraries may write some bytes more
        self.library.do(
            f"query port {self.name}",
            "ibv_query_port",
            self.context,
            self.port.number,
            ctypes.addressof(attributes),
        )
        port = attributes[0]
        if port.state != abi.PORT_ACTIVE:
            raise SystemFailure(
                f"cannot use {self.name}: its port is not active",
                hint="check the cable, the switch and the subnet manager",
            )
        self.mtu, self.lid, self.max_message = port.active_mtu, port.lid, port.max_msg_sz
        self.pd = self.library.make("a protection domain", "ibv_alloc_pd", self.context)
        self.channel = self.library.make(
            "a completion channel", "ibv_create_comp_channel", self.context
        )
        for fd in (self.channel_fd, self.async_fd):
            os.set_blocking(fd, False)

    def _find(self) -> int:
        """Return the ``ibv_device`` with the name of this device."""
        count = ctypes.c_int()
        devices = self.library.make(
            "a list of devices", "ibv_get_device_list", ctypes.addressof(count)
        )
        try:
            for i in range(count.value):
                device = ctypes.c_uint64.from_address(devices + 8 * i).value
                if self.library.call("ibv_get_device_name", device) == self.hca.name.encode():
                    return device
        finally:
            self.library.call("ibv_free_device_list", devices)
        raise SystemFailure(
            f"cannot open {self.hca.name}: libibverbs does not list it",
            hint="install its provider (Debian and Ubuntu: ibverbs-providers), and check that "
            "/dev/infiniband is visible here",
        )

    def gids(self) -> list[PortGid]:
        return [PortGid(index=g.index, raw=g.raw, type=g.type) for g in self.port.gids]

    def register(self, address: int, nbytes: int, access: int) -> tuple[int, int]:
        """Register memory until the device is closed; return its local and its remote key."""
        mr = self.make_registration(address, nbytes, access)
        keys = word32(mr + abi.MR_LKEY), word32(mr + abi.MR_RKEY)
        self.regions[address, access] = mr
        return keys

    def make_registration(self, address: int, nbytes: int, access: int) -> int:
        """Register memory; return the ``ibv_mr``, which the caller ends by ``ibv_dereg_mr``."""
        return self.library.make(
            f"a registration of {nbytes} bytes on {self.hca.name}",
            "ibv_reg_mr",
            self.pd,
            address,
            nbytes,
            access | self.extra_access,
        )

    def make_null_registration(self) -> int:
        """Return an ``ibv_mr`` that drops what is written to it, 0 if the device has none; the
        caller ends it by ``ibv_dereg_mr``.
        """
        function = self.library.null_mr_function(self.context)
        if not function:
            return 0
        return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(function)(self.pd) or 0

    def accepts_relaxed_ordering(self) -> bool:
        """Return True if a page can be registered with relaxed ordering."""
        page = PrivateMemory(PAGE_BYTES)
        access = ACCESS_REMOTE | abi.ACCESS_RELAXED_ORDERING
        try:
            self.register(page.address, PAGE_BYTES, access)
        except SystemFailure:
            return False
        self.deregister(page.address, access)
        return True

    def deregister(self, address: int, access: int) -> None:
        """End a registration that ``register`` made."""
        mr = self.regions.pop((address, access), 0)
        if mr:
            self.library.call("ibv_dereg_mr", mr)

    def create_queue(self, entries: int) -> int:
        """Create a completion queue that reports to the channel."""
        if entries > self.limits.max_cqe:
            raise SystemFailure(
                f"cannot make a completion queue of {entries} entries: {self.hca.name} allows "
                f"{self.limits.max_cqe}",
                hint="lower MIRACCL_IB_QPS_PER_CONNECTION",
            )
        return self.library.make(
            "a completion queue", "ibv_create_cq", self.context, entries, None, self.channel, 0
        )

    def next_event(self) -> int:
        """Return the type of the next asynchronous event, -1 if there is none."""
        event = abi.AsyncEvent()
        if self.library.call("ibv_get_async_event", self.context, ctypes.addressof(event)):
            return -1
        self.library.call("ibv_ack_async_event", ctypes.addressof(event))
        return int(event.kind)

    def close(self) -> None:
        """Free everything; queue pairs and completion queues must be gone. Idempotent."""
        for mr in self.regions.values():
            self.library.call("ibv_dereg_mr", mr)
        self.regions.clear()
        for name in ("channel", "pd", "context"):
            address, function = getattr(self, name), _DESTROY[name]
            if address:
                setattr(self, name, 0)
                self.library.call(function, address)


_DESTROY = {
    "channel": "ibv_destroy_comp_channel",
    "pd": "ibv_dealloc_pd",
    "context": "ibv_close_device",
}


@dataclass(frozen=True, kw_only=True)
class PeerQp:
    """The other end of a queue pair.

    Attributes:
        device: Number of the peer's device, for its keys.
        gid: The peer's address; b"" without one.
        gid_index: Entry of the own port's table to send from.
    """

    device: int
    number: int
    psn: int
    lid: int
    mtu: int
    gid: bytes
    gid_index: int


def address_vector(device: VerbsDevice, settings: QpSettings, peer: PeerQp) -> Any:
    """Return the ``ibv_ah_attr`` of a peer's port."""
    ah = abi.Ah(dlid=peer.lid, sl=settings.service_level)
    ah.port_num = device.port.number
    if peer.gid:
        ah.is_global = 1
        ctypes.memmove(ctypes.addressof(ah), peer.gid, 16)
        ah.grh.sgid_index, ah.grh.hop_limit = peer.gid_index, 255
        ah.grh.traffic_class = settings.traffic_class
    return ah


@dataclass(eq=False)
class QueuePair:
    """Reliable connected queue pair of a device."""

    device: VerbsDevice
    queue: int
    send_depth: int
    recv_depth: int
    settings: QpSettings
    pointer: int = 0
    psn: int = 0
    inline: bool = False
    access: int = ACCESS_REMOTE

    def create(self) -> None:
        """Create it in state INIT. Rows are written inline if the device can."""
        wanted = self.settings.inline_bytes
        try:
            self.pointer = self._create(wanted)
            self.inline = wanted > 0
        except SystemFailure:
            if not wanted:
                raise
            self.pointer = self._create(0)
        self.to_init()

    def _create(self, inline: int) -> int:
        init = abi.QpInit(
            send_cq=self.queue,
            recv_cq=self.queue,
            cap=abi.QpCap(
                send_wr=self.send_depth,
                recv_wr=self.recv_depth,
                send_sge=1,
                recv_sge=1,
                inline=inline,
            ),
            qp_type=abi.QPT_RC,
        )
        return self.device.library.make(
            f"a queue pair on {self.device.hca.name}",
            "ibv_create_qp",
            self.device.pd,
            ctypes.addressof(init),
        )

    @property
    def number(self) -> int:
        return word32(self.pointer + abi.QP_NUMBER)

    def _modify(self, what: str, attributes: Any, mask: int) -> None:
        self.device.library.do(
            f"move a queue pair of {self.device.name} to {what}",
            "ibv_modify_qp",
            self.pointer,
            ctypes.addressof(attributes),
            mask,
        )

    def to_init(self) -> None:
        attributes = abi.QpAttr(
            qp_state=abi.QPS_INIT,
            port_num=self.device.port.number,
            pkey_index=self.settings.pkey_index,
            access=self.access,
        )
        mask = abi.ATTR_STATE | abi.ATTR_PKEY | abi.ATTR_PORT | abi.ATTR_ACCESS
        self._modify("INIT", attributes, mask)

    def connect(self, peer: PeerQp) -> None:
        """Move it to RTR and RTS. Receives must be posted."""
        ah = address_vector(self.device, self.settings, peer)
        ready = abi.QpAttr(
            qp_state=abi.QPS_RTR,
            path_mtu=min(self.device.mtu, peer.mtu),
            dest_qp_num=peer.number,
            rq_psn=peer.psn,
            ah=ah,
            max_dest_rd_atomic=1,
            min_rnr_timer=12,
        )
        mask = abi.ATTR_STATE | abi.ATTR_AV | abi.ATTR_MTU | abi.ATTR_DEST_QPN | abi.ATTR_RQ_PSN
        self._modify("RTR", ready, mask | abi.ATTR_DEST_RD_ATOMIC | abi.ATTR_MIN_RNR)
        send = abi.QpAttr(
            qp_state=abi.QPS_RTS,
            sq_psn=self.psn,
            timeout=self.settings.timeout,
            retry_cnt=self.settings.retry_count,
            rnr_retry=7,
            max_rd_atomic=1,
        )
        mask = abi.ATTR_STATE | abi.ATTR_SQ_PSN | abi.ATTR_TIMEOUT | abi.ATTR_RETRY
        self._modify("RTS", send, mask | abi.ATTR_RNR_RETRY | abi.ATTR_RD_ATOMIC)

    def to_error(self) -> None:
        """Stop it: no further byte arrives or leaves, and all work requests complete."""
        self._modify("ERR", abi.QpAttr(qp_state=abi.QPS_ERR), abi.ATTR_STATE)

    def to_reset(self) -> None:
        self._modify("RESET", abi.QpAttr(qp_state=abi.QPS_RESET), abi.ATTR_STATE)

    def close(self) -> None:
        """Destroy it; idempotent."""
        pointer, self.pointer = self.pointer, 0
        if pointer:
            self.device.library.call("ibv_destroy_qp", pointer)


def device_counts(devices: Sequence[VerbsDevice], count: int) -> list[int]:
    """Return how many of ``count`` queue pairs each device carries: pair i is on device i % n."""
    return [len(range(i, count, len(devices))) for i in range(len(devices))]
