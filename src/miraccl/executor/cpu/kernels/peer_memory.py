"""Memory that peers can address: signals, and the primitives that read and write buffers of peers.

A signal tells peers that everything before it is done, and the addresses of a rank's buffers. A
buffer lies in window memory, which all ranks of the host have mapped; in private memory, which the
kernel copies from and to (``process_vm_readv``, ``process_vm_writev``); or in this process's own
memory if the peer is one of its threads. Scratch memory is never signalled: ``lower`` rejects
schedules in which peers would access it.
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.chunks import INPUT, buffer_base, slice_extent
from miraccl.executor.cpu.kernels.copies import copy_memory
from miraccl.executor.cpu.kernels.fifo_messages import (
    acquire_slot,
    connection,
    consume,
    post_descriptor,
    read_remote,
    receive,
    write_remote,
)
from miraccl.executor.cpu.kernels.operands import fold_operands, operand_words
from miraccl.executor.cpu.kernels.slots import descriptor_line
from miraccl.executor.cpu.kernels.waiting import fail
from miraccl.native.intrinsics import inline, load, store


@inline
def locate(ctx: int, address: int, nbytes: int, private: int) -> tuple[int, int]:
    """Return (0, offset in the window), or (``private``, address in private memory)."""
    window = load(ctx + layout.CTX_WINDOW)
    if address >= window and address + nbytes <= load(ctx + layout.CTX_WINDOW_END):
        return 0, address - window
    return private, address


@inline
def locate_buffers(ctx: int, run: int) -> tuple[int, int, int]:
    """Return (PRIVATE_* bits, location of input, of output) of this rank, for its signals."""
    in_mode, in_at = locate(
        ctx, load(run + layout.RUN_IN), load(run + layout.RUN_IN_BYTES), layout.PRIVATE_IN
    )
    out_mode, out_at = locate(
        ctx, load(run + layout.RUN_OUT), load(run + layout.RUN_OUT_BYTES), layout.PRIVATE_OUT
    )
    return in_mode | out_mode, in_at, out_at


@inline
def send_signal(ctx: int, run: int, peer: int) -> int:
    """Signal a peer that everything before is done, with the locations of this rank's buffers."""
    conn = connection(ctx, layout.CTX_SEND, peer)
    code = acquire_slot(ctx, conn, peer)
    if code != layout.OK:
        return code
    line = descriptor_line(conn)
    modes, in_at, out_at = locate_buffers(ctx, run)
    store(line + layout.DESC_ADDR, in_at)
    store(line + layout.DESC_ADDR2, out_at)
    if load(conn + layout.CONN_CAPS) & layout.CAP_ONE_SIDED == 0:
        # The peer cannot use addresses.
        post_descriptor(ctx, conn, load(run + layout.RUN_SIG), 0, layout.MODE_INLINE)
    else:
        post_descriptor(ctx, conn, load(run + layout.RUN_SIG), modes, layout.MODE_SIGNAL)
    return layout.OK


@inline
def wait_signal(ctx: int, run: int, peer: int) -> int:
    """Wait for a peer's signal and record the locations of its buffers."""
    conn = connection(ctx, layout.CTX_RECV, peer)
    code = receive(ctx, conn, peer, load(run + layout.RUN_SIG))
    if code != layout.OK:
        return code
    line = descriptor_line(conn)
    modes = load(line + layout.DESC_BYTES)
    same = load(conn + layout.CONN_PID) == load(ctx + layout.CTX_PID)
    window = load(conn + layout.CONN_WINDOW)
    store(
        conn + layout.CONN_PEER_IN,
        load(line + layout.DESC_ADDR) + (window if modes & layout.PRIVATE_IN == 0 else 0),
    )
    store(
        conn + layout.CONN_PEER_OUT,
        load(line + layout.DESC_ADDR2) + (window if modes & layout.PRIVATE_OUT == 0 else 0),
    )
    store(conn + layout.CONN_PEER_MODES, 0 if same else modes)
    store(conn + layout.CONN_PEER_PRIVATE, modes)
    consume(ctx, conn)
    return layout.OK


@inline
def peer_buffer(conn: int, buffer: int) -> tuple[int, bool]:
    """Return the address of a peer's input or output, and whether it is in another process."""
    if buffer == INPUT:
        return load(conn + layout.CONN_PEER_IN), load(
            conn + layout.CONN_PEER_MODES
        ) & layout.PRIVATE_IN != 0
    return load(conn + layout.CONN_PEER_OUT), load(
        conn + layout.CONN_PEER_MODES
    ) & layout.PRIVATE_OUT != 0


@inline
def reduce_from_peers(ctx: int, run: int, step: int, rnd: int) -> int:
    """Run REDUCE_FROM_PEERS. All ranks' buffers have the same blocks, so this rank's offset is
    valid
    for all.
    """
    src_buf, src = load(step + layout.STEP_SRC_BUF), load(step + layout.STEP_SRC)
    dst_buf, dst = load(step + layout.STEP_DST_BUF), load(step + layout.STEP_DST)
    count, peers, rank = (
        load(step + layout.STEP_NPEERS),
        load(step + layout.STEP_PEERS),
        load(ctx + layout.CTX_RANK),
    )
    for chunk in range(load(step + layout.STEP_CHUNKS)):
        to, size = slice_extent(run, dst_buf, dst + chunk, rnd)
        offset, own_size = slice_extent(run, src_buf, src + chunk, rnd)
        for i in range(count):
            peer = load(peers + 8 * i)
            if peer == rank:
                store(operand_words(ctx, step, i), buffer_base(run, src_buf) + offset)
            else:
                start, far = peer_buffer(connection(ctx, layout.CTX_RECV, peer), src_buf)
                store(operand_words(ctx, step, i), 0 if far else start + offset)
                store(operand_words(ctx, step, i) + 8, start + offset)
        code = fold_operands(ctx, run, step, buffer_base(run, dst_buf) + to, min(size, own_size))
        if code != layout.OK:
            return code
    return layout.OK


@inline
def put_or_get(ctx: int, run: int, step: int, puts: bool, rnd: int) -> int:
    """Run PUT or GET."""
    src_buf, src = load(step + layout.STEP_SRC_BUF), load(step + layout.STEP_SRC)
    dst_buf, dst = load(step + layout.STEP_DST_BUF), load(step + layout.STEP_DST)
    peer = load(step + (layout.STEP_SEND if puts else layout.STEP_RECV))
    conn = connection(ctx, layout.CTX_RECV, peer)
    theirs, far = peer_buffer(conn, dst_buf if puts else src_buf)
    for i in range(load(step + layout.STEP_CHUNKS)):
        frm, from_size = slice_extent(run, src_buf, src + i, rnd)
        to, size = slice_extent(run, dst_buf, dst + i, rnd)
        frm += buffer_base(run, src_buf) if puts else theirs
        to += theirs if puts else buffer_base(run, dst_buf)
        size = min(size, from_size)
        if not far:
            copy_memory(ctx, to, frm, size)
        elif not (
            write_remote(ctx, conn, to, frm, size)
            if puts
            else read_remote(ctx, conn, to, frm, size)
        ):
            return fail(ctx, layout.ERR_CMA, peer, size, 0)
    return layout.OK


@inline
def negotiate_window(ctx: int, run: int) -> int:
    """Exchange buffer locations with all ranks.

    Returns OK if all buffers are window memory, ``NOT_HANDLED`` if not, or an ERR_*.
    """
    peers, count = load(run + layout.RUN_NEGOTIATE_PEERS), load(run + layout.RUN_NEGOTIATE_NPEERS)
    for i in range(count):
        code = send_signal(ctx, run, load(peers + 8 * i))
        if code != layout.OK:
            return code
    private, _, _ = locate_buffers(ctx, run)
    for i in range(count):
        peer = load(peers + 8 * i)
        code = wait_signal(ctx, run, peer)
        if code != layout.OK:
            return code
        private |= load(connection(ctx, layout.CTX_RECV, peer) + layout.CONN_PEER_PRIVATE)
    return layout.NOT_HANDLED if private != 0 else layout.OK
