"""Shared by the tests of schedules: inputs, all built-in cases, and small hand-made schedules."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from miraccl.schedule import catalog
from miraccl.schedule.ir import Buffer, Schedule, Step
from miraccl.schedule.layout import Counts, block_counts
from miraccl.types import Collective

ALL_TO_ALL = Collective.ALL_TO_ALL
#: numbers of ranks up to 33; TEST_SLOW=1 has all, which takes three times as long
SIZES = tuple(range(1, 34)) if os.environ.get("TEST_SLOW") else (*range(1, 18), 23, 32, 33)
COLLECTIVES = [collective for collective in Collective if collective is not Collective.SEND_RECV]

#: (algorithm, collective) of everything built in
BUILTIN = [
    (name, collective)
    for name in catalog.names()
    for collective in sorted(catalog.get(name).collectives)
]


def schedules(
    name: str, collective: Collective, sizes: Sequence[int], roots: str = "some"
) -> Iterator[Schedule]:
    """Yield the schedules of a built-in algorithm for the supported ``sizes``.

    Rooted collectives are built for the first, middle and last root, or for all roots.
    """
    algorithm = catalog.get(name)
    for nranks in sizes:
        if not algorithm.supports(collective, nranks):
            continue
        choice = (
            {0}
            if not collective.rooted
            else set(range(nranks))
            if roots == "all"
            else {0, nranks // 2, nranks - 1}
        )
        for root in sorted(choice):
            yield algorithm.build(collective, nranks, root)


def make_inputs(
    schedule: Schedule, counts: Counts, seed: int = 0, dtype: Any = np.int64
) -> list[Any]:
    """Return random inputs for each rank of ``schedule``; ``None`` for ranks without one."""
    rng = np.random.default_rng(seed)
    inputs: list[Any] = []
    for rank in range(schedule.nranks):
        if not schedule.chunks_at(Buffer.INPUT, rank):
            inputs.append(None)
            continue
        size = sum(block_counts(schedule, rank, Buffer.INPUT, counts))
        inputs.append(rng.integers(-40, 40, size=size).astype(dtype))
    return inputs


def hand_made(
    collective: Collective, *ranks: Iterable[Step], parts: int = 1, root: int = 0, scratch: int = 0
) -> Schedule:
    """Return a single-channel schedule from the steps of each rank."""
    return Schedule(
        name="hand",
        collective=collective,
        nranks=len(ranks),
        parts=parts,
        root=root,
        scratch_chunks=scratch,
        channels=(tuple(tuple(steps) for steps in ranks),),
    )


def edited(
    schedule: Schedule, rank: int, number: int, *steps: Step, channel: int = 0, drop: int = 1
) -> Schedule:
    """Return ``schedule`` with ``drop`` steps of a rank, from ``number`` on, replaced."""
    program = list(schedule.channels[channel][rank])
    program[number : number + drop] = steps
    ranks = list(schedule.channels[channel])
    ranks[rank] = tuple(program)
    channels = list(schedule.channels)
    channels[channel] = tuple(ranks)
    return replace(schedule, channels=tuple(channels))
