"""Operations that compiled code starts, on a thread without the GIL.

``run_nogil`` runs a prepared operation of the engine. The others use TCP streams of their own
(``streams``): ``exchange_nogil`` is a collective, one message to and one from each peer and then
one reduction of all that arrived, in the order of the sources, numbered, signed and published like
every other; ``messages_nogil`` are sends and receives. Errors are explained alike.
"""

from __future__ import annotations

from typing import Any

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.nogil import offsets
from miraccl.executor.cpu.kernels.nogil.tcp_streams import (
    back_off,
    begin_next_segment,
    receive_some,
    remaining,
    remaining_both,
    send_some,
)
from miraccl.executor.cpu.kernels.progress_page import begin_operation
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
# CTX_TSTATE of a thread that does not hold the GIL and does not handle signals
NOT_FROM_PYTHON = -1


@inline
def enter(ctx: int) -> bool:
    """Enter the context if an operation may begin. The caller admits one thread at a time."""
    if load(ctx + layout.CTX_BUSY) != 0 or load(ctx + layout.CTX_INSIDE) != 0:
        return False
    store(ctx + layout.CTX_INSIDE, 1)
    store(ctx + layout.CTX_TSTATE, NOT_FROM_PYTHON)
    return True


@inline
def leave(ctx: int) -> None:
    """Leave the context."""
    store(ctx + layout.CTX_TSTATE, 0)
    store(ctx + layout.CTX_INSIDE, 0)


def run_nogil(ctx: int, run: int, unused: int, unused2: int) -> int:
    """Run ``run``, whose addresses are set: OK, an ERR_*, or NOT_BEGUN if the engine is closed or
    in
    use.
    """
    if not enter(ctx):
        return NOT_BEGUN
    store(ctx + layout.CTX_LAST_RUN, run)
    code = call4(load(ctx + layout.CTX_OPERATE), ctx, run, load(run + layout.RUN_TEMPLATE), 0)
    leave(ctx)
    return code


@inline
def check_abort(ctx: int) -> int:
    """Return OK, or the error of a communicator that was aborted before the operation began."""
    ctrl = load(ctx + layout.CTX_CTRL)
    if load_acquire(ctrl + layout.CTRL_ABORT) != 0:
        return fail(ctx, layout.ERR_ABORTED, -1, 0, load(ctrl + layout.CTRL_ABORT))
    return layout.OK


# ---- progress on streams


@inline
def payload_moved(direction: int, upto: int) -> int:
    """Return ``upto``, or the bytes of payload that have moved if the message is incomplete and
    these
    are fewer.
    """
    return (
        upto
        if remaining(direction) == 0
        else min(upto, max(0, load(direction + offsets.MOVED) - offsets.HEADER_BYTES))
    )


@inline
def fold_some(exchange: int) -> bool:
    """Reduce what has arrived from all peers and been sent to all; True when all is reduced."""
    total, done = load(exchange + offsets.FOLD_BYTES), load(exchange + offsets.FOLDED)
    upto = total
    for i in range(load(exchange + offsets.NPEERS)):
        row = load(exchange + offsets.ROWS) + i * offsets.ROW_BYTES
        upto = payload_moved(row + offsets.OUT, payload_moved(row + offsets.IN, upto))
    if upto < total:
        upto = upto // offsets.FOLD_SEGMENT_BYTES * offsets.FOLD_SEGMENT_BYTES
    if upto > done:
        sources, bases = load(exchange + offsets.SOURCES), load(exchange + offsets.BASES)
        nsources = load(exchange + offsets.NSOURCES)
        for i in range(nsources):
            store(sources + 8 + 8 * i, load(bases + 8 * i) + done)
        count = (upto - done) // load(exchange + offsets.ITEMSIZE)
        call4(
            load(exchange + offsets.FOLD),
            load(exchange + offsets.FOLD_TO) + done,
            sources,
            nsources,
            count,
        )
        store(exchange + offsets.FOLDED, upto)
    return upto == total


@inline
def advance_streams(ctx: int, exchange: int) -> int:
    """Until everything has gone, come and been reduced."""
    store(exchange + offsets.FOLDED, 0)
    if load(exchange + offsets.COPY_BYTES) != 0:
        memcpy(
            load(exchange + offsets.COPY_TO),
            load(exchange + offsets.COPY_FROM),
            load(exchange + offsets.COPY_BYTES),
        )
    rows, count = load(exchange + offsets.ROWS), load(exchange + offsets.NPEERS)
    since = 0
    while True:
        moved, missing = False, 0
        for i in range(count):
            row = rows + i * offsets.ROW_BYTES
            moved |= send_some(exchange, row)
            begin_next_segment(row + offsets.OUT)
            code = receive_some(ctx, exchange, row)
            if code >= layout.ERR_ABORTED:
                return code
            begin_next_segment(row + offsets.IN)
            moved |= code == layout.OK
            missing += remaining_both(row)
        if fold_some(exchange) and missing == 0:
            return layout.OK
        now = 0 if moved else now_ns(ctx)
        since = now if since == 0 or moved else since
        if not moved:
            code = back_off(ctx, exchange, now, now - since)
            if code != layout.OK:
                return code


# ---- collectives


@inline
def begin(ctx: int, exchange: int) -> None:
    """Number and sign the operation, and write the headers."""
    store(ctx + layout.CTX_STEP, 0)
    store(ctx + layout.CTX_DEADLINE, 0)
    sig = begin_operation(ctx, load(exchange + offsets.TEMPLATE), load(exchange + offsets.COUNT))
    for i in range(load(exchange + offsets.NPEERS)):
        row = load(exchange + offsets.ROWS) + i * offsets.ROW_BYTES
        write_header(row + offsets.OUT, sig)
        write_header(row + offsets.IN, sig)


@inline
def write_header(direction: int, sig: int) -> None:
    """Write the header of one direction."""
    store(direction + offsets.MOVED, 0)
    store(direction + offsets.HEADER, sig)
    store(direction + offsets.HEADER + 8, load(direction + offsets.BYTES) - offsets.HEADER_BYTES)


def exchange_nogil(ctx: int, exchange: int, unused: int, unused2: int) -> int:
    """Run the exchange (``offsets``): OK, an ERR_*, or NOT_BEGUN if the engine is closed or
    busy.
    """
    if not enter(ctx):
        return NOT_BEGUN
    begin(ctx, exchange)
    code = check_abort(ctx)
    if code == layout.OK:
        code = advance_streams(ctx, exchange)
    if code == layout.OK:
        store_release(load(ctx + layout.CTX_CTRL) + layout.PROGRESS_STATE, layout.STATE_IDLE)
    leave(ctx)
    return code


# ---- sends and receives


@inline
def begin_messages(ctx: int, exchange: int) -> None:
    """Begin the first send and receive of every peer."""
    store(ctx + layout.CTX_STEP, 0)
    store(ctx + layout.CTX_DEADLINE, 0)
    mark = begin_collective(exchange)
    for i in range(load(exchange + offsets.NPEERS)):
        row = load(exchange + offsets.ROWS) + i * offsets.ROW_BYTES
        count_messages(row + offsets.OUT, load(exchange + offsets.COLLECTIVES))
        count_messages(row + offsets.IN, load(exchange + offsets.COLLECTIVES))
        restart(row + offsets.OUT, mark)
        restart(row + offsets.IN, mark)


@inline
def begin_collective(exchange: int) -> int:
    """Count and record the collective that starts with this exchange, if any.

    Returns the mark of its messages, 0 for plain ones.
    """
    words, begins = load(exchange + offsets.COLLECTIVES), load(exchange + offsets.COLLECTIVE)
    if words == 0:
        return 0
    number = load(words + offsets.COUNTED)
    if begins != 0:
        number += 1
        store(words + offsets.COUNTED, number)
        store(words + offsets.RECENT + 8 * (number % offsets.RECENT_SIZE), begins)
    return (number & offsets.MARK_MASK) << offsets.MARK_SHIFT


@inline
def count_messages(direction: int, words: int) -> None:
    """Add one direction's messages of this exchange to the counters of collectives.

    ``words``: address of these, 0 for plain messages.
    """
    stream, parts = load(direction + offsets.NUMBER), load(direction + offsets.NSEGMENTS)
    if words != 0 and parts != 0:
        store(
            stream + offsets.COLLECTIVE_MESSAGES, load(stream + offsets.COLLECTIVE_MESSAGES) + parts
        )
        store(stream + offsets.LAST_COLLECTIVE, load(words + offsets.COUNTED))


@inline
def restart(direction: int, mark: int) -> None:
    """Begin the messages of one direction."""
    store(direction + offsets.MARK, mark)
    store(direction + offsets.BYTES, 0)
    store(direction + offsets.MOVED, 0)
    store(direction + offsets.SEGMENTS_BEGUN, 0)
    begin_next_segment(direction)


def messages_nogil(ctx: int, exchange: int, unused: int, unused2: int) -> int:
    """Run an exchange of sends and receives, as ``exchange_nogil``; it has no sequence number."""
    if not enter(ctx):
        return NOT_BEGUN
    code = check_abort(ctx)
    if code == layout.OK:
        begin_messages(ctx, exchange)
        code = advance_streams(ctx, exchange)
    if code == layout.OK:
        ctrl = load(ctx + layout.CTX_CTRL)
        store_release(ctrl + layout.PROGRESS_P2P_SIG, 0)
        store_release(ctrl + layout.PROGRESS_STATE, layout.STATE_IDLE)
    leave(ctx)
    return code


EXPORTS: dict[str, Any] = {
    "run_nogil": run_nogil,
    "exchange_nogil": exchange_nogil,
    "messages_nogil": messages_nogil,
}
