"""Paths between the nodes of a system (NCCL ``src/graph/paths.cc`` ncclTopoComputePaths).

Routes are corrected by NCCL's rules about their use, in this order; each rule sees the result of
the previous ones:

1. GPUs without peer access communicate through the CPU of the receiving one. 2. Two GPUs of one
node that can use neither peer access nor shared memory, or that are faster over the network, are
marked NET. 3. A GPU joined to its CPU by C2C reaches the NICs of that CPU as P2C. 4. A GPU reaches
a far NIC through the NVLink-connected GPU next to it (PXN), if that is faster or avoids the CPU. 5.
Where GPUDirect RDMA is not possible, traffic between GPU and NIC goes through the GPU's CPU.

A ``PathRecorder`` passed to :func:`compute_paths` receives every change; without one nothing is
collected.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from miraccl.topo.options import PathOptions
from miraccl.topo.queries import (
    GdrMode,
    NearestDevices,
    gdr_mode,
    local_cpu,
    net_is_faster,
    p2p_level,
    peer_access,
    relay_gpu,
)
from miraccl.topo.records import (
    LOC_BW,
    TABLE_SOURCES,
    TABLE_TARGETS,
    GpuNode,
    LinkType,
    NetNode,
    NodeType,
    Path,
    PathTable,
    PathType,
    System,
    f32,
)
from miraccl.topo.routes import Routes, route_edges

Key = tuple[NodeType, int, NodeType, int]
"""Source type and position, target type and position."""

_GPU, _NET, _CPU = NodeType.GPU, NodeType.NET, NodeType.CPU


class PathRecorder(Protocol):
    """Receiver of the rules applied to paths."""

    def applied(
        self, key: Key, rule: str, before: Path, after: Path, facts: dict[str, object]
    ) -> None:
        """Record one change; ``rule`` is a key of ``explain.RULES``, ``facts`` fill its text."""

    def split(self) -> None:
        """Note that the node is divided: later changes refer to its first domain."""


class _PathTableBuilder:
    """The path table while rules are applied to it."""

    def __init__(self, system: System, options: PathOptions, recorder: PathRecorder | None) -> None:
        self.system = system
        self.options = options
        self.recorder = recorder
        edges = route_edges(system)
        self.rows: dict[tuple[NodeType, NodeType], list[list[Path]]] = {}
        for target in TABLE_TARGETS:
            routes = Routes(system, target, edges, nvb=options.nvb)
            for source in (_GPU, _NET, _CPU):
                if (source, target) != (_NET, _NET):
                    start = system.starts[source]
                    self.rows[source, target] = [
                        routes.row(start + i) for i in range(system.count(source))
                    ]
        self.paths = PathTable(rows=self.rows)
        self.nearest = NearestDevices(system, self.paths, options.net_per_gpu)

    def path(self, source: NodeType, i: int, target: NodeType, j: int) -> Path:
        return self.paths.path(source, i, target, j)

    def set(self, key: Key, path: Path, rule: str, **facts: object) -> None:
        source, i, target, j = key
        row = self.rows[source, target][i]
        if j >= len(row):  # no route
            return
        if self.recorder is not None:
            self.recorder.applied(key, rule, row[j], path, facts)
        row[j] = path
        if (source, target) == (_GPU, _NET):
            self.nearest.invalidate(gpu=i)
        elif (source, target) == (_NET, _GPU):
            self.nearest.invalidate(net=i)

    def reroute(self, key: Key, through: tuple[NodeType, int], rule: str, **facts: object) -> None:
        """Replace a path by the two paths to and from an intermediate node (NCCL addInterStep)."""
        source, i, target, j = key
        first, second = self.path(source, i, *through), self.path(*through, target, j)
        type = PathType.PXN if through[0] == _GPU else merged_type(first.type, second.type)
        path = Path(type=type, bw=min(first.bw, second.bw), hops=first.hops + second.hops)
        self.set(
            key, path, rule, through=self.system.nodes[self.system.index(*through)].name, **facts
        )

    def rename(self, key: Key, type: PathType, rule: str, **facts: object) -> None:
        self.set(key, replace(self.path(*key), type=type), rule, **facts)


def merged_type(one: PathType, other: PathType) -> PathType:
    """Return the type of two consecutive paths: the worse one, except C2C + PCI, which is P2C."""
    if {one, other} == {PathType.C2C, PathType.PHB}:
        return PathType.P2C
    return max(one, other)


def compute_paths(
    system: System, options: PathOptions, *, recorder: PathRecorder | None = None
) -> PathTable:
    """Compute the paths of every GPU and net of ``system``, after all rules."""
    table = _PathTableBuilder(system, options, recorder)
    _apply_peer_rules(table)
    _apply_c2c(table)
    for net in range(len(system.nets)):
        for gpu in range(len(system.gpus)):
            _apply_net_rules(table, net, gpu)
    rows = {
        (s, t): tuple(map(tuple, table.rows[s, t]))
        for s in TABLE_SOURCES
        for t in TABLE_TARGETS
        if (s, t) in table.rows
    }
    return PathTable(rows=rows)


def _apply_peer_rules(table: _PathTableBuilder) -> None:
    system, options, paths = table.system, table.options, table.paths
    gpus = range(len(system.gpus))
    level = p2p_level(system, options)
    for gpu in gpus:
        for peer in gpus:
            if not peer_access(system, paths, options, peer, gpu):
                cpu = local_cpu(system, paths, gpu)
                table.reroute((_GPU, peer, _GPU, gpu), (_CPU, cpu), "p2p_level", level=level.name)
        for peer in gpus:
            if peer != gpu and (rule := _network_only_reason(table, peer, gpu)):
                table.rename((_GPU, peer, _GPU, gpu), PathType.NET, rule)


def _network_only_reason(table: _PathTableBuilder, gpu: int, peer: int) -> str:
    """Return the rule by which two GPUs can only use the network, empty if P2P or SHM works."""
    system, options, paths = table.system, table.options, table.paths
    faster = net_is_faster(paths, options, gpu, peer)
    if peer_access(system, paths, options, gpu, peer) and (
        relay_gpu(system, paths, gpu, peer) >= 0 or not faster
    ):
        return ""
    if faster:
        return "net_faster"
    return "" if options.shm else "no_shm"


def _apply_c2c(table: _PathTableBuilder) -> None:
    system = table.system
    for net in range(len(system.nets)):
        for gpu in range(len(system.gpus)):
            cpu = local_cpu(system, table.paths, gpu)
            if (
                merged_type(
                    table.path(_GPU, gpu, _CPU, cpu).type, table.path(_NET, net, _CPU, cpu).type
                )
                != PathType.P2C
            ):
                continue
            for key in ((_GPU, gpu, _NET, net), (_NET, net, _GPU, gpu)):
                if table.path(*key).type > PathType.P2C:
                    table.rename(key, PathType.P2C, "c2c", cpu=system.cpus[cpu].name)


def _apply_net_rules(table: _PathTableBuilder, net: int, gpu: int) -> None:
    system, options = table.system, table.options
    if options.pxn:
        relay = table.nearest.gpu(net)
        if relay not in (gpu, -1) and _pxn_helps(table, net, gpu, relay):
            table.reroute((_GPU, gpu, _NET, net), (_GPU, relay), "pxn")
    if table.path(_GPU, gpu, _NET, net).type >= PathType.PHB:
        return
    if (
        gdr_mode(system, table.paths, options, gpu, table.nearest.first(net), read=False)
        == GdrMode.DISABLED
    ):
        cpu = local_cpu(system, table.paths, gpu)
        facts = {"net_gdr": system.nets[net].gdr, "gpu_gdr": system.gpus[gpu].gdr}
        table.reroute((_NET, net, _GPU, gpu), (_CPU, cpu), "no_gdr", **facts)
        table.reroute((_GPU, gpu, _NET, net), (_CPU, cpu), "no_gdr", **facts)


def _pxn_helps(table: _PathTableBuilder, net: int, gpu: int, relay: int) -> bool:
    system = table.system
    own, relayed = table.path(_GPU, gpu, _NET, net), table.path(_GPU, relay, _NET, net)
    return (
        relayed.type <= (PathType.P2C if table.options.pxn_c2c else PathType.PXB)
        and table.path(_GPU, relay, _GPU, gpu).type <= PathType.NVL
        and system.gpus[relay].system_id == system.gpus[gpu].system_id
        and (relayed.bw > own.bw or own.type > PathType.PXN)
    )


# Values derived from paths


def find_domains(system: System, paths: PathTable) -> tuple[tuple[int, ...], ...]:
    """Group GPU positions that reach each other without the network (NCCL ncclTopoTrimSystem).

    The group with the lowest rank comes first.
    """
    domain: list[int] = []
    for gpu in range(len(system.gpus)):
        nearest = [
            domain[peer] for peer in range(gpu) if paths.gpu_gpu(gpu, peer).type < PathType.NET
        ]
        domain.append(min([gpu, *nearest]))
    groups = (tuple(g for g, d in enumerate(domain) if d == group) for group in set(domain))
    return tuple(sorted(groups, key=lambda group: min(system.gpus[gpu].rank for gpu in group)))


def restrict_to_domain(system: System, gpus: tuple[int, ...]) -> System:
    """Return the system without the GPUs outside ``gpus`` (positions) and the links to them."""
    keep = [
        i for i, node in enumerate(system.nodes) if node.type != _GPU or i in gpus
    ]  # GPUs come first: position is index
    number = {old: new for new, old in enumerate(keep)}
    nodes = []
    for old in keep:
        node = system.nodes[old]
        links = tuple(
            replace(link, target=number[link.target])
            for link in node.links
            if link.target in number
        )
        nodes.append(replace(node, links=links))
    return replace(system, nodes=tuple(nodes))


def finish_system(system: System, paths: PathTable, options: PathOptions, *, nranks: int) -> System:
    """Fill in the values that depend on paths (NCCL ncclTopoSearchInit).

    These are the nets' nearest GPUs, ``inter``, ``max_bw`` and ``total_bw``. ``nranks`` counts the
    ranks of the whole job.
    """
    nearest = NearestDevices(system, paths, options.net_per_gpu)
    first = system.starts[_NET]
    nodes = tuple(
        replace(n, local_gpu=nearest.gpu(i - first)) if isinstance(n, NetNode) else n
        for i, n in enumerate(system.nodes)
    )
    inter = 0 if len(system.gpus) == nranks else 1
    if not inter and len(system.gpus) == 1:
        return replace(system, nodes=nodes, inter=inter, max_bw=LOC_BW, total_bw=LOC_BW)
    ends = _NET if inter else _GPU
    reached = (p.bw for g in range(len(system.gpus)) for p in paths.row(_GPU, g, ends) if p.count)
    return replace(
        system,
        nodes=nodes,
        inter=inter,
        max_bw=max(reached, default=0.0),
        total_bw=max((_gpu_bw(gpu) for gpu in system.gpus), default=0.0),
    )


def _gpu_bw(gpu: GpuNode) -> float:
    """Return the sum of a GPU's NVLinks, or its last PCI link if that is more (GB/s)."""
    nvlink = pci = 0.0
    for link in gpu.links:
        if link.type == LinkType.NVL:
            nvlink = f32(nvlink + link.bw)
        elif link.type == LinkType.PCI:
            pci = link.bw
    return max(nvlink, pci)
