"""Network paths of this process's communicators, for ``miraccl net watch``.

A process that has connections over a network listens at a Unix socket in the user's private folder
(``bootstrap.runtime_file``), from its first such communicator to its last. A client that connects
reads one JSON document and the end of the stream: ``{"pid": ..., "time": ..., "communicators":
[{"name", "rank", "nranks", "paths": [PathStatus as a dictionary]}]}``. ``time`` is a monotonic
clock's, so that rates follow from two documents. Nothing is measured or kept until then, and the
thread that answers blocks in ``accept``.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from miraccl import clock, trace
from miraccl.bootstrap.runtime_file import runtime_folder
from miraccl.errors import MiracclError, SystemFailure
from miraccl.transport.base import PathStatus

log = trace.logger("socket")

PREFIX, SUFFIX = "net-", ".sock"
SEND_TIMEOUT_S = 2.0
RECEIVE_TIMEOUT_S = 3.0
_STOP_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True, eq=False)
class PathSource:
    """Paths of one communicator; ``paths`` is callable from any thread."""

    name: str
    rank: int
    nranks: int
    paths: Callable[[], Sequence[PathStatus]]


class StatusServer:
    """Answers with the paths of all sources; runs while there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: list[PathSource] = []
        self._listener: socket.socket | None = None
        self._path = ""
        self._thread: Any = None

    def add(self, source: PathSource) -> None:
        """Publish a source. A process that cannot listen is not watched; the log says why."""
        with self._lock:
            self._sources.append(source)
            if self._listener is None:
                try:
                    self._start()
                except (OSError, RuntimeError, MiracclError) as error:
                    log.info("miraccl net watch cannot see this process: %s", error)
                    self._stop()

    def remove(self, source: PathSource) -> None:
        """Withdraw a source; the last one ends the thread. Idempotent."""
        with self._lock:
            if source in self._sources:
                self._sources.remove(source)
            if not self._sources:
                self._stop()

    def forget(self) -> None:
        """Detach in a forked child: socket file and thread are the parent's."""
        self._lock = threading.Lock()
        listener, self._listener, self._thread = self._listener, None, None
        self._sources, self._path = [], ""
        if listener is not None:
            listener.close()

    def snapshot(self) -> dict[str, Any]:
        """Return the document that a client receives."""
        communicators = []
        for source in list(self._sources):
            with contextlib.suppress(OSError, MiracclError):  # it is being closed
                communicators.append(
                    {
                        "name": source.name,
                        "rank": source.rank,
                        "nranks": source.nranks,
                        "paths": [asdict(path) for path in source.paths()],
                    }
                )
        return {"pid": os.getpid(), "time": clock.monotonic(), "communicators": communicators}

    def _start(self) -> None:
        path = os.path.join(runtime_folder(), f"{PREFIX}{os.getpid()}{SUFFIX}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of an earlier process with this number
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._path = path
        self._listener.listen(8)
        self._thread = clock.thread(self._serve, args=(self._listener,), name="miraccl net status")
        self._thread.start()

    def _stop(self) -> None:
        listener, self._listener = self._listener, None
        thread, self._thread = self._thread, None
        if listener is None:
            return
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # ends ``accept``
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_TIMEOUT_S)
        listener.close()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                if self._listener is not listener:
                    return
                clock.sleep(0.1)  # no descriptor is free
                continue
            with client, contextlib.suppress(OSError):
                client.settimeout(SEND_TIMEOUT_S)
                client.sendall(json.dumps(self.snapshot()).encode())


def find_processes() -> Iterator[tuple[int, str]]:
    """Yield (pid, socket) of this user's processes on this host that have network paths."""
    folder = runtime_folder()
    for name in sorted(os.listdir(folder)):
        number = name.removeprefix(PREFIX).removesuffix(SUFFIX)
        if name == f"{PREFIX}{number}{SUFFIX}" and number.isdecimal():
            yield int(number), os.path.join(folder, name)


def read_status(path: str) -> dict[str, Any] | None:
    """Read the document of a process; None if it has ended, whose socket is then removed.

    Raises:
        SystemFailure: The process does not answer.
    """
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(RECEIVE_TIMEOUT_S)
        try:
            sock.connect(path)
            data = b"".join(iter(lambda: sock.recv(1 << 16), b""))
            document: dict[str, Any] = json.loads(data)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None
        except (OSError, ValueError) as error:
            raise SystemFailure(f"cannot read the paths of {path}: {error}") from None
    return document


server = StatusServer()
os.register_at_fork(after_in_child=server.forget)
