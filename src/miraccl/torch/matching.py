"""Tag matching of messages in CPU memory, including receives from any source.

A message is a header (tag, size, and a short payload), followed by the payload if it is long.  Both
travel over a communicator of their own, so messages and collectives of a group never wait for each
other.  Messages from one rank to another arrive in order; one that arrives before its receive is
buffered as unexpected.  A header receive is posted only while some receive could match it.

Matching follows MPI and Gloo: a receive matches the oldest message with its tag from its source,
and a message matches the oldest such receive.  Sizes must be equal.

All progress happens inside calls (``wait``, ``poll`` and the others); between calls, the progress
thread of ``runtime.progress`` advances messages.  A waiting thread yields every ``SLICE_S``, so
that threads of one process do not block each other's messages.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from miraccl import clock
from miraccl.diagnosis.blocked_ops import BlockedScope
from miraccl.diagnosis.detector import deadlock_detector
from miraccl.diagnosis.waits import ANY_RANK, Wait
from miraccl.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorClosed,
    InvalidUsage,
    MiracclError,
)
from miraccl.executor.cpu.kernels import layout
from miraccl.runtime.core_access import core_access
from miraccl.runtime.progress import progress
from miraccl.runtime.tagged_exchange import TaggedExchange
from miraccl.torch.message import SENT, TaggedMessage, UnexpectedMessage, read_header, write_header

if TYPE_CHECKING:
    from miraccl.api.communicator import Communicator
    from miraccl.runtime.exchange import TransferEntry

SLICE_S = 0.005
#: Time slice of a direct receive while other receives are posted.  Their messages may have to
#: advance before this one can arrive.
CONTENDED_SLICE_NS = 200_000
#: Exponential backoff of a receive that only another thread of this rank can complete, or behind
#: which other threads wait.
BACKOFF_FIRST_S, BACKOFF_LAST_S = 20e-6, 500e-6
CLOSE_WAIT_S = 10.0
#: A wait longer than this wakes the deadlock detector.
LONG_WAIT_S = 0.1


class TagMatcher:
    """Tag matching for one rank of a group; thread-safe."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._me, self._nranks = comm.rank, comm.nranks
        self._access = core_access(comm)
        self.set_timeout(self._access.timeout)
        self._exchange = TaggedExchange(self._access)
        self._access.set_background(True)
        self._wait_state = self._access.wait_state
        self._wait_state.open_transfers, self._wait_state.runs_in_background = (
            self._transfers,
            lambda: False,
        )
        self._lock = threading.RLock()
        self._waiters_lock = threading.Lock()
        self._waiters = 0
        self._posted_receives: list[TaggedMessage] = []  # receives without a matching message
        self._active: list[TaggedMessage] = []  # sends, and matched receives
        self._unexpected: list[UnexpectedMessage] = []
        self._headers: dict[int, TransferEntry] = {}  # posted header receives, by source
        self._free_headers: dict[int, TransferEntry] = {}  # reusable header sends, by peer
        self._closed = False
        self.watched = False
        self._locked, self._lock_held = _Locked(self), _LockHeld(self)

    # ---- calls

    def send(self, tensor: Any, peer: int, tag: int, name: str = "send") -> TaggedMessage:
        """Start sending a tensor; its memory must not change until the message is done."""
        self._rank(peer, name)
        with self._locked:
            self._check(name)
            if peer == self._me:
                payload = TaggedMessage(name, tag, peer, tensor).array.copy()
                self._unexpected.append(
                    UnexpectedMessage(peer=peer, tag=tag, payload=payload, entries=[])
                )
                self._advance([])
                return SENT
            code = self._exchange.send_tagged(peer, tag, tensor.data_ptr(), tensor.nbytes)
            if code == layout.OK:
                return SENT
            message = TaggedMessage(name, tag, peer, tensor)
            if code == layout.IN_PROGRESS:
                message.entries = [self._exchange.remainder(message.array)]
                self._active.append(message)
            else:
                self._send(message, peer)
        if not self.watched and not message.done:  # the application may leave this library now
            progress.watch(self)
        return message

    def _send(self, message: TaggedMessage, peer: int) -> None:
        message.header = header = self._header_to(peer)
        payload = message.array
        write_header(header, message.tag, payload)
        self._exchange.enqueue(header)
        message.entries = [header]
        if payload.nbytes > layout.SHORT_BYTES:
            message.entries = [header, self._exchange.start(payload, peer, receives=False)]
        self._active.append(message)
        self._post_header_receives()
        self._advance([])

    def receive(self, tensor: Any, peer: int | None, tag: int, name: str = "recv") -> TaggedMessage:
        """Post a receive into a tensor, from rank ``peer`` or, with None, from any source."""
        message = TaggedMessage(name, tag, None if peer is None else self._rank(peer, name), tensor)
        with self._locked:
            self._check(name)
            self._posted_receives.append(message)
            if self._unexpected:
                self._match_messages()  # it may have arrived already
                self._complete()
        if not self.watched and not message.done:  # the application may leave this library now
            progress.watch(self)
        return message

    def advance_in_background(self) -> bool | None:
        """Advance without waiting, for ``runtime.progress``.

        Returns:
            None if nothing is open, else True if something advanced; False if another thread is
            inside.
        """
        if not self._lock.acquire(blocking=False):
            return False
        with self._lock_held:
            before = self._progress_state()
            if before is not None:
                self._post_header_receives()
                self._advance([])
            return None if before is None else self._progress_state() != before

    def _progress_state(self) -> tuple[int, ...] | None:
        """Return a fingerprint of the open messages' progress, or None if there are none."""
        entries = [
            *(m.entries for m in self._active),
            *(early.entries for early in self._unexpected),
        ]
        open_ones = [entry for some in entries for entry in some if not entry.done]
        if not self._posted_receives and not open_ones:
            return None
        return (
            len(self._posted_receives),
            len(open_ones),
            sum(int(e.words[layout.OP_DONE // 8]) for e in open_ones),
        )

    def poll(self, message: TaggedMessage) -> bool:
        """Advance without waiting; return True if the message is done."""
        if not message.done and self._lock.acquire(blocking=False):
            with self._lock_held:
                self._post_header_receives()
                self._advance([])
        return message.done

    def wait(self, message: TaggedMessage, limit: float | None = None) -> None:
        """Wait until the message is done and raise its error.

        Args:
            message: The message to complete.
            limit: Seconds after which ``CollectiveTimeout`` is raised while the message continues.
                Without
                a limit, exceeding the group's deadline breaks the communicator.
        """
        if not message.done and limit is not None:
            self._wait_loop(message, limit)
        elif not message.done and not self._try_direct_receive(message):
            with BlockedScope(lambda: self._wait_reason(message)):
                self._wait_loop(message, limit)
        if message.error is not None:
            raise message.error

    def _wait_loop(self, message: TaggedMessage, limit: float | None) -> None:
        """Advance messages until ``message`` is done or the time has passed."""
        now = clock.monotonic()
        end, long = now + (self.timeout if limit is None else limit), now + LONG_WAIT_S
        backoff = BACKOFF_FIRST_S
        while not message.done:
            now = clock.monotonic()
            left = end - now
            if left <= 0:
                with self._locked:  # it may have arrived since the last poll
                    self._post_header_receives()
                    self._advance([])
                if not message.done:
                    self._raise_timeout(message, limit)
                break
            if now > long:
                deadlock_detector.wake()
                long = end
            with self._locked:
                self._post_header_receives()
                if (source := self._awaited_rank(message)) is not None:
                    message.received_count = self._exchange.received(source)
                required = self._required_entries(message)
                self._advance(required, min(SLICE_S, left), list(self._headers.values()))
                idle = not required and not self._headers
            if not message.done and (idle or self._waiters):
                clock.sleep(min(backoff, left))
                backoff = min(2 * backoff, BACKOFF_LAST_S)

    def _wait_reason(self, message: TaggedMessage) -> Wait | None:
        """Return the wait-for record of ``message`` if a single rank can complete it, else None."""
        peer, received = self._awaited_rank(message), message.received_count
        if peer is None or received is None or self.timeout < self._wait_state.default_timeout_s:
            return None
        sends = message.sends
        entry = next((e for e in message.entries if not e.done), None)
        consumption = (
            self._exchange.required_consumption(entry) if sends and entry is not None else 0
        )
        if message.done or (sends and consumption <= 0):
            return None
        return self._wait_state.wait_for_message(
            peer, received, consumption, f"{message.name}, tag {message.tag}"
        )

    def _awaited_rank(self, message: TaggedMessage) -> int | None:
        """Return the only rank that can complete the message, or None."""
        peer = 1 - self._me if message.peer is None and self._nranks == 2 else message.peer
        return None if peer == self._me else peer

    def _transfers(self) -> list[tuple[int, bool]]:
        """Return the transfers that may advance in the background, as (peer, receives).

        Safe without the lock: a message is always in at least one list, and the lists are read in
        the order in which a message moves through them.
        """
        awaited = [(source, True) for source in list(self._headers)]
        aside = [
            (early.peer, True)
            for early in list(self._unexpected)
            if not all(e.done for e in early.entries)
        ]
        messages = [*self._posted_receives, *self._active]
        return [
            *awaited,
            *aside,
            *((ANY_RANK if m.peer is None else m.peer, not m.sends) for m in messages),
        ]

    def _try_direct_receive(self, message: TaggedMessage) -> bool:
        """Receive straight into the tensor if this receive is the next to match and nothing else is
        active.

        Returns True if that completed it.  If another message arrives first, or none in time,
        nothing changes.
        """
        if not self._lock.acquire(blocking=False):
            return False
        with self._lock_held:
            if self._active or self._waiters or not self._is_next_match(message):
                return False
            if self._unexpected and not all(
                e.done for early in self._unexpected for e in early.entries
            ):
                return False
            try:
                self._receive_next(message)
            except MiracclError as error:
                self._fail(error)
            return message.done

    def _receive_next(self, message: TaggedMessage) -> None:
        """Receive the next message if it matches; otherwise change nothing."""
        tensor, limit_ns = (
            message.tensor,
            self._slice_ns if len(self._posted_receives) == 1 else CONTENDED_SLICE_NS,
        )
        source = self._exchange.recv_tagged(
            message.peer, message.tag, tensor.data_ptr(), tensor.nbytes, limit_ns
        )
        if source < 0 and source != -layout.IN_PROGRESS:
            return
        self._posted_receives.remove(message)
        if source >= 0:
            message.peer, message.done = source, True
        else:
            entry = self._exchange.remainder(message.array)
            message.peer, message.entries = entry.transfer.peer, [entry]
            self._active.append(message)

    def _is_next_match(self, message: TaggedMessage) -> bool:
        """Return True if no older posted receive could match this receive's message."""
        for other in self._posted_receives:
            if other is message:
                return True
            if other.tag == message.tag and (
                other.peer == message.peer or other.peer is None or message.peer is None
            ):
                break
        return False

    def expire(self, message: TaggedMessage) -> None:
        """Break the communicator: a message without a waiter has passed the group's deadline."""
        self._raise_timeout(message, None)

    def cancel(self, message: TaggedMessage) -> bool:
        """Cancel a receive that has not matched a message; return True if it was cancelled."""
        with self._locked:
            if message in self._posted_receives:
                self._posted_receives.remove(message)
                return True
        return False

    def set_timeout(self, seconds: float) -> None:
        self.timeout = seconds
        self._slice_ns = int(min(SLICE_S, seconds) * 1e9)

    def close(self) -> None:
        """Complete pending sends and leave; posted receives are dropped."""
        with self._lock:
            if self._closed:
                return
            sends = [m for m in self._active if m.sends]
            end = clock.monotonic() + CLOSE_WAIT_S
            try:
                while any(not m.done for m in sends) and clock.monotonic() < end:
                    self._advance([e for m in sends for e in m.entries], SLICE_S)
            except MiracclError:
                pass  # reported to the waiter of each message
            self._closed = True
            self._fail(
                CommunicatorClosed("the process group has been destroyed", rank=self.comm.rank)
            )
        self._access.set_timeout(self.timeout)
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
                f"{name}: rank {peer} does not exist; allowed are 0 to {self.comm.nranks - 1}",
                rank=self.comm.rank,
            )
        return peer

    def _required_entries(self, message: TaggedMessage) -> Sequence[TransferEntry]:
        """Return the entries that must finish for ``message`` to continue; empty if not known."""
        if message.entries:
            return message.entries
        header = None if message.peer is None else self._headers.get(message.peer)
        return [] if header is None else [header]

    def _advance(
        self,
        required: Sequence[TransferEntry],
        limit_s: float = 1.0,
        any_of: Sequence[TransferEntry] = (),
    ) -> None:
        """Advance everything (``TaggedExchange.progress``); a communicator fault fails every
        message.
        """
        if self._closed:  # a late thread: the communicator's memory may be freed
            return
        try:
            self._exchange.progress(required, limit_s, any_of)
            while self._match_messages() and self._exchange.in_flight:
                self._exchange.progress([], limit_s)
        except MiracclError as error:
            self._fail(error)
        self._complete()

    def _fail(self, error: MiracclError) -> None:
        self._complete()
        for message in [*self._posted_receives, *self._active]:
            message.error, message.done = error, True
        self._posted_receives, self._active = [], []

    def _post_header_receives(self) -> None:
        """Post a header receive for every rank from which a posted receive could match."""
        for message in self._posted_receives:
            for source in range(self._nranks) if message.peer is None else (message.peer,):
                if source != self._me and source not in self._headers:
                    self._headers[source] = header = self._exchange.header_from(source)
                    self._exchange.enqueue(header)

    def _header_to(self, peer: int) -> TransferEntry:
        """Return a header send to ``peer``, reusing a free one."""
        return self._free_headers.pop(peer, None) or self._exchange.header_to(
            np.zeros(layout.HEADER_BYTES, np.uint8), peer
        )

    def _match_messages(self) -> bool:
        """Match arrived headers and unexpected messages to posted receives; return True on any
        match.
        """
        new = False
        for source in [source for source, header in self._headers.items() if header.done]:
            self._on_header(source, self._headers[source])
            self._exchange.reset(self._headers.pop(source))
            new = True
        for unexpected in list(self._unexpected) if self._posted_receives else ():
            receive = self._match(unexpected.peer, unexpected.tag)
            if receive is not None:
                self._deliver(receive, unexpected)
                self._unexpected.remove(unexpected)
                new = True
        if new and self._posted_receives:
            self._post_header_receives()
        return new

    def _match(self, source: int, tag: int) -> TaggedMessage | None:
        return next(
            (m for m in self._posted_receives if m.tag == tag and m.peer in (None, source)), None
        )

    def _on_header(self, source: int, header: TransferEntry) -> None:
        """Process an arrived header.

        A payload outside the header is received into the matching tensor, or into a buffer if no
        receive matches or the sizes differ.
        """
        tag, nbytes, short = read_header(header)
        queued = any(e.peer == source and e.tag == tag for e in self._unexpected)
        receive = None if queued else self._match(source, tag)
        entries = []
        fits = receive is not None and receive.nbytes == nbytes
        if receive is not None and fits and nbytes <= layout.SHORT_BYTES:  # the common case
            receive.array[:] = short
            receive.peer, receive.done = source, True
            self._posted_receives.remove(receive)
            return
        if nbytes <= layout.SHORT_BYTES:
            payload = short.copy()
        else:
            payload = receive.array if receive is not None and fits else np.empty(nbytes, np.uint8)
            entries = [self._exchange.start(payload, source, receives=True)]
        unexpected = UnexpectedMessage(peer=source, tag=tag, payload=payload, entries=entries)
        if receive is None:
            self._unexpected.append(unexpected)
        else:
            self._deliver(receive, unexpected, bounce=not fits or not entries)

    def _deliver(
        self, message: TaggedMessage, unexpected: UnexpectedMessage, *, bounce: bool = True
    ) -> None:
        """Bind a message to a receive; with ``bounce``, its payload is copied from a buffer at the
        end.
        """
        self._posted_receives.remove(message)
        self._active.append(message)
        message.peer, message.entries = unexpected.peer, unexpected.entries
        message.bounce = unexpected.payload if bounce else None
        if message.nbytes != unexpected.payload.nbytes:
            sizes = f"{unexpected.payload.nbytes} bytes, but the tensor has {message.nbytes}"
            text = f"the message of rank {unexpected.peer} with tag {unexpected.tag} has {sizes}"
            message.error = CollectiveMismatch(
                text, rank=self.comm.rank, peer=unexpected.peer, op=message.name
            )

    def _complete(self) -> None:
        """Mark finished messages as done."""
        # a list takes half the time of a generator expression
        done = [m for m in self._active if all([e.done for e in m.entries])]  # noqa: C419
        for message in done:
            if message.bounce is not None and message.error is None:
                np.copyto(message.array, message.bounce)
            if message.header is not None and message.peer is not None:
                self._free_headers[message.peer] = self._exchange.reset(message.header)
            self._active.remove(message)
            message.done = True

    def _raise_timeout(self, message: TaggedMessage, limit: float | None) -> None:
        who = "any rank" if message.peer is None else f"rank {message.peer}"
        it = f"a message with tag {message.tag}"
        what = f"{who} to receive {it}" if message.name == "send" else f"{it} from {who}"
        if limit is not None:
            text = (
                f"Timed out waiting {limit * 1e3:.0f}ms for {what}; "
                "the message continues after the wait has timed out"
            )
            raise CollectiveTimeout(text, rank=self.comm.rank, peer=message.peer, op=message.name)
        text = f"rank {self.comm.rank} timed out after {self.timeout:g} s waiting for {what}"
        with self._locked:
            if not message.done:
                self._fail(self._exchange.break_at_deadline(text, message.peer))


class _LockHeld:
    """Scope of a lock that the thread already holds; releases it at the end.

    An exception that is not a miraccl error comes from a signal handler.  The state of the messages
    is then unknown, so the communicator is aborted.
    """

    def __init__(self, matcher: TagMatcher) -> None:
        self._matcher = matcher

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
                self._matcher.abort(f"{kind.__name__} was raised during a message")
        finally:
            self._matcher._lock.release()


class _Locked(_LockHeld):
    """Scope that acquires the lock; waiters are counted, so that the holder yields to them."""

    def __enter__(self) -> None:
        matcher = self._matcher
        if not matcher._lock.acquire(blocking=False):
            with matcher._waiters_lock:
                matcher._waiters += 1
            try:
                matcher._lock.acquire()
            finally:
                with matcher._waiters_lock:
                    matcher._waiters -= 1
