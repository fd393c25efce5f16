"""Upper bounds on the bandwidth of all-gather, reduce-scatter and all-reduce on a machine, and when they are reached.

The idea is that of ForestColl (arXiv 2402.06787). Take any set S of vertices that does not hold all ranks. In an all-gather every rank in S
has to get its block out of S once at least, and only the links that leave S can carry it. So no rank can broadcast faster than ``capacity
leaving S / ranks in S``. The least of these quotients over all S is the bound, the cut that attains it the machine's bottleneck. For a
reduce-scatter the same holds of what enters S.

Rules kept here
- Switches, NICs and CPUs are relays: they forward and may copy, they hold no data and do not reduce. Bytes are moved and added as they are,
  not coded. A schedule that reduces inside NVSwitches or network switches (NVLS, CollNet) passes no cut, but may pass what follows from the
  number of times that data enters ranks: the ceiling of all-reduce and, where relays narrow, the bound on reduce-scatter.
- A bound is reached, in the limit of large sizes, where relays only need to forward. The all-gather's is if no relay *widens* (can send
  more than it can receive): then the relays can be taken out of the graph, a link in and a link out at a time, so that no cut between ranks
  becomes narrower than the bottleneck (Bang-Jensen, Frank and Jackson, SIAM J. Discrete Math. 8, 1995), and what is left, links between
  ranks, holds trees that fill it (Edmonds). The reduce-scatter's is if no relay *narrows* (can receive more than it can send): the same
  graph turned round. Theorem 1 of ForestColl is on graphs in which every vertex is balanced, as on all machines recorded from NCCL.
- Elsewhere the cuts remain bounds, but may be out of reach: relays that widen have to copy, and packing such trees does not always fill the
  cut (network coding would); relays that narrow would have to add, so there data also has to enter ranks often enough.
- All arithmetic is exact. The least quotient is found by Newton's method on cuts: a maximal flow either shows that a rate is possible or
  yields a cut with a smaller quotient (the paper's binary search ends at the same fraction).
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
    """A cut: the ranks on one side, the links across (``from``, ``to``, GB/s) and their sum. ``rate``: GB/s per rank inside."""

    inside: tuple[int, ...]
    links: tuple[tuple[str, str, Fraction], ...]
    capacity: Fraction
    rate: Fraction

    def describe(self) -> str:
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
    """Bus bandwidths (GB/s, as nccl-tests define them) that cannot be passed, and what limits them.

    ``all_gather``, ``reduce_scatter``: the bound on each, equal to that of its cut (``reduce_scatter`` may be lower where relays narrow).
    ``all_reduce``: the bound on a reduce-scatter followed by an all-gather; ``all_reduce_ceiling``: that on any all-reduce without reducing
    switches, never lower. They are equal on most machines, not where all-gather is held up by a few groups of ranks (pairs of GPUs, say).
    ``widening``, ``narrowing``: the names of relays that send more than they receive, or less.
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
        """Whether some schedule is known to reach the bound; if not, it may be out of reach."""
        return not self.widening

    @property
    def reduce_scatter_reached(self) -> bool:
        return not self.narrowing

    @property
    def all_reduce_reached(self) -> bool:
        """Of ``all_reduce``. Where the ceiling is higher, nothing is known of what lies between."""
        return self.all_gather_reached and self.reduce_scatter_reached

    def summarize(self) -> list[str]:
        cut = self.reduce_scatter == (self.nranks - 1) * self.reduce_scatter_cut.rate
        return [
            f"no all-gather of {self.nranks} ranks can pass a bus bandwidth of {float(self.all_gather):g} GB/s: "
            f"{self.all_gather_cut.describe()}",
            f"no reduce-scatter {'' if cut else 'without reducing switches '}can pass {float(self.reduce_scatter):g} GB/s",
            f"an all-reduce made of both reaches {float(self.all_reduce):g} GB/s at best; "
            f"no other without reducing switches can pass {float(self.all_reduce_ceiling):g} GB/s",
            *(
                f"the bound on {name} may be out of reach: what can be sent is {how} than what can be received at {_join_some(relays, 4)}"
                for name, relays, how in (
                    ("all-gather", self.widening, "more"),
                    ("reduce-scatter", self.narrowing, "less"),
                )
                if relays
            ),
        ]


def _join_some(words: Sequence[object], count: int) -> str:
    return ", ".join(map(str, words[:count])) + (", ..." if len(words) > count else "")


def bandwidth_bound(
    system: System, nodes: int = 1, *, network: bool | None = None
) -> BandwidthBound:
    """The bound for a job on ``nodes`` machines like ``system``, one rank per GPU.

    ``network``: whether NICs may be used; by default between nodes only. Raises ``InvalidUsage`` for less than two ranks and
    ``TopologyError`` when some rank cannot reach another one.
    """
    return bound_network(
        flow_network(system, nodes, network=nodes > 1 if network is None else network)
    )


def bound_network(graph: FlowNetwork, *, holds_for_more_nodes: bool = False) -> BandwidthBound:
    """The bound for any graph of links. ``or_more``: one that holds for jobs on more of these nodes, too.

    More nodes only lower a bound, with one exception and one condition. The exception: least connection and bandwidth of an all-reduce's
    input stay as they are, so the bus bandwidth rises towards twice that. The condition: every vertex is balanced. Then what enters a set
    of vertices is what leaves it, so that the bottleneck has the network on its inner side, and further nodes add to the ranks there
    but not to the links across. Else ``InvalidUsage`` is raised.
    """
    if holds_for_more_nodes and (len(graph.groups) < 2 or any(graph.surplus)):
        raise InvalidUsage(
            "the bound of some nodes is one of more of them only for 2 or more nodes whose every vertex is balanced"
        )
    count = len(graph.ranks)
    gather = find_bottleneck(graph)
    scatter = find_bottleneck(graph.reversed())
    if not gather.rate or not scatter.rate:
        raise TopologyError("some ranks cannot reach the others: no link leads there")
    collected = aggregation_limit(graph)
    scatter_rate = min(scatter.rate, collected / count)
    both = 1 / (1 / (count * gather.rate) + 1 / (count * scatter_rate))
    per_bus = Fraction(2 * (count - 1), count)
    # The whole sum has to cross every cut between two ranks. And each byte of it is collected by the first group of ranks that has it; into
    # every other group something enters then or later, so data enters groups twice as often.
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
    """The set S with the least ``capacity leaving S / ranks in S`` among those that lack a rank (1/x* in the paper)."""
    everything = frozenset(range(len(graph.names)))
    best = min(
        (_bottleneck(graph, everything - {rank}) for rank in graph.representatives),
        key=lambda cut: cut.rate,
    )
    source = len(graph.names)
    flow = MaxFlow(source + 1, [*graph.pairs, *((source, vertex) for vertex in graph.ranks)])
    for sink in graph.representatives:
        # Every rank can send ``rate`` to this one, or the least cut is a set whose ranks cannot all send it out.
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
    """Bytes per second (GB/s) that can be collected: each the sum of one byte of every rank, at some rank.

    Cut the ranks into k groups. Without reducing relays, each of the k - 1 groups in which a sum does not end sends its share of it to a
    group once at least, so data enters groups k - 1 times. Copies of a node are alike, so one group stands for all.
    """
    limits = []
    nodes = len(graph.groups)
    for groups in ([(rank,) for rank in graph.representatives], graph.groups[:1]):
        if len(groups) * nodes > 1:
            entering = nodes * sum((_max_inflow(graph, group) for group in groups), Fraction(0))
            limits.append(entering / (len(groups) * nodes - 1))
    return min(limits)


def _max_inflow(graph: FlowNetwork, group: Sequence[int]) -> Fraction:
    """The most that can enter a group of ranks: the least cut between all other ranks and it."""
    source, sink = len(graph.names), len(graph.names) + 1
    ends = [(vertex, sink) if vertex in group else (source, vertex) for vertex in graph.ranks]
    plenty = [sum(graph.capacities) + 1] * len(ends)
    flow = MaxFlow(sink + 1, [*graph.pairs, *ends])
    return Fraction(flow.push(source, sink, [*graph.capacities, *plenty]), graph.unit)


def min_pairwise_flow(graph: FlowNetwork) -> Fraction:
    """The least maximal flow from a rank to another one."""
    flow = MaxFlow(len(graph.names), graph.pairs)
    first = graph.ranks[0]
    ends = [
        pair for other in graph.representative_peers for pair in ((first, other), (other, first))
    ]
    return Fraction(min(flow.push(*pair, graph.capacities) for pair in ends), graph.unit)
