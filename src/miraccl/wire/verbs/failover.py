"""Recovery of queue pairs as a state machine: events in, instructions out.

A connection has n queue pairs and n streams (``wire.verbs.rows``); stream s starts on pair s. When
a pair fails, its streams move to pairs that work, and nothing is lost, sent twice or written late:

1. Either side stops its end of the pair, so that no further byte of it can arrive, and processes
   all completions. Then it sends DOWN: which of its ends are stopped, and how many rows of each
   stream it has received.
2. A side that has stopped its own end and knows the peer's count posts the rows above that count
   again, on another pair. It does not before: a copy that was still under way could be written into
   memory that has been given back (``docs/design/verbs.md``, rule of one copy).
3. After a pause that doubles up to ``MAX_PAUSE_S``, and for ever, the lower rank resets its end and
   sends REOPEN; the other one answers REOPENED, and the stream moves back.

DOWN names all ends that are stopped, with their epochs, so the last one repeats what earlier ones
may have lost; an older one is recognised by its epochs.

NCCL's ``p2p_resiliency`` reads the receiver's completion records over another pair instead, is off
by default, and gives up after five attempts.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from miraccl.errors import ProtocolError
from miraccl.wire.verbs.rows import KIND_DOWN, KIND_REOPEN, KIND_REOPENED, MAX_STREAMS, ROW_BYTES

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
#: A pair that has worked this long starts again with ``FIRST_PAUSE_S``.
PROVEN_S = 10.0
#: Time for an answer to REOPEN.
ANSWER_S = 2.0
NEVER = float("inf")


class QpState(enum.Enum):
    """State of this side's end of a queue pair."""

    UP = "up"
    STOPPING = "stopping"
    """Stopped; its completions are still arriving."""
    DOWN = "down"
    """Stopped, and everything that arrived is processed."""
    REOPENING = "reopening"
    """Reset; the peer's answer is awaited."""
    UNPROVEN = "unproven"
    """Connected again, but the peer, which may not have read the answer, was not heard on it."""


PAIR_TABLE: Final[dict[tuple[QpState, str], QpState]] = {
    (QpState.UP, "failed, or the peer has stopped"): QpState.STOPPING,
    (QpState.UNPROVEN, "failed, or the peer has stopped"): QpState.STOPPING,
    (QpState.STOPPING, "drained"): QpState.DOWN,
    (QpState.DOWN, "pause over"): QpState.REOPENING,
    (QpState.REOPENING, "pause over"): QpState.REOPENING,
    (QpState.REOPENING, "REOPENED"): QpState.UP,
    (QpState.DOWN, "REOPEN"): QpState.UNPROVEN,
    (QpState.UNPROVEN, "REOPEN"): QpState.UNPROVEN,
    (QpState.UNPROVEN, "peer heard"): QpState.UP,
}


# --- rows


@dataclass(frozen=True, kw_only=True)
class DownRow:
    """Ends that are stopped, their epochs, and the rows received of each stream (low 16 bits)."""

    mask: int
    epochs: tuple[int, ...]
    received: tuple[int, ...]

    def encode(self) -> bytes:
        epochs = bytes(e & 0xFF for e in self.epochs).ljust(MAX_STREAMS, b"\0")
        counts = [n & 0xFFFF for n in self.received] + [0] * (MAX_STREAMS - len(self.received))
        head = struct.pack("<Q8x", self.mask) + epochs
        return head.ljust(64, b"\0") + struct.pack(f"<{MAX_STREAMS}H", *counts)

    @classmethod
    def decode(cls, row: bytes, count: int) -> DownRow:
        """Parse the row of a connection with ``count`` pairs. Raises ``ProtocolError``."""
        mask = struct.unpack_from("<Q", row)[0]
        if not 0 < mask < 1 << count:
            raise ProtocolError(f"cannot read a DOWN row: it names pairs {mask:#x} of {count}")
        return cls(
            mask=mask,
            epochs=tuple(row[16 : 16 + count]),
            received=struct.unpack_from(f"<{count}H", row, 64),
        )


@dataclass(frozen=True, kw_only=True)
class ReopenRow:
    """REOPEN or REOPENED of one pair: its new epoch and the sender's first packet number."""

    qp: int
    epoch: int
    psn: int

    def encode(self) -> bytes:
        return struct.pack("<QQQ", self.qp, self.epoch, self.psn).ljust(ROW_BYTES, b"\0")

    @classmethod
    def decode(cls, row: bytes, count: int) -> ReopenRow:
        qp, epoch, psn = struct.unpack_from("<QQQ", row)
        if qp >= count or psn >= 1 << 24:
            raise ProtocolError(f"cannot read a REOPEN row: pair {qp} of {count}, number {psn}")
        return cls(qp=qp, epoch=epoch, psn=psn)


# --- instructions


class StopPair(NamedTuple):
    """Stop this side's end of a pair and pause the streams on it; report when it is drained."""

    qp: int
    streams: tuple[int, ...]


class SendRow(NamedTuple):
    """Send a row of this kind on any stream whose pair is up."""

    kind: int
    row: DownRow | ReopenRow


class ResumeStream(NamedTuple):
    """Post the rows of a stream above ``received`` again, on pair ``qp``."""

    stream: int
    received: int
    qp: int


class ResetPair(NamedTuple):
    """Reset a pair, post receives, and connect it if the peer's packet number is known."""

    qp: int
    peer_psn: int
    """-1: only reset it."""
    psn: int


class ConnectPair(NamedTuple):
    """Connect a pair that was reset."""

    qp: int
    peer_psn: int


class MoveStream(NamedTuple):
    """Move a stream back to its own pair, between two rows."""

    stream: int
    qp: int


class AllDown(NamedTuple):
    """No pair works: the peer is lost."""


Instruction: TypeAlias = (
    StopPair | SendRow | ResumeStream | ResetPair | ConnectPair | MoveStream | AllDown
)


@dataclass
class _Pair:
    """One queue pair."""

    state: QpState = QpState.UP
    epoch: int = 0
    """Number of times that it was reopened; both sides agree while it is up."""
    attempt: int = 0
    """Last epoch that this side has proposed."""
    peer_down: bool = False
    received: dict[int, int] = field(default_factory=dict)
    """Rows that the peer has received of the streams on this pair (low 16 bits)."""
    pause_s: float = FIRST_PAUSE_S
    retry_at: float = NEVER
    up_since: float = 0.0

    def move(self, trigger: str) -> None:
        self.state = PAIR_TABLE[self.state, trigger]


class Failover:
    """Recovery of one connection.

    Args:
        count: Number of pairs and of streams.
        initiator: True on the lower rank, which reopens pairs.

    Attributes:
        route: Pair of each stream.
    """

    def __init__(self, count: int, *, initiator: bool) -> None:
        self.count, self.initiator = count, initiator
        self.pairs = [_Pair() for _ in range(count)]
        self.route = list(range(count))
        self._moving: set[int] = set()

    # --- events

    def on_failed(self, qp: int, now: float) -> list[Instruction]:
        """Process a failed work request, or the loss of the device or its port."""
        return self._stop(qp, now)

    def on_drained(self, qp: int, received: Sequence[int], now: float) -> list[Instruction]:
        """Process that all completions of a stopped pair are processed.

        Args:
            received: Rows processed of each incoming stream.
        """
        pair = self.pairs[qp]
        if pair.state is not QpState.STOPPING:
            return []
        pair.move("drained")
        self._schedule(pair, now)
        return [*self._down_row(received), *self._resume()]

    def on_down(self, row: DownRow, received: Sequence[int], now: float) -> list[Instruction]:
        """Process a DOWN row of the peer."""
        done: list[Instruction] = []
        for qp, pair in enumerate(self.pairs):
            stopped = row.mask >> qp & 1 and row.epochs[qp] == pair.epoch & 0xFF
            if not stopped or pair.peer_down:
                continue
            pair.peer_down = True
            pair.received = {stream: row.received[stream] for stream in range(self.count)}
            done += self._stop(qp, now)
        return [*done, *self._resume()]

    def on_reopen(self, row: ReopenRow, psn: int, now: float) -> list[Instruction]:
        """Process a REOPEN row; ``psn`` is this side's new first packet number."""
        pair = self.pairs[row.qp]
        # Unproven: the answer to an earlier REOPEN was lost, so reset it again. A stream is on it
        # until the rows that the peer has received are known.
        idle = pair.state in (QpState.DOWN, QpState.UNPROVEN) and row.qp not in self.route
        if self.initiator or row.epoch <= pair.epoch or not idle:
            return []  # the peer repeats it
        pair.move("REOPEN")
        self._reopened(pair, row.epoch, now)
        return [
            ResetPair(row.qp, row.psn, psn),
            SendRow(KIND_REOPENED, ReopenRow(qp=row.qp, epoch=row.epoch, psn=psn)),
        ]

    def on_reopened(self, row: ReopenRow, now: float) -> list[Instruction]:
        """Process the answer to REOPEN."""
        pair = self.pairs[row.qp]
        if pair.state is not QpState.REOPENING or row.epoch != pair.attempt:
            return []
        pair.move("REOPENED")
        self._reopened(pair, row.epoch, now)
        return [ConnectPair(row.qp, row.psn), *self.on_proven(row.qp)]

    def on_proven(self, qp: int) -> list[Instruction]:
        """Process a first packet of the peer on a reopened pair: its own stream may return."""
        pair, carrier = self.pairs[qp], self.pairs[self.route[qp]]
        if pair.state is QpState.UNPROVEN:
            pair.move("peer heard")
        if pair.state is not QpState.UP or carrier.state is not QpState.UP:
            return []
        if self.route[qp] == qp or qp in self._moving:
            return []
        self._moving.add(qp)
        return [MoveStream(qp, qp)]

    def on_moved(self, stream: int) -> None:
        """Process that a stream is on its own pair again."""
        if stream in self._moving:
            self._moving.discard(stream)
            self.route[stream] = stream

    def on_timer(self, psns: Sequence[int], now: float) -> list[Instruction]:
        """Reopen the pairs whose pause is over; ``psns`` has a packet number for each."""
        done: list[Instruction] = []
        for qp, pair in enumerate(self.pairs):
            settled = pair.state is QpState.DOWN and pair.peer_down and qp not in self.route
            if not self.initiator or now < pair.retry_at:
                continue
            if not self._live() or not (settled or pair.state is QpState.REOPENING):
                pair.retry_at = now + FIRST_PAUSE_S if pair.state is not QpState.UP else NEVER
                continue
            pair.move("pause over")
            pair.attempt = max(pair.attempt, pair.epoch) + 1
            pair.retry_at = now + pair.pause_s + ANSWER_S
            pair.pause_s = min(2 * pair.pause_s, MAX_PAUSE_S)
            row = ReopenRow(qp=qp, epoch=pair.attempt, psn=psns[qp])
            done += [ResetPair(qp, -1, psns[qp]), SendRow(KIND_REOPEN, row)]
        return done

    @property
    def next_timer(self) -> float:
        """Time of the next ``on_timer``, infinity without one."""
        if not self.initiator:
            return NEVER
        return min(pair.retry_at for pair in self.pairs)

    # --- steps

    def _live(self) -> list[int]:
        """Return the pairs that carry streams: unproven ones only if there are no others."""
        states = [pair.state for pair in self.pairs]
        up = [i for i, state in enumerate(states) if state is QpState.UP]
        return up or [i for i, state in enumerate(states) if state is QpState.UNPROVEN]

    def _stop(self, qp: int, now: float) -> list[Instruction]:
        pair = self.pairs[qp]
        if pair.state not in (QpState.UP, QpState.UNPROVEN):
            return []
        if now - pair.up_since > PROVEN_S:
            pair.pause_s = FIRST_PAUSE_S
        pair.move("failed, or the peer has stopped")
        self._moving = {s for s in self._moving if qp not in (s, self.route[s])}
        streams = tuple(s for s, route in enumerate(self.route) if route == qp)
        done: list[Instruction] = [StopPair(qp, streams)]
        if not self._live():
            done.append(AllDown())
        return done

    def _schedule(self, pair: _Pair, now: float) -> None:
        pair.retry_at = now + pair.pause_s
        pair.pause_s = min(2 * pair.pause_s, MAX_PAUSE_S)

    def _down_row(self, received: Sequence[int]) -> list[Instruction]:
        """Return the row that names all ends that are stopped and not up again."""
        stopped = (QpState.DOWN, QpState.REOPENING)
        down = [i for i, pair in enumerate(self.pairs) if pair.state in stopped]
        row = DownRow(
            mask=sum(1 << i for i in down),
            epochs=tuple(pair.epoch & 0xFF for pair in self.pairs),
            received=tuple(n & 0xFFFF for n in received),
        )
        return [SendRow(KIND_DOWN, row)]

    def _resume(self) -> list[Instruction]:
        """Move the streams of pairs that are stopped on both sides."""
        live, done = self._live(), list[Instruction]()
        if not live:
            return done
        for stream, qp in enumerate(self.route):
            pair = self.pairs[qp]
            if pair.state is QpState.DOWN and pair.peer_down and stream in pair.received:
                target = min(live, key=lambda i: (self.route.count(i), (i - stream) % self.count))
                self.route[stream] = target
                done.append(ResumeStream(stream, pair.received.pop(stream), target))
        return done

    def _reopened(self, pair: _Pair, epoch: int, now: float) -> None:
        pair.epoch, pair.peer_down = epoch, False
        pair.received, pair.retry_at, pair.up_since = {}, NEVER, now
