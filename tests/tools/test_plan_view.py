"""Pictures of plans: no overlaps, no markup from files, and the page in a browser."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from miraccl.graph.plan import PlanRequest, make_plan
from miraccl.graph.plan_bound import bound_section
from miraccl.graph.plan_explain import explain_plan
from miraccl.graph.plan_json import plan_to_json
from miraccl.tools.plan_view import render_page, render_svg
from miraccl.tools.plan_view.page import embedded
from miraccl.tools.plan_view.placement import draw_system
from miraccl.topo.explain import PathChangeLog
from miraccl.topo.records import NodeType
from miraccl.topo.system_json import system_from_json
from tests.graph.golden import all_cases
from tests.topo.golden import TOPOLOGIES, GoldenCase

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@cache
def document(name: str, nodes: int = 1) -> dict[str, Any]:
    notes = PathChangeLog()
    made = make_plan(TOPOLOGIES / f"{name}.xml", PlanRequest.read({}, nodes=nodes), recorder=notes)
    return {
        **plan_to_json(made),
        "bound": bound_section(made),
        "explain": explain_plan(made, notes),
    }


def _one_case_per_machine() -> list[Any]:
    machines = {(case.topology.name, case.options.gpus): case for case in all_cases()}
    return [pytest.param(case, id=case.name) for case in machines.values()]


@pytest.mark.golden
@pytest.mark.parametrize("case", _one_case_per_machine())
def test_boxes_do_not_overlap(case: GoldenCase) -> None:
    drawing = draw_system(system_from_json(case.load()["system"]))
    boxes = sorted(drawing.boxes, key=lambda box: box.left)
    for i, a in enumerate(boxes):
        assert 0 <= a.left < a.right <= drawing.width, a
        assert 0 <= a.top < a.bottom <= drawing.height, a
        for b in boxes[i + 1 :]:
            if b.left >= a.right:
                break
            assert b.top >= a.bottom or b.bottom <= a.top, f"{a.title} overlaps {b.title}"


@pytest.mark.parametrize(
    "name",
    ["nvidia-dgxh100", "nvidia-dgx1v", "nvidia-hgx-b300", "nvidia-gb200-4gpu", "pcie8-bcm-pcilink"],
)
def test_every_link_is_drawn_once(name: str) -> None:
    system = system_from_json(document(name)["system"])
    drawing = draw_system(system)
    links = {
        (min(i, link.target), max(i, link.target), link.type)
        for i, node in enumerate(system.nodes)
        for link in node.links
    }
    assert sorted(
        (min(w.source, w.target), max(w.source, w.target), w.type) for w in drawing.links
    ) == sorted(links)


def test_nvlinks_of_one_height_do_not_overlap() -> None:
    drawing = draw_system(system_from_json(document("nvidia-dgx1v")["system"]))
    boxes = {box.index: box for box in drawing.boxes}
    spans: dict[float, list[tuple[float, float]]] = {}
    for wire in drawing.links:
        if boxes[wire.source].kind == boxes[wire.target].kind == NodeType.GPU:
            (left, _), (_, level), (right, _) = wire.points[0], wire.points[1], wire.points[3]
            spans.setdefault(level, []).append((left, right))
    assert len(spans) > 1
    for row in spans.values():
        row.sort()
        assert all(a[1] < b[0] for a, b in itertools.pairwise(row))


def test_svg_is_well_formed_and_labelled() -> None:
    text = render_svg(document("nvidia-dgxh100"))
    root = ElementTree.fromstring(text)
    words = " ".join(root.itertext())
    for name in ("GPU 7", "NET 0", "CPU 1", "NVSwitch", "Intel Sapphire Rapids", "370.8"):
        assert name in words
    assert "script" not in {element.tag.split("}")[-1] for element in root.iter()}


EVIL = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>\"&<b>"


def poisoned() -> dict[str, Any]:
    """Return a plan in which every text from a file or the environment is an injection."""
    plan = json.loads(json.dumps(document("pcie8-2s-2nic")))
    plan["topology"] = EVIL
    plan["env"] = {"NCCL_ALGO": EVIL}
    for sentences in plan["explain"]["sentences"].values():
        sentences.append(EVIL)
    for path in plan["explain"]["paths"]:
        path["bw_reason"] = path["type_reason"] = EVIL
    for graph in plan["explain"]["search"][0]:
        graph["sentences"].append(EVIL)
    return dict(plan)


def test_nothing_from_a_file_becomes_markup() -> None:
    page = render_page(poisoned())
    assert "<img" not in page
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert "Content-Security-Policy" in page
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert "<img" not in render_svg(poisoned())


def test_embedded_data_survives() -> None:
    value = {"a": EVIL, "b": "\u2028\u2029é", "c": [1.5, None]}
    text = embedded(value)
    assert not set("<>&") & set(text)
    assert text.isascii()
    assert json.loads(text) == value


def test_page_without_reasons() -> None:
    plain = {
        key: value
        for key, value in document("nvidia-dgxh100").items()
        if key not in ("explain", "bound")
    }
    assert "<svg" in render_page(plain)


# In a browser


def in_browser(page: str, script: str, folder: Path, *more: str) -> Any:
    """Evaluate ``script`` in the page and return its value; the page must not raise."""
    watch = (
        "<script>window.failures=[];"
        "window.addEventListener('error',e=>window.failures.push(e.message));</script>"
    )
    probe = (
        "<script>(()=>{let value;try{value=" + script + "}catch(e){window.failures.push(String(e))}"
        "document.body.dataset.result=JSON.stringify("
        "{value:value,errors:window.failures,pwned:window.pwned||0})})()</script>"
    )
    file = folder / "page.html"
    file.write_text(
        page.replace("<head>", "<head>" + watch, 1).replace("</body>", probe + "</body>"),
        encoding="utf-8",
    )
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ]
    flags += [
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}",
    ]
    command = [
        str(CHROMIUM),
        *flags,
        *more,
        "--virtual-time-budget=2000",
        "--dump-dom",
        file.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r'data-result="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    result = json.loads(html.unescape(found[1]))
    assert result["errors"] == []
    assert result["pwned"] == 0
    return result["value"]


TOUR = """(() => {
  const click = (e) => e.dispatchEvent(new MouseEvent("click", {bubbles: true}));
  const text = (id) => document.getElementById(id).textContent;
  const buttons = (id) => [...document.querySelectorAll("#" + id + " button")];
  const out = {ready: document.body.dataset.ready, title: document.title, cards: text("cards")};
  out.graphs = buttons("graphs").map((b) => b.textContent);
  click(buttons("channels").find((b) => b.textContent === "all"));
  out.all = document.querySelectorAll("#overlay path").length;
  out.ring = text("details");
  out.summary = [...document.querySelectorAll("#details .search > p")].length;
  click(buttons("channels").find((b) => b.textContent === "none"));
  out.none = document.querySelectorAll("#overlay path").length;
  const named = (name) => [...document.querySelectorAll(".box")]
    .find((b) => b.textContent.startsWith(name));
  const box = (name) =>
    document.querySelector('.box[data-node="' + named(name).dataset.node + '"]');
  click(box("GPU 0"));
  click(box("NET 1"));
  out.path = text("details");
  out.wires = document.querySelectorAll(".wire.onpath").length;
  click(box("CPU 0"));
  out.unpicked = document.querySelectorAll(".wire.onpath").length;
  out.collectives = buttons("collectives").map((b) => b.textContent);
  buttons("collectives").map((b) => b.textContent).forEach((name) =>
    ["time", "algorithm bandwidth", "bus bandwidth"].forEach((axis) => {
      click(buttons("collectives").find((b) => b.textContent === name));
      click(buttons("axes").find((b) => b.textContent === axis));
    }));
  out.curves = document.querySelectorAll("#chart .curve").length;
  click(buttons("collectives").find((b) => b.textContent === "AllReduce"));
  out.choices = [...document.querySelectorAll("#choices tr.choice")].map((row) =>
    [...row.children].slice(0, 2).map((cell) => cell.textContent).join(": "));
  out.reasons = document.querySelectorAll("#choices tr.reason").length;
  out.marks = document.querySelectorAll("#chart .mark").length;
  click(buttons("protocols").find((b) => b.textContent === "LL"));
  out.without = [...document.querySelectorAll("#legend tr.hidden")].map((r) => r.textContent);
  click(buttons("protocols").find((b) => b.textContent === "LL"));
  out.bounds = text("bounds");
  out.folded = [...document.querySelectorAll("details")].filter((d) => !d.open).length;
  const lists = [...document.querySelectorAll("#why > ul")];
  out.lists = Math.max(...lists.map((list) => list.children.length));
  out.lines = text("ranks").split("\\n").length;
  out.why = text("why").length;
  const shape = (name, last) => {
    const b = buttons("shapes").find((b) => b.textContent === name);
    if (!b) return null;
    click(b);
    if (last) click(buttons("shape-channels").pop());
    const svg = document.querySelector("#shape svg");
    return {
      nodes: svg.querySelectorAll("rect.node").length,
      circles: svg.querySelectorAll("circle").length,
      edges: svg.querySelectorAll(".edge").length,
      text: document.querySelector("#shape p").textContent,
      labels: [...svg.querySelectorAll("text")].map((t) => t.textContent).join(" "),
    };
  };
  out.ring_shape = shape("ring", false);
  out.tree_shape = shape("tree", true);
  out.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  out.images = document.querySelectorAll("img").length;
  return out;
})()"""


@needs_chromium
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    seen = in_browser(render_page(document("nvidia-dgxh100", 2)), TOUR, tmp_path)
    assert seen["ready"] == "yes"
    assert seen["title"] == "nvidia-dgxh100.xml, 2 x 8 GPUs"
    assert seen["graphs"] == ["ring", "tree", "nvls"]
    assert seen["all"] == 8 * (7 + 2)  # seven hops and two nets for each of eight rings
    assert seen["none"] == 0
    assert "net 0 → 0 → 7" in seen["ring"]
    assert "PXN, 48 GB/s" in seen["path"]
    assert seen["wires"] == 5
    assert seen["unpicked"] == 0
    assert len(seen["collectives"]) == 5
    assert seen["curves"] == 7
    assert seen["choices"] == [
        "8 B to 128 KiB: Tree/LL",
        "512 KiB: Tree/LL128",
        "2 MiB to 8 GiB: NVLSTree/Simple",
    ]
    assert seen["reasons"] == 3
    assert seen["why"] > 1000
    assert "16ranks" in seen["cards"]
    assert seen["overflow"] == 0


@needs_chromium
def test_protocols_have_marks_and_can_be_hidden(tmp_path: Path) -> None:
    seen = in_browser(render_page(document("nvidia-dgxh100", 2)), TOUR, tmp_path)
    assert seen["marks"] > 7 * 5
    assert [text.split("/")[1][:2] for text in seen["without"]] == ["LL", "LL"]
    assert not any("LL128" in text for text in seen["without"])


@needs_chromium
def test_ceiling_and_plan_are_explained(tmp_path: Path) -> None:
    plan = document("nvidia-dgxh100", 2)
    seen = in_browser(render_page(plan), TOUR, tmp_path)
    assert "GB/s ceiling is the bus bandwidth that no all-reduce" in seen["bounds"]
    assert "GB/s this plan is the bus bandwidth that the model predicts" in seen["bounds"]
    assert "times 1.88 for an all-reduce of 16 ranks" in seen["bounds"]


@needs_chromium
def test_long_texts_are_folded(tmp_path: Path) -> None:
    seen = in_browser(render_page(document("nvidia-dgxh100", 2)), TOUR, tmp_path)
    assert seen["summary"] == 3
    assert seen["lists"] == 3
    assert seen["folded"] >= 8
    for report in document("nvidia-dgxh100", 2)["explain"]["search"][0]:
        assert len(report["summary"]) <= 3


@needs_chromium
@pytest.mark.parametrize(
    ("name", "nodes", "gpus"), [("nvidia-dgxh100", 16, 8), ("nvidia-gb200-4gpu", 16, 4)]
)
def test_rings_and_trees_over_nodes_are_drawn(
    name: str, nodes: int, gpus: int, tmp_path: Path
) -> None:
    seen = in_browser(render_page(document(name, nodes)), TOUR, tmp_path)
    ring, tree = seen["ring_shape"], seen["tree_shape"]
    assert (ring["nodes"], ring["circles"], ring["edges"]) == (nodes, nodes * gpus, nodes)
    assert ring["text"].startswith("Ring of channel 0, equal to channel")
    assert "node 15" in ring["labels"]
    assert (tree["circles"], tree["edges"]) == (nodes, nodes - 1)
    assert tree["text"].startswith("Tree of channel 15")
    assert seen["overflow"] == 0


@needs_chromium
def test_edges_of_a_tree_name_their_ranks(tmp_path: Path) -> None:
    seen = in_browser(render_page(document("nvidia-dgxh100", 2)), TOUR, tmp_path)
    # Rank 15 of node 1 is the parent of rank 7 of node 0.
    assert seen["tree_shape"]["labels"] == "7>15 0 1"


@needs_chromium
def test_one_node_has_a_ring_of_gpus(tmp_path: Path) -> None:
    seen = in_browser(render_page(document("nvidia-gb200-4gpu")), TOUR, tmp_path)
    assert seen["ring_shape"]["labels"] == "GPUs 0 1 2 3"
    assert seen["tree_shape"] is None


@needs_chromium
def test_narrow_windows_do_not_scroll_sideways(tmp_path: Path) -> None:
    page = render_page(document("nvidia-dgxh100", 4))
    seen = in_browser(page, TOUR, tmp_path, "--window-size=500,900")
    assert seen["overflow"] == 0


def test_print_style_hides_controls_and_shows_all() -> None:
    css = render_page(document("nvidia-dgxh100")).partition("@media print")[2]
    assert 'button:not([aria-pressed="true"])' in css
    assert "max-height: none" in css


@needs_chromium
def test_injections_stay_text_in_a_browser(tmp_path: Path) -> None:
    seen = in_browser(render_page(poisoned()), TOUR, tmp_path)
    assert seen["images"] == 0
    assert "<img" in seen["path"]
    assert EVIL in seen["title"]
