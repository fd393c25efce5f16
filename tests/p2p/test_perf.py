"""``miraccl perf`` of one-sided transfers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import ROOT
from tests.support.warm_python import warm_python

pytestmark = pytest.mark.multiprocess


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python(), "-m", "miraccl", "perf", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "method"),
    [
        (("write", "--sizes", "256"), "window"),
        (("writev", "--sizes", "4K", "--blocks", "4", "--private"), "process"),
    ],
)
def test_both_roles(words: tuple[str, ...], method: str) -> None:
    done = run(*words, "--seconds", "0.01", "--json")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    assert [(row["method"], row["wrong"]) for row in rows] == [(method, 0)]
    assert rows[0]["us"] > 0
    assert rows[0]["predicted_us"] > 0


#: Stands for the interface of Mooncake's engine: it copies between the processes by the kernel.
_ENGINE = """
import ctypes, os, socket
class TransferEngine:
    def initialize(self, host, how, protocol, devices):
        return 0
    def register_memory(self, address, nbytes):
        return 0
    def get_rpc_port(self):
        return os.getpid()
    def transfer_sync_write(self, name, local, remote, nbytes):
        with open(f"/proc/{name.partition(':')[2]}/mem", "r+b", buffering=0) as memory:
            memory.seek(remote)
            return 0 if memory.write(ctypes.string_at(local, nbytes)) == nbytes else -1
"""


def test_beside_a_peer(tmp_path: Path) -> None:
    """The comparison, with an engine of Mooncake's interface: turns, bytes, ratio, files."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "engine.py").write_text(_ENGINE)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {warm_python()} "$@"\n')
    python.chmod(0o755)
    out, plot = tmp_path / "rows.json", tmp_path / "rows.svg"
    words = ("write", "--sizes", "4K", "--seconds", "0.01", "--compare", "mooncake")
    done = run(*words, "--peer-python", str(python), "--json", str(out), "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    ours, theirs = json.loads(out.read_text())["rows"]
    assert (ours["engine"], theirs["engine"]) == ("miraccl", "mooncake tcp")
    assert theirs["ratio"] == pytest.approx(theirs["us"] / ours["us"])
    assert (ours["wrong"], theirs["wrong"]) == (0, 0)
    assert "mooncake tcp" in plot.read_text()
    assert f"mooncake tcp: {theirs['ratio']:.2f} x" in done.stdout


def test_wrong_options() -> None:
    assert "--connect" in run("read", "--role", "client", "--secret", "x").stderr
    assert "numbers from 1 on" in run("writev", "--blocks", "0").stderr
    assert "allowed are cpu, cuda" in run("write", "--device", "tpu").stderr
    assert "nixl-cu12" in run("write", "--compare", "nixl", "--peer-python", "/bin/false").stderr


def test_device_without_gpu() -> None:
    done = run("write", "--device", "cuda")
    if done.returncode == 0:
        pytest.skip("this machine has a GPU: tests/gpu measures it")
    assert "GPU" in done.stderr or "CUDA" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
