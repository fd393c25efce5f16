"""Transfers to run on a fabric: who sends how much to whom, under which control, and the outcome.

``interpreted.run`` (objects, any topology and packet size) and ``compiled.run`` (flat arrays, large
fabrics) take the same request and give the same result.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from miraccl.errors import InvalidUsage
from miraccl.sim.fabric.faults import LinkChange
from miraccl.sim.fabric.topology import FabricTopology

US = 1_000


class Balance(enum.IntEnum):
    """Choice of the entropy of a packet.

    SPRAY: all entropies in turn, in an order that changes each time around (EQDS, Olteanu et al.,
    NSDI 2022). RECYCLE: entropies whose packets arrived without an ECN mark are used again, others
    are drawn at random (REPS, Bonato et al., arXiv 2407.21625).
    """

    SPRAY = 0
    RECYCLE = 1


class Control(enum.IntEnum):
    """Admission of packets.

    RECEIVER: credits that the receiver issues at its line rate over all senders (EQDS). SENDER: a
    window that shrinks with the share of ECN marks (DCTCP, RFC 8257), as NICs do.
    """

    RECEIVER = 0
    SENDER = 1


@dataclass(frozen=True)
class FabricTransfer:
    """``nbytes`` from host ``source`` to host ``target``, from ``start`` (ns) on."""

    source: int
    target: int
    nbytes: int
    start: int = 0


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Protocol of all transfers of a run.

    Args:
        packet: Bytes of a full packet. header: Bytes of it that are no payload, also the size of
            control packets. entropies: Paths that a transfer chooses from; 1 is ECMP per flow.
            balance: Choice among them. control: Admission. window: Packets that a sender may send
            before it was granted any (RECEIVER), or its initial window (SENDER). timeout: Time in
            ns after which an unacknowledged packet is sent again. pull_percent: Interval of
            credits in percent of a full packet's time on the receiver's link.
    """

    packet: int = 4150
    header: int = 64
    entropies: int = 128
    balance: Balance = Balance.SPRAY
    control: Control = Control.RECEIVER
    window: int = 50
    timeout: int = 120 * US
    pull_percent: int = 101

    def __post_init__(self) -> None:
        if not self.header < self.packet <= 1 << 16:
            raise InvalidUsage(f"packets of {self.packet} bytes with {self.header} of header")
        if not 1 <= self.entropies <= 1 << 15:
            raise InvalidUsage(f"{self.entropies} entropies; allowed are 1 to {1 << 15}")
        if self.window < 1 or self.timeout < 1 or self.pull_percent < 1:
            raise InvalidUsage(
                f"window {self.window}, timeout {self.timeout}, pull_percent {self.pull_percent}: "
                "all must be at least 1"
            )

    @property
    def payload(self) -> int:
        """Payload of a full packet in bytes."""
        return self.packet - self.header


@dataclass(frozen=True)
class TransferRequest:
    """A run: topology, transfers, protocol, changes of links, seed."""

    topology: FabricTopology
    transfers: Sequence[FabricTransfer]
    config: TransferConfig = field(default_factory=TransferConfig)
    changes: Sequence[LinkChange] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        self.topology.validate()
        for i, transfer in enumerate(self.transfers):
            inside = all(0 <= h < self.topology.hosts for h in (transfer.source, transfer.target))
            if not inside or transfer.source == transfer.target or transfer.nbytes < 1:
                raise InvalidUsage(
                    f"cannot run transfer {i}: {transfer.nbytes} bytes from host "
                    f"{transfer.source} to {transfer.target} of {self.topology.hosts}"
                )


@dataclass(frozen=True)
class TransferResult:
    """Outcome of a run.

    ``completion`` has the time in ns from the start of each transfer to the acknowledgement of its
    last byte, -1 if it did not end in time. Packet counts are sums over all transfers or ports;
    ``last_loss`` is the time in ns of the last loss on a wire.
    """

    completion: tuple[int, ...]
    events: int
    sent: int
    resent: int
    trimmed: int
    marked: int
    dropped: int
    lost: int
    last_loss: int

    @property
    def slowest(self) -> int:
        """Completion time of the last transfer in ns; -1 if one did not end."""
        return -1 if min(self.completion) < 0 else max(self.completion)
