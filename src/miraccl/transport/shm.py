"""Ranks of one host: FIFOs, a control page and window memory in segments that all of them have mapped.

Each rank makes two segments: one with its control page and its outgoing FIFOs, and one for window memory.  Segments are anonymous
files (``memfd_create``), opened by peers as ``/proc/<pid>/fd/<n>``: they never have a name that could be left behind, whatever kills
the job.  Once all peers have mapped them, no descriptor is kept.  Pages count only once they are touched, so the window segment may be as
large as the machine; addresses are what could run out, on hosts with much memory and many ranks or communicators.

A rank's budget for FIFOs is shared out among its peers: memory is linear in the number of ranks of a host.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miraccl.errors import ProtocolError, SystemFailure
from miraccl.transport import fifo
from miraccl.transport.base import Endpoint, Fifo, FifoKind, FifoPair, Transport
from miraccl.transport.mapped_file import MappedFile

CONTROL_BYTES = fifo.PAGE_BYTES
DEFAULT_BUDGET = 4 << 20
"""Bytes of all outgoing FIFOs of a rank (NCCL takes 4 MiB per connection)."""
MIN_SLOT_BYTES, MAX_SLOT_BYTES = 2 * fifo.PAGE_BYTES, 64 << 10
ADDRESS_SPACE_BYTES = 1 << 47
"""Bytes that a process can map on x86-64; on aarch64 not fewer."""
MAX_COMMUNICATORS = 256
MAGIC = 0x6D697261


def slot_bytes_for(npeers: int, budget: int = 0, max_slot_bytes: int = MAX_SLOT_BYTES) -> int:
    """Slot size with ``npeers`` peers that share ``budget`` bytes: a power of two, the same on all ranks that count the same peers."""
    share = (budget or DEFAULT_BUDGET) // max(1, npeers) // fifo.NSLOTS
    size = MIN_SLOT_BYTES
    while size * 2 <= min(share, max_slot_bytes):
        size *= 2
    return size


@dataclass(kw_only=True)
class ShmSegment:
    """A mapped segment, and the descriptor it was made with (-1 for a peer's, and once it is released)."""

    file: MappedFile
    fd: int = -1

    @property
    def address(self) -> int:
        return self.file.address

    @property
    def nbytes(self) -> int:
        return self.file.nbytes

    @classmethod
    def create(cls, label: str, nbytes: int) -> ShmSegment:
        fd = -1
        try:
            fd = os.memfd_create(label, os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
            return cls(file=MappedFile(fd, nbytes), fd=fd)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise SystemFailure(
                f"cannot make a shared segment of {nbytes} bytes: {error.strerror}"
            ) from error

    @classmethod
    def open(cls, pid: int, fd: int, nbytes: int) -> ShmSegment:
        try:
            handle = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            hint = (
                "ranks that do not see each other's processes can be given different MIRACCL_HOSTID"
            )
            raise SystemFailure(
                f"cannot open the segment of process {pid}: {error.strerror}", hint=hint
            ) from error
        try:
            if os.fstat(handle).st_size != nbytes:
                raise ProtocolError(f"the segment of process {pid} has another size than it said")
            return cls(file=MappedFile(handle, nbytes))
        except OSError as error:
            raise SystemFailure(
                f"cannot map the segment of process {pid}: {error.strerror}"
            ) from error
        finally:
            os.close(handle)

    def release(self) -> None:
        """Close the descriptor: nobody else can map the segment any more. May be called twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def default_window_bytes(nranks: int) -> int:
    """Address space for the window memory of one of ``nranks`` ranks of a host, each of which maps all of them: the machine's memory, none
    of which is taken before it is used, but no more than leaves addresses for ``COMMUNICATORS`` communicators."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    space = (
        ADDRESS_SPACE_BYTES if limit == resource.RLIM_INFINITY else min(limit, ADDRESS_SPACE_BYTES)
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (
        max(1, min(memory, space // MAX_COMMUNICATORS // nranks) // fifo.PAGE_BYTES)
        * fifo.PAGE_BYTES
    )


class ShmTransport(Transport):
    """Shared memory between the ranks of a host. ``peers`` are the other local ranks, in any order.

    ``largest_slot`` in bytes is for communicators that reach other hosts too, where larger pieces pay.
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
            self.window = ShmSegment.create(
                f"miraccl-window{endpoint.rank}",
                window_bytes or default_window_bytes(1 + len(peers)),
            )
        except SystemFailure:
            self.segment.release()
            raise
        self._probe = ctypes.c_int64(MAGIC ^ os.getpid())
        self.peers: dict[int, ShmSegment] = {}
        self.windows: dict[int, ShmSegment] = {}
        self.pids: dict[int, int] = {}
        self.readable: set[int] = set()

    @staticmethod
    def can_connect(a: Endpoint, b: Endpoint) -> bool:
        return a.hostid == b.hostid

    def _fifo_offset(self, source: int, destination: int, order: list[int]) -> int:
        return (
            CONTROL_BYTES + [r for r in order if r != source].index(destination) * self._fifo_bytes
        )

    def setup(self) -> bytes:
        record = {
            "pid": os.getpid(),
            "segment": [self.segment.fd, self.segment.nbytes],
            "window": [self.window.fd, self.window.nbytes],
            "slot_bytes": self.slot_bytes,
            "probe": ctypes.addressof(self._probe),
        }
        return json.dumps(record).encode()

    def connect(self, infos: Mapping[int, bytes]) -> dict[int, FifoPair]:
        everyone = sorted([*self._order, self.endpoint.rank])
        pairs: dict[int, FifoPair] = {}
        for peer, info in infos.items():
            record = _parse(info, peer)
            if record["slot_bytes"] != self.slot_bytes:
                raise ProtocolError(
                    f"slots are {record['slot_bytes']} bytes there and {self.slot_bytes} here",
                    peer=peer,
                )
            pid = record["pid"]
            self.pids[peer] = pid
            self.peers[peer] = segment = ShmSegment.open(pid, *record["segment"])
            self.windows[peer] = ShmSegment.open(pid, *record["window"])
            if _can_read(pid, record["probe"]):
                self.readable.add(peer)
            mine = self.segment.address + self._fifo_offset(self.endpoint.rank, peer, everyone)
            theirs = segment.address + self._fifo_offset(peer, self.endpoint.rank, everyone)
            pairs[peer] = FifoPair(
                send=Fifo.from_address(mine, self.slot_bytes, kind=FifoKind.SHM),
                recv=Fifo.from_address(theirs, self.slot_bytes, kind=FifoKind.SHM),
            )
        return pairs

    @property
    def control(self) -> int:
        """Address of this rank's control page."""
        return self.segment.address

    def release(self) -> None:
        """All peers have connected: the descriptors have done their work."""
        self.segment.release()
        self.window.release()

    def close(self) -> None:
        """Mappings go with the last array that lies in them."""
        self.release()


def _parse(info: bytes, peer: int) -> dict[str, Any]:
    try:
        record = json.loads(info)
        ok = all(isinstance(record[k], int) for k in ("pid", "slot_bytes", "probe"))
        ok = ok and all(
            len(record[k]) == 2 and all(isinstance(v, int) for v in record[k])
            for k in ("segment", "window")
        )
    except (ValueError, KeyError, TypeError):
        ok = False
    if not ok:
        raise ProtocolError("the description of a shared segment is malformed", peer=peer)
    return dict(record)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _can_read(pid: int, address: int) -> bool:
    """Whether the kernel lets this process read ``pid``'s memory (ptrace rights, see process_vm_readv(2))."""
    if pid == os.getpid():
        return True
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is None:
        return False
    value = ctypes.c_int64(0)
    here = _Iovec(ctypes.addressof(value), 8)
    there = _Iovec(address, 8)
    call.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    call.restype = ctypes.c_ssize_t
    return (
        call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == 8
        and value.value == MAGIC ^ pid
    )
