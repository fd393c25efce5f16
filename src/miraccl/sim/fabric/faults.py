"""Changes of links at chosen times: failures, repairs, slow and lossy links."""

from __future__ import annotations

from dataclasses import dataclass, replace

from miraccl.errors import InvalidUsage


@dataclass(frozen=True, kw_only=True)
class LinkChange:
    """New properties of a link from ``time`` (ns) on; None keeps the old value.

    A link that is down swallows packets without notice, as a black hole does.
    """

    time: int
    link: int
    up: bool | None = None
    rate: int | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        if self.time < 0 or (self.rate is not None and self.rate < 1):
            raise InvalidUsage(
                f"cannot change link {self.link} at {self.time} ns to {self.rate} bit/s: the time "
                "must be at least 0 and the rate at least 1"
            )


def both_directions(change: LinkChange, opposite: int) -> tuple[LinkChange, LinkChange]:
    """Return a change and the same one for the link in the opposite direction."""
    return change, replace(change, link=opposite)
