"""``init_process_group("miraccl", "miraccl://")`` under launchers with and without RANK."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'miraccl[torch]')")

import torch.distributed as dist

import miraccl.torch
from tests.launchers.jobs import RANK_PROGRAMS, run_together, torchrun
from tests.support.warm_python import TORCH, warm_python

pytestmark = pytest.mark.multiprocess


def anywhere(folder: Path) -> list[str]:
    return [warm_python(*TORCH), str(RANK_PROGRAMS / "anywhere.py"), str(folder)]


def check(folder: Path, nranks: int) -> None:
    for rank in range(nranks):
        assert json.loads((folder / f"{rank}.json").read_text()) == [
            nranks,
            [int("1" * nranks)] * 2,
        ]


def openmpi(rank: int, folder: Path) -> dict[str, str]:
    size = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    return {
        **size,
        "OMPI_COMM_WORLD_RANK": str(rank),
        "PMIX_NAMESPACE": "job",
        "XDG_RUNTIME_DIR": str(folder),
    }


def slurm(rank: int, folder: Path) -> dict[str, str]:
    step = {
        "SLURM_JOB_ID": folder.name,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "localhost",
    }
    return {**step, "SLURM_PROCID": str(rank)}


@pytest.mark.parametrize("launcher", [openmpi, slurm])
def test_the_environment_of_a_launcher_is_sufficient(
    launcher: Callable[[int, Path], dict[str, str]], tmp_path: Path
) -> None:
    folder = tmp_path / secrets.token_hex(8)
    folder.mkdir(mode=0o700)
    environments: list[Mapping[str, str]] = [launcher(rank, folder) for rank in range(3)]
    for ended in run_together([anywhere(tmp_path)] * 3, environments):
        assert ended.status == 0, ended.stderr
    check(tmp_path, 3)


def test_miraccl_run(tmp_path: Path) -> None:
    python, program, folder = anywhere(tmp_path)
    (ended,) = run_together([[python, "-m", "miraccl", "run", "-n", "3", program, folder]], [{}])
    assert ended.status == 0, ended.stderr
    check(tmp_path, 3)


def test_torchrun_keeps_its_store(tmp_path: Path) -> None:
    python = warm_python(*TORCH)
    (ended,) = run_together(
        [
            torchrun(
                ["--standalone", "--nproc-per-node", "2"],
                "anywhere.py",
                str(tmp_path),
                python=python,
            )
        ],
        [{}],
    )
    assert ended.status == 0, ended.stderr
    check(tmp_path, 2)


def test_without_a_launcher(tmp_path: Path) -> None:
    (ended,) = run_together([anywhere(tmp_path)], [{}])
    assert ended.status == 0, ended.stderr
    check(tmp_path, 1)


def test_explicit_ranks_conflict_with_the_launcher() -> None:
    with pytest.raises(miraccl.torch.BackendError, match="come from the launcher"):
        dist.init_process_group(miraccl.torch.NAME, "miraccl://", rank=0, world_size=1)


def test_contradictory_launch_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "2")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(
        miraccl.torch.BackendError, match=r"PMI_RANK=2 of 2 ranks \(ranks are 0 to 1\)"
    ):
        dist.init_process_group(miraccl.torch.NAME, "miraccl://")
