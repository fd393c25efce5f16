"""One-sided transfers beside NIXL and Mooncake, in turns.

    python bench/transfers.py
    python bench/transfers.py --peer-python /path/to/venv/bin/python --out transfers/MACHINE-DATE
    python bench/transfers.py --device cuda

The peers are installed in an environment of their own (no torch and no CUDA are needed)::

    pip install numpy; pip install --no-deps nixl-cu12==1.5.1
    pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1

A cell is the time in us until the initiator sees the completion, transfers one after the other from
prepared handles: the best of many short batches, and the best of the rounds. Every engine runs in
two processes of its own; the engines take turns within a round, and the bytes of every write are
compared. The start of an agent and its first transfer, of 64 bytes, count without the import of the
engine and the memory of the caller, and with bytecode of Python sources at hand, which the first
process leaves in a folder for the next ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common

WORKER = Path(__file__).parents[1] / "src/miraccl/tools/perf/transfer_worker.py"
SMALL = (256, 4096, 16384, 65536, 1 << 20, 100_000_000)
BLOCKS = ((1024, 4096), (1024, 16384), (4096, 16384))
MAX_BYTES = 100_000_000
#: Bytecode of the processes, as on a machine on which they have run before.
BYTECODE = tempfile.TemporaryDirectory(prefix="miraccl-bytecode-")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine with its settings."""

    name: str
    kind: str
    window: bool = False
    env: dict[str, str] = field(default_factory=dict)


OURS = (
    Engine(name="miraccl window", kind="miraccl", window=True),
    Engine(name="miraccl private", kind="miraccl"),
    Engine(name="miraccl tcp", kind="miraccl", env={"MIRACCL_P2P_TRUST": "target"}),
)
PEERS = (
    Engine(name="nixl posix,cma", kind="nixl", env={"UCX_TLS": "posix,cma"}),
    Engine(name="nixl as installed", kind="nixl", env={"NIXL_AS_INSTALLED": "1"}),
    Engine(name="nixl tcp", kind="nixl", env={"UCX_TLS": "tcp"}),
    Engine(name="mooncake tcp", kind="mooncake"),
)
LOCAL = ("miraccl window", "miraccl private", "nixl posix,cma", "nixl as installed")
NETWORK = ("miraccl tcp", "nixl tcp", "mooncake tcp")


class Worker:
    """Process of an engine."""

    def __init__(self, engine: Engine, role: str, python: str) -> None:
        env = {**os.environ, **engine.env, "OMP_NUM_THREADS": "1", "UCX_LOG_LEVEL": "error"}
        env |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": BYTECODE.name}
        env["GLOG_minloglevel"] = "3"
        words = [python, str(WORKER), engine.kind, role, "window" if engine.window else "private"]
        self._process = subprocess.Popen(
            words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def send(self, command: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps([command, arguments]) + "\n").encode())
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        while True:
            line = self._process.stdout.readline()
            if not line:
                return RuntimeError("the process has ended")
            if not line.startswith(b"{"):
                continue  # output of a library
            answer = json.loads(line)
            return RuntimeError(answer["error"]) if "error" in answer else answer["value"]

    def call(self, command: str, *arguments: Any) -> Any:
        self.send(command, *arguments)
        answer = self.receive()
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


def cells(engine: Engine) -> list[tuple[str, int, list[int] | None]]:
    """Return (kind, bytes, remote blocks) of an engine's cells."""
    rng = random.Random(1)
    found: list[tuple[str, int, list[int] | None]] = [("write", n, None) for n in SMALL]
    found += [("read", n, None) for n in (1 << 16, 1 << 20, 100_000_000)]
    for count, nbytes in BLOCKS:
        blocks = list(range(count))
        rng.shuffle(blocks)
        found.append(("write", nbytes, blocks))
    return found


def label(kind: str, nbytes: int, blocks: list[int] | None) -> str:
    return f"{kind} {nbytes}" if blocks is None else f"{kind} {len(blocks)} x {nbytes}"


def run_engine(engine: Engine, python: str, seconds: float) -> dict[str, float | str]:
    """Measure all cells of one engine in a pair of new processes."""
    target, initiator = Worker(engine, "target", python), Worker(engine, "initiator", python)
    result: dict[str, float | str] = {}
    try:
        result["memory of an agent, MiB"] = target.call("memory")
        offer = target.call("offer", MAX_BYTES)
        first, start = initiator.call("connect", offer, MAX_BYTES), initiator.call("start_ms")
        result["start, ms"] = start
        result["start with first transfer, ms"] = start + first
        for kind, nbytes, blocks in cells(engine):
            name = label(kind, nbytes, blocks)
            try:
                result[name] = initiator.call("measure", kind, nbytes, blocks, seconds)
                if kind == "write" and not target.call("check", nbytes, blocks):
                    result[name] = "wrong bytes"
            except RuntimeError as error:
                result[name] = f"fails: {error}"[:60]
        if engine.kind != "mooncake":
            target.send("pong", initiator.call("metadata"))
            result["notification round trip"] = initiator.call("ping", 4 * seconds)
        result["idle, % of a core"] = initiator.call("cpu", 0.5)
    except RuntimeError as error:
        result["error"] = str(error)
    finally:
        initiator.close()
        target.close()
    return result


def best_of(values: list[float | str]) -> float | str:
    numbers = [v for v in values if isinstance(v, float | int)]
    return min(numbers) if numbers else values[0]


def table(names: tuple[str, ...], results: dict[str, dict[str, float | str]]) -> str:
    used = [name for name in names if name in results]
    rows = list(dict.fromkeys(row for name in used for row in results[name]))
    peers = [name for name in used if not name.startswith("miraccl")]
    lines = []
    for row in rows:
        values = [results[name].get(row, "") for name in used]
        numbers = [results[n][row] for n in peers if isinstance(results[n].get(row), float)]
        best = min(numbers, default=None)  # type: ignore[type-var]
        shown = [_show(v) for v in values]
        for name in used:
            value = results[name].get(row)
            if name.startswith("miraccl"):
                ratio = f"{best / value:.2f} x" if best and isinstance(value, float) else ""
                shown.append(ratio)
        lines.append([row, *shown])
    ours = [f"{name} / best peer" for name in used if name.startswith("miraccl")]
    return common.markdown_table(["cell, us", *used, *ours], lines)


def _show(value: float | str) -> str:
    return common.show_us(value) if isinstance(value, float | int) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", help="Python of an environment with the peers")
    parser.add_argument("--engines", default="", help="part of the names of engines to run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.25, help="per cell and round")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    common.add_output_option(parser)
    options = parser.parse_args()
    if options.device == "cuda":
        import transfers_cuda

        transfers_cuda.main(options)
        return
    machine = common.describe_machine()
    engines = [e for e in (*OURS, *PEERS) if options.engines in e.name]
    if not options.peer_python:
        engines = [e for e in engines if e.kind == "miraccl"]
    rounds: dict[str, list[dict[str, float | str]]] = {e.name: [] for e in engines}
    for number in range(options.rounds):
        for engine in engines:
            python = sys.executable if engine.kind == "miraccl" else options.peer_python
            print(f"round {number}: {engine.name}", file=sys.stderr)
            rounds[engine.name].append(run_engine(engine, python, options.seconds))
    results = {
        name: {row: best_of([r[row] for r in runs if row in r]) for row in runs[0]}
        for name, runs in rounds.items()
        if runs
    }
    text = common.heading("One-sided transfers", machine)
    text += "\nTime in us until the completion is seen. Same host:\n\n" + table(LOCAL, results)
    text += "\n\nTCP on loopback:\n\n" + table(NETWORK, results)
    common.save(options.out, {"machine": machine, "rounds": rounds}, text)


if __name__ == "__main__":
    main()
