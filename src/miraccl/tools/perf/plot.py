"""``miraccl perf --plot``: bus bandwidth over size, with matplotlib (imported here only)."""

from __future__ import annotations

import os
from typing import Any

import click

from miraccl.errors import InvalidUsage, MissingDependency
from miraccl.tools.perf.spec import PerfRow, busbw_factor

_ENDINGS = (".svg", ".png", ".pdf")


def load_figure_class() -> Any:
    """Return matplotlib's ``Figure``, which needs no display; raise ``MissingDependency``."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency(
            "cannot draw --plot without matplotlib",
            hint="pip install 'miraccl[plot]', or pip install matplotlib",
        ) from None
    return Figure


def check_target(target: str) -> None:
    """Raise ``UsageError`` before the measurement if the picture could not be drawn after it."""
    if os.path.splitext(target)[1].lower() not in _ENDINGS:
        raise click.UsageError(f"--plot {target}: the file name must end in {', '.join(_ENDINGS)}")
    load_figure_class()


def draw(rows: list[PerfRow], target: str) -> None:
    """Draw one line per form, and one per form of the peer."""
    figure = load_figure_class()(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for in_place, label in ((False, "out of place"), (True, "in place")):
        mine = [r for r in rows if r.in_place is in_place]
        if not mine:
            continue
        (drawn,) = axes.plot(
            [r.bytes for r in mine], [r.busbw for r in mine], marker="o", label=f"miraccl, {label}"
        )
        theirs = [(r.bytes, _peer_busbw(r)) for r in mine if r.peer_time_us]
        if theirs:
            sizes, speeds = zip(*theirs, strict=True)
            axes.plot(
                sizes,
                speeds,
                marker="x",
                linestyle="--",
                color=drawn.get_color(),
                label=f"{mine[0].peer}, {label}",
            )
    first = rows[0]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("size (bytes)")
    axes.set_ylabel("busbw (GB/s)")
    where = f" on {first.device}" if first.device else ""
    axes.set_title(
        f"{first.op}, {first.ranks} ranks{where},"
        f" {first.dtype}{', CUDA graphs' if first.graph else ''}"
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(target)
    except (OSError, ValueError) as error:
        raise InvalidUsage(f"cannot write {target}: {error}") from None


def _peer_busbw(row: PerfRow) -> float:
    assert row.peer_time_us is not None
    return row.bytes / row.peer_time_us / 1e3 * busbw_factor(row.op, row.ranks)
