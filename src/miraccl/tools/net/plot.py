"""``--plot`` of ``miraccl net``: matplotlib, as for ``miraccl perf``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miraccl.errors import InvalidUsage
from miraccl.tools.net.bench import BenchRow
from miraccl.tools.perf.plot import format_size, load_figure_class

_BLUE, _ORANGE, _GREEN = "#0072b2", "#d55e00", "#009e73"


def draw_bench(rows: Sequence[BenchRow], peers: Sequence[Mapping[str, Any]], target: str) -> None:
    """Draw latency and rate over size, with the results of other tools."""
    figure = load_figure_class()(figsize=(13, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = [row.bytes for row in rows]
    left.plot(sizes, [row.latency_us for row in rows], color=_BLUE, marker="o", markersize=4)
    left.set_yscale("log")
    left.yaxis.set_major_formatter(lambda value, position: f"{value:g}")
    times = [row.latency_us for row in rows]
    few = max(times) < 10 * min(times)  # without a power of ten in between
    left.yaxis.set_minor_formatter(lambda value, position: f"{value:g}" if few else "")
    left.set_ylabel("one way (µs)")
    for label, color, values in (
        ("one way", _BLUE, [row.oneway_gbps for row in rows]),
        ("both ways", _GREEN, [row.both_gbps for row in rows]),
    ):
        right.plot(sizes, values, color=color, marker="o", markersize=4, label=label)
    for peer in (peer for peer in peers if peer["gbps"]):
        if peer["bytes"]:
            right.plot(
                [peer["bytes"]], [peer["gbps"]], color=_ORANGE, marker="x", label=peer["tool"]
            )
        else:
            right.axhline(peer["gbps"], color=_ORANGE, linestyle=":", label=peer["tool"])
    right.set_ylabel("Gbit/s")
    right.set_ylim(bottom=0)
    right.legend()
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [format_size(size) for size in sizes], rotation=35, ha="right")
        axes.xaxis.minorticks_off()
        axes.grid(visible=True, alpha=0.3)
    figure.suptitle(f"messages between two hosts over {rows[0].transport}")
    _save(figure, target)


def draw_rtts(samples: Mapping[str, Sequence[float]], target: str) -> None:
    """Draw the distribution of round-trip times of each path, in microseconds."""
    figure = load_figure_class()(figsize=(8, 5.6), layout="constrained")
    axes = figure.subplots()
    for name, values in samples.items():
        ordered = sorted(values)
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        axes.plot(ordered, shares, label=name, drawstyle="steps-post")
    axes.set_xscale("log")
    axes.set_xlabel("round trip (µs)")
    axes.set_ylabel("share of probes")
    axes.grid(visible=True, alpha=0.3)
    if samples:
        axes.legend()
    _save(figure, target)


def draw_watch(series: Mapping[str, Sequence[tuple[float, float]]], target: str) -> None:
    """Draw the rate of each path over time: (seconds, Gbit/s)."""
    figure = load_figure_class()(figsize=(11, 5.6), layout="constrained")
    axes = figure.subplots()
    for name, points in series.items():
        axes.plot([t for t, _ in points], [rate for _, rate in points], label=name)
    axes.set_xlabel("seconds")
    axes.set_ylabel("sent and received (Gbit/s)")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    if series:
        axes.legend(fontsize=7)
    _save(figure, target)


def _save(figure: Any, target: str) -> None:
    try:
        figure.savefig(target)
    except (OSError, ValueError) as error:
        raise InvalidUsage(f"cannot write {target}: {error}") from None
