"""A warm Python behaves like Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.warm_python import warm_python

pytestmark = pytest.mark.multiprocess
PROGRAM = """
import atexit, os, signal, subprocess, sys
action, *words = sys.argv[1:]
print(os.getpid(), flush=True)
atexit.register(print, "the end")
if action == "say":
    has_miraccl = "miraccl.runtime" in sys.modules
    print(__name__, os.getcwd(), os.environ["SAID"], words, sys.stdin.read(), has_miraccl)
    sys.exit(7)
if action == "again":
    sys.exit(subprocess.call([sys.executable, __file__, "say", "inner"]))
if action == "raise":
    raise ValueError("on purpose")
if action == "text":
    sys.exit("a reason")
if action == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if action == "term":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    print("waiting", flush=True)
    signal.pause()
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "a program.py"
    path.write_text(PROGRAM)
    return str(path)


def run(python: str, *words: str, cwd: Path | None = None) -> tuple[int, list[str], str]:
    environ = {**os.environ, "SAID": "some thing"}
    done = subprocess.run(
        [python, *words],
        env=environ,
        cwd=cwd,
        input="typed",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return (
        done.returncode,
        done.stdout.splitlines()[1:],
        done.stderr.splitlines()[-1] if done.stderr else "",
    )


@pytest.mark.parametrize("action", ["say", "raise", "text", "kill"])
def test_programs_exit_as_in_python(program: str, action: str, tmp_path: Path) -> None:
    warm, cold = (
        run(python, "-u", program, action, "a b", cwd=tmp_path)
        for python in (warm_python(), sys.executable)
    )
    if action == "say":
        assert [(warm[1][0].split()[-1]), cold[1][0].split()[-1]] == [
            "True",
            "False",
        ], "the warm Python has imported miraccl already"
        assert warm[1][0].rpartition(" ")[0] == cold[1][0].rpartition(" ")[0]
        assert warm[1][1:] == cold[1][1:] == ["the end"]
    else:
        assert warm[1] == cold[1]
    assert (warm[0], warm[2]) == (cold[0], cold[2])


def test_programs_started_by_a_program_are_warm(program: str) -> None:
    status, lines, _ = run(warm_python(), program, "again")
    assert status == 7
    assert any("inner" in line and line.endswith("True") for line in lines)


def test_modules_and_other_command_lines() -> None:
    assert run(warm_python(), "-m", "miraccl", "no such command")[0] == 2
    assert run(warm_python(), "-c", "print(1); print(2)") == (0, ["2"], "")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 5), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_signals_reach_the_program(program: str, number: int, status: int) -> None:
    with subprocess.Popen(
        [warm_python(), program, "term"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        assert process.wait(30) == status
        assert process.stdout.read() == ("the end\n" if status == 5 else ""), (
            "the program has exited: its streams are closed"
        )
