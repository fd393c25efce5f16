"""Notification of objects in forked children, where they belong to the parent process."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    def forked(self) -> None:
        """Detach in a forked child: no other thread runs there and locks may be held forever."""


_forkable: weakref.WeakSet[Forkable] = weakref.WeakSet()


def register(forkable: Forkable) -> None:
    """Call ``forkable.forked()`` in every forked child while ``forkable`` is referenced."""
    _forkable.add(forkable)


def closed_reason(in_forked_child: bool) -> str:
    """Return the reason why a closed communicator accepts no calls."""
    if in_forked_child:
        return (
            "the communicator belongs to the process that made it, from which this one was forked"
        )
    return "the communicator has been finalized"


def _after_fork() -> None:
    for thing in list(_forkable):
        thing.forked()


os.register_at_fork(after_in_child=_after_fork)
