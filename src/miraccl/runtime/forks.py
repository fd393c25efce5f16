"""Forked children: what the parent made is not theirs, and whoever has made it is told there."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    def forked(self) -> None:
        """In a forked child, in which no other thread runs and locks may be held for ever."""


_forkable: weakref.WeakSet[Forkable] = weakref.WeakSet()


def register(forkable: Forkable) -> None:
    """Call ``thing.forked()`` in every forked child, as long as somebody holds ``thing``."""
    _forkable.add(forkable)


def closed_reason(in_forked_child: bool) -> str:
    """Why a communicator takes no calls: ``foreign``, in a forked child, or as it has ended."""
    if in_forked_child:
        return (
            "the communicator belongs to the process that made it, from which this one was forked"
        )
    return "the communicator has been finalized"


def _after_fork() -> None:
    for thing in list(_forkable):
        thing.forked()


os.register_at_fork(after_in_child=_after_fork)
