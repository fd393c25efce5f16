"""Line charts on logarithmic axes as SVG.

No drawing library is used, so the files do not depend on its version.
"""

from __future__ import annotations

import math

_WIDTH, _HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 40, 60
_COLORS = ("#1a7f64", "#888888", "#b5541c")


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: dict[str, list[tuple[float, float]]],
    x_ticks: dict[float, str],
) -> str:
    """An SVG of ``series`` (name -> points); both axes are logarithmic."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))

    def px(x: float) -> float:
        share = (math.log(x) - math.log(min(xs))) / (math.log(max(xs)) - math.log(min(xs)))
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def py(y: float) -> float:
        return _TOP + (high - math.log10(y)) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    floor = _HEIGHT - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{title}</text>',
    ]
    for power in range(low, high + 1):
        y = py(10**power)
        parts.append(_line(_LEFT, y, _WIDTH - _RIGHT, y, "#dddddd"))
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10**power:g}</text>'
        )
    for x, label in x_ticks.items():
        parts.append(_line(px(x), _TOP, px(x), floor, "#eeeeee"))
        parts.append(f'<text x="{px(x):.1f}" y="{floor + 18}" text-anchor="middle">{label}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{x_label}</text>')
    turn = f"translate(18 {(_TOP + floor) / 2:.1f}) rotate(-90)"
    parts.append(f'<text transform="{turn}" text-anchor="middle">{y_label}</text>')
    for (name, points), color in zip(series.items(), _COLORS, strict=False):
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        parts += [
            f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3.5" fill="{color}"/>' for x, y in points
        ]
        x, y = points[0]
        place = f'x="{px(x) + 8:.1f}" y="{py(y) - 10:.1f}"'
        parts.append(f'<text {place} fill="{color}" font-weight="bold">{name} {y:.1f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}"/>'
