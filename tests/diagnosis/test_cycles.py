"""Who waits for whom, from what processes tell: only a circle of waits that certainly do not end is one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from miraccl.diagnosis import cycles
from miraccl.diagnosis.waits import (
    ANY_RANK,
    BlockedState,
    RankProgress,
    Wait,
    WaitForControlOp,
    WaitForCredit,
    WaitForHost,
    WaitForInit,
    WaitForMessage,
    WaitForOperation,
    WaitForPackets,
    WaitForStream,
)


def place(*waits: Wait | None, made: tuple[str, ...] = (), **come: dict[str, Any]) -> BlockedState:
    """Of a program or stream: its waits, creations it has come to, and how far it has come in communicators, by key."""
    nothing = {"sent": [0, 0, 0], "taken": [0, 0, 0]}
    return BlockedState(
        [wait for wait in waits if wait],
        {key: RankProgress(**(nothing | counts)) for key, counts in come.items()},
        made,
    )


def names(start: str, places: Mapping[str, BlockedState]) -> list[str]:
    """Those in the circle, from what goes between processes."""
    told = {
        name: BlockedState.from_json(json.loads(json.dumps(place.to_json())))
        for name, place in places.items()
    }
    return [name for name, _ in cycles.find_cycle(start, told)[1]]


IN_A = WaitForOperation(key="a", awaited=("1",), op="", number=5)  # of process 0, for process 1
MEETS = WaitForControlOp(key="a", awaited=("0", "2"), op="", number=2)  # of process 1
TAKES = replace(IN_A, taken=3)
MAKES = WaitForInit(key="b", awaited=("0",), op="")


@pytest.mark.parametrize(
    ("mine", "theirs", "circle"),
    [
        (place(IN_A, a={"meetings": 1}), place(MEETS, a={"operations": 4}), True),
        (
            place(IN_A, a={"meetings": 1}),
            place(MEETS, a={"operations": 5}),
            False,
        ),  # it has come: what it sent may be under way
        (
            place(IN_A, a={"meetings": 2}),
            place(MEETS, a={"operations": 4}),
            False,
        ),  # this one has been there
        (
            place(IN_A, a={"meetings": 1}),
            place(MEETS, a={"operations": 4, "aside": True}),
            False,
        ),  # called, if not begun
        (place(IN_A, a={"meetings": 1}), place(None, a={"operations": 4}), False),  # it computes
        (place(IN_A, a={"meetings": 1}), place(MEETS), False),  # it has left
        (
            place(TAKES, a={"meetings": 1}),
            place(MEETS, a={"operations": 4, "taken": [2, 0, 0]}),
            True,
        ),
        (
            place(TAKES, a={"meetings": 1}),
            place(MEETS, a={"operations": 4, "taken": [3, 0, 0]}),
            False,
        ),
        (place(IN_A), place(MAKES, a={"operations": 4}), True),
        (place(IN_A, made=("b",)), place(MAKES, a={"operations": 4}), False),
    ],
)
def test_a_circle_of_two(mine: BlockedState, theirs: BlockedState, circle: bool) -> None:
    assert bool(names("0", {"0": mine, "1": theirs})) == circle


RECEIVES = WaitForMessage(key="m", awaited=("1",), op="", number=7)
SENDS = WaitForCredit(key="m", awaited=("1",), op="", number=4)


@pytest.mark.parametrize(
    ("mine", "theirs", "circle"),
    [
        (RECEIVES, {"sent": [7, 0, 0]}, True),
        (RECEIVES, {"sent": [8, 0, 0]}, False),  # it is under way
        (RECEIVES, {"sent": [7, 0, 0], "sends": [0]}, False),
        (RECEIVES, {"sent": [7, 0, 0], "sends": [2], "receives": [0]}, True),
        (SENDS, {"taken": [3, 0, 0]}, True),
        (SENDS, {"taken": [4, 0, 0]}, False),
        (SENDS, {"taken": [3, 0, 0], "receives": [0]}, False),
        (SENDS, {"taken": [3, 0, 0], "receives": [ANY_RANK]}, False),
        (SENDS, {"taken": [3, 0, 0], "receives": [2], "sends": [0]}, True),
    ],
)
def test_a_message_against_an_operation(mine: Wait, theirs: dict[str, Any], circle: bool) -> None:
    other = WaitForOperation(key="a", awaited=("0",), op="", number=1, rank=1)
    assert bool(names("0", {"0": place(mine, a={}), "1": place(other, m=theirs)})) == circle


LAUNCH = WaitForOperation(
    key="gpu", awaited=("1/",), op="", number=5
)  # of the stream of process 0, for that of process 1
IN_CPU = WaitForOperation(
    key="a", awaited=("0",), op="", number=1, rank=1
)  # of process 1, for process 0
WAITS_FOR_ALL = WaitForStream(key="a", awaited=("0/",), op="")
NO_CALL = WaitForHost(key=IN_CPU.ident, awaited=("1",), op="")


@pytest.mark.parametrize(
    ("mine", "waits", "theirs", "here", "circle"),
    [
        (WAITS_FOR_ALL, [LAUNCH], IN_CPU, place(NO_CALL, gpu={"operations": 4}), True),
        (
            WAITS_FOR_ALL,
            [LAUNCH],
            IN_CPU,
            place(NO_CALL, gpu={"operations": 5}),
            False,
        ),  # it has come
        (
            WAITS_FOR_ALL,
            [LAUNCH],
            IN_CPU,
            place(gpu={"operations": 4}),
            False,
        ),  # something is enqueued
        (
            WAITS_FOR_ALL,
            [LAUNCH],
            replace(IN_CPU, number=2),
            place(NO_CALL, gpu={"operations": 4}),
            False,
        ),  # it has called meanwhile
        (
            WAITS_FOR_ALL,
            [NO_CALL],
            IN_CPU,
            place(NO_CALL, gpu={"operations": 4}),
            False,
        ),  # there is nothing to wait for
        (None, [LAUNCH], IN_CPU, place(NO_CALL, gpu={"operations": 4}), False),  # it computes
        (
            WAITS_FOR_ALL,
            [replace(LAUNCH, awaited=("2/",)), LAUNCH],
            IN_CPU,
            place(NO_CALL, gpu={"operations": 4}),
            True,
        ),
    ],
)
def test_a_program_that_waits_for_its_stream(
    mine: Wait | None, waits: list[Wait], theirs: Wait, here: BlockedState, circle: bool
) -> None:
    places = {
        "0": place(mine, a={}),
        "1": place(theirs, a={}),
        "0/": place(*waits, gpu={}),
        "1/": here,
    }
    assert names("1", places) == (["1", "0", "0/", "1/"] if circle else [])


ROWS = WaitForPackets(key="gpu", awaited=("1/",), op="", number=3, suspended=2, counter="sent")
BACK = replace(LAUNCH, awaited=("0/",))


@pytest.mark.parametrize(
    ("mine", "theirs", "circle"),
    [
        (ROWS, place(BACK, gpu={"sent": [2, 0]}), True),
        (ROWS, place(BACK, gpu={"sent": [3, 0]}), False),
        (replace(ROWS, what="taken"), place(BACK, gpu={"sent": [3, 0], "taken": [2, 0]}), True),
        (
            ROWS,
            place(replace(ROWS, awaited=("0/",), number=1, rank=1, holds=1), gpu={"sent": [2, 0]}),
            True,
        ),
        (
            ROWS,
            place(replace(ROWS, awaited=("0/",), number=1, rank=1, holds=2), gpu={"sent": [2, 0]}),
            False,
        ),  # it may send
    ],
)
def test_messages_in_kernels(mine: Wait, theirs: BlockedState, circle: bool) -> None:
    here = place(mine, gpu={"operations": 4, "sent": [0, 0], "taken": [0, 0]})
    assert bool(names("0/", {"0/": here, "1/": theirs})) == circle


def test_operations_of_one_number_that_differ() -> None:
    inside = replace(LAUNCH, key="a", number=5 + (1 << 16))
    places = {
        "0/": place(inside, a={"called": {"5": [7, 1]}}),
        "1/": place(a={"called": {"5": [8, 1], "4": [6, 1]}}),
        "2/": place(),
    }
    assert cycles.logged_ops(inside, places) == {"0/": [7, 1], "1/": [8, 1]}


def test_circles_of_three_and_those_who_wait_for_one() -> None:
    places = {
        str(r): place(
            WaitForOperation(key=str(r), awaited=(str((r + 1) % 3),), op="", number=1),
            made=(),
            **{str(k): {} for k in range(3)},
        )
        for r in range(3)
    }
    assert names("1", places) == ["1", "2", "0"]
    places["3"] = place(
        WaitForControlOp(key="0", awaited=("0",), op="", number=1), made=(), **{"0": {}}
    )
    assert names("3", places) == ["0", "1", "2"]
    places["2"] = replace(places["2"], waits=[])
    assert not names("1", places)
    assert not names("4", places)


def test_messages_of_two_ranks_are_not_one_wait() -> None:
    """Between them the program may have called something on GPU memory."""
    for wait in (RECEIVES, SENDS, ROWS):
        assert replace(wait, awaited=("2",)).ident != wait.ident
