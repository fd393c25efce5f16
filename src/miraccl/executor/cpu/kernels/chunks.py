"""Slices of chunks that a round moves: at most ``RUN_ROUND_BYTES`` of every chunk.

A step on several chunks sends one message in which chunk ``i`` begins at ``i * RUN_STRIDE``, with
gaps as long as 64 bytes at most: a network sends them, too.
Chunk ``i`` of scratch has the length of part ``i % parts`` of a block.
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.native.intrinsics import inline, load
from miraccl.schedule.ir import Buffer

INPUT, OUTPUT, SCRATCH = int(Buffer.INPUT), int(Buffer.OUTPUT), int(Buffer.SCRATCH)


@inline
def slice_extent(run: int, buffer: int, index: int, rnd: int) -> tuple[int, int]:
    """Return (offset from the start of the buffer, bytes) of a round's slice of one chunk."""
    slice_bytes = load(run + layout.RUN_ROUND_BYTES)
    parts = load(run + layout.RUN_PARTS)
    if buffer == SCRATCH:
        size = load(run + layout.RUN_SCRATCH_CHUNK)
        left = (
            min(size, load(run + layout.RUN_SCRATCH_BLOCK) - index % parts * size)
            - rnd * slice_bytes
        )
        return index * size + rnd * slice_bytes, max(0, min(slice_bytes, left))
    table = load(run + (layout.RUN_IN_BLOCKS if buffer == INPUT else layout.RUN_OUT_BLOCKS))
    block, part = index, 0
    if parts != 1:
        block = index // parts
        part = index - block * parts
    entry = table + block * layout.BLOCK_SIZE
    chunk = load(entry + 16)
    low = part * chunk + rnd * slice_bytes
    high = min(min(part * chunk + chunk, load(entry + 8)), low + slice_bytes)
    return load(entry) + low, max(0, high - low)


@inline
def buffer_base(run: int, buffer: int) -> int:
    """Return the address of a buffer."""
    return load(
        run
        + (
            layout.RUN_IN
            if buffer == INPUT
            else layout.RUN_OUT
            if buffer == OUTPUT
            else layout.RUN_SCRATCH
        )
    )


@inline
def message_bytes(run: int, buffer: int, index: int, chunks: int, rnd: int) -> int:
    """Return the bytes of the message that carries these chunks' slices, including gaps between
    them.
    """
    last = 0
    for i in range(chunks):
        _, size = slice_extent(run, buffer, index + i, rnd)
        if size > 0:
            last = i * load(run + layout.RUN_STRIDE) + size
    return last
