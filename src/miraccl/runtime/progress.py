"""Messages go on although the program is elsewhere: in a collective, in a store, in its own work.

Sends and receives in the background are begun by a call, and later calls of their communicator, or of their group of PyTorch's, go on with
them.  A program that makes none of these calls for a while may be waiting for a rank that waits for the message.  So one thread per process
looks after those with messages under way, as the threads of Gloo and of some MPIs do (MPI 4.1, section 2.9 on progress); it sleeps where
there are none.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Protocol

from miraccl import trace

#: Seconds between two looks: at first, at most, and while something moves that nobody else moves.
FIRST_S, LAST_S, BUSY_S = 1e-3, 2e-2, 5e-5
#: After so long with nothing under way the thread sleeps until it is called.
QUIET_S = 1.0
_log = trace.logger("proxy")


class Movable(Protocol):
    """What this thread looks after, while it is ``watched``."""

    watched: bool

    def go_on_alone(self) -> bool | None:
        """Do what can be done at once if no other thread is at it; whether anything moved, None if nothing is under way."""


class Progress:
    """The one of this process."""

    def __init__(self) -> None:
        self.forked()

    def forked(self) -> None:
        """In a forked child, which has none of the parent's threads."""
        self._lock = threading.Lock()
        self._called = threading.Event()
        self._watched: weakref.WeakSet[Movable] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def watch(self, post: Movable) -> None:
        """Look after it until nothing has been under way for a while."""
        with self._lock:
            self._watched.add(post)
            post.watched = True
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="miraccl progress", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the host has none left: calls alone go on with messages
                    return
                self._thread = thread
            self._called.set()

    def _run(self) -> None:
        while True:
            self._called.wait()
            self._called.clear()
            self._look_after_all()

    def _look_after_all(self) -> None:
        nap, last_seen = FIRST_S, time.monotonic()
        while True:
            time.sleep(nap)
            found = [self._look_after(post) for post in list(self._watched)]
            now = time.monotonic()
            if any(moved is not None for moved in found):
                last_seen = now
            elif now - last_seen > QUIET_S and self._forget():
                return
            nap = BUSY_S if any(found) else min(max(2 * nap, FIRST_S), LAST_S)

    def _forget(self) -> bool:
        """Look after nothing any more, unless somebody has called just now, or begun something since the last look."""
        with self._lock:
            if self._called.is_set():
                self._called.clear()
                return False
            posts = list(self._watched)
            for post in posts:
                post.watched = False
            self._watched.clear()
        for post in posts:  # who began something while it was still watched did not call
            if self._look_after(post) is not None:
                self.watch(post)
        return True

    def _look_after(self, post: Movable) -> bool | None:
        try:
            return post.go_on_alone()
        except (
            Exception
        ):  # it must go on with the others; whoever waits for these meets the same error
            _log.exception("messages do not go on by themselves")
            return None


progress = Progress()
os.register_at_fork(after_in_child=progress.forked)
