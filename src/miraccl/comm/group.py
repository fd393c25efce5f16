"""``with miraccl.group():`` collects calls and starts them together at the end, so that no order of sends and receives can deadlock."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

from miraccl.native import atomics

_word = ctypes.c_int64(0)
_OPENED, _CLOSED = (1 << 32) + 1, -1
_add = atomics.add


def address() -> int:
    """Of a word for compiled code: how many groups threads of this process have open in the lower half, and how many there have been in
    the upper one. Doors of the CPU do not know about threads, so while any is open they leave all calls to Python."""
    global _add
    _add = atomics.bound("add_word")
    return _ADDRESS


_ADDRESS = ctypes.addressof(_word)


class Part(Protocol):
    """What a group has collected for one communicator."""

    def run(self) -> None: ...
    def drop(self) -> None: ...


AnyPart = TypeVar("AnyPart", bound=Part)


class Member(Protocol):
    """A communicator, as groups see it."""

    def run_group(self, items: list[Any]) -> None: ...


class _Items:
    """Calls of a communicator, in their order."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.items: list[Any] = []

    def run(self) -> None:
        self._member.run_group(self.items)

    def drop(self) -> None:
        """Nothing has begun."""


class Group:
    """A ``with`` block that collects calls; inside another one it is a part of that. ``parts`` run in their order."""

    __slots__ = ("_depth", "parts")
    parts: dict[Any, Any]

    def __init__(self) -> None:
        self._depth = 0

    def part(self, owner: Any, make: Callable[[Any], AnyPart]) -> AnyPart:
        """What is collected for ``owner``, at first ``make(owner)``."""
        found: AnyPart | None = self.parts.get(owner)
        if found is None:
            found = self.parts[owner] = make(owner)
        return found

    def add(self, member: Member, item: Any) -> None:
        self.part(member, _Items).items.append(item)

    def __enter__(self) -> None:
        whole = _local.group
        if whole is None:
            whole = _local.group = self
            self.parts = {}
            _add(_ADDRESS, _OPENED)
        whole._depth += 1

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        whole = _local.group
        assert whole is not None
        whole._depth -= 1
        if whole._depth:
            return
        _local.group = None
        _add(_ADDRESS, _CLOSED)
        waiting = iter(whole.parts.values())
        try:
            if kind is None:
                for part in waiting:
                    part.run()
        finally:
            for part in waiting:
                part.drop()


class _Local(threading.local):
    group: Group | None = None  # of the class: asking for what a thread has not set would cost half a microsecond


_local = _Local()


def current() -> Group | None:
    """The group that this thread has open."""
    return _local.group


def group() -> Group:
    """Batch the calls of this thread inside the ``with`` block: they start when it ends, sends and receives of a communicator together.

    Results of calls inside are filled in when the block has ended.  Groups may be nested: the outermost counts.  An exception inside
    the block drops the batch; nothing of it was sent.
    """
    return Group()
