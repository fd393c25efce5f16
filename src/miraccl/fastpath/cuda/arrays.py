"""Kernel source: what doors see of CuPy's arrays. They are asked for single attributes: ``__cuda_array_interface__`` makes new objects."""

from __future__ import annotations

from miraccl.fastpath.cuda import layout
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
    """The value of a new object that is a number and not negative; -1 for anything else, and where an exception is set instead."""
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
    """The DLDataType of an array; 0 for one that goes the long way."""
    dtype, found = PyObject_GetAttr(array, load(state + layout.NAME_DTYPE)), 0
    if dtype == 0:
        PyErr_Clear()
        return 0
    for place in range(
        state + layout.STATE_ARRAY_DTYPES,
        state + layout.STATE_ARRAY_DTYPES + 16 * layout.NDTYPES,
        16,
    ):
        if load(place) == dtype:
            found = load(place + 8)
    Py_DecRef(dtype)
    return found


@inline
def view_array(state: int, array: int, view: int) -> int:
    """Look at an array on this GPU that is contiguous, and write at ``view`` what a tensor's has; its elements, -1 for anything else."""
    dtype = dtype_of(state, array)
    if (
        dtype == 0
        or consume_int(PyObject_GetAttr(array, load(state + layout.NAME_CONTIGUOUS))) != 1
    ):
        return -1
    memory = PyObject_GetAttr(array, load(state + layout.NAME_DATA))
    if memory == 0:
        PyErr_Clear()
        return -1
    address = consume_int(PyObject_GetAttr(memory, load(state + layout.NAME_PTR)))
    device = consume_int(PyObject_GetAttr(memory, load(state + layout.NAME_DEVICE)))
    Py_DecRef(memory)
    if (
        address < 0
        or address % item_size(dtype) != 0
        or device != load32(state + layout.STATE_DEVICE + 4)
    ):
        return -1
    store(view + layout.DL_DATA, address)
    store(view + layout.DL_NDIM, dtype << 32)  # two fields
    store(view + layout.DL_OFFSET, 0)
    count = consume_int(PyObject_GetAttr(array, load(state + layout.NAME_SIZE)))
    return count if is_valid_address(address, count) else -1
