"""Reference results of each collective in NumPy, from its definition, without the package's own
arithmetic.

16-bit and 8-bit floats are added in float32 in rank order and rounded once; integers wrap around;
averages of integers are truncated towards zero; NaN propagates through min and max.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from miraccl import DType, PreMulSum, RedOp

Array = np.ndarray

DTYPES: dict[DType, np.dtype] = {
    DType.INT8: np.dtype(np.int8),
    DType.UINT8: np.dtype(np.uint8),
    DType.INT32: np.dtype(np.int32),
    DType.UINT32: np.dtype(np.uint32),
    DType.INT64: np.dtype(np.int64),
    DType.UINT64: np.dtype(np.uint64),
    DType.FLOAT16: np.dtype(np.float16),
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT64: np.dtype(np.float64),
    DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    DType.FLOAT8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.FLOAT8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
}
SMALL_FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8_E4M3, DType.FLOAT8_E5M2)
OPERATORS = (RedOp.SUM, RedOp.PROD, RedOp.MIN, RedOp.MAX, RedOp.AVG)
#: Operators beside the sum that tests compile, at a second of processor time each: all for one type
#: and each for another kind of arithmetic. TEST_SLOW=1 compiles all.
_COMPILED = {
    DType.FLOAT32: OPERATORS,
    DType.BFLOAT16: (RedOp.PROD, RedOp.MAX, RedOp.AVG),
    DType.FLOAT16: (RedOp.PROD, RedOp.AVG),
    DType.FLOAT8_E4M3: (RedOp.PROD, RedOp.MIN, RedOp.AVG),
    DType.FLOAT8_E5M2: (RedOp.PROD, RedOp.AVG),
    DType.INT32: (RedOp.MAX, RedOp.AVG),
    DType.UINT8: (RedOp.PROD, RedOp.MIN),
}


def compiled_operators(dtype: DType) -> tuple[RedOp, ...]:
    """Return the operators whose kernels tests run for a type."""
    if os.environ.get("TEST_SLOW"):
        return OPERATORS
    return tuple(dict.fromkeys((RedOp.SUM, *_COMPILED.get(dtype, ()))))


def wild(rng: np.random.Generator, dtype: DType, count: int) -> Array:
    """Return arbitrary bit patterns: overflowing integers, infinities, NaNs, signed zeros,
    subnormals.
    """
    return np.frombuffer(rng.bytes(count * dtype.itemsize), DTYPES[dtype]).copy()


def tame(rng: np.random.Generator, dtype: DType, count: int) -> Array:
    """Return -1, 0 and 1 (unsigned: 0 and 1), mostly 0: exact in every type and order."""
    low = 0 if dtype in (DType.UINT8, DType.UINT32, DType.UINT64) else -1
    values = rng.integers(low, 2, count) * (rng.random(count) < 0.4)
    return values.astype(np.float32).astype(DTYPES[dtype])


def reduce_arrays(
    arrays: Sequence[Array], op: RedOp | PreMulSum, scalars: Sequence[float] = ()
) -> Array:
    """Reduce the arrays of all ranks in rank order."""
    dtype = arrays[0].dtype
    small = any(dtype == DTYPES[d] for d in SMALL_FLOATS)
    wide = np.dtype(np.float32) if small else dtype
    with np.errstate(all="ignore"):
        parts = [a.astype(wide) for a in arrays]
        if isinstance(op, PreMulSum):
            parts = [(p * wide.type(s)).astype(dtype).astype(wide) for p, s in zip(parts, scalars)]
        total = parts[0].copy()
        for part in parts[1:]:
            if op is RedOp.PROD:
                total = total * part
            elif op is RedOp.MIN:
                total = np.minimum(total, part)
            elif op is RedOp.MAX:
                total = np.maximum(total, part)
            else:
                total = total + part
        if op is RedOp.AVG:
            n = len(arrays)
            if wide.kind in "iu":
                share, rest = np.divmod(
                    total, wide.type(n)
                )  # rounded down, and up again where that was away from zero
                total = share + ((total < 0) & (rest != 0)).astype(wide)
            else:
                total = total / wide.type(n)
        return total.astype(dtype)


def same(a: Array, b: Array) -> bool:
    """Return True if arrays are equal bit by bit, except for payload and sign of NaNs."""
    return bool(differing(a, b).size == 0)


def differing(a: Array, b: Array, zeros_alike: bool = False) -> Any:
    """Return the indices of differing elements; with ``zeros_alike`` -0 equals 0, as in a
    minimum.
    """
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    assert a.size == b.size, (a.shape, b.shape)
    flat_a, flat_b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    bits = np.dtype(f"u{a.dtype.itemsize}")
    unequal = flat_a.view(bits) != flat_b.view(bits)
    if a.dtype.kind not in "iu":
        with np.errstate(all="ignore"):
            nans = np.isnan(flat_a.astype(np.float64)) & np.isnan(flat_b.astype(np.float64))
        unequal &= ~nans
        if zeros_alike:
            unequal &= (flat_a.astype(np.float64) != 0) | (flat_b.astype(np.float64) != 0)
    return np.flatnonzero(unequal)
