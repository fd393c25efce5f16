"""Counts of a call, written into its run: everything in a run that depends on the size of its
blocks.
"""

from __future__ import annotations

from miraccl.executor.cpu import sizes
from miraccl.executor.cpu.kernels import layout
from miraccl.native.intrinsics import inline, load, store

chunk_bytes = inline(sizes.chunk_bytes)
size_class = inline(sizes.size_class)
count_hash = inline(sizes.count_hash)


@inline
def fill_blocks(
    table: int, counts: int, number: int, parts: int, itemsize: int
) -> tuple[int, int, int]:
    """Write a table of consecutive blocks.

    Returns the bytes of the largest chunk, of the largest block, and of all blocks.
    """
    chunk, block, end = 0, 0, 0
    for i in range(number):
        nbytes = load(counts + 8 * i) * itemsize
        size = chunk_bytes(nbytes, parts, itemsize)
        row = table + i * layout.BLOCK_SIZE
        store(row, end)
        store(row + 8, nbytes)
        store(row + 16, size)
        chunk, block = max(chunk, size), max(block, nbytes)
        end += nbytes
    return chunk, block, end


@inline
def fill_counts(run: int, counts: int) -> None:
    """Write the counts at ``counts`` into one run."""
    parts, itemsize = load(run + layout.RUN_PARTS), load(run + layout.RUN_ITEMSIZE)
    inputs, number = load(run + layout.RUN_IN_BLOCKS), load(run + layout.RUN_NIN)
    first = counts + layout.COUNTS_BLOCKS
    in_chunk, in_block, in_bytes = fill_blocks(inputs, first, number, parts, itemsize)
    outputs = load(run + layout.RUN_OUT_BLOCKS)
    out_chunk, out_block, out_bytes = fill_blocks(
        outputs, first + 8 * number, load(run + layout.RUN_NOUT), parts, itemsize
    )
    chunk, block = max(in_chunk, out_chunk), max(1, max(in_block, out_block))
    slice_bytes = load(run + layout.RUN_ROUND_BYTES)
    store(run + layout.RUN_STRIDE, min(slice_bytes, -(-chunk // sizes.ALIGN) * sizes.ALIGN))
    store(run + layout.RUN_NROUNDS, max(1, (min(chunk, block) + slice_bytes - 1) // slice_bytes))
    store(run + layout.RUN_IN_BYTES, in_bytes)
    store(run + layout.RUN_OUT_BYTES, out_bytes)
    store(
        run + layout.RUN_STREAM,
        1 if in_bytes + out_bytes >= load(run + layout.RUN_STREAM_FROM) else 0,
    )
    store(run + layout.RUN_SCRATCH_CHUNK, chunk)
    store(run + layout.RUN_SCRATCH_BLOCK, max(load(inputs + 8), load(outputs + 8)))
    store(run + layout.RUN_COUNT, load(counts + layout.COUNTS_REPORTED))
    template = load(run + layout.RUN_TEMPLATE) & ((1 << layout.SIG_COUNT_SHIFT) - 1)
    store(
        run + layout.RUN_TEMPLATE,
        template | count_hash(load(counts + layout.COUNTS_AGREED)) << layout.SIG_COUNT_SHIFT,
    )


def set_counts(run: int, counts: int, unused: int, also_unused: int) -> int:
    """Write the counts at ``counts`` into a run and its window run; neither may be in progress."""
    fill_counts(run, counts)
    window_run = load(run + layout.RUN_WINDOW_PATH)
    if window_run != 0:
        fill_counts(window_run, counts)
    return layout.OK
