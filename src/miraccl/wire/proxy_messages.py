"""The messages of a link that are under way, one record each for as long as the peer or the executor has to do with it."""

from __future__ import annotations

from miraccl.wire.proxy_records import MessagePosted, Placement
from miraccl.wire.proxy_states import RECV_TABLE, SEND_TABLE, RecvState, SendState
from miraccl.wire.stream import Frame


class Contradiction(Exception):
    """A frame cannot be true."""


class Impossible(Exception):
    """This side did what it cannot have done."""


class OutgoingMessage:
    """One message on its way out: bytes [0, queued) are in frames, ``untaken`` of these frames are not in the kernel yet."""

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
    """One message on its way in: ``pieces`` are the claimed byte ranges, ``missing`` the bytes not placed yet."""

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
        """Ranges are kept merged and sorted, so that a message of any number of pieces needs little memory."""
        merged = []
        for low, high in self.ranges:
            if start < high and low < end:
                raise Contradiction(f"bytes [{start}, {end}) come twice")
            if high == start:
                start = low
            elif low == end:
                end = high
            else:
                merged.append((low, high))
        self.ranges = sorted([*merged, (start, end)])
