"""The system graph: link bandwidths and the rules about order, one small machine per rule."""

from __future__ import annotations

import pytest

from miraccl.errors import TopologyError
from miraccl.topo.build import build_system
from miraccl.topo.hardware import inter_cpu_bw, nvlink_bw, pci_bw, pci_class
from miraccl.topo.records import (
    CpuArch,
    CpuVendor,
    GpuNode,
    Link,
    LinkType,
    NodeType,
    PciNode,
    System,
    TopoNode,
    f32,
)
from miraccl.topo.xmlfile import parse_topology


def build(inside: str, version: int = 1) -> System:
    return build_system(parse_topology(f'<system version="{version}">{inside}</system>').root)


def links(system: System, name: str) -> list[tuple[str, float, str]]:
    node = next(n for n in system.nodes if n.name == name)
    return [(link.type.name, link.bw, system.nodes[link.target].name) for link in node.links]


CPU = '<cpu numaid="{}" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">{}</cpu>'
PCI = 'class="0x030200" link_speed="16 GT/s" link_width="16"'
GPU = (
    f'<pci busid="0000:{{0:02x}}:00.0" {PCI}><gpu dev="{{0}}" rank="{{0}}" sm="80">{{1}}</gpu>'
    "</pci>"
)
SWITCH = (
    '<pci busid="0000:{}:00.0" class="0x060400" {} link_speed="16 GT/s" link_width="16">{}</pci>'
)


@pytest.mark.parametrize(
    ("speed", "width", "bw"),
    [
        ("2.5 GT/s", 16, 3.0),
        ("8.0 GT/s PCIe", 16, 12.0),
        ("16 GT/s", 8, 12.0),
        ("16.0 GT/s PCIe", 16, 24.0),
        ("32.0 GT/s PCIe", 16, 48.0),
        ("64.0 GT/s PCIe", 16, 96.0),
        ("32.0 GT/s", 16, 12.0),  # NCCL knows this spelling with "PCIe" only
        ("Unknown", 0, 12.0),
        ("", 1, 0.75),
    ],
)
def test_pci_bandwidth(speed, width, bw):
    assert pci_bw(speed, width) == f32(bw)


@pytest.mark.parametrize(
    ("sm", "bw"),
    [
        (60, 18.0),
        (70, 20.0),
        (80, 20.0),
        (86, 12.0),
        (89, 20.0),
        (90, 20.6),
        (103, 40.1),
        (35, 20.0),
    ],
)
def test_nvlink_bandwidth(sm, bw):
    assert nvlink_bw(sm) == f32(bw)


def test_bandwidth_between_cpus():
    assert inter_cpu_bw(CpuArch.X86, CpuVendor.AMD, -1) == 16.0
    assert [inter_cpu_bw(CpuArch.X86, CpuVendor.INTEL, model) for model in (1, 2, 3, 4)] == [
        6.0,
        10.0,
        22.0,
        40.0,
    ]
    assert inter_cpu_bw(CpuArch.X86, CpuVendor.ZHAOXIN, 1) == 9.0
    assert inter_cpu_bw(CpuArch.POWER, CpuVendor.UNDEF, -1) == 32.0
    assert inter_cpu_bw(CpuArch.UNKNOWN, CpuVendor.UNDEF, -1) == 5000.0


def test_pci_classes():
    kinds = [
        pci_class(text)
        for text in ("0x060400", "0x068000", "0x068001", "0x030200", "0x020700", "0x120000", "")
    ]
    assert kinds == [
        NodeType.PCI,
        NodeType.NVS,
        NodeType.CPU,
        NodeType.GPU,
        NodeType.NIC,
        NodeType.PCI,
        NodeType.PCI,
    ]


def test_nvlinks_to_one_peer_add_up_and_precede_pci():
    peer = '<nvlink target="0000:{:02x}:00.0" count="{}" tclass="0x030200"/>'
    one = GPU.format(1, peer.format(2, 2) + peer.format(3, 4) + peer.format(2, 1))
    system = build(CPU.format(0, one + GPU.format(2, "") + GPU.format(3, "")))
    assert links(system, "GPU/0-1000") == [
        ("NVL", 80.0, "GPU/0-3000"),
        ("NVL", 60.0, "GPU/0-2000"),
        ("PCI", 24.0, "CPU/0-0"),
    ]


def test_switches_are_merged_and_cpu_links_are_local():
    link = '<nvlink target="x" count="2" tclass="{}"/>'
    system = build(
        CPU.format(
            3,
            GPU.format(
                1, link.format("0x068000") + link.format("0x068000") + link.format("0x068001")
            ),
        )
    )
    # The first link to the CPU is moved to the end, and that is the faster one: NCCL's ncclTopoSort
    # compares the node, not the type.
    assert links(system, "GPU/0-1000") == [
        ("NVL", 80.0, "NVS/0-0"),
        ("PCI", 24.0, "CPU/0-3"),
        ("NVL", 40.0, "CPU/0-3"),
    ]
    assert links(system, "NVS/0-0") == [("NVL", 80.0, "GPU/0-1000")]


def test_upstream_links_are_last():
    system = build(
        CPU.format(0, SWITCH.format("10", "", GPU.format(1, "") + GPU.format(2, "")))
        + CPU.format(1, "")
    )
    assert [target for _, _, target in links(system, "PCI/0-10000")] == [
        "GPU/0-1000",
        "GPU/0-2000",
        "CPU/0-0",
    ]
    assert links(system, "CPU/0-0") == [("PCI", 24.0, "PCI/0-10000"), ("SYS", 22.0, "CPU/0-1")]


BCM = 'vendor="0x1000" device="0xc010" subsystem_vendor="0x1000" subsystem_device="0xa096"'
OTHER = 'vendor="0x1000" device="0xc010" subsystem_vendor="0x10de" subsystem_device="0x13b8"'


def test_broadcom_gen4_switches_lose_their_second_level():
    inner = (
        SWITCH.format("11", BCM, GPU.format(1, ""))
        + SWITCH.format("12", BCM, GPU.format(2, ""))
        + SWITCH.format("13", OTHER, "")
    )
    system = build(CPU.format(0, SWITCH.format("10", BCM, inner)))
    assert [target for _, _, target in links(system, "PCI/0-10000")] == [
        "PCI/0-13000",
        "GPU/0-1000",
        "GPU/0-2000",
        "CPU/0-0",
    ]
    assert [n.name for n in system.pcis] == ["PCI/0-10000", "PCI/0-13000"]
    assert system.pcis[0].device == 0x1000C0101000FFFF


@pytest.mark.parametrize(("level", "merged"), [("0x1002", True), ("0x0002", False)])
def test_broadcom_gen5_level_is_in_the_subsystem_id(level, merged):
    top = 'vendor="0x1000" device="0xc030" subsystem_vendor="0x1000" subsystem_device="0x0001"'
    below = f'vendor="0x1000" device="0xc030" subsystem_vendor="0x1000" subsystem_device="{level}"'
    system = build(
        CPU.format(0, SWITCH.format("10", top, SWITCH.format("11", below, GPU.format(1, ""))))
    )
    assert (len(system.pcis) == 1) is merged


def test_links_between_switches():
    a, b = (
        '<pcilink target="0000:20:00.0"/>',
        '<pcilink target="0000:10:00.0"/><pcilink target="0000:77:00.0"/>',
    )
    system = build(
        CPU.format(
            0,
            SWITCH.format("10", "", GPU.format(1, "") + a)
            + SWITCH.format("20", "", GPU.format(2, "") + b),
        )
    )
    assert ("LOC", 5000.0, "PCI/0-20000") in links(system, "PCI/0-10000")
    assert len([kind for kind, _, _ in links(system, "PCI/0-20000") if kind == "LOC"]) == 1


def test_nics_below_cpus_are_one_node():
    """A NIC is identified by its bus id alone, so both CPUs' virtual NICs are the node of the
    first.
    """
    nic = '<nic><net name="a" dev="{}" speed="100000"/></nic>'
    system = build(CPU.format(0, GPU.format(1, "") + nic.format(0)) + CPU.format(1, nic.format(1)))
    assert links(system, "NIC/0-0") == [
        ("NET", 12.5, "NET/0-0"),
        ("NET", 12.5, "NET/0-1"),
        ("PCI", 5000.0, "CPU/0-0"),
    ]


def test_defaults_of_a_net():
    system = build(CPU.format(0, '<nic><net dev="3"/><net name="out" speed="100"/></nic>'))
    (net,) = system.nets
    assert (net.bw, net.latency, net.port, net.gdr, net.coll, net.max_channels, net.asic) == (
        1.25,
        0.0,
        0,
        0,
        0,
        64,
        3,
    )


def test_c2c_and_several_hosts():
    c2c = GPU.format(1, '<c2c bw="44712" count="10"/>')
    system = build(
        '<cpu numaid="0" arch="arm64" host_hash="0x1">'
        + c2c
        + '</cpu><cpu numaid="0" arch="arm64" host_hash="0x2"/>'
    )
    assert ("C2C", f32(447.12), "CPU/0-0") in links(system, "GPU/0-1000")
    assert [cpu.name for cpu in system.cpus] == ["CPU/0-0", "CPU/1-0"]
    assert all(
        link.type != LinkType.SYS for link in system.links
    )  # hosts are joined by the network only


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ("<cpu/>", "line 1: <cpu> has no numaid"),
        (CPU.format(0, '<pci class="0x030200"/>'), "<pci> has no busid"),
        (CPU.format(0, '<pci busid="1"><gpu rank="0"/></pci>'), "<gpu> has no sm"),
        (
            CPU.format(0, GPU.format(1, '<nvlink target="1" tclass="0x03"/>')),
            "<nvlink> has no count",
        ),
        (
            CPU.format(0, GPU.format(1, '<nvlink count="1" tclass="0x03"/>')),
            "<nvlink> has no target",
        ),
        (CPU.format(0, GPU.format(1, '<c2c bw="1"/>')), "<c2c> has no count"),
        (
            CPU.format(0, '<pci busid="1"><gpu><c2c bw="1" count="1"/></gpu></pci>'),
            "GPU 1, which is not in the system",
        ),
        (
            CPU.format(0, '<nic><net dev="0" latency="inf"/></nic>'),
            "line 1: latency inf; allowed is a number of us up to 1e",
        ),
        (
            CPU.format(0, '<nic><net dev="0" latency="3e38"/></nic>'),
            "line 1: latency 3e38; allowed is a number of us up to 1e",
        ),
    ],
)
def test_missing_attributes_are_named(inside, message):
    with pytest.raises(TopologyError) as error:
        build(inside)
    assert message in str(error.value)


def test_invalid_systems_are_rejected():
    gpu, cpu = GpuNode(id=1), PciNode(id=2)
    with pytest.raises(TopologyError, match="out of order"):
        System(nodes=(cpu, gpu))
    with pytest.raises(TopologyError, match="leads to node 5"):
        System(
            nodes=(
                TopoNode(
                    type=NodeType.GPU, id=0, links=(Link(type=LinkType.PCI, bw=1.0, target=5),)
                ),
            )
        )
