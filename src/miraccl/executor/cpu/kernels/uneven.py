"""Counts of an uneven call: from the lists given to the fast path to the words of
``kernels.counts``.
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.arguments import read_counts
from miraccl.native import hashing
from miraccl.native.intrinsics import inline, load, store
from miraccl.types import Collective

ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = (
    int(Collective.ALL_GATHER),
    int(Collective.REDUCE_SCATTER),
    int(Collective.ALL_TO_ALL),
)
GATHER, SCATTER = int(Collective.GATHER), int(Collective.SCATTER)
mix = inline(hashing.mix)


@inline
def splits_input(coll: int) -> bool:
    """Return True if a rank's input has a block for each rank."""
    return coll == ALL_TO_ALL or coll == REDUCE_SCATTER or coll == SCATTER


@inline
def splits_output(coll: int) -> bool:
    """Return True if a rank's output has a block for each rank."""
    return coll == ALL_TO_ALL or coll == ALL_GATHER or coll == GATHER


@inline
def read_call_counts(ctx: int, coll: int, lists: int) -> tuple[int, int, int]:
    """Write the counts of an uneven call to ``CTX_COUNTS``; ``lists`` are those of input and
    output.

    Returns (elements of the input, of the output, of the largest block that all ranks know), with
    -1 where the slow path must handle the call.
    """
    nranks, rank, table = (
        load(ctx + layout.CTX_NRANKS),
        load(ctx + layout.CTX_RANK),
        load(ctx + layout.CTX_COUNTS),
    )
    ins = table + layout.COUNTS_BLOCKS
    outs = ins + (8 * nranks if splits_input(coll) else 8)
    count = read_counts(ctx, load(lists), nranks, ins) if splits_input(coll) else 0
    out_count = read_counts(ctx, load(lists + 8), nranks, outs) if splits_output(coll) else 0
    if count < 0 or out_count < 0:
        return -1, -1, 0
    agreed, most = 0, 0
    if coll == ALL_TO_ALL:
        if load(ins + 8 * rank) != load(outs + 8 * rank):
            return -1, -1, 0
    else:
        known = ins if splits_input(coll) else outs
        for i in range(nranks):
            agreed, most = mix(agreed, load(known + 8 * i)), max(most, load(known + 8 * i))
    store(table + layout.COUNTS_AGREED, agreed)
    store(table + layout.COUNTS_REPORTED, max(count, out_count) if coll != ALL_TO_ALL else count)
    if not splits_output(coll):
        out_count = load(ins + 8 * rank)
        store(outs, out_count)
    elif not splits_input(coll):
        count = load(outs + 8 * rank)
        store(ins, count)
    return count, out_count, most


@inline
def elements_before(ctx: int, coll: int) -> int:
    """Return the elements of the blocks before this rank's, by the counts that were read last."""
    blocks = load(ctx + layout.CTX_COUNTS) + layout.COUNTS_BLOCKS + (0 if splits_input(coll) else 8)
    before = 0
    for i in range(load(ctx + layout.CTX_RANK)):
        before += load(blocks + 8 * i)
    return before
