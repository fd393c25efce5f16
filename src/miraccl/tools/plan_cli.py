"""``miraccl plan``: rings, trees, channel counts, times and choices for a topology, with reasons.

All output is derived from the plan's JSON (``graph.plan``), so tables, ``--json``, SVG and HTML
agree, and a cached plan is shown without being recomputed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from miraccl import params
from miraccl.errors import InvalidUsage
from miraccl.native.cache import plan_folder
from miraccl.tools.options import (
    MAX_NODES,
    File,
    Numbers,
    OutputFile,
    SuggestingGroup,
    accelerators_option,
    read_bytes,
    write_text,
)
from miraccl.tools.plan_diff_cli import diff

if TYPE_CHECKING:
    from miraccl.graph.plan import PlanRequest
    from miraccl.graph.plan_cache import PlanDocument
    from miraccl.topo.xmlfile import XmlNode


@click.group(
    cls=SuggestingGroup,
    invoke_without_command=True,
    short_help="Show the chosen algorithms and channels, and why.",
)
@click.option(
    "--topo",
    "topo_file",
    type=File(".xml"),
    help="Topology file.  [default: NCCL_TOPO_FILE, or this machine]",
)
@click.option(
    "--nodes",
    type=click.IntRange(1, MAX_NODES),
    default=1,
    show_default=True,
    help="Number of such machines in the job.",
)
@click.option(
    "--gpus",
    type=Numbers(),
    metavar="0,2,...",
    help="Only the GPUs with these device numbers, in the order of their ranks.",
)
@click.option("--collnet", is_flag=True, help="Assume a CollNet plugin that every net supports.")
@click.option(
    "--fuse",
    is_flag=True,
    help="Merge the file as NCCL does when every rank reads it through NCCL_TOPO_FILE.",
)
@accelerators_option
@click.option(
    "--explain",
    is_flag=True,
    help="Give the reasons, stage by stage; in the JSON under the key explain.",
)
@click.option(
    "--json",
    "json_target",
    type=OutputFile(),
    metavar="FILE",
    help="Write the plan; - is standard output.",
)
@click.option(
    "--graph-xml",
    type=OutputFile(),
    metavar="FILE",
    help="Write the channel graphs for NCCL_GRAPH_FILE; - is standard output.",
)
@click.option("--svg", type=OutputFile(), metavar="FILE", help="Draw the machine.")
@click.option(
    "--html",
    type=OutputFile(),
    metavar="FILE",
    help="Write an interactive page of the machine, its channels, paths and times.",
)
@click.option("--no-cache", is_flag=True, help="Neither read nor write the cache of plans.")
@click.pass_context
def plan(
    context: click.Context,
    topo_file: str | None,
    nodes: int,
    gpus: tuple[int, ...] | None,
    collnet: bool,
    fuse: bool,
    accelerators: tuple[str, ...],
    explain: bool,
    json_target: str | None,
    graph_xml: str | None,
    svg: str | None,
    html: str | None,
    no_cache: bool,
) -> None:
    """Show the decisions for a job on NODES machines like the one described: system, paths,
    channels, rings, trees, the number of channels, the performance model, and the algorithm and
    protocol for each collective and size. These are the decisions of NCCL 2.28.9, with the NCCL_*
    settings of the environment. No GPU is needed.

    \b
    Examples:
      miraccl plan --topo dgx-h100.xml --nodes 4
      miraccl plan --topo dgx-h100.xml --gpus 0,1,2,3 --explain
      NCCL_ALGO=ring miraccl plan --topo dgx-h100.xml --json -
      miraccl plan --topo dgx-h100.xml --nodes 16 --html plan.html
      miraccl plan diff dgx-h100.xml --nodes 16 --without NET/3
    """
    if context.invoked_subcommand:
        return
    if [json_target, graph_xml, svg, html].count("-") > 1:
        raise InvalidUsage(
            "cannot write several outputs to standard output: only one of --json, --graph-xml,"
            " --svg and --html may be -"
        )
    tables = "-" not in (json_target, graph_xml, svg, html)
    depth = "explain" if explain or html else "bound" if tables else "plan"
    source = PlanSource.read(
        topo_file or params.TOPO_FILE.read(os.environ), _descriptions(accelerators, os.environ)
    )
    request = _request(nodes, gpus or (), collnet=collnet, fuse=fuse)
    document = _load_document(source, request, depth=depth, cached=not no_cache)
    if dump := params.TOPO_DUMP_FILE.read(os.environ):
        from miraccl.topo.select import select_topology
        from miraccl.topo.xmlfile import format_topology

        write_text(dump, format_topology(select_topology(source.root, request.topo)))
    if json_target:
        write_text(json_target, document.text.decode())
    for target in filter(None, {graph_xml, params.GRAPH_DUMP_FILE.read(os.environ)}):
        write_text(target, _graph_xml(document.data))
    if svg or html:
        from miraccl.tools.plan_view import render_page, render_svg

        if svg:
            write_text(svg, render_svg(document.data))
        if html:
            write_text(html, render_page(document.data))
    if tables:
        from miraccl.tools.plan_tables import print_explanation, print_plan

        print_plan(document.data)
        if explain:
            print_explanation(document.data)


plan.add_command(diff)


@dataclass(frozen=True)
class PlanSource:
    """Topology to plan on.

    - ``path``: topology file, empty for this machine.
    - ``content``: its bytes, read once, because the file may be a pipe or change; None for this
      machine.
    - ``descriptions``: files that describe accelerators.
    """

    path: str
    content: bytes | None
    descriptions: Sequence[str]

    @classmethod
    def read(cls, path: str, descriptions: Sequence[str]) -> PlanSource:
        return cls(path, read_bytes(path, "topology file") if path else None, descriptions)

    @property
    def name(self) -> str:
        if self.content is not None:
            return Path(self.path).name
        return (
            "this machine"
            if _gpus(self.root)
            else "this machine (CPU ranks, planned as if they were GPUs)"
        )

    @cached_property
    def root(self) -> XmlNode:
        from miraccl.topo.accelerators import read_accelerators
        from miraccl.topo.load import load_topology, load_topology_text

        described = [a for file in self.descriptions for a in read_accelerators(file)]
        if self.content is None:
            return load_topology(accelerators=described).root
        return load_topology_text(self.content, source=self.path, accelerators=described).root


def _request(nodes: int, gpus: Sequence[int], *, collnet: bool, fuse: bool) -> PlanRequest:
    from miraccl.graph.plan import PlanRequest

    graph_file = params.GRAPH_FILE.read(os.environ)
    graphs = read_bytes(graph_file, "graph file").decode(errors="replace") if graph_file else ""
    if graph_file and not graphs.strip():
        raise InvalidUsage(
            f"cannot use the graph file {graph_file}: it is empty, expected <graphs>"
        )
    return PlanRequest.read(
        os.environ, nodes=nodes, gpus=gpus, collnet=collnet, fuse=fuse, graph_xml=graphs
    )


def _load_document(
    source: PlanSource, request: PlanRequest, *, depth: str, cached: bool
) -> PlanDocument:
    """Return the plan, from the cache if possible.

    - ``depth``: ``plan`` alone, ``bound`` to add the bounds, ``explain`` to add bounds and reasons.
    """
    from miraccl.graph.plan_cache import cached_document, plan_key

    # Not cached: a detected machine can change, and detection dominates the time.
    if source.content is None:
        return cached_document(None, "", lambda: _compute(source, request, depth))
    parts = [source.content, *(read_bytes(file, "description") for file in source.descriptions)]
    key = plan_key(b"\0".join(parts), request, variant=f"{depth} {source.name}")
    return cached_document(
        plan_folder() if cached else None, key, lambda: _compute(source, request, depth)
    )


def _descriptions(files: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    return list(files) or [file for file in params.ACCELERATORS.read(environ).split(":") if file]


def _compute(source: PlanSource, request: PlanRequest, depth: str) -> dict[str, Any]:
    from dataclasses import replace

    from miraccl.graph.plan import make_plan
    from miraccl.graph.plan_json import plan_to_json
    from miraccl.topo.explain import PathChangeLog

    notes = PathChangeLog() if depth == "explain" else None
    plan = replace(make_plan(source.root, request, recorder=notes), name=source.name)
    result = plan_to_json(plan)
    if depth != "plan":
        from miraccl.graph.plan_bound import bound_section

        result["bound"] = bound_section(plan)
    if notes is not None:
        from miraccl.graph.plan_explain import explain_plan

        result["explain"] = explain_plan(plan, notes)
    return result


def _gpus(root: XmlNode) -> int:
    """Return the number of GPUs, without the stand-ins of CPU ranks."""
    return sum(
        node.name == "gpu" and not node.attrs.get("accelerator", "").startswith("cpu")
        for node in root.walk()
    )


def _graph_xml(document: Mapping[str, Any]) -> str:
    from miraccl.graph.channel_graph import graph_from_json, graphs_to_xml
    from miraccl.topo.system_json import system_from_json

    return graphs_to_xml(
        [graph_from_json(graph) for graph in document["graphs"]],
        system_from_json(document["system"]),
    )
