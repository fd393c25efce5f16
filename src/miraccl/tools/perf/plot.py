"""``miraccl perf --plot``: time and bus bandwidth over size, with matplotlib (imported here only).

Peers, earlier runs (``--against``) and the bound of the machine (``--bound``) are drawn beside the
measurement. Sizes at which the algorithm changes are marked.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from miraccl.errors import InvalidUsage, MissingDependency
from miraccl.tools.options import read_bytes
from miraccl.tools.perf.bound import Bound
from miraccl.tools.perf.spec import PerfRow, busbw_factor

_ENDINGS = (".svg", ".png", ".pdf")
#: one color per library and run (Okabe and Ito, distinguishable by color-blind readers)
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_MOST_TICKS = 12


@dataclass(frozen=True, kw_only=True)
class EarlierRun:
    """Rows of a run that ``--json`` has written."""

    name: str
    rows: tuple[PerfRow, ...]


@dataclass(frozen=True, kw_only=True)
class _Line:
    """One line of both panels: sizes, times in us and bus bandwidths in GB/s."""

    label: str
    color: str
    style: Any  # a line style of matplotlib
    marker: str
    sizes: tuple[int, ...]
    times: tuple[float, ...]
    speeds: tuple[float, ...]


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


def read_run(path: str, op: str) -> EarlierRun:
    """Return the rows of ``op`` in a file of ``--json``.

    Raises:
        InvalidUsage: The file has no such rows.
    """
    try:
        records = json.loads(read_bytes(path, "run"))
        fields = {field.name for field in dataclasses.fields(PerfRow)}
        rows = tuple(
            PerfRow(**{name: value for name, value in record.items() if name in fields})
            for record in records
            if record["op"] == op
        )
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidUsage(
            f"cannot read the run {path}: it is not a file of miraccl perf --json ({error})"
        ) from None
    if not rows:
        raise InvalidUsage(f"cannot compare with {path}: it has no rows of {op}")
    return EarlierRun(name=os.path.splitext(os.path.basename(path))[0], rows=rows)


def format_size(nbytes: float) -> str:
    """Format a size for an axis: ``8 B``, ``256 KiB``, ``1.5 MiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes:.0f} B"


def draw(
    rows: Sequence[PerfRow],
    target: str,
    *,
    runs: Sequence[EarlierRun] = (),
    bound: Bound | None = None,
) -> None:
    """Draw the rows, their peer, earlier runs and the bound to ``target``."""
    figure = load_figure_class()(figsize=(13, 5.6), layout="constrained")
    time_axes, speed_axes = figure.subplots(1, 2)
    lines = [*_lines(rows, "miraccl", _COLORS[0], peer_color=_COLORS[1])]
    for number, run in enumerate(runs):
        color = _COLORS[2 + number % (len(_COLORS) - 2)]
        lines += _lines(run.rows, run.name, color, peer_color=color)
    for line in lines:
        for axes, values in ((time_axes, line.times), (speed_axes, line.speeds)):
            axes.plot(
                line.sizes,
                values,
                label=line.label,
                color=line.color,
                linestyle=line.style,
                marker=line.marker,
                markersize=4,
            )
    sizes = sorted({size for line in lines for size in line.sizes})
    times = [time for line in lines for time in line.times]
    if bound is not None:
        _draw_bound(time_axes, speed_axes, rows[0], sizes, bound, min(times))
    for axes, name in ((time_axes, "time (µs)"), (speed_axes, "bus bandwidth (GB/s)")):
        _set_sizes(axes, sizes)
        axes.set_ylabel(name)
        axes.grid(visible=True, alpha=0.3)
        _mark_changes(axes, rows)
    time_axes.set_yscale("log")
    time_axes.yaxis.set_major_formatter(lambda value, position: f"{value:g}")
    # Without a power of ten in between the minor ticks are the only ones.
    few = max(times) < 10 * min(times)
    time_axes.yaxis.set_minor_formatter(lambda value, position: f"{value:g}" if few else "")
    speed_axes.set_ylim(bottom=0)
    figure.suptitle(_title(rows[0]))
    handles, labels = speed_axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    try:
        figure.savefig(target)
    except (OSError, ValueError) as error:
        raise InvalidUsage(f"cannot write {target}: {error}") from None


def _title(first: PerfRow) -> str:
    where = f" on {first.device}" if first.device else ""
    graph = ", CUDA graphs" if first.graph else ""
    return f"{first.op}, {first.ranks} ranks{where}, {first.dtype}{graph}"


def _lines(rows: Sequence[PerfRow], name: str, color: str, *, peer_color: str) -> Iterator[_Line]:
    """Yield a line per form, and one per form of the peer."""
    for in_place, form, marker in ((False, "out of place", "o"), (True, "in place", "s")):
        mine = sorted((r for r in rows if r.in_place is in_place), key=lambda row: row.bytes)
        if not mine:
            continue
        yield _Line(
            label=f"{name}, {form}",
            color=color,
            style="-" if not in_place else (0, (6, 2)),
            marker=marker,
            sizes=tuple(r.bytes for r in mine),
            times=tuple(r.time_us for r in mine),
            speeds=tuple(r.busbw for r in mine),
        )
        theirs = [(r, r.peer_time_us) for r in mine if r.peer_time_us]
        if theirs:
            peer = theirs[0][0].peer
            yield _Line(
                label=f"{peer if name == 'miraccl' else f'{peer} of {name}'}, {form}",
                color=peer_color,
                style=":" if not in_place else "-.",
                marker="x",
                sizes=tuple(r.bytes for r, _ in theirs),
                times=tuple(time for _, time in theirs),
                speeds=tuple(
                    r.bytes / time / 1e3 * busbw_factor(r.op, r.ranks) for r, time in theirs
                ),
            )


def _set_sizes(axes: Any, sizes: Sequence[int]) -> None:
    """Label the axis with the measured sizes, at most ``_MOST_TICKS`` of them."""
    axes.set_xscale("log", base=2)
    step = -(-len(sizes) // _MOST_TICKS)
    shown = sizes[::step]
    axes.set_xticks(shown, [format_size(size) for size in shown], rotation=35, ha="right")
    axes.minorticks_off()
    axes.set_xlabel("size")


def _plan_name(row: PerfRow) -> str:
    return f"{row.algo}/{row.proto}" if row.proto else row.algo


def algorithm_changes(rows: Sequence[PerfRow]) -> list[tuple[int, str]]:
    """Return (size, algorithm and protocol) where these differ from those of the size before.

    The rows are those of one form: out of place, or in place if there are no others.
    """
    forms = [[r for r in rows if r.in_place is in_place and r.algo] for in_place in (False, True)]
    mine = sorted(forms[0] or forms[1], key=lambda row: row.bytes)
    changes: list[tuple[int, str]] = []
    for row in mine:
        if not changes or _plan_name(row) != changes[-1][1]:
            changes.append((row.bytes, _plan_name(row)))
    return changes


def _mark_changes(axes: Any, rows: Sequence[PerfRow]) -> None:
    """Draw a vertical line with the name of what runs from each change on."""
    changes = algorithm_changes(rows)
    sizes = sorted({row.bytes for row in rows})
    for number, (size, name) in enumerate(changes):
        before = max((other for other in sizes if other < size), default=None)
        x = size if before is None else (size * before) ** 0.5  # between the two
        if number:
            axes.axvline(x, color="#888888", linewidth=0.8, linestyle=(0, (2, 2)))
        axes.annotate(
            name,
            (x, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(2, 3 + 10 * (number % 3)),  # staggered: changes may be close to each other
            textcoords="offset points",
            fontsize=8,
            color="#333333",
        )


def _draw_bound(
    time_axes: Any,
    speed_axes: Any,
    first: PerfRow,
    sizes: Sequence[int],
    bound: Bound,
    shortest: float,
) -> None:
    common = {"color": "#333333", "linestyle": (0, (1, 1)), "linewidth": 1.2, "label": bound.label}
    factor = busbw_factor(first.op, first.ranks)
    times = [(size, size * factor / bound.busbw / 1e3) for size in sizes]
    # Below the shortest time the line would only compress the others.
    shown = [(size, time) for size, time in times if time >= shortest / 3]
    if shown:
        time_axes.plot(*zip(*shown, strict=True), **common)
    speed_axes.plot(sizes, [bound.busbw] * len(sizes), **common)
