"""Fault injection: a session whose watcher thread is stalled for as long as a test wants."""

from __future__ import annotations

import contextlib
import socket
import threading

from miraccl.bootstrap import Event, Session
from miraccl.bootstrap.hub import READ_BYTES
from miraccl.bootstrap.link import SocketLink
from miraccl.bootstrap.session import LinkSession

PATIENCE_S = 20.0


class LateWatcher:
    """Stalls the watcher of ``session`` before each event until ``release``."""

    def __init__(self, session: Session) -> None:
        assert isinstance(session, LinkSession)
        assert isinstance(session._link, SocketLink)
        self._link = session._link
        self._here, self._go = threading.Semaphore(0), threading.Semaphore(0)
        self._behind = 0
        session._callbacks.insert(0, self._hold)

    def _hold(self, event: Event) -> None:
        self._behind = len(self._link._callbacks)
        self._here.release()
        assert self._go.acquire(timeout=PATIENCE_S)

    def wait_for_event(self) -> None:
        """Block until the watcher stalls."""
        assert self._here.acquire(timeout=PATIENCE_S)

    def has_received(self, data: bytes) -> bool:
        """Return True if ``data`` lies unread in the receive buffer of its connection."""
        with contextlib.suppress(BlockingIOError):
            return data in self._link._sock.recv(READ_BYTES, socket.MSG_PEEK)
        return False

    @property
    def awaited(self) -> bool:
        """True if a call waits for the watcher to catch up."""
        return len(self._link._callbacks) > self._behind

    def release(self, events: int = 1) -> None:
        self._go.release(events)
