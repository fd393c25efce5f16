"""Tables of a comparison of plans on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from miraccl.graph import tuning_constants as k
from miraccl.graph.format import format_bytes, format_time
from miraccl.graph.plan_diff import ChoiceDifference, PlanDiff, summarize_diff
from miraccl.graph.tuning_choice import TuningChoice
from miraccl.tools.plan_tables import (
    MAX_CHANNELS,
    MAX_RANKS,
    format_ranges,
    make_table,
    output_console,
    print_block,
)


def print_diff(diff: PlanDiff, left: str, right: str) -> None:
    """Print the differences; ``left`` and ``right`` name the sides."""
    console = output_console()
    console.print(f"[bold]left[/bold]   {escape(left)}", soft_wrap=True)
    console.print(f"[bold]right[/bold]  {escape(right)}", soft_wrap=True)
    console.print()
    if diff.equal:
        console.print("The plans are equal.")
    for line in summarize_diff(diff):
        console.print(f"- {escape(line)}", soft_wrap=True)
    if not diff.equal:
        console.print()
    _print_machine(console, diff)
    _print_channels(console, diff)
    _print_rings(console, diff)
    for coll in k.TUNED:
        rows = [row for row in diff.choices if row.collective is coll]
        if any(row.reason for row in rows):
            _print_choices(console, k.TUNED[coll], rows)
    same = [
        name
        for coll, name in k.TUNED.items()
        if not any(row.reason for row in diff.choices if row.collective is coll)
    ]
    if same and not diff.equal:
        console.print(f"Choices and times are equal: {', '.join(same)}", soft_wrap=True)


def _print_machine(console: Console, diff: PlanDiff) -> None:
    rows = [(d.name, d.left, d.right, 1) for d in diff.settings]
    rows += [(d.where, d.left, d.right, d.count) for d in diff.machine]
    if rows:
        table = make_table("Machine and settings", "what", "left", "right", "times")
        for name, a, b, count in rows:
            table.add_row(escape(name), escape(a), escape(b), str(count) if count > 1 else "")
        print_block(console, table)
        console.print()


def _print_channels(console: Console, diff: PlanDiff) -> None:
    if diff.channels:
        table = make_table("Channels", "what", "left", "right", "reason")
        for row in diff.channels:
            table.add_row(row.name, row.left, row.right, escape(row.reason))
        print_block(console, table)
        console.print()


def _print_rings(console: Console, diff: PlanDiff) -> None:
    if not diff.rings:
        return
    table = make_table("Rings", "channels", "left", "right")

    def ring(ranks: tuple[int, ...]) -> str:
        text = " ".join(map(str, ranks[:MAX_RANKS]))
        more = len(ranks) - MAX_RANKS
        return (text + (f" ... {more} more" if more > 0 else "")) or "-"

    for row in diff.rings[:MAX_CHANNELS]:
        table.add_row(format_ranges(row.channels), ring(row.left), ring(row.right))
    if len(diff.rings) > MAX_CHANNELS:
        table.add_row("...", f"{len(diff.rings) - MAX_CHANNELS} more", "")
    print_block(console, table)
    console.print()


def _print_choices(console: Console, name: str, rows: list[ChoiceDifference]) -> None:
    table = make_table(
        f"{name}: algorithm/protocol, time, channels x warps",
        *("size", "left", "right", "time", "reason"),
        numbers=("size", "time"),
    )

    def choice(value: TuningChoice | None) -> str:
        if value is None:
            return "-"
        protocol = k.PROTOCOL_LABELS[value.protocol]
        return (
            f"{value.algorithm.label}/{protocol} {format_time(value.time)} "
            f"{value.channels}x{value.warps}"
        )

    last = ""
    for row in rows:
        ratio = "" if row.ratio is None else f"x {row.ratio:.3g}"
        # A reason is printed where it changes: successive sizes often share one.
        reason = row.reason if row.reason != last else '"' if row.reason else ""
        last = row.reason
        table.add_row(
            format_bytes(row.nbytes),
            choice(row.left),
            choice(row.right) if row.reason else "=",
            ratio if row.reason else "",
            escape(reason),
        )
    print_block(console, table)
    console.print()
