"""Cycles in the wait-for graph: found exactly if none of their waits can end."""

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


def state(
    *waits: Wait | None, inits: tuple[str, ...] = (), **progress: dict[str, Any]
) -> BlockedState:
    """A node with these waits, started creations, and progress by communicator key."""
    zero = {"sent": [0, 0, 0], "received": [0, 0, 0]}
    return BlockedState(
        [wait for wait in waits if wait],
        {key: RankProgress(**(zero | counts)) for key, counts in progress.items()},
        inits,
    )


def cycle_names(start: str, states: Mapping[str, BlockedState]) -> list[str]:
    """Names of the nodes in the cycle, from states that have been through JSON."""
    decoded = {
        name: BlockedState.from_json(json.loads(json.dumps(each.to_json())))
        for name, each in states.items()
    }
    return [name for name, _ in cycles.find_cycle(start, decoded)[1]]


IN_REDUCE = WaitForOperation(
    key="a", awaited=("1",), op="", number=5
)  # process 0 waits for process 1
IN_SPLIT = WaitForControlOp(key="a", awaited=("0", "2"), op="", number=2)
NEEDS_CREDIT = replace(IN_REDUCE, must_receive=3)
IN_INIT = WaitForInit(key="b", awaited=("0",), op="")


@pytest.mark.parametrize(
    ("mine", "theirs", "cycle"),
    [
        (state(IN_REDUCE, a={"control_ops": 1}), state(IN_SPLIT, a={"operations": 4}), True),
        (
            state(IN_REDUCE, a={"control_ops": 1}),
            state(IN_SPLIT, a={"operations": 5}),
            False,
        ),  # it has arrived: its data may be in flight
        (
            state(IN_REDUCE, a={"control_ops": 2}),
            state(IN_SPLIT, a={"operations": 4}),
            False,
        ),  # process 0 has been through the split
        (
            state(IN_REDUCE, a={"control_ops": 1}),
            state(IN_SPLIT, a={"operations": 4, "background": True}),
            False,
        ),  # submitted, perhaps not started
        (
            state(IN_REDUCE, a={"control_ops": 1}),
            state(None, a={"operations": 4}),
            False,
        ),  # process 1 is not blocked
        (
            state(IN_REDUCE, a={"control_ops": 1}),
            state(IN_SPLIT),
            False,
        ),  # process 1 has left the communicator
        (
            state(NEEDS_CREDIT, a={"control_ops": 1}),
            state(IN_SPLIT, a={"operations": 4, "received": [2, 0, 0]}),
            True,
        ),
        (
            state(NEEDS_CREDIT, a={"control_ops": 1}),
            state(IN_SPLIT, a={"operations": 4, "received": [3, 0, 0]}),
            False,
        ),
        (state(IN_REDUCE), state(IN_INIT, a={"operations": 4}), True),
        (state(IN_REDUCE, inits=("b",)), state(IN_INIT, a={"operations": 4}), False),
    ],
)
def test_cycle_of_two_hosts(mine: BlockedState, theirs: BlockedState, cycle: bool) -> None:
    assert bool(cycle_names("0", {"0": mine, "1": theirs})) == cycle


RECEIVES = WaitForMessage(key="m", awaited=("1",), op="", number=7)
SENDS = WaitForCredit(key="m", awaited=("1",), op="", number=4)


@pytest.mark.parametrize(
    ("mine", "theirs", "cycle"),
    [
        (RECEIVES, {"sent": [7, 0, 0]}, True),
        (RECEIVES, {"sent": [8, 0, 0]}, False),  # the message is in flight
        (RECEIVES, {"sent": [7, 0, 0], "sends": [0]}, False),
        (RECEIVES, {"sent": [7, 0, 0], "sends": [2], "receives": [0]}, True),
        (SENDS, {"received": [3, 0, 0]}, True),
        (SENDS, {"received": [4, 0, 0]}, False),
        (SENDS, {"received": [3, 0, 0], "receives": [0]}, False),
        (SENDS, {"received": [3, 0, 0], "receives": [ANY_RANK]}, False),
        (SENDS, {"received": [3, 0, 0], "receives": [2], "sends": [0]}, True),
    ],
)
def test_message_against_collective(mine: Wait, theirs: dict[str, Any], cycle: bool) -> None:
    other = WaitForOperation(key="a", awaited=("0",), op="", number=1, rank=1)
    assert bool(cycle_names("0", {"0": state(mine, a={}), "1": state(other, m=theirs)})) == cycle


LAUNCH = WaitForOperation(
    key="gpu", awaited=("1/",), op="", number=5
)  # the stream of process 0 waits for that of process 1
ON_HOST = WaitForOperation(
    key="a", awaited=("0",), op="", number=1, rank=1
)  # process 1 waits for process 0
SYNCHRONIZES = WaitForStream(key="a", awaited=("0/",), op="")
STREAM_IDLE = WaitForHost(key=ON_HOST.ident, awaited=("1",), op="")


@pytest.mark.parametrize(
    ("mine", "waits", "theirs", "here", "cycle"),
    [
        (SYNCHRONIZES, [LAUNCH], ON_HOST, state(STREAM_IDLE, gpu={"operations": 4}), True),
        (
            SYNCHRONIZES,
            [LAUNCH],
            ON_HOST,
            state(STREAM_IDLE, gpu={"operations": 5}),
            False,
        ),  # its stream has arrived
        (
            SYNCHRONIZES,
            [LAUNCH],
            ON_HOST,
            state(gpu={"operations": 4}),
            False,
        ),  # its stream is not idle
        (
            SYNCHRONIZES,
            [LAUNCH],
            replace(ON_HOST, number=2),
            state(STREAM_IDLE, gpu={"operations": 4}),
            False,
        ),  # the host is in a later wait
        (
            SYNCHRONIZES,
            [STREAM_IDLE],
            ON_HOST,
            state(STREAM_IDLE, gpu={"operations": 4}),
            False,
        ),  # the stream has completed
        (
            None,
            [LAUNCH],
            ON_HOST,
            state(STREAM_IDLE, gpu={"operations": 4}),
            False,
        ),  # process 1 is not blocked
        (
            SYNCHRONIZES,
            [replace(LAUNCH, awaited=("2/",)), LAUNCH],
            ON_HOST,
            state(STREAM_IDLE, gpu={"operations": 4}),
            True,
        ),
    ],
)
def test_host_that_waits_for_its_stream(
    mine: Wait | None, waits: list[Wait], theirs: Wait, here: BlockedState, cycle: bool
) -> None:
    states = {
        "0": state(mine, a={}),
        "1": state(theirs, a={}),
        "0/": state(*waits, gpu={}),
        "1/": here,
    }
    assert cycle_names("1", states) == (["1", "0", "0/", "1/"] if cycle else [])


PACKETS = WaitForPackets(key="gpu", awaited=("1/",), op="", number=3, suspended=2, counter="sent")
BACK = replace(LAUNCH, awaited=("0/",))


@pytest.mark.parametrize(
    ("mine", "theirs", "cycle"),
    [
        (PACKETS, state(BACK, gpu={"sent": [2, 0]}), True),
        (PACKETS, state(BACK, gpu={"sent": [3, 0]}), False),
        (
            replace(PACKETS, counter="received"),
            state(BACK, gpu={"sent": [3, 0], "received": [2, 0]}),
            True,
        ),
        (
            PACKETS,
            state(
                replace(PACKETS, awaited=("0/",), number=1, rank=1, suspended=1),
                gpu={"sent": [2, 0]},
            ),
            True,
        ),
        (
            PACKETS,
            state(
                replace(PACKETS, awaited=("0/",), number=1, rank=1, suspended=2),
                gpu={"sent": [2, 0]},
            ),
            False,
        ),  # the peer still serves rank 0
    ],
)
def test_packets_in_kernels(mine: Wait, theirs: BlockedState, cycle: bool) -> None:
    here = state(mine, gpu={"operations": 4, "sent": [0, 0], "received": [0, 0]})
    assert bool(cycle_names("0/", {"0/": here, "1/": theirs})) == cycle


def test_logged_ops_of_one_number() -> None:
    inside = replace(LAUNCH, key="a", number=5 + (1 << 16))
    states = {
        "0/": state(inside, a={"op_log": {"5": [7, 1]}}),
        "1/": state(a={"op_log": {"5": [8, 1], "4": [6, 1]}}),
        "2/": state(),
    }
    assert cycles.logged_ops(inside, states) == {"0/": [7, 1], "1/": [8, 1]}


def test_cycle_of_three_and_a_node_that_waits_for_it() -> None:
    states = {
        str(r): state(
            WaitForOperation(key=str(r), awaited=(str((r + 1) % 3),), op="", number=1),
            inits=(),
            **{str(k): {} for k in range(3)},
        )
        for r in range(3)
    }
    assert cycle_names("1", states) == ["1", "2", "0"]
    states["3"] = state(
        WaitForControlOp(key="0", awaited=("0",), op="", number=1), inits=(), **{"0": {}}
    )
    assert cycle_names("3", states) == ["0", "1", "2"]
    states["2"] = replace(states["2"], waits=[])
    assert not cycle_names("1", states)
    assert not cycle_names("4", states)


def test_waits_for_different_peers_have_different_idents() -> None:
    """Between the two waits the host may have called something on GPU memory."""
    for wait in (RECEIVES, SENDS, PACKETS):
        assert replace(wait, awaited=("2",)).ident != wait.ident
