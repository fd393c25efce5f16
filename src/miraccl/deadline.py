"""A point in time shared by several waits."""

from __future__ import annotations

from dataclasses import dataclass

from miraccl import clock
from miraccl.params import FOREVER


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """Instant by which an operation must have ended.

    Attributes:
        seconds: The timeout the caller gave, in seconds; used in messages only.
        at: The instant on ``clock.monotonic()``, in seconds.
    """

    seconds: float
    at: float

    @classmethod
    def after(cls, seconds: float | Deadline) -> Deadline:
        """Return the deadline ``seconds`` from now; a ``Deadline`` is returned unchanged."""
        if isinstance(seconds, Deadline):
            return seconds
        seconds = min(seconds, FOREVER)
        return cls(seconds=seconds, at=clock.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until the deadline; 0 once it has passed."""
        return max(0.0, self.at - clock.monotonic())

    def within(self, seconds: float | Deadline) -> Deadline:
        """Return the earlier of this deadline and ``seconds`` (from now, or another deadline)."""
        return min(self, Deadline.after(seconds), key=lambda deadline: deadline.at)
