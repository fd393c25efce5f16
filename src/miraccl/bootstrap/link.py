"""A rank's control connection: socket, machine and watcher thread, shared by the session and all communicators split from it.

Owns the socket and the thread.  Calls come from any thread and are serialised by one lock; what arrives is read by the watcher only,
which wakes waiting calls under the lock and delivers events without it.  Ranks in this file are those of the whole job.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from miraccl import trace
from miraccl.bootstrap import lifetime
from miraccl.bootstrap.eventfd import Bell
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
    Arrived,
    Disconnected,
    Drop,
    HubLost,
    MemberState,
    Received,
    Send,
    SendMessage,
)
from miraccl.wire.bootstrap_member import MemberMachine
from miraccl.wire.bootstrap_messages import (
    Accepted,
    Gather,
    Gathered,
    GatherLate,
    Gone,
    Goodbye,
    Join,
    LeaveGroup,
    NoticeMessage,
    OpenGroup,
    Refusal,
    Refused,
    StatusAsk,
    StatusReply,
    Welcome,
)

_log = trace.logger("bootstrap")
#: The hub keeps the deadlines; a member waits this much longer (seconds) for its word.
GRACE_SECONDS = 1.0
GOODBYE_SECONDS = 1.0
#: How often whoever waits for a meeting looks whether that has a use.
LOOK_SECONDS = 0.1


class View(Protocol):
    """What the link tells a session. All calls come from the watcher thread, without the lock."""

    def peer_gone(self, rank: int, left: bool, reason: str) -> None: ...
    def hub_gone(self, rank: int, left: bool, reason: str) -> None: ...
    def notice(self, rank: int, payload: bytes) -> None: ...
    def status_asked(self, rank: int, ident: int) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why a wait ended without a result. ``kind``: lost, left, hub, late, silent (no word from the hub), ended (by this rank) or closed."""

    kind: str
    ranks: tuple[int, ...] = ()
    reason: str = ""


@dataclass(kw_only=True)
class _Waiter:
    group: int
    ranks: tuple[int, ...]
    parts: tuple[bytes, ...] | None = None
    problem: Problem | None = None

    @property
    def done(self) -> bool:
        return self.parts is not None or self.problem is not None


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Outcome of a meeting: what each rank told, and the rank in whose process the hub lives (-1: in none)."""

    members: tuple[Join, ...]
    hub_rank: int


class RankTaken(BootstrapError):
    """The hub has this rank already: another process, or a connection of this one that broke and is not known to be broken yet."""


class JobOver(RankTaken):
    """The hub serves a job that has met already, with another process as this rank."""


class HubVanished(Exception):
    """The hub closed the connection before it took the rank in; another try may succeed."""


class Link:
    """Takes over a connected socket whose machine waits for ``Join``, unless it raises ``SystemFailure``."""

    def __init__(
        self, sock: socket.socket, machine: MemberMachine, *, rank: int, nranks: int
    ) -> None:
        self.rank, self.nranks = rank, nranks
        self.meeting: Meeting | None = None
        self._sock, self._machine = sock, machine
        self._cond = threading.Condition(threading.Lock())
        self._unsent = bytearray()
        self._views: dict[int, View] = {}
        self._view_ranks: dict[int, tuple[int, ...]] = {}
        self._gone: dict[int, Problem] = {}
        self._left: dict[tuple[int, int], Problem] = {}
        self._hub_problem: Problem | None = None
        self._refused: Refused | None = None
        self._hub_lost: HubLost | None = None
        self._rounds: dict[tuple[int, str], int] = {}
        self._waiters: dict[tuple[int, str, int], _Waiter] = {}
        self._ended: dict[tuple[int, str], Problem] = {}
        self._status: dict[int, dict[int, bytes]] = {}
        self._status_ident = 0
        self._deliveries: deque[Callable[[], None]] = deque()
        self._closed = False
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name=f"miraccl-watcher-{rank}", daemon=True
        )
        with (
            as_system_failure("the connection to the hub cannot be watched", rank=rank),
            contextlib.ExitStack() as unless_it_runs,
        ):
            self._selector = unless_it_runs.enter_context(selectors.DefaultSelector())
            self._bell = Bell()
            unless_it_runs.callback(self._bell.close)
            self._selector.register(self._sock, selectors.EVENT_READ)
            self._selector.register(self._bell, selectors.EVENT_READ)
            self._thread.start()
            unless_it_runs.pop_all()
        lifetime.links.add(self)

    # --- meeting ----------------------------------------------------------------------------------------------------

    def meet(self, join: Join, deadline: float, look: Callable[[], None]) -> Meeting:
        """Join and wait for all ranks. ``deadline`` is a time of the monotonic clock; ``look`` may raise to end the wait.

        Raises ``PeerDied`` (a rank or the hub died), ``BootstrapError`` (a rank is missing or was refused), ``JobOver`` or
        ``HubVanished``.
        """
        with self._cond:
            self._command(join)
            left = GRACE_SECONDS
            while not (self.meeting or self._refused or self._hub_lost) and left > 0:
                look()
                left = deadline + GRACE_SECONDS - time.monotonic()
                self._cond.wait(min(max(0.0, left), LOOK_SECONDS))
            if self.meeting is not None:
                return self.meeting
            refused, lost = self._refused, self._hub_lost
        self.close("the meeting failed")
        if refused is not None:
            raise _refusal(refused, self.rank)
        if lost is not None and lost.state in (MemberState.PROVED, MemberState.JOINING):
            raise HubVanished(lost.reason)
        if lost is not None:
            raise PeerDied(
                f"the hub died while the ranks were meeting: {lost.reason}", rank=self.rank, peer=0
            )
        raise BootstrapError(
            "the hub took this rank in and then said nothing until the deadline", rank=self.rank
        )

    # --- views ------------------------------------------------------------------------------------------------------

    def open_view(self, group: int, ranks: tuple[int, ...], view: View) -> None:
        """Group 0 exists already; the others are made known to the hub. What the view missed is delivered to it."""
        with self._cond:
            self._check_open()
            self._views[group], self._view_ranks[group] = view, ranks
            if group:
                self._command(OpenGroup(group=group, ranks=ranks))
            for rank, problem in self._gone.items():
                if rank in ranks:
                    self._deliver(view.peer_gone, rank, problem.kind == "left", problem.reason)
        self._bell.ring()

    def close_view(self, group: int, reason: str) -> None:
        """Leave a group; the last view to close ends the connection."""
        with self._cond:
            if self._views.pop(group, None) is None:
                return
            for waiter in self._waiters.values():
                if waiter.group == group and not waiter.done:
                    waiter.problem = Problem(
                        kind="closed", reason="the session was closed by another thread"
                    )
            self._ended = {key: problem for key, problem in self._ended.items() if key[0] != group}
            self._cond.notify_all()
            if self._views and self._machine.state is MemberState.UP:
                self._command(LeaveGroup(group=group, rank=self.rank, reason=reason))
            last = not self._views
        if last:
            self.close(reason)

    def close(self, reason: str) -> None:
        """Say goodbye, wait for the hub to hang up, end the watcher. May be called twice and from any thread."""
        with self._cond:
            if not self._closed:
                self._closed = True
                if self._machine.state is not MemberState.CLOSED:
                    self._command(Goodbye(reason=reason))
        self._bell.ring()
        if self._thread is threading.current_thread():
            return
        if not self._over.wait(GOODBYE_SECONDS):
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(GOODBYE_SECONDS)

    @property
    def on_watcher(self) -> bool:
        return self._thread is threading.current_thread()

    def _check_open(self, group: int | None = None) -> None:
        """With the lock. ``group``: of which the hub is told something, which drops a rank that is not in it (any more)."""
        if self._closed or (group is not None and group not in self._views):
            raise CommunicatorClosed("the session is closed", rank=self.rank)

    # --- calls ------------------------------------------------------------------------------------------------------

    def gather(
        self, group: int, tag: str, data: bytes, timeout: float
    ) -> tuple[bytes, ...] | Problem:
        """The parts of all ranks of the group in its order, or why there are none."""
        if self.on_watcher:
            raise InvalidUsage(
                "a callback of a session cannot wait for other ranks; hand the event to another thread",
                rank=self.rank,
            )
        timeout = min(max(timeout, 0.0), FOREVER)
        with self._cond:
            self._check_open(group)
            ranks = self._view_ranks[group]
            if len(data) * len(ranks) + 64 * len(ranks) + 1024 > framing.MAX_FRAME_BYTES:
                raise InvalidUsage(
                    f"all_gather moves at most {framing.MAX_FRAME_BYTES} bytes in all over the control plane",
                    rank=self.rank,
                )
            problem = self._ended.get((group, tag)) or self._group_problem(group)
            if problem is not None:
                return problem
            number = self._rounds.get((group, tag), 0)
            self._rounds[group, tag] = number + 1
            waiter = _Waiter(group=group, ranks=ranks)
            key = (group, tag, number)
            self._waiters[key] = waiter
            try:
                self._command(
                    Gather(group=group, tag=tag, round=number, timeout=timeout, data=data)
                )
                self._cond.wait_for(lambda: waiter.done, timeout + GRACE_SECONDS)
            finally:
                del self._waiters[key]
            if waiter.parts is not None:
                return waiter.parts
            return waiter.problem or Problem(kind="silent", reason="the hub does not answer")

    def end_gather(self, group: int, tag: str, reason: str) -> None:
        """End this rank's calls of ``gather`` with this tag, now and later. Any thread may call it."""
        with self._cond:
            problem = self._ended[group, tag] = Problem(kind="ended", reason=reason)
            for (waiting, name, _), waiter in self._waiters.items():
                if (waiting, name) == (group, tag) and not waiter.done:
                    waiter.problem = problem
            self._cond.notify_all()

    def notify(self, group: int, payload: bytes) -> Problem | None:
        with self._cond:
            self._check_open(group)
            if self._hub_problem is not None:
                return self._hub_problem
            self._command(NoticeMessage(group=group, rank=self.rank, payload=payload))
            return None

    def ask_status(
        self, group: int, timeout: float, without: Collection[int] = ()
    ) -> tuple[dict[int, bytes], dict[int, Problem]]:
        """Answers by rank, and what is known of those that cannot answer; those of ``without`` are not waited for."""
        if self.on_watcher:
            raise InvalidUsage(
                "a callback of a session cannot wait for other ranks; hand the event to another thread",
                rank=self.rank,
            )
        with self._cond:
            self._check_open(group)
            ranks = self._view_ranks[group]
            ident = self._status_ident = (self._status_ident + 1) & 0xFFFFFFFF
            replies: dict[int, bytes] = {}
            self._status[ident] = replies
            if self._hub_problem is None:
                self._command(StatusAsk(group=group, rank=self.rank, ident=ident))

                def complete() -> bool:
                    awaited = (
                        r for r in ranks if r not in (self.rank, *without) and r not in replies
                    )
                    return self._hub_problem is not None or all(
                        self._problem(group, r) for r in awaited
                    )

                self._cond.wait_for(complete, min(timeout, FOREVER))
            del self._status[ident]
            absent = {r: problem for r in ranks if (problem := self._problem(group, r)) is not None}
            if self._hub_problem is not None:
                absent |= {r: self._hub_problem for r in ranks if r not in absent}
            return dict(replies), absent

    def gone(self, group: int) -> list[int]:
        """Ranks of the group, by their numbers in the world, that have died or left it, as far as is known here."""
        with self._cond:
            return [
                rank for rank in self._view_ranks[group] if self._problem(group, rank) is not None
            ]

    def _problem(self, group: int, rank: int) -> Problem | None:
        """Why a rank is not in the group any more, if that is so."""
        return self._gone.get(rank) or self._left.get((group, rank))

    def _group_problem(self, group: int) -> Problem | None:
        for rank in self._view_ranks[group]:
            problem = self._problem(group, rank)
            if problem is not None:
                return problem
        return self._hub_problem

    # --- machine ----------------------------------------------------------------------------------------------------

    def _command(self, message: Any) -> None:
        """With the lock: send one message."""
        try:
            self._run(self._machine.handle(SendMessage(now=time.monotonic(), message=message)))
        except ProtocolError as error:  # the state does not allow it: the connection is over
            raise CommunicatorClosed(
                f"the control connection is over: {error.message}", rank=self.rank
            ) from None

    def _run(self, outputs: list[Any]) -> None:
        for output in outputs:
            if isinstance(output, Send):
                self._unsent += output.data
            elif isinstance(output, Arrived):
                self._arrived(output.message)
            elif isinstance(output, HubLost):
                self._lost_hub(output)
            elif isinstance(output, Drop):
                continue  # the watcher ends when the machine is closed
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
                    self._unsent.clear()  # the reader sees the end, after what arrived before it
                    end_sending(self._sock)
        if waiting and not self.on_watcher:
            self._bell.ring()

    def _arrived(self, message: Any) -> None:
        if isinstance(message, Gathered | GatherLate):
            self._gather_ended(message)
        elif isinstance(message, Gone):
            self._peer_gone(message)
        elif isinstance(message, LeaveGroup):
            problem = Problem(kind="left", ranks=(message.rank,), reason=message.reason)
            self._left[message.group, message.rank] = problem
            self._end_waits(problem, lambda waiter: waiter.group == message.group)
            if message.group in self._views:
                self._deliver(
                    self._views[message.group].peer_gone, message.rank, True, message.reason
                )
        elif isinstance(message, NoticeMessage):
            if message.group in self._views:
                self._deliver(self._views[message.group].notice, message.rank, message.payload)
        elif isinstance(message, StatusAsk):
            self._deliver(self._answer_status, message)
        elif isinstance(message, StatusReply):
            if message.ident in self._status:
                self._status[message.ident][message.rank] = message.payload
        elif isinstance(message, Welcome):
            self._welcomed(message)
        elif isinstance(message, Refused):
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
            text = "the hub welcomed this rank with a list of ranks that makes no sense"
            self._refused = Refused(code=Refusal.CLOSED, text=text, ranks=())
            return
        holders = [rank for rank, member in enumerate(members) if member.token == message.hub_token]
        self.meeting = Meeting(members=members, hub_rank=holders[0] if holders else -1)

    def _gather_ended(self, message: Gathered | GatherLate) -> None:
        waiter = self._waiters.get((message.group, message.tag, message.round))
        if waiter is None or waiter.done:
            return
        if isinstance(message, GatherLate):
            waiter.problem = Problem(kind="late", ranks=message.missing)
        elif len(message.parts) == len(waiter.ranks):
            waiter.parts = message.parts

    def _peer_gone(self, message: Gone) -> None:
        problem = Problem(
            kind="left" if message.left else "lost", ranks=(message.rank,), reason=message.reason
        )
        self._gone[message.rank] = problem
        self._end_waits(problem, lambda waiter: message.rank in waiter.ranks)
        for group, view in self._views.items():
            if message.rank in self._view_ranks[group] and (group, message.rank) not in self._left:
                self._deliver(view.peer_gone, message.rank, message.left, message.reason)

    def _lost_hub(self, output: HubLost) -> None:
        self._hub_lost = output
        self._cond.notify_all()
        if self.meeting is None or self._closed:
            return
        rank = self.meeting.hub_rank
        known = self._gone.get(rank)
        left = output.left or (known is not None and known.kind == "left")
        reason = output.reason if known is None else known.reason
        self._hub_problem = Problem(
            kind="hub left" if left else "hub", ranks=(rank,) if rank >= 0 else (), reason=reason
        )
        if rank >= 0 and known is None:
            self._gone[rank] = Problem(
                kind="left" if left else "lost", ranks=(rank,), reason=reason
            )
        self._end_waits(self._hub_problem, lambda waiter: True)
        for view in self._views.values():
            self._deliver(view.hub_gone, rank if known is None else -1, left, reason)

    def _end_waits(self, problem: Problem, concerns: Callable[[_Waiter], bool]) -> None:
        for waiter in self._waiters.values():
            if not waiter.done and concerns(waiter):
                waiter.problem = problem
        self._cond.notify_all()

    # --- watcher ----------------------------------------------------------------------------------------------------

    def _deliver(self, call: Callable[..., Any], *args: Any) -> None:
        self._deliveries.append(lambda: call(*args))

    def post(self, call: Callable[[], None]) -> None:
        """Run ``call`` on the watcher thread."""
        self._deliveries.append(call)
        self._bell.ring()

    def catch_up(self, timeout: float) -> None:
        """Returns when the watcher has dealt with all that has come from the hub, at most after ``timeout`` seconds."""
        caught_up = threading.Event()

        def look() -> None:
            if self._machine.state is not MemberState.CLOSED:
                self._read()  # it may have come while the watcher was at what came before
            self._deliver(caught_up.set)

        if not self.on_watcher and not self._over.is_set():
            self.post(look)
            caught_up.wait(timeout)

    def _answer_status(self, ask: StatusAsk) -> None:
        view = self._views.get(ask.group)
        payload = (
            framing.encode_json({"answered": True, "closed": True})
            if view is None
            else view.status_asked(ask.rank, ask.ident)
        )
        with self._cond, contextlib.suppress(CommunicatorClosed):
            self._command(
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
                for key, mask in selector.select():
                    if key.fileobj is self._bell:
                        self._bell.silence()
                        continue
                    if mask & selectors.EVENT_WRITE:
                        with self._cond:
                            self._flush()
                    if mask & selectors.EVENT_READ:
                        self._read()
                self._run_deliveries()
        except Exception:
            _log.exception("the watcher of rank %d failed", self.rank)
        finally:
            with self._cond:
                self._run(
                    self._machine.handle(
                        Disconnected(now=time.monotonic(), reason="the watcher ended")
                    )
                )
            self._over.set()
            self._run_deliveries()
            selector.close()
            self._sock.close()
            self._bell.close()

    def _read(self) -> None:
        now = time.monotonic()
        event: Received | Disconnected
        try:
            data = self._sock.recv(READ_BYTES)
            closed = "the connection to the hub was closed; its process has probably ended"
            event = Received(now=now, data=data) if data else Disconnected(now=now, reason=closed)
        except OSError as error:
            if is_transient(error):
                return
            event = Disconnected(
                now=now, reason=f"the connection to the hub broke ({error.strerror})"
            )
        with self._cond:
            self._run(self._machine.handle(event))

    def _run_deliveries(self) -> None:
        while self._deliveries:
            call = self._deliveries.popleft()
            try:
                call()
            except Exception:
                _log.exception("a callback of rank %d failed", self.rank)

    def forked(self) -> None:
        """In a forked child: give up the descriptors, so that the parent's death is still seen by the other ranks."""
        self._closed = True
        self._cond = threading.Condition(threading.Lock())
        self._over.set()
        self._selector.close()
        self._sock.close()
        self._bell.close()


def _refusal(refused: Refused, rank: int) -> BootstrapError | PeerDied:
    peer = refused.ranks[0] if len(refused.ranks) == 1 else None
    if refused.code == Refusal.DIED:
        return PeerDied(refused.text, rank=rank, peer=peer)
    if refused.code == Refusal.OVER:
        return JobOver(
            refused.text,
            rank=rank,
            peer=peer,
            hint="each process needs its own rank, and each job its own id or port",
        )
    if refused.code == Refusal.DUPLICATE:
        return RankTaken(refused.text, rank=rank, peer=peer, hint="each process needs its own rank")
    hint = "all ranks need the same nranks" if refused.code == Refusal.NRANKS else None
    return BootstrapError(refused.text, rank=rank, peer=peer, hint=hint)
