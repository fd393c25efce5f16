"""Reduction kernels: ``dst[i] = s0[i] (+) s1[i] (+) ...`` for every data type and operator.

One C function per (dtype, op), compiled at its first use: ``int64 fold(dst, sources, k, n)``.
``sources`` is an array of words: the address of ``FOLD_BLOCK`` accumulators, then ``k`` addresses.
``dst`` may be one of the sources. Additions happen in the order of the sources. 16- and 8-bit
floats are widened to float32, summed, and rounded once (to nearest, ties to even). ``avg`` divides
the complete sum by ``k``: it is used only if all ranks are folded at once.

LLVM vectorises a loop only if it can prove or check that the pointers do not alias, which fails if
``dst`` is a source; hence the separate loops for that case, in which both are one pointer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from miraccl.executor.cpu.kernels.layout import FOLD_BLOCK
from miraccl.native.intrinsics import inline, load
from miraccl.types import DType, RedOp


def _element(
    storage: Any,
    result: Any,
    widen: Callable[..., Any] | None = None,
    narrow: Callable[..., Any] | None = None,
) -> Any:
    """Return (get, put) for elements stored as LLVM type ``storage``, computed as Numba type
    ``result``.
    """

    @intrinsic
    def get(typingctx: Any, base: Any, index: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = builder.load(
                builder.gep(builder.inttoptr(args[0], storage.as_pointer()), [args[1]])
            )
            value.align = 1
            return widen(builder, value) if widen else value

        return result(types.int64, types.int64), emit

    @intrinsic
    def put(typingctx: Any, base: Any, index: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            stored = narrow(builder, args[2]) if narrow else args[2]
            instruction = builder.store(
                stored, builder.gep(builder.inttoptr(args[0], storage.as_pointer()), [args[1]])
            )
            instruction.align = 1
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, result), emit

    return get, put


_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()


def _const(value: int, kind: Any = _I32) -> Any:
    return ir.Constant(kind, value)


def _bf16_widen(b: Any, v: Any) -> Any:
    return b.bitcast(b.shl(b.zext(v, _I32), _const(16)), _F32)


def _bf16_narrow(b: Any, v: Any) -> Any:
    bits = b.bitcast(v, _I32)
    tie = b.and_(b.lshr(bits, _const(16)), _const(1))
    rounded = b.lshr(b.add(bits, b.add(tie, _const(0x7FFF))), _const(16))
    nan = b.fcmp_unordered("uno", v, v)
    quiet = b.or_(b.lshr(bits, _const(16)), _const(0x40))
    return b.trunc(b.select(nan, quiet, rounded), _I16)


def _fp8_widen(exponent: int, mantissa: int, finite: bool) -> Callable[..., Any]:
    """Return the conversion from an 8-bit float to float32.

    The payload is placed as in a float32 and multiplied by 2^(127 - bias), which also converts
    subnormals.
    """
    bias = (1 << (exponent - 1)) - 1
    shift = 23 - mantissa

    def widen(b: Any, v: Any) -> Any:
        byte = b.zext(v, _I32)
        sign = b.shl(b.and_(byte, _const(0x80)), _const(24))
        magnitude = b.and_(byte, _const(0x7F))
        scaled = b.fmul(
            b.bitcast(b.shl(magnitude, _const(shift)), _F32),
            ir.Constant(_F32, float(2.0 ** (127 - bias))),
        )
        # e4m3fn: one NaN code; e5m2: infinity and NaNs from here on
        top = 0x7F if finite else ((1 << exponent) - 1) << mantissa
        special = b.icmp_unsigned("==" if finite else ">=", magnitude, _const(top))
        # e5m2 keeps infinity (mantissa 0); every other special is NaN
        payload = (
            _const(0x7FC00000)
            if finite
            else b.or_(_const(0x7F800000), b.shl(b.and_(magnitude, _const(3)), _const(21)))
        )
        bits = b.select(special, payload, b.bitcast(scaled, _I32))
        return b.bitcast(b.or_(bits, sign), _F32)

    return widen


def _fp8_narrow(exponent: int, mantissa: int, finite: bool) -> Callable[..., Any]:
    """Return the conversion from float32 to an 8-bit float, to nearest even.

    Beyond the largest value the result is NaN (e4m3fn) or infinity (e5m2), as in ml_dtypes.
    """
    bias = (1 << (exponent - 1)) - 1
    shift = 23 - mantissa
    # exponent field of the float32 equal to the smallest normal number of the target
    smallest = 127 - bias + 1

    def narrow(b: Any, v: Any) -> Any:
        bits = b.bitcast(v, _I32)
        sign = b.lshr(b.and_(bits, _const(-0x80000000)), _const(24))
        magnitude = b.and_(bits, _const(0x7FFFFFFF))
        # normal: drop the low mantissa bits with rounding, then move the exponent
        tie = b.and_(b.lshr(magnitude, _const(shift)), _const(1))
        rounded = b.add(magnitude, b.add(tie, _const((1 << (shift - 1)) - 1)))
        normal = b.sub(b.lshr(rounded, _const(shift)), _const((127 - bias) << mantissa))
        # subnormal: adding a magic number makes the processor round at the right bit
        magic = (smallest + (23 - mantissa)) << 23
        small = b.sub(
            b.bitcast(b.fadd(b.bitcast(magnitude, _F32), b.bitcast(_const(magic), _F32)), _I32),
            _const(magic),
        )
        code = b.select(b.icmp_unsigned("<", magnitude, _const(smallest << 23)), small, normal)
        limit = 0x7E if finite else (((1 << exponent) - 1) << mantissa) - 1
        overflow = _const(0x7F if finite else ((1 << exponent) - 1) << mantissa)
        code = b.select(b.icmp_unsigned(">", code, _const(limit)), overflow, code)
        huge = b.icmp_unsigned(">=", magnitude, _const(0x7F800000))
        code = b.select(huge, overflow, code)
        nan = b.icmp_unsigned(">", magnitude, _const(0x7F800000))
        code = b.select(nan, _const(0x7F if finite else 0x7E), code)
        return b.trunc(b.or_(code, sign), _I8)

    return narrow


_HALF = ir.HalfType()
_ACCESS: dict[DType, Any] = {
    DType.INT8: _element(_I8, types.int8),
    DType.UINT8: _element(_I8, types.uint8),
    DType.INT32: _element(_I32, types.int32),
    DType.UINT32: _element(_I32, types.uint32),
    DType.INT64: _element(_I64, types.int64),
    DType.UINT64: _element(_I64, types.uint64),
    DType.FLOAT16: _element(
        _HALF, types.float32, lambda b, v: b.fpext(v, _F32), lambda b, v: b.fptrunc(v, _HALF)
    ),
    DType.FLOAT32: _element(_F32, types.float32),
    DType.FLOAT64: _element(ir.DoubleType(), types.float64),
    DType.BFLOAT16: _element(_I16, types.float32, _bf16_widen, _bf16_narrow),
    DType.FLOAT8_E4M3: _element(
        _I8, types.float32, _fp8_widen(4, 3, True), _fp8_narrow(4, 3, True)
    ),
    DType.FLOAT8_E5M2: _element(
        _I8, types.float32, _fp8_widen(5, 2, False), _fp8_narrow(5, 2, False)
    ),
}
_COMPUTE = {
    DType.INT8: types.int8,
    DType.UINT8: types.uint8,
    DType.INT32: types.int32,
    DType.UINT32: types.uint32,
    DType.INT64: types.int64,
    DType.UINT64: types.uint64,
    DType.FLOAT64: types.float64,
}


def _combine(op: RedOp, dtype: DType) -> Any:
    """Return the operator on two values of the computing type; min and max propagate NaN as NumPy
    does.
    """
    kind = _COMPUTE.get(dtype, types.float32)
    if op in (RedOp.SUM, RedOp.AVG):
        return inline(lambda a, b: kind(a + b))
    if op is RedOp.PROD:
        return inline(lambda a, b: kind(a * b))
    if op is RedOp.MIN:
        return inline(lambda a, b: b if (b < a) or (b != b) else a)
    return inline(lambda a, b: b if (b > a) or (b != b) else a)


def _divide(dtype: DType) -> Any:
    """Return the division of a sum by the number of ranks."""
    kind = _COMPUTE.get(dtype, types.float32)
    if dtype.is_float:
        return inline(lambda a, k: kind(a / kind(k)))
    if dtype in (DType.INT8, DType.INT32, DType.INT64):
        # towards zero, as C and NCCL's FuncSumPostDiv do
        return inline(
            lambda a, k: kind(-((-types.int64(a)) // k)) if a < 0 else kind(types.int64(a) // k)
        )
    return inline(lambda a, k: kind(types.uint64(a) // types.uint64(k)))


def make_fold(dtype: DType, op: RedOp) -> Any:
    """Return the reduction kernel of a data type and operator."""
    get, put = _ACCESS[dtype]
    keep_get, keep_put = _ACCESS[DType.FLOAT32] if dtype.accumulates_in_float32 else (get, put)
    combine = _combine(op, dtype)
    average = op is RedOp.AVG
    divide = _divide(dtype)

    @inline
    def finish(value: Any, k: int) -> Any:
        if average:
            return divide(value, k)
        return value

    @inline
    def two(dst: int, a: int, b: int, n: int) -> None:
        if dst == a:
            for i in range(n):
                put(dst, i, finish(combine(get(dst, i), get(b, i)), 2))
        elif dst == b:
            for i in range(n):
                put(dst, i, finish(combine(get(a, i), get(dst, i)), 2))
        else:
            for i in range(n):
                put(dst, i, finish(combine(get(a, i), get(b, i)), 2))

    @inline
    def many(dst: int, sources: int, k: int, n: int) -> None:
        keep = load(sources)
        for start in range(0, n, FOLD_BLOCK):
            m = min(FOLD_BLOCK, n - start)
            first = load(sources + 8)
            for i in range(m):
                keep_put(keep, i, get(first, start + i))
            for j in range(1, k):
                other = load(sources + 8 + 8 * j)
                for i in range(m):
                    keep_put(keep, i, combine(keep_get(keep, i), get(other, start + i)))
            for i in range(m):
                put(dst, start + i, finish(keep_get(keep, i), k))

    def fold(dst: int, sources: int, k: int, n: int) -> int:
        if k == 2:
            two(dst, load(sources + 8), load(sources + 16), n)
        else:
            many(dst, sources, k, n)
        return 0

    return fold


def make_scale(dtype: DType, divides: bool) -> Any:
    """Return the kernel ``dst[i] = src[i] * scalar``, or ``dst[i] = src[i] / factor`` for an
    integer.

    The scalar lies at the address ``factor``: a float64 for floats; an element for integers, of
    which float64 cannot hold all.
    """
    get, put = _ACCESS[dtype]
    get_scalar, _ = _ACCESS[DType.FLOAT64 if dtype.is_float else dtype]
    divide = _divide(dtype)
    kind = _COMPUTE.get(dtype, types.float32)

    if divides:

        def over(dst: int, src: int, factor: int, n: int) -> int:
            if dst == src:
                for i in range(n):
                    put(dst, i, divide(get(dst, i), factor))
            else:
                for i in range(n):
                    put(dst, i, divide(get(src, i), factor))
            return 0

        return over

    def times(dst: int, src: int, factor: int, n: int) -> int:
        scalar = kind(get_scalar(factor, 0))
        if dst == src:
            for i in range(n):
                put(dst, i, kind(get(dst, i) * scalar))
        else:
            for i in range(n):
                put(dst, i, kind(get(src, i) * scalar))
        return 0

    return times


COMPILER = "numba"  # elements of many types

#: name -> function; ``fold_float32_sum``, ``times_float32``, ``over_float32``
EXPORTS: dict[str, Any] = {
    f"fold_{dtype.label}_{op.name.lower()}": make_fold(dtype, op)
    for dtype in DType
    for op in RedOp
    if op is not RedOp.PREMUL_SUM
}
EXPORTS.update({f"times_{dtype.label}": make_scale(dtype, False) for dtype in DType})
EXPORTS.update({f"over_{dtype.label}": make_scale(dtype, True) for dtype in DType})
