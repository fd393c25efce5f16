"""Readers of Python objects for the fast path: array headers, small integers, lists of counts."""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.native.intrinsics import (
    PyErr_Clear,
    PyList_GetItem,
    PyList_Size,
    PyLong_AsLong,
    PyTuple_GetItem,
    PyTuple_Size,
    inline,
    load,
    load32,
    store,
)
from miraccl.types import DType

INT64 = int(DType.INT64)
MAX_COUNT = 1 << 48  # sums stay within a word; larger counts go to the slow path
READABLE = layout.ARRAY_C_CONTIGUOUS | layout.ARRAY_ALIGNED
WRITABLE = READABLE | layout.ARRAY_WRITEABLE
NTYPES = len(DType)


@inline
def is_usable(ctx: int, array: int, flags: int) -> bool:
    """Return True for a NumPy array that has all of ``flags``."""
    if load(array + layout.OB_TYPE) != load(ctx + layout.CTX_ARRAY_TYPE):
        return False
    return load32(array + layout.ARRAY_FLAGS) & flags == flags


@inline
def element_count(array: int) -> int:
    dims = load(array + layout.ARRAY_DIMS)
    count = 1
    for i in range(load32(array + layout.ARRAY_ND)):
        count *= load(dims + 8 * i)
    return count


@inline
def dtype_code(ctx: int, array: int) -> int:
    """Return the DType of an array's elements, -1 if collectives do not support it."""
    descr = load(array + layout.ARRAY_DESCR)
    table = load(ctx + layout.CTX_DTYPES)
    for code in range(NTYPES):
        if load(table + 8 * code) == descr:
            return code
    return -1


@inline
def common_dtype(ctx: int, x: int, out: int, writes: bool) -> int:
    """Return the DType of two arrays, -1 if they differ or an array cannot be used.

    ``writes``: the second array is an output.
    """
    if not is_usable(ctx, x, READABLE) or not is_usable(ctx, out, WRITABLE if writes else READABLE):
        return -1
    dtype = dtype_code(ctx, x)
    return dtype if dtype_code(ctx, out) == dtype else -1


@inline
def small_int(ctx: int, thing: int, kind: int) -> int:
    """Return the value of an object whose exact type is ``CTX_*_TYPE``, -1 for any other object."""
    if load(thing + layout.OB_TYPE) != load(ctx + kind):
        return -1
    value = PyLong_AsLong(thing)
    if value == -1:  # negative, or larger than a word, which sets an exception
        PyErr_Clear()
    return value


@inline
def read_counts(ctx: int, counts: int, number: int, into: int) -> int:
    """Read ``number`` counts from a list, a tuple or an int64 array and write them to ``into``.

    Returns their sum, -1 for any other object or length.
    """
    kind, words, size = load(counts + layout.OB_TYPE), 0, -1
    if kind == load(ctx + layout.CTX_LIST_TYPE):
        size = PyList_Size(counts)
    elif kind == load(ctx + layout.CTX_TUPLE_TYPE):
        size = PyTuple_Size(counts)
    elif (
        is_usable(ctx, counts, READABLE)
        and load32(counts + layout.ARRAY_ND) == 1
        and dtype_code(ctx, counts) == INT64
    ):
        words, size = load(counts + layout.ARRAY_DATA), element_count(counts)
    if size != number:
        return -1
    total = 0
    for i in range(number):
        if kind == load(ctx + layout.CTX_LIST_TYPE):
            count = small_int(ctx, PyList_GetItem(counts, i), layout.CTX_INT_TYPE)
        elif kind == load(ctx + layout.CTX_TUPLE_TYPE):
            count = small_int(ctx, PyTuple_GetItem(counts, i), layout.CTX_INT_TYPE)
        else:
            count = load(words + 8 * i)
        if count < 0 or count > MAX_COUNT:
            return -1
        store(into + 8 * i, count)
        total += count
    return total
