"""Benchmarks run and write their results; figures are not checked."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(
    ("script", "args"),
    [
        ("call_overhead.py", ["--rounds", "1", "--calls", "20"]),
        ("startup.py", ["--rounds", "1", "--ranks", "2"]),
        ("idle_cpu.py", ["--seconds", "0.05"]),
        ("memory.py", ["--ranks", "2", "--bytes", "100000"]),
        ("staging.py", ["--rounds", "1", "--sizes", "1K,1M"]),
        (
            "torch_calls.py",
            ["--rounds", "1", "--calls", "3", "--ranks", "2", "--only", "all_gather,futures,recv"],
        ),
        ("uneven_counts.py", ["--rounds", "1", "--calls", "3", "--ranks", "2"]),
        (
            "peers.py",
            [
                "--rounds",
                "1",
                "--ranks",
                "2",
                "--ops",
                "all_reduce",
                "--sizes",
                "8",
                "--batches",
                "1",
                "--variants",
                "window",
            ],
        ),
    ],
)
def test_a_benchmark_writes_its_results(script: str, args: list[str], tmp_path: Path) -> None:
    if script.startswith("torch"):
        pytest.importorskip("torch", reason="PyTorch is not installed", exc_type=ImportError)
    command = [
        warm_python(),
        str(ROOT / "bench" / script),
        *args,
        "--out",
        str(tmp_path / "result"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "result.json").read_text())["machine"]["cores"] >= 1
    assert "|" in (tmp_path / "result.md").read_text()


@pytest.mark.parametrize(
    "command",
    [
        "gpu_hosts.py",
        "gpu_links.py",
        "gpu_clock.py",
        "gpu_sweep.py",
        "gpu_versions.py",
        "call_overhead.py --devices cuda",
    ],
)
def test_without_a_gpu_one_line_reports_what_is_missing(command: str) -> None:
    script, *words = command.split()
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [warm_python(), str(ROOT / "bench" / script), *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environ,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
