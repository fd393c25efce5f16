"""Validation of the arguments of operations that are not arrays: operators, types, ranks,
counts.
"""

from __future__ import annotations

import contextlib
import math
from operator import index as to_index
from typing import Any

import numpy as np

from miraccl.errors import InvalidUsage
from miraccl.ops.array_errors import ALLOWED
from miraccl.schedule.reduction import DTYPE_OF, NUMPY_DTYPE, accumulator
from miraccl.types import DType, PreMulSum, RedOp

_SURELY_FINITE = 1e38  # finite in every accumulator type


def resolve_operator(op: Any, dtype: DType, where: str) -> tuple[RedOp, float]:
    """Return (operator, scalar of a ``PreMulSum``, else 1.0).

    The scalar is an int for integer types, since float64 does not represent all of their values.

    Raises:
        InvalidUsage: ``op`` is not an operator, or its scalar is not a value of ``dtype``.
    """
    if isinstance(op, PreMulSum):
        if not dtype.is_float:
            if not _is_integer(op.scalar, dtype):
                raise InvalidUsage(
                    f"{where}: scalar {op.scalar} of PreMulSum is not a value of {dtype.label}"
                )
            return RedOp.PREMUL_SUM, int(op.scalar)
        scalar = float(op.scalar)
        if _SURELY_FINITE < abs(scalar) < math.inf:
            _expect_finite(scalar, dtype, where)
        return RedOp.PREMUL_SUM, scalar
    if isinstance(op, RedOp) and op is not RedOp.PREMUL_SUM:
        return op, 1.0
    names = ", ".join(o.name for o in RedOp if o is not RedOp.PREMUL_SUM)
    raise InvalidUsage(
        f"{where}: op is {op!r}; allowed are miraccl.{names} and miraccl.PreMulSum(scalar)"
    )


def _is_integer(scalar: float, dtype: DType) -> bool:
    limits = np.iinfo(NUMPY_DTYPE[dtype])
    whole = isinstance(scalar, int) or scalar.is_integer()
    return whole and int(limits.min) <= int(scalar) <= int(limits.max)


def _expect_finite(scalar: float, dtype: DType, where: str) -> None:
    """Raise if ``scalar`` overflows the type in which elements of ``dtype`` are accumulated."""
    wide = accumulator(NUMPY_DTYPE[dtype])
    with np.errstate(over="ignore"):
        if np.isfinite(wide.type(scalar)):
            return
    limit = f"{np.finfo(wide).max:.8g}, the largest {wide}, in which {dtype.label} is accumulated"
    raise InvalidUsage(f"{where}: scalar {scalar:g} of PreMulSum exceeds {limit}")


def data_type(value: Any) -> DType:
    """Return the ``DType`` of a ``DType``, its label or a NumPy type."""
    if isinstance(value, str) and value.upper() in DType.__members__:
        return DType[value.upper()]
    if isinstance(value, DType):
        return value
    if value is not None and not isinstance(value, str):
        with contextlib.suppress(TypeError):
            if (code := DTYPE_OF.get(np.dtype(value))) is not None:
                return code
    raise InvalidUsage(f"dtype is {value!r}; allowed are {ALLOWED}")


def peer_rank(value: Any, name: str, nranks: int, where: str) -> int:
    """Return ``value`` as a rank from 0 to ``nranks`` - 1, or raise ``InvalidUsage``."""
    if type(value) is int and 0 <= value < nranks:
        return value  # common case first: GPU calls take fractions of a microsecond
    if (
        isinstance(value, bool)
        or not isinstance(value, int | np.integer)
        or not 0 <= value < nranks
    ):
        raise InvalidUsage(f"{where}: {name} is {value!r}; allowed are the ranks 0 to {nranks - 1}")
    return int(value)


def reject_stream(stream: Any, rank: int, name: str | None = None) -> None:
    """Raise if an operation on CPU memory was given a stream."""
    if stream is not None:
        raise InvalidUsage(
            "stream is given, but the arrays are in CPU memory; streams are for GPU memory",
            rank=rank,
            op=name,
        )


def counts_of(values: Any, name: str, nranks: int, where: str) -> list[int]:
    """Return the element counts, one per rank, of an uneven operation."""
    try:
        if isinstance(values, (dict, set, frozenset)):  # unordered, or ordered by key
            raise TypeError
        counts = [to_index(v) for v in values]
    except TypeError as error:
        raise InvalidUsage(
            f"{where}: {name} must be a list of {nranks} element counts, got {values!r}"
        ) from error
    if len(counts) != nranks or min(counts) < 0:
        raise InvalidUsage(
            f"{where}: {name} must have {nranks} counts of 0 or more, one per rank, got {counts}"
        )
    return counts
