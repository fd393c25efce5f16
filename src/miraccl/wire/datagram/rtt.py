"""Round-trip time of one path: RFC 9002 section 5, in integer nanoseconds and without a floor.

Datacenter paths have round trips of microseconds, so the 1 ms granularity of QUIC is not used.
"""

from __future__ import annotations

from dataclasses import dataclass

#: RTT assumed before the first sample; RFC 9002 uses 333 ms, too long inside a machine room.
INITIAL_NS = 20_000_000

#: The first samples may include the time until the peer began to read; a much shorter one among
#: them starts the average anew.
SETTLED = 8

#: Longest sample that is believed: a longer one is of a clock that jumped or a process that was
#: stopped. An hour's would pace the path at a packet in two minutes.
MAX_NS = 2_000_000_000


@dataclass(slots=True)
class RttEstimator:
    """Smoothed RTT and its variation, both in nanoseconds; 0 samples mean that both are guesses.

    ``adjusted`` is the latest sample without the time that the peer held the packet: the delay of
    the network alone, which congestion controllers use (Swift's fabric delay).
    """

    smoothed: int = INITIAL_NS
    variation: int = INITIAL_NS // 2
    minimum: int = 0
    latest: int = 0
    adjusted: int = 0
    samples: int = 0

    def add(self, sample: int, ack_delay: int) -> None:
        """Add a sample of the largest newly acknowledged packet.

        Args:
            sample: Time since that packet was sent, in ns.
            ack_delay: Time the peer held the acknowledgement back, in ns, from the arrival of
                the packet in its kernel; subtracted down to the minimum (RFC 9002 section 5.3).
        """
        sample = min(max(1, sample), MAX_NS)
        self.latest = sample
        self.minimum = sample if not self.samples else min(self.minimum, sample)
        self.adjusted = adjusted = max(self.minimum, sample - ack_delay)
        if not self.samples or (self.samples < SETTLED and 4 * adjusted < self.smoothed):
            self.smoothed, self.variation = adjusted, adjusted // 2
        else:
            self.variation += (abs(self.smoothed - adjusted) - self.variation) // 4
            self.smoothed += (adjusted - self.smoothed) // 8
        self.samples += 1

    def probe_timeout(self, ack_delay: int, floor: int) -> int:
        """Probe timeout in ns: ``smoothed + 4 * variation + ack_delay``, at least ``floor``."""
        return max(floor, self.smoothed + 4 * self.variation + ack_delay)

    def loss_delay(self, floor: int) -> int:
        """Time threshold of loss detection in ns: 9/8 of the RTT (RFC 9002 section 6.1.2)."""
        return max(floor, max(self.smoothed, self.latest) * 9 // 8)
