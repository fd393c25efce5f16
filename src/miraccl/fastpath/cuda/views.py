"""Kernel source: reading an array of any known type, and releasing what its view owned."""

from __future__ import annotations

from miraccl.executor.cuda import fast_call_layout
from miraccl.fastpath.cuda.arrays import view_array
from miraccl.fastpath.cuda.foreign import foreign_type
from miraccl.fastpath.cuda.tensors import view_tensor
from miraccl.native.intrinsics import (
    Py_DecRef,
    PyErr_Occurred,
    PyList_Append,
    PyList_Size,
    PyObject_Vectorcall,
    call4,
    inline,
    load,
    store,
)


@inline
def is_known_type(state: int, array: int) -> bool:
    """Return True if arrays of this type can be read."""
    kind = load(array + fast_call_layout.OB_TYPE)
    return (
        kind == load(state + fast_call_layout.STATE_TYPE)
        or kind == load(state + fast_call_layout.STATE_ARRAY_TYPE)
        or foreign_type(state, array) != 0
    )


@inline
def element_count(state: int, array: int, view: int) -> int:
    """Write the view of a contiguous array on this GPU; return its elements, -1 for others.

    The caller has made sure that its stream is the current one.
    """
    if load(state + fast_call_layout.STATE_BUSY) != 0:
        return -1
    store(view + fast_call_layout.VIEW_READ_ONLY, 0)
    kind = load(array + fast_call_layout.OB_TYPE)
    if kind == load(state + fast_call_layout.STATE_TYPE):
        return view_tensor(state, array, view)
    if kind == load(state + fast_call_layout.STATE_ARRAY_TYPE):
        return view_array(state, array, view)
    entry = foreign_type(state, array)
    return (
        call4(load(state + fast_call_layout.STATE_VIEW_FOREIGN), state, entry, array, view)
        if entry != 0
        else -1
    )


@inline
def has_owners(state: int) -> bool:
    """Return True if an array of this call must outlive the operation on the GPU."""
    return (
        load(state + fast_call_layout.STATE_VIEWS + fast_call_layout.VIEW_OWNER)
        | load(
            state
            + fast_call_layout.STATE_VIEWS
            + fast_call_layout.VIEW_BYTES
            + fast_call_layout.VIEW_OWNER
        )
    ) != 0


@inline
def release_retained(state: int) -> bool:
    """Let Python release the retained owners in time; False on a Python exception."""
    result = PyObject_Vectorcall(load(state + fast_call_layout.STATE_RELEASE), 0, 0, 0)
    if result != 0:
        Py_DecRef(result)
    return result != 0


@inline
def retain(state: int, owner: int, nbytes: int) -> bool:
    """Retain a capsule whose launch is in the current stream; False on a Python exception."""
    retained, stream = (
        load(state + fast_call_layout.STATE_RETAINED),
        load(state + fast_call_layout.STATE_STREAM),
    )
    if (
        load(state + fast_call_layout.STATE_RETAINED_STREAM) != stream
        and PyList_Size(retained) != 0
        and not release_retained(state)
    ):
        return False
    store(state + fast_call_layout.STATE_RETAINED_STREAM, stream)
    store(
        state + fast_call_layout.STATE_RETAINED_BYTES,
        load(state + fast_call_layout.STATE_RETAINED_BYTES) + nbytes,
    )
    return PyList_Append(retained, owner) == 0


@inline
def limit_retained(state: int) -> bool:
    """Release the retained owners if they are many or large; False on a Python exception."""
    full = (
        PyList_Size(load(state + fast_call_layout.STATE_RETAINED)) >= fast_call_layout.MAX_RETAINED
        or load(state + fast_call_layout.STATE_RETAINED_BYTES)
        >= fast_call_layout.MAX_RETAINED_BYTES
    )
    return not full or release_retained(state)


@inline
def finish_call(state: int, code: int) -> bool:
    """End a call: retain the owners that its launch reads, release the others; False on an
    exception.

    Owners that cannot be retained are leaked, so they stay valid.
    """
    if not has_owners(state) or load(state + fast_call_layout.STATE_BUSY) != 0:
        return code != fast_call_layout.NOT_HANDLED or PyErr_Occurred() == 0
    for view in range(
        state + fast_call_layout.STATE_VIEWS,
        state + fast_call_layout.STATE_VIEWS + 2 * fast_call_layout.VIEW_BYTES,
        fast_call_layout.VIEW_BYTES,
    ):
        owner = load(view + fast_call_layout.VIEW_OWNER)
        if owner != 0:
            if code == fast_call_layout.DONE and not retain(
                state, owner, load(view + fast_call_layout.VIEW_NBYTES)
            ):
                store(view + fast_call_layout.VIEW_OWNER, 0)
                return False
            store(view + fast_call_layout.VIEW_OWNER, 0)
            Py_DecRef(owner)
    return PyErr_Occurred() == 0 and limit_retained(state)
