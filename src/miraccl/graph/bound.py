"""How fast any schedule could be on a machine: the bound of ForestColl (arXiv 2402.06787) on all-gather, reduce-scatter and all-reduce.

The idea: take any set S of vertices that does not hold all ranks. In an all-gather every rank in S has to get its block out of S once
at least, and only the links that leave S can carry it. So no rank can broadcast faster than ``capacity leaving S / ranks in S``, and
the least of these quotients over all S is what can be reached (Theorem 1 there). The cut that attains it is the machine's bottleneck.

Rules kept here
- Switches, NICs and CPUs are relays: they forward and may copy, they hold no data and do not reduce. So a schedule that reduces inside
  NVSwitches or network switches (NVLS, CollNet) may pass the bounds on reduce-scatter and all-reduce.
- Links are full duplex with the bandwidths of the topology; nodes of a job are joined by an ideal network, ports being the only limit.
- All arithmetic is exact. The least quotient is found by Newton's method on cuts: a maximal flow either shows that a rate is possible or
  yields a cut with a smaller quotient (the paper's binary search ends at the same fraction).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import lcm

from miraccl.errors import InvalidUsage, TopologyError
from miraccl.topo.records import NetNode, NodeType, System

DECIMALS = 1000
"""Bandwidths are taken as multiples of 1/1000 GB/s, as the channel search does."""


@dataclass(frozen=True, kw_only=True)
class FlowNetwork:
    """A directed graph with capacities in GB/s. ``names[v]`` of vertex v; ``ranks`` are the vertices that hold data, by rank.

    ``groups``: ranks by node of the job; nodes have to be alike (exchanging two of them leaves the graph as it is), so that the first
    two stand for all.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    edges: tuple[tuple[int, int, Fraction], ...]
    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.ranks) < 2:
            raise InvalidUsage("a bound needs at least 2 ranks")
        if any(capacity < 0 for _, _, capacity in self.edges):
            raise TopologyError("a link has a negative bandwidth")

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        return [(start, end) for start, end, _ in self.edges]

    @cached_property
    def unit(self) -> int:
        """Parts of a GB/s in which all capacities are whole numbers."""
        return lcm(1, *(capacity.denominator for _, _, capacity in self.edges))

    @cached_property
    def capacities(self) -> list[int]:
        return [int(capacity * self.unit) for _, _, capacity in self.edges]

    @property
    def images(self) -> tuple[int, ...]:
        """Ranks that stand for all: those of the first node."""
        return self.groups[0]

    @property
    def others(self) -> tuple[int, ...]:
        """Ranks that stand for all but the first, seen from there."""
        return tuple(vertex for group in self.groups[:2] for vertex in group if vertex != self.ranks[0])

    def reversed(self) -> FlowNetwork:
        """The same graph with every link turned round: a reduce-scatter is an all-gather backwards in time."""
        edges = tuple((end, start, capacity) for start, end, capacity in self.edges)
        return FlowNetwork(names=self.names, ranks=self.ranks, edges=edges, groups=self.groups)


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """A cut: the ranks on one side, the links across (``from``, ``to``, GB/s) and their sum. ``rate``: GB/s per rank inside."""

    inside: tuple[int, ...]
    links: tuple[tuple[str, str, Fraction], ...]
    capacity: Fraction
    rate: Fraction

    def sentence(self) -> str:
        ranks = ", ".join(map(str, self.inside[:8])) + (", ..." if len(self.inside) > 8 else "")
        shown = ", ".join(f"{a} to {b}" for a, b, _ in self.links[:4]) + (", ..." if len(self.links) > 4 else "")
        links = f"{len(self.links)} link{'' if len(self.links) == 1 else 's'}"
        return f"{len(self.inside)} ranks ({ranks}) share {float(self.capacity):g} GB/s over {links} ({shown})"


@dataclass(frozen=True, kw_only=True)
class BandwidthBound:
    """The best bus bandwidths (GB/s, as nccl-tests define them) and what limits them.

    ``all_reduce`` is that of an optimal reduce-scatter followed by an optimal all-gather; ``all_reduce_ceiling`` is what no all-reduce
    without reducing switches can pass. They are equal on machines whose ranks are alike.
    """

    nranks: int
    all_gather: Fraction
    reduce_scatter: Fraction
    all_reduce: Fraction
    all_reduce_ceiling: Fraction
    all_gather_cut: Bottleneck
    reduce_scatter_cut: Bottleneck

    def sentences(self) -> list[str]:
        return [
            f"no all-gather of {self.nranks} ranks can pass a bus bandwidth of {float(self.all_gather):g} GB/s: "
            f"{self.all_gather_cut.sentence()}",
            f"no reduce-scatter can pass {float(self.reduce_scatter):g} GB/s",
            f"an all-reduce made of both reaches {float(self.all_reduce):g} GB/s at best; "
            f"no other without reducing switches can pass {float(self.all_reduce_ceiling):g} GB/s",
        ]


def bandwidth_bound(system: System, nodes: int = 1, *, network: bool | None = None) -> BandwidthBound:
    """The bound for a job on ``nodes`` machines like ``system``, one rank per GPU.

    ``network``: whether NICs may be used; by default between nodes only. Raises ``InvalidUsage`` for less than two ranks and
    ``TopologyError`` when some rank cannot reach another one.
    """
    return bound_of_network(flow_network(system, nodes, network=nodes > 1 if network is None else network))


def bound_of_network(graph: FlowNetwork) -> BandwidthBound:
    """The bound for any graph of links."""
    count = len(graph.ranks)
    gather = narrowest_cut(graph)
    scatter = narrowest_cut(graph.reversed())
    if not gather.rate or not scatter.rate:
        raise TopologyError("some ranks cannot reach the others: no link leads there")
    both = 1 / (1 / (count * gather.rate) + 1 / (count * scatter.rate))
    per_bus = Fraction(2 * (count - 1), count)
    return BandwidthBound(
        nranks=count,
        all_gather=(count - 1) * gather.rate,
        reduce_scatter=(count - 1) * scatter.rate,
        all_reduce=both * per_bus,
        all_reduce_ceiling=all_reduce_ceiling(graph) * per_bus,
        all_gather_cut=gather,
        reduce_scatter_cut=scatter,
    )


def narrowest_cut(graph: FlowNetwork) -> Bottleneck:
    """The set S with the least ``capacity leaving S / ranks in S`` among those that lack a rank (1/x* in the paper)."""
    everything = frozenset(range(len(graph.names)))
    best = min((_bottleneck(graph, everything - {rank}) for rank in graph.images), key=lambda cut: cut.rate)
    source = len(graph.names)
    flow = MaxFlow(source + 1, [*graph.pairs, *((source, vertex) for vertex in graph.ranks)])
    for sink in graph.images:
        # Every rank can send ``rate`` to this one, or the least cut is a set whose ranks cannot all send it out.
        while best.rate:
            rate = best.rate * graph.unit
            feeds = [rate.numerator] * len(graph.ranks)
            if flow.push(source, sink, [*(rate.denominator * c for c in graph.capacities), *feeds]) == sum(feeds):
                break
            best = _bottleneck(graph, flow.reachable(source) - {source})
    return best


def _bottleneck(graph: FlowNetwork, inside: frozenset[int]) -> Bottleneck:
    across = [edge for edge in graph.edges if edge[0] in inside and edge[1] not in inside and edge[2]]
    ranks = tuple(rank for rank, vertex in enumerate(graph.ranks) if vertex in inside)
    capacity = sum((edge[2] for edge in across), Fraction(0))
    links = tuple((graph.names[start], graph.names[end], bw) for start, end, bw in across)
    return Bottleneck(inside=ranks, links=links, capacity=capacity, rate=capacity / len(ranks))


def all_reduce_ceiling(graph: FlowNetwork) -> Fraction:
    """Bytes per second (GB/s) of input that no all-reduce can pass.

    Every cut between two ranks has to be crossed by the whole sum. And each byte of the result takes a tree in and a tree out: over k
    disjoint groups of ranks, data enters a group 2 (k - 1) times at least. Copies of a node are alike, so one group stands for all.
    """
    limits = [least_connection(graph)]
    nodes = len(graph.groups)
    for groups in ([(rank,) for rank in graph.images], graph.groups[:1]):
        if len(groups) * nodes > 1:
            entering = nodes * sum((_entering(graph, group) for group in groups), Fraction(0))
            limits.append(entering / (2 * (len(groups) * nodes - 1)))
    return min(limits)


def _entering(graph: FlowNetwork, group: Sequence[int]) -> Fraction:
    """The most that can enter a group of ranks: the least cut between all other ranks and it."""
    source, sink = len(graph.names), len(graph.names) + 1
    ends = [(vertex, sink) if vertex in group else (source, vertex) for vertex in graph.ranks]
    plenty = [sum(graph.capacities) + 1] * len(ends)
    flow = MaxFlow(sink + 1, [*graph.pairs, *ends])
    return Fraction(flow.push(source, sink, [*graph.capacities, *plenty]), graph.unit)


def least_connection(graph: FlowNetwork) -> Fraction:
    """The least maximal flow from a rank to another one."""
    flow = MaxFlow(len(graph.names), graph.pairs)
    first = graph.ranks[0]
    ends = [pair for other in graph.others for pair in ((first, other), (other, first))]
    return Fraction(min(flow.push(*pair, graph.capacities) for pair in ends), graph.unit)


# From a system to a graph


def flow_network(system: System, nodes: int, *, network: bool) -> FlowNetwork:
    """``nodes`` copies of a system; with ``network`` all their NICs meet in one ideal switch, those that share a port through that port."""
    if nodes < 1:
        raise InvalidUsage(f"a job has at least 1 node, not {nodes}")
    size = len(system.nodes)
    names = [f"{node.name}@{copy}" if nodes > 1 else node.name for copy in range(nodes) for node in system.nodes]
    edges: dict[tuple[int, int], Fraction] = {}

    def join(start: int, end: int, bw: float) -> None:
        if start != end:
            edges[start, end] = edges.get((start, end), Fraction(0)) + Fraction(round(bw * DECIMALS), DECIMALS)

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


def _join_network(system: System, nodes: int, names: list[str], join: Callable[[int, int, float], None]) -> None:
    """Append the switch and one vertex per port, and join them."""
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


# Maximal flow


class MaxFlow:
    """Dinic's algorithm on whole numbers, again and again over the same edges."""

    def __init__(self, size: int, edges: Sequence[tuple[int, int]]) -> None:
        self.leaving: list[list[int]] = [[] for _ in range(size)]  # arcs by vertex; arc a ^ 1 is arc a turned round
        self.end: list[int] = []
        self.left: list[int] = []
        for start, end in edges:
            for vertex, other in ((start, end), (end, start)):
                self.leaving[vertex].append(len(self.end))
                self.end.append(other)

    def push(self, source: int, sink: int, capacities: Sequence[int]) -> int:
        """Send as much as possible over edges of these capacities; returns how much."""
        self.left = [0] * len(self.end)
        self.left[::2] = capacities
        total = 0
        while (level := self._levels(source))[sink] >= 0:
            begun = [0] * len(self.leaving)
            while amount := self._augment(source, sink, level, begun):
                total += amount
        return total

    def reachable(self, source: int) -> frozenset[int]:
        """After :meth:`push`: the side of the source in a least cut."""
        return frozenset(vertex for vertex, level in enumerate(self._levels(source)) if level >= 0)

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self.leaving)
        level[source] = 0
        queue = [source]
        for vertex in queue:
            for arc in self.leaving[vertex]:
                if self.left[arc] and level[self.end[arc]] < 0:
                    level[self.end[arc]] = level[vertex] + 1
                    queue.append(self.end[arc])
        return level

    def _augment(self, source: int, sink: int, level: list[int], begun: list[int]) -> int:
        """One path that descends level by level; ``begun`` remembers which arcs of a vertex are spent."""
        path: list[int] = []
        at = source
        while at != sink:
            arcs = self.leaving[at]
            while begun[at] < len(arcs):
                arc = arcs[begun[at]]
                if self.left[arc] and level[self.end[arc]] == level[at] + 1:
                    break
                begun[at] += 1
            else:
                if not path:
                    return 0
                at = self.end[path.pop() ^ 1]
                begun[at] += 1
                continue
            path.append(arc)
            at = self.end[arc]
        amount = min(self.left[arc] for arc in path)
        for arc in path:
            self.left[arc] -= amount
            self.left[arc ^ 1] += amount
        return amount
