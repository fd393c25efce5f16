"""Reading topology files: rejected files, NCCL's number parsing, malformed input."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miraccl.errors import TopologyError
from miraccl.topo import xmlfile
from miraccl.topo.analyse import Topology, analyse_topology
from miraccl.topo.check import check_topology
from miraccl.topo.load import load_topology_text
from miraccl.topo.system_json import (
    paths_from_json,
    paths_to_json,
    system_from_json,
    system_to_json,
)
from miraccl.topo.xmlfile import (
    XmlNode,
    bus_id,
    c_float,
    c_int,
    c_uint64,
    format_topology,
    parse_topology,
    read_topology,
    write_topology,
)
from tests.topo.golden import TOPOLOGIES

FILES = sorted(TOPOLOGIES.glob("*.xml"))

REFUSED = {
    "empty": ("", "line 1: no element found"),
    "not xml": ("hello", "line 1"),
    "other root": ("<graphs version='1'/>", "expected <system>"),
    "no version": ("<system/>", "no version"),
    "unknown version": ('<system version="3"/>', "version 3"),
    "unclosed": ('<system version="1">\n<cpu numaid="0">\n', "<cpu> of line 2 is not closed"),
    "crossed": (
        '<system version="1">\n<cpu numaid="0">\n<pci busid="0">\n</cpu></system>',
        "line 4: mismatched tag: <pci> of line 3",
    ),
    "duplicate attribute": (
        '<system version="1">\n<cpu numaid="0" numaid="1"/></system>',
        "line 2: duplicate attribute",
    ),
    "text": ('<system version="1">\n words\n</system>', "text between elements: 'words'"),
    "two roots": (
        '<system version="1"/>\n<system version="1"/>',
        "line 2: junk after document element",
    ),
    "doctype": ('<!DOCTYPE system>\n<system version="1"/>', "no document type"),
    "entity": (
        '<!DOCTYPE s [<!ENTITY a "b">]><system version="1">&a;</system>',
        "no document type",
    ),
    "undeclared entity": ('<system version="1" name="&a;"/>', "undefined entity"),
    "unknown encoding": ('<?xml version="1.0" encoding="klingon"?><system version="1"/>', "line 1"),
    "long value": (f'<system version="1" name="{"x" * 300}"/>', "longer than 254"),
    "deep": (
        '<system version="1">' + '<cpu numaid="0">' + '<pci busid="1">' * 100,
        "nested deeper than 64",
    ),
    "many": ('<system version="1">' + '<cpu numaid="0"/>' * 20_001, "more than 20000 elements"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rejected_with_the_line(name):
    text, message = REFUSED[name]
    with pytest.raises(TopologyError) as error:
        parse_topology(text)
    assert message in str(error.value)


def test_entities_do_not_expand():
    """Nine levels of ten references each, a billion letters, cost no time."""
    levels = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, 10))
    bomb = f'<!DOCTYPE system [<!ENTITY e0 "x">{levels}]><system version="1" name="&e9;"/>'
    with pytest.raises(TopologyError, match="no document type"):
        parse_topology(bomb)


def test_large_files_are_rejected_unread(tmp_path):
    path = tmp_path / "large.xml"
    with path.open("wb") as file:
        file.write(b'<system version="1">')
        file.truncate(100 << 20)
    with pytest.raises(TopologyError, match="larger than"):
        read_topology(path)


def test_more_nodes_than_the_limit_are_rejected():
    gpus = "".join(
        f'<pci busid="{i:x}" class="0x030200"><gpu dev="{i}" rank="{i}" sm="80"/></pci>'
        for i in range(577)
    )
    file = parse_topology(f'<system version="1"><cpu numaid="0">{gpus}</cpu></system>')
    with pytest.raises(TopologyError, match="more than 576 GPU nodes"):
        analyse_topology(file.root)


def test_one_endless_token_is_read_in_time():
    """A value as large as the limit is rejected without quadratic work."""
    with pytest.raises(TopologyError):
        parse_topology(b'<system version="1" name="' + b"x" * (xmlfile.MAX_BYTES - 100))


def test_huge_names_are_truncated_in_errors():
    with pytest.raises(TopologyError, match=r"the outermost element is <s{40}>, expected"):
        parse_topology("<" + "s" * 100_000 + "/>")
    (note,) = parse_topology('<system version="1"><' + "s" * 100_000 + "/></system>").notes
    assert len(note[1]) < 100


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_unreadable_paths(kind, tmp_path):
    path = tmp_path / "no.xml" if kind == "missing" else tmp_path
    with pytest.raises(TopologyError, match=str(tmp_path)):
        read_topology(path)


def test_tolerated_and_noted():
    file = parse_topology(
        '\n\n<?xml version="1.0"?>\n<!-- a comment --><system version="1">\n<gpu/><cpu numaid="0">'
        '\n<fan speed="3"><gpu/></fan>\t</cpu></system>'
    )
    assert file.notes == (
        (5, "<gpu> inside <system> is ignored"),
        (6, "<fan> inside <cpu> is ignored"),
    )
    assert [child.name for child in file.root.children] == ["cpu"]
    assert file.root.children[0].children == []


def test_attributes_beyond_sixteen_are_dropped_like_nccl_does():
    attrs = " ".join(f'a{i}="{i}"' for i in range(20))
    file = parse_topology(f'<system version="1"><cpu numaid="0" {attrs}/></system>')
    assert list(file.root.children[0].attrs) == ["numaid", *(f"a{i}" for i in range(15))]
    assert len(file.notes) == 5


def test_limits_of_nccl_are_noted():
    nets = '<net dev="0"/>' * 300
    file = parse_topology(f'<system version="1"><cpu numaid="0"><nic>{nets}</nic></cpu></system>')
    assert [text for _, text in file.notes] == [
        "303 elements; NCCL rejects 256 and more",
        "<nic> has 300 children; NCCL rejects more than 128",
    ]


def test_self_closing_elements_are_distinguished():
    root = parse_topology(
        '<system version="1"><cpu numaid="0"/><cpu numaid="1"></cpu></system>'
    ).root
    assert [child.single for child in root.children] == [True, False]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_laid_out_by_nccl_are_written_unchanged(path, tmp_path):
    write_topology(read_topology(path).root, tmp_path / "out.xml")
    assert (tmp_path / "out.xml").read_text() == path.read_text()


def test_markup_in_values_survives():
    root = XmlNode("system", {"version": "1", "name": 'a"b<c&d>'})
    assert parse_topology(format_topology(root)).root.attrs == root.attrs


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("0x1f", 31),
        ("010", 8),
        ("-1", -1),
        (" 7x", 7),
        ("", 0),
        ("abc", 0),
        ("0x", 0),
        ("4294967296", 0),
        ("9" * 40, -1),
    ],
)
def test_integers_parse_like_c(text, value):
    assert c_int(text) == value


def test_other_numbers_parse_like_c():
    assert c_uint64("0x1e95b50003fd7010", 16) == 0x1E95B50003FD7010
    assert c_uint64("-1", 16) == (1 << 64) - 1
    assert c_uint64("f" * 30, 16) == (1 << 64) - 1
    assert c_float("1.5us") == 1.5
    assert c_float("fast") == 0.0
    assert c_float("1_0") == 1.0
    assert bus_id("0018:01:00.0") == 0x1801000
    assert bus_id("fffffff:ffff:ff") == 0xFFFFFFFFFFFFF
    assert bus_id("") == 0


# Malformed files: the result is a topology or a TopologyError, never another exception.

NAMES = (
    "system",
    "cpu",
    "pci",
    "gpu",
    "nic",
    "net",
    "nvlink",
    "c2c",
    "pcilink",
    "xgmi",
    "xlink",
    "other",
)
KEYS = {
    "cpu": ("numaid", "arch", "vendor", "familyid", "modelid", "host_hash"),
    "pci": ("busid", "class", "vendor", "device", "link_speed", "link_width"),
    "gpu": ("dev", "rank", "sm", "gdr"),
    "net": ("dev", "name", "speed", "guid", "latency", "port", "gdr", "coll", "maxconn"),
    "nvlink": ("target", "count", "tclass"),
    "xgmi": ("target", "count", "tclass"),
    "xlink": ("kind", "target", "count", "bw", "switch"),
    "c2c": ("bw", "count"),
    "pcilink": ("target",),
}
NUMBERS = ("0", "1", "2", "-1", "6", "80", "207", "400000", "nan", "1e99", "99999999999999999999")
BUS_IDS = ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:01:00.1", "")
CLASSES = ("0x060400", "0x030200", "0x068000", "0x068001", "0x020000", "0x120000")
TEXTS = (
    "x86_64",
    "arm64",
    "GenuineIntel",
    "AuthenticAMD",
    "16.0 GT/s PCIe",
    "Unknown",
    "",
    "é",
    "&",
)
KINDS = ("switch", "gpu", "cpu", "")
LIKELY = {
    **dict.fromkeys(("busid", "target"), BUS_IDS),
    **dict.fromkeys(("class", "tclass"), CLASSES),
    **dict.fromkeys(("arch", "vendor", "link_speed"), TEXTS),
    "kind": KINDS,
}


def values(key: str) -> st.SearchStrategy[str]:
    """Draw mostly valid attribute values."""
    return st.sampled_from(LIKELY.get(key, NUMBERS)) | st.sampled_from((*NUMBERS, *TEXTS))


@st.composite
def elements(draw: st.DrawFn, parent: str = "system", depth: int = 0) -> XmlNode:
    allowed = xmlfile.CHILDREN.get(parent, ())
    name = (
        draw(st.sampled_from(allowed or NAMES))
        if draw(st.integers(0, 9))
        else draw(st.sampled_from(NAMES))
    )
    keys = KEYS.get(name, ())
    attrs = {key: draw(values(key)) for key in keys if draw(st.integers(0, 12))}
    count = 0 if depth > 4 else draw(st.integers(0, 3))
    return XmlNode(name, attrs, [draw(elements(name, depth + 1)) for _ in range(count)])


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from(["1", "2"]))
def test_random_machines_are_a_topology_or_an_error(data, version):
    root = read_topology(TOPOLOGIES / "pcie2-intel-nic200.xml").root
    root.attrs["version"] = version
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(
            st.sampled_from([node for node in root.walk() if node.name in xmlfile.CHILDREN])
        )
        place.children.insert(
            data.draw(st.integers(0, len(place.children))), data.draw(elements(place.name, 2))
        )
    try:
        file = load_topology_text(format_topology(root))
    except TopologyError:
        return
    check_topology(file)
    try:
        assert_consistent(analyse_topology(file.root))
    except TopologyError:
        return


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(FILES), st.data())
def test_damaged_files_are_a_topology_or_an_error(path, data):
    text = bytearray(path.read_bytes()[:6000])
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text)))
        pieces = st.binary(max_size=4) | st.sampled_from([b"<", b"/>", b'"', b"</cpu>", b"-"])
        text[at : at + data.draw(st.integers(0, 40))] = data.draw(pieces)
    text += b"</pci></cpu></system>" if data.draw(st.booleans()) else b""
    try:
        file = load_topology_text(bytes(text))
        check_topology(file)
        assert_consistent(analyse_topology(file.root))
    except TopologyError:
        pass


def assert_consistent(topology: Topology) -> None:
    """Check that every path follows links of the system to its target, and that both survive JSON.

    If nodes share an id, which no real machine has, NCCL's routes to them are mixed up, like ours:
    then only JSON is checked.
    """
    system, paths = topology.system, topology.paths
    unique = len({node.name for node in system.nodes}) == len(system.nodes)
    for source, i, target, j, path in paths if unique else ():
        at = system.index(source, i)
        for hop in path.hops:
            assert system.link_source[hop] == at
            at = system.links[hop].target
        if path.hops:
            assert at == system.index(target, j)
            # NCCL searches from the target outwards, so the reverse links count where the
            # directions differ.
            back = [system.links[system.reverse_links[hop]].bw for hop in path.hops]
            assert path.bw <= min(max(system.links[hop].bw, bw) for hop, bw in zip(path.hops, back))
    restored = system_from_json(system_to_json(system))
    assert system_to_json(restored) == system_to_json(system)
    paths_from_json(paths_to_json(paths, system), restored)
