"""Messages with tags, as far as they go without anybody's help.

A message is a header (tag, bytes of the payload, and the payload if it is short) and, if it is not, its payload, which goes as any
other message does.  Headers all have one size, so that one can be received before anything is known.  Which receive gets which message is
Python's to say (``miraccl.torch.matching``); compiled code does the everyday cases: a send that nothing is before, and a receive that no
other one competes with, whose message is the next one of its source.  Whatever else it finds stays where it is.

A payload that does not get through in the call leaves its progress in ``row``, an operation of ``kernels.p2p``, for ``exchange_all``.
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.messages import (
    connection,
    consume_message,
    local_payload,
    post_slot,
)
from miraccl.executor.cpu.kernels.p2p import (
    back_off,
    can_advance,
    exchange_all,
    init_op,
    op_finished,
    signature,
)
from miraccl.executor.cpu.kernels.slots import has_free_slot, next_slot_address, post_line
from miraccl.executor.cpu.kernels.waiting import release_gil
from miraccl.native.intrinsics import inline, load, load_acquire, memcpy, store, store_release
from miraccl.types import DType

UINT8 = int(DType.UINT8)


@inline
def send_tagged_message(ctx: int, peer: int, tag: int, address: int, nbytes: int, row: int) -> int:
    """Send a message that is the next one to ``peer``: OK; IN_PROGRESS, where the rest of it is in ``row``; NOT_HANDLED, where nothing has
    happened, for there is no room or no way; or an ERR_*."""
    conn = connection(ctx, layout.CTX_SEND, peer)
    if (
        load(conn + layout.CONN_SLOT_BYTES) < layout.HEADER_BYTES
        or load_acquire(load(ctx + layout.CTX_CTRL) + layout.CTRL_ABORT) != 0
    ):
        return layout.NOT_HANDLED
    if not has_free_slot(conn):
        return layout.NOT_HANDLED
    header = next_slot_address(conn)
    store(header + layout.HEADER_TAG, tag)
    store(header + layout.HEADER_COUNT, nbytes)
    if nbytes <= layout.SHORT_BYTES:
        memcpy(header + layout.HEADER_PAYLOAD, address, nbytes)
    post_slot(ctx, conn, signature(UINT8, layout.HEADER_BYTES), layout.HEADER_BYTES)
    if nbytes <= layout.SHORT_BYTES:
        return layout.OK
    release_gil(ctx)
    init_op(ctx, row, False, peer, address, nbytes, UINT8, 0)
    code = exchange_all(ctx, row, 1)
    return code if code != layout.OK or op_finished(ctx, row) else layout.IN_PROGRESS


@inline
def recv_if_matching(ctx: int, op: int, tag: int, address: int, nbytes: int, row: int) -> int:
    """As ``take_message``, of the message whose header has come for ``op``."""
    peer = load(op + layout.OP_PEER)
    conn = connection(ctx, layout.CTX_RECV, peer)
    landed = load(post_line(conn) + layout.DESC_MODE) == layout.MODE_LANDED
    header = load(op + layout.OP_ADDR) if landed else local_payload(ctx, conn)
    if (
        header == 0
        or load(header + layout.HEADER_TAG) != tag
        or load(header + layout.HEADER_COUNT) != nbytes
    ):
        return -layout.NOT_HANDLED
    if nbytes <= layout.SHORT_BYTES:
        memcpy(address, header + layout.HEADER_PAYLOAD, nbytes)
    consume_message(ctx, conn, load(ctx + layout.CTX_SWAP) != 0)
    store(op + layout.OP_MARK, 0)
    code = layout.OK
    if nbytes > layout.SHORT_BYTES:
        release_gil(ctx)
        init_op(ctx, row, True, peer, address, nbytes, UINT8, layout.WAIT_ALL)
        code = exchange_all(ctx, row, 1)
    if code == layout.OK:
        return peer
    retryable = (
        code == layout.ERR_TIMEOUT
        or code == layout.ERR_ABORTED
        or code == layout.ERR_LEFT
        or code == layout.ERR_DIVERGED
    )
    return -layout.IN_PROGRESS if retryable else -code


@inline
def recv_tagged_message(
    ctx: int, table: int, count: int, first: int, tag: int, address: int, nbytes: int, row: int
) -> int:
    """Wait for the next message of any of ``count`` sources, whose headers the operations of ``table`` receive, and take it if it is the
    one: its source; else, negative, IN_PROGRESS, where the rest of it is in ``row``, or another result.  After NOT_HANDLED and what whoever
    waits finds again (ERR_TIMEOUT, ERR_ABORTED, ERR_LEFT, ERR_DIVERGED) nothing has happened.

    The sources are looked at in turn, from number ``first`` on.
    """
    for i in range(count):
        store(table + i * layout.OP_SIZE + layout.OP_PREDECESSOR, -1)
        store(
            table + i * layout.OP_SIZE + layout.OP_WAIT,
            layout.WAIT_ALL if count == 1 else layout.WAIT_ANY,
        )
    store(ctx + layout.CTX_DEADLINE, 0)
    store(ctx + layout.CTX_STEP, 0)
    idle = 0
    while True:
        for i in range(count):
            op = table + (first + i) % count * layout.OP_SIZE
            if can_advance(ctx, table, op):
                result = recv_if_matching(ctx, op, tag, address, nbytes, row)
                store_release(load(ctx + layout.CTX_CTRL) + layout.PROGRESS_P2P_SIG, 0)
                return result
        release_gil(ctx)
        code, idle = back_off(ctx, table, count, idle + 1)
        if code != layout.OK:
            return -code
