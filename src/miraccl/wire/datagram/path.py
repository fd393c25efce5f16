"""One path of a flow: packets in flight, loss detection, round-trip time, window, pacing, state.

Loss detection follows RFC 9002 section 6 and RFC 8985 (RACK) per path: a packet is lost if a later
one of the same path was acknowledged and it is ``threshold`` packets or 9/8 RTT older.  An
acknowledgement of a packet that was declared lost undoes the reduction and widens the threshold.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from miraccl.wire.datagram.control import RATE, WINDOW, AckSample, Controller
from miraccl.wire.datagram.control.base import SECOND
from miraccl.wire.datagram.packets import MAX_ACK_RANGES, MIN_MTU, Ack
from miraccl.wire.datagram.path_states import PATH_TABLE, PathState
from miraccl.wire.datagram.ranges import RangeSet
from miraccl.wire.datagram.rtt import RttEstimator

#: RFC 9002: three later packets; widened up to the bound when reordering looked like loss.
PACKET_THRESHOLD, MAX_PACKET_THRESHOLD = 3, 128
#: Shortest time threshold in ns: below this, batches of one system call look like reordering.
MIN_LOSS_DELAY_NS = 100_000
#: Shortest probe timeout in ns; covers the peer's scheduling on a busy host.
MIN_PROBE_TIMEOUT_NS = 2_000_000
MAX_PROBE_TIMEOUT_NS = 1_000_000_000
#: Probe timeouts in a row after which a path is dead.
DEAD_AFTER = 4
#: Interval of probes of a dead path, doubled from first to last; within the goal of 500 ms.
PROBE_FIRST_NS, PROBE_LAST_NS = 20_000_000, 200_000_000
#: Time that one burst may run ahead of the pacing rate, in ns (one super-packet at 1 Gbit/s).
BURST_NS = 500_000
#: An acknowledgement waits for this many packets or this long.
ACK_EVERY, ACK_DELAY_NS = 2, 200_000
#: Probe timeouts in a row after which packets shrink to what every path carries (RFC 8899, 4.3):
#: 14 ms. After two, 6 ms, a busy host shrank packets of 32 KiB by 26 for half a second.
BLACK_HOLE_AFTER = 3
#: Interval of probes for the full packet size on a path whose packets have shrunk, doubled from
#: first to last.
MTU_PROBE_FIRST_NS, MTU_PROBE_LAST_NS = 500_000_000, 60_000_000_000
#: Packets that must be acknowledged and are remembered: in flight, or declared lost and perhaps
#: only late.  The window leaves room for probes, which it does not bound.
REMEMBERED, PROBE_ROOM = 2048, 64


@dataclass(slots=True)
class Span:
    """Bytes ``[start, stop)`` of a frame in a packet; ``headed`` if its header was in it."""

    stream: int
    frame: int
    start: int
    stop: int
    headed: bool


@dataclass(slots=True)
class SentPacket:
    """A packet in flight.  ``delivered`` and ``delivered_at`` are the path's counters at its
    sending.
    """

    number: int
    time: int
    size: int
    spans: list[Span]
    delivered: int
    delivered_at: int
    limited: bool
    probe: bool = False
    grant: bool = False
    requeued: bool = False
    #: Position among the packets of the path that must be acknowledged.
    order: int = 0


@dataclass(slots=True)
class ReceivedNumbers:
    """Packet numbers received on a path, and the acknowledgement that is due for them."""

    numbers: RangeSet = field(default_factory=RangeSet)
    floor: int = 0
    largest: int = -1
    largest_at: int = 0
    marked: int = 0
    duplicates: int = 0
    pending: int = 0
    due: int = 0
    #: Acknowledgements of this path still to be repeated on other paths.
    repeats: int = 0

    def is_new(self, number: int) -> bool:
        """Return True unless the number was received or lies below the remembered window."""
        return number >= self.floor and number not in self.numbers

    def add(self, now: int, number: int, *, eliciting: bool, marked: bool, urgent: bool) -> None:
        """Record a packet and decide when it is acknowledged."""
        in_order = number == self.largest + 1
        self.numbers.add(number, number + 1)
        while len(self.numbers) > MAX_ACK_RANGES:
            start, stop = self.numbers.first
            self.numbers.remove(start, stop)
            self.floor = stop
        if number > self.largest:
            self.largest, self.largest_at = number, now
        self.marked += marked
        if not eliciting:
            return
        self.pending += 1
        self.repeats = 2
        if urgent or marked or not in_order or self.pending >= ACK_EVERY:
            self.due = now
        elif self.pending == 1:
            self.due = now + ACK_DELAY_NS

    def record(self, path: int, now: int) -> Ack:
        """Build the acknowledgement of this path."""
        ranges = tuple(reversed(list(self.numbers)))[:MAX_ACK_RANGES]
        delay = max(0, now - self.largest_at) // 1000
        return Ack(path, ranges, delay, self.marked & 0xFFFFFFFF, self.duplicates & 0xFFFFFFFF)


class FlowPath:
    """One path of a flow, both directions.

    Args:
        index: Number of the path, equal on both sides.
        controller: Congestion controller of this path.
        mtu: Bytes of a UDP payload that the path carries.
        max_in_flight: Bytes in flight at most, whatever the controller allows.
    """

    def __init__(
        self, index: int, controller: Controller, mtu: int, max_in_flight: int = 1 << 30
    ) -> None:
        self.index, self.mtu, self.full_mtu = index, mtu, mtu
        self.mtu_probe_at, self._mtu_probe_interval = 0, MTU_PROBE_FIRST_NS
        self.max_in_flight = max_in_flight
        self.state = PathState.OPEN
        self.rtt = RttEstimator()
        self.controller = controller
        self.control = controller.start(mtu)
        self.next_number = 0
        self.in_flight = 0
        self.sent: dict[int, SentPacket] = {}
        self.largest_acked = -1
        self.timeouts = 0
        #: Probe packets that may be sent whatever the window.
        self.probes = 0
        self.received = ReceivedNumbers()
        self.lost_packets = self.spurious = self.sent_packets = 0
        self.lost_bytes = self.acked_bytes = 0
        self._lost: dict[int, SentPacket] = {}
        self._order = 0
        self._threshold = PACKET_THRESHOLD
        self._loss_time = 0
        self._last_eliciting = 0
        self._release = 0
        self._delivered = 0
        self._delivered_at = 0
        self._peer_marked = 0
        self._probe_at = 0
        self._probe_interval = PROBE_FIRST_NS

    # ---- sending

    @property
    def usable(self) -> bool:
        """True if the path may carry new data."""
        return self.state is PathState.OPEN

    @property
    def window(self) -> int:
        """Congestion window in bytes."""
        return self.control[WINDOW]

    @property
    def rate(self) -> int:
        """Pacing rate in bytes per second."""
        own = self.control[RATE]
        return own if own else max(1, self.window * SECOND * 5 // (4 * max(1, self.rtt.smoothed)))

    def has_room(self, size: int) -> bool:
        """Return True if the window admits a packet of ``size`` bytes; always one at a time.

        A window of small packets is smaller than the first large one when the full packet size gets
        through again, and so is a small share of a receive buffer: nothing would ever be sent.
        """
        oldest = next(iter(self.sent.values()), None)
        if oldest is None:
            return True
        if self._order - oldest.order >= REMEMBERED - PROBE_ROOM:
            return False
        return self.in_flight + size <= min(self.window, self.max_in_flight)

    def release_time(self, now: int) -> int:
        """Earliest time at which pacing admits a packet: ``now`` or later."""
        return max(now, self._release - BURST_NS)

    def expected_finish(self, size: int) -> int:
        """Expected time until ``size`` more bytes arrive, in ns: queue ahead of them plus half an
        RTT.
        """
        rtt = self.rtt.smoothed
        return (self.in_flight + size) * rtt // max(1, self.window) + rtt // 2

    def on_sent(
        self, now: int, size: int, spans: list[Span], *, probe: bool, grant: bool, limited: bool
    ) -> None:
        """Record a packet that must be acknowledged; it has number ``next_number``."""
        if not self.sent:
            self._delivered_at = now
        self.sent[self.next_number] = SentPacket(
            self.next_number,
            now,
            size,
            spans,
            self._delivered,
            self._delivered_at,
            limited,
            probe,
            grant,
            order=self._order,
        )
        self._order += 1
        while self._lost and self._order - next(iter(self._lost.values())).order > REMEMBERED:
            del self._lost[next(iter(self._lost))]
        self.in_flight += size
        self._last_eliciting = now
        self._release = max(now, self._release) + size * SECOND // self.rate

    def take_number(self) -> int:
        """Return the next packet number; numbers are never reused."""
        self.next_number += 1
        self.sent_packets += 1
        return self.next_number - 1

    def validate(self, now: int) -> None:
        """Carry probes only until one of them is acknowledged."""
        self.state, self.probes = PathState.PROBING, 1
        self._probe_at = now + self._probe_interval

    def shrink(self, now: int) -> None:
        """Send packets that every path carries from now on, and probe for the full size later."""
        if self.mtu > MIN_MTU:
            self.mtu = MIN_MTU
            self._mtu_probe_interval = MTU_PROBE_FIRST_NS
            self.mtu_probe_at = now + MTU_PROBE_FIRST_NS

    def wants_mtu_probe(self, now: int) -> bool:
        """Return True if a packet of the full size is to be tried now."""
        return self.usable and self.mtu < self.full_mtu and now >= self.mtu_probe_at

    def take_mtu_probe(self, now: int) -> None:
        """Schedule the next such packet."""
        self.mtu_probe_at = now + self._mtu_probe_interval
        self._mtu_probe_interval = min(2 * self._mtu_probe_interval, MTU_PROBE_LAST_NS)

    # ---- acknowledgements and losses

    def on_ack(self, now: int, ack: Ack) -> tuple[list[SentPacket], list[SentPacket]]:
        """Process an acknowledgement of this path.

        Returns:
            Packets newly acknowledged (also those declared lost before), and packets now lost.
        """
        acked: list[SentPacket] = []
        for start, stop in ack.ranges:
            acked += self._acked_in(start, stop)
        marked = (ack.ce - self._peer_marked) & 0xFFFFFFFF
        marked = marked if marked < 1 << 31 else 0
        self._peer_marked = (self._peer_marked + marked) & 0xFFFFFFFF
        if not acked:
            return [], []
        self._move("acknowledged")
        self.timeouts = self.probes = 0
        self._probe_interval = PROBE_FIRST_NS
        newest = max(acked, key=lambda p: p.number)
        self.mtu = max(self.mtu, newest.size)
        nbytes = sum(p.size for p in acked)
        self._delivered += nbytes
        self.acked_bytes += nbytes
        if newest.number > self.largest_acked:
            self.largest_acked = newest.number
            self.rtt.add(now - newest.time, ack.delay_us * 1000)
        interval = now - newest.delivered_at
        delivered = self._delivered - newest.delivered
        self._delivered_at = now
        sample = AckSample(
            now=now,
            rtt=self.rtt.adjusted,
            smoothed=self.rtt.smoothed,
            minimum=self.rtt.minimum,
            acked=nbytes,
            marked=marked,
            in_flight=self.in_flight,
            sent_at=newest.time,
            delivery_rate=delivered * SECOND // interval if interval > 0 else 0,
            limited=newest.limited,
        )
        self.controller.acked(self.control, sample, self.mtu)
        return acked, self.detect_losses(now)

    def _acked_in(self, start: int, stop: int) -> list[SentPacket]:
        """Remove the packets of a range; walks the shorter of the range and the packets in
        flight.
        """
        stop = min(stop, self.next_number)
        if stop - start > len(self.sent):
            numbers = [n for n in self.sent if start <= n < stop]
        else:
            numbers = [n for n in range(start, stop) if n in self.sent]
        acked = []
        for number in sorted(numbers + [n for n in self._lost if start <= n < stop]):
            if number in self.sent:
                packet = self.sent.pop(number)
                self.in_flight -= packet.size
                acked.append(packet)
                continue
            acked.append(self._lost.pop(number))
            self.spurious += 1
            self.lost_packets -= 1
            self._threshold = min(2 * self._threshold, MAX_PACKET_THRESHOLD)
            self.controller.undo(self.control)
        return acked

    def detect_losses(self, now: int) -> list[SentPacket]:
        """Declare packets lost; sets the timer for those that may be lost later."""
        delay = self.rtt.loss_delay(MIN_LOSS_DELAY_NS)
        lost: list[SentPacket] = []
        self._loss_time = 0
        for number, packet in self.sent.items():
            if number >= self.largest_acked:
                break
            if now - packet.time >= delay or self.largest_acked - number >= self._threshold:
                lost.append(packet)
            elif not self._loss_time:
                self._loss_time = packet.time + delay
        if lost:
            self._remove_lost(now, lost)
        return lost

    def _remove_lost(self, now: int, lost: list[SentPacket]) -> None:
        for packet in lost:
            del self.sent[packet.number]
            self.in_flight -= packet.size
            self._lost[packet.number] = packet
        if lost[0].number < next(iter(self._lost)):
            self._lost = dict(sorted(self._lost.items()))
        nbytes = sum(p.size for p in lost)
        self.lost_packets += len(lost)
        self.lost_bytes += nbytes
        # a path in another state carries probes only; one packet that is too large says nothing
        tried = len(lost) == 1 and nbytes > self.mtu
        if self.state in (PathState.OPEN, PathState.SUSPECT) and not tried:
            self.controller.lost(self.control, now, nbytes, lost[-1].time, self.mtu)

    # ---- timers

    def timer(self) -> int:
        """Time at which ``on_timer`` must be called, 0 for none."""
        if self.state in (PathState.DEAD, PathState.PROBING):
            return self._probe_at
        times = [t for t in (self._loss_time, self._timeout_at()) if t]
        return min(times) if times else 0

    def _timeout_at(self) -> int:
        if not self.sent or self.probes:
            return 0
        base = self.rtt.probe_timeout(ACK_DELAY_NS, MIN_PROBE_TIMEOUT_NS)
        return self._last_eliciting + min(base << min(self.timeouts, 16), MAX_PROBE_TIMEOUT_NS)

    def on_timer(self, now: int) -> list[SentPacket]:
        """Handle expired timers; return the packets now lost.

        A probe timeout grants two probe packets; after ``DEAD_AFTER`` of them everything in flight
        is lost and the path is probed only.
        """
        if self.state in (PathState.DEAD, PathState.PROBING):
            return self._probe_timer(now)
        lost = self.detect_losses(now) if self._loss_time and now >= self._loss_time else []
        due = self._timeout_at()
        if due and now >= due:
            self.timeouts += 1
            self.probes = 2
            self._last_eliciting = now
            self._move("probe timeout")
            if self.timeouts == BLACK_HOLE_AFTER:
                self.shrink(now)
            if self.timeouts >= DEAD_AFTER:
                lost += self.abandon(now)
        return lost

    def _probe_timer(self, now: int) -> list[SentPacket]:
        if now < self._probe_at:
            return []
        lost = list(self.sent.values())
        if lost:
            self._remove_lost(now, lost)
            self._move("probe lost")
        self.probes = 1
        self._probe_at = now + self._probe_interval
        self._probe_interval = min(2 * self._probe_interval, PROBE_LAST_NS)
        self._move("probe sent")
        return lost

    def abandon(self, now: int) -> list[SentPacket]:
        """Declare everything in flight lost and the path dead; return the packets."""
        lost = list(self.sent.values())
        if lost:
            self._remove_lost(now, lost)
        self.controller.timeout(self.control, now, self.mtu)
        if self.state is PathState.OPEN:
            self._move("probe timeout")
        self._move("timeouts exhausted")
        self.probes, self._loss_time = 0, 0
        self._probe_interval = PROBE_FIRST_NS
        self._probe_at = now + self._probe_interval
        return lost

    def on_unreachable(self) -> None:
        """Note an ICMP error (ECONNREFUSED): a hint, no proof."""
        self._move("unreachable")

    def _move(self, trigger: str) -> None:
        self.state = PATH_TABLE.get((self.state, trigger), self.state)
