"""Who waits for whom, from what processes tell: only a circle of waits that certainly do not end is one."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from miraccl.bootstrap import solo
from miraccl.comm import whereabouts
from miraccl.comm.lookout import lookout
from miraccl.comm.whereabouts import ANY, CALL, CREATION, MEETING, MESSAGE, OPERATION, ROWS, STREAM, Wait, find_cycle


def program(wait: dict[str, Any] | None, *made: str, **come: dict[str, Any]) -> dict[str, Any]:
    """The report of a process: its wait, creations it has come to, and how far it has come in communicators, by key."""
    nothing = {"operations": 0, "meetings": 0, "sent": [0, 0, 0], "taken": [0, 0, 0], "aside": False, "sends": [], "receives": []}
    return {"wait": wait, "made": list(made), "come": {key: nothing | counts for key, counts in come.items()}}


def wait(kind: str, key: str, *awaited: str, number: int = 0, taken: int = 0, rank: int = 0) -> dict[str, Any]:
    return {"kind": kind, "key": key, "awaited": list(awaited), "number": number, "taken": taken, "rank": rank}


IN_A = wait(OPERATION, "a", "1", number=5)  # of process 0, for process 1
MEETS = wait(MEETING, "a", "0", "2", number=2)  # of process 1


@pytest.mark.parametrize(
    ("mine", "theirs", "circle"),
    [
        (program(IN_A, a={"meetings": 1}), program(MEETS, a={"operations": 4}), True),
        (program(IN_A, a={"meetings": 1}), program(MEETS, a={"operations": 5}), False),  # it has come: what it sent may be under way
        (program(IN_A, a={"meetings": 2}), program(MEETS, a={"operations": 4}), False),  # this one has been there
        (program(IN_A, a={"meetings": 1}), program(MEETS, a={"operations": 4, "aside": True}), False),  # called, if not begun
        (program(IN_A, a={"meetings": 1}), program(None, a={"operations": 4}), False),  # it computes
        (program(IN_A, a={"meetings": 1}), program(MEETS), False),  # it has left
        (program(IN_A | {"taken": 3}, a={"meetings": 1}), program(MEETS, a={"operations": 4, "taken": [2, 0, 0]}), True),
        (program(IN_A | {"taken": 3}, a={"meetings": 1}), program(MEETS, a={"operations": 4, "taken": [3, 0, 0]}), False),
        (program(IN_A), program(wait(CREATION, "b", "0"), a={"operations": 4}), True),
        (program(IN_A, "b"), program(wait(CREATION, "b", "0"), a={"operations": 4}), False),
    ],
)
def test_a_circle_of_two(mine: dict[str, Any], theirs: dict[str, Any], circle: bool) -> None:
    assert bool(find_cycle("0", {"0": mine, "1": theirs})) == circle


RECEIVES = wait(MESSAGE, "m", "1", number=7)
SENDS = wait(MESSAGE, "m", "1", taken=4)


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
        (SENDS, {"taken": [3, 0, 0], "receives": [ANY]}, False),
        (SENDS, {"taken": [3, 0, 0], "receives": [2], "sends": [0]}, True),
    ],
)
def test_a_message_against_an_operation(mine: dict[str, Any], theirs: dict[str, Any], circle: bool) -> None:
    other = wait(OPERATION, "a", "0", number=1, rank=1)
    assert bool(find_cycle("0", {"0": program(mine, a={}), "1": program(other, m=theirs)})) == circle


def stream(*waits: dict[str, Any], **come: dict[str, Any]) -> dict[str, Any]:
    """The report of a stream."""
    return program(None, **come) | {"waits": list(waits)}


LAUNCH = wait(OPERATION, "gpu", "1/", number=5)  # of the stream of process 0, for that of process 1
IN_CPU = wait(OPERATION, "a", "0", number=1, rank=1) | {"ident": "it"}  # of process 1, for process 0
WAITS_FOR_ALL = wait(STREAM, "a", "0/")
NO_CALL = wait(CALL, "it", "1")


@pytest.mark.parametrize(
    ("mine", "waits", "theirs", "here", "circle"),
    [
        (WAITS_FOR_ALL, [LAUNCH], IN_CPU, stream(NO_CALL, gpu={"operations": 4}), True),
        (WAITS_FOR_ALL, [LAUNCH], IN_CPU, stream(NO_CALL, gpu={"operations": 5}), False),  # it has come
        (WAITS_FOR_ALL, [LAUNCH], IN_CPU, stream(gpu={"operations": 4}), False),  # something is enqueued
        (WAITS_FOR_ALL, [LAUNCH], IN_CPU | {"ident": "another"}, stream(NO_CALL, gpu={"operations": 4}), False),  # it has called meanwhile
        (WAITS_FOR_ALL, [NO_CALL], IN_CPU, stream(NO_CALL, gpu={"operations": 4}), False),  # there is nothing to wait for
        (None, [LAUNCH], IN_CPU, stream(NO_CALL, gpu={"operations": 4}), False),  # it computes
        (WAITS_FOR_ALL, [wait(OPERATION, "gpu", "2/", number=9), LAUNCH], IN_CPU, stream(NO_CALL, gpu={"operations": 4}), True),
    ],
)
def test_a_program_that_waits_for_its_stream(
    mine: dict[str, Any] | None, waits: list[dict[str, Any]], theirs: dict[str, Any], here: dict[str, Any], circle: bool
) -> None:
    reports = {"0": program(mine, a={}), "1": program(theirs, a={}), "0/": stream(*waits, gpu={}), "1/": here}
    assert find_cycle("1", reports) == (["1", "0", "0/", "1/"] if circle else [])


@pytest.mark.parametrize(
    ("needs", "theirs", "circle"),
    [
        ({"number": 3}, stream(LAUNCH | {"awaited": ["0/"]}, gpu={"sent": [2, 0]}), True),
        ({"number": 3}, stream(LAUNCH | {"awaited": ["0/"]}, gpu={"sent": [3, 0]}), False),
        ({"number": 3, "taken": 1}, stream(LAUNCH | {"awaited": ["0/"]}, gpu={"sent": [3, 0], "taken": [2, 0]}), True),
        ({"number": 3}, stream(wait(ROWS, "gpu", "0/", number=1, rank=1) | {"holds": 1}, gpu={"sent": [2, 0]}), True),
        ({"number": 3}, stream(wait(ROWS, "gpu", "0/", number=1, rank=1) | {"holds": 2}, gpu={"sent": [2, 0]}), False),  # it may send
    ],
)
def test_messages_in_kernels(needs: dict[str, int], theirs: dict[str, Any], circle: bool) -> None:
    mine = stream(wait(ROWS, "gpu", "1/", **needs) | {"holds": 2}, gpu={"operations": 4, "sent": [0, 0], "taken": [0, 0]})
    assert bool(find_cycle("0/", {"0/": mine, "1/": theirs})) == circle


def test_operations_of_one_number_that_differ() -> None:
    inside = wait(OPERATION, "a", "1/", number=5 + (1 << 16))
    reports = {"0/": stream(inside, a={"called": {"5": [7, 1]}}), "1/": stream(a={"called": {"5": [8, 1], "4": [6, 1]}}), "2/": stream()}
    assert whereabouts.called(inside, reports) == {"0/": [7, 1], "1/": [8, 1]}


def test_circles_of_three_and_those_who_wait_for_one() -> None:
    of = {r: wait(OPERATION, f"{r}", str((r + 1) % 3), number=1) for r in range(3)}
    reports = {str(r): program(of[r], **{str(k): {} for k in range(3)}) for r in range(3)}
    assert find_cycle("1", reports) == ["1", "2", "0"]
    reports["3"] = program(wait(MEETING, "0", "0", number=1), **{"0": {}})
    assert find_cycle("3", reports) == ["0", "1", "2"]
    reports["2"]["wait"] = None
    assert not find_cycle("1", reports)
    assert not find_cycle("4", reports)


def test_only_a_program_with_one_thread_is_in_one_place() -> None:
    me = threading.get_ident()
    here = Wait(kind=OPERATION, key="a", awaited=("1",), op="all_reduce", end=print)
    inside = Wait(kind=MEETING, key="b", awaited=("1",), op="split", end=print)
    begun, end = threading.Event(), threading.Event()

    def thread() -> None:
        begun.set()
        end.wait()

    with whereabouts.Waiting(lambda: here), whereabouts.Waiting(lambda: inside):
        assert whereabouts.only_thread() == me
        assert whereabouts.current() is here  # the outer one ends last
        for make in (threading.Thread(target=thread), threading.Timer(0, thread)):
            make.start()
            begun.wait()
            assert whereabouts.current() is None
            end.set()
            make.join()
            begun.clear()
            end.clear()
        library = threading.Thread(target=end.wait)  # runs no line of the program's
        library.start()
        assert whereabouts.current() is here
        end.set()
        library.join()
    assert not whereabouts._waits


def test_a_communicator_that_is_closed_before_others_are_asked() -> None:
    """What its program waits in now is looked at next."""
    session = solo()
    session.close()
    assert not lookout._ask(session, session.tokens[0])
