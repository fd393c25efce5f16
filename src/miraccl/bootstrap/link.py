"""A rank's control connection: socket, machine and watcher thread.

A session and all sessions split from it share one link. It owns the socket and the thread. Calls
come from any thread and are serialised by one lock. Only the watcher reads; it wakes blocked calls
under the lock and runs callbacks without it. Ranks in this file are those of the whole job.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from miraccl import clock, trace
from miraccl.bootstrap import lifetime
from miraccl.bootstrap.eventfd import EventFd
from miraccl.bootstrap.hub import READ_BYTES, end_sending
from miraccl.errors import (
    BootstrapError,
    CommunicatorClosed,
    InvalidUsage,
    PeerDied,
    ProtocolError,
    as_system_failure,
)
from miraccl.params import FOREVER
from miraccl.sockets import is_transient
from miraccl.wire import framing
from miraccl.wire.bootstrap import (
    Disconnected,
    Drop,
    HubLost,
    MemberState,
    MessageArrived,
    Received,
    Send,
    SendMessage,
)
from miraccl.wire.bootstrap_member import MemberMachine
from miraccl.wire.bootstrap_messages import (
    Accepted,
    Gather,
    Gathered,
    GatherTimeout,
    Gone,
    Goodbye,
    Join,
    JoinRejected,
    LeaveGroup,
    NoticeMessage,
    OpenGroup,
    RejectCode,
    StatusQuery,
    StatusReply,
    Welcome,
)

_log = trace.logger("bootstrap")
#: The hub keeps the deadlines; a member waits this much longer (seconds) for its message.
GRACE_SECONDS = 1.0
GOODBYE_SECONDS = 1.0
#: Interval at which a rank that waits for the others polls (seconds).
POLL_SECONDS = 0.1


class LinkObserver(Protocol):
    """A session as its link calls it: on the watcher thread, without the lock."""

    def peer_gone(self, rank: int, left: bool, reason: str) -> None: ...
    def hub_gone(self, rank: int, left: bool, reason: str) -> None: ...
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
    group: int
    ranks: tuple[int, ...]
    parts: tuple[bytes, ...] | None = None
    failure: WaitFailure | None = None

    @property
    def done(self) -> bool:
        return self.parts is not None or self.failure is not None


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Result of the rendezvous.

    ``members``: the ``Join`` of each rank. ``hub_rank``: rank in whose process the hub runs, -1 for
    a launcher's.
    """

    members: tuple[Join, ...]
    hub_rank: int


class RankTaken(BootstrapError):
    """The hub has this rank already.

    Either another process has it, or a connection of this process that broke unnoticed.
    """


class JobAlreadyFormed(RankTaken):
    """The hub serves a job that has formed already, with another process as this rank."""


class HubDisconnected(Exception):
    """The hub closed the connection before it accepted the rank; another attempt may succeed."""


class Link:
    """Control connection of one rank.

    Takes over a connected socket whose machine waits for ``Join``, unless it raises
    ``SystemFailure``.
    """

    def __init__(
        self, sock: socket.socket, machine: MemberMachine, *, rank: int, nranks: int
    ) -> None:
        self.rank, self.nranks = rank, nranks
        self.membership: Membership | None = None
        self._address = _peer_address(sock)
        self._sock, self._machine = sock, machine
        self._cond = clock.condition(threading.Lock())
        self._unsent = bytearray()
        self._observers: dict[int, LinkObserver] = {}
        self._group_ranks: dict[int, tuple[int, ...]] = {}
        self._gone: dict[int, WaitFailure] = {}
        self._left: dict[tuple[int, int], WaitFailure] = {}
        self._hub_failure: WaitFailure | None = None
        self._refused: JoinRejected | None = None
        self._hub_lost: HubLost | None = None
        self._rounds: dict[tuple[int, str], int] = {}
        self._waiters: dict[tuple[int, str, int], _Waiter] = {}
        self._ended: dict[tuple[int, str], WaitFailure] = {}
        self._status: dict[int, dict[int, bytes]] = {}
        self._status_ident = 0
        self._callbacks: deque[Callable[[], None]] = deque()
        self._closed = False
        self._stopped = clock.event()
        self._thread = clock.thread(target=self._watch, name=f"miraccl-watcher-{rank}", daemon=True)
        with (
            as_system_failure("cannot watch the control connection", rank=rank),
            contextlib.ExitStack() as unless_it_runs,
        ):
            self._selector = unless_it_runs.enter_context(selectors.DefaultSelector())
            self._wakeup = EventFd()
            unless_it_runs.callback(self._wakeup.close)
            self._selector.register(self._sock, selectors.EVENT_READ)
            self._selector.register(self._wakeup, selectors.EVENT_READ)
            self._thread.start()
            unless_it_runs.pop_all()
        lifetime.links.add(self)

    # --- meeting ---

    def join(self, join: Join, deadline: float, poll: Callable[[], None]) -> Membership:
        """Send ``join`` and wait for all ranks.

        ``deadline``: a time of the monotonic clock; ``poll`` may raise to end the wait. Raises
        ``PeerDied`` (a rank or the hub died), ``BootstrapError`` (a rank is missing or was
        rejected), ``JobAlreadyFormed`` or ``HubDisconnected``.
        """
        with self._cond:
            self._send_message(join)
            left = GRACE_SECONDS
            while not (self.membership or self._refused or self._hub_lost) and left > 0:
                poll()
                left = deadline + GRACE_SECONDS - clock.monotonic()
                self._cond.wait(min(max(0.0, left), POLL_SECONDS))
            if self.membership is not None:
                return self.membership
            refused, lost = self._refused, self._hub_lost
        self.close("the rendezvous failed")
        if refused is not None:
            raise _rejection_error(refused, self.rank)
        if lost is not None and lost.state in (MemberState.PROVED, MemberState.JOINING):
            raise HubDisconnected(lost.reason)
        if lost is not None:
            raise PeerDied(
                f"{self.hub_name} died before all ranks had joined: {lost.reason}",
                rank=self.rank,
                peer=0,
            )
        raise BootstrapError(
            f"{self.hub_name} accepted this rank and then did not answer until the deadline",
            rank=self.rank,
        )

    # --- views ---

    def attach(self, group: int, ranks: tuple[int, ...], observer: LinkObserver) -> None:
        """Attach a session to a group and deliver the departures that it missed.

        Group 0 exists from the start; others are opened at the hub.
        """
        with self._cond:
            self._check_open()
            self._observers[group], self._group_ranks[group] = observer, ranks
            if group:
                self._send_message(OpenGroup(group=group, ranks=ranks))
            for rank, failure in self._gone.items():
                if rank in ranks:
                    self._queue_callback(
                        observer.peer_gone, rank, failure.kind == "left", failure.reason
                    )
        self._wakeup.notify()

    def detach(self, group: int, reason: str) -> None:
        """Leave a group; the last session to detach closes the connection."""
        with self._cond:
            if self._observers.pop(group, None) is None:
                return
            for waiter in self._waiters.values():
                if waiter.group == group and not waiter.done:
                    waiter.failure = WaitFailure(
                        kind="closed", reason="the session was closed by another thread"
                    )
            self._ended = {key: failure for key, failure in self._ended.items() if key[0] != group}
            self._cond.notify_all()
            if self._observers and self._machine.state is MemberState.UP:
                self._send_message(LeaveGroup(group=group, rank=self.rank, reason=reason))
            last = not self._observers
        if last:
            self.close(reason)

    def close(self, reason: str) -> None:
        """Say goodbye, wait for the hub to hang up, end the watcher.

        May be called twice and from any thread.
        """
        with self._cond:
            if not self._closed:
                self._closed = True
                if self._machine.state is not MemberState.CLOSED:
                    self._send_message(Goodbye(reason=reason))
        self._wakeup.notify()
        if self._thread is threading.current_thread():
            return
        if not self._stopped.wait(GOODBYE_SECONDS):
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(GOODBYE_SECONDS)

    @property
    def hub_name(self) -> str:
        """Name of the hub for error messages: ``rank 0's control plane at HOST:PORT``."""
        rank = self.membership.hub_rank if self.membership is not None else 0
        owner = f"rank {rank}'s" if rank >= 0 else "the launcher's"
        return f"{owner} control plane at {self._address}"

    @property
    def on_watcher(self) -> bool:
        return self._thread is threading.current_thread()

    def _check_open(self, group: int | None = None) -> None:
        """Raise if the link is closed, or if the session of ``group`` has detached. Needs the lock."""
        if self._closed or (group is not None and group not in self._observers):
            raise CommunicatorClosed("the session is closed", rank=self.rank)

    # --- calls ---

    def gather(
        self, group: int, tag: str, data: bytes, timeout: float
    ) -> tuple[bytes, ...] | WaitFailure:
        """Return the parts of all ranks of the group in its order, or the reason why there are
        none.
        """
        if self.on_watcher:
            raise InvalidUsage(
                (
                    "cannot wait for other ranks in a callback of a session: hand the event to "
                    "another thread"
                ),
                rank=self.rank,
            )
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
            waiter = _Waiter(group=group, ranks=ranks)
            key = (group, tag, number)
            self._waiters[key] = waiter
            try:
                self._send_message(
                    Gather(group=group, tag=tag, round=number, timeout=timeout, data=data)
                )
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
            for (waiting, name, _), waiter in self._waiters.items():
                if (waiting, name) == (group, tag) and not waiter.done:
                    waiter.failure = failure
            self._cond.notify_all()

    def notify(self, group: int, payload: bytes) -> WaitFailure | None:
        with self._cond:
            self._check_open(group)
            if self._hub_failure is not None:
                return self._hub_failure
            self._send_message(NoticeMessage(group=group, rank=self.rank, seq=0, payload=payload))
            return None

    def query_status(
        self, group: int, timeout: float, without: Collection[int] = ()
    ) -> tuple[dict[int, bytes], dict[int, WaitFailure]]:
        """Return the status replies by rank, and the failures of ranks that cannot reply.

        Ranks of ``without`` are not waited for.
        """
        if self.on_watcher:
            raise InvalidUsage(
                (
                    "cannot wait for other ranks in a callback of a session: hand the event to "
                    "another thread"
                ),
                rank=self.rank,
            )
        with self._cond:
            self._check_open(group)
            ranks = self._group_ranks[group]
            ident = self._status_ident = (self._status_ident + 1) & 0xFFFFFFFF
            replies: dict[int, bytes] = {}
            self._status[ident] = replies
            if self._hub_failure is None:
                self._send_message(StatusQuery(group=group, rank=self.rank, ident=ident))

                def complete() -> bool:
                    awaited = (
                        r for r in ranks if r not in (self.rank, *without) and r not in replies
                    )
                    return self._hub_failure is not None or all(
                        self._failure(group, r) for r in awaited
                    )

                self._cond.wait_for(complete, min(timeout, FOREVER))
            del self._status[ident]
            absent = {r: failure for r in ranks if (failure := self._failure(group, r)) is not None}
            if self._hub_failure is not None:
                absent |= {r: self._hub_failure for r in ranks if r not in absent}
            return dict(replies), absent

    def gone(self, group: int) -> list[int]:
        """Return the ranks of the group that are known to have died or left it."""
        with self._cond:
            return [
                rank for rank in self._group_ranks[group] if self._failure(group, rank) is not None
            ]

    def _failure(self, group: int, rank: int) -> WaitFailure | None:
        """Return the reason why a rank is no longer in the group, None if it is."""
        return self._gone.get(rank) or self._left.get((group, rank))

    def _group_failure(self, group: int) -> WaitFailure | None:
        for rank in self._group_ranks[group]:
            failure = self._failure(group, rank)
            if failure is not None:
                return failure
        return self._hub_failure

    # --- machine ---

    def _send_message(self, message: Any) -> None:
        """Send one message. Needs the lock."""
        try:
            self._apply(self._machine.handle(SendMessage(now=clock.monotonic(), message=message)))
        except ProtocolError as error:  # the connection is closed or closing
            raise CommunicatorClosed(
                f"cannot send: the control connection is closed: {error.message}", rank=self.rank
            ) from None

    def _apply(self, outputs: list[Any]) -> None:
        for output in outputs:
            if isinstance(output, Send):
                self._unsent += output.data
            elif isinstance(output, MessageArrived):
                self._handle_message(output.message)
            elif isinstance(output, HubLost):
                self._hub_gone(output)
            elif isinstance(output, Drop):
                continue  # the watcher ends once the machine is closed
        self._flush()

    def _flush(self) -> None:
        """Send what fits; the watcher sends the rest."""
        waiting = False
        while self._unsent and not waiting:
            try:
                del self._unsent[: self._sock.send(self._unsent)]
            except OSError as error:
                waiting = is_transient(error)
                if not waiting:
                    self._unsent.clear()  # the reader sees the end, after what arrived before
                    end_sending(self._sock)
        if waiting and not self.on_watcher:
            self._wakeup.notify()

    def _handle_message(self, message: Any) -> None:
        if isinstance(message, Gathered | GatherTimeout):
            self._gather_ended(message)
        elif isinstance(message, Gone):
            self._peer_gone(message)
        elif isinstance(message, LeaveGroup):
            failure = WaitFailure(kind="left", ranks=(message.rank,), reason=message.reason)
            self._left[message.group, message.rank] = failure
            self._fail_waits(failure, lambda waiter: waiter.group == message.group)
            if message.group in self._observers:
                self._queue_callback(
                    self._observers[message.group].peer_gone, message.rank, True, message.reason
                )
        elif isinstance(message, NoticeMessage):
            if message.group in self._observers:
                self._queue_callback(
                    self._observers[message.group].notice, message.rank, message.payload
                )
        elif isinstance(message, StatusQuery):
            self._queue_callback(self._reply_status, message)
        elif isinstance(message, StatusReply):
            if message.ident in self._status:
                self._status[message.ident][message.rank] = message.payload
        elif isinstance(message, Welcome):
            self._welcomed(message)
        elif isinstance(message, JoinRejected):
            self._refused = message
        else:
            assert isinstance(message, Accepted)
        self._cond.notify_all()

    def _welcomed(self, message: Welcome) -> None:
        try:
            members = tuple(framing.decode(member, {Join.KIND: Join}) for member in message.members)
        except ProtocolError:
            members = ()
        if len(members) != self.nranks:
            text = f"{self.hub_name} sent a malformed list of ranks"
            self._refused = JoinRejected(code=RejectCode.CLOSED, text=text, ranks=())
            return
        holders = [rank for rank, member in enumerate(members) if member.token == message.hub_token]
        self.membership = Membership(members=members, hub_rank=holders[0] if holders else -1)

    def _gather_ended(self, message: Gathered | GatherTimeout) -> None:
        waiter = self._waiters.get((message.group, message.tag, message.round))
        if waiter is None or waiter.done:
            return
        if isinstance(message, GatherTimeout):
            waiter.failure = WaitFailure(kind="late", ranks=message.missing)
        elif len(message.parts) == len(waiter.ranks):
            waiter.parts = message.parts

    def _peer_gone(self, message: Gone) -> None:
        failure = WaitFailure(
            kind="left" if message.left else "lost", ranks=(message.rank,), reason=message.reason
        )
        self._gone[message.rank] = failure
        self._fail_waits(failure, lambda waiter: message.rank in waiter.ranks)
        for group, view in self._observers.items():
            if message.rank in self._group_ranks[group] and (group, message.rank) not in self._left:
                self._queue_callback(view.peer_gone, message.rank, message.left, message.reason)

    def _hub_gone(self, output: HubLost) -> None:
        self._hub_lost = output
        self._cond.notify_all()
        if self.membership is None or self._closed:
            return
        rank = self.membership.hub_rank
        known = self._gone.get(rank)
        left = output.left or (known is not None and known.kind == "left")
        reason = output.reason if known is None else known.reason
        self._hub_failure = WaitFailure(
            kind="hub left" if left else "hub", ranks=(rank,) if rank >= 0 else (), reason=reason
        )
        if rank >= 0 and known is None:
            self._gone[rank] = WaitFailure(
                kind="left" if left else "lost", ranks=(rank,), reason=reason
            )
        self._fail_waits(self._hub_failure, lambda waiter: True)
        for view in self._observers.values():
            self._queue_callback(view.hub_gone, rank if known is None else -1, left, reason)

    def _fail_waits(self, failure: WaitFailure, concerns: Callable[[_Waiter], bool]) -> None:
        for waiter in self._waiters.values():
            if not waiter.done and concerns(waiter):
                waiter.failure = failure
        self._cond.notify_all()

    # --- watcher ---

    def _queue_callback(self, call: Callable[..., Any], *args: Any) -> None:
        self._callbacks.append(lambda: call(*args))

    def run_on_watcher(self, call: Callable[[], None]) -> None:
        """Run ``call`` on the watcher thread."""
        self._callbacks.append(call)
        self._wakeup.notify()

    def drain(self, timeout: float) -> None:
        """Wait until the watcher has handled everything received so far, at most ``timeout``
        seconds.
        """
        caught_up = clock.event()

        def look() -> None:
            if self._machine.state is not MemberState.CLOSED:
                self._read()  # it may have arrived while the watcher ran earlier callbacks
            self._queue_callback(caught_up.set)

        if not self.on_watcher and not self._stopped.is_set():
            self.run_on_watcher(look)
            caught_up.wait(timeout)

    def _reply_status(self, ask: StatusQuery) -> None:
        view = self._observers.get(ask.group)
        payload = (
            framing.encode_json({"answered": True, "closed": True})
            if view is None
            else view.status_requested(ask.rank, ask.ident)
        )
        with self._cond, contextlib.suppress(CommunicatorClosed):
            self._send_message(
                StatusReply(group=ask.group, rank=ask.rank, ident=ask.ident, payload=payload)
            )

    def _watch(self) -> None:
        selector = self._selector
        try:
            while self._machine.state is not MemberState.CLOSED:
                selector.modify(
                    self._sock,
                    selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0),
                )
                for key, mask in clock.wait_io(selector.select, None):
                    if key.fileobj is self._wakeup:
                        self._wakeup.clear()
                        continue
                    if mask & selectors.EVENT_WRITE:
                        with self._cond:
                            self._flush()
                    if mask & selectors.EVENT_READ:
                        self._read()
                self._run_callbacks()
        except Exception:
            _log.exception("the watcher of rank %d failed", self.rank)
        finally:
            with self._cond:
                self._apply(
                    self._machine.handle(
                        Disconnected(now=clock.monotonic(), reason="the watcher ended")
                    )
                )
            self._stopped.set()
            self._run_callbacks()
            selector.close()
            self._sock.close()
            self._wakeup.close()

    def _read(self) -> None:
        now = clock.monotonic()
        event: Received | Disconnected
        try:
            data = self._sock.recv(READ_BYTES)
            closed = "the control connection was closed; its process has probably ended"
            event = Received(now=now, data=data) if data else Disconnected(now=now, reason=closed)
        except OSError as error:
            if is_transient(error):
                return
            event = Disconnected(now=now, reason=f"the control connection broke ({error.strerror})")
        with self._cond:
            self._apply(self._machine.handle(event))

    def _run_callbacks(self) -> None:
        while self._callbacks:
            call = self._callbacks.popleft()
            try:
                call()
            except Exception:
                _log.exception("a callback of rank %d failed", self.rank)

    def forked(self) -> None:
        """Close the descriptors in a forked child, so that the parent's death is still seen."""
        self._closed = True
        self._cond = clock.condition(threading.Lock())
        self._stopped.set()
        self._selector.close()
        self._sock.close()
        self._wakeup.close()


def _peer_address(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:  # the peer has hung up already
        return "an unknown address"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _rejection_error(refused: JoinRejected, rank: int) -> BootstrapError | PeerDied:
    peer = refused.ranks[0] if len(refused.ranks) == 1 else None
    if refused.code == RejectCode.DIED:
        return PeerDied(refused.text, rank=rank, peer=peer)
    if refused.code == RejectCode.ALREADY_FORMED:
        return JobAlreadyFormed(
            refused.text,
            rank=rank,
            peer=peer,
            hint="each process needs its own rank, and each job its own id or port",
        )
    if refused.code == RejectCode.DUPLICATE:
        return RankTaken(refused.text, rank=rank, peer=peer, hint="each process needs its own rank")
    hint = "all ranks need the same nranks" if refused.code == RejectCode.NRANKS else None
    return BootstrapError(refused.text, rank=rank, peer=peer, hint=hint)
