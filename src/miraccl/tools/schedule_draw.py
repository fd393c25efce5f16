"""Pictures of schedules as SVG: one row per rank, one box per step, one arrow per message.

Time is that of ``schedule_timeline``. Boxes carry the primitive, its chunks and its peers; a legend
explains the primitives that occur and the notation. Ranks and times that look alike are folded
(``schedule_fold``).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from html import escape

from miraccl.schedule.ir import Buffer, Op, Schedule
from miraccl.schedule.text import format_step
from miraccl.tools.schedule_fold import (
    BUFFER_NAMES,
    FoldedRow,
    Layout,
    folded_layout,
    full_layout,
)
from miraccl.tools.schedule_timeline import MessageArrow, StepEvent, compute_timeline

FOLD_FROM = 9  # ranks from which pictures are folded by default

_CHARACTER = 6.3  # mean width of a character at 11 px
_BOLD_CHARACTER = 6.95  # that of the bold names of primitives, in DejaVu Sans
_LINE, _BOX, _LANE, _GAP, _ELLIPSIS = 14, 48, 58, 20, 70
_TOP, _LEGEND_LINE, _LEGEND_WIDTH = 92, 19, (56, 110)  # px, px, characters: a phone to a page
_HEADING = 50  # px above the time axis
_TEXT, _MUTED, _ARROW = "#111111", "#555555", "#444444"
#: fill and border by kind: tints on which text of ``_TEXT`` has a contrast of at least 12:1
COLORS = {
    "send": ("#cfe3f5", "#2f6ea5"),
    "receive": ("#d5f1f0", "#1d7f7c"),
    "copy": ("#e6e6e6", "#6b6b6b"),
    "reduce": ("#fbd9dc", "#b8394a"),
    "sync": ("#f5ecc3", "#8a7412"),
}
_MEANINGS = {
    Op.SEND: "sends a chunk to the FIFO of the peer",
    Op.RECV: "stores the received chunk",
    Op.COPY: "copies a chunk within the rank",
    Op.RECV_REDUCE: "reduces the received chunk into the destination",
    Op.RECV_COPY_SEND: "stores the received chunk and forwards it",
    Op.RECV_REDUCE_SEND: "reduces the received chunk with its own and sends the result",
    Op.RECV_REDUCE_COPY: "reduces the received chunk with its own and stores the result",
    Op.RECV_REDUCE_COPY_SEND: "reduces the received chunk with its own, stores and sends it",
    Op.RECV_REDUCE_ALL: "reduces one chunk of each peer, in the order listed",
    Op.PUT: "writes a chunk into the memory of the peer",
    Op.GET: "reads a chunk from the memory of the peer",
    Op.REDUCE_FROM_PEERS: "reads a chunk from the memory of each peer and reduces them",
    Op.SIGNAL: "tells the peers that its earlier steps are complete",
    Op.WAIT: "waits for a signal of each peer",
    Op.BARRIER: "waits until all ranks are here",
}


def draw_svg(schedule: Schedule, *, fold: bool | None = None) -> str:
    """Return a self-contained SVG.

    Args:
        fold: Draw ranks and times that look alike once; None: from ``FOLD_FROM`` ranks.
    """
    return "\n".join(Picture(schedule, fold).render()) + "\n"


class Picture:
    """Geometry and parts of one picture.

    Args:
        fold: As for ``draw_svg``.
    """

    def __init__(self, schedule: Schedule, fold: bool | None) -> None:
        self.schedule = schedule
        self.title = f"{schedule.name} {schedule.collective.label} over {schedule.nranks} ranks"
        self.timeline = compute_timeline(schedule)
        self.folded = schedule.nranks >= FOLD_FROM if fold is None else fold
        make = folded_layout if self.folded else full_layout
        self.layout: Layout = make(schedule, self.timeline)
        shown = {row.rank for row in self.layout.rows}
        columns = set(self.layout.columns)
        self.events = [
            event
            for event in self.timeline.events
            if event.rank in shown and event.start in columns
        ]
        self.numbers = {
            (event.channel, event.rank, event.number): number
            for number, event in enumerate(self.events)
        }
        self.texts = [self._lines(event) for event in self.events]
        longest = max(
            (_CHARACTER * len(line) for lines in self.texts for line in lines), default=50
        )
        bold = max((_BOLD_CHARACTER * len(lines[0]) for lines in self.texts), default=50)
        self.box = round(max(70, 14 + max(longest, bold)))
        labels = [row.label for row in self.layout.rows if row.rank is not None]
        self.left = round(24 + _CHARACTER * max(len(label) for label in labels))
        self._place_columns()
        self._place_rows()

    def _place_columns(self) -> None:
        self.starts: dict[int, int] = {}
        self.breaks: list[tuple[int, int]] = []  # (x, units left out)
        x, before = self.left, -1
        for position, unit in enumerate(self.layout.columns):
            if unit is None:
                after = next(
                    (u for u in self.layout.columns[position + 1 :] if u is not None),
                    self.timeline.length,
                )
                self.breaks.append((x, after - before - 1))
                x += _ELLIPSIS
            else:
                self.starts[unit], before = x, unit
                x += self.box + _GAP
        self.right = x
        self.width = x + 10

    def _place_rows(self) -> None:
        self.tops: list[int] = []
        self.top_of: dict[int, int] = {}
        y = _TOP
        for row in self.layout.rows:
            self.tops.append(y)
            if row.rank is not None:
                self.top_of[row.rank] = y
            y += self._height(row) + 8
        self.bottom = y

    def _height(self, row: FoldedRow) -> int:
        return _LANE * self.schedule.nchannels if row.rank is not None else 26

    def _lines(self, event: StepEvent) -> list[str]:
        naming = self.layout.naming
        lines = (event.step.op.name.lower(), naming.operands(event), naming.peers(event))
        return [line for line in lines if line]

    # ---- parts

    def render(self) -> Iterator[str]:
        """Yield the lines of an SVG with heading and legend."""
        characters = max(_LEGEND_WIDTH[0], int((self.width - 46) / _CHARACTER))
        legend = [
            (kind if number == 0 else "", line)
            for kind, text in self.legend()
            for number, line in enumerate(textwrap.wrap(text, min(_LEGEND_WIDTH[1], characters)))
        ]
        height = self.bottom + 30 + _LEGEND_LINE * len(legend)
        texts = [self.title + " " * 12, self.subtitle(), *(text for _, text in legend)]
        width = max(self.width, round(40 + _CHARACTER * max(map(len, texts))))
        yield from self._open(width, 0, height)
        yield f"<title>{escape(self.title)}</title>"
        yield '<rect width="100%" height="100%" fill="white"/>'
        yield f'<text x="12" y="24" font-size="16" font-weight="600">{escape(self.title)}</text>'
        yield f'<text x="12" y="44" fill="{_MUTED}">{escape(self.subtitle())}</text>'
        yield from self._body()
        for number, (kind, text) in enumerate(legend):
            yield from self._legend_line(self.bottom + 34 + _LEGEND_LINE * number, kind, text)
        yield "</svg>"

    def render_body(self) -> Iterator[str]:
        """Yield the lines of an SVG with the time axis and the rows only."""
        yield from self._open(self.width, _HEADING, self.bottom + 8 - _HEADING)
        yield from self._body()
        yield "</svg>"

    def _open(self, width: int, top: int, height: int) -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
            f' viewBox="0 {top} {width} {height}" font-family="ui-sans-serif, Helvetica, Arial,'
            f' sans-serif" font-size="11" fill="{_TEXT}">'
        )
        yield (
            '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="3.5"'
            f' orient="auto"><path d="M0,0 L7,3.5 L0,7 z" fill="{_ARROW}"/></marker></defs>'
        )

    def _body(self) -> Iterator[str]:
        yield from self._axis()
        for row, top in zip(self.layout.rows, self.tops, strict=True):
            yield from self._row(row, top)
        yield from self._arrows()
        for event, lines in zip(self.events, self.texts, strict=True):
            yield from self._box(event, lines)
        yield from self._labels()

    def subtitle(self) -> str:
        """Return the line below the title."""
        steps = self.timeline.length
        text = f"{steps} step{'s' * (steps != 1)} in time"
        if self.schedule.nchannels > 1:
            text += f", {self.schedule.nchannels} channels, one line each"
        return text

    def _axis(self) -> Iterator[str]:
        y = _TOP - 12
        yield (f'<text x="{self.left}" y="{y - 14}" fill="{_MUTED}">time, in steps →</text>')
        for unit, x in self.starts.items():
            yield (
                f'<line x1="{x - 5}" y1="{y}" x2="{x - 5}" y2="{self.bottom}" stroke="#d5d5d5"/>'
                f'<text x="{x}" y="{y + 4}" fill="{_MUTED}">{unit}</text>'
            )
        for x, missing in self.breaks:
            yield (
                f'<text x="{x + (_ELLIPSIS - _GAP) / 2:g}" y="{y + 4}" fill="{_MUTED}"'
                f' text-anchor="middle">{missing} more</text>'
            )

    def _row(self, row: FoldedRow, top: int) -> Iterator[str]:
        height = self._height(row)
        if row.rank is None:
            yield f'<text x="{self.left}" y="{top + 17}" fill="{_MUTED}">{escape(row.label)}</text>'
            return
        yield (
            f'<rect x="{self.left - 8}" y="{top}" width="{self.right - self.left}"'
            f' height="{height}" fill="#f6f6f6"/>'
        )
        for x, _ in self.breaks:
            yield (
                f'<text x="{x + (_ELLIPSIS - _GAP) / 2:g}" y="{top + height / 2 + 6:g}"'
                f' font-size="18" fill="{_MUTED}" text-anchor="middle">⋯</text>'
            )

    def _labels(self) -> Iterator[str]:
        """Draw the names of the rows as one group, over the rest: a page keeps it in view."""
        yield (
            f'<g id="labels"><rect x="0" y="{_TOP - 2}" width="{self.left - 9}"'
            f' height="{self.bottom - _TOP}" fill="white"/>'
        )
        for row, top in zip(self.layout.rows, self.tops, strict=True):
            if row.rank is not None:
                y = top + self._height(row) / 2 + 4
                yield f'<text x="12" y="{y:g}">{escape(row.label)}</text>'
        yield "</g>"

    def _middle(self, event: StepEvent) -> float:
        return self.top_of[event.rank] + event.channel * _LANE + _LANE / 2

    def _box(self, event: StepEvent, lines: list[str]) -> Iterator[str]:
        x, middle = self.starts[event.start], self._middle(event)
        fill, border = COLORS[_kind(event.step.op)]
        tip = (
            f"rank {event.rank}, channel {event.channel}, step {event.number}:"
            f" {format_step(event.step)}"
        )
        number = self.numbers[event.channel, event.rank, event.number]
        yield (
            f'<g class="step" id="s{number}"><title>{escape(tip)}</title><rect x="{x}"'
            f' y="{middle - _BOX / 2:g}" width="{self.box}" height="{_BOX}" rx="4" fill="{fill}"'
            f' stroke="{border}"/>'
        )
        first = middle + 4 - _LINE * (len(lines) - 1) / 2
        for position, line in enumerate(lines):
            weight = ' font-weight="600"' if position == 0 else ""
            yield (
                f'<text x="{x + 6}" y="{first + _LINE * position:g}"{weight}>{escape(line)}</text>'
            )
        yield "</g>"

    def _arrows(self) -> Iterator[str]:
        """Draw the messages; ends whose other end is not in the picture become short arrows."""
        for arrow in self.timeline.arrows:
            sender, receiver = self._number(arrow.sender), self._number(arrow.receiver)
            if self.folded and self._is_folded(arrow):
                if sender is not None:
                    yield self._stub(arrow.sender, "out", f"s{sender}")
                if receiver is not None:
                    yield self._stub(arrow.receiver, "in", f"s{receiver}")
            elif sender is not None and receiver is not None:
                x1, y1 = self.starts[arrow.sender.start] + self.box, self._middle(arrow.sender)
                x2, y2 = self.starts[arrow.receiver.start], self._middle(arrow.receiver)
                yield (
                    f'<line class="message" data-ends="s{sender} s{receiver}" x1="{x1}"'
                    f' y1="{y1:g}" x2="{x2}" y2="{y2:g}" stroke="{_ARROW}"'
                    ' marker-end="url(#tip)"/>'
                )

    def _is_folded(self, arrow: MessageArrow) -> bool:
        """Return True unless both ends are drawn and stand for themselves."""
        counts = {row.rank: row.count for row in self.layout.rows}
        ends = (arrow.sender, arrow.receiver)
        return any(self._number(end) is None or counts.get(end.rank, 0) != 1 for end in ends)

    def _number(self, event: StepEvent) -> int | None:
        return self.numbers.get((event.channel, event.rank, event.number))

    def _stub(self, event: StepEvent, direction: str, step: str) -> str:
        x, middle = self.starts[event.start], self._middle(event)
        x1, y1, x2, y2 = (
            (x + self.box, middle + 8, x + self.box + 15, middle + 20)
            if direction == "out"
            else (x - 15, middle - 20, x, middle - 8)
        )
        return (
            f'<line class="message" data-ends="{step}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}"'
            f' y2="{y2:g}" stroke="{_ARROW}" marker-end="url(#tip)"/>'
        )

    # ---- legend

    def legend(self) -> Iterator[tuple[str, str]]:
        """Yield (kind of box or an empty string, text) per entry."""
        for op in sorted({event.step.op for event in self.events}, key=_legend_order):
            yield _kind(op), f"{op.name.lower()}: {_MEANINGS[op]}"
        buffers = sorted(
            {
                ref.buffer
                for event in self.events
                for ref in (event.step.src, event.step.dst)
                if ref is not None
            }
        )
        if buffers:
            names = ", ".join(
                f"{BUFFER_NAMES[b]}[i] is chunk i of the {_BUFFER_MEANINGS[b]}" for b in buffers
            )
            several = any(
                ref.chunks > 1
                for event in self.events
                for ref in (event.step.src, event.step.dst)
                if ref is not None
            )
            yield (
                "",
                f"{names}; {self._chunk_note()}"
                + ("; [i+3] means 3 chunks from i" if several else ""),
            )
        yield "", "a step takes one unit of time after its messages have arrived"
        if self.timeline.arrows:
            yield (
                "",
                "an arrow is a message"
                + ("; a short one leads to a rank or time that is not drawn" * self.folded),
            )
        if self.layout.naming.note:
            yield "", self.layout.naming.note
        if self.folded and len(self.layout.rows) < self.schedule.nranks:
            yield "", "ranks that do the same are one row; repeated times are left out (⋯)"

    def _chunk_note(self) -> str:
        parts = self.schedule.parts
        blocks = max(1, self.schedule.input_chunks // parts, self.schedule.output_chunks // parts)
        cut = "is one chunk" if parts == 1 else f"is cut into {parts} chunks"
        if blocks > 1:
            return f"each of the {blocks} blocks {cut}"
        return f"the buffer {cut}"

    def _legend_line(self, y: int, kind: str, text: str) -> Iterator[str]:
        if kind:
            fill, border = COLORS[kind]
            yield (
                f'<rect x="12" y="{y - 10}" width="13" height="13" rx="2" fill="{fill}"'
                f' stroke="{border}"/>'
            )
        yield f'<text x="34" y="{y}">{escape(text)}</text>'


_BUFFER_MEANINGS = {
    Buffer.INPUT: "input",
    Buffer.OUTPUT: "output",
    Buffer.SCRATCH: "scratch memory",
}


def _kind(op: Op) -> str:
    if op.reduces:
        return "reduce"
    if op.receives or op is Op.GET:
        return "receive"
    if op.sends or op is Op.PUT:
        return "send"
    return "copy" if op is Op.COPY else "sync"


def _legend_order(op: Op) -> tuple[int, int]:
    return list(COLORS).index(_kind(op)), int(op)
