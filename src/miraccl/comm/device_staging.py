"""GPU data on their way through pinned host memory and the CPU communicator, piece by piece, in stream order.

What is enqueued for a piece: copies down to its slot, the number of the job into the slot's flag; then, after the next pieces have been
sent down, a wait for the answer and copies up.  The proxy's thread (``proxy.staging``) runs a collective of the CPU communicator on the
slot in between.  The calling thread never waits, and nothing is allocated once a slot is large enough.

``cut`` decides from counts that all ranks know into which pieces an operation is cut; it has no GPU and no communicator in it.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from miraccl.executor.cuda.driver import Gpu
from miraccl.proxy import staging
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import Collective, DType

LANES = 2  # proxies, each with CPU communicators of its own
NSLOTS = 2 * LANES  # while a lane's piece is on the network, its next one is copied
PAGE_BYTES = 4096
FLAG_BYTES = PAGE_BYTES
ALIGN = 64  # bytes, of the parts of a slot


@dataclass(frozen=True, slots=True)
class Copy:
    """``nbytes`` between byte ``device`` of the user's buffer number ``buffer`` and byte ``host`` of the slot."""

    buffer: int
    device: int
    host: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece: copies, and where input and output lie in the slot: byte and elements of each block."""

    down: tuple[Copy, ...] = ()
    up: tuple[Copy, ...] = ()
    source: int = 0
    source_counts: tuple[int, ...] = ()
    target: int = 0
    target_counts: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """An operation as far as it decides about pieces. ``sends[j]`` and ``receives[j]`` are the elements of block j of this rank's input and
    output, ``rank`` the caller's number among ``nranks``.  ``counts`` are those of an uneven collective, as all ranks know them; ``uneven``
    collectives run as such in every piece, also where its blocks are equal.  ``source_places`` and ``places`` are the elements of input and
    output where their blocks begin; empty is one after another."""

    collective: Collective
    itemsize: int
    rank: int
    nranks: int
    root: int = 0
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    counts: tuple[int, ...] = ()
    uneven: bool = False
    source_places: tuple[int, ...] = ()
    places: tuple[int, ...] = ()

    @classmethod
    def even(cls, collective: Collective, itemsize: int, rank: int, nranks: int, root: int, count: int) -> Shape:
        """With blocks of ``count`` elements, as ``schedule.ir`` counts them."""
        one, each = (count,), (count,) * nranks
        sends, receives = {
            Collective.ALL_GATHER: (one, each),
            Collective.REDUCE_SCATTER: (each, one),
            Collective.ALL_TO_ALL: (each, each),
            Collective.GATHER: (one, each if rank == root else ()),
            Collective.SCATTER: (each if rank == root else (), one),
        }.get(collective, (one, one))
        return cls(collective=collective, itemsize=itemsize, rank=rank, nranks=nranks, root=root, sends=sends, receives=receives)


_WHOLE = (Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE)


def elements_per_piece(collective: Collective, itemsize: int, nranks: int, slot_bytes: int) -> int:
    """Elements of a block in a piece, the same on all ranks: a block, one from every rank, or one to and one from each fill a slot."""
    blocks = 1 if collective in _WHOLE else 2 * nranks if collective is Collective.ALL_TO_ALL else nranks
    room = (slot_bytes - ALIGN) // (blocks * itemsize)
    return max(1, room // ALIGN * ALIGN or room)


def cut(shape: Shape, slot_bytes: int) -> tuple[Piece, ...]:
    """The pieces of an operation in order; none where there is nothing to move."""
    most = elements_per_piece(shape.collective, shape.itemsize, shape.nranks, slot_bytes)
    count = max((*shape.sends, *shape.receives, *shape.counts), default=0)
    return tuple(_piece(shape, most, number) for number in range(-(-count // most)))


def _piece(shape: Shape, most: int, number: int) -> Piece:
    """Input and output of one piece share their place where the collective has an in-place form."""
    begin, size = number * most, shape.itemsize

    def part(counts: Sequence[int]) -> tuple[int, ...]:
        return tuple(min(most, max(0, n - begin)) for n in counts)

    sends, receives = part(shape.sends), part(shape.receives)
    source = target = 0
    collective, rank = shape.collective, shape.rank
    if collective is Collective.ALL_TO_ALL:
        target = -(-sum(sends) * size // ALIGN) * ALIGN
    elif collective in (Collective.ALL_GATHER, Collective.GATHER) and len(receives) > 1:
        source = sum(receives[:rank]) * size
    elif collective in (Collective.REDUCE_SCATTER, Collective.SCATTER) and len(sends) > 1:
        target = sum(sends[:rank]) * size
    chief = rank == shape.root
    gives = chief or collective not in (Collective.BROADCAST, Collective.SCATTER)
    gets = (chief or collective not in (Collective.REDUCE, Collective.GATHER)) and not (chief and collective is Collective.BROADCAST)
    return Piece(
        down=_copies(0, shape.source_places or _one_after_another(shape.sends), sends, begin, source, size) if gives else (),
        up=_copies(1, shape.places or _one_after_another(shape.receives), receives, begin, target, size) if gets else (),
        source=source,
        source_counts=sends,
        target=target,
        target_counts=receives,
        counts=part(shape.counts),
    )


def _one_after_another(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(counts, initial=0))[:-1]


def _copies(buffer: int, places: Sequence[int], part: Sequence[int], begin: int, host: int, size: int) -> tuple[Copy, ...]:
    """Neighbours in both places are one copy."""
    copies: list[Copy] = []
    for place, count in zip(places, part, strict=True):
        if count:
            at, nbytes = (place + begin) * size, count * size
            last = copies[-1] if copies else None
            if last is not None and last.device + last.nbytes == at and last.host + last.nbytes == host:
                copies[-1] = Copy(buffer, last.device, last.host, last.nbytes + nbytes)
            else:
                copies.append(Copy(buffer, at, host, nbytes))
        host += count * size
    return tuple(copies)


class CpuCommunicator(Protocol):
    """What staged operations need of a CPU communicator (``comm.communicator``)."""

    rank: int
    nranks: int

    def all_reduce(self, x: Any, out: Any = None, op: Any = ...) -> Any: ...
    def all_gather(self, x: Any, out: Any = None) -> Any: ...
    def reduce_scatter(self, x: Any, out: Any = None, op: Any = ...) -> Any: ...
    def broadcast(self, x: Any, root: int = 0) -> Any: ...
    def reduce(self, x: Any, root: int = 0, out: Any = None, op: Any = ...) -> Any: ...
    def all_to_all(self, x: Any, out: Any = None) -> Any: ...
    def all_gather_v(self, x: Any, counts: Sequence[int], out: Any = None) -> Any: ...
    def reduce_scatter_v(self, x: Any, counts: Sequence[int], out: Any = None, op: Any = ...) -> Any: ...
    def all_to_all_v(self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int], out: Any = None) -> Any: ...
    def gather(self, x: Any, root: int = 0, out: Any = None) -> Any: ...
    def scatter(self, x: Any = None, root: int = 0, out: Any = None) -> Any: ...
    def gather_v(self, x: Any, counts: Sequence[int], root: int = 0, out: Any = None) -> Any: ...
    def scatter_v(self, x: Any, counts: Sequence[int], root: int = 0, out: Any = None) -> Any: ...
    def send(self, x: Any, dst: int, *, async_op: bool = False) -> Any: ...
    def recv(self, x: Any, src: int, *, async_op: bool = False) -> Any: ...
    def barrier(self) -> Any: ...
    def abort(self, reason: str = ...) -> None: ...
    def finalize(self) -> None: ...


class Slots:
    """Pinned memory for ``NSLOTS`` pieces of ``nbytes`` each: ordinary pages that are registered, so that sockets, the kernel's copies
    between processes and GPUs all take them."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self.nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self._gpu = gpu
        self._map = mmap.mmap(-1, NSLOTS * self.nbytes)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.on_gpu = gpu.pin(self.address, NSLOTS * self.nbytes)

    def view(self, slot: int, offset: int, count: int, dtype: DType) -> np.ndarray:
        """``count`` elements that lie ``offset`` bytes into a slot."""
        begin = slot * self.nbytes + offset
        return self.bytes[begin : begin + count * dtype.itemsize].view(NUMPY_DTYPE[dtype])

    def close(self) -> None:
        """May be called twice. The memory goes with the last array that lies in it."""
        on_gpu, self.on_gpu = self.on_gpu, 0
        if on_gpu:
            self._gpu.unpin(self.address)


RunPiece = Callable[[Piece, int, int], None]
"""``run(piece, number, slot)``: the network's part of a piece."""


class StagedJob:
    """An operation that is cut into pieces (``proxy.staging.Job``)."""

    def __init__(self, pieces: Sequence[Piece], slots: Slots, run: RunPiece, captured: bool, stride: int) -> None:
        self.pieces, self.slots, self.captured, self.stride = tuple(pieces), slots, captured, stride
        self.npieces = len(self.pieces)
        self.number = 0
        self._run = run

    def run(self, piece: int, slot: int) -> None:
        self._run(self.pieces[piece], piece, slot)


def slot_of(piece: int, stride: int) -> int:
    return staging.slot_of(piece, stride, NSLOTS, LANES)


Hook = Callable[[int, int], None]
"""``hook(piece, slot)`` enqueues more in the same stream."""


class Staging:
    """Slots, flags and the proxies of one communicator."""

    def __init__(self, gpu: Gpu, slot_bytes: int, *, on_fault: Callable[[Exception], None], name: str) -> None:
        self.gpu = gpu
        self.slots = Slots(gpu, slot_bytes)
        self._larger: list[Slots] = []
        self._words, flags, self._flags_on_gpu = gpu.host_words(FLAG_BYTES)
        self._flags = flags
        self.proxies = [staging.StagingProxy(flags, NSLOTS, on_fault=on_fault, lane=lane, lanes=LANES) for lane in range(LANES)]
        for lane, proxy in enumerate(self.proxies):
            proxy.start(f"{name}-{lane}")

    def slots_for(self, nbytes: int) -> Slots:
        """Slots of at least ``nbytes``; larger ones than usual are made once and kept."""
        for slots in (self.slots, *self._larger):
            if slots.nbytes >= nbytes:
                return slots
        with self.gpu.outside_of_capture():
            self._larger.append(Slots(self.gpu, 1 << (nbytes - 1).bit_length()))
        return self._larger[-1]

    def job(self, pieces: Sequence[Piece], slots: Slots, run: RunPiece, captured: bool, stride: int = 1) -> StagedJob:
        """``stride`` is 1 for a job of one lane, ``LANES`` for one of all."""
        job = StagedJob(pieces, slots, run, captured, stride)
        for proxy in self.proxies:
            job.number = proxy.register(job)
        return job

    def drain(self) -> None:
        """Run nothing any more, but let streams go on."""
        for proxy in self.proxies:
            proxy.drain()

    def enqueue(
        self,
        job: StagedJob,
        buffers: Sequence[int],
        stream: int,
        *,
        takes_part: bool = True,
        before: Hook | None = None,
        after: Hook | None = None,
    ) -> None:
        """Enqueue all pieces. ``buffers`` are the addresses that copies count from; ``before`` and ``after`` enqueue what the GPU does with
        a piece before it goes down and after it has come up.  Who does not take part only calls these, in the order of those that do."""
        ahead = NSLOTS * job.stride // LANES - 1
        if takes_part and not job.captured:
            for proxy in self.proxies:
                if proxy.takes_part(job):
                    proxy.announce()
        for number in range(job.npieces + ahead):
            if number < job.npieces:
                if before is not None:
                    before(number, slot_of(number, job.stride))
                if takes_part:
                    self._send_down(job, number, buffers, stream)
            if number >= ahead:
                if takes_part:
                    self._bring_up(job, number - ahead, buffers, stream)
                if after is not None:
                    after(number - ahead, slot_of(number - ahead, job.stride))

    def _send_down(self, job: StagedJob, number: int, buffers: Sequence[int], stream: int) -> None:
        gpu, slot = self.gpu, slot_of(number, job.stride)
        base = job.slots.address + slot * job.slots.nbytes
        for copy in job.pieces[number].down:
            gpu.copy_to_host(base + copy.host, buffers[copy.buffer] + copy.device, copy.nbytes, stream)
        gpu.write_word(self._flags_on_gpu + slot * staging.SLOT_STRIDE + staging.DONE_OFFSET, 0, stream)
        gpu.write_word(self._flags_on_gpu + slot * staging.SLOT_STRIDE + staging.READY_OFFSET, job.number, stream)

    def _bring_up(self, job: StagedJob, number: int, buffers: Sequence[int], stream: int) -> None:
        gpu, slot = self.gpu, slot_of(number, job.stride)
        gpu.wait_word(self._flags_on_gpu + slot * staging.SLOT_STRIDE + staging.DONE_OFFSET, 1, stream)
        base = job.slots.address + slot * job.slots.nbytes
        for copy in job.pieces[number].up:
            gpu.copy_from_host(buffers[copy.buffer] + copy.device, base + copy.host, copy.nbytes, stream)

    def bytes_pinned(self) -> int:
        return FLAG_BYTES + sum(NSLOTS * slots.nbytes for slots in (self.slots, *self._larger))

    def close(self) -> None:
        """After every stream has passed what was enqueued; may be called twice."""
        for proxy in self.proxies:
            proxy.close()
        for slots in (self.slots, *self._larger):
            slots.close()
        flags, self._flags = self._flags, 0
        if flags:
            self.gpu.free_host(flags)


# ---- the network's part


def collective_on(cpus: Sequence[CpuCommunicator], shape: Shape, dtype: DType, op: Any, slots: Slots) -> RunPiece:
    """Run pieces of ``shape`` on CPU communicators of ``shape.nranks`` ranks, one for each lane that the job takes."""

    def run(piece: Piece, number: int, slot: int) -> None:
        x = slots.view(slot, piece.source, sum(piece.source_counts), dtype)
        out = slots.view(slot, piece.target, sum(piece.target_counts), dtype)
        _call(cpus[number % len(cpus)], shape, piece, x, out, op)

    return run


def _call(cpu: CpuCommunicator, shape: Shape, piece: Piece, x: Any, out: Any, op: Any) -> None:
    root, chief = shape.root, shape.rank == shape.root
    match shape.collective, shape.uneven:
        case Collective.ALL_REDUCE, _:
            cpu.all_reduce(x, None, op)
        case Collective.BROADCAST, _:
            cpu.broadcast(x, root)
        case Collective.REDUCE, _:
            cpu.reduce(x, root, None, op)
        case Collective.ALL_GATHER, False:
            cpu.all_gather(x, out)
        case Collective.ALL_GATHER, True:
            cpu.all_gather_v(x, piece.counts, out)
        case Collective.REDUCE_SCATTER, False:
            cpu.reduce_scatter(x, out, op)
        case Collective.REDUCE_SCATTER, True:
            cpu.reduce_scatter_v(x, piece.counts, out, op)
        case Collective.ALL_TO_ALL, False:
            cpu.all_to_all(x, out)
        case Collective.ALL_TO_ALL, True:
            cpu.all_to_all_v(x, piece.source_counts, piece.target_counts, out)
        case Collective.GATHER, False:
            cpu.gather(x, root, out if chief else None)
        case Collective.GATHER, True:
            cpu.gather_v(x, piece.counts, root, out if chief else None)
        case Collective.SCATTER, False:
            cpu.scatter(x if chief else None, root, out)
        case Collective.SCATTER, True:
            cpu.scatter_v(x if chief else None, piece.counts, root, out)
        case _:
            raise ValueError(f"{shape.collective.label} is not cut into pieces")
