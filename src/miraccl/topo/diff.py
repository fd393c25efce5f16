"""Differences between two machines: counts, attributes, links and paths.

Nodes are matched by their position within their type, not by bus id, so that two machines of one
model compare as equal if only bus numbers differ (:func:`compare_names` lists those).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from miraccl.topo.analyse import Topology
from miraccl.topo.explain import cpu_name
from miraccl.topo.records import CpuNode, GpuNode, NetNode, NodeType, PathTable, System, TopoNode


@dataclass(frozen=True, kw_only=True)
class TopologyDifference:
    """One difference at ``where``; ``count`` equal ones are merged."""

    where: str
    left: str
    right: str
    count: int = 1


def compare_topologies(left: Topology, right: Topology) -> list[TopologyDifference]:
    """Compare the first domains of two machines; equal differences are merged."""
    found = list(_counts(left, right))
    found += _group_equal(_nodes(left.system, right.system))
    found += _group_equal(_paths(left, right))
    for name, a, b in (
        ("totalBw", left.system.total_bw, right.system.total_bw),
        ("maxBw", left.system.max_bw, right.system.max_bw),
    ):
        if a != b:
            found.append(TopologyDifference(where=name, left=f"{a:g} GB/s", right=f"{b:g} GB/s"))
    return found


def compare_names(left: System, right: System) -> list[TopologyDifference]:
    """Return the nodes whose names (bus ids, NUMA numbers) differ, by position."""
    return [
        TopologyDifference(where=f"{kind.name} {i}", left=a.name, right=b.name)
        for kind in NodeType
        for i, (a, b) in enumerate(zip(left.of(kind), right.of(kind)))
        if a.name != b.name
    ]


def _counts(left: Topology, right: Topology) -> Iterator[TopologyDifference]:
    for kind in NodeType:
        a, b = left.system.count(kind), right.system.count(kind)
        if a != b:
            yield TopologyDifference(
                where=f"number of {kind.name} nodes", left=str(a), right=str(b)
            )
    if len(left.domains) != len(right.domains):
        yield TopologyDifference(
            where="domains joined by the network only",
            left=str(len(left.domains)),
            right=str(len(right.domains)),
        )


def _node_attributes(node: TopoNode) -> dict[str, str]:
    if isinstance(node, GpuNode):
        return {
            "dev": str(node.dev),
            "rank": str(node.rank),
            "sm": str(node.sm),
            "gdr": str(node.gdr),
            "kind": node.label or "NVIDIA",
        }
    if isinstance(node, CpuNode):
        return {"kind": cpu_name(node)}
    if isinstance(node, NetNode):
        return {
            "bandwidth": f"{node.bw:g} GB/s",
            "latency": f"{node.latency:g} us",
            "gdr": str(node.gdr),
            "coll": str(node.coll),
            "port": str(node.port),
            "maxconn": str(node.max_channels),
        }
    return {}


def _nodes(left: System, right: System) -> Iterator[tuple[str, str, str, str]]:
    for kind in NodeType:
        for a, b in zip(left.of(kind), right.of(kind)):
            left_value, right_value = _node_attributes(a), _node_attributes(b)
            for key in left_value:
                if left_value[key] != right_value[key]:
                    yield kind.name, key, left_value[key], right_value[key]
            one, two = _links(left, a), _links(right, b)
            if one != two:
                yield kind.name, "links", one, two


def _links(system: System, node: TopoNode) -> str:
    """Format the links of a node without names: ``NVL 370.8 to NVS, 2 x PCI 48 to PCI``."""
    texts = [
        f"{link.type.name} {link.bw:g} to {system.nodes[link.target].type.name}"
        for link in node.links
    ]
    runs = [(text, len(list(run))) for text, run in groupby(texts)]
    return ", ".join(f"{count} x {text}" if count > 1 else text for text, count in runs) or "none"


def _paths(left: Topology, right: Topology) -> Iterator[tuple[str, str, str, str]]:
    one, two = left.system, right.system
    for source, target in (
        (NodeType.GPU, NodeType.GPU),
        (NodeType.GPU, NodeType.NET),
        (NodeType.GPU, NodeType.CPU),
    ):
        for i in range(min(one.count(source), two.count(source))):
            for j in range(min(one.count(target), two.count(target))):
                a, b = (
                    _path(left.paths, source, i, target, j),
                    _path(right.paths, source, i, target, j),
                )
                if a != b:
                    yield f"{source.name} to {target.name}", "path", a, b


def _path(paths: PathTable, source: NodeType, i: int, target: NodeType, j: int) -> str:
    path = paths.path(source, i, target, j)
    return f"{path.type.name} {path.bw:g} GB/s"


def _group_equal(found: Iterator[tuple[str, str, str, str]]) -> list[TopologyDifference]:
    counts: dict[tuple[str, str, str, str], int] = {}
    for item in found:
        counts[item] = counts.get(item, 0) + 1
    return [
        TopologyDifference(where=f"{a} {b}", left=c, right=d, count=n)
        for (a, b, c, d), n in counts.items()
    ]
