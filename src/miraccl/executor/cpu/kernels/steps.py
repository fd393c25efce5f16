"""Primitives of ``schedule.ir.Op`` on bytes: the work of one step of a program in one round.

A step that has nothing to move in a round (``chunks``) neither sends nor expects a message; both
ends decide alike.
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.chunks import SCRATCH, buffer_base, message_bytes, slice_extent
from miraccl.executor.cpu.kernels.copies import copy_memory
from miraccl.executor.cpu.kernels.fanout import describe_shared, shares_slot
from miraccl.executor.cpu.kernels.fifo_messages import (
    acquire_slot,
    can_post_address,
    clear_to_send,
    connection,
    consume,
    copy_bytes,
    copy_payload,
    local_payload,
    post_address,
    post_descriptor,
    post_slot,
    receive,
)
from miraccl.executor.cpu.kernels.operands import fold_message, fold_operands, operand_words
from miraccl.executor.cpu.kernels.peer_memory import (
    put_or_get,
    reduce_from_peers,
    send_signal,
    wait_signal,
)
from miraccl.executor.cpu.kernels.rows import do_row_step
from miraccl.executor.cpu.kernels.slots import descriptor_line, next_slot_address
from miraccl.executor.cpu.kernels.waiting import fail
from miraccl.native.intrinsics import inline, load, memcpy, store
from miraccl.schedule.ir import Op

SEND, RECV, COPY, RECV_REDUCE, RECV_COPY_SEND, RECV_REDUCE_SEND = (
    int(op)
    for op in (Op.SEND, Op.RECV, Op.COPY, Op.RECV_REDUCE, Op.RECV_COPY_SEND, Op.RECV_REDUCE_SEND)
)
RECV_REDUCE_COPY, RECV_REDUCE_COPY_SEND, RECV_REDUCE_ALL, PUT, GET = (
    int(op)
    for op in (Op.RECV_REDUCE_COPY, Op.RECV_REDUCE_COPY_SEND, Op.RECV_REDUCE_ALL, Op.PUT, Op.GET)
)
REDUCE_FROM_PEERS, SIGNAL, WAIT, BARRIER = (
    int(op) for op in (Op.REDUCE_FROM_PEERS, Op.SIGNAL, Op.WAIT, Op.BARRIER)
)


@inline
def send(
    ctx: int,
    run: int,
    peer: int,
    buffer: int,
    index: int,
    chunks: int,
    rnd: int,
    size: int,
    fanout: int,
) -> int:
    """Post a round's slices of some chunks to ``peer``; ``fanout``: see ``STEP_FANOUT``."""
    conn = connection(ctx, layout.CTX_SEND, peer)
    code = acquire_slot(ctx, conn, peer)
    if code != layout.OK:
        return code
    sig = load(run + layout.RUN_SIG)
    start = buffer_base(run, buffer)
    if chunks == 1:
        offset, _ = slice_extent(run, buffer, index, rnd)
        if can_post_address(ctx, conn, start + offset, size, load(run + layout.RUN_DIRECT)):
            post_address(ctx, conn, sig, start + offset, size)
        elif size <= layout.INLINE_BYTES and load(run + layout.RUN_LL) != 0:
            memcpy(descriptor_line(conn) + layout.DESC_INLINE, start + offset, size)
            post_descriptor(ctx, conn, sig, size, layout.MODE_INLINE)
        elif fanout != layout.NO_FANOUT and shares_slot(ctx, conn, start + offset, size):
            describe_shared(ctx, conn, peer)
            post_descriptor(ctx, conn, sig, size, layout.MODE_WINDOW)
        else:
            copy_memory(ctx, next_slot_address(conn), start + offset, size)
            post_slot(ctx, conn, sig, size)
        return layout.OK
    stride = load(run + layout.RUN_STRIDE)
    for i in range(chunks):
        offset, length = slice_extent(run, buffer, index + i, rnd)
        copy_memory(ctx, next_slot_address(conn) + i * stride, start + offset, length)
    post_slot(ctx, conn, sig, size)
    return layout.OK


@inline
def receive_sized(ctx: int, run: int, conn: int, peer: int, size: int) -> int:
    """Wait for a message of ``size`` bytes."""
    code = receive(ctx, conn, peer, load(run + layout.RUN_SIG))
    if code != layout.OK:
        return code
    got = load(descriptor_line(conn) + layout.DESC_BYTES)
    if got != size:
        return fail(ctx, layout.ERR_SIZE, peer, size, got)
    return layout.OK


@inline
def unpack(
    ctx: int, run: int, conn: int, peer: int, buffer: int, index: int, chunks: int, rnd: int
) -> int:
    """Copy the message to dst, chunk by chunk."""
    start = buffer_base(run, buffer)
    if chunks == 1:
        offset, size = slice_extent(run, buffer, index, rnd)
        return copy_payload(ctx, conn, peer, start + offset, size)
    source = local_payload(ctx, conn)
    stride = load(run + layout.RUN_STRIDE)
    for i in range(chunks):
        offset, size = slice_extent(run, buffer, index + i, rnd)
        copy_memory(ctx, start + offset, source + i * stride, size)
    return layout.OK


@inline
def reduce_into(
    ctx: int,
    run: int,
    conn: int,
    peer: int,
    src_buf: int,
    src: int,
    dst_buf: int,
    dst: int,
    chunks: int,
    rnd: int,
) -> int:
    """Compute ``dst = src (+) message``, chunk by chunk."""
    stride = load(run + layout.RUN_STRIDE)
    for i in range(chunks):
        own, own_size = slice_extent(run, src_buf, src + i, rnd)
        to, size = slice_extent(run, dst_buf, dst + i, rnd)
        size = min(size, own_size)
        if size > 0:
            code = fold_message(
                ctx,
                run,
                conn,
                peer,
                buffer_base(run, dst_buf) + to,
                buffer_base(run, src_buf) + own,
                i * stride,
                size,
            )
            if code != layout.OK:
                return code
    return layout.OK


@inline
def reduce_to_next(ctx: int, run: int, step: int, conn: int, peer: int, rnd: int, size: int) -> int:
    """Run RECV_REDUCE_SEND: fold straight into the slot of the next rank."""
    to = load(step + layout.STEP_SEND)
    out = connection(ctx, layout.CTX_SEND, to)
    code = acquire_slot(ctx, out, to)
    if code != layout.OK:
        return code
    buffer, index, chunks = (
        load(step + layout.STEP_SRC_BUF),
        load(step + layout.STEP_SRC),
        load(step + layout.STEP_CHUNKS),
    )
    stride = load(run + layout.RUN_STRIDE)
    for i in range(chunks):
        own, length = slice_extent(run, buffer, index + i, rnd)
        if length > 0:
            code = fold_message(
                ctx,
                run,
                conn,
                peer,
                next_slot_address(out) + i * stride,
                buffer_base(run, buffer) + own,
                i * stride,
                length,
            )
            if code != layout.OK:
                return code
    post_slot(ctx, out, load(run + layout.RUN_SIG), size)
    return layout.OK


@inline
def receive_step(ctx: int, run: int, step: int, op: int, rnd: int) -> int:
    """Run any primitive that receives from one peer."""
    chunks = load(step + layout.STEP_CHUNKS)
    src_buf, src = load(step + layout.STEP_SRC_BUF), load(step + layout.STEP_SRC)
    dst_buf, dst = load(step + layout.STEP_DST_BUF), load(step + layout.STEP_DST)
    size = (
        message_bytes(run, src_buf, src, chunks, rnd)
        if op == RECV_REDUCE_SEND
        else message_bytes(run, dst_buf, dst, chunks, rnd)
    )
    if size == 0:
        return layout.OK
    peer = load(step + layout.STEP_RECV)
    conn = connection(ctx, layout.CTX_RECV, peer)
    lands = (
        load(conn + layout.CONN_CAPS) & layout.CAP_IN_PLACE != 0
        and chunks == 1
        and (op == RECV or op == RECV_COPY_SEND)
    )
    if lands and size > layout.INLINE_BYTES and dst_buf != SCRATCH:
        offset, _ = slice_extent(run, dst_buf, dst, rnd)
        clear_to_send(ctx, conn, buffer_base(run, dst_buf) + offset, size, 0)
    code = receive_sized(ctx, run, conn, peer, size)
    if code == layout.OK:
        if op == RECV or op == RECV_COPY_SEND:
            code = unpack(ctx, run, conn, peer, dst_buf, dst, chunks, rnd)
        elif op == RECV_REDUCE_SEND:
            code = reduce_to_next(ctx, run, step, conn, peer, rnd, size)
        elif op == RECV_REDUCE:
            code = reduce_into(ctx, run, conn, peer, dst_buf, dst, dst_buf, dst, chunks, rnd)
        else:
            code = reduce_into(ctx, run, conn, peer, src_buf, src, dst_buf, dst, chunks, rnd)
    if code != layout.OK:
        return code
    consume(ctx, conn)
    if op == RECV_COPY_SEND or op == RECV_REDUCE_COPY_SEND:
        to = load(step + layout.STEP_SEND)
        return send(ctx, run, to, dst_buf, dst, chunks, rnd, size, layout.NO_FANOUT)
    return layout.OK


@inline
def reduce_all(ctx: int, run: int, step: int, rnd: int) -> int:
    """Run RECV_REDUCE_ALL."""
    src_buf, src = load(step + layout.STEP_SRC_BUF), load(step + layout.STEP_SRC)
    dst_buf, dst, chunks = (
        load(step + layout.STEP_DST_BUF),
        load(step + layout.STEP_DST),
        load(step + layout.STEP_CHUNKS),
    )
    to, size = slice_extent(run, dst_buf, dst, rnd)
    message = size if chunks == 1 else message_bytes(run, dst_buf, dst, chunks, rnd)
    if message == 0:
        return layout.OK
    count, peers, rank = (
        load(step + layout.STEP_NPEERS),
        load(step + layout.STEP_PEERS),
        load(ctx + layout.CTX_RANK),
    )
    for i in range(count):
        peer = load(peers + 8 * i)
        if peer != rank:
            code = receive_sized(ctx, run, connection(ctx, layout.CTX_RECV, peer), peer, message)
            if code != layout.OK:
                return code
    for chunk in range(chunks):
        if chunk > 0:
            to, size = slice_extent(run, dst_buf, dst + chunk, rnd)
        own, _ = slice_extent(run, src_buf, src + chunk, rnd)
        offset = chunk * load(run + layout.RUN_STRIDE)
        for i in range(count):
            peer = load(peers + 8 * i)
            if peer == rank:
                store(operand_words(ctx, step, i), buffer_base(run, src_buf) + own)
            else:
                conn = connection(ctx, layout.CTX_RECV, peer)
                here = local_payload(ctx, conn)
                store(operand_words(ctx, step, i), here + offset if here != 0 else 0)
                store(
                    operand_words(ctx, step, i) + 8,
                    load(descriptor_line(conn) + layout.DESC_ADDR) + offset,
                )
        code = fold_operands(ctx, run, step, buffer_base(run, dst_buf) + to, size)
        if code != layout.OK:
            return code
    for i in range(count):
        peer = load(peers + 8 * i)
        if peer != rank:
            consume(ctx, connection(ctx, layout.CTX_RECV, peer))
    return layout.OK


@inline
def synchronize(ctx: int, run: int, step: int, op: int) -> int:
    """Run SIGNAL, WAIT or BARRIER."""
    peers, count, rank = (
        load(step + layout.STEP_PEERS),
        load(step + layout.STEP_NPEERS),
        load(ctx + layout.CTX_RANK),
    )
    if op == SIGNAL or op == BARRIER:
        for i in range(count):
            peer = load(peers + 8 * i)
            if peer != rank:
                code = send_signal(ctx, run, peer)
                if code != layout.OK:
                    return code
    if op == WAIT or op == BARRIER:
        for i in range(count):
            peer = load(peers + 8 * i)
            if peer != rank:
                code = wait_signal(ctx, run, peer)
                if code != layout.OK:
                    return code
    return layout.OK


@inline
def copy_chunks(ctx: int, run: int, step: int, rnd: int) -> None:
    """Run COPY."""
    src_buf, src = load(step + layout.STEP_SRC_BUF), load(step + layout.STEP_SRC)
    dst_buf, dst = load(step + layout.STEP_DST_BUF), load(step + layout.STEP_DST)
    for i in range(load(step + layout.STEP_CHUNKS)):
        frm, from_size = slice_extent(run, src_buf, src + i, rnd)
        to, size = slice_extent(run, dst_buf, dst + i, rnd)
        frm += buffer_base(run, src_buf)
        to += buffer_base(run, dst_buf)
        if to != frm:
            copy_bytes(ctx, to, frm, min(size, from_size))


@inline
def do_step(ctx: int, run: int, step: int, rnd: int) -> int:
    """Run one step in one round; return OK or an ERR_*."""
    if load(run + layout.RUN_ROWS) != 0:
        return do_row_step(ctx, run, step, rnd)
    op = load(step + layout.STEP_OP)
    if op == SEND:
        buffer, index, chunks = (
            load(step + layout.STEP_SRC_BUF),
            load(step + layout.STEP_SRC),
            load(step + layout.STEP_CHUNKS),
        )
        size = message_bytes(run, buffer, index, chunks, rnd)
        if size == 0:
            return layout.OK
        to, fanout = load(step + layout.STEP_SEND), load(step + layout.STEP_FANOUT)
        if fanout == layout.FIRST_OF_FANOUT:
            store(ctx + layout.CTX_FANOUT_SLOT, 0)
        return send(ctx, run, to, buffer, index, chunks, rnd, size, fanout)
    if op == RECV_REDUCE_ALL:
        return reduce_all(ctx, run, step, rnd)
    if op == COPY:
        copy_chunks(ctx, run, step, rnd)
        return layout.OK
    if op < RECV_REDUCE_ALL:
        return receive_step(ctx, run, step, op, rnd)
    if op == REDUCE_FROM_PEERS:
        return reduce_from_peers(ctx, run, step, rnd)
    if op == PUT or op == GET:
        return put_or_get(ctx, run, step, op == PUT, rnd)
    when = load(step + layout.STEP_ROUNDS)
    if (
        when == layout.NEVER
        or (when == layout.FIRST_ROUND and rnd != 0)
        or (when == layout.LAST_ROUND and rnd != load(run + layout.RUN_NROUNDS) - 1)
    ):
        return layout.OK
    return synchronize(ctx, run, step, op)
