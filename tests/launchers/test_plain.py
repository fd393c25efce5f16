"""Ranks started by hand, with MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE only."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.launchers.jobs import RANK_PROGRAMS, free_port, run_together
from tests.support.warm_python import TORCH, warm_python

pytestmark = pytest.mark.multiprocess
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="PyTorch is not installed (pip install 'miraccl[torch]')",
)


@pytest.mark.parametrize(
    ("kind", "address"),
    [
        ("init", "127.0.0.1"),
        ("init", "localhost"),
        pytest.param("torch", "localhost", marks=needs_torch),
    ],
)
def test_ranks_started_by_hand(kind: str, address: str, tmp_path: Path) -> None:
    nranks, port = 3, free_port()
    environments = [
        {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(nranks),
        }
        for rank in range(nranks)
    ]
    python = warm_python(*TORCH) if kind == "torch" else sys.executable
    command = [python, str(RANK_PROGRAMS / "add_up.py"), kind, str(tmp_path)]
    for ended in run_together([command] * nranks, environments):
        assert ended.status == 0, ended.stderr
    for rank in range(nranks):
        record = json.loads((tmp_path / f"rank-{rank}.jsonl").read_text())
        assert record == {"kind": kind, "rank": rank, "nranks": nranks, "total": 111}


def test_a_missing_rendezvous_is_a_usage_error(tmp_path: Path) -> None:
    command = [sys.executable, str(RANK_PROGRAMS / "add_up.py"), "init", str(tmp_path)]
    (ended,) = run_together([command], [{"RANK": "0", "WORLD_SIZE": "2"}])
    assert ended.status != 0
    assert "InvalidUsage" in ended.stderr
    assert "MASTER_ADDR" in ended.stderr
