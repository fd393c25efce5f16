"""Kernel source: a group of calls that only doors have seen, from its beginning to its end.

``layout.GROUPS_*`` are words of the process, in which one thread at a time has such a group; Python's lock guards them.  Groups of other
threads, and any group with something that a door does not take, are Python's (``comm.group``): it empties the words and goes on by itself.
"""

from __future__ import annotations

from miraccl.fastpath.cuda import layout as at
from miraccl.fastpath.cuda.rows import find_messages, type_is_known
from miraccl.fastpath.cuda.streams import captures, is_here
from miraccl.fastpath.cuda.views import hold, limit
from miraccl.native.intrinsics import (
    Py_DecRef,
    Py_IncRef,
    PyErr_Clear,
    PyList_Append,
    PyList_GetItem,
    PyList_SetSlice,
    PyList_Size,
    PyThreadState_Get,
    PyThreadState_GetID,
    inline,
    load,
    load32,
    store,
)


@inline
def none(groups: int) -> int:
    """The object None, as a result."""
    Py_IncRef(load(groups + at.GROUPS_NONE))
    return load(groups + at.GROUPS_NONE)


@inline
def this_thread() -> int:
    """A number that no other thread ever has, which is not 0."""
    return PyThreadState_GetID(PyThreadState_Get()) + 1


@inline
def is_of_this_thread(groups: int) -> bool:
    """Whether this thread has a group open that only doors have seen."""
    return load(groups + at.GROUPS_THREAD) == this_thread()


# ---- what is noted


@inline
def may_begin(door: int, state: int) -> bool:
    """Whether messages are launched or noted here, as far as their arrays have no say."""
    groups = load(state + at.STATE_GROUPS)
    return load32(groups) == 0 or (load(door + at.DOOR_NOTES) != 0 and is_of_this_thread(groups))


@inline
def can_be_noted(door: int, state: int, count: int) -> bool:
    """Whether the messages of a call may join those of the group."""
    groups = load(state + at.STATE_GROUPS)
    if not may_begin(door, state):  # which an array that computes something may have changed
        return False
    for number in range(count):
        if not type_is_known(state, state + at.STATE_CALL + number * at.MESSAGE_BYTES):
            return False
    if load(groups + at.GROUPS_STATE) == 0:
        return True
    if load(groups + at.GROUPS_STATE) != state or load(state + at.STATE_NOTED_STREAM) != load(
        state + at.STATE_STREAM
    ):
        return False
    return load(state + at.STATE_NOTED) + count <= at.MOST_MESSAGES


@inline
def join(state: int) -> bool:
    """Before messages are noted; False if there is no memory for it, which Python is told."""
    groups = load(state + at.STATE_GROUPS)
    if load(groups + at.GROUPS_STATE) == 0:
        if PyList_Append(load(groups + at.GROUPS_NOTED), load(state + at.STATE_HAND_OVER)) != 0:
            return False
        store(groups + at.GROUPS_STATE, state)
        store(state + at.STATE_NOTED_STREAM, load(state + at.STATE_STREAM))
    store(load(state + at.STATE_CPU_PLAN), 0)
    return True


@inline
def note(state: int, number: int, x: int) -> bool:
    """Put a message of this call, its array and what holds that beside those that are noted; likewise."""
    if PyList_Append(load(state + at.STATE_NOTES), x) != 0:
        return False
    view = state + at.STATE_VIEWS + number * at.VIEW_BYTES
    owner = load(view + at.VIEW_OWNER)
    if owner != 0:
        if PyList_Append(load(state + at.STATE_NOTED_OWNERS), owner) != 0:
            return False
        store(view + at.VIEW_OWNER, 0)
        store(
            state + at.STATE_NOTED_BYTES,
            load(state + at.STATE_NOTED_BYTES) + load(view + at.VIEW_NBYTES),
        )
        Py_DecRef(owner)
    noted = load(state + at.STATE_NOTED)
    mine, its = (
        state + at.STATE_CALL + number * at.MESSAGE_BYTES,
        state + at.STATE_GROUP + noted * at.MESSAGE_BYTES,
    )
    for offset in range(0, at.MESSAGE_BYTES, 8):
        store(its + offset, load(mine + offset))
    store(state + at.STATE_NOTED, noted + 1)
    return True


@inline
def find_noted(state: int) -> int:
    """The block for what is noted; 0 where Python is to do it."""
    if load32(load(state + at.STATE_ABORT)) != 0 or load(state + at.STATE_NOTED_STREAM) != load(
        state + at.STATE_STREAM
    ):
        return 0
    if load(state + at.STATE_STREAM) <= at.STREAM_OF_THREAD and not is_here(state):
        return 0
    if PyList_Size(load(state + at.STATE_NOTED_OWNERS)) != 0 and captures(
        state, load(state + at.STATE_STREAM)
    ):
        return 0
    return find_messages(
        state,
        state + at.STATE_GROUP,
        load(state + at.STATE_NOTED),
        load(state + at.STATE_NOTED_SIGNATURE),
    )


@inline
def hold_noted(state: int) -> bool:
    """After the launch: hold what it reads; False where Python is to raise."""
    owners, held = load(state + at.STATE_NOTED_OWNERS), True
    count = PyList_Size(owners)
    if count == 0:
        return True
    for place in range(count):
        owner = PyList_GetItem(owners, place)
        if held and not hold(state, owner, 0):
            held = False
        if not held:
            Py_IncRef(owner)  # it stays for good
    store(
        state + at.STATE_HELD_BYTES,
        load(state + at.STATE_HELD_BYTES) + load(state + at.STATE_NOTED_BYTES),
    )
    store(state + at.STATE_NOTED_BYTES, 0)
    clear(owners, count)
    return held and limit(state)


@inline
def clear(things: int, count: int) -> None:
    if PyList_SetSlice(things, 0, count, 0) != 0:
        PyErr_Clear()


@inline
def close(groups: int, state: int) -> None:
    """The group is over; arrays may go, which may run anything."""
    store(groups + at.GROUPS_THREAD, 0)
    store(groups + at.GROUPS_STATE, 0)
    store(groups + at.GROUPS_OPEN, load(groups + at.GROUPS_OPEN) - 1)
    if state != 0:
        noted = load(state + at.STATE_NOTED)
        store(state + at.STATE_NOTED, 0)
        store(state + at.STATE_NOTED_SIGNATURE, 0)
        clear(load(groups + at.GROUPS_NOTED), 1)
        clear(load(state + at.STATE_NOTES), noted)
