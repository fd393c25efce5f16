"""Compiled reductions against NumPy: every type, operator and number of sources, unaligned memory,
the result over one of the sources.
"""

from __future__ import annotations

import numpy as np
import pytest

from miraccl import DType, PreMulSum, RedOp
from miraccl.executor.cpu.context import call_kernel, fold_kernel, scale_kernel
from miraccl.executor.cpu.kernels.layout import FOLD_BLOCK
from tests.runtime import reference as ref

COUNTS = (0, 1, 7, 64, FOLD_BLOCK - 1, FOLD_BLOCK, FOLD_BLOCK + 1, 2 * FOLD_BLOCK + 5)
NO_SIGN = (RedOp.MIN, RedOp.MAX)  # of two zeros either may be the smaller


class Memory:
    """Arrays at odd addresses with guard bytes on both sides."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._kept: list[tuple[np.ndarray, int, int]] = []

    def place(self, values: np.ndarray) -> tuple[int, np.ndarray]:
        """(address, bytes of the copy)"""
        start = 32 + int(self._rng.integers(0, 17))
        raw = np.full(start + values.nbytes + 48, 0x5A, np.uint8)
        raw[start : start + values.nbytes] = values.view(np.uint8).reshape(-1)
        self._kept.append((raw, start, values.nbytes))
        return int(raw.ctypes.data) + start, raw[start : start + values.nbytes]

    def check(self) -> None:
        for raw, start, nbytes in self._kept:
            assert (raw[:start] == 0x5A).all()
            assert (raw[start + nbytes :] == 0x5A).all()


def fold(
    dtype: DType, op: RedOp, arrays: list[np.ndarray], over: int | None, rng: np.random.Generator
) -> np.ndarray:
    """The result of the kernel; ``over`` is the source that it overwrites."""
    memory = Memory(rng)
    places = [memory.place(a) for a in arrays]
    target, result = places[over] if over is not None else memory.place(np.zeros_like(arrays[0]))
    keep = np.zeros(FOLD_BLOCK + 8, np.int64)
    keep[FOLD_BLOCK:] = 77
    sources = np.array([keep.ctypes.data, *(address for address, _ in places)], np.int64)
    call_kernel(
        fold_kernel(dtype, op), target, int(sources.ctypes.data), len(arrays), arrays[0].size
    )
    memory.check()
    assert (keep[FOLD_BLOCK:] == 77).all()
    for number, (array, (_, placed)) in enumerate(zip(arrays, places)):
        if number != over:
            assert (placed == array.view(np.uint8)).all(), "a source was written"
    return result.copy().view(ref.DTYPES[dtype])


@pytest.mark.parametrize("op", ref.OPERATORS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.label)
def test_fold(dtype: DType, op: RedOp) -> None:
    if op not in ref.compiled_operators(dtype):
        pytest.skip("a kernel takes a second to compile: TEST_SLOW=1")
    rng = np.random.default_rng([dtype, op])
    for k in (1, 2, 3, 5, 9):
        for count in COUNTS:
            arrays = [ref.wild(rng, dtype, count) for _ in range(k)]
            want = ref.reduce_arrays(arrays, op)
            for over in (None, 0, k - 1, k // 2):
                got = fold(dtype, op, arrays, over, rng)
                wrong = ref.differing(got, want, zeros_alike=op in NO_SIGN)
                assert wrong.size == 0, (
                    k,
                    count,
                    over,
                    int(wrong[0]),
                    [a[wrong[0]] for a in arrays],
                    got[wrong[0]],
                    want[wrong[0]],
                )


@pytest.mark.parametrize(
    "dtype",
    [DType.FLOAT8_E4M3, DType.FLOAT8_E5M2, DType.FLOAT16, DType.BFLOAT16],
    ids=lambda d: d.label,
)
def test_every_pair_of_small_floats(dtype: DType) -> None:
    """All sums and products of two 8-bit floats; for 16-bit floats all values against some."""
    if dtype.itemsize == 1:
        values = np.arange(256, dtype=np.uint8).view(ref.DTYPES[dtype])
        a, b = np.repeat(values, 256), np.tile(values, 256)
    else:
        values = np.arange(1 << 16, dtype=np.uint16).view(ref.DTYPES[dtype])
        a, b = np.tile(values, 4), np.repeat(values[[1, 0x3C01, 0x7BFF, 0xFC00]], 1 << 16)
    rng = np.random.default_rng(0)
    for op in (RedOp.SUM, RedOp.PROD, RedOp.AVG):
        assert (
            ref.differing(fold(dtype, op, [a, b], None, rng), ref.reduce_arrays([a, b], op)).size
            == 0
        )


@pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.label)
def test_scale(dtype: DType) -> None:
    """Times a scalar (pre-multiplied sum) and divided by a number (average), in place and not."""
    rng = np.random.default_rng(dtype)
    values = ref.wild(rng, dtype, 2000)
    # of 64 bits: no float64
    largest = 0 if dtype.is_float else int(np.iinfo(ref.DTYPES[dtype]).max)
    for scalar in (0, 1, 3, largest) if not dtype.is_float else (0.0, 0.37, -2.5):
        for in_place in (False, True):
            memory = Memory(rng)
            source, _ = memory.place(values)
            target, result = (
                (source, memory._kept[0][0][memory._kept[0][1] :][: values.nbytes])
                if in_place
                else memory.place(values * 0)
            )
            factor = np.array([scalar], np.float64 if dtype.is_float else ref.DTYPES[dtype])
            call_kernel(
                scale_kernel(dtype, False), target, source, int(factor.ctypes.data), values.size
            )
            memory.check()
            want = ref.reduce_arrays([values], PreMulSum(scalar), [scalar])
            assert ref.differing(result.copy().view(ref.DTYPES[dtype]), want).size == 0
    for divisor in (1, 2, 7):
        memory = Memory(rng)
        target, result = memory.place(values)
        call_kernel(scale_kernel(dtype, True), target, target, divisor, values.size)
        memory.check()
        with np.errstate(all="ignore"):
            if dtype.is_float:
                wide = np.float32 if dtype in ref.SMALL_FLOATS else ref.DTYPES[dtype]
                want = (values.astype(wide) / np.dtype(wide).type(divisor)).astype(values.dtype)
            else:
                want = np.array(
                    [abs(int(v)) // divisor * (-1 if int(v) < 0 else 1) for v in values],
                    values.dtype,
                )
        assert ref.differing(result.copy().view(ref.DTYPES[dtype]), want).size == 0
