"""Protocol of one network peer as a state machine: events in, instructions out.

No sockets, memory, clock or threads. A ``ProxyLink`` is both directions between this rank and one
peer, over ``nstreams`` TCP streams that may reorder each other's frames: a ``SendHalf``, a
``ReceiveHalf``, and the ends of the streams.

Every frame carries, as ``ack``, the number of messages the receiver has consumed. Frames are not
trusted: credit and CTS are checked against what this side has sent as well, and the first
contradiction ends the link with ``PeerLost(PROTOCOL)``. The receiver never stops reading its
streams, so credit and CTS cannot be stuck behind data, and the protocol cannot deadlock.

End of a link. ``CloseRequested``: send what was posted, then CLOSE on each stream, then wait for
the peer's end. A peer that is not closing itself answers CLOSE by closing. A stream that ends
without CLOSE is a loss. The log of all events can be recorded and replayed (``replay``), as in
dask's worker state machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from miraccl.wire.proxy_messages import Contradiction, Impossible
from miraccl.wire.proxy_receiver import ReceiveHalf
from miraccl.wire.proxy_records import (
    AbortRequested,
    AbortStreams,
    CloseRequested,
    Event,
    FrameReceived,
    FramesWritten,
    Garbage,
    Instruction,
    InternalError,
    LinkConfig,
    LinkFinished,
    Loss,
    LossKind,
    MessagePosted,
    MessagesConsumed,
    PayloadPlaced,
    PeerLost,
    ReceivePosted,
    StreamEnded,
    StreamMeasured,
)
from miraccl.wire.proxy_sender import SendHalf
from miraccl.wire.proxy_states import LINK_TABLE, LinkState
from miraccl.wire.stream import MAX_TEXT_BYTES, Frame, FrameType


class ProxyLink:
    """State of one peer. ``handle`` is the only entry point and never raises for actions of the
    peer.

    Attributes without an underscore may be read by the owner.

    Args:
        log: List that collects all events.
    """

    def __init__(self, config: LinkConfig, *, log: list[Event] | None = None) -> None:
        self.config = config
        self.state = LinkState.OPEN
        self.loss: Loss | None = None
        self.log = log
        self._instructions: list[Instruction] = []
        self.sender = SendHalf(config, self._instructions)
        self.receiver = ReceiveHalf(config, self._instructions)
        self._stream_closed = [False] * config.nstreams  # by the peer
        self._peer_total = -1
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            MessagePosted: self.sender.on_posted,
            ReceivePosted: self._receive_posted,
            MessagesConsumed: self._consumed,
            FrameReceived: self._frame_received,
            PayloadPlaced: self.receiver.on_placed,
            FramesWritten: self.sender.on_written,
            StreamMeasured: self.sender.on_measured,
            StreamEnded: self._stream_ended,
            Garbage: self._garbage,
            CloseRequested: self._close_requested,
            AbortRequested: self._abort_requested,
            InternalError: self._internal_error,
        }

    @property
    def alive(self) -> bool:
        """True while streams and memory are in use."""
        return self.state in (LinkState.OPEN, LinkState.DRAINING, LinkState.CLOSING)

    @property
    def peer_closed(self) -> bool:
        """True if the peer has closed every stream."""
        return all(self._stream_closed)

    def handle(self, event: Event) -> list[Instruction]:
        """Process one event and return the instructions to execute, in order."""
        if self.log is not None:
            self.log.append(event)
        if not self.alive:
            return []
        self._instructions.clear()
        try:
            self._handlers[type(event)](event)
            if self.alive:
                self._pump()
        except Impossible as problem:
            self._fail(LossKind.INTERNAL, str(problem), cut=True)
        except Contradiction as problem:
            self._fail(LossKind.PROTOCOL, f"violated the protocol: {problem}", cut=True)
        return self._instructions.copy()

    # --- local events

    def _receive_posted(self, event: ReceivePosted) -> None:
        if self.receiver.post_receive(event.message, event.nbytes):
            self.sender.queue_control(FrameType.CTS, event.message, 0, event.nbytes)

    def _consumed(self, event: MessagesConsumed) -> None:
        self.receiver.consume(event.tail)
        # The peer stops at nslots. A credit per half of them keeps it sending, and saves three
        # frames out of four if messages go in one direction only.
        if (
            event.tail - self.sender.last_ack >= self.config.nslots // 2
            and not self.sender.has_control_frames
        ):
            self.sender.queue_control(FrameType.CREDIT)

    def _close_requested(self, event: CloseRequested) -> None:
        if self.state is LinkState.OPEN:
            self._move("close requested")

    def _abort_requested(self, event: AbortRequested) -> None:
        self._instructions.append(AbortStreams(event.text))
        self._move("lost")

    def _internal_error(self, event: InternalError) -> None:
        raise Impossible(event.detail)

    # --- events of streams

    def _frame_received(self, event: FrameReceived) -> None:
        stream, frame = event.stream, event.frame
        if frame.stream != stream:
            raise Contradiction(f"a frame of stream {frame.stream} on stream {stream}")
        if self._stream_closed[stream]:
            raise Contradiction(f"a {frame.type.name} frame after CLOSE")
        if frame.type is FrameType.ABORT:
            return self._fail(LossKind.ABORTED, f"gave up: {event.text}")
        self.sender.on_ack(frame.ack)
        if frame.type is FrameType.DATA:
            self.receiver.on_data(stream, frame)
        elif frame.type is FrameType.ANNOUNCE:
            self.receiver.on_announce(frame)
        elif frame.type is FrameType.CTS:
            self.sender.on_cts(frame.message, frame.nbytes)
        elif frame.type is FrameType.CLOSE:
            self._peer_close(stream, frame)

    def _stream_ended(self, event: StreamEnded) -> None:
        if self._stream_closed[event.stream]:
            return
        self._stream_closed[event.stream] = True
        if self.state is LinkState.OPEN:
            self._fail(LossKind.RESET, event.detail)
        elif self.state is LinkState.DRAINING:  # the peer reads no longer
            self._finish("peer closed")
        else:  # it will not read a CLOSE that is still queued either
            self.sender.drop(event.stream)

    def _garbage(self, event: Garbage) -> None:
        raise Contradiction(event.detail)

    def _peer_close(self, stream: int, frame: Frame) -> None:
        if self._peer_total not in (-1, frame.message):
            raise Contradiction("streams close with different numbers of messages")
        self._peer_total = frame.message
        self._stream_closed[stream] = True
        if not all(self._stream_closed):
            return
        if self.receiver.delivered != frame.message:
            raise Contradiction(
                f"it closes after {frame.message} messages, but {self.receiver.delivered} arrived"
            )
        if self.state is LinkState.OPEN:
            self._fail(LossKind.CLOSED, "closed its communicator")
        elif self.state is LinkState.DRAINING:  # the peer reads no longer
            self._finish("peer closed")

    # --- after an event

    def _pump(self) -> None:
        ack = self.receiver.tail
        if self.state is LinkState.DRAINING and self.sender.done:
            self._move("all written")
            self.sender.close(ack)
        if self.state is LinkState.CLOSING:
            # Closing a stream on which the peer still sends resets it and destroys data that the
            # peer has not read: wait for its end.
            if not self.sender.closing and all(self._stream_closed):
                self._finish("close written, peer closed")
            return
        self.sender.pump(ack)

    def _move(self, trigger: str) -> None:
        self.state = LINK_TABLE[self.state, trigger]

    def _finish(self, trigger: str) -> None:
        self._move(trigger)
        self._instructions.append(LinkFinished())

    def _fail(self, kind: LossKind, detail: str, *, cut: bool = False) -> None:
        self._move("lost")
        self.loss = Loss(kind, detail)
        if cut:
            self._instructions.append(AbortStreams(detail[:MAX_TEXT_BYTES]))
        self._instructions.append(PeerLost(self.loss))


def replay(config: LinkConfig, events: Iterable[Event]) -> tuple[ProxyLink, list[Instruction]]:
    """Return a new link that processed ``events``, and all of its instructions."""
    link = ProxyLink(config)
    return link, [instruction for event in events for instruction in link.handle(event)]
