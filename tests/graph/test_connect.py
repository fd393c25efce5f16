"""Rings, trees and counts: invariants on any shape, and NCCL's results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miraccl.errors import InvalidUsage
from miraccl.graph.channel_count import ChannelCountInputs, count_channels
from miraccl.graph.channel_graph import ChannelGraph
from miraccl.graph.connect import Connections, SearchedDomain, connect, connections_to_json
from miraccl.graph.kinds import GraphKind, Pattern
from miraccl.graph.plan_settings import ConnectSettings
from miraccl.graph.rank_layout import RankLayout
from miraccl.graph.rings import build_rings
from miraccl.graph.trees import NodeTree, TreeOrder, binary_tree, connect_tree, double_binary_tree
from miraccl.topo.records import GpuNode, NodeType, Path, PathTable, PathType, System
from tests.graph.golden import differences, recorded_domains, sample
from tests.topo.golden import GoldenCase


@pytest.mark.golden
@pytest.mark.parametrize("case", sample(3))
def test_connections_match_nccl(case: GoldenCase) -> None:
    want = case.load()
    plan = connect(
        recorded_domains(want),
        hosts=case.options.nodes,
        gpus_per_host=want["gpus_per_node"],
        collnet=case.options.collnet,
        settings=ConnectSettings.read(case.env),
    )
    assert differences(want["comm"], connections_to_json(plan), "comm") == []


def check_tree(tree: NodeTree, n: int) -> None:
    """Check that there is one root and that parents and children name each other."""
    assert (tree.up == -1).sum() == 1
    for node in range(n):
        for child, second in ((tree.down0[node], 0), (tree.down1[node], 1)):
            if child >= 0:
                assert tree.up[child] == node
                assert tree.second_child[child] == second
        if (parent := tree.up[node]) >= 0:
            assert node in (tree.down0[parent], tree.down1[parent])
        climbed, at = 0, node
        while tree.up[at] >= 0:
            at, climbed = tree.up[at], climbed + 1
            assert climbed <= n.bit_length()


@pytest.mark.parametrize("n", [*range(1, 34), 63, 64, 65, 1023, 1024])
def test_both_trees_over_nodes_are_trees(n: int) -> None:
    for tree in double_binary_tree(n):
        check_tree(tree, n)


@pytest.mark.parametrize("n", range(2, 34))
def test_node_is_inner_in_one_tree_only(n: int) -> None:
    inner = [
        (tree.down0 >= 0) | ((tree.down1 >= 0) & (tree.up >= 0)) for tree in double_binary_tree(n)
    ]
    if n % 2 == 0:
        assert not (inner[0] & inner[1]).any()
    else:  # shifted by one, the last node can be inside both
        assert (inner[0] & inner[1]).sum() <= 1


def test_first_tree_is_that_of_the_paper() -> None:
    assert binary_tree(14).up.tolist() == [-1, 2, 4, 2, 8, 6, 4, 6, 0, 10, 12, 10, 8, 12]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[RankLayout, list[list[int]]]:
    """Draw a layout of one to three domains with one order of ranks for each."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    ranks = list(range(sum(sizes)))
    domains, at = [], 0
    for size in sizes:
        domains.append(tuple(ranks[at : at + size]))
        at += size
    layout = RankLayout(
        hosts=draw(st.integers(1, 9)), gpus_per_host=len(ranks), domains=tuple(domains)
    )
    return layout, [draw(st.permutations(domain)) for domain in domains]


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_ring_visits_nodes_in_order_and_ranks_once(
    drawn: tuple[RankLayout, list[list[int]]],
) -> None:
    layout, orders = drawn
    rings = build_rings(layout, [[order] for order in orders], [False] * len(orders), 1)
    ring = rings[0].tolist()
    assert ring[0] == 0
    assert sorted(ring) == list(range(layout.nranks))
    nodes = layout.rank_to_node[ring]
    changes = [(a, b) for a, b in zip(nodes, np.roll(nodes, -1)) if a != b]
    assert all((a + 1) % layout.nnodes == b for a, b in changes)


@given(layouts(), st.sampled_from([Pattern.TREE, Pattern.SPLIT_TREE, Pattern.BALANCED_TREE]))
@settings(max_examples=60, deadline=None)
def test_rank_trees_are_connected(
    drawn: tuple[RankLayout, list[list[int]]], pattern: Pattern
) -> None:
    layout, orders = drawn
    chains = [
        TreeOrder(order=tuple(order), pattern=pattern if len(order) > 1 else Pattern.TREE)
        for order in orders
    ]
    for tree in connect_tree(layout, chains, double_binary_tree(layout.nnodes)):
        assert (tree.up == -1).sum() == 1
        children = [set(row[row >= 0].tolist()) for row in tree.down]
        assert sum(map(len, children)) == layout.nranks - 1
        for rank, parent in enumerate(tree.up.tolist()):
            assert parent == -1 or rank in children[parent]
        holes = [
            row
            for row in tree.down.tolist()
            if -1 in row and any(x >= 0 for x in row[row.index(-1) :])
        ]
        assert holes == []


def test_odd_nodes_swap_cross_nic_pairs() -> None:
    layout = RankLayout(hosts=2, gpus_per_host=2, domains=((0, 1),))
    rings = build_rings(layout, [[[0, 1], [1, 0]]], [True], 2)
    assert rings.tolist() == [[0, 1, 3, 2], [0, 2, 3, 1]]


def inputs(**changes: object) -> ChannelCountInputs:
    values: dict[str, object] = {
        "searched": 4,
        "nnodes": 1,
        "nranks": 8,
        "min_sm": 80,
        "ring_bw_intra": 20.0,
        "collnet": None,
    }
    return ChannelCountInputs(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "limits", "total"),
    [
        ({}, {}, 8),
        ({"searched": 40}, {}, 64),
        ({"nnodes": 2, "nranks": 16, "min_sm": 90, "ring_bw_intra": 48.0}, {}, 16),
        ({"nnodes": 2, "nranks": 16, "min_sm": 90, "ring_bw_intra": 45.0}, {}, 8),
        ({"nnodes": 2, "nranks": 16, "collnet": (30.0, 24.0)}, {}, 12),
        ({"nnodes": 2, "nranks": 2, "collnet": (30.0, 24.0)}, {}, 8),
        ({}, {"NCCL_MAX_NCHANNELS": "3"}, 3),
        ({}, {"NCCL_MIN_NCHANNELS": "20"}, 20),
        ({}, {"NCCL_MAX_NCHANNELS": "3", "NCCL_MIN_NCHANNELS": "7"}, 7),
        ({}, {"NCCL_MAX_NRINGS": "3"}, 3),
        ({}, {"NCCL_MAX_NRINGS": "3", "NCCL_MAX_NCHANNELS": "5"}, 5),
        ({}, {"NCCL_MAX_CTAS": "2"}, 2),
        ({}, {"NCCL_MAX_CTAS": "-2"}, 8),
        ({}, {"NCCL_MIN_CTAS": "100"}, 64),
    ],
)
def test_channel_counts(changes: dict[str, object], limits: dict[str, str], total: int) -> None:
    count = count_channels(inputs(**changes), ConnectSettings.read(limits))
    assert count.total == total
    assert count.steps[-1].after == total
    assert all(a.after == b.before for a, b in zip(count.steps, count.steps[1:]))


def test_copies_cycle_through_the_channels() -> None:
    count = count_channels(inputs(searched=2), ConnectSettings(max_channels=3, min_channels=8))
    assert count.source == (0, 1, 0, 0, 1, 0, 0, 1)
    assert count.tree == (0, 0, 1, 0, 0, 1, 0, 0)


def small_domain(ranks: tuple[int, ...], *, channels: int = 2, sm: int = 80) -> SearchedDomain:
    gpus = tuple(GpuNode(id=rank, dev=rank, rank=rank, sm=sm) for rank in ranks)
    system = System(nodes=gpus)
    row = tuple(
        tuple(
            Path(type=PathType.NVL if i != j else PathType.LOC, bw=60.0) for j in range(len(ranks))
        )
        for i in range(len(ranks))
    )
    orders = tuple(tuple(ranks) for _ in range(channels))
    found = {GraphKind.RING: Pattern.RING, GraphKind.TREE: Pattern.TREE}
    graphs = {
        kind: ChannelGraph(
            kind=kind,
            pattern=found.get(kind, Pattern.TREE),
            bw_intra=20.0,
            bw_inter=20.0,
            intra=orders if kind in found else (),
        )
        for kind in GraphKind
    }
    return SearchedDomain(
        system=system, paths=PathTable(rows={(NodeType.GPU, NodeType.GPU): row}), graphs=graphs
    )


def two_domains() -> Connections:
    return connect(
        [small_domain((0, 1, 2), channels=2), small_domain((3,), channels=1)],
        hosts=2,
        gpus_per_host=4,
    )


def test_domains_agree_on_the_fewest_channels_and_are_nodes_of_their_own() -> None:
    plan = two_domains()
    assert plan.layout.nnodes == 4
    assert plan.layout.rank_to_node.tolist() == [0, 0, 0, 1, 2, 2, 2, 3]
    assert plan.channels == 2
    assert plan.rings.tolist() == [list(range(8))] * 2


def test_ranks_with_different_counts_are_listed() -> None:
    plan = replace(two_domains(), per_domain=((2, 0, 2, 2), (2, 0, 2, 1)))
    assert connections_to_json(plan)["perRank"] == [[2, 0, 2, 2]] * 3 + [[2, 0, 2, 1]] + [
        [2, 0, 2, 2]
    ] * 3 + [[2, 0, 2, 1]]
    assert "perRank" not in connections_to_json(two_domains())


def test_p2p_channels_follow_the_nvlinks() -> None:
    plan = connect([small_domain((0, 1), channels=6)], hosts=1, gpus_per_host=2)
    assert (plan.p2p.total, plan.p2p.per_peer) == (
        16,
        8,
    )  # 12 channels; three NVLinks of 20 GB/s make 6 per peer; both to a power of two


def test_domain_without_a_ring_is_rejected() -> None:
    with pytest.raises(InvalidUsage, match="no ring"):
        connect([small_domain((0, 1), channels=0)], hosts=1, gpus_per_host=2)


def test_domains_without_a_rank_are_rejected() -> None:
    with pytest.raises(InvalidUsage, match="once"):
        connect([small_domain((0, 2))], hosts=1, gpus_per_host=3)


def test_thousand_nodes() -> None:
    plan = connect([small_domain(tuple(range(8)), channels=8)], hosts=1024, gpus_per_host=8)
    assert plan.rings.shape == (16, 8192)
    assert all((tree.up == -1).sum() == 1 for tree in plan.trees)
    assert plan.tree_depth == 17
