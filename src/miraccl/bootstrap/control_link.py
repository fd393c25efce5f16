"""One rank's end of the control plane: calls in progress, departures, and what a new hub needs.

A session and all sessions split from it share one link. This part knows the messages, not how they
travel: ``SocketLink`` (``link.py``) connects to the hub of a job over TCP, ``MemoryLink``
(``memory.py``) to the ranks of the same process. Calls come from any thread and are serialised by
one lock; callbacks run on the watcher thread, without the lock. Ranks in this file are those of the
whole job.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from miraccl import clock, trace
from miraccl.errors import CommunicatorClosed, InvalidUsage
from miraccl.params import FOREVER
from miraccl.wire import framing
from miraccl.wire.bootstrap_messages import (
    Gather,
    Gathered,
    GatherMissing,
    GatherTimeout,
    Gone,
    Join,
    LeaveGroup,
    NoticeMessage,
    OpenGroup,
    Replayed,
    Resumed,
    StatusQuery,
    StatusReply,
    unpack_gone,
)

_log = trace.logger("bootstrap")
#: The hub keeps the deadlines; a member waits this much longer (seconds) for its message.
GRACE_SECONDS = 0.4
#: Completed gathers whose part a rank keeps for others that did not get the result of a lost hub.
RETAINED_PARTS = 64
RETAINED_BYTES = 16 << 20
#: Notices that are sent again to a new hub, if they are not older (seconds).
RETAINED_NOTICES, NOTICE_SECONDS = 16, 10.0
RETAINED_DEPARTURES = 64


class LinkObserver(Protocol):
    """A session as its link calls it: on the watcher thread, without the lock."""

    def peer_gone(self, rank: int, left: bool, reason: str) -> None: ...
    def control_plane_lost(self, left: bool, reason: str) -> None: ...
    def notice(self, rank: int, payload: bytes) -> None: ...
    def status_requested(self, rank: int, ident: int) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class WaitFailure:
    """Reason why a blocked call ended without a result.

    ``kind``: lost or left (a rank), hub or hub left, late (deadline), silent (no answer of the
    hub), ended (by this rank) or closed.
    """

    kind: str
    ranks: tuple[int, ...] = ()
    reason: str = ""


@dataclass(kw_only=True)
class _Waiter:
    """A gather in progress; ``deadline``: a time of the monotonic clock."""

    ranks: tuple[int, ...]
    message: Gather
    deadline: float
    parts: tuple[bytes, ...] | None = None
    failure: WaitFailure | None = None

    @property
    def done(self) -> bool:
        return self.parts is not None or self.failure is not None


@dataclass(frozen=True, kw_only=True)
class _Departure:
    """A group that this rank has left."""

    group: int
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Result of the rendezvous.

    ``members``: the ``Join`` of each rank. ``hub_rank``: rank in whose process the hub runs, -1 for
    a launcher's.
    """

    members: tuple[Join, ...]
    hub_rank: int


class ControlLink(abc.ABC):
    """Logic of a link, for ranks of a job that has formed (``membership``) or is about to."""

    def __init__(self, *, rank: int, nranks: int) -> None:
        self.rank, self.nranks = rank, nranks
        self.membership: Membership | None = None
        self._cond = clock.condition(threading.Lock())
        self._observers: dict[int, LinkObserver] = {}
        self._group_ranks: dict[int, tuple[int, ...]] = {}
        self._gone: dict[int, Gone] = {}
        self._left: dict[tuple[int, int], WaitFailure] = {}
        self._hub_failure: WaitFailure | None = None
        self._rounds: dict[tuple[int, str], int] = {}
        self._waiters: dict[tuple[int, str, int], _Waiter] = {}
        self._ended: dict[tuple[int, str], WaitFailure] = {}
        self._status: dict[int, tuple[int, dict[int, bytes]]] = {}
        self._status_ident = 0
        self._callbacks: deque[Callable[[], None]] = deque()
        self._closed = False
        # for the successor of a hub:
        self._parts: OrderedDict[tuple[int, str, int], Gather] = OrderedDict()
        self._notices: deque[tuple[float, NoticeMessage]] = deque(maxlen=RETAINED_NOTICES)
        self._notice_seq = 0
        self._seen_notices: dict[int, int] = {}
        self._departures: deque[_Departure] = deque(maxlen=RETAINED_DEPARTURES)

    # --- contract of the two kinds ---

    @property
    @abc.abstractmethod
    def hub_name(self) -> str:
        """Name of the hub for error messages: ``rank 0's control plane at HOST:PORT``."""

    @property
    @abc.abstractmethod
    def on_watcher(self) -> bool:
        """True on the thread that runs the callbacks."""

    @abc.abstractmethod
    def close(self, reason: str) -> None:
        """Say goodbye and end the link. May be called twice and from any thread."""

    @abc.abstractmethod
    def drain(self, timeout: float) -> None:
        """Wait until everything received so far is handled, at most ``timeout`` seconds."""

    @abc.abstractmethod
    def _transmit(self, message: Any) -> None:
        """Send a message to the hub. Needs the lock.

        While a lost hub has no successor the message is dropped: ``_replay`` sends all again.
        Raises ``CommunicatorClosed`` if the link has ended.
        """

    @abc.abstractmethod
    def _wake_watcher(self) -> None:
        """Have the watcher run the queued callbacks."""

    # --- groups ---

    def attach(self, group: int, ranks: tuple[int, ...], observer: LinkObserver) -> None:
        """Attach a session to a group and deliver the departures that it missed.

        Group 0 exists from the start; others are opened at the hub.
        """
        with self._cond:
            self._check_open()
            self._observers[group], self._group_ranks[group] = observer, ranks
            if group:
                self._transmit(OpenGroup(group=group, ranks=ranks))
            for gone in self._gone.values():
                if gone.rank in ranks:
                    self._queue_callback(observer.peer_gone, gone.rank, gone.left, gone.reason)
            if self._hub_failure is not None:
                self._queue_callback(
                    observer.control_plane_lost,
                    self._hub_failure.kind == "hub left",
                    self._hub_failure.reason,
                )
        self._wake_watcher()

    def detach(self, group: int, reason: str) -> None:
        """Leave a group; the last session to detach closes the connection."""
        with self._cond:
            if self._observers.pop(group, None) is None:
                return
            closed = WaitFailure(kind="closed", reason="the session was closed by another thread")
            self._fail_waits(closed, lambda waiter: waiter.message.group == group)
            self._ended = {key: failure for key, failure in self._ended.items() if key[0] != group}
            ranks = self._group_ranks[group]
            self._departures.append(_Departure(group=group, ranks=ranks, reason=reason))
            last = not self._observers
            if not last and not self._closed and self._hub_failure is None:
                self._transmit(LeaveGroup(group=group, rank=self.rank, reason=reason))
        if last:
            self.close(reason)

    def _check_open(self, group: int | None = None) -> None:
        """Raise if the link is closed, or if the session of ``group`` detached. Needs the lock."""
        if self._closed or (group is not None and group not in self._observers):
            raise CommunicatorClosed("the session is closed", rank=self.rank)

    # --- calls ---

    def gather(
        self, group: int, tag: str, data: bytes, timeout: float
    ) -> tuple[bytes, ...] | WaitFailure:
        """Return the parts of all ranks of the group in its order, or why there are none."""
        self._check_may_wait()
        timeout = min(max(timeout, 0.0), FOREVER)
        with self._cond:
            self._check_open(group)
            ranks = self._group_ranks[group]
            if len(data) * len(ranks) + 64 * len(ranks) + 1024 > framing.MAX_FRAME_BYTES:
                raise InvalidUsage(
                    f"cannot all_gather {len(data)} bytes per rank over the control plane: "
                    f"at most {framing.MAX_FRAME_BYTES} bytes in all",
                    rank=self.rank,
                )
            failure = self._ended.get((group, tag)) or self._group_failure(group)
            if failure is not None:
                return failure
            number = self._rounds.get((group, tag), 0)
            self._rounds[group, tag] = number + 1
            message = Gather(group=group, tag=tag, round=number, timeout=timeout, data=data)
            waiter = _Waiter(ranks=ranks, message=message, deadline=clock.monotonic() + timeout)
            key = (group, tag, number)
            self._waiters[key] = waiter
            try:
                self._transmit(message)
                self._cond.wait_for(lambda: waiter.done, timeout + GRACE_SECONDS)
            finally:
                del self._waiters[key]
            if waiter.parts is not None:
                return waiter.parts
            return waiter.failure or WaitFailure(
                kind="silent", reason=f"{self.hub_name} does not answer"
            )

    def end_gather(self, group: int, tag: str, reason: str) -> None:
        """End this rank's ``gather`` calls with this tag, now and later. Any thread may call it."""
        with self._cond:
            failure = self._ended[group, tag] = WaitFailure(kind="ended", reason=reason)
            self._fail_waits(
                failure, lambda waiter: (waiter.message.group, waiter.message.tag) == (group, tag)
            )

    def notify(self, group: int, payload: bytes) -> WaitFailure | None:
        """Send a notice to the other ranks of a group; return the reason if that is impossible."""
        with self._cond:
            self._check_open(group)
            if self._hub_failure is not None:
                return self._hub_failure
            seq = self._notice_seq + 1
            message = NoticeMessage(group=group, rank=self.rank, seq=seq, payload=payload)
            framing.check_length(len(payload) + 64)
            self._notice_seq = seq
            self._notices.append((clock.monotonic(), message))
            self._transmit(message)
            return None

    def query_status(
        self,
        group: int,
        timeout: float,
        without: Collection[int] = (),
        quiet: float | None = None,
    ) -> tuple[dict[int, bytes], dict[int, WaitFailure]]:
        """Return the status replies by rank, and the failures of ranks that cannot reply.

        Ranks of ``without`` are not waited for; the wait ends early when no reply has come for
        ``quiet`` seconds.
        """
        self._check_may_wait()
        with self._cond:
            self._check_open(group)
            ranks = self._group_ranks[group]
            ident = self._status_ident = (self._status_ident + 1) & 0xFFFFFFFF
            replies: dict[int, bytes] = {}
            self._status[ident] = group, replies
            if self._hub_failure is None:
                self._transmit(StatusQuery(group=group, rank=self.rank, ident=ident))

                def complete() -> bool:
                    awaited = (
                        r for r in ranks if r not in (self.rank, *without) and r not in replies
                    )
                    return self._hub_failure is not None or all(
                        self._failure(group, r) for r in awaited
                    )

                end = clock.monotonic() + min(timeout, FOREVER)
                pause = FOREVER if quiet is None else quiet
                while not complete() and (left := end - clock.monotonic()) > 0:
                    before = len(replies)
                    self._cond.wait_for(
                        lambda before=before: complete() or len(replies) > before,  # type: ignore[misc]
                        min(left, pause),
                    )
                    if quiet is not None and len(replies) == before:
                        break
            del self._status[ident]
            absent = {r: failure for r in ranks if (failure := self._failure(group, r)) is not None}
            if self._hub_failure is not None:
                absent |= {r: self._hub_failure for r in ranks if r not in absent}
            return dict(replies), absent

    def _check_may_wait(self) -> None:
        if self.on_watcher:
            raise InvalidUsage(
                "cannot wait for other ranks in a callback of a session: hand the event to "
                "another thread",
                rank=self.rank,
            )

    def gone(self, group: int) -> list[int]:
        """Return the ranks of the group that are known to have died or left it."""
        with self._cond:
            return [
                rank for rank in self._group_ranks[group] if self._failure(group, rank) is not None
            ]

    def _failure(self, group: int, rank: int) -> WaitFailure | None:
        """Return the reason why a rank is no longer in the group, None if it is."""
        gone = self._gone.get(rank)
        return self._left.get((group, rank)) if gone is None else _wait_failure(gone)

    def _group_failure(self, group: int) -> WaitFailure | None:
        for rank in self._group_ranks[group]:
            failure = self._failure(group, rank)
            if failure is not None:
                return failure
        return self._hub_failure

    # --- messages of the hub, with the lock ---

    def _handle_message(self, message: Any) -> None:
        if isinstance(message, Gathered | GatherTimeout):
            self._gather_ended(message)
        elif isinstance(message, Gone):
            self._rank_gone(message)
        elif isinstance(message, LeaveGroup):
            self._rank_left_group(message)
        elif isinstance(message, NoticeMessage):
            self._notice_arrived(message)
        elif isinstance(message, StatusQuery):
            self._queue_callback(self._reply_status, message)
        elif isinstance(message, StatusReply):
            if message.ident in self._status:
                self._status[message.ident][1][message.rank] = message.payload
        elif isinstance(message, GatherMissing):
            part = self._parts.get((message.group, message.tag, message.round))
            if part is not None:
                self._transmit(part)
        else:
            assert isinstance(message, Resumed)
            self._resumed(message)
        self._cond.notify_all()

    def _gather_ended(self, message: Gathered | GatherTimeout) -> None:
        key = (message.group, message.tag, message.round)
        waiter = self._waiters.get(key)
        if waiter is None or waiter.done:
            return
        if isinstance(message, GatherTimeout):
            waiter.failure = WaitFailure(kind="late", ranks=message.missing)
        elif len(message.parts) == len(waiter.ranks):
            waiter.parts = message.parts
            self._retain(key, waiter.message)

    def _retain(self, key: tuple[int, str, int], part: Gather) -> None:
        """Keep this rank's part of a completed gather for ``GatherMissing``."""
        self._parts[key] = part
        while self._parts and (
            len(self._parts) > RETAINED_PARTS
            or sum(len(each.data) for each in self._parts.values()) > RETAINED_BYTES
        ):
            self._parts.popitem(last=False)

    def _rank_gone(self, message: Gone) -> None:
        if message.rank in self._gone:
            return
        self._gone[message.rank] = message
        self._fail_waits(_wait_failure(message), lambda waiter: message.rank in waiter.ranks)
        for group, observer in self._observers.items():
            if message.rank in self._group_ranks[group] and (group, message.rank) not in self._left:
                self._queue_callback(observer.peer_gone, message.rank, message.left, message.reason)

    def _rank_left_group(self, message: LeaveGroup) -> None:
        if (message.group, message.rank) in self._left or message.rank in self._gone:
            return
        failure = WaitFailure(kind="left", ranks=(message.rank,), reason=message.reason)
        self._left[message.group, message.rank] = failure
        self._fail_waits(failure, lambda waiter: waiter.message.group == message.group)
        if message.group in self._observers:
            self._queue_callback(
                self._observers[message.group].peer_gone, message.rank, True, message.reason
            )

    def _notice_arrived(self, message: NoticeMessage) -> None:
        if message.seq <= self._seen_notices.get(message.rank, 0):
            return  # sent again, to the successor of a hub that had delivered it
        self._seen_notices[message.rank] = message.seq
        if message.group in self._observers:
            self._queue_callback(
                self._observers[message.group].notice, message.rank, message.payload
            )

    def _resumed(self, message: Resumed) -> None:
        """Continue at the successor of a hub: send all again that is not known to be complete."""
        for gone in unpack_gone(message):
            self._rank_gone(gone)
        for each in self._replay():
            self._transmit(each)

    def _replay(self) -> Iterator[Any]:
        now = clock.monotonic()
        for group in self._observers:
            if group:
                yield OpenGroup(group=group, ranks=self._group_ranks[group])
        for each in self._departures:
            if each.group:
                yield OpenGroup(group=each.group, ranks=each.ranks)
            yield LeaveGroup(group=each.group, rank=self.rank, reason=each.reason)
        for waiter in self._waiters.values():
            if not waiter.done:
                old = waiter.message
                yield Gather(
                    group=old.group,
                    tag=old.tag,
                    round=old.round,
                    timeout=max(0.0, waiter.deadline - now),
                    data=old.data,
                )
        for sent_at, notice in self._notices:
            if now - sent_at < NOTICE_SECONDS and notice.group in self._observers:
                yield notice
        for ident, (group, _) in self._status.items():
            yield StatusQuery(group=group, rank=self.rank, ident=ident)
        yield Replayed()

    def _control_plane_lost(self, left: bool, reason: str) -> None:
        """End all waits, now and later: the hub is gone and has no successor. Needs the lock."""
        self._hub_failure = WaitFailure(kind="hub left" if left else "hub", reason=reason)
        self._fail_waits(self._hub_failure, lambda waiter: True)
        for observer in self._observers.values():
            self._queue_callback(observer.control_plane_lost, left, reason)

    def _fail_waits(self, failure: WaitFailure, concerns: Callable[[_Waiter], bool]) -> None:
        for waiter in self._waiters.values():
            if not waiter.done and concerns(waiter):
                waiter.failure = failure
        self._cond.notify_all()

    # --- callbacks ---

    def _queue_callback(self, call: Callable[..., Any], *args: Any) -> None:
        self._callbacks.append(lambda: call(*args))

    def run_on_watcher(self, call: Callable[[], None]) -> None:
        """Run ``call`` on the watcher thread."""
        self._callbacks.append(call)
        self._wake_watcher()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            call = self._callbacks.popleft()
            try:
                call()
            except Exception:
                _log.exception("a callback of rank %d failed", self.rank)

    def _reply_status(self, query: StatusQuery) -> None:
        observer = self._observers.get(query.group)
        payload = (
            framing.encode_json({"answered": True, "closed": True})
            if observer is None
            else observer.status_requested(query.rank, query.ident)
        )
        reply = StatusReply(group=query.group, rank=query.rank, ident=query.ident, payload=payload)
        with self._cond, contextlib.suppress(CommunicatorClosed):
            self._transmit(reply)


def _wait_failure(gone: Gone) -> WaitFailure:
    kind = "left" if gone.left else "lost"
    return WaitFailure(kind=kind, ranks=(gone.rank,), reason=gone.reason)
