"""Records of a link: parameters, events, instructions, and losses.

Events and instructions are tuples, not dataclasses: several are made per message, and a frozen
dataclass costs five times as much.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from miraccl.errors import CommunicatorAborted, MiracclError, PeerDied, ProtocolError
from miraccl.wire.stream import MAX_STREAMS, MIN_SEGMENT_BYTES, Frame
from miraccl.wire.verbs.policy import SHARES


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """Parameters of a link; sizes in bytes.

    Attributes:
        send_slot_bytes, recv_slot_bytes: Size of the peer's and of this side's slots.
        segment_bytes: Largest segment of a message.
        queue_bytes, queue_frames: Bytes and frames that a stream queues before the kernel has them.
            256 KiB keep a stream busy while its next frame is decided.
        spread: Small messages and control frames go to the least loaded stream, not to the first
            one: on datagrams each stream has one frame in flight.
        policy: Distribution of larger messages: ``SHARES`` gives a share per stream to whichever
            has the least queued; others are those of ``wire.verbs.policy``.
        control_streams: Last streams, which carry all frames without payload and no others; with 0
            all streams carry both.
        rails: Networks that the streams use. With several, segments are as small as they may be,
            and each goes to the stream that is expected to end first (``StreamMeasured``): a slow
            network gets fewer bytes, and all end together.
    """

    nstreams: int
    send_slot_bytes: int
    recv_slot_bytes: int
    nslots: int = 8
    inline_bytes: int = 32
    segment_bytes: int = 1 << 20
    queue_bytes: int = 1 << 18
    queue_frames: int = 32
    spread: bool = False
    policy: int = SHARES
    control_streams: int = 0
    rails: int = 1

    @property
    def data_streams(self) -> int:
        """Number of the streams that carry payload; they are the first ones."""
        return self.nstreams - self.control_streams

    def __post_init__(self) -> None:
        if not 1 <= self.nstreams <= MAX_STREAMS:
            raise ValueError(f"cannot use {self.nstreams} streams: allowed are 1 to {MAX_STREAMS}")
        if not 0 <= self.control_streams < self.nstreams:
            raise ValueError(
                f"cannot use {self.control_streams} of {self.nstreams} streams for control frames"
            )
        if self.segment_bytes < MIN_SEGMENT_BYTES:
            raise ValueError(
                f"cannot use segments of {self.segment_bytes} bytes: allowed are "
                f"{MIN_SEGMENT_BYTES} or more"
            )


class LossKind(enum.Enum):
    """Reason for which a peer cannot be reached any longer."""

    CLOSED = "closed"
    RESET = "reset"
    PROTOCOL = "protocol"
    ABORTED = "aborted"
    INTERNAL = "internal"


CLOSED_WITHOUT_CLOSE_FRAME = "it was closed without a word"


@dataclass(frozen=True)
class Loss:
    """End of a connection that this side did not request.

    Attributes:
        detail: Action of the peer, such as "closed its communicator"; for INTERNAL an action of
            this
            side, for RESET the kernel's message.
    """

    kind: LossKind
    detail: str

    def __str__(self) -> str:
        return self.detail

    def error(self, *, rank: int, peer: int) -> MiracclError:
        """Return the exception of an operation that needs ``peer``."""
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
    """Memory in which a message lands."""

    INLINE = "inline"
    SLOT = "slot"
    POSTED = "posted"
    OVERSIZE = "oversize"
    """Nowhere: the posted buffer is too small for it."""


class MessagePosted(NamedTuple):
    """The executor posted its next message."""

    message: int
    signature: int
    nbytes: int


class ReceivePosted(NamedTuple):
    """The executor posted a receive buffer for a message."""

    message: int
    nbytes: int


class MessagesConsumed(NamedTuple):
    """The executor has consumed ``tail`` messages in total."""

    tail: int


class FrameReceived(NamedTuple):
    """A valid header arrived on ``stream``; an ABORT with its ``text``.

    The payload of DATA is still in the stream.
    """

    stream: int
    frame: Frame
    text: str = ""


class PayloadPlaced(NamedTuple):
    """The payload of the DATA frame on ``stream`` is where the stream's last ``ReceivePayload``
    said.
    """

    stream: int


class FramesWritten(NamedTuple):
    """The kernel has all bytes of the ``frames`` oldest frames of ``stream``."""

    stream: int
    frames: int


class StreamMeasured(NamedTuple):
    """The kernel holds ``backlog`` bytes of ``stream`` that the peer has not acknowledged, and
    delivers ``rate`` bytes per millisecond (0: unknown).
    """

    stream: int
    backlog: int
    rate: int


class StreamEnded(NamedTuple):
    """The peer's end of ``stream`` is closed or broken."""

    stream: int
    detail: str


class Garbage(NamedTuple):
    """Bytes arrived on ``stream`` that are not a frame."""

    stream: int
    detail: str


class CloseRequested(NamedTuple):
    """Send what was posted, then close."""


class AbortRequested(NamedTuple):
    """Close now and send the reason to the peer."""

    text: str


class InternalError(NamedTuple):
    """This side cannot continue: the executor posted something impossible, or the proxy failed."""

    detail: str


Event: TypeAlias = (
    MessagePosted
    | ReceivePosted
    | MessagesConsumed
    | FrameReceived
    | PayloadPlaced
    | FramesWritten
    | StreamMeasured
    | StreamEnded
    | Garbage
    | CloseRequested
    | AbortRequested
    | InternalError
)


class SendFrame(NamedTuple):
    """Queue ``frame`` on its stream; DATA is followed by bytes [offset, offset + length) of its
    message.
    """

    frame: Frame


class ReceivePayload(NamedTuple):
    """Place the payload of the frame on ``stream`` at byte ``offset`` of the memory of
    ``message``.
    """

    stream: int
    message: int
    placement: Placement
    offset: int
    length: int


class AnnounceMessage(NamedTuple):
    """Show the executor that a message waits for its CTS."""

    message: int
    signature: int
    nbytes: int


class DeliverMessage(NamedTuple):
    """Post the descriptor of a message whose payload is in place."""

    message: int
    signature: int
    nbytes: int
    placement: Placement


class PublishTail(NamedTuple):
    """Publish the tail of the send FIFO."""

    tail: int


class PeerLost(NamedTuple):
    """Report the loss of the peer; memory of this link must not be touched afterwards."""

    loss: Loss


class AbortStreams(NamedTuple):
    """Send ``text`` in an ABORT frame on streams that are between frames, and close all streams."""

    text: str


class LinkFinished(NamedTuple):
    """Everything is sent and the peer has closed its side: close the streams."""


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
