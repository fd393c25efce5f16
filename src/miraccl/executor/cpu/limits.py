"""What CPU ranks cannot run of the schedules that the verifier finds right; all ranks refuse it alike, before anything is sent.

Only schedules of users come near these limits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from miraccl.errors import InvalidUsage
from miraccl.executor.cpu.kernels.layout import NSLOTS
from miraccl.executor.cpu.sizes import ALIGN
from miraccl.schedule.ir import Buffer, Op, Schedule, Step
from miraccl.schedule.text import format_location

SYNCS = frozenset((Op.SIGNAL, Op.WAIT, Op.BARRIER))
#: A part of a step that happens at once: the ranks taken from, those posted to, and what.
StepPart = tuple[Sequence[int], Sequence[int], str]
MESSAGE, SIGNAL, BARRIER_SIGNAL = "a message", "a signal", "a signal of a barrier"


def check_limits(schedule: Schedule) -> None:
    """Raise ``InvalidUsage`` with the first step that cannot be run."""
    if schedule.needs_addressable_memory and schedule.scratch_chunks:
        _check_remote_memory(schedule)
    if schedule.ops & SYNCS:
        for channel in range(schedule.nchannels):
            _check_order(schedule, channel)


def check_width(schedule: Schedule, slot_bytes: int) -> None:
    """Raise ``InvalidUsage`` where a slot has no room for a message of the widest step."""
    if slot_bytes // schedule.widest < ALIGN:
        raise InvalidUsage(
            f"a step of {schedule.name} moves {schedule.widest} chunks, too many for slots of {slot_bytes} bytes"
        )


def _check_remote_memory(schedule: Schedule) -> None:
    """Signals tell peers where inputs and outputs lie, not where scratch does."""
    for number, channel in enumerate(schedule.channels):
        for rank, steps in enumerate(channel):
            for position, step in enumerate(steps):
                if step.remote is not None and step.remote.buffer is Buffer.SCRATCH:
                    raise InvalidUsage(
                        f"{format_location(schedule, number, rank, position)}: peers cannot address scratch memory on CPUs"
                    )


def _check_order(schedule: Schedule, channel: int) -> None:
    """Signals go through the FIFO of the messages: they are taken in the order in which both were posted, and need places there."""
    nranks, programs = schedule.nranks, schedule.channels[channel]
    fifos: defaultdict[tuple[int, int], deque[str]] = defaultdict(deque)  # by sender and receiver
    parts = [
        [(i, part) for i, step in enumerate(steps) for part in _parts(step, r, nranks)]
        for r, steps in enumerate(programs)
    ]
    positions, ready = [0] * nranks, deque(range(nranks))
    while ready:
        rank = ready.popleft()
        while positions[rank] < len(parts[rank]):
            number, (senders, receivers, kind) = parts[rank][positions[rank]]
            if not all(fifos[sender, rank] for sender in senders) or any(
                len(fifos[rank, peer]) == NSLOTS for peer in receivers
            ):
                break
            for sender in senders:
                if (posted := fifos[sender, rank].popleft()) is not kind:
                    text = f"{posted} is before {kind} from rank {sender}, and CPU ranks take them in the order they were sent in"
                    raise InvalidUsage(
                        f"{format_location(schedule, channel, rank, number)}: {text}"
                    )
            for peer in receivers:
                fifos[rank, peer].append(kind)
            positions[rank] += 1
            ready.extend((*senders, *receivers))
    for rank, (position, steps) in enumerate(zip(positions, parts, strict=True)):
        if position < len(steps):
            text = f"gets stuck on CPUs, where {NSLOTS} messages and signals at most are under way from one rank to another"
            raise InvalidUsage(
                f"{format_location(schedule, channel, rank, steps[position][0])}: {text}"
            )


def sync_peers(step: Step, rank: int, nranks: int) -> list[int]:
    """The other ranks that a signal, wait or barrier is for."""
    return [
        peer for peer in (range(nranks) if step.op is Op.BARRIER else step.peers) if peer != rank
    ]


def _parts(step: Step, rank: int, nranks: int) -> Iterator[StepPart]:
    """A step as the engine does it (``kernels.steps``)."""
    if step.op not in SYNCS:
        yield (
            step.senders(rank),
            [step.send_peer] if step.op.sends and step.send_peer is not None else [],
            MESSAGE,
        )
        return
    kind = BARRIER_SIGNAL if step.op is Op.BARRIER else SIGNAL
    peers = sync_peers(step, rank, nranks)
    if step.op is not Op.WAIT:
        yield from (((), (peer,), kind) for peer in peers)
    if step.op is not Op.SIGNAL:
        yield from (((peer,), (), kind) for peer in peers)
