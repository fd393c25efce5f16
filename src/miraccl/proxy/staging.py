"""The threads that carry pieces of GPU data between a stream and the network.

A stream copies a piece to pinned memory and writes the number of its job into the slot's word ``ready``.  A lane sees it, runs the
piece, and stores 1 to ``done``, for which the stream waits.  The stream itself clears ``done`` before it writes ``ready``: nothing here
counts launches, so what a CUDA graph has captured may be replayed any number of times.

There may be several lanes, each a thread with slots of its own: lane l has the slots l, l + lanes, ...  Pieces of a job come in order,
and jobs one after another, each beginning with a lane's first slot: for a lane there is always exactly one word to look at.  A job of
``stride`` 1 takes lane 0 only; one whose stride is the number of lanes deals its pieces out to all of them.  After a fault nothing is run
any more, but every piece is still answered, so that no stream waits for ever.

The loop is compiled and runs without the interpreter's lock (``kernels.lane``); pieces whose ``calls`` say how are run there too, the
others by ``Job.run`` in Python.  It looks without pause for ``SPIN_NS`` after something happened, then ever more rarely; with nothing
announced and nothing captured it sleeps until ``announce``.
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
    """What is run when a stream says that a piece is there. ``captured``: a graph may bring it at any time.

    ``calls`` is the address of ``nsegments`` records of ``layout.CALL_*`` that live as long as the job, 0 if Python runs all pieces;
    ``explain`` raises what a call's code means.
    """

    nsegments: int
    stride: int
    captured: bool
    calls: int

    def run(self, segment: int, slot: int) -> None: ...
    def explain(self, segment: int, code: int) -> None: ...


def slot_of(segment: int, stride: int, nslots: int, nthreads: int) -> int:
    """The slot of a piece: pieces of one lane go around its slots."""
    return segment % nslots if stride == nthreads else segment * nthreads % nslots


class StagingThread:
    """Answers the slots of one lane, whose words lie at ``flags`` (``nslots`` times ``SLOT_STRIDE`` bytes of zeros, for all lanes).

    ``on_fault(error)`` is called once, in the thread, with what the first piece that failed raised; from then on nothing is run.
    ``start`` begins the thread; without it ``step`` may be called instead.
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
        self._free: list[int] = []  # numbers of jobs that were forgotten
        self._tables: list[
            np.ndarray
        ] = []  # all that there were: the thread may still look into an older one
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
        """The number that a stream writes to ``ready`` for pieces of ``job``; it is registered with all lanes, in the same order.
        A number that was forgotten is given again."""
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
        """Whether pieces of a job come to this lane."""
        return self.index < min(job.stride, job.nsegments)

    def unregister(self, job_id: int) -> None:
        """A job that has ended and that no stream brings any more."""
        self._jobs[job_id - 1] = None
        self._free.append(job_id)

    def announce(self) -> int:
        """A job is about to be enqueued that is not captured, and that comes to this lane; which one it is for ``has_ended``."""
        count = self._get(staging_layout.ANNOUNCED) + 1
        self._set(staging_layout.ANNOUNCED, count)
        self._ring_doorbell()
        return count

    def has_finished(self, count: int) -> bool:
        """Whether the lane has answered all pieces of what was announced so."""
        return self._get(staging_layout.FINISHED) >= count

    @property
    def _ready(self) -> int:
        """The number of the job whose piece is there, 0: none is."""
        return ctypes.c_uint32.from_address(
            self._get(staging_layout.FLAGS)
            + self._get(staging_layout.SLOT) * staging_layout.SLOT_STRIDE
            + staging_layout.READY_OFFSET
        ).value

    @property
    def between_jobs(self) -> bool:
        """Whether no piece is there, and all of the last job have been answered."""
        return self._ready == 0 and self._get(staging_layout.SEGMENT) == self.index

    @property
    def idle(self) -> bool:
        """Whether all that was announced has been answered, and nothing may come without."""
        return (
            self._get(staging_layout.CAPTURED) == 0
            and self._get(staging_layout.ANNOUNCED) == self._get(staging_layout.FINISHED)
            and self.between_jobs
        )

    def current(self) -> tuple[StagingJob, int] | None:
        """The job whose piece is there, and the number of the piece, as they are now."""
        job_id, segment = self._ready, self._get(staging_layout.SEGMENT)
        job = self._jobs[job_id - 1] if 0 < job_id <= len(self._jobs) else None
        return (job, segment) if job is not None and segment < job.nsegments else None

    def drain(self) -> None:
        """Run nothing any more, but answer. Any thread may call it."""
        self._set(staging_layout.DRAIN, 1)
        self._ring_doorbell()

    # ---- the thread

    def start(self, name: str) -> None:
        self._thread = clock.thread(target=self._loop, name=name, daemon=True)
        self._thread.start()
        atexit.register(
            self._end, EXIT_WAIT_S
        )  # a process that ends without ``close`` unmaps what the loop looks at

    def _end(self, wait: float) -> bool:
        self._set(staging_layout.STOP, 1)
        self._ring_doorbell()
        if self._thread is None:
            return True
        self._thread.join(wait)
        return not self._thread.is_alive()

    def close(self) -> bool:
        """End the thread, when no stream waits any more; says whether it has ended. May be called twice."""
        atexit.unregister(self._end)
        return self._end(CLOSE_WAIT_S)

    def step(self) -> bool:
        """Answer one piece if it is there; says whether it was."""
        outcome = self._serve(self.address, 0)
        if outcome in (staging_layout.NEEDS_PYTHON, staging_layout.FAILED):
            self._run_in_python()
            self._serve(self.address, 0)
        return bool(outcome != staging_layout.IDLE)

    def _loop(self) -> None:
        while self._serve(self.address, 1) != staging_layout.IDLE:
            self._run_in_python()

    def _run_in_python(self) -> None:
        """Python's part of a piece; the next ``serve`` answers it."""
        job, segment, code = (
            self._jobs[self._get(staging_layout.PYTHON_JOB) - 1],
            self._get(staging_layout.SEGMENT),
            self._get(staging_layout.CODE),
        )
        assert job is not None, "only jobs that have ended are forgotten"
        try:
            if code:
                job.explain(segment, code)
            else:
                job.run(segment, self._get(staging_layout.SLOT))
        except Exception as error:
            self._set(staging_layout.DRAIN, 1)
            log.info("piece %d of %d was not run: %s", segment + 1, job.nsegments, error)
            self._on_fault(error)

    def pause(self, idle: float) -> float:
        """How long the loop waits before its next look, ``idle`` seconds after something happened; 0 is not at all."""
        return float(self._pause(self.address, round(idle * 1e9))) / 1e9
