"""Window memory: arrays that all ranks of the host have mapped, from ``Communicator.empty``.

Each rank has one sparse segment, divided first-fit into blocks of whole pages. A block, and its
pages, are freed when the last array that views it is gone. Allocation is local: no other rank takes
part.
"""

from __future__ import annotations

import collections
import contextlib
import math
import operator
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from miraccl.errors import InvalidUsage, SystemFailure
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import DType

PAGE = os.sysconf("SC_PAGE_SIZE")


class WindowRegion(Protocol):
    """Memory of a window: a ``ShmRegion``, or memory of this process."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def memory(self, offset: int, nbytes: int, /) -> Any: ...
    def remove(self, offset: int, nbytes: int, /) -> None: ...
    def resident_bytes(self, offset: int, nbytes: int, /) -> int: ...


class WindowAllocator:
    """First-fit allocator over a region. Thread-safe.

    Args:
        reserved: Bytes at the end of the region that are not allocated; a multiple of the page.

    Attributes:
        end: Offset of the first reserved byte.
    """

    def __init__(self, region: WindowRegion, reserved: int = 0) -> None:
        self.region, self.reserved = region, reserved
        self.end = region.nbytes // PAGE * PAGE - reserved
        #: (offset, bytes) of free blocks: sorted, never adjacent
        self._free: list[tuple[int, int]] = [(0, self.end)]
        self._returned: collections.deque[tuple[int, int]] = collections.deque()
        self._lock = threading.Lock()
        self.allocated = 0
        #: Called with (offset, bytes) of a block that is freed, at any point of the program, so it
        #: must not wait. True: its owner calls ``complete_release`` when no adapter uses the block.
        self.on_release: Callable[[int, int], bool] = lambda offset, nbytes: False

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return an uninitialised, page-aligned array in window memory (zero on fresh pages)."""
        kind, dims = element_type(dtype), dimensions(shape)
        nbytes = math.prod(dims) * kind.itemsize
        size = max(PAGE, -(-nbytes // PAGE) * PAGE)
        offset = self._allocate(size)
        raw = self.region.memory(offset, max(nbytes, 1))
        weakref.finalize(raw, self._release, offset, size)
        return np.frombuffer(raw, np.uint8, nbytes).view(kind).reshape(dims)

    def contains(self, address: int, nbytes: int) -> bool:
        return (
            self.region.address <= address
            and address + nbytes <= self.region.address + self.region.nbytes
        )

    def resident_bytes(self) -> int:
        """Return the resident bytes of the allocated blocks."""
        with self._lock:
            self._merge()
            ends = [
                0,
                *(bound for start, room in self._free for bound in (start, start + room)),
                self.end,
            ]
        return sum(
            self.region.resident_bytes(a, b - a) for a, b in zip(ends[::2], ends[1::2], strict=True)
        )

    def _allocate(self, size: int) -> int:
        with self._lock:
            self._merge()
            for i, (offset, room) in enumerate(self._free):
                if room >= size:
                    self._free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                    self.allocated += size
                    return offset
        raise SystemFailure(
            f"cannot allocate {size} bytes of window memory: {self.allocated} of "
            f"{self.region.nbytes} bytes are in use"
        )

    def _release(self, offset: int, size: int) -> None:
        """Free a block; called by the garbage collector, at any point."""
        if not self.on_release(offset, size):
            self.complete_release(offset, size)

    def complete_release(self, offset: int, size: int) -> None:
        """Give the pages of a freed block back and let it be allocated again; any thread."""
        # It may run inside ``_allocate`` of the same thread, so it must not wait for the lock: the
        # holder merges the block.
        with contextlib.suppress(OSError):  # the segment frees it at the latest
            self.region.remove(offset, size)
        self._returned.append((offset, size))
        if self._lock.acquire(blocking=False):
            try:
                self._merge()
            finally:
                self._lock.release()

    def _merge(self) -> None:
        """Return released blocks to the free list; the caller holds the lock."""
        while self._returned:
            offset, size = self._returned.popleft()
            self.allocated -= size
            merged: list[tuple[int, int]] = []
            for start, room in sorted([*self._free, (offset, size)]):
                if merged and merged[-1][0] + merged[-1][1] == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + room)
                else:
                    merged.append((start, room))
            self._free = merged


def element_type(dtype: Any) -> Any:
    """Return the NumPy type of a ``DType``, its label or anything ``numpy.dtype`` accepts.

    Raises:
        InvalidUsage: ``dtype`` is none of these, or its elements are not stored in the array.
    """
    try:
        label = dtype.label if isinstance(dtype, DType) else dtype
        kind = (
            NUMPY_DTYPE[DType[label.upper()]]
            if isinstance(label, str) and label.upper() in DType.__members__
            else np.dtype(label)
        )
    except (TypeError, ValueError, SyntaxError) as error:
        raise InvalidUsage(f"empty: dtype {dtype!r} is not supported: {error}") from None
    if kind.hasobject or not kind.itemsize:
        raise InvalidUsage(
            f"empty: dtype {dtype!r} is not supported: its elements are not stored in the array"
        )
    return kind


def dimensions(shape: Any) -> tuple[int, ...]:
    """Return the shape of a new array of window memory (CPU and GPU) as a tuple.

    Raises:
        InvalidUsage: ``shape`` is neither a whole number nor a sequence of them, from 0 on.
    """
    try:
        dims = (
            tuple(operator.index(n) for n in shape)
            if isinstance(shape, tuple | list)
            else (operator.index(shape),)
        )
    except TypeError:
        dims = (-1,)
    if any(n < 0 for n in dims):
        raise InvalidUsage(
            f"empty: shape is {shape!r}; it must be a whole number or a tuple of them, from 0 on"
        )
    return dims
