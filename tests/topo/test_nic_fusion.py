"""Fusion of NICs in the tree of a machine."""

from __future__ import annotations

import pytest

from miraccl.errors import InvalidUsage
from miraccl.topo.nic_fusion import PORT, fuse_nics, parse_groups
from miraccl.topo.records import PathType
from miraccl.topo.xmlfile import XmlNode


def nic(bus: str, *names: str) -> XmlNode:
    nets = [
        XmlNode("net", {"name": name, "dev": "0", "speed": "100000", "gdr": "1", "port": "1"})
        for name in names
    ]
    attrs = {"busid": bus, "class": "0x020700", "link_width": "16"}
    return XmlNode("pci", attrs, [XmlNode("nic", {}, nets)])


def machine() -> XmlNode:
    """Return two NUMA domains; a and b are ports of a NIC, c shares their switch, d the domain."""
    switch = XmlNode(
        "pci",
        {"busid": "0000:01:00.0"},
        [nic("0000:02:00.0", "a", "b"), nic("0000:03:00.0", "c")],
    )
    first = XmlNode("cpu", {"numaid": "0"}, [switch, nic("0000:04:00.0", "d")])
    second = XmlNode("cpu", {"numaid": "1"}, [nic("0000:81:00.0", "e")])
    return XmlNode("system", {"version": "1"}, [first, second])


def nets(root: XmlNode) -> dict[str, int]:
    """Return the speed of each net in Gbit/s."""
    return {n.attrs["name"]: n.integer("speed") // 1000 for n in root.walk() if n.name == "net"}


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (PathType.LOC, {"a": 100, "b": 100, "c": 100, "d": 100, "e": 100}),
        (PORT, {"a+b": 200, "c": 100, "d": 100, "e": 100}),
        (PathType.PIX, {"a+b+c": 300, "d": 100, "e": 100}),
        (PathType.PHB, {"a+b+c+d": 400, "e": 100}),
        (PathType.SYS, {"a+b+c+d+e": 500}),
    ],
)
def test_levels(level: int, expected: dict[str, int]) -> None:
    root = machine()
    fuse_nics(root, list("abcde"), level=level)
    assert nets(root) == expected


def test_places_of_fused_devices() -> None:
    root = machine()
    texts = fuse_nics(root, list("abcde"), level=PORT, force="c,d")
    assert texts == ["c and d are one network device", "a and b are one network device"]
    first = root.children[0]
    (made,) = [n for n in first.children if n.child("nic")]
    assert made.attrs == {"busid": "0000:03:00.1", "class": "0x020700", "link_width": "32"}
    # what is empty without its net is gone, and the ports of a NIC stay in its place
    devices = [n.attrs["busid"] for n in root.walk() if n.name == "pci"]
    assert devices == ["0000:01:00.0", "0000:02:00.0", "0000:03:00.1", "0000:81:00.0"]
    fused = [n for n in root.walk() if n.attrs.get("name") == "a+b"]
    assert [(n.attrs["dev"], n.attrs["gdr"]) for n in fused] == [("6", "1")]


def test_at_most_eight_ports() -> None:
    names = [f"p{i}" for i in range(10)]
    root = XmlNode("system", {}, [XmlNode("cpu", {"numaid": "0"}, [nic("0000:02:00.0", *names)])])
    fuse_nics(root, names, level=PORT)
    assert list(nets(root).values()) == [800, 200]


@pytest.mark.parametrize(
    ("force", "problem"),
    [
        ("a,x", r"there is no active port x \(ports: a, b, c, d, e\)"),
        ("a,a", "named twice"),
        ("a,b;b,c", "named twice"),
    ],
)
def test_bad_groups(force: str, problem: str) -> None:
    with pytest.raises(InvalidUsage, match=problem):
        fuse_nics(machine(), list("abcde"), level=PORT, force=force)


def test_groups() -> None:
    assert parse_groups("a,b;;c") == (("a", "b"), ("c",))
    assert parse_groups("") == ()
