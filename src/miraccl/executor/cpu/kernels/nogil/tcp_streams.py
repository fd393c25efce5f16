"""Messages on TCP streams that compiled code serves itself, without blocking (``offsets``).

A row is a peer's stream with its outgoing and its incoming message. Only ``poll_streams`` waits.
"""

from __future__ import annotations

import platform

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.nogil import offsets
from miraccl.executor.cpu.kernels.progress_page import publish_wait
from miraccl.executor.cpu.kernels.waiting import deadline_expired, fail, signal_eventfd
from miraccl.native.intrinsics import (
    inline,
    load,
    load_acquire,
    pause,
    sched_yield,
    store,
    store_release,
    syscall,
)

# arch/*/entry/syscalls; include/linux/socket.h; include/uapi/asm-generic/poll.h
SYS_SENDMSG, SYS_RECVMSG, SYS_PPOLL = (
    (211, 212, 73) if platform.machine() == "aarch64" else (46, 47, 271)
)
MSG_DONTWAIT, MSG_NOSIGNAL = 0x40, 0x4000
POLLIN, POLLOUT, POLLERR, POLLHUP, POLLRDHUP = 1, 4, 8, 16, 0x2000


@inline
def build_msghdr(exchange: int, header: int, direction: int, most: int) -> int:
    """Build a struct msghdr for the rest of a message, at most ``most`` bytes of payload."""
    vectors, message, count = exchange + offsets.VECTOR, exchange + offsets.MESSAGE, 0
    moved = load(direction + offsets.MOVED)
    if moved < offsets.HEADER_BYTES:
        store(vectors, header + moved)
        store(vectors + 8, offsets.HEADER_BYTES - moved)
        count = 1
    nbytes, done = (
        load(direction + offsets.BYTES) - offsets.HEADER_BYTES,
        max(0, moved - offsets.HEADER_BYTES),
    )
    if done < nbytes:
        store(vectors + 16 * count, load(direction + offsets.BUFFER) + done)
        store(vectors + 16 * count + 8, min(most, nbytes - done))
        count += 1
    store(message + 16, vectors)
    store(message + 24, count)
    return message


@inline
def remaining(direction: int) -> int:
    """Return the bytes of a message that have not moved."""
    return load(direction + offsets.BYTES) - load(direction + offsets.MOVED)


@inline
def remaining_both(row: int) -> int:
    """Return the bytes that have not moved in both directions of a row."""
    return remaining(row + offsets.OUT) + remaining(row + offsets.IN)


@inline
def send_some(exchange: int, row: int) -> bool:
    """Send what the kernel accepts; return True if anything moved."""
    direction = row + offsets.OUT
    if remaining(direction) == 0:
        return False
    message = build_msghdr(exchange, direction + offsets.HEADER, direction, offsets.MAX_SEND_BYTES)
    transferred = syscall(
        SYS_SENDMSG, load(row + offsets.DESCRIPTOR), message, MSG_DONTWAIT | MSG_NOSIGNAL, 0, 0, 0
    )
    if transferred <= 0:
        return False
    store(direction + offsets.MOVED, load(direction + offsets.MOVED) + transferred)
    return True


@inline
def receive_some(ctx: int, exchange: int, row: int) -> int:
    """Receive what has arrived: OK if anything did, NOT_HANDLED if nothing did, or an ERR_*.

    Nothing arrives on a stream that has ended; the control plane may know why it has.
    """
    direction = row + offsets.IN
    if remaining(direction) == 0:
        return layout.NOT_HANDLED
    message = build_msghdr(exchange, row + offsets.HEADER_IN, direction, offsets.MAX_RECV_BYTES)
    transferred = syscall(
        SYS_RECVMSG, load(row + offsets.DESCRIPTOR), message, MSG_DONTWAIT, 0, 0, 0
    )
    if transferred == 0:
        store(row + offsets.ENDED, 1)
    if transferred <= 0:
        return layout.NOT_HANDLED
    moved = load(direction + offsets.MOVED)
    store(direction + offsets.MOVED, moved + transferred)
    if moved < offsets.HEADER_BYTES <= moved + transferred:
        wanted, theirs = load(direction + offsets.HEADER), load(row + offsets.HEADER_IN)
        if theirs != wanted:
            return fail(ctx, layout.ERR_MISMATCH, load(row + offsets.PEER), wanted, theirs)
        wanted, theirs = load(direction + offsets.HEADER + 8), load(row + offsets.HEADER_IN + 8)
        if theirs != wanted:
            return fail(ctx, layout.ERR_SIZE, load(row + offsets.PEER), wanted, theirs)
    return layout.OK


@inline
def begin_next_segment(direction: int) -> None:
    """Begin the next send or receive of a direction whose message is complete, if there is one.

    Numbers it and writes its header.
    """
    begun = load(direction + offsets.SEGMENTS_BEGUN)
    if remaining(direction) == 0 and begun < load(direction + offsets.NSEGMENTS):
        part = load(direction + offsets.SEGMENTS) + begun * offsets.SEGMENT_SIZE
        number = load(load(direction + offsets.NUMBER) + offsets.MESSAGES_BEGUN) + 1
        store(load(direction + offsets.NUMBER) + offsets.MESSAGES_BEGUN, number)
        store(
            direction + offsets.HEADER,
            load(part + offsets.SEGMENT_SIGNATURE) | (number & layout.SEQ_MASK),
        )
        store(
            direction + offsets.HEADER + 8,
            load(part + offsets.SEGMENT_MESSAGE_BYTES) | load(direction + offsets.MARK),
        )
        store(direction + offsets.BUFFER, load(part + offsets.SEGMENT_ADDRESS))
        store(direction + offsets.BYTES, offsets.HEADER_BYTES + load(part + offsets.SEGMENT_BYTES))
        store(direction + offsets.MOVED, 0)
        store(direction + offsets.SEGMENTS_BEGUN, begun + 1)


@inline
def publish_missing(ctx: int, exchange: int) -> int:
    """Publish the awaited message on the progress page; return its peer, -1 if there is none."""
    for i in range(load(exchange + offsets.NPEERS)):
        row = load(exchange + offsets.ROWS) + i * offsets.ROW_BYTES
        if remaining_both(row) > 0:
            direction = row + offsets.IN if remaining(row + offsets.IN) > 0 else row + offsets.OUT
            if load(direction + offsets.NSEGMENTS) > 0:
                ctrl = load(ctx + layout.CTX_CTRL)
                part = (
                    load(direction + offsets.SEGMENTS)
                    + (load(direction + offsets.SEGMENTS_BEGUN) - 1) * offsets.SEGMENT_SIZE
                )
                store(ctrl + layout.PROGRESS_P2P_COUNT, load(part + offsets.SEGMENT_COUNT))
                store_release(
                    ctrl + layout.PROGRESS_P2P_SIG, load(part + offsets.SEGMENT_SIGNATURE)
                )
            publish_wait(ctx, load(row + offsets.PEER))
            return load(row + offsets.PEER)
    publish_wait(ctx, -1)
    return -1


@inline
def ended_peer(exchange: int) -> int:
    """Return a peer whose stream has ended before its messages were complete, -1 if none."""
    for i in range(load(exchange + offsets.NPEERS)):
        row = load(exchange + offsets.ROWS) + i * offsets.ROW_BYTES
        if load(row + offsets.ENDED) != 0 and remaining_both(row) > 0:
            return load(row + offsets.PEER)
    return -1


@inline
def check_wait(ctx: int, exchange: int, now: int, idle: int) -> int:
    """Check for the ends of a wait: an abort, the deadline, a peer that has left or lost its
    connection.

    A peer that has left may have done its part first, so its stream is read to the end.
    """
    ctrl, peer = load(ctx + layout.CTX_CTRL), publish_missing(ctx, exchange)
    if load_acquire(ctrl + layout.CTRL_ABORT) != 0:
        return fail(ctx, layout.ERR_ABORTED, peer, 0, load(ctrl + layout.CTRL_ABORT))
    if deadline_expired(ctx, now):
        return fail(ctx, layout.ERR_TIMEOUT, peer, 0, 0)
    cut = ended_peer(exchange)
    if cut >= 0 and load_acquire(load(ctx + layout.CTX_GONE) + 8 * cut) != 0:
        return fail(ctx, layout.ERR_LEFT, cut, 0, 0)
    if cut >= 0 and idle > offsets.STREAM_END_GRACE_NS:
        return fail(ctx, layout.ERR_STREAM_ENDED, cut, 0, 0)
    return layout.OK


@inline
def poll_streams(exchange: int, nanoseconds: int) -> None:
    """Sleep until a stream is ready."""
    polls, count = load(exchange + offsets.POLLS), load(exchange + offsets.NPEERS)
    for i in range(count):
        row = load(exchange + offsets.ROWS) + i * offsets.ROW_BYTES
        interest = 0
        if load(row + offsets.ENDED) == 0:
            to_come, to_go = remaining(row + offsets.IN) > 0, remaining(row + offsets.OUT) > 0
            # A peer that has closed its direction does not read either.
            interest = POLLIN * to_come | POLLOUT * to_go | POLLRDHUP * (to_go and not to_come)
        # poll ignores descriptor -1.
        descriptor = load(row + offsets.DESCRIPTOR) if interest != 0 else 0xFFFFFFFF
        store(polls + 8 * i, descriptor | interest << 32)
    store(exchange + offsets.TIME, 0)
    store(exchange + offsets.TIME + 8, nanoseconds)
    if syscall(SYS_PPOLL, polls, count, exchange + offsets.TIME, 0, 0, 0) > 0:
        for i in range(count):
            # From now on it is read without polling.
            if load(polls + 8 * i) >> 48 & (POLLERR | POLLHUP | POLLRDHUP) != 0:
                store(load(exchange + offsets.ROWS) + i * offsets.ROW_BYTES + offsets.ENDED, 1)


@inline
def notify_detector(ctx: int, exchange: int, since: int) -> None:
    """Notify the deadlock detector once that nothing has moved since ``since``."""
    if load(exchange + offsets.REPORTED) != since and load(ctx + layout.CTX_DETECTOR) >= 0:
        store(exchange + offsets.REPORTED, since)
        signal_eventfd(ctx, load(ctx + layout.CTX_DETECTOR))


@inline
def back_off(ctx: int, exchange: int, now: int, idle: int) -> int:
    """Wait after ``idle`` ns without progress: OK to try again, or an ERR_*."""
    if idle > offsets.SPIN_NS // 8:
        code = check_wait(ctx, exchange, now, idle)
        if code != layout.OK:
            return code
    if idle >= offsets.SPIN_NS:
        if idle >= offsets.REPORT_AFTER_NS:
            notify_detector(ctx, exchange, now - idle)
        poll_streams(exchange, min(idle, offsets.MAX_SLEEP_NS))
    elif idle > offsets.SPIN_NS // 8:
        sched_yield()
    else:
        pause()
    return layout.OK
