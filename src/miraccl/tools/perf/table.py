"""The table of nccl-tests (``src/common.cu``, ``TimeTest``): its columns in its order, then the peer's and the plan's."""

from __future__ import annotations

from miraccl.tools.perf.spec import Row

_LEFT = "{:>12}  {:>12}  {:>11}  {:>10}  {:>4}"
_SIDE = "  {:>8}  {:>6}  {:>6}  {:>6}"
_PEER = "  {:>8}  {:>5}"


def format_us(value: float) -> str:
    """Three or four significant digits in eight columns."""
    for limit, digits in ((10.0, 3), (100.0, 2), (10000.0, 1)):
        if value < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"


def format_speed(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def header(peer: str) -> list[str]:
    """The lines above the numbers; ``peer`` is empty without a comparison."""
    left = [("size", "count", "type", "redop", "root"), ("(B)", "(elements)", "", "", "")]
    side = [("time", "algbw", "busbw", "#wrong"), ("(us)", "(GB/s)", "(GB/s)", "")]
    versus = [(peer, "ratio"), ("(us)", "")]
    width = len(_SIDE.format(*side[0])) + (len(_PEER.format(*versus[0])) if peer else 0)
    lines = ["#" + " " * len(_LEFT.format(*left[0])) + "out-of-place".center(width) + "in-place".center(width)]
    for number in (0, 1):
        part = _SIDE.format(*side[number]) + (_PEER.format(*versus[number]) if peer else "")
        chosen = "  algorithm" if number == 0 else ""
        lines.append("#" + _LEFT.format(*left[number]) + part + part + chosen)
    return [line.rstrip() for line in lines]


def line(out_of_place: Row | None, in_place: Row | None, peer: str) -> str:
    """One size. A form that the library does not have is N/A, as in nccl-tests."""
    row = out_of_place or in_place
    if row is None:
        raise ValueError("a line needs at least one form")
    text = " " + _LEFT.format(row.bytes, row.count, row.dtype, row.redop, row.root)
    for side in (out_of_place, in_place):
        text += _side(side) + (_versus(side) if peer else "")
    return f"{text}  {_chosen(out_of_place, in_place)}".rstrip()


def _side(row: Row | None) -> str:
    if row is None:
        return _SIDE.format("N/A", "N/A", "N/A", "N/A")
    wrong = "N/A" if row.wrong is None else str(row.wrong)
    return _SIDE.format(format_us(row.time_us), format_speed(row.algbw), format_speed(row.busbw), wrong)


def _versus(row: Row | None) -> str:
    if row is None or row.peer_time_us is None or row.ratio is None:
        return _PEER.format("N/A", "N/A")
    return _PEER.format(format_us(row.peer_time_us), f"{row.ratio:.2f}")


def _chosen(*rows: Row | None) -> str:
    """``ring/simple x2``; both forms if they differ."""
    names = [f"{r.algo}/{r.proto} x{r.channels}" if r.proto else r.algo for r in rows if r is not None and r.algo]
    return " | ".join(dict.fromkeys(names))


def footer(rows: list[Row], peer: str) -> list[str]:
    """The verdict and the averages."""
    checked = [r.wrong for r in rows if r.wrong is not None]
    wrong = sum(checked)
    verdict = f"# Wrong values         : {wrong} {'FAILED' if wrong else 'OK'}" if checked else "# Wrong values         : not checked"
    average = sum(r.busbw for r in rows) / len(rows) if rows else 0.0
    lines = [verdict, f"# Avg bus bandwidth    : {average:.3f} GB/s"]
    ratios = [r.ratio for r in rows if r.ratio]
    if peer and ratios:
        product = 1.0
        for ratio in ratios:
            product *= ratio ** (1 / len(ratios))
        lines.append(f"# Geometric mean ratio : {product:.2f} (time of {peer} / time of miraccl)")
    return lines
