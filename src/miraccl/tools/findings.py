"""Records of ``miraccl doctor``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "note", "missing"]


@dataclass(frozen=True, kw_only=True)
class DoctorFinding:
    """Result of one check.

    - ``status``: ``ok``; ``note`` if miraccl works but something is slow or disabled; ``missing``
      if it does not work.
    - ``found``: observed state.
    - ``advice``: remedy, or an empty string.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


#: None: the check does not apply, or another check reports the problem
Check = Callable[[], DoctorFinding | None]


def read_text(path: str) -> str:
    """Return the stripped text of a system file, empty if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
