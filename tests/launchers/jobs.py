"""Programs started by a launcher: bounded in time, output captured, all processes cleaned up.

Launchers put ranks into sessions of their own, so a killed launcher may leave them behind. Every
process of a job carries a marker in its environment; processes that still have it afterwards are
killed and reported as a failure.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RANK_PROGRAMS = Path(__file__).resolve().parent / "programs"
_MARKER = "LAUNCHER_TEST_JOB"
_EXIT_TIMEOUT_S = 30.0  # for processes that have been signalled


@dataclass(frozen=True, kw_only=True)
class CompletedJob:
    """Exit status and output of a command."""

    status: int
    stdout: str
    stderr: str


def run_together(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    timeout: float = 90.0,
) -> list[CompletedJob]:
    """Run commands concurrently, each with its additions to the environment.

    Raise ``AssertionError`` at the timeout or if processes are left behind.
    """
    marker = secrets.token_hex(8)
    base = {
        **os.environ,
        _MARKER: marker,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "OMP_NUM_THREADS": "1",
    }
    deadline, started = time.monotonic() + timeout, []
    try:
        for command, environment in zip(commands, environments, strict=True):
            started.append(
                subprocess.Popen(
                    command, env={**base, **environment}, cwd=ROOT, text=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )  # fmt: skip
        ended = []
        for process in started:
            stdout, stderr = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            ended.append(CompletedJob(status=process.returncode, stdout=stdout, stderr=stderr))
    except subprocess.TimeoutExpired as error:
        _kill_marked(marker, timeout=0)
        outputs = [process.communicate(timeout=_EXIT_TIMEOUT_S) for process in started]
        raise AssertionError(f"not finished after {timeout} s: {commands}\n{outputs}") from error
    left = _kill_marked(marker)
    assert not left, f"processes were left behind: {left}"
    return ended


def _kill_marked(word: str, timeout: float = _EXIT_TIMEOUT_S) -> list[int]:
    """Kill, by pid, all marked processes that do not exit in time; return their pids."""
    limit = time.monotonic() + timeout
    while (left := list(_marked_processes(word))) and time.monotonic() < limit:
        time.sleep(0.05)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def _marked_processes(word: str) -> Iterator[int]:
    needle = f"{_MARKER}={word}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)
            except OSError:
                continue  # has exited, or belongs to another user


def free_port() -> int:
    """Return a free port of the loopback interface, where ranks may meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(
    arguments: Sequence[str], program: str, *words: str, python: str = sys.executable
) -> list[str]:
    """Return the ``torchrun`` command line for a rank program of this folder.

    Ranks run under the same Python.
    """
    return [python, "-m", "torch.distributed.run", *arguments, str(RANK_PROGRAMS / program), *words]
