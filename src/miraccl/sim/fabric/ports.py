"""Output ports: queues with priorities, ECN marks and trimming, and the link behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from miraccl.sim.fabric.events import EventQueue
from miraccl.sim.fabric.hashing import DRAW_RANGE, draw
from miraccl.sim.fabric.topology import LinkSpec

#: Size of a trimmed packet and of control packets: an Ethernet minimum frame.
HEADER_BYTES = 64


@dataclass(eq=False, slots=True)
class FabricPacket:
    """A packet on its way.

    ``flow`` and ``entropy`` choose its path. ``control`` packets overtake data. ``marked`` is ECN's
    CE mark; a ``trimmed`` packet has lost its payload. ``content`` belongs to the hosts.
    """

    source: int
    target: int
    flow: int
    entropy: int
    size: int
    control: bool = False
    content: Any = None
    marked: bool = False
    trimmed: bool = False
    corrupted: bool = False


@dataclass(slots=True)
class PortCounters:
    """Counts of one port since the start."""

    packets: int = 0
    bytes: int = 0
    dropped: int = 0
    lost: int = 0
    trimmed: int = 0
    marked: int = 0
    #: Time of the last loss on the wire.
    last_loss: int = 0
    #: Largest number of queued bytes of data.
    peak: int = 0


class RandomDraws:
    """Random numbers of a fabric, drawn in the order of its events."""

    def __init__(self, seed: int) -> None:
        self.seed, self.drawn = seed, 0

    def next(self) -> int:
        """Return the next 32 bits."""
        self.drawn += 1
        return draw(self.seed, self.drawn)

    def happens(self, probability: int) -> bool:
        """Return True with ``probability`` / 2^32; impossible events draw nothing."""
        return probability > 0 and self.next() < probability


class DataSource(Protocol):
    """Host whose link asks for data when it is free."""

    @property
    def has_data(self) -> bool:
        """True if ``next_data`` may return a packet."""
        ...

    def next_data(self) -> FabricPacket | None:
        """Return the next data packet, or None."""
        ...


class OutputPort:
    """Queue and transmitter of one link.

    ``source``, if set, supplies data when the link is free, so that a host queues nothing; other
    packets come through ``enqueue``.

    Args:
        number: Number of the link.
        spec: The link.
        events: Time.
        draws: Random numbers.
        deliver: Called with (node, packet) when a packet arrives there.
    """

    def __init__(
        self,
        number: int,
        spec: LinkSpec,
        events: EventQueue,
        draws: RandomDraws,
        deliver: Callable[[tuple[int, FabricPacket]], None],
    ) -> None:
        self.number, self.profile, self.target = number, spec.profile, spec.target
        self.up = True
        self.counters = PortCounters()
        self.source: DataSource | None = None
        self._events, self._draws, self._deliver = events, draws, deliver
        self._control: deque[FabricPacket] = deque()
        self._data: deque[FabricPacket] = deque()
        self.control_bytes = self.data_bytes = 0
        self._busy_until = 0
        self._wake_pending = False

    def enqueue(self, packet: FabricPacket) -> None:
        """Queue, mark, trim or drop a packet; send it if the link is free."""
        if not packet.control and not packet.trimmed:
            kept = self._enqueue_data(packet)
            if kept is None:
                return
            packet = kept
        if packet.control or packet.trimmed:
            if self.control_bytes + packet.size > 2 * self.profile.queue:
                self.counters.dropped += 1
                return
            self._control.append(packet)
            self.control_bytes += packet.size
        self.kick()

    def _enqueue_data(self, packet: FabricPacket) -> FabricPacket | None:
        """Queue data; return the packet or the one trimmed for it, None if it was dropped."""
        profile, counters = self.profile, self.counters
        if self.data_bytes + packet.size > profile.queue:
            if not profile.trimming:
                counters.dropped += 1
                return None
            # Trimming the last or the new packet at random avoids that one flow of a synchronised
            # pair loses every time (NDP, Handley et al., SIGCOMM 2017, section 3.1).
            if self._data and self._draws.next() & 1:
                victim = self._data.pop()
                self.data_bytes += packet.size - victim.size
                self._data.append(packet)
                packet = victim
            packet.trimmed, packet.size = True, HEADER_BYTES
            counters.trimmed += 1
            return packet
        self._data.append(packet)
        self.data_bytes += packet.size
        counters.peak = max(counters.peak, self.data_bytes)
        if profile.mark_above and self.data_bytes > profile.mark_above:
            packet.marked = True
            counters.marked += 1
        return packet

    def kick(self) -> None:
        """Send if there is something to send and the link is free; else wake when it is."""
        if self._wake_pending:
            return
        if self._events.now >= self._busy_until:
            self._transmit()
        else:
            self._wake_pending = True
            self._events.schedule(self._busy_until, self._wake)

    def _wake(self, _: Any) -> None:
        self._wake_pending = False
        self._transmit()

    def _next(self) -> FabricPacket | None:
        if self._control:
            packet = self._control.popleft()
            self.control_bytes -= packet.size
            return packet
        if self._data:
            packet = self._data.popleft()
            self.data_bytes -= packet.size
            return packet
        return self.source.next_data() if self.source is not None else None

    def _transmit(self) -> None:
        packet = self._next()
        if packet is None:
            return
        profile, counters = self.profile, self.counters
        self._busy_until = self._events.now + profile.transmission_time(packet.size)
        counters.packets += 1
        counters.bytes += packet.size
        if not self.up or self._draws.happens(int(profile.loss * DRAW_RANGE)):
            counters.lost += 1
            counters.last_loss = self._events.now
        else:
            self._propagate(packet)
        if self._control or self._data or (self.source is not None and self.source.has_data):
            self._wake_pending = True
            self._events.schedule(self._busy_until, self._wake)

    def _propagate(self, packet: FabricPacket) -> None:
        profile, draws = self.profile, self._draws
        copies = 2 if draws.happens(int(profile.duplicate * DRAW_RANGE)) else 1
        if draws.happens(int(profile.corrupt * DRAW_RANGE)):
            packet.corrupted = True
        for copy in range(copies):
            late = draws.next() % (profile.jitter + 1) if profile.jitter else 0
            arrival = self._busy_until + profile.latency + late
            sent = replace(packet) if copy else packet
            self._events.schedule(arrival, self._deliver, (self.target, sent))
