"""Measured constants of this machine and their cache."""

from __future__ import annotations

import contextlib
import ctypes
import io
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miraccl import clock, native
from miraccl.api import measure
from miraccl.executor.cpu.context import ENGINE
from miraccl.native import cache
from miraccl.planning import tuning
from miraccl.planning.cost_model import CpuConstants
from miraccl.runtime import host_facts
from miraccl.types import DType, RedOp


def test_compilation_does_not_count_against_the_measuring_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = CpuConstants(switch_us=3.25)
    order: list[object] = []

    @contextlib.contextmanager
    def started() -> Iterator[None]:
        order.append("started")
        yield
        order.append("ended")

    def output_of(process: None) -> tuple[list[str], str]:
        order.append("limited")
        return [f"{wanted.to_json()}\n"], ""

    monkeypatch.setattr(native, "library", order.append)
    monkeypatch.setattr(tuning, "fold_kernel", lambda *kernel: order.append(kernel))
    monkeypatch.setattr(tuning, "_measuring_process", started)
    monkeypatch.setattr(tuning, "_output_of", output_of)
    assert tuning._measure() == wanted
    assert order == ["started", ENGINE, (DType.FLOAT32, RedOp.SUM), "limited", "ended"]


#: Constants that a measurement prints before it takes too long.
MEASURED_FIRST = CpuConstants(loop_copy=True, single_copy_from=1 << 20)


@pytest.fixture
def slow_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[int]]:
    """Replace the measurement by two processes that print a step and do not end.

    Return a function for their pids.
    """
    program = tmp_path / "slow"
    program.write_text(
        f"#!/bin/sh\necho '{MEASURED_FIRST.to_json()}'\nprintf '{{\"cut\"'\n"
        f"sleep 60 &\necho $$ $! >> {tmp_path}/pids\n"
        f"mv {tmp_path}/pids {tmp_path}/started\nwait\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(native, "library", lambda _: None)
    monkeypatch.setattr(tuning, "fold_kernel", lambda *_: None)
    monkeypatch.setattr(tuning, "LIMIT_S", 2.0)
    monkeypatch.setenv("MIRACCL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(tuning.MEASURING_VARIABLE, raising=False)
    return lambda: [int(pid) for pid in (tmp_path / "started").read_text().split()]


def _has_ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while not all(_has_ended(pid) for pid in pids):
        assert time.monotonic() < deadline, f"left behind: {pids}"
        time.sleep(0.01)


def test_a_measurement_that_is_too_slow_is_ended_and_not_repeated_at_once(
    monkeypatch: pytest.MonkeyPatch, slow_measurement: Callable[[], list[int]]
) -> None:
    load_constants = tuning.load_constants.__wrapped__
    assert load_constants() == MEASURED_FIRST
    _await_end(slow_measurement())
    monkeypatch.setattr(tuning, "_measure", lambda: pytest.fail("measured again"))
    assert load_constants() == MEASURED_FIRST  # another rank, or the next process
    wanted = CpuConstants(switch_us=3.25)
    monkeypatch.setattr(tuning, "_measure", lambda: wanted)
    monkeypatch.setattr(tuning, "RETRY_AFTER_S", 0.0)
    assert load_constants() == wanted


def test_a_measurement_without_output_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Exit status 0 without a line: the next process does not measure again at once."""
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    monkeypatch.setattr(native, "library", lambda _: None)
    monkeypatch.setattr(tuning, "fold_kernel", lambda *_: None)
    monkeypatch.setenv("MIRACCL_CACHE_DIR", str(tmp_path))
    assert tuning._measure() == CpuConstants()
    assert "cannot measure this machine: no output; defaults are used," in caplog.text
    assert tuning._recent_failure() == CpuConstants()


def test_an_interrupted_measurement_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, slow_measurement: Callable[[], list[int]]
) -> None:
    def interrupted(process: subprocess.Popen[str], timeout: float) -> None:
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(FileNotFoundError):
                assert slow_measurement()
                break
            assert time.monotonic() < deadline
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuning._measure()
    _await_end(slow_measurement())
    assert cache.read(tuning.FAILURE_FILE) is None


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"nan", b"1e99", b"-1e99", b"\xff", b"0.0", b"0.0\n[]"]
)
def test_a_damaged_note_of_a_failure_does_not_count(
    content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MIRACCL_CACHE_DIR", str(tmp_path))
    cache.write(tuning.FAILURE_FILE, content)
    assert tuning._recent_failure() is None


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2048K\n", 2 << 20), ("0K\n", 32 << 20), ("\n", 32 << 20), ("unknown", 32 << 20)],
)
def test_cache_size_from_sysfs(text: str, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default applies if sysfs has no size, as on some emulated machines."""
    monkeypatch.setattr(host_facts, "open", lambda path: io.StringIO(text), raising=False)
    assert host_facts.last_level_cache_bytes() == nbytes


@pytest.mark.parametrize("slow", [False, True])
def test_copies_that_alias_pages_are_found(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A destination 16 bytes further into its page is compared with one half a page further."""
    now, distances = [0.0], set()

    def copy(dst: int, src: int, nbytes: int) -> None:
        distances.add((dst - src) % 4096)
        now[0] += 10.0 if slow and (dst - src) % 4096 == 16 else 1.0

    monkeypatch.setattr(ctypes, "memmove", copy)
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])
    assert measure.copies_alias_pages() is slow
    assert distances == {16, 2048}
