"""Mapping of a shared file in memory that keeps no descriptor.

Python's ``mmap`` keeps a duplicate descriptor for as long as the mapping lives (until 3.13, where
it is optional): several per communicator. This one keeps none. The mapping is removed with the last
object that was made over it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

from miraccl.errors import as_system_failure

PAGE_BYTES = mmap.PAGESIZE
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # in the module since Python 3.13
_FAILED = ctypes.c_void_p(-1).value
#: Bytes per call of mincore.
_MINCORE_BYTES = 1 << 30

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
    """Mapping of the first ``nbytes`` bytes of an open file. Raises ``OSError``.

    ``fd`` may be closed afterwards. A store to a mapping that is not ``writable`` faults.
    """

    def __init__(self, fd: int, nbytes: int, flags: int = 0, *, writable: bool = True) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags |= mmap.MAP_SHARED | _NORESERVE
        address = _libc.mmap(None, nbytes, protection, flags, fd, 0)
        if address == _FAILED:
            raise _error()
        self.address, self.nbytes = int(address), nbytes
        weakref.finalize(
            self, _libc.munmap, self.address, nbytes
        ).atexit = False  # threads may use it until the process ends

    def memory(self, offset: int, nbytes: int) -> Any:
        """Return a buffer over part of the mapping, which keeps it alive."""
        buffer: Any = (ctypes.c_char * nbytes).from_address(self.address + offset)
        buffer.owner = self
        return buffer

    def remove(self, offset: int, nbytes: int) -> None:
        """Return whole pages to the system; they read as zeros from then on, in every process."""
        if _libc.madvise(self.address + offset, nbytes, mmap.MADV_REMOVE) != 0:
            raise _error()

    def resident_bytes(self, offset: int, nbytes: int) -> int:
        """Return the bytes of some whole pages that are in memory, whichever process touched
        them.
        """
        total = 0
        for start in range(offset, offset + nbytes, _MINCORE_BYTES):
            size = min(_MINCORE_BYTES, offset + nbytes - start)
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


class AnonymousMemory(MappedFile):
    """Mapping of zeroed memory of this process. Raises ``SystemFailure``."""

    def __init__(self, nbytes: int) -> None:
        with as_system_failure(f"cannot map {nbytes} bytes of memory"):
            super().__init__(-1, nbytes, mmap.MAP_ANONYMOUS)


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
