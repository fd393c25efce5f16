"""Wake-up of a thread that blocks in a selector."""

from __future__ import annotations

import contextlib
import io
import os

_ONE = (1).to_bytes(8, "little")


class EventFd:
    """An eventfd to register for reading.

    Unlike a byte through a socket pair, notifying it needs no kernel memory. That matters: a thread
    is woken to send again what the kernel had no memory for.
    """

    def __init__(self) -> None:
        self._file = io.FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")

    def fileno(self) -> int:
        return self._file.fileno()

    def notify(self) -> None:
        """Wake the selector. Any thread may call it; no effect after ``close``."""
        with contextlib.suppress(OSError, ValueError):
            self._file.write(_ONE)

    def clear(self) -> None:
        """Reset it until the next ``notify``."""
        self._file.read(8)

    def close(self) -> None:
        """May be called twice."""
        self._file.close()
