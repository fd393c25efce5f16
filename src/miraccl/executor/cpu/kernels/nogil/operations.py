"""Kernel source: operations that compiled code starts, on a thread that does not hold the interpreter's lock.

``run_unlocked`` runs a prepared operation of the engine.  The others go over TCP streams of their own (``streams``): ``exchange_unlocked``
is a collective, one message to and one from each peer, then one reduction of all that came, in the order of the sources, numbered, signed
and put on the board as every other; ``messages_unlocked`` are sends and receives.  What fails is explained alike.
"""

from __future__ import annotations

from typing import Any

from miraccl.executor.cpu.kernels import layout as at
from miraccl.executor.cpu.kernels.board import begin_operation
from miraccl.executor.cpu.kernels.nogil import layout as ex
from miraccl.executor.cpu.kernels.nogil.streams import (
    begin_next,
    left,
    left_of,
    receive_some,
    rest,
    send_some,
)
from miraccl.executor.cpu.kernels.waiting import fail, now_ns
from miraccl.native.intrinsics import (
    call4,
    inline,
    load,
    load_acquire,
    memcpy,
    store,
    store_release,
)

NOT_BEGUN = -1
NOT_FROM_PYTHON = (
    -1
)  # of CTX_TSTATE: there is no lock to let go of, and signals are not this thread's


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


@inline
def aborted(ctx: int) -> int:
    """OK, or the error of a communicator that was aborted before the operation began."""
    ctrl = load(ctx + at.CTX_CTRL)
    if load_acquire(ctrl + at.CTRL_ABORT) != 0:
        return fail(ctx, at.ERR_ABORTED, -1, 0, load(ctrl + at.CTRL_ABORT))
    return at.OK


# ---- what moves on streams


@inline
def payload_moved(way: int, upto: int) -> int:
    """``upto`` bytes, or the bytes of payload that have moved where those are fewer and not all."""
    return upto if left(way) == 0 else min(upto, max(0, load(way + ex.MOVED) - ex.HEADER_BYTES))


@inline
def fold_some(exchange: int) -> bool:
    """Reduce what has come from all peers and gone to all; True when all of it is done."""
    total, done = load(exchange + ex.FOLD_BYTES), load(exchange + ex.FOLDED)
    upto = total
    for i in range(load(exchange + ex.NPEERS)):
        row = load(exchange + ex.ROWS) + i * ex.ROW_BYTES
        upto = payload_moved(row + ex.OUT, payload_moved(row + ex.IN, upto))
    if upto < total:
        upto = upto // ex.FOLD_PART * ex.FOLD_PART
    if upto > done:
        sources, bases = load(exchange + ex.SOURCES), load(exchange + ex.BASES)
        nsources = load(exchange + ex.NSOURCES)
        for i in range(nsources):
            store(sources + 8 + 8 * i, load(bases + 8 * i) + done)
        count = (upto - done) // load(exchange + ex.ITEMSIZE)
        call4(
            load(exchange + ex.FOLD), load(exchange + ex.FOLD_TO) + done, sources, nsources, count
        )
        store(exchange + ex.FOLDED, upto)
    return upto == total


@inline
def move(ctx: int, exchange: int) -> int:
    """Until everything has gone, come and been reduced."""
    store(exchange + ex.FOLDED, 0)
    if load(exchange + ex.COPY_BYTES) != 0:
        memcpy(
            load(exchange + ex.COPY_TO),
            load(exchange + ex.COPY_FROM),
            load(exchange + ex.COPY_BYTES),
        )
    rows, count = load(exchange + ex.ROWS), load(exchange + ex.NPEERS)
    since = 0
    while True:
        moved, missing = False, 0
        for i in range(count):
            row = rows + i * ex.ROW_BYTES
            moved |= send_some(exchange, row)
            begin_next(row + ex.OUT)
            code = receive_some(ctx, exchange, row)
            if code >= at.ERR_ABORTED:
                return code
            begin_next(row + ex.IN)
            moved |= code == at.OK
            missing += left_of(row)
        if fold_some(exchange) and missing == 0:
            return at.OK
        now = 0 if moved else now_ns(ctx)
        since = now if since == 0 or moved else since
        if not moved:
            code = rest(ctx, exchange, now, now - since)
            if code != at.OK:
                return code


# ---- collectives


@inline
def begin(ctx: int, exchange: int) -> None:
    """Number and sign the operation, and write the headers."""
    store(ctx + at.CTX_STEP, 0)
    store(ctx + at.CTX_DEADLINE, 0)
    sig = begin_operation(ctx, load(exchange + ex.TEMPLATE), load(exchange + ex.COUNT))
    for i in range(load(exchange + ex.NPEERS)):
        row = load(exchange + ex.ROWS) + i * ex.ROW_BYTES
        sign(row + ex.OUT, sig)
        sign(row + ex.IN, sig)


@inline
def sign(way: int, sig: int) -> None:
    store(way + ex.MOVED, 0)
    store(way + ex.HEADER, sig)
    store(way + ex.HEADER + 8, load(way + ex.BYTES) - ex.HEADER_BYTES)


def exchange_unlocked(ctx: int, exchange: int, unused: int, unused2: int) -> int:
    """Run the exchange (``layout``): OK, an ERR_*, or NOT_BEGUN where the doors are shut."""
    if not enter(ctx):
        return NOT_BEGUN
    begin(ctx, exchange)
    code = aborted(ctx)
    if code == at.OK:
        code = move(ctx, exchange)
    if code == at.OK:
        store_release(load(ctx + at.CTX_CTRL) + at.BOARD_STATE, at.STATE_IDLE)
    leave(ctx)
    return code


# ---- sends and receives


@inline
def begin_messages(ctx: int, exchange: int) -> None:
    store(ctx + at.CTX_STEP, 0)
    store(ctx + at.CTX_DEADLINE, 0)
    mark = begin_collective(exchange)
    for i in range(load(exchange + ex.NPEERS)):
        row = load(exchange + ex.ROWS) + i * ex.ROW_BYTES
        count_messages(row + ex.OUT, load(exchange + ex.COLLECTIVES))
        count_messages(row + ex.IN, load(exchange + ex.COLLECTIVES))
        restart(row + ex.OUT, mark)
        restart(row + ex.IN, mark)


@inline
def begin_collective(exchange: int) -> int:
    """Count and remember the collective that begins with this exchange, if one does; the mark of its messages, 0 for plain ones."""
    words, begins = load(exchange + ex.COLLECTIVES), load(exchange + ex.COLLECTIVE)
    if words == 0:
        return 0
    number = load(words + ex.COUNTED)
    if begins != 0:
        number += 1
        store(words + ex.COUNTED, number)
        store(words + ex.REMEMBERED + 8 * (number % ex.MEMORY), begins)
    return (number & ex.MARK_MASK) << ex.MARK_SHIFT


@inline
def count_messages(way: int, words: int) -> None:
    """Add those that this exchange has one way to those of collectives; ``words`` count these, 0: the messages are plain."""
    stream, parts = load(way + ex.NUMBER), load(way + ex.NPARTS)
    if words != 0 and parts != 0:
        store(stream + ex.OF_COLLECTIVES, load(stream + ex.OF_COLLECTIVES) + parts)
        store(stream + ex.LAST_COLLECTIVE, load(words + ex.COUNTED))


@inline
def restart(way: int, mark: int) -> None:
    store(way + ex.MARK, mark)
    store(way + ex.BYTES, 0)
    store(way + ex.MOVED, 0)
    store(way + ex.BEGUN, 0)
    begin_next(way)


def messages_unlocked(ctx: int, exchange: int, unused: int, unused2: int) -> int:
    """As ``exchange_unlocked``, for an exchange of sends and receives; it is not numbered with the communicator's operations."""
    if not enter(ctx):
        return NOT_BEGUN
    code = aborted(ctx)
    if code == at.OK:
        begin_messages(ctx, exchange)
        code = move(ctx, exchange)
    if code == at.OK:
        ctrl = load(ctx + at.CTX_CTRL)
        store_release(ctrl + at.BOARD_P2P_SIG, 0)
        store_release(ctrl + at.BOARD_STATE, at.STATE_IDLE)
    leave(ctx)
    return code


EXPORTS: dict[str, Any] = {
    "run_unlocked": run_unlocked,
    "exchange_unlocked": exchange_unlocked,
    "messages_unlocked": messages_unlocked,
}
