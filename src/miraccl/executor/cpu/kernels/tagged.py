"""Tagged messages, as far as compiled code can match them without Python.

A message is a header (tag, bytes of the payload, and a short payload itself) and, if the payload is
long, the payload as any other message. All headers have one size, so that one can be received
before anything is known. ``miraccl.torch.matching`` matches messages to receives; compiled code
handles the common cases: a send with no send before it, and a receive without competitors whose
message is the next one of its source. Anything else is left untouched.

The progress of a payload that does not complete in the call is in ``row``, an operation of
``kernels.p2p`` for ``exchange_all``.
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.fifo_messages import (
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
from miraccl.executor.cpu.kernels.slots import descriptor_line, has_free_slot, next_slot_address
from miraccl.executor.cpu.kernels.waiting import release_gil
from miraccl.native.intrinsics import inline, load, load_acquire, memcpy, store, store_release
from miraccl.types import DType

UINT8 = int(DType.UINT8)


@inline
def send_tagged_message(ctx: int, peer: int, tag: int, address: int, nbytes: int, row: int) -> int:
    """Send the next message to ``peer``.

    Returns OK; IN_PROGRESS if the remaining payload is in ``row``; NOT_HANDLED, without any effect,
    if there is no free slot or no connection; or an ERR_*.
    """
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
    """Receive the message whose header has arrived for ``op`` if it matches; see
    ``recv_tagged_message``.
    """
    peer = load(op + layout.OP_PEER)
    conn = connection(ctx, layout.CTX_RECV, peer)
    landed = load(descriptor_line(conn) + layout.DESC_MODE) == layout.MODE_LANDED
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
    """Wait for the next message of ``count`` sources and receive it if tag and size match.

    ``table`` has an operation for the header of each source; they are polled in turn from number
    ``first`` on. Returns the source, or negated: IN_PROGRESS if the remaining payload is in
    ``row``, or another result. After NOT_HANDLED, and after errors that a later wait finds again
    (ERR_TIMEOUT, ERR_ABORTED, ERR_LEFT, ERR_DIVERGED), nothing has been consumed.
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
