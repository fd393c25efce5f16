"""Symmetric memory of emulated GPUs: private mappings of one initial image.

An untouched page costs nothing: a machine of 8 ranks is made in a millisecond, and a check of 46
MiB of packet buffers per rank reads the pages that kernels have written.
"""

from __future__ import annotations

import functools
import mmap
import os
from typing import Any

import numpy as np

from miraccl.executor.cuda import layout

_ENTRY_BYTES = 8  # of /proc/self/pagemap, one per page
_PRESENT_OR_SWAPPED = np.uint64(0b11 << 62)  # Linux Documentation/admin-guide/mm/pagemap.rst
_OF_FILE = np.uint64(1 << 61)  # still the page of the image


@functools.cache
def _image() -> int:
    """Return the descriptor of a file with the memory of a rank after the start."""
    fd = os.memfd_create("miraccl-emulator")
    os.ftruncate(fd, layout.TOTAL_BYTES)
    with mmap.mmap(fd, layout.TOTAL_BYTES) as whole:
        for offset, size, word in layout.INITIAL_FILL:
            np.frombuffer(whole, np.uint32, size // 4, offset)[:] = word
    return fd


def initial_memory() -> Any:
    """Return the memory of a rank as after the start of a communicator, page-aligned."""
    return np.frombuffer(
        mmap.mmap(
            _image(),
            layout.TOTAL_BYTES,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        ),
        np.uint8,
    )


def written_bytes(memory: Any, start: int, stop: int) -> Any:
    """Return a copy of the bytes of ``initial_memory()`` on pages that were written.

    ``start``: a multiple of the page size. The rest of the last page is returned in any case.
    """
    count, rest = divmod(stop - start, mmap.PAGESIZE)
    pages = memory[start : stop - rest].reshape(count, mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        table.seek(pages.ctypes.data // mmap.PAGESIZE * _ENTRY_BYTES)
        entries = np.frombuffer(table.read(count * _ENTRY_BYTES), np.uint64)
    assert len(entries) == count
    written = ((entries & _PRESENT_OR_SWAPPED) != 0) & ((entries & _OF_FILE) == 0)
    return np.concatenate([pages[written].reshape(-1), memory[stop - rest : stop]])
