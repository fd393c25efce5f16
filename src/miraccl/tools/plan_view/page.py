"""Self-contained HTML page of a plan: no network, no other files.

Content of topology files is treated as untrusted data: text is escaped, the plan is embedded as
JSON without the character ``<``, the script builds the page with ``textContent`` only, and the
page's Content-Security-Policy forbids loading anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from miraccl.tools.plan_view.placement import Drawing, draw_system
from miraccl.tools.plan_view.svg import machine_svg
from miraccl.topo.system_json import system_from_json

MAX_RANKS = 512
"""Rings and trees over more ranks are omitted from the page; the plan's JSON has them."""

MAX_TRIES = 200
"""Number of listed search walks; after it only improving ones are listed."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<header><h1>{title}</h1><p id="settings"></p><div id="cards"></div><div id="bounds"></div></header>
<main>
<section id="machine-section">
<h2>Machine and channels</h2>
<div class="bar"><span id="graphs" class="group"></span><span id="channels" class="group"></span>
<span class="group right"><button id="fit" aria-pressed="true">fit</button>
<button id="clear">clear</button></span></div>
<div class="columns"><div id="canvas">{svg}</div><aside id="details"></aside></div>
</section>
<section><h2>Times and choices</h2>
<div class="bar"><span id="collectives" class="group"></span>
<span id="protocols" class="group"></span><span id="axes" class="group right"></span></div>
<div class="columns"><div id="chart"></div><aside id="legend"></aside></div>
<div id="choices"></div></section>
<section><h2>Rings and trees over the nodes</h2>
<div class="bar"><span id="shapes" class="group"></span>
<span id="shape-channels" class="group"></span></div>
<div id="shape"></div><div id="ranks"></div></section>
<section><h2>Why</h2><div id="why"></div></section>
</main>
<script type="application/json" id="plan">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def render_page(document: Mapping[str, Any]) -> str:
    """Return the page of a plan (its JSON); with the key ``explain`` it shows reasons and time
    curves.
    """
    system = system_from_json(document["system"])
    drawing = draw_system(system)
    title = (
        f"{document.get('topology') or 'a system'}, {document['nodes']} x"
        f" {document['gpus_per_node']} GPUs"
    )
    data = {
        **{
            key: value for key, value in document.items() if key not in ("paths", "comm", "explain")
        },
        "explain": _small_explanation(document.get("explain")),
        "comm": _small_comm(document["comm"], document["nranks"]),
        "names": [node.name for node in system.nodes],
        "drawing": _positions(drawing),
    }
    return _PAGE.format(
        policy=escape(_POLICY),
        title=escape(title),
        css=_resource("page.css"),
        svg=machine_svg(drawing, title=title, standalone=False),
        data=embedded(data),
        script=_resource("page.js"),
    )


def embedded(value: Any) -> str:
    """Return JSON that is safe inside a ``script`` element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _small_comm(comm: Mapping[str, Any], nranks: int) -> dict[str, Any]:
    if nranks <= MAX_RANKS:
        return dict(comm)
    return {key: value for key, value in comm.items() if not isinstance(value, list | dict)}


def _small_explanation(explain: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the explanation with the first domain's searches and at most ``MAX_TRIES`` fruitless
    tries.
    """
    if not explain:
        return None
    searches = [
        {
            **graph,
            "tries": [t for i, t in enumerate(graph["tries"]) if i < MAX_TRIES or t["improved"]],
            "walks": len(graph["tries"]),
        }
        for graph in explain["search"][0]
    ]
    return {**explain, "search": [searches]}


def _positions(drawing: Drawing) -> dict[str, Any]:
    return {
        "boxes": [
            {"kind": b.kind.name, "x": b.x, "y": b.y, "w": b.w, "h": b.h, "title": b.title}
            for b in drawing.boxes
        ],
        "overlayTop": drawing.overlay_top,
        "overlayBottom": drawing.overlay_bottom,
        "width": drawing.width,
    }


def _resource(name: str) -> str:
    return files("miraccl.tools.plan_view").joinpath(name).read_text(encoding="utf-8")
