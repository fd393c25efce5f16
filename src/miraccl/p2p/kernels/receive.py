"""Kernel source: waiting for notifications, from rings and from the streams that are served."""

from __future__ import annotations

from typing import Any

from miraccl.native.intrinsics import (
    FUTEX_WAIT,
    SYS_FUTEX,
    Py_DecRef,
    PyBytes_AsString,
    PyBytes_FromStringAndSize,
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
    sched_getcpu,
    store,
    syscall,
)
from miraccl.p2p import segment_layout as layout
from miraccl.p2p import stream_layout as frames
from miraccl.p2p.kernels.notify import has_record, now_ns, take_plain
from miraccl.p2p.kernels.serve import poll_notification
from miraccl.p2p.kernels.sockets import relax

#: A timespec.
SCRATCH_BYTES = 16
#: Pauses between two polls of a stream, some 0.5 us: a round trip took 22 us instead of 24.5 on a
#: busy machine.
STREAM_PAUSES = 20


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
def is_sender_here(inbox: int) -> bool:
    """Return True if the last sender within the host ran on the core of the caller."""
    core = load(inbox + layout.INBOX_CORE)
    return core != 0 and core == sched_getcpu() + 1


@inline
def wait_records(inbox: int, wait_ns: int, scratch: int) -> bool:
    """Wait until a ring has a record, the doorbell's word changes, or ``wait_ns`` have passed.

    While it polls it receives the notifications of streams itself. It sleeps at once if the sender
    needs this core: two processes on one core took 110 us for a round trip, all of it polling.
    """
    doorbell = load(inbox + layout.INBOX_DOORBELL)
    seen = load32(doorbell + layout.DOORBELL_FUTEX)
    start = now_ns(scratch)
    spin_ns = 0 if is_sender_here(inbox) else min(layout.SPIN_NS, wait_ns)
    rounds, elapsed, streams = 0, 0, load(inbox + layout.INBOX_STREAMS)
    while elapsed < spin_ns:
        if has_record(inbox) or load32(doorbell + layout.DOORBELL_FUTEX) != seen:
            return True
        if streams != 0 and poll_streams(inbox, start + elapsed):
            return True
        rounds += 1
        # A poll of a stream is a system call, of rings a few loads.
        if rounds & (7 if streams != 0 else 31) == 0:
            elapsed = now_ns(scratch) - start
            relax(elapsed)
        else:
            pause()
        if streams != 0:  # a receive holds the lock of the socket, which the arriving data need
            for _ in range(STREAM_PAUSES):
                pause()
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


@inline
def wait_without_gil(inbox: int, wait_ns: int) -> int:
    """Wait as ``wait_records``; return the time that is left, or -1 after an exception.

    The caller holds the GIL, and holds it again afterwards. A signal ends the wait; its handler has
    then run.
    """
    memory = PyBytes_FromStringAndSize(0, SCRATCH_BYTES)
    if memory == 0:
        return -1
    scratch = PyBytes_AsString(memory)
    state = PyEval_SaveThread()
    start = now_ns(scratch)
    wait_records(inbox, wait_ns, scratch)
    left = max(0, wait_ns - (now_ns(scratch) - start))
    PyEval_RestoreThread(state)
    Py_DecRef(memory)
    return left if PyErr_CheckSignals() == 0 else -1


@inline
def poll_with_gil(inbox: int, wait_ns: int) -> int:
    """Poll the rings for ``SOON_NS``; return the time that is left of ``wait_ns``."""
    scratch = inbox + layout.INBOX_SCRATCH
    start, elapsed = now_ns(scratch), 0
    while elapsed < min(layout.SOON_NS, wait_ns):
        for _ in range(8):
            if has_record(inbox):
                return wait_ns
            pause()
        elapsed = now_ns(scratch) - start
    return max(0, wait_ns - elapsed)


def await_one(self: int, args: int, nargs: int) -> int:
    """``await_one(wait_ns)``, bound to the address of an inbox: the next notification, or the
    nanoseconds that are left.

    The latter after a signal, a ring of the doorbell, and for what Python has to read: a failed
    transfer, records while another thread takes them out of the rings, or those behind a
    notification that has come into the queue.
    """
    inbox, left = PyLong_AsLong(self), PyLong_AsLong(load(args))
    queued = load(inbox + layout.INBOX_QUEUED)
    if load(inbox + layout.INBOX_DRAINING) != 0:
        return PyLong_FromLong(left)
    if not has_record(inbox) and left > 0:
        if load(inbox + layout.INBOX_STREAMS) == 0 and not is_sender_here(inbox):
            left = poll_with_gil(inbox, left)
        if not has_record(inbox) and left > 0:
            left = wait_without_gil(inbox, left)
            if left < 0:
                return 0
            if queued != load(inbox + layout.INBOX_QUEUED):
                return PyLong_FromLong(left)
            if load(inbox + layout.INBOX_DRAINING) != 0:
                return PyLong_FromLong(left)
    if has_record(inbox):
        made = take_plain(inbox)
        if made != 0:
            return made
    return PyLong_FromLong(left)


def await_records(self: int, args: int, nargs: int) -> int:
    """``await_records(wait_ns)``, bound to the address of an inbox: wait until a ring has a record
    or the doorbell rings; return the nanoseconds that are left.
    """
    inbox, left = PyLong_AsLong(self), PyLong_AsLong(load(args))
    if not has_record(inbox) and left > 0:
        left = wait_without_gil(inbox, left)
        if left < 0:
            return 0
    return PyLong_FromLong(left)


EXPORTS: dict[str, Any] = {"await_one": await_one, "await_records": await_records}
