"""Copies of payloads: ``memcpy``, or a loop where the processor copies strings slowly.

glibc copies 2 KiB to the size of the second-level cache with ``rep movsb`` on processors that claim
to be fast at it (ERMS, FSRM). AMD's Zen 3 and 4 are not, if source and destination lie unfavourably
to each other: 3 GB/s instead of 30. The measurement of the machine decides (``loop_copy``).
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.native.intrinsics import copy_lines, inline, load, memcpy

#: Sizes that the loop copies: below, glibc uses vectors as well; above, it does again.
SMALLEST, LARGEST = 2048, 1 << 20
STRIDE = 256  # bytes of one turn of the loop


@inline
def copy_memory(ctx: int, dst: int, src: int, nbytes: int) -> None:
    """Copy bytes between memory that does not overlap."""
    if load(ctx + layout.CTX_LOOP_COPY) == 0 or nbytes < SMALLEST or nbytes > LARGEST:
        memcpy(dst, src, nbytes)
        return
    turns = nbytes // STRIDE
    for i in range(turns):
        copy_lines(dst + i * STRIDE, src + i * STRIDE)
    done = turns * STRIDE
    memcpy(dst + done, src + done, nbytes - done)
