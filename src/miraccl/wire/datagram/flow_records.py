"""Records that a flow exchanges with its owner: configuration, packets to send, events."""

from __future__ import annotations

from dataclasses import dataclass

from miraccl.errors import InvalidUsage
from miraccl.wire.datagram.packets import MAX_PATHS, MAX_STREAMS, MIN_MTU, Abort, Ack, Grant, Probe
from miraccl.wire.datagram.path_states import PathState


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """Configuration of one flow, equal on both sides except ``connection``.

    Args:
        connection: Number that the peer put into packets to us; packets to the peer carry its
            number. peer_connection: Number in packets to the peer. npaths: Number of paths.
            nstreams: Number of streams; each has one frame in flight, any number queued. mtu: UDP
            payload in bytes that every path carries at the start. congestion: Name of the
            congestion controller. granted: Bytes of new data admitted before the first grant; None
            disables grants. max_in_flight: Bytes in flight per path, whatever the controller
            allows: a share of the peer's receive buffer.
    """

    connection: int
    peer_connection: int
    npaths: int = 1
    nstreams: int = 16
    mtu: int = MIN_MTU
    congestion: str = "swift"
    granted: int | None = None
    max_in_flight: int = 1 << 30

    def __post_init__(self) -> None:
        if not 1 <= self.npaths <= MAX_PATHS:
            raise InvalidUsage(f"{self.npaths} paths; allowed are 1 to {MAX_PATHS}")
        if not 1 <= self.nstreams <= MAX_STREAMS:
            raise InvalidUsage(f"{self.nstreams} streams; allowed are 1 to {MAX_STREAMS}")
        if not MIN_MTU <= self.mtu <= 65_507:
            raise InvalidUsage(f"mtu of {self.mtu} bytes; allowed are {MIN_MTU} to 65507")


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes ``[offset, offset + length)`` of the frame in flight on ``stream``, for one packet.

    ``header`` is the frame header, or empty once the peer has acknowledged it.
    """

    stream: int
    frame: int
    offset: int
    length: int
    header: bytes


@dataclass(frozen=True, slots=True)
class OutgoingPacket:
    """One packet to encode, seal and send on ``path``: control records, then data segments."""

    path: int
    number: int
    size: int
    records: tuple[Ack | Grant | Probe | Abort, ...]
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class FrameStarted:
    """A frame has begun to arrive on ``stream``; its payload follows in any order."""

    stream: int
    header: bytes


@dataclass(frozen=True, slots=True)
class PayloadReceived:
    """New payload bytes of the frame on ``stream``; every byte is reported exactly once."""

    stream: int
    offset: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class FrameCompleted:
    """All payload bytes of the frame on ``stream`` have been reported."""

    stream: int


@dataclass(frozen=True, slots=True)
class FrameAcknowledged:
    """The peer has the frame sent on ``stream``; its memory is the owner's again."""

    stream: int


@dataclass(frozen=True, slots=True)
class PathChanged:
    """The state of a path has changed; values are ``PathState`` values."""

    path: int
    before: str
    after: str

    @property
    def opened(self) -> bool:
        """True if the path may carry data from now on."""
        return self.after == PathState.OPEN.value


@dataclass(frozen=True, slots=True)
class PeerAborted:
    """The peer gives up; ``text`` is its reason."""

    text: bytes


FlowEvent = (
    FrameStarted | PayloadReceived | FrameCompleted | FrameAcknowledged | PathChanged | PeerAborted
)
