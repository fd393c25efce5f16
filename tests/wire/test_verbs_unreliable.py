"""Late copies on unreliable queue pairs: every order of events for four rules of placement.

Two messages are sent one after the other. A message may be sent twice, on two paths, because the
sender cannot tell a lost packet from a late one. The network delivers or loses each copy at any
time, also long after the message was acknowledged, and may deliver a copy twice. Rules:

- ``in place``: WRITE to the application's buffer, which it gets back with the message.
- ``ring``: WRITE to one of the transport's buffers that the sender chooses.
- ``send``: SEND to the buffer that the receiver has posted next: what the transport does.
- ``reset``: WRITE in place; the buffer is given back when every queue pair that may carry a copy
  was reset, so that what it still carries is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

PATHS, MESSAGES, SLOTS = 2, 2, 1


@dataclass(frozen=True)
class Copy:
    """Copy of a message on a path; ``epoch`` is that of the queue pair when it was sent."""

    message: int
    path: int
    epoch: int
    again: bool


@dataclass(frozen=True)
class State:
    """``buffers[i]``: the message in buffer i that was not read, -1 for none.

    ``application[m]``: "granted", then "back" once message m was delivered.
    """

    copies: tuple[Copy, ...] = ()
    sent: tuple[tuple[int, int], ...] = ()
    done: tuple[int, ...] = ()
    application: tuple[str, ...] = ("granted",) * MESSAGES
    landed: tuple[int, ...] = ()
    buffers: tuple[int, ...] = (-1,) * SLOTS
    epochs: tuple[int, ...] = (0,) * PATHS


class ViolationError(AssertionError):
    """A copy was written where nothing may be written any more."""


def deliver(rule: str, state: State, copy: Copy) -> State | None:
    """Return the state after a copy has arrived; None if the network drops it."""
    message = copy.message
    if rule in ("in place", "reset"):
        if copy.epoch != state.epochs[copy.path]:
            return None  # a queue pair that was reset drops what was sent before
        if state.application[message] == "back":
            raise ViolationError(f"message {message} is written to memory that was given back")
        landed = tuple(sorted({*state.landed, message}))
        return replace(state, landed=landed)
    slot = (
        message % SLOTS
        if rule == "ring"
        else next((i for i, held in enumerate(state.buffers) if held < 0), None)
    )
    if slot is None:
        return None  # no receive is posted
    if state.buffers[slot] >= 0:
        raise ViolationError(
            f"message {message} overwrites {state.buffers[slot]} before it is read"
        )
    buffers = list(state.buffers)
    buffers[slot] = message
    return replace(state, buffers=tuple(buffers))


def steps(rule: str, state: State) -> list[State]:
    """Return all next states."""
    found = []
    current = len(state.done)
    for path in range(PATHS):
        if current < MESSAGES and (current, path) not in state.sent:
            copy = Copy(current, path, state.epochs[path], again=True)
            found.append(
                replace(state, sent=(*state.sent, (current, path)), copies=(*state.copies, copy))
            )
    for i, copy in enumerate(state.copies):
        rest = state.copies[:i] + state.copies[i + 1 :]
        found.append(replace(state, copies=rest))  # lost
        arrived = deliver(rule, state, copy)
        if arrived is not None:
            found.append(replace(arrived, copies=rest))
            if copy.again:  # the network repeats it
                found.append(replace(arrived, copies=(*rest, replace(copy, again=False))))
    for slot, message in enumerate(state.buffers):
        if message >= 0:  # the receiver reads a packet: it is new, or a duplicate
            buffers = list(state.buffers)
            buffers[slot] = -1
            landed = tuple(sorted({*state.landed, message}))
            found.append(replace(state, buffers=tuple(buffers), landed=landed))
    if current < MESSAGES and current in state.landed:
        found.append(finish(rule, state, current))
    return found


def finish(rule: str, state: State, message: int) -> State:
    """Deliver a message: its buffer is the application's again, and the sender is told."""
    application = list(state.application)
    application[message] = "back"
    epochs = state.epochs
    if rule == "reset":
        used = {path for sent, path in state.sent if sent == message}
        epochs = tuple(epoch + (path in used) for path, epoch in enumerate(epochs))
    return replace(
        state, application=tuple(application), done=(*state.done, message), epochs=epochs
    )


def explore(rule: str) -> tuple[int, bool]:
    """Visit all states; return their number, and whether all messages can be delivered."""
    seen, queue, complete = {State()}, [State()], False
    while queue:
        state = queue.pop()
        complete = complete or len(state.done) == MESSAGES
        for each in steps(rule, state):
            if each not in seen:
                seen.add(each)
                queue.append(each)
    return len(seen), complete


@pytest.mark.parametrize("rule", ["send", "reset"])
def test_rule_excludes_late_writes(rule: str) -> None:
    states, complete = explore(rule)
    assert complete
    assert states > 300


@pytest.mark.parametrize(
    ("rule", "text"), [("in place", "given back"), ("ring", "before it is read")]
)
def test_other_rules_write_late(rule: str, text: str) -> None:
    with pytest.raises(ViolationError, match=text):
        explore(rule)
