"""Random programs (``tests.gpu.programs``) on ranks with CPU memory."""

from __future__ import annotations

import os

import numpy as np
import torch

from tests.gpu.programs.draw import draw
from tests.gpu.programs.rank import ProgramRank


def run_seeds(path: str, api: str, seeds: list[int], nsteps: int) -> None:
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    rank, nranks = int(os.environ["MIRACCL_RANK"]), int(os.environ["MIRACCL_NRANKS"])
    for seed in seeds:
        program = draw(seed, api, nranks, "cpu", nsteps=nsteps)
        try:
            ProgramRank(program, rank, {"path": f"{path}-{seed}", "backend": "miraccl"}).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
