"""Machines that NCCL does not know: AMD's dialect, and devices described by a TOML file."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from miraccl.errors import TopologyError
from miraccl.tools.topo_cli import topo
from miraccl.topo.accelerators import parse_accelerators, read_accelerators
from miraccl.topo.analyse import Topology, analyse_topology
from miraccl.topo.check import check_file
from miraccl.topo.load import dump_if_asked, load_topology, load_topology_text
from miraccl.topo.options import PathOptions, TopoOptions
from miraccl.topo.records import LinkType, NodeType, PathType
from miraccl.topo.xmlfile import format_topology
from tests.topo.golden import DATA

SIPU_TOML = DATA / "accelerators" / "sipu.toml"
SIPU_XML = DATA / "accelerators" / "sipu.xml"
GPU, NET = NodeType.GPU, NodeType.NET


def sipu(nodes: int = 2, **environ: str) -> Topology:
    file = load_topology(SIPU_XML, accelerators=read_accelerators(SIPU_TOML))
    return analyse_topology(file.root, TopoOptions(nodes=nodes, paths=PathOptions.read(environ)))


def test_sipu_devices_connect_through_their_switch():
    found = sipu()
    (switch,) = found.system.of(NodeType.NVS)
    assert switch.label == "eth_switch"
    assert [gpu.label for gpu in found.system.gpus] == ["sipu"] * 4
    assert [(link.type, link.bw) for link in switch.links] == [(LinkType.NVL, 400.0)] * 4
    assert found.paths.gpu_gpu(0, 3).type == PathType.NVL
    assert found.paths.gpu_gpu(0, 3).bw == 400.0


def test_virtual_nics_have_bandwidth():
    """Their PCI link has speed Unknown and width 0: 16 lanes of 8 GT/s, never 0."""
    found = sipu()
    nics = found.system.of(NodeType.NIC)
    assert [link.bw for nic in nics for link in nic.links if link.type == LinkType.PCI] == [
        12.0,
        12.0,
    ]


def test_each_net_is_listed_once():
    found = sipu()
    assert [(net.label, net.dev) for net in found.system.nets] == [("mlx5_0", 0), ("mlx5_1", 1)]
    reached = [
        found.system.nodes[link.target].name
        for nic in found.system.of(NodeType.NIC)
        for link in nic.links
    ]
    assert sorted(name for name in reached if name.startswith("NET")) == ["NET/0-0", "NET/0-1"]


@pytest.mark.parametrize("environ", [{}, {"NCCL_P2P_DISABLE": "1"}])
def test_paths_lead_over_the_nics(environ):
    found = sipu(**environ)
    for gpu in range(4):
        for net in range(2):
            path = found.paths.gpu_net(gpu, net)
            nic = found.system.nodes[found.system.link_source[path.hops[-1]]]
            assert path.bw == 12.0
            assert nic.type == NodeType.NIC
    if environ:
        assert {found.paths.gpu_gpu(i, j).type for i in range(4) for j in range(4) if i != j} == {
            PathType.PHB,
            PathType.SYS,
        }


def test_without_p2p_and_shm_devices_use_the_network():
    found = sipu(1, NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    assert found.local_ranks == ((0,), (1,), (2,), (3,))
    for domain in found.domains:
        assert domain.system.inter == 1
        assert domain.system.max_bw == 12.0  # over the NIC
        assert all(path.bw == 12.0 for path in domain.paths.row(GPU, 0, NET))


def test_check_reports_assumptions():
    findings = check_file(SIPU_XML, accelerators=read_accelerators(SIPU_TOML))
    texts = [finding.text for finding in findings]
    assert "link_speed of a nic is 'Unknown': 8 GT/s assumed, with 16 lanes 12 GB/s" in texts
    assert "link_width of a nic is 0: 16 lanes assumed, 12 GB/s" in texts
    assert "4 links of a sipu to eth_switch: 400 GB/s by its description" in texts
    assert "sipu is planned as if it were a GPU of sm 80" in texts
    assert not [finding for finding in findings if finding.severity == "error"]


def test_the_documentation_shows_this_example():
    page = (DATA.parents[1] / "docs" / "guide" / "topology.md").read_text()
    assert SIPU_TOML.read_text() in page
    result = CliRunner().invoke(topo, ["check", str(SIPU_XML), "--accelerators", str(SIPU_TOML)])
    assert result.output in page


def test_missing_description_is_suggested():
    findings = check_file(SIPU_XML, accelerators=())
    assert findings[0].severity == "error"
    assert any("--accelerators" in finding.fix for finding in findings)


def test_descriptions_come_from_the_environment():
    environ = {"MIRACCL_ACCELERATORS": str(SIPU_TOML), "MIRACCL_TOPO_FILE": str(SIPU_XML)}
    assert format_topology(load_topology(environ=environ).root).count("<xlink") == 4


def test_a_device_with_its_own_element_and_peer_links():
    description = parse_accelerators(
        {
            "format": 1,
            "accelerator": {
                "npu": {
                    "element": "npu",
                    "sm": 90,
                    "link": {
                        "element": "lane",
                        "only": "gpu",
                        "bw": {"attribute": "model", "default": 10, "x2": 25.5},
                    },
                }
            },
        }
    )
    text = '<system version="1"><cpu numaid="0" arch="arm64">'
    for i, model in ((1, "x1"), (2, "x2a")):
        text += f'<pci busid="0000:0{i}:00.0" link_width="8"><npu dev="{i - 1}" model="{model}">'
        text += f'<lane target="0000:0{3 - i}:00.0" count="2"/></npu></pci>'
    found = analyse_topology(
        load_topology_text(text + "</cpu></system>", accelerators=description).root
    )
    assert [gpu.links[0].bw for gpu in found.system.gpus] == [20.0, 51.0]
    assert [gpu.sm for gpu in found.system.gpus] == [90, 90]
    assert found.system.count(NodeType.NVS) == 0
    assert found.paths.gpu_gpu(0, 1).type == PathType.NVL


def test_dump_round_trip(tmp_path):
    found = sipu(2)
    assert not dump_if_asked(found, {})
    out = tmp_path / "used.xml"
    assert dump_if_asked(found, {"NCCL_TOPO_DUMP_FILE": str(out)})
    again = analyse_topology(load_topology(out, accelerators=()).root, TopoOptions(nodes=2))
    assert again.system == found.system
    assert again.paths == found.paths


@pytest.mark.parametrize("lost", ["kind", "count", "bw"])
def test_xlinks_need_their_attributes(lost):
    link = re.sub(
        rf'{lost}="[^"]*" ?', "", '<xlink kind="switch" count="4" bw="100.0" switch="s"/>'
    )
    text = (
        f'<system version="1"><cpu numaid="0"><pci busid="1"><gpu sm="80">{link}</gpu></pci>'
        "</cpu>"
        "</system>"
    )
    with pytest.raises(TopologyError, match=f"line 1: <xlink> has no {lost}"):
        analyse_topology(load_topology_text(text).root)


AMD_GPU = (
    '<pci busid="0000:0{0}:00.0" class="0x120000" vendor="0x1002" link_speed="32.0 GT/s PCIe" '
    'link_width="16">'
    '<gpu dev="{0}" sm="304" gcn="{1}" arch="38911" rank="{0}" gdr="1">'
    '<xgmi target="0000:0{2}:00.0" count="{3}" tclass="0x120000"/></gpu></pci>'
)


def amd(gcn: str, count: int = 1, version: int = 2) -> Topology:
    gpus = AMD_GPU.format(1, gcn, 2, count) + AMD_GPU.format(2, gcn, 1, count)
    text = (
        f'<system version="{version}"><cpu numaid="0" arch="x86_64" '
        f'vendor="AuthenticAMD">{gpus}</cpu></system>'
    )
    return analyse_topology(load_topology_text(text).root)


@pytest.mark.parametrize(
    ("gcn", "count", "bw"),
    [("gfx942", 1, 48.0), ("gfx90a", 4, 144.0), ("910", 1, 36.0), ("906", 2, 48.0)],
)
def test_xgmi_links_connect_gpus(gcn, count, bw):
    found = amd(gcn, count)
    assert found.paths.gpu_gpu(0, 1).bw == bw
    assert found.paths.gpu_gpu(0, 1).type == PathType.NVL
    assert found.system.gpus[0].label == f"amd {gcn}"
    assert found.system.gpus[0].sm == 80  # not the number of compute units, which RCCL writes there


def test_xgmi_is_ignored_in_version_1():
    found = amd("gfx942", version=1)
    assert found.paths.gpu_gpu(0, 1).type == PathType.PHB


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("", "format is None"),
        ("format = 2", "format is 2"),
        ("format = 1\nother = 1", "'other'; known are format, accelerator"),
        ("format = 1\naccelerator = 3", "accelerator is 3, expected a table"),
        ("format = 1\n[accelerator.a]\nspeed = 1", "accelerator.a has 'speed'"),
        (
            'format = 1\n[accelerator.a]\nsm = "x"',
            "accelerator.a.sm is 'x', expected a compute capability",
        ),
        ("format = 1\n[accelerator.a.link]\nbw = 0", "accelerator.a.link.bw is 0, expected GB/s"),
        ('format = 1\n[accelerator.a.link]\nbw = 1\nkind = "t"', "needs both kind and values"),
        ('format = 1\n[accelerator.a.link]\nbw = 1\nonly = "ring"', "only is 'ring'"),
        (
            "format = 1\n[accelerator.a]\npci_class = [3]",
            "pci_class is [3], expected a text or a list",
        ),
        ("format = ", "Invalid value"),
        ('format = 1\n[accelerator.""]', "an accelerator is called ''; expected a name"),
        (
            'format = 1\n[accelerator.a]\nlabel = ["gcn"]',
            "accelerator.a.label is ['gcn'], expected a text",
        ),
        (
            "format = 1\n[accelerator.a]\nversion = true",
            "accelerator.a.version is True, expected 1 or 2",
        ),
        (
            'format = 1\n[accelerator.a.link]\nbw = 1\nkind = "t"\ngpu = ["x"]\ncpu = ["x"]',
            "accelerator.a.link has 'x' for both gpu and cpu",
        ),
        ("format = 1\nother = " + "[" * 5000, "nested too deeply"),
    ],
)
def test_invalid_descriptions_are_rejected(toml, message, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(toml)
    with pytest.raises(TopologyError, match=re.escape(str(path))) as error:
        read_accelerators(path)
    assert message in str(error.value)


def test_unknown_link_kinds_are_rejected():
    text = SIPU_XML.read_text().replace('type="switch"', 'type="ring"')
    with pytest.raises(
        TopologyError, match="line 5: <silink> has type='ring'; its description has switch, peer"
    ):
        load_topology_text(text, accelerators=read_accelerators(SIPU_TOML))
