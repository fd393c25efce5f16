"""Fast path of send, recv and sendrecv: from arguments to the engine of ``kernels.p2p``."""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.arguments import (
    READABLE,
    WRITABLE,
    dtype_code,
    element_count,
    is_usable,
    small_int,
)
from miraccl.executor.cpu.kernels.fifo_messages import connection
from miraccl.executor.cpu.kernels.p2p import exchange_all, init_op, single_message
from miraccl.executor.cpu.kernels.waiting import RELEASE_GIL_BYTES, fail, release_gil
from miraccl.native.intrinsics import inline, load, load_acquire


@inline
def send_or_receive(ctx: int, args: int, receives: bool) -> int:
    """Run a send or receive with arguments (array, peer)."""
    x = load(args)
    if not is_usable(ctx, x, WRITABLE if receives else READABLE):
        return layout.NOT_HANDLED
    peer = small_int(ctx, load(args + 8), layout.CTX_INT_TYPE)
    dtype = dtype_code(ctx, x)
    if (
        dtype < 0
        or peer < 0
        or peer >= load(ctx + layout.CTX_NRANKS)
        or peer == load(ctx + layout.CTX_RANK)
    ):
        return layout.NOT_HANDLED
    ctrl = load(ctx + layout.CTX_CTRL)
    if load_acquire(ctrl + layout.CTRL_ABORT) != 0:
        return fail(ctx, layout.ERR_ABORTED, peer, 0, load(ctrl + layout.CTRL_ABORT))
    if load(ctx + layout.CTX_THREADED) != 0:
        release_gil(ctx)
    return single_message(ctx, receives, peer, load(x + layout.ARRAY_DATA), element_count(x), dtype)


@inline
def fill_op(ctx: int, op: int, receives: bool, array: int, peer: int) -> bool:
    """Write one operation of an exchange; False if array or peer must go to the slow path."""
    if not is_usable(ctx, array, WRITABLE if receives else READABLE):
        return False
    if peer < 0 or peer >= load(ctx + layout.CTX_NRANKS) or peer == load(ctx + layout.CTX_RANK):
        return False
    dtype = dtype_code(ctx, array)
    if dtype < 0 or load(connection(ctx, layout.CTX_SEND, peer) + layout.CONN_CAPS) == 0:
        return False
    init_op(
        ctx,
        op,
        receives,
        peer,
        load(array + layout.ARRAY_DATA),
        element_count(array),
        dtype,
        layout.WAIT_ALL,
    )
    return True


@inline
def send_and_receive(ctx: int, args: int) -> int:
    """Run a sendrecv with arguments (array, peer, array, peer)."""
    table = load(ctx + layout.CTX_SENDRECV_OPS)
    if not fill_op(
        ctx, table, False, load(args), small_int(ctx, load(args + 8), layout.CTX_INT_TYPE)
    ):
        return layout.NOT_HANDLED
    if not fill_op(
        ctx,
        table + layout.OP_SIZE,
        True,
        load(args + 16),
        small_int(ctx, load(args + 24), layout.CTX_INT_TYPE),
    ):
        return layout.NOT_HANDLED
    first, second = load(table + layout.OP_ADDR), load(table + layout.OP_SIZE + layout.OP_ADDR)
    if first < second + load(table + layout.OP_SIZE + layout.OP_BYTES) and second < first + load(
        table + layout.OP_BYTES
    ):
        return layout.NOT_HANDLED  # overlapping
    ctrl = load(ctx + layout.CTX_CTRL)
    if load_acquire(ctrl + layout.CTRL_ABORT) != 0:
        return fail(
            ctx, layout.ERR_ABORTED, load(table + layout.OP_PEER), 0, load(ctrl + layout.CTRL_ABORT)
        )
    if load(ctx + layout.CTX_THREADED) != 0 or load(table + layout.OP_BYTES) > RELEASE_GIL_BYTES:
        release_gil(ctx)
    return exchange_all(ctx, table, 2)
