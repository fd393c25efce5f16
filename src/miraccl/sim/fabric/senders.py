"""Sender and receiver of one transfer: the specification of the compiled ones in ``kernels``.

A receiver-driven sender may send ``window`` packets unsolicited, then one packet per credit.
Credits are totals: a lost one is covered by the next. Every data packet says how many credits its
sender wants in total, without those for packets that were trimmed: the receiver, which learns of
these first, adds one for each.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

from miraccl.sim.fabric.hashing import draw, mix
from miraccl.sim.fabric.transfers import Balance, Control, FabricTransfer, TransferConfig

#: Smallest share of a window that a sender asks credits for.
MIN_WINDOW = 2
#: Entropies that RECYCLE remembers (REPS: 8).
RECYCLED = 8
#: Timeouts for which RECYCLE draws no new entropies after a loss (REPS: freezing).
FREEZE_TIMEOUTS = 8
#: A packet is lost if one sent this fraction of the timeout later was acknowledged (RFC 8985).
REORDER_DIVISOR = 8
#: Likewise with receiver control and RECYCLE, where packets of one sender take paths with queues of
#: different lengths.
SPRAY_REORDER_DIVISOR = 4
#: Packets beyond the oldest unacknowledged one that one acknowledgement examines.
LOSS_SCAN = 64
#: DCTCP (RFC 8257): weight of a new sample 1/16; fractions of 2^16.
ALPHA_SHIFT, ONE = 4, 1 << 16
MAX_WINDOW = 1 << 12


class Kind(enum.IntEnum):
    """Type of a message between hosts."""

    DATA = 0
    ACK = 1
    NACK = 2
    PULL = 3
    REQUEST = 4
    COMPLETE = 5


class Status(enum.IntEnum):
    """State of a packet at its sender."""

    NEW = 0
    IN_FLIGHT = 1
    RESEND = 2
    ACKNOWLEDGED = 3


@dataclass(frozen=True, slots=True)
class Message:
    """Content of a packet.

    ``sequence`` names a data packet, or in a PULL the credits issued so far; in a REQUEST of a
    sender that has received nothing for a while, the credits that it has received, else -1.
    ``wanted`` is the total number of credits that the sender wants besides one for each trimmed
    packet; ``marked`` echoes ECN's mark.
    """

    kind: Kind
    transfer: int
    sequence: int
    entropy: int
    wanted: int = 0
    marked: bool = False


class Sender:
    """Sender of one transfer. ``next_message`` is called when the host's link is free."""

    def __init__(
        self, number: int, transfer: FabricTransfer, config: TransferConfig, seed: int
    ) -> None:
        self.number, self.transfer, self.config = number, transfer, config
        self.count = -(-transfer.nbytes // config.payload)
        self.queued = False
        #: Senders of the host that have something to send.
        self.sharing = 0
        self.finished = -1
        self.sent = self.resent = 0
        self.unsolicited = config.window if config.control is Control.RECEIVER else 0
        self._status = [Status.NEW] * self.count
        self._sent_at = [0] * self.count
        self._last_sent = 0
        self._next = self._oldest = self._acknowledged = self._in_flight = 0
        self._resend: deque[int] = deque()
        self._resend_count = 0
        self._credit = self._pulls = self._nacks = 0
        self._idle = False
        self._seed, self._draws = mix(seed) + number, 0
        self._turn, self._offset = 0, 0
        self._recycled = [0] * RECYCLED
        self._recycled_from = self._recycled_to = self._frozen_until = 0
        self._window = config.window * ONE
        self._alpha = ONE
        self._slow_start = True
        self._round_start = self._round_acks = self._round_marks = 0

    # ---- what to send

    @property
    def may_send(self) -> bool:
        """True if there is a packet to send and it is admitted."""
        if self._next == self.count and not self._resend_count:
            return False
        if self.config.control is Control.SENDER:
            return self._in_flight < max(1, self._window >> 16)
        return self._credit > 0 or self.unsolicited > 0

    @property
    def wanted(self) -> int:
        """Total number of credits that this sender can use, less those for trimmed packets.

        A sender wants a window of unspent ones at most; one that shares its link with others wants
        its share of the window, so that it does not claim credits that others could use.
        """
        window = max(MIN_WINDOW, self.config.window // max(1, self.sharing))
        left = min(window, self.count - self._next + self._resend_count)
        return self._pulls + max(0, left - self._credit - self.unsolicited) - self._nacks

    def size(self, sequence: int) -> int:
        """Bytes of a data packet."""
        if sequence < self.count - 1:
            return self.config.packet
        return self.transfer.nbytes - sequence * self.config.payload + self.config.header

    def next_message(self, now: int) -> Message:
        """Return the next data packet; lost ones come first."""
        if self._resend_count:
            while self._status[sequence := self._resend.popleft()] is not Status.RESEND:
                pass
            self._resend_count -= 1
            self.resent += 1
        else:
            sequence = self._next
            self._next += 1
        if self._credit:
            self._credit -= 1
        elif self.unsolicited:
            self.unsolicited -= 1
        self._status[sequence] = Status.IN_FLIGHT
        self._sent_at[sequence] = self._last_sent = now
        self._in_flight += 1
        self.sent += 1
        return Message(
            Kind.DATA, self.number, sequence, self._next_entropy(now), wanted=self.wanted
        )

    def request(self, *, stalled: bool) -> Message | None:
        """Ask for credits if this sender cannot go on without; None if it can.

        A ``stalled`` sender also reports how many it has received.
        """
        if self.config.control is Control.SENDER or self.may_send:
            return None
        if self._next == self.count and not self._resend_count:
            return None
        received = self._pulls if stalled else -1
        # Another entropy each time, so that a dead path does not swallow all of them.
        entropy = self._draw() % self.config.entropies
        return Message(Kind.REQUEST, self.number, received, entropy, wanted=self.wanted)

    # ---- entropies

    def _next_entropy(self, now: int) -> int:
        if self.config.balance is Balance.RECYCLE:
            return self._recycled_entropy(now)
        entropy = (self._turn + self._offset) % self.config.entropies
        self._turn += 1
        if self._turn == self.config.entropies:
            self._turn, self._offset = 0, self._draw()
        return entropy

    def _recycled_entropy(self, now: int) -> int:
        if self._recycled_from < self._recycled_to:
            entropy = self._recycled[self._recycled_from % RECYCLED]
            self._recycled_from += 1
            return entropy
        if now < self._frozen_until and self._recycled_to >= RECYCLED:
            self._turn += 1
            return self._recycled[self._turn % RECYCLED]
        return self._draw() % self.config.entropies

    def _draw(self) -> int:
        self._draws += 1
        return draw(self._seed, self._draws)

    def _recycle(self, entropy: int) -> None:
        if self._recycled_to - self._recycled_from == RECYCLED:
            self._recycled_from += 1
        self._recycled[self._recycled_to % RECYCLED] = entropy
        self._recycled_to += 1

    # ---- feedback

    def on_ack(self, now: int, message: Message) -> None:
        """Process the acknowledgement of one packet."""
        self._idle = False
        sequence = message.sequence
        status = self._status[sequence]
        if self.finished >= 0 or status is Status.ACKNOWLEDGED:
            return
        if status is Status.IN_FLIGHT:
            self._in_flight -= 1
        else:
            self._resend_count -= 1  # its entry in the queue is skipped later
        self._status[sequence] = Status.ACKNOWLEDGED
        self._acknowledged += 1
        if self._acknowledged == self.count:
            self.finished = now
        while self._oldest < self.count and self._status[self._oldest] is Status.ACKNOWLEDGED:
            self._oldest += 1
        if self.config.balance is Balance.RECYCLE and not message.marked:
            self._recycle(message.entropy)
        if self.config.control is Control.SENDER:
            self._adjust_window(now, self._sent_at[sequence], message.marked)
            self._detect_losses(self._sent_at[sequence])
        elif self.config.balance is Balance.RECYCLE:
            self._leave_dead_paths(now, self._sent_at[sequence])

    def on_complete(self, now: int) -> None:
        """End the transfer: the receiver has everything, but acknowledgements were lost."""
        if self.finished < 0:
            self.finished = now
        self._next = self._oldest = self._acknowledged = self.count
        self._resend_count = self._in_flight = 0

    def on_nack(self, message: Message) -> None:
        """Queue a trimmed packet again; end the unsolicited start."""
        if self.finished < 0 and self._status[message.sequence] is Status.IN_FLIGHT:
            self._queue_again(message.sequence)
        self._idle = False
        self._nacks += 1
        self.unsolicited = 0

    def on_pull(self, total: int) -> None:
        """Add credits up to a total."""
        self._idle = False
        if total > self._pulls:
            self._credit += total - self._pulls
            self._pulls = total

    def on_timer(self, now: int) -> tuple[int, bool]:
        """Queue packets without an answer again.

        Returns:
            Time of the next check, and whether nothing was received since the last one.
        """
        oldest, stalled, self._idle = now, self._idle, True
        expired = False
        for sequence in range(self._oldest, self._next):
            if self._status[sequence] is not Status.IN_FLIGHT:
                continue
            if self._sent_at[sequence] + self.config.timeout <= now:
                self._queue_again(sequence)
                expired = True
            else:
                oldest = min(oldest, self._sent_at[sequence])
        if expired:
            self._window, self._slow_start = ONE, False
            self._frozen_until = now + FREEZE_TIMEOUTS * self.config.timeout
        return oldest + self.config.timeout, stalled or expired

    def _leave_dead_paths(self, now: int, sent_at: int) -> None:
        """Draw no new entropies for a while if packets are lost that were sent long before one that
        has arrived: where queues trim, only a dead path loses packets.
        """
        limit = sent_at - self.config.timeout // SPRAY_REORDER_DIVISOR
        for sequence in range(self._oldest, min(self._next, self._oldest + LOSS_SCAN)):
            if self._status[sequence] is Status.IN_FLIGHT and self._sent_at[sequence] < limit:
                self._queue_again(sequence)
                self._frozen_until = now + FREEZE_TIMEOUTS * self.config.timeout

    def _queue_again(self, sequence: int) -> None:
        self._status[sequence] = Status.RESEND
        self._in_flight -= 1
        self._resend.append(sequence)
        self._resend_count += 1

    # ---- window of SENDER control

    def _adjust_window(self, now: int, sent_at: int, marked: bool) -> None:
        self._round_acks += 1
        self._round_marks += marked
        if self._slow_start and not marked:
            self._window += ONE
        else:
            self._slow_start = False
            self._window += ONE * ONE // self._window
        if sent_at >= self._round_start:
            share = self._round_marks * ONE // self._round_acks
            self._alpha += (share - self._alpha) >> ALPHA_SHIFT
            if self._round_marks:
                self._window -= self._window * self._alpha // (2 * ONE)
            self._round_start, self._round_acks, self._round_marks = now, 0, 0
        self._window = max(ONE, min(self._window, MAX_WINDOW * ONE))

    def _detect_losses(self, sent_at: int) -> None:
        limit = sent_at - self.config.timeout // REORDER_DIVISOR
        lost = False
        for sequence in range(self._oldest, min(self._next, self._oldest + LOSS_SCAN)):
            if self._status[sequence] is Status.IN_FLIGHT and self._sent_at[sequence] < limit:
                self._queue_again(sequence)
                lost = True
        if lost and sent_at >= self._frozen_until:
            # once per round: packets sent before the reduction do not cause another one
            self._frozen_until = self._last_sent
            self._window, self._slow_start = max(ONE, self._window // 2), False


class Receiver:
    """Receiver of one transfer: packets that arrived, and credits wanted and issued."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.received = bytearray(count)
        self.missing = count
        self.wanted = self.trimmed = self.issued = 0
        self.resend_backlog = 0
        #: Entropy of the last packet: one of a path that works.
        self.entropy = 0
        self.listed = self.resend_listed = False

    @property
    def backlog(self) -> int:
        """Credits wanted and not issued."""
        return 0 if not self.missing else self.wanted + self.trimmed - self.issued

    def on_data(self, message: Message, trimmed: bool) -> Kind:
        """Process a data packet; return the type of the answer."""
        self.wanted = max(self.wanted, message.wanted)
        self.entropy = message.entropy
        if trimmed:
            if not self.received[message.sequence]:
                self.trimmed += 1
                self.resend_backlog += 1
                return Kind.NACK
            return Kind.ACK
        if not self.received[message.sequence]:
            self.received[message.sequence] = 1
            self.missing -= 1
        return Kind.ACK

    def on_request(self, message: Message) -> None:
        """Note how many credits the sender wants; forget those that did not reach it."""
        self.entropy = message.entropy  # the old one may lead back over a dead path
        if message.sequence >= 0:
            self.issued = min(self.issued, message.sequence)
        self.wanted = max(self.wanted, message.wanted)
