"""Kernel source: copies by vectors, for what glibc's ``memcpy`` copies slowly.

glibc copies 2 KiB to the size of the second-level cache with ``rep movsb`` on processors that claim
to be fast at it (ERMS, FSRM). AMD's Zen 3 and 4 are not if the target lies 1 to 31 bytes behind the
source, modulo 4 KiB: 16 KiB at 3 GB/s instead of 18, 64 KiB at 2 instead of 25 (EPYC, family 25
model 1). An array of NumPy that ``malloc`` has mapped begins 16 bytes behind a page, window memory
at a page: every read of the first from the second is such a copy.
"""

from __future__ import annotations

from miraccl.native.intrinsics import copy_lines, inline, memcpy

#: Sizes that the loop copies: below, glibc uses vectors as well; above, it does again.
SMALLEST, LARGEST = 2048, 1 << 20
STRIDE = 256  # bytes of one turn of the loop
#: Distances of the target behind the source, modulo a page, at which ``rep movsb`` is slow.
PAGE, SLOW_DISTANCE = 4096, 32


@inline
def copy_by_lines(dst: int, src: int, nbytes: int) -> None:
    """Copy bytes with vectors between memory that does not overlap."""
    turns = nbytes // STRIDE
    for i in range(turns):
        copy_lines(dst + i * STRIDE, src + i * STRIDE)
    done = turns * STRIDE
    memcpy(dst + done, src + done, nbytes - done)


@inline
def copy_apart(dst: int, src: int, nbytes: int) -> None:
    """Copy bytes between memory that does not overlap, whatever its alignment."""
    distance = (dst - src) & (PAGE - 1)
    if nbytes < SMALLEST or nbytes >= LARGEST or distance == 0 or distance >= SLOW_DISTANCE:
        memcpy(dst, src, nbytes)
    else:
        copy_by_lines(dst, src, nbytes)
