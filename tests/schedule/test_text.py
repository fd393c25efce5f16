"""Text and schedules convert into each other without loss; errors name the line."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miraccl.errors import ScheduleError
from miraccl.schedule import catalog
from miraccl.schedule.ir import OPERANDS, Buffer, Op, Ref, Schedule, Step
from miraccl.schedule.text import dump, format_location, format_step, parse, parse_step
from miraccl.types import Collective
from tests.schedule.helpers import BUILTIN, schedules

REFS = st.builds(Ref, st.sampled_from(Buffer), st.integers(0, 50), st.just(2))
RANKS = st.integers(0, 9)


@st.composite
def steps(draw: Any) -> Step:
    op = draw(st.sampled_from(Op))
    src, dst, recv_peer, send_peer, peers = OPERANDS[op]
    return Step(
        op=op,
        src=draw(REFS) if src else None,
        dst=draw(REFS) if dst else None,
        recv_peer=draw(RANKS) if recv_peer else None,
        send_peer=draw(RANKS) if send_peer else None,
        peers=tuple(draw(st.lists(RANKS, min_size=1, max_size=4))) if peers else (),
    )


@st.composite
def any_schedule(draw: Any) -> Schedule:
    nranks = draw(st.integers(1, 3))
    program = st.lists(steps(), max_size=4).map(tuple)
    channel = st.lists(program, min_size=nranks, max_size=nranks).map(tuple)
    return Schedule(
        name=draw(st.text(max_size=10)),
        collective=draw(st.sampled_from(Collective)),
        nranks=nranks,
        parts=draw(st.integers(1, 9)),
        root=draw(st.integers(0, nranks - 1)),
        scratch_chunks=draw(st.integers(0, 9)),
        notes=tuple(draw(st.lists(st.text(max_size=10), max_size=2))),
        channels=tuple(draw(st.lists(channel, min_size=1, max_size=2))),
    )


@given(schedule=any_schedule())
@settings(max_examples=200, deadline=None)
def test_round_trip(schedule):
    again = parse(dump(schedule))
    assert again == schedule
    assert again.notes == schedule.notes
    assert dump(again) == dump(schedule)


@given(step=steps())
@settings(deadline=None)
def test_step_round_trip(step):
    assert parse_step(format_step(step)) == step


@pytest.mark.parametrize(("name", "collective"), BUILTIN)
def test_round_trip_of_built_in_schedules(name, collective):
    for schedule in schedules(name, collective, (1, 4, 7)):
        assert parse(dump(schedule)) == schedule


TEXT = """\
# a comment
schedule "two \\"ranks\\" # here" reduce nranks 2 parts 1 root 1
note "n"

channel 0
  rank 0
    send input[0] to 1   # its part
rank 1
recv_reduce_copy input[0] -> output[0] from 0
"""


def test_hand_written_text():
    schedule = parse(TEXT)
    assert schedule.name == 'two "ranks" # here'
    assert schedule.root == 1
    assert schedule.notes == ("n",)
    assert [len(steps) for steps in schedule.channels[0]] == [1, 1]
    assert format_location(schedule, 0, 1, 0).endswith(
        "channel 0, rank 1, step 0 (recv_reduce_copy input[0] -> output[0] from 0)"
    )


HEAD = 'schedule "x" all_reduce nranks 1 parts 2\nchannel 0\nrank 0\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "contains no schedule"),
        ("channel 0", "line 1: a schedule starts with a line such as"),
        ("schedule x all_reduce nranks 1", "line 1: cannot parse"),
        ('schedule "x" all_reduce nranks', "line 1: cannot parse"),
        ('schedule "x" all_reduce nranks ' + "9" * 5000, "line 1: cannot parse"),
        (
            'schedule "x" all_recude nranks 1',
            "line 1: 'all_recude' is not a collective; allowed are all_reduce",
        ),
        ('schedule "x" all_reduce ranks 1', "line 1: unknown field 'ranks'"),
        ('schedule "x" all_reduce parts 1', "line 1: nranks is missing"),
        ('schedule "\\q" all_reduce nranks 1', 'line 1: "\\q" is not a quoted string'),
        (HEAD + HEAD, "line 4: a text contains one schedule only"),
        ('schedule "x" all_reduce nranks 1\nrank 0', "line 2: a rank must follow a channel"),
        (
            'schedule "x" all_reduce nranks 1\nchannel 1',
            "line 2: channels must be numbered in order: expected channel 0",
        ),
        (
            'schedule "x" all_reduce nranks 1\nchannel 0\nrank 1',
            "line 3: ranks must be numbered in order: expected rank 0",
        ),
        (
            'schedule "x" all_reduce nranks 1\nchannel 0\ncopy input[0] -> output[0]',
            "line 3: a step must follow a channel and a rank",
        ),
        ('schedule "x" all_reduce nranks 2\nchannel 0\nrank 0', "channel 0 has 1 ranks, not 2"),
        ('schedule "x" all_reduce nranks 1', "at least 1"),
        (HEAD + "note 7", "line 4: 7 is not a quoted string"),
        (HEAD + "sned input[0] to 1", "line 4: 'sned' is not a primitive; allowed are send, recv"),
        (HEAD + "\n\nsend inptu[0] to 1", "line 6: 'inptu[0]' is not a reference such as"),
        (HEAD + "send input[0+0] to 1", "line 4: cannot make a reference"),
        (HEAD + "send input[0] to one", "line 4: 'one' is not a rank"),
        (HEAD + "send input[0] to", "line 4: 'to' needs an operand"),
        (HEAD + "send input[0]", "line 4: SEND needs send_peer"),
        (HEAD + "send input[0] input[1] to 1", "line 4: src is given twice"),
        (HEAD + "send input[0] to 1 to 2", "line 4: to is given twice"),
        (HEAD + "recv -> output[0] from 1 peers 2", "line 4: RECV has no peers"),
        (HEAD + "copy input[0] -> output[0+2]", "line 4: COPY: src has 1 chunks, dst 2"),
    ],
)
def test_errors_name_the_line(text, words):
    with pytest.raises(ScheduleError) as caught:
        parse(text)
    assert words in str(caught.value)


@given(text=st.text(alphabet='schedule nk01[+]->"# \nrptofm', max_size=120))
@settings(max_examples=200, deadline=None)
def test_any_text_parses_or_raises_schedule_error(text):
    for start in ("", HEAD):
        with suppress(ScheduleError):
            parse(start + text)


def test_a_damaged_dump_is_detected():
    schedule = catalog.build("ring", Collective.ALL_REDUCE, 3)
    lines = dump(schedule).splitlines()
    for number in range(len(lines)):
        rest = "\n".join(lines[:number] + lines[number + 1 :])
        with suppress(ScheduleError):
            assert parse(rest) != schedule
    assert replace(schedule, notes=("x",)) == schedule
