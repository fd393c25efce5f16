"""Pictures of schedules: one row per rank, one box per step, one arrow per message, time to the
right.

Time is logical: every step takes one unit after its messages have arrived, messages take none,
FIFOs never fill. The picture shows dependencies and the length of the longest chain;
``miraccl.sim`` computes times on links with bandwidth and latency.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from html import escape

from miraccl.errors import ScheduleError
from miraccl.schedule.ir import Op, Schedule, Step
from miraccl.schedule.text import format_step

_UNIT, _LANE, _BOX, _LEFT, _TOP = 64, 34, 20, 70, 46
_COLORS = {
    "send": "#4477aa",
    "receive": "#66ccee",
    "copy": "#bbbbbb",
    "reduce": "#ee6677",
    "sync": "#ccbb44",
}  # Tol, "bright"


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One step on the logical clock; it runs in the unit that begins at ``start``."""

    channel: int
    rank: int
    number: int
    step: Step
    start: int

    @property
    def end(self) -> int:
        return self.start + 1


@dataclass(frozen=True, kw_only=True)
class MessageArrow:
    """A message, or a remote access to memory."""

    sender: StepEvent
    receiver: StepEvent


@dataclass(frozen=True, kw_only=True)
class Timeline:
    events: tuple[StepEvent, ...]
    arrows: tuple[MessageArrow, ...]

    @property
    def length(self) -> int:
        return max((e.end for e in self.events), default=0)


def compute_timeline(schedule: Schedule) -> Timeline:
    """Schedule every step at the earliest unit at which its rank is free and its messages have
    arrived.

    Raise ``ScheduleError`` if steps wait for each other in a cycle.
    """
    events: list[StepEvent] = []
    arrows: list[MessageArrow] = []
    for number, ranks in enumerate(schedule.channels):
        clock = _ChannelClock(number, ranks)
        clock.run(schedule.name)
        events += clock.events
        arrows += clock.arrows
    return Timeline(events=tuple(events), arrows=tuple(arrows))


class _ChannelClock:
    """Logical run of one channel: ranks advance until none can."""

    def __init__(self, channel: int, ranks: tuple[tuple[Step, ...], ...]) -> None:
        self.events: list[StepEvent] = []
        self.arrows: list[MessageArrow] = []
        self._channel = channel
        self._ranks = ranks
        self._next = [0] * len(ranks)
        self._free = [0] * len(ranks)
        self._messages: dict[tuple[int, int], deque[StepEvent]] = defaultdict(deque)
        self._signals: dict[tuple[int, int], deque[StepEvent]] = defaultdict(deque)

    def run(self, name: str) -> None:
        while any(self._next[r] < len(steps) for r, steps in enumerate(self._ranks)):
            moved = [self._advance(rank) for rank in range(len(self._ranks))]
            if not any(moved) and not self._pass_barrier():
                raise ScheduleError(
                    f"cannot draw {name}: the steps of channel {self._channel} wait for each other"
                )

    def _advance(self, rank: int) -> bool:
        """Run the steps of ``rank`` up to one that must wait; return True if there were any."""
        moved = False
        while self._next[rank] < len(self._ranks[rank]):
            step = self._ranks[rank][self._next[rank]]
            queues = self._required_queues(rank, step)
            if step.op is Op.BARRIER or not all(queues):
                return moved
            self._place_step(rank, step, [queue.popleft() for queue in queues])
            moved = True
        return moved

    def _required_queues(self, rank: int, step: Step) -> list[deque[StepEvent]]:
        """Return the queues that must hold a message each before the step can run."""
        if step.op is Op.WAIT:
            return [self._signals[peer, rank] for peer in step.peers]
        return [self._messages[peer, rank] for peer in step.senders(rank)]

    def _place_step(self, rank: int, step: Step, arrived: list[StepEvent]) -> None:
        start = max([self._free[rank], *(e.end for e in arrived)])
        event = StepEvent(
            channel=self._channel, rank=rank, number=self._next[rank], step=step, start=start
        )
        self.events.append(event)
        self.arrows += [MessageArrow(sender=sender, receiver=event) for sender in arrived]
        self._free[rank] = event.end
        self._next[rank] += 1
        if step.op.sends and step.send_peer is not None:
            self._messages[rank, step.send_peer].append(event)
        if step.op is Op.SIGNAL:
            for peer in step.peers:
                self._signals[rank, peer].append(event)

    def _pass_barrier(self) -> bool:
        """Release all ranks if each of them waits at a barrier; return True if so."""
        waiting = [
            self._next[r] < len(steps) and steps[self._next[r]].op is Op.BARRIER
            for r, steps in enumerate(self._ranks)
        ]
        if not all(waiting):
            return False
        self._free = [max(self._free)] * len(self._free)
        for rank, steps in enumerate(self._ranks):
            self._place_step(rank, steps[self._next[rank]], [])
        return True


def draw_svg(schedule: Schedule) -> str:
    """Draw a self-contained SVG; channels are sub-rows of each rank, boxes have tooltips."""
    timeline = compute_timeline(schedule)
    height_of_rank = _LANE * schedule.nchannels + 10
    width = _LEFT + _UNIT * max(1, timeline.length) + 20
    height = _TOP + height_of_rank * schedule.nranks + 34

    def middle(event: StepEvent) -> float:
        return _TOP + event.rank * height_of_rank + event.channel * _LANE + _LANE / 2

    title = (
        f"{schedule.name}: {schedule.collective.label}, nranks {schedule.nranks}, channels"
        f" {schedule.nchannels}, parts {schedule.parts}"
    )
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0'
            f' 0 {width} {height}" font-family="sans-serif" font-size="11">'
        ),
        f"<title>{escape(title)}</title>",
        (
            '<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="6" refY="3"'
            ' orient="auto"><path d="M0,0 L6,3 L0,6 z"/></marker></defs>'
        ),
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="18" font-size="14">{escape(title)}</text>',
    ]
    parts += _axis(timeline.length, height)
    for rank in range(schedule.nranks):
        top = _TOP + rank * height_of_rank
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{width - _LEFT - 10}"'
            f' height="{height_of_rank - 8}" fill="#f4f4f4"/>'
        )
        parts.append(f'<text x="10" y="{top + height_of_rank / 2:g}">rank {rank}</text>')
    parts += [_box(event, middle(event)) for event in timeline.events]
    parts += [
        _arrow(arrow, middle(arrow.sender), middle(arrow.receiver)) for arrow in timeline.arrows
    ]
    parts += _legend(height)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axis(length: int, height: int) -> list[str]:
    return [
        f'<g stroke="#dddddd"><line x1="{_LEFT + t * _UNIT}" y1="{_TOP - 8}"'
        f' x2="{_LEFT + t * _UNIT}" y2="{height - 30}"/></g><text x="{_LEFT + t * _UNIT}"'
        f' y="{_TOP - 12}" fill="#888888">{t}</text>'
        for t in range(length + 1)
    ]


def _kind(op: Op) -> str:
    if op.reduces:
        return "reduce"
    if op.receives or op is Op.GET:
        return "receive"
    if op.sends or op is Op.PUT:
        return "send"
    return "copy" if op is Op.COPY else "sync"


def _box(event: StepEvent, middle: float) -> str:
    x, y = _LEFT + event.start * _UNIT + 4, middle - _BOX / 2
    ref = event.step.dst or event.step.src
    label = (
        f"{ref.buffer.name[0].lower()}{ref.index}" + (f"+{ref.chunks}" if ref.chunks > 1 else "")
        if ref
        else ""
    )
    tip = (
        f"rank {event.rank}, channel {event.channel}, step {event.number}:"
        f" {format_step(event.step)}"
    )
    return (
        f'<g><title>{escape(tip)}</title><rect x="{x}" y="{y:g}" width="{_UNIT - 12}"'
        f' height="{_BOX}" rx="3" fill="{_COLORS[_kind(event.step.op)]}"/><text x="{x + 4}"'
        f' y="{middle + 4:g}">{escape(label)}</text></g>'
    )


def _arrow(arrow: MessageArrow, y1: float, y2: float) -> str:
    x1 = _LEFT + arrow.sender.end * _UNIT - 8
    x2 = _LEFT + arrow.receiver.start * _UNIT + 4
    return (
        f'<line x1="{x1}" y1="{y1:g}" x2="{x2}" y2="{y2:g}" stroke="black" stroke-width="0.8"'
        ' marker-end="url(#tip)" opacity="0.7"/>'
    )


def _legend(height: int) -> list[str]:
    parts = []
    for number, (name, color) in enumerate(_COLORS.items()):
        x = _LEFT + number * 90
        parts.append(f'<rect x="{x}" y="{height - 22}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 17}" y="{height - 12}">{name}</text>')
    return parts
