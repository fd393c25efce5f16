"""NIXL and Mooncake beside ``miraccl perf write|read|writev``: their Python and processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from miraccl.errors import MissingDependency, TransferError

WORKER = Path(__file__).with_name("transfer_worker.py")
PEERS = ("nixl", "mooncake")
_INSTALL = {
    "nixl": "pip install numpy; pip install --no-deps nixl-cu12",
    "mooncake": "pip install numpy; pip install --no-deps mooncake-transfer-engine-non-cuda",
}
_PROBES = {
    "nixl": "import transfer_worker; transfer_worker.nixl_api()",
    "mooncake": "import mooncake.engine",
}
_PROBE_SECONDS, _END_SECONDS = 60, 10


def find_python(peer: str, given: str | None) -> str:
    """Return a Python that can import the peer and NumPy; raise ``MissingDependency``."""
    python = given or sys.executable
    code = f"import sys; sys.path.append({str(WORKER.parent)!r}); import numpy; {_PROBES[peer]}"
    hint = f"{_INSTALL[peer]}, or set --peer-python to a Python that has it"
    try:
        probe = subprocess.run(
            [python, "-c", code],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
            env={**os.environ, "GLOG_minloglevel": "3"},
        )
    except OSError as error:
        raise MissingDependency(f"cannot run {python}: {error.strerror}", hint=hint) from None
    if probe.returncode:
        reason = (probe.stderr.strip().splitlines() or [f"status {probe.returncode}"])[-1]
        raise MissingDependency(
            f"cannot compare with {peer}: {python} cannot import it: {reason}", hint=hint
        )
    return python


class WorkerProcess:
    """Process of an engine, which answers commands in order.

    Args:
        env: Variables of the engine, beside those of this process.
    """

    def __init__(
        self, python: str, kind: str, role: str, env: dict[str, str], *, window: bool = False
    ) -> None:
        quiet = {"OMP_NUM_THREADS": "1", "UCX_LOG_LEVEL": "error", "GLOG_minloglevel": "3"}
        self.kind = kind
        self._process = subprocess.Popen(
            [python, str(WORKER), kind, role, "window" if window else "private"],
            env={**os.environ, **quiet, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def send(self, command: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps([command, arguments]) + "\n").encode())
        self._process.stdin.flush()

    def call(self, command: str, *arguments: Any) -> Any:
        """Return the answer to a command.

        Raises:
            TransferError: The engine fails, or its process has ended.
        """
        self.send(command, *arguments)
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith(b"{"):  # other lines are output of a library
                answer = json.loads(line)
                if "error" in answer:
                    raise TransferError(f"{self.kind}: {answer['error']}", reason="peer")
                return answer["value"]
        raise TransferError(f"{self.kind}: the process has ended", reason="peer")

    def close(self) -> None:
        """End the process. Idempotent."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_SECONDS)


class PeerPair:
    """Target and initiator of one peer; a context manager that ends them.

    Args:
        method: Method of miraccl, which decides what UCX may use unless UCX_TLS does.
        nbytes: Size of the memory on both sides.
    """

    def __init__(self, peer: str, python: str, *, method: str, nbytes: int) -> None:
        tls = os.environ.get("UCX_TLS") or ("tcp" if method == "tcp" else "posix,cma")
        env = {"UCX_TLS": tls} if peer == "nixl" else {}
        self.name = f"{peer} {tls}" if peer == "nixl" else f"{peer} tcp"
        self._target = WorkerProcess(python, peer, "target", env)
        self._initiator = WorkerProcess(python, peer, "initiator", env)
        try:
            self._initiator.call("connect", self._target.call("offer", nbytes), nbytes)
        except BaseException:
            self.close()
            raise

    def measure(
        self, kind: str, nbytes: int, blocks: list[int] | None, seconds: float
    ) -> tuple[float, bool]:
        """Return us per transfer, and True if the bytes of a write are right."""
        us = self._initiator.call("measure", kind, nbytes, blocks, seconds)
        return us, kind == "read" or bool(self._target.call("check", nbytes, blocks))

    def close(self) -> None:
        self._initiator.close()
        self._target.close()

    def __enter__(self) -> PeerPair:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
