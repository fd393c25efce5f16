"""Virtual time in integer nanoseconds, and the events due at it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

US, MS, SECOND = 1_000, 1_000_000, 1_000_000_000


class EventQueue:
    """Events in order of time; those of one instant in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0
        self.executed = 0
        self._events: list[tuple[int, int, Callable[[Any], None], Any]] = []
        self._scheduled = 0

    def schedule(self, time: int, function: Callable[[Any], None], argument: Any = None) -> None:
        """Call ``function(argument)`` at ``time``, or now if that has passed."""
        self._scheduled += 1
        heapq.heappush(self._events, (max(time, self.now), self._scheduled, function, argument))

    def run(self, until: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Execute events until none is left, ``stop()`` is true, or the next is after ``until``."""
        while self._events and not stop():
            if self._events[0][0] > until:
                self.now = until
                return
            self.now, _, function, argument = heapq.heappop(self._events)
            self.executed += 1
            function(argument)

    def __len__(self) -> int:
        return len(self._events)
