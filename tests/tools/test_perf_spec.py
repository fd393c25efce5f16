"""Sizes, counts, bandwidth factors and the printed table."""

from __future__ import annotations

import pytest

from miraccl.tools.perf import table
from miraccl.tools.perf.spec import OPERATIONS, PerfRow, build_case, busbw_factor, size_range

DATA_OPERATIONS = [op for op in OPERATIONS if op != "barrier"]


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("broadcast", 1),
        ("reduce", 1),
        ("sendrecv", 1),
    ],
)
def test_busbw_factors_match_nccl_tests(op: str, factor: float) -> None:
    assert busbw_factor(op, 4) == factor


@pytest.mark.parametrize("op", DATA_OPERATIONS)
@pytest.mark.parametrize("nbytes", [1, 8, 1000, 4096])
@pytest.mark.parametrize("nranks", [1, 3, 4])
def test_the_size_is_the_larger_buffer(op: str, nbytes: int, nranks: int) -> None:
    case = build_case(op, nbytes, nranks=nranks, dtype="float32")
    smallest = (
        4 * nranks
        if op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
        else 4
    )
    assert case.nbytes == max(case.input_count, case.output_count) * 4
    assert case.nbytes == max(smallest, nbytes // smallest * smallest)


def test_count_is_nccls_argument() -> None:
    assert build_case("all_reduce", 4096, nranks=4, dtype="float32").count == 1024
    assert build_case("all_gather", 4096, nranks=4, dtype="float32").count == 256
    assert build_case("reduce_scatter", 4096, nranks=4, dtype="bfloat16").count == 512


def test_size_range() -> None:
    assert size_range(8, 64, 2) == [8, 16, 32, 64]
    assert size_range(8, 100, 3) == [8, 24, 72]
    assert size_range(8, 4, 2) == []


def test_speeds() -> None:
    case = build_case("all_reduce", 1_000_000, nranks=4, dtype="float32")
    assert case.speeds(1000.0) == pytest.approx((1.0, 1.5))


def row(**changes: object) -> PerfRow:
    fields: dict[str, object] = {
        "op": "all_reduce",
        "bytes": 4194304,
        "count": 1048576,
        "dtype": "float32",
        "redop": "sum",
        "root": -1,
        "ranks": 4,
        "in_place": False,
        "time_us": 1234.56,
        "time_min_us": 1200.0,
        "algbw": 3.397,
        "busbw": 5.096,
        "wrong": 0,
        "iters": 16,
        "batches": 5,
        "algo": "ring",
        "proto": "simple",
        "channels": 2,
    }
    return PerfRow(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_line_has_the_columns_of_nccl_tests() -> None:
    words = table.line(row(), row(in_place=True, time_us=99.994, wrong=3), "").split()
    assert words[:5] == ["4194304", "1048576", "float32", "sum", "-1"]
    assert words[5:9] == ["1234.6", "3.40", "5.10", "0"]
    assert words[9:13] == ["99.99", "3.40", "5.10", "3"]
    assert words[13:] == ["ring/simple", "x2"]


def test_missing_forms_are_na() -> None:
    words = table.line(None, row(in_place=True, wrong=None), "").split()
    assert words[5:9] == ["N/A"] * 4
    assert words[12] == "N/A"


def test_numbers_align_with_their_headings() -> None:
    for peer in ("", "gloo"):
        line = table.line(row(peer=peer, peer_time_us=5000.0, ratio=4.05), row(in_place=True), peer)
        heading = table.header(peer)[1]
        for name, value in (("size", "4194304"), ("redop", "sum"), ("#wrong", " 0")):
            assert heading.index(name) + len(name) == line.index(value) + len(value)


def test_peer_columns() -> None:
    words = table.line(
        row(peer="gloo", peer_time_us=5000.0, ratio=4.05), row(in_place=True, peer="gloo"), "gloo"
    ).split()
    assert words[9:11] == ["5000.0", "4.05"]
    assert words[15:17] == ["N/A", "N/A"]


def test_the_footer_counts_wrong_values() -> None:
    assert "0 OK" in table.footer([row()], "")[0]
    assert "7 FAILED" in table.footer([row(wrong=3), row(wrong=4)], "")[0]
    assert "not checked" in table.footer([row(wrong=None)], "")[0]
    assert "2.00" in table.footer([row(ratio=1.0), row(ratio=4.0)], "mpi")[2]


def test_json_rows_omit_an_absent_peer() -> None:
    assert "ratio" not in row().to_json()
    assert row(peer="mpi", peer_time_us=2.0, ratio=0.5).to_json()["ratio"] == 0.5
