"""Mutated schedules are rejected by the verifier or correct under every interleaving."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from miraccl.errors import ScheduleError
from miraccl.schedule import catalog
from miraccl.schedule.interpret import expected_outputs, interpret
from miraccl.schedule.ir import OPERANDS, Buffer, Op, Ref, Schedule, Step
from miraccl.schedule.layout import in_place_forms
from miraccl.schedule.passes import split_channels
from miraccl.schedule.verify import verify
from miraccl.types import Collective
from tests.schedule.helpers import BUILTIN, make_inputs

#: Two slots suffice for all but the schedules between hosts, whose FIFOs are deeper.
CASES = [
    case
    for case in BUILTIN
    if case[1] is not Collective.BARRIER and not catalog.get(case[0]).network
]


@st.composite
def correct_schedules(draw: Any) -> Schedule:
    name, collective = draw(st.sampled_from(CASES))
    sizes = [n for n in range(2, 6) if catalog.get(name).supports(collective, n)]
    nranks = draw(st.sampled_from(sizes))
    schedule = catalog.build(name, collective, nranks, draw(st.integers(0, nranks - 1)))
    if draw(st.booleans()):
        try:
            return split_channels(schedule, 2)
        except ValueError:
            pass
    return schedule


def _changed_ref(draw: Any, ref: Ref) -> Ref:
    what = draw(st.sampled_from(["buffer", "index", "chunks"]))
    if what == "buffer":
        return Ref(draw(st.sampled_from(list(Buffer))), ref.index, ref.chunks)
    if what == "index":
        return Ref(ref.buffer, max(0, ref.index + draw(st.integers(-3, 3))), ref.chunks)
    return Ref(ref.buffer, ref.index, max(1, ref.chunks + draw(st.integers(-1, 1))))


def _changed_step(draw: Any, step: Step, nranks: int) -> Step:
    """Return ``step`` with one operand changed, or another primitive with the same operands."""
    fields = [
        field
        for field in ("src", "dst", "recv_peer", "send_peer", "peers")
        if getattr(step, field) not in (None, ())
    ]
    field = draw(st.sampled_from([*fields, "op"]))
    if field == "op":
        return replace(
            step, op=draw(st.sampled_from([op for op in Op if OPERANDS[op] == OPERANDS[step.op]]))
        )
    if field == "peers":
        return replace(
            step,
            peers=tuple(draw(st.lists(st.integers(0, nranks - 1), min_size=1, max_size=nranks))),
        )
    if field.endswith("peer"):
        return replace(step, **{field: draw(st.integers(0, nranks - 1))})
    changed: dict[str, Any] = {field: _changed_ref(draw, getattr(step, field))}
    return replace(step, **changed)


@st.composite
def mutants(draw: Any) -> Schedule:
    """Correct schedules with one step changed, dropped, doubled, swapped or moved."""
    schedule: Schedule = draw(correct_schedules())
    channels = [[list(steps) for steps in ranks] for ranks in schedule.channels]
    spots = [
        (c, r, k)
        for c, ranks in enumerate(channels)
        for r, steps in enumerate(ranks)
        for k in range(len(steps))
    ]
    channel, rank, number = draw(st.sampled_from(spots))
    steps = channels[channel][rank]
    kind = draw(
        st.sampled_from(["change", "change", "change", "drop", "double", "swap", "rank", "channel"])
    )
    if kind == "change":
        try:
            steps[number] = _changed_step(draw, steps[number], schedule.nranks)
        except ValueError:
            assume(False)
    elif kind == "drop":
        del steps[number]
    elif kind == "double":
        steps.insert(number, steps[number])
    elif kind == "swap":
        assume(number + 1 < len(steps))
        steps[number], steps[number + 1] = steps[number + 1], steps[number]
    else:
        step = steps.pop(number)
        target = (
            channels[channel][draw(st.integers(0, schedule.nranks - 1))]
            if kind == "rank"
            else draw(st.sampled_from(channels))[rank]
        )
        target.insert(draw(st.integers(0, len(target))), step)
    return replace(
        schedule, channels=tuple(tuple(tuple(steps) for steps in ranks) for ranks in channels)
    )


def is_correct(schedule: Schedule, in_place: bool, direct: bool, seed: int) -> bool:
    """Return True if the interpreter computes the collective in several interleavings."""
    inputs = make_inputs(schedule, 2 * schedule.parts + 1, seed)
    want = expected_outputs(schedule.collective, inputs, root=schedule.root)
    for shuffle in (
        None,
        random.Random(seed).shuffle,
        random.Random(seed + 1).shuffle,
        lambda turns: turns.sort(reverse=True),
    ):
        try:
            got = interpret(
                schedule, inputs, in_place=in_place, fifo_depth=2, direct=direct, shuffle=shuffle
            )
        except ScheduleError:
            return False
        for a, b in zip(got, want):
            if a is not None and b is not None and not np.array_equal(a, b):
                return False
    return True


@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(mutant=mutants(), direct=st.booleans(), in_place=st.booleans(), seed=st.integers(0, 1000))
def test_accepted_mutants_are_correct(mutant, direct, in_place, seed):
    in_place = in_place and True in in_place_forms(mutant.collective)
    try:
        verify(mutant, in_place=in_place, fifo_depth=2, direct=direct)
    except ScheduleError:
        return
    assert is_correct(mutant, in_place, direct, seed)


@settings(max_examples=100, deadline=None)
@given(schedule=correct_schedules(), seed=st.integers(0, 1000))
def test_correct_schedules_are_accepted(schedule, seed):
    """The schedules that are mutated are accepted, and correct."""
    verify(schedule, fifo_depth=2)
    assert is_correct(schedule, False, False, seed)


@pytest.mark.parametrize("name", ["ring", "two_shot_put", "double_binary_tree", "pairwise"])
def test_every_dropped_step_is_detected(name):
    """Every step of these schedules is needed out of place."""
    collective = min(catalog.get(name).collectives)
    schedule = catalog.build(name, collective, 4)
    for channel, ranks in enumerate(schedule.channels):
        for rank, steps in enumerate(ranks):
            for number in range(len(steps)):
                channels = [[list(s) for s in r] for r in schedule.channels]
                del channels[channel][rank][number]
                mutant = replace(
                    schedule, channels=tuple(tuple(tuple(s) for s in r) for r in channels)
                )
                with pytest.raises(ScheduleError):
                    verify(mutant)
