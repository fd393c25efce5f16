"""Flush of received data: a read or a fetch-and-add through a loop-back queue pair.

A NIC's writes to GPU memory and its completions in host memory take different paths through the
machine. A request of the same NIC that reads what it has written cannot pass the writes, so its
completion says that they are visible (NCCL ``net_ib/p2p.cc``, ``ncclIbIflush``). Whether this is
needed, and which request, ``wire.verbs.flush`` decides.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from miraccl import clock
from miraccl.errors import SystemFailure
from miraccl.native import verbs_abi as abi
from miraccl.native.verbs_abi import word32
from miraccl.transport.fifo import PAGE_BYTES, PrivateMemory
from miraccl.transport.verbs_device import PeerQp, QpSettings, QueuePair, VerbsDevice
from miraccl.wire.verbs.flush import FlushMethod
from miraccl.wire.verbs.gids import GidWish, choose_gids

FLUSHABLE = (
    abi.ACCESS_LOCAL_WRITE
    | abi.ACCESS_REMOTE_WRITE
    | abi.ACCESS_REMOTE_READ
    | abi.ACCESS_REMOTE_ATOMIC
)
"""Access of memory that is to be flushed by ``FlushQueue``."""
ATOMIC_BYTES = 8
DEPTH = 16
_POLL_S = 20e-6


@dataclass(eq=False)
class FlushQueue:
    """Loop-back queue pair of a device.

    Args:
        method: READ or ATOMIC.

    Raises:
        SystemFailure: The queue pair cannot be made or connected to itself.
    """

    device: VerbsDevice
    method: FlushMethod = FlushMethod.READ
    settings: QpSettings = field(default_factory=lambda: QpSettings(inline_bytes=0))
    queue: int = 0
    pair: QueuePair | None = None
    null_mr: int = 0

    def open(self) -> None:
        """Make the queue pair and connect it to itself."""
        if self.method not in (FlushMethod.READ, FlushMethod.ATOMIC):
            raise ValueError(f"cannot flush by {self.method.value} through a queue pair")
        device = self.device
        try:
            self._words = PrivateMemory(PAGE_BYTES)
            self._key = device.register(self._words.address, PAGE_BYTES, abi.ACCESS_LOCAL_WRITE)[0]
            self._local = (self._words.address, self._key)
            if self.method is FlushMethod.ATOMIC:
                self.null_mr = device.make_null_registration()
            if self.null_mr:  # the old value of the word goes nowhere
                self._local = (0, word32(self.null_mr + abi.MR_LKEY))
            self.queue = device.create_queue(2 * DEPTH)
            self.pair = QueuePair(
                device=device,
                queue=self.queue,
                send_depth=DEPTH,
                recv_depth=1,
                settings=self.settings,
                access=FLUSHABLE,
            )
            self.pair.create()
            self.pair.connect(self._own_end(self.pair))
        except BaseException:
            self.close()
            raise
        kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        self._post = kind(device.operations[abi.OP_POST_SEND])
        self._poll = kind(device.operations[abi.OP_POLL_CQ])

    def _own_end(self, pair: QueuePair) -> PeerQp:
        device = self.device
        own = tuple(device.gids())
        choice = choose_gids(own, own, GidWish())
        gid = choice.pair[0] if choice.pair and device.port.kind != "ib" else None
        return PeerQp(
            device=0,
            number=pair.number,
            psn=pair.psn,
            lid=device.lid,
            mtu=device.mtu,
            gid=gid.raw if gid else b"",
            gid_index=gid.index if gid else 0,
        )

    def post(self, address: int, nbytes: int, rkey: int) -> None:
        """Begin to flush a received buffer, registered with ``FLUSHABLE`` on this device.

        READ reads the last byte. ATOMIC adds 0 to the last aligned 8 bytes of a buffer that has
        them, and reads otherwise.
        """
        assert self.pair is not None
        wr = abi.SendWr(wr_id=address, num_sge=1, send_flags=abi.SEND_SIGNALED)
        last = (address + nbytes - ATOMIC_BYTES) & -ATOMIC_BYTES
        atomic = self.method is FlushMethod.ATOMIC and last >= address
        local, key = self._local if atomic else (self._words.address, self._key)
        sge = abi.Sge(addr=local, length=ATOMIC_BYTES if atomic else 1, lkey=key)
        wr.sg_list = ctypes.addressof(sge)
        if atomic:
            # ibv_send_wr.wr.atomic: remote_addr, compare_add, swap, rkey
            wr.opcode, wr.remote_addr = abi.WR_ATOMIC_FETCH_AND_ADD, last
            wr.pad1[0], wr.rkey = 0, 0
            ctypes.c_uint64.from_address(ctypes.addressof(wr) + 48).value = 0
            ctypes.c_uint32.from_address(ctypes.addressof(wr) + 64).value = rkey
        else:
            wr.opcode, wr.remote_addr, wr.rkey = abi.WR_RDMA_READ, address + nbytes - 1, rkey
        bad = ctypes.c_uint64()
        code = self._post(self.pair.pointer, ctypes.addressof(wr), ctypes.addressof(bad))
        if code:
            raise SystemFailure(f"cannot post a flush on {self.device.name}: errno {code}")

    def done(self) -> bool:
        """Return True if the oldest posted flush has completed.

        Raises:
            SystemFailure: It completed with an error.
        """
        wc = abi.Wc()
        if self._poll(self.queue, 1, ctypes.addressof(wc)) <= 0:
            return False
        if wc.status:
            raise SystemFailure(
                f"cannot flush through {self.device.name}: status {wc.status}, vendor error "
                f"{wc.vendor_err}",
                hint="set MIRACCL_NET=tcp",
            )
        return True

    def flush(self, address: int, nbytes: int, rkey: int, timeout: float = 10.0) -> None:
        """Flush a buffer and wait. Raises ``SystemFailure``, also after ``timeout`` seconds."""
        self.post(address, nbytes, rkey)
        until = clock.monotonic() + timeout
        while not self.done():
            if clock.monotonic() > until:
                raise SystemFailure(
                    f"cannot flush through {self.device.name}: no completion in {timeout:g} s"
                )
            clock.sleep(_POLL_S)

    @property
    def number(self) -> int:
        """Number of the queue pair."""
        assert self.pair is not None
        return word32(self.pair.pointer + abi.QP_NUMBER)

    def close(self) -> None:
        """Destroy queue pair and queue; idempotent."""
        if self.pair:
            self.pair.close()
            self.pair = None
        if self.queue:
            self.device.library.call("ibv_destroy_cq", self.queue)
            self.queue = 0
        null_mr, self.null_mr = self.null_mr, 0
        if null_mr:
            self.device.library.call("ibv_dereg_mr", null_mr)
        if getattr(self, "_words", None) is not None:
            self.device.deregister(self._words.address, abi.ACCESS_LOCAL_WRITE)
