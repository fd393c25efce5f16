"""One time by which several things end, however many of them wait."""

from __future__ import annotations

import time
from dataclasses import dataclass

from miraccl.params import FOREVER


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """``at`` is a time of the monotonic clock; ``seconds`` is what its user gave, for words about it."""

    seconds: float
    at: float

    @classmethod
    def after(cls, seconds: float | Deadline) -> Deadline:
        """So many seconds from now; a deadline is itself."""
        if isinstance(seconds, Deadline):
            return seconds
        seconds = min(seconds, FOREVER)
        return cls(seconds=seconds, at=time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds from now, at least 0."""
        return max(0.0, self.at - time.monotonic())

    def within(self, seconds: float | Deadline) -> Deadline:
        """The earlier of this one and another."""
        return min(self, Deadline.after(seconds), key=lambda deadline: deadline.at)
