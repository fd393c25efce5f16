"""Variants of a machine for comparisons: without a device, or with a slower one.

Devices are named like in the tables of ``miraccl plan``: ``NET/3`` and ``GPU/3`` by device number,
``CPU/0`` by NUMA number, any other by its position among the devices of its type (``NVS/0``), and
all of them by their full name (``PCI/0-15000``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from miraccl.errors import InvalidUsage
from miraccl.topo.records import CpuNode, GpuNode, NetNode, NodeType, System, f32


def find_device(system: System, name: str) -> int:
    """Return the flat index of the device called ``name``.

    Raises ``InvalidUsage`` for an unknown device, with the names of its type.
    """
    kind, _, number = name.upper().partition("/")
    if kind not in NodeType.__members__ or not number:
        types = ", ".join(NodeType.__members__)
        raise InvalidUsage(f"cannot find the device {name!r}: expected TYPE/NUMBER of {types}")
    nodes = system.of(NodeType[kind])
    short = []
    for position, node in enumerate(nodes):
        own = position
        if isinstance(node, GpuNode | NetNode):
            own = node.dev
        elif isinstance(node, CpuNode):
            own = node.local_id
        short.append(f"{kind}/{own}")
        if name.upper() in (short[-1], node.name.upper()):
            return system.index(NodeType[kind], position)
    raise InvalidUsage(
        f"cannot find the device {name}: the machine has {', '.join(short) or f'no {kind}'}"
    )


def without_device(system: System, name: str) -> System:
    """Return the system without a device.

    NICs and PCI switches that then hold no device are removed, too, and CPUs that hold neither a
    GPU nor a net; the remaining GPUs are ranked from 0. Raises ``InvalidUsage`` for an unknown
    device or the last GPU.
    """
    removed = {find_device(system, name)}
    if all(i in removed for i in range(system.count(NodeType.GPU))):
        raise InvalidUsage(f"cannot remove {name}: it is the only GPU")
    while extra := {i for i in range(len(system.nodes)) if _holds_nothing(system, i, removed)}:
        removed |= extra
    keep = [i for i in range(len(system.nodes)) if i not in removed]
    index = {old: new for new, old in enumerate(keep)}
    ranks = sorted(gpu.rank for i, gpu in enumerate(system.gpus) if i not in removed)
    nodes = []
    for old in keep:
        node = system.nodes[old]
        links = tuple(
            replace(link, target=index[link.target]) for link in node.links if link.target in index
        )
        if isinstance(node, GpuNode):
            node = replace(node, rank=ranks.index(node.rank))
        nodes.append(replace(node, links=links))
    return replace(system, nodes=tuple(nodes))


def _holds_nothing(system: System, i: int, removed: set[int]) -> bool:
    """Return True for a NIC, PCI switch or CPU to remove along with ``removed``.

    Only devices next to a removed one are considered: others were in the original machine.
    """
    node = system.nodes[i]
    if i in removed or node.type not in (NodeType.NIC, NodeType.PCI, NodeType.CPU):
        return False
    targets = {link.target for link in node.links}
    if not targets & removed:
        return False
    rest = [system.nodes[t].type for t in targets - removed]
    if node.type == NodeType.NIC:
        return NodeType.NET not in rest
    if node.type == NodeType.CPU:
        return all(kind == NodeType.CPU for kind in rest)
    return len(rest) <= 1  # the link to its parent


def scale_device(system: System, name: str, factor: float) -> System:
    """Return the system with all links of a device at ``factor`` times their bandwidth.

    A net's own bandwidth is scaled as well. Raises ``InvalidUsage`` for an unknown device or a
    factor that is not positive and finite.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise InvalidUsage(f"cannot scale {name} by {factor:g}: the factor must be positive")
    device = find_device(system, name)
    nodes = []
    for i, node in enumerate(system.nodes):
        links = tuple(
            replace(link, bw=f32(link.bw * factor)) if device in (i, link.target) else link
            for link in node.links
        )
        if i == device and isinstance(node, NetNode):
            node = replace(node, bw=f32(node.bw * factor))
        # Links of a node are sorted by descending bandwidth, equal ones in their order (NCCL).
        nodes.append(replace(node, links=tuple(sorted(links, key=lambda link: -link.bw))))
    return replace(system, nodes=tuple(nodes))


def modify_system(
    system: System, *, without: tuple[str, ...], scale: Mapping[str, float]
) -> System:
    """Apply :func:`scale_device` and then :func:`without_device` for each device named."""
    for name, factor in scale.items():
        system = scale_device(system, name, factor)
    for name in without:
        system = without_device(system, name)
    return system
