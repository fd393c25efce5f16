"""Shared by the benchmarks: description of the machine, medians, result files."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, kernel, versions, load and command line."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in _lines("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("miraccl", "numpy", "numba")},
        "load": os.getloadavg()[0],
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def add_output_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        help=(
            "name of the result files below bench/results, without an ending; none are written"
            " without it"
        ),
    )


def save(name: str | None, record: dict[str, Any], markdown: str) -> None:
    """Print the markdown; with a name also write ``<name>.json`` and ``<name>.md`` below
    bench/results.

    The name may be a path.
    """
    print(markdown)
    if not name:
        return
    base = Path(name) if "/" in name else RESULTS / name
    base.parent.mkdir(parents=True, exist_ok=True)
    base.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    base.with_suffix(".md").write_text(markdown + "\n", encoding="utf-8")
    print(f"saved {base}.json and {base}.md", file=sys.stderr)


def heading(title: str, machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    return (
        f"# {title}\n\n{machine['date']}, {machine['cpu']}, {machine['cores']} cores, Linux"
        f" {machine['kernel']}, Python {machine['python']}, {versions}, load"
        f" {machine['load']:.1f} at the start.\n\n    {machine['command']}\n"
    )


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(
        [*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)]
    )


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def geometric_mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values) if values else float("nan")


def show_us(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
