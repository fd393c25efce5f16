"""Resolution of host names on a thread, with a time limit of the caller's."""

from __future__ import annotations

import socket
from typing import Any

from miraccl import clock


class Lookup:
    """Resolution of ``host``.

    Once it has ended, ``infos`` has the addresses as ``socket.getaddrinfo`` returns them (port 0),
    or is empty and ``problem`` says why. A numeric address needs no thread. A thread whose name
    server never answers ends at the resolver's own timeout and is not joined.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.infos: list[Any] = []
        self.problem = ""
        self._ended = clock.event()
        self._resolve(socket.AI_NUMERICHOST)
        if self.infos:
            self._ended.set()
            return
        self.problem = "name resolution does not answer"
        try:
            clock.thread(target=self._run, name="miraccl-lookup", daemon=True).start()
        except RuntimeError as error:
            self.problem = str(error)
            self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds``; return True if the resolution has ended."""
        return self._ended.wait(max(0.0, seconds))

    def _run(self) -> None:
        self._resolve(0)
        self._ended.set()

    def _resolve(self, flags: int) -> None:
        try:
            self.infos = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM, flags=flags)
        except OSError as error:
            self.problem = f"the name cannot be resolved ({error.strerror})"
        except UnicodeError:
            self.problem = "not a valid host name"
