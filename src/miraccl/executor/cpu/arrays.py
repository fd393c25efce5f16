"""NumPy's ABI as compiled code reads it: array headers and addresses of dtype descriptors.

The fast path gets arrays as objects and reads ``PyArrayObject_fields`` itself.
``headers_are_readable`` compares the fields with NumPy's answers on probes before the fast path is
used; if they differ (another interpreter, a build with a different object header) every call takes
the slow path, which asks NumPy.
"""

from __future__ import annotations

import ctypes
import functools
import sys

import numpy as np

from miraccl.executor.cpu.kernels import layout
from miraccl.schedule.reduction import DTYPE_OF, NUMPY_DTYPE
from miraccl.types import DType


def dtype_of(array: np.ndarray) -> DType | None:
    """Return the DType of an array's elements, None if collectives do not support it."""
    return DTYPE_OF.get(array.dtype)


def descriptor_addresses() -> np.ndarray:
    """Return the addresses of the descriptor objects that arrays of each DType point to."""
    return np.array([id(NUMPY_DTYPE[code]) for code in DType], np.int64)


@functools.cache
def headers_are_readable() -> bool:
    """Return True if reading array headers gives the same values as asking NumPy."""
    if sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    if hasattr(sys, "_is_gil_enabled") and not sys._is_gil_enabled():
        return False
    base = np.arange(24, dtype=np.float32)
    frozen = base.reshape(2, 3, 4)
    frozen.setflags(write=False)
    return all(
        _reads_right(a)
        for a in (base, frozen, base[::2], base[1:5], np.zeros((), np.int8), base.reshape(4, 6).T)
    )


def _reads_right(array: np.ndarray) -> bool:
    header = id(array)

    def word(offset: int) -> int:
        return ctypes.c_int64.from_address(header + offset).value

    flags = ctypes.c_int32.from_address(header + layout.ARRAY_FLAGS).value
    dims = [
        ctypes.c_int64.from_address(word(layout.ARRAY_DIMS) + 8 * i).value
        for i in range(array.ndim)
    ]
    return (
        word(layout.OB_TYPE) == id(np.ndarray)
        and word(layout.ARRAY_DATA) == array.ctypes.data
        and ctypes.c_int32.from_address(header + layout.ARRAY_ND).value == array.ndim
        and tuple(dims) == array.shape
        and word(layout.ARRAY_DESCR) == id(array.dtype)
        and bool(flags & layout.ARRAY_C_CONTIGUOUS) == array.flags.c_contiguous
        and bool(flags & layout.ARRAY_ALIGNED) == array.flags.aligned
        and bool(flags & layout.ARRAY_WRITEABLE) == array.flags.writeable
    )
