"""Kernel source: waiting for notifications, from rings and from the streams that are served."""

from __future__ import annotations

from typing import Any

from miraccl.native.intrinsics import (
    FUTEX_WAIT,
    SYS_FUTEX,
    PyErr_CheckSignals,
    PyEval_RestoreThread,
    PyEval_SaveThread,
    PyLong_AsLong,
    PyLong_FromLong,
    add32,
    fence,
    inline,
    load,
    load32,
    load_acquire,
    pause,
    sched_yield,
    store,
    syscall,
)
from miraccl.p2p import segment_layout as layout
from miraccl.p2p import stream_layout as frames
from miraccl.p2p.kernels.notify import has_record, now_ns
from miraccl.p2p.kernels.serve import poll_notification


@inline
def poll_streams(inbox: int, now: int) -> bool:
    """Receive from the streams, if they are few; return True if a notification has come."""
    rings = load_acquire(inbox + layout.INBOX_RINGS)
    count, polled = load(rings), 0
    for i in range(count):
        stream = load(
            rings + layout.RINGS_ENTRIES + layout.RING_ENTRY_BYTES * i + layout.RING_STREAM
        )
        if stream != 0 and polled < frames.MAX_POLLED:
            polled += 1
            if poll_notification(stream, now):
                return True
    return False


@inline
def wait_records(inbox: int, spin_ns: int, wait_ns: int, scratch: int) -> bool:
    """Wait until a ring has a record, the doorbell's word changes, or ``wait_ns`` have passed.

    While it polls it receives the notifications of streams itself.
    """
    doorbell = load(inbox + layout.INBOX_DOORBELL)
    seen = load32(doorbell + layout.DOORBELL_FUTEX)
    start = now_ns(scratch)
    rounds, elapsed = 0, 0
    while elapsed < min(spin_ns, wait_ns):
        if has_record(inbox) or load32(doorbell + layout.DOORBELL_FUTEX) != seen:
            return True
        if poll_streams(inbox, start + elapsed):
            return True
        pause()
        rounds += 1
        if rounds & 31 == 0:
            elapsed = now_ns(scratch) - start
            if elapsed > 20000:
                sched_yield()
    add32(doorbell + layout.DOORBELL_SLEEPERS, 1)
    fence()
    found = has_record(inbox)
    left = wait_ns - (now_ns(scratch) - start)
    if not found and left > 0:
        store(scratch, left // 1000000000)
        store(scratch + 8, left % 1000000000)
        syscall(SYS_FUTEX, doorbell + layout.DOORBELL_FUTEX, FUTEX_WAIT, seen, scratch, 0, 0)
        found = has_record(inbox)
    add32(doorbell + layout.DOORBELL_SLEEPERS, -1)
    return found


def await_records(self: int, args: int, nargs: int) -> int:
    """``await_records(inbox, spin_ns, wait_ns, scratch)``: 1 if a record came, or 0.

    Returns early after a signal, whose handler has then run; -1 if it raised.
    """
    inbox, spin_ns = PyLong_AsLong(load(args)), PyLong_AsLong(load(args + 8))
    wait_ns, scratch = PyLong_AsLong(load(args + 16)), PyLong_AsLong(load(args + 24))
    if has_record(inbox):
        return PyLong_FromLong(1)
    state = PyEval_SaveThread()
    found = wait_records(inbox, spin_ns, wait_ns, scratch)
    PyEval_RestoreThread(state)
    if PyErr_CheckSignals() != 0:
        return 0
    return PyLong_FromLong(1 if found else 0)


EXPORTS: dict[str, Any] = {"await_records": await_records}
