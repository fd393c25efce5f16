"""Kernel source: reading PyTorch tensors through their C exchange API (DLPack 1.3), and Python
ints.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from miraccl.executor.cuda import fast_call_layout
from miraccl.native.intrinsics import I64, PyErr_Clear, PyLong_AsLong, inline, load, load32

#: Linux maps nothing below (vm.mmap_min_addr). The address of a tensor whose storage was freed is
#: its offset, usually 0.
MIN_ADDRESS = 1 << 16


def _emit_call(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """Emit a call of the C function at the first address, which takes words and returns an int."""
    word = ir.IntType(64)
    kind = ir.FunctionType(ir.IntType(32), [word] * (len(args) - 1))
    return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:]), word)


@intrinsic
def call_int4(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Call the C function at an address with four words; it returns a 32-bit int."""
    return I64(I64, I64, I64, I64, I64), _emit_call


@intrinsic
def call_int2(typingctx: Any, function: Any, a: Any, b: Any) -> Any:
    """Call the C function at an address with two words; it returns a 32-bit int."""
    return I64(I64, I64, I64), _emit_call


@intrinsic
def call_int3(typingctx: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    """Call the C function at an address with three words; it returns a 32-bit int."""
    return I64(I64, I64, I64, I64), _emit_call


@intrinsic
def call_builtin(typingctx: Any, function: Any, owner: Any, args: Any, nargs: Any) -> Any:
    """Call the C function of a builtin; it returns an object."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(64)
        return builder.call(
            builder.inttoptr(args[0], ir.FunctionType(word, [word] * 3).as_pointer()), args[1:]
        )

    return I64(I64, I64, I64, I64), emit


@inline
def view_tensor(state: int, tensor: int, view: int) -> int:
    """Write the view of a contiguous tensor on this GPU at ``view``; return its elements, -1 for
    others.
    """
    if call_int2(load(state + fast_call_layout.STATE_VIEW), tensor, view) != 0:
        PyErr_Clear()
        return -1
    return tensor_count(state, view)


@inline
def is_valid_address(memory: int, count: int) -> bool:
    """Return True if ``count`` elements may be at an address."""
    return memory >= MIN_ADDRESS or count == 0


@inline
def tensor_count(state: int, view: int) -> int:
    """Return the elements of a contiguous DLTensor on this GPU; -1 for others."""
    if load(view + fast_call_layout.DL_DEVICE) != load(state + fast_call_layout.STATE_DEVICE):
        return -1
    shape, strides, count = (
        load(view + fast_call_layout.DL_SHAPE),
        load(view + fast_call_layout.DL_STRIDES),
        1,
    )
    for axis in range(load32(view + fast_call_layout.DL_NDIM) - 1, -1, -1):
        length = load(shape + 8 * axis)
        if strides != 0 and length != 1 and load(strides + 8 * axis) != count:
            return -1
        count *= length
    return count if is_valid_address(load(view + fast_call_layout.DL_DATA), count) else -1


@inline
def address(view: int) -> int:
    return load(view + fast_call_layout.DL_DATA) + load(view + fast_call_layout.DL_OFFSET)


@inline
def data_type(view: int) -> int:
    """Return the DLDataType of a view as a number."""
    return load32(view + fast_call_layout.DL_DTYPE) & 0xFFFFFFFF


@inline
def int_value(state: int, value: int) -> int:
    """Return the value of a non-negative int object; -1 for other objects."""
    if load(value + fast_call_layout.OB_TYPE) != load(state + fast_call_layout.STATE_INT_TYPE):
        return -1
    number = PyLong_AsLong(value)
    if number == -1:
        PyErr_Clear()
    return number if number >= 0 else -1


@inline
def rank_value(state: int, value: int) -> int:
    """Return the value of an int object that is a rank; -1 for other objects."""
    number = int_value(state, value)
    return number if number < load(state + fast_call_layout.STATE_NRANKS) else -1
