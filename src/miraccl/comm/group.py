"""``with miraccl.group():`` collects calls and starts them together at the end, so that no order of sends and receives can deadlock."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

_local = threading.local()
_lock = threading.Lock()
_open_groups = 0


class Member(Protocol):
    """A communicator, as groups see it."""

    def look_before_running(self, reason: int, on: bool) -> None: ...
    def run_group(self, items: list[Any]) -> None: ...


members: weakref.WeakSet[Any] = weakref.WeakSet()
REASON_GROUP = 2


class _Group:
    def __init__(self) -> None:
        self.items: dict[int, tuple[Any, list[Any]]] = {}

    def add(self, member: Member, item: Any) -> None:
        self.items.setdefault(id(member), (member, []))[1].append(item)

    def run(self) -> None:
        for member, items in self.items.values():
            member.run_group(items)


def current() -> _Group | None:
    """The group that this thread has open."""
    return getattr(_local, "group", None)


@contextmanager
def group() -> Iterator[None]:
    """Batch the calls of this thread inside the ``with`` block: they start when it ends, sends and receives of a communicator together.

    Results of calls inside are filled in when the block has ended.  Groups may be nested: the outermost counts.  An exception inside
    the block drops the batch; nothing of it was sent.
    """
    global _open_groups
    if current() is not None:
        yield
        return
    mine = _local.group = _Group()
    _count(1)
    try:
        yield
    finally:
        _local.group = None
        _count(-1)
    mine.run()


def _count(change: int) -> None:
    """Doors of all communicators of this process are shut while any thread has a group open: they do not know about threads."""
    global _open_groups
    with _lock:
        _open_groups += change
        on = _open_groups > 0
        for member in list(members):
            member.look_before_running(REASON_GROUP, on)


def join(member: Any) -> None:
    """A new communicator takes part in groups from now on."""
    with _lock:
        members.add(member)
        if _open_groups:
            member.look_before_running(REASON_GROUP, True)


Action = Callable[[], Any]
