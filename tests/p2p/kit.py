"""Agents in other processes for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]


class RemoteError(Exception):
    """Error of a command in the other process."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Remote:
    """Agent in a process of its own; ``remote.call(name, ...)`` runs a method of ``Worker``."""

    def __init__(self, name: str, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [warm_python(), "-m", "tests.p2p.worker", name],
            cwd=ROOT,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        hello = self.call("hello")
        self.pid, self.address = hello["pid"], hello["address"]

    def call(self, command: str, **arguments: Any) -> Any:
        self.send(command, **arguments)
        return self.receive()

    def send(self, command: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, arguments]) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RemoteError(*answer["error"])
        return answer["value"]

    def offer(
        self, name: str, shape: tuple[int, ...], *, window: bool = False, access: str = "rw"
    ) -> bytes:
        """Make and register an array of bytes; return its descriptor."""
        self.call("make", name=name, shape=list(shape), dtype="uint8", window=window)
        return bytes.fromhex(self.call("register", name=name, access=access))

    def signal(self, number: int) -> None:
        """Send a signal; return from SIGSTOP when the kernel has stopped all threads."""
        os.kill(self.pid, number)
        while number == signal.SIGSTOP and not self._stopped():
            pass

    def _stopped(self) -> bool:
        tasks = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        with suppress(OSError, ValueError):
            self.send("close")
            assert self._process.stdout is not None
            self._process.stdout.readline()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            self._process.wait(5)
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._process.wait(5)


@contextmanager
def remote_agent(name: str = "target", **env: str) -> Iterator[Remote]:
    remote = Remote(name, env)
    try:
        yield remote
    finally:
        remote.close()
