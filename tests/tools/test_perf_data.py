"""Inputs and expected results of ``miraccl perf``: what it calls right is right, and one wrong element is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from miraccl.tools.perf import data
from miraccl.tools.perf.engine import place_buffers
from miraccl.tools.perf.spec import ITEMSIZES, OPERATIONS, REDOPS, REDUCING, Case, build_case

SEED = 3


DATA_OPERATIONS = [op for op in OPERATIONS if op != "barrier"]


def inputs_of(case: Case) -> list[np.ndarray]:
    """The input of every rank in float64, made by the function that the measurement uses."""
    arrays = []
    for rank in range(case.nranks):
        array = np.zeros(case.input_count, data.numpy_dtype(case.dtype))
        data.fill_input(case, array, rank, SEED)
        arrays.append(array.astype(np.float64))
    return arrays


def obvious_result(case: Case, rank: int) -> np.ndarray:
    """What the collective means, written as plainly as possible, in float64."""
    x, n, count = inputs_of(case), case.nranks, case.count
    if case.op in REDUCING:
        scaled = [
            data.premul_scalar(r) * a if case.redop == "premul_sum" else a for r, a in enumerate(x)
        ]
        fold: Any = {"prod": np.prod, "min": np.min, "max": np.max}.get(case.redop, np.sum)
        total = fold(np.stack(scaled), axis=0)
        if case.redop == "avg":
            total = total / n
            total = (
                np.trunc(total)
                if np.issubdtype(data.numpy_dtype(case.dtype), np.integer)
                else total
            )
        return np.asarray(
            total[rank * count : (rank + 1) * count] if case.op == "reduce_scatter" else total
        )
    if case.op in ("all_gather", "gather"):
        return np.concatenate(x)
    if case.op == "all_to_all":
        return np.concatenate([a[rank * count : (rank + 1) * count] for a in x])
    if case.op == "scatter":
        return x[case.root][rank * count : (rank + 1) * count]
    return x[case.root] if case.op == "broadcast" else x[(rank - 1) % n]


def output_of(case: Case, rank: int) -> np.ndarray:
    has_output = case.op not in ("gather", "reduce") or rank == case.root
    result = obvious_result(case, rank) if has_output else np.zeros(0)
    return result.astype(data.numpy_dtype(case.dtype))


@pytest.mark.parametrize("op", DATA_OPERATIONS)
@pytest.mark.parametrize("nranks", [1, 3, 4])
def test_right_results_have_no_wrong_elements(op: str, nranks: int) -> None:
    case = build_case(
        op, 4 * 3 * (data.PERIOD + 11), nranks=nranks, dtype="float32", root=nranks - 1
    )
    for rank in range(nranks):
        assert (
            data.count_wrong(case, output_of(case, rank), data.expected_output(case, rank, SEED))
            == 0
        )


@pytest.mark.parametrize("dtype", ITEMSIZES)
@pytest.mark.parametrize("redop", REDOPS)
@pytest.mark.parametrize("nranks", [2, 3, 7, 40])
def test_reductions_are_exact_in_every_type(dtype: str, redop: str, nranks: int) -> None:
    case = build_case("all_reduce", ITEMSIZES[dtype] * 500, nranks=nranks, dtype=dtype, redop=redop)
    exact = obvious_result(case, 0)
    rounded = exact.astype(data.numpy_dtype(dtype))
    assert np.isfinite(exact).all()
    if redop != "avg":
        assert np.array_equal(rounded.astype(np.float64), exact), (
            "a result that the type cannot hold cannot be checked for equality"
        )
    assert data.count_wrong(case, rounded, data.expected_output(case, 0, SEED)) == 0


@pytest.mark.parametrize("redop", ["sum", "premul_sum"])
@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3", "float16", "int8"])
def test_partial_sums_are_exact_too(redop: str, dtype: str) -> None:
    case = build_case("all_reduce", 100, nranks=33, dtype=dtype, redop=redop)
    running = np.zeros(case.count, data.numpy_dtype(dtype))
    for rank, x in enumerate(inputs_of(case)):
        scaled = x * (data.premul_scalar(rank) if redop == "premul_sum" else 1)
        running = (running.astype(np.float64) + scaled).astype(running.dtype)
    assert data.count_wrong(case, running, data.expected_output(case, 0, SEED)) == 0


@pytest.mark.parametrize("dtype", ITEMSIZES)
@pytest.mark.parametrize("position", [0, 1, data.PERIOD, 2 * data.PERIOD + 4])
def test_one_wrong_element_is_found(dtype: str, position: int) -> None:
    case = build_case("all_reduce", ITEMSIZES[dtype] * (2 * data.PERIOD + 5), nranks=3, dtype=dtype)
    output = output_of(case, 0)
    output.view(np.uint8)[position * output.itemsize] ^= 1  # the lowest bit
    assert data.count_wrong(case, output, data.expected_output(case, 0, SEED)) == 1


def test_an_average_that_is_off_by_more_than_rounding_is_found() -> None:
    case = build_case("all_reduce", 4000, nranks=3, dtype="float32", redop="avg")
    output = output_of(case, 0)
    output[5] = np.nextafter(output[5], np.float32(np.inf))
    assert data.count_wrong(case, output, data.expected_output(case, 0, SEED)) == 0
    output[5] *= 1 + 1e-5
    assert data.count_wrong(case, output, data.expected_output(case, 0, SEED)) == 1


@pytest.mark.parametrize("dtype", ITEMSIZES)
@pytest.mark.parametrize("redop", ["sum", "avg"])
def test_memory_that_nobody_wrote_is_wrong(dtype: str, redop: str) -> None:
    case = build_case("all_reduce", ITEMSIZES[dtype] * 100, nranks=3, dtype=dtype, redop=redop)
    output = np.zeros(case.count, data.numpy_dtype(dtype))
    data.poison(output)
    assert data.count_wrong(case, output, data.expected_output(case, 0, SEED)) == 100


@pytest.mark.parametrize("op", DATA_OPERATIONS)
def test_blocks_in_the_wrong_order_are_found(op: str) -> None:
    case = build_case(op, 4 * 1024, nranks=4, dtype="int32")
    shifted = np.roll(output_of(case, 0), 64)
    assert (
        data.count_wrong(case, shifted, data.expected_output(case, 0, SEED))
        > 900 * case.output_count // 1024
    )


def test_the_result_of_the_check_before_is_not_right_in_the_next() -> None:
    case = build_case("all_reduce", 4096, nranks=2, dtype="float32")
    assert data.count_wrong(case, output_of(case, 0), data.expected_output(case, 0, SEED + 1)) > 900


@pytest.mark.parametrize("op", DATA_OPERATIONS)
@pytest.mark.parametrize("rank", [0, 2])
def test_in_place_buffers_overlap_as_nccl_defines(op: str, rank: int) -> None:
    case = build_case(op, 4 * 30, nranks=3, dtype="int32", root=2)
    x, y = place_buffers(case, rank, True, lambda count: np.zeros(count, np.int32))
    if x.size and y.size:
        assert np.shares_memory(x, y)
        whole, block = (x, y) if x.size >= y.size else (y, x)
        assert block.ctypes.data - whole.ctypes.data == (
            0 if x.size == y.size else rank * case.count * 4
        )
    out_x, out_y = place_buffers(case, rank, False, lambda count: np.zeros(count, np.int32))
    assert not np.shares_memory(out_x, out_y)
    assert (out_x.size, out_y.size) == (x.size, y.size)
