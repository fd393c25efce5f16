"""Kernel source: cuLaunchKernelEx as a fast builtin, and the doors of a communicator's collectives on GPU memory.

``launch(block, source, target, stream)``: ``block`` is the address of ``BLOCK_WORDS`` words; the result is CUDA's code.  Through
cuda.bindings a launch costs about a microsecond and a half more.  Python's lock is let go, since a launch waits where the queue of the GPU
is full.

``collective(x, out, op or root, stream)`` is a whole call, from PyTorch's tensors to the launch, where everything is as it was the last
time.  It looks at tensors through the functions that their type offers to compiled code (DLPack 1.3, "C Exchange API").  The result is 0,
or not 0 where Python is to do it: nothing has happened then.  ``doors.table`` keeps what it looks into, ``doors.layout`` says where.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from miraccl.executor.cuda.doors import layout as at
from miraccl.native.intrinsics import (
    I64,
    PyErr_Clear,
    PyEval_RestoreThread,
    PyEval_SaveThread,
    PyLong_AsLong,
    PyLong_FromLong,
    inline,
    load,
    load32,
    store,
)


def _emit_call(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """The C function at the first address, which takes the words that follow and returns an int."""
    word = ir.IntType(64)
    kind = ir.FunctionType(ir.IntType(32), [word] * (len(args) - 1))
    return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:]), word)


@intrinsic
def call4(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Call the C function at an address with four words; it returns an int."""
    return I64(I64, I64, I64, I64, I64), _emit_call


@intrinsic
def call2(typingctx: Any, function: Any, a: Any, b: Any) -> Any:
    """The same with two words."""
    return I64(I64, I64, I64), _emit_call


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


@intrinsic
def ask_stream(typingctx: Any, function: Any, device: Any, where: Any) -> Any:
    """Call ``int f(int device_type, int device_id, void **stream)``, both numbers in one word as in DLDevice."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word, half = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(half, [half, half, word])
        parts = [builder.trunc(args[1], half), builder.trunc(builder.lshr(args[1], ir.Constant(word, 32)), half), args[2]]
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), parts), word)

    return I64(I64, I64, I64), emit


@inline
def elements(state: int, thing: int, view: int) -> int:
    """Look at a tensor on this GPU that is contiguous: its elements, -1 for anything else."""
    if load(thing + at.OB_TYPE) != load(state + at.STATE_TYPE):
        return -1
    if call2(load(state + at.STATE_VIEW), thing, view) != 0:
        PyErr_Clear()
        return -1
    if load(view + at.DL_DEVICE) != load(state + at.STATE_DEVICE):
        return -1
    shape, strides, count = load(view + at.DL_SHAPE), load(view + at.DL_STRIDES), 1
    for axis in range(load32(view + at.DL_NDIM) - 1, -1, -1):
        length = load(shape + 8 * axis)
        if strides != 0 and length != 1 and load(strides + 8 * axis) != count:
            return -1
        count *= length
    return count


key_of = inline(at.key_of)
slot_of = inline(at.slot_of)


@inline
def number_of(state: int, given: int) -> int:
    """An int that is not negative, -1 for anything else."""
    if load(given + at.OB_TYPE) != load(state + at.STATE_INT_TYPE):
        return -1
    number = PyLong_AsLong(given)
    if number == -1:
        PyErr_Clear()
    return number if number >= 0 else -1


@inline
def third_of(state: int, kind: int, given: int) -> int:
    """The number of an operator, or a root; -1 for anything else."""
    if kind == at.THIRD_ROOT:
        return number_of(state, given)
    if kind == at.THIRD_NOTHING:
        return 0
    for op in range(at.NOPS):
        if load(state + at.STATE_OPS + 8 * op) == given:
            return op
    return -1


@inline
def stream_of(state: int, given: int) -> int:
    """The stream of a call as a number: an int of the caller's, the current one for None; -1 for anything else."""
    if given != load(state + at.STATE_NONE):
        return number_of(state, given)
    place = state + at.STATE_VIEWS + 2 * at.DL_BYTES
    if ask_stream(load(state + at.STATE_CURRENT), load(state + at.STATE_DEVICE), place) != 0:
        PyErr_Clear()
        return -1
    return load(place)


@inline
def find(door: int, args: int) -> int:
    """The row of the launch for these arguments, with addresses and stream in its block; 0 where Python is to do it."""
    state = load(door + at.DOOR_STATE)
    x, out, third = load(args), load(args + 8), load(args + 16)
    if load32(load(state + at.STATE_ABORT)) != 0 or load(state + at.STATE_STREAM) == -1:
        return 0
    view, other = state + at.STATE_VIEWS, state + at.STATE_VIEWS + at.DL_BYTES
    count = elements(state, x, view)
    blocks = load(door + at.DOOR_IN_BLOCKS)
    if count <= 0 or count % blocks != 0:
        return 0
    count //= blocks
    source = load(view + at.DL_DATA) + load(view + at.DL_OFFSET)
    target = source
    dtype = load32(view + at.DL_DTYPE) & 0xFFFFFFFF
    if out != load(state + at.STATE_NONE):
        blocks_out = load(door + at.DOOR_OUT_BLOCKS)
        if elements(state, out, other) != count * blocks_out or load32(other + at.DL_DTYPE) & 0xFFFFFFFF != dtype:
            return 0
        target = load(other + at.DL_DATA) + load(other + at.DL_OFFSET)
        itemsize = (dtype >> 8 & 255) >> 3
        if target < source + count * blocks * itemsize and source < target + count * blocks_out * itemsize:
            return 0  # in place in one way or another
    elif load(door + at.DOOR_IN_PLACE) == 0:
        return 0
    number = third_of(state, load(door + at.DOOR_THIRD), third)
    if number < 0:
        return 0
    if stream_of(state, load(args + 24)) != load(state + at.STATE_STREAM):
        return 0
    key = key_of(load(door + at.DOOR_COLLECTIVE), number, dtype)
    for probe in range(at.PROBES):
        row = state + at.STATE_TABLE + slot_of(key, count, probe) * at.ROW_BYTES
        if load(row + at.ROW_KEY) == key and load(row + at.ROW_COUNT) == count:
            if load(row + at.ROW_FILLS) != 0 and load(load(state + at.STATE_ORDER)) != load(state + at.STATE_SELF):
                return 0
            block = load(row + at.ROW_BLOCK)
            store(load(block + 8 * at.ARGUMENT), source)
            store(load(block + 8 * at.ARGUMENT) + 8, target)
            store(load(block + 8 * at.CONFIG) + at.CONFIG_STREAM, load(state + at.STATE_STREAM))
            return row
    return 0


def collective(self: int, args: int, nargs: int) -> int:
    door = PyLong_AsLong(self)
    row = find(door, args)
    if row == 0:
        return PyLong_FromLong(1)
    block = load(row + at.ROW_BLOCK)
    store(load(door + at.DOOR_STATE) + at.STATE_LAST, block)
    return PyLong_FromLong(enqueue(block))


EXPORTS: dict[str, Any] = {"launch": launch, "collective": collective}
