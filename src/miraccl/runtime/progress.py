"""Background progress of sends and receives while the application does something else.

A background transfer is started by a call and advanced by later calls of its communicator (or
PyTorch process group). An application that makes no such call for a while may itself wait for a
rank that waits for the message. One thread per process therefore advances communicators with open
transfers, like the progress threads of Gloo and of some MPIs (MPI 4.1, section 2.9); it sleeps when
there are none.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from miraccl import clock, trace

#: Seconds between polls: first, longest, and while only this thread advances transfers.
FIRST_POLL_S, MAX_POLL_S, BUSY_POLL_S = 1e-3, 2e-2, 5e-5
#: Idle time after which the thread sleeps until ``watch`` is called.
IDLE_S = 1.0
_log = trace.logger("proxy")


class Progressable(Protocol):
    """An object with open transfers; the progress thread polls it while ``watched`` is set."""

    watched: bool

    def advance_in_background(self) -> bool | None:
        """Advance without blocking, unless another thread is doing so.

        Returns:
            True if something advanced; None if nothing is open.
        """


class MessageProgressThread:
    """The progress thread of this process."""

    def __init__(self) -> None:
        self.forked()

    def forked(self) -> None:
        """Reset in a forked child, which has none of the parent's threads."""
        self._lock = threading.Lock()
        self._wake_up = clock.event()
        self._watched: weakref.WeakSet[Progressable] = weakref.WeakSet()
        self._thread: clock.Thread | None = None

    def watch(self, watched: Progressable) -> None:
        """Poll ``watched`` until nothing has been open for ``IDLE_S``.

        Virtual ranks are not polled: the thread belongs to the process, not to their clock.
        """
        if clock.current() is not clock.SYSTEM:
            return
        with self._lock:
            self._watched.add(watched)
            watched.watched = True
            if self._thread is None:
                thread = clock.thread(target=self._run, name="miraccl progress", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # out of threads: transfers advance inside calls only
                    return
                self._thread = thread
            self._wake_up.set()

    def _run(self) -> None:
        while True:
            self._wake_up.wait()
            self._wake_up.clear()
            self._poll_all()

    def _poll_all(self) -> None:
        interval, last_seen = FIRST_POLL_S, clock.monotonic()
        while True:
            clock.sleep(interval)
            found = [self._poll(post) for post in list(self._watched)]
            now = clock.monotonic()
            if any(moved is not None for moved in found):
                last_seen = now
            elif now - last_seen > IDLE_S and self._stop_watching():
                return
            interval = (
                BUSY_POLL_S if any(found) else min(max(2 * interval, FIRST_POLL_S), MAX_POLL_S)
            )

    def _stop_watching(self) -> bool:
        """Drop all objects; return False if one was added or has started something since the last
        poll.
        """
        with self._lock:
            if self._wake_up.is_set():
                self._wake_up.clear()
                return False
            posts = list(self._watched)
            for post in posts:
                post.watched = False
            self._watched.clear()
        # A transfer started while ``watched`` was still set did not call ``watch``.
        for post in posts:
            if self._poll(post) is not None:
                self.watch(post)
        return True

    def _poll(self, post: Progressable) -> bool | None:
        try:
            return post.advance_in_background()
        except (
            Exception
        ):  # keep serving the others; a call that waits for these gets the same error
            _log.exception("cannot advance transfers in the background")
            return None


progress = MessageProgressThread()
os.register_at_fork(after_in_child=progress.forked)
