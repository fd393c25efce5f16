"""Flush of received data: a read or a fetch-and-add through a loop-back queue pair.

A NIC's writes to GPU memory and its completions in host memory take different paths through the
machine. A request of the same NIC that reads what it has written cannot pass the writes, so its
completion says that they are visible (NCCL ``net_ib/p2p.cc``, ``ncclIbIflush``). Whether this is
needed, and which request, ``wire.verbs.flush`` decides.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from miraccl import clock, params
from miraccl.errors import SystemFailure
from miraccl.native import verbs_abi as abi
from miraccl.native.verbs_abi import word32
from miraccl.transport.fifo import PAGE_BYTES, PrivateMemory, memory_at
from miraccl.transport.verbs_device import PeerQp, QpSettings, QueuePair, VerbsDevice
from miraccl.wire.verbs.flush import FlushFacts, FlushMethod
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
VERIFY_S = 2.0
_POLL_S = 20e-6


def flush_facts(
    sm: int,
    root: str | Path = "/",
    *,
    writes_ordering: int = -1,
    null_mr: bool = False,
    data_direct: bool = False,
) -> FlushFacts:
    """Return what decides the flush for a GPU of compute capability ``sm`` on this host.

    Args:
        writes_ordering: As ``FlushFacts`` has it.
        null_mr, data_direct: Abilities that all devices in use have.
    """
    return FlushFacts(
        memory="gpu",
        compute_capability=sm,
        writes_ordering=writes_ordering,
        forced=bool(params.NET_FORCE_FLUSH.read()),
        disabled=bool(params.GDR_FLUSH_DISABLE.read()),
        gdrcopy=(Path(root) / "dev/gdrdrv").exists(),
        null_mr=null_mr,
        data_direct=data_direct,
    )


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
        last = (address + nbytes - ATOMIC_BYTES) & -ATOMIC_BYTES
        if self.method is FlushMethod.ATOMIC and last >= address:
            opcode = abi.WR_ATOMIC_FETCH_AND_ADD
            self._post_request(opcode, last, rkey, (*self._local, ATOMIC_BYTES))
        else:
            local = self._words.address, self._key, 1
            self._post_request(abi.WR_RDMA_READ, address + nbytes - 1, rkey, local)

    def _post_request(
        self, opcode: int, remote: int, rkey: int, local: tuple[int, int, int]
    ) -> None:
        """Post a request of (address, key, bytes) of local memory."""
        assert self.pair is not None
        wr = abi.SendWr(wr_id=remote, num_sge=1, send_flags=abi.SEND_SIGNALED, opcode=opcode)
        sge = abi.Sge(addr=local[0], lkey=local[1], length=local[2])
        wr.sg_list, wr.remote_addr = ctypes.addressof(sge), remote
        if opcode == abi.WR_ATOMIC_FETCH_AND_ADD:
            # ibv_send_wr.wr.atomic: remote_addr, compare_add, swap, rkey
            ctypes.c_uint32.from_address(ctypes.addressof(wr) + 64).value = rkey
        else:
            wr.rkey = rkey
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
        self.wait(timeout)

    def verify(self, address: int, rkey: int, read: Callable[[int, int], bytes]) -> None:
        """Check that the device writes and reads registered memory: 8 bytes, which change.

        Args:
            read: ``read(address, nbytes)`` returns the memory as its owner sees it.

        Raises:
            SystemFailure: A request fails, or the bytes are other ones.
        """
        pattern, here = clock.random_bytes(ATOMIC_BYTES), self._words.address
        words = memory_at(here, PAGE_BYTES)
        words[64:72] = pattern
        self._post_request(abi.WR_RDMA_WRITE, address, rkey, (here + 64, self._key, ATOMIC_BYTES))
        self.wait(VERIFY_S)
        self.flush(address, ATOMIC_BYTES, rkey, VERIFY_S)
        seen = read(address, ATOMIC_BYTES)
        self._post_request(abi.WR_RDMA_READ, address, rkey, (here + 128, self._key, ATOMIC_BYTES))
        self.wait(VERIFY_S)
        fetched = bytes(words[128:136])
        if (seen, fetched) != (pattern, pattern):
            raise SystemFailure(
                f"cannot use GPU memory on {self.device.name}: of {pattern.hex()}, which it wrote, "
                f"the GPU sees {seen.hex()} and the device reads {fetched.hex()}",
                hint="set MIRACCL_NET_GDR_LEVEL=LOC",
            )

    def wait(self, timeout: float = 10.0) -> None:
        """Wait for the oldest request. Raises ``SystemFailure``, also after ``timeout`` seconds."""
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
