"""Kernel source: the stream of a call, and that it follows the stream of the operation before."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from miraccl.fastpath.cuda import layout as at
from miraccl.fastpath.cuda.arrays import taken
from miraccl.fastpath.cuda.tensors import call_int2, call_int3, number_of
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
def ask_stream(typingctx: Any, function: Any, device: Any, where: Any) -> Any:
    """Call ``int f(int device_type, int device_id, void **stream)``, both numbers in one word as in DLDevice."""

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
def forgive(state: int) -> None:
    """Forget an exception, with which the long way is to deal; not one that ends programs (``KeyboardInterrupt``)."""
    if PyErr_ExceptionMatches(load(state + at.STATE_EXCEPTION)) != 0:
        PyErr_Clear()


@inline
def asked(state: int, ask: int) -> int:
    """The current stream as a function of Python's says, -1 for anything else; a signal handler may raise in there."""
    if ask == 0:
        return -1
    answer = PyObject_Vectorcall(ask, state + at.STATE_ORDINAL, 1, 0)
    if answer == 0:
        forgive(state)
        return -1
    return taken(answer)


@inline
def stream_of(state: int, given: int, array: int) -> int:
    """The stream of a call as a number: an int of the caller's, for None the current one of the library of ``array``; -1 for anything
    else."""
    if given != load(state + at.STATE_NONE):
        return number_of(state, given)
    if load(array + at.OB_TYPE) == load(state + at.STATE_ARRAY_TYPE):
        return asked(state, load(state + at.STATE_ASK_ARRAYS))
    if load(state + at.STATE_CURRENT) == 0:
        return asked(state, load(state + at.STATE_ASK))
    if (
        ask_stream(
            load(state + at.STATE_CURRENT), load(state + at.STATE_DEVICE), state + at.STATE_ANSWER
        )
        != 0
    ):
        PyErr_Clear()
        return -1
    return load(state + at.STATE_ANSWER)


@inline
def is_here(state: int) -> bool:
    """Whether this thread's context is that of the communicator: default streams are those of the current one."""
    ask = load(state + at.STATE_ASK_CONTEXT)
    if ask == 0:
        return True
    code = call_int2(ask, state + at.STATE_ANSWER, 0)  # it takes the first alone
    return code == 0 and load(state + at.STATE_ANSWER) == load(state + at.STATE_CONTEXT)


@inline
def captures(state: int, stream: int) -> bool:
    """Whether a stream is captured, or may be: what a graph reads is not let go of here, nor ordered."""
    if load(state + at.STATE_IS_CAPTURING) == 0:
        return True
    store(state + at.STATE_ANSWER, 0)
    return (
        call_int2(load(state + at.STATE_IS_CAPTURING), stream, state + at.STATE_ANSWER) != 0
        or load32(state + at.STATE_ANSWER) != 0
    )


@inline
def follow(state: int, stream: int) -> bool:
    """Make ``stream`` wait for that of the operation before, and be that from now on. Captures and groups are Python's, and so is a stream
    of which something is held: it may be destroyed after this."""
    before, event = load(state + at.STATE_STREAM), load(state + at.STATE_EVENT)
    if PyList_Size(load(state + at.STATE_HELD)) != 0:
        return False
    if (
        event == 0
        or not is_here(state)
        or load32(load(state + at.STATE_GROUPS)) != 0
        or captures(state, before)
        or captures(state, stream)
    ):
        return False
    if (
        call_int2(load(state + at.STATE_RECORD), event, before) != 0
        or call_int3(load(state + at.STATE_WAIT), stream, event, 0) != 0
    ):
        return False
    store(state + at.STATE_STREAM, stream)
    store(state + at.STATE_OTHERS, 1)
    return True


@inline
def may_go_on(state: int, stream: int, array: int) -> bool:
    """Whether nothing is wrong, and ``stream`` is that of the operation before, or follows it. What producers of arrays have made that one
    wait for is waited for then, too. The first operation after a capture is Python's."""
    if load32(load(state + at.STATE_ABORT)) != 0 or load(state + at.STATE_STREAM) == -1:
        return False
    number = stream_of(state, stream, array)
    if number <= at.STREAM_OF_THREAD and not is_here(state):
        return False
    if load(state + at.STATE_CAPTURED) != 0:
        return number == load(state + at.STATE_STREAM) and captures(state, number)
    return number == load(state + at.STATE_STREAM) or (number >= 0 and follow(state, number))


@inline
def is_plain(state: int, options: int, array: int) -> bool:
    """Whether ``async_op`` and ``stream``, the last arguments, are as usual. ``array``: the first that the call uses."""
    return load(options) == load(state + at.STATE_FALSE) and may_go_on(
        state, load(options + 8), array
    )
