"""Kernel source: cuLaunchKernelEx as a fast builtin, and the fast calls of a communicator's
operations.

``launch(record, source, target, stream)``: ``record`` is the address of ``RECORD_WORDS`` words; the
result is CUDA's error code.

A fast call runs a whole call from array to launch if everything is as in an earlier call: ``views``
reads the arguments, ``lookup`` finds the launch that ``table`` has entered. The result is ``DONE``,
or ``NOT_HANDLED`` if nothing has happened. Calls that it does not handle go to its fallback, the
fast call of the operation on CPU memory.

Groups begin and end here as well (``groups``). Valid sends and receives are collected and launched
at the end; all other calls of a group are left to Python.
"""

from __future__ import annotations

from typing import Any

from miraccl.executor.cuda import fast_call_layout
from miraccl.fastpath.cuda.foreign import view_foreign
from miraccl.fastpath.cuda.groups import (
    can_collect,
    close_group,
    collect_message,
    find_collected,
    is_own_group,
    join_group,
    may_collect,
    retain_collected,
    return_none,
    thread_id,
)
from miraccl.fastpath.cuda.lookup import find_collective, find_messages, overlaps, write_message
from miraccl.fastpath.cuda.message_ops import find_message_collective
from miraccl.fastpath.cuda.reductions import find_reductions
from miraccl.fastpath.cuda.streams import has_default_options
from miraccl.fastpath.cuda.tensors import call_builtin, call_int4
from miraccl.fastpath.cuda.views import finish_call, is_known_type
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
def launch_kernel(record: int) -> int:
    """Launch without the GIL; return CUDA's error code."""
    # Without the GIL: a launch blocks while the queue of the GPU is full. Through cuda.bindings it
    # costs about 1.5 us more.
    state = PyEval_SaveThread()
    code = call_int4(
        load(record + 8 * fast_call_layout.RECORD_FUNCTION),
        load(record + 8 * fast_call_layout.RECORD_CONFIG),
        load(record + 8 * fast_call_layout.RECORD_KERNEL),
        load(record + 8 * fast_call_layout.RECORD_PARAMETERS),
        0,
    )
    PyEval_RestoreThread(state)
    return code


def launch(self: int, args: int, nargs: int) -> int:
    record = PyLong_AsLong(load(args))
    argument, config = (
        load(record + 8 * fast_call_layout.RECORD_ARGUMENT),
        load(record + 8 * fast_call_layout.RECORD_CONFIG),
    )
    store(argument, PyLong_AsLong(load(args + 8)))
    store(argument + 8, PyLong_AsLong(load(args + 16)))
    store(config + fast_call_layout.CONFIG_STREAM, PyLong_AsLong(load(args + 24)))
    return PyLong_FromLong(launch_kernel(record))


# ---- collectives


@inline
def begin_launch(state: int, record: int) -> int:
    """Launch ``record`` and note it as the last operation; return CUDA's error code."""
    store(state + fast_call_layout.STATE_LAST_RECORD, record)
    store(load(state + fast_call_layout.STATE_CPU_PLAN), 0)
    return launch_kernel(record)


@inline
def launch_found(state: int, record: int) -> int:
    """Launch ``record`` if it is not 0; return the result of the fast call."""
    return (
        fast_call_layout.DONE
        if record != 0 and begin_launch(state, record) == 0
        else fast_call_layout.NOT_HANDLED
    )


@inline
def finish(call_record: int, code: int, args: int, nargs: int) -> int:
    """End a call: return ``code`` as an object, or call the fallback."""
    if not finish_call(load(call_record + fast_call_layout.FAST_STATE), code):
        return 0
    fallback = load(call_record + fast_call_layout.FAST_FALLBACK)
    if code == fast_call_layout.NOT_HANDLED and fallback != 0:
        return call_builtin(
            fallback, load(call_record + fast_call_layout.FAST_FALLBACK_SELF), args, nargs
        )
    return PyLong_FromLong(code)


def collective(self: int, args: int, nargs: int) -> int:
    """Builtin ``fast_call(x, out, op or root, async_op, stream)``; ``reduce`` takes op and a final
    root.
    """
    call_record = PyLong_AsLong(self)
    return finish(
        call_record,
        launch_found(
            load(call_record + fast_call_layout.FAST_STATE), find_collective(call_record, args)
        ),
        args,
        nargs,
    )


def message_collective(self: int, args: int, nargs: int) -> int:
    """Builtin ``fast_call(x, out, root, x counts, out counts, async_op, stream)`` of a message
    collective.
    """
    call_record = PyLong_AsLong(self)
    return finish(
        call_record,
        launch_found(
            load(call_record + fast_call_layout.FAST_STATE),
            find_message_collective(call_record, args),
        ),
        args,
        nargs,
    )


def reductions(self: int, args: int, nargs: int) -> int:
    """Builtin ``fast_call(x, out, op, async_op, stream, counts)`` of ``reduce_scatter_v``.

    Raises if a launch fails after another one has been enqueued.
    """
    call_record = PyLong_AsLong(self)
    state = load(call_record + fast_call_layout.FAST_STATE)
    found = find_reductions(call_record, args)
    for number in range(found):
        code = begin_launch(state, load(state + fast_call_layout.STATE_RECORDS + 8 * number))
        if code != 0 and number == 0:
            return finish(call_record, fast_call_layout.NOT_HANDLED, args, nargs)
        if code != 0:
            if not finish_call(state, fast_call_layout.DONE):
                return 0
            code_word = state + fast_call_layout.STATE_CODE
            store(code_word, PyLong_FromLong(code))
            raised = PyObject_Vectorcall(
                load(state + fast_call_layout.STATE_RAISE), code_word, 1, 0
            )
            Py_DecRef(load(code_word))
            return raised
    return finish(
        call_record,
        fast_call_layout.DONE if found != 0 else fast_call_layout.NOT_HANDLED,
        args,
        nargs,
    )


# ---- sends and receives


def message(self: int, args: int, nargs: int) -> int:
    """Builtin ``fast_call(x, peer, async_op, stream)`` of a send or a receive."""
    call_record = PyLong_AsLong(self)
    state, code, receives = (
        load(call_record + fast_call_layout.FAST_STATE),
        fast_call_layout.NOT_HANDLED,
        load(call_record + fast_call_layout.FAST_RECEIVES),
    )
    x, peer = load(args), load(args + 8)
    plain = (
        is_known_type(state, x)
        and may_collect(call_record, state)
        and has_default_options(state, args + 16, x)
    )
    if plain and write_message(state, 0, x, peer, receives):
        if load32(load(state + fast_call_layout.STATE_GROUPS)) == 0:
            code = launch_found(
                state, find_messages(state, state + fast_call_layout.STATE_CALL_MESSAGES, 1, 0)
            )
        elif can_collect(call_record, state, 1):
            if not join_group(state) or not collect_message(state, 0, x):
                return 0
            code = fast_call_layout.DONE
    return finish(call_record, code, args, nargs)


def pair(self: int, args: int, nargs: int) -> int:
    """Builtin ``fast_call(x, dst, out, src, async_op, stream)`` of a send and a receive that do not
    overlap.
    """
    call_record = PyLong_AsLong(self)
    state, code = load(call_record + fast_call_layout.FAST_STATE), fast_call_layout.NOT_HANDLED
    sent, got = (
        state + fast_call_layout.STATE_CALL_MESSAGES,
        state + fast_call_layout.STATE_CALL_MESSAGES + fast_call_layout.MESSAGE_BYTES,
    )
    x, dst, out, src = load(args), load(args + 8), load(args + 16), load(args + 24)
    if (
        not is_known_type(state, x)
        or not may_collect(call_record, state)
        or not has_default_options(state, args + 32, x)
    ):
        return finish(call_record, code, args, nargs)
    if (
        write_message(state, 0, x, dst, 0)
        and write_message(state, 1, out, src, 1)
        and not overlaps(sent, got)
    ):
        if load32(load(state + fast_call_layout.STATE_GROUPS)) == 0:
            code = launch_found(state, find_messages(state, sent, 2, 0))
        elif can_collect(call_record, state, 2):
            if (
                not join_group(state)
                or not collect_message(state, 0, x)
                or not collect_message(state, 1, out)
            ):
                return 0
            code = fast_call_layout.DONE
    return finish(call_record, code, args, nargs)


# ---- groups


def begin(self: int, args: int, nargs: int) -> int:
    """Builtin ``begin()`` of a ``with`` block; as a class attribute it may receive the object as
    well.
    """
    groups = PyLong_AsLong(self)
    if load32(groups + fast_call_layout.GROUPS_OPEN) == 0:
        store(groups + fast_call_layout.GROUPS_THREAD, thread_id())
        store(groups + fast_call_layout.GROUPS_DEPTH, 1)
        store(
            groups + fast_call_layout.GROUPS_OPEN, load(groups + fast_call_layout.GROUPS_OPEN) + 1
        )
    elif is_own_group(groups):
        store(
            groups + fast_call_layout.GROUPS_DEPTH, load(groups + fast_call_layout.GROUPS_DEPTH) + 1
        )
    else:
        return PyObject_Vectorcall(load(groups + fast_call_layout.GROUPS_BEGIN), 0, 0, 0)
    return return_none(groups)


def end(self: int, args: int, nargs: int) -> int:
    """Builtin ``end(type, value, trace)`` of a ``with`` block; launches the collected messages
    together.
    """
    groups, left_by = PyLong_AsLong(self), args + 8 * (nargs - 3)
    if not is_own_group(groups) or load(left_by) != load(groups + fast_call_layout.GROUPS_NONE):
        return PyObject_Vectorcall(load(groups + fast_call_layout.GROUPS_END), left_by, 3, 0)
    depth, state = (
        load(groups + fast_call_layout.GROUPS_DEPTH),
        load(groups + fast_call_layout.GROUPS_STATE),
    )
    if depth > 1:
        store(groups + fast_call_layout.GROUPS_DEPTH, depth - 1)
    elif state == 0 or launch_found(state, find_collected(state)) == fast_call_layout.DONE:
        retained = state == 0 or retain_collected(state)
        close_group(groups, state)
        if not retained:
            return 0
    else:
        return PyObject_Vectorcall(load(groups + fast_call_layout.GROUPS_END), left_by, 3, 0)
    return return_none(groups)


def is_compiled(self: int, args: int, nargs: int) -> int:
    """Builtin: 1 if this thread's open group is only known to compiled code, else 0."""
    return PyLong_FromLong(1 if is_own_group(PyLong_AsLong(self)) else 0)


EXPORTS: dict[str, Any] = {
    "launch": launch,
    "collective": collective,
    "message_collective": message_collective,
    "reductions": reductions,
    "message": message,
    "pair": pair,
    "begin": begin,
    "end": end,
    "is_compiled": is_compiled,
    "view_foreign": view_foreign,
}
