"""Named implementations of one kind, with errors that list the known names."""

from __future__ import annotations

from typing import Generic, TypeVar

from miraccl.errors import InvalidUsage, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Table of implementations by name. Names are unique and lower case."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        if name in self._entries:
            raise InvalidUsage(f"cannot register {self.kind} {name!r}: the name is taken")
        if not name or name != name.lower():
            raise InvalidUsage(f"cannot register {self.kind} {name!r}: names must be lower case")
        self._entries[name] = entry
        return entry

    def remove(self, name: str) -> None:
        self._entries.pop(name, None)

    def get(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            known = ", ".join(sorted(self._entries))
            raise InvalidUsage(
                f"unknown {self.kind} {name!r}; known are: {known}",
                hint=did_you_mean(name, self._entries),
            ) from None

    def names(self) -> list[str]:
        return sorted(self._entries)
