"""Folds of operands that may lie in other processes.

An operand that is not addressable is read into the stage, part by part, and added from there.
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.fifo_messages import connection, local_payload, read_remote
from miraccl.executor.cpu.kernels.slots import descriptor_line
from miraccl.executor.cpu.kernels.waiting import fail
from miraccl.native.intrinsics import call4, inline, load, store


@inline
def fold_two(ctx: int, run: int, dst: int, a: int, b: int, nbytes: int) -> None:
    """Compute ``dst = a (+) b``."""
    sources = load(ctx + layout.CTX_SCRATCH) + layout.SCRATCH_SOURCES
    store(sources, load(ctx + layout.CTX_ACCUMULATORS))
    store(sources + 8, a)
    store(sources + 16, b)
    call4(load(run + layout.RUN_FOLD), dst, sources, 2, nbytes // load(run + layout.RUN_ITEMSIZE))


@inline
def fold_message(
    ctx: int, run: int, conn: int, peer: int, dst: int, own: int, offset: int, nbytes: int
) -> int:
    """Compute ``dst = own (+) message[offset:]``, wherever the message lies."""
    source = local_payload(ctx, conn)
    if source != 0:
        fold_two(ctx, run, dst, own, source + offset, nbytes)
        return layout.OK
    remote = load(descriptor_line(conn) + layout.DESC_ADDR) + offset
    stage, step = load(ctx + layout.CTX_STAGE), load(ctx + layout.CTX_STAGE_BYTES)
    for start in range(0, nbytes, step):
        size = min(step, nbytes - start)
        if not read_remote(ctx, conn, stage, remote + start, size):
            return fail(ctx, layout.ERR_CMA, peer, nbytes, 0)
        fold_two(ctx, run, dst + start, own + start, stage, size)
    return layout.OK


@inline
def operand_words(ctx: int, step: int, i: int) -> int:
    """Return the address of the two words of the ``i``-th operand of a step.

    The first word is the operand's local address, 0 if it is in private memory of the peer's
    process; the second is its address there.
    """
    return (
        load(ctx + layout.CTX_SCRATCH)
        + layout.SCRATCH_SOURCES
        + 8 * (load(step + layout.STEP_NPEERS) + 1)
        + 16 * i
    )


@inline
def fold_operands(ctx: int, run: int, step: int, dst: int, nbytes: int) -> int:
    """Reduce all operands of a step to ``dst``, in their order; see ``operand_words``."""
    if nbytes == 0:
        return layout.OK
    count, peers = load(step + layout.STEP_NPEERS), load(step + layout.STEP_PEERS)
    remotes = 0
    for i in range(count):
        if load(operand_words(ctx, step, i)) == 0:
            remotes += 1
    block = nbytes
    if remotes != 0:
        block = max(64, load(ctx + layout.CTX_STAGE_BYTES) // remotes // 64 * 64)
    sources = load(ctx + layout.CTX_SCRATCH) + layout.SCRATCH_SOURCES
    store(sources, load(ctx + layout.CTX_ACCUMULATORS))
    for start in range(0, nbytes, block):
        size = min(block, nbytes - start)
        stage = load(ctx + layout.CTX_STAGE)
        for i in range(count):
            here = load(operand_words(ctx, step, i))
            if here != 0:
                store(sources + 8 * (i + 1), here + start)
                continue
            peer, there = load(peers + 8 * i), load(operand_words(ctx, step, i) + 8)
            if not read_remote(
                ctx, connection(ctx, layout.CTX_RECV, peer), stage, there + start, size
            ):
                return fail(ctx, layout.ERR_CMA, peer, nbytes, 0)
            store(sources + 8 * (i + 1), stage)
            stage += block
        call4(
            load(run + layout.RUN_FOLD),
            dst + start,
            sources,
            count,
            size // load(run + layout.RUN_ITEMSIZE),
        )
    return layout.OK
