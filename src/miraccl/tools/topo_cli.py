"""``miraccl topo``: detect, show, check, write and compare topologies of machines."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from miraccl.errors import InvalidUsage
from miraccl.tools.completion import complete_files
from miraccl.tools.options import (
    MAX_NODES,
    File,
    Numbers,
    OutputFile,
    SuggestingGroup,
    accelerators_option,
    write_json,
    write_text,
)

if TYPE_CHECKING:
    from rich.table import Table

    from miraccl.topo.analyse import Topology
    from miraccl.topo.explain import PathChangeLog
    from miraccl.topo.options import TopoOptions
    from miraccl.topo.paths import Key
    from miraccl.topo.records import NodeType, System
    from miraccl.topo.xmlfile import XmlFile

MAX_CPU_RANKS = 576
"""Largest number of devices of a system (``topo.build.MAX_NODES``)."""


@click.group(cls=SuggestingGroup, short_help="Show, read and compare the topology of machines.")
def topo() -> None:
    """Show, read and compare the topology of machines.

    FILE is a topology file as NCCL writes it (NCCL_TOPO_DUMP_FILE); the default is NCCL_TOPO_FILE,
    or this machine. The output is what NCCL 2.28.9 would detect on that machine, with the NCCL_*
    settings of the environment.

    \b
    Examples:
      miraccl topo detect --out machine.xml
      miraccl topo show machine.xml --explain GPU0,NET1
      miraccl topo check machine.xml
      miraccl topo diff node1.xml node2.xml
    """


def _reading_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that control how a topology file is read."""
    for decorate in (
        accelerators_option,
        click.option(
            "--collnet", is_flag=True, help="Every net without a coll attribute supports CollNet."
        ),
        click.option(
            "--fuse",
            is_flag=True,
            help="Merge FILE as NCCL does when every rank reads it through NCCL_TOPO_FILE.",
        ),
        click.option(
            "--gpus",
            type=Numbers(),
            metavar="0,2,...",
            help="Only the GPUs with these device numbers, in the order of their ranks.",
        ),
        click.option(
            "--nodes",
            type=click.IntRange(1, MAX_NODES),
            default=1,
            show_default=True,
            help="Number of such nodes in the job.",
        ),
    ):
        function = decorate(function)
    return function


_json_option = click.option(
    "--json",
    "json_target",
    type=OutputFile(),
    metavar="FILE",
    help="Write JSON; - is standard output.",
)
_accelerators_option = click.option(
    "--accelerators",
    multiple=True,
    metavar="TOML",
    shell_complete=complete_files(".toml"),
    help="Description of accelerators; repeatable.",
)
_file_argument = click.argument("file", required=False, type=File(".xml"))


def _load(file: str | None, accelerators: Sequence[str]) -> XmlFile:
    from miraccl.topo.accelerators import read_accelerators
    from miraccl.topo.load import load_topology

    described = (
        [a for name in accelerators for a in read_accelerators(name)] if accelerators else None
    )
    return load_topology(file, accelerators=described)


def _options(nodes: int, gpus: tuple[int, ...] | None, fuse: bool, collnet: bool) -> TopoOptions:
    from miraccl.topo.options import PathOptions, TopoOptions

    return TopoOptions(
        nodes=nodes, gpus=gpus or (), fuse=fuse, collnet=collnet, paths=PathOptions.read()
    )


@topo.command(short_help="Detect this machine and write its topology file.")
@click.option(
    "--out",
    type=OutputFile(),
    metavar="FILE",
    help="Topology file to write; - is standard output.  [default: -, or none with --json]",
)
@click.option(
    "--cpu-ranks",
    type=click.IntRange(0, MAX_CPU_RANKS),
    help="CPU ranks to add.  [default: one per CPU if there are no GPUs, at most 8]",
)
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False),
    default="/",
    show_default=True,
    help="Folder that holds sys and proc of a machine.",
)
@click.option(
    "--base",
    type=File(".xml"),
    help="Topology file to complete, such as the PCI tree of a provider's virtual machine.",
)
@_json_option
def detect(
    out: str | None, cpu_ranks: int | None, root: str, base: str | None, json_target: str | None
) -> None:
    """Detect this machine: PCI tree and NUMA domains, nets, GPUs and their links.

    \b
    Example:
      miraccl topo detect --out machine.xml
    """
    from miraccl.tools.net.plugins import nets
    from miraccl.topo.detect import detect_machine
    from miraccl.topo.xmlfile import read_topology

    if out == json_target == "-":
        raise InvalidUsage("cannot write both --out and --json to standard output")
    tree = read_topology(base).root if base else None
    here = root == "/"
    machine = detect_machine(
        root,
        cpu_ranks=cpu_ranks,
        gpus=None if here else (),
        base=tree,
        nets=nets() if here else None,
    )
    for _, text in machine.notes:
        click.echo(f"note: {text}", err=True)
    if json_target:
        write_json(json_target, _tree(machine))
    if out or not json_target:
        _write(machine, out or "-")


def _write(file: XmlFile, out: str) -> None:
    from miraccl.topo.xmlfile import format_topology

    write_text(out, format_topology(file.root))


def _tree(file: XmlFile) -> dict[str, Any]:
    def node(xml: Any) -> dict[str, Any]:
        return {
            "element": xml.name,
            "attributes": xml.attrs,
            "children": [node(child) for child in xml.children],
        }

    return node(file.root)


@topo.command(short_help="Write the topology that takes part, as NCCL dumps it.")
@_file_argument
@click.option(
    "--out",
    type=OutputFile(),
    metavar="FILE",
    default="-",
    help="File to write; - is standard output.  [default: -]",
)
@_reading_options
def dump(
    file: str | None,
    out: str,
    nodes: int,
    gpus: tuple[int, ...] | None,
    fuse: bool,
    collnet: bool,
    accelerators: tuple[str, ...],
) -> None:
    """Write the topology that takes part, laid out as NCCL dumps it.

    With --gpus or --fuse this is the merged topology the ranks would agree on. Described
    accelerators keep their own elements unless --gpus, --fuse or --collnet select devices.

    \b
    Example:
      miraccl topo dump machine.xml --gpus 0,1 --out half.xml
    """
    from miraccl.topo.accelerators import read_accelerators
    from miraccl.topo.load import read_original
    from miraccl.topo.select import select_topology
    from miraccl.topo.xmlfile import XmlFile

    read = read_original(
        file,
        [a for name in accelerators for a in read_accelerators(name)] if accelerators else None,
    )
    if gpus or fuse or collnet:
        options = _options(nodes, gpus, fuse, collnet)
        read = XmlFile(
            root=select_topology(read.root, options), source=read.source, notes=read.notes
        )
    _write(read, out)


@topo.command(short_help="Show the system graph and the paths between GPUs and nets.")
@_file_argument
@_reading_options
@click.option(
    "--explain",
    metavar="FROM,TO|all",
    help="Explain the path between two nodes, such as GPU0,NET1, or all paths.",
)
@_json_option
def show(
    file: str | None,
    nodes: int,
    gpus: tuple[int, ...] | None,
    fuse: bool,
    collnet: bool,
    accelerators: tuple[str, ...],
    explain: str | None,
    json_target: str | None,
) -> None:
    """Show the system graph and the paths between GPUs and nets.

    \b
    Examples:
      miraccl topo show machine.xml --nodes 2
      NCCL_P2P_LEVEL=SYS miraccl topo show machine.xml --explain GPU0,GPU7
    """
    from miraccl.topo.analyse import analyse_topology
    from miraccl.topo.explain import PathChangeLog
    from miraccl.topo.load import dump_if_asked

    notes = PathChangeLog() if explain is not None else None
    topology = analyse_topology(
        _load(file, accelerators).root, _options(nodes, gpus, fuse, collnet), recorder=notes
    )
    dump_if_asked(topology)
    if json_target:
        write_json(json_target, _show_json(topology, notes, explain))
    elif notes is not None and explain is not None:
        _print_reasons(topology, notes, explain)
    else:
        _print_system(topology)


def _show_json(
    topology: Topology, notes: PathChangeLog | None, explain: str | None
) -> dict[str, Any]:
    from miraccl.topo.system_json import paths_to_json, system_to_json

    result: dict[str, Any] = {
        "domains": [list(ranks) for ranks in topology.local_ranks],
        "system": system_to_json(topology.system),
        "labels": {node.name: node.label for node in topology.system.nodes if node.label},
        "paths": paths_to_json(topology.paths, topology.system),
    }
    if notes is not None and explain is not None:
        result["reasons"] = [reason.to_json() for reason in _reasons(topology, notes, explain)]
        result["separations"] = [
            {"gpus": [i, j], "reason": reason} for i, j, reason in notes.find_separations()
        ]
    return result


def _reasons(topology: Topology, notes: PathChangeLog, wanted: str) -> list[Any]:
    from miraccl.topo.explain import explain_path, explain_paths

    system, paths = topology.system, topology.paths
    if wanted == "all":
        return list(explain_paths(system, paths, notes))
    return [explain_path(system, paths, notes, _key(system, wanted))]


def _key(system: System, text: str) -> Key:
    """Parse ``GPU0,NET1`` as source and target; numbers are positions within the type."""
    from miraccl.topo.records import TABLE_SOURCES, TABLE_TARGETS, NodeType

    parts = text.split(",")
    if len(parts) != 2:
        raise InvalidUsage(f"cannot explain {text}: expected two nodes such as GPU0,NET1, or all")
    ends: list[tuple[NodeType, int]] = []
    for part, allowed in zip(parts, (TABLE_SOURCES, TABLE_TARGETS)):
        if ends and ends[0][0] == NodeType.NET:
            allowed = tuple(kind for kind in allowed if kind != NodeType.NET)
        match = re.fullmatch(r"([A-Za-z]+)([0-9]{1,9})", part.strip())
        kind = NodeType.__members__.get(match[1].upper()) if match else None
        if match is None or kind not in allowed or int(match[2]) >= system.count(kind):
            lasts = {k.name: system.count(k) - 1 for k in allowed if system.count(k)}
            there = ", ".join(
                f"{name}0 to {name}{last}" if last else f"{name}0" for name, last in lasts.items()
            )
            raise InvalidUsage(f"cannot explain {text}: {part!r} is not one of {there}")
        ends.append((kind, int(match[2])))
    return (*ends[0], *ends[1])


def _print_reasons(topology: Topology, notes: PathChangeLog, wanted: str) -> None:
    names = [gpu.name for gpu in topology.whole.gpus]
    for i, j, why in notes.find_separations():
        click.echo(f"{names[i]} and {names[j]} count as different nodes: {why}")
    for reason in _reasons(topology, notes, wanted):
        click.echo(f"{reason.source} to {reason.target}: {reason.type.name}, {reason.bw:g} GB/s")
        click.echo(f"  type: {reason.type_reason}")
        click.echo(f"  bandwidth: {reason.bw_reason}")
        for change in reason.changes:
            was = (
                f"was {change.before.type.name} {change.before.bw:g} GB/s; "
                if change.before != change.after
                else ""
            )
            click.echo(f"  {was}{change.description}")
        for k, hop in enumerate(reason.hops):
            mark = "  <- limits" if k == reason.limit else ""
            click.echo(
                f"    {hop.link.name:<4} {hop.source} -> {hop.target}  {hop.bw:g} GB/s{mark}"
            )


def _print_system(topology: Topology) -> None:
    from rich.console import Console
    from rich.tree import Tree

    from miraccl.topo.records import LinkType, NodeType

    system = topology.system
    width = None if sys.stdout.isatty() else 10_000
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False, width=width)
    console.print(
        f"maxBw {system.max_bw:g} GB/s, totalBw {system.total_bw:g} GB/s, {len(system.gpus)} GPUs,"
        f" {len(system.nets)} nets"
    )
    if len(topology.domains) > 1:
        console.print(
            "these groups are joined by the network only: "
            + "; ".join(map(str, topology.local_ranks))
        )
    seen: set[int] = set()

    def grow(tree: Tree, index: int) -> None:
        seen.add(index)
        for link in system.nodes[index].links:
            target = system.nodes[link.target]
            text = f"{link.type.name} {link.bw:g} GB/s - {_describe(system, link.target)}"
            if (
                link.type in (LinkType.PCI, LinkType.NET)
                and link.target not in seen
                and target.type != NodeType.CPU
            ):
                grow(tree.add(text), link.target)
            elif link.type not in (LinkType.PCI, LinkType.NET):
                tree.add(text)

    for position in range(system.count(NodeType.CPU)):
        index = system.index(NodeType.CPU, position)
        tree = Tree(_describe(system, index))
        grow(tree, index)
        console.print(tree)
    for target in (NodeType.GPU, NodeType.NET):
        if system.count(target):
            console.print(_path_table(topology, target))


def _describe(system: System, index: int) -> str:
    from miraccl.topo.explain import cpu_name
    from miraccl.topo.records import CpuNode, GpuNode, NetNode, PciNode

    node = system.nodes[index]
    extra = ""
    if isinstance(node, GpuNode):
        extra = f"rank {node.rank}, sm {node.sm}"
    elif isinstance(node, CpuNode):
        extra = cpu_name(node)
    elif isinstance(node, PciNode):
        extra = f"{node.device:016x}"
    elif isinstance(node, NetNode):
        extra = f"{node.bw * 8:g} Gbit/s, gdr {node.gdr}"
    label = f" {node.label}" if node.label else ""
    return f"{node.name}{label} ({extra})" if extra else f"{node.name}{label}"


def _path_table(topology: Topology, target: NodeType) -> Table:
    from rich.table import Table

    from miraccl.topo.records import NodeType

    system = topology.system
    table = Table(
        title=f"paths from GPUs to {target.name} nodes: type and GB/s", title_justify="left"
    )
    table.add_column("", no_wrap=True)
    for j in range(system.count(target)):
        table.add_column(f"{target.name}{j}", justify="right", no_wrap=True)
    for i in range(len(system.gpus)):
        row = topology.paths.row(NodeType.GPU, i, target)
        table.add_row(f"GPU{i}", *(f"{path.type.name} {path.bw:g}" for path in row))
    return table


@topo.command(short_help="Check a topology file: errors and how to fix them.")
@_file_argument
@_accelerators_option
@_json_option
def check(file: str | None, accelerators: tuple[str, ...], json_target: str | None) -> None:
    """Check a topology file: errors, assumptions, and how to fix them.

    The exit status is 1 if the file cannot be used.

    \b
    Example:
      miraccl topo check machine.xml
    """
    from dataclasses import asdict

    from miraccl.topo.accelerators import read_accelerators
    from miraccl.topo.check import check_file

    described = (
        [a for name in accelerators for a in read_accelerators(name)] if accelerators else None
    )
    findings = check_file(file, accelerators=described)
    if json_target:
        write_json(json_target, [asdict(finding) for finding in findings])
    else:
        for finding in findings:
            place = f"line {finding.line}: " if finding.line else ""
            times = f" ({finding.count} times)" if finding.count > 1 else ""
            click.echo(f"{finding.severity}: {place}{finding.text}{times}")
            if finding.fix:
                click.echo(f"    fix: {finding.fix}")
        if not findings:
            click.echo("no problems: the file is complete")
    if any(finding.severity == "error" for finding in findings):
        sys.exit(1)


@topo.command(short_help="Compare two machines: counts, attributes, links and paths.")
@click.argument("left", type=File(".xml"))
@click.argument("right", type=File(".xml"))
@_accelerators_option
@click.option("--names", is_flag=True, help="Compare bus ids and NUMA numbers as well.")
@_json_option
def diff(
    left: str, right: str, accelerators: tuple[str, ...], names: bool, json_target: str | None
) -> None:
    """Compare two machines: counts, attributes, links and paths.

    LEFT or RIGHT may be - for this machine.

    The exit status is 1 if they differ.

    \b
    Example:
      miraccl topo diff node1.xml node2.xml
    """
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from miraccl.topo.analyse import analyse_topology
    from miraccl.topo.diff import compare_names, compare_topologies

    options = _options(1, None, False, False)
    one, two = (
        analyse_topology(_load(None if name == "-" else name, accelerators).root, options)
        for name in (left, right)
    )
    found = compare_topologies(one, two) + (compare_names(one.system, two.system) if names else [])
    if json_target:
        write_json(json_target, [asdict(difference) for difference in found])
    elif not found:
        click.echo("the machines are equal")
    else:
        table = Table("what", "times", left, right)
        for difference in found:
            table.add_row(
                difference.where, str(difference.count), difference.left, difference.right
            )
        width = None if sys.stdout.isatty() else 200
        Console(highlight=False, markup=False, emoji=False, width=width).print(table)
    if found:
        sys.exit(1)
