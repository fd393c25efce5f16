"""Sends and receives: one alone, and any number that go on together.

A message is cut into pieces of a slot; both ends cut alike, however each of them groups its calls.  What goes on together is a
table of operations; the messages between two ranks in one direction follow one another (``OP_PREDECESSOR``), so the order on a FIFO is
that of the program, and everything else goes in whatever order it can: no operation ever waits for another one of the table.  A
call ends when the operations have whose ``OP_WAIT`` is ``ALL``, or one whose is ``ANY``; the others keep their progress (``OP_DONE``) for
the next call.

Why this cannot deadlock where the program does not: a rank that waits here waits only because each of its operations needs its
peer, and each that could go has gone.
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.counts import count_hash
from miraccl.executor.cpu.kernels.messages import (
    acquire,
    can_post_address,
    connection,
    consume_part,
    drain,
    post,
    post_address,
    post_slot,
    receive,
    take,
    want,
)
from miraccl.executor.cpu.kernels.slots import MOST, must_be_taken, post_line, slot
from miraccl.executor.cpu.kernels.waiting import (
    FIRST_SLEEP_NS,
    arm_bell,
    doze,
    fail,
    interrupted,
    longer,
    may_yield,
    never_comes,
    now_ns,
    release_gil,
    yield_core,
)
from miraccl.native.intrinsics import (
    inline,
    load,
    load_acquire,
    memcpy,
    pause,
    store,
    store_release,
)
from miraccl.types import Collective, DType

SEND_RECV = int(Collective.SEND_RECV)
#: 4 bits for each DType: of how many bytes its elements are, as a power of two
ITEM_SIZES = sum((dtype.itemsize.bit_length() - 1) << 4 * dtype for dtype in DType)


@inline
def signature(dtype: int, count: int) -> int:
    """As ``lower.signature`` makes it, without a sequence number: two ranks may have sent different numbers of messages to others."""
    return SEND_RECV << 16 | dtype << 21 | count_hash(count) << layout.SIG_COUNT_SHIFT


@inline
def item_size(dtype: int) -> int:
    """Bytes of an element."""
    return 1 << (ITEM_SIZES >> 4 * dtype & 15)


@inline
def from_bytes(ctx: int, total: int) -> int:
    """From how many bytes on the pieces of a message of ``total`` bytes are posted by address; -1: never."""
    threshold = load(ctx + layout.CTX_P2P_DIRECT)
    return layout.MIN_DIRECT_BYTES if 0 <= threshold <= total else -1


@inline
def put_piece(ctx: int, peer: int, address: int, nbytes: int, sig: int, total: int) -> int:
    conn = connection(ctx, layout.CTX_SEND, peer)
    code = acquire(ctx, conn, peer)
    if code != layout.OK:
        return code
    if nbytes <= layout.INLINE_BYTES:
        memcpy(post_line(conn) + layout.DESC_INLINE, address, nbytes)
        post(ctx, conn, sig, nbytes, layout.MODE_INLINE)
    elif can_post_address(ctx, conn, address, nbytes, from_bytes(ctx, total)):
        post_address(ctx, conn, sig, address, nbytes)
    else:
        memcpy(slot(conn), address, nbytes)
        post_slot(ctx, conn, sig, nbytes)
    return layout.OK


@inline
def announce(ctx: int, peer: int, address: int, nbytes: int) -> None:
    conn = connection(ctx, layout.CTX_RECV, peer)
    if load(conn + layout.CONN_KIND) == layout.KIND_NET and nbytes > layout.INLINE_BYTES:
        want(ctx, conn, address, nbytes)


@inline
def piece_bytes(ctx: int, peer: int) -> int:
    """Both ends of a pair have slots of the same size; network FIFOs send larger pieces, straight from and to the user's memory."""
    conn = connection(ctx, layout.CTX_SEND, peer)
    if load(conn + layout.CONN_KIND) == layout.KIND_NET:
        return layout.NET_SEGMENT_BYTES
    return load(conn + layout.CONN_SLOT_BYTES)


@inline
def take_piece(ctx: int, peer: int, address: int, nbytes: int, sig: int, total: int) -> int:
    """A piece of a message that comes alone: where that is long, for a time everything goes one way, and swapping slots does not pay."""
    announce(ctx, peer, address, nbytes)
    return take_announced(ctx, peer, address, nbytes, sig, total <= MOST * piece_bytes(ctx, peer))


@inline
def take_announced(ctx: int, peer: int, address: int, nbytes: int, sig: int, may_swap: bool) -> int:
    conn = connection(ctx, layout.CTX_RECV, peer)
    code = receive(ctx, conn, peer, sig)
    if code != layout.OK:
        return code
    size = load(post_line(conn) + layout.DESC_BYTES)
    if size != nbytes:
        return fail(ctx, layout.ERR_SIZE, peer, nbytes, size)
    code = take(ctx, conn, peer, address, size)
    if code == layout.OK:
        consume_part(ctx, conn, may_swap and load(ctx + layout.CTX_SWAP) != 0)
    return code


def _one_message(ctx: int, receives: bool, peer: int, address: int, count: int, dtype: int) -> int:
    ctrl = load(ctx + layout.CTX_CTRL)
    sig = signature(dtype, count)
    store(ctrl + layout.PROGRESS_P2P_COUNT, count)
    store_release(ctrl + layout.PROGRESS_P2P_SIG, sig)
    store(ctx + layout.CTX_DEADLINE, 0)
    store(ctx + layout.CTX_STEP, 0)
    nbytes = count * item_size(dtype)
    store(ctx + layout.CTX_STREAM, 1 if nbytes >= load(ctx + layout.CTX_STREAM_FROM) else 0)
    piece = piece_bytes(ctx, peer)
    start = 0
    while True:
        size = min(piece, nbytes - start)
        if receives:
            code = take_piece(ctx, peer, address + start, size, sig, nbytes)
        else:
            code = put_piece(ctx, peer, address + start, size, sig, nbytes)
        if code != layout.OK:
            return code
        start += size
        if start >= nbytes:
            break
    if not receives:
        code = drain(ctx, connection(ctx, layout.CTX_SEND, peer), peer)
        if code != layout.OK:
            return code
    store_release(ctrl + layout.PROGRESS_P2P_SIG, 0)
    store_release(ctrl + layout.PROGRESS_STATE, layout.STATE_IDLE)
    return layout.OK


one_message = inline(_one_message)


@inline
def begin_op(
    ctx: int, op: int, receives: bool, peer: int, address: int, count: int, dtype: int, must: int
) -> None:
    """Write an operation that has not begun and follows no other one; as ``comm.exchange`` makes it."""
    nbytes, piece = count * item_size(dtype), piece_bytes(ctx, peer)
    store(op + layout.OP_RECEIVES, 1 if receives else 0)
    store(op + layout.OP_PEER, peer)
    store(op + layout.OP_ADDR, address)
    store(op + layout.OP_BYTES, nbytes)
    store(op + layout.OP_SIG, signature(dtype, count))
    store(op + layout.OP_PREDECESSOR, -1)
    store(op + layout.OP_SEGMENTS, max(1, (nbytes + piece - 1) // piece))
    store(op + layout.OP_COUNT, count)
    store(op + layout.OP_DONE, 0)
    store(op + layout.OP_MARK, 0)
    store(op + layout.OP_WAIT, must)


@inline
def finished(ctx: int, op: int) -> bool:
    """All pieces are done and, for a send, taken where they were posted by address (``OP_MARK`` is then the count of messages)."""
    if load(op + layout.OP_DONE) < load(op + layout.OP_SEGMENTS):
        return False
    if load(op + layout.OP_RECEIVES) != 0 or load(op + layout.OP_MARK) == 0:
        return True
    conn = connection(ctx, layout.CTX_SEND, load(op + layout.OP_PEER))
    return load_acquire(load(conn + layout.CONN_TAIL_ADDR)) >= load(op + layout.OP_MARK)


@inline
def can_go(ctx: int, table: int, op: int) -> bool:
    """Whether the next piece can be posted or taken now. Tells the proxy where a piece may land (``OP_MARK``: pieces told)."""
    done = load(op + layout.OP_DONE)
    if done >= load(op + layout.OP_SEGMENTS):
        return False
    after = load(op + layout.OP_PREDECESSOR)
    if after >= 0:
        before = table + after * layout.OP_SIZE
        if load(before + layout.OP_DONE) < load(before + layout.OP_SEGMENTS):
            return False
    peer = load(op + layout.OP_PEER)
    if load(op + layout.OP_RECEIVES) == 0:
        conn = connection(ctx, layout.CTX_SEND, peer)
        return load_acquire(load(conn + layout.CONN_TAIL_ADDR)) >= must_be_taken(conn)
    conn = connection(ctx, layout.CTX_RECV, peer)
    if load(op + layout.OP_MARK) <= done:
        start = done * piece_bytes(ctx, peer)
        announce(
            ctx,
            peer,
            load(op + layout.OP_ADDR) + start,
            min(piece_bytes(ctx, peer), load(op + layout.OP_BYTES) - start),
        )
        store(op + layout.OP_MARK, done + 1)
    return load_acquire(post_line(conn) + layout.DESC_FLAG) >= load(conn + layout.CONN_COUNT) + 1


@inline
def go(ctx: int, op: int) -> int:
    """The next piece of an operation that can go."""
    peer, done = load(op + layout.OP_PEER), load(op + layout.OP_DONE)
    piece = piece_bytes(ctx, peer)
    start = done * piece
    address, size = (
        load(op + layout.OP_ADDR) + start,
        min(piece, load(op + layout.OP_BYTES) - start),
    )
    if load(op + layout.OP_RECEIVES) == 0:
        code = put_piece(
            ctx, peer, address, size, load(op + layout.OP_SIG), load(op + layout.OP_BYTES)
        )
        conn = connection(ctx, layout.CTX_SEND, peer)
        if load(conn + layout.CONN_LAST_DIRECT) == load(conn + layout.CONN_COUNT):
            store(op + layout.OP_MARK, load(conn + layout.CONN_COUNT))
    else:
        code = take_announced(ctx, peer, address, size, load(op + layout.OP_SIG), True)
    store(op + layout.OP_DONE, done + 1)
    return code


@inline
def advance(ctx: int, table: int, count: int) -> tuple[int, int]:
    """One piece of every operation that can go: (result, how many went)."""
    went = 0
    for i in range(count):
        op = table + i * layout.OP_SIZE
        if can_go(ctx, table, op):
            code = go(ctx, op)
            if code != layout.OK:
                return code, went
            went += 1
    return layout.OK, went


@inline
def awaited(ctx: int, table: int, count: int) -> int:
    """The first operation that the call waits for: one of all that must end, else of those of which any must; -1 if it need not wait."""
    first_of_all, first_of_any, nall = -1, -1, 0
    for i in range(count):
        op = table + i * layout.OP_SIZE
        must = load(op + layout.OP_WAIT)
        if must == layout.WAIT_ALL:
            nall += 1
            if first_of_all < 0 and not finished(ctx, op):
                first_of_all = i
        elif must == layout.WAIT_ANY:
            if finished(ctx, op):
                return -1
            if first_of_any < 0:
                first_of_any = i
    return first_of_all if nall > 0 else first_of_any


@inline
def ready(ctx: int, table: int, count: int) -> bool:
    """Whether anything has changed for the better."""
    for i in range(count):
        if can_go(ctx, table, table + i * layout.OP_SIZE):
            return True
    first = awaited(ctx, table, count)
    return first < 0 or first != load(ctx + layout.CTX_STEP)


@inline
def messages_taken(ctx: int, op: int) -> int:
    """How many messages the peer must have taken for a send to go on: those in the way of its next piece, or all that are to be taken."""
    if load(op + layout.OP_DONE) >= load(op + layout.OP_SEGMENTS):
        return load(op + layout.OP_MARK)
    return must_be_taken(connection(ctx, layout.CTX_SEND, load(op + layout.OP_PEER)))


def _sleep_any(ctx: int, table: int, count: int) -> int:
    """As ``waiting.sleep``, for the first of many events: whoever brings one about rings this rank's bell."""
    ctrl = load(ctx + layout.CTX_CTRL)
    op = table + load(ctx + layout.CTX_STEP) * layout.OP_SIZE
    peer = load(op + layout.OP_PEER)
    sends = load(op + layout.OP_RECEIVES) == 0
    store(ctx + layout.CTX_AWAITED_TAIL, messages_taken(ctx, op) if sends else 0)
    alone = (
        load(op + layout.OP_WAIT) == layout.WAIT_ALL
    )  # else another rank may bring it about as well
    store(ctrl + layout.PROGRESS_PEER, peer if alone else layout.ANY_PEER)
    store(ctrl + layout.PROGRESS_STEP, load(ctx + layout.CTX_STEP))
    store(ctrl + layout.PROGRESS_P2P_COUNT, load(op + layout.OP_COUNT))
    store_release(ctrl + layout.PROGRESS_P2P_SIG, load(op + layout.OP_SIG))
    store_release(ctrl + layout.PROGRESS_STATE, layout.STATE_WAITING)
    nap = FIRST_SLEEP_NS
    result = layout.OK
    while True:
        bell = arm_bell(ctx)
        if ready(ctx, table, count):
            break
        result = doze(ctx, peer, bell, nap, now_ns(ctx))
        if result != layout.OK or ready(ctx, table, count):
            break
        if (
            alone
            and load_acquire(load(ctx + layout.CTX_GONE) + 8 * peer) != 0
            and not ready(ctx, table, count)
        ):
            result = fail(ctx, layout.ERR_LEFT, peer, 0, 0)
            break
        if alone and never_comes(ctx, peer, sends) and not ready(ctx, table, count):
            result = fail(ctx, layout.ERR_DIVERGED, peer, 0, 0)
            break
        if interrupted(ctx):
            result = fail(ctx, layout.ERR_INTERRUPTED, peer, 0, 0)
            break
        nap = longer(ctx, nap)
    store(ctrl + layout.CTRL_SLEEP, 0)
    if result == layout.OK:
        store_release(ctrl + layout.PROGRESS_STATE, layout.STATE_IDLE)
    return result


sleep_any = inline(_sleep_any)


@inline
def patience(ctx: int, count: int) -> int:
    """How often ``rest`` only pauses; a look at every operation takes about as long as a pause."""
    return load(ctx + layout.CTX_SPIN) // (1 + count)


@inline
def rest(ctx: int, table: int, count: int, idle: int) -> tuple[int, int]:
    """Nothing could go for the ``idle``-th time since something did or this rank slept: (result, the new ``idle``)."""
    spins = patience(ctx, count)
    if idle <= spins:
        pause()
        return layout.OK, idle
    release_gil(ctx)
    if idle <= spins + load(ctx + layout.CTX_YIELDS) and load(ctx + layout.CTX_SKIP_YIELDS) == 0:
        yield_core(ctx, now_ns(ctx))
        return layout.OK, idle
    may_yield(ctx)  # this was one of the waits that do not
    return sleep_any(ctx, table, count), 0


@inline
def exchange_all(ctx: int, table: int, count: int) -> int:
    """Advance ``count`` sends and receives until those have ended that must (``OP_WAIT``); without any, do what can be done at once."""
    store(ctx + layout.CTX_DEADLINE, 0)
    total = 0
    for i in range(count):
        total += load(table + i * layout.OP_SIZE + layout.OP_BYTES)
    store(ctx + layout.CTX_STREAM, 1 if total >= load(ctx + layout.CTX_STREAM_FROM) else 0)
    idle, passes = 0, 0
    while True:
        code, went = advance(ctx, table, count)
        if code != layout.OK:
            return code
        first = awaited(ctx, table, count)
        passes += 1
        if first < 0 and (went == 0 or passes > layout.NSLOTS):
            break
        store(ctx + layout.CTX_STEP, max(first, 0))
        if went > 0:
            idle = 0
            pause()
        else:
            code, idle = rest(ctx, table, count, idle + 1)
            if code != layout.OK:
                return code
    store_release(load(ctx + layout.CTX_CTRL) + layout.PROGRESS_P2P_SIG, 0)
    return layout.OK
