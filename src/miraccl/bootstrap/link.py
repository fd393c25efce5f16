"""Control connection of a rank over TCP: socket, machine and watcher thread.

The link owns the socket, the thread and the standby port at which this rank listens in case it has
to succeed the hub. Only the watcher reads; it wakes blocked calls under the lock and runs callbacks
without it. When the connection to the hub breaks, the watcher looks for the successor
(``failover.py``); calls in progress wait for that, until their own deadlines.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

from miraccl import clock, trace
from miraccl.bootstrap import lifetime
from miraccl.bootstrap.control_link import GRACE_SECONDS, ControlLink, Membership
from miraccl.bootstrap.eventfd import EventFd
from miraccl.bootstrap.failover import HubFailover, LinkClosed, Standby
from miraccl.bootstrap.hub import READ_BYTES, end_sending
from miraccl.errors import (
    BootstrapError,
    CommunicatorClosed,
    PeerDied,
    ProtocolError,
    as_system_failure,
)
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
from miraccl.wire.bootstrap_failover import Outcome
from miraccl.wire.bootstrap_member import MemberMachine
from miraccl.wire.bootstrap_messages import (
    Accepted,
    Gone,
    Goodbye,
    Join,
    JoinRejected,
    RejectCode,
    Rejoin,
    Resumed,
    Welcome,
    pack_gone,
)

_log = trace.logger("bootstrap")
GOODBYE_SECONDS = 1.0
#: Interval at which a rank that waits for the others polls (seconds).
POLL_SECONDS = 0.1


class RankTaken(BootstrapError):
    """The hub has this rank already.

    Either another process has it, or a connection of this process that broke unnoticed.
    """


class JobAlreadyFormed(RankTaken):
    """The hub serves a job that has formed already, with another process as this rank."""


class HubDisconnected(Exception):
    """The hub closed the connection before it accepted the rank; another attempt may succeed."""


class SocketLink(ControlLink):
    """Link over TCP to the hub of a job, and to its successors.

    Takes over a connected socket whose machine waits for ``Join``, unless it raises
    ``SystemFailure``; ``standby`` in any case.
    """

    def __init__(
        self,
        sock: socket.socket,
        machine: MemberMachine,
        *,
        rank: int,
        nranks: int,
        standby: Standby | None = None,
    ) -> None:
        super().__init__(rank=rank, nranks=nranks)
        self._address = _peer_address(sock)
        self._sock, self._machine, self.standby = sock, machine, standby
        self._unsent = bytearray()
        self._rejected: JoinRejected | None = None
        self._hub_lost: HubLost | None = None
        self._failover: HubFailover | None = None
        self._hub_is_silent = False  # it has not answered Rejoin in time
        self._stopped = clock.event()
        self._thread = clock.thread(target=self._watch, name=f"miraccl-watcher-{rank}", daemon=True)
        with (
            as_system_failure("cannot watch the control connection", rank=rank),
            contextlib.ExitStack() as unless_it_runs,
        ):
            if standby is not None:
                unless_it_runs.callback(standby.close)
            self._selector = unless_it_runs.enter_context(selectors.DefaultSelector())
            self._wakeup = EventFd()
            unless_it_runs.callback(self._wakeup.close)
            self._selector.register(self._sock, selectors.EVENT_READ)
            self._selector.register(self._wakeup, selectors.EVENT_READ)
            self._thread.start()
            unless_it_runs.pop_all()
        lifetime.links.add(self)

    # --- rendezvous ---

    def join(self, join: Join, deadline: float, poll: Callable[[], None]) -> Membership:
        """Send ``join`` and wait for all ranks.

        ``deadline``: a time of the monotonic clock; ``poll`` may raise to end the wait. Raises
        ``PeerDied`` (a rank or the hub died), ``BootstrapError`` (a rank is missing or was
        rejected), ``JobAlreadyFormed`` or ``HubDisconnected``.
        """
        with self._cond:
            self._send(join)
            left = GRACE_SECONDS
            while not (self.membership or self._rejected or self._hub_lost) and left > 0:
                poll()
                left = deadline + GRACE_SECONDS - clock.monotonic()
                self._cond.wait(min(max(0.0, left), POLL_SECONDS))
            if self.membership is not None:
                return self.membership
            rejected, lost = self._rejected, self._hub_lost
        self.close("the rendezvous failed")
        if rejected is not None:
            raise _rejection_error(rejected, self.rank)
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

    # --- contract ---

    @property
    def hub_name(self) -> str:
        rank = self.membership.hub_rank if self.membership is not None else 0
        owner = f"rank {rank}'s" if rank >= 0 else "the launcher's"
        return f"{owner} control plane at {self._address}"

    @property
    def on_watcher(self) -> bool:
        return self._thread is threading.current_thread()

    def close(self, reason: str) -> None:
        """Say goodbye, wait for the hub to hang up, end the watcher."""
        with self._cond:
            if not self._closed:
                self._closed = True
                if self._machine.state is not MemberState.CLOSED:
                    self._send(Goodbye(reason=reason))
        self._wakeup.notify()
        if self.on_watcher:
            return
        if not self._stopped.wait(GOODBYE_SECONDS):
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(GOODBYE_SECONDS)

    def drain(self, timeout: float) -> None:
        caught_up = clock.event()

        def read() -> None:
            if self._machine.state is not MemberState.CLOSED:
                self._read()  # it may have arrived while the watcher ran earlier callbacks
            self._queue_callback(caught_up.set)

        if not self.on_watcher and not self._stopped.is_set():
            self.run_on_watcher(read)
            caught_up.wait(timeout)

    def _wake_watcher(self) -> None:
        self._wakeup.notify()

    def _transmit(self, message: Any) -> None:
        if self._failover is None or self._machine.state is MemberState.UP:
            self._send(message)

    # --- machine ---

    def _send(self, message: Any) -> None:
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
                self._lost_hub(output)
            elif isinstance(output, Drop):
                continue  # the watcher sees that the machine is closed
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
        if isinstance(message, Welcome):
            self._welcomed(message)
        elif isinstance(message, JoinRejected):
            self._rejected = message
        elif not isinstance(message, Accepted):
            super()._handle_message(message)
        self._cond.notify_all()

    def _welcomed(self, message: Welcome) -> None:
        try:
            members = tuple(framing.decode(member, {Join.KIND: Join}) for member in message.members)
        except ProtocolError:
            members = ()
        if len(members) != self.nranks:
            text = f"{self.hub_name} sent a malformed list of ranks"
            self._rejected = JoinRejected(code=RejectCode.CLOSED, text=text, ranks=())
            return
        holders = [rank for rank, member in enumerate(members) if member.token == message.hub_token]
        self.membership = Membership(members=members, hub_rank=holders[0] if holders else -1)

    def _resumed(self, message: Resumed) -> None:
        assert self._failover is not None
        self._failover.handle(Outcome.RESUMED)
        self._failover = None
        super()._resumed(message)

    # --- loss of the hub ---

    def _lost_hub(self, output: HubLost) -> None:
        """Record the loss; the watcher then searches for the successor. Needs the lock."""
        self._hub_lost = output
        self._cond.notify_all()
        if self.membership is None or self._closed:
            return
        if self._failover is not None and self._rejected is not None:
            self._failover.handle(Outcome.REJECTED, self._rejected.text)
        elif self._failover is not None and self._hub_is_silent:
            self._failover.handle(Outcome.SILENT, output.reason)
        else:
            self._count_hub_process_as_gone(output)
            if self._failover is None:
                self._failover = HubFailover(self, output)
            else:
                self._failover.handle(Outcome.LOST, output.reason)
        self._rejected, self._hub_is_silent = None, False

    def _count_hub_process_as_gone(self, lost: HubLost) -> None:
        """The ranks of a hub's process die with it, unless it closed the hub in good order."""
        assert self.membership is not None
        members, hub = self.membership.members, self.membership.hub_rank
        if lost.left or hub < 0 or members[hub].token == members[self.rank].token:
            return
        for rank, member in enumerate(members):
            if member.token == members[hub].token:
                self._rank_gone(Gone(rank=rank, left=False, reason=lost.reason))

    def departed(self) -> list[Gone]:
        """Ranks that are gone, for the failover."""
        return list(self._gone.values())

    def poll(self) -> None:
        """Run the callbacks, for the failover; raises ``LinkClosed``."""
        self._run_callbacks()
        if self._closed:
            raise LinkClosed

    def _find_successor(self) -> bool:
        """Connect to the successor of the hub, or become it. False: there is none, or the end."""
        failover = self._failover
        if failover is None or self._closed:
            return False
        try:
            found = failover.run()
        except LinkClosed:
            return False
        with self._cond:
            if self._closed:
                return False
            if found is None:
                self._control_plane_lost(failover.left, failover.reason)
                return False
            sock, machine, rank = found
            self._selector.unregister(self._sock)
            self._sock.close()
            self._sock, self._machine, self._address = sock, machine, _peer_address(sock)
            self._unsent.clear()
            self._selector.register(self._sock, selectors.EVENT_READ)
            assert self.membership is not None
            self.membership = Membership(members=self.membership.members, hub_rank=rank)
            token = self.membership.members[self.rank].token
            self._send(Rejoin(token=token, **pack_gone(self._gone.values())))
        return True

    # --- watcher ---

    def _watch(self) -> None:
        try:
            self._serve()
            while self._find_successor():
                self._serve()
        except Exception:
            _log.exception("the watcher of rank %d failed", self.rank)
        finally:
            self._end()

    def _serve(self) -> None:
        """Handle the connection and the callbacks until the machine is closed."""
        while self._machine.state is not MemberState.CLOSED:
            self._selector.modify(
                self._sock,
                selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0),
            )
            for key, mask in clock.wait_io(self._selector.select, self._rejoin_time_left()):
                if key.fileobj is self._wakeup:
                    self._wakeup.clear()
                    continue
                if mask & selectors.EVENT_WRITE:
                    with self._cond:
                        self._flush()
                if mask & selectors.EVENT_READ:
                    self._read()
            if self._rejoin_time_left() == 0:
                self._hub_is_silent = True
                self._disconnected("the new control plane did not answer")
            self._run_callbacks()

    def _rejoin_time_left(self) -> float | None:
        if self._failover is None or self._failover.rejoin_by == float("inf"):
            return None
        return max(0.0, self._failover.rejoin_by - clock.monotonic())

    def _disconnected(self, reason: str) -> None:
        with self._cond:
            self._apply(self._machine.handle(Disconnected(now=clock.monotonic(), reason=reason)))

    def _read(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except OSError as error:
            if not is_transient(error):
                self._disconnected(f"the control connection broke ({error.strerror})")
            return
        if not data:
            self._disconnected("the control connection was closed; its process has probably ended")
            return
        with self._cond:
            self._apply(self._machine.handle(Received(now=clock.monotonic(), data=data)))

    def _end(self) -> None:
        with self._cond:
            failed = not self._closed and self.membership is not None
            if failed and self._hub_failure is None:  # the watcher itself failed
                self._control_plane_lost(False, "the watcher ended")
            self._failover = None
            self._apply(
                self._machine.handle(
                    Disconnected(now=clock.monotonic(), reason="the watcher ended")
                )
            )
        self._stopped.set()
        self._run_callbacks()
        self._selector.close()
        self._sock.close()
        self._wakeup.close()
        if self.standby is not None:
            self.standby.close()

    def forked(self) -> None:
        """Close the descriptors in a forked child, so that the parent's death is still seen."""
        self._closed = True
        self._cond = clock.condition(threading.Lock())
        self._stopped.set()
        self._selector.close()
        self._sock.close()
        self._wakeup.close()
        if self.standby is not None:
            self.standby.close()


def _peer_address(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:  # the peer has hung up already
        return "an unknown address"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _rejection_error(rejected: JoinRejected, rank: int) -> BootstrapError | PeerDied:
    peer = rejected.ranks[0] if len(rejected.ranks) == 1 else None
    if rejected.code == RejectCode.DIED:
        return PeerDied(rejected.text, rank=rank, peer=peer)
    if rejected.code == RejectCode.ALREADY_FORMED:
        return JobAlreadyFormed(
            rejected.text,
            rank=rank,
            peer=peer,
            hint="a new job needs an id or a port of its own, or all ranks of the last one "
            "to have left; "
            "shrink() goes on without ranks that died",
        )
    if rejected.code == RejectCode.DUPLICATE:
        return RankTaken(
            rejected.text, rank=rank, peer=peer, hint="each process needs its own rank"
        )
    hint = "all ranks need the same nranks" if rejected.code == RejectCode.NRANKS else None
    return BootstrapError(rejected.text, rank=rank, peer=peer, hint=hint)
