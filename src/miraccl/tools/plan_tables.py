"""Tables and explanations of a plan on a terminal, from its JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from miraccl.graph.format import format_bytes, format_time
from miraccl.graph.kinds import Pattern

Json = Mapping[str, Any]

MAX_RANKS = 64
"""Longer rings are truncated."""
MAX_CHANNELS = 16
_WIDE = 140  # columns that the table of choices needs

_PATTERNS = {
    Pattern.BALANCED_TREE: "balanced tree",
    Pattern.SPLIT_TREE: "split tree",
    Pattern.TREE: "tree",
    Pattern.RING: "ring",
    Pattern.NVLS: "NVLS",
    Pattern.COLLNET_DIRECT: "CollNet direct",
}


def output_console() -> Console:
    """Return a console of the terminal's or COLUMNS' width; in files and pipes wide enough for all
    tables.
    """
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, emoji=False, width=_WIDE if wide else None)


def print_block(console: Console, block: RenderableType) -> None:
    """Print one block; outside of terminals without blanks at the ends of lines."""
    if console.is_terminal:
        console.print(block)
        return
    with console.capture() as capture:
        console.print(block)
    console.out("\n".join(line.rstrip() for line in capture.get().splitlines()), highlight=False)


def print_plan(document: Json) -> None:
    """Print all stages in the order in which they are decided."""
    console = output_console()
    console.print(f"[bold]{escape(_headline(document))}[/bold]", soft_wrap=not console.is_terminal)
    for table in (
        _system(document),
        _paths(document),
        _graphs(document),
        _counts(document),
        _rings(document),
        _trees(document),
        _model(document),
        _choices(document),
    ):
        print_block(console, table)
        console.print()
    if bound := document.get("bound"):
        _print_list(console, "Bounds on bus bandwidth", bound["sentences"])


def print_explanation(document: Json) -> None:
    """Print the reasons, stage by stage."""
    console = output_console()
    for heading, reasons in document["explain"]["sentences"].items():
        _print_list(console, f"Why: {heading.lower()}", reasons)


def _print_list(console: Console, heading: str, items: Sequence[str]) -> None:
    console.print(f"[bold]{escape(heading)}[/bold]")
    if console.is_terminal:
        grid = Table.grid(padding=(0, 1))
        for item in items:
            grid.add_row(" -", escape(item))
        console.print(grid)
    else:  # one line per item, which other programs can search
        for item in items:
            console.print(f"  - {escape(item)}", soft_wrap=True)
    console.print()


def make_table(title: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    """Return an empty table; the columns in ``numbers`` are aligned to the right."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def _headline(document: Json) -> str:
    comm = document["comm"]
    text = (
        f"{document['topology'] or 'a system'}: {document['nodes']} x"
        f" {document['gpus_per_node']} GPUs, {document['nranks']} ranks"
    )
    if comm["nNodes"] != document["nodes"]:
        text += (
            f"; the network alone joins the {len(document['domains'])} groups of GPUs of each"
            f" machine, which gives {comm['nNodes']} nodes"
        )
    settings = " ".join(f"{name}={value}" for name, value in document["env"].items())
    return f"{text} ({settings})" if settings else text


def _system(document: Json) -> Table:
    system = document["system"]
    title = f"System: {system['maxBw']:g} GB/s to a peer, {system['totalBw']:g} GB/s per GPU"
    table = make_table(title, "device", "properties", "links (GB/s)")
    for kind in ("GPU", "PCI", "NVS", "CPU", "NIC", "NET"):
        for node in system[kind]:
            groups: dict[str, list[str]] = {}
            for link, bw, name in node["links"]:
                groups.setdefault(f"{link} {bw:.4g}", []).append(name)
            links = "; ".join(f"{link}: {' '.join(names)}" for link, names in groups.items())
            table.add_row(node["name"], _properties(kind, node), escape(links))
    return table


def _properties(kind: str, node: Json) -> str:
    if kind == "GPU":
        return (
            f"rank {node['rank']} dev {node['dev']} sm"
            f" {node['sm']}{'' if node['gdr'] else ' no GPUDirect'}"
        )
    if kind == "NET":
        return f"{node['bw'] * 8:g} Gbit/s port {node['port']}{' CollNet' if node['coll'] else ''}"
    return ""


def _paths(document: Json) -> Table:
    """Return the devices each GPU reaches, grouped by path type and bandwidth."""
    paths, system = document["paths"], document["system"]
    table = make_table("Paths of the GPUs", "from", "type GB/s: to")
    for node, row in zip(system["GPU"], paths["GPU"]):
        groups: dict[str, dict[str, list[int]]] = {}
        for kind, name in (("GPU", "rank"), ("NET", "dev")):
            for target, (type, bw, _) in zip(system[kind], row[kind]):
                if type != "LOC":
                    groups.setdefault(f"{type} {bw:.4g}", {}).setdefault(kind, []).append(
                        target[name]
                    )
        texts = [
            f"{key}: "
            + ", ".join(f"{kind} {format_ranges(numbers)}" for kind, numbers in to.items())
            for key, to in groups.items()
        ]
        table.add_row(f"GPU {node['rank']}", "\n".join(texts))
    return table


def format_ranges(numbers: Sequence[int]) -> str:
    """Format numbers as ranges: ``0 1 2 5`` as ``0-2 5``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs
    )


def _graphs(document: Json) -> Table:
    table = make_table(
        "Channel graphs",
        *("graph", "channels", "GB/s inside", "GB/s between", "paths inside", "paths between"),
        *("pattern", "first channel"),
        numbers=("channels", "GB/s inside", "GB/s between"),
    )
    for graph in document["graphs"]:
        if not graph["computed"] or not graph["nChannels"]:
            reason = "nothing found" if graph["computed"] else "not searched"
            table.add_row(graph["name"], "0", "", "", "", "", reason, "")
            continue
        nets = graph["inter"][0] if graph["inter"] else None
        order = " ".join(map(str, graph["intra"][0]))
        table.add_row(
            graph["name"],
            str(graph["nChannels"]),
            f"{graph['bwIntra']:g}",
            f"{graph['bwInter']:g}",
            graph["typeIntra"],
            graph["typeInter"] if nets else "",
            _PATTERNS[Pattern(graph["pattern"])] + (", crossing NICs" if graph["crossNic"] else ""),
            f"net {nets[0]} > {order} > net {nets[1]}" if nets else order,
        )
    return table


def _counts(document: Json) -> Table:
    comm = document["comm"]
    table = make_table("Communicator", "what", "value")
    rows = {
        "nodes": comm["nNodes"],
        "channels of collectives": comm["nChannels"],
        "channels of send and receive": (
            f"{comm['p2pnChannels']}, {comm['p2pnChannelsPerPeer']} per peer"
        ),
        "NVLS": (
            f"{comm['nvlsChannels']} channels, {comm['nvls']['nHeads']} heads"
            if comm.get("nvls")
            else "not in use"
        ),
        "CollNet": f"{comm['collnet']['headsNum']} heads" if comm.get("collnet") else "not in use",
        "all GPUs joined by NVLink": "yes" if comm["isAllNvlink"] else "no",
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _distinct(rows: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers of equal channels and their common value."""
    groups: list[tuple[list[int], Any]] = []
    for c, row in enumerate(rows):
        for numbers, first in groups:
            if first == row:
                numbers.append(c)
                break
        else:
            groups.append(([c], row))
    for numbers, first in groups[:MAX_CHANNELS]:
        yield format_ranges(numbers), first


def _rings(document: Json) -> Table:
    table = make_table("Rings", "channels", "ranks")
    for channels, ring in _distinct(document["comm"]["rings"]):
        text = " ".join(map(str, ring[:MAX_RANKS]))
        table.add_row(
            channels, text + (f" ... {len(ring) - MAX_RANKS} more" if len(ring) > MAX_RANKS else "")
        )
    return table


def _trees(document: Json) -> Table:
    trees = document["comm"]["trees"]
    title = f"Trees of depth {trees[0]['depth']}: parent(children)" if trees else "Trees"
    table = make_table(title, "channels", "ranks")
    for channels, tree in _distinct(trees):
        inner = [(r, [c for c in down if c >= 0]) for r, down in enumerate(tree["down"])]
        texts = [f"{rank}({' '.join(map(str, children))})" for rank, children in inner if children]
        root = tree["up"].index(-1)
        more = f" ... {len(texts) - MAX_RANKS} more" if len(texts) > MAX_RANKS else ""
        table.add_row(channels, f"root {root}: " + " ".join(texts[:MAX_RANKS]) + more)
    return table


def _model(document: Json) -> Table:
    tuning = document["tuning"]
    table = make_table(
        "Model: latency us / bandwidth GB/s",
        "collective",
        "algorithm",
        "LL",
        "LL128",
        "Simple",
        numbers=("LL", "LL128", "Simple"),
    )
    for collective, rows in tuning["bandwidths"].items():
        for algorithm, bandwidths in rows.items():
            if any(bandwidths):
                latencies = tuning["latencies"][collective][algorithm]
                cells = [
                    f"{lat:.1f} / {bw:.1f}" if bw else "-" for lat, bw in zip(latencies, bandwidths)
                ]
                table.add_row(collective, algorithm, *cells)
    return table


def _choices(document: Json) -> Table:
    choice = document["tuning"]["choice"]
    table = make_table(
        "Choice: algorithm/protocol, time, channels x warps", "size", *choice, numbers=("size",)
    )
    for row in zip(*choice.values()):
        table.add_row(
            format_bytes(row[0][0]),
            *(f"{e[1]}/{e[2]} {format_time(e[3])} {e[4]}x{e[5]}" if e[1] else "-" for e in row),
        )
    return table
