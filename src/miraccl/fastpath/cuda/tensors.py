"""Kernel source: what doors see of PyTorch's tensors, through the functions that their type offers to compiled code (DLPack 1.3, "C
Exchange API"), and of numbers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from miraccl.fastpath.cuda import layout
from miraccl.native.intrinsics import I64, PyErr_Clear, PyLong_AsLong, inline, load, load32

#: Linux maps nothing below (vm.mmap_min_addr); a tensor whose storage was freed has for an address its offset, most often 0
MIN_ADDRESS = 1 << 16


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
def view_tensor(state: int, tensor: int, view: int) -> int:
    """Look at a tensor on this GPU that is contiguous, and write at ``view`` what it is; its elements, -1 for anything else."""
    if call_int2(load(state + layout.STATE_VIEW), tensor, view) != 0:
        PyErr_Clear()
        return -1
    return tensor_count(state, view)


@inline
def is_valid_address(memory: int, count: int) -> bool:
    """Whether so many elements may lie at an address."""
    return memory >= MIN_ADDRESS or count == 0


@inline
def tensor_count(state: int, view: int) -> int:
    """Elements of a DLTensor on this GPU that is contiguous; -1 for anything else."""
    if load(view + layout.DL_DEVICE) != load(state + layout.STATE_DEVICE):
        return -1
    shape, strides, count = load(view + layout.DL_SHAPE), load(view + layout.DL_STRIDES), 1
    for axis in range(load32(view + layout.DL_NDIM) - 1, -1, -1):
        length = load(shape + 8 * axis)
        if strides != 0 and length != 1 and load(strides + 8 * axis) != count:
            return -1
        count *= length
    return count if is_valid_address(load(view + layout.DL_DATA), count) else -1


@inline
def address(view: int) -> int:
    return load(view + layout.DL_DATA) + load(view + layout.DL_OFFSET)


@inline
def data_type(view: int) -> int:
    """A DLDataType as a number."""
    return load32(view + layout.DL_DTYPE) & 0xFFFFFFFF


@inline
def int_value(state: int, value: int) -> int:
    """An int that is not negative, -1 for anything else."""
    if load(value + layout.OB_TYPE) != load(state + layout.STATE_INT_TYPE):
        return -1
    number = PyLong_AsLong(value)
    if number == -1:
        PyErr_Clear()
    return number if number >= 0 else -1


@inline
def rank_value(state: int, value: int) -> int:
    """An int that is a rank, -1 for anything else."""
    number = int_value(state, value)
    return number if number < load(state + layout.STATE_NRANKS) else -1
