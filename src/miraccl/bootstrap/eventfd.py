"""How a thread that sleeps in a selector is woken by others."""

from __future__ import annotations

import contextlib
import io
import os

_ONE = (1).to_bytes(8, "little")


class EventFd:
    """An eventfd, to be registered for reading. Ringing it needs no memory of the kernel, unlike a byte through a pair of sockets: who is
    woken to send again what the kernel had no memory for does hear it."""

    def __init__(self) -> None:
        self._file = io.FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")

    def fileno(self) -> int:
        return self._file.fileno()

    def notify(self) -> None:
        """Any thread; nothing happens once it is closed."""
        with contextlib.suppress(OSError, ValueError):
            self._file.write(_ONE)

    def clear(self) -> None:
        """Until it is rung again."""
        self._file.read(8)

    def close(self) -> None:
        """May be called twice."""
        self._file.close()
