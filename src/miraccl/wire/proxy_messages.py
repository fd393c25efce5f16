"""Messages of a link that are in flight: one record each while peer or executor refer to it."""

from __future__ import annotations

from miraccl.wire.proxy_records import MessagePosted, Placement
from miraccl.wire.proxy_states import RECV_TABLE, SEND_TABLE, RecvState, SendState
from miraccl.wire.stream import Frame


class Contradiction(Exception):
    """A frame of the peer contradicts the state of the link."""


class Impossible(Exception):
    """This side did something that the protocol excludes."""


class OutgoingMessage:
    """Outgoing message: bytes [0, queued) are in frames, of which ``unwritten`` are not in the
    kernel.
    """

    __slots__ = ("nbytes", "queued", "signature", "state", "unwritten")

    def __init__(self, posted: MessagePosted) -> None:
        self.signature = posted.signature
        self.nbytes = posted.nbytes
        self.state = SendState.WAIT_CREDIT
        self.queued = 0
        self.unwritten = 0

    def move(self, trigger: str) -> None:
        self.state = SEND_TABLE[self.state, trigger]


class IncomingMessage:
    """Incoming message: ``ranges`` are the claimed byte ranges, ``missing`` the bytes not placed
    yet.
    """

    __slots__ = ("missing", "nbytes", "placement", "ranges", "signature", "state")

    def __init__(self, frame: Frame) -> None:
        self.signature = frame.signature
        self.nbytes = frame.nbytes
        self.state: RecvState | None = None
        self.placement: Placement | None = None
        self.missing = frame.nbytes
        self.ranges: list[tuple[int, int]] = []

    def move(self, trigger: str) -> None:
        self.state = RECV_TABLE[self.state, trigger]

    def claim(self, start: int, end: int) -> None:
        """Claim bytes [start, end). Raises ``Contradiction`` if they were claimed before."""
        merged = []
        for low, high in self.ranges:
            if start < high and low < end:
                raise Contradiction(f"it sends bytes [{start}, {end}) twice")
            if high == start:
                start = low
            elif low == end:
                end = high
            else:
                merged.append((low, high))
        self.ranges = sorted([*merged, (start, end)])
