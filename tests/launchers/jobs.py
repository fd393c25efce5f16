"""Programs started by a launcher: bounded, with all their output, and nothing left behind.

Launchers put ranks into sessions of their own, so a killed launcher may leave them.  Every process of a job carries a word in its
environment; ``Job`` looks for it afterwards, and what still has it is killed and told as a failure.
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
_EXIT_TIMEOUT_S = 30.0  # for processes that have been told to end


@dataclass(frozen=True, kw_only=True)
class CompletedJob:
    """What a command said and how it ended."""

    status: int
    stdout: str
    stderr: str


def run_together(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    timeout: float = 90.0,
) -> list[CompletedJob]:
    """Run the commands at the same time, each with its additions to the environment; ``AssertionError`` when they take too long."""
    word = secrets.token_hex(8)
    base = {
        **os.environ,
        _MARKER: word,
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
        _kill_marked(word, timeout=0)
        told = [process.communicate(timeout=_EXIT_TIMEOUT_S) for process in started]
        raise AssertionError(f"not ended after {timeout} s: {commands}\n{told}") from error
    left = _kill_marked(word)
    assert not left, f"processes were left behind: {left}"
    return ended


def _kill_marked(word: str, timeout: float = _EXIT_TIMEOUT_S) -> list[int]:
    """Kill, by pid, all processes that carry the word and do not end in time; gives their pids."""
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
                continue  # ended meanwhile, or somebody else's


def free_port() -> int:
    """A port of the loopback interface that nobody has now; ranks may meet there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(
    arguments: Sequence[str], program: str, *words: str, python: str = sys.executable
) -> list[str]:
    """The command line of ``torchrun`` for one of the rank programs of this folder, which run under the same Python as it does."""
    return [python, "-m", "torch.distributed.run", *arguments, str(RANK_PROGRAMS / program), *words]
