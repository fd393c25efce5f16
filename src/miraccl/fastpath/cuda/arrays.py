"""Kernel source: reading CuPy arrays."""

from __future__ import annotations

from miraccl.executor.cuda import fast_call_layout
from miraccl.fastpath.cuda.tensors import is_valid_address
from miraccl.native.intrinsics import (
    Py_DecRef,
    PyErr_Clear,
    PyLong_AsLong,
    PyObject_GetAttr,
    inline,
    load,
    load32,
    store,
)


@inline
def item_size(dtype: int) -> int:
    return (dtype >> 8 & 255) >> 3


@inline
def consume_int(number: int) -> int:
    """Return the value of a new int object, which is released; -1 if negative, not an int, or null.

    A pending exception is cleared.
    """
    if number == 0:
        PyErr_Clear()
        return -1
    value = PyLong_AsLong(number)
    Py_DecRef(number)
    if value == -1:
        PyErr_Clear()
    return value if value >= 0 else -1


@inline
def dtype_of(state: int, array: int) -> int:
    """Return the DLDataType of an array; 0 if the slow path must handle it."""
    dtype, found = PyObject_GetAttr(array, load(state + fast_call_layout.NAME_DTYPE)), 0
    if dtype == 0:
        PyErr_Clear()
        return 0
    for entry in range(
        state + fast_call_layout.STATE_ARRAY_DTYPES,
        state + fast_call_layout.STATE_ARRAY_DTYPES + 16 * fast_call_layout.NDTYPES,
        16,
    ):
        if load(entry) == dtype:
            found = load(entry + 8)
    Py_DecRef(dtype)
    return found


@inline
def view_array(state: int, array: int, view: int) -> int:
    """Write the view of a contiguous array on this GPU at ``view``; return its elements, -1 for
    others.
    """
    dtype = dtype_of(state, array)
    if (
        dtype == 0
        or consume_int(PyObject_GetAttr(array, load(state + fast_call_layout.NAME_CONTIGUOUS))) != 1
    ):
        return -1
    memory = PyObject_GetAttr(array, load(state + fast_call_layout.NAME_DATA))
    if memory == 0:
        PyErr_Clear()
        return -1
    address = consume_int(PyObject_GetAttr(memory, load(state + fast_call_layout.NAME_PTR)))
    device = consume_int(PyObject_GetAttr(memory, load(state + fast_call_layout.NAME_DEVICE)))
    Py_DecRef(memory)
    if (
        address < 0
        or address % item_size(dtype) != 0
        or device != load32(state + fast_call_layout.STATE_DEVICE + 4)
    ):
        return -1
    store(view + fast_call_layout.DL_DATA, address)
    store(view + fast_call_layout.DL_NDIM, dtype << 32)  # two fields
    store(view + fast_call_layout.DL_OFFSET, 0)
    count = consume_int(PyObject_GetAttr(array, load(state + fast_call_layout.NAME_SIZE)))
    return count if is_valid_address(address, count) else -1
