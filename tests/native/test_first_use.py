"""First use of a machine: its progress, interruption, and processes that start together."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miraccl import native
from miraccl.native import cache, compiler, progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_without_a_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.show("compiling the engine", 3.0):
        assert stream.getvalue() == (
            "miraccl: compiling the engine (once per machine, about 3 s)\n"
        )
    assert stream.getvalue().count("\n") == 1


def test_progress_on_a_terminal_is_a_bar_that_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(KeyboardInterrupt), progress.show("compiling the engine", 3.0):
        raise KeyboardInterrupt
    first, *others = stream.getvalue().split("\r\033[K")[1:]
    assert "compiling the engine, about 3 s left" in first
    assert others[-1] == ""
    assert "\n" not in stream.getvalue()


def test_progress_without_standard_error_or_with_a_closed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress.show("compiling the engine", 3.0):
            pass


@pytest.mark.parametrize(
    ("elapsed_s", "filled", "text"),
    [
        (0.0, 0, "about 4 s left"),
        (2.0, 10, "about 2 s left"),
        (3.9, 19, "nearly done"),
        (5.0, 19, "5 s, nearly done"),
        (9.0, 19, "9 s, longer than usual: the machine is busy"),
    ],
)
def test_the_bar_is_full_only_when_the_work_has_ended(
    elapsed_s: float, filled: int, text: str
) -> None:
    line = progress.bar("measuring", elapsed_s, 4.0)
    assert f"[{'#' * filled}{'.' * (20 - filled)}] measuring, " in line
    assert line.endswith(text)


def test_an_interrupted_compilation_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> list[bytes]:
        raise KeyboardInterrupt

    monkeypatch.setenv("MIRACCL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(compiler, "compile_module", interrupted)
    with pytest.raises(KeyboardInterrupt):
        native.library("miraccl.native.words")
    assert [path.name for path in tmp_path.iterdir()] == ["words.lock"]
    with cache.lock("words") as first:
        assert first
    monkeypatch.undo()
    monkeypatch.setenv("MIRACCL_CACHE_DIR", str(tmp_path))
    assert native.library("miraccl.native.words").address("miraccl_load_word")


def test_an_interrupted_write_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.write_atomically(tmp_path / "kernel.o", b"code")
    assert not list(tmp_path.iterdir())


def test_of_processes_that_start_together_one_compiles(tmp_path: Path) -> None:
    code = (
        "from miraccl import native;"
        "assert native.library('miraccl.executor.cpu.kernels.engine').address('miraccl_operate')"
    )
    environ = {**os.environ, "MIRACCL_CACHE_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environ, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    output = [process.communicate(timeout=120)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], output
    assert "".join(output) == "miraccl: compiling the engine (once per machine, about 3 s)\n"
    assert len(list(tmp_path.glob("*.o"))) == 1


def test_later_starts_do_not_import_numba() -> None:
    """Numba takes 0.4 s to import; compiled code is loaded from the cache without it."""
    text = "import sys, miraccl; miraccl.init().finalize(); print('numba' in sys.modules)"
    for _ in range(2):  # the first one may compile
        done = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=True
        )
    assert done.stdout.split() == ["False"]
