"""Failover of one rank to the successor of its hub.

Drives ``wire.bootstrap_failover.SuccessorSearch`` on the watcher thread of a link: connects to the
candidates, or starts the successor in this process.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Protocol

from miraccl import clock, trace
from miraccl.bootstrap.control_link import Membership
from miraccl.bootstrap.dial import ControlPlaneUnreachable, Dialer
from miraccl.bootstrap.hub import HubServer, listen
from miraccl.bootstrap.interfaces import is_loopback
from miraccl.errors import MiracclError, SystemFailure
from miraccl.wire.bootstrap import HubLost
from miraccl.wire.bootstrap_failover import (
    Action,
    Dial,
    GiveUp,
    Outcome,
    SuccessorSearch,
    TakeOver,
    candidates,
)
from miraccl.wire.bootstrap_hub import REJOIN_SECONDS, HubMachine
from miraccl.wire.bootstrap_member import MemberMachine
from miraccl.wire.bootstrap_messages import Gone, Join

_log = trace.logger("bootstrap")
#: A candidate to which no connection is made within this time (seconds) counts as unreachable.
CONNECT_SECONDS = 3.0
#: A candidate that is connected and has not proved itself within this time (seconds) is passed
#: over. Its watcher may be kept from running, by a thread that holds the GIL for example.
PROOF_SECONDS = 10.0
POLL_SECONDS = 0.05


class LinkClosed(Exception):
    """The link was closed while it looked for the successor of its hub."""


class Standby:
    """Listening socket of a rank that may have to succeed its hub, and the secret of the job.

    ``port`` 0: this host has no descriptor left; the rank is not a candidate then.
    """

    def __init__(self, secret: bytes, *, loopback: str = "") -> None:
        """``loopback``: address to listen on where all ranks of the job use loopback."""
        self.secret = secret
        self._sock: socket.socket | None = None
        self.port = 0
        with contextlib.suppress(OSError):
            self._sock = listen(loopback, 0)
            self.port = int(self._sock.getsockname()[1])

    def take(self) -> socket.socket | None:
        """Hand over the socket; None if there is none."""
        sock, self._sock = self._sock, None
        return sock

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()


class FailoverLink(Protocol):
    """A link as its failover uses it."""

    rank: int
    nranks: int
    membership: Membership | None
    standby: Standby | None

    def departed(self) -> list[Gone]: ...

    def poll(self) -> None:
        """Run the callbacks; raises ``LinkClosed``."""


class HubFailover:
    """One failover, from the loss of a hub until the control plane has resumed.

    ``lost``: the loss. ``rejoin_by``: time until which the hub that this rank has joined has to
    resume. ``reason``: why there is no successor, once ``run`` has returned None.
    """

    def __init__(self, link: FailoverLink, lost: HubLost) -> None:
        self._link, self.left, self.reason = link, lost.left, lost.reason
        self.rejoin_by = float("inf")
        self._hub: HubServer | None = None
        assert link.membership is not None
        self._members = link.membership.members
        gone = [each.rank for each in link.departed()]
        ports, hosts = [m.standby_port for m in self._members], [m.network for m in self._members]
        self._search = SuccessorSearch(rank=link.rank, candidates=candidates(ports, hosts, gone))
        self._action: Action | None = self._search.start()
        _log.info("rank %d lost the control plane: %s", link.rank, lost.reason)

    def handle(self, outcome: Outcome, detail: str = "") -> None:
        """Take an outcome: of the connection that ``run`` has returned, or of ``run`` itself."""
        serving = self._hub is not None
        self._action = self._search.handle(outcome, detail)
        if serving and self._action is not None:
            self._close_hub()

    def run(self) -> tuple[socket.socket, MemberMachine, int] | None:
        """Return a connection to the new hub, its machine and its rank; None if there is none.

        The machine waits for ``Rejoin``. Raises ``LinkClosed``.
        """
        try:
            while True:
                self._link.poll()
                action = self._action
                if action is None or isinstance(action, GiveUp):
                    if action is not None and action.reason:
                        self.reason = f"{self.reason}; no successor: {action.reason}"
                    return None
                if isinstance(action, TakeOver) and not self._take_over():
                    continue
                if (found := self._dial(action)) is not None:
                    self.rejoin_by = clock.monotonic() + REJOIN_SECONDS + PROOF_SECONDS
                    return *found, action.rank
        except LinkClosed:
            self._close_hub()
            raise

    def _dial(self, action: Dial | TakeOver) -> tuple[socket.socket, MemberMachine] | None:
        """Connect to a candidate; None if that failed, which has been handled then."""
        begun = clock.monotonic()

        def poll() -> None:
            self._link.poll()
            if dialer.refused:
                raise ControlPlaneUnreachable("its process has ended")
            if not dialer.connected and clock.monotonic() - begun > CONNECT_SECONDS:
                raise ControlPlaneUnreachable(f"no connection within {CONNECT_SECONDS:g} s")

        assert self._link.standby is not None
        dialer = Dialer(
            _targets(self._members[action.rank], self._members[self._link.rank]),
            secret=self._link.standby.secret,
            rank=self._link.rank,
            nranks=self._link.nranks,
            deadline=begun + PROOF_SECONDS,
            interval=POLL_SECONDS,
            poll=poll,
        )
        try:
            found = dialer.dial()
        except ControlPlaneUnreachable as error:
            if dialer.refused:
                self.handle(Outcome.REFUSED)
            elif dialer.connected:
                self.handle(Outcome.SILENT, f"no answer within {PROOF_SECONDS:g} s")
            else:
                self.handle(Outcome.UNREACHABLE, error.message)
        except MiracclError as error:  # another service uses the port
            self.handle(Outcome.REFUSED, error.message)
        else:
            self.handle(Outcome.PROVED)
            return found
        return None

    def _take_over(self) -> bool:
        """Start the successor in this process, if that has not been done yet."""
        if self._hub is not None:
            return True
        rank, members = self._link.rank, self._members
        assert self._link.standby is not None
        listener = self._link.standby.take()
        machine = HubMachine.successor(
            secret=self._link.standby.secret,
            token=members[rank].token,
            tokens=[member.token for member in members],
            gone=self._link.departed(),
            now=clock.monotonic(),
        )
        try:
            if listener is None:
                raise SystemFailure("it has no standby port")
            standby = {r: _targets(m, members[rank]) for r, m in enumerate(members)}
            self._hub = HubServer([listener], machine, standby=standby)
        except SystemFailure as error:
            self.handle(Outcome.REJECTED, error.message)
            return False
        _log.info("rank %d takes over the control plane", rank)
        return True

    def _close_hub(self) -> None:
        if self._hub is not None:
            self._hub.close("it could not take over the control plane")
            self._hub = None


def _targets(member: Join, own: Join) -> list[tuple[str, int]]:
    """Addresses at which a candidate listens, as seen from the rank with the ``Join`` ``own``."""
    hosts = [host for host in member.addresses if not is_loopback(host)]
    if member.network == own.network:
        hosts = ["127.0.0.1", "::1", *hosts]
    return [(host, member.standby_port) for host in hosts]
