"""Input patterns and the results they must give.

Element ``i`` of rank ``r``'s input is ``table(r)[i % PERIOD]``, so results have the same period and
are compared without computing them in full. ``PERIOD`` is prime, so data at a wrong offset is
detected. Values are chosen such that the result is the same in every order of operations and exact
in the data type: small integers whose sums stay below the first integer that the type cannot
represent, products of powers of two. Only averages over a number of ranks that is not a power of
two round; they are compared in float64 with a tolerance of two units in the last place.

Imports numpy and ``spec`` only; processes of a peer load this file by its path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from miraccl.tools.perf.spec import Case

PERIOD = 4093
#: integers up to here are exact: 2 to the number of significand bits with the hidden one
_EXACT = {
    "float16": 2048,
    "bfloat16": 256,
    "float8_e4m3": 16,
    "float8_e5m2": 8,
    "float32": 1 << 24,
    "float64": 1 << 53,
}
_EXACT_INTEGER = {"int8": 127, "uint8": 255}
_ML_DTYPES = {"bfloat16": "bfloat16", "float8_e4m3": "float8_e4m3fn", "float8_e5m2": "float8_e5m2"}
_SPREAD = 251  # number of distinct values of wide types

Array = np.ndarray[Any, np.dtype[Any]]


def numpy_dtype(name: str) -> Any:
    """Return the numpy type for a name of ``spec.ITEMSIZES``."""
    if name in _ML_DTYPES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, _ML_DTYPES[name]))
    return np.dtype(name)


def premul_scalar(rank: int) -> float:
    """Return the factor of ``rank`` for premul_sum, exact in every type."""
    return float(1 + rank % 2)


def _random(seed: int, rank: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return PERIOD pseudo-random integers by seed and rank.

    Source: splitmix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
    """
    x = np.arange(PERIOD, dtype=np.uint64) + np.uint64((seed * 1009 + rank) * PERIOD + 1)
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def input_table(case: Case, rank: int, seed: int) -> Array:
    """Return one period of the input of ``rank`` as float64.

    Every value is exact in float64 and in the case's type.
    """
    raw = _random(seed, rank)
    limit = _EXACT.get(case.dtype) or _EXACT_INTEGER.get(case.dtype) or 1 << 30
    if case.redop == "prod":
        return _powers_of_two(case, rank, raw)
    if case.redop in ("none", "min", "max"):
        spread = min(_SPREAD, limit)
        return (raw % np.uint64(spread)).astype(np.float64)
    # Sums: every element has at most `terms` ranks that are not zero there, each at most `top`.
    weight = 2 if case.redop == "premul_sum" else 1
    terms = min(case.nranks, limit // weight)
    top = max(1, min(_SPREAD, limit // (weight * terms)))
    lowest = 1 if top > 2 else 0  # a missing contribution of zero would go undetected
    values = (raw % np.uint64(top + 1 - lowest)).astype(np.float64) + lowest
    return np.where(_contributes(case.nranks, rank, terms), values, 0.0)


def _powers_of_two(case: Case, rank: int, raw: Any) -> Array:
    """Return ones, and twos on so few ranks per element that the product is exact in every type."""
    terms = min(case.nranks, 6)
    twos = (raw % np.uint64(2)).astype(np.float64) + 1.0
    return np.where(_contributes(case.nranks, rank, terms), twos, 1.0)


def _contributes(nranks: int, rank: int, terms: int) -> Any:
    """Return a mask of the elements to which ``rank`` is one of at most ``terms`` contributors."""
    groups = -(-nranks // terms)
    return (np.arange(PERIOD) + rank) % groups == 0


def reduced_table(case: Case, seed: int) -> Array:
    """Return one period of the reduction over all ranks, in float64."""
    tables = [input_table(case, rank, seed) for rank in range(case.nranks)]
    if case.redop == "premul_sum":
        tables = [premul_scalar(rank) * table for rank, table in enumerate(tables)]
    stacked = np.stack(tables)
    if case.redop == "prod":
        return np.asarray(stacked.prod(axis=0))
    if case.redop == "min":
        return np.asarray(stacked.min(axis=0))
    if case.redop == "max":
        return np.asarray(stacked.max(axis=0))
    total = np.asarray(stacked.sum(axis=0))
    if case.redop == "avg":
        total = total / case.nranks
        return total if case.dtype in _EXACT else np.asarray(np.trunc(total))
    return total


def fill(array: Array, table: Array, start: int = 0) -> None:
    """Set ``array[i] = table[(start + i) % PERIOD]``."""
    period = np.roll(table, -(start % PERIOD)).astype(array.dtype)
    whole = array.size // PERIOD * PERIOD
    array[:whole].reshape(-1, PERIOD)[:] = period
    array[whole:] = period[: array.size - whole]


def fill_input(case: Case, array: Array, rank: int, seed: int) -> None:
    """Write the input of ``rank``; ``array`` is the whole input of the operation."""
    fill(array, input_table(case, rank, seed))


@dataclass(frozen=True, kw_only=True)
class ExpectedSegment:
    """Expected content of ``length`` output elements from ``start``: ``table`` from element
    ``phase``.
    """

    start: int
    length: int
    table: Array
    phase: int


def poison(array: Array) -> None:
    """Fill with bytes 0xFF (NaN, -1, or 255 for uint8), which are never a correct result."""
    array.view(np.uint8)[:] = 0xFF


def fill_neutral(case: Case, array: Array) -> None:
    """Fill with the neutral element.

    Repeated in-place operations then neither overflow nor become subnormal.
    """
    array[:] = np.ones(1, array.dtype) if case.redop == "prod" else np.zeros(1, array.dtype)


def expected_output(case: Case, rank: int, seed: int) -> list[ExpectedSegment]:
    """Return the expected output of ``rank``; empty if the operation gives it none."""
    n, count = case.nranks, case.count
    if case.op in ("all_reduce", "reduce"):
        wanted = case.op == "all_reduce" or rank == case.root
        return (
            [ExpectedSegment(start=0, length=count, table=reduced_table(case, seed), phase=0)]
            if wanted
            else []
        )
    if case.op == "reduce_scatter":
        return [
            ExpectedSegment(
                start=0, length=count, table=reduced_table(case, seed), phase=rank * count
            )
        ]
    if case.op in ("all_gather", "gather"):
        if case.op == "gather" and rank != case.root:
            return []
        return [
            ExpectedSegment(
                start=r * count, length=count, table=input_table(case, r, seed), phase=0
            )
            for r in range(n)
        ]
    if case.op == "all_to_all":
        return [
            ExpectedSegment(
                start=r * count, length=count, table=input_table(case, r, seed), phase=rank * count
            )
            for r in range(n)
        ]
    if case.op == "scatter":
        return [
            ExpectedSegment(
                start=0, length=count, table=input_table(case, case.root, seed), phase=rank * count
            )
        ]
    if case.op == "barrier":
        return []
    source = case.root if case.op == "broadcast" else (rank - 1) % n
    return [ExpectedSegment(start=0, length=count, table=input_table(case, source, seed), phase=0)]


def count_wrong(case: Case, output: Array, segments: list[ExpectedSegment]) -> int:
    """Count the elements of ``output`` that differ from the expected segments."""
    tolerance = relative_tolerance(case)
    return sum(
        _count_wrong_in(output[s.start : s.start + s.length], s, tolerance) for s in segments
    )


def relative_tolerance(case: Case) -> float:
    """Return the allowed relative error; 0 requires equal bits."""
    if case.redop != "avg" or case.dtype not in _EXACT or case.nranks & (case.nranks - 1) == 0:
        return 0.0
    # Two units in the last place; the spacing at 1.0 is 2 / _EXACT.
    return 2.0 / (_EXACT[case.dtype] / 2)


def _count_wrong_in(actual: Array, segment: ExpectedSegment, tolerance: float) -> int:
    reference = np.roll(segment.table, -(segment.phase % PERIOD))
    whole = actual.size // PERIOD * PERIOD
    wrong = 0
    step = PERIOD * 64  # bounds the memory of the comparison
    for start in range(0, whole, step):
        rows = actual[start : min(start + step, whole)].reshape(-1, PERIOD)
        wrong += _count_differing(rows, reference, tolerance)
    return wrong + _count_differing(actual[whole:], reference[: actual.size - whole], tolerance)


def _count_differing(actual: Array, reference: Array, tolerance: float) -> int:
    rounded = reference.astype(actual.dtype)
    if not tolerance:
        # Compare bits, so that NaN counts as wrong; no expected result is a negative zero.
        bits = np.dtype(f"u{actual.itemsize}")
        return int(np.count_nonzero(actual.view(bits) != rounded.view(bits)))
    distance = np.abs(actual.astype(np.float64) - reference)
    return int(np.count_nonzero(~(distance <= tolerance * np.abs(reference))))
