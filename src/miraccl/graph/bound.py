"""Upper bounds on the bandwidth of all-gather, reduce-scatter and all-reduce on a machine.

The bound follows ForestColl (arXiv 2402.06787). Take any set S of vertices that lacks at least one
rank. In an all-gather every rank of S has to send its block out of S at least once, and only the
links that leave S can carry it. So no rank can broadcast faster than ``capacity leaving S / ranks
in S``. The minimum of these quotients over all S is the bound; the cut that attains it is the
machine's bottleneck. For a reduce-scatter the same holds for the links that enter S.

Assumptions and limits:

- Switches, NICs and CPUs are relays: they forward and may copy, but hold no data and do not reduce.
  Data is routed and summed, not network-coded. A schedule that reduces inside NVSwitches or network
  switches (NVLS, CollNet) cannot pass a cut, but it can pass the limits derived from how often data
  enters a rank: the ceiling of all-reduce and, where relays narrow, the reduce-scatter bound.
- A bound is reached, in the limit of large sizes, if relays only have to forward. For all-gather
  that is the case if no relay *widens* (can send more than it can receive): such relays can be
  split off, one incoming and one outgoing link at a time, without narrowing any cut between ranks
  below the bottleneck (Bang-Jensen, Frank and Jackson, SIAM J. Discrete Math. 8, 1995), and the
  remaining links between ranks contain trees that fill the bottleneck (Edmonds). For reduce-scatter
  it is the case if no relay *narrows* (can receive more than it can send): the same argument on the
  reversed graph. Theorem 1 of ForestColl assumes that every vertex is balanced, which holds on all
  machines recorded from NCCL.
- Otherwise the cuts are still bounds but may be out of reach: relays that widen have to copy, and
  packing such trees does not always fill the cut (network coding would); relays that narrow would
  have to add, so data must enter ranks more often.
- All arithmetic is exact. The minimum quotient is found by Newton's method on cuts: a maximum flow
  either shows that a rate is feasible or yields a cut with a smaller quotient (the paper's binary
  search ends at the same fraction).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from miraccl.errors import InvalidUsage, TopologyError
from miraccl.graph.flow_network import FlowNetwork, flow_network
from miraccl.graph.max_flow import MaxFlow
from miraccl.topo.records import System


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """A cut of the machine: the ranks on one side and the links across.

    ``links`` are triples (from, to, GB/s), ``capacity`` is their sum in GB/s, ``rate`` is GB/s per
    rank inside.
    """

    inside: tuple[int, ...]
    links: tuple[tuple[str, str, Fraction], ...]
    capacity: Fraction
    rate: Fraction

    def describe(self) -> str:
        """Return the cut as one line of text with at most 4 links and 8 ranks."""
        shown = _join_some([f"{a} to {b}" for a, b, _ in self.links], 4)
        links = f"{len(self.links)} link{'' if len(self.links) == 1 else 's'}"
        ranks = (
            f"rank {self.inside[0]} has"
            if len(self.inside) == 1
            else f"{len(self.inside)} ranks ({_join_some(self.inside, 8)}) share"
        )
        return f"{ranks} {float(self.capacity):g} GB/s over {links} ({shown})"


@dataclass(frozen=True, kw_only=True)
class BandwidthBound:
    """Upper bounds on bus bandwidth (GB/s, as nccl-tests defines it) and their bottlenecks.

    ``all_gather`` and ``reduce_scatter`` are equal to the rate of their cuts (``reduce_scatter``
    may be lower where relays narrow). ``all_reduce`` bounds a reduce-scatter followed by an
    all-gather; ``all_reduce_ceiling`` bounds any all-reduce without reducing switches and is never
    lower. The two are equal on most machines; they differ where a few groups of ranks, such as
    pairs of GPUs, limit all-gather. ``widening`` and ``narrowing`` name the relays that can send
    more than they receive, or less.
    """

    nranks: int
    all_gather: Fraction
    reduce_scatter: Fraction
    all_reduce: Fraction
    all_reduce_ceiling: Fraction
    all_gather_cut: Bottleneck
    reduce_scatter_cut: Bottleneck
    widening: tuple[str, ...]
    narrowing: tuple[str, ...]

    @property
    def all_gather_reached(self) -> bool:
        """True if a schedule is known to reach the all-gather bound."""
        return not self.widening

    @property
    def reduce_scatter_reached(self) -> bool:
        """True if a schedule is known to reach the reduce-scatter bound."""
        return not self.narrowing

    @property
    def all_reduce_reached(self) -> bool:
        """True if a schedule is known to reach ``all_reduce``.

        Where ``all_reduce_ceiling`` is higher, the range between the two is open.
        """
        return self.all_gather_reached and self.reduce_scatter_reached

    def summarize(self) -> list[str]:
        """Return the bounds as lines of text, with a caveat where one may be out of reach."""
        cut = self.reduce_scatter == (self.nranks - 1) * self.reduce_scatter_cut.rate
        return [
            f"no all-gather of {self.nranks} ranks can exceed a bus bandwidth of "
            f"{float(self.all_gather):g} GB/s: "
            f"{self.all_gather_cut.describe()}",
            f"no reduce-scatter {'' if cut else 'without reducing switches '}can exceed "
            f"{float(self.reduce_scatter):g} GB/s",
            f"an all-reduce composed of both reaches at most {float(self.all_reduce):g} GB/s; "
            "no all-reduce without reducing switches can exceed "
            f"{float(self.all_reduce_ceiling):g} GB/s",
            *(
                f"the bound on {name} may be out of reach: {_join_some(relays, 4)} "
                f"can send {how} than they can receive"
                for name, relays, how in (
                    ("all-gather", self.widening, "more"),
                    ("reduce-scatter", self.narrowing, "less"),
                )
                if relays
            ),
        ]


def _join_some(items: Sequence[object], count: int) -> str:
    return ", ".join(map(str, items[:count])) + (", ..." if len(items) > count else "")


def bandwidth_bound(
    system: System, nodes: int = 1, *, network: bool | None = None
) -> BandwidthBound:
    """Compute the bound for a job on ``nodes`` copies of ``system`` with one rank per GPU.

    ``network`` states whether NICs may be used; None allows them between nodes only.

    Raises ``InvalidUsage`` for fewer than two ranks and ``TopologyError`` if a rank cannot reach
    another one.
    """
    return bound_network(
        flow_network(system, nodes, network=nodes > 1 if network is None else network)
    )


def bound_network(graph: FlowNetwork, *, holds_for_more_nodes: bool = False) -> BandwidthBound:
    """Compute the bound of an arbitrary graph of links.

    ``holds_for_more_nodes`` asks for a bound that also holds for jobs on more copies of these
    nodes. Raises ``InvalidUsage`` for it if the graph has fewer than 2 nodes or an unbalanced
    vertex, and ``TopologyError`` if a rank cannot reach another one.
    """
    # More nodes only lower a bound, with one exception and one condition. The exception: minimum
    # flow and input bandwidth of an all-reduce stay the same, so its bus bandwidth rises towards
    # twice that. The condition: every vertex is balanced. Then the flow into a set of vertices
    # equals the flow out of it, so that the bottleneck has the network on its inner side, and more
    # nodes add to the ranks there but not to the links across.
    if holds_for_more_nodes and (len(graph.groups) < 2 or any(graph.surplus)):
        raise InvalidUsage(
            "cannot extend the bound to more nodes: "
            "it needs 2 or more nodes in which every vertex is balanced"
        )
    count = len(graph.ranks)
    gather = find_bottleneck(graph)
    scatter = find_bottleneck(graph.reversed())
    if not gather.rate or not scatter.rate:
        raise TopologyError("cannot bound the bandwidth: no link joins some ranks to the others")
    collected = aggregation_limit(graph)
    scatter_rate = min(scatter.rate, collected / count)
    both = 1 / (1 / (count * gather.rate) + 1 / (count * scatter_rate))
    per_bus = Fraction(2 * (count - 1), count)
    # The whole sum has to cross every cut between two ranks. And each byte of it is reduced in the
    # first group of ranks that has it; it enters every other group then or later, so data enters
    # groups twice as often.
    ceiling = min(
        min_pairwise_flow(graph) * (2 if holds_for_more_nodes else per_bus), collected / 2 * per_bus
    )
    return BandwidthBound(
        nranks=count,
        all_gather=(count - 1) * gather.rate,
        reduce_scatter=(count - 1) * scatter_rate,
        all_reduce=both * per_bus,
        all_reduce_ceiling=ceiling,
        all_gather_cut=gather,
        reduce_scatter_cut=scatter,
        widening=tuple(graph.names[relay] for relay in graph.relays if graph.surplus[relay] < 0),
        narrowing=tuple(graph.names[relay] for relay in graph.relays if graph.surplus[relay] > 0),
    )


def find_bottleneck(graph: FlowNetwork) -> Bottleneck:
    """Find the set S that minimises ``capacity leaving S / ranks in S`` (1/x* in ForestColl)."""
    everything = frozenset(range(len(graph.names)))
    best = min(
        (_bottleneck(graph, everything - {rank}) for rank in graph.representatives),
        key=lambda cut: cut.rate,
    )
    source = len(graph.names)
    flow = MaxFlow(source + 1, [*graph.pairs, *((source, vertex) for vertex in graph.ranks)])
    for sink in graph.representatives:
        # Either every rank can send ``rate`` to this one, or the minimum cut is a set whose ranks
        # cannot all send that much out of it.
        while best.rate:
            rate = best.rate * graph.unit
            feeds = [rate.numerator] * len(graph.ranks)
            if flow.push(
                source, sink, [*(rate.denominator * c for c in graph.capacities), *feeds]
            ) == sum(feeds):
                break
            best = _bottleneck(graph, flow.reachable(source) - {source})
    return best


def _bottleneck(graph: FlowNetwork, inside: frozenset[int]) -> Bottleneck:
    across = [
        edge for edge in graph.edges if edge[0] in inside and edge[1] not in inside and edge[2]
    ]
    ranks = tuple(rank for rank, vertex in enumerate(graph.ranks) if vertex in inside)
    capacity = sum((edge[2] for edge in across), Fraction(0))
    links = tuple((graph.names[start], graph.names[end], bw) for start, end, bw in across)
    return Bottleneck(inside=ranks, links=links, capacity=capacity, rate=capacity / len(ranks))


def aggregation_limit(graph: FlowNetwork) -> Fraction:
    """Return the rate (GB/s) at which fully reduced bytes can be formed, summed over all ranks.

    Cut the ranks into k groups. Without reducing relays, each of the k - 1 groups in which a sum
    does not end has to send its share of it to another group at least once, so data enters groups k
    - 1 times.
    """
    limits = []
    nodes = len(graph.groups)
    # Nodes are interchangeable, so the first group counts for all.
    for groups in ([(rank,) for rank in graph.representatives], graph.groups[:1]):
        if len(groups) * nodes > 1:
            entering = nodes * sum((_max_inflow(graph, group) for group in groups), Fraction(0))
            limits.append(entering / (len(groups) * nodes - 1))
    return min(limits)


def _max_inflow(graph: FlowNetwork, group: Sequence[int]) -> Fraction:
    """Return the minimum cut (GB/s) from all other ranks to ``group``."""
    source, sink = len(graph.names), len(graph.names) + 1
    ends = [(vertex, sink) if vertex in group else (source, vertex) for vertex in graph.ranks]
    plenty = [sum(graph.capacities) + 1] * len(ends)
    flow = MaxFlow(sink + 1, [*graph.pairs, *ends])
    return Fraction(flow.push(source, sink, [*graph.capacities, *plenty]), graph.unit)


def min_pairwise_flow(graph: FlowNetwork) -> Fraction:
    """Return the smallest maximum flow (GB/s) from one rank to another."""
    flow = MaxFlow(len(graph.names), graph.pairs)
    first = graph.ranks[0]
    ends = [
        pair for other in graph.representative_peers for pair in ((first, other), (other, first))
    ]
    return Fraction(min(flow.push(*pair, graph.capacities) for pair in ends), graph.unit)
