"""``miraccl perf`` of one-sided transfers."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.support.documents import ROOT
from tests.support.warm_python import warm_python

pytestmark = pytest.mark.multiprocess


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python(), "-m", "miraccl", "perf", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "method"),
    [
        (("write", "--sizes", "256"), "window"),
        (("writev", "--sizes", "4K", "--blocks", "4", "--private"), "process"),
    ],
)
def test_both_roles(words: tuple[str, ...], method: str) -> None:
    done = run(*words, "--seconds", "0.01", "--json")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    assert [(row["method"], row["wrong"]) for row in rows] == [(method, 0)]
    assert rows[0]["us"] > 0


def test_wrong_options() -> None:
    assert "--connect" in run("read", "--role", "client", "--secret", "x").stderr
    assert "numbers from 1 on" in run("writev", "--blocks", "0").stderr
