"""Two links joined by a virtual network: per stream and direction an ordered queue of frames, and
nothing else is ordered.

The world plays executor and driver on both sides.  ``choices`` decides what happens next, so that
hypothesis can search all orders; memory is the set of byte ranges that instructions placed,
compared with what the peer posted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from miraccl.wire import proxy_records as rec
from miraccl.wire.proxy import ProxyLink
from miraccl.wire.proxy_check import validate_state
from miraccl.wire.stream import Frame, FrameType, decode_frame, encode_frame


@dataclass
class Side:
    """One rank: its link, what it sends, and what it has received."""

    link: ProxyLink
    to_post: deque[int]
    rooms: dict[int, int]
    posted: int = 0
    tail: int = 0
    consumed: int = 0
    wire: list[deque[Frame]] = field(default_factory=list)
    taken: list[deque[Frame]] = field(default_factory=list)
    placing: dict[int, rec.ReceivePayload] = field(default_factory=dict)
    placed: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    announced: dict[int, int] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)
    delivered: list[rec.DeliverMessage] = field(default_factory=list)
    loss: rec.Loss | None = None
    cut: str | None = None
    finished: bool = False
    did: list[rec.Instruction] = field(default_factory=list)


class World:
    """``sizes[i]`` are the messages that side i posts; ``rooms[i]`` the wants of side i, by
    message.
    """

    def __init__(
        self,
        config: rec.LinkConfig,
        sizes: tuple[list[int], list[int]],
        rooms: tuple[dict[int, int], dict[int, int]] | None = None,
    ) -> None:
        self.config = config
        self.sizes = sizes
        rooms = rooms or ({}, {})
        self.sides = [
            Side(link=ProxyLink(config, log=[]), to_post=deque(sizes[i]), rooms=dict(rooms[i]))
            for i in (0, 1)
        ]
        for side in self.sides:
            side.wire = [deque() for _ in range(config.nstreams)]
            side.taken = [deque() for _ in range(config.nstreams)]

    def handle(self, index: int, event: rec.Event) -> None:
        side = self.sides[index]
        for do in side.link.handle(event):
            side.did.append(do)
            self._carry_out(side, do)
        if side.link.alive:
            validate_state(side.link)

    def _carry_out(self, side: Side, do: rec.Instruction) -> None:
        if isinstance(do, rec.SendFrame):
            assert decode_frame(encode_frame(do.frame)) == do.frame
            side.taken[do.frame.stream].append(do.frame)
        elif isinstance(do, rec.ReceivePayload):
            assert do.stream not in side.placing
            limit = {
                rec.Placement.INLINE: self.config.inline_bytes,
                rec.Placement.SLOT: self.config.recv_slot_bytes,
                rec.Placement.POSTED: side.rooms.get(do.message, 0)
                if do.message in side.wanted
                else 0,
                rec.Placement.OVERSIZE: 0,
            }[do.placement]
            assert 0 <= do.offset < do.offset + do.length <= limit
            assert side.consumed <= do.message < side.consumed + self.config.nslots
            side.placing[do.stream] = do
        elif isinstance(do, rec.AnnounceMessage):
            side.announced[do.message] = do.nbytes
        elif isinstance(do, rec.DeliverMessage):
            assert do.message == len(side.delivered)
            side.delivered.append(do)
        elif isinstance(do, rec.PublishTail):
            assert side.tail < do.tail <= side.posted
            side.tail = do.tail
        elif isinstance(do, rec.PeerLost):
            assert side.loss is None
            side.loss = do.loss
        elif isinstance(do, rec.AbortStreams):
            side.cut = do.text
        else:
            assert isinstance(do, rec.LinkFinished)
            side.finished = True

    def moves(self) -> list[Callable[[], None]]:
        """Everything that could happen now."""
        found: list[Callable[[], None]] = []
        for i, side in enumerate(self.sides):
            if not side.link.alive:
                continue
            if side.to_post and side.posted - side.tail < self.config.nslots:
                found.append(partial(self.post, i))
            if side.consumed < len(side.delivered):
                found.append(partial(self.consume, i))
            for message in side.rooms:
                if (
                    message not in side.wanted
                    and side.consumed <= message < side.consumed + self.config.nslots
                ):
                    found.append(partial(self.want, i, message))
            for stream in range(self.config.nstreams):
                if side.taken[stream]:
                    found.append(partial(self.take, i, stream))
                if stream in side.placing:
                    found.append(partial(self.place, i, stream))
                elif self.sides[1 - i].wire[stream]:
                    found.append(partial(self.arrive, i, stream))
        return found

    def post(self, i: int) -> None:
        side = self.sides[i]
        side.posted += 1
        self.handle(
            i, rec.MessagePosted(side.posted - 1, 1000 * i + side.posted, side.to_post.popleft())
        )

    def consume(self, i: int) -> None:
        self.sides[i].consumed += 1
        self.handle(i, rec.MessagesConsumed(self.sides[i].consumed))

    def want(self, i: int, message: int) -> None:
        self.sides[i].wanted.add(message)
        self.handle(i, rec.ReceivePosted(message, self.sides[i].rooms[message]))

    def take(self, i: int, stream: int) -> None:
        """The kernel takes one frame: from now on it is on its way."""
        side = self.sides[i]
        side.wire[stream].append(side.taken[stream].popleft())
        self.handle(i, rec.FramesWritten(stream, 1))

    def arrive(self, i: int, stream: int) -> None:
        frame = self.sides[1 - i].wire[stream].popleft()
        self.handle(i, rec.FrameReceived(stream, frame))

    def place(self, i: int, stream: int) -> None:
        side = self.sides[i]
        do = side.placing.pop(stream)
        side.placed.setdefault(do.message, []).append((do.offset, do.offset + do.length))
        self.handle(i, rec.PayloadPlaced(stream))

    def run(self, choose: Callable[[int], int] | None = None, *, limit: int = 200_000) -> None:
        """Until nothing can happen any more; ``choose(n)`` picks one of n moves."""
        for _ in range(limit):
            moves = self.moves()
            if not moves:
                return
            moves[choose(len(moves)) if choose else 0]()
        raise AssertionError("the links never come to rest")

    def check_complete(self) -> None:
        """All messages arrived, in order, each byte once, and all memory was given back."""
        for i, side in enumerate(self.sides):
            assert side.loss is None
            expected = self.sizes[1 - i]
            assert [d.nbytes for d in side.delivered] == expected
            assert [d.signature for d in side.delivered] == [
                1000 * (1 - i) + m + 1 for m in range(len(expected))
            ]
            assert self.sides[1 - i].tail == len(expected)
            for message, nbytes in enumerate(expected):
                ranges = sorted(side.placed.get(message, []))
                assert sum(high - low for low, high in ranges) == nbytes
                assert [low for low, _ in ranges] == [0, *(high for _, high in ranges[:-1])][
                    : len(ranges)
                ]

    def frames(self, i: int, kind: FrameType) -> list[Frame]:
        """Frames of a kind that side i was asked to send."""
        return [
            do.frame
            for do in self.sides[i].did
            if isinstance(do, rec.SendFrame) and do.frame.type is kind
        ]
