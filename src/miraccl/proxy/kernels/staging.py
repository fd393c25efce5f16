"""Loop of a staging thread (``proxy.staging``), which runs without the GIL.

It polls one word, makes the segment's call and stores ``done``. Python is needed only if a segment
has no call or its call failed: ``serve`` then returns, Python does its part, and the next ``serve``
completes the segment first.
"""

from __future__ import annotations

from typing import Any

from miraccl.native.intrinsics import (
    FUTEX_WAIT,
    SYS_FUTEX,
    PyEval_RestoreThread,
    PyEval_SaveThread,
    PyLong_AsLong,
    PyLong_FromLong,
    call4,
    clock_gettime,
    inline,
    load,
    load32,
    load_acquire,
    pause,
    sched_yield,
    store,
    store_release,
    syscall,
)
from miraccl.proxy.kernels import staging_layout


@inline
def now_ns(thread: int) -> int:
    """Return CLOCK_MONOTONIC in nanoseconds."""
    clock_gettime(1, thread + staging_layout.TIME)
    return load(thread + staging_layout.TIME) * 1000000000 + load(thread + staging_layout.TIME + 8)


@inline
def flag(thread: int) -> int:
    """Return the address of the words of the slot of the next segment."""
    return (
        load(thread + staging_layout.FLAGS)
        + load(thread + staging_layout.SLOT) * staging_layout.SLOT_STRIDE
    )


@inline
def complete(thread: int, job_id: int) -> None:
    """Let the stream continue, and go to the next slot."""
    job = load_acquire(thread + staging_layout.JOBS) + job_id * staging_layout.JOB_BYTES
    words = flag(thread)
    next_segment = load(thread + staging_layout.SEGMENT) + load(job + staging_layout.JOB_STRIDE)
    if next_segment < load(job + staging_layout.JOB_NSEGMENTS):
        store(thread + staging_layout.SEGMENT, next_segment)
        store(
            thread + staging_layout.SLOT,
            (load(thread + staging_layout.SLOT) + load(thread + staging_layout.NTHREADS))
            % load(thread + staging_layout.NSLOTS),
        )
    else:
        store(thread + staging_layout.SEGMENT, load(thread + staging_layout.THREAD))
        store(thread + staging_layout.SLOT, load(thread + staging_layout.THREAD))
        if load(job + staging_layout.JOB_CAPTURED) == 0:
            store(thread + staging_layout.FINISHED, load(thread + staging_layout.FINISHED) + 1)
    store_release(words + staging_layout.READY_OFFSET, 0)
    store_release(words + staging_layout.DONE_OFFSET, 1)


@inline
def run_segment(thread: int, job_id: int) -> int:
    """Run the ready segment, or leave it to Python."""
    if load_acquire(thread + staging_layout.DRAIN) == 0:
        calls = load(
            load_acquire(thread + staging_layout.JOBS)
            + job_id * staging_layout.JOB_BYTES
            + staging_layout.JOB_CALLS
        )
        call = calls + load(thread + staging_layout.SEGMENT) * staging_layout.CALL_BYTES
        code = staging_layout.NOT_BEGUN
        if calls != 0 and load(call + staging_layout.CALL_FUNCTION) != 0:
            code = call4(
                load(call + staging_layout.CALL_FUNCTION),
                load(call + staging_layout.CALL_A),
                load(call + staging_layout.CALL_B),
                0,
                0,
            )
        if code != 0:
            store(thread + staging_layout.PYTHON_JOB, job_id)
            store(thread + staging_layout.CODE, 0 if code == staging_layout.NOT_BEGUN else code)
            return (
                staging_layout.NEEDS_PYTHON
                if code == staging_layout.NOT_BEGUN
                else staging_layout.FAILED
            )
    complete(thread, job_id)
    return staging_layout.COMPLETED


@inline
def sleep_for_ns(thread: int, idle: int) -> int:
    """Return the nanoseconds to sleep when idle for ``idle`` ns; 0 is no sleep."""
    if idle < staging_layout.SPIN_NS:
        return 0
    between_jobs = load(thread + staging_layout.SEGMENT) == load(thread + staging_layout.THREAD)
    if (
        between_jobs
        and load_acquire(thread + staging_layout.ANNOUNCED)
        == load(thread + staging_layout.FINISHED)
        and load_acquire(thread + staging_layout.CAPTURED) == 0
    ):
        return staging_layout.IDLE_SLEEP_NS
    return min(
        staging_layout.MAX_SLEEP_NS,
        max(staging_layout.MIN_SLEEP_NS, idle // staging_layout.SLEEP_FRACTION),
    )


@inline
def sleep(thread: int, doorbell: int, nanoseconds: int) -> None:
    store(thread + staging_layout.TIME, nanoseconds // 1000000000)
    store(thread + staging_layout.TIME + 8, nanoseconds % 1000000000)
    syscall(
        SYS_FUTEX,
        thread + staging_layout.DOORBELL,
        FUTEX_WAIT,
        doorbell,
        thread + staging_layout.TIME,
        0,
        0,
    )


@inline
def serve_until_needed(thread: int) -> int:
    """Complete segments until Python is needed or the thread is to stop."""
    since = 0
    while load_acquire(thread + staging_layout.STOP) == 0:
        doorbell = load32(thread + staging_layout.DOORBELL)
        for _ in range(staging_layout.POLLS_PER_YIELD):
            job_id = load_acquire(flag(thread) + staging_layout.READY_OFFSET)
            if job_id != 0:
                outcome = run_segment(thread, job_id)
                if outcome != staging_layout.COMPLETED:
                    return outcome
                since = 0
            pause()
        now = now_ns(thread)
        if since == 0:
            since = now
        sleep_ns = sleep_for_ns(thread, now - since)
        if sleep_ns == 0:
            sched_yield()
        elif load_acquire(thread + staging_layout.STOP) == 0:
            sleep(thread, doorbell, sleep_ns)
            if load32(thread + staging_layout.DOORBELL) != doorbell:
                since = 0
    return staging_layout.IDLE


def serve(self: int, args: int, nargs: int) -> int:
    """Builtin ``serve(thread, waits)``: complete Python's segment, then others until Python is
    needed.

    Without ``waits`` at most one segment in total is completed.
    """
    thread, waits = PyLong_AsLong(load(args)), PyLong_AsLong(load(args + 8))
    state = PyEval_SaveThread()
    python_job = load(thread + staging_layout.PYTHON_JOB)
    outcome = staging_layout.IDLE
    if python_job != 0:
        store(thread + staging_layout.PYTHON_JOB, 0)
        complete(thread, python_job)
        outcome = staging_layout.COMPLETED
    if waits != 0:
        outcome = serve_until_needed(thread)
    elif python_job == 0:
        job_id = load_acquire(flag(thread) + staging_layout.READY_OFFSET)
        if job_id != 0:
            outcome = run_segment(thread, job_id)
    PyEval_RestoreThread(state)
    return PyLong_FromLong(outcome)


def pause_ns(self: int, args: int, nargs: int) -> int:
    """Builtin ``pause_ns(thread, idle)``; see ``sleep_for_ns``."""
    return PyLong_FromLong(sleep_for_ns(PyLong_AsLong(load(args)), PyLong_AsLong(load(args + 8))))


EXPORTS: dict[str, Any] = {"serve": serve, "pause_ns": pause_ns}
