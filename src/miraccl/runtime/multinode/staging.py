"""Staging of GPU data through pinned host memory and the CPU communicator, segment by segment.

For a segment the stream gets: copies down to its slot and a write of the job's number to the slot's
flag; after the next segments have been copied down, a wait for the answer and copies up. In between
a staging thread (``proxy.staging``) runs a collective of its CPU communicator on the slot. The
calling thread never waits, and nothing is allocated once a slot is large enough.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from miraccl.errors import MiracclError
from miraccl.executor.cuda.gpu import Gpu
from miraccl.proxy import staging
from miraccl.proxy.kernels import staging_layout
from miraccl.runtime.multinode.segments import StagedSegment
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import DType

STAGING_THREADS = 2  # each with CPU communicators of its own
NSLOTS = 2 * STAGING_THREADS  # a thread's next segment is copied while one is on the network
PAGE_BYTES = 4096
FLAG_BYTES = PAGE_BYTES


class Slots(Protocol):
    """Memory for ``NSLOTS`` segments of ``nbytes`` each, at ``address``."""

    nbytes: int
    address: int

    def copy_down(self, slot: int, device: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy of GPU memory to an address in a slot."""

    def copy_up(self, device: int, slot: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from an address in a slot."""

    def close(self) -> None: ...


class PinnedSlots:
    """Pinned memory for ``NSLOTS`` segments of ``nbytes`` each.

    It consists of ordinary registered pages, so that sockets, cross-memory attach and GPUs can use
    it.
    """

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self.nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self._gpu = gpu
        self._map = mmap.mmap(-1, NSLOTS * self.nbytes)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.on_gpu = gpu.pin(self.address, NSLOTS * self.nbytes)

    def view(self, slot: int, offset: int, count: int, dtype: DType) -> np.ndarray:
        """Return ``count`` elements at byte ``offset`` of a slot."""
        begin = slot * self.nbytes + offset
        return self.bytes[begin : begin + count * dtype.itemsize].view(NUMPY_DTYPE[dtype])

    def copy_down(self, slot: int, device: int, nbytes: int, stream: int) -> None:
        self._gpu.copy_to_host(slot, device, nbytes, stream)

    def copy_up(self, device: int, slot: int, nbytes: int, stream: int) -> None:
        self._gpu.copy_from_host(device, slot, nbytes, stream)

    def close(self) -> None:
        """Unregister the memory, which is freed with the last array in it. May be called twice."""
        on_gpu, self.on_gpu = self.on_gpu, 0
        if on_gpu:
            self._gpu.unpin(self.address)


class PreparedSegment(Protocol):
    """Checked and planned operation (``runtime.persistent``); a call runs it."""

    def __call__(self) -> Any: ...
    def unlocked(self) -> tuple[int, int, int] | None: ...
    def check_result(self, code: int) -> None: ...


class SegmentNetwork(Protocol):
    """Network part of a job's segments; ``number`` is the segment's."""

    def run(self, segment: StagedSegment, number: int, slot: int) -> None: ...

    def prepare(self, segment: StagedSegment, number: int, slot: int) -> PreparedSegment | None:
        """Return an operation that the staging loop can start without Python, or None."""


class StagedJob:
    """Segmented operation (``proxy.staging.Job``)."""

    def __init__(
        self,
        segments: Sequence[StagedSegment],
        slots: Slots,
        network: SegmentNetwork,
        captured: bool,
        stride: int,
    ) -> None:
        self.segments, self.slots, self.captured, self.stride = (
            tuple(segments),
            slots,
            captured,
            stride,
        )
        self.nsegments = len(self.segments)
        self.segment_bytes = max(
            (
                copy.host + copy.nbytes
                for segment in self.segments
                for copy in (*segment.down, *segment.up)
            ),
            default=0,
        )
        self.number = 0
        self.announced: dict[int, int] = {}  # thread -> number of its last announcement
        self.graphs = 0  # graphs that bring it again
        self.call_text = ""  # application's call, if its parts have other counts
        self.concurrent = self.before = self.after = (
            False  # kernels of the node run concurrently, before or after each segment
        )
        self._network = network
        self._prepared = [
            network.prepare(segment, number, slot_of(number, stride))
            for number, segment in enumerate(self.segments)
        ]
        calls = [prepared and prepared.unlocked() for prepared in self._prepared]
        self._calls = np.array([call or (0, 0, 0) for call in calls], np.int64)
        assert self._calls.nbytes == staging_layout.CALL_BYTES * self.nsegments
        self.calls = int(self._calls.ctypes.data) if any(calls) else 0

    def blocks_kernels(self, segment: int) -> bool:
        """Return True if no kernel of the node runs before a segment is answered."""
        return not self.concurrent and not self.before and (segment == 0 or not self.after)

    def prepared(self, segment: int) -> PreparedSegment | None:
        """Return the operation that the staging loop starts for a segment, if any."""
        return self._prepared[segment]

    def run(self, segment: int, slot: int) -> None:
        with self._name_errors():
            self._network.run(self.segments[segment], segment, slot)

    def explain(self, segment: int, code: int) -> None:
        prepared = self._prepared[segment]
        assert prepared is not None, "only prepared operations return codes"
        with self._name_errors():
            prepared.check_result(code)

    @contextlib.contextmanager
    def _name_errors(self) -> Iterator[None]:
        """Add the application's call to errors of a part of it."""
        try:
            yield
        except MiracclError as error:
            if self.call_text and not (error.op or "").endswith(self.call_text):
                error.op = f"{error.op}, a part of {self.call_text}" if error.op else self.call_text
            raise


def slot_of(segment: int, stride: int) -> int:
    return staging.slot_of(segment, stride, NSLOTS, STAGING_THREADS)


Hook = Callable[[int, int], None]
"""``hook(segment, slot)`` enqueues more work in the same stream."""


class Staging:
    """Slots, flags and staging threads of one communicator."""

    def __init__(
        self, gpu: Gpu, slot_bytes: int, *, on_fault: Callable[[Exception], None], name: str
    ) -> None:
        self.gpu = gpu
        self.slots = PinnedSlots(gpu, slot_bytes)
        self._large_slots: list[PinnedSlots] = []
        self._words, flags, self._flags_on_gpu = gpu.host_words(FLAG_BYTES)
        self._flags = flags
        self._recorded: list[StagedJob] | None = None
        self._last_concurrent: dict[
            int, int
        ] = {}  # thread -> announcement of the last job with concurrent kernels
        self._captured_concurrent = False
        self.enqueuing = (
            False  # inside a call, whose kernels may wait before its jobs are announced
        )
        self.proxies = [
            staging.StagingThread(
                flags, NSLOTS, on_fault=on_fault, index=thread, nthreads=STAGING_THREADS
            )
            for thread in range(STAGING_THREADS)
        ]
        for thread, proxy in enumerate(self.proxies):
            proxy.start(f"{name}-{thread}")

    def slots_for(self, nbytes: int) -> PinnedSlots:
        """Return slots of at least ``nbytes``; larger ones than usual are created once and kept."""
        for slots in (self.slots, *self._large_slots):
            if slots.nbytes >= nbytes:
                return slots
        with self.gpu.relaxed_capture():
            self._large_slots.append(PinnedSlots(self.gpu, 1 << (nbytes - 1).bit_length()))
        return self._large_slots[-1]

    def job(
        self,
        segments: Sequence[StagedSegment],
        slots: Slots,
        network: SegmentNetwork,
        captured: bool,
        stride: int = 1,
    ) -> StagedJob:
        """Create a job; ``stride``: 1 for one staging thread, ``STAGING_THREADS`` for all."""
        job = StagedJob(segments, slots, network, captured, stride)
        for proxy in self.proxies:
            job.number = proxy.register(job)
        return job

    @property
    def between_jobs(self) -> bool:
        """True if no staging thread runs a job."""
        return all(proxy.between_jobs for proxy in self.proxies)

    @property
    def idle(self) -> bool:
        """True if the staging threads have done all enqueued work; a graph may bring more."""
        return all(proxy.idle for proxy in self.proxies)

    def current_job(self) -> tuple[StagedJob, int] | None:
        """Return the job of the first staging thread and its segment, or None."""
        found = self.proxies[0].current()
        return (
            (found[0], found[1]) if found is not None and isinstance(found[0], StagedJob) else None
        )

    def waits_for_kernels(self) -> bool:
        """Return True if the first thread is idle until a blocked kernel of the node continues."""
        if self.enqueuing:
            return False
        concurrent = self._captured_concurrent or not all(
            self.proxies[thread].has_finished(count)
            for thread, count in list(self._last_concurrent.items())
        )
        return not concurrent and self.proxies[0].current() is None

    def drain(self) -> None:
        """Answer all segments without running them, so that streams continue."""
        for proxy in self.proxies:
            proxy.drain()

    def enqueue(
        self,
        job: StagedJob,
        buffers: Sequence[int],
        stream: int,
        *,
        participates: bool = True,
        before: Hook | None = None,
        after: Hook | None = None,
    ) -> None:
        """Enqueue all segments of a job.

        ``buffers``: addresses that the copies' offsets refer to. ``before`` and ``after`` enqueue
        GPU work on a segment before it is copied down and after it has been copied up. A rank that
        does not participate only calls these, in the order of those that do.
        """
        depth = NSLOTS * job.stride // STAGING_THREADS - 1
        job.before |= before is not None
        job.after |= after is not None
        self._captured_concurrent |= job.concurrent and job.captured
        if participates and not job.captured:
            self.announce(job) if self._recorded is None else self._record(job)
        for number in range(job.nsegments + depth):
            if number < job.nsegments:
                if before is not None:
                    before(number, slot_of(number, job.stride))
                if participates:
                    self._copy_down(job, number, buffers, stream)
            if number >= depth:
                if participates:
                    self._copy_up(job, number - depth, buffers, stream)
                if after is not None:
                    after(number - depth, slot_of(number - depth, job.stride))

    def announce(self, job: StagedJob) -> None:
        """Announce a job to the staging threads, which then poll for its segments."""
        for thread, proxy in enumerate(self.proxies):
            if proxy.participates(job):
                job.announced[thread] = proxy.announce()
                if job.concurrent:
                    self._last_concurrent[thread] = job.announced[thread]

    def evict(self, job: StagedJob) -> bool:
        """Drop a job that has ended and that no graph can bring again; return True if dropped."""
        if (
            job.captured
            or job.graphs
            or not all(
                self.proxies[thread].has_finished(count) for thread, count in job.announced.items()
            )
        ):
            return False
        for proxy in self.proxies:
            proxy.unregister(job.number)
        return True

    def _record(self, job: StagedJob) -> None:
        assert self._recorded is not None
        self._recorded.append(job)
        job.graphs += 1

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[StagedJob]]:
        """Collect the jobs enqueued in the block.

        The caller announces them before each launch of their graph, until it is destroyed.
        """
        jobs: list[StagedJob] = []
        self._recorded = jobs
        try:
            yield jobs
        finally:
            self._recorded = None

    def _copy_down(self, job: StagedJob, number: int, buffers: Sequence[int], stream: int) -> None:
        gpu, slot = self.gpu, slot_of(number, job.stride)
        base = job.slots.address + slot * job.slots.nbytes
        for copy in job.segments[number].down:
            job.slots.copy_down(
                base + copy.host, buffers[copy.buffer] + copy.device, copy.nbytes, stream
            )
        gpu.write_word(
            self._flags_on_gpu + slot * staging_layout.SLOT_STRIDE + staging_layout.DONE_OFFSET,
            0,
            stream,
        )
        gpu.write_word(
            self._flags_on_gpu + slot * staging_layout.SLOT_STRIDE + staging_layout.READY_OFFSET,
            job.number,
            stream,
        )

    def _copy_up(self, job: StagedJob, number: int, buffers: Sequence[int], stream: int) -> None:
        gpu, slot = self.gpu, slot_of(number, job.stride)
        gpu.wait_word(
            self._flags_on_gpu + slot * staging_layout.SLOT_STRIDE + staging_layout.DONE_OFFSET,
            1,
            stream,
        )
        base = job.slots.address + slot * job.slots.nbytes
        for copy in job.segments[number].up:
            job.slots.copy_up(
                buffers[copy.buffer] + copy.device, base + copy.host, copy.nbytes, stream
            )

    def bytes_pinned(self) -> int:
        return FLAG_BYTES + sum(NSLOTS * slots.nbytes for slots in (self.slots, *self._large_slots))

    def close(self) -> bool:
        """Stop the threads and free the memory, after every stream has passed the enqueued work.

        May be called twice. Returns False if a thread does not end: its memory stays allocated.
        """
        ended = [proxy.close() for proxy in self.proxies]
        if not all(ended):
            return False
        for slots in (self.slots, *self._large_slots):
            slots.close()
        flags, self._flags = self._flags, 0
        if flags:
            self.gpu.free_host(flags)
        return True
