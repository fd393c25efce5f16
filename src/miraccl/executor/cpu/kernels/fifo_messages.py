"""Messages on a FIFO: slots, posting, receiving, and the four places of a payload.

A payload lies in a slot, in the descriptor line itself (at most 32 bytes: flag and data on one
cache line), or is not copied and its address is posted: in window memory, which the receiver has
mapped, or in the sender's private memory, which the receiver reads with ``process_vm_readv``
(directly if the sender is a thread of the same process). The sender chooses, the receiver accepts
what it finds. A sender that posted an address must not return before the receiver has consumed the
data: ``drain``.
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.copies import copy_memory
from miraccl.executor.cpu.kernels.slots import (
    claim_slot,
    descriptor_line,
    has_free_slot,
    poll_tail,
    received_slot,
    required_tail,
    return_slot,
    slot_address,
)
from miraccl.executor.cpu.kernels.waiting import fail, wait, wake_peer
from miraccl.native.intrinsics import (
    fence,
    inline,
    load,
    memcpy,
    process_vm_readv,
    process_vm_writev,
    store,
    store_release,
    stream_line,
)


@inline
def connection(ctx: int, table: int, peer: int) -> int:
    """Return the connection to ``peer`` in one of the two tables."""
    return load(ctx + table) + peer * layout.CONN_SIZE


@inline
def acquire_slot(ctx: int, conn: int, peer: int) -> int:
    """Wait until the next line and slot of a send connection are free."""
    if has_free_slot(conn):
        return layout.OK
    code = wait(ctx, load(conn + layout.CONN_TAIL_ADDR), required_tail(conn), peer)
    if code == layout.OK:
        poll_tail(conn)
    return code


@inline
def post_descriptor(ctx: int, conn: int, sig: int, nbytes: int, mode: int) -> None:
    """Publish the line whose payload or address is in place."""
    line = descriptor_line(conn)
    count = load(conn + layout.CONN_COUNT) + 1
    store(line + layout.DESC_SIG, sig)
    store(line + layout.DESC_BYTES, nbytes)
    store(line + layout.DESC_MODE, mode)
    store(conn + layout.CONN_COUNT, count)
    store_release(line + layout.DESC_FLAG, count)
    wake_peer(ctx, conn)


@inline
def post_slot(ctx: int, conn: int, sig: int, nbytes: int) -> None:
    """Publish the content of ``next_slot_address(conn)``."""
    post_descriptor(ctx, conn, sig, nbytes, claim_slot(conn))


@inline
def post_address(ctx: int, conn: int, sig: int, address: int, nbytes: int) -> None:
    """Publish the address of the payload, from which the receiver reads it."""
    line = descriptor_line(conn)
    window = load(ctx + layout.CTX_WINDOW)
    if (
        address >= window
        and address + nbytes <= load(ctx + layout.CTX_WINDOW_END)
        and load(conn + layout.CONN_CAPS) & layout.CAP_ONE_SIDED != 0
    ):
        store(line + layout.DESC_ADDR, address - window)
        post_descriptor(ctx, conn, sig, nbytes, layout.MODE_WINDOW)
    else:
        store(line + layout.DESC_ADDR, address)
        post_descriptor(ctx, conn, sig, nbytes, layout.MODE_ADDRESS)
    store(conn + layout.CONN_LAST_DIRECT, load(conn + layout.CONN_COUNT))


@inline
def can_post_address(ctx: int, conn: int, address: int, nbytes: int, threshold: int) -> bool:
    """Return True if a payload is posted by address.

    Window memory always is; private memory from ``threshold`` bytes on, if the peer or the proxy
    can read it.
    """
    if load(conn + layout.CONN_CAPS) & layout.CAP_IN_PLACE != 0:
        # The proxy sends straight from the user's memory.
        return nbytes > load(conn + layout.CONN_SLOT_BYTES) or (
            threshold >= 0 and nbytes >= layout.MIN_DIRECT_BYTES
        )
    if nbytes <= layout.INLINE_BYTES or threshold < 0:
        return False
    if load(conn + layout.CONN_CAPS) & layout.CAP_ONE_SIDED != 0:
        window = load(ctx + layout.CTX_WINDOW)
        if address >= window and address + nbytes <= load(ctx + layout.CTX_WINDOW_END):
            return True
    return nbytes >= threshold and load(conn + layout.CONN_DIRECT) != 0


@inline
def drain(ctx: int, conn: int, peer: int) -> int:
    """Wait until the peer has consumed everything that was posted by address."""
    last = load(conn + layout.CONN_LAST_DIRECT)
    if load(conn + layout.CONN_TAIL) >= last:
        return layout.OK
    code = wait(ctx, load(conn + layout.CONN_TAIL_ADDR), last, peer)
    poll_tail(conn)
    return code


@inline
def receive(ctx: int, conn: int, peer: int, sig: int) -> int:
    """Wait for the next message of a receive connection, which must belong to operation ``sig``."""
    line = descriptor_line(conn)
    code = wait(ctx, line + layout.DESC_FLAG, load(conn + layout.CONN_COUNT) + 1, peer)
    if code != layout.OK:
        return code
    if load(line + layout.DESC_SIG) != sig:
        return fail(ctx, layout.ERR_MISMATCH, peer, sig, load(line + layout.DESC_SIG))
    return layout.OK


@inline
def consume(ctx: int, conn: int) -> None:
    """Give line and slot of the current message back."""
    consume_message(ctx, conn, load(ctx + layout.CTX_SWAP) != 0)


@inline
def consume_message(ctx: int, conn: int, swaps: bool) -> None:
    """Give line and slot of the current message back; ``swaps``: its slot may be kept for another
    one.
    """
    return_slot(ctx, conn, swaps)
    count = load(conn + layout.CONN_COUNT) + 1
    store(conn + layout.CONN_COUNT, count)
    store_release(load(conn + layout.CONN_TAIL_ADDR), count)
    wake_peer(ctx, conn)


@inline
def clear_to_send(ctx: int, conn: int, address: int, nbytes: int, ahead: int) -> None:
    """Post a CTS: the message ``ahead`` of the next one may land at ``address`` (connections with
    IN_PLACE only).
    """
    message = load(conn + layout.CONN_COUNT) + ahead
    line = load(conn + layout.CONN_CTS) + (message & (layout.NSLOTS - 1)) * layout.LINE
    store(line + 8, address)
    store(line + 16, nbytes)
    store_release(line, message + 1)
    wake_peer(ctx, conn)


@inline
def local_payload(ctx: int, conn: int) -> int:
    """Return the local address of the received payload, 0 if it is in private memory of another
    process.
    """
    line = descriptor_line(conn)
    mode = load(line + layout.DESC_MODE)
    if mode == layout.MODE_SLOT or mode == layout.MODE_MOVED:
        return slot_address(conn, received_slot(conn))
    if mode == layout.MODE_INLINE:
        return line + layout.DESC_INLINE
    if mode == layout.MODE_WINDOW:
        return load(conn + layout.CONN_WINDOW) + load(line + layout.DESC_ADDR)
    if load(conn + layout.CONN_PID) == load(ctx + layout.CTX_PID):
        return load(line + layout.DESC_ADDR)
    return 0


@inline
def iovecs(ctx: int, here: int, there: int, nbytes: int) -> int:
    """Write two consecutive struct iovec, for local memory and memory of another process."""
    vectors = load(ctx + layout.CTX_SCRATCH) + layout.SCRATCH_VECTORS
    store(vectors, here)
    store(vectors + 8, nbytes)
    store(vectors + 16, there)
    store(vectors + 24, nbytes)
    return vectors


@inline
def read_remote(ctx: int, conn: int, dst: int, src: int, nbytes: int) -> bool:
    """Copy from the private memory of the peer's process; False if the kernel refuses."""
    done = 0
    while done < nbytes:
        vectors = iovecs(ctx, dst + done, src + done, nbytes - done)
        got = process_vm_readv(load(conn + layout.CONN_PID), vectors, 1, vectors + 16, 1, 0)
        if got <= 0:
            return False
        done += got
    return True


@inline
def write_remote(ctx: int, conn: int, dst: int, src: int, nbytes: int) -> bool:
    """Copy into the private memory of the peer's process; False if the kernel refuses."""
    done = 0
    while done < nbytes:
        vectors = iovecs(ctx, src + done, dst + done, nbytes - done)
        got = process_vm_writev(load(conn + layout.CONN_PID), vectors, 1, vectors + 16, 1, 0)
        if got <= 0:
            return False
        done += got
    return True


@inline
def copy_bytes(ctx: int, dst: int, src: int, nbytes: int) -> None:
    """Copy to a user's buffer, bypassing the caches if the operation is larger than they are."""
    if load(ctx + layout.CTX_STREAM) == 0 or nbytes < 4096:
        copy_memory(ctx, dst, src, nbytes)
        return
    head = -dst & 63
    lines = (nbytes - head) >> 6
    memcpy(dst, src, head)
    for i in range(lines):
        stream_line(dst + head + i * 64, src + head + i * 64)
    done = head + lines * 64
    memcpy(dst + done, src + done, nbytes - done)
    fence()


@inline
def copy_payload(ctx: int, conn: int, peer: int, dst: int, nbytes: int) -> int:
    """Copy the received payload to ``dst``."""
    line = descriptor_line(conn)
    if load(line + layout.DESC_MODE) == layout.MODE_LANDED:
        return layout.OK
    source = local_payload(ctx, conn)
    if source != 0:
        copy_bytes(ctx, dst, source, nbytes)
    elif not read_remote(ctx, conn, dst, load(line + layout.DESC_ADDR), nbytes):
        return fail(ctx, layout.ERR_CMA, peer, nbytes, 0)
    return layout.OK
