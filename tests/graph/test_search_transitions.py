"""Single transitions of the search on states small enough to compute by hand; interpreted."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miraccl.errors import TopologyError
from miraccl.graph.kinds import GraphKind, Pattern
from miraccl.graph.search.kernel import order, transitions
from miraccl.graph.search.kernel.state import CURRENT, ChannelSearchState
from miraccl.graph.search.nets import candidate_nets, preferred_nets
from miraccl.graph.search.passes import MAX_DIRECT_HEADS
from miraccl.graph.search.speeds import INTER_BLACKWELL, INTRA, first_at_most, speeds_for
from miraccl.graph.search.state_builder import build_state
from miraccl.topo.queries import NearestDevices
from miraccl.topo.records import (
    CpuArch,
    CpuNode,
    CpuVendor,
    GpuNode,
    Link,
    LinkType,
    NetNode,
    NodeType,
    Path,
    PathTable,
    PathType,
    System,
)

ONE = np.float32(1)


def link(kind: LinkType, bw: float, target: int) -> Link:
    return Link(type=kind, bw=bw, target=target)


def pcie_pair(vendor: CpuVendor = CpuVendor.INTEL, sm: int = 80, gpus: int = 2) -> NearestDevices:
    """GPUs below one CPU with 12 GB/s each, and a net of 10 GB/s at the CPU."""
    cpu = gpus
    nodes = (
        *(
            GpuNode(id=0x10 + g, dev=g, rank=g, sm=sm, links=(link(LinkType.PCI, 12.0, cpu),))
            for g in range(gpus)
        ),
        CpuNode(
            id=0,
            arch=CpuArch.X86,
            vendor=vendor,
            links=(
                *(link(LinkType.PCI, 12.0, g) for g in range(gpus)),
                link(LinkType.PCI, 12.0, cpu + 1),
            ),
        ),
        NetNode(id=0, dev=0, bw=10.0, local_gpu=0, links=(link(LinkType.PCI, 12.0, cpu),)),
    )
    system = System(nodes=nodes, inter=1, max_bw=10.0, total_bw=12.0)
    to_cpu = list(range(gpus))
    from_cpu = [gpus + g for g in range(gpus)]
    cpu_net, net_cpu = 2 * gpus, 2 * gpus + 1
    loc = Path(type=PathType.LOC, bw=5000.0)

    def between(a: int, b: int) -> Path:
        return loc if a == b else Path(type=PathType.PHB, bw=12.0, hops=(to_cpu[a], from_cpu[b]))

    paths = PathTable(
        rows={
            (NodeType.GPU, NodeType.GPU): tuple(
                tuple(between(a, b) for b in range(gpus)) for a in range(gpus)
            ),
            (NodeType.GPU, NodeType.NET): tuple(
                (Path(type=PathType.PHB, bw=10.0, hops=(to_cpu[g], cpu_net)),) for g in range(gpus)
            ),
            (NodeType.NET, NodeType.GPU): (
                tuple(
                    Path(type=PathType.PHB, bw=10.0, hops=(net_cpu, from_cpu[g]))
                    for g in range(gpus)
                ),
            ),
        }
    )
    return NearestDevices(system, paths)


def state_for(nearest: NearestDevices, **graph: Any) -> ChannelSearchState:
    state = build_state(nearest)
    defaults = {
        "pattern": Pattern.RING,
        "type_intra": PathType.SYS,
        "type_inter": PathType.SYS,
        "bw_intra": 5.0,
        "bw_inter": 5.0,
    }
    for name, value in {**defaults, **graph}.items():
        state.graphs[CURRENT][name] = value
    return state


def left(state: ChannelSearchState) -> list[float]:
    return [float(bw) for bw in state.links["bw"]]


@given(st.floats(0, 5000, width=32), st.floats(0, 5000, width=32))
def test_subtraction_rounds_to_three_decimals(a: float, b: float) -> None:
    got = transitions.subtract_rounded(np.float32(a), np.float32(b))
    difference = np.float32(np.float32(a) - np.float32(b)) * np.float32(1000)
    magnitude = int(abs(float(difference)) + 0.5)
    want = np.float32(magnitude if difference >= 0 else -magnitude) / np.float32(1000)
    assert got == want
    assert isinstance(got, np.float32)


def test_first_subtraction_changes_an_unrounded_bandwidth() -> None:
    """20.6 x 18 has more than three decimals in single precision, so its first use rounds it."""
    full = np.float32(20.6) * np.float32(18)
    again = transitions.subtract_rounded(
        transitions.subtract_rounded(full, np.float32(60)), np.float32(-60)
    )
    assert struct.pack("f", full) != struct.pack("f", again)
    assert (
        transitions.subtract_rounded(
            transitions.subtract_rounded(again, np.float32(60)), np.float32(-60)
        )
        == again
    )


@pytest.mark.parametrize(("vendor", "takes"), [(CpuVendor.INTEL, 6.0), (CpuVendor.AMD, 5.0)])
def test_peer_to_peer_through_an_intel_host_bridge_costs_a_fifth_more(
    vendor: CpuVendor, takes: float
) -> None:
    state = state_for(pcie_pair(vendor))
    assert transitions.follow_path(state, 0, 1, ONE)
    assert left(state)[0] == left(state)[3] == 12 - takes
    assert transitions.follow_path(state, 0, 1, -ONE)
    assert left(state) == [12.0] * 6
    assert state.graphs[CURRENT].n_hops == 0


def test_old_gpus_return_an_eighth_as_acknowledgements() -> None:
    for sm, aside in ((70, 5 / 8), (80, 0.0)):
        state = state_for(pcie_pair(sm=sm))
        assert transitions.follow_path(state, 2, 0, ONE)
        assert left(state)[0] == 12 - aside


def test_failed_reservation_changes_nothing() -> None:
    state = state_for(pcie_pair(CpuVendor.AMD))
    state.links[3].bw = 4.0  # the second hop
    before = left(state)
    assert not transitions.follow_path(state, 0, 1, ONE)
    assert left(state) == before


def test_path_type_is_checked_for_full_bandwidth_only() -> None:
    state = state_for(pcie_pair(), type_intra=PathType.PXB)
    assert not transitions.follow_path(state, 0, 1, ONE)
    assert transitions.follow_path(state, 0, 1, np.float32(0.5))


def test_balanced_tree_sends_half_to_the_net() -> None:
    state = state_for(pcie_pair(CpuVendor.AMD), pattern=Pattern.BALANCED_TREE)
    assert transitions.follow_path_to_net(state, 0, 0, ONE)
    assert left(state)[0] == 9.5
    assert state.graphs[CURRENT].bw_inter == 5.0


def test_hop_counts_of_partial_bandwidth_truncate_like_c() -> None:
    """With a third of the bandwidth, hop counts fall faster than they rose."""
    state = state_for(pcie_pair(gpus=4), bw_intra=3.0)
    part = transitions.fanout_share(4)
    state.graphs[CURRENT].n_hops = 2
    transitions.follow_path(state, 0, 1, part)
    assert state.graphs[CURRENT].n_hops == 2
    transitions.follow_path(state, 0, 1, -part)
    assert state.graphs[CURRENT].n_hops == 1


def test_nets_of_one_port_share_reservations() -> None:
    state = state_for(pcie_pair())
    transitions.reserve_net(state, 0, 4)
    assert state.nets[0].bw == 6.0
    transitions.reserve_net(state, 0, -4)
    assert state.nets[0].bw == 10.0


def test_next_gpus_are_sorted_by_bandwidth() -> None:
    nearest = pcie_pair(gpus=4)
    state = state_for(nearest)
    assert order.list_next_gpus(state, 1, 0, 0) == 3
    assert list(state.choices[0, :3]) == [2, 3, 0]
    state.paths[1, 0].bw = 13.0
    order.list_next_gpus(state, 1, 0, 0)
    assert list(state.choices[0, :3]) == [0, 2, 3]
    state.paths[1, 0].bw = 12.9  # scores are whole numbers
    order.list_next_gpus(state, 1, 0, 0)
    assert list(state.choices[0, :3]) == [2, 3, 0]


def test_equal_gpus_are_reversed_before_a_later_exit() -> None:
    state = state_for(pcie_pair(gpus=4))
    order.list_next_gpus(state, 1, -1, 0)
    assert list(state.choices[0, :3]) == [0, 3, 2]
    state.used[0, 3] = 1
    assert order.list_next_gpus(state, 1, -1, 0) == 2
    assert list(state.choices[0, :2]) == [0, 2]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [(Pattern.RING, [0, 2]), (Pattern.BALANCED_TREE, [2, 0]), (Pattern.TREE, [2])],
)
def test_nvswitch_restricts_choices_to_neighbours(pattern: Pattern, expected: list[int]) -> None:
    state = state_for(pcie_pair(gpus=4), pattern=pattern)
    state.header[0].nvs = 5
    count = order.list_next_gpus(state, 1, 0, 0)
    assert list(state.choices[0, :count]) == expected


def test_gpus_with_less_pci_bandwidth_come_later() -> None:
    state = state_for(pcie_pair(gpus=3))
    state.links[1].bw = 3.0
    order.list_next_gpus(state, 0, 1, 0)
    assert list(state.choices[0, :2]) == [2, 1]


# Nets


def test_preferred_nets_precede_all_others() -> None:
    nearest = pcie_pair()
    assert preferred_nets(nearest, 0) == [0]
    assert candidate_nets(nearest, [0, 1], PathType.SYS) == [0]


def test_a_gpu_without_a_net_ends_the_search() -> None:
    base = pcie_pair()
    rows = {
        **base.paths.rows,
        (NodeType.GPU, NodeType.NET): (base.paths.row(NodeType.GPU, 0, NodeType.NET), ()),
    }
    nearest = NearestDevices(base.system, PathTable(rows=rows))
    assert candidate_nets(nearest, [0, 1], PathType.SYS) == []
    assert candidate_nets(nearest, [0], PathType.SYS) == [0]


def several_nets(types: list[PathType], net_per_gpu: int) -> NearestDevices:
    """One GPU and nets at these path types, nearest first."""
    nodes = (
        GpuNode(id=1, dev=0, rank=0, sm=80),
        *(NetNode(id=n, dev=n, bw=10.0) for n in range(len(types))),
    )
    row = tuple(Path(type=kind, bw=10.0) for kind in types)
    rows = {
        (NodeType.GPU, NodeType.NET): (row,),
        (NodeType.NET, NodeType.GPU): tuple((path,) for path in row),
    }
    return NearestDevices(System(nodes=nodes), PathTable(rows=rows), net_per_gpu)


def test_farther_nets_come_last_if_allowed() -> None:
    nearest = several_nets([PathType.PHB, PathType.PIX, PathType.SYS, PathType.PIX], 0)
    assert candidate_nets(nearest, [0], PathType.PIX) == [1, 3]
    assert candidate_nets(nearest, [0], PathType.PHB) == [1, 3, 0]
    assert candidate_nets(nearest, [0], PathType.SYS) == [1, 3, 0, 2]


def test_nets_per_gpu_limits_the_candidates() -> None:
    types = [PathType.PIX, PathType.PIX, PathType.PHB]
    assert candidate_nets(several_nets(types, 1), [0], PathType.SYS) == [0]
    assert candidate_nets(several_nets(types, -1), [0], PathType.SYS) == [0, 1, 2]


# Tables


def test_speeds_fall_and_follow_the_generation() -> None:
    for sm in (70, 90, 100):
        for inter in (False, True):
            speeds = speeds_for(sm, inter)
            assert list(speeds) == sorted(speeds, reverse=True)
    assert speeds_for(89, False) is INTRA
    assert speeds_for(120, True) is INTER_BLACKWELL
    assert first_at_most(INTRA, 19.0) == INTRA.index(18.0)
    assert first_at_most(INTRA, 0.0) == len(INTRA) - 1


def test_missing_reverse_link_is_rejected() -> None:
    nearest = pcie_pair(sm=70)
    nodes = list(nearest.system.nodes)
    nodes[0] = GpuNode(id=0x10, dev=0, rank=0, sm=70, links=(link(LinkType.NVL, 12.0, 2),))
    with pytest.raises(TopologyError, match="no PCI link back"):
        build_state(NearestDevices(System(nodes=tuple(nodes), inter=1), nearest.paths))


def test_collnet_direct_has_at_most_eight_heads() -> None:
    assert MAX_DIRECT_HEADS == 8
    assert GraphKind.COLLNET_DIRECT.uses_collnet
    assert not GraphKind.NVLS.uses_collnet
