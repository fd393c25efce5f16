"""A job of 8 ranks whose ranks 0 to 6 die in turn goes on, however it was started."""

from __future__ import annotations

import importlib.util
import json
import os
import random
from pathlib import Path

import pytest

from tests.launchers.jobs import RANK_PROGRAMS, CompletedJob, free_port, run_together, torchrun
from tests.support.warm_python import TORCH as PACKAGES
from tests.support.warm_python import warm_python

pytestmark = pytest.mark.multiprocess
NRANKS = 8
PROGRAM = str(RANK_PROGRAMS / "outlive.py")


TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)


def check(ended: list[CompletedJob], folder: Path, survivor: int = NRANKS - 1) -> None:
    for each in ended:
        assert each.status == 0, each.stderr
    report = json.loads((folder / "last.json").read_text())
    assert report["rank"] == survivor
    assert report["sums"] == [float(n) for n in range(NRANKS, 0, -1)]
    assert max(report["seconds"]) < 20


def start_by_hand(way: str, tmp_path: Path, order: str = "") -> list[CompletedJob]:
    environ = {"WORLD_SIZE": str(NRANKS), "OUTLIVE_ORDER": order}
    if way == "address":
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [warm_python(), PROGRAM, str(tmp_path)]
    command += [] if way == "address" else [str(tmp_path / "id")]
    environs = [{**environ, "RANK": str(rank)} for rank in range(NRANKS)]
    return run_together([command] * NRANKS, environs, timeout=120)


def start_by_torchrun(tmp_path: Path, order: str = "") -> list[CompletedJob]:
    how = ["--nproc-per-node", str(NRANKS), "--master-addr", "127.0.0.1"]
    how += ["--master-port", str(free_port())]
    command = torchrun(how, "outlive.py", str(tmp_path), python=warm_python(*PACKAGES))
    return run_together([command], [{"OUTLIVE_ORDER": order}], timeout=120)


@pytest.mark.parametrize("way", ["address", "unique id"])
def test_started_by_hand(way: str, tmp_path: Path) -> None:
    check(start_by_hand(way, tmp_path), tmp_path)


def test_started_by_miraccl_run(tmp_path: Path) -> None:
    command = [warm_python(), "-m", "miraccl", "run", "-n", str(NRANKS), PROGRAM, str(tmp_path)]
    check(run_together([command], [{}], timeout=120), tmp_path)


@TORCH
def test_started_by_torchrun(tmp_path: Path) -> None:
    check(start_by_torchrun(tmp_path), tmp_path)


@pytest.mark.skipif(
    not os.environ.get("TEST_SLOW"), reason="slow: 16 jobs of 8 ranks, 3 minutes (TEST_SLOW=1)"
)
@pytest.mark.parametrize("survivor", range(NRANKS))
@pytest.mark.parametrize("way", ["address", pytest.param("torchrun", marks=TORCH)])
def test_any_rank_survives_all_others(way: str, survivor: int, tmp_path: Path) -> None:
    deaths = [rank for rank in range(NRANKS) if rank != survivor]
    random.Random(survivor).shuffle(deaths)
    order = ",".join(map(str, deaths))
    torch = way == "torchrun"
    jobs = start_by_torchrun(tmp_path, order) if torch else start_by_hand(way, tmp_path, order)
    check(jobs, tmp_path, survivor)
