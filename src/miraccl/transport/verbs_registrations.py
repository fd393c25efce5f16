"""Cache of memory registrations: ranges with reference counts, bounded, and invalidated.

A registration pins pages of memory, so it must end before they are unmapped: afterwards the adapter
would still write to the old pages while the process sees others. Hence the owner of a range
promises to call ``invalidate`` before its memory goes away, and only ranges of such owners belong
here. A range that is released stays registered, because registering costs some 10 us and 0.1 us per
page, until room is needed for another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MAX_ENTRIES = 64
MAX_BYTES = 1 << 32


@dataclass(eq=False)
class Registration:
    """Registered range.

    Attributes:
        handle: What the function that registers returned.
        users: Number of ``acquire`` without ``release``.
        valid: False once it was invalidated; it ends with its last user then.
    """

    address: int
    nbytes: int
    handle: Any
    users: int = 0
    valid: bool = True

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    def covers(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.end

    def touches(self, address: int, nbytes: int) -> bool:
        return self.address < address + nbytes and address < self.end


class RegistrationCache:
    """Registrations of one set of devices; not thread-safe.

    Args:
        register: ``register(address, nbytes)`` returns a handle, or raises.
        deregister: Ends the registration of a handle.
        max_entries: Largest number of registrations.
        max_bytes: Largest number of registered bytes; both bounds evict the registration without
            users that was released first, and refuse new ones if all have users.

    Attributes:
        hits, misses, evictions: Counts since the start.
    """

    def __init__(
        self,
        register: Callable[[int, int], Any],
        deregister: Callable[[Any], None],
        *,
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._register, self._deregister = register, deregister
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: list[Registration] = []  # in the order of their last release
        self.hits = self.misses = self.evictions = 0

    def __iter__(self) -> Iterator[Registration]:
        return iter(self._entries)

    @property
    def nbytes(self) -> int:
        """Registered bytes."""
        return sum(entry.nbytes for entry in self._entries)

    def find(self, address: int, nbytes: int) -> Registration | None:
        """Return a valid registration that covers a range."""
        for entry in self._entries:
            if entry.valid and entry.covers(address, nbytes):
                return entry
        return None

    def acquire(self, address: int, nbytes: int) -> Registration | None:
        """Return a registration of a range with one user more; None if the bounds leave no room.

        Whatever ``register`` raises passes, after registrations without users were ended and it
        was tried again.
        """
        entry = self.find(address, nbytes)
        if entry is None:
            self.misses += 1
            if not self._make_room(nbytes):
                return None
            entry = Registration(address, nbytes, self._try_register(address, nbytes))
            self._entries.append(entry)
        else:
            self.hits += 1
        entry.users += 1
        return entry

    def _try_register(self, address: int, nbytes: int) -> Any:
        try:
            return self._register(address, nbytes)
        except Exception:
            if not self.trim():
                raise
        return self._register(address, nbytes)

    def _make_room(self, nbytes: int) -> bool:
        if nbytes > self._max_bytes:
            return False
        while len(self._entries) >= self._max_entries or self.nbytes + nbytes > self._max_bytes:
            idle = next((entry for entry in self._entries if not entry.users), None)
            if idle is None:
                return False
            self.evictions += 1
            self._end(idle)
        return True

    def release(self, entry: Registration) -> None:
        """End one use; the registration stays unless it was invalidated."""
        if entry.users <= 0:
            raise ValueError("cannot release a registration without a user")
        entry.users -= 1
        if entry.users == 0:
            if entry.valid:
                self._entries.remove(entry)
                self._entries.append(entry)
            else:
                self._end(entry)

    def invalidate(self, address: int, nbytes: int) -> bool:
        """End the registrations that touch a range, whose memory is about to go away.

        Returns:
            True if none is left. False if one has users: it is not used for new ones, and ends
            with the last; until then the memory must stay.
        """
        touched = [entry for entry in self._entries if entry.touches(address, nbytes)]
        for entry in touched:
            entry.valid = False
            if not entry.users:
                self._end(entry)
        return not any(entry.users for entry in touched)

    def trim(self) -> int:
        """End all registrations without users; return how many."""
        idle = [entry for entry in self._entries if not entry.users]
        for entry in idle:
            self._end(entry)
        return len(idle)

    def clear(self) -> None:
        """End all registrations."""
        for entry in list(self._entries):
            self._end(entry)

    def _end(self, entry: Registration) -> None:
        self._entries.remove(entry)
        self._deregister(entry.handle)
