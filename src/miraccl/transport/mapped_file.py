"""A file in memory, shared with whoever else maps it.

Python's ``mmap`` keeps a descriptor of its own for as long as the mapping lives (until 3.13, where that can be refused): some for every
communicator.  This one keeps none.  The mapping goes with the last object that was made over it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

PAGE_BYTES = mmap.PAGESIZE
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # in the module since Python 3.13
_FAILED = ctypes.c_void_p(-1).value
#: What ``resident_bytes`` asks about at a time.
_ASKED_BYTES = 1 << 30

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class MappedFile:
    """The first ``nbytes`` bytes of an open file; ``fd`` may be closed afterwards. Raises ``OSError``."""

    def __init__(self, fd: int, nbytes: int) -> None:
        address = _libc.mmap(
            None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _NORESERVE, fd, 0
        )
        if address == _FAILED:
            raise _error()
        self.address, self.nbytes = int(address), nbytes
        weakref.finalize(
            self, _libc.munmap, self.address, nbytes
        ).atexit = False  # threads may be in there until the very end

    def memory(self, offset: int, nbytes: int) -> Any:
        """A buffer over some bytes of it, which keeps the mapping alive."""
        buffer: Any = (ctypes.c_char * nbytes).from_address(self.address + offset)
        buffer.owner = self
        return buffer

    def remove(self, offset: int, nbytes: int) -> None:
        """Give whole pages back to the system; they read as zeros from then on, in every process."""
        if _libc.madvise(self.address + offset, nbytes, mmap.MADV_REMOVE) != 0:
            raise _error()

    def resident_bytes(self, offset: int, nbytes: int) -> int:
        """How many bytes of some whole pages are in memory, whoever touched them."""
        total = 0
        for start in range(offset, offset + nbytes, _ASKED_BYTES):
            size = min(_ASKED_BYTES, offset + nbytes - start)
            pages = bytearray(-(-size // PAGE_BYTES))
            if (
                _libc.mincore(
                    self.address + start, size, (ctypes.c_char * len(pages)).from_buffer(pages)
                )
                != 0
            ):
                raise _error()
            total += sum(page & 1 for page in pages) * PAGE_BYTES
        return total


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
