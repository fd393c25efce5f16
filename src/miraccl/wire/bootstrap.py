"""Bootstrap protocol: states, transition tables, inputs and outputs of its two machines.

``HubMachine`` (``bootstrap_hub.py``) serves the rendezvous and the control plane; ``MemberMachine``
(``bootstrap_member.py``) is one rank. Both take an input record and return a list of output records
(the shape of dask's ``worker_state_machine.py``). Neither has a socket, a clock, a thread or
randomness, so the same inputs give the same outputs and a log of inputs is a test case
(``replay``).

All transitions are in this file. An input that a state does not list violates the protocol.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from miraccl.errors import ProtocolError

# --- states and transitions ---


class PeerState(enum.Enum):
    """A connection as the hub sees it. Up to JOIN its peer is unauthenticated."""

    HELLO = "waits for Hello"
    PROOF = "waits for Proof"
    JOIN = "waits for Join"
    WAITING = "waits for the other ranks"
    UP = "in the job"
    GONE = "left, lost or dropped"


class JobState(enum.Enum):
    """The job as the hub sees it."""

    GATHERING = "ranks arrive"
    RECOVERING = "the successor of a hub waits for the survivors"
    FORMED = "all ranks are in"
    FAILED = "the rendezvous failed; late ranks are rejected with the reason"
    FINISHED = "nothing left to do"


class MemberState(enum.Enum):
    """A rank's view of its own connection."""

    NEW = "nothing sent"
    HELLO = "Hello sent"
    PROVED = "the hub has proved itself"
    JOINING = "Proof and Join sent"
    REJOINING = "Proof and Rejoin sent to the successor of a hub"
    WAITING = "accepted, waits for the other ranks"
    UP = "in the job"
    LEAVING = "Goodbye sent"
    CLOSED = "closed"


PEER_TRANSITIONS: dict[tuple[PeerState, str], PeerState] = {
    (PeerState.HELLO, "Hello"): PeerState.PROOF,
    (PeerState.PROOF, "Proof"): PeerState.JOIN,
    (PeerState.JOIN, "Join"): PeerState.WAITING,
    (PeerState.JOIN, "Rejoin"): PeerState.WAITING,
    (PeerState.WAITING, "complete"): PeerState.UP,
    (PeerState.WAITING, "Goodbye"): PeerState.GONE,
    (PeerState.UP, "Goodbye"): PeerState.GONE,
    **{(state, "drop"): PeerState.GONE for state in PeerState},
    **{
        (PeerState.UP, m): PeerState.UP
        for m in (
            "OpenGroup",
            "Gather",
            "NoticeMessage",
            "StatusQuery",
            "StatusReply",
            "LeaveGroup",
            "Replayed",
        )
    },
}

JOB_TRANSITIONS: dict[tuple[JobState, str], JobState] = {
    (JobState.GATHERING, "complete"): JobState.FORMED,
    (JobState.GATHERING, "fail"): JobState.FAILED,
    (JobState.RECOVERING, "complete"): JobState.FORMED,
    (JobState.RECOVERING, "fail"): JobState.FAILED,
    (JobState.FORMED, "all gone"): JobState.FINISHED,
    (JobState.FAILED, "all notified"): JobState.FINISHED,
    **{(state, "close"): JobState.FINISHED for state in JobState},
}

MEMBER_TRANSITIONS: dict[tuple[MemberState, str], MemberState] = {
    (MemberState.NEW, "start"): MemberState.HELLO,
    (MemberState.HELLO, "Challenge"): MemberState.PROVED,
    (MemberState.HELLO, "Unsupported"): MemberState.CLOSED,
    (MemberState.PROVED, "join"): MemberState.JOINING,
    (MemberState.PROVED, "rejoin"): MemberState.REJOINING,
    (MemberState.REJOINING, "Resumed"): MemberState.UP,
    (MemberState.REJOINING, "JoinRejected"): MemberState.CLOSED,
    (MemberState.JOINING, "Accepted"): MemberState.WAITING,
    (MemberState.JOINING, "JoinRejected"): MemberState.CLOSED,
    (MemberState.WAITING, "JoinRejected"): MemberState.CLOSED,
    (MemberState.WAITING, "Welcome"): MemberState.UP,
    (MemberState.UP, "HubClosing"): MemberState.CLOSED,
    **{
        (state, "leave"): MemberState.LEAVING
        for state in (
            MemberState.JOINING,
            MemberState.REJOINING,
            MemberState.WAITING,
            MemberState.UP,
        )
    },
    **{
        (state, "leave"): MemberState.CLOSED
        for state in (MemberState.NEW, MemberState.HELLO, MemberState.PROVED)
    },
    **{(state, "lost"): MemberState.CLOSED for state in MemberState},
    **{
        (MemberState.UP, m): MemberState.UP
        for m in (
            "Gathered",
            "GatherTimeout",
            "GatherMissing",
            "NoticeMessage",
            "StatusQuery",
            "StatusReply",
        )
    },
    **{(MemberState.UP, m): MemberState.UP for m in ("LeaveGroup", "Gone", "send")},
}

S = TypeVar("S", bound=enum.Enum)


def advance(table: Mapping[tuple[S, str], S], state: S, event: str) -> S:
    """Return the state after ``event``.

    Raises ``ProtocolError`` if the table has no such transition.
    """
    try:
        return table[state, event]
    except KeyError:
        raise ProtocolError(
            f"{event} is not expected while the state is {state.name} ({state.value})"
        ) from None


# --- inputs and outputs ---


@dataclass(frozen=True, kw_only=True)
class Connected:
    """Hub input: a connection came in.

    ``nonce``: 32 fresh random bytes; ``peer``: its address as text.
    """

    now: float
    conn: int
    nonce: bytes
    peer: str


@dataclass(frozen=True, kw_only=True)
class Received:
    """Input: bytes came in. A member has one connection, number 0."""

    now: float
    conn: int = 0
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Disconnected:
    now: float
    conn: int = 0
    reason: str


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Input: the clock passed ``deadline()``."""

    now: float


@dataclass(frozen=True, kw_only=True)
class RankDead:
    """Input of a successor: the process of a rank that has not rejoined has ended."""

    now: float
    rank: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class CloseHub:
    now: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Start:
    """Member input: the connection is established."""

    now: float


@dataclass(frozen=True, kw_only=True)
class SendMessage:
    """Member input: send a message of the control plane (Join, Gather, NoticeMessage, ...,
    Goodbye).
    """

    now: float
    message: Any


@dataclass(frozen=True, kw_only=True)
class Send:
    """Output: write these bytes. The hub names the connection."""

    conn: int = 0
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Output: close the connection once everything sent before is out.

    ``linger``: close our direction and wait a moment for the other side to hang up, so that it
    surely reads the last message.
    """

    conn: int = 0
    reason: str
    linger: bool = False


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Hub output: stop listening and end."""


@dataclass(frozen=True, kw_only=True)
class HubProved:
    """Member output: the hub knows the secret. Answer with ``SendMessage(Join)`` or drop the
    connection.
    """


@dataclass(frozen=True, kw_only=True)
class HubRejected:
    """Member output: the server is not the hub of this job.

    ``kind``: secret, version or stranger.
    """

    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class MessageArrived:
    """Member output: a message for the layer above (Accepted, Welcome, Gathered, Gone, ...)."""

    message: Any


@dataclass(frozen=True, kw_only=True)
class HubLost:
    """Member output: the connection ended. ``left``: the hub announced it."""

    state: MemberState
    left: bool
    reason: str


class Machine(Protocol):
    """Contract of both machines."""

    def handle(self, event: Any) -> list[Any]:
        """Take one input; return the outputs in order."""

    def deadline(self) -> float | None:
        """Return the time at which the machine wants a ``Tick``, None for never."""

    def validate_state(self) -> None:
        """Assert the machine's invariants."""


def replay(machine: Machine, log: Iterable[Any]) -> list[list[Any]]:
    """Return the outputs of a fresh machine for a log of inputs."""
    return [machine.handle(event) for event in log]


# --- text ---


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 2``, ``ranks 2 and 5``, or ``ranks 0-3, 7 and 9``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts: list[str] = []
    for first, last in runs:
        parts += (
            [f"{first}-{last}"]
            if last > first + 1
            else [str(rank) for rank in range(first, last + 1)]
        )
    if len(parts) > 24:
        parts = [*parts[:23], f"{len(parts) - 23} more"]
    text = (
        parts[0]
        if len(parts) == 1
        else f"{', '.join(parts[:-1])} and {parts[-1]}"
        if parts
        else "none"
    )
    return ("rank " if len(runs) == 1 and runs[0][0] == runs[0][1] else "ranks ") + text
