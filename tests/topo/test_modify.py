"""Variants of a machine: device names, removal with its consequences, and scaling."""

from __future__ import annotations

from pathlib import Path

import pytest

from miraccl.errors import InvalidUsage
from miraccl.graph.plan import plan
from miraccl.graph.plan_json import plan_to_json
from miraccl.topo.analyse import analyse_topology
from miraccl.topo.modify import find_device, modify_system, scale_device, without_device
from miraccl.topo.records import LinkType, NodeType, System
from miraccl.topo.xmlfile import XmlNode, read_topology
from tests.topo.golden import TOPOLOGIES

H100 = TOPOLOGIES / "nvidia-dgxh100.xml"
PCIE = TOPOLOGIES / "pcie8-2s-2nic.xml"


def system(path: Path = H100) -> System:
    return analyse_topology(read_topology(path).root).whole


def test_devices_have_short_and_full_names() -> None:
    machine = system()
    net = find_device(machine, "NET/3")
    assert machine.nodes[net] is machine.nets[3]
    assert find_device(machine, machine.nets[3].name) == net
    assert find_device(machine, "gpu/0") == 0
    assert machine.nodes[find_device(machine, "NVS/0")].type == NodeType.NVS
    assert machine.nodes[find_device(machine, "CPU/1")].name == "CPU/0-1"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NET/9", "the machine has NET/0, NET/1, NET/2"),
        ("NET", "expected TYPE/NUMBER of GPU, PCI, NVS, CPU, NIC, NET"),
        ("DISK/0", "expected TYPE/NUMBER"),
    ],
)
def test_unknown_devices_are_rejected(name: str, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        find_device(system(), name)


def _without_net(path: Path, dev: str) -> XmlNode:
    """Return the tree of a file without one net, its NIC, and switches that become empty."""
    root = read_topology(path).root.copy()

    def prune(node: XmlNode) -> None:
        node.children = [
            child for child in node.children if child.name != "net" or child.attrs["dev"] != dev
        ]
        for child in node.children:
            prune(child)
        node.children = [c for c in node.children if c.name not in ("nic", "pci") or c.children]

    prune(root)
    return root


@pytest.mark.parametrize("path", [H100, PCIE])
@pytest.mark.parametrize("nodes", [1, 2])
def test_without_a_net_is_the_file_without_it(path: Path, nodes: int) -> None:
    got = plan_to_json(plan(without_device(system(path), "NET/1"), nodes=nodes))
    want = plan_to_json(plan(_without_net(path, "1"), nodes=nodes))
    assert {**got, "topology": ""} == {**want, "topology": ""}


@pytest.mark.parametrize("path", [H100, PCIE])
def test_without_a_gpu_is_the_selection_of_the_others(path: Path) -> None:
    got = plan_to_json(plan(without_device(system(path), "GPU/2"), nodes=2))
    want = plan_to_json(plan(path, nodes=2, gpus=[0, 1, 3, 4, 5, 6, 7]))
    for key in ("system", "graphs", "comm", "tuning"):
        assert got[key] == want[key]


def test_the_last_gpu_stays() -> None:
    machine = system(TOPOLOGIES / "single-h100-1nic.xml")
    with pytest.raises(InvalidUsage, match="it is the only GPU"):
        without_device(machine, "GPU/0")


def test_scaling_changes_all_links_of_a_device_and_nothing_else() -> None:
    machine = system()
    slow = scale_device(machine, "NET/3", 0.5)
    net = find_device(machine, "NET/3")
    assert slow.nets[3].bw == machine.nets[3].bw / 2
    for i, (before, after) in enumerate(zip(machine.nodes, slow.nodes)):
        want = [
            (link.type, link.target, link.bw / 2 if net in (i, link.target) else link.bw)
            for link in before.links
        ]
        assert sorted((k.type, k.target, k.bw) for k in after.links) == sorted(want)


def test_scaled_links_are_sorted_by_bandwidth() -> None:
    slow = scale_device(system(), "NVS/0", 0.1)
    gpu = slow.gpus[0]
    assert [link.type for link in gpu.links] == [LinkType.PCI, LinkType.NVL]


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_must_be_positive(factor: float) -> None:
    with pytest.raises(InvalidUsage, match="the factor must be positive"):
        scale_device(system(), "NET/0", factor)


def test_changes_combine() -> None:
    changed = modify_system(system(), without=("NET/0", "NET/1"), scale={"NET/2": 0.5})
    assert [net.dev for net in changed.nets] == [2, 3, 4, 5, 6, 7]
    assert changed.nets[0].bw == 25.0
