"""Sends and receives: one alone, and groups that go on together.

A message is cut into pieces of a slot; both ends cut alike, whether they are in a group or not.  A group goes round by round: in
each round every send that has a piece left posts it, then every receive takes one.  Messages between the same two ranks follow
one another (``OP_FIRST_ROUND``), so the order on a FIFO is that of the program.

Why a group cannot deadlock: take the rank that is in the smallest round k.  Its sends need peers to have taken the pieces of
round k - 8 or earlier, and all peers are at k or later.  Its receives need the pieces of round k, which peers post before they
receive in round k, and posting is never blocked for the same reason.
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout as at
from miraccl.executor.cpu.kernels.messages import (
    acquire,
    can_post_address,
    connection,
    consume,
    drain,
    post,
    post_address,
    post_line,
    receive,
    slot,
    take,
    want,
)
from miraccl.executor.cpu.kernels.waiting import fail
from miraccl.native.intrinsics import inline, load, memcpy, store, store_release
from miraccl.types import Collective

SEND_RECV = int(Collective.SEND_RECV)


@inline
def signature(dtype: int, count: int) -> int:
    """As ``lower.signature`` makes it, without a sequence number: two ranks may have sent different numbers of messages to others."""
    return SEND_RECV << 16 | dtype << 21 | ((count * 0x9E3779B1) & 0x7FFFFF) << 40


@inline
def item_size(dtype: int) -> int:
    if dtype < 2 or dtype > 9:
        return 1
    if dtype == 6 or dtype == 9:
        return 2
    if dtype == 4 or dtype == 5 or dtype == 8:
        return 8
    return 4


@inline
def from_bytes(ctx: int, total: int) -> int:
    """From how many bytes on the pieces of a message of ``total`` bytes are posted by address; -1: never."""
    threshold = load(ctx + at.CTX_P2P_DIRECT)
    return at.DIRECT_PIECE if 0 <= threshold <= total else -1


@inline
def put_piece(ctx: int, peer: int, address: int, nbytes: int, sig: int, total: int) -> int:
    conn = connection(ctx, at.CTX_SEND, peer)
    code = acquire(ctx, conn, peer)
    if code != at.OK:
        return code
    if nbytes <= at.INLINE_BYTES:
        memcpy(post_line(conn) + at.POST_INLINE, address, nbytes)
        post(ctx, conn, sig, nbytes, at.MODE_INLINE)
    elif can_post_address(ctx, conn, address, nbytes, from_bytes(ctx, total)):
        post_address(ctx, conn, sig, address, nbytes)
    else:
        memcpy(slot(conn), address, nbytes)
        post(ctx, conn, sig, nbytes, at.MODE_SLOT)
    return at.OK


@inline
def announce(ctx: int, peer: int, address: int, nbytes: int) -> None:
    conn = connection(ctx, at.CTX_RECV, peer)
    if load(conn + at.CONN_KIND) == at.KIND_NET and nbytes > at.INLINE_BYTES:
        want(ctx, conn, address, nbytes)


@inline
def take_piece(ctx: int, peer: int, address: int, nbytes: int, sig: int) -> int:
    conn = connection(ctx, at.CTX_RECV, peer)
    announce(ctx, peer, address, nbytes)
    code = receive(ctx, conn, peer, sig)
    if code != at.OK:
        return code
    size = load(post_line(conn) + at.POST_BYTES)
    if size != nbytes:
        return fail(ctx, at.ERR_SIZE, peer, nbytes, size)
    code = take(ctx, conn, peer, address, size)
    if code == at.OK:
        consume(ctx, conn)
    return code


@inline
def piece_bytes(ctx: int, peer: int) -> int:
    """Both ends of a pair have slots of the same size; network FIFOs send larger pieces, straight from and to the user's memory."""
    conn = connection(ctx, at.CTX_SEND, peer)
    if load(conn + at.CONN_KIND) == at.KIND_NET:
        return at.NET_PIECE
    return load(conn + at.CONN_SLOT_BYTES)


def _one_message(ctx: int, receives: bool, peer: int, address: int, count: int, dtype: int) -> int:
    ctrl = load(ctx + at.CTX_CTRL)
    sig = signature(dtype, count)
    store(ctrl + at.BOARD_P2P_COUNT, count)
    store_release(ctrl + at.BOARD_P2P_SIG, sig)
    store(ctx + at.CTX_DEADLINE, 0)
    store(ctx + at.CTX_STEP, 0)
    nbytes = count * item_size(dtype)
    store(ctx + at.CTX_STREAM, 1 if nbytes >= load(ctx + at.CTX_STREAM_FROM) else 0)
    piece = piece_bytes(ctx, peer)
    start = 0
    while True:
        size = min(piece, nbytes - start)
        if receives:
            code = take_piece(ctx, peer, address + start, size, sig)
        else:
            code = put_piece(ctx, peer, address + start, size, sig, nbytes)
        if code != at.OK:
            return code
        start += size
        if start >= nbytes:
            break
    if not receives:
        code = drain(ctx, connection(ctx, at.CTX_SEND, peer), peer)
        if code != at.OK:
            return code
    store_release(ctrl + at.BOARD_P2P_SIG, 0)
    return at.OK


one_message = inline(_one_message)


@inline
def one_round(ctx: int, table: int, count: int, kind: int, rnd: int) -> int:
    """All sends, or all receives, of a round."""
    for i in range(count):
        op = table + i * at.OP_SIZE
        number = rnd - load(op + at.OP_FIRST_ROUND)
        if load(op + at.OP_KIND) != kind or number < 0 or number >= load(op + at.OP_ROUNDS):
            continue
        peer, piece = load(op + at.OP_PEER), piece_bytes(ctx, load(op + at.OP_PEER))
        start = number * piece
        size = min(piece, load(op + at.OP_BYTES) - start)
        store(ctx + at.CTX_STEP, i)
        store(load(ctx + at.CTX_CTRL) + at.BOARD_P2P_COUNT, load(op + at.OP_COUNT))
        store_release(load(ctx + at.CTX_CTRL) + at.BOARD_P2P_SIG, load(op + at.OP_SIG))
        if kind == 0:
            code = put_piece(ctx, peer, load(op + at.OP_ADDR) + start, size, load(op + at.OP_SIG), load(op + at.OP_BYTES))
        else:
            code = take_piece(ctx, peer, load(op + at.OP_ADDR) + start, size, load(op + at.OP_SIG))
        if code != at.OK:
            return code
    return at.OK


@inline
def exchange_all(ctx: int, table: int, count: int) -> int:
    """Run a group of ``count`` sends and receives to their end."""
    store(ctx + at.CTX_DEADLINE, 0)
    rounds, total = 0, 0
    for i in range(count):
        op = table + i * at.OP_SIZE
        rounds = max(rounds, load(op + at.OP_FIRST_ROUND) + load(op + at.OP_ROUNDS))
        total += load(op + at.OP_BYTES)
    store(ctx + at.CTX_STREAM, 1 if total >= load(ctx + at.CTX_STREAM_FROM) else 0)
    for rnd in range(rounds):
        for kind in range(2):
            code = one_round(ctx, table, count, kind, rnd)
            if code != at.OK:
                return code
    for i in range(count):
        op = table + i * at.OP_SIZE
        if load(op + at.OP_KIND) == 0:
            peer = load(op + at.OP_PEER)
            code = drain(ctx, connection(ctx, at.CTX_SEND, peer), peer)
            if code != at.OK:
                return code
    store_release(load(ctx + at.CTX_CTRL) + at.BOARD_P2P_SIG, 0)
    return at.OK
