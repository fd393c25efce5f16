"""Kernel source: cuLaunchKernelEx as a fast builtin, and the doors of a communicator's operations on GPU memory.

``launch(block, source, target, stream)``: ``block`` is the address of ``BLOCK_WORDS`` words; the result is CUDA's code.  Through
cuda.bindings a launch costs about a microsecond and a half more.  Python's lock is let go, since a launch waits where the queue of the GPU
is full.

A door is a whole call, from PyTorch's tensors to the launch, where everything is as it was the last time; ``doors.tensors`` looks at the
arguments, ``doors.rows`` finds the launch that ``doors.table`` keeps, ``doors.layout`` says where.  The result is ``DONE``, or
``NOT_TAKEN``: nothing has happened then.  What a door does not take it hands to the next one, that of the same operation on CPU memory.

A group begins and ends here, too (``doors.groups``).  Sends and receives in which nothing is wrong are noted, and launched at its end.
What else a group has is Python's.
"""

from __future__ import annotations

from typing import Any

from miraccl.fastpath.cuda import layout as at
from miraccl.fastpath.cuda.foreign import view_foreign
from miraccl.fastpath.cuda.groups import (
    can_be_noted,
    close,
    find_noted,
    hold_noted,
    is_of_this_thread,
    join,
    may_begin,
    none,
    note,
    this_thread,
)
from miraccl.fastpath.cuda.moves import find_moves
from miraccl.fastpath.cuda.reductions import find_reductions
from miraccl.fastpath.cuda.rows import find_collective, find_messages, overlap, write_message
from miraccl.fastpath.cuda.streams import is_plain
from miraccl.fastpath.cuda.tensors import call_builtin, call_int4
from miraccl.fastpath.cuda.views import is_known, settle
from miraccl.native.intrinsics import (
    Py_DecRef,
    PyEval_RestoreThread,
    PyEval_SaveThread,
    PyLong_AsLong,
    PyLong_FromLong,
    PyObject_Vectorcall,
    inline,
    load,
    load32,
    store,
)


@inline
def enqueue(block: int) -> int:
    """Launch without Python's lock; CUDA's code."""
    state = PyEval_SaveThread()
    code = call_int4(
        load(block + 8 * at.FUNCTION),
        load(block + 8 * at.CONFIG),
        load(block + 8 * at.KERNEL),
        load(block + 8 * at.PARAMETERS),
        0,
    )
    PyEval_RestoreThread(state)
    return code


def launch(self: int, args: int, nargs: int) -> int:
    block = PyLong_AsLong(load(args))
    argument, config = load(block + 8 * at.ARGUMENT), load(block + 8 * at.CONFIG)
    store(argument, PyLong_AsLong(load(args + 8)))
    store(argument + 8, PyLong_AsLong(load(args + 16)))
    store(config + at.CONFIG_STREAM, PyLong_AsLong(load(args + 24)))
    return PyLong_FromLong(enqueue(block))


# ---- doors


@inline
def begin_launch(state: int, block: int) -> int:
    """Launch it as the last operation; CUDA's code."""
    store(state + at.STATE_LAST, block)
    store(load(state + at.STATE_CPU_PLAN), 0)
    return enqueue(block)


@inline
def go(state: int, block: int) -> int:
    """Launch what was found, if anything; what the door says."""
    return at.DONE if block != 0 and begin_launch(state, block) == 0 else at.NOT_TAKEN


@inline
def answer(door: int, code: int, args: int, nargs: int) -> int:
    """The end of a call: what a door says, or the next one."""
    if not settle(load(door + at.DOOR_STATE), code):
        return 0
    following = load(door + at.DOOR_NEXT)
    if code == at.NOT_TAKEN and following != 0:
        return call_builtin(following, load(door + at.DOOR_NEXT_SELF), args, nargs)
    return PyLong_FromLong(code)


def collective(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(x, out, op or root, async_op, stream)``; that of ``reduce`` takes the operator, and the root in the end."""
    door = PyLong_AsLong(self)
    return answer(door, go(load(door + at.DOOR_STATE), find_collective(door, args)), args, nargs)


def moves(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(x, out, root, counts of x, counts of out, async_op, stream)`` of a collective that is a list of messages."""
    door = PyLong_AsLong(self)
    return answer(door, go(load(door + at.DOOR_STATE), find_moves(door, args)), args, nargs)


def reductions(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(x, out, op, async_op, stream, counts)`` of ``reduce_scatter_v``. Where a launch fails after another one, it raises."""
    door = PyLong_AsLong(self)
    state = load(door + at.DOOR_STATE)
    found = find_reductions(door, args)
    for number in range(found):
        code = begin_launch(state, load(state + at.STATE_BLOCKS + 8 * number))
        if code != 0 and number == 0:
            return answer(door, at.NOT_TAKEN, args, nargs)
        if code != 0:
            if not settle(state, at.DONE):
                return 0
            place = state + at.STATE_CODE
            store(place, PyLong_FromLong(code))
            raised = PyObject_Vectorcall(load(state + at.STATE_FAIL), place, 1, 0)
            Py_DecRef(load(place))
            return raised
    return answer(door, at.DONE if found != 0 else at.NOT_TAKEN, args, nargs)


# ---- sends and receives


def message(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(x, peer, async_op, stream)`` of a send or a receive."""
    door = PyLong_AsLong(self)
    state, code, receives = load(door + at.DOOR_STATE), at.NOT_TAKEN, load(door + at.DOOR_RECEIVES)
    x, peer = load(args), load(args + 8)
    plain = is_known(state, x) and may_begin(door, state) and is_plain(state, args + 16, x)
    if plain and write_message(state, 0, x, peer, receives):
        if load32(load(state + at.STATE_GROUPS)) == 0:
            code = go(state, find_messages(state, state + at.STATE_CALL, 1, 0))
        elif can_be_noted(door, state, 1):
            if not join(state) or not note(state, 0, x):
                return 0
            code = at.DONE
    return answer(door, code, args, nargs)


def pair(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(x, dst, out, src, async_op, stream)`` of a send and a receive that do not overlap."""
    door = PyLong_AsLong(self)
    state, code = load(door + at.DOOR_STATE), at.NOT_TAKEN
    sent, got = state + at.STATE_CALL, state + at.STATE_CALL + at.MESSAGE_BYTES
    x, dst, out, src = load(args), load(args + 8), load(args + 16), load(args + 24)
    if not is_known(state, x) or not may_begin(door, state) or not is_plain(state, args + 32, x):
        return answer(door, code, args, nargs)
    if (
        write_message(state, 0, x, dst, 0)
        and write_message(state, 1, out, src, 1)
        and not overlap(sent, got)
    ):
        if load32(load(state + at.STATE_GROUPS)) == 0:
            code = go(state, find_messages(state, sent, 2, 0))
        elif can_be_noted(door, state, 2):
            if not join(state) or not note(state, 0, x) or not note(state, 1, out):
                return 0
            code = at.DONE
    return answer(door, code, args, nargs)


# ---- groups


def begin(self: int, args: int, nargs: int) -> int:
    """Builtin ``begin()`` of a ``with`` block; as the attribute of a class it may be given the object, too."""
    groups = PyLong_AsLong(self)
    if load32(groups + at.GROUPS_OPEN) == 0:
        store(groups + at.GROUPS_THREAD, this_thread())
        store(groups + at.GROUPS_DEPTH, 1)
        store(groups + at.GROUPS_OPEN, load(groups + at.GROUPS_OPEN) + 1)
    elif is_of_this_thread(groups):
        store(groups + at.GROUPS_DEPTH, load(groups + at.GROUPS_DEPTH) + 1)
    else:
        return PyObject_Vectorcall(load(groups + at.GROUPS_BEGIN), 0, 0, 0)
    return none(groups)


def end(self: int, args: int, nargs: int) -> int:
    """Builtin ``end(type, value, trace)``, likewise. What is noted goes in one launch."""
    groups, left_by = PyLong_AsLong(self), args + 8 * (nargs - 3)
    if not is_of_this_thread(groups) or load(left_by) != load(groups + at.GROUPS_NONE):
        return PyObject_Vectorcall(load(groups + at.GROUPS_END), left_by, 3, 0)
    depth, state = load(groups + at.GROUPS_DEPTH), load(groups + at.GROUPS_STATE)
    if depth > 1:
        store(groups + at.GROUPS_DEPTH, depth - 1)
    elif state == 0 or go(state, find_noted(state)) == at.DONE:
        held = state == 0 or hold_noted(state)
        close(groups, state)
        if not held:
            return 0
    else:
        return PyObject_Vectorcall(load(groups + at.GROUPS_END), left_by, 3, 0)
    return none(groups)


def is_compiled(self: int, args: int, nargs: int) -> int:
    """Builtin: whether this thread has a group open that only doors have seen."""
    return PyLong_FromLong(1 if is_of_this_thread(PyLong_AsLong(self)) else 0)


EXPORTS: dict[str, Any] = {
    "launch": launch,
    "collective": collective,
    "moves": moves,
    "reductions": reductions,
    "message": message,
    "pair": pair,
    "begin": begin,
    "end": end,
    "is_compiled": is_compiled,
    "view_foreign": view_foreign,
}
