"""Starts ranks, sends them programs, and ends them when they fail or take too long."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.ranks import ROOT, environment, free_port

GRACE_S = 4.0  # for the other ranks, after one has failed
END_S = 20.0
LOOK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class ProgramJob:
    """Programs to run: these seeds, ``apis`` in turn."""

    seeds: range
    nranks: int
    device: str
    apis: tuple[str, ...] = ("own", "torch")
    backend: str = "miraccl"
    ranks_per_host: int = 0  # of hosts that the ranks pretend to be on; 0: this one
    limit_s: float = 60.0
    budget_s: float = float("inf")
    options: dict[str, Any] = field(default_factory=dict)

    def api(self, seed: int) -> str:
        return self.apis[seed % len(self.apis)]


@dataclass
class ProgramOutcome:
    passed: int = 0
    failed: dict[int, str] = field(default_factory=dict)


class RankProcesses:
    """Processes of all ranks, which run one program after another."""

    def __init__(self, job: ProgramJob, folder: Path) -> None:
        self._folder, self._job = folder, job
        self._answers: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._errors = [(folder / f"stderr-{rank}").open("w+") for rank in range(job.nranks)]
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.programs.rank", str(rank), str(folder)],
                env=environment(rank, job.nranks, 0),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors[rank],
                text=True,
            )
            for rank in range(job.nranks)
        ]
        for rank, process in enumerate(self._ranks):
            threading.Thread(target=self._listen, args=(rank, process), daemon=True).start()

    def _listen(self, rank: int, process: Any) -> None:
        for line in process.stdout:
            self._answers.put((rank, line))
        self._answers.put((rank, ""))

    def run(self, seed: int, number: int, stands_still: Callable[[], bool] = lambda: False) -> str:
        """Run a program and return the failure, or an empty string.

        Ranks that have not finished by the limit, or when ``stands_still``, are reported as hung.
        """
        job = self._job
        order = {
            "seed": seed,
            "api": job.api(seed),
            "nranks": job.nranks,
            "device": job.device,
            "options": job.options,
        }
        order["ranks_per_host"] = job.ranks_per_host
        order["environment"] = {"MASTER_PORT": str(free_port())}
        order["meeting"] = {"path": str(self._folder / f"meet-{number}"), "backend": job.backend}
        for process in self._ranks:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, as its result says
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()
        answers: dict[int, str] = {}
        end = time.monotonic() + job.limit_s
        while len(answers) < job.nranks:
            try:
                rank, line = self._answers.get(timeout=LOOK_S)
            except queue.Empty:
                if time.monotonic() >= end or stands_still():
                    break
                continue
            if line and not line.startswith("{"):
                continue  # output of a library
            answers[rank] = json.loads(line)["error"] if line else "its process ended"
            if answers[rank]:
                end = min(end, time.monotonic() + GRACE_S)
        if len(answers) == job.nranks and not any(answers.values()):
            return ""
        stacks = self._dump([rank for rank in range(job.nranks) if rank not in answers])
        lines = []
        for rank in range(job.nranks):
            lines.append(f"  rank {rank}: {answers.get(rank, 'did not end') or 'ended well'}")
            lines.append(f"    was at: {self._note(rank)}")
            lines.append(f"    wrote: {stacks[rank]}" if stacks[rank] else "")
        return "\n".join(line for line in lines if line)

    def _note(self, rank: int) -> str:
        path = self._folder / f"notes-{rank}"
        return (
            path.read_bytes().decode(errors="replace").strip("\0 ")
            if path.exists()
            else "its beginning"
        )

    def _dump(self, late: list[int]) -> list[str]:
        """Return the standard error of all ranks; hung ranks write their stacks first."""
        for rank in late:
            if self._ranks[rank].poll() is None:
                self._ranks[rank].send_signal(signal.SIGUSR1)
        if late:
            time.sleep(1.0)  # for the stacks to be written
        return [self.written(rank) for rank in range(len(self._ranks))]

    def written(self, rank: int) -> str:
        """Return the standard error of a rank."""
        return (self._folder / f"stderr-{rank}").read_text(errors="replace")[-5000:]

    def send_signal(self, rank: int, signal_number: int) -> None:
        self._ranks[rank].send_signal(signal_number)

    def end(self, kill: bool) -> list[int]:
        """End the processes and return their exit statuses."""
        for process in self._ranks:
            assert process.stdin is not None
            if kill:
                process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        statuses = []
        for process in self._ranks:
            try:
                statuses.append(process.wait(timeout=END_S))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                statuses.append(-signal.SIGKILL)
        for file in self._errors:
            file.close()
        return statuses


def run_programs(job: ProgramJob, say: Callable[[str], None]) -> ProgramOutcome:
    """Run the programs; after a failure, in new processes."""
    outcome, begin, crew, first = ProgramOutcome(), time.monotonic(), None, 0
    last_said = begin
    with tempfile.TemporaryDirectory(prefix="programs-") as name:
        for number, seed in enumerate(job.seeds):
            if time.monotonic() - begin > job.budget_s:
                say(
                    f"the budget of {job.budget_s:g} s is spent, "
                    f"{number} of {len(job.seeds)} programs were run"
                )
                break
            if crew is None:
                folder = Path(name) / str(number)
                folder.mkdir()
                crew, first = RankProcesses(job, folder), seed
            error = crew.run(seed, number)
            if error:
                outcome.failed[seed] = error
                say(
                    f"seed {seed} ({job.api(seed)}) FAILED; its processes had run {first} to "
                    f"{seed - 1} before\n{error}\n"
                )
                crew.end(kill=True)
                crew = None
            else:
                outcome.passed += 1
            if time.monotonic() - last_said > 5:
                last_said = time.monotonic()
                say(
                    f"{outcome.passed} right, {len(outcome.failed)} wrong, seed {seed}, "
                    f"{last_said - begin:.0f} s"
                )
        if crew is not None:
            statuses = crew.end(kill=False)
            if any(statuses):
                outcome.failed[-1] = f"exit statuses {statuses}"
                say(f"the ranks ended with {statuses}")
    return outcome
