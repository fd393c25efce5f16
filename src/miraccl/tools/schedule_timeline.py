"""Logical time of a schedule's steps, for pictures.

Every step takes one unit after its messages have arrived, messages take none, FIFOs never fill. The
result shows dependencies and the length of the longest chain; ``miraccl.sim`` computes times on
links with bandwidth and latency.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from miraccl.errors import ScheduleError
from miraccl.schedule.ir import Op, Schedule, Step


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
