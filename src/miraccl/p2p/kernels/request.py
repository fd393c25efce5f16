"""Kernel source: the initiator's side of a stream: one operation at a time, without the GIL.

``run_op`` continues an operation for a slice of time and can be called again: what the kernel has
taken or given is kept in the operation's words.
"""

from __future__ import annotations

from typing import Any

from miraccl.native.intrinsics import (
    PyBytes_AsString,
    PyBytes_Size,
    PyEval_RestoreThread,
    PyEval_SaveThread,
    PyLong_AsLong,
    PyLong_FromLong,
    inline,
    load,
    load_acquire,
    memcpy,
    store,
)
from miraccl.p2p import segment_layout as layout
from miraccl.p2p import stream_layout as frames
from miraccl.p2p.kernels.sockets import (
    LATE,
    POLLIN,
    SINCE,
    SYS_RECVMSG,
    SYS_SENDMSG,
    SYS_SENDTO,
    add_vector,
    move,
    now_ns,
    transmit_one,
    wait_socket,
)

#: Reads from this size on sleep until their answer begins; shorter ones poll.
SLEEP_BYTES = 1 << 16


@inline
def work_of(op: int) -> int:
    return load(op + frames.OP_WORK)


@inline
def moved(op: int, call: int, used: int, until: int) -> int:
    """Send or receive the vectors of the work memory once, or wait; return the bytes, 0 to try
    again, ``LATE`` at the slice's end, ``CLOSED``, or minus errno.
    """
    work = work_of(op)
    return move(
        call,
        load(op + frames.OP_FD),
        work + frames.WORK_VECTORS,
        used,
        load(op + frames.OP_SPIN_NS),
        until,
        work + frames.WORK_SCRATCH,
    )


@inline
def fail(op: int, failed: int) -> int:
    store(op + frames.OP_ERRNO, -failed)
    return frames.RUN_BROKEN


# ---- frames


@inline
def frame_extents(op: int, most: int) -> int:
    """Choose the extents of the next frame: write its table, count and payload; advance the
    position of the operation. Returns the number of extents.
    """
    extents, count = load(op + frames.OP_EXTENTS), load(op + frames.OP_COUNT)
    index, offset = load(op + frames.OP_INDEX), load(op + frames.OP_OFFSET)
    table = work_of(op) + frames.WORK_TABLE
    store(op + frames.OP_FRAME_INDEX, index)
    store(op + frames.OP_FRAME_OFFSET, offset)
    used, payload = 0, 0
    while index < count and used < frames.MAX_FRAME_EXTENTS and payload < most:
        extent = extents + index * layout.EXTENT_BYTES
        part = min(load(extent + 16) - offset, most - payload)
        store(table + 16 * used, load(extent + 8) + offset)
        store(table + 16 * used + 8, part)
        used += 1
        payload += part
        offset += part
        if offset == load(extent + 16):
            index += 1
            offset = 0
    store(op + frames.OP_INDEX, index)
    store(op + frames.OP_OFFSET, offset)
    store(op + frames.OP_FRAME_EXTENTS, used)
    store(op + frames.OP_FRAME_PAYLOAD, payload)
    return used


@inline
def write_header(op: int, kind: int, flags: int, count: int, payload: int) -> None:
    header = work_of(op) + frames.WORK_HEADER
    store(header, frames.MAGIC | kind << 16 | flags << 24 | count << 32)
    store(header + 8, load(op + frames.OP_NUMBER))
    store(header + 16, load(op + frames.OP_SLOT) | payload << 32)
    store(header + 24, load(op + frames.OP_GENERATION))
    store(header + 32, load(op + frames.OP_KEY))
    store(header + 40, load(op + frames.OP_KEY2))
    store(header + 48, load(work_of(op) + frames.WORK_TABLE) if count == 1 else 0)
    store(header + 56, load(op + frames.OP_DONE))
    store(op + frames.OP_FRAME_SENT, 0)


@inline
def begin_frame(op: int) -> None:
    """Prepare the next frame of a PUT or GET, or the END of a cancelled PUT."""
    kind = load(op + frames.OP_KIND)
    if kind == frames.PUT and load_acquire(op + frames.OP_CANCEL) != 0:
        store(op + frames.OP_FRAME_EXTENTS, 0)
        store(op + frames.OP_FRAME_PAYLOAD, 0)
        store(op + frames.OP_INDEX, load(op + frames.OP_COUNT))
        write_header(op, frames.END, 0, 0, 0)
        return
    count = frame_extents(op, frames.MAX_PAYLOAD)
    payload, flags = load(op + frames.OP_FRAME_PAYLOAD), load(op + frames.OP_FLAGS)
    if load(op + frames.OP_INDEX) >= load(op + frames.OP_COUNT):
        flags = flags | frames.LAST
    write_header(op, kind, flags, count, payload)
    store(op + frames.OP_DONE, load(op + frames.OP_DONE) + payload)


@inline
def frame_vectors(op: int) -> int:
    """Write iovecs over what the kernel has not taken of the frame; return how many."""
    work = work_of(op)
    vectors, sent, used = work + frames.WORK_VECTORS, load(op + frames.OP_FRAME_SENT), 0
    count = load(op + frames.OP_FRAME_EXTENTS)
    if sent < frames.REQUEST_BYTES:
        used = add_vector(
            vectors, used, work + frames.WORK_HEADER + sent, frames.REQUEST_BYTES - sent
        )
        sent = frames.REQUEST_BYTES
    skip, table = sent - frames.REQUEST_BYTES, 16 * count if count > 1 else 0
    if skip < table:
        used = add_vector(vectors, used, work + frames.WORK_TABLE + skip, table - skip)
        skip = table
    if load(op + frames.OP_KIND) != frames.PUT:
        return used
    skip -= table
    extents, index = load(op + frames.OP_EXTENTS), load(op + frames.OP_FRAME_INDEX)
    for i in range(count):
        part = load(work + frames.WORK_TABLE + 16 * i + 8)
        if skip < part:
            first = load(op + frames.OP_FRAME_OFFSET) if i == 0 else 0
            address = load(extents + (index + i) * layout.EXTENT_BYTES) + first
            used = add_vector(vectors, used, address + skip, part - skip)
            skip = 0
        else:
            skip -= part
    return used


@inline
def frame_size(op: int) -> int:
    count = load(op + frames.OP_FRAME_EXTENTS)
    size = frames.REQUEST_BYTES + (16 * count if count > 1 else 0)
    if load(op + frames.OP_KIND) == frames.PUT:
        size += load(op + frames.OP_FRAME_PAYLOAD)
    return size


@inline
def send_frame(op: int, until: int) -> int:
    """Send the rest of the frame under way; return 0, 1 at the slice's end, or minus errno."""
    size = frame_size(op)
    while load(op + frames.OP_FRAME_SENT) < size:
        got = moved(op, SYS_SENDMSG, frame_vectors(op), until)
        if got < 0:
            return 1 if got == LATE else got
        store(op + frames.OP_FRAME_SENT, load(op + frames.OP_FRAME_SENT) + got)
    return 0


@inline
def send_put(op: int, until: int) -> int:
    """Send all frames of a PUT; return 0, 1 at the slice's end, or minus errno."""
    while True:
        if load(op + frames.OP_FRAME_SENT) < 0:
            begin_frame(op)
        waited = send_frame(op, until)
        if waited != 0:
            return waited
        store(op + frames.OP_FRAME_SENT, -1)
        if load(op + frames.OP_INDEX) >= load(op + frames.OP_COUNT):
            return 0
        if now_ns(work_of(op) + frames.WORK_SCRATCH) >= until:
            return 1


@inline
def send_notify(op: int, until: int) -> int:
    """Send the notification behind a PUT; the target decides about its error."""
    work = work_of(op)
    nbytes = load(op + frames.OP_NOTIFY_BYTES)
    if load(op + frames.OP_FRAME_SENT) < 0:
        write_header(op, frames.NOTIFY, 0, 0, nbytes)
        store(work + frames.WORK_HEADER + 16, load(op + frames.OP_BLOCK) | nbytes << 32)
        store(work + frames.WORK_HEADER + 24, 1)
    vectors = work + frames.WORK_VECTORS
    while load(op + frames.OP_FRAME_SENT) < frames.REQUEST_BYTES + nbytes:
        sent, used = load(op + frames.OP_FRAME_SENT), 0
        if sent < frames.REQUEST_BYTES:
            used = add_vector(
                vectors, used, work + frames.WORK_HEADER + sent, frames.REQUEST_BYTES - sent
            )
            sent = frames.REQUEST_BYTES
        sent -= frames.REQUEST_BYTES
        if sent < nbytes:
            used = add_vector(vectors, used, load(op + frames.OP_NOTIFY_DATA) + sent, nbytes - sent)
        got = moved(op, SYS_SENDMSG, used, until)
        if got < 0:
            return 1 if got == LATE else got
        store(op + frames.OP_FRAME_SENT, load(op + frames.OP_FRAME_SENT) + got)
    store(op + frames.OP_FRAME_SENT, -1)
    return 0


# ---- replies


@inline
def note(op: int, status: int, position: int) -> None:
    if load(op + frames.OP_STATUS) == frames.OK:
        store(op + frames.OP_STATUS, status)
        store(op + frames.OP_POSITION, position)


@inline
def reply_header(op: int) -> int:
    """Process a complete reply header; return 0, or ``RUN_PROTOCOL``."""
    words = work_of(op) + frames.WORK_REPLY
    kind, payload = (load(words) >> 16) & 0xFF, (load(words + 16) >> 32) & 0xFFFFFFFF
    if load(words) & 0xFFFF != frames.MAGIC or load(words + 8) != load(op + frames.OP_NUMBER):
        return frames.RUN_PROTOCOL
    store(op + frames.OP_IN_HEADER, 0)
    if kind == frames.ACK:
        note(op, load(words + 16) & 0xFFFFFFFF, load(words + 24))
        store(op + frames.OP_ANSWERED, load(op + frames.OP_ANSWERED) + 1)
        return 0
    expected = load(op + frames.OP_SIZES + 8 * (load(op + frames.OP_ANSWERED) & 1))
    if kind != frames.DATA or load(op + frames.OP_KIND) != frames.GET or payload != expected:
        return frames.RUN_PROTOCOL
    store(op + frames.OP_IN_LEFT, payload)
    store(op + frames.OP_IN_STATE, 1)
    return 0


@inline
def payload_vectors(op: int) -> int:
    """Write iovecs for the payload of DATA: local memory, or a discard area after a failure."""
    vectors, left = work_of(op) + frames.WORK_VECTORS, load(op + frames.OP_IN_LEFT)
    if load(op + frames.OP_STATUS) != frames.OK or load_acquire(op + frames.OP_CANCEL) != 0:
        return add_vector(
            vectors, 0, work_of(op) + frames.WORK_DISCARD, min(left, frames.DISCARD_BYTES)
        )
    extents, count = load(op + frames.OP_EXTENTS), load(op + frames.OP_COUNT)
    index, skip = load(op + frames.OP_IN_INDEX), load(op + frames.OP_IN_OFFSET)
    used = 0
    while left > 0 and index < count and used < frames.MAX_FRAME_EXTENTS:
        extent = extents + index * layout.EXTENT_BYTES
        part = min(load(extent + 16) - skip, left)
        used = add_vector(vectors, used, load(extent) + skip, part)
        left -= part
        skip = 0
        index += 1
    return used


@inline
def count_payload(op: int, got: int) -> None:
    """Advance the receiving position by ``got`` bytes."""
    store(op + frames.OP_IN_LEFT, load(op + frames.OP_IN_LEFT) - got)
    store(op + frames.OP_IN_BYTES, load(op + frames.OP_IN_BYTES) + got)
    extents, count = load(op + frames.OP_EXTENTS), load(op + frames.OP_COUNT)
    index, skip = load(op + frames.OP_IN_INDEX), load(op + frames.OP_IN_OFFSET) + got
    while index < count and skip >= load(extents + index * layout.EXTENT_BYTES + 16):
        skip -= load(extents + index * layout.EXTENT_BYTES + 16)
        index += 1
    store(op + frames.OP_IN_INDEX, index)
    store(op + frames.OP_IN_OFFSET, skip)


@inline
def receive_reply(op: int, until: int) -> int:
    """Receive one reply; return 0, 1 at the slice's end, 2 for a violation, or minus errno."""
    work = work_of(op)
    vectors = work + frames.WORK_VECTORS
    while True:
        state = load(op + frames.OP_IN_STATE)
        if state == 0:
            done = load(op + frames.OP_IN_HEADER)
            used = add_vector(
                vectors, 0, work + frames.WORK_REPLY + done, frames.REPLY_BYTES - done
            )
        elif state == 1 and load(op + frames.OP_IN_LEFT) > 0:
            used = payload_vectors(op)
        else:
            store(op + frames.OP_IN_STATE, 2)
            state = 2
            done = load(op + frames.OP_IN_HEADER)
            used = add_vector(
                vectors, 0, work + frames.WORK_REPLY + 32 + done, frames.TRAILER_BYTES - done
            )
        got = moved(op, SYS_RECVMSG, used, until)
        if got < 0:
            return 1 if got == LATE else got
        if got > 0 and state == 1:
            count_payload(op, got)
        elif got > 0:
            done = load(op + frames.OP_IN_HEADER) + got
            store(op + frames.OP_IN_HEADER, done)
            if state == 0 and done == frames.REPLY_BYTES:
                if reply_header(op) != 0:
                    return 2
                if load(op + frames.OP_IN_STATE) == 0:
                    return 0
            elif state == 2 and done == frames.TRAILER_BYTES:
                store(op + frames.OP_IN_HEADER, 0)
                store(op + frames.OP_IN_STATE, 0)
                status = load(work + frames.WORK_REPLY + 32)
                if status != frames.OK:
                    note(op, status, load(op + frames.OP_IN_BYTES))
                store(op + frames.OP_ANSWERED, load(op + frames.OP_ANSWERED) + 1)
                return 0


@inline
def request_data(op: int, until: int) -> int:
    """Send requests of a GET while few are under way; return as ``send_put``."""
    while True:
        if load(op + frames.OP_FRAME_SENT) < 0:
            asked = load(op + frames.OP_ASKED)
            if load(op + frames.OP_INDEX) >= load(op + frames.OP_COUNT):
                return 0
            if asked - load(op + frames.OP_ANSWERED) >= frames.MAX_ASKED:
                return 0
            if load(op + frames.OP_STATUS) != frames.OK or load_acquire(op + frames.OP_CANCEL) != 0:
                store(op + frames.OP_INDEX, load(op + frames.OP_COUNT))
                return 0
            begin_frame(op)
            payload = load(op + frames.OP_FRAME_PAYLOAD)
            store(op + frames.OP_SIZES + 8 * (asked & 1), payload)
            store(op + frames.OP_ASKED, asked + 1)
        waited = send_frame(op, until)
        if waited != 0:
            return waited
        store(op + frames.OP_FRAME_SENT, -1)


@inline
def run_put(op: int, until: int, sends_only: bool) -> int:
    phase = load(op + frames.OP_PHASE)
    if phase == frames.PHASE_START or phase == frames.PHASE_SEND:
        store(op + frames.OP_PHASE, frames.PHASE_SEND)
        waited = send_put(op, until)
        if waited != 0:
            return waited
        notifies = load(op + frames.OP_NOTIFY_BYTES) >= 0
        store(op + frames.OP_PHASE, frames.PHASE_NOTIFY if notifies else frames.PHASE_RECEIVE)
    if load(op + frames.OP_PHASE) == frames.PHASE_NOTIFY:
        waited = send_notify(op, until)
        if waited != 0:
            return waited
        store(op + frames.OP_PHASE, frames.PHASE_RECEIVE)
    if load(op + frames.OP_PHASE) == frames.PHASE_RECEIVE:
        if sends_only:
            return 1
        waited = receive_reply(op, until)
        if waited != 0:
            return waited
        store(op + frames.OP_PHASE, frames.PHASE_DONE)
    return 0


@inline
def await_answer(op: int, until: int) -> None:
    """Sleep until the first byte of a long answer.

    A thread that polls meanwhile keeps the target, which the request has woken, on its own core
    while others are idle: the target then sends all of the answer before any of it is received. A
    read of 1 MiB took 600 to 1000 us, and 150 to 270 with the two processes on two cores.
    """
    begun = load(op + frames.OP_ANSWERED) + load(op + frames.OP_IN_STATE)
    if begun + load(op + frames.OP_IN_HEADER) == 0 and load(op + frames.OP_TOTAL) > SLEEP_BYTES:
        scratch = work_of(op) + frames.WORK_SCRATCH
        wait_socket(load(op + frames.OP_FD), POLLIN, max(0, until - now_ns(scratch)), scratch)


@inline
def run_get(op: int, until: int, sends_only: bool) -> int:
    store(op + frames.OP_PHASE, frames.PHASE_SEND)
    while True:
        waited = request_data(op, until)
        if waited != 0:
            return waited
        if sends_only:
            return 1
        if load(op + frames.OP_ANSWERED) == load(op + frames.OP_ASKED):
            store(op + frames.OP_PHASE, frames.PHASE_DONE)
            return 0
        await_answer(op, until)
        waited = receive_reply(op, until)
        if waited != 0:
            return waited


@inline
def run(op: int, slice_ns: int, sends_only: bool) -> int:
    until = now_ns(work_of(op) + frames.WORK_SCRATCH) + slice_ns
    if load(op + frames.OP_PHASE) == frames.PHASE_DONE:
        return frames.RUN_DONE
    if load(op + frames.OP_KIND) == frames.PUT:
        waited = run_put(op, until, sends_only)
    else:
        waited = run_get(op, until, sends_only)
    if waited == 0:
        failed = load(op + frames.OP_STATUS) != frames.OK
        return frames.RUN_FAILED if failed else frames.RUN_DONE
    if waited == 1:
        return frames.RUN_MORE
    if waited == 2:
        return frames.RUN_PROTOCOL
    return fail(op, waited)


def run_op(self: int, args: int, nargs: int) -> int:
    """``run_op(op, slice_ns, sends_only)``: continue an operation; return a ``RUN_`` result."""
    op, slice_ns = PyLong_AsLong(load(args)), PyLong_AsLong(load(args + 8))
    sends_only = PyLong_AsLong(load(args + 16)) != 0
    state = PyEval_SaveThread()
    result = run(op, slice_ns, sends_only)
    PyEval_RestoreThread(state)
    return PyLong_FromLong(result)


def begin_op(self: int, args: int, nargs: int) -> int:
    """``begin_op(op, fd, number, flags, work, data, nbytes)``: prepare an operation to run.

    ``data``: bytes object of the notification; ``nbytes`` is -1 for none.
    """
    op, nbytes = PyLong_AsLong(load(args)), PyLong_AsLong(load(args + 48))
    for at in range(frames.OP_INDEX, frames.OP_TOTAL, 8):
        store(op + at, 0)
    for at in range(frames.OP_CANCEL, frames.OP_NOTIFY_DATA, 8):
        store(op + at, 0)
    for at in range(frames.OP_IN_STATE, frames.OP_BLOCK, 8):
        store(op + at, 0)
    store(op + frames.OP_FD, PyLong_AsLong(load(args + 8)))
    store(op + frames.OP_NUMBER, PyLong_AsLong(load(args + 16)))
    store(op + frames.OP_FLAGS, PyLong_AsLong(load(args + 24)))
    store(op + frames.OP_WORK, PyLong_AsLong(load(args + 32)))
    store(work_of(op) + frames.WORK_SCRATCH + SINCE, 0)
    store(op + frames.OP_FRAME_SENT, -1)
    store(op + frames.OP_NOTIFY_BYTES, nbytes)
    store(op + frames.OP_NOTIFY_DATA, PyBytes_AsString(load(args + 40)) if nbytes >= 0 else 0)
    return PyLong_FromLong(0)


def send_note(self: int, args: int, nargs: int) -> int:
    """``send_note(fd, data)``, bound to the work memory of an idle stream: send a bytes object as a
    notification without a transfer; return the bytes that the socket has taken, or minus errno.

    It keeps the GIL: on loopback the call takes as long as a switch of threads, 5 us.
    """
    work, fd = PyLong_AsLong(self), PyLong_AsLong(load(args))
    data, nbytes = PyBytes_AsString(load(args + 8)), PyBytes_Size(load(args + 8))
    frame = work + frames.WORK_DISCARD  # no answer is awaited: it has no other use now
    for at in range(0, frames.REQUEST_BYTES, 8):
        store(frame + at, 0)
    store(frame, frames.MAGIC | frames.NOTIFY << 16)
    store(frame + 16, nbytes << 32)
    memcpy(frame + frames.REQUEST_BYTES, data, nbytes)
    return PyLong_FromLong(transmit_one(SYS_SENDTO, fd, frame, frames.REQUEST_BYTES + nbytes))


EXPORTS: dict[str, Any] = {"run_op": run_op, "begin_op": begin_op, "send_note": send_note}
