"""A job of 8 ranks whose ranks 0 to 6 die in turn goes on, however it was started."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.launchers.jobs import RANK_PROGRAMS, CompletedJob, free_port, run_together, torchrun

pytestmark = pytest.mark.multiprocess
NRANKS = 8
PROGRAM = str(RANK_PROGRAMS / "outlive.py")


def check(ended: list[CompletedJob], folder: Path) -> None:
    for each in ended:
        assert each.status == 0, each.stderr
    report = json.loads((folder / "last.json").read_text())
    assert report["rank"] == NRANKS - 1
    assert report["sums"] == [float(n) for n in range(NRANKS, 0, -1)]
    assert max(report["seconds"]) < 20


@pytest.mark.parametrize("way", ["address", "unique id"])
def test_started_by_hand(way: str, tmp_path: Path) -> None:
    environ = {"WORLD_SIZE": str(NRANKS)}
    if way == "address":
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, PROGRAM, str(tmp_path)]
    command += [] if way == "address" else [str(tmp_path / "id")]
    environs = [{**environ, "RANK": str(rank)} for rank in range(NRANKS)]
    check(run_together([command] * NRANKS, environs, timeout=120), tmp_path)


def test_started_by_miraccl_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "miraccl", "run", "-n", str(NRANKS), PROGRAM, str(tmp_path)]
    check(run_together([command], [{}], timeout=120), tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_started_by_torchrun(tmp_path: Path) -> None:
    how = ["--nproc-per-node", str(NRANKS), "--master-addr", "127.0.0.1"]
    how += ["--master-port", str(free_port())]
    command = torchrun(how, "outlive.py", str(tmp_path))
    check(run_together([command], [{}], timeout=120), tmp_path)
