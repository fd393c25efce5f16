"""Kernel source: messages on TCP streams that compiled code serves itself, without blocking (``layout``).

A row is a peer's stream, with the message that goes on it and the one that comes.  Nothing here waits but ``nap``.
"""

from __future__ import annotations

import platform

from miraccl.executor.cpu.kernels import layout as at
from miraccl.executor.cpu.kernels.board import show_waiting
from miraccl.executor.cpu.kernels.nogil import layout as ex
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
    parts, message, count = exchange + ex.VECTOR, exchange + ex.MESSAGE, 0
    moved = load(way + ex.MOVED)
    if moved < ex.HEADER_BYTES:
        store(parts, header + moved)
        store(parts + 8, ex.HEADER_BYTES - moved)
        count = 1
    nbytes, done = load(way + ex.BYTES) - ex.HEADER_BYTES, max(0, moved - ex.HEADER_BYTES)
    if done < nbytes:
        store(parts + 16 * count, load(way + ex.BUFFER) + done)
        store(parts + 16 * count + 8, min(most, nbytes - done))
        count += 1
    store(message + 16, parts)
    store(message + 24, count)
    return message


@inline
def left(way: int) -> int:
    """Bytes that are still to go or to come."""
    return load(way + ex.BYTES) - load(way + ex.MOVED)


@inline
def left_of(row: int) -> int:
    """The same, both ways."""
    return left(row + ex.OUT) + left(row + ex.IN)


@inline
def send_some(exchange: int, row: int) -> bool:
    way = row + ex.OUT
    if left(way) == 0:
        return False
    message = vector(exchange, way + ex.HEADER, way, ex.SEND_MOST)
    taken = syscall(
        SYS_SENDMSG, load(row + ex.DESCRIPTOR), message, MSG_DONTWAIT | MSG_NOSIGNAL, 0, 0, 0
    )
    if taken <= 0:
        return False
    store(way + ex.MOVED, load(way + ex.MOVED) + taken)
    return True


@inline
def receive_some(ctx: int, exchange: int, row: int) -> int:
    """OK if something came, NEED_PLAN if nothing did, or an ERR_*.  Nothing comes on a stream that has ended: others may tell why."""
    way = row + ex.IN
    if left(way) == 0:
        return at.NEED_PLAN
    message = vector(exchange, row + ex.HEADER_IN, way, ex.RECV_MOST)
    taken = syscall(SYS_RECVMSG, load(row + ex.DESCRIPTOR), message, MSG_DONTWAIT, 0, 0, 0)
    if taken == 0:
        store(row + ex.ENDED, 1)
    if taken <= 0:
        return at.NEED_PLAN
    moved = load(way + ex.MOVED)
    store(way + ex.MOVED, moved + taken)
    if moved < ex.HEADER_BYTES <= moved + taken:
        wanted, theirs = load(way + ex.HEADER), load(row + ex.HEADER_IN)
        if theirs != wanted:
            return fail(ctx, at.ERR_MISMATCH, load(row + ex.PEER), wanted, theirs)
        wanted, theirs = load(way + ex.HEADER + 8), load(row + ex.HEADER_IN + 8)
        if theirs != wanted:
            return fail(ctx, at.ERR_SIZE, load(row + ex.PEER), wanted, theirs)
    return at.OK


@inline
def begin_next(way: int) -> None:
    """Where a message has gone or come: begin with the next of the sends or receives, if there is one; number it, and write its header."""
    begun = load(way + ex.BEGUN)
    if left(way) == 0 and begun < load(way + ex.NPARTS):
        part = load(way + ex.PARTS) + begun * ex.PART_SIZE
        number = load(load(way + ex.NUMBER) + ex.BEGUN_EVER) + 1
        store(load(way + ex.NUMBER) + ex.BEGUN_EVER, number)
        store(way + ex.HEADER, load(part + ex.PART_SIGNATURE) | (number & at.SEQ_MASK))
        store(way + ex.HEADER + 8, load(part + ex.PART_WHOLE) | load(way + ex.MARK))
        store(way + ex.BUFFER, load(part + ex.PART))
        store(way + ex.BYTES, ex.HEADER_BYTES + load(part + ex.PART_BYTES))
        store(way + ex.MOVED, 0)
        store(way + ex.BEGUN, begun + 1)


@inline
def show_missing(ctx: int, exchange: int) -> int:
    """Put what is waited for on the board; its peer, -1 if there is none."""
    for i in range(load(exchange + ex.NPEERS)):
        row = load(exchange + ex.ROWS) + i * ex.ROW_BYTES
        if left_of(row) > 0:
            way = row + ex.IN if left(row + ex.IN) > 0 else row + ex.OUT
            if load(way + ex.NPARTS) > 0:
                ctrl = load(ctx + at.CTX_CTRL)
                part = load(way + ex.PARTS) + (load(way + ex.BEGUN) - 1) * ex.PART_SIZE
                store(ctrl + at.BOARD_P2P_COUNT, load(part + ex.PART_COUNT))
                store_release(ctrl + at.BOARD_P2P_SIG, load(part + ex.PART_SIGNATURE))
            show_waiting(ctx, load(row + ex.PEER))
            return load(row + ex.PEER)
    show_waiting(ctx, -1)
    return -1


@inline
def cut_off(exchange: int) -> int:
    """A peer whose stream has ended though something is missing, -1 if there is none."""
    for i in range(load(exchange + ex.NPEERS)):
        row = load(exchange + ex.ROWS) + i * ex.ROW_BYTES
        if load(row + ex.ENDED) != 0 and left_of(row) > 0:
            return load(row + ex.PEER)
    return -1


@inline
def look_around(ctx: int, exchange: int, now: int, idle: int) -> int:
    """What may end a wait: an abort, the deadline, a peer that has left or to which there is no connection any more.

    Who has left may have done its part first, so what it has sent is taken up to the end of its stream.
    """
    ctrl, peer = load(ctx + at.CTX_CTRL), show_missing(ctx, exchange)
    if load_acquire(ctrl + at.CTRL_ABORT) != 0:
        return fail(ctx, at.ERR_ABORTED, peer, 0, load(ctrl + at.CTRL_ABORT))
    if expired(ctx, now):
        return fail(ctx, at.ERR_TIMEOUT, peer, 0, 0)
    cut = cut_off(exchange)
    if cut >= 0 and load_acquire(load(ctx + at.CTX_GONE) + 8 * cut) != 0:
        return fail(ctx, at.ERR_LEFT, cut, 0, 0)
    if cut >= 0 and idle > ex.CUT_NS:
        return fail(ctx, at.ERR_CUT, cut, 0, 0)
    return at.OK


@inline
def nap(exchange: int, nanoseconds: int) -> None:
    """Sleep until a stream has news."""
    polls, count = load(exchange + ex.POLLS), load(exchange + ex.NPEERS)
    for i in range(count):
        row = load(exchange + ex.ROWS) + i * ex.ROW_BYTES
        wants = 0
        if load(row + ex.ENDED) == 0:
            to_come, to_go = left(row + ex.IN) > 0, left(row + ex.OUT) > 0
            wants = (
                POLLIN * to_come | POLLOUT * to_go | POLLRDHUP * (to_go and not to_come)
            )  # who sends no more takes no more
        descriptor = load(row + ex.DESCRIPTOR) if wants != 0 else 0xFFFFFFFF  # -1: not looked at
        store(polls + 8 * i, descriptor | wants << 32)
    store(exchange + ex.TIME, 0)
    store(exchange + ex.TIME + 8, nanoseconds)
    if syscall(SYS_PPOLL, polls, count, exchange + ex.TIME, 0, 0, 0) > 0:
        for i in range(count):
            if (
                load(polls + 8 * i) >> 48 & (POLLERR | POLLHUP | POLLRDHUP) != 0
            ):  # what has come is read without asking again
                store(load(exchange + ex.ROWS) + i * ex.ROW_BYTES + ex.ENDED, 1)


@inline
def tell_lookout(ctx: int, exchange: int, since: int) -> None:
    """Nothing has moved for long, ``since`` then: told once."""
    if load(exchange + ex.TOLD) != since and load(ctx + at.CTX_LOOKOUT) >= 0:
        store(exchange + ex.TOLD, since)
        write_to(ctx, load(ctx + at.CTX_LOOKOUT))


@inline
def rest(ctx: int, exchange: int, now: int, idle: int) -> int:
    """Nothing has moved for ``idle`` ns: OK to look again, or an ERR_*."""
    if idle > ex.SPIN_NS // 8:
        code = look_around(ctx, exchange, now, idle)
        if code != at.OK:
            return code
    if idle >= ex.SPIN_NS:
        if idle >= ex.LONG_NS:
            tell_lookout(ctx, exchange, now - idle)
        nap(exchange, min(idle, ex.NAP_NS))
    elif idle > ex.SPIN_NS // 8:
        sched_yield()
    else:
        pause()
    return at.OK
