"""Kernel source: cuLaunchKernelEx as a fast builtin, and the doors of a communicator's operations on GPU memory.

``launch(block, source, target, stream)``: ``block`` is the address of ``BLOCK_WORDS`` words; the result is CUDA's code.  Through
cuda.bindings a launch costs about a microsecond and a half more.  Python's lock is let go, since a launch waits where the queue of the GPU
is full.

A door is a whole call, from PyTorch's tensors to the launch, where everything is as it was the last time; ``doors.tensors`` looks at the
arguments, ``doors.rows`` finds the launch that ``doors.table`` keeps, ``doors.layout`` says where.  The result is ``DONE``, or
``NOT_TAKEN``: nothing has happened then.  What a door does not take it hands to the next one, that of the same operation on CPU memory.

While a thread has a group open, sends and receives in which nothing is wrong are noted; ``NOTED`` tells Python of the first one, and
``exchange`` launches them.  What else a group has is Python's.
"""

from __future__ import annotations

from typing import Any

from miraccl.executor.cuda.doors import layout as at
from miraccl.executor.cuda.doors.rows import find_collective, find_messages, overlap, type_is_known, write_message
from miraccl.executor.cuda.doors.tensors import call4, call_builtin, may_go_on
from miraccl.native.intrinsics import (
    PyEval_RestoreThread,
    PyEval_SaveThread,
    PyList_Append,
    PyLong_AsLong,
    PyLong_FromLong,
    PyThread_get_thread_ident,
    inline,
    load,
    load32,
    store,
)


@inline
def enqueue(block: int) -> int:
    """Launch without Python's lock; CUDA's code."""
    state = PyEval_SaveThread()
    code = call4(
        load(block + 8 * at.FUNCTION), load(block + 8 * at.CONFIG), load(block + 8 * at.KERNEL), load(block + 8 * at.PARAMETERS), 0
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
def go(state: int, block: int) -> int:
    """Launch what was found, if anything; what the door says."""
    if block == 0:
        return at.NOT_TAKEN
    store(state + at.STATE_LAST, block)
    store(load(state + at.STATE_CPU_PLAN), 0)
    return at.DONE if enqueue(block) == 0 else at.NOT_TAKEN


@inline
def answer(door: int, code: int, args: int, nargs: int) -> int:
    """What a door says, or the next one."""
    following = load(door + at.DOOR_NEXT)
    if code == at.NOT_TAKEN and following != 0:
        return call_builtin(following, load(door + at.DOOR_NEXT_SELF), args, nargs)
    return PyLong_FromLong(code)


def collective(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(x, out, op or root, async_op, stream)``; that of ``reduce`` takes the operator, and the root in the end."""
    door = PyLong_AsLong(self)
    return answer(door, go(load(door + at.DOOR_STATE), find_collective(door, args)), args, nargs)


# ---- sends and receives


@inline
def can_be_noted(door: int, state: int, count: int) -> bool:
    """Whether the messages of a call may join those that are noted, or begin a group."""
    noted = load(state + at.STATE_NOTED)
    if load(door + at.DOOR_NOTES) == 0:
        return False
    if noted != 0:
        if load(state + at.STATE_NOTED_THREAD) != PyThread_get_thread_ident():
            return False
        if load(state + at.STATE_NOTED_GROUP) != load(load(state + at.STATE_GROUPS)):
            return False  # of a group that is no more, or another thread has had one since
        if load(state + at.STATE_NOTED_STREAM) != load(state + at.STATE_STREAM):
            return False
    for number in range(count):
        if not type_is_known(state, state + at.STATE_CALL + number * at.MESSAGE_BYTES):
            return False
    return noted + count <= at.MOST_MESSAGES


@inline
def note(state: int, number: int, x: int, peer: int, receives: int) -> bool:
    """Put a message of this call beside those that are noted; False if there is no memory for it, which Python is told."""
    notes, noted = load(state + at.STATE_NOTES), load(state + at.STATE_NOTED)
    whether = load(state + at.STATE_TRUE) if receives != 0 else load(state + at.STATE_FALSE)
    if PyList_Append(notes, x) != 0 or PyList_Append(notes, peer) != 0 or PyList_Append(notes, whether) != 0:
        return False
    mine, its = state + at.STATE_CALL + number * at.MESSAGE_BYTES, state + at.STATE_GROUP + noted * at.MESSAGE_BYTES
    for offset in range(0, at.MESSAGE_BYTES, 8):
        store(its + offset, load(mine + offset))
    store(state + at.STATE_NOTED, noted + 1)
    return True


@inline
def begin_or_join(state: int) -> int:
    """What a door says that is about to note messages."""
    store(load(state + at.STATE_CPU_PLAN), 0)
    if load(state + at.STATE_NOTED) != 0:
        return at.DONE
    store(state + at.STATE_NOTED_THREAD, PyThread_get_thread_ident())
    store(state + at.STATE_NOTED_GROUP, 0)
    store(state + at.STATE_NOTED_STREAM, load(state + at.STATE_STREAM))
    return at.NOTED


@inline
def is_plain(state: int, options: int) -> bool:
    """Whether ``async_op`` and ``stream``, the last arguments, are as usual."""
    return load(options) == load(state + at.STATE_FALSE) and may_go_on(state, load(options + 8))


def message(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(x, peer, async_op, stream)`` of a send or a receive."""
    door = PyLong_AsLong(self)
    state, code, receives = load(door + at.DOOR_STATE), at.NOT_TAKEN, load(door + at.DOOR_RECEIVES)
    x, peer = load(args), load(args + 8)
    if write_message(state, state + at.STATE_CALL, x, peer, receives) and is_plain(state, args + 16):
        if load32(load(state + at.STATE_GROUPS)) == 0:
            code = go(state, find_messages(state, state + at.STATE_CALL, 1))
        elif can_be_noted(door, state, 1):
            code = begin_or_join(state)
            if not note(state, 0, x, peer, receives):
                return 0
    return answer(door, code, args, nargs)


def pair(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(x, dst, out, src, async_op, stream)`` of a send and a receive that do not overlap."""
    door = PyLong_AsLong(self)
    state, code = load(door + at.DOOR_STATE), at.NOT_TAKEN
    sent, got = state + at.STATE_CALL, state + at.STATE_CALL + at.MESSAGE_BYTES
    x, dst, out, src = load(args), load(args + 8), load(args + 16), load(args + 24)
    if not write_message(state, sent, x, dst, 0) or not write_message(state, got, out, src, 1) or overlap(sent, got):
        return answer(door, code, args, nargs)
    if is_plain(state, args + 32):
        if load32(load(state + at.STATE_GROUPS)) == 0:
            code = go(state, find_messages(state, sent, 2))
        elif can_be_noted(door, state, 2):
            code = begin_or_join(state)
            if not note(state, 0, x, dst, 0) or not note(state, 1, out, src, 1):
                return 0
    return answer(door, code, args, nargs)


def exchange(self: int, args: int, nargs: int) -> int:
    """Builtin ``door()``: what is noted, all in one launch. Nothing is noted any more, but for the list, which is Python's."""
    state = load(PyLong_AsLong(self) + at.DOOR_STATE)
    count = load(state + at.STATE_NOTED)
    store(state + at.STATE_NOTED, 0)
    if load32(load(state + at.STATE_ABORT)) != 0 or load(state + at.STATE_NOTED_STREAM) != load(state + at.STATE_STREAM):
        return PyLong_FromLong(at.NOT_TAKEN)
    return PyLong_FromLong(go(state, find_messages(state, state + at.STATE_GROUP, count)))


EXPORTS: dict[str, Any] = {
    "launch": launch,
    "collective": collective,
    "message": message,
    "pair": pair,
    "exchange": exchange,
}
