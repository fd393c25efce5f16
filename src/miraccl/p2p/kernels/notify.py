"""Kernel source: rings of notifications, which a peer of the host or a served stream fills.

A receiver polls for a moment, then sleeps on a futex word of its table, which each sender wakes
if there are sleepers (``kernels.receive``).
"""

from __future__ import annotations

import sys
from typing import Any

from miraccl.native.intrinsics import (
    FUTEX_WAKE,
    SYS_FUTEX,
    Py_IncRef,
    PyBytes_AsString,
    PyBytes_FromStringAndSize,
    PyBytes_Size,
    PyLong_AsLong,
    PyLong_FromLong,
    PyTuple_SetItem,
    PyType_GenericAlloc,
    add32,
    clock_gettime,
    fence,
    inline,
    load,
    load_acquire,
    memcpy,
    sched_getcpu,
    store,
    store_release,
    syscall,
)
from miraccl.p2p import segment_layout as layout

#: Offset of ``ob_type`` in an object (CPython Include/object.h).
OB_TYPE = 8
#: Offset of the cached hash in a tuple, which is -1 at first; 0 before Python 3.14, which has none
#: (CPython Include/cpython/tupleobject.h).
TUPLE_HASH = 24 if sys.version_info >= (3, 14) else 0


@inline
def ring_copy(ring: int, position: int, memory: int, nbytes: int, reads: bool) -> None:
    """Copy to or from the ring, in two parts where it wraps around."""
    start = position & (layout.RING_BYTES - 1)
    first = min(nbytes, layout.RING_BYTES - start)
    if reads:
        memcpy(memory, ring + start, first)
        memcpy(memory + first, ring, nbytes - first)
    else:
        memcpy(ring + start, memory, first)
        memcpy(ring, memory + first, nbytes - first)


@inline
def wake_sleepers(doorbell: int) -> None:
    fence()
    if load_acquire(doorbell + layout.DOORBELL_SLEEPERS) != 0:
        add32(doorbell + layout.DOORBELL_FUTEX, 1)
        syscall(SYS_FUTEX, doorbell + layout.DOORBELL_FUTEX, FUTEX_WAKE, 1 << 30, 0, 0, 0)


@inline
def record_size(nbytes: int) -> int:
    """Return the bytes of a record in its ring, with header and padding to 8 bytes."""
    return layout.RECORD_BYTES + ((nbytes + 7) & ~7)


@inline
def read_header(pair: int, head: int, tail: int) -> int:
    """Return the first word of the record at ``head``: its bytes, and its kind in the high half.

    The ring is memory that a peer writes: -1 if a record of that size cannot be in it.
    """
    word = load(pair + layout.PAIR_RING + (head & (layout.RING_BYTES - 1)))
    nbytes, filled = word & 0xFFFFFFFF, tail - head
    if nbytes > layout.MAX_RECORD or filled < record_size(nbytes) or filled > layout.RING_BYTES:
        return -1
    return word


@inline
def write_record(pair: int, kind: int, number: int, data: int, nbytes: int) -> bool:
    """Append a record; return False if the ring is full. One thread at a time."""
    size = record_size(nbytes)
    tail = load(pair + layout.PAIR_TAIL)
    # The reader writes the head's line with each record: it is read only if the ring seems full.
    if tail + size - load(pair + layout.PAIR_SEEN) > layout.RING_BYTES:
        head = load_acquire(pair + layout.PAIR_HEAD)
        store(pair + layout.PAIR_SEEN, head)
        if tail + size - head > layout.RING_BYTES:
            return False
    ring = pair + layout.PAIR_RING
    start = tail & (layout.RING_BYTES - 1)  # a record is 8-byte aligned, its words never wrap
    store(ring + start, nbytes | (kind << 32))
    store(ring + ((tail + 8) & (layout.RING_BYTES - 1)), number)
    ring_copy(ring, tail + layout.RECORD_BYTES, data, nbytes, False)
    store_release(pair + layout.PAIR_TAIL, tail + size)
    return True


@inline
def post_local(pair: int, doorbell: int, kind: int, number: int, data: int, nbytes: int) -> int:
    """Append a record to the ring of another process and wake its reader; return 1, or 0."""
    core = sched_getcpu() + 1
    if load(pair + layout.PAIR_CORE) != core:
        store(pair + layout.PAIR_CORE, core)
    if not write_record(pair, kind, number, data, nbytes):
        return 0
    wake_sleepers(doorbell)
    return 1


def post_record(self: int, args: int, nargs: int) -> int:
    """``post_record(pair, doorbell, kind, number, data, nbytes)``: 1, or 0 if the ring is full.

    ``data``: a bytes object. One thread posts at a time: the caller holds the GIL.
    """
    pair, doorbell = PyLong_AsLong(load(args)), PyLong_AsLong(load(args + 8))
    kind, number = PyLong_AsLong(load(args + 16)), PyLong_AsLong(load(args + 24))
    data, nbytes = PyBytes_AsString(load(args + 32)), PyLong_AsLong(load(args + 40))
    return PyLong_FromLong(post_local(pair, doorbell, kind, number, data, nbytes))


def post(self: int, args: int, nargs: int) -> int:
    """``post(data)``, bound to the address of its ``POST_`` words: post a notification without a
    transfer; 1, or 0 if ``data`` is not a bytes object that fits.
    """
    words, data = PyLong_AsLong(self), load(args)
    if load(data + OB_TYPE) != load(words + layout.POST_BYTES_TYPE):
        return PyLong_FromLong(0)
    nbytes = PyBytes_Size(data)
    if nbytes > layout.MAX_NOTIFICATION:
        return PyLong_FromLong(0)
    pair, doorbell = load(words + layout.POST_PAIR), load(words + layout.POST_DOORBELL)
    return PyLong_FromLong(post_local(pair, doorbell, 0, 0, PyBytes_AsString(data), nbytes))


def take_record(self: int, args: int, nargs: int) -> int:
    """``take_record(pair)``: bytes of the next record with its header; 0 if there is none, -1 if
    the ring contradicts itself.
    """
    pair = PyLong_AsLong(load(args))
    head, tail = load(pair + layout.PAIR_HEAD), load_acquire(pair + layout.PAIR_TAIL)
    if head == tail:
        return PyLong_FromLong(0)
    word = read_header(pair, head, tail)
    if word == -1:
        return PyLong_FromLong(-1)
    nbytes = word & 0xFFFFFFFF
    made = PyBytes_FromStringAndSize(0, layout.RECORD_BYTES + nbytes)
    if made == 0:
        return 0
    memory = PyBytes_AsString(made)
    ring_copy(pair + layout.PAIR_RING, head, memory, layout.RECORD_BYTES + nbytes, True)
    # The peer may have changed the header since it was checked.
    store(memory, (load(memory) >> 32 << 32) | nbytes)
    store_release(pair + layout.PAIR_HEAD, head + record_size(nbytes))
    return made


@inline
def has_record(inbox: int) -> bool:
    rings = load_acquire(inbox + layout.INBOX_RINGS)
    for i in range(load(rings)):
        pair = load(rings + layout.RINGS_ENTRIES + layout.RING_ENTRY_BYTES * i)
        if load_acquire(pair + layout.PAIR_TAIL) != load(pair + layout.PAIR_HEAD):
            return True
    return False


@inline
def take_plain(inbox: int) -> int:
    """Return the ``Notification`` of the first record without an error, or 0.

    Anything else stays in its ring. The caller holds the GIL.
    """
    none, rings = load(inbox + layout.INBOX_NONE), load_acquire(inbox + layout.INBOX_RINGS)
    for i in range(load(rings)):
        entry = rings + layout.RINGS_ENTRIES + layout.RING_ENTRY_BYTES * i
        pair = load(entry)
        head, tail = load(pair + layout.PAIR_HEAD), load_acquire(pair + layout.PAIR_TAIL)
        if head != tail:
            nbytes = read_header(pair, head, tail)
            if nbytes >> 32 != 0:  # another kind, or -1
                return 0
            ring = pair + layout.PAIR_RING
            # As ``tuple.__new__(Notification, fields)``, in a third of its time.
            made = PyType_GenericAlloc(load(inbox + layout.INBOX_TYPE), 5)
            if TUPLE_HASH != 0:
                store(made + TUPLE_HASH, -1)
            data = PyBytes_FromStringAndSize(0, nbytes)
            number = load(ring + ((head + 8) & (layout.RING_BYTES - 1)))
            ring_copy(ring, head + layout.RECORD_BYTES, PyBytes_AsString(data), nbytes, True)
            store_release(pair + layout.PAIR_HEAD, head + record_size(nbytes))
            name, agent = load(entry + layout.RING_NAME), load(entry + layout.RING_AGENT)
            Py_IncRef(name)
            Py_IncRef(agent)
            PyTuple_SetItem(made, 0, name)
            PyTuple_SetItem(made, 1, agent)
            PyTuple_SetItem(made, 2, PyLong_FromLong(number))
            PyTuple_SetItem(made, 3, data)
            Py_IncRef(none)
            PyTuple_SetItem(made, 4, none)
            store(inbox + layout.INBOX_CORE, load(pair + layout.PAIR_CORE))
            return made
    return 0


@inline
def now_ns(scratch: int) -> int:
    clock_gettime(1, scratch)
    return load(scratch) * 1000000000 + load(scratch + 8)


def ring_doorbell(self: int, args: int, nargs: int) -> int:
    """``ring_doorbell(doorbell)``: wake all that wait for notifications."""
    doorbell = PyLong_AsLong(load(args))
    add32(doorbell + layout.DOORBELL_FUTEX, 1)
    syscall(SYS_FUTEX, doorbell + layout.DOORBELL_FUTEX, FUTEX_WAKE, 1 << 30, 0, 0, 0)
    return PyLong_FromLong(0)


EXPORTS: dict[str, Any] = {
    "post_record": post_record,
    "post": post,
    "take_record": take_record,
    "ring_doorbell": ring_doorbell,
}
