"""Kernel source: the stream of a call, ordered after the stream of the previous operation."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from miraccl.executor.cuda import fast_call_layout
from miraccl.fastpath.cuda.arrays import consume_int
from miraccl.fastpath.cuda.tensors import call_int2, call_int3, int_value
from miraccl.native.intrinsics import (
    I64,
    PyErr_Clear,
    PyErr_ExceptionMatches,
    PyList_Size,
    PyObject_Vectorcall,
    inline,
    load,
    load32,
    store,
)


@intrinsic
def query_stream(typingctx: Any, function: Any, device: Any, result_address: Any) -> Any:
    """Call ``int f(int device_type, int device_id, void **stream)``; ``device`` is a DLDevice as
    one
    word.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word, half = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(half, [half, half, word])
        parts = [
            builder.trunc(args[1], half),
            builder.trunc(builder.lshr(args[1], ir.Constant(word, 32)), half),
            args[2],
        ]
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), parts), word)

    return I64(I64, I64, I64), emit


@inline
def clear_exception(state: int) -> None:
    """Clear an exception that the slow path will raise again; keep ``KeyboardInterrupt`` and the
    like.
    """
    if PyErr_ExceptionMatches(load(state + fast_call_layout.STATE_EXCEPTION)) != 0:
        PyErr_Clear()


@inline
def call_stream_query(state: int, query: int) -> int:
    """Return the current stream from a Python function; -1 on failure."""
    if query == 0:
        return -1
    result = PyObject_Vectorcall(query, state + fast_call_layout.STATE_ORDINAL, 1, 0)
    if result == 0:
        clear_exception(state)
        return -1
    return consume_int(result)


@inline
def stream_handle(state: int, value: int, array: int) -> int:
    """Return the handle of a call's stream; -1 if it is not a plain int.

    None stands for the current stream of the array's library.
    """
    if value != load(state + fast_call_layout.STATE_NONE):
        return int_value(state, value)
    if load(array + fast_call_layout.OB_TYPE) == load(state + fast_call_layout.STATE_ARRAY_TYPE):
        return call_stream_query(state, load(state + fast_call_layout.STATE_QUERY_CUPY_STREAM))
    if load(state + fast_call_layout.STATE_CURRENT) == 0:
        return call_stream_query(state, load(state + fast_call_layout.STATE_QUERY_STREAM))
    if (
        query_stream(
            load(state + fast_call_layout.STATE_CURRENT),
            load(state + fast_call_layout.STATE_DEVICE),
            state + fast_call_layout.STATE_RESULT,
        )
        != 0
    ):
        PyErr_Clear()
        return -1
    return load(state + fast_call_layout.STATE_RESULT)


@inline
def is_own_context(state: int) -> bool:
    """Return True if this thread's current context is the communicator's."""
    query = load(state + fast_call_layout.STATE_GET_CONTEXT)
    if query == 0:
        return True
    code = call_int2(
        query, state + fast_call_layout.STATE_RESULT, 0
    )  # it ignores the second argument
    return code == 0 and load(state + fast_call_layout.STATE_RESULT) == load(
        state + fast_call_layout.STATE_CONTEXT
    )


@inline
def is_capturing(state: int, stream: int) -> bool:
    """Return True if a stream is captured or may be."""
    if load(state + fast_call_layout.STATE_IS_CAPTURING) == 0:
        return True
    store(state + fast_call_layout.STATE_RESULT, 0)
    return (
        call_int2(
            load(state + fast_call_layout.STATE_IS_CAPTURING),
            stream,
            state + fast_call_layout.STATE_RESULT,
        )
        != 0
        or load32(state + fast_call_layout.STATE_RESULT) != 0
    )


@inline
def follow_stream(state: int, stream: int) -> bool:
    """Make ``stream`` wait for the previous operation's stream and become the current one.

    False if Python must do it: for captures, groups, and while owners of memory are retained.
    """
    # Retained owners are noted for the current stream, which may be destroyed after this call.
    before, event = (
        load(state + fast_call_layout.STATE_STREAM),
        load(state + fast_call_layout.STATE_EVENT),
    )
    if PyList_Size(load(state + fast_call_layout.STATE_RETAINED)) != 0:
        return False
    if (
        event == 0
        or not is_own_context(state)
        or load32(load(state + fast_call_layout.STATE_GROUPS)) != 0
        or is_capturing(state, before)
        or is_capturing(state, stream)
    ):
        return False
    if (
        call_int2(load(state + fast_call_layout.STATE_EVENT_RECORD), event, before) != 0
        or call_int3(load(state + fast_call_layout.STATE_STREAM_WAIT), stream, event, 0) != 0
    ):
        return False
    store(state + fast_call_layout.STATE_STREAM, stream)
    store(state + fast_call_layout.STATE_OTHER_STREAMS, 1)
    return True


@inline
def may_proceed(state: int, stream: int, array: int) -> bool:
    """Return True if there is no error and ``stream`` is, or now follows, the previous operation's
    stream.
    """
    # The stream also waits for what producers of arrays have made the current one wait for. The
    # first operation after a capture is left to Python.
    if (
        load32(load(state + fast_call_layout.STATE_ABORT)) != 0
        or load(state + fast_call_layout.STATE_STREAM) == -1
    ):
        return False
    handle = stream_handle(state, stream, array)
    if handle <= fast_call_layout.STREAM_PER_THREAD and not is_own_context(state):
        return False
    if load(state + fast_call_layout.STATE_CAPTURED) != 0:
        return handle == load(state + fast_call_layout.STATE_STREAM) and is_capturing(state, handle)
    return handle == load(state + fast_call_layout.STATE_STREAM) or (
        handle >= 0 and follow_stream(state, handle)
    )


@inline
def has_default_options(state: int, options: int, array: int) -> bool:
    """Return True if ``async_op`` is False and the stream may be used.

    ``options``: the last two arguments; ``array``: first array that the call uses.
    """
    return load(options) == load(state + fast_call_layout.STATE_FALSE) and may_proceed(
        state, load(options + 8), array
    )
