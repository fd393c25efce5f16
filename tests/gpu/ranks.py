"""Launcher of the ranks of a GPU test: one process per rank; ranks may share GPUs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(rank: int, nranks: int, port: int) -> dict[str, str]:
    settings = {
        "RANK": rank,
        "WORLD_SIZE": nranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": nranks,
        "MASTER_PORT": port,
    }
    return {
        **os.environ,
        **{name: str(value) for name, value in settings.items()},
        "MASTER_ADDR": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "NCCL_NVLS_ENABLE": "0",
    }


def run_cases(
    cases: list[dict[str, Any]],
    nranks: int,
    *,
    timeout: float = 300.0,
    module: str = "tests.gpu.worker",
) -> list[list[str]]:
    """Return ``answers[case][rank]``: the differences, or an empty string."""
    port = free_port()
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", module],
            env=environment(rank, nranks, port),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(nranks)
    ]
    text = json.dumps(cases)
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(text)
        worker.stdin.close()
        worker.stdin = None
    answers = []
    try:
        for rank, worker in enumerate(workers):
            out, err = worker.communicate(timeout=timeout)
            lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
            if not lines:
                raise AssertionError(
                    f"rank {rank} ended with {worker.returncode} and no result:\n{err[-4000:]}"
                )
            answers.append(json.loads(lines[0][7:]))
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    return [list(row) for row in zip(*answers, strict=True)]
