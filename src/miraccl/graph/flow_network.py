"""Directed graph with capacities of one or more machines, the input of bandwidth bounds.

Links are full duplex with the bandwidths of the topology. The nodes of a job are joined by an ideal
network that is limited by its ports alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import lcm

from miraccl.errors import InvalidUsage, TopologyError
from miraccl.topo.records import NetNode, NodeType, System

DECIMALS = 1000
"""Bandwidths are rounded to multiples of 1/1000 GB/s, like in the channel search."""


@dataclass(frozen=True, kw_only=True)
class FlowNetwork:
    """A directed graph with capacities in GB/s.

    ``names[v]`` is the name of vertex v; ``ranks`` are the vertices that hold data, by rank.
    ``groups`` lists the ranks of each node of the job. Nodes must be interchangeable (swapping two
    of them leaves the graph unchanged), so computations use the first two only.

    Raises ``InvalidUsage`` for fewer than 2 ranks and ``TopologyError`` for a negative bandwidth.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    edges: tuple[tuple[int, int, Fraction], ...]
    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.ranks) < 2:
            raise InvalidUsage("cannot bound the bandwidth: it needs at least 2 ranks")
        if any(capacity < 0 for _, _, capacity in self.edges):
            raise TopologyError("cannot bound the bandwidth: a link has a negative bandwidth")

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """The edges without capacities, as (start, end)."""
        return [(start, end) for start, end, _ in self.edges]

    @cached_property
    def unit(self) -> int:
        """Factor by which all capacities become integers."""
        return lcm(1, *(capacity.denominator for _, _, capacity in self.edges))

    @cached_property
    def capacities(self) -> list[int]:
        """Capacities of the edges times ``unit``."""
        return [int(capacity * self.unit) for _, _, capacity in self.edges]

    @cached_property
    def surplus(self) -> list[Fraction]:
        """Incoming minus outgoing capacity of each vertex, in GB/s."""
        found = [Fraction(0)] * len(self.names)
        for start, end, capacity in self.edges:
            found[start] -= capacity
            found[end] += capacity
        return found

    @property
    def relays(self) -> list[int]:
        """The vertices that hold no data."""
        return sorted(set(range(len(self.names))) - set(self.ranks))

    @property
    def representatives(self) -> tuple[int, ...]:
        """The ranks of the first node, which represent all ranks by symmetry."""
        return self.groups[0]

    @property
    def representative_peers(self) -> tuple[int, ...]:
        """The ranks of the first two nodes, which represent all peers of rank 0 by symmetry."""
        return tuple(
            vertex for group in self.groups[:2] for vertex in group if vertex != self.ranks[0]
        )

    def reversed(self) -> FlowNetwork:
        """Return the graph with every link reversed.

        An all-gather on it, run backwards, is a reduce-scatter on this graph: a relay that copies
        there would have to add here.
        """
        edges = tuple((end, start, capacity) for start, end, capacity in self.edges)
        return FlowNetwork(names=self.names, ranks=self.ranks, edges=edges, groups=self.groups)


def flow_network(system: System, nodes: int, *, network: bool) -> FlowNetwork:
    """Build the graph of ``nodes`` copies of a system.

    With ``network`` all NICs connect to one ideal switch; NICs that share a port connect through
    that port. Raises ``InvalidUsage`` for fewer than 1 node.
    """
    if nodes < 1:
        raise InvalidUsage(f"cannot bound a job of {nodes} nodes: it has at least 1")
    size = len(system.nodes)
    names = [
        f"{node.name}@{copy}" if nodes > 1 else node.name
        for copy in range(nodes)
        for node in system.nodes
    ]
    edges: dict[tuple[int, int], Fraction] = {}

    def join(start: int, end: int, bw: float) -> None:
        if start != end:
            edges[start, end] = edges.get((start, end), Fraction(0)) + Fraction(
                round(bw * DECIMALS), DECIMALS
            )

    for copy in range(nodes):
        for start, link in zip(system.link_source, system.links, strict=True):
            join(copy * size + start, copy * size + link.target, link.bw)
    if network:
        _join_network(system, nodes, names, join)
    gpus = [index for index, node in enumerate(system.nodes) if node.type == NodeType.GPU]
    gpus.sort(key=lambda index: system.gpus[index].rank)
    groups = tuple(tuple(copy * size + index for index in gpus) for copy in range(nodes))
    return FlowNetwork(
        names=tuple(names),
        ranks=tuple(vertex for group in groups for vertex in group),
        edges=tuple((start, end, bw) for (start, end), bw in edges.items()),
        groups=groups,
    )


def _join_network(
    system: System, nodes: int, names: list[str], join: Callable[[int, int, float], None]
) -> None:
    """Append the network switch and one vertex per port, and join them."""
    size = len(system.nodes)
    switch = len(names)
    names.append("network")
    for copy in range(nodes):
        ports: dict[tuple[int, int], list[tuple[int, NetNode]]] = {}
        for index, node in enumerate(system.nodes):
            if isinstance(node, NetNode):
                ports.setdefault((node.asic, node.port), []).append((copy * size + index, node))
        for nets in ports.values():
            port = len(names)
            names.append(f"port of {names[nets[0][0]]}")
            bw = max(node.bw for _, node in nets)
            join(port, switch, bw)
            join(switch, port, bw)
            for vertex, node in nets:
                join(vertex, port, node.bw)
                join(port, vertex, node.bw)
