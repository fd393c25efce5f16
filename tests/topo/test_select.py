"""Selection of ranks and GPUs, and fusion of the ranks' views."""

from __future__ import annotations

import pytest

from miraccl.errors import InvalidUsage, TopologyError
from miraccl.topo.analyse import analyse_topology
from miraccl.topo.options import PathOptions, TopoOptions
from miraccl.topo.records import PathType
from miraccl.topo.select import select_topology
from miraccl.topo.xmlfile import XmlNode, format_topology, parse_topology


def pci(bus: str, inside: str, cls: str = "0x030200") -> str:
    return f'<pci busid="{bus}" class="{cls}" link_speed="16 GT/s" link_width="16">{inside}</pci>'


def tree(inside: str) -> XmlNode:
    return parse_topology(
        '<system version="1"><cpu numaid="0" arch="x86_64" '
        f'vendor="AuthenticAMD">{inside}</cpu></system>'
    ).root


def gpus(root: XmlNode) -> list[tuple[str, str]]:
    return [(n.attrs["dev"], n.attrs["rank"]) for n in root.walk() if n.name == "gpu"]


def test_missing_numbers_follow_the_bus_id():
    root = tree(pci("0000:03:00.0", '<gpu sm="80"/>') + pci("0000:01:00.0", '<gpu sm="80"/>'))
    selected = select_topology(root, TopoOptions())
    assert gpus(selected) == [("1", "1"), ("0", "0")]
    assert [n.attrs["gdr"] for n in selected.walk() if n.name == "gpu"] == ["1", "1"]
    assert (
        "dev" not in root.children[0].children[0].children[0].attrs
    )  # the file itself is left alone


def test_missing_ranks_follow_dev():
    root = tree(
        pci("0000:01:00.0", '<gpu dev="5" sm="80"/>')
        + pci("0000:02:00.0", '<gpu dev="2" sm="80"/>')
    )
    assert gpus(select_topology(root, TopoOptions())) == [("5", "1"), ("2", "0")]


def test_ranks_of_another_node_become_local():
    root = tree(
        pci("0000:01:00.0", '<gpu dev="0" rank="9" sm="80"/>')
        + pci("0000:02:00.0", '<gpu dev="1" rank="8" sm="80"/>')
    )
    assert gpus(select_topology(root, TopoOptions())) == [("0", "1"), ("1", "0")]


def test_two_gpus_with_one_rank_are_rejected():
    root = tree(
        pci("0000:01:00.0", '<gpu dev="0" rank="0" sm="80"/>')
        + pci("0000:02:00.0", '<gpu dev="1" rank="0" sm="80"/>')
    )
    with pytest.raises(TopologyError, match="two GPUs have rank 0"):
        select_topology(root, TopoOptions())


def switch(bus: str, inside: str) -> str:
    return pci(bus, inside, "0x060400")


FOUR = "".join(
    switch(f"0000:{i}0:00.0", pci(f"0000:{i}1:00.0", f'<gpu dev="{i}" rank="{i}" sm="80"/>'))
    for i in range(4)
)


def test_selected_gpus_are_ranked_in_selection_order():
    selected = select_topology(tree(FOUR), TopoOptions(gpus=(2, 0)))
    assert gpus(selected) == [("0", "1"), ("2", "0")]
    assert (
        len([n for n in selected.walk() if n.name == "pci"]) == 4
    )  # switches without a GPU are gone


def socket(numa: int, inside: str) -> str:
    return f'<cpu numaid="{numa}" arch="x86_64" vendor="AuthenticAMD">{inside}</cpu>'


def two_sockets(second: str) -> XmlNode:
    """Return a tree with GPU 0 below one socket and GPU 1 with ``second`` below the other."""
    one = pci("0000:01:00.0", '<gpu dev="0" rank="0" sm="80"/>')
    two = pci("0000:81:00.0", '<gpu dev="1" rank="1" sm="80"/>')
    text = f'<system version="1">{socket(0, one)}{socket(1, two + second)}</system>'
    return parse_topology(text).root


def test_unused_sockets_without_a_nic_are_dropped():
    alone = select_topology(two_sockets(""), TopoOptions(gpus=(0,)))
    assert [cpu.attrs["numaid"] for cpu in alone.children] == ["0"]
    nic = pci("0000:82:00.0", '<nic><net dev="0"/></nic>', "0x020000")
    with_nic = select_topology(two_sockets(nic), TopoOptions(gpus=(0,)))
    assert [cpu.attrs["numaid"] for cpu in with_nic.children] == ["0", "1"]


def test_invalid_selections():
    with pytest.raises(TopologyError, match="cannot select GPU 7: the topology has dev 0, 1, 2, 3"):
        select_topology(tree(FOUR), TopoOptions(gpus=(0, 7)))
    with pytest.raises(InvalidUsage, match="is repeated"):
        TopoOptions(gpus=(1, 1))
    with pytest.raises(InvalidUsage, match="at least 1"):
        TopoOptions(nodes=0)


def test_collnet_marks_nets_without_coll():
    root = tree(FOUR + '<nic><net dev="0"/><net dev="1" coll="0"/></nic>')
    nets = [
        n.attrs["coll"]
        for n in select_topology(root, TopoOptions(collnet=True)).walk()
        if n.name == "net"
    ]
    assert nets == ["1", "0"]


def test_fusion_appends_the_elements_of_a_rank():
    """Rank 1 is first in the file; merged in rank order it is second, after the net of rank 0."""
    one, zero = (
        pci("0000:01:00.0", '<gpu dev="1" rank="1" sm="80"/>'),
        pci("0000:02:00.0", '<gpu dev="0" rank="0" sm="80"/>'),
    )
    root = tree(
        one
        + zero
        + pci("0000:03:00.0", '<nic><net dev="0"/></nic>', "0x020000")
        + pci("0000:04:00.0", "", "0x060400")
    )
    fused = select_topology(root, TopoOptions(fuse=True))
    assert [child.attrs["busid"] for child in fused.children[0].children] == [
        "0000:02:00.0",
        "0000:03:00.0",
        "0000:01:00.0",
    ]


def test_fusion_keeps_a_merged_tree():
    root = select_topology(tree(FOUR), TopoOptions())
    assert format_topology(select_topology(root, TopoOptions(fuse=True))) == format_topology(root)


def test_no_gpu_is_an_error():
    with pytest.raises(TopologyError, match="no GPU takes part"):
        analyse_topology(tree('<nic><net dev="0"/></nic>'))


def test_settings_are_read_from_either_name():
    assert PathOptions.read({}) == PathOptions()
    environ = {
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_NET_GDR_LEVEL": "2",
        "NCCL_NETDEVS_POLICY": "MAX:3",
        "MIRACCL_NVB_DISABLE": "1",
    }
    options = PathOptions.read(environ)
    assert (options.p2p_level, options.gdr_level, options.net_per_gpu, options.nvb) == (
        PathType.SYS,
        PathType.PXB,
        3,
        False,
    )
    assert (
        PathOptions.read({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"}).p2p_level
        == PathType.LOC
    )
    assert PathOptions.read({"NCCL_P2P_LEVEL": "9"}).p2p_level == PathType.SYS
    for name, value in (
        ("NCCL_P2P_LEVEL", "FAR"),
        ("NCCL_NETDEVS_POLICY", "MAX:0"),
        ("NCCL_NET_GDR_C2C", "yes please"),
    ):
        with pytest.raises(InvalidUsage, match=name):
            PathOptions.read({name: value})
