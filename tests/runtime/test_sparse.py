"""Sparse all-reduce on real ranks: the same bits as the deterministic dense sum."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.runtime import sparse_ranks
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

#: TEST_SLOW=1 runs more than ten thousand cases
SLOW = bool(os.environ.get("TEST_SLOW"))
CASES = 2600 if SLOW else 14


@pytest.mark.parametrize("nranks", [1, 2, 3, 5] if SLOW else [1, 3])
def test_same_bits_as_dense(nranks: int) -> None:
    timeout = 1200.0 if SLOW else 60.0
    cases = sparse_ranks.random_cases
    used = run_ranks(cases, nranks, nranks, CASES, 1, 0, not SLOW, timeout=timeout)
    assert (nranks == 1) == ("sparse_two_shot" not in used[0])


def test_same_bits_over_hosts() -> None:
    used = run_ranks(sparse_ranks.random_cases, 3, 9, 3, 0, 1)
    assert "sparse_two_shot" in used[0]


def test_a_scan_fails() -> None:
    """All ranks raise the error of a scanning thread; none waits for its bitmap."""
    for text in run_ranks(sparse_ranks.failing_scan, 2):
        assert "the scan of the array failed: MemoryError('of the test')" in text


def test_arguments_differ() -> None:
    fields = ["count", "dtype", "operator", "block", "density"]
    for texts in run_ranks(sparse_ranks.different_arguments, 2, fields):
        for field, text in zip(fields, texts, strict=True):
            assert f"ranks passed different values of {field}" in text
            assert "on rank 0" in text


def test_plans() -> None:
    for sparse, dense, window, after in run_ranks(sparse_ranks.plans, 2):
        assert sparse.algo == "sparse_two_shot"
        assert sparse.block == 256
        assert sparse.density == pytest.approx(1 / (1 << 14))
        assert 0 < sparse.union < sparse.break_even
        assert dense.algo != "sparse_two_shot"
        assert dense.reason.startswith("dense: about 100.0% of the blocks are not zero")
        assert window.reason.startswith("dense: ")
        assert not hasattr(after, "block")


@pytest.mark.parametrize("nranks", [1, 2, 4] if SLOW else [1, 3])
def test_coo(nranks: int) -> None:
    assert run_ranks(sparse_ranks.random_coo, nranks, nranks, CASES) == [CASES] * nranks


def test_refused_coo() -> None:
    for found in run_ranks(sparse_ranks.refused_coo, 2):
        assert "indices[1] is 9; allowed are 0 to 8" in found[0]
        assert "indices[0] is -1" in found[1]
        assert "indices have dtype float64" in found[2]
        assert "values have shape (2, 4); they need one row for each of the 1 indices" in found[3]
        assert "size is 9223372036854775808; allowed are 0 to 2^62" in found[4]
        assert "different values of size: 10 on rank 0, 11 on rank 1" in found[5]


def test_refused_arguments() -> None:
    for found in run_ranks(sparse_ranks.refused, 2):
        assert len(found) == 6
        assert found[5].startswith("all_reduce_sparse: out has 7 elements"), found[5]
        assert "block is 0; allowed are 1 to" in found[0]
        assert "density is 1.5; allowed are 0.0 to 1.0" in found[3]
        assert "inside a group" in found[4]


def test_perf() -> None:
    options = ["-r", "2", "-s", "1M", "--density", "0,0.02,1", "-n", "1", "--json", "-"]
    command = [sys.executable, "-m", "miraccl", "perf", "all_reduce_sparse", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["density"] for row in rows] == [0.0, 0.02, 1.0]
    assert [row["wrong"] for row in rows] == [0, 0, 0]
    assert all(row["block"] == 256 for row in rows)
    refused = subprocess.run([*command, "--graph"], capture_output=True, text=True, check=False)
    assert "cannot use --graph with all_reduce_sparse" in refused.stderr
