"""Kernel source: what doors see of PyTorch's tensors, through the functions that their type offers to compiled code (DLPack 1.3, "C
Exchange API"), and of numbers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from miraccl.fastpath.cuda import layout as at
from miraccl.native.intrinsics import I64, PyErr_Clear, PyLong_AsLong, inline, load, load32

#: Linux maps nothing below (vm.mmap_min_addr); a tensor whose storage was freed has for an address its offset, most often 0
LEAST_ADDRESS = 1 << 16


def _emit_call(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """The C function at the first address, which takes the words that follow and returns an int."""
    word = ir.IntType(64)
    kind = ir.FunctionType(ir.IntType(32), [word] * (len(args) - 1))
    return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:]), word)


@intrinsic
def call_int4(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Call the C function at an address with four words; it returns an int of 32 bits (the driver, PyTorch's functions for DLPack)."""
    return I64(I64, I64, I64, I64, I64), _emit_call


@intrinsic
def call_int2(typingctx: Any, function: Any, a: Any, b: Any) -> Any:
    """The same with two words."""
    return I64(I64, I64, I64), _emit_call


@intrinsic
def call_int3(typingctx: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    """The same with three words."""
    return I64(I64, I64, I64, I64), _emit_call


@intrinsic
def call_builtin(typingctx: Any, function: Any, owner: Any, args: Any, nargs: Any) -> Any:
    """Call the C function of a builtin; its result is an object."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(64)
        return builder.call(
            builder.inttoptr(args[0], ir.FunctionType(word, [word] * 3).as_pointer()), args[1:]
        )

    return I64(I64, I64, I64, I64), emit


@inline
def view_tensor(state: int, thing: int, view: int) -> int:
    """Look at a tensor on this GPU that is contiguous, and write at ``view`` what it is; its elements, -1 for anything else."""
    if call_int2(load(state + at.STATE_VIEW), thing, view) != 0:
        PyErr_Clear()
        return -1
    return count_of(state, view)


@inline
def is_there(memory: int, count: int) -> bool:
    """Whether so many elements may lie at an address."""
    return memory >= LEAST_ADDRESS or count == 0


@inline
def count_of(state: int, view: int) -> int:
    """Elements of a DLTensor on this GPU that is contiguous; -1 for anything else."""
    if load(view + at.DL_DEVICE) != load(state + at.STATE_DEVICE):
        return -1
    shape, strides, count = load(view + at.DL_SHAPE), load(view + at.DL_STRIDES), 1
    for axis in range(load32(view + at.DL_NDIM) - 1, -1, -1):
        length = load(shape + 8 * axis)
        if strides != 0 and length != 1 and load(strides + 8 * axis) != count:
            return -1
        count *= length
    return count if is_there(load(view + at.DL_DATA), count) else -1


@inline
def address(view: int) -> int:
    return load(view + at.DL_DATA) + load(view + at.DL_OFFSET)


@inline
def data_type(view: int) -> int:
    """A DLDataType as a number."""
    return load32(view + at.DL_DTYPE) & 0xFFFFFFFF


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
def rank_of(state: int, given: int) -> int:
    """An int that is a rank, -1 for anything else."""
    number = number_of(state, given)
    return number if number < load(state + at.STATE_NRANKS) else -1
