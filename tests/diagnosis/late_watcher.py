"""A rank whose watcher, the thread that hears what the others tell, gets no processor for as long as a test wants."""

from __future__ import annotations

import contextlib
import socket
import threading

from miraccl.bootstrap import Event, Session
from miraccl.bootstrap.hub import READ_BYTES

PATIENCE_S = 20.0


class LateWatcher:
    """The watcher of ``session`` stops before it deals with an event, until it is let go."""

    def __init__(self, session: Session) -> None:
        assert session._link is not None
        self._link = session._link
        self._here, self._go = threading.Semaphore(0), threading.Semaphore(0)
        self._behind = 0
        session._callbacks.insert(0, self._hold)

    def _hold(self, event: Event) -> None:
        self._behind = len(self._link._deliveries)
        self._here.release()
        assert self._go.acquire(timeout=PATIENCE_S)

    def await_event(self) -> None:
        """Returns when it has stopped."""
        assert self._here.acquire(timeout=PATIENCE_S)

    def has_come(self, words: bytes) -> bool:
        """Whether ``words`` lie in its connection, behind what it has taken in."""
        with contextlib.suppress(BlockingIOError):
            return words in self._link._sock.recv(READ_BYTES, socket.MSG_PEEK)
        return False

    @property
    def awaited(self) -> bool:
        """Whether somebody has begun to wait until it catches up."""
        return len(self._link._deliveries) > self._behind

    def let_go(self, events: int = 1) -> None:
        self._go.release(events)
