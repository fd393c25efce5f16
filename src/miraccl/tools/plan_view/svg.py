"""Plain SVG of a machine: no script, no network, all text escaped.

``machine_svg`` is used alone (``--svg``) and inside the page, whose script finds devices and links
by class and ``data-`` attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from miraccl.tools.plan_view.placement import Box, Drawing, DrawnLink, Point, draw_system
from miraccl.topo.records import LOC_BW, LinkType
from miraccl.topo.system_json import system_from_json

COLORS = {
    LinkType.NVL: "#2b8a3e",
    LinkType.C2C: "#0c8599",
    LinkType.PCI: "#4c6ef5",
    LinkType.SYS: "#868e96",
    LinkType.NET: "#e8590c",
    LinkType.LOC: "#adb5bd",
}
NAMES = {
    LinkType.NVL: "NVLink",
    LinkType.C2C: "C2C",
    LinkType.PCI: "PCI",
    LinkType.SYS: "between CPUs",
    LinkType.NET: "network",
    LinkType.LOC: "bridge",
}
#: units of the drawing
CORNER_RADIUS = 7.0
STYLE = """
.box rect{fill:#fff;stroke:#495057;stroke-width:1.2;rx:6}
.box text{font:600 11.5px system-ui,sans-serif;fill:#212529;text-anchor:middle}
.box text.sub{font:10px system-ui,sans-serif;fill:#495057}.box text.tight{font-size:9.5px}
.CPU rect{fill:#e7f5ff;stroke:#1971c2}.PCI rect{fill:#edf2ff;stroke:#4c6ef5}
.GPU rect{fill:#ebfbee;stroke:#2b8a3e}
.NIC rect{fill:#fff4e6;stroke:#e8590c}.NET rect{fill:#fff9db;stroke:#e67700}
.NVS rect{fill:#d3f9d8;stroke:#2b8a3e}
.wire path{fill:none;stroke-linejoin:round}
.wire text,.legend text{font:9.5px system-ui,sans-serif;paint-order:stroke;stroke:#fff;
stroke-width:3px;stroke-linejoin:round}
.legend text{font-size:11px;fill:#343a40}.title{font:600 15px system-ui,sans-serif;fill:#212529}
"""


def render_svg(document: Mapping[str, Any]) -> str:
    """Return a standalone picture of the machine of a plan (its JSON)."""
    drawing = draw_system(system_from_json(document["system"]))
    comm = document["comm"]
    title = (
        f"{document.get('topology') or 'this machine'}: {document['nodes']} x"
        f" {document['gpus_per_node']} GPUs, {comm['nChannels']} channels"
    )
    return machine_svg(drawing, title=title, standalone=True)


def machine_svg(drawing: Drawing, *, title: str, standalone: bool) -> str:
    """Return the SVG of a drawing; ``standalone`` adds title, background and legend."""
    head, foot = (34.0, 30.0) if standalone else (0.0, 0.0)
    width, height = drawing.width, drawing.height + head + foot
    parts = [
        (
            '<svg xmlns="http://www.w3.org/2000/svg" id="machine" viewBox="0 0'
            f' {_n(width)} {_n(height)}" width="{_n(width)}" height="{_n(height)}" role="img"'
            f' aria-label="{escape(title)}">'
        ),
        f"<style>{STYLE}</style>",
    ]
    if standalone:
        parts.append(f'<rect width="{_n(width)}" height="{_n(height)}" fill="#fff"/>')
        parts.append(f'<text class="title" x="16" y="24">{escape(title)}</text>')
        parts.append(_legend(drawing, height - 12))
    parts.append(f'<g transform="translate(0 {_n(head)})">')
    parts += [_render_link(wire) for wire in drawing.links]
    parts += [_render_box(box) for box in drawing.boxes]
    parts.append('<g id="overlay"></g></g></svg>')
    return "\n".join(parts)


def _legend(drawing: Drawing, y: float) -> str:
    parts = ['<g class="legend">']
    x = 16.0
    for kind in sorted({wire.type for wire in drawing.links}):
        parts.append(
            f'<path d="M{_n(x)} {_n(y - 4)}h22" stroke="{COLORS[kind]}" stroke-width="3"/>'
        )
        parts.append(f'<text x="{_n(x + 27)}" y="{_n(y)}">{NAMES[kind]}</text>')
        x += 40 + 7 * len(NAMES[kind])
    parts.append(f'<text x="{_n(x)}" y="{_n(y)}">numbers are GB/s per direction</text></g>')
    return "".join(parts)


def _render_box(box: Box) -> str:
    two = bool(box.subtitle) and box.h >= 30
    title = box.title if two or not box.subtitle else f"{box.title} {box.subtitle}"
    tight = ' class="tight"' if len(title) > 11 and box.w < 100 else ""
    lines = [
        f'<text{tight} x="{_n(box.x)}" y="{_n(box.y + (-2 if two else 4))}">{escape(title)}</text>'
    ]
    if two:
        lines.append(
            f'<text class="sub" x="{_n(box.x)}" y="{_n(box.y + 12)}">{escape(box.subtitle)}</text>'
        )
    return (
        f'<g class="box {box.kind.name}" data-node="{box.index}"><rect x="{_n(box.left)}"'
        f' y="{_n(box.top)}" width="{_n(box.w)}" height="{_n(box.h)}" rx="6"/>{"".join(lines)}</g>'
    )


def _render_link(wire: DrawnLink) -> str:
    color = COLORS[wire.type]
    virtual = wire.bw >= LOC_BW
    width = 1.2 + (0.0 if virtual else min(3.2, wire.bw / 110))
    dash = ' stroke-dasharray="5 4"' if wire.type == LinkType.LOC else ""
    label = ""
    if wire.label and not virtual:
        x, y = wire.label
        anchor = "start" if x > wire.points[-1][0] else "middle"
        label = (
            f'<text x="{_n(x)}" y="{_n(y)}" fill="{color}"'
            f' text-anchor="{anchor}">{wire.bw:.4g}</text>'
        )
    return (
        f'<g class="wire {wire.type.name}" data-a="{wire.source}" data-b="{wire.target}"><path'
        f' d="{path_data(wire.points, curved=wire.curved)}" stroke="{color}"'
        f' stroke-width="{_n(width)}"{dash}/>{label}</g>'
    )


def path_data(points: Sequence[Point], *, curved: bool) -> str:
    """Return an SVG path through ``points`` with rounded corners.

    Four ``curved`` points give one smooth curve.
    """
    if curved and len(points) == 4:
        (x0, y0), (x1, y1), (x2, y2), (x3, y3) = points
        return f"M{_n(x0)} {_n(y0)}C{_n(x1)} {_n(y1)} {_n(x2)} {_n(y2)} {_n(x3)} {_n(y3)}"
    parts = [f"M{_n(points[0][0])} {_n(points[0][1])}"]
    for before, corner, after in zip(points, points[1:], points[2:]):
        enter, leave = (
            _towards(corner, before, CORNER_RADIUS),
            _towards(corner, after, CORNER_RADIUS),
        )
        turn = f"Q{_n(corner[0])} {_n(corner[1])} {_n(leave[0])} {_n(leave[1])}"
        parts.append(f"L{_n(enter[0])} {_n(enter[1])}{turn}")
    parts.append(f"L{_n(points[-1][0])} {_n(points[-1][1])}")
    return "".join(parts)


def _towards(start: Point, end: Point, distance: float) -> Point:
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = (dx * dx + dy * dy) ** 0.5
    if not length:
        return start
    step = min(distance, length / 2) / length
    return start[0] + dx * step, start[1] + dy * step


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
