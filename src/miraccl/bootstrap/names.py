"""Addresses of host names, asked for on a thread: a resolver waits for its servers longer than ranks may wait for each other."""

from __future__ import annotations

import socket
import threading
from typing import Any


class Lookup:
    """The addresses of ``host``. Ended: ``infos`` has them as ``socket.getaddrinfo`` does (port 0), or is empty and ``trouble`` says why.

    A numeric address needs no thread.  A thread whose server never answers ends with the resolver's patience; nobody waits for it.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.infos: list[Any] = []
        self.problem = ""
        self._ended = threading.Event()
        self._resolve(socket.AI_NUMERICHOST)
        if self.infos:
            self._ended.set()
            return
        self.problem = "the name service does not answer"
        try:
            threading.Thread(target=self._run, name="miraccl-lookup", daemon=True).start()
        except RuntimeError as error:
            self.problem = str(error)
            self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, at the latest ``seconds`` from now."""
        return self._ended.wait(max(0.0, seconds))

    def _run(self) -> None:
        self._resolve(0)
        self._ended.set()

    def _resolve(self, flags: int) -> None:
        try:
            self.infos = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM, flags=flags)
        except OSError as error:
            self.problem = f"the name is not known ({error.strerror})"
        except UnicodeError:
            self.problem = "this is no name of a host"
