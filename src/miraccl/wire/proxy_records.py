"""Records of a link: its numbers, what happens to it (events), what it asks for (instructions), and how it can end.

Events and instructions are tuples and not dataclasses: several are made per message, and a frozen dataclass costs five times as much.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from miraccl.errors import CommunicatorAborted, MiracclError, PeerDied, ProtocolError
from miraccl.wire.stream import MAX_STREAMS, MIN_SEGMENT_BYTES, Frame


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """Numbers of a link.  ``send_slot_bytes`` are the peer's slots, ``recv_slot_bytes`` ours; sizes in bytes.

    ``piece_bytes`` is the largest piece.  A stream takes frames until ``queue_bytes`` or ``queue_frames`` of them are not yet taken by the
    kernel; 256 KiB keep a stream busy while its next frame is decided.
    """

    nstreams: int
    send_slot_bytes: int
    recv_slot_bytes: int
    nslots: int = 8
    inline_bytes: int = 32
    segment_bytes: int = 1 << 20
    queue_bytes: int = 1 << 18
    queue_frames: int = 32

    def __post_init__(self) -> None:
        if not 1 <= self.nstreams <= MAX_STREAMS:
            raise ValueError(f"a link has 1 to {MAX_STREAMS} streams, got {self.nstreams}")
        if self.segment_bytes < MIN_SEGMENT_BYTES:
            raise ValueError(
                f"a piece has {MIN_SEGMENT_BYTES} bytes or more, got {self.segment_bytes}"
            )


class LossKind(enum.Enum):
    """Why a peer cannot be reached any more."""

    CLOSED = "closed"
    RESET = "reset"
    PROTOCOL = "protocol"
    ABORTED = "aborted"
    INTERNAL = "internal"


CLOSED_WITHOUT_CLOSE_FRAME = "it was closed without a word"


@dataclass(frozen=True)
class Loss:
    """The end of a connection that this side did not ask for; ``detail`` is what the peer did, such as "closed its communicator", what this
    side did for INTERNAL, and for RESET what the kernel said."""

    kind: LossKind
    detail: str

    def __str__(self) -> str:
        return self.detail

    def error(self, *, rank: int, peer: int) -> MiracclError:
        """The exception that an operation which needs ``peer`` ends with."""
        text = {
            LossKind.RESET: f"rank {rank} has lost its connection to rank {peer}: {self.detail}",
            LossKind.INTERNAL: f"rank {rank} cannot reach rank {peer} any more: it {self.detail}",
        }.get(self.kind, f"rank {peer} {self.detail}")
        kinds: dict[LossKind, type[MiracclError]] = {
            LossKind.PROTOCOL: ProtocolError,
            LossKind.ABORTED: CommunicatorAborted,
            LossKind.INTERNAL: MiracclError,
        }
        return kinds.get(self.kind, PeerDied)(text, rank=rank, peer=peer)


class Placement(enum.Enum):
    """Where a message lands."""

    INLINE = "inline"
    SLOT = "slot"
    POSTED = "posted"
    OVERSIZE = "oversize"
    """Nowhere: the room is too small for it."""


class MessagePosted(NamedTuple):
    """The executor posted its next message."""

    message: int
    signature: int
    nbytes: int


class ReceivePosted(NamedTuple):
    """The executor says that a message may land in ``room`` bytes of its own."""

    message: int
    nbytes: int


class MessagesConsumed(NamedTuple):
    """The executor has consumed ``tail`` messages in all."""

    tail: int


class FrameReceived(NamedTuple):
    """A valid header came on ``stream``; for ABORT its ``text``.  Payload of DATA is still in the stream."""

    stream: int
    frame: Frame
    text: str = ""


class PayloadPlaced(NamedTuple):
    """The payload of the DATA frame on ``stream`` is where the last ``Receive`` of the stream said."""

    stream: int


class FramesWritten(NamedTuple):
    """The kernel has all bytes of the ``frames`` oldest frames of ``stream``."""

    stream: int
    frames: int


class StreamEnded(NamedTuple):
    """The peer's end of ``stream`` is closed or broken."""

    stream: int
    detail: str


class Garbage(NamedTuple):
    """Bytes came on ``stream`` that are no frame."""

    stream: int
    detail: str


class CloseRequested(NamedTuple):
    """Send what is posted, then close."""


class AbortRequested(NamedTuple):
    """Close now and tell the peer why."""

    text: str


class InternalError(NamedTuple):
    """This side cannot go on: the executor posted something impossible, or the proxy failed."""

    detail: str


Event: TypeAlias = (
    MessagePosted
    | ReceivePosted
    | MessagesConsumed
    | FrameReceived
    | PayloadPlaced
    | FramesWritten
    | StreamEnded
    | Garbage
    | CloseRequested
    | AbortRequested
    | InternalError
)


class SendFrame(NamedTuple):
    """Put ``frame`` at the end of its stream's queue, for DATA followed by bytes [offset, offset + length) of its message."""

    frame: Frame


class ReceivePayload(NamedTuple):
    """Put the payload of the frame that just came on ``stream`` at byte ``offset`` of the place of ``message``."""

    stream: int
    message: int
    placement: Placement
    offset: int
    length: int


class AnnounceMessage(NamedTuple):
    """Let the executor see that a message waits for its want."""

    message: int
    signature: int
    nbytes: int


class DeliverMessage(NamedTuple):
    """Post the line of a message: it is in place."""

    message: int
    signature: int
    nbytes: int
    placement: Placement


class PublishTail(NamedTuple):
    """Publish the tail of the send FIFO."""

    tail: int


class PeerLost(NamedTuple):
    """Report the loss of the peer; no memory is to be touched for this link any more."""

    loss: Loss


class AbortStreams(NamedTuple):
    """Tell ``text`` in an ABORT frame on streams that are between frames, if that works at once, and close all streams."""

    text: str


class LinkFinished(NamedTuple):
    """All is sent and the peer has its end of the streams closed: close them."""


Instruction: TypeAlias = (
    SendFrame
    | ReceivePayload
    | AnnounceMessage
    | DeliverMessage
    | PublishTail
    | PeerLost
    | AbortStreams
    | LinkFinished
)
