"""Reference reduction in numpy: the meaning of (+) for each data type and operator.

Every executor must match these rules:

- 16- and 8-bit floats are widened to float32, folded from left to right, and rounded once when the
  step stores or sends.
- Other types are folded in their own type from left to right; integers wrap around.
- ``AVG`` divides after the last of the ``nranks`` contributions has been added and before rounding;
  integers are truncated towards zero.
- ``PREMUL_SUM`` first multiplies a rank's input by the rank's scalar (in the accumulator type,
  rounded to the data type).
- ``MIN`` and ``MAX`` propagate NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from miraccl.errors import InvalidUsage
from miraccl.types import DType, RedOp

Array = npt.NDArray[Any]

NUMPY_DTYPE: dict[DType, np.dtype[Any]] = {
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
DTYPE_OF = {dtype: code for code, dtype in NUMPY_DTYPE.items()}

_BINARY = {
    RedOp.SUM: np.add,
    RedOp.PROD: np.multiply,
    RedOp.MIN: np.minimum,
    RedOp.MAX: np.maximum,
    RedOp.AVG: np.add,
    RedOp.PREMUL_SUM: np.add,
}


def dtype_of(array: Array) -> DType:
    """Return the ``DType`` of a numpy array; raise ``InvalidUsage`` for an unsupported type."""
    try:
        return DTYPE_OF[array.dtype]
    except KeyError:
        raise InvalidUsage(
            f"cannot communicate arrays of {array.dtype}: unsupported data type"
        ) from None


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which elements of ``dtype`` are folded."""
    return np.dtype(np.float32) if DTYPE_OF[dtype].accumulates_in_float32 else dtype


def divide_towards_zero(array: Array, divisor: int) -> Array:
    """Divide integers with truncation towards zero."""
    quotient = array // array.dtype.type(divisor)
    inexact = array % array.dtype.type(divisor) != 0
    return np.asarray(quotient + ((array < 0) & inexact), dtype=array.dtype)


def fold(values: Sequence[Array], op: RedOp, divisor: int | None = None) -> Array:
    """Left-fold ``values`` with ``op``, divide by ``divisor`` if given, and round once."""
    dtype = values[0].dtype
    wide = accumulator(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        total: Array = values[0].astype(wide)
        for value in values[1:]:
            total = _BINARY[op](total, value.astype(wide))
        if divisor is not None:
            total = (
                divide_towards_zero(total, divisor)
                if np.issubdtype(wide, np.integer)
                else total / wide.type(divisor)
            )
        return total.astype(dtype)


def premultiply(value: Array, scalar: float) -> Array:
    """Return ``scalar * value`` as ``PREMUL_SUM`` applies it to a rank's input."""
    wide = accumulator(value.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(value.astype(wide) * wide.type(scalar)).astype(value.dtype)


def reference(inputs: Sequence[Array], op: RedOp, scalars: Sequence[float] | None = None) -> Array:
    """Reduce one array per rank in rank order and round once."""
    if op is RedOp.PREMUL_SUM:
        if scalars is None:
            raise InvalidUsage("PREMUL_SUM needs one scalar per rank")
        inputs = [premultiply(array, scalar) for array, scalar in zip(inputs, scalars, strict=True)]
    return fold(inputs, op, len(inputs) if op is RedOp.AVG else None)
