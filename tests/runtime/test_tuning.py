"""Measured constants of this machine and their cache."""

from __future__ import annotations

import io
import subprocess
from typing import Any

import pytest

from miraccl import native
from miraccl.executor.cpu.context import ENGINE
from miraccl.planning import tuning
from miraccl.planning.cost_model import CpuConstants
from miraccl.runtime import fabric


def test_compilation_does_not_count_against_the_measuring_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = CpuConstants(switch_us=3.25)
    order = []

    def measure(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        order.append("measured")
        return subprocess.CompletedProcess(command, 0, stdout=f"{wanted.to_json()}\n")

    monkeypatch.setattr(native, "library", order.append)
    monkeypatch.setattr(subprocess, "run", measure)
    assert tuning._measure() == wanted
    assert order == [ENGINE, "measured"]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2048K\n", 2 << 20), ("0K\n", 32 << 20), ("\n", 32 << 20), ("unknown", 32 << 20)],
)
def test_cache_size_from_sysfs(text: str, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default applies if sysfs has no size, as on some emulated machines."""
    monkeypatch.setattr(fabric, "open", lambda path: io.StringIO(text), raising=False)
    assert fabric.last_level_cache_bytes() == nbytes
