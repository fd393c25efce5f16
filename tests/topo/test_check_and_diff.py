"""Findings of ``topo check`` and comparison of two machines."""

from __future__ import annotations

import pytest

from miraccl.topo.analyse import analyse_topology
from miraccl.topo.check import check_file, check_topology
from miraccl.topo.diff import compare_names, compare_topologies
from miraccl.topo.load import load_topology_text
from miraccl.topo.xmlfile import read_topology
from tests.topo.golden import TOPOLOGIES

_LINK = '<nvlink target="0000:0{}:00.0" count="4" tclass="0x030200"/>'
GOOD = f"""<system version="1">
<cpu numaid="0" arch="x86_64" vendor="AuthenticAMD">
<pci busid="0000:01:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
<gpu dev="0" rank="0" sm="80" gdr="1">{_LINK.format(2)}</gpu>
</pci>
<pci busid="0000:02:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
<gpu dev="1" rank="1" sm="80" gdr="1">{_LINK.format(1)}</gpu>
</pci>
<pci busid="0000:03:00.0" class="0x020000" link_speed="16.0 GT/s PCIe" link_width="16">
<nic><net name="mlx5_0" dev="0" speed="100000" gdr="1"/></nic>
</pci>
</cpu>
</system>
"""

FLAWS = {
    "speed": (
        '"16.0 GT/s PCIe" link_width="16">\n<nic',
        '"Unknown" link_width="16">\n<nic',
        "warning",
        9,
        "link_speed of a nic is 'Unknown'",
    ),
    "width": (
        'link_width="16">\n<nic',
        'link_width="0">\n<nic',
        "note",
        9,
        "link_width of a nic is 0: 16 lanes assumed, 24 GB/s",
    ),
    "negative width": (
        'link_width="16">\n<nic',
        'link_width="-4">\n<nic',
        "warning",
        9,
        "link_width is -4",
    ),
    "slow link": (
        '"16.0 GT/s PCIe" link_width="16">\n<nic',
        '"2.5 GT/s" link_width="1">\n<nic',
        "note",
        9,
        "the PCI link limits them",
    ),
    "numa": ('numaid="0"', 'numaid="-1"', "note", 2, "numaid is -1"),
    "arch": (' arch="x86_64"', "", "warning", 2, "cpu without arch"),
    "vendor": (' vendor="AuthenticAMD"', "", "warning", 2, "x86 cpu without vendor"),
    "busid": ('busid="0000:03:00.0"', 'busid="3"', "warning", 9, "is not like 0000:1b:00.0"),
    "same busid": (
        'busid="0000:03:00.0"',
        'busid="0000:02:00.0"',
        "warning",
        9,
        "busid 0000:02:00.0 again, first in line 6",
    ),
    "self link": (
        'target="0000:02:00.0"',
        'target="0000:01:00.0"',
        "warning",
        4,
        "a GPU linked to itself",
    ),
    "dangling link": (
        'target="0000:02:00.0"',
        'target="0000:09:00.0"',
        "warning",
        4,
        "a link to 0000:09:00.0, which is not a GPU",
    ),
    "one-sided link": (
        'target="0000:02:00.0" count="4"',
        'target="0000:02:00.0" count="2"',
        "warning",
        4,
        "2 links to 2000, but 4 back",
    ),
    "net twice": (
        '<net name="mlx5_0"',
        '<net name="mlx5_0" dev="0" speed="100000"/><net name="mlx5_0"',
        "warning",
        10,
        "listed again, first in line 10",
    ),
    "net without dev": ('name="mlx5_0" dev="0"', 'name="mlx5_0"', "warning", 10, "net without dev"),
    "net speed": (
        'speed="100000"',
        'speed="-1"',
        "warning",
        10,
        "net speed is -1: 10 Gbit/s assumed",
    ),
    "net gdr": ('speed="100000" gdr="1"', 'speed="100000"', "note", 10, "net without gdr"),
    "gpu rank": (' rank="1"', "", "note", 7, "gpu without rank: numbered by dev"),
    "gpu gdr": ('sm="80" gdr="1"', 'sm="80"', "note", 4, "gpu without gdr"),
    "numa with a space": ('numaid="0"', 'numaid=" -1"', "note", 2, "numaid is -1"),
    "net twice under two numbers": (
        '<net name="mlx5_0"',
        '<net name="mlx5_0" dev="7" speed="100000" gdr="1"/><net name="mlx5_0"',
        "warning",
        10,
        "net mlx5_0, port missing, is listed again as dev 0, first in line 10: it counts twice",
    ),
    "two nics": (
        "<nic>",
        "<nic/><nic>",
        "warning",
        10,
        "another nic in the pci element of line 9: only the first counts",
    ),
    "sm": (
        'rank="1" sm="80"',
        'rank="1" sm="a"',
        "warning",
        7,
        "sm of a gpu is 'a', read as 0: no GPU has it",
    ),
    "nameless accelerator": (
        'sm="80" gdr="1"',
        'sm="80" accelerator=""',
        "note",
        4,
        "gpu without gdr",
    ),
    "gpu dev": ('dev="1"', 'dev="0"', "warning", 7, "dev 0 again, first in line 4"),
    "gpu sm": ('rank="1" sm="80"', 'rank="1" sm="90"', "note", 4, "GPUs of different sm (80, 90)"),
    "no sm": ('rank="1" sm="80"', 'rank="1"', "error", 7, "has no sm"),
    "same rank": ('rank="1"', 'rank="0"', "error", 4, "two GPUs have rank 0"),
    "version": ('version="1"', 'version="2"', "note", 1, "version 2 is AMD's dialect"),
    "empty switch": (
        "<pci busid",
        '<pci busid="0000:04:00.0" class="0x060400"/><pci busid',
        "note",
        3,
        "a PCI switch without GPU and NIC",
    ),
    "foreign device": (
        "<pci busid",
        '<pci busid="0000:04:00.0" class="0x020000"/><pci busid',
        "note",
        3,
        "without gpu or nic element",
    ),
    "ignored": ("<nic>", "<nic><led/>", "note", 10, "<led> inside <nic> is ignored"),
    "two hosts": (
        "</cpu>",
        '</cpu><cpu numaid="1" host_hash="0x7" arch="arm64"/>',
        "note",
        1,
        "cpu elements of 2 hosts",
    ),
    "same numa": (
        "</cpu>",
        '</cpu><cpu numaid="0" arch="arm64"/>',
        "warning",
        12,
        "numaid 0 again, first in line 2",
    ),
}


def test_a_complete_file_has_no_findings():
    assert check_topology(load_topology_text(GOOD)) == []


@pytest.mark.parametrize("defect", FLAWS)
def test_defects_are_found(defect):
    old, new, severity, line, text = FLAWS[defect]
    assert old in GOOD
    findings = check_topology(load_topology_text(GOOD.replace(old, new, 1)))
    assert [f for f in findings if f.severity == severity and f.line == line and text in f.text], (
        findings
    )


def test_unreadable_file_is_one_error(tmp_path):
    path = tmp_path / "broken.xml"
    path.write_text(GOOD.replace("</cpu>", ""))
    (finding,) = check_file(path)
    assert (finding.severity, finding.line) == ("error", 13)
    assert "close every element" in finding.fix
    path.write_text(GOOD.replace('numaid="0"', 'numaid="0" numaid="1"'))
    assert check_file(path)[0].fix == "remove one of the two"


@pytest.mark.parametrize(
    ("cut", "line", "text"),
    [
        (GOOD.index("class"), 3, "unclosed token"),
        (GOOD.index("</pci>"), 5, "no element found: <pci> of line 3 is not closed"),
    ],
)
def test_truncated_file_names_the_open_element(cut, line, text, tmp_path):
    (tmp_path / "a, b.xml").write_text(GOOD[:cut])
    (finding,) = check_file(tmp_path / "a, b.xml")
    assert (finding.severity, finding.line, finding.text) == ("error", line, text)
    assert finding.fix.startswith("close every element")


def test_line_of_an_error_is_printed_once(tmp_path):
    (tmp_path / "x.xml").write_text(GOOD.replace(' sm="80"', ""))
    assert [(f.line, f.text) for f in check_file(tmp_path / "x.xml") if f.severity == "error"] == [
        (4, "<gpu> has no sm")
    ]


@pytest.mark.parametrize("where", ["second in its element", "below a NIC"])
def test_dropped_gpus_are_rejected(where):
    second = '<gpu dev="1" rank="1" sm="80" gdr="1"/>'
    text = GOOD.replace("<nvlink", "<nothing")
    if where == "below a NIC":
        text = text.replace(
            "<nic>",
            f'<pci busid="0000:04:00.0" class="0x0302">{second.replace("1", "7")}</pci><nic>',
        )
    else:
        text = text.replace("</gpu>\n</pci>", f"</gpu>{second.replace('1', '7')}\n</pci>", 1)
    (error,) = [
        finding
        for finding in check_topology(load_topology_text(text))
        if finding.severity == "error"
    ]
    assert error.text.startswith("the GPU with dev 7 is not in the machine")


def test_bus_ids_and_numbers_are_of_one_host():
    cpu = GOOD[GOOD.index("<cpu") : GOOD.index("</system>")]
    second = cpu.replace('rank="1"', 'rank="3"').replace('rank="0"', 'rank="2"')
    both = cpu.replace("<cpu", '<cpu host_hash="0x1"') + second.replace(
        "<cpu", '<cpu host_hash="0x2"'
    )
    found = check_topology(load_topology_text(f'<system version="1">{both}</system>'))
    assert [
        finding.text
        for finding in found
        if "again" in finding.text or finding.severity == "warning"
    ] == []
    assert any("2 hosts" in finding.text for finding in found)


def test_equal_findings_are_merged():
    findings = check_topology(load_topology_text(GOOD.replace("16.0 GT/s PCIe", "fast")))
    (gpus,) = [f for f in findings if "of a gpu is 'fast'" in f.text]
    assert (gpus.count, gpus.line) == (2, 3)


def test_pci_tree_without_gpus_suggests_a_fix():
    text = (
        '<system version="1"><cpu numaid="0" arch="arm64"><pci busid="0000:01:00.0" '
        'class="0x060400"/></cpu></system>'
    )
    errors = [f for f in check_topology(load_topology_text(text)) if f.severity == "error"]
    assert "add a <gpu> element" in errors[0].fix


def machine(name):
    return analyse_topology(read_topology(TOPOLOGIES / f"{name}.xml").root)


def test_machine_equals_itself():
    assert compare_topologies(machine("nvidia-dgxa100"), machine("nvidia-dgxa100")) == []
    assert compare_names(machine("nvidia-dgxa100").system, machine("nvidia-dgxa100").system) == []


def test_two_models_differ():
    found = {
        d.where: (d.left, d.right, d.count)
        for d in compare_topologies(machine("nvidia-dgxa100"), machine("nvidia-dgxh100"))
    }
    assert found["GPU sm"] == ("80", "90", 8)
    assert found["GPU to GPU path"] == ("NVL 240 GB/s", "NVL 370.8 GB/s", 56)
    assert found["number of CPU nodes"][:2] == ("4", "2")
    assert found["NVS links"][:2] == ("8 x NVL 240 to GPU", "8 x NVL 370.8 to GPU")
    assert compare_names(machine("nvidia-dgxa100").system, machine("nvidia-dgxh100").system)


def test_one_slow_link_is_found():
    left = analyse_topology(load_topology_text(GOOD).root)
    right = analyse_topology(load_topology_text(GOOD.replace('count="4"', 'count="3"', 1)).root)
    assert [(d.where, d.left, d.right) for d in compare_topologies(left, right)][:1] == [
        ("GPU links", "NVL 80 to GPU, PCI 24 to CPU", "NVL 60 to GPU, PCI 24 to CPU")
    ]


@pytest.mark.parametrize(
    ("attribute", "left", "right"), [("latency", "0 us", "30 us"), ("maxconn", "64", "1")]
)
def test_numbers_of_a_net_are_compared(attribute, left, right):
    changed = GOOD.replace('speed="100000"', f'speed="100000" {attribute}="{right.split()[0]}"')
    one, two = (analyse_topology(load_topology_text(text).root) for text in (GOOD, changed))
    assert [(d.where, d.left, d.right) for d in compare_topologies(one, two)] == [
        (f"NET {attribute}", left, right)
    ]
