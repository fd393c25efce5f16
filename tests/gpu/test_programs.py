"""Random programs on emulated GPUs: streams, graphs, windows, groups, background, in one host and in two that are pretended."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.comm.sweep_ranks import act_as_hosts
from tests.gpu.emulator import folder, needs_compiler
from tests.gpu.programs.draw import draw
from tests.gpu.programs.rank import Rank
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.multiprocess,
    needs_compiler,
]


def run_seeds(seeds: list[int], ranks_per_host: int) -> None:
    act_as_hosts(ranks_per_host)
    np.seterr(all="ignore")
    rank, nranks = int(os.environ["MIRACCL_RANK"]), int(os.environ["MIRACCL_NRANKS"])
    for seed in seeds:
        try:
            Rank(draw(seed, "own", nranks, "emulated", nsteps=25, dtypes=["int32"]), rank, {}).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize(("nranks", "ranks_per_host"), [(2, 0), (2, 1)])
def test_programs_on_emulated_gpus(nranks: int, ranks_per_host: int) -> None:
    run_ranks(run_seeds, nranks, [1, 2, 3], ranks_per_host, env={"MIRACCL_EMULATOR_CACHE": str(folder())}, timeout=180.0)
