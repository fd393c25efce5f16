"""Transport for ranks of one host: FIFOs, control page and window memory in shared segments.

Each rank makes two segments: one with its control page and its outgoing FIFOs, and one for window
memory. Segments are anonymous files (``memfd_create``), opened by peers as ``/proc/<pid>/fd/<n>``:
they never have a name that could be left behind, whatever kills the job. ``release`` closes the
descriptors once all peers have mapped them. Pages count only once they are touched, so the window
segment may be as large as the machine's memory; address space is the scarce resource, on hosts with
much memory and many ranks or communicators.

A rank's budget for FIFOs is divided among its peers: memory is linear in the number of ranks of a
host.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import struct
from collections.abc import Mapping
from typing import Any

from miraccl import clock
from miraccl.errors import ProtocolError, SystemFailure
from miraccl.transport import fifo, registry
from miraccl.transport.base import Endpoint, Fifo, FifoPair, Transport, TransportContext
from miraccl.transport.fifo import MAX_SLOT_BYTES, slot_bytes_for
from miraccl.transport.region import (
    KEY_BYTES,
    MappedRegion,
    Region,
    RegionDescriptor,
    Rights,
    StaleRegion,
    copy_memory,
    fence,
)
from miraccl.transport.shared_segment import ShmSegment

CAPABILITIES = registry.SHM.capabilities
CONTROL_BYTES = fifo.PAGE_BYTES
ADDRESS_SPACE_BYTES = 1 << 47
"""Bytes that a process can map on x86-64; aarch64 allows at least as many."""
MAX_COMMUNICATORS = 256
"""Communicators whose windows must fit into the address space of one process."""
MAGIC = 0x6D697261


_HEADER = struct.Struct(f"<{KEY_BYTES}sqq")  # key, generation, bytes
_HEADER_BYTES = fifo.PAGE_BYTES


class ShmRegion(Region):
    """Region in a shared segment, which has its key and generation in a page after the memory.

    ``release`` ends the time in which peers may attach it; ``close`` also frees its pages with the
    last mapping.
    """

    def __init__(self, segment: ShmSegment, nbytes: int) -> None:
        self.segment, self.address, self.nbytes = segment, segment.address, nbytes
        self.key, self._generation = clock.random_bytes(KEY_BYTES), 0
        self._closed = False
        self._publish()

    @classmethod
    def create(cls, label: str, nbytes: int) -> ShmRegion:
        """Make a region of ``nbytes``, rounded up to whole pages. Raises ``SystemFailure``."""
        nbytes = -(-nbytes // fifo.PAGE_BYTES) * fifo.PAGE_BYTES
        return cls(ShmSegment.create(label, nbytes + _HEADER_BYTES), nbytes)

    def _publish(self) -> None:
        header = _HEADER.pack(self.key, self._generation, self.nbytes)
        fifo.memory_at(self.address + self.nbytes, len(header))[:] = header

    def memory(self, offset: int, nbytes: int) -> Any:
        """Return a buffer over part of the region, which keeps it mapped."""
        return self.segment.file.memory(offset, nbytes)

    def remove(self, offset: int, nbytes: int) -> None:
        """Return whole pages to the system; they read as zeros afterwards."""
        self.segment.file.remove(offset, nbytes)

    def resident_bytes(self, offset: int, nbytes: int) -> int:
        """Return the bytes of some whole pages that are in memory."""
        return self.segment.file.resident_bytes(offset, nbytes)

    def descriptor(self, rights: Rights = Rights.READ | Rights.WRITE) -> bytes:
        if self.segment.fd < 0 or self._closed:
            raise StaleRegion("cannot describe a region that is closed to further peers")
        return RegionDescriptor(
            provider=ShmRegions.name,
            key=self.key,
            generation=self._generation,
            nbytes=self.nbytes,
            rights=rights,
            location={"pid": os.getpid(), "fd": self.segment.fd},
        ).encode()

    def revoke(self) -> None:
        self._generation += 1
        self._publish()

    def release(self) -> None:
        """Close the descriptor, so that no further peer can attach the region; idempotent."""
        self.segment.release()

    def close(self) -> None:
        if not self._closed:
            self._closed, self._generation = True, -2
            self._publish()
        self.release()


class ShmRegions:
    """Provider of regions for the processes of one host."""

    name = "shm"

    def register(self, nbytes: int) -> ShmRegion:
        return ShmRegion.create("miraccl-region", nbytes)

    def attach(self, descriptor: bytes) -> MappedRegion:
        parsed = RegionDescriptor.decode(descriptor, self.name)
        try:
            pid, fd = int(parsed.location["pid"]), int(parsed.location["fd"])
        except (KeyError, ValueError) as error:
            raise ProtocolError(f"cannot read a region descriptor: {error!r}") from None
        segment = ShmSegment.open(pid, fd, parsed.nbytes + _HEADER_BYTES)
        header = segment.address + parsed.nbytes

        def read() -> tuple[bytes, int, int]:
            key, generation, nbytes = _HEADER.unpack(fifo.memory_at(header, _HEADER.size))
            return key, generation, nbytes

        key, generation, nbytes = read()
        if key != parsed.key or nbytes != parsed.nbytes:
            raise ProtocolError(f"cannot attach a region of process {pid}: its key is another one")
        if generation != parsed.generation:
            raise StaleRegion("cannot attach a region: it was revoked or freed by its owner")
        return MappedRegion(
            parsed,
            segment.address,
            generation=lambda: read()[1],
            copy=copy_memory,
            flush=fence,
            memory=segment,
        )


def default_window_bytes(nranks: int) -> int:
    """Return the size of a rank's window segment on a host with ``nranks`` ranks.

    The size is that of the machine's memory, of which nothing is used before it is touched, but
    small enough that ``MAX_COMMUNICATORS`` communicators fit into a process's address space, where
    each rank maps the windows of all.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    space = (
        ADDRESS_SPACE_BYTES if limit == resource.RLIM_INFINITY else min(limit, ADDRESS_SPACE_BYTES)
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    pages = min(memory, space // MAX_COMMUNICATORS // nranks) // fifo.PAGE_BYTES
    return max(1, pages) * fifo.PAGE_BYTES


class ShmTransport(Transport):
    """Shared memory between the ranks of a host.

    Args:
        peers: The other local ranks, in any order.
        budget: Bytes of all send slots; 0 for the default.
        window_bytes: Size of the window segment, default ``default_window_bytes``.
        max_slot_bytes: Largest slot; larger for communicators that reach other hosts, where larger
            messages pay.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        peers: Mapping[int, Endpoint],
        *,
        budget: int = 0,
        window_bytes: int | None = None,
        max_slot_bytes: int = MAX_SLOT_BYTES,
    ) -> None:
        self.endpoint = endpoint
        self._order = sorted(peers)
        self.slot_bytes = slot_bytes_for(len(self._order), budget, max_slot_bytes)
        self._fifo_bytes = fifo.fifo_bytes(self.slot_bytes)
        size = CONTROL_BYTES + len(self._order) * self._fifo_bytes
        self.segment = ShmSegment.create(f"miraccl-rank{endpoint.rank}", size)
        try:
            self.window = ShmRegion.create(
                f"miraccl-window{endpoint.rank}",
                window_bytes or default_window_bytes(1 + len(peers)),
            )
        except SystemFailure:
            self.segment.release()
            raise
        self._info: bytes | None = None
        self._probe = ctypes.c_int64(MAGIC ^ os.getpid())

    @property
    def control(self) -> int:
        """Address of this rank's control page."""
        return self.segment.address

    def _fifo_offset(self, source: int, destination: int, order: list[int]) -> int:
        position = [r for r in order if r != source].index(destination)
        return CONTROL_BYTES + position * self._fifo_bytes

    def setup(self) -> bytes:
        if self._info is not None:
            return self._info
        record = {
            "pid": os.getpid(),
            "segment": [self.segment.fd, self.segment.nbytes],
            "window": self.window.descriptor().decode(),
            "slot_bytes": self.slot_bytes,
            "probe": ctypes.addressof(self._probe),
        }
        self._info = json.dumps(record).encode()
        return self._info

    def connect(self, infos: Mapping[int, bytes]) -> dict[int, FifoPair]:
        return {peer: self._connect_peer(peer, _parse(info, peer)) for peer, info in infos.items()}

    def _connect_peer(self, peer: int, record: Mapping[str, Any]) -> FifoPair:
        if record["slot_bytes"] != self.slot_bytes:
            raise ProtocolError(
                f"cannot connect to rank {peer}: its slots have {record['slot_bytes']} bytes, this "
                f"rank's {self.slot_bytes}",
                peer=peer,
            )
        ranks, pid = sorted([*self._order, self.endpoint.rank]), record["pid"]
        segment = ShmSegment.open(pid, *record["segment"])
        window = ShmRegions().attach(record["window"].encode())
        own = self.segment.address + self._fifo_offset(self.endpoint.rank, peer, ranks)
        theirs = segment.address + self._fifo_offset(peer, self.endpoint.rank, ranks)
        return FifoPair(
            send=Fifo.from_address(own, self.slot_bytes, capabilities=CAPABILITIES),
            recv=Fifo.from_address(theirs, self.slot_bytes, capabilities=CAPABILITIES),
            control=segment.address,
            pid=pid,
            window=window.address,
            readable=_can_read(pid, record["probe"]),
            memory=(self.segment, segment, window),
        )

    def release(self) -> None:
        self.segment.release()
        self.window.release()

    def close(self) -> None:
        """Close the descriptors; mappings live as long as the last array or pair that uses them."""
        self.release()


def open_transport(context: TransportContext) -> ShmTransport:
    """Open shared memory for ``context``; see ``registry.TransportSpec``."""
    return ShmTransport(
        context.endpoint,
        context.peers,
        budget=context.budget,
        max_slot_bytes=context.max_slot_bytes,
    )


def _parse(info: bytes, peer: int) -> dict[str, Any]:
    try:
        record = json.loads(info)
        ok = all(isinstance(record[k], int) for k in ("pid", "slot_bytes", "probe"))
        ok = ok and len(record["segment"]) == 2 and isinstance(record["window"], str)
        ok = ok and all(isinstance(v, int) for v in record["segment"])
    except (ValueError, KeyError, TypeError):
        ok = False
    if not ok:
        raise ProtocolError(
            f"cannot connect to rank {peer}: its description of a shared segment is malformed",
            peer=peer,
        )
    return dict(record)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _can_read(pid: int, address: int) -> bool:
    """Return True if the kernel lets this process read the memory of ``pid``.

    The rights are those of ptrace (process_vm_readv(2)); ``address`` holds ``MAGIC ^ pid`` there.
    """
    if pid == os.getpid():
        return True
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is None:
        return False
    value = ctypes.c_int64(0)
    local = _Iovec(ctypes.addressof(value), 8)
    remote = _Iovec(address, 8)
    call.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    call.restype = ctypes.c_ssize_t
    nread = call(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    return bool(nread == 8 and value.value == MAGIC ^ pid)
