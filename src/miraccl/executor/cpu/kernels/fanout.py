"""One payload with several receivers: copied once, into a slot that all of them read.

Sends of the same chunk one after another (``lower`` marks them) have their payload in a slot of
window memory, which all ranks of the host have mapped, and post its address. A broadcast over n
ranks of a host is n copies instead of 2 (n - 1).

A slot is free once all its receivers have consumed their messages: a row of ``CTX_FANOUT_TAILS``
has the count that each one's tail must reach. Nobody waits for a slot. If none is free, which needs
receivers that are NSLOTS messages apart, the payload is copied for each receiver as usual.
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.copies import copy_memory
from miraccl.executor.cpu.kernels.slots import descriptor_line, poll_tail
from miraccl.native.intrinsics import inline, load, store


@inline
def row_of(ctx: int, slot: int) -> int:
    """Return the address of a slot's row."""
    return load(ctx + layout.CTX_FANOUT_TAILS) + slot * load(ctx + layout.CTX_NRANKS) * 8


@inline
def is_free(ctx: int, slot: int) -> bool:
    """Return True if all receivers of a slot's last payload have consumed it."""
    row = row_of(ctx, slot)
    for rank in range(load(ctx + layout.CTX_NRANKS)):
        needed = load(row + 8 * rank)
        if needed != 0:
            conn = load(ctx + layout.CTX_SEND) + rank * layout.CONN_SIZE
            if load(conn + layout.CONN_TAIL) < needed and poll_tail(conn) < needed:
                return False
            store(row + 8 * rank, 0)
    return True


@inline
def fill_slot(ctx: int, conn: int, address: int, size: int) -> bool:
    """Copy the payload at ``address`` into the next slot; False if that is not free."""
    slot = load(ctx + layout.CTX_FANOUT_NEXT)
    if not is_free(ctx, slot):
        return False
    to = load(ctx + layout.CTX_FANOUT) + slot * load(conn + layout.CONN_SLOT_BYTES)
    copy_memory(ctx, to, address, size)
    store(ctx + layout.CTX_FANOUT_SLOT, slot + 1)
    store(ctx + layout.CTX_FANOUT_NEXT, 0 if slot + 1 == layout.NFANOUT else slot + 1)
    return True


@inline
def shares_slot(ctx: int, conn: int, address: int, size: int) -> bool:
    """Return True if the payload at ``address`` is in a shared slot; the first call copies it."""
    if (
        size < layout.FANOUT_FROM
        or load(ctx + layout.CTX_FANOUT) == 0
        or load(conn + layout.CONN_CAPS) & layout.CAP_ONE_SIDED == 0
    ):
        return False
    if load(ctx + layout.CTX_FANOUT_SLOT) != 0:
        return True
    return fill_slot(ctx, conn, address, size)


@inline
def describe_shared(ctx: int, conn: int, peer: int) -> None:
    """Write the place of the shared payload into the line of the next message to ``peer``."""
    slot = load(ctx + layout.CTX_FANOUT_SLOT) - 1
    at = load(ctx + layout.CTX_FANOUT) + slot * load(conn + layout.CONN_SLOT_BYTES)
    store(descriptor_line(conn) + layout.DESC_ADDR, at - load(ctx + layout.CTX_WINDOW))
    store(row_of(ctx, slot) + 8 * peer, load(conn + layout.CONN_COUNT) + 1)
