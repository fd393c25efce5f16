"""Path rules, each on a machine where it applies, and the recorded reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from miraccl.topo.analyse import Topology, analyse_topology
from miraccl.topo.explain import RULES, PathChangeLog, explain_path, explain_paths
from miraccl.topo.options import PathOptions, TopoOptions
from miraccl.topo.paths import compute_paths, merged_type
from miraccl.topo.queries import (
    GdrMode,
    NearestDevices,
    gdr_mode,
    local_cpu,
    mirror_bits,
    nearest,
    p2p_level,
    pxn_relay,
    relay_gpu,
)
from miraccl.topo.records import DISCONNECTED, NodeType, Path, PathTable, PathType
from miraccl.topo.xmlfile import read_topology
from tests.topo.golden import TOPOLOGIES

GPU, NET = NodeType.GPU, NodeType.NET


def topology(name: str, nodes: int = 1, **rules: object) -> tuple[Topology, PathChangeLog]:
    notes = PathChangeLog()
    paths = replace(PathOptions(), **rules)  # type: ignore[arg-type]
    options = TopoOptions(nodes=nodes, paths=paths)
    return analyse_topology(
        read_topology(TOPOLOGIES / f"{name}.xml").root, options, recorder=notes
    ), notes


def rules(notes: PathChangeLog) -> set[str]:
    return {
        change.rule
        for changes in (*notes.changes.values(), *notes.whole.values())
        for change in changes
    }


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("pcie8-2s-2nic", {}, {"p2p_level"}),
        ("nvidia-dgxh100", {}, {"pxn"}),
        ("nvidia-dgxh100", {"pxn": False}, set()),
        ("gh200-4gpu-mesh", {}, {"c2c", "pxn"}),
        ("spark-gb10", {}, set()),
        ("pcie4-4nic-netfaster", {}, {"p2p_level", "net_faster"}),
        ("pcie4-4nic-netfaster", {"net_intra": False}, {"p2p_level"}),
        ("pcie2-intel-nic200", {"shm": False}, {"p2p_level", "no_shm"}),
        ("nvidia-dgxa100", {"gdr_level": PathType.LOC, "pxn": False}, {"no_gdr"}),
    ],
)
def test_rules_that_apply(name, options, expected):
    found = rules(topology(name, 2, **options)[1])
    assert found >= expected
    assert found <= expected | {"no_gdr", "net_faster", "c2c"}
    if not expected:
        assert not found & {"pxn", "p2p_level"}


def test_every_rule_has_a_description():
    seen: set[str] = set()
    for name, options in (
        ("pcie4-4nic-netfaster", {}),
        ("pcie2-intel-nic200", {"shm": False}),
        ("gh200-4gpu-mesh", {}),
        ("nvidia-dgxa100", {"gdr_level": PathType.LOC}),
    ):
        found, notes = topology(name, 2, **options)
        for changes in (*notes.changes.values(), *notes.whole.values()):
            for change in changes:
                assert change.description
                seen.add(change.rule)
        assert all(reason.to_json() for reason in explain_paths(found.system, found.paths, notes))
    assert seen == set(RULES)


def test_recording_changes_nothing():
    system = topology("nvidia-dgx1v")[0].whole
    assert compute_paths(system, PathOptions()) == compute_paths(
        system, PathOptions(), recorder=PathChangeLog()
    )


def test_reason_of_a_relayed_path():
    found, notes = topology("nvidia-dgxa100", 2)
    reason = explain_path(found.system, found.paths, notes, (GPU, 0, NET, 3))
    assert (reason.type, reason.bw) == (PathType.PXN, 24.0)
    assert reason.hops[reason.limit].bw == 24.0
    assert [change.rule for change in reason.changes] == ["pxn"]
    assert reason.changes[0].before.type == PathType.SYS
    assert "forwards" in reason.changes[0].description


def test_every_path_is_explained_by_a_hop_of_its_bandwidth():
    for file in ("nvidia-dgx1v", "ibm-ac922-6gpu", "nvidia-gb200-4gpu", "pcie8-2level"):
        found, notes = topology(file, 2)
        for reason in explain_paths(found.system, found.paths, notes):
            assert reason.type_reason
            assert reason.bw_reason
            if reason.hops:
                assert reason.hops[reason.limit].bw == reason.bw


def test_amd_pairs_may_access_each_other_everywhere():
    small, _ = topology("pcie8-amd-direct-1nic")
    assert p2p_level(small.system, PathOptions()) == PathType.PXB
    two = analyse_topology(
        read_topology(TOPOLOGIES / "pcie8-amd-direct-1nic.xml").root, TopoOptions(gpus=(0, 1))
    )
    assert p2p_level(two.system, PathOptions()) == PathType.SYS
    assert p2p_level(two.system, PathOptions(p2p_level=PathType.LOC)) == PathType.LOC


def test_domains_become_separate_systems():
    found, notes = topology("pcie4-4nic-netfaster", 2)
    assert found.local_ranks == ((0, 1), (2, 3))
    assert {(i, j) for i, j, _ in notes.find_separations()} == {
        (i, j) for i in range(4) for j in range(4) if (i < 2) != (j < 2)
    }
    assert "they use the network" in next(notes.find_separations())[2]
    for domain in found.domains:
        assert len(domain.system.gpus) == 2
        assert domain.system.inter == 1
        assert all(link.target < len(domain.system.nodes) for link in domain.system.links)
    assert found.nranks == 8
    assert len(found.whole.gpus) == 4


def path(type: PathType, bw: float) -> Path:
    return Path(type=type, bw=bw)


def test_nearest_prefers_bandwidth_then_type():
    row = [
        path(PathType.PHB, 12),
        path(PathType.PIX, 12),
        path(PathType.SYS, 24),
        path(PathType.PIX, 12),
        path(PathType.SYS, 24),
    ]
    assert nearest(row) == [2, 4]
    assert nearest(row[:2] + row[3:4]) == [1, 2]
    assert nearest([]) == []
    assert nearest([DISCONNECTED, DISCONNECTED]) == [0, 1]


def test_mirrored_bits():
    assert [mirror_bits(i, 8) for i in range(8)] == [0, 4, 2, 6, 1, 5, 3, 7]
    assert mirror_bits(9, 1) == 0


def test_nets_are_shared_among_gpus():
    found, _ = topology("single-a100-2nic", 2)
    near = NearestDevices(found.system, found.paths)
    assert near.nets(0) == [0, 1]
    assert near.nets_per_gpu(0) == 2
    assert [near.net(0, channel) for channel in range(4)] == [0, 1, 0, 1]
    assert NearestDevices(found.system, found.paths, 1).nets_per_gpu(0) == 1
    assert [near.gpu(net) for net in (0, 1)] == [0, 0]


def test_a_gpu_without_nets_uses_none():
    found, _ = topology("pcie4-2s-nonic")
    near = NearestDevices(found.system, found.paths)
    assert (near.net(0, 0), near.nets_per_gpu(0)) == (-1, 0)


def test_gpudirect():
    found, _ = topology("nvidia-dgxa100", 2)
    system, paths, options = found.system, found.paths, PathOptions()
    assert gdr_mode(system, paths, options, 0, 0, read=False) == GdrMode.DEFAULT
    assert gdr_mode(system, paths, options, 0, 3, read=True) == GdrMode.DEFAULT  # over the relay
    assert (
        gdr_mode(system, paths, replace(options, gdr_read=0), 0, 0, read=True) == GdrMode.DISABLED
    )
    assert (
        gdr_mode(system, paths, replace(options, gdr_level=PathType.LOC), 0, 0, read=False)
        == GdrMode.DISABLED
    )
    assert pxn_relay(system, paths, 0, 3) == NearestDevices(system, paths).gpu(3)
    v100 = topology("pcie4-4nic-netfaster", 2, net_intra=False)[0]
    assert (
        gdr_mode(v100.system, v100.paths, options, 0, 0, read=True) == GdrMode.DISABLED
    )  # before Ampere, PCI is busy
    assert (
        gdr_mode(v100.system, v100.paths, replace(options, gdr_read=1), 0, 0, read=True)
        == GdrMode.DEFAULT
    )
    grace = topology("nvidia-gb200-4gpu", 2)[0]
    assert gdr_mode(grace.system, grace.paths, options, 0, 0, read=False) == GdrMode.DEFAULT


def test_relays_over_nvlink():
    found, _ = topology("nvidia-dgx1v")
    relayed = [
        (i, j) for i in range(8) for j in range(8) if found.paths.gpu_gpu(i, j).type == PathType.NVB
    ]
    assert relayed
    assert all(relay_gpu(found.system, found.paths, i, j) >= 0 for i, j in relayed)
    assert relay_gpu(found.system, found.paths, 0, 1) == -1
    without, _ = topology("nvidia-dgx1v", nvb=False)
    assert all(without.paths.gpu_gpu(i, j).type != PathType.NVB for i, j in relayed)


def test_local_cpu_and_merged_types():
    found, _ = topology("nvidia-dgxh100")
    assert [local_cpu(found.system, found.paths, gpu) for gpu in range(8)] == [
        0,
        0,
        0,
        0,
        1,
        1,
        1,
        1,
    ]
    assert merged_type(PathType.PHB, PathType.C2C) == PathType.P2C
    assert merged_type(PathType.PIX, PathType.SYS) == PathType.SYS


def test_path_table_defaults():
    assert PathTable().gpu_net(0, 0) == DISCONNECTED
