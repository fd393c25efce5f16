"""Join of a job by its unique id: find the hub, prove the secret, wait for all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from miraccl import clock, params
from miraccl.bootstrap.dial import ControlPlaneUnreachable, Dialer
from miraccl.bootstrap.failover import Standby
from miraccl.bootstrap.interfaces import choose_addresses, is_loopback, rail_addresses
from miraccl.bootstrap.link import HubDisconnected, JobAlreadyFormed, RankTaken, SocketLink
from miraccl.bootstrap.session import LinkSession, single_rank_session
from miraccl.deadline import Deadline
from miraccl.errors import BootstrapError, MiracclError, SystemFailure
from miraccl.host import host_fingerprint, network_fingerprint, process_token
from miraccl.wire.auth import MAX_RANKS, VERSION
from miraccl.wire.bootstrap_messages import Join

if TYPE_CHECKING:
    from miraccl.bootstrap.control_link import Membership
    from miraccl.bootstrap.hub import HubServer
    from miraccl.bootstrap.unique_id import UniqueId
    from miraccl.wire.bootstrap_member import MemberMachine

#: Seconds before the hub of a job that has formed is tried again, when ports are probed.
FORMED_PAUSE = 0.1
#: Seconds from a transient problem (the hub hung up, no descriptors left) to the next attempt.
RETRY_PAUSE = 0.02
#: A hub that hung up and whose port refuses connections for this time (seconds) has ended.
ENDED_SECONDS = 1.0


def _no_op() -> None:
    pass


def connect(
    unique_id: UniqueId,
    rank: int,
    nranks: int,
    timeout: float | Deadline | None = None,
    *,
    session_timeout: float | None = None,
    dial_timeout: float | None = None,
    hub: HubServer | None = None,
    thread_ids: Sequence[int] = (),
    poll: Callable[[], None] = _no_op,
) -> LinkSession:
    """Join the job of ``unique_id`` as ``rank``; return when all ranks have joined.

    ``timeout``: seconds, or the deadline of an enclosing operation; default
    MIRACCL_BOOTSTRAP_TIMEOUT. ``session_timeout`` (default MIRACCL_TIMEOUT): deadline of the
    session's later calls. ``dial_timeout`` (default ``timeout``): time to find the hub. ``hub``: a
    hub for the session to keep. ``poll`` is called every so often; an exception that it raises ends
    the attempt. Ranks join in any order, also before rank 0 listens.

    Raises ``BootstrapError`` (names missing ranks; a rank number used twice; different nranks;
    another version), ``AuthenticationError`` (wrong secret) or ``PeerDied`` (a rank died before all
    had joined).
    """
    _check_rank(rank, nranks)
    if unique_id.version != VERSION:
        raise BootstrapError(
            f"cannot join the job: its unique id has protocol version {unique_id.version}, "
            f"this is version {VERSION}",
            rank=rank,
            hint="run the same version of miraccl on all ranks",
        )
    return join_job(
        _targets(unique_id),
        secret=unique_id.secret,
        rank=rank,
        nranks=nranks,
        timeout=timeout,
        session_timeout=session_timeout,
        dial_timeout=dial_timeout,
        hub=hub,
        thread_ids=thread_ids,
        poll=poll,
    )


def _check_rank(rank: int, nranks: int) -> None:
    if nranks > MAX_RANKS:
        raise BootstrapError(
            f"cannot join a job with nranks={nranks}: a job has at most {MAX_RANKS} ranks",
            rank=rank,
        )
    if not 0 <= rank < nranks:
        raise BootstrapError(
            f"cannot join as rank {rank}: it is out of range for nranks={nranks}",
            rank=rank,
            hint="ranks are 0..nranks-1",
        )


def _targets(unique_id: UniqueId) -> list[tuple[str, int]]:
    """Return the addresses to try.

    Loopback comes first on the host where the id was made, and is left out on other hosts.
    """
    here = unique_id.host in ("", network_fingerprint())
    local = [address for address in unique_id.addresses if is_loopback(address[0])]
    remote = [address for address in unique_id.addresses if not is_loopback(address[0])]
    targets = local + remote if here else remote
    if not targets:
        raise BootstrapError(
            (
                "cannot join the job: its unique id was made on another host and has only "
                "loopback addresses"
            ),
            hint="the process that makes the id needs a network interface, see SOCKET_IFNAME",
        )
    return targets


def join_job(
    targets: Sequence[tuple[str, int]],
    *,
    secret: bytes,
    rank: int,
    nranks: int,
    timeout: float | Deadline | None = None,
    session_timeout: float | None = None,
    dial_timeout: float | None = None,
    probing: bool = False,
    hub: HubServer | None = None,
    route_to: str | None = None,
    thread_ids: Sequence[int] = (),
    poll: Callable[[], None] = _no_op,
) -> LinkSession:
    """Join a job at one of ``targets``, a list of (host, port); see ``Dialer`` for ``probing``.

    ``route_to``: host whose route decides which address this rank announces, default the first of
    ``targets`` that is not loopback. Other arguments and errors as ``connect``.
    """
    _check_rank(rank, nranks)
    timeout = params.BOOTSTRAP_TIMEOUT.read() if timeout is None else timeout
    session_timeout = params.TIMEOUT.read() if session_timeout is None else session_timeout
    if nranks == 1 and hub is None:
        return single_rank_session(session_timeout)
    deadline = Deadline.after(timeout)
    hosts = [route_to] if route_to else [host for host, _ in targets]
    search = _JoinAttempts(
        targets=targets,
        secret=secret,
        rank=rank,
        nranks=nranks,
        deadline=deadline,
        dial_deadline=deadline.at if dial_timeout is None else deadline.within(dial_timeout).at,
        probing=probing,
        remote=next((host for host in hosts if not is_loopback(host)), None),
        poll=poll,
    )
    link, membership = search.run()
    session = LinkSession(
        link=link,
        membership=membership,
        ranks=tuple(range(nranks)),
        rank=rank,
        timeout=session_timeout,
        hub=hub,
        thread_ids=thread_ids,
    )
    session.data_key = hashlib.sha256(b"miraccl data" + secret).digest()
    return session


@dataclass(kw_only=True)
class _JoinAttempts:
    """Repeated attempts of one rank to join its job.

    Transient problems (a hub that hangs up before it accepted the rank, a lost connection, a host
    without descriptors) are retried until ``dial_deadline``; the error then names the last one. A
    hub that hung up and no longer listens has ended, except when ports are probed: there one job
    may follow another.
    """

    targets: Sequence[tuple[str, int]]
    secret: bytes
    rank: int
    nranks: int
    deadline: Deadline
    dial_deadline: float
    probing: bool
    remote: str | None
    poll: Callable[[], None]
    transient_problem: str = ""
    hung_up: bool = False
    last_nonce: bytes = b""  # the nonce of the connection that was cut
    not_before: dict[tuple[object, ...], float] = field(default_factory=dict)

    def run(self) -> tuple[SocketLink, Membership]:
        formed: JobAlreadyFormed | None = None
        while True:
            hub: tuple[object, ...] = ()
            problem: MiracclError
            try:
                dialer = self._dialer()
                sock, machine = dialer.dial()
                hub = dialer.hub
                return self._join_hub(sock, machine)
            except ControlPlaneUnreachable as error:
                raise formed or self._with_transient_problem(error) from None
            except RankTaken as error:
                if not (self.probing and isinstance(error, JobAlreadyFormed)):
                    raise self._with_transient_problem(error) from None
                # An earlier job of this port and secret still runs; ours may appear at another
                # port, or later at this one.
                formed, self.not_before[hub] = error, clock.monotonic() + FORMED_PAUSE
                continue
            except HubDisconnected as error:
                self.hung_up, self.last_nonce = True, machine.nonce
                self.transient_problem = (
                    f"the control plane hung up before it had accepted this rank ({error})"
                )
                problem = ControlPlaneUnreachable(self.transient_problem, rank=self.rank)
            except SystemFailure as error:
                self.transient_problem, problem = error.message, error
            left = self.dial_deadline - clock.monotonic()
            if left <= 0:
                raise formed or problem
            clock.sleep(min(RETRY_PAUSE, left))

    def _with_transient_problem(self, error: BootstrapError) -> BootstrapError:
        if self.transient_problem:
            error.hint = f"before that, {self.transient_problem}"
        return error

    def _dialer(self) -> Dialer:
        return Dialer(
            self.targets,
            secret=self.secret,
            rank=self.rank,
            nranks=self.nranks,
            deadline=self.dial_deadline,
            probing=self.probing,
            not_before=self.not_before,
            last_nonce=self.last_nonce,
            give_up_after_refusals=ENDED_SECONDS
            if self.hung_up and not self.probing
            else float("inf"),
            poll=self.poll,
        )

    def _loopback(self, sock: socket.socket) -> str:
        """Return the hub's address if all ranks of the job use loopback, else an empty text.

        Such ranks need no standby port that other hosts can reach.
        """
        with contextlib.suppress(OSError):  # the hub has hung up
            return str(sock.getpeername()[0]) if self.remote is None else ""
        return ""

    def _join_hub(
        self, sock: socket.socket, machine: MemberMachine
    ) -> tuple[SocketLink, Membership]:
        standby = Standby(self.secret, loopback=self._loopback(sock))
        try:  # until the link owns the sockets
            join = _join(sock, self.remote, self.deadline, standby.port)
            link = SocketLink(sock, machine, rank=self.rank, nranks=self.nranks, standby=standby)
        except BaseException:
            standby.close()
            sock.close()
            raise
        try:
            return link, link.join(join, self.deadline.at, self.poll)
        except BaseException:
            link.close("the rendezvous failed")
            raise


def _join(
    sock: socket.socket, remote: str | None, deadline: Deadline, standby_port: int = 0
) -> Join:
    """Return the ``Join`` of this rank.

    It announces the address that leads to the hub, or to the hub's own network. Raises
    ``HubDisconnected`` if the peer has closed the connection.
    """
    try:
        names = sock.getsockname(), sock.getpeername()
    except OSError as error:
        raise HubDisconnected(error.strerror or str(error)) from None
    local, hub = (str(name[0]).removeprefix("::ffff:").partition("%")[0] for name in names)
    addresses, loopback = choose_addresses(remote if is_loopback(local) else hub)
    return Join(
        host=host_fingerprint(),
        network=network_fingerprint(),
        token=process_token(),
        pid=os.getpid(),
        addresses=(*addresses, *rail_addresses(addresses)),
        loopback=loopback,
        timeout_total=deadline.seconds,
        timeout_left=max(0.001, deadline.left),
        standby_port=standby_port,
    )
