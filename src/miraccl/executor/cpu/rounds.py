"""Rounds of a program in which signals, waits and barriers are executed.

A round is the whole schedule on one slice of every chunk, so executing all of them in every round
is always correct. Many are needed once: signals before all data say that buffers are ready, those
after all data that everything is done, and rounds access disjoint memory. Such a signal may be
omitted from the other rounds if its wait is as well, and if nothing else depends on the order of
the two: on each rank those of the first round are the first steps of the program, those of the last
round the last ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.limits import SYNCS, sync_peers
from miraccl.schedule.ir import Op, Schedule, Step

Program = Sequence[Step]
#: (signalling rank, waiting rank, True for a barrier)
Signal = tuple[int, int, bool]


def rounds_of(schedule: Schedule, *, signalled: bool) -> list[list[int]]:
    """Return for each rank the ``layout.*_ROUND`` of its steps, channel after channel.

    Data move in every round. ``signalled``: see ``lower``.
    """
    programs = [
        [step for channel in schedule.channels for step in channel[rank]]
        for rank in range(schedule.participants)
    ]
    if not schedule.ops & SYNCS:
        return [[layout.EVERY_ROUND] * len(steps) for steps in programs]
    first = layout.NEVER if signalled else layout.FIRST_ROUND
    leading, trailing = (
        _matched_prefixes(programs),
        _matched_prefixes([steps[::-1] for steps in programs]),
    )
    return [
        [
            first
            if i < before
            else layout.LAST_ROUND
            if i >= len(steps) - after
            else layout.EVERY_ROUND
            for i in range(len(steps))
        ]
        for steps, before, after in zip(programs, leading, trailing, strict=True)
    ]


def _matched_prefixes(programs: Sequence[Program]) -> list[int]:
    """Return the length of each program's prefix of signals and waits that match each other."""
    lengths = [
        next((i for i, step in enumerate(steps) if step.op not in SYNCS), len(steps))
        for steps in programs
    ]
    while True:
        sent, received = Counter[Signal](), Counter[Signal]()
        for rank, steps in enumerate(programs):
            for step in steps[: lengths[rank]]:
                sent.update(_sent_signals(step, rank, len(programs)))
                received.update(_received_signals(step, rank, len(programs)))
        fewer = [
            _paired_prefix(steps[: lengths[rank]], rank, len(programs), sent, received)
            for rank, steps in enumerate(programs)
        ]
        if fewer == lengths:
            return lengths
        lengths = fewer


def _paired_prefix(
    steps: Program, rank: int, nranks: int, sent: Counter[Signal], received: Counter[Signal]
) -> int:
    """Return the number of steps before the first signal or wait without its counterpart."""
    own_sent, own_received = Counter[Signal](), Counter[Signal]()
    for number, step in enumerate(steps):
        own_sent.update(signals := list(_sent_signals(step, rank, nranks)))
        own_received.update(waits := list(_received_signals(step, rank, nranks)))
        if any(own_sent[end] > received[end] for end in signals) or any(
            own_received[end] > sent[end] for end in waits
        ):
            return number
    return len(steps)


def _sent_signals(step: Step, rank: int, nranks: int) -> Iterator[Signal]:
    if step.op is not Op.WAIT:
        yield from ((rank, peer, step.op is Op.BARRIER) for peer in sync_peers(step, rank, nranks))


def _received_signals(step: Step, rank: int, nranks: int) -> Iterator[Signal]:
    if step.op is not Op.SIGNAL:
        yield from ((peer, rank, step.op is Op.BARRIER) for peer in sync_peers(step, rank, nranks))
