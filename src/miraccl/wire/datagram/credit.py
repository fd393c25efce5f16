"""Receiver-driven admission: grants of one receiver over all of its senders.

The receiver bounds the bytes that may be on their way to it, so its socket buffer cannot overflow,
and paces them at the rate at which it receives (EQDS, Olteanu et al., NSDI 2022; Homa, Montazeri et
al., SIGCOMM 2018). A grant is a total since the start of a connection, never a difference: a lost
grant costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Bytes that a sender may send before it is granted anything: one super-packet.
UNSOLICITED_BYTES = 64 << 10
#: Smallest increase of a grant worth a packet.
QUANTUM_BYTES = 16 << 10
#: Backlog up to which a transfer overtakes longer ones.
SHORT_BYTES = 64 << 10


@dataclass(slots=True)
class SenderCredit:
    """Admission of one sender: bytes that it wants to send, was granted, and has delivered.

    ``wanted`` counts from the start of the connection, like ``granted`` and ``received``: the bytes
    of posted receives, or of frames whose header has arrived.
    """

    wanted: int = 0
    granted: int = UNSOLICITED_BYTES
    received: int = 0
    #: When it was last granted something, counted in grants of all senders.
    turn: int = 0

    @property
    def outstanding(self) -> int:
        """Bytes granted and not yet received, as far as the sender can use the grant."""
        return max(0, min(self.granted, max(self.wanted, UNSOLICITED_BYTES)) - self.received)

    @property
    def unused(self) -> int:
        """Bytes granted and not yet received."""
        return self.granted - self.received

    @property
    def backlog(self) -> int:
        """Bytes that the sender wants to send and was not granted."""
        return max(0, self.wanted - self.granted)


class Grantor:
    """Grants of one receiver.

    Args:
        budget: Most bytes on their way to this receiver: at most half of its real socket buffer.
        rate: Bytes per second at which grants are issued; 0 issues up to the budget at once.
    """

    def __init__(self, budget: int, rate: int = 0) -> None:
        self.budget, self.rate = max(budget, QUANTUM_BYTES), rate
        self.senders: dict[int, SenderCredit] = {}
        self._allowance = self.budget
        self._refilled = 0
        self._turn = 0

    @property
    def outstanding(self) -> int:
        """Bytes that all senders may have on their way."""
        return sum(s.outstanding for s in self.senders.values())

    def add(self, sender: int) -> SenderCredit:
        """Admit a sender with the unsolicited start; return its record."""
        return self.senders.setdefault(sender, SenderCredit())

    def remove(self, sender: int) -> None:
        """Forget a sender that has left."""
        self.senders.pop(sender, None)

    def want(self, sender: int, nbytes: int) -> None:
        """Note that a receive of ``nbytes`` more bytes was posted for a sender."""
        self.add(sender).wanted += nbytes

    def on_received(self, sender: int, nbytes: int) -> None:
        """Note ``nbytes`` new bytes from a sender; bytes not wanted count as wanted."""
        record = self.add(sender)
        record.received += nbytes
        record.wanted = max(record.wanted, record.received)

    def issue(self, now: int) -> list[tuple[int, int]]:
        """Return grants to send as (sender, total).

        Senders with little left come first, the least first; the others take turns. Always serving
        the smallest backlog would finish equal transfers one after the other. A sender that has
        nothing to send gets its unsolicited start back, so that its next message does not wait for
        a grant; it counts against the budget once it is used.
        """
        self._refill(now)
        issued: dict[int, int] = {}
        for number, idle in self.senders.items():
            if idle.wanted == idle.received and idle.unused < UNSOLICITED_BYTES // 2:
                idle.granted = idle.received + UNSOLICITED_BYTES
                issued[number] = idle.granted
        free = self.budget - self.outstanding
        while free >= QUANTUM_BYTES and self._allowance >= QUANTUM_BYTES:
            sender = self._next_sender()
            if sender is None:
                break
            record = self.senders[sender]
            step = min(QUANTUM_BYTES, record.backlog)
            record.granted += step
            issued[sender] = record.granted
            free -= step
            self._allowance -= step
        return list(issued.items())

    def timer(self, now: int) -> int:
        """Time at which ``issue`` may have more to give; 0 for none.

        0 also if the budget is used up: then ``issue`` has more once bytes have arrived.
        """
        if not self.rate or not any(s.backlog for s in self.senders.values()):
            return 0
        if self.budget - self.outstanding < QUANTUM_BYTES:
            return 0
        missing = max(0, QUANTUM_BYTES - self._allowance)
        return now + missing * 1_000_000_000 // self.rate + 1

    def _refill(self, now: int) -> None:
        if not self.rate:
            self._allowance = self.budget
        elif now > self._refilled:
            more = (now - self._refilled) * self.rate // 1_000_000_000
            self._allowance = min(self.budget, self._allowance + more)
            self._refilled = now

    def _next_sender(self) -> int | None:
        waiting = [(sender, r) for sender, r in self.senders.items() if r.backlog]
        if not waiting:
            return None
        short = [each for each in waiting if each[1].backlog <= SHORT_BYTES]
        if short:
            sender, record = min(short, key=lambda each: (each[1].backlog, each[1].turn))
        else:
            sender, record = min(waiting, key=lambda each: each[1].turn)
        self._turn += 1
        record.turn = self._turn
        return sender
