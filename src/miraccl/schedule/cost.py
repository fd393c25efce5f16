"""Cost of a schedule, counted from its steps.

The docstrings of ``schedule.algos`` state these numbers as formulas; tests compare the two. Sizes
are in blocks of ``count`` elements, as fractions; each number is the maximum over all ranks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from fractions import Fraction

from miraccl.errors import ScheduleError
from miraccl.schedule.ir import Op, Schedule, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Costs of one schedule, each the maximum over ranks.

    - ``latency_steps``: length of the longest dependency chain of messages, signals and remote
      reads; a barrier counts one.
    - ``wire_blocks``: blocks a rank sends or puts, and reads from peers.
    - ``messages``: messages, puts and signals a rank sends.
    - ``copy_blocks``: blocks copied by COPY.
    - ``reduce_blocks``: blocks added, one for each (+).
    """

    latency_steps: int
    wire_blocks: Fraction
    messages: int
    copy_blocks: Fraction
    reduce_blocks: Fraction


def compute_cost(schedule: Schedule) -> Cost:
    """Count the costs of ``schedule``; raise ``ScheduleError`` if it deadlocks with unbounded
    FIFOs.
    """
    wire, messages, copies, additions = ([0] * schedule.participants for _ in range(4))
    for ranks in schedule.channels:
        for rank, steps in enumerate(ranks):
            for step in steps:
                wire[rank] += step.chunks * _crossings(step, rank)
                messages[rank] += (
                    len(step.peers) if step.op is Op.SIGNAL else int(step.send_peer is not None)
                )
                copies[rank] += step.chunks * (step.op is Op.COPY)
                additions[rank] += step.chunks * _additions(step)
    return Cost(
        latency_steps=max(_latency(schedule, channel) for channel in range(schedule.nchannels)),
        wire_blocks=Fraction(max(wire), schedule.parts),
        messages=max(messages),
        copy_blocks=Fraction(max(copies), schedule.parts),
        reduce_blocks=Fraction(max(additions), schedule.parts),
    )


def _crossings(step: Step, rank: int) -> int:
    """Return how often ``rank`` moves the step's chunks over a wire: sends, puts or reads."""
    if step.op is Op.REDUCE_FROM_PEERS:
        return sum(peer != rank for peer in step.peers)
    return int(step.send_peer is not None or step.op is Op.GET)


def _additions(step: Step) -> int:
    if step.op in (Op.RECV_REDUCE_ALL, Op.REDUCE_FROM_PEERS):
        return len(step.peers) - 1
    return int(step.op.reduces)


def _latency(schedule: Schedule, channel: int) -> int:
    """Return the longest chain by Lamport clocks in which only sending advances the clock."""
    programs = schedule.channels[channel]
    nranks = schedule.participants
    clock, position = [0] * nranks, [0] * nranks
    messages: dict[tuple[int, int, bool], deque[int]] = {}  # (sender, receiver, is a signal)
    ready = deque(range(nranks))
    at_barrier: set[int] = set()
    while ready:
        rank = ready.popleft()
        while position[rank] < len(programs[rank]):
            step = programs[rank][position[rank]]
            if step.op is Op.BARRIER:
                at_barrier.add(rank)
                if len(at_barrier) < nranks:
                    break
                clock = [max(clock) + 1] * nranks
                for other in at_barrier - {rank}:
                    position[other] += 1
                ready.extend(at_barrier - {rank})
                at_barrier.clear()
            queues = [
                messages.setdefault((peer, rank, step.op is Op.WAIT), deque())
                for peer in _sources(step, rank)
            ]
            if not all(queues):
                break
            clock[rank] = max([clock[rank], *(box.popleft() for box in queues)])
            clock[rank] += step.op is Op.GET or (
                step.op is Op.REDUCE_FROM_PEERS and _crossings(step, rank) > 0
            )
            for peer in _targets(step):
                messages.setdefault((rank, peer, step.op is Op.SIGNAL), deque()).append(
                    clock[rank] + 1
                )
                ready.append(peer)
            position[rank] += 1
    for rank, steps in enumerate(programs):
        if position[rank] < len(steps):
            raise ScheduleError(
                f"{schedule.name}: channel {channel}, rank {rank}, step {position[rank]}: deadlock"
            )
    return max(clock)


def _sources(step: Step, rank: int) -> list[int]:
    return list(step.peers) if step.op is Op.WAIT else step.senders(rank)


def _targets(step: Step) -> tuple[int, ...]:
    if step.op is Op.SIGNAL:
        return step.peers
    return (step.send_peer,) if step.op.sends and step.send_peer is not None else ()
