"""Measurement on a machine with other load: disturbed repetitions do not count."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest

import miraccl
from miraccl.api import measure
from miraccl.transport import shm
from tests.support.ranks import run_ranks


@pytest.fixture
def crowded_core() -> Iterator[None]:
    """Share one core between this thread and a busy process."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()
        os.sched_setaffinity(0, cores)


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@pytest.mark.skipif(
    not os.path.exists("/proc/thread-self/schedstat"),
    reason="this kernel does not say who waited for a core",
)
def test_core_taken_by_others_is_detected(crowded_core: None) -> None:
    limit = time.monotonic() + 30
    while not measure.timed(lambda: spin(0.02))[1]:
        assert time.monotonic() < limit


def test_sleeping_thread_is_not_disturbed() -> None:
    """Waiting for a peer is not waiting for a core, except for the wake-up."""
    limit = time.monotonic() + 30
    while measure.timed(lambda: time.sleep(0.05))[1]:
        assert time.monotonic() < limit


class Script:
    """Scripted times and disturbances; the other rank reports ``theirs``."""

    def __init__(self, *rows: tuple[float, bool], theirs: bool = False) -> None:
        self.rows, self.theirs, self.taken = list(rows), theirs, 0
        self.comm: Any = types.SimpleNamespace(
            nranks=2, barrier=lambda: None, all_gather=self.gather
        )

    def timed(self, action: Any) -> tuple[float, bool]:
        row = self.rows[min(self.taken, len(self.rows) - 1)]
        self.taken += 1
        return row

    def gather(self, verdict: Any, out: Any) -> None:
        out[:] = [verdict, [self.theirs]]


@pytest.mark.parametrize(
    ("script", "taken", "best"),
    [
        (Script((3.0, False), (2.0, False), (9.0, False)), 3, 2.0),
        (
            Script((9.0, True), (8.0, True), (3.0, False), (2.0, False), (7.0, True), (4.0, False)),
            6,
            2.0,
        ),
        (Script((9.0, True), (8.0, True)), 3 * measure.RETRY_FACTOR, 8.0),  # never quiet
        (Script((3.0, False), (2.0, False), theirs=True), 3 * measure.RETRY_FACTOR, 2.0),
    ],
)
def test_undisturbed_repetitions(
    monkeypatch: pytest.MonkeyPatch, script: Script, taken: int, best: float
) -> None:
    monkeypatch.setattr(measure, "timed", script.timed)
    assert measure._best_collective_us(script.comm, lambda: None, 3) == best * 1e6
    assert script.taken == taken


def measured_one_sided() -> list[int]:
    """Measure single copies while rank 1 may not read rank 0's memory (Yama ptrace_scope 1)."""
    if os.environ["MIRACCL_RANK"] == "1":
        shm._can_read = lambda pid, address: False
    with miraccl.init() as comm:
        found = [measure._single_copy_from(comm), measure._exchange_copy_from(comm, False)]
        comm.finalize()
    return found


def test_ranks_agree_if_one_may_not_read() -> None:
    assert run_ranks(measured_one_sided, 2) == [[-1, -1]] * 2
