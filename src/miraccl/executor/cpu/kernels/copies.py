"""Copies of payloads: ``memcpy``, or a loop where the processor copies strings slowly.

The measurement of the machine decides (``loop_copy``); ``native.copies`` says why.
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.native.copies import LARGEST, SMALLEST, copy_by_lines
from miraccl.native.intrinsics import inline, load, memcpy


@inline
def copy_memory(ctx: int, dst: int, src: int, nbytes: int) -> None:
    """Copy bytes between memory that does not overlap."""
    if load(ctx + layout.CTX_LOOP_COPY) == 0 or nbytes < SMALLEST or nbytes > LARGEST:
        memcpy(dst, src, nbytes)
        return
    copy_by_lines(dst, src, nbytes)
