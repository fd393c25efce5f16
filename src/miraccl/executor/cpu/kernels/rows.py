"""Primitives on rows of a block: the steps of a schedule with tables (``schedule.rows``).

A round moves at most ``ROWS_PER_ROUND`` rows of every part's union, and of each table those among
them: ``ROWS_STARTS`` has the position in the list at which a round begins, by table, part and
round. A message is the rows of its table, one after another, always in a slot: gathering them is
the copy that a slot needs anyway. A step without rows in a round has no message; both ends know.
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.chunks import buffer_base
from miraccl.executor.cpu.kernels.fifo_messages import (
    acquire_slot,
    connection,
    consume,
    local_payload,
    post_slot,
    receive,
)
from miraccl.executor.cpu.kernels.operands import operand_words
from miraccl.executor.cpu.kernels.slots import descriptor_line, next_slot_address
from miraccl.executor.cpu.kernels.waiting import fail
from miraccl.native.intrinsics import call4, inline, load, memcpy, store
from miraccl.schedule.ir import Op

SEND, RECV, COPY, RECV_COPY_SEND, RECV_REDUCE_ALL = (
    int(op) for op in (Op.SEND, Op.RECV, Op.COPY, Op.RECV_COPY_SEND, Op.RECV_REDUCE_ALL)
)


@inline
def listed_rows(rows: int, table: int, part: int, rnd: int) -> tuple[int, int]:
    """Return the addresses of the first and one-past-last row of a table's part in a round."""
    nrounds = load(rows + layout.ROWS_NROUNDS)
    index = (table * load(rows + layout.ROWS_PARTS) + part) * (nrounds + 1) + rnd
    starts, lists = load(rows + layout.ROWS_STARTS), load(rows + layout.ROWS_LISTS)
    return lists + 8 * load(starts + 8 * index), lists + 8 * load(starts + 8 * index + 8)


@inline
def row_bytes(rows: int, row: int) -> int:
    """Return the bytes of a row; the last one of a block may be shorter."""
    size = load(rows + layout.ROWS_BYTES)
    return min(size, load(rows + layout.ROWS_TOTAL) - row * size)


@inline
def message_bytes(rows: int, first: int, end: int) -> int:
    """Return the bytes of a message with the rows at ``first`` to ``end``."""
    if first == end:
        return 0
    size = load(rows + layout.ROWS_BYTES)
    return (end - first - 8) // 8 * size + row_bytes(rows, load(end - 8))


@inline
def send_rows(ctx: int, run: int, peer: int, buffer: int, table: int, part: int, rnd: int) -> int:
    """Gather a round's rows of a table into a message to ``peer``."""
    rows = load(run + layout.RUN_ROWS)
    first, end = listed_rows(rows, table, part, rnd)
    nbytes = message_bytes(rows, first, end)
    if nbytes == 0:
        return layout.OK
    conn = connection(ctx, layout.CTX_SEND, peer)
    code = acquire_slot(ctx, conn, peer)
    if code != layout.OK:
        return code
    size, start, to = load(rows + layout.ROWS_BYTES), buffer_base(run, buffer), 0
    to = next_slot_address(conn)
    for at in range(first, end, 8):
        row = load(at)
        length = row_bytes(rows, row)
        memcpy(to, start + row * size, length)
        to += length
    post_slot(ctx, conn, load(run + layout.RUN_SIG), nbytes)
    return layout.OK


@inline
def receive_rows(ctx: int, run: int, peer: int, table: int, part: int, rnd: int) -> int:
    """Wait for the message with a round's rows of a table, if there are any."""
    rows = load(run + layout.RUN_ROWS)
    first, end = listed_rows(rows, table, part, rnd)
    nbytes = message_bytes(rows, first, end)
    if nbytes == 0:
        return layout.OK
    conn = connection(ctx, layout.CTX_RECV, peer)
    code = receive(ctx, conn, peer, load(run + layout.RUN_SIG))
    if code != layout.OK:
        return code
    got = load(descriptor_line(conn) + layout.DESC_BYTES)
    if got != nbytes:
        return fail(ctx, layout.ERR_SIZE, peer, nbytes, got)
    return layout.OK


@inline
def scatter_rows(ctx: int, run: int, step: int, part: int, rnd: int) -> int:
    """Run RECV and RECV_COPY_SEND up to the copy: the message's rows go to their places in dst."""
    rows, peer = load(run + layout.RUN_ROWS), load(step + layout.STEP_RECV)
    table = load(step + layout.STEP_DST_TABLE)
    first, end = listed_rows(rows, table, part, rnd)
    if first == end:
        return layout.OK
    code = receive_rows(ctx, run, peer, table, part, rnd)
    if code != layout.OK:
        return code
    conn = connection(ctx, layout.CTX_RECV, peer)
    size = load(rows + layout.ROWS_BYTES)
    start = buffer_base(run, load(step + layout.STEP_DST_BUF))
    source = local_payload(ctx, conn)
    for at in range(first, end, 8):
        row = load(at)
        length = row_bytes(rows, row)
        memcpy(start + row * size, source, length)
        source += length
    consume(ctx, conn)
    return layout.OK


@inline
def copy_rows(run: int, step: int, part: int, rnd: int) -> None:
    """Run COPY."""
    rows = load(run + layout.RUN_ROWS)
    first, end = listed_rows(rows, load(step + layout.STEP_DST_TABLE), part, rnd)
    size = load(rows + layout.ROWS_BYTES)
    frm = buffer_base(run, load(step + layout.STEP_SRC_BUF))
    to = buffer_base(run, load(step + layout.STEP_DST_BUF))
    if frm != to:
        for at in range(first, end, 8):
            row = load(at)
            memcpy(to + row * size, frm + row * size, row_bytes(rows, row))


@inline
def operand_address(ctx: int, run: int, step: int, i: int, part: int, row: int, rnd: int) -> int:
    """Return the address of ``row`` in the i-th operand of a fold; of zeros if it is not listed.

    The operand's words are the payload at which its next row lies, and that row's place in the
    list.
    """
    rows = load(run + layout.RUN_ROWS)
    table = load(load(step + layout.STEP_TABLES) + 8 * i)
    words = operand_words(ctx, step, i)
    _, end = listed_rows(rows, table, part, rnd)
    at, payload = load(words + 8), load(words)
    if at == end or load(at) != row:
        return load(rows + layout.ROWS_ZERO)
    store(words + 8, at + 8)
    if payload == 0:  # the rank's own rows
        size = load(rows + layout.ROWS_BYTES)
        return buffer_base(run, load(step + layout.STEP_SRC_BUF)) + row * size
    store(words, payload + row_bytes(rows, row))
    return payload


@inline
def reduce_rows(ctx: int, run: int, step: int, part: int, rnd: int) -> int:
    """Run RECV_REDUCE_ALL: fold each row of dst over all operands.

    An operand without the row adds zeros, as in the sum of whole arrays: -0.0 + 0.0 is 0.0.
    """
    rows, rank = load(run + layout.RUN_ROWS), load(ctx + layout.CTX_RANK)
    first, end = listed_rows(rows, load(step + layout.STEP_DST_TABLE), part, rnd)
    if first == end:
        return layout.OK
    count, peers = load(step + layout.STEP_NPEERS), load(step + layout.STEP_PEERS)
    tables = load(step + layout.STEP_TABLES)
    for i in range(count):
        peer, table = load(peers + 8 * i), load(tables + 8 * i)
        words = operand_words(ctx, step, i)
        start, stop = listed_rows(rows, table, part, rnd)
        store(words, 0)
        store(words + 8, start)
        if peer != rank and start != stop:
            code = receive_rows(ctx, run, peer, table, part, rnd)
            if code != layout.OK:
                return code
            store(words, local_payload(ctx, connection(ctx, layout.CTX_RECV, peer)))
    sources = load(ctx + layout.CTX_SCRATCH) + layout.SCRATCH_SOURCES
    store(sources, load(ctx + layout.CTX_ACCUMULATORS))
    size, itemsize = load(rows + layout.ROWS_BYTES), load(run + layout.RUN_ITEMSIZE)
    to = buffer_base(run, load(step + layout.STEP_DST_BUF))
    for at in range(first, end, 8):
        row = load(at)
        for i in range(count):
            store(sources + 8 * (i + 1), operand_address(ctx, run, step, i, part, row, rnd))
        elements = row_bytes(rows, row) // itemsize
        call4(load(run + layout.RUN_FOLD), to + row * size, sources, count, elements)
    for i in range(count):
        peer = load(peers + 8 * i)
        start, stop = listed_rows(rows, load(tables + 8 * i), part, rnd)
        if peer != rank and start != stop:
            consume(ctx, connection(ctx, layout.CTX_RECV, peer))
    return layout.OK


@inline
def do_row_step(ctx: int, run: int, step: int, rnd: int) -> int:
    """Run one step on rows in one round; return OK or an ERR_*."""
    op = load(step + layout.STEP_OP)
    if op == SEND:
        return send_rows(
            ctx,
            run,
            load(step + layout.STEP_SEND),
            load(step + layout.STEP_SRC_BUF),
            load(step + layout.STEP_SRC_TABLE),
            load(step + layout.STEP_SRC),
            rnd,
        )
    part = load(step + layout.STEP_DST)
    if op == COPY:
        copy_rows(run, step, part, rnd)
        return layout.OK
    if op == RECV_REDUCE_ALL:
        return reduce_rows(ctx, run, step, part, rnd)
    code = scatter_rows(ctx, run, step, part, rnd)
    if code == layout.OK and op == RECV_COPY_SEND:
        return send_rows(
            ctx,
            run,
            load(step + layout.STEP_SEND),
            load(step + layout.STEP_DST_BUF),
            load(step + layout.STEP_DST_TABLE),
            part,
            rnd,
        )
    return code
