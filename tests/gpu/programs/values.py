"""Values of programs, and the bounds within which their sums are exact.

Reduced values are small enough for sums that are exact in their type in every order, so all
algorithms give the same bits. Other values have arbitrary bit patterns.
"""

from __future__ import annotations

import functools

import numpy as np

from miraccl.types import DType
from tests.runtime import reference as ref

POOL = 1 << 18
KINDS = ("wild", "tame", "unit")
_TAME = {
    DType.FLOAT64: 1000,
    DType.FLOAT32: 1000,
    DType.FLOAT16: 20,
    DType.BFLOAT16: 4,
    DType.FLOAT8_E4M3: 1,
    DType.FLOAT8_E5M2: 1,
}
#: Largest n for which all whole numbers up to n are values of the type.
_EXACT = {
    DType.FLOAT64: 1 << 53,
    DType.FLOAT32: 1 << 24,
    DType.FLOAT16: 1 << 11,
    DType.BFLOAT16: 1 << 8,
    DType.FLOAT8_E4M3: 1 << 4,
    DType.FLOAT8_E5M2: 1 << 3,
}


def exact(dtype: DType, bound: int) -> bool:
    """Return True if integers up to this magnitude are values of the type; integer types wrap
    around.
    """
    return not dtype.is_float or bound <= _EXACT[dtype]


def bound_of(dtype: DType, kind: str) -> int | None:
    """Return the magnitude bound of a kind of values; None: unbounded."""
    if not dtype.is_float:
        return 0
    return {"wild": None, "tame": _TAME[dtype], "unit": 1}[kind]


@functools.cache
def pool(dtype: DType, kind: str) -> np.ndarray:
    """Return the constant pool from which values are taken."""
    rng = np.random.default_rng([int(dtype), KINDS.index(kind)])
    if kind == "wild" or not dtype.is_float:
        return ref.wild(rng, dtype, POOL)
    bound = bound_of(dtype, kind)
    assert bound is not None
    return rng.integers(-bound, bound + 1, POOL).astype(np.float32).astype(ref.DTYPES[dtype])


def parts(count: int, rank: int, salt: int) -> list[tuple[int, int, int]]:
    """Yield (position in the buffer, position in the pool, count) that fill ``count`` elements of a
    rank.
    """
    at = (salt * 7919 + rank * 104729) % POOL
    found = []
    done = 0
    while done < count:
        size = min(count - done, POOL - at)
        found.append((done, at, size))
        done += size
        at = (at + size + 3 * rank + 1) % POOL
    return found
