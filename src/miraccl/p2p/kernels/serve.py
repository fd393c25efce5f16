"""Kernel source: the target's side of a stream, on a thread of its own without the GIL.

It is the compiled counterpart of ``wire.p2p_target.Target``. Each request is checked against the
region table before a byte moves. Memory is announced as accessed only around a system call that
does not block, so a slow or stopped initiator never delays ``deregister``.
"""

from __future__ import annotations

from typing import Any

from miraccl.native.copies import copy_apart
from miraccl.native.intrinsics import (
    FUTEX_WAKE,
    SYS_FUTEX,
    PyEval_RestoreThread,
    PyEval_SaveThread,
    PyLong_AsLong,
    PyLong_FromLong,
    add32,
    exchange,
    inline,
    load,
    load32,
    load_acquire,
    memcpy,
    memmove,
    store,
    store_release,
    syscall,
)
from miraccl.p2p import segment_layout as layout
from miraccl.p2p import stream_layout as frames
from miraccl.p2p.kernels.notify import wake_sleepers, write_record
from miraccl.p2p.kernels.sockets import (
    CLOSED,
    EAGAIN,
    EINTR,
    FOREVER,
    POLLIN,
    POLLOUT,
    SYS_RECVFROM,
    SYS_RECVMSG,
    SYS_SENDMSG,
    add_vector,
    nap,
    now_ns,
    relax,
    settle,
    transmit,
    transmit_one,
    wait_socket,
)

RIGHT_READ, RIGHT_WRITE = 1, 2
#: Offset in the scratch area for a thread that polls while the stream's thread waits.
POLL_SCRATCH = 384
MAX_OFFSET = 1 << 62


@inline
def begin_access(stream: int, slot: int, generation: int) -> bool:
    exchange(load(stream + frames.SERVE_ACCESS), slot + 1)
    entry = load(stream + frames.SERVE_ENTRIES) + slot * layout.ENTRY_BYTES
    if load_acquire(entry + layout.ENTRY_GENERATION) == generation:
        return True
    store_release(load(stream + frames.SERVE_ACCESS), 0)
    return False


@inline
def end_access(stream: int) -> None:
    store_release(load(stream + frames.SERVE_ACCESS), 0)


@inline
def settled(stream: int, call: int, got: int) -> int:
    """Return the bytes of a ``transmit``, 0 to try again, or minus a ``SERVE_`` result."""
    fd, scratch = load(stream + frames.SERVE_FD), load(stream + frames.SERVE_SCRATCH)
    got = settle(call, got, fd, load(stream + frames.SERVE_SPIN_NS), FOREVER, scratch)
    if got >= 0:
        return got
    if got == CLOSED:
        return -frames.SERVE_CLOSED
    store(stream + frames.SERVE_ERRNO, -got)
    return -frames.SERVE_BROKEN


@inline
def transmitted(stream: int, call: int, used: int) -> int:
    """Send or receive the vectors of the stream once; return as ``transmit``."""
    return transmit(
        call,
        load(stream + frames.SERVE_FD),
        load(stream + frames.SERVE_VECTORS),
        used,
        load(stream + frames.SERVE_SCRATCH),
    )


@inline
def moved(stream: int, call: int, address: int, nbytes: int) -> int:
    """Send or receive up to ``nbytes`` at ``address``; return as ``settled``."""
    used = add_vector(load(stream + frames.SERVE_VECTORS), 0, address, nbytes)
    return settled(stream, call, transmitted(stream, call, used))


@inline
def staged(stream: int) -> int:
    """Bytes in the staging buffer that were not consumed yet."""
    return load(stream + frames.SERVE_END) - load(stream + frames.SERVE_START)


@inline
def fill(stream: int, nbytes: int) -> int:
    """Receive until the staging buffer has ``nbytes``; return 0, or a ``SERVE_`` result."""
    staging = load(stream + frames.SERVE_STAGING)
    start = load(stream + frames.SERVE_START)
    if staged(stream) < nbytes and start > 0:
        memmove(staging, staging + start, staged(stream))
        store(stream + frames.SERVE_END, staged(stream))
        store(stream + frames.SERVE_START, 0)
    while staged(stream) < nbytes:
        end = load(stream + frames.SERVE_END)
        room = min(frames.STAGING_BYTES - end, max(frames.STAGED_RECEIVE, nbytes))
        got = moved(stream, SYS_RECVMSG, staging + end, room)
        if got < 0:
            return -got
        store(stream + frames.SERVE_END, end + got)
    return 0


@inline
def send_all(stream: int, address: int, nbytes: int) -> int:
    """Send a short reply; return 0, or a ``SERVE_`` result."""
    sent = 0
    while sent < nbytes:
        got = moved(stream, SYS_SENDMSG, address + sent, nbytes - sent)
        if got < 0:
            return -got
        sent += got
    return 0


@inline
def reply(stream: int, number: int, status: int, position: int) -> int:
    """Send an ACK."""
    words = load(stream + frames.SERVE_SCRATCH) + 256
    store(words, frames.MAGIC | frames.ACK << 16)
    store(words + 8, number)
    store(words + 16, status)
    store(words + 24, position)
    return send_all(stream, words, frames.REPLY_BYTES)


# ---- checks


@inline
def check_region(stream: int, header: int, right: int) -> int:
    """Return the status of a request's slot, generation, key and right."""
    slot = load(header + 16) & 0xFFFFFFFF
    if slot >= layout.MAX_REGIONS:
        return frames.STALE
    entry = load(stream + frames.SERVE_ENTRIES) + slot * layout.ENTRY_BYTES
    generation = load(header + 24)
    if generation & 1 == 0 or load_acquire(entry + layout.ENTRY_GENERATION) != generation:
        return frames.STALE
    # Both words are compared in any case: the time does not tell how much of a key is right.
    keys = load(stream + frames.SERVE_KEYS) + slot * 16
    wrong = (load(keys) ^ load(header + 32)) | (load(keys + 8) ^ load(header + 40))
    if wrong != 0:
        return frames.WRONG_KEY
    if load(entry + layout.ENTRY_RIGHTS) & right == 0:
        return frames.NO_RIGHT
    return frames.OK


@inline
def extent_at(header: int, index: int) -> tuple[int, int]:
    """Return (offset, bytes) of an extent of a request."""
    if (load(header) >> 32) & 0xFFFF == 1:
        return load(header + 48), (load(header + 16) >> 32) & 0xFFFFFFFF
    extent = header + frames.REQUEST_BYTES + 16 * index
    return load(extent), load(extent + 8)


@inline
def check_extents(stream: int, header: int) -> int:
    """Return the status of a request's extents, which must lie within the region."""
    slot = load(header + 16) & 0xFFFFFFFF
    limit = load(
        load(stream + frames.SERVE_ENTRIES) + slot * layout.ENTRY_BYTES + layout.ENTRY_NBYTES
    )
    for i in range((load(header) >> 32) & 0xFFFF):
        offset, nbytes = extent_at(header, i)
        if offset < 0 or nbytes < 0 or offset > MAX_OFFSET or nbytes > MAX_OFFSET:
            return frames.OUTSIDE
        if offset + nbytes > limit:
            return frames.OUTSIDE
    return frames.OK


@inline
def is_well_formed(header: int) -> bool:
    """Return True if the sizes in a request agree with each other and with the limits."""
    word = load(header)
    kind, count = (word >> 16) & 0xFF, (word >> 32) & 0xFFFF
    payload = (load(header + 16) >> 32) & 0xFFFFFFFF
    if word & 0xFFFF != frames.MAGIC or load(header + 8) < 0 or load(header + 56) < 0:
        return False
    if kind == frames.NOTIFY:
        return count == 0 and payload <= frames.MAX_NOTIFY
    if kind == frames.END:
        return count == 0 and payload == 0
    if kind != frames.PUT and kind != frames.GET:
        return False
    return 1 <= count <= frames.MAX_FRAME_EXTENTS and payload <= frames.MAX_PAYLOAD


@inline
def sum_extents(header: int) -> int:
    """Return the bytes of all extents; -1 if one has a size that no frame can have."""
    total = 0
    for i in range((load(header) >> 32) & 0xFFFF):
        _, nbytes = extent_at(header, i)
        if nbytes < 0 or nbytes > frames.MAX_PAYLOAD:
            return -1
        total += nbytes
    return total


# ---- PUT


@inline
def note_failure(stream: int, status: int, position: int) -> None:
    """Remember the first failure of the operation under way."""
    if load(stream + frames.SERVE_STATUS) == frames.OK:
        store(stream + frames.SERVE_STATUS, status)
        store(stream + frames.SERVE_POSITION, position)


@inline
def discard(stream: int, nbytes: int) -> int:
    """Receive payload of a failed operation without storing it."""
    part = min(staged(stream), nbytes)
    store(stream + frames.SERVE_START, load(stream + frames.SERVE_START) + part)
    left = nbytes - part
    while left > 0:
        room = min(left, frames.DISCARD_BYTES)
        got = moved(stream, SYS_RECVMSG, load(stream + frames.SERVE_DISCARD), room)
        if got < 0:
            return -got
        left -= got
    return 0


@inline
def build_vectors(vectors: int, header: int, base: int, index: int, skip: int, most: int) -> int:
    """Write iovecs over the extents from ``skip`` bytes into extent ``index``; return how many."""
    total, used, count = 0, 0, (load(header) >> 32) & 0xFFFF
    while index < count and total < most:
        offset, nbytes = extent_at(header, index)
        part = min(nbytes - skip, most - total)
        if part > 0:
            used = add_vector(vectors, used, base + offset + skip, part)
            total += part
        skip = 0
        index += 1
    return used


@inline
def skip_extents(header: int, index: int, skip: int, nbytes: int) -> tuple[int, int]:
    """Return (extent, offset in it) ``nbytes`` further on."""
    count = (load(header) >> 32) & 0xFFFF
    going = True
    while going and index < count:
        _, length = extent_at(header, index)
        going = length - skip <= nbytes
        if going:
            nbytes -= length - skip
            skip = 0
            index += 1
    return index, skip + nbytes


@inline
def place_staged(stream: int, header: int, base: int, nbytes: int) -> tuple[int, int]:
    """Copy payload from the staging buffer to its extents; return (extent, offset) after it."""
    source = load(stream + frames.SERVE_STAGING) + load(stream + frames.SERVE_START)
    index, skip, left = 0, 0, nbytes
    count = (load(header) >> 32) & 0xFFFF
    while left > 0 and index < count:
        offset, length = extent_at(header, index)
        part = min(length, left)
        copy_apart(base + offset, source, part)
        source += part
        left -= part
        if part == length:
            index += 1
        else:
            skip = part
    return index, skip


@inline
def place(stream: int, header: int, payload: int) -> int:
    """Store the payload of a checked PUT; return 0, or a ``SERVE_`` result."""
    slot, generation = load(header + 16) & 0xFFFFFFFF, load(header + 24)
    entry = load(stream + frames.SERVE_ENTRIES) + slot * layout.ENTRY_BYTES
    vectors, base = load(stream + frames.SERVE_VECTORS), load(entry + layout.ENTRY_ADDRESS)
    index, skip, done = 0, 0, 0
    while done < payload:
        if not begin_access(stream, slot, generation):
            note_failure(stream, frames.STALE, load(header + 56) + done)
            return discard(stream, payload - done)
        part = min(staged(stream), payload - done)
        if part > 0:
            index, skip = place_staged(stream, header, base, part)
            end_access(stream)
            store(stream + frames.SERVE_START, load(stream + frames.SERVE_START) + part)
            done += part
        else:
            used = build_vectors(vectors, header, base, index, skip, frames.PIECE_BYTES)
            got = transmitted(stream, SYS_RECVMSG, used)
            end_access(stream)  # before a wait
            got = settled(stream, SYS_RECVMSG, got)
            if got < 0:
                return -got
            done += got
            index, skip = skip_extents(header, index, skip, got)
    return 0


@inline
def handle_put(stream: int, header: int, payload: int) -> int:
    number, position = load(header + 8), load(header + 56)
    flags = (load(header) >> 24) & 0xFF
    if load(stream + frames.SERVE_OP) != number:
        store(stream + frames.SERVE_OP, number)
        store(stream + frames.SERVE_STATUS, frames.OK)
        store(stream + frames.SERVE_POSITION, 0)
    store(stream + frames.SERVE_NOTIFIES, flags & frames.NOTIFIES)
    status = load(stream + frames.SERVE_STATUS)
    if status == frames.OK:
        status = check_region(stream, header, RIGHT_WRITE)
        if status == frames.OK:
            status = check_extents(stream, header)
        if status != frames.OK:
            note_failure(stream, status, position)
    if status == frames.OK:
        failed = place(stream, header, payload)
    else:
        failed = discard(stream, payload)
    if failed != 0 or flags & frames.LAST == 0:
        return failed
    return end_operation(stream, number)


@inline
def end_operation(stream: int, number: int) -> int:
    """Answer the operation under way and remember its result for the notification behind it."""
    status, position = load(stream + frames.SERVE_STATUS), load(stream + frames.SERVE_POSITION)
    store(stream + frames.SERVE_LAST_OP, number)
    store(stream + frames.SERVE_LAST_STATUS, status)
    store(stream + frames.SERVE_LAST_POSITION, position)
    store(stream + frames.SERVE_OP, -1)
    store(stream + frames.SERVE_NOTIFIES, 0)
    return reply(stream, number, status, position)


# ---- GET


@inline
def data_vectors(
    stream: int, header: int, base: int, words: int, sent: int, payload: int, live: bool
) -> int:
    """Write iovecs over a DATA reply from its byte ``sent`` on; return how many.

    ``base`` counts only if the region is ``live``; zeros stand for the memory otherwise.
    """
    vectors, used = load(stream + frames.SERVE_VECTORS), 0
    if sent < frames.REPLY_BYTES:
        used = add_vector(vectors, used, words + sent, frames.REPLY_BYTES - sent)
        sent = frames.REPLY_BYTES
    done = sent - frames.REPLY_BYTES
    if done < payload:
        if live:
            index, skip = skip_extents(header, 0, 0, done)
            used += build_vectors(vectors + 16 * used, header, base, index, skip, payload - done)
        else:
            zeros = min(payload - done, frames.DISCARD_BYTES)
            used = add_vector(vectors, used, load(stream + frames.SERVE_DISCARD), zeros)
            if zeros < payload - done:
                return used
        done = payload
    trailer = words + frames.REPLY_BYTES + (done - payload)
    return add_vector(vectors, used, trailer, frames.TRAILER_BYTES - (done - payload))


@inline
def send_data(stream: int, header: int, payload: int) -> int:
    """Send the memory that a checked GET names; return 0, or a ``SERVE_`` result."""
    slot, generation = load(header + 16) & 0xFFFFFFFF, load(header + 24)
    entry = load(stream + frames.SERVE_ENTRIES) + slot * layout.ENTRY_BYTES
    words = load(stream + frames.SERVE_SCRATCH) + 256
    base = load(entry + layout.ENTRY_ADDRESS)
    store(words, frames.MAGIC | frames.DATA << 16)
    store(words + 8, load(header + 8))
    store(words + 16, payload << 32)
    store(words + 24, load(header + 56))
    store(words + frames.REPLY_BYTES, frames.OK)
    total = frames.REPLY_BYTES + payload + frames.TRAILER_BYTES
    sent, live = 0, True
    while sent < total:
        if live and not begin_access(stream, slot, generation):
            live = False
            store(words + frames.REPLY_BYTES, frames.STALE)
        used = data_vectors(stream, header, base, words, sent, payload, live)
        got = transmitted(stream, SYS_SENDMSG, used)
        if live:
            end_access(stream)  # before a wait
        got = settled(stream, SYS_SENDMSG, got)
        if got < 0:
            return -got
        sent += got
    return 0


@inline
def handle_get(stream: int, header: int, payload: int) -> int:
    status = check_region(stream, header, RIGHT_READ)
    if status == frames.OK:
        status = check_extents(stream, header)
    if status != frames.OK:
        return reply(stream, load(header + 8), status, load(header + 56))
    return send_data(stream, header, payload)


# ---- the loop


@inline
def put_in_ring(stream: int, header: int, payload: int, status: int) -> bool:
    """Put the notification at ``header`` into the ring of the stream; return False if it is full,
    or the transfer failed, which Python describes.
    """
    ring = load(stream + frames.SERVE_RING)
    if status != frames.OK or ring == 0 or payload > layout.MAX_RECORD:
        return False
    if not write_record(ring, 0, load(header + 8), header + frames.REQUEST_BYTES, payload):
        return False
    wake_sleepers(load(stream + frames.SERVE_DOORBELL))
    return True


@inline
def is_last_result(stream: int, header: int) -> bool:
    """Return True if the last operation decides about the error of the notification."""
    return load(header + 24) == 1 and load(stream + frames.SERVE_LAST_OP) == load(header + 8)


@inline
def handle_notify(stream: int, header: int, payload: int) -> int:
    """Put a notification into the ring, or hand it to Python; its data stay in the staging buffer
    until the next call.
    """
    status, position = load(header + 48), load(header + 56)
    if is_last_result(stream, header):
        status = load(stream + frames.SERVE_LAST_STATUS)
        position = load(stream + frames.SERVE_LAST_POSITION)
    if put_in_ring(stream, header, payload, status):
        store(stream + frames.SERVE_START, load(stream + frames.SERVE_START) + payload)
        return 0
    store(stream + frames.SERVE_EVENT_NUMBER, load(header + 8))
    store(stream + frames.SERVE_EVENT_STATUS, status)
    store(stream + frames.SERVE_EVENT_BLOCK, load(header + 16) & 0xFFFFFFFF)
    store(stream + frames.SERVE_EVENT_POSITION, position)
    store(stream + frames.SERVE_EVENT_DATA, header + frames.REQUEST_BYTES)
    store(stream + frames.SERVE_EVENT_BYTES, payload)
    store(stream + frames.SERVE_START, load(stream + frames.SERVE_START) + payload)
    return frames.SERVE_NOTIFICATION


# ---- turns: the stream's thread receives, or for a moment a thread that waits for notifications


@inline
def take_turn(stream: int) -> bool:
    return load(stream + frames.SERVE_TURN) == 0 and (exchange(stream + frames.SERVE_TURN, 1) == 0)


@inline
def leave_turn(stream: int) -> None:
    store_release(stream + frames.SERVE_TURN, 0)


@inline
def receive_staged(stream: int) -> int:
    """Receive into the staging buffer without a wait; return as ``transmit``."""
    staging, start = load(stream + frames.SERVE_STAGING), load(stream + frames.SERVE_START)
    if start > 0:
        memmove(staging, staging + start, staged(stream))
        store(stream + frames.SERVE_END, staged(stream))
        store(stream + frames.SERVE_START, 0)
    end = load(stream + frames.SERVE_END)
    room = min(frames.STAGING_BYTES - end, frames.STAGED_RECEIVE)
    got = transmit_one(SYS_RECVFROM, load(stream + frames.SERVE_FD), staging + end, room)
    if got > 0:
        store(stream + frames.SERVE_END, end + got)
    return got


@inline
def await_request(stream: int) -> int:
    """Wait for the first bytes of a request; return 0, or a ``SERVE_`` result, with the turn."""
    fd, scratch = load(stream + frames.SERVE_FD), load(stream + frames.SERVE_SCRATCH)
    since = 0
    while True:
        got = -EAGAIN
        if take_turn(stream):
            if staged(stream) > 0:
                return 0
            got = receive_staged(stream)
            if got > 0:
                return 0
            if got == 0:
                return frames.SERVE_CLOSED
            if got != -EAGAIN and got != -EINTR:
                store(stream + frames.SERVE_ERRNO, -got)
                return frames.SERVE_BROKEN
            leave_turn(stream)
        now = now_ns(scratch)
        returned = load32(stream + frames.SERVE_RETURNED)
        polled = load_acquire(stream + frames.SERVE_POLLED)
        if polled > now:
            # Not on SERVE_POLLED, which each poll changes: this thread would never sleep.
            wait_ns = min(polled - now, frames.LEASE_NS)
            nap(stream + frames.SERVE_RETURNED, returned, wait_ns, scratch)
            since = 0
        else:
            if since == 0:
                since = now
            if now - since < load(stream + frames.SERVE_SPIN_NS):
                relax(now - since)
            else:
                wait_socket(fd, POLLIN, -1, scratch)


@inline
def handle(stream: int) -> int:
    """Receive the rest of a request and execute it; return 0, or a ``SERVE_`` result.

    The thread has the turn.
    """
    failed = fill(stream, frames.REQUEST_BYTES)
    if failed != 0:
        return failed
    header = load(stream + frames.SERVE_STAGING) + load(stream + frames.SERVE_START)
    if not is_well_formed(header):
        return frames.SERVE_PROTOCOL
    kind, count = (load(header) >> 16) & 0xFF, (load(header) >> 32) & 0xFFFF
    payload = (load(header + 16) >> 32) & 0xFFFFFFFF
    size = frames.REQUEST_BYTES + (16 * count if count > 1 else 0)
    failed = fill(stream, size + (payload if kind == frames.NOTIFY else 0))
    if failed != 0:
        return failed
    start = load(stream + frames.SERVE_START)
    # The payload that follows may move the staging buffer's content: the header is kept apart.
    table = load(stream + frames.SERVE_DISCARD) + frames.DISCARD_BYTES
    memcpy(table, load(stream + frames.SERVE_STAGING) + start, size)
    store(stream + frames.SERVE_START, start + size)
    if kind == frames.NOTIFY:
        return handle_notify(stream, load(stream + frames.SERVE_STAGING) + start, payload)
    if kind == frames.END:
        if load(stream + frames.SERVE_OP) != load(table + 8):
            store(stream + frames.SERVE_STATUS, frames.OK)
        note_failure(stream, frames.CANCELLED, load(table + 56))
        return end_operation(stream, load(table + 8))
    if sum_extents(table) != payload:
        return frames.SERVE_PROTOCOL
    if kind == frames.PUT:
        return handle_put(stream, table, payload)
    return handle_get(stream, table, payload)


@inline
def is_staged(stream: int) -> bool:
    """Return True if all of the next request is in the staging buffer, and it has a short answer
    that the socket takes without a wait.
    """
    header = load(stream + frames.SERVE_STAGING) + load(stream + frames.SERVE_START)
    if not is_well_formed(header):
        return False
    kind, count = (load(header) >> 16) & 0xFF, (load(header) >> 32) & 0xFFFF
    payload = (load(header + 16) >> 32) & 0xFFFFFFFF
    size = frames.REQUEST_BYTES + (16 * count if count > 1 else 0)
    if kind == frames.GET or staged(stream) < size + payload:
        return False
    if kind == frames.NOTIFY:
        return True
    if kind == frames.PUT and sum_extents(header) != payload:
        return False
    scratch = load(stream + frames.SERVE_SCRATCH) + POLL_SCRATCH
    return wait_socket(load(stream + frames.SERVE_FD), POLLOUT, 0, scratch) == 1


@inline
def take_staged(stream: int) -> bool:
    """Put the notification in the staging buffer into the ring; return False if Python has to."""
    start = load(stream + frames.SERVE_START)
    header = load(stream + frames.SERVE_STAGING) + start
    payload, status = (load(header + 16) >> 32) & 0xFFFFFFFF, load(header + 48)
    if is_last_result(stream, header):
        status = load(stream + frames.SERVE_LAST_STATUS)
    if not put_in_ring(stream, header, payload, status):
        return False
    store(stream + frames.SERVE_START, start + frames.REQUEST_BYTES + payload)
    return True


@inline
def poll_notification(stream: int, now: int) -> bool:
    """Receive on the thread of a receiver, without a wait, up to a notification; return True if
    there was one. What is not in the staging buffer as a whole is left to the stream's thread.
    """
    if not take_turn(stream):
        return False
    found, mine = False, True
    if staged(stream) < frames.REQUEST_BYTES:
        got = receive_staged(stream)
        mine = got > 0 or got == -EAGAIN or got == -EINTR
    while mine and not found and staged(stream) >= frames.REQUEST_BYTES:
        header = load(stream + frames.SERVE_STAGING) + load(stream + frames.SERVE_START)
        mine = is_staged(stream)
        if mine and (load(header) >> 16) & 0xFF == frames.NOTIFY:
            found = take_staged(stream)
            mine = found
        elif mine:
            mine = handle(stream) == 0
    store_release(stream + frames.SERVE_POLLED, now + frames.LEASE_NS if mine else 0)
    leave_turn(stream)
    if not mine:
        add32(stream + frames.SERVE_RETURNED, 1)
        syscall(SYS_FUTEX, stream + frames.SERVE_RETURNED, FUTEX_WAKE, 1, 0, 0, 0)
    return found


def serve(self: int, args: int, nargs: int) -> int:
    """``serve(stream)``: execute requests until a ``SERVE_`` result concerns Python."""
    stream = PyLong_AsLong(load(args))
    state = PyEval_SaveThread()
    result = 0
    if load(stream + frames.SERVE_TURN) == 2:
        leave_turn(stream)
    while result == 0:
        result = await_request(stream)
        if result == 0:
            result = handle(stream)
        store(stream + frames.SERVE_FRAMES, load(stream + frames.SERVE_FRAMES) + 1)
        if result == 0:
            leave_turn(stream)
    # Kept until the next call: Python reads the staging buffer, or closes the socket.
    store_release(stream + frames.SERVE_TURN, 2)
    PyEval_RestoreThread(state)
    return PyLong_FromLong(result)


EXPORTS: dict[str, Any] = {"serve": serve}
