"""Kernel source: the loop of a lane (``proxy.staging``), which runs without the interpreter's lock.

It looks at one word, makes the piece's call, stores ``done``.  Python is asked only where a piece has no call or its call failed: then
``serve`` returns, Python does its part, and the next ``serve`` answers the piece first.
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
from miraccl.proxy.kernels import layout as at


@inline
def now_ns(lane: int) -> int:
    """CLOCK_MONOTONIC."""
    clock_gettime(1, lane + at.TIME)
    return load(lane + at.TIME) * 1000000000 + load(lane + at.TIME + 8)


@inline
def flag(lane: int) -> int:
    """Address of the words of the slot where the next piece comes."""
    return load(lane + at.FLAGS) + load(lane + at.SLOT) * at.SLOT_STRIDE


@inline
def answer(lane: int, number: int) -> None:
    """Let the stream go on, and look at the next slot."""
    job = load_acquire(lane + at.JOBS) + number * at.JOB_BYTES
    words = flag(lane)
    following = load(lane + at.PIECE) + load(job + at.JOB_STRIDE)
    if following < load(job + at.JOB_NPIECES):
        store(lane + at.PIECE, following)
        store(
            lane + at.SLOT, (load(lane + at.SLOT) + load(lane + at.LANES)) % load(lane + at.NSLOTS)
        )
    else:
        store(lane + at.PIECE, load(lane + at.LANE))
        store(lane + at.SLOT, load(lane + at.LANE))
        if load(job + at.JOB_CAPTURED) == 0:
            store(lane + at.FINISHED, load(lane + at.FINISHED) + 1)
    store_release(words + at.READY_OFFSET, 0)
    store_release(words + at.DONE_OFFSET, 1)


@inline
def take(lane: int, number: int) -> int:
    """Run the piece that is there, or hold it for Python."""
    if load_acquire(lane + at.DRAIN) == 0:
        calls = load(load_acquire(lane + at.JOBS) + number * at.JOB_BYTES + at.JOB_CALLS)
        call = calls + load(lane + at.PIECE) * at.CALL_BYTES
        code = at.NOT_BEGUN
        if calls != 0 and load(call + at.CALL_FUNCTION) != 0:
            code = call4(
                load(call + at.CALL_FUNCTION), load(call + at.CALL_A), load(call + at.CALL_B), 0, 0
            )
        if code != 0:
            store(lane + at.HELD, number)
            store(lane + at.CODE, 0 if code == at.NOT_BEGUN else code)
            return at.RUN if code == at.NOT_BEGUN else at.FAILED
    answer(lane, number)
    return at.ANSWERED


@inline
def pause_for(lane: int, idle: int) -> int:
    """How long to wait before the next look, ``idle`` ns after something happened; 0 is not at all."""
    if idle < at.SPIN_NS:
        return 0
    between_jobs = load(lane + at.PIECE) == load(lane + at.LANE)
    if (
        between_jobs
        and load_acquire(lane + at.ANNOUNCED) == load(lane + at.FINISHED)
        and load_acquire(lane + at.CAPTURED) == 0
    ):
        return at.NO_PAUSE_NS
    return min(at.LONGEST_PAUSE_NS, max(at.SHORTEST_PAUSE_NS, idle // at.PAUSE_PART))


@inline
def sleep(lane: int, bell: int, nanoseconds: int) -> None:
    store(lane + at.TIME, nanoseconds // 1000000000)
    store(lane + at.TIME + 8, nanoseconds % 1000000000)
    syscall(SYS_FUTEX, lane + at.BELL, FUTEX_WAIT, bell, lane + at.TIME, 0, 0)


@inline
def watch(lane: int) -> int:
    """Answer pieces until Python is needed or the lane is to stop."""
    since = 0
    while load_acquire(lane + at.STOP) == 0:
        bell = load32(lane + at.BELL)
        for _ in range(at.LOOKS_BETWEEN_YIELDS):
            number = load_acquire(flag(lane) + at.READY_OFFSET)
            if number != 0:
                outcome = take(lane, number)
                if outcome != at.ANSWERED:
                    return outcome
                since = 0
            pause()
        now = now_ns(lane)
        if since == 0:
            since = now
        rest = pause_for(lane, now - since)
        if rest == 0:
            sched_yield()
        elif load_acquire(lane + at.STOP) == 0:
            sleep(lane, bell, rest)
            if load32(lane + at.BELL) != bell:
                since = 0
    return at.NOTHING


def serve(self: int, args: int, nargs: int) -> int:
    """Builtin ``serve(lane, waits)``: answer what Python has run, then pieces until Python is needed; without ``waits`` one in all."""
    lane, waits = PyLong_AsLong(load(args)), PyLong_AsLong(load(args + 8))
    state = PyEval_SaveThread()
    held = load(lane + at.HELD)
    outcome = at.NOTHING
    if held != 0:
        store(lane + at.HELD, 0)
        answer(lane, held)
        outcome = at.ANSWERED
    if waits != 0:
        outcome = watch(lane)
    elif held == 0:
        number = load_acquire(flag(lane) + at.READY_OFFSET)
        if number != 0:
            outcome = take(lane, number)
    PyEval_RestoreThread(state)
    return PyLong_FromLong(outcome)


def pause_ns(self: int, args: int, nargs: int) -> int:
    """Builtin ``pause_ns(lane, idle)``; see ``pause_for``."""
    return PyLong_FromLong(pause_for(PyLong_AsLong(load(args)), PyLong_AsLong(load(args + 8))))


EXPORTS: dict[str, Any] = {"serve": serve, "pause_ns": pause_ns}
