"""Kernel source: a door looks at an array of any type that it knows, and lets go of what it held for that."""

from __future__ import annotations

from miraccl.fastpath.cuda import layout as at
from miraccl.fastpath.cuda.arrays import view_array
from miraccl.fastpath.cuda.foreign import kind_of
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
def is_known(state: int, thing: int) -> bool:
    """Whether arrays of this type may be looked at: cheap, for calls on CPU memory, which come here first."""
    kind = load(thing + at.OB_TYPE)
    return (
        kind == load(state + at.STATE_TYPE)
        or kind == load(state + at.STATE_ARRAY_TYPE)
        or kind_of(state, thing) != 0
    )


@inline
def elements(state: int, thing: int, view: int) -> int:
    """Look at a tensor or array on this GPU that is contiguous: its elements, -1 for anything else.

    Its stream is that of the operation before, which whoever calls this has made sure of.
    """
    if load(state + at.STATE_BUSY) != 0:
        return -1
    store(view + at.VIEW_READ_ONLY, 0)
    kind = load(thing + at.OB_TYPE)
    if kind == load(state + at.STATE_TYPE):
        return view_tensor(state, thing, view)
    if kind == load(state + at.STATE_ARRAY_TYPE):
        return view_array(state, thing, view)
    row = kind_of(state, thing)
    return call4(load(state + at.STATE_VIEW_FOREIGN), state, row, thing, view) if row != 0 else -1


@inline
def owns(state: int) -> bool:
    """Whether an array of this call is to be held until the GPU has come past the operation."""
    return (
        load(state + at.STATE_VIEWS + at.VIEW_OWNER)
        | load(state + at.STATE_VIEWS + at.VIEW_BYTES + at.VIEW_OWNER)
    ) != 0


@inline
def release(state: int) -> bool:
    """Have Python let go of what is held, in time; False where it raises."""
    nothing = PyObject_Vectorcall(load(state + at.STATE_RELEASE), 0, 0, 0)
    if nothing != 0:
        Py_DecRef(nothing)
    return nothing != 0


@inline
def hold(state: int, owner: int, nbytes: int) -> bool:
    """Hold a capsule, whose launch is in the stream of the operation before."""
    held, stream = load(state + at.STATE_HELD), load(state + at.STATE_STREAM)
    if (
        load(state + at.STATE_HELD_STREAM) != stream
        and PyList_Size(held) != 0
        and not release(state)
    ):
        return False
    store(state + at.STATE_HELD_STREAM, stream)
    store(state + at.STATE_HELD_BYTES, load(state + at.STATE_HELD_BYTES) + nbytes)
    return PyList_Append(held, owner) == 0


@inline
def limit(state: int) -> bool:
    """Not to hold too much for long; False where Python is to raise."""
    full = (
        PyList_Size(load(state + at.STATE_HELD)) >= at.MOST_HELD
        or load(state + at.STATE_HELD_BYTES) >= at.MOST_HELD_BYTES
    )
    return not full or release(state)


@inline
def settle(state: int, code: int) -> bool:
    """At the end of a call: hold what its launch reads, let go of what nothing was done with. False where Python is to raise.

    What cannot be held stays for good.
    """
    if not owns(state) or load(state + at.STATE_BUSY) != 0:
        return code != at.NOT_TAKEN or PyErr_Occurred() == 0
    for view in range(
        state + at.STATE_VIEWS, state + at.STATE_VIEWS + 2 * at.VIEW_BYTES, at.VIEW_BYTES
    ):
        owner = load(view + at.VIEW_OWNER)
        if owner != 0:
            if code == at.DONE and not hold(state, owner, load(view + at.VIEW_NBYTES)):
                store(view + at.VIEW_OWNER, 0)
                return False
            store(view + at.VIEW_OWNER, 0)
            Py_DecRef(owner)
    return PyErr_Occurred() == 0 and limit(state)
