"""Folding of pictures: ranks that do the same, and times at which the same repeats, are drawn once.

Ranks are compared in relative numbers, as a rotation (``r+1``) or as an exclusive or (``r^4``) of
their own number, so a ring of 64 ranks is one row. Otherwise ranks with the same primitives at the
same times form a row, and neighbouring ranks that do the same one after the other an ellipsis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import xor

from miraccl.schedule.ir import Buffer, Ref, Schedule
from miraccl.tools.schedule_timeline import StepEvent, Timeline

#: names of buffers in pictures
BUFFER_NAMES = {Buffer.INPUT: "in", Buffer.OUTPUT: "out", Buffer.SCRATCH: "tmp"}
LEAST_RUN = 4  # repetitions from which an ellipsis is shorter
LONGEST_PERIOD = 4  # units of time that a repetition may have
SHOWN_PEERS = 3
MOST_LINES = 12  # of all channels; beyond that, ranks form rows by their primitives alone


@dataclass(frozen=True, kw_only=True)
class Naming:
    """Names of peers and chunks from the point of view of a rank, as they are printed."""

    nranks: int
    peer: Callable[[int, int], str] = lambda rank, peer: str(peer)
    chunk: Callable[[int, Ref], str] = lambda rank, ref: str(ref.index)
    note: str = ""

    def ref(self, rank: int, ref: Ref) -> str:
        """Return a name such as ``in[2]``, or ``in[2+3]`` for three chunks."""
        tail = f"+{ref.chunks}" if ref.chunks > 1 else ""
        return f"{BUFFER_NAMES[ref.buffer]}[{self.chunk(rank, ref)}{tail}]"

    def operands(self, event: StepEvent) -> str:
        """Return the chunks of a step, such as ``in[0] → out[0]``."""
        step = event.step
        return " → ".join(
            self.ref(event.rank, ref) for ref in (step.src, step.dst) if ref is not None
        )

    def peers(self, event: StepEvent) -> str:
        """Return the peers of a step, such as ``from 3, to 1``."""
        step, rank = event.step, event.rank
        parts = [
            f"{word} {self.peer(rank, peer)}"
            for word, peer in (("from", step.recv_peer), ("to", step.send_peer))
            if peer is not None
        ]
        if step.peers:
            parts.append("peers " + self._listed(event, SHOWN_PEERS))
        return ", ".join(parts)

    def _listed(self, event: StepEvent, most: int) -> str:
        """Return the names of ``peers``, the first ``most`` of them."""
        peers = event.step.peers
        if len(peers) == self.nranks > most and list(peers) == sorted(peers):
            return f"0 … {self.nranks - 1}"
        more = len(peers) - most
        names = " ".join(self.peer(event.rank, peer) for peer in peers[:most])
        return names + (f" … {more} more" if more > 0 else "")

    def signature(self, event: StepEvent) -> Hashable:
        """Return what equal steps of different ranks have in common."""
        step, rank = event.step, event.rank
        ends = [
            None if peer is None else self.peer(rank, peer)
            for peer in (step.recv_peer, step.send_peer)
        ]
        listed = self._listed(event, self.nranks) if step.peers else ""
        return event.channel, event.start, step.op, self.operands(event), *ends, listed


@dataclass(frozen=True, kw_only=True)
class FoldedRow:
    """One row of a picture: a rank, and the ranks that it stands for.

    ``label`` has no events if ``rank`` is None: it stands for ranks that are left out.
    """

    label: str
    rank: int | None
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Rows and columns of a picture.

    Attributes:
        columns: Units of time that are shown; None stands for those that are left out.
    """

    rows: tuple[FoldedRow, ...]
    columns: tuple[int | None, ...]
    naming: Naming


def full_layout(schedule: Schedule, timeline: Timeline) -> Layout:
    """Return one row per rank and one column per unit of time."""
    return Layout(
        rows=tuple(FoldedRow(label=f"rank {rank}", rank=rank) for rank in range(schedule.nranks)),
        columns=tuple(range(timeline.length)),
        naming=Naming(nranks=schedule.nranks),
    )


def folded_layout(schedule: Schedule, timeline: Timeline) -> Layout:
    """Return as few rows and columns as show every kind of rank and of repetition."""
    events: defaultdict[int, list[StepEvent]] = defaultdict(list)
    for event in timeline.events:
        events[event.rank].append(event)
    candidates = [
        (naming, _classes(schedule.nranks, events, naming.signature))
        for naming in _relative_namings(schedule)
    ]
    naming, classes = min(candidates, key=lambda item: len(item[1]))
    plain = Naming(nranks=schedule.nranks)
    for key, what in (
        (_time_and_primitive, "peers and chunks"),
        (_primitive, "times, peers and chunks"),
    ):
        if len(classes) * schedule.nchannels > MOST_LINES or what == "peers and chunks":
            alike = _classes(schedule.nranks, events, key)
            if len(alike) < len(classes):
                classes = alike
                naming = replace(plain, note=f"{what} are those of the lowest rank of a row")
    if len(classes) < schedule.nranks:
        rows = [
            FoldedRow(label=_range_label(ranks), rank=ranks[0], count=len(ranks))
            for ranks in classes
        ]
    else:
        rows, naming = _rows_with_ellipses(schedule.nranks, events), plain
    return Layout(
        rows=tuple(rows),
        columns=_fold_columns(timeline, [row.rank for row in rows if row.rank is not None]),
        naming=naming,
    )


def _time_and_primitive(event: StepEvent) -> Hashable:
    return event.channel, event.start, event.step.op


def _primitive(event: StepEvent) -> Hashable:
    return event.channel, event.step.op


def _classes(
    nranks: int, events: dict[int, list[StepEvent]], signature: Callable[[StepEvent], Hashable]
) -> list[list[int]]:
    """Return the ranks with equal signatures, by their lowest rank."""
    classes: defaultdict[Hashable, list[int]] = defaultdict(list)
    for rank in range(nranks):
        classes[tuple(signature(event) for event in events.get(rank, ()))].append(rank)
    return list(classes.values())


def _relative_namings(schedule: Schedule) -> Iterator[Naming]:
    """Yield namings relative to the own rank; blocks of a buffer are numbered by rank."""
    n = schedule.nranks

    def rotated(rank: int, value: int) -> str:
        difference = (value - rank) % n
        if difference > n // 2:
            return f"r−{n - difference}"
        return f"r+{difference}" if difference else "r"

    def mirrored(rank: int, value: int) -> str:
        difference = xor(rank, value)
        return f"r^{difference}" if difference else "r"

    def by_block(relative: Callable[[int, int], str]) -> Callable[[int, Ref], str]:
        def name(rank: int, ref: Ref) -> str:
            whole = schedule.chunks_at(ref.buffer, rank)
            if whole < n or whole % n:
                return str(ref.index)
            block, part = divmod(ref.index, whole // n)
            tail = f".{part}" if whole > n else ""
            return relative(rank, block) + tail

        return name

    def by_part(rank: int, ref: Ref) -> str:
        whole = schedule.chunks_at(ref.buffer, rank)
        if whole <= n or whole % n:
            return str(ref.index)
        part, block = divmod(ref.index, n)
        return f"{rotated(rank, block)}+{part * n}" if part else rotated(rank, block)

    wrap = f"r is the number of the rank itself; r+1 is counted modulo {n}"
    yield Naming(nranks=n, peer=rotated, chunk=by_block(rotated), note=wrap)
    yield Naming(nranks=n, peer=rotated, chunk=by_part, note=wrap)
    yield Naming(nranks=n, peer=rotated, note=wrap)
    if n & (n - 1) == 0:
        flip = "r is the number of the rank itself; r^4 is r with the bit of value 4 flipped"
        yield Naming(nranks=n, peer=mirrored, chunk=by_block(mirrored), note=flip)
        yield Naming(nranks=n, peer=mirrored, note=flip)


def _rows_with_ellipses(nranks: int, events: dict[int, list[StepEvent]]) -> list[FoldedRow]:
    """Return rows in rank order; of neighbours that do the same later, the first and the last."""

    def shifted(rank: int) -> Hashable:
        mine = events.get(rank, [])
        first = min((event.start for event in mine), default=0)
        return tuple((event.channel, event.step.op, event.start - first) for event in mine)

    rows: list[FoldedRow] = []
    for _, group in groupby(range(nranks), shifted):
        ranks = list(group)
        if len(ranks) < LEAST_RUN:
            rows += [FoldedRow(label=f"rank {rank}", rank=rank) for rank in ranks]
            continue
        rows += [
            FoldedRow(label=f"rank {ranks[0]}", rank=ranks[0]),
            FoldedRow(
                label=f"⋮ {_range_label(ranks[1:-1])}: the same, one after the other",
                rank=None,
                count=len(ranks) - 2,
            ),
            FoldedRow(label=f"rank {ranks[-1]}", rank=ranks[-1]),
        ]
    return rows


def _range_label(ranks: Sequence[int]) -> str:
    """Name ranks: ``rank 3``, ``ranks 0–63``, ``ranks 2, 4, 6 … (12)``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}–{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:3]))
    return f"ranks {shown}" + (f" … ({len(ranks)})" if len(ranks) > 3 else "")


def _fold_columns(timeline: Timeline, ranks: Sequence[int]) -> tuple[int | None, ...]:
    """Return the units of time without the inner ones of runs that look alike."""
    looks: defaultdict[int, list[Hashable]] = defaultdict(list)
    for event in timeline.events:
        if event.rank in ranks:
            looks[event.start].append((event.rank, event.channel, event.step.op))
    sorted_looks: list[Hashable] = [
        tuple(sorted(looks[t], key=str)) for t in range(timeline.length)
    ]
    columns: list[int | None] = []
    t = 0
    while t < timeline.length:
        period, length = _repetition(sorted_looks, t)
        if length < max(LEAST_RUN, 3 * period):
            columns.append(t)
            t += 1
        elif not sorted_looks[t] and period == 1:
            columns.append(None)
            t += length
        else:
            columns += [*range(t, t + period), None, *range(t + length - period, t + length)]
            t += length
    return tuple(columns)


def _repetition(looks: Sequence[Hashable], start: int) -> tuple[int, int]:
    """Return (period, length) of the longest run from ``start`` that repeats its first units."""
    best = 1, 1
    for period in range(1, LONGEST_PERIOD + 1):
        length = period
        while (
            start + length < len(looks) and looks[start + length] == looks[start + length - period]
        ):
            length += 1
        length -= length % period
        if length >= 3 * period and length > best[1]:
            best = period, length
    return best
