"""``miraccl perf`` and ``miraccl doctor`` on real GPUs; ranks share a single one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.gpus import GPUS, NEEDS_GPU

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    NEEDS_GPU,
]
WHERE = ("--devices", "cuda:0,1") if GPUS > 1 else ("--devices", "cuda:0", "--ranks", "2")
QUICK = ("--batches", "2", "--timeout", "200")
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
with_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="NCCL comes with PyTorch"
)


def run(*words: str, module: str = "miraccl") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=environ, cwd=ROOT
    )


def rows_of(*words: str) -> list[dict[str, Any]]:
    done = run("perf", *words, *QUICK, "--json", "-")
    assert done.returncode == 0, done.stderr[-4000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    assert all(row["wrong"] == 0 and row["time_us"] > 0 and row["host_us"] > 0 for row in rows)
    return rows


def test_patterns_graphs_and_clock() -> None:
    done = run(module="tests.gpu.perf_buffers")
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr[-4000:]


@pytest.mark.parametrize(
    "op",
    ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "sendrecv"],
)
def test_every_operation_is_correct(op: str) -> None:
    for extra in ((), ("--graph", "--dtype", "bfloat16")):
        rows = rows_of(op, *WHERE, "--sizes", "8,1000,300K,5M", *extra)
        assert {row["graph"] for row in rows} == {bool(extra)}
        assert all("NVIDIA" in row["device"] for row in rows)


@pytest.mark.parametrize("op", ["broadcast", "reduce"])
def test_an_algorithm_of_some_operations_only(op: str) -> None:
    rows = rows_of(op, *WHERE, "--sizes", "300K,5M", "--algo", "chain", "--proto", "simple")
    assert {(row["algo"], row["proto"]) for row in rows} == {("chain", "simple")}


@pytest.mark.parametrize("dtype", ["int8", "int64", "float16", "float64"])
@pytest.mark.parametrize("redop", ["prod", "min", "avg"])
def test_types_and_operators(dtype: str, redop: str) -> None:
    rows_of("all_reduce", *WHERE, "--sizes", "5000,2M", "--dtype", dtype, "--redop", redop)


def test_algorithms_and_protocols_are_those_requested() -> None:
    rows = rows_of("all_reduce", *WHERE, "--sizes", "100K", "--algo", "ring", "--proto", "simple")
    assert {(row["algo"], row["proto"]) for row in rows} == {("ring", "simple")}


@two_gpus
def test_one_process_drives_several_gpus() -> None:
    rows_of("all_reduce", *WHERE, "--threads", "--sizes", "8,300K,5M", "--graph")


@two_gpus
@with_torch
def test_nccl_is_measured_in_the_same_run() -> None:
    for extra in (("--graph",), ()):
        for op in ("all_reduce", "sendrecv"):
            rows = rows_of(op, *WHERE, "--sizes", "1K,1M", "--compare", "nccl", *extra)
            assert all(
                row["nccl_us"] > 0 and row["ratio"] > 0 and row["nccl_host_us"] > 0 for row in rows
            )


@two_gpus
@with_torch
def test_nccl_runs_in_separate_processes_with_threads() -> None:
    assert all(
        row["nccl_us"] > 0
        for row in rows_of("all_gather", *WHERE, "--threads", "--sizes", "1K", "--compare", "nccl")
    )


def test_missing_gpus_are_reported() -> None:
    done = run("perf", "all_reduce", "--devices", "cuda:0,77")
    assert done.returncode == 2
    assert "no cuda:77" in done.stderr


def test_doctor_lists_gpus() -> None:
    found = {f["name"]: f for f in json.loads(run("doctor", "--json", "-").stdout)}
    assert "NVIDIA" in found["cuda"]["found"]
    assert found["nvrtc"]["status"] == "ok"
    assert found["gpu ipc"]["status"] == "ok", found["gpu ipc"]
    assert found["gpu peers"]["status"] == "ok", found["gpu peers"]
