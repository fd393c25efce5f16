"""What a proxy does for one peer, without sockets, memory, clock or threads: events in, instructions out.

A ``Link`` is both directions between this rank and one peer, over ``nstreams`` TCP streams that may reorder each other's frames.

Sending.  A message is SENDING as soon as the peer can hold it: message m needs ``m - credit < nslots`` (credit: messages that the peer's
executor has consumed, on every frame as ``ack``), and one larger than the peer's slots needs a WANT of enough room; without one, an
ANNOUNCE tells the peer that it is needed.  Small messages go whole over stream 0, larger ones in pieces to whichever stream has room,
lowest message first.  When the kernel has taken all bytes of all messages up to m, ``Release(m + 1)`` gives the sender its memory back.

Receiving.  The first frame of a message fixes its place: in the line if it fits, at the wanted address if there is enough room, else in
its slot.  Nothing is ever placed elsewhere, and no frame is believed: message number, size, piece, credit and wants are all checked
against what this side has granted, and the first contradiction ends the link with ``Lost(PROTOCOL)``.  Messages are delivered in order.
The receiver never stops reading its streams, so credit and wants cannot be stuck behind data: that is why this cannot deadlock.

Ending.  ``CloseAsked``: what was posted is sent, then CLOSE on each stream, then the peer's end is waited for.  A peer that is not
leaving itself answers CLOSE by closing.  A stream that ends without CLOSE is a loss.
The record of every event can be kept and played again (``replay``); the idea is that of dask's worker state machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from miraccl.wire.proxy_messages import Contradiction, Incoming, Outgoing
from miraccl.wire.proxy_records import (
    AbortAsked,
    Announce,
    CloseAsked,
    Consumed,
    Cut,
    Deliver,
    Event,
    Finished,
    FrameIn,
    Garbage,
    Instruction,
    InternalError,
    LinkConfig,
    Loss,
    LossKind,
    Lost,
    Placed,
    Placement,
    Posted,
    Receive,
    Release,
    Send,
    StreamEnded,
    Taken,
    Wanted,
)
from miraccl.wire.proxy_states import LINK_TABLE, LinkState, RecvState, SendState
from miraccl.wire.stream import MAX_MESSAGE_BYTES, MAX_TEXT_BYTES, MIN_PIECE_BYTES, Frame, FrameType

# in place of a message number in a stream's queue
_CONTROL, _CLOSE = -1, -2


class Link:
    """State of one peer.  ``handle`` is the only door; it never raises for what a peer does.

    ``log``, if given, collects the events.  Attributes without underscore may be read by the owner.
    """

    def __init__(self, config: LinkConfig, *, log: list[Event] | None = None) -> None:
        self.config = config
        self.state = LinkState.OPEN
        self.loss: Loss | None = None
        self.log = log
        # outgoing direction: released <= sendable <= next_post
        self.next_post = 0
        self.released = 0
        self.credit = 0
        self._sendable = 0
        self._out: dict[int, Outgoing] = {}
        self._grants: dict[int, int] = {}
        self._to_send: deque[int] = deque()
        self._control: deque[tuple[FrameType, int, int, int]] = deque()
        # incoming direction: tail <= delivered
        self.tail = 0
        self.delivered = 0
        self._told = 0
        self._in: dict[int, Incoming] = {}
        self._wants: dict[int, int] = {}
        # per stream
        n = config.nstreams
        self._queued: list[deque[tuple[int, int]]] = [deque() for _ in range(n)]
        self._queued_bytes = [0] * n
        self._arriving: list[tuple[int, int] | None] = [None] * n
        self._stream_closed = [False] * n
        self._peer_total = -1
        self._close_left = 0
        self._doors: dict[type[Event], Callable[[Any], None]] = {
            Posted: self._posted,
            Wanted: self._wanted,
            Consumed: self._consumed,
            FrameIn: self._frame_in,
            Placed: self._placed,
            Taken: self._taken,
            StreamEnded: self._stream_ended,
            Garbage: self._garbage,
            CloseAsked: self._close_asked,
            AbortAsked: self._abort_asked,
            InternalError: self._internal_error,
        }
        self._do: list[Instruction] = []

    @property
    def alive(self) -> bool:
        """Whether streams and memory are still in use."""
        return self.state in (LinkState.OPEN, LinkState.DRAINING, LinkState.CLOSING)

    def handle(self, event: Event) -> list[Instruction]:
        """One thing happened; returns what is to be done, in this order."""
        if self.log is not None:
            self.log.append(event)
        if not self.alive:
            return []
        do: list[Instruction] = []
        self._do = do
        try:
            self._doors[type(event)](event)
            if self.alive:
                self._pump()
        except Contradiction as problem:
            self._fail(LossKind.PROTOCOL, f"sent what makes no sense: {problem}", cut=True)
        return do

    # --- local events

    def _posted(self, event: Posted) -> None:
        if event.message != self.next_post or event.message - self.released >= self.config.nslots:
            return self._fail(LossKind.INTERNAL, f"posted message {event.message} instead of {self.next_post}", cut=True)
        if not 0 <= event.nbytes <= MAX_MESSAGE_BYTES:
            return self._fail(LossKind.INTERNAL, f"posted {event.nbytes} bytes", cut=True)
        self._out[event.message] = Outgoing(event)
        self.next_post += 1
        self._use_credit()

    def _wanted(self, event: Wanted) -> None:
        message, room = event
        record = self._in.get(message)
        if message in self._wants or not self.delivered <= message < self.tail + self.config.nslots:
            return
        if record and record.state is not RecvState.ANNOUNCED:
            return  # too late, the message has its place
        self._wants[message] = room
        if record and room < record.nbytes:
            self._refuse(record, "want too small")
        elif room > self.config.recv_slot_bytes:
            self._control.append((FrameType.WANT, message, 0, room))

    def _consumed(self, event: Consumed) -> None:
        if not self.tail <= event.tail <= self.delivered:
            return self._fail(LossKind.INTERNAL, f"consumed {event.tail} of {self.delivered} messages", cut=True)
        for message in range(self.tail, event.tail):
            del self._in[message]
            self._wants.pop(message, None)
        self.tail = event.tail
        # The peer stops at nslots; half of it keeps it going and saves seven frames out of eight where traffic is one way only.
        if self.tail - self._told >= self.config.nslots // 2 and not self._control:
            self._control.append((FrameType.CREDIT, 0, 0, 0))

    def _close_asked(self, event: CloseAsked) -> None:
        if self.state is LinkState.OPEN:
            self._move("close asked")

    def _abort_asked(self, event: AbortAsked) -> None:
        self._do.append(Cut(event.text))
        self._move("lost")

    def _internal_error(self, event: InternalError) -> None:
        self._fail(LossKind.INTERNAL, event.detail, cut=True)

    # --- events of streams

    def _taken(self, event: Taken) -> None:
        queue = self._queued[event.stream]
        for _ in range(event.frames):
            message, nbytes = queue.popleft()
            self._queued_bytes[event.stream] -= nbytes
            if message < 0:
                self._close_left -= message == _CLOSE
                continue
            record = self._out[message]
            record.untaken -= 1
            if record.state is SendState.HANDED and not record.untaken:
                record.move("all frames taken")
        self._release()

    def _frame_in(self, event: FrameIn) -> None:
        stream, frame = event.stream, event.frame
        if frame.stream != stream:
            raise Contradiction(f"a frame of stream {frame.stream} on stream {stream}")
        if self._stream_closed[stream]:
            raise Contradiction(f"a {frame.type.name} frame after CLOSE")
        if frame.type is FrameType.ABORT:
            return self._fail(LossKind.ABORTED, f"gave up: {event.text}")
        self._acknowledge(frame.ack)
        if frame.type is FrameType.DATA:
            self._data(stream, frame)
        elif frame.type is FrameType.ANNOUNCE:
            self._announced(frame)
        elif frame.type is FrameType.WANT:
            self._granted(frame)
        elif frame.type is FrameType.CLOSE:
            self._peer_close(stream, frame)

    def _placed(self, event: Placed) -> None:
        arriving = self._arriving[event.stream]
        assert arriving is not None, f"no payload was arriving on stream {event.stream}"
        self._arriving[event.stream] = None
        message, length = arriving
        record = self._in[message]
        record.missing -= length
        if not record.missing:
            record.move("all placed")
            self._deliver()

    def _stream_ended(self, event: StreamEnded) -> None:
        if self._stream_closed[event.stream]:
            return
        self._stream_closed[event.stream] = True
        if self.state is LinkState.OPEN:
            self._fail(LossKind.RESET, event.detail)
        elif self.state is LinkState.DRAINING:  # nobody reads what is left
            self._finish("peer closed")
        else:  # nor takes our own CLOSE, where that is left
            self._close_left -= sum(message == _CLOSE for message, _ in self._queued[event.stream])
            self._queued[event.stream].clear()

    def _garbage(self, event: Garbage) -> None:
        raise Contradiction(event.detail)

    # --- what frames mean

    def _acknowledge(self, ack: int) -> None:
        """Credit only grows; the peer cannot have consumed what was neither sent nor announced."""
        if ack <= self.credit:
            return
        for message in range(self.credit, ack):
            record = self._out.get(message)
            if record is None:
                if message >= self.next_post:
                    raise Contradiction(f"consumed {ack} messages of {self.next_post}")
            elif record.state is SendState.WAIT_WANT:
                record.move("consumed unseen")
            elif record.state not in (SendState.HANDED, SendState.TAKEN):
                raise Contradiction(f"consumed message {message} before it was sent")
        self.credit = ack
        self._release()
        self._use_credit()

    def _granted(self, frame: Frame) -> None:
        message = frame.message
        if message >= self.credit + self.config.nslots:
            raise Contradiction(f"wants message {message} after consuming {self.credit}")
        if frame.nbytes <= self.config.send_slot_bytes:
            raise Contradiction(f"wants message {message} in {frame.nbytes} bytes, less than a slot")
        record = self._out.get(message)
        if record is None and message < self.next_post:
            return  # sent already
        if record is None or record.state is SendState.WAIT_CREDIT:
            self._grants[message] = frame.nbytes
        elif record.state is SendState.WAIT_WANT and record.nbytes <= frame.nbytes:
            record.move("want")
            self._queue_message(message)

    def _announced(self, frame: Frame) -> None:
        message = frame.message
        if frame.nbytes <= self.config.recv_slot_bytes:
            raise Contradiction(f"announces {frame.nbytes} bytes, which fit into a slot")
        known = self._in.get(message)
        if known and (known.state is RecvState.ANNOUNCED or known.nbytes != frame.nbytes):
            raise Contradiction(f"announces message {message} again")
        if known or message < self.tail:
            return  # it crossed with a want, and the data on another stream have overtaken it
        self._check_window(message)
        record = self._in[message] = Incoming(frame)
        room = self._wants.get(message)
        if room is not None and room < frame.nbytes:
            return self._refuse(record, "announce, want too small")
        record.move("announce")
        if room is None:
            self._do.append(Announce(message, frame.signature, frame.nbytes))

    def _data(self, stream: int, frame: Frame) -> None:
        message = frame.message
        record = self._in.get(message)
        if record is None:
            self._check_window(message)
            record = self._in[message] = Incoming(frame)
        elif record.state in (RecvState.COMPLETE, RecvState.DELIVERED):
            raise Contradiction(f"sends message {message} again")
        elif (record.signature, record.nbytes) != (frame.signature, frame.nbytes):
            raise Contradiction(f"message {message} changes on its way")
        if record.placement is None:
            record.placement = self._place(message, frame.nbytes)
        record.move("piece")
        record.claim(frame.offset, frame.offset + frame.length)
        if frame.length:
            self._arriving[stream] = (message, frame.length)
            self._do.append(Receive(stream, message, record.placement, frame.offset, frame.length))
        else:
            record.move("all placed")
            self._deliver()

    def _peer_close(self, stream: int, frame: Frame) -> None:
        if self._peer_total not in (-1, frame.message):
            raise Contradiction("streams close with different numbers of messages")
        self._peer_total = frame.message
        self._stream_closed[stream] = True
        if not all(self._stream_closed):
            return
        if self.delivered != frame.message:
            raise Contradiction(f"closes after {frame.message} messages, {self.delivered} came")
        if self.state is LinkState.OPEN:
            self._fail(LossKind.CLOSED, "closed its communicator")
        elif self.state is LinkState.DRAINING:  # nobody reads what is left
            self._finish("peer closed")

    # --- receiving

    def _check_window(self, message: int) -> None:
        if not self.tail <= message < self.tail + self.config.nslots:
            raise Contradiction(f"sends message {message}, allowed are {self.tail} to {self.tail + self.config.nslots - 1}")

    def _place(self, message: int, nbytes: int) -> Placement:
        if nbytes <= self.config.inline_bytes:
            return Placement.INLINE
        if nbytes <= self._wants.get(message, -1):
            return Placement.WANTED
        if nbytes <= self.config.recv_slot_bytes:
            return Placement.SLOT
        raise Contradiction(f"sends {nbytes} bytes as message {message} without being asked for")

    def _refuse(self, record: Incoming, trigger: str) -> None:
        record.placement = Placement.OVERSIZE
        record.move(trigger)
        self._deliver()

    def _deliver(self) -> None:
        while (record := self._in.get(self.delivered)) and record.state is RecvState.COMPLETE:
            assert record.placement is not None
            record.move("all before delivered")
            self._do.append(Deliver(self.delivered, record.signature, record.nbytes, record.placement))
            self.delivered += 1

    # --- sending

    def _use_credit(self) -> None:
        limit = min(self.next_post, self.credit + self.config.nslots)
        while self._sendable < limit:
            message = self._sendable
            record = self._out[message]
            self._sendable += 1
            room = self._grants.pop(message, 0)
            if record.nbytes <= self.config.send_slot_bytes or record.nbytes <= room:
                record.move("credit")
                self._queue_message(message)
            else:
                record.move("credit, no want")
                self._control.append((FrameType.ANNOUNCE, message, record.signature, record.nbytes))

    def _queue_message(self, message: int) -> None:
        """Lowest first; wants may come out of order, so this is an insertion into a queue of at most nslots."""
        at = len(self._to_send)
        while at and self._to_send[at - 1] > message:
            at -= 1
        self._to_send.insert(at, message)

    def _release(self) -> None:
        before = self.released
        while (record := self._out.get(self.released)) and record.state is SendState.TAKEN:
            del self._out[self.released]
            self.released += 1
        if self.released != before:
            self._do.append(Release(self.released))

    def _pump(self) -> None:
        """Fill the streams that have room."""
        if self.state is LinkState.DRAINING and not self._out:
            self._move("all taken")
            self._close_left = self.config.nstreams
            for stream in range(self.config.nstreams):
                self._send(Frame(FrameType.CLOSE, stream, self.next_post, ack=self.tail), _CLOSE)
        if self.state is LinkState.CLOSING:
            # A stream closed while the peer still sends on it is reset, which would destroy what the peer has not read: wait for its end.
            if not self._close_left and all(self._stream_closed):
                self._finish("close taken, peer closed")
            return
        while self._control or self._to_send:
            if not (self._send_control() if self._control else self._send_piece()):
                return

    def _has_room(self, stream: int) -> bool:
        return self._queued_bytes[stream] < self.config.queue_bytes and len(self._queued[stream]) < self.config.queue_frames

    def _idlest(self) -> int:
        return min(range(self.config.nstreams), key=self._queued_bytes.__getitem__)

    def _send_control(self) -> bool:
        stream = self._idlest()
        if len(self._queued[stream]) >= 2 * self.config.queue_frames:
            return False
        kind, message, signature, nbytes = self._control.popleft()
        self._send(Frame(kind, stream, message, signature, nbytes, ack=self.tail), _CONTROL)
        return True

    def _send_piece(self) -> bool:
        message = self._to_send[0]
        record = self._out[message]
        left = record.nbytes - record.queued
        small = record.nbytes <= MIN_PIECE_BYTES
        stream = 0 if small or self.config.nstreams == 1 else self._idlest()
        if not self._has_room(stream):
            return False
        length = left if small else min(left, self._piece_bytes(record.nbytes))
        frame = Frame(FrameType.DATA, stream, message, record.signature, record.nbytes, record.queued, length, self.tail)
        record.queued += length
        record.untaken += 1
        if record.queued == record.nbytes:
            record.move("last piece queued")
            self._to_send.popleft()
        self._send(frame, message)
        return True

    def _piece_bytes(self, nbytes: int) -> int:
        """An equal share per stream, between the smallest and the largest piece, in whole pages."""
        share = -(-nbytes // self.config.nstreams)
        return min(self.config.piece_bytes, max(MIN_PIECE_BYTES, -(-share // 4096) * 4096))

    def _send(self, frame: Frame, message: int) -> None:
        self._told = self.tail
        self._queued[frame.stream].append((message, frame.length))
        self._queued_bytes[frame.stream] += frame.length
        self._do.append(Send(frame))

    # --- ends

    def _move(self, trigger: str) -> None:
        self.state = LINK_TABLE[self.state, trigger]

    def _finish(self, trigger: str) -> None:
        self._move(trigger)
        self._do.append(Finished())

    def _fail(self, kind: LossKind, detail: str, *, cut: bool = False) -> None:
        self._move("lost")
        self.loss = Loss(kind, detail)
        if cut:
            self._do.append(Cut(detail[:MAX_TEXT_BYTES]))
        self._do.append(Lost(self.loss))


def replay(config: LinkConfig, events: Iterable[Event]) -> tuple[Link, list[Instruction]]:
    """A link that lived through ``events``, and all that it asked for."""
    link = Link(config)
    return link, [instruction for event in events for instruction in link.handle(event)]
