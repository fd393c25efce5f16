"""Real ranks for tests.

``run_ranks(target, n, *args)`` runs a module-level function of a test module in ``n`` processes of
this host, with the environment from which ``miraccl.init()`` makes a communicator, and returns the
result of each rank::

    def sums(value):
        with miraccl.init() as comm:
            x = np.full(4, value + comm.rank, np.float32)
            comm.all_reduce(x)
            return x

    def test_sum():
        for x in run_ranks(sums, 3, 1.0):
            assert x.tolist() == [6.0] * 4

``rank_outcomes`` does the same for ranks that are expected to fail. Every run has a hard deadline,
after which its ranks are killed by pid and their output is shown. Ranks are forked from a server
process (``rank_server.py``) that has imported numpy, miraccl and the modules of previous targets,
and torch for targets below ``tests.torch``. It starts on first use and ends with the test session.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miraccl.tools.spawn import RankOutcome
from tests.support.warm_python import TORCH

ROOT = Path(__file__).resolve().parents[2]
_LENGTH = struct.Struct("<Q")
_SERVER_TIMEOUT_S = 15.0  # seconds after a run's deadline in which the server must respond


class _Server:
    """Process that forks ranks; handles one request at a time."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.rank_server", *modules],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, request: dict[str, Any]) -> list[RankOutcome]:
        assert self._process.stdin is not None
        body = pickle.dumps(request)
        self._process.stdin.write(_LENGTH.pack(len(body)) + body)
        self._process.stdin.flush()
        limit = request["timeout"] + _SERVER_TIMEOUT_S
        try:
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size, limit))
            outcomes: list[RankOutcome] = pickle.loads(self._read(length, limit))
        except TimeoutError:
            self.close()
            raise
        return outcomes

    def _read(self, length: int, timeout: float) -> bytes:
        assert self._process.stdout is not None
        fd, data = self._process.stdout.fileno(), b""
        while len(data) < length:
            if not select.select([fd], [], [], timeout)[0]:
                raise TimeoutError("the server of test ranks does not respond")
            part = os.read(fd, length - len(data))
            if not part:
                raise TimeoutError(
                    f"the server of test ranks exited with status {self._process.wait(10)}"
                )
            data += part
        return data

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Kill the server and all processes it has started."""
        if self.alive:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


_servers: dict[tuple[str, ...], _Server] = {}


def _server(modules: tuple[str, ...]) -> _Server:
    if modules not in _servers or not _servers[modules].alive:
        _servers[modules] = _Server(modules)
        atexit.register(_servers[modules].close)
    return _servers[modules]


def rank_outcomes(
    target: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[RankOutcome]:
    """Run ``target(*args)`` in ``n`` ranks; return status, value, error and output of each.

    ``target`` is a module-level function below ``tests``; arguments and results must be picklable.
    ``timeout`` is in seconds; a rank killed at the timeout has a negative status. ``env`` is added
    to the environment of every rank.
    """
    qualname = target.__qualname__
    if "<" in qualname:
        raise ValueError(
            f"{qualname} is not a module-level function: another process cannot import it"
        )
    request = {
        "module": target.__module__,
        "function": qualname,
        "nranks": n,
        "args": args,
        "timeout": timeout,
        "env": dict(env or {}),
    }
    return _server(TORCH if target.__module__.startswith("tests.torch.") else ()).run(request)


def run_ranks(
    target: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``target(*args)`` in ``n`` ranks, all of which must succeed; return their results by
    rank.
    """
    outcomes = rank_outcomes(target, n, *args, timeout=timeout, env=env)
    if not all(o.ok for o in outcomes):
        raise AssertionError(
            "\n".join(_report(o) for o in sorted(outcomes, key=lambda o: (o.ok, o.order)))
        )
    return [o.value for o in outcomes]


def _report(outcome: RankOutcome) -> str:
    if outcome.ok:
        return f"rank {outcome.rank} succeeded"
    parts = [f"---- {outcome.describe()}", outcome.error.rstrip(), outcome.output.rstrip()]
    return "\n".join(p for p in parts if p)
