"""Collectives on real ranks against NumPy: all algorithms, types, operators, forms and edge sizes.

Hypothesis draws seeds; the ranks of one run draw many cases from a seed (``tests.runtime.cases``),
since starting ranks takes most of the time. ``buffsize=1`` makes FIFO slots as small as possible (8
KiB), so that a few thousand elements take several rounds.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from miraccl.schedule import catalog
from tests.runtime import sweep_ranks
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

SLOT = 8192
COUNTS = [
    0,
    1,
    2,
    3,
    7,
    31,
    32,
    33,
    127,
    128,
    129,
    511,
    1000,
    2047,
    2048,
    2049,
    SLOT - 1,
    SLOT,
    SLOT + 1,
    2 * SLOT + 1,
    40_001,
]
ALGORITHMS = [name for name in catalog.names() if name != "dissemination"]  # which is a barrier

once = settings(
    max_examples=1, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
quick = settings(once, max_examples=10 if os.environ.get("TEST_SLOW") else 1)
seeds = st.integers(0, 1 << 30)


@pytest.mark.parametrize("nranks", [1, 2, 3, 4, 5, 6, 7, 8])
@quick
@given(seed=seeds)
def test_planner_choice(nranks: int, seed: int) -> None:
    # On a new machine the first run compiles some 20 kernels, of a second each.
    number = 160 // nranks
    run_ranks(sweep_ranks.random_cases, nranks, seed, number, "", False, COUNTS, True, timeout=150)


@pytest.mark.parametrize("algo", ALGORITHMS)
@quick
@given(seed=seeds, nranks=st.integers(2, 5))
def test_every_algorithm(algo: str, seed: int, nranks: int) -> None:
    assert (
        run_ranks(sweep_ranks.random_cases, nranks, seed, 40, algo, False, COUNTS, True)
        == [40] * nranks
    )


@pytest.mark.parametrize("algo", ALGORITHMS)
@once
@given(seed=seeds, nranks=st.integers(6, 7))
def test_every_algorithm_with_many_ranks(algo: str, seed: int, nranks: int) -> None:
    run_ranks(sweep_ranks.random_cases, nranks, seed, 8, algo, False, COUNTS, True)


def test_nine_ranks() -> None:
    run_ranks(sweep_ranks.random_cases, 9, 9, 12, "", False, COUNTS[:-2], True)


@quick
@given(seed=seeds, nranks=st.integers(2, 5))
def test_deterministic_sums_are_in_rank_order(seed: int, nranks: int) -> None:
    """Every bit pattern and float type has one correct result."""
    run_ranks(sweep_ranks.random_cases, nranks, seed, 40, "", True, COUNTS, True)


@pytest.mark.parametrize(
    "settings_of",
    [{"MIRACCL_CMA_DISABLE": "1"}, {"MIRACCL_SHM_DISABLE": "1"}, {"MIRACCL_PROTO": "simple"}],
    ids=str,
)
@once
@given(seed=seeds)
def test_with_settings(settings_of: dict[str, str], seed: int) -> None:
    run_ranks(sweep_ranks.random_cases, 3, seed, 40, "", False, COUNTS, True, env=settings_of)


@pytest.mark.parametrize("threshold", [0, 4096])
@pytest.mark.parametrize("algo", ["", "ring", "two_shot", "one_shot", "chain", "pat", "bruck"])
def test_payloads_read_from_private_memory(algo: str, threshold: int) -> None:
    """Single copies wherever an algorithm allows them, whatever the measured constants."""
    run_ranks(sweep_ranks.single_copy_cases, 3, 7 + threshold, 25, algo, COUNTS, threshold)


def test_window_memory_rewritten_directly_after_the_call() -> None:
    """A sender may overwrite window memory that was posted by address once its call has
    returned.
    """
    for nranks in (2, 4):
        run_ranks(sweep_ranks.rewritten, nranks)


@pytest.mark.parametrize("root", [0, 2])
def test_gather_and_scatter_use_the_fast_path(root: int) -> None:
    run_ranks(sweep_ranks.rooted_fast_calls, 3, root)


@pytest.mark.parametrize("algo", ["", "chain"])
def test_reduce_uses_the_fast_path(algo: str) -> None:
    run_ranks(sweep_ranks.reduce_fast_path, 3, 2, algo)
