"""Recovery of queue pairs: every order of events of a small model, random orders of larger ones.

The model has two sides with real ``Failover`` machines and a network that delivers the packets of a
queue pair in order, or not at all. Rows carry messages that the receiver writes into a buffer; once
a message is processed, the buffer belongs to the application again, and a later write into it is
the fault that the rule of one copy excludes.
"""

from __future__ import annotations

import copy
import os
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from miraccl.errors import ProtocolError
from miraccl.wire.verbs import failover as machine
from miraccl.wire.verbs.failover import DownRow, Failover, QpState, ReopenRow
from miraccl.wire.verbs.rows import KIND_DOWN, KIND_REOPEN, KIND_REOPENED

SLOW = pytest.mark.skipif(not os.environ.get("TEST_SLOW"), reason="TEST_SLOW=1 runs it (30 s)")


class LateWriteError(AssertionError):
    """A copy was written into a buffer that had been given back."""


@dataclass
class Side:
    """One side: its machine, its rows, and what it has received.

    ``posted[s]`` are the rows of stream s in order: ("message", n) or ("control", kind, row).
    ``unfinished[s]``: message rows that may have to be posted again: (number, message).
    """

    failover: Failover
    count: int
    hasty: bool = False  # posts again without waiting for the peer: the model's known bad variant
    posted: list[int] = field(default_factory=list)
    unfinished: list[list[tuple[int, int]]] = field(default_factory=list)
    arrived: list[dict[int, Any]] = field(default_factory=list)
    processed: list[int] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    paused: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    draining: set[int] = field(default_factory=set)
    pending: deque[tuple[int, Any]] = field(default_factory=deque)
    backlog: deque[int] = field(default_factory=deque)
    heard: set[int] = field(default_factory=set)
    lost: bool = False

    def __post_init__(self) -> None:
        self.posted, self.processed = [0] * self.count, [0] * self.count
        self.unfinished = [[] for _ in range(self.count)]
        self.arrived = [{} for _ in range(self.count)]


class Model:
    """Both sides and the packets between them; ``wires[side, qp]`` are on their way from a side."""

    def __init__(self, count: int, messages: int, failures: int, *, hasty: bool = False) -> None:
        self.count, self.failures = count, failures
        self.sides = [Side(Failover(count, initiator=side == 0), count, hasty) for side in (0, 1)]
        self.wires: dict[tuple[int, int], deque[Any]] = {
            (side, qp): deque() for side in (0, 1) for qp in range(count)
        }
        self.epochs = [[0] * count, [0] * count]
        self.sides[0].backlog.extend(range(messages))
        self.total = messages
        self.now = 0.0

    # --- what can happen next

    def choices(self) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for number, side in enumerate(self.sides):
            if side.lost:
                continue
            if side.backlog or side.pending:
                found += [("send", number)] if self._open_stream(number) is not None else []
            for qp in range(self.count):
                if self.wires[number, qp]:
                    found.append(("deliver", number, qp))
                if qp in side.draining:
                    found.append(("drained", number, qp))
                up = side.failover.pairs[qp].state is QpState.UP
                if self.failures and up and qp not in side.stopped and self._others_up(qp):
                    found.append(("fail", number, qp))
        return found

    def _others_up(self, qp: int) -> bool:
        """The model keeps one path alive: total loss ends a link."""
        return any(
            other != qp
            and all(s.failover.pairs[other].state is QpState.UP for s in self.sides)
            and not any(other in s.stopped for s in self.sides)
            for other in range(self.count)
        )

    def _open_stream(self, number: int) -> int | None:
        side = self.sides[number]
        for stream in range(self.count):
            qp = side.failover.route[stream]
            if stream not in side.paused and side.failover.pairs[qp].state is QpState.UP:
                return stream
        return None

    # --- steps

    def do(self, choice: tuple[Any, ...]) -> None:
        kind, number = choice[0], choice[1]
        side = self.sides[number]
        if kind == "send":
            stream = self._open_stream(number)
            assert stream is not None
            if side.pending:
                self._post(number, stream, ("control", *side.pending.popleft()))
            else:
                self._post(number, stream, ("message", side.backlog.popleft()))
        elif kind == "deliver":
            self._deliver(number, choice[2])
        elif kind == "drained":
            side.draining.discard(choice[2])
            self._carry_out(number, side.failover.on_drained(choice[2], side.processed, self.now))
        else:
            self.failures -= 1
            self._carry_out(number, side.failover.on_failed(choice[2], self.now))

    def _post(self, number: int, stream: int, content: Any) -> None:
        side = self.sides[number]
        side.posted[stream] += 1
        if content[0] == "message":
            side.unfinished[stream].append((side.posted[stream], content[1]))
        qp = side.failover.route[stream]
        packet = (self.epochs[number][qp], stream, side.posted[stream], content)
        self.wires[number, qp].append(packet)

    def _deliver(self, number: int, qp: int) -> None:
        epoch, stream, row, content = self.wires[number, qp].popleft()
        peer = self.sides[1 - number]
        if qp in peer.stopped or epoch != self.epochs[1 - number][qp]:
            return  # the adapter drops it
        peer.heard.add(qp)
        if content[0] == "message" and content[1] in peer.messages:
            raise LateWriteError(f"message {content[1]} again")
        peer.arrived[stream][row] = content
        while peer.processed[stream] + 1 in peer.arrived[stream]:
            peer.processed[stream] += 1
            done = peer.arrived[stream].pop(peer.processed[stream])
            if done[0] == "message":
                peer.messages.append(done[1])
            else:
                self._control(1 - number, done[1], done[2])

    def _control(self, number: int, kind: int, row: Any) -> None:
        side = self.sides[number]
        data = row.encode()
        if kind == KIND_DOWN:
            down = DownRow.decode(data, self.count)
            assert down == row
            self._carry_out(number, side.failover.on_down(down, side.processed, self.now))
        elif kind == KIND_REOPEN:
            reopen = ReopenRow.decode(data, self.count)
            self._carry_out(number, side.failover.on_reopen(reopen, 7, self.now))
        elif kind == KIND_REOPENED:
            self._carry_out(
                number, side.failover.on_reopened(ReopenRow.decode(data, self.count), self.now)
            )

    def _carry_out(self, number: int, instructions: list[machine.Instruction]) -> None:
        side = self.sides[number]
        for each in instructions:
            if isinstance(each, machine.StopPair):
                side.stopped.add(each.qp)
                side.draining.add(each.qp)
                side.paused.update(each.streams)
                if side.hasty:
                    self._resume_hastily(number, each)
            elif isinstance(each, machine.SendRow):
                side.pending.append((each.kind, each.row))
            elif isinstance(each, machine.ResumeStream):
                self._resume(number, each)
            elif isinstance(each, machine.ResetPair | machine.ConnectPair):
                self.epochs[number][each.qp] += isinstance(each, machine.ResetPair)
                self.wires[number, each.qp].clear()
                side.stopped.discard(each.qp)
                side.heard.discard(each.qp)
            elif isinstance(each, machine.MoveStream):
                if not side.unfinished[each.stream]:
                    side.failover.on_moved(each.stream)
            else:
                side.lost = True

    def _resume(self, number: int, each: machine.ResumeStream) -> None:
        side, stream = self.sides[number], each.stream
        side.paused.discard(stream)
        again = [m for row, m in side.unfinished[stream] if row > each.received]
        side.unfinished[stream] = []
        side.posted[stream] = each.received
        for message in again:
            self._post(number, stream, ("message", message))

    def _resume_hastily(self, number: int, stop: machine.StopPair) -> None:
        """What the rule forbids: post again on another pair at once."""
        side = self.sides[number]
        for stream in stop.streams:
            rows, side.unfinished[stream] = side.unfinished[stream], []
            target = next(s for s in range(self.count) if s not in side.paused)
            for _, message in rows:
                self._post(number, target, ("message", message))

    def acknowledge(self, number: int) -> None:
        """Let the sends of a side complete whose rows the peer has received."""
        side, peer = self.sides[number], self.sides[1 - number]
        for stream in range(self.count):
            if stream not in side.paused:
                done = peer.processed[stream]
                side.unfinished[stream] = [r for r in side.unfinished[stream] if r[0] > done]

    def let_time_pass(self, seconds: float, psns: list[int]) -> None:
        self.now += seconds
        for number, side in enumerate(self.sides):
            self._carry_out(number, side.failover.on_timer(psns, self.now))
            for qp in range(self.count):
                up = side.failover.pairs[qp].state is QpState.UP
                if side.failover.route[qp] != qp and (up or qp in side.heard):
                    self._carry_out(number, side.failover.on_proven(qp))

    # --- checks

    def key(self) -> str:
        """Return a text that is equal for equal states."""
        return repr(
            (
                [
                    (vars(s.failover) | {"pairs": [vars(p) for p in s.failover.pairs]}, vars(s))
                    for s in self.sides
                ],
                self.wires,
                self.epochs,
                self.failures,
            )
        )

    def check_end(self) -> None:
        for side in self.sides:
            assert not side.lost
        assert sorted(self.sides[1].messages) == list(range(self.total))


def explore(model: Model, limit: int = 60_000) -> int:
    """Visit every state that can be reached; return how many there are."""
    seen, stack = {model.key()}, [model]
    while stack:
        current = stack.pop()
        choices = current.choices()
        if not choices:
            current.check_end()
        for choice in choices:
            following = copy.deepcopy(current)
            following.do(choice)
            key = following.key()
            if key not in seen:
                assert len(seen) < limit, "the model is larger than expected"
                seen.add(key)
                stack.append(following)
    return len(seen)


@pytest.mark.parametrize("messages", [1, pytest.param(2, marks=SLOW)])
def test_every_order_of_a_failure_delivers_each_message_once(messages: int) -> None:
    """Two queue pairs, a failure on either side at any moment."""
    assert explore(Model(2, messages, 1)) > 50


def test_the_model_finds_the_late_write_that_the_rule_excludes() -> None:
    with pytest.raises(LateWriteError):
        explore(Model(2, 1, 1, hasty=True))


@pytest.mark.parametrize("seed", range(60))
def test_random_failures_and_returns(seed: int) -> None:
    draw = random.Random(seed)
    model = Model(draw.choice((2, 3, 4)), 25, draw.randrange(1, 9))
    for _ in range(4000):
        choices = model.choices()
        if not choices:
            break
        weights = [0.1 if c[0] == "fail" else 1.0 for c in choices]
        model.do(draw.choices(choices, weights)[0])
        if draw.random() < 0.1:
            model.acknowledge(draw.randrange(2))
            psns = [draw.randrange(1 << 24) for _ in range(model.count)]
            model.let_time_pass(draw.choice((0.3, 1.0, 5.0)), psns)
    assert not [c for c in model.choices() if c[0] != "fail"]
    assert sorted(model.sides[1].messages) == list(range(25))


def test_last_pair_down_is_the_end() -> None:
    failover = Failover(2, initiator=True)
    failover.on_failed(0, 0.0)
    assert machine.AllDown() in failover.on_failed(1, 0.0)


def test_pauses_double_and_start_again_after_a_good_time() -> None:
    failover = Failover(2, initiator=True)
    pauses, now = [], 0.0
    down = DownRow(mask=2, epochs=(0, 0), received=(0, 0))
    failover.on_failed(1, now)
    failover.on_drained(1, [0, 0], now)
    failover.on_down(down, [0, 0], now)
    for _ in range(9):
        pauses.append(failover.next_timer - now)
        now = failover.next_timer
        failover.on_timer([1, 2], now)
    assert pauses[0] == machine.FIRST_PAUSE_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == machine.MAX_PAUSE_S + machine.ANSWER_S


@pytest.mark.parametrize(
    ("decode", "row"),
    [
        (DownRow.decode, bytes(128)),
        (DownRow.decode, b"\xff" * 128),
        (ReopenRow.decode, b"\xff" * 128),
    ],
)
def test_rows_that_cannot_be_true_are_rejected(decode: Any, row: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(row, 4)
