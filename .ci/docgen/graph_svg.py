"""Layered drawings of directed graphs as SVG.

No drawing library is used, so the files do not depend on its version. Edges point down; every node
is below all its predecessors, except at the end of an edge that closes a cycle. An edge that passes
a row takes a column of its own there, and a label takes room in a row between its ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

_CHAR, _LINE = 7.4, 17
_LABEL_CHAR = 6.4
_PAD_X, _PAD_Y = 12, 9
_GAP_X = 22
_MARGIN = 16
_PASSED = 14
"""Width of an edge where it passes a row."""
_SWEEPS = 8


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A directed edge with an optional label."""

    source: str
    target: str
    label: str = ""


@dataclass(kw_only=True)
class _Cell:
    """Room in a row: a node, a label or an edge that passes."""

    row: int
    width: float
    height: float
    lines: Sequence[str] = ()
    label: str = ""
    x: float = 0.0
    y: float = 0.0
    above: list[_Cell] = field(default_factory=list)
    below: list[_Cell] = field(default_factory=list)


def draw_graph(nodes: Mapping[str, Sequence[str]], edges: Sequence[Edge], *, title: str) -> str:
    """Draw ``nodes`` (name -> lines of text, the first one bold) and ``edges``, top to bottom."""
    levels = _levels(list(nodes), edges)
    step = 2 if any(edge.label for edge in edges) else 1
    cells = {
        name: _Cell(
            row=step * levels[name],
            width=max(len(line) for line in lines) * _CHAR + 2 * _PAD_X,
            height=len(lines) * _LINE + 2 * _PAD_Y - 3,
            lines=lines,
        )
        for name, lines in nodes.items()
    }
    rows: list[list[_Cell]] = [[] for _ in range(max(c.row for c in cells.values()) + 1)]
    for cell in cells.values():
        rows[cell.row].append(cell)
    routes = [
        (edge, _route(edge, cells, rows, step))
        for edge in edges
        if levels[edge.source] < levels[edge.target]
    ]
    _order(rows)
    width, height = _place(rows)
    loops = [edge for edge in edges if edge.source == edge.target]
    back = [edge for edge in edges if levels[edge.target] < levels[edge.source]]
    width += 24 * bool(back) + max((40 + len(e.label) * _LABEL_CHAR for e in loops), default=0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}"'
        f' width="{width:.0f}" font-family="sans-serif" font-size="13" role="img">',
        f"<title>{escape(title)}</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
        ' markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#5f6b7a"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
    ]
    parts += [_draw_route(route) for _, route in routes]
    parts += [_draw_back(cells[edge.source], cells[edge.target]) for edge in back]
    parts += [_draw_loop(cells[edge.source], edge.label) for edge in loops]
    parts += [_draw_cell(cell) for row in rows for cell in row]
    return "\n".join([*(part for part in parts if part), "</svg>"]) + "\n"


def _levels(names: Sequence[str], edges: Sequence[Edge]) -> dict[str, int]:
    """Return the longest distance of each node from a source; edges against the order count not."""
    order = {name: position for position, name in enumerate(names)}
    level = dict.fromkeys(names, 0)
    for name in names:
        for edge in edges:
            if edge.source == name and order[edge.target] > order[name]:
                level[edge.target] = max(level[edge.target], level[name] + 1)
    return level


def _route(
    edge: Edge, cells: Mapping[str, _Cell], rows: list[list[_Cell]], step: int
) -> list[_Cell]:
    """Return the cells of an edge from end to end, with new ones in the rows between."""
    source, target = cells[edge.source], cells[edge.target]
    route = [source]
    # Labels are in odd rows; the middle one is far from both nodes.
    labelled = (source.row + target.row) // 2 // step * step + step - 1 if edge.label else -1
    for row in range(source.row + 1, target.row):
        label = edge.label if row == labelled else ""
        width = len(label) * _LABEL_CHAR + 8 if label else _PASSED
        route.append(_Cell(row=row, width=width, height=_LINE if label else 0, label=label))
        rows[row].append(route[-1])
    route.append(target)
    for upper, lower in itertools.pairwise(route):
        upper.below.append(lower)
        lower.above.append(upper)
    return route


def _order(rows: list[list[_Cell]]) -> None:
    """Sort each row by the mean position of the neighbours, downwards and upwards in turn."""
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            position = {id(cell): i for r in rows for i, cell in enumerate(r)}
            scale = {id(cell): max(1, len(r) - 1) for r in rows for cell in r}

            def mean(
                cell: _Cell,
                position: dict[int, int] = position,
                scale: dict[int, int] = scale,
                down: bool = down,
            ) -> float:
                near = cell.above if down else cell.below
                if not near:
                    return position[id(cell)] / scale[id(cell)]
                return sum(position[id(n)] / scale[id(n)] for n in near) / len(near)

            row.sort(key=mean)


def _place(rows: list[list[_Cell]]) -> tuple[float, float]:
    """Set the positions of all cells and return the size of the drawing."""
    widths = [sum(cell.width + _GAP_X for cell in row) - _GAP_X for row in rows]
    total = max(widths)
    y = float(_MARGIN)
    for row, width in zip(rows, widths):
        spread = min(_GAP_X * 2.0, (total - width) / max(1, len(row)))
        x = _MARGIN + (total - width - spread * (len(row) - 1)) / 2
        height = max(cell.height for cell in row)
        for cell in row:
            if not cell.lines and not cell.label:
                cell.height = height  # an edge passes the whole row straight
            cell.x, cell.y = x + cell.width / 2, y + (height - cell.height) / 2
            x += cell.width + _GAP_X + spread
        y += height + (20 if any(cell.label for r in rows for cell in r) else 34)
    return total + 2 * _MARGIN, max(c.y + c.height for c in rows[-1]) + _MARGIN


_STYLE = 'fill="none" stroke="#5f6b7a" stroke-width="1.2" marker-end="url(#tip)"'


def _draw_route(route: Sequence[_Cell]) -> str:
    path = f"M{route[0].x:.0f} {route[0].y + route[0].height:.0f}"
    for upper, lower in itertools.pairwise(route):
        y1, y2 = upper.y + upper.height, lower.y - (1 if lower is route[-1] else 0)
        bend = (y2 - y1) / 2
        path += (
            f"C{upper.x:.0f} {y1 + bend:.0f} {lower.x:.0f} {y2 - bend:.0f} {lower.x:.0f} {y2:.0f}"
        )
        if lower is not route[-1]:
            path += f"V{lower.y + lower.height:.0f}"
    return f'<path d="{path}" {_STYLE}/>'


def _draw_back(source: _Cell, target: _Cell) -> str:
    x1, x2 = source.x + source.width / 2, target.x + target.width / 2
    y1, y2 = source.y + source.height / 2, target.y + target.height / 2
    right = max(x1, x2) + 26
    path = f"M{x1:.0f} {y1:.0f}C{right:.0f} {y1:.0f} {right:.0f} {y2:.0f} {x2:.0f} {y2:.0f}"
    return f'<path d="{path}" {_STYLE}/>'


def _draw_loop(cell: _Cell, label: str) -> str:
    x, y = cell.x + cell.width / 2, cell.y + cell.height / 2
    return (
        f'<path d="M{x:.0f} {y - 7:.0f}c30 -14 30 28 0 14" {_STYLE}/>'
        f'<text x="{x + 28:.0f}" y="{y + 4:.0f}" font-size="12" fill="#7a3d12">'
        f"{escape(label)}</text>"
    )


def _draw_cell(cell: _Cell) -> str:
    if cell.label:
        return (
            f'<text x="{cell.x:.0f}" y="{cell.y + 13:.0f}" text-anchor="middle" font-size="12"'
            f' fill="#7a3d12" paint-order="stroke" stroke="#ffffff" stroke-width="4">'
            f"{escape(cell.label)}</text>"
        )
    if not cell.lines:
        return ""
    parts = [
        f'<rect x="{cell.x - cell.width / 2:.0f}" y="{cell.y:.0f}" width="{cell.width:.0f}"'
        f' height="{cell.height:.0f}" rx="6" fill="#eef4f1" stroke="#1a7f64"/>'
    ]
    for number, line in enumerate(cell.lines):
        weight = ' font-weight="600"' if number == 0 else ' fill="#444444"'
        parts.append(
            f'<text x="{cell.x:.0f}" y="{cell.y + _PAD_Y + 12 + number * _LINE:.0f}"'
            f' text-anchor="middle"{weight}>{escape(line)}</text>'
        )
    return "".join(parts)
