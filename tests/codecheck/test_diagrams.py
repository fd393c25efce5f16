"""Diagrams of the design pages: every node and label is drawn inside the picture, once."""

from __future__ import annotations

import enum
import re
from xml.etree import ElementTree

import pytest

from docgen import diagrams
from docgen.graph_svg import Edge, draw_graph

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", diagrams.FILES)
def test_everything_is_inside_the_picture(name: str) -> None:
    root = ElementTree.fromstring(diagrams.FILES[name]())
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for box in root.iter(f"{SVG}rect"):
        x, y = float(box.get("x", 0)), float(box.get("y", 0))
        assert 0 <= x <= x + float(box.attrib["width"]) <= width
        assert 0 <= y <= y + float(box.attrib["height"]) <= height
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.attrib["x"]) <= width
        assert 0 <= float(text.attrib["y"]) <= height


def test_packages_and_records() -> None:
    packages = texts(diagrams.package_diagram())
    assert {"topo/", "graph/", "runtime/", "api/", "torch/"} <= set(packages)
    records = texts(diagrams.records_diagram())
    assert {"XmlFile", "System", "PathTable", "SearchResult", "Connections"} <= set(records)
    assert "search.search_channels" in records


class Light(enum.Enum):
    RED = 1
    GREEN = 2


def test_state_diagram() -> None:
    table = {
        (None, "start"): Light.RED,
        (Light.RED, "go"): Light.GREEN,
        (Light.RED, "wait"): Light.RED,
        (Light.GREEN, "stop"): Light.RED,
    }
    svg = diagrams.state_diagram(table, "a light")
    assert texts(svg).count("RED") == texts(svg).count("GREEN") == 1
    assert {"new", "start", "go", "wait"} <= set(texts(svg))
    assert "<title>a light</title>" in svg


def test_markup_in_names_is_escaped() -> None:
    svg = draw_graph(
        {"a": ("<b>",), "b": ("b",)}, [Edge(source="a", target="b", label="x < y")], title="&"
    )
    assert "<b>" in texts(svg)
    assert "x < y" in texts(svg)


def test_edges_keep_clear_of_nodes_they_pass() -> None:
    nodes = {name: (name,) for name in "abc"}
    edges = [Edge(source=s, target=t) for s, t in ("ab", "bc", "ac")]
    root = ElementTree.fromstring(draw_graph(nodes, edges, title="three"))
    middle = [box for box in root.iter(f"{SVG}rect") if box.get("rx")][1]
    left = float(middle.attrib["x"])
    right = left + float(middle.attrib["width"])
    passing = max((p.attrib["d"] for p in root.findall(f"{SVG}path")), key=len)
    x = float(re.findall(r"[ ,](\d+) \d+V", passing)[0])
    assert not left < x < right
