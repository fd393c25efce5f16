"""Instructions that kernel sources are written in: memory words, libc, and the C API of Python.

Importing this module imports Numba (0.25 s); only ``native.compiler`` and kernel sources do.
Everything is an int64: addresses, counts, flags. Loads and stores that synchronise with another
rank name their order; the compiler may reorder all others.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

I64 = types.int64
I32 = types.int32
_W = ir.IntType(64)
_H = ir.IntType(32)
_B = ir.IntType(8)


def inline(function: Any) -> Any:
    """Compile a helper that LLVM may inline; Python cannot call it.

    It has no exceptions, no reference counts, and NumPy's division.
    """
    return njit(
        error_model="numpy",
        nogil=True,
        no_cfunc_wrapper=True,
        no_cpython_wrapper=True,
        fastmath=False,
    )(function)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def load(typingctx: Any, address: Any) -> Any:
    """Load the word at an address."""
    return I64(I64), lambda context, builder, sig, args: builder.load(
        _pointer(builder, args[0], _W)
    )


@intrinsic
def store(typingctx: Any, address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0], _W))
        return context.get_dummy_value()

    return types.void(I64, I64), emit


@intrinsic
def load32(typingctx: Any, address: Any) -> Any:
    """Load the signed 32-bit word at an address."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.sext(builder.load(_pointer(builder, args[0], _H)), _W)

    return I64(I64), emit


@intrinsic
def load_acquire(typingctx: Any, address: Any) -> Any:
    """Load a word before everything that follows."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0], _W), "acquire", 8)

    return I64(I64), emit


@intrinsic
def store_release(typingctx: Any, address: Any, value: Any) -> Any:
    """Store a word after everything that precedes."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0], _W), "release", 8)
        return context.get_dummy_value()

    return types.void(I64, I64), emit


@intrinsic
def exchange(typingctx: Any, address: Any, value: Any) -> Any:
    """Store a word and return the old value, sequentially consistent: also a full fence."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", _pointer(builder, args[0], _W), args[1], "seq_cst")

    return I64(I64, I64), emit


@intrinsic
def add32(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to a 32-bit word atomically and return the old value."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        small = builder.trunc(args[1], _H)
        return builder.sext(
            builder.atomic_rmw("add", _pointer(builder, args[0], _H), small, "seq_cst"), _W
        )

    return I64(I64, I64), emit


@intrinsic
def add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to a word atomically and return the old value."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0], _W), args[1], "seq_cst")

    return I64(I64, I64), emit


@intrinsic
def fence(typingctx: Any) -> Any:
    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def pause(typingctx: Any) -> Any:
    """Mark a spin loop for the core (x86 ``pause``; elsewhere a fence for the compiler only)."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if "x86" in builder.module.triple:
            builder.call(
                builder.module.declare_intrinsic(
                    "llvm.x86.sse2.pause", fnty=ir.FunctionType(ir.VoidType(), [])
                ),
                [],
            )
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def stream_line(typingctx: Any, dst: Any, src: Any) -> Any:
    """Copy 64 bytes past the caches, without reading ``dst`` first; ``dst`` is a multiple of 64.

    A fence must follow before other threads are notified.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        line = ir.VectorType(_W, 8)
        value = builder.load(_pointer(builder, args[1], line))
        value.align = 8
        written = builder.store(value, _pointer(builder, args[0], line))
        written.align = 64
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_H, 1)]))
        return context.get_dummy_value()

    return types.void(I64, I64), emit


@intrinsic
def copy_lines(typingctx: Any, dst: Any, src: Any) -> Any:
    """Copy 256 bytes at addresses of any alignment, all loads before all stores."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        line = ir.VectorType(_W, 8)
        values = []
        for i in range(4):
            place = builder.add(args[1], ir.Constant(_W, 64 * i))
            values.append(builder.load(_pointer(builder, place, line)))
            values[-1].align = 1
        for i, value in enumerate(values):
            place = builder.add(args[0], ir.Constant(_W, 64 * i))
            builder.store(value, _pointer(builder, place, line)).align = 1
        return context.get_dummy_value()

    return types.void(I64, I64), emit


@intrinsic
def any_of_256_bytes(typingctx: Any, address: Any) -> Any:
    """Return a number that is not zero if any bit of the 256 bytes at an address is set."""
    # A loop over words was half as fast: 3.7 against 7.2 GB/s on a loaded machine, one run.

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        line = ir.VectorType(_W, 8)
        total = None
        for offset in range(0, 256, 64):
            at = builder.add(args[0], ir.Constant(_W, offset))
            value = builder.load(_pointer(builder, at, line))
            value.align = 1
            total = value if total is None else builder.or_(total, value)
        # A comparison is one instruction on vectors; a reduction is a chain of shuffles.
        held = builder.icmp_unsigned("!=", total, ir.Constant(line, None))
        return builder.zext(builder.bitcast(held, ir.IntType(8)), _W)

    return I64(I64), emit


@intrinsic
def call4(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Call the C function ``int64 f(int64, int64, int64, int64)`` at an address."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.call(_pointer(builder, args[0], ir.FunctionType(_W, [_W] * 4)), args[1:])

    return I64(I64, I64, I64, I64, I64), emit


@intrinsic
def call6(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    """Call the C function at an address with six int64s; it may take fewer."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.call(_pointer(builder, args[0], ir.FunctionType(_W, [_W] * 6)), args[1:])

    return I64(I64, I64, I64, I64, I64, I64, I64), emit


@intrinsic
def store32(typingctx: Any, address: Any, value: Any) -> Any:
    """Store the lower half of a word."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(builder.trunc(args[1], _H), _pointer(builder, args[0], _H), align=1)
        return context.get_dummy_value()

    return types.void(I64, I64), emit


@intrinsic
def load8(typingctx: Any, address: Any) -> Any:
    """Load an unsigned byte."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.zext(builder.load(_pointer(builder, args[0], _B)), _W)

    return I64(I64), emit


@intrinsic
def store8(typingctx: Any, address: Any, value: Any) -> Any:
    """Store the lowest byte of a word."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(builder.trunc(args[1], _B), _pointer(builder, args[0], _B))
        return context.get_dummy_value()

    return types.void(I64, I64), emit


@intrinsic
def load_unaligned(typingctx: Any, address: Any) -> Any:
    """Load a word at any address."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], _W), align=1)

    return I64(I64), emit


@intrinsic
def store_unaligned(typingctx: Any, address: Any, value: Any) -> Any:
    """Store a word at any address."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0], _W), align=1)
        return context.get_dummy_value()

    return types.void(I64, I64), emit


# numbers of system calls (arch/*/entry/syscalls) and their arguments (linux/futex.h,
# linux/membarrier.h)
SYS_FUTEX, SYS_MEMBARRIER = (98, 283) if platform.machine() == "aarch64" else (202, 324)
FUTEX_WAIT, FUTEX_WAKE = 0, 1
MEMBARRIER_GLOBAL_EXPEDITED = 2


def _external(symbol: str, result: Any, *arguments: Any) -> Any:
    return types.ExternalFunction(symbol, result(*arguments))


# libc
memcpy = _external("memcpy", I64, I64, I64, I64)
memmove = _external("memmove", I64, I64, I64, I64)
sched_yield = _external("sched_yield", I32)
sched_getcpu = _external("sched_getcpu", I32)
sched_getaffinity = _external("sched_getaffinity", I32, I32, I64, I64)
sched_setaffinity = _external("sched_setaffinity", I32, I32, I64, I64)
clock_gettime = _external("clock_gettime", I32, I32, I64)
process_vm_readv = _external("process_vm_readv", I64, I64, I64, I64, I64, I64, I64)
process_vm_writev = _external("process_vm_writev", I64, I64, I64, I64, I64, I64, I64)
libc_write = _external("write", I64, I32, I64, I64)
errno_location = _external("__errno_location", I64)
syscall = _external("syscall", I64, I64, I64, I64, I64, I64, I64, I64)
# the C interface of Python
PyLong_FromLong = _external("PyLong_FromLong", I64, I64)
PyLong_AsLong = _external("PyLong_AsLong", I64, I64)
PyList_Append = _external("PyList_Append", I32, I64, I64)
PyList_Size = _external("PyList_Size", I64, I64)
PyList_GetItem = _external("PyList_GetItem", I64, I64, I64)
PyTuple_Size = _external("PyTuple_Size", I64, I64)
PyTuple_GetItem = _external("PyTuple_GetItem", I64, I64, I64)
PyTuple_New = _external("PyTuple_New", I64, I64)
PyType_GenericAlloc = _external("PyType_GenericAlloc", I64, I64, I64)
PyTuple_SetItem = _external("PyTuple_SetItem", I32, I64, I64, I64)
PyList_SetSlice = _external("PyList_SetSlice", I32, I64, I64, I64, I64)
PyObject_Vectorcall = _external("PyObject_Vectorcall", I64, I64, I64, I64, I64)
PyThreadState_Get = _external("PyThreadState_Get", I64)
PyThreadState_GetID = _external("PyThreadState_GetID", I64, I64)
PyObject_VectorcallMethod = _external("PyObject_VectorcallMethod", I64, I64, I64, I64, I64)
PyDict_GetItem = _external("PyDict_GetItem", I64, I64, I64)
PyCapsule_IsValid = _external("PyCapsule_IsValid", I32, I64, I64)
PyCapsule_GetPointer = _external("PyCapsule_GetPointer", I64, I64, I64)
PyErr_Occurred = _external("PyErr_Occurred", I64)
PyErr_ExceptionMatches = _external("PyErr_ExceptionMatches", I32, I64)
PyBytes_FromStringAndSize = _external("PyBytes_FromStringAndSize", I64, I64, I64)
PyBytes_AsString = _external("PyBytes_AsString", I64, I64)
PyBytes_Size = _external("PyBytes_Size", I64, I64)
PyObject_GetAttr = _external("PyObject_GetAttr", I64, I64, I64)
Py_IncRef = _external("Py_IncRef", types.void, I64)
Py_DecRef = _external("Py_DecRef", types.void, I64)
PyEval_SaveThread = _external("PyEval_SaveThread", I64)
PyErr_CheckSignals = _external("PyErr_CheckSignals", I32)
PyErr_Fetch = _external("PyErr_Fetch", types.void, I64, I64, I64)
PyErr_Clear = _external("PyErr_Clear", types.void)
PyEval_RestoreThread = _external("PyEval_RestoreThread", types.void, I64)
