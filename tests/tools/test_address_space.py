"""Programs and commands under a real ``ulimit -v`` that leaves too little for their libraries."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest


def _run_limited(mib: int, *command: str) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))

    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=60, preexec_fn=limit
    )


@pytest.mark.parametrize("mib", [60, 100, 200, 300])
def test_run_says_what_is_missing(tmp_path: Path, mib: int) -> None:
    """``miraccl run`` refuses to start ranks, whose NumPy would end them without an exception."""
    program = tmp_path / "program.py"
    program.write_text("import numpy, miraccl\nmiraccl.init()\n")
    ended = _run_limited(mib, "-m", "miraccl", "run", "-n", "2", str(program))
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "numpy and llvmlite need" in ended.stderr
    assert f"this process may have {mib} MiB in all (ulimit -v)" in ended.stderr


@pytest.mark.parametrize("mib", [100, 200, 300])
def test_init_says_what_is_missing(mib: int) -> None:
    """The last line of a program's traceback is that sentence, whatever it has imported before."""
    before = "" if mib < 150 else "import numpy\n"
    ended = _run_limited(mib, "-c", f"{before}import miraccl\nmiraccl.init()")
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("miraccl.errors.SystemFailure: cannot load miraccl.init: ")
    assert "ulimit -v" in last


def test_commands_that_need_no_library_run() -> None:
    """60 MiB are enough for the version, and not for a proof."""
    assert _run_limited(60, "-m", "miraccl", "--version").returncode == 0
    refused = _run_limited(60, "-m", "miraccl", "schedule", "verify", "ring")
    assert "cannot run miraccl schedule: numpy needs" in refused.stderr
