"""Sends and receives: one alone, and any number that progress together.

A message is split into segments of a slot; both ends split alike, however they group their calls.
Operations that progress together form a table. Messages between two ranks in one direction follow
one another (``OP_PREDECESSOR``), so the order on a FIFO is that of the program; everything else
progresses in any order, and no operation ever waits for another one of the table. A call ends when
all operations with ``WAIT_ALL`` have ended, or one with ``WAIT_ANY``; the others keep their
progress (``OP_DONE``) for the next call.

This cannot deadlock unless the program does: a rank waits here only if each of its operations
needs its peer, after every operation that could advance has advanced.
"""

from __future__ import annotations

from miraccl.executor.cpu import sizes
from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.copies import copy_memory
from miraccl.executor.cpu.kernels.counts import count_hash
from miraccl.executor.cpu.kernels.fifo_messages import (
    acquire_slot,
    can_post_address,
    clear_to_send,
    connection,
    consume_message,
    copy_payload,
    drain,
    post_address,
    post_descriptor,
    post_slot,
    receive,
)
from miraccl.executor.cpu.kernels.slots import (
    MAX_SWAP_SLOTS,
    descriptor_line,
    next_slot_address,
    required_tail,
)
from miraccl.executor.cpu.kernels.waiting import (
    DRIVE_POLL,
    FIRST_SLEEP_NS,
    arm_doorbell,
    drive,
    drive_sleep,
    drives,
    fail,
    futex_sleep,
    interrupted,
    next_sleep_ns,
    now_ns,
    pause_or_drive,
    peer_diverged,
    release_gil,
    should_yield,
    sleeps_driving,
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
#: Segments of one message for which a receiver has posted a CTS: the next one follows its
#: predecessor without a round trip.
CTS_AHEAD = 2
#: 4 bits for each DType: the binary logarithm of its element size
ITEM_SIZES = sum((dtype.itemsize.bit_length() - 1) << 4 * dtype for dtype in DType)

lead_bytes = inline(sizes.lead_bytes)
count_segments = inline(sizes.count_segments)


@inline
def signature(dtype: int, count: int) -> int:
    """Return the signature of a send or receive, as ``lower.signature`` without a sequence number.

    There is none because two ranks may have sent different numbers of messages to others.
    """
    return SEND_RECV << 16 | dtype << 21 | count_hash(count) << layout.SIG_COUNT_SHIFT


@inline
def item_size(dtype: int) -> int:
    """Return the bytes of an element."""
    return 1 << (ITEM_SIZES >> 4 * dtype & 15)


@inline
def direct_threshold(ctx: int, total: int) -> int:
    """Return the bytes from which segments of a message of ``total`` bytes are posted by address;
    -1:
    never.
    """
    threshold = load(ctx + layout.CTX_P2P_DIRECT)
    return layout.MIN_DIRECT_BYTES if 0 <= threshold <= total else -1


@inline
def send_segment(ctx: int, peer: int, address: int, nbytes: int, sig: int, total: int) -> int:
    """Post one segment, waiting for a slot."""
    conn = connection(ctx, layout.CTX_SEND, peer)
    code = acquire_slot(ctx, conn, peer)
    if code != layout.OK:
        return code
    if nbytes <= layout.INLINE_BYTES:
        memcpy(descriptor_line(conn) + layout.DESC_INLINE, address, nbytes)
        post_descriptor(ctx, conn, sig, nbytes, layout.MODE_INLINE)
    elif can_post_address(ctx, conn, address, nbytes, direct_threshold(ctx, total)):
        post_address(ctx, conn, sig, address, nbytes)
    else:
        copy_memory(ctx, next_slot_address(conn), address, nbytes)
        post_slot(ctx, conn, sig, nbytes)
    return layout.OK


@inline
def post_receive(ctx: int, peer: int, address: int, nbytes: int, ahead: int) -> None:
    """Let the message ``ahead`` of the next one land at ``address`` if the connection can deliver
    in place.
    """
    conn = connection(ctx, layout.CTX_RECV, peer)
    if load(conn + layout.CONN_CAPS) & layout.CAP_IN_PLACE != 0 and nbytes > layout.INLINE_BYTES:
        clear_to_send(ctx, conn, address, nbytes, ahead)


@inline
def post_receives(
    ctx: int, peer: int, address: int, nbytes: int, posted: int, done: int, segments: int
) -> int:
    """Post the CTS of segments of a message of which ``done`` have arrived and ``posted`` have one;
    return the new ``posted``.
    """
    last = min(segments, done + CTS_AHEAD)
    while posted < last:
        start, size = segment_range(ctx, peer, nbytes, posted)
        post_receive(ctx, peer, address + start, size, posted - done)
        posted += 1
    return posted


@inline
def segment_bytes(ctx: int, peer: int) -> int:
    """Return the size of a segment to or from ``peer``.

    Both ends of a pair have slots of the same size. Connections that deliver in place use larger
    segments, straight from and to the user's memory.
    """
    conn = connection(ctx, layout.CTX_SEND, peer)
    if load(conn + layout.CONN_CAPS) & layout.CAP_IN_PLACE != 0:
        return sizes.NET_SEGMENT_BYTES
    return load(conn + layout.CONN_SLOT_BYTES)


@inline
def segment_sizes(ctx: int, peer: int, nbytes: int) -> tuple[int, int]:
    """Return the largest size of the first segment of a message of ``nbytes``, and of others."""
    conn, segment = connection(ctx, layout.CTX_SEND, peer), segment_bytes(ctx, peer)
    in_place = load(conn + layout.CONN_CAPS) & layout.CAP_IN_PLACE != 0
    return lead_bytes(nbytes, segment, in_place), segment


@inline
def segment_range(ctx: int, peer: int, nbytes: int, index: int) -> tuple[int, int]:
    """Return (start, size) of a segment of a message of ``nbytes``."""
    lead, segment = segment_sizes(ctx, peer, nbytes)
    if index == 0:
        return 0, min(lead, nbytes)
    start = lead + (index - 1) * segment
    return start, min(segment, nbytes - start)


@inline
def recv_posted_segment(
    ctx: int, peer: int, address: int, nbytes: int, sig: int, may_swap: bool
) -> int:
    """Receive one segment whose CTS has been posted."""
    conn = connection(ctx, layout.CTX_RECV, peer)
    code = receive(ctx, conn, peer, sig)
    if code != layout.OK:
        return code
    size = load(descriptor_line(conn) + layout.DESC_BYTES)
    if size != nbytes:
        return fail(ctx, layout.ERR_SIZE, peer, nbytes, size)
    code = copy_payload(ctx, conn, peer, address, size)
    if code == layout.OK:
        consume_message(ctx, conn, may_swap and load(ctx + layout.CTX_SWAP) != 0)
    return code


def _single_message(
    ctx: int, receives: bool, peer: int, address: int, count: int, dtype: int
) -> int:
    ctrl = load(ctx + layout.CTX_CTRL)
    sig = signature(dtype, count)
    store(ctrl + layout.PROGRESS_P2P_COUNT, count)
    store_release(ctrl + layout.PROGRESS_P2P_SIG, sig)
    store(ctx + layout.CTX_DEADLINE, 0)
    store(ctx + layout.CTX_STEP, 0)
    nbytes = count * item_size(dtype)
    store(ctx + layout.CTX_STREAM, 1 if nbytes >= load(ctx + layout.CTX_STREAM_FROM) else 0)
    lead, segment = segment_sizes(ctx, peer, nbytes)
    segments = count_segments(nbytes, lead, segment)
    # A long message flows in one direction for a while; swapping slots does not pay then.
    may_swap = nbytes <= MAX_SWAP_SLOTS * segment
    posted = 0
    for done in range(segments):
        start, size = segment_range(ctx, peer, nbytes, done)
        if receives:
            posted = post_receives(ctx, peer, address, nbytes, posted, done, segments)
            code = recv_posted_segment(ctx, peer, address + start, size, sig, may_swap)
        else:
            code = send_segment(ctx, peer, address + start, size, sig, nbytes)
        if code != layout.OK:
            return code
    if not receives:
        code = drain(ctx, connection(ctx, layout.CTX_SEND, peer), peer)
        if code != layout.OK:
            return code
    store_release(ctrl + layout.PROGRESS_P2P_SIG, 0)
    store_release(ctrl + layout.PROGRESS_STATE, layout.STATE_IDLE)
    return layout.OK


single_message = inline(_single_message)


@inline
def init_op(
    ctx: int,
    op: int,
    receives: bool,
    peer: int,
    address: int,
    count: int,
    dtype: int,
    wait_mode: int,
) -> None:
    """Write an operation that has not begun and has no predecessor; as ``runtime.exchange`` makes
    it.
    """
    nbytes = count * item_size(dtype)
    lead, segment = segment_sizes(ctx, peer, nbytes)
    store(op + layout.OP_RECEIVES, 1 if receives else 0)
    store(op + layout.OP_PEER, peer)
    store(op + layout.OP_ADDR, address)
    store(op + layout.OP_BYTES, nbytes)
    store(op + layout.OP_SIG, signature(dtype, count))
    store(op + layout.OP_PREDECESSOR, -1)
    store(op + layout.OP_SEGMENTS, count_segments(nbytes, lead, segment))
    store(op + layout.OP_COUNT, count)
    store(op + layout.OP_DONE, 0)
    store(op + layout.OP_MARK, 0)
    store(op + layout.OP_WAIT, wait_mode)


@inline
def op_finished(ctx: int, op: int) -> bool:
    """Return True if all segments are done and, for a send posted by address, consumed.

    ``OP_MARK`` of such a send is the number of messages that the peer must have consumed.
    """
    if load(op + layout.OP_DONE) < load(op + layout.OP_SEGMENTS):
        return False
    if load(op + layout.OP_RECEIVES) != 0 or load(op + layout.OP_MARK) == 0:
        return True
    conn = connection(ctx, layout.CTX_SEND, load(op + layout.OP_PEER))
    return load_acquire(load(conn + layout.CONN_TAIL_ADDR)) >= load(op + layout.OP_MARK)


@inline
def can_advance(ctx: int, table: int, op: int) -> bool:
    """Return True if the next segment can be posted or received now.

    Posts the CTS of a receive and of the next segment first; its ``OP_MARK`` counts the segments
    with one.
    """
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
        return load_acquire(load(conn + layout.CONN_TAIL_ADDR)) >= required_tail(conn)
    conn = connection(ctx, layout.CTX_RECV, peer)
    segments = load(op + layout.OP_SEGMENTS)
    if load(op + layout.OP_MARK) < min(segments, done + CTS_AHEAD):
        address, nbytes = load(op + layout.OP_ADDR), load(op + layout.OP_BYTES)
        posted = load(op + layout.OP_MARK)
        posted = post_receives(ctx, peer, address, nbytes, posted, done, segments)
        store(op + layout.OP_MARK, posted)
    return (
        load_acquire(descriptor_line(conn) + layout.DESC_FLAG) >= load(conn + layout.CONN_COUNT) + 1
    )


@inline
def advance_op(ctx: int, op: int) -> int:
    """Post or receive the next segment of an operation that can advance."""
    peer, done = load(op + layout.OP_PEER), load(op + layout.OP_DONE)
    start, size = segment_range(ctx, peer, load(op + layout.OP_BYTES), done)
    address = load(op + layout.OP_ADDR) + start
    if load(op + layout.OP_RECEIVES) == 0:
        code = send_segment(
            ctx, peer, address, size, load(op + layout.OP_SIG), load(op + layout.OP_BYTES)
        )
        conn = connection(ctx, layout.CTX_SEND, peer)
        if load(conn + layout.CONN_LAST_DIRECT) == load(conn + layout.CONN_COUNT):
            store(op + layout.OP_MARK, load(conn + layout.CONN_COUNT))
    else:
        code = recv_posted_segment(ctx, peer, address, size, load(op + layout.OP_SIG), True)
    store(op + layout.OP_DONE, done + 1)
    return code


@inline
def advance_all(ctx: int, table: int, count: int) -> tuple[int, int]:
    """Advance every operation that can by one segment; return (result, number that advanced)."""
    advanced = 0
    for i in range(count):
        op = table + i * layout.OP_SIZE
        if can_advance(ctx, table, op):
            code = advance_op(ctx, op)
            if code != layout.OK:
                return code, advanced
            advanced += 1
    return layout.OK, advanced


@inline
def post_all_receives(ctx: int, table: int, count: int) -> None:
    """Post the CTS of all receives that may have one before anything is sent: behind data it would
    wait until these have left, and the peer's data with it.
    """
    for i in range(count):
        op = table + i * layout.OP_SIZE
        if load(op + layout.OP_RECEIVES) != 0:
            can_advance(ctx, table, op)


@inline
def awaited_op(ctx: int, table: int, count: int) -> int:
    """Return the first operation that the call waits for, -1 if it need not wait.

    It is one of those with ``WAIT_ALL`` if there are any, else one with ``WAIT_ANY``.
    """
    first_of_all, first_of_any, nall = -1, -1, 0
    for i in range(count):
        op = table + i * layout.OP_SIZE
        wait_mode = load(op + layout.OP_WAIT)
        if wait_mode == layout.WAIT_ALL:
            nall += 1
            if first_of_all < 0 and not op_finished(ctx, op):
                first_of_all = i
        elif wait_mode == layout.WAIT_ANY:
            if op_finished(ctx, op):
                return -1
            if first_of_any < 0:
                first_of_any = i
    return first_of_all if nall > 0 else first_of_any


@inline
def has_progress(ctx: int, table: int, count: int) -> bool:
    """Return True if an operation can advance or the awaited one has changed."""
    for i in range(count):
        if can_advance(ctx, table, table + i * layout.OP_SIZE):
            return True
    first = awaited_op(ctx, table, count)
    return first < 0 or first != load(ctx + layout.CTX_STEP)


@inline
def awaited_tail(ctx: int, op: int) -> int:
    """Return the number of messages the peer must have consumed for a send to advance or end."""
    if load(op + layout.OP_DONE) >= load(op + layout.OP_SEGMENTS):
        return load(op + layout.OP_MARK)
    return required_tail(connection(ctx, layout.CTX_SEND, load(op + layout.OP_PEER)))


@inline
def all_sleep_driving(ctx: int, table: int, count: int) -> bool:
    """Return True if a wait for any of these operations sleeps in ``drive``."""
    for i in range(count):
        if not sleeps_driving(ctx, load(table + i * layout.OP_SIZE + layout.OP_PEER)):
            return False
    return True


def _sleep_any(ctx: int, table: int, count: int) -> int:
    """Sleep until any operation can advance, as ``waiting.sleep_until`` does for one word.

    Every event of these operations rings this rank's doorbell.
    """
    ctrl = load(ctx + layout.CTX_CTRL)
    op = table + load(ctx + layout.CTX_STEP) * layout.OP_SIZE
    peer = load(op + layout.OP_PEER)
    sending = load(op + layout.OP_RECEIVES) == 0
    store(ctx + layout.CTX_AWAITED_TAIL, awaited_tail(ctx, op) if sending else 0)
    # With several WAIT_ANY another rank may end the wait as well.
    alone = load(op + layout.OP_WAIT) == layout.WAIT_ALL
    store(ctrl + layout.PROGRESS_PEER, peer if alone else layout.ANY_PEER)
    store(ctrl + layout.PROGRESS_STEP, load(ctx + layout.CTX_STEP))
    store(ctrl + layout.PROGRESS_P2P_COUNT, load(op + layout.OP_COUNT))
    store_release(ctrl + layout.PROGRESS_P2P_SIG, load(op + layout.OP_SIG))
    store_release(ctrl + layout.PROGRESS_STATE, layout.STATE_WAITING)
    sleep_ns = FIRST_SLEEP_NS
    result, driving = layout.OK, all_sleep_driving(ctx, table, count)
    while True:
        doorbell = 0 if driving else arm_doorbell(ctx)
        if has_progress(ctx, table, count):
            break
        if driving:
            result, driving = drive_sleep(ctx, peer, sleep_ns, now_ns(ctx))
        else:
            result = futex_sleep(ctx, peer, doorbell, sleep_ns, now_ns(ctx))
            driving = all_sleep_driving(ctx, table, count)
        if result != layout.OK or has_progress(ctx, table, count):
            break
        if (
            alone
            and load_acquire(load(ctx + layout.CTX_GONE) + 8 * peer) != 0
            and not has_progress(ctx, table, count)
        ):
            result = fail(ctx, layout.ERR_LEFT, peer, 0, 0)
            break
        if alone and peer_diverged(ctx, peer, sending) and not has_progress(ctx, table, count):
            result = fail(ctx, layout.ERR_DIVERGED, peer, 0, 0)
            break
        if interrupted(ctx):
            result = fail(ctx, layout.ERR_INTERRUPTED, peer, 0, 0)
            break
        sleep_ns = next_sleep_ns(ctx, sleep_ns)
    store(ctrl + layout.CTRL_SLEEP, 0)
    if result == layout.OK:
        store_release(ctrl + layout.PROGRESS_STATE, layout.STATE_IDLE)
    return result


sleep_any = inline(_sleep_any)


@inline
def spin_limit(ctx: int, count: int) -> int:
    """Return the number of pauses before ``back_off`` yields."""
    return load(ctx + layout.CTX_SPIN) // (1 + count)


@inline
def back_off(ctx: int, table: int, count: int, idle: int) -> tuple[int, int]:
    """Pause, yield or sleep after the ``idle``-th pass without progress; return (result, new
    ``idle``).
    """
    spins = spin_limit(ctx, count)
    if idle <= spins:
        pause_or_drive(ctx)
        return layout.OK, idle
    release_gil(ctx)
    if idle <= spins + load(ctx + layout.CTX_YIELDS) and load(ctx + layout.CTX_SKIP_YIELDS) == 0:
        yield_core(ctx, now_ns(ctx))
        if drives(ctx):
            drive(ctx, DRIVE_POLL)
        return layout.OK, idle
    should_yield(ctx)  # count this wait among those that do not yield
    return sleep_any(ctx, table, count), 0


@inline
def exchange_all(ctx: int, table: int, count: int) -> int:
    """Advance ``count`` sends and receives until those with an ``OP_WAIT`` have ended.

    Without any of these, do whatever can be done at once.
    """
    store(ctx + layout.CTX_DEADLINE, 0)
    total = 0
    for i in range(count):
        total += load(table + i * layout.OP_SIZE + layout.OP_BYTES)
    store(ctx + layout.CTX_STREAM, 1 if total >= load(ctx + layout.CTX_STREAM_FROM) else 0)
    post_all_receives(ctx, table, count)
    idle, passes = 0, 0
    while True:
        code, advanced = advance_all(ctx, table, count)
        if code != layout.OK:
            return code
        first = awaited_op(ctx, table, count)
        passes += 1
        if first < 0 and (advanced == 0 or passes > layout.NSLOTS):
            break
        store(ctx + layout.CTX_STEP, max(first, 0))
        if advanced > 0:
            idle = 0
            pause()
        else:
            code, idle = back_off(ctx, table, count, idle + 1)
            if code != layout.OK:
                return code
    store_release(load(ctx + layout.CTX_CTRL) + layout.PROGRESS_P2P_SIG, 0)
    return layout.OK
