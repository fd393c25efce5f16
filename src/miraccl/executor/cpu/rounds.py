"""In which rounds of a program signals, waits and barriers are done.

A round is the whole schedule on one piece of every chunk, so doing all of them in every round is always right.  Many are needed once:
signals before all data say that buffers are ready, those after all data that everything is done, and rounds touch different pieces of
memory.  Such a signal may be left out of the other rounds if its wait is, too, and if nothing else hangs on the order of the two: on each
rank those of the first round are the first steps of the program, those of the last round the last ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.limits import SYNCS, sync_peers
from miraccl.schedule.ir import Op, Schedule, Step

Program = Sequence[Step]
#: (who signals, who waits, whether at a barrier)
Signal = tuple[int, int, bool]


def rounds_of(schedule: Schedule, *, signalled: bool) -> list[list[int]]:
    """For each rank the ``layout.*_ROUND`` of its steps, channel after channel; data move in every round. ``opened`` as in ``lower``."""
    programs = [
        [step for channel in schedule.channels for step in channel[rank]]
        for rank in range(schedule.nranks)
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
    """How many steps each program begins with that do nothing but signal and wait, where both ends of every signal are among them."""
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
    """How many steps come before the first one with a signal that has no other end."""
    own_sent, own_taken = Counter[Signal](), Counter[Signal]()
    for number, step in enumerate(steps):
        own_sent.update(signals := list(_sent_signals(step, rank, nranks)))
        own_taken.update(waits := list(_received_signals(step, rank, nranks)))
        if any(own_sent[end] > received[end] for end in signals) or any(
            own_taken[end] > sent[end] for end in waits
        ):
            return number
    return len(steps)


def _sent_signals(step: Step, rank: int, nranks: int) -> Iterator[Signal]:
    if step.op is not Op.WAIT:
        yield from ((rank, peer, step.op is Op.BARRIER) for peer in sync_peers(step, rank, nranks))


def _received_signals(step: Step, rank: int, nranks: int) -> Iterator[Signal]:
    if step.op is not Op.SIGNAL:
        yield from ((peer, rank, step.op is Op.BARRIER) for peer in sync_peers(step, rank, nranks))
