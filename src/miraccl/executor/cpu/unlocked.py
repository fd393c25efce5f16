"""Kernel source: operations that compiled code starts, on a thread that does not hold the interpreter's lock.

``run_unlocked`` runs a prepared operation of the engine.  ``exchange_unlocked`` is an operation of another kind: one message to and one
from each peer over TCP streams of its own, then one reduction of all that came, in the order of the sources.  Both are numbered, signed
and put on the board alike, so what fails is explained alike.
"""

from __future__ import annotations

import platform
from typing import Any

from miraccl.executor.cpu import exchange_layout as ex
from miraccl.executor.cpu.kernels import layout as at
from miraccl.executor.cpu.kernels.board import begin_operation, show_waiting
from miraccl.executor.cpu.kernels.waiting import expired, fail, now_ns
from miraccl.native.intrinsics import call4, inline, load, load_acquire, memcpy, pause, sched_yield, store, store_release, syscall

NOT_BEGUN = -1
NOT_FROM_PYTHON = -1  # of CTX_TSTATE: there is no lock to let go of, and signals are not this thread's
# arch/*/entry/syscalls; include/linux/socket.h; include/uapi/asm-generic/poll.h
SYS_SENDMSG, SYS_RECVMSG, SYS_PPOLL = (211, 212, 73) if platform.machine() == "aarch64" else (46, 47, 271)
MSG_DONTWAIT, MSG_NOSIGNAL = 0x40, 0x4000
POLLIN, POLLOUT = 1, 4


@inline
def enter(ctx: int) -> bool:
    """Whether an operation may begin. One thread at a time may be in a context; the caller sees to that."""
    if load(ctx + at.CTX_BUSY) != 0 or load(ctx + at.CTX_INSIDE) != 0:
        return False
    store(ctx + at.CTX_INSIDE, 1)
    store(ctx + at.CTX_TSTATE, NOT_FROM_PYTHON)
    return True


@inline
def leave(ctx: int) -> None:
    store(ctx + at.CTX_TSTATE, 0)
    store(ctx + at.CTX_INSIDE, 0)


def run_unlocked(ctx: int, run: int, unused: int, unused2: int) -> int:
    """Run ``run``, whose addresses are set: OK, an ERR_*, or NOT_BEGUN where the doors are shut."""
    if not enter(ctx):
        return NOT_BEGUN
    store(ctx + at.CTX_LAST_PLAN, run)
    code = call4(load(ctx + at.CTX_OPERATE), ctx, run, load(run + at.RUN_TEMPLATE), 0)
    leave(ctx)
    return code


# ---- exchanges


@inline
def begin(ctx: int, exchange: int) -> int:
    """Number and sign the operation, and write the headers; its signature."""
    store(ctx + at.CTX_STEP, 0)
    store(ctx + at.CTX_DEADLINE, 0)
    sig = begin_operation(ctx, load(exchange + ex.TEMPLATE), load(exchange + ex.COUNT))
    for i in range(load(exchange + ex.NPEERS)):
        row = load(exchange + ex.ROWS) + i * ex.ROW_BYTES
        store(row + ex.SENT, 0)
        store(row + ex.GOT, 0)
        store(row + ex.HEADER_OUT, sig)
        store(row + ex.HEADER_OUT + 8, load(row + ex.SEND_BYTES))
    return sig


@inline
def vector(exchange: int, header: int, payload: int, nbytes: int, moved: int, most: int) -> int:
    """A message header (struct msghdr) for what is left of header and payload, ``most`` bytes of payload at a time."""
    parts, message, count = exchange + ex.VECTOR, exchange + ex.MESSAGE, 0
    if moved < ex.HEADER_BYTES:
        store(parts, header + moved)
        store(parts + 8, ex.HEADER_BYTES - moved)
        count = 1
    done = max(0, moved - ex.HEADER_BYTES)
    if done < nbytes:
        store(parts + 16 * count, payload + done)
        store(parts + 16 * count + 8, min(most, nbytes - done))
        count += 1
    store(message + 16, parts)
    store(message + 24, count)
    return message


@inline
def send_some(exchange: int, row: int) -> bool:
    moved, nbytes = load(row + ex.SENT), load(row + ex.SEND_BYTES)
    if moved == ex.HEADER_BYTES + nbytes:
        return False
    message = vector(exchange, row + ex.HEADER_OUT, load(row + ex.SEND), nbytes, moved, ex.SEND_MOST)
    taken = syscall(SYS_SENDMSG, load(row + ex.DESCRIPTOR), message, MSG_DONTWAIT | MSG_NOSIGNAL, 0, 0, 0)
    if taken <= 0:
        return False
    store(row + ex.SENT, moved + taken)
    return True


@inline
def receive_some(ctx: int, exchange: int, row: int, sig: int) -> int:
    """OK if something came, NEED_PLAN if nothing did, or an ERR_*.  A stream that has ended gives nothing: the control plane tells why."""
    moved, nbytes = load(row + ex.GOT), load(row + ex.RECV_BYTES)
    if moved == ex.HEADER_BYTES + nbytes:
        return at.NEED_PLAN
    message = vector(exchange, row + ex.HEADER_IN, load(row + ex.RECV), nbytes, moved, ex.RECV_MOST)
    taken = syscall(SYS_RECVMSG, load(row + ex.DESCRIPTOR), message, MSG_DONTWAIT, 0, 0, 0)
    if taken == 0:
        store(row + ex.ENDED, 1)
    if taken <= 0:
        return at.NEED_PLAN
    store(row + ex.GOT, moved + taken)
    if moved < ex.HEADER_BYTES <= moved + taken:
        theirs, size = load(row + ex.HEADER_IN), load(row + ex.HEADER_IN + 8)
        if theirs != sig:
            return fail(ctx, at.ERR_MISMATCH, load(row + ex.PEER), sig, theirs)
        if size != nbytes:
            return fail(ctx, at.ERR_SIZE, load(row + ex.PEER), nbytes, size)
    return at.OK


@inline
def unsent(row: int) -> int:
    """Bytes that are still to go."""
    return ex.HEADER_BYTES + load(row + ex.SEND_BYTES) - load(row + ex.SENT)


@inline
def unreceived(row: int) -> int:
    return ex.HEADER_BYTES + load(row + ex.RECV_BYTES) - load(row + ex.GOT)


@inline
def fold_some(exchange: int) -> bool:
    """Reduce what has come from all peers and gone to all; True when all of it is done."""
    total, done = load(exchange + ex.FOLD_BYTES), load(exchange + ex.FOLDED)
    upto = total
    for i in range(load(exchange + ex.NPEERS)):
        row = load(exchange + ex.ROWS) + i * ex.ROW_BYTES
        if unreceived(row) > 0:
            upto = min(upto, max(0, load(row + ex.GOT) - ex.HEADER_BYTES))
        if unsent(row) > 0:
            upto = min(upto, max(0, load(row + ex.SENT) - ex.HEADER_BYTES))
    if upto < total:
        upto = upto // ex.FOLD_PART * ex.FOLD_PART
    if upto > done:
        sources, bases = load(exchange + ex.SOURCES), load(exchange + ex.BASES)
        nsources = load(exchange + ex.NSOURCES)
        for i in range(nsources):
            store(sources + 8 + 8 * i, load(bases + 8 * i) + done)
        count = (upto - done) // load(exchange + ex.ITEMSIZE)
        call4(load(exchange + ex.FOLD), load(exchange + ex.FOLD_TO) + done, sources, nsources, count)
        store(exchange + ex.FOLDED, upto)
    return upto == total


@inline
def rest(ctx: int, exchange: int, idle: int) -> None:
    """Nothing moved for ``idle`` ns: look again at once, or after a nap that any stream ends."""
    if idle < ex.SPIN_NS:
        if idle > ex.SPIN_NS // 8:
            sched_yield()
        else:
            pause()
        return
    polls = load(exchange + ex.POLLS)
    count = load(exchange + ex.NPEERS)
    for i in range(count):
        row = load(exchange + ex.ROWS) + i * ex.ROW_BYTES
        wants = 0
        if load(row + ex.ENDED) == 0:
            wants = POLLIN * (unreceived(row) > 0) | POLLOUT * (unsent(row) > 0)
        descriptor = load(row + ex.DESCRIPTOR) if wants != 0 else 0xFFFFFFFF  # -1: not looked at
        store(polls + 8 * i, descriptor | wants << 32)
    store(exchange + ex.TIME, 0)
    store(exchange + ex.TIME + 8, min(idle, ex.NAP_NS))
    syscall(SYS_PPOLL, polls, count, exchange + ex.TIME, 0, 0, 0)


@inline
def first_missing(exchange: int) -> int:
    """The peer that is waited for."""
    for i in range(load(exchange + ex.NPEERS)):
        row = load(exchange + ex.ROWS) + i * ex.ROW_BYTES
        if unsent(row) > 0 or unreceived(row) > 0:
            return load(row + ex.PEER)
    return -1


@inline
def look_around(ctx: int, exchange: int, now: int) -> int:
    """What may end a wait: an abort, the deadline, a peer that has left."""
    ctrl, peer = load(ctx + at.CTX_CTRL), first_missing(exchange)
    show_waiting(ctx, peer)
    if load_acquire(ctrl + at.CTRL_ABORT) != 0:
        return fail(ctx, at.ERR_ABORTED, peer, 0, load(ctrl + at.CTRL_ABORT))
    if expired(ctx, now):
        return fail(ctx, at.ERR_TIMEOUT, peer, 0, 0)
    if peer >= 0 and load_acquire(load(ctx + at.CTX_GONE) + 8 * peer) != 0:
        return fail(ctx, at.ERR_LEFT, peer, 0, 0)
    return at.OK


@inline
def move(ctx: int, exchange: int, sig: int) -> int:
    """Until everything has gone, come and been reduced."""
    store(exchange + ex.FOLDED, 0)
    if load(exchange + ex.COPY_BYTES) != 0:
        memcpy(load(exchange + ex.COPY_TO), load(exchange + ex.COPY_FROM), load(exchange + ex.COPY_BYTES))
    rows, count = load(exchange + ex.ROWS), load(exchange + ex.NPEERS)
    since = 0
    while True:
        moved, left = False, 0
        for i in range(count):
            row = rows + i * ex.ROW_BYTES
            moved |= send_some(exchange, row)
            code = receive_some(ctx, exchange, row, sig)
            if code >= at.ERR_ABORTED:
                return code
            moved |= code == at.OK
            left += unsent(row) + unreceived(row)
        if fold_some(exchange) and left == 0:
            return at.OK
        if moved:
            since = 0
            continue
        now = now_ns(ctx)
        if since == 0:
            since = now
        if now - since > ex.SPIN_NS // 8:
            code = look_around(ctx, exchange, now)
            if code != at.OK:
                return code
        rest(ctx, exchange, now - since)


def exchange_unlocked(ctx: int, exchange: int, unused: int, unused2: int) -> int:
    """Run the exchange (``exchange_layout``): OK, an ERR_*, or NOT_BEGUN where the doors are shut."""
    if not enter(ctx):
        return NOT_BEGUN
    sig = begin(ctx, exchange)
    ctrl = load(ctx + at.CTX_CTRL)
    code = at.OK
    if load_acquire(ctrl + at.CTRL_ABORT) != 0:
        code = fail(ctx, at.ERR_ABORTED, -1, 0, load(ctrl + at.CTRL_ABORT))
    else:
        code = move(ctx, exchange, sig)
    if code == at.OK:
        store_release(ctrl + at.BOARD_STATE, at.STATE_IDLE)
    leave(ctx)
    return code


EXPORTS: dict[str, Any] = {"run_unlocked": run_unlocked, "exchange_unlocked": exchange_unlocked}
