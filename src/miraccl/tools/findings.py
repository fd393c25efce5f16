"""What ``miraccl doctor`` finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "note", "missing"]


@dataclass(frozen=True, kw_only=True)
class DoctorFinding:
    """One thing that was looked at. ``note``: miraccl works, something is slower or off. ``missing``: it does not work."""

    name: str
    status: Status
    found: str
    advice: str = ""


Check = Callable[
    [], DoctorFinding | None
]  # None: there is nothing to look at here, or another check says it


def read_text(path: str) -> str:
    """What a file of the system says, without the space around it; empty where it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
