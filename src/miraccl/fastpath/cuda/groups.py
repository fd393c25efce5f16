"""Kernel source: a group of calls that only fast calls have seen, from begin to end.

``layout.GROUPS_*`` are words of the process, guarded by the GIL; one thread at a time has such a
group. Groups of other threads, and any group with a call that the fast path does not handle, belong
to Python (``runtime.group``), which empties the words and continues.
"""

from __future__ import annotations

from miraccl.executor.cuda import fast_call_layout
from miraccl.fastpath.cuda.lookup import find_messages, is_known_dtype
from miraccl.fastpath.cuda.streams import is_capturing, is_own_context
from miraccl.fastpath.cuda.views import limit_retained, retain
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
def return_none(groups: int) -> int:
    """Return a new reference to None."""
    Py_IncRef(load(groups + fast_call_layout.GROUPS_NONE))
    return load(groups + fast_call_layout.GROUPS_NONE)


@inline
def thread_id() -> int:
    """Return a number unique to this thread for the life of the process; never 0."""
    return PyThreadState_GetID(PyThreadState_Get()) + 1


@inline
def is_own_group(groups: int) -> bool:
    """Return True if this thread has an open group that only fast calls have seen."""
    return load(groups + fast_call_layout.GROUPS_THREAD) == thread_id()


# ---- collected messages


@inline
def may_collect(call_record: int, state: int) -> bool:
    """Return True if messages may be launched or collected here, before their arrays are read."""
    groups = load(state + fast_call_layout.STATE_GROUPS)
    return load32(groups) == 0 or (
        load(call_record + fast_call_layout.FAST_COLLECTS) != 0 and is_own_group(groups)
    )


@inline
def can_collect(call_record: int, state: int, count: int) -> bool:
    """Return True if the messages of a call may join those of the group."""
    groups = load(state + fast_call_layout.STATE_GROUPS)
    if not may_collect(call_record, state):  # may have changed while an array was read
        return False
    for number in range(count):
        if not is_known_dtype(
            state,
            state + fast_call_layout.STATE_CALL_MESSAGES + number * fast_call_layout.MESSAGE_BYTES,
        ):
            return False
    if load(groups + fast_call_layout.GROUPS_STATE) == 0:
        return True
    if load(groups + fast_call_layout.GROUPS_STATE) != state or load(
        state + fast_call_layout.STATE_COLLECTED_STREAM
    ) != load(state + fast_call_layout.STATE_STREAM):
        return False
    return load(state + fast_call_layout.STATE_COLLECTED) + count <= fast_call_layout.MAX_MESSAGES


@inline
def join_group(state: int) -> bool:
    """Register with the group before messages are collected; False on a Python exception."""
    groups = load(state + fast_call_layout.STATE_GROUPS)
    if load(groups + fast_call_layout.GROUPS_STATE) == 0:
        if (
            PyList_Append(
                load(groups + fast_call_layout.GROUPS_BATCHES),
                load(state + fast_call_layout.STATE_HAND_OVER),
            )
            != 0
        ):
            return False
        store(groups + fast_call_layout.GROUPS_STATE, state)
        store(
            state + fast_call_layout.STATE_COLLECTED_STREAM,
            load(state + fast_call_layout.STATE_STREAM),
        )
    store(load(state + fast_call_layout.STATE_CPU_PLAN), 0)
    return True


@inline
def collect_message(state: int, number: int, x: int) -> bool:
    """Append a message of this call, its array and its owner to the collected ones; False on an
    exception.
    """
    if PyList_Append(load(state + fast_call_layout.STATE_COLLECTED_ARRAYS), x) != 0:
        return False
    view = state + fast_call_layout.STATE_VIEWS + number * fast_call_layout.VIEW_BYTES
    owner = load(view + fast_call_layout.VIEW_OWNER)
    if owner != 0:
        if PyList_Append(load(state + fast_call_layout.STATE_COLLECTED_OWNERS), owner) != 0:
            return False
        store(view + fast_call_layout.VIEW_OWNER, 0)
        store(
            state + fast_call_layout.STATE_COLLECTED_BYTES,
            load(state + fast_call_layout.STATE_COLLECTED_BYTES)
            + load(view + fast_call_layout.VIEW_NBYTES),
        )
        Py_DecRef(owner)
    collected = load(state + fast_call_layout.STATE_COLLECTED)
    source, target = (
        state + fast_call_layout.STATE_CALL_MESSAGES + number * fast_call_layout.MESSAGE_BYTES,
        state
        + fast_call_layout.STATE_COLLECTED_MESSAGES
        + collected * fast_call_layout.MESSAGE_BYTES,
    )
    for offset in range(0, fast_call_layout.MESSAGE_BYTES, 8):
        store(target + offset, load(source + offset))
    store(state + fast_call_layout.STATE_COLLECTED, collected + 1)
    return True


@inline
def find_collected(state: int) -> int:
    """Return the launch record of the collected messages; 0 if Python must handle them."""
    if load32(load(state + fast_call_layout.STATE_ABORT)) != 0 or load(
        state + fast_call_layout.STATE_COLLECTED_STREAM
    ) != load(state + fast_call_layout.STATE_STREAM):
        return 0
    if load(
        state + fast_call_layout.STATE_STREAM
    ) <= fast_call_layout.STREAM_PER_THREAD and not is_own_context(state):
        return 0
    if PyList_Size(load(state + fast_call_layout.STATE_COLLECTED_OWNERS)) != 0 and is_capturing(
        state, load(state + fast_call_layout.STATE_STREAM)
    ):
        return 0
    return find_messages(
        state,
        state + fast_call_layout.STATE_COLLECTED_MESSAGES,
        load(state + fast_call_layout.STATE_COLLECTED),
        load(state + fast_call_layout.STATE_COLLECTED_SIGNATURE),
    )


@inline
def retain_collected(state: int) -> bool:
    """Retain the owners of launched memory; False on a Python exception."""
    owners, retained = load(state + fast_call_layout.STATE_COLLECTED_OWNERS), True
    count = PyList_Size(owners)
    if count == 0:
        return True
    for index in range(count):
        owner = PyList_GetItem(owners, index)
        if retained and not retain(state, owner, 0):
            retained = False
        if not retained:
            Py_IncRef(owner)  # leaked
    store(
        state + fast_call_layout.STATE_RETAINED_BYTES,
        load(state + fast_call_layout.STATE_RETAINED_BYTES)
        + load(state + fast_call_layout.STATE_COLLECTED_BYTES),
    )
    store(state + fast_call_layout.STATE_COLLECTED_BYTES, 0)
    clear_list(owners, count)
    return retained and limit_retained(state)


@inline
def clear_list(items: int, count: int) -> None:
    if PyList_SetSlice(items, 0, count, 0) != 0:
        PyErr_Clear()


@inline
def close_group(groups: int, state: int) -> None:
    """End the group and release its arrays, which may run arbitrary code."""
    store(groups + fast_call_layout.GROUPS_THREAD, 0)
    store(groups + fast_call_layout.GROUPS_STATE, 0)
    store(groups + fast_call_layout.GROUPS_OPEN, load(groups + fast_call_layout.GROUPS_OPEN) - 1)
    if state != 0:
        collected = load(state + fast_call_layout.STATE_COLLECTED)
        store(state + fast_call_layout.STATE_COLLECTED, 0)
        store(state + fast_call_layout.STATE_COLLECTED_SIGNATURE, 0)
        clear_list(load(groups + fast_call_layout.GROUPS_BATCHES), 1)
        clear_list(load(state + fast_call_layout.STATE_COLLECTED_ARRAYS), collected)
