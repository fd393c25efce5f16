"""Links and hubs at the end of the interpreter and in forked children.

An interpreter that exits says goodbye, with the exception that ended it: the other ranks then see
who left and why, instead of a death. A forked child closes its copies of the descriptors: while
they are open, the death of the parent would not close its connections.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import Protocol

from miraccl import clock

#: Seconds a hub waits at interpreter exit for ranks that exit at the same time; after an exception.
LINGER_SECONDS, SHORT_LINGER_SECONDS = 1.0, 0.25
MAX_REASON = 500


class Closable(Protocol):
    def close(self, reason: str) -> None: ...
    def forked(self) -> None: ...


class StoppableHub(Closable, Protocol):
    def join(self, timeout: float | None = None) -> bool: ...


links: weakref.WeakSet[Closable] = weakref.WeakSet()
hubs: weakref.WeakSet[StoppableHub] = weakref.WeakSet()


def _close_at_exit() -> None:
    problem = getattr(
        sys, "last_value", None
    )  # set by the interpreter when it shows an uncaught exception
    reason = (
        f"its interpreter exited after {type(problem).__name__}: {problem}"
        if problem is not None
        else "its interpreter exited"
    )
    for link in list(links):
        link.close(reason[:MAX_REASON])
    give_up = clock.monotonic() + (LINGER_SECONDS if problem is None else SHORT_LINGER_SECONDS)
    for hub in list(hubs):
        hub.join(max(0.0, give_up - clock.monotonic()))
        hub.close(reason[:MAX_REASON])


def _after_fork() -> None:
    for owner in [*links, *hubs]:
        owner.forked()
    links.clear()
    hubs.clear()


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_after_fork)
