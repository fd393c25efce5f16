"""Reasons for the type and the bandwidth of a path, as data.

``PathChangeLog`` is a recorder for ``compute_paths``: it stores every rule applied to a path with
the path before it. :func:`explain_paths` adds the properties of the finished path: the hop that
determines the type and the one that limits the bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from miraccl.topo.hardware import nvlink_bw
from miraccl.topo.paths import Key
from miraccl.topo.records import (
    CpuArch,
    CpuNode,
    CpuVendor,
    GpuNode,
    Link,
    LinkType,
    NodeType,
    Path,
    PathTable,
    PathType,
    System,
    TopoNode,
)
from miraccl.topo.system_json import number

RULES = {
    "p2p_level": "GPUs access each other's memory up to {level} here: diverted through {through}",
    "net_faster": "both GPUs have a NIC within PXB that beats this path: they use the network",
    "no_shm": "neither peer access nor shared memory is allowed: only the network is left",
    "c2c": "the GPU is joined to {cpu} by C2C and the NIC is attached to it",
    "pxn": "{through} is next to the NIC and one NVLink away: it forwards (PXN)",
    "no_gdr": "no GPUDirect RDMA between them (GPU {gpu_gdr}, NIC {net_gdr}, or too far): "
    "diverted through {through}",
}
"""Text of each path rule."""


@dataclass(frozen=True, kw_only=True)
class PathChange:
    """One application of a rule, with the path before and after it."""

    rule: str
    before: Path
    after: Path
    facts: dict[str, object]

    @property
    def description(self) -> str:
        """The rule as one line of text."""
        return RULES[self.rule].format(**self.facts)


class PathChangeLog:
    """Recorder of the rules applied to paths, by source and target.

    ``changes`` refers to the planned system. If that was divided into domains, ``whole`` holds the
    changes made to the whole node before, with positions in ``Topology.whole``.
    """

    def __init__(self) -> None:
        self.changes: dict[Key, list[PathChange]] = {}
        self.whole: dict[Key, list[PathChange]] = {}

    def applied(
        self, key: Key, rule: str, before: Path, after: Path, facts: dict[str, object]
    ) -> None:
        """Record one change; a path of a node to itself is ignored."""
        if key[:2] != key[2:]:
            self.changes.setdefault(key, []).append(
                PathChange(rule=rule, before=before, after=after, facts=facts)
            )

    def split(self) -> None:
        """Move the changes recorded so far to ``whole``."""
        self.whole, self.changes = self.changes, {}

    def find_separations(self) -> Iterator[tuple[int, int, str]]:
        """Yield pairs of GPUs that only the network joins, with the reason.

        GPUs are positions in ``Topology.whole``.
        """
        for (source, i, target, j), changes in self.whole.items():
            if source == target == NodeType.GPU and changes[-1].after.type == PathType.NET:
                yield i, j, changes[-1].description


@dataclass(frozen=True, kw_only=True)
class PathHop:
    """One link of a path; ``bw_source`` explains its bandwidth (GB/s)."""

    link: LinkType
    source: str
    target: str
    bw: float
    bw_source: str


@dataclass(frozen=True, kw_only=True)
class PathExplanation:
    """A path with the reasons of its type and bandwidth.

    ``limit`` is the index of the hop that limits the bandwidth, -1 without hops.
    """

    source: str
    target: str
    type: PathType
    bw: float
    hops: tuple[PathHop, ...]
    limit: int
    type_reason: str
    changes: tuple[PathChange, ...] = field(default=())

    @property
    def bw_reason(self) -> str:
        """The hop that limits the bandwidth, as text."""
        if self.limit < 0:
            return "no link is crossed" if self.type == PathType.LOC else "no path"
        hop = self.hops[self.limit]
        return f"{hop.link.name} link from {hop.source} to {hop.target}: {hop.bw_source}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``; bandwidths in GB/s."""
        return {
            "from": self.source,
            "to": self.target,
            "type": self.type.name,
            "bw": number(self.bw),
            "type_reason": self.type_reason,
            "bw_reason": self.bw_reason,
            "limit": self.limit,
            "hops": [
                {
                    "link": h.link.name,
                    "from": h.source,
                    "to": h.target,
                    "bw": number(h.bw),
                    "why": h.bw_source,
                }
                for h in self.hops
            ],
            "rules": [
                {
                    "rule": c.rule,
                    "sentence": c.description,
                    "before": [c.before.type.name, number(c.before.bw)],
                    "after": [c.after.type.name, number(c.after.bw)],
                }
                for c in self.changes
            ],
        }


def explain_paths(
    system: System, paths: PathTable, notes: PathChangeLog
) -> Iterator[PathExplanation]:
    """Yield the explanations of all paths, in the order of the table."""
    for source, i, target, j, _ in paths:
        yield explain_path(system, paths, notes, (source, i, target, j))


def explain_path(
    system: System, paths: PathTable, notes: PathChangeLog, key: Key
) -> PathExplanation:
    """Return the explanation of one path."""
    path = paths.path(*key)
    source, i, target, j = key
    hops = tuple(_hop(system, hop) for hop in path.hops)
    limit = min(range(len(hops)), key=lambda k: hops[k].bw) if hops else -1
    return PathExplanation(
        source=system.nodes[system.index(source, i)].name,
        target=system.nodes[system.index(target, j)].name,
        type=path.type,
        bw=path.bw,
        hops=hops,
        limit=limit,
        type_reason=_type_reason(system, path),
        changes=tuple(notes.changes.get(key, ())),
    )


def _hop(system: System, number: int) -> PathHop:
    link, source = system.links[number], system.nodes[system.link_source[number]]
    target = system.nodes[link.target]
    return PathHop(
        link=link.type,
        source=source.name,
        target=target.name,
        bw=link.bw,
        bw_source=_link_reason(source, target, link),
    )


def _link_reason(source: TopoNode, target: TopoNode, link: Link) -> str:
    """Return the source of a link's bandwidth as text."""
    match link.type:
        case LinkType.NVL:
            gpu = source if isinstance(source, GpuNode) else target
            if isinstance(gpu, GpuNode) and not gpu.label:
                per_link = nvlink_bw(gpu.sm)
                return f"{round(link.bw / per_link)} NVLinks of {per_link:g} GB/s (sm {gpu.sm})"
            return f"{link.bw:g} GB/s by the description of {getattr(gpu, 'label', '')}"
        case LinkType.NET:
            return f"{link.bw * 8:g} Gbit/s network"
        case LinkType.SYS:
            return f"{link.bw:g} GB/s between NUMA domains ({cpu_name(source)})"
        case LinkType.C2C:
            return f"{link.bw:g} GB/s chip to chip"
        case LinkType.PCI:
            if NodeType.NIC in (source.type, target.type) and link.bw >= 5000:
                return "a virtual NIC, no PCI link"
            return f"{link.bw:g} GB/s PCI"
        case _:
            return f"{link.bw:g} GB/s"


def cpu_name(node: TopoNode) -> str:
    """Return vendor and model of a CPU as text."""
    if not isinstance(node, CpuNode):
        return node.name
    if node.arch in (CpuArch.POWER, CpuArch.ARM):
        return CpuArch(node.arch).name
    if node.vendor == CpuVendor.INTEL:
        models = {1: "Broadwell or older", 2: "Skylake", 3: "Sapphire Rapids", 4: "Emerald Rapids"}
        return f"Intel {models.get(node.model, '')}".strip()
    names = {
        CpuVendor.AMD: "AMD",
        CpuVendor.ZHAOXIN: "Zhaoxin Yongfeng" if node.model == 1 else "Zhaoxin",
    }
    return next((name for vendor, name in names.items() if vendor == node.vendor), "unknown CPU")


def _type_reason(system: System, path: Path) -> str:
    """Return the part of a path that determines its type, as text."""
    between = [
        (system.nodes[system.link_source[hop]], system.nodes[system.links[hop].target])
        for hop in path.hops
    ]
    match path.type:
        case PathType.LOC:
            return "the node itself"
        case PathType.NVL:
            switch = next((b for _, b in between if b.type == NodeType.NVS), None)
            return f"NVLink through {switch.label or 'NVSwitch'}" if switch else "NVLink only"
        case PathType.NVB | PathType.PXN:
            relay = next((b.name for _, b in between if b.type == NodeType.GPU), "")
            return f"NVLink to {relay}, which forwards"
        case PathType.C2C:
            return "chip to chip link"
        case PathType.PIX:
            return "one PCI switch at most"
        case PathType.PXB:
            pair = next(
                ((a.name, b.name) for a, b in between if a.type == b.type == NodeType.PCI), ("", "")
            )
            return f"several PCI switches, {pair[0]} and {pair[1]}"
        case PathType.P2C:
            return "C2C between GPU and CPU, PCI between CPU and NIC"
        case PathType.PHB:
            cpu = next((b.name for _, b in between if b.type == NodeType.CPU), "")
            return f"through the host bridge of {cpu or 'its CPU'}"
        case PathType.SYS:
            pair = next(
                ((a.name, b.name) for a, b in between if a.type == b.type == NodeType.CPU), ("", "")
            )
            return f"between NUMA domains, {pair[0]} and {pair[1]}"
        case PathType.NET:
            return "only over the network"
        case _:
            return "no path"
