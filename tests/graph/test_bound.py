"""The bandwidth bound on small graphs with all cuts, on schedules and on known machines."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from miraccl.errors import InvalidUsage, TopologyError
from miraccl.graph.bound import (
    aggregation_limit,
    bandwidth_bound,
    bound_network,
    find_bottleneck,
    min_pairwise_flow,
)
from miraccl.graph.flow_network import FlowNetwork, flow_network
from miraccl.graph.max_flow import MaxFlow
from miraccl.topo.records import GpuNode, Link, LinkType, NetNode, NodeType, System, TopoNode
from miraccl.topo.system_json import system_from_json
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
    """Yield every set of vertices with the capacity that leaves it."""
    vertices = range(len(graph.names))
    sets = [
        frozenset(chosen) for k in range(len(graph.names)) for chosen in combinations(vertices, k)
    ]
    return [
        (s, sum((c for a, b, c in graph.edges if a in s and b not in s), Fraction(0))) for s in sets
    ]


@settings(deadline=None, max_examples=150)
@given(networks())
def test_results_are_minima_over_all_cuts(graph: FlowNetwork) -> None:
    """One test for bottleneck, pairwise flow and inflow, since listing all cuts takes longest."""
    every, ranks = cuts(graph), set(graph.ranks)
    between = [(s, leaving) for s, leaving in every if s & ranks and not s >= ranks]
    found = find_bottleneck(graph)
    assert found.rate == min(leaving / len(s & ranks) for s, leaving in between)
    assert found.rate == found.capacity / len(found.inside)
    assert found.capacity == sum((bw for _, _, bw in found.links), Fraction(0))
    assert min_pairwise_flow(graph) == min(leaving for _, leaving in between)
    flow = MaxFlow(len(graph.names), graph.pairs)
    flow.push(1, 0, graph.capacities)  # what was pushed before does not matter
    value = Fraction(flow.push(0, 1, graph.capacities), graph.unit)
    assert value == min(leaving for s, leaving in every if 0 in s and 1 not in s)
    side = flow.reachable(0)
    assert value == sum((c for a, b, c in graph.edges if a in side and b not in side), Fraction(0))


@settings(deadline=None, max_examples=100)
@given(networks())
def test_all_reduce_ceiling_is_an_upper_bound(graph: FlowNetwork) -> None:
    try:
        bound = bound_network(graph)
    except TopologyError:
        assert not find_bottleneck(graph).rate or not find_bottleneck(graph.reversed()).rate
        return
    assert bound.all_reduce <= bound.all_reduce_ceiling
    assert (
        min(bound.all_gather, bound.reduce_scatter)
        <= bound.all_reduce
        <= max(bound.all_gather, bound.reduce_scatter)
    )


def unbalanced() -> FlowNetwork:
    """Network whose relays 3 and 5 can receive more than they can send: they would have to add."""
    whole = {
        (0, 2): 2,
        (0, 3): 1,
        (0, 5): 2,
        (1, 0): 4,
        (1, 5): 1,
        (2, 3): 1,
        (3, 4): 1,
        (4, 1): 1,
        (5, 2): 2,
    }
    return network(
        3,
        3,
        {(2, 1): Fraction(7, 2), **{pair: Fraction(capacity) for pair, capacity in whole.items()}},
    )


def test_bound_excludes_sums_in_relays() -> None:
    """25/2 GB/s can enter the ranks, and a reduce-scatter enters 6 times per GB/s of a rank, so the
    cut (9/4) is out of reach.
    """
    bound = bound_network(unbalanced())
    assert (bound.widening, bound.narrowing) == ((), ("3", "5"))
    assert bound.all_gather_reached
    assert not bound.reduce_scatter_reached
    assert not bound.all_reduce_reached
    assert bound.reduce_scatter_cut.rate == Fraction(9, 4)
    assert bound.reduce_scatter == 2 * Fraction(25, 2) / 6
    assert bound.all_gather == 2 * 2
    assert bound.all_reduce == Fraction(200, 49)
    assert bound.all_reduce_ceiling == Fraction(25, 6)
    lines = bound.summarize()
    assert lines[1] == "no reduce-scatter without reducing switches can exceed 4.16667 GB/s"
    assert lines[3:] == [
        "the bound on reduce-scatter may be out of reach: 3, 5 can send less than they can receive"
    ]


def test_all_reduce_ceiling_of_unbalanced_network_is_reached() -> None:
    """Trees towards a rank (first half of each row) and back out of it, on paths through relays."""
    trees: list[tuple[Fraction, int, list[str]]] = [
        (Fraction(3, 8), 0, ["10", "21", "21", "02"]),
        (Fraction(1), 0, ["10", "2341", "21", "052"]),
        (Fraction(3, 4), 1, ["02", "21", "10", "02"]),
        (Fraction(1, 8), 1, ["02", "21", "10", "052"]),
        (Fraction(7, 8), 2, ["052", "10", "10", "21"]),
    ]
    graph = unbalanced()
    load = {(start, end): Fraction(0) for start, end, _ in graph.edges}
    for rate, root, paths in trees:
        ends = [(int(path[0]), int(path[-1])) for path in paths]
        assert in_tree(root, ends[:2])
        assert in_tree(root, [(end, start) for start, end in ends[2:]])
        for path in paths:
            assert all(int(relay) >= 3 for relay in path[1:-1])
            for a, b in pairwise(path):
                load[int(a), int(b)] += rate
    assert all(load[start, end] <= capacity for start, end, capacity in graph.edges)
    bus = Fraction(2 * 2, 3)
    assert sum(rate for rate, _, _ in trees) * bus == bound_network(graph).all_reduce_ceiling


def in_tree(root: int, links: list[tuple[int, int]]) -> bool:
    """Return True if these links lead each of 3 ranks to ``root`` with one send per other rank."""
    parent = dict(links)
    others = {0, 1, 2} - {root}
    return set(parent) == others and all(
        root in (parent[rank], parent.get(parent[rank])) for rank in others
    )


@st.composite
def networks_of_forwarders(draw: st.DrawFn) -> FlowNetwork:
    """Draw a network in which no relay can send more than it can receive."""
    ranks, relays = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    size = ranks + relays
    edges = {
        (a, b): Fraction(draw(st.integers(0, 6)))
        for a in range(size)
        for b in range(size)
        if a != b and draw(st.booleans())
    }
    for relay in range(ranks, size):
        lack = -network(ranks, relays, edges).surplus[relay]
        feeder = draw(st.integers(0, ranks - 1))
        edges[feeder, relay] = edges.get((feeder, relay), Fraction(0)) + max(lack, Fraction(0))
    return network(ranks, relays, edges)


def without_relays(graph: FlowNetwork, rate: Fraction) -> FlowNetwork:
    """Split the links of all relays off.

    One link into and one out of a relay become a link that bypasses it, as long as each set of
    ranks can still send ``rate`` per rank. Trees over links between ranks fill their narrowest cut
    (Edmonds), so ``rate`` is reached if it remains.
    """
    capacity = {(start, end): bw for start, end, bw in graph.edges}
    ranks = set(graph.ranks)
    sets = [
        frozenset(s)
        for k in range(1, len(graph.names))
        for s in combinations(range(len(graph.names)), k)
    ]
    spare = {s: -rate * len(s & ranks) for s in sets if s & ranks and not s >= ranks}
    for s in spare:
        spare[s] += sum(
            (bw for (a, b), bw in capacity.items() if a in s and b not in s), Fraction(0)
        )
    for relay in graph.relays:
        others = [vertex for vertex in range(len(graph.names)) if vertex != relay]
        for end, start in product(others, others):
            narrowed = [
                s for s in spare if ((start in s) == (end in s)) and ((start in s) != (relay in s))
            ]
            into, out = (
                capacity.get((start, relay), Fraction(0)),
                capacity.get((relay, end), Fraction(0)),
            )
            amount = min(into, out, *(spare[s] for s in narrowed))
            for s in narrowed:
                spare[s] -= amount
            capacity[start, relay], capacity[relay, end] = into - amount, out - amount
            if start != end:
                capacity[start, end] = capacity.get((start, end), Fraction(0)) + amount
        assert not any(bw for (start, _), bw in capacity.items() if start == relay)
    return network(len(ranks), 0, {pair: bw for pair, bw in capacity.items() if ranks >= set(pair)})


@settings(deadline=None, max_examples=100)
@given(networks_of_forwarders())
def test_bounds_are_reached_if_relays_only_forward(graph: FlowNetwork) -> None:
    assume(find_bottleneck(graph).rate and find_bottleneck(graph.reversed()).rate)
    bound = bound_network(graph)
    assert bound.all_gather_reached
    assert (
        find_bottleneck(without_relays(graph, bound.all_gather_cut.rate)).rate
        == bound.all_gather_cut.rate
    )
    turned = bound_network(graph.reversed())
    assert turned.reduce_scatter_reached
    assert (
        turned.reduce_scatter == bound.all_gather
    )  # how often data enters ranks is no further limit
    assert turned.all_gather_reached == bound.reduce_scatter_reached


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_rings_and_stars_reach_their_link(ranks: int) -> None:
    ring = {(a, (a + 1) % ranks): Fraction(7) for a in range(ranks)}
    star = {edge: Fraction(7) for a in range(ranks) for edge in ((a, ranks), (ranks, a))}
    for graph in (network(ranks, 0, ring), network(ranks, 1, star)):
        bound = bound_network(graph)
        assert (
            bound.all_gather
            == bound.reduce_scatter
            == bound.all_reduce
            == bound.all_reduce_ceiling
            == 7
        )


def test_slow_rank_limits_all_gather_more_than_all_reduce() -> None:
    """Reduce towards a fast rank while broadcasting from it: the slow rank sends and receives at
    once.
    """
    speeds = [10, 10, 10, 1]
    star = {edge: Fraction(bw) for a, bw in enumerate(speeds) for edge in ((a, 4), (4, a))}
    bound = bound_network(network(4, 1, star))
    assert bound.all_gather == 1
    assert bound.all_reduce == 1
    assert bound.all_reduce_ceiling == Fraction(3, 2)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(2, "rank 0 has 3 GB/s over 1 link ("), (3, "2 ranks (0, 1) share 3 GB/s over 1 link (")],
)
def test_bottleneck_description(ranks: int, words: str) -> None:
    line = {(a, a + 1): Fraction(3) for a in range(ranks - 1)} | {
        (a + 1, a): Fraction(9) for a in range(ranks - 1)
    }
    assert bound_network(network(ranks, 0, line)).all_gather_cut.describe().startswith(words)


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_symmetric_nodes_have_the_bound_of_the_whole_graph(nodes: int) -> None:
    """The shortcut through symmetry equals the result of the whole graph."""
    system = small_system()
    graph = flow_network(system, nodes, network=True)
    whole = FlowNetwork(
        names=graph.names, ranks=graph.ranks, edges=graph.edges, groups=(graph.ranks,)
    )
    assert find_bottleneck(graph).rate == find_bottleneck(whole).rate
    assert min_pairwise_flow(graph) == min_pairwise_flow(whole)
    assert aggregation_limit(graph) <= aggregation_limit(
        whole
    )  # knows of the nodes as groups besides


def small_system(*, nvlink: float = 40.0, second: float = 12.0, up: float = 24.0) -> System:
    """Two GPUs with 40 GB/s between them and 12 GB/s to a CPU; two nets of 10 and 5 GB/s on one
    port.

    ``up`` is GB/s from the CPU to the NIC; the other direction has 24.
    """

    def link(kind: LinkType, bw: float, target: int) -> Link:
        return Link(type=kind, bw=bw, target=target)

    pci = (12.0, second)
    gpus = []
    for g, bw in enumerate(pci):
        gpus.append(
            GpuNode(
                id=g,
                dev=g,
                rank=g,
                sm=80,
                links=(link(LinkType.NVL, nvlink, 1 - g), link(LinkType.PCI, bw, 2)),
            )
        )
    down = (link(LinkType.PCI, bw, g) for g, bw in enumerate(pci))
    cpu = TopoNode(type=NodeType.CPU, id=0, links=(*down, link(LinkType.PCI, up, 3)))
    nic = TopoNode(
        type=NodeType.NIC,
        id=9,
        links=(
            link(LinkType.PCI, 24.0, 2),
            link(LinkType.NET, 10.0, 4),
            link(LinkType.NET, 5.0, 5),
        ),
    )
    nets = tuple(
        NetNode(id=n, dev=n, asic=1, port=1, bw=bw, links=(link(LinkType.NET, bw, 3),))
        for n, bw in enumerate((10.0, 5.0))
    )
    return System(nodes=(*gpus, cpu, nic, *nets))


def test_nets_that_share_a_port_do_not_add_up() -> None:
    bound = bandwidth_bound(small_system(), nodes=2)
    assert bound.all_gather_cut.capacity == 10
    assert bound.all_gather == 3 * Fraction(10, 2)
    assert set(bound.all_gather_cut.inside) in ({0, 1}, {2, 3})


def test_single_node_ignores_the_network_by_default() -> None:
    assert bandwidth_bound(small_system()).all_gather == 52
    assert bandwidth_bound(small_system(), network=True).all_gather == 52


@pytest.mark.parametrize(("nvlink", "second"), [(40, 12), (0, 12), (0, 1)])
def test_bound_for_more_nodes_holds_for_each_of_them(nvlink: float, second: float) -> None:
    """The link of a slow GPU limits an all-reduce, too: the result crosses it once, and bus
    bandwidth
    is 2 (n - 1) / n times that.
    """
    system = small_system(nvlink=nvlink, second=second)
    some = bound_network(flow_network(system, 2, network=True), holds_for_more_nodes=True)
    for nodes in (3, 4, 7):
        more = bandwidth_bound(system, nodes)
        assert more.all_gather <= some.all_gather
        assert more.reduce_scatter <= some.reduce_scatter
        assert more.all_reduce <= some.all_reduce
        assert more.all_reduce_ceiling <= some.all_reduce_ceiling
    if second == 1:
        assert (
            more.all_reduce_ceiling
            == 2 * Fraction(13, 14)
            > bandwidth_bound(system, 2).all_reduce_ceiling
        )


def test_unbalanced_node_has_no_bound_for_more_nodes() -> None:
    """A CPU that sends 1 GB/s to the NIC and receives 24: the outflow of a node is the bottleneck
    of
    few nodes.
    """
    graph = flow_network(small_system(up=1.0), 2, network=True)
    assert bandwidth_bound(small_system(up=1.0), 4).all_gather > bound_network(graph).all_gather
    with pytest.raises(InvalidUsage, match="balanced"):
        bound_network(graph, holds_for_more_nodes=True)


def test_invalid_bound_requests_are_rejected() -> None:
    with pytest.raises(InvalidUsage, match="2 ranks"):
        bandwidth_bound(System(nodes=(GpuNode(id=0, dev=0, rank=0),)))
    with pytest.raises(InvalidUsage, match="it has at least 1"):
        bandwidth_bound(small_system(), nodes=0)
    with pytest.raises(TopologyError, match="no link joins"):
        bandwidth_bound(System(nodes=tuple(GpuNode(id=g, dev=g, rank=g) for g in range(2))))


@pytest.mark.golden
def test_recorded_machines_are_balanced() -> None:
    cases = {case.topology.name: case for case in golden_cases(DATA / "golden")}
    assert cases
    for name, case in cases.items():
        system = system_from_json(case.load()["system"])
        for nodes in (1, 2):
            if nodes * len(system.gpus) > 1:
                assert not any(flow_network(system, nodes, network=True).surplus), name


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
    assert len(bound.summarize()) == 3
