"""Construction of a ``ChannelSearchState`` from ``System`` and ``PathTable``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from miraccl.errors import TopologyError
from miraccl.graph.channel_graph import MAX_CHANNELS
from miraccl.graph.search.kernel.state import (
    FRAME,
    GPU,
    GRAPH,
    HEADER,
    HOP,
    LINK,
    NET,
    PATH,
    ChannelSearchState,
)
from miraccl.graph.search.nets import candidate_nets
from miraccl.topo.queries import NearestDevices
from miraccl.topo.records import (
    CpuArch,
    CpuNode,
    CpuVendor,
    GpuNode,
    LinkType,
    NodeType,
    Path,
    PathTable,
    PathType,
    System,
)

PRE_AMPERE = 80
"""Compute capability (times ten) below which a GPU returns an eighth of the received bandwidth as
acknowledgements (NCCL ``followPath``)."""

FRAMES_BESIDE_GPUS = 8
"""Choice points of a channel besides one per GPU: net, first GPU, two exits, close or finish, next
channel, and two spare ones."""


def build_state(nearest: NearestDevices) -> ChannelSearchState:
    """Allocate a state with all bandwidth available and two empty graphs.

    Where nets are used, :func:`set_candidates` must be called before a walk. Raises
    ``TopologyError`` for a system without a GPU.
    """
    system, paths = nearest.system, nearest.paths
    ngpus, nnets = len(system.gpus), len(system.nets)
    if not ngpus:
        raise TopologyError("cannot search channels: the system has no GPU")
    table, hops = _paths(system, paths)
    near = [nearest.gpus(net) for net in range(nnets)]
    header = np.zeros(1, HEADER)
    header[0].ngpus = ngpus
    header[0].nvs = ngpus + nnets if system.count(NodeType.NVS) else -1
    header[0].inter = system.inter
    header[0].exits_first = sum(map(len, near))
    lists = np.zeros(header[0].exits_first + 2 * ngpus + (ngpus + 1) * nnets, np.int64)
    lists[: header[0].exits_first] = [gpu for gpus in near for gpu in gpus]
    frames = (ngpus + FRAMES_BESIDE_GPUS) * (MAX_CHANNELS + 1)
    return ChannelSearchState(
        header=header,
        graphs=np.zeros(2, GRAPH),
        ranks=np.zeros((2, MAX_CHANNELS, ngpus), np.int64),
        ends=np.zeros((2, MAX_CHANNELS, 2), np.int64),
        used=np.zeros((MAX_CHANNELS, ngpus), np.int64),
        links=_array([(link.bw, link.type == LinkType.PCI) for link in system.links], LINK),
        hops=_array(hops, HOP),
        paths=table,
        gpus=_array([(gpu.rank, *_pci_links(system, i)) for i, gpu in enumerate(system.gpus)], GPU),
        nets=_nets(system, near),
        lists=lists,
        frames=np.zeros(frames, FRAME),
        choices=np.zeros((frames, max(2 * (ngpus + 2), nnets)), np.int64),
    )


def _array(rows: Sequence[tuple[Any, ...]], dtype: Any) -> Any:
    """Allocate a record array with at least one element, so that it has an address."""
    array = np.zeros(max(1, len(rows)), dtype)
    for i, row in enumerate(rows):
        array[i] = row
    return array


def set_candidates(state: ChannelSearchState, nearest: NearestDevices, worst: PathType) -> None:
    """Write the nets by which channels may enter and leave, up to path type ``worst``."""
    header = state.header[0]
    ngpus = int(header.ngpus)
    at = int(header.exits_first) + 2 * ngpus
    starts = candidate_nets(nearest, range(ngpus), worst)
    header.starts_first, header.starts_count = at, len(starts)
    state.lists[at : at + len(starts)] = starts
    at += len(starts)
    for gpu in range(ngpus):
        exits = candidate_nets(nearest, [gpu], worst)
        state.lists[header.exits_first + 2 * gpu : header.exits_first + 2 * gpu + 2] = (
            at,
            len(exits),
        )
        state.lists[at : at + len(exits)] = exits
        at += len(exits)


def _paths(system: System, paths: PathTable) -> tuple[Any, list[tuple[int, int, float]]]:
    """Return the table of paths between vertices, and their hops."""
    ngpus, nnets = len(system.gpus), len(system.nets)
    size = ngpus + nnets + 1
    table = np.zeros((size, size), PATH)
    table["type"] = PathType.DIS
    hops: list[tuple[int, int, float]] = []
    first = {NodeType.GPU: 0, NodeType.NET: ngpus, NodeType.NVS: ngpus + nnets}

    def enter(source: NodeType, i: int, target: NodeType, j: int, path: Path) -> None:
        start = system.index(source, i)
        table[first[source] + i, first[target] + j] = (
            len(hops),
            path.count,
            path.type,
            path.bw,
            _is_wide(system, source, path),
        )
        hops.extend(_hop(system, start, link) for link in path.hops)

    for source, i, target, j, path in paths:
        if target == NodeType.NVS and j == 0 and source == NodeType.GPU:
            enter(source, i, target, j, path)
            enter(target, j, source, i, _reversed(system, path))
        elif target in (NodeType.GPU, NodeType.NET):
            enter(source, i, target, j, path)
    return table, hops


def _reversed(system: System, path: Path) -> Path:
    """Return the reverse path over the same links: the table lacks paths from an NVSwitch."""
    back = tuple(system.reverse_links[link] for link in reversed(path.hops))
    if -1 in back:
        return Path(type=PathType.DIS, bw=0.0)
    return Path(type=path.type, bw=path.bw, hops=back)


def _is_wide(system: System, source: NodeType, path: Path) -> bool:
    """Return True for peer-to-peer paths through an Intel host bridge."""
    # Such traffic is cut into 64 byte packets: a fifth more data on PCI.
    if path.type != PathType.PHB or source != NodeType.GPU:
        return False
    ends = (system.nodes[system.links[link].target] for link in path.hops)
    return any(
        isinstance(n, CpuNode) and n.arch == CpuArch.X86 and n.vendor == CpuVendor.INTEL
        for n in ends
    )


def _hop(system: System, start: int, number: int) -> tuple[int, int, float]:
    """Return link, reverse link, and the share of the bandwidth that the reverse link loses."""
    link = system.links[number]
    end = system.nodes[link.target]
    share = 0.0
    if (
        isinstance(end, GpuNode)
        and end.sm < PRE_AMPERE
        and system.nodes[start].type != NodeType.GPU
    ):
        share += 1 / 8
    if isinstance(end, CpuNode) and end.arch == CpuArch.POWER and link.type == LinkType.NVL:
        share += 1.0
    back = system.reverse_links[number]
    if share and back < 0:
        raise TopologyError(
            f"cannot search channels: {end.name} has no {link.type.name} link back "
            f"to {system.nodes[system.link_source[number]].name}"
        )
    return number, back, share


def _pci_links(system: System, gpu: int) -> tuple[int, int]:
    """Return a GPU's PCI link and the first link back (global numbers), -1 without one."""
    here = system.index(NodeType.GPU, gpu)
    for number, link in enumerate(system.nodes[here].links, system.link_start[here]):
        if link.type != LinkType.PCI:
            continue
        for back, other in enumerate(
            system.nodes[link.target].links, system.link_start[link.target]
        ):
            if other.target == here:
                return number, back
    return -1, -1


def _nets(system: System, near: Sequence[Sequence[int]]) -> Any:
    asics: dict[tuple[int, int], int] = {}
    rows = []
    at = 0
    for net, gpus in zip(system.nets, near, strict=True):
        asic = asics.setdefault((net.asic, net.port), len(asics))
        rows.append((net.bw, net.latency, net.id, asic, net.coll, net.local_gpu, at, len(gpus)))
        at += len(gpus)
    return _array(rows, NET)
