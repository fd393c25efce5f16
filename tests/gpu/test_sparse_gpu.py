"""Sparse sums on real GPUs: bits of the dense sum; ranks share a GPU if there is only one."""

from __future__ import annotations

import functools

import pytest

from tests.gpu.gpus import GPUS, ON_GPUS
from tests.gpu.ranks import run_cases

pytestmark = ON_GPUS
RANKS = sorted({2, min(4, GPUS)} - {0, 1})
CASES = ["densities", "types", "clustered", "graph", "streams", "memory"]


@functools.cache
def answers(nranks: int) -> list[list[str]]:
    """Results of all cases from one set of processes."""
    cases = [{"case": name} for name in CASES]
    return run_cases(cases, nranks, module="tests.gpu.sparse_worker")


@pytest.mark.parametrize("nranks", RANKS)
@pytest.mark.parametrize("number", range(len(CASES)), ids=CASES)
def test_on_gpus(number: int, nranks: int) -> None:
    assert answers(nranks)[number] == [""] * nranks
