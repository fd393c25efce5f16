"""Ranks started by ``torchrun``: one agent, two agents, and a restart after a killed rank.

Ranks of one agent start as users start them; the others use a warm Python, because importing torch
would dominate the time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'miraccl[torch]')")

from tests.launchers.jobs import RANK_PROGRAMS, CompletedJob, free_port, run_together, torchrun
from tests.support.warm_python import TORCH, warm_python

pytestmark = pytest.mark.multiprocess
KINDS = ["init", "torch"]  # run one after the other in the same ranks
NRANKS, STEPS, FATAL = 3, 6, 3  # the last two as in programs/resume.py


def static(port: int, *more: str, local_ranks: int = NRANKS) -> list[str]:
    return [
        "--nproc-per-node",
        str(local_ranks),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(port),
        *more,
    ]


def run(*commands: Sequence[str]) -> list[CompletedJob]:
    ended = run_together(commands, [{}] * len(commands))
    for one in ended:
        assert one.status == 0, one.stderr
    return ended


def said(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]


def test_one_agent(tmp_path: Path) -> None:
    options = static(free_port(), local_ranks=2)
    run(torchrun(options, "add_up.py", ",".join(KINDS), str(tmp_path)))
    for rank in range(2):
        assert said(tmp_path, rank) == [
            {"kind": kind, "rank": rank, "nranks": 2, "total": 11} for kind in KINDS
        ]


def test_two_agents(tmp_path: Path) -> None:
    """Two agents model two hosts: all ranks meet at the first agent's address."""
    port = free_port()
    agents = [static(port, "--nnodes", "2", "--node-rank", str(i), local_ranks=2) for i in range(2)]
    run(
        *(
            torchrun(agent, "add_up.py", ",".join(KINDS), str(tmp_path), python=warm_python(*TORCH))
            for agent in agents
        )
    )
    for rank in range(4):
        assert said(tmp_path, rank) == [
            {"kind": kind, "rank": rank, "nranks": 4, "total": 1111} for kind in KINDS
        ]


@pytest.mark.parametrize(
    ("kind", "victim", "mode"),
    [("init", 0, "elastic"), ("init", 2, "static"), ("torch", 1, "elastic")],
)
def test_restart_after_a_killed_rank(kind: str, victim: int, mode: str, tmp_path: Path) -> None:
    options = (
        ["--standalone", "--nproc-per-node", str(NRANKS)]
        if mode == "elastic"
        else static(free_port())
    )
    run(
        torchrun(
            [*options, "--max-restarts", "1"],
            "resume.py",
            kind,
            str(tmp_path),
            str(victim),
            python=warm_python(*TORCH),
        )
    )
    total = sum(step + rank for step in range(STEPS) for rank in range(NRANKS))
    for rank in range(NRANKS):
        *before, last = said(tmp_path, rank)
        assert last == {"generation": 1, "first": FATAL, "total": total, "nranks": NRANKS}
        if rank == victim:
            assert not before
            continue
        (seen,) = before
        assert seen["generation"] == 0
        assert seen["error"] == ("PeerDied" if kind == "init" else "BackendError")
        assert "PeerDied" in seen["error"] + seen["text"]
        assert f"rank {victim}" in seen["text"]


def test_a_second_agent_joins_a_running_job(tmp_path: Path) -> None:
    """torchrun stops the first generation; the next one has more ranks and a new rendezvous."""
    rendezvous = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{free_port()}",
        "--rdzv-conf",
        "last_call_timeout=1",
    ]
    options = [
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "2",
        "--rdzv-id",
        "grow",
        "--local-addr",
        "127.0.0.1",
        "--max-restarts",
        "1",
        *rendezvous,
    ]
    agent = torchrun(options, "grow.py", "init", str(tmp_path), python=warm_python(*TORCH))
    later = [warm_python(*TORCH), str(RANK_PROGRAMS / "when.py"), str(tmp_path / "running"), *agent]
    # PyTorch 2.13: agents that share a store (the default) deadlock after a second one has joined.
    for ended in run_together([agent, later], [{"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}] * 2):
        assert ended.status == 0, ended.stderr
    for rank in range(4):
        assert said(tmp_path, rank) == [{"rank": rank, "nranks": 4, "total": 1111}]


def test_perf() -> None:
    command = [
        warm_python(*TORCH),
        "-m",
        "torch.distributed.run",
        *static(free_port(), local_ranks=2),
    ]
    (ended,) = run(
        [
            *command,
            "-m",
            "miraccl",
            "perf",
            "all_reduce",
            "--sizes",
            "8,64K",
            "--iters",
            "2",
            "--batches",
            "1",
            "--json",
            "-",
        ]
    )
    rows = json.loads(ended.stdout)
    assert {row["bytes"] for row in rows} == {8, 65536}
    assert all(row["ranks"] == 2 and row["wrong"] == 0 for row in rows)
