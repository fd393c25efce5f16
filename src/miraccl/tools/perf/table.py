"""Table of nccl-tests (``src/common.cu``, ``TimeTest``) with columns for peer and plan."""

from __future__ import annotations

from miraccl.tools.perf.spec import PerfRow

_LEFT = "{:>12}  {:>12}  {:>11}  {:>10}  {:>4}"
_SIDE = "  {:>8}  {:>6}  {:>6}  {:>6}"
_PEER = "  {:>8}  {:>5}"
_HOST = "  {:>6}"


def format_us(value: float) -> str:
    """Format microseconds with three or four significant digits in eight columns."""
    for limit, digits in ((10.0, 3), (100.0, 2), (10000.0, 1)):
        if value < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"


def format_speed(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def header(peer: str, host: bool = False) -> list[str]:
    """Return the lines above the numbers.

    ``peer`` is empty without a comparison; ``host`` adds the host's time per call.
    """
    left = [("size", "count", "type", "redop", "root"), ("(B)", "(elements)", "", "", "")]
    side = [("time", "algbw", "busbw", "#wrong"), ("(us)", "(GB/s)", "(GB/s)", "")]
    versus = [(peer, "ratio"), ("(us)", "")]
    calls = ("host", "(us)")
    width = (
        len(_SIDE.format(*side[0]))
        + (len(_PEER.format(*versus[0])) if peer else 0)
        + (len(_HOST.format("")) if host else 0)
    )
    lines = [
        "#"
        + " " * len(_LEFT.format(*left[0]))
        + "out-of-place".center(width)
        + "in-place".center(width)
    ]
    for number in (0, 1):
        part = (
            _SIDE.format(*side[number])
            + (_PEER.format(*versus[number]) if peer else "")
            + (_HOST.format(calls[number]) if host else "")
        )
        chosen = "  algorithm" if number == 0 else ""
        lines.append("#" + _LEFT.format(*left[number]) + part + part + chosen)
    return [line.rstrip() for line in lines]


def line(
    out_of_place: PerfRow | None, in_place: PerfRow | None, peer: str, host: bool = False
) -> str:
    """Format one size. A form that the library does not have is N/A, as in nccl-tests."""
    row = out_of_place or in_place
    if row is None:
        raise ValueError("a line needs at least one form")
    text = " " + _LEFT.format(row.bytes, row.count, row.dtype, row.redop, row.root)
    for side in (out_of_place, in_place):
        text += (
            _format_form(side)
            + (_format_peer(side) if peer else "")
            + (_format_host_time(side) if host else "")
        )
    return f"{text}  {_format_plans(out_of_place, in_place)}".rstrip()


def _format_form(row: PerfRow | None) -> str:
    if row is None:
        return _SIDE.format("N/A", "N/A", "N/A", "N/A")
    wrong = "N/A" if row.wrong is None else str(row.wrong)
    return _SIDE.format(
        format_us(row.time_us), format_speed(row.algbw), format_speed(row.busbw), wrong
    )


def _format_peer(row: PerfRow | None) -> str:
    if row is None or row.peer_time_us is None or row.ratio is None:
        return _PEER.format("N/A", "N/A")
    return _PEER.format(format_us(row.peer_time_us), f"{row.ratio:.2f}")


def _format_host_time(row: PerfRow | None) -> str:
    return _HOST.format("N/A" if row is None or row.host_us is None else f"{row.host_us:.2f}")


def _format_plans(*rows: PerfRow | None) -> str:
    """Format the plans of both forms, once if they are equal.

    ``ring/simple x2`` (channels), on a GPU ``ring/simple 16x512`` (blocks x threads).
    """
    return " | ".join(
        dict.fromkeys(_format_plan(row) for row in rows if row is not None and row.algo)
    )


def _format_plan(row: PerfRow) -> str:
    if not row.proto:
        return row.algo
    shape = (
        f"x{row.channels}"
        if not row.device
        else f"{row.channels}x{row.threads}"
        if row.threads
        else "copy engines"
    )
    return f"{row.algo}/{row.proto} {shape}"


def footer(rows: list[PerfRow], peer: str) -> list[str]:
    """Return the number of wrong values and the averages."""
    checked = [r.wrong for r in rows if r.wrong is not None]
    wrong = sum(checked)
    verdict = (
        f"# Wrong values         : {wrong} {'FAILED' if wrong else 'OK'}"
        if checked
        else "# Wrong values         : not checked"
    )
    average = sum(r.busbw for r in rows) / len(rows) if rows else 0.0
    lines = [verdict, f"# Avg bus bandwidth    : {average:.3f} GB/s"]
    ratios = [r.ratio for r in rows if r.ratio]
    if peer and ratios:
        product = 1.0
        for ratio in ratios:
            product *= ratio ** (1 / len(ratios))
        lines.append(f"# Geometric mean ratio : {product:.2f} (time of {peer} / time of miraccl)")
    return lines
