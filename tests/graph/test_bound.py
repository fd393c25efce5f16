"""The bandwidth bound: against all cuts of small graphs, and on machines whose bound is known."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miraccl.errors import InvalidUsage, TopologyError
from miraccl.graph.bound import (
    FlowNetwork,
    MaxFlow,
    all_reduce_ceiling,
    bandwidth_bound,
    bound_of_network,
    least_connection,
    narrowest_cut,
)
from miraccl.topo.jsonform import system_from_json
from miraccl.topo.records import GpuNode, Link, LinkType, NetNode, NodeType, System, TopoNode
from tests.topo.golden import DATA, golden_cases


def network(ranks: int, relays: int, edges: dict[tuple[int, int], Fraction]) -> FlowNetwork:
    size = ranks + relays
    return FlowNetwork(
        names=tuple(map(str, range(size))),
        ranks=tuple(range(ranks)),
        edges=tuple((a, b, c) for (a, b), c in edges.items()),
        groups=(tuple(range(ranks)),),
    )


@st.composite
def networks(draw: st.DrawFn) -> FlowNetwork:
    ranks, relays = draw(st.integers(2, 4)), draw(st.integers(0, 3))
    size = ranks + relays
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    capacity = st.fractions(0, 8, max_denominator=6)
    edges = {pair: draw(capacity) for pair in pairs if draw(st.booleans())}
    return network(ranks, relays, edges)


def cuts(graph: FlowNetwork) -> list[tuple[frozenset[int], Fraction]]:
    """Every set of vertices and the capacity that leaves it."""
    vertices = range(len(graph.names))
    sets = [frozenset(chosen) for k in range(len(graph.names)) for chosen in combinations(vertices, k)]
    return [(s, sum((c for a, b, c in graph.edges if a in s and b not in s), Fraction(0))) for s in sets]


@settings(deadline=None, max_examples=150)
@given(networks())
def test_the_narrowest_cut_is_that_of_all_cuts(graph: FlowNetwork) -> None:
    ranks = set(graph.ranks)
    quotients = [leaving / len(s & ranks) for s, leaving in cuts(graph) if s & ranks and not s >= ranks]
    found = narrowest_cut(graph)
    assert found.rate == min(quotients)
    assert found.rate == found.capacity / len(found.inside)
    assert found.capacity == sum((bw for _, _, bw in found.links), Fraction(0))


@settings(deadline=None, max_examples=150)
@given(networks())
def test_the_least_connection_is_the_least_cut_between_ranks(graph: FlowNetwork) -> None:
    ranks = set(graph.ranks)
    assert least_connection(graph) == min(leaving for s, leaving in cuts(graph) if s & ranks and not s >= ranks)


@settings(deadline=None, max_examples=100)
@given(networks())
def test_a_flow_is_as_large_as_the_least_cut(graph: FlowNetwork) -> None:
    flow = MaxFlow(len(graph.names), graph.pairs)
    flow.push(1, 0, graph.capacities)  # what was pushed before does not matter
    value = Fraction(flow.push(0, 1, graph.capacities), graph.unit)
    assert value == min(leaving for s, leaving in cuts(graph) if 0 in s and 1 not in s)
    side = flow.reachable(0)
    assert value == sum((c for a, b, c in graph.edges if a in side and b not in side), Fraction(0))


@settings(deadline=None, max_examples=100)
@given(networks())
def test_the_ceiling_of_all_reduce_is_above_what_can_be_reached(graph: FlowNetwork) -> None:
    try:
        bound = bound_of_network(graph)
    except TopologyError:
        assert not narrowest_cut(graph).rate or not narrowest_cut(graph.reversed()).rate
        return
    assert bound.all_reduce <= bound.all_reduce_ceiling
    assert min(bound.all_gather, bound.reduce_scatter) <= bound.all_reduce <= max(bound.all_gather, bound.reduce_scatter)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_rings_and_stars_reach_their_link(ranks: int) -> None:
    ring = {(a, (a + 1) % ranks): Fraction(7) for a in range(ranks)}
    star = {edge: Fraction(7) for a in range(ranks) for edge in ((a, ranks), (ranks, a))}
    for graph in (network(ranks, 0, ring), network(ranks, 1, star)):
        bound = bound_of_network(graph)
        assert bound.all_gather == bound.reduce_scatter == bound.all_reduce == bound.all_reduce_ceiling == 7


def test_one_slow_rank_limits_an_all_gather_but_less_an_all_reduce() -> None:
    """Reduce towards a fast rank while broadcasting from it: the slow rank sends and receives at once."""
    speeds = [10, 10, 10, 1]
    star = {edge: Fraction(bw) for a, bw in enumerate(speeds) for edge in ((a, 4), (4, a))}
    bound = bound_of_network(network(4, 1, star))
    assert bound.all_gather == 1
    assert bound.all_reduce == 1
    assert bound.all_reduce_ceiling == Fraction(3, 2)


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_copies_of_a_node_are_taken_as_alike(nodes: int) -> None:
    """The short cut through symmetry gives what the whole graph gives."""
    from miraccl.graph.bound import flow_network

    system = small_system()
    graph = flow_network(system, nodes, network=True)
    whole = FlowNetwork(names=graph.names, ranks=graph.ranks, edges=graph.edges, groups=(graph.ranks,))
    assert narrowest_cut(graph).rate == narrowest_cut(whole).rate
    assert least_connection(graph) == least_connection(whole)
    assert all_reduce_ceiling(graph) <= all_reduce_ceiling(whole)  # knows of the nodes as groups besides


def small_system() -> System:
    """Two GPUs with 40 GB/s between them, 12 to a CPU; two nets of 10 and 5 GB/s that share one port."""

    def link(kind: LinkType, bw: float, target: int) -> Link:
        return Link(type=kind, bw=bw, target=target)

    up = (link(LinkType.PCI, 12.0, 2),)
    gpus = tuple(GpuNode(id=g, dev=g, rank=g, sm=80, links=(link(LinkType.NVL, 40.0, 1 - g), *up)) for g in range(2))
    down = (*(link(LinkType.PCI, 12.0, g) for g in range(2)), link(LinkType.PCI, 24.0, 3))
    cpu = TopoNode(type=NodeType.CPU, id=0, links=down)
    nic = TopoNode(type=NodeType.NIC, id=9, links=(link(LinkType.PCI, 24.0, 2), link(LinkType.NET, 10.0, 4), link(LinkType.NET, 5.0, 5)))
    nets = tuple(NetNode(id=n, dev=n, asic=1, port=1, bw=bw, links=(link(LinkType.NET, bw, 3),)) for n, bw in enumerate((10.0, 5.0)))
    return System(nodes=(*gpus, cpu, nic, *nets))


def test_nets_that_share_a_port_do_not_add_up() -> None:
    bound = bandwidth_bound(small_system(), nodes=2)
    assert bound.all_gather_cut.capacity == 10
    assert bound.all_gather == 3 * Fraction(10, 2)
    assert set(bound.all_gather_cut.inside) in ({0, 1}, {2, 3})


def test_a_node_alone_leaves_the_network_out_unless_asked() -> None:
    assert bandwidth_bound(small_system()).all_gather == 52
    assert bandwidth_bound(small_system(), network=True).all_gather == 52


def test_what_cannot_be_bounded_is_refused() -> None:
    with pytest.raises(InvalidUsage, match="2 ranks"):
        bandwidth_bound(System(nodes=(GpuNode(id=0, dev=0, rank=0),)))
    with pytest.raises(InvalidUsage, match="at least 1 node"):
        bandwidth_bound(small_system(), nodes=0)
    with pytest.raises(TopologyError, match="cannot reach"):
        bandwidth_bound(System(nodes=tuple(GpuNode(id=g, dev=g, rank=g) for g in range(2))))


@pytest.mark.parametrize(
    ("name", "nodes", "gather"),
    [
        ("device-8xH200-vm.1n", 1, 370.8 + 48),  # NVLink and PCI at once
        ("nvidia-dgx1v.1n", 1, 132),  # six NVLinks of 20 and PCI
    ],
)
def test_bounds_of_known_machines(name: str, nodes: int, gather: float) -> None:
    case = next(case for case in golden_cases(DATA / "golden") if case.name == name)
    bound = bandwidth_bound(system_from_json(case.load()["system"]), nodes)
    assert float(bound.all_gather) == pytest.approx(gather)
    assert len(bound.sentences()) == 3
