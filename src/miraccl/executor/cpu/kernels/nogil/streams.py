"""Kernel source: messages on TCP streams that compiled code serves itself, without blocking (``layout``).

A row is a peer's stream, with the message that goes on it and the one that comes.  Nothing here waits but ``nap``.
"""

from __future__ import annotations

import platform

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.board import show_waiting
from miraccl.executor.cpu.kernels.nogil import offsets
from miraccl.executor.cpu.kernels.waiting import expired, fail, write_to
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
def vector(exchange: int, header: int, way: int, most: int) -> int:
    """A message header (struct msghdr) for what is left of header and payload, ``most`` bytes of payload at a time."""
    parts, message, count = exchange + offsets.VECTOR, exchange + offsets.MESSAGE, 0
    moved = load(way + offsets.MOVED)
    if moved < offsets.HEADER_BYTES:
        store(parts, header + moved)
        store(parts + 8, offsets.HEADER_BYTES - moved)
        count = 1
    nbytes, done = (
        load(way + offsets.BYTES) - offsets.HEADER_BYTES,
        max(0, moved - offsets.HEADER_BYTES),
    )
    if done < nbytes:
        store(parts + 16 * count, load(way + offsets.BUFFER) + done)
        store(parts + 16 * count + 8, min(most, nbytes - done))
        count += 1
    store(message + 16, parts)
    store(message + 24, count)
    return message


@inline
def left(way: int) -> int:
    """Bytes that are still to go or to come."""
    return load(way + offsets.BYTES) - load(way + offsets.MOVED)


@inline
def left_of(row: int) -> int:
    """The same, both ways."""
    return left(row + offsets.OUT) + left(row + offsets.IN)


@inline
def send_some(exchange: int, row: int) -> bool:
    way = row + offsets.OUT
    if left(way) == 0:
        return False
    message = vector(exchange, way + offsets.HEADER, way, offsets.MAX_SEND_BYTES)
    taken = syscall(
        SYS_SENDMSG, load(row + offsets.DESCRIPTOR), message, MSG_DONTWAIT | MSG_NOSIGNAL, 0, 0, 0
    )
    if taken <= 0:
        return False
    store(way + offsets.MOVED, load(way + offsets.MOVED) + taken)
    return True


@inline
def receive_some(ctx: int, exchange: int, row: int) -> int:
    """OK if something came, NOT_HANDLED if nothing did, or an ERR_*.  Nothing comes on a stream that has ended: others may tell why."""
    way = row + offsets.IN
    if left(way) == 0:
        return layout.NOT_HANDLED
    message = vector(exchange, row + offsets.HEADER_IN, way, offsets.MAX_RECV_BYTES)
    taken = syscall(SYS_RECVMSG, load(row + offsets.DESCRIPTOR), message, MSG_DONTWAIT, 0, 0, 0)
    if taken == 0:
        store(row + offsets.ENDED, 1)
    if taken <= 0:
        return layout.NOT_HANDLED
    moved = load(way + offsets.MOVED)
    store(way + offsets.MOVED, moved + taken)
    if moved < offsets.HEADER_BYTES <= moved + taken:
        wanted, theirs = load(way + offsets.HEADER), load(row + offsets.HEADER_IN)
        if theirs != wanted:
            return fail(ctx, layout.ERR_MISMATCH, load(row + offsets.PEER), wanted, theirs)
        wanted, theirs = load(way + offsets.HEADER + 8), load(row + offsets.HEADER_IN + 8)
        if theirs != wanted:
            return fail(ctx, layout.ERR_SIZE, load(row + offsets.PEER), wanted, theirs)
    return layout.OK


@inline
def begin_next(way: int) -> None:
    """Where a message has gone or come: begin with the next of the sends or receives, if there is one; number it, and write its header."""
    begun = load(way + offsets.SEGMENTS_BEGUN)
    if left(way) == 0 and begun < load(way + offsets.NSEGMENTS):
        part = load(way + offsets.SEGMENTS) + begun * offsets.SEGMENT_SIZE
        number = load(load(way + offsets.NUMBER) + offsets.MESSAGES_BEGUN) + 1
        store(load(way + offsets.NUMBER) + offsets.MESSAGES_BEGUN, number)
        store(
            way + offsets.HEADER,
            load(part + offsets.SEGMENT_SIGNATURE) | (number & layout.SEQ_MASK),
        )
        store(
            way + offsets.HEADER + 8,
            load(part + offsets.SEGMENT_MESSAGE_BYTES) | load(way + offsets.MARK),
        )
        store(way + offsets.BUFFER, load(part + offsets.SEGMENT_ADDRESS))
        store(way + offsets.BYTES, offsets.HEADER_BYTES + load(part + offsets.SEGMENT_BYTES))
        store(way + offsets.MOVED, 0)
        store(way + offsets.SEGMENTS_BEGUN, begun + 1)


@inline
def show_missing(ctx: int, exchange: int) -> int:
    """Put what is waited for on the board; its peer, -1 if there is none."""
    for i in range(load(exchange + offsets.NPEERS)):
        row = load(exchange + offsets.ROWS) + i * offsets.ROW_BYTES
        if left_of(row) > 0:
            way = row + offsets.IN if left(row + offsets.IN) > 0 else row + offsets.OUT
            if load(way + offsets.NSEGMENTS) > 0:
                ctrl = load(ctx + layout.CTX_CTRL)
                part = (
                    load(way + offsets.SEGMENTS)
                    + (load(way + offsets.SEGMENTS_BEGUN) - 1) * offsets.SEGMENT_SIZE
                )
                store(ctrl + layout.PROGRESS_P2P_COUNT, load(part + offsets.SEGMENT_COUNT))
                store_release(
                    ctrl + layout.PROGRESS_P2P_SIG, load(part + offsets.SEGMENT_SIGNATURE)
                )
            show_waiting(ctx, load(row + offsets.PEER))
            return load(row + offsets.PEER)
    show_waiting(ctx, -1)
    return -1


@inline
def cut_off(exchange: int) -> int:
    """A peer whose stream has ended though something is missing, -1 if there is none."""
    for i in range(load(exchange + offsets.NPEERS)):
        row = load(exchange + offsets.ROWS) + i * offsets.ROW_BYTES
        if load(row + offsets.ENDED) != 0 and left_of(row) > 0:
            return load(row + offsets.PEER)
    return -1


@inline
def look_around(ctx: int, exchange: int, now: int, idle: int) -> int:
    """What may end a wait: an abort, the deadline, a peer that has left or to which there is no connection any more.

    Who has left may have done its part first, so what it has sent is taken up to the end of its stream.
    """
    ctrl, peer = load(ctx + layout.CTX_CTRL), show_missing(ctx, exchange)
    if load_acquire(ctrl + layout.CTRL_ABORT) != 0:
        return fail(ctx, layout.ERR_ABORTED, peer, 0, load(ctrl + layout.CTRL_ABORT))
    if expired(ctx, now):
        return fail(ctx, layout.ERR_TIMEOUT, peer, 0, 0)
    cut = cut_off(exchange)
    if cut >= 0 and load_acquire(load(ctx + layout.CTX_GONE) + 8 * cut) != 0:
        return fail(ctx, layout.ERR_LEFT, cut, 0, 0)
    if cut >= 0 and idle > offsets.STREAM_END_GRACE_NS:
        return fail(ctx, layout.ERR_STREAM_ENDED, cut, 0, 0)
    return layout.OK


@inline
def nap(exchange: int, nanoseconds: int) -> None:
    """Sleep until a stream has news."""
    polls, count = load(exchange + offsets.POLLS), load(exchange + offsets.NPEERS)
    for i in range(count):
        row = load(exchange + offsets.ROWS) + i * offsets.ROW_BYTES
        wants = 0
        if load(row + offsets.ENDED) == 0:
            to_come, to_go = left(row + offsets.IN) > 0, left(row + offsets.OUT) > 0
            wants = (
                POLLIN * to_come | POLLOUT * to_go | POLLRDHUP * (to_go and not to_come)
            )  # who sends no more takes no more
        descriptor = (
            load(row + offsets.DESCRIPTOR) if wants != 0 else 0xFFFFFFFF
        )  # -1: not looked at
        store(polls + 8 * i, descriptor | wants << 32)
    store(exchange + offsets.TIME, 0)
    store(exchange + offsets.TIME + 8, nanoseconds)
    if syscall(SYS_PPOLL, polls, count, exchange + offsets.TIME, 0, 0, 0) > 0:
        for i in range(count):
            if (
                load(polls + 8 * i) >> 48 & (POLLERR | POLLHUP | POLLRDHUP) != 0
            ):  # what has come is read without asking again
                store(load(exchange + offsets.ROWS) + i * offsets.ROW_BYTES + offsets.ENDED, 1)


@inline
def tell_lookout(ctx: int, exchange: int, since: int) -> None:
    """Nothing has moved for long, ``since`` then: told once."""
    if load(exchange + offsets.REPORTED) != since and load(ctx + layout.CTX_DETECTOR) >= 0:
        store(exchange + offsets.REPORTED, since)
        write_to(ctx, load(ctx + layout.CTX_DETECTOR))


@inline
def rest(ctx: int, exchange: int, now: int, idle: int) -> int:
    """Nothing has moved for ``idle`` ns: OK to look again, or an ERR_*."""
    if idle > offsets.SPIN_NS // 8:
        code = look_around(ctx, exchange, now, idle)
        if code != layout.OK:
            return code
    if idle >= offsets.SPIN_NS:
        if idle >= offsets.REPORT_AFTER_NS:
            tell_lookout(ctx, exchange, now - idle)
        nap(exchange, min(idle, offsets.MAX_SLEEP_NS))
    elif idle > offsets.SPIN_NS // 8:
        sched_yield()
    else:
        pause()
    return layout.OK
