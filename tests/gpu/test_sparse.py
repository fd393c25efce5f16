"""Sparse sums on GPU memory: through the communicator, on emulated GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import sparse_ranks
from tests.gpu.emulator import folder, needs_compiler
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.multiprocess, needs_compiler]


@pytest.mark.parametrize(
    ("scene", "nranks"),
    [
        (sparse_ranks.sums, 1),
        (sparse_ranks.sums, 2),
        (sparse_ranks.sums, 3),
        (sparse_ranks.choices, 2),
        (sparse_ranks.graphs, 2),
    ],
)
def test_on_emulated_gpus(scene: Callable[[], Any], nranks: int) -> None:
    env = {"MIRACCL_SMS": "2", "MIRACCL_EMULATOR_CACHE": str(folder())}
    run_ranks(scene, nranks, env=env, timeout=180.0)


def test_different_operators() -> None:
    env = {"MIRACCL_EMULATOR_CACHE": str(folder())}
    for rank, text in enumerate(run_ranks(sparse_ranks.mismatch, 2, env=env, timeout=180.0)):
        assert "all_reduce" in text
        assert f"rank {1 - rank}" in text
