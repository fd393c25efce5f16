"""Completion of the command line in the shells themselves: real Tab keys, or fish's own query."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

#: (what is typed before Tab, the line that it becomes)
CASES = (
    ("miraccl perf all_r", "miraccl perf all_reduce "),
    ("miraccl perf broadcast --algo=dou", "miraccl perf broadcast --algo=double_binary_tree "),
    ("miraccl schedule draw -c all_to_all pair", "miraccl schedule draw -c all_to_all pairwise "),
    ("miraccl plan --topo mach", "miraccl plan --topo machine.xml "),
    ("miraccl run -n 4 prog", "miraccl run -n 4 program.py "),
)
DEADLINE_S = 30.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with the command, a topology file, a file that is none, a folder, and a program."""
    command = tmp_path / "bin" / "miraccl"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m miraccl "$@"\n')
    command.chmod(0o755)
    for name in ("machine.xml", "machine.txt", "program.py"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    return tmp_path


class Terminal:
    """A shell on a terminal: keys go in, what it shows comes out."""

    def __init__(self, command: list[str], folder: Path) -> None:
        environment = {
            **os.environ,
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "HOME": str(folder),
            "TERM": "dumb",
            "PS1": "",
            "INPUTRC": os.devnull,
        }
        self.file, terminal = pty.openpty()
        os.set_blocking(self.file, False)
        self.process = subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        os.close(terminal)

    def send(self, keys: str) -> None:
        """Type ``keys``."""
        os.write(self.file, keys.encode())

    def wait_for(self, text: str) -> str:
        """Read until ``text`` was shown; return everything read."""
        shown = ""
        end = time.monotonic() + DEADLINE_S
        while text not in shown and time.monotonic() < end:
            try:
                shown += os.read(self.file, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.01)
        assert text in shown, f"{text!r} not in {shown!r}"
        return shown

    def close(self) -> None:
        """End the shell."""
        self.process.kill()
        self.process.wait()
        os.close(self.file)


def _open_shell(shell: str, folder: Path) -> Terminal:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    if shell == "bash":
        terminal = Terminal(["bash", "--norc", "--noprofile", "-i"], folder)
        terminal.send("source <(miraccl completion bash); echo rea''dy\n")
    else:
        terminal = Terminal(["zsh", "-f", "-i"], folder)
        terminal.send("autoload -U compinit; compinit -u -D; source <(miraccl completion zsh)\n")
        terminal.send("bindkey '^I' complete-word; echo rea''dy\n")
    terminal.wait_for("ready")
    return terminal


@pytest.fixture(params=["bash", "zsh"])
def terminal(request: pytest.FixtureRequest, folder: Path) -> Iterator[Terminal]:
    """A shell that completes miraccl's command line."""
    opened = _open_shell(request.param, folder)
    yield opened
    opened.close()


def test_tab_completes(terminal: Terminal) -> None:
    """The line under the cursor becomes the expected one; it is read back as a comment."""
    for typed, expected in CASES:
        terminal.send(typed + "\t")
        # go to the start, put an echo before, and run it: prints what Tab left on the line
        terminal.send("\x01printf '<%s>' \"\x05\"\n")
        terminal.wait_for("<" + expected.rstrip(" /"))  # zsh drops what may end a word


def test_fish_completes(folder: Path) -> None:
    """fish, asked for the completions of a line, has the expected word among them."""
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("fish is not installed")
    asked = "\n".join(f"complete -C '{typed}'" for typed, _ in CASES)
    result = subprocess.run(
        [fish, "--no-config", "-c", f"miraccl completion fish | source\n{asked}"],
        env={**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    words = {line.split("\t")[0] for line in result.stdout.splitlines()}
    assert {expected.split()[-1] for _, expected in CASES} <= words


def test_a_shell_that_is_not_known_is_refused() -> None:
    """The error names the shells that are."""
    result = subprocess.run(
        [sys.executable, "-m", "miraccl", "completion", "csh"], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "bash" in result.stderr
    assert "fish" in result.stderr
