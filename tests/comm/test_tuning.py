"""How this machine's constants come about."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from miraccl import native
from miraccl.comm import tuning
from miraccl.comm.model import Constants
from miraccl.executor.cpu.context import ENGINE


def test_the_time_for_measuring_does_not_pass_while_the_engine_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Constants(switch_us=3.25)
    order = []

    def measure(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        order.append("measured")
        return subprocess.CompletedProcess(command, 0, stdout=f"{wanted.to_json()}\n")

    monkeypatch.setattr(native, "library", order.append)
    monkeypatch.setattr(subprocess, "run", measure)
    assert tuning._measure() == wanted
    assert order == [ENGINE, "measured"]
