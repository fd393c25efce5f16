"""Figures with their aims, printed as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

BEFORE = "ab73fdd"
"""The commit that the figures are compared with."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured figure.

    ``before`` is the value at commit ``BEFORE``, None if it was not measured there. ``details``
    lists the places that count.
    """

    name: str
    now: float
    before: float | None
    aim: str
    unit: str = ""
    details: tuple[str, ...] = ()


def format_figures(figures: Sequence[Figure], *, details: bool = False) -> str:
    """Format the figures as a table, with their places below it if ``details`` is set."""
    rows = [("", f"at {BEFORE}", "now", "aim")]
    rows += [(f.name, _number(f.before, f.unit), _number(f.now, f.unit), f.aim) for f in figures]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip()
        for row in rows
    ]
    if details:
        for figure in figures:
            if figure.details:
                lines += ["", f"{figure.name}:", *(f"  {line}" for line in figure.details)]
    return "\n".join(lines)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    text = f"{value:,.1f}" if value != int(value) else f"{int(value):,}"
    return f"{text} {unit}".strip()


def figures_to_json(figures: Sequence[Figure]) -> str:
    """Format the figures as JSON."""
    return json.dumps({"before": BEFORE, "figures": [asdict(f) for f in figures]}, indent=1)
