"""Messages with tags between ranks' CPU memory, and receives from whoever sends first.

A message is a header (tag, bytes, and the payload if that is short) and, if not, its payload; both go over a communicator of their own,
so that messages and collectives of a group do not wait for each other.  Between two ranks in one direction messages follow one another,
so a message that comes before its receive is put aside, in memory of its own.  A header is awaited only while some receive may want it.

Rules, those of MPI and Gloo: a receive takes the oldest message with its tag from its source; of several receives that want the same
message, the oldest gets it.  The sizes must be equal.

Everything goes on inside calls: of ``wait``, ``poll`` and whatever else is called here; where none are made for a while, by ``progress``.
A thread that waits steps back every ``SLICE_S``, so that threads of one process do not wait for each other's messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from miraccl.api.communicator import Communicator
from miraccl.diagnosis.blocked_ops import Waiting
from miraccl.diagnosis.detector import lookout
from miraccl.diagnosis.waits import ANY, Wait
from miraccl.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorClosed,
    InvalidUsage,
    MiracclError,
)
from miraccl.executor.cpu.kernels import layout as at
from miraccl.runtime.exchange import Entry
from miraccl.runtime.progress import progress
from miraccl.torch.core_access import Wire, run_beside, seat_of, set_timeout, timeout_of
from miraccl.torch.message import SENT, Early, Message, read_header, write_header

SLICE_S = 0.005
#: A receive that others stand beside is waited for alone only for so long: their messages may have to go on for its own to come.
AMONG_OTHERS_NS = 200_000
#: A receive that only another thread of this rank can end looks again after ever longer naps, and so does one that others wait behind.
NAP_FIRST_S, NAP_LAST_S = 20e-6, 500e-6
CLOSE_WAIT_S = 10.0
#: After this the lookout is told that a wait is long.
LONG_S = 0.1


class Post:
    """The messages of one rank of a group. Any thread may call."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._me, self._nranks = comm.rank, comm.nranks
        self.set_timeout(timeout_of(comm))
        self._wire = Wire(comm)
        run_beside(comm, True)
        self._seat = seat_of(comm)
        self._seat.transfers, self._seat.aside = self._transfers, lambda: False
        self._turn = threading.RLock()
        self._counting = threading.Lock()
        self._waiting = 0
        self._wanted: list[Message] = []  # receives without a message
        self._moving: list[Message] = []  # sends, and receives with one
        self._early: list[Early] = []
        self._headers: dict[int, Entry] = {}  # those that are awaited, by source
        self._unused: dict[int, Entry] = {}  # headers of sends by peer
        self._closed = False
        self.watched = False
        self._inside, self._held = _Turn(self), _Held(self)

    # ---- calls

    def send(self, tensor: Any, peer: int, tag: int, name: str = "send") -> Message:
        """Begin to send a tensor, which stays as it is until the message is done."""
        self._rank(peer, name)
        with self._inside:
            self._check(name)
            if peer == self._me:
                payload = Message(name, tag, peer, tensor).array.copy()
                self._early.append(Early(peer=peer, tag=tag, payload=payload, entries=[]))
                self._advance([])
                return SENT
            code = self._wire.put(peer, tag, tensor.data_ptr(), tensor.nbytes)
            if code == at.OK:
                return SENT
            message = Message(name, tag, peer, tensor)
            if code == at.UNDER_WAY:
                message.entries = [self._wire.rest(message.array)]
                self._moving.append(message)
            else:
                self._send(message, peer)
        if not self.watched and not message.done:  # the program may do something else now
            progress.watch(self)
        return message

    def _send(self, message: Message, peer: int) -> None:
        message.header = header = self._header_to(peer)
        payload = message.array
        write_header(header, message.tag, payload)
        self._wire.take_in(header)
        message.entries = [header]
        if payload.nbytes > at.SHORT_BYTES:
            message.entries = [header, self._wire.start(payload, peer, receives=False)]
        self._moving.append(message)
        self._await_headers()
        self._advance([])

    def receive(self, tensor: Any, peer: int | None, tag: int, name: str = "recv") -> Message:
        """Begin to receive into a tensor, from ``peer`` or from anyone."""
        message = Message(name, tag, None if peer is None else self._rank(peer, name), tensor)
        with self._inside:
            self._check(name)
            self._wanted.append(message)
            if self._early:
                self._sort()  # it may have come already
                self._conclude()
        if not self.watched and not message.done:  # the program may do something else now
            progress.watch(self)
        return message

    def go_on_alone(self) -> bool | None:
        """As ``progress`` asks: do what can be done at once if no other thread is inside."""
        if not self._turn.acquire(blocking=False):
            return False
        with self._held:
            before = self._done_so_far()
            if before is not None:
                self._await_headers()
                self._advance([])
            return None if before is None else self._done_so_far() != before

    def _done_so_far(self) -> tuple[int, ...] | None:
        """What is under way, and how far it has come; None for nothing."""
        entries = [*(m.entries for m in self._moving), *(early.entries for early in self._early)]
        open_ones = [entry for some in entries for entry in some if not entry.done]
        if not self._wanted and not open_ones:
            return None
        return (
            len(self._wanted),
            len(open_ones),
            sum(int(e.words[at.OP_DONE // 8]) for e in open_ones),
        )

    def poll(self, message: Message) -> bool:
        """Do what can be done at once; whether the message is done."""
        if not message.done and self._turn.acquire(blocking=False):
            with self._held:
                self._await_headers()
                self._advance([])
        return message.done

    def wait(self, message: Message, limit: float | None = None) -> None:
        """Until the message is done; raises its error.

        After ``limit`` seconds it raises ``CollectiveTimeout`` and the message goes on; without a limit, the group's deadline breaks
        the communicator.
        """
        if not message.done and limit is not None:
            self._go_on(message, limit)
        elif not message.done and not self._take(message):
            with Waiting(lambda: self._wait_for(message)):
                self._go_on(message, limit)
        if message.error is not None:
            raise message.error

    def _go_on(self, message: Message, limit: float | None) -> None:
        """The rest of ``wait``."""
        now = time.monotonic()
        end, long = now + (self.timeout if limit is None else limit), now + LONG_S
        nap = NAP_FIRST_S
        while not message.done:
            now = time.monotonic()
            left = end - now
            if left <= 0:
                with self._inside:  # it may have come while nobody looked
                    self._await_headers()
                    self._advance([])
                if not message.done:
                    self._late(message, limit)
                break
            if now > long:
                lookout.call()
                long = end
            with self._inside:
                self._await_headers()
                if (source := self._awaited_rank(message)) is not None:
                    message.heard = self._wire.received(source)
                must = self._next(message)
                self._advance(must, min(SLICE_S, left), list(self._headers.values()))
                idle = not must and not self._headers
            if not message.done and (idle or self._waiting):
                time.sleep(min(nap, left))
                nap = min(2 * nap, NAP_LAST_S)

    def _wait_for(self, message: Message) -> Wait | None:
        """What has to come for ``message`` to go on, where that is up to one rank."""
        peer, heard = self._awaited_rank(message), message.heard
        if peer is None or heard is None or self.timeout < self._seat.usual_s:
            return None
        sends = message.sends
        entry = next((e for e in message.entries if not e.done), None)
        taken = self._wire.must_be_taken(entry) if sends and entry is not None else 0
        if message.done or (sends and taken <= 0):
            return None
        return self._seat.wait_for_message(peer, heard, taken, f"{message.name}, tag {message.tag}")

    def _awaited_rank(self, message: Message) -> int | None:
        """The other rank that a message is to or from, where that can be one only."""
        peer = 1 - self._me if message.peer is None and self._nranks == 2 else message.peer
        return None if peer == self._me else peer

    def _transfers(self) -> list[tuple[int, bool]]:
        """What goes on, or may go on, whatever the program does: (peer, whether it receives).

        Another thread may be inside, but a message is always in some list, and these are read in the order in which it comes to them.
        """
        awaited = [(source, True) for source in list(self._headers)]
        aside = [
            (early.peer, True)
            for early in list(self._early)
            if not all(e.done for e in early.entries)
        ]
        messages = [*self._wanted, *self._moving]
        return [
            *awaited,
            *aside,
            *((ANY if m.peer is None else m.peer, not m.sends) for m in messages),
        ]

    def _take(self, message: Message) -> bool:
        """The shortest way, for a receive that is the next to get its message, while nothing is moving: whether that has ended it.  If
        another message comes first, or none for a while, nothing has happened."""
        if not self._turn.acquire(blocking=False):
            return False
        with self._held:
            if self._moving or self._waiting or not self._is_first(message):
                return False
            if self._early and not all(e.done for early in self._early for e in early.entries):
                return False
            try:
                self._take_next(message)
            except MiracclError as error:
                self._fail(error)
            return message.done

    def _take_next(self, message: Message) -> None:
        """Where the next message is not its own, nothing happens."""
        tensor, limit_ns = (
            message.tensor,
            self._slice_ns if len(self._wanted) == 1 else AMONG_OTHERS_NS,
        )
        source = self._wire.take(
            message.peer, message.tag, tensor.data_ptr(), tensor.nbytes, limit_ns
        )
        if source < 0 and source != -at.UNDER_WAY:
            return
        self._wanted.remove(message)
        if source >= 0:
            message.peer, message.done = source, True
        else:
            entry = self._wire.rest(message.array)
            message.peer, message.entries = entry.transfer.peer, [entry]
            self._moving.append(message)

    def _is_first(self, message: Message) -> bool:
        """Whether it waits for a message that no older receive may get."""
        for other in self._wanted:
            if other is message:
                return True
            if other.tag == message.tag and (
                other.peer == message.peer or other.peer is None or message.peer is None
            ):
                break
        return False

    def give_up(self, message: Message) -> None:
        """The group's deadline has passed for a message that nobody waits for with ``wait``: that breaks the communicator."""
        self._late(message, None)

    def withdraw(self, message: Message) -> bool:
        """Take back a receive that has found no message; whether that was so."""
        with self._inside:
            if message in self._wanted:
                self._wanted.remove(message)
                return True
        return False

    def set_timeout(self, seconds: float) -> None:
        self.timeout = seconds
        self._slice_ns = int(min(SLICE_S, seconds) * 1e9)

    def close(self) -> None:
        """End after the sends under way, and leave. Receives that wait are forgotten."""
        with self._turn:
            if self._closed:
                return
            sends = [m for m in self._moving if m.sends]
            end = time.monotonic() + CLOSE_WAIT_S
            try:
                while any(not m.done for m in sends) and time.monotonic() < end:
                    self._advance([e for m in sends for e in m.entries], SLICE_S)
            except MiracclError:
                pass  # whoever waits for one of them is told
            self._closed = True
            self._fail(
                CommunicatorClosed("the process group has been destroyed", rank=self.comm.rank)
            )
        set_timeout(self.comm, self.timeout)
        self.comm.finalize()

    def abort(self, reason: str) -> None:
        self.comm.abort(reason)

    # ---- one turn

    def _check(self, name: str) -> None:
        if self._closed:
            raise CommunicatorClosed(
                "the process group has been destroyed", rank=self.comm.rank, op=name
            )

    def _rank(self, peer: int, name: str) -> int:
        if not 0 <= peer < self._nranks:
            raise InvalidUsage(
                f"{name}: the rank is {peer}; allowed are 0 to {self.comm.nranks - 1}",
                rank=self.comm.rank,
            )
        return peer

    def _next(self, message: Message) -> Sequence[Entry]:
        """What has to end for ``message`` to go on; empty where that is not one thing."""
        if message.entries:
            return message.entries
        header = None if message.peer is None else self._headers.get(message.peer)
        return [] if header is None else [header]

    def _advance(
        self, must: Sequence[Entry], limit_s: float = 1.0, any_of: Sequence[Entry] = ()
    ) -> None:
        """Go on with everything (``Wire.go_on``). A fault of the communicator becomes that of all messages."""
        if self._closed:  # another thread was late: the communicator's memory may be gone
            return
        try:
            self._wire.go_on(must, limit_s, any_of)
            while self._sort() and self._wire.open:
                self._wire.go_on([], limit_s)
        except MiracclError as error:
            self._fail(error)
        self._conclude()

    def _fail(self, error: MiracclError) -> None:
        self._conclude()
        for message in [*self._wanted, *self._moving]:
            message.error, message.done = error, True
        self._wanted, self._moving = [], []

    def _await_headers(self) -> None:
        """A header is awaited from every rank from which some receive may get a message."""
        for message in self._wanted:
            for source in range(self._nranks) if message.peer is None else (message.peer,):
                if source != self._me and source not in self._headers:
                    self._headers[source] = header = self._wire.header_from(source)
                    self._wire.take_in(header)

    def _header_to(self, peer: int) -> Entry:
        """A header to a peer; each has its memory once, unless several are under way."""
        return self._unused.pop(peer, None) or self._wire.header_to(
            np.zeros(at.HEADER_BYTES, np.uint8), peer
        )

    def _sort(self) -> bool:
        """Bring messages and receives together; whether there is something new to do."""
        new = False
        for source in [source for source, header in self._headers.items() if header.done]:
            self._arrived(source, self._headers[source])
            self._wire.renew(self._headers.pop(source))
            new = True
        for early in list(self._early) if self._wanted else ():
            taker = self._taker(early.peer, early.tag)
            if taker is not None:
                self._give(taker, early)
                self._early.remove(early)
                new = True
        if new and self._wanted:
            self._await_headers()
        return new

    def _taker(self, source: int, tag: int) -> Message | None:
        return next((m for m in self._wanted if m.tag == tag and m.peer in (None, source)), None)

    def _arrived(self, source: int, header: Entry) -> None:
        """A payload that is not in its header goes straight to the receive that waits for it, else aside."""
        tag, nbytes, short = read_header(header)
        ahead = any(e.peer == source and e.tag == tag for e in self._early)
        taker = None if ahead else self._taker(source, tag)
        entries = []
        fits = taker is not None and taker.nbytes == nbytes
        if taker is not None and fits and nbytes <= at.SHORT_BYTES:  # most messages
            taker.array[:] = short
            taker.peer, taker.done = source, True
            self._wanted.remove(taker)
            return
        if nbytes <= at.SHORT_BYTES:
            payload = short.copy()
        else:
            payload = taker.array if taker is not None and fits else np.empty(nbytes, np.uint8)
            entries = [self._wire.start(payload, source, receives=True)]
        early = Early(peer=source, tag=tag, payload=payload, entries=entries)
        if taker is None:
            self._early.append(early)
        else:
            self._give(taker, early, aside=not fits or not entries)

    def _give(self, message: Message, early: Early, *, aside: bool = True) -> None:
        """``aside``: the payload lands somewhere else than in the message's own memory."""
        self._wanted.remove(message)
        self._moving.append(message)
        message.peer, message.entries = early.peer, early.entries
        message.aside = early.payload if aside else None
        if message.nbytes != early.payload.nbytes:
            sizes = f"{early.payload.nbytes} bytes, the tensor {message.nbytes}"
            text = f"the message of rank {early.peer} with tag {early.tag} has {sizes}"
            message.error = CollectiveMismatch(
                text, rank=self.comm.rank, peer=early.peer, op=message.name
            )

    def _conclude(self) -> None:
        """Mark what is done."""
        for message in [m for m in self._moving if all([e.done for e in m.entries])]:  # noqa: C419  (half the time of a generator)
            if message.aside is not None and message.error is None:
                np.copyto(message.array, message.aside)
            if message.header is not None and message.peer is not None:
                self._unused[message.peer] = self._wire.renew(message.header)
            self._moving.remove(message)
            message.done = True

    def _late(self, message: Message, limit: float | None) -> None:
        who = "any rank" if message.peer is None else f"rank {message.peer}"
        it = f"a message with tag {message.tag}"
        what = f"{who} to take {it}" if message.name == "send" else f"{it} from {who}"
        if limit is not None:
            text = f"not finished within {limit:g} s: waits for {what}; it goes on"
            raise CollectiveTimeout(text, rank=self.comm.rank, peer=message.peer, op=message.name)
        text = f"rank {self.comm.rank} passed the deadline of {self.timeout:g} s while waiting for {what}"
        with self._inside:
            if not message.done:
                self._fail(self._wire.expire(text, message.peer))


class _Held:
    """The turn, which this thread has; it is over with the block.

    What leaves the block and is no error of ours comes from the handler of a signal: nobody knows then how far messages have come, as when
    it comes from within compiled code.
    """

    def __init__(self, post: Post) -> None:
        self._post = post

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is not None and not issubclass(kind, MiracclError):
                self._post.abort(f"{kind.__name__} was raised in the middle of a message")
        finally:
            self._post._turn.release()


class _Turn(_Held):
    """One thread at a time; others are counted, so that the one inside hurries."""

    def __enter__(self) -> None:
        post = self._post
        if not post._turn.acquire(blocking=False):
            with post._counting:
                post._waiting += 1
            try:
                post._turn.acquire()
            finally:
                with post._counting:
                    post._waiting -= 1
