"""Threads that move segments of GPU data between a CUDA stream and the network.

A stream copies a segment to pinned memory and writes the number of its job to the slot's word
``ready``. A staging thread sees it, runs the segment, and stores 1 to ``done``, for which the
stream waits. The stream itself clears ``done`` before it writes ``ready``: nothing here counts
launches, so a captured CUDA graph may be replayed any number of times.

There may be several threads, each with slots of its own: thread t has slots t, t + threads, ... The
segments of a job arrive in order, and so do jobs, each starting at a thread's first slot: a thread
always has exactly one word to poll. A job of ``stride`` 1 uses thread 0 only; one whose stride is
the number of threads distributes its segments over all of them. After a fault nothing is run any
longer, but every segment is still completed, so that no stream waits forever.

The loop is compiled and runs without the GIL (``kernels.staging``); segments with a compiled call
in ``calls`` are run there as well, the others by ``StagingJob.run`` in Python. It polls without
pause for ``SPIN_NS`` after the last segment, then ever less often; with nothing announced and
nothing captured it sleeps until ``announce``.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable
from typing import Protocol

import numpy as np

from miraccl import clock, native, trace
from miraccl.native import atomics
from miraccl.proxy.kernels import staging_layout

log = trace.logger("proxy")

KERNEL = "miraccl.proxy.kernels.staging"
FIRST_JOBS = 64
CLOSE_WAIT_S, EXIT_WAIT_S = 10.0, 0.2


class StagingJob(Protocol):
    """Work to run when a stream has a segment ready.

    Attributes:
        captured: True if a CUDA graph may bring its segments at any time.
        calls: Address of ``nsegments`` records ``staging_layout.CALL_*`` that live as long as the
            job; 0 if Python runs all segments.
    """

    nsegments: int
    stride: int
    captured: bool
    calls: int

    def run(self, segment: int, slot: int) -> None: ...
    def explain(self, segment: int, code: int) -> None: ...


def slot_of(segment: int, stride: int, nslots: int, nthreads: int) -> int:
    """Return the slot of a segment: the segments of one thread cycle through its slots."""
    return segment % nslots if stride == nthreads else segment * nthreads % nslots


class StagingThread:
    """One staging thread. ``start`` starts it; without it ``step`` may be called instead.

    Args:
        flags: Address of the words of all slots, ``nslots`` times ``SLOT_STRIDE`` bytes of zeros,
            shared by all threads.
        on_fault: Called once, on the thread, with the error of the first segment that failed;
            nothing is run afterwards.
        index, nthreads: Number of this thread, and of all threads.
    """

    def __init__(
        self,
        flags: int,
        nslots: int,
        *,
        on_fault: Callable[[Exception], None],
        index: int = 0,
        nthreads: int = 1,
    ) -> None:
        assert nslots % nthreads == 0
        self._on_fault = on_fault
        self.index, self.nthreads = index, nthreads
        library = native.library(KERNEL)
        self._serve, self._pause = (
            native.builtin(name, library.address(native.PREFIX + name))
            for name in ("serve", "pause_ns")
        )
        self._store, self._futex = atomics.bound("store_word"), atomics.bound("ring_futex")
        self._words = np.zeros(staging_layout.THREAD_BYTES // 8, np.int64)
        self.address = int(self._words.ctypes.data)
        self._jobs: list[StagingJob | None] = []
        self._free: list[int] = []  # numbers of unregistered jobs
        self._tables: list[np.ndarray] = []  # The thread may still read an older table.
        self._enlarge(FIRST_JOBS)
        for offset, value in (
            (staging_layout.FLAGS, flags),
            (staging_layout.NSLOTS, nslots),
            (staging_layout.THREAD, index),
            (staging_layout.NTHREADS, nthreads),
            (staging_layout.SLOT, index),
            (staging_layout.SEGMENT, index),
        ):
            self._words[offset // 8] = value
        self._thread: clock.Thread | None = None

    def _get(self, offset: int) -> int:
        return int(self._words[offset // 8])

    def _set(self, offset: int, value: int) -> None:
        self._store(self.address + offset, value)

    def _ring_doorbell(self) -> None:
        """Wake the thread if it sleeps."""
        self._futex(self.address + staging_layout.DOORBELL)

    def _enlarge(self, rows: int) -> None:
        table = np.zeros((rows, staging_layout.JOB_BYTES // 8), np.int64)
        if self._tables:
            table[: len(self._tables[-1])] = self._tables[-1]
        self._tables.append(table)
        self._set(staging_layout.JOBS, int(table.ctypes.data))

    def register(self, job: StagingJob) -> int:
        """Return the number that a stream writes to ``ready`` for segments of ``job``.

        A job is registered with all threads, in the same order. Numbers of unregistered jobs are
        reused.
        """
        job_id = self._free.pop() if self._free else len(self._jobs) + 1
        if job_id == len(self._tables[-1]):
            self._enlarge(2 * job_id)
        row = self._tables[-1][job_id]
        for offset, value in (
            (staging_layout.JOB_NSEGMENTS, job.nsegments),
            (staging_layout.JOB_STRIDE, job.stride),
            (staging_layout.JOB_CAPTURED, job.captured),
            (staging_layout.JOB_CALLS, job.calls),
        ):
            row[offset // 8] = value
        self._jobs[job_id - 1 : job_id] = [job]
        if job.captured and self.participates(job):
            self._set(staging_layout.CAPTURED, 1)
        return job_id

    def participates(self, job: StagingJob) -> bool:
        """Return True if this thread runs segments of a job."""
        return self.index < min(job.stride, job.nsegments)

    def unregister(self, job_id: int) -> None:
        """Remove a job that has ended and that no stream will bring again."""
        self._jobs[job_id - 1] = None
        self._free.append(job_id)

    def announce(self) -> int:
        """Announce a job of this thread that is about to be enqueued and is not captured.

        Returns its number for ``has_finished``.
        """
        count = self._get(staging_layout.ANNOUNCED) + 1
        self._set(staging_layout.ANNOUNCED, count)
        self._ring_doorbell()
        return count

    def has_finished(self, count: int) -> bool:
        """Return True if all segments of announced job ``count`` are complete."""
        return self._get(staging_layout.FINISHED) >= count

    @property
    def _ready(self) -> int:
        """Number of the job whose segment is ready, 0 for none."""
        return ctypes.c_uint32.from_address(
            self._get(staging_layout.FLAGS)
            + self._get(staging_layout.SLOT) * staging_layout.SLOT_STRIDE
            + staging_layout.READY_OFFSET
        ).value

    @property
    def between_jobs(self) -> bool:
        """True if no segment is ready and all of the last job are complete."""
        return self._ready == 0 and self._get(staging_layout.SEGMENT) == self.index

    @property
    def idle(self) -> bool:
        """True if everything announced is complete and nothing may come unannounced."""
        return (
            self._get(staging_layout.CAPTURED) == 0
            and self._get(staging_layout.ANNOUNCED) == self._get(staging_layout.FINISHED)
            and self.between_jobs
        )

    def current(self) -> tuple[StagingJob, int] | None:
        """Return (job, segment) that is ready now, None if none is."""
        job_id, segment = self._ready, self._get(staging_layout.SEGMENT)
        job = self._jobs[job_id - 1] if 0 < job_id <= len(self._jobs) else None
        return (job, segment) if job is not None and segment < job.nsegments else None

    def drain(self) -> None:
        """Complete segments without running them from now on; callable from any thread."""
        self._set(staging_layout.DRAIN, 1)
        self._ring_doorbell()

    # ---- the thread

    def start(self, name: str) -> None:
        self._thread = clock.thread(target=self._loop, name=name, daemon=True)
        self._thread.start()
        # A process that exits without ``close`` unmaps the memory that the loop polls.
        atexit.register(self._end, EXIT_WAIT_S)

    def _end(self, wait: float) -> bool:
        self._set(staging_layout.STOP, 1)
        self._ring_doorbell()
        if self._thread is None:
            return True
        self._thread.join(wait)
        return not self._thread.is_alive()

    def close(self) -> bool:
        """End the thread, after the last stream that waits for it; return True if it has ended.
        Idempotent.
        """
        atexit.unregister(self._end)
        return self._end(CLOSE_WAIT_S)

    def step(self) -> bool:
        """Complete one segment if one is ready; return True if there was."""
        outcome = self._serve(self.address, 0)
        if outcome in (staging_layout.NEEDS_PYTHON, staging_layout.FAILED):
            self._run_in_python()
            self._serve(self.address, 0)
        return bool(outcome != staging_layout.IDLE)

    def _loop(self) -> None:
        while self._serve(self.address, 1) != staging_layout.IDLE:
            self._run_in_python()

    def _run_in_python(self) -> None:
        """Run Python's part of a segment; the next ``serve`` completes it."""
        job, segment, code = (
            self._jobs[self._get(staging_layout.PYTHON_JOB) - 1],
            self._get(staging_layout.SEGMENT),
            self._get(staging_layout.CODE),
        )
        assert job is not None, "the job was unregistered while a stream used it"
        try:
            if code:
                job.explain(segment, code)
            else:
                job.run(segment, self._get(staging_layout.SLOT))
        except Exception as error:
            self._set(staging_layout.DRAIN, 1)
            log.info("segment %d of %d was not run: %s", segment + 1, job.nsegments, error)
            self._on_fault(error)

    def pause(self, idle: float) -> float:
        """Return the seconds that the loop sleeps when idle for ``idle`` seconds; 0 is no sleep."""
        return float(self._pause(self.address, round(idle * 1e9))) / 1e9
