"""Search for a job's hub among addresses.

All addresses are tried at once and repeatedly until the deadline; the first that proves the secret
wins. A port may be closed because rank 0 starts later, or used by a service that is silent or
speaks another protocol. Each address has timers of its own, so none delays the others, and a member
proves itself to exactly one hub.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from miraccl import clock
from miraccl.bootstrap.hub import MAX_SELECT_SECONDS, tune
from miraccl.bootstrap.names import Lookup
from miraccl.errors import AuthenticationError, BootstrapError, as_system_failure
from miraccl.sockets import finish_connect
from miraccl.wire.auth import NONCE_BYTES, make_nonce
from miraccl.wire.bootstrap import Disconnected, HubProved, HubRejected, Received, Send, Start
from miraccl.wire.bootstrap_member import MemberMachine

FIRST_PAUSE, PAUSE_GROWTH, LONGEST_PAUSE = 0.002, 1.6, 0.1  # seconds between attempts
CONNECT_SECONDS, ANSWER_SECONDS = 2.0, 5.0  # limits of an attempt
#: A wrong secret at one address is final unless another address proves itself within this time.
VERDICT_SECONDS = 0.25
SECRET_HINT = (
    "give all ranks the same unique id, or the same MIRACCL_SECRET, MASTER_PORT and run id, which "
    "make the secret; set MASTER_PORT to the number outside of the container where it is mapped"
)
RESOLVE_SECONDS = 1.0  # between resolutions of a name
RESOLVE_POLL = 0.005  # between polls of a resolution


class ControlPlaneUnreachable(BootstrapError):
    """No control plane of this job answered before the deadline."""


@dataclass(kw_only=True)
class _Endpoint:
    family: int
    address: tuple[object, ...]
    name: str
    pause: float = FIRST_PAUSE
    next_try: float = 0.0
    problem: str = "not tried"
    rejected: HubRejected | None = None  # the answer of another job's control plane
    refused_since: float = float("inf")  # since when every connection was refused

    def failed(self, trouble: str, refused: bool = False) -> None:
        # A control plane of another secret or version explains more than what came after it, such
        # as "Connection refused" once that one has ended.
        if self.rejected is None:
            self.problem = trouble
        self.refused_since = min(self.refused_since, clock.monotonic()) if refused else float("inf")


@dataclass(kw_only=True)
class _Attempt:
    endpoint: _Endpoint
    sock: socket.socket
    machine: MemberMachine
    give_up: float
    started: bool = False

    @property
    def timeout_problem(self) -> str:
        """Reason to report when the attempt times out."""
        return "no answer" if self.started else "no connection"


class Dialer:
    """One search for a hub.

    ``targets``: (host, port) in order of preference; hosts may be names. ``deadline``: a time of
    the monotonic clock. ``probing``: a wrong secret or version at an address is not an error, as
    another service may listen there. ``not_before``: times before which socket addresses are not
    tried. ``give_up_after_refusals``: seconds in which every connection is refused, after which the
    search ends early. ``last_nonce``: nonce of a connection that was cut. ``poll`` is called at
    least every ``interval`` seconds and may raise to end the search. Raises ``SystemFailure`` if it
    cannot start.
    """

    def __init__(
        self,
        targets: Sequence[tuple[str, int]],
        *,
        secret: bytes,
        rank: int,
        nranks: int,
        deadline: float,
        probing: bool = False,
        not_before: Mapping[tuple[object, ...], float] | None = None,
        give_up_after_refusals: float = float("inf"),
        last_nonce: bytes = b"",
        interval: float = MAX_SELECT_SECONDS,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        self._targets, self._secret, self._rank, self._nranks = targets, secret, rank, nranks
        self._deadline, self._probing, self._not_before, self._poll = (
            deadline,
            probing,
            not_before or {},
            poll,
        )
        self._give_up_after_refusals, self._last_nonce = give_up_after_refusals, last_nonce
        self._interval = interval
        self._endpoints: dict[tuple[object, ...], _Endpoint] = {}
        self._unresolved: dict[str, str] = dict.fromkeys((host for host, _ in targets), "not tried")
        self._lookups: list[Lookup] = []
        self._resolve_at = 0.0
        self._attempts: list[_Attempt] = []
        self._verdict: tuple[str, HubRejected] | None = None
        self._verdict_at = float("inf")
        self.hub: tuple[object, ...] = ()  # socket address of the hub once it is found
        self.connected = False  # once, to whatever listens there
        with as_system_failure("cannot search for the control plane of the job", rank=rank):
            self._selector = selectors.DefaultSelector()

    def dial(self) -> tuple[socket.socket, MemberMachine]:
        """Return the connection and its machine, which waits for ``Join``.

        Raises ``ControlPlaneUnreachable`` at the deadline with what was tried,
        ``AuthenticationError`` for another secret.
        """
        winner: _Attempt | None = None
        try:
            while winner is None:
                self._poll()
                now = clock.monotonic()
                self._check_verdict(now)
                self._resolve(now)
                self._start_attempts(now)
                winner = self._step()
                if winner is None and self._all_refuse():
                    raise ControlPlaneUnreachable(
                        (
                            "cannot reach the control plane of this job: its process has ended, "
                            "nothing listens there"
                        ),
                        rank=self._rank,
                    )
                if (
                    winner is None and clock.monotonic() >= self._deadline
                ):  # after one round: each address is tried once, whatever the deadline
                    raise self._unreachable()
            self._selector.unregister(winner.sock)
            self._attempts.remove(winner)
            self.hub = winner.endpoint.address
            return winner.sock, winner.machine
        finally:
            for attempt in self._attempts:
                attempt.sock.close()
            self._selector.close()

    @property
    def refused(self) -> bool:
        """True if no address answers and at least one has a host that refuses connections."""
        refused = [e.refused_since < float("inf") for e in self._endpoints.values()]
        tried = all(e.next_try > 0 for e in self._endpoints.values())
        return tried and any(refused) and not self._attempts

    def _unreachable(self) -> BootstrapError:
        """Return the error at the deadline; another secret outweighs all other problems."""
        text = self._explain()
        for endpoint in self._endpoints.values():
            if endpoint.rejected is not None and endpoint.rejected.kind == "secret":
                return AuthenticationError(
                    f"cannot join the job at {endpoint.name}: {endpoint.rejected.reason}; {text}",
                    rank=self._rank,
                    hint=SECRET_HINT,
                )
        return ControlPlaneUnreachable(
            text, rank=self._rank, hint="check that rank 0 runs and that its address is right"
        )

    def _explain(self) -> str:
        for attempt in self._attempts:
            attempt.endpoint.failed(attempt.timeout_problem)
        troubles: dict[str, list[str]] = {}
        for endpoint in self._endpoints.values():
            troubles.setdefault(endpoint.problem, []).append(endpoint.name)
        for host, trouble in self._unresolved.items():
            troubles.setdefault(trouble, []).append(host)
        details = [
            f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}: {t}"
            for t, names in troubles.items()
        ]
        return (
            f"cannot reach the control plane of this job before the deadline: {'; '.join(details)}"
        )

    def _all_refuse(self) -> bool:
        since = max(
            (endpoint.refused_since for endpoint in self._endpoints.values()), default=float("inf")
        )
        return not self._unresolved and clock.monotonic() - since >= self._give_up_after_refusals

    def _check_verdict(self, now: float) -> None:
        verdict = self._verdict
        if verdict is not None and (
            now >= self._verdict_at
            or (not self._attempts and all(e.next_try > 0 for e in self._endpoints.values()))
        ):
            address, rejected = verdict
            if rejected.kind == "secret":
                raise AuthenticationError(
                    f"cannot join the job at {address}: {rejected.reason}",
                    rank=self._rank,
                    hint=SECRET_HINT,
                )
            raise BootstrapError(
                f"cannot join the job at {address}: {rejected.reason}",
                rank=self._rank,
                hint="run the same version of miraccl on all ranks",
            )

    def _resolve(self, now: float) -> None:
        """Look up every name, and again those that are still unknown."""
        if self._unresolved and not self._lookups and now >= self._resolve_at:
            self._resolve_at = now + RESOLVE_SECONDS
            self._lookups = [Lookup(host) for host in self._unresolved]
            self._unresolved |= {lookup.host: lookup.problem for lookup in self._lookups}
        ended = [lookup for lookup in self._lookups if lookup.wait(0)]
        self._lookups = [lookup for lookup in self._lookups if lookup not in ended]
        found = {lookup.host: lookup.infos for lookup in ended if lookup.infos}
        self._unresolved |= {lookup.host: lookup.problem for lookup in ended}
        for host, port in self._targets:
            for family, _, _, _, address in found.get(host, ()):
                name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                key = (address[0], port, *address[2:])
                endpoint = _Endpoint(
                    family=family, address=key, name=name, next_try=self._not_before.get(key, 0.0)
                )
                self._endpoints.setdefault(key, endpoint)
        for host in found:
            del self._unresolved[host]

    def _start_attempts(self, now: float) -> None:
        busy = {id(attempt.endpoint) for attempt in self._attempts}
        for endpoint in self._endpoints.values():
            if id(endpoint) in busy or endpoint.next_try > now:
                continue
            endpoint.next_try = now + endpoint.pause
            endpoint.pause = min(endpoint.pause * PAUSE_GROWTH, LONGEST_PAUSE)
            try:
                sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
            except OSError as error:
                endpoint.failed(error.strerror or str(error))
                continue
            sock.setblocking(False)
            tune(sock)
            problem = sock.connect_ex(endpoint.address)
            if problem not in (0, errno.EINPROGRESS):
                endpoint.failed(os.strerror(problem), problem == errno.ECONNREFUSED)
                sock.close()
                continue
            nonce = make_nonce(self._secret, clock.random_bytes(NONCE_BYTES), self._last_nonce)
            machine = MemberMachine(
                secret=self._secret, rank=self._rank, nranks=self._nranks, nonce=nonce
            )
            attempt = _Attempt(
                endpoint=endpoint, sock=sock, machine=machine, give_up=now + CONNECT_SECONDS
            )
            try:
                self._selector.register(sock, selectors.EVENT_WRITE, attempt)
            except OSError as error:  # no kernel memory for it
                endpoint.failed(error.strerror or str(error))
                sock.close()
                continue
            self._attempts.append(attempt)

    def _step(self) -> _Attempt | None:
        """Wait for the next event, at most until an attempt is due or times out."""
        now = clock.monotonic()
        busy = {id(attempt.endpoint) for attempt in self._attempts}
        times = [self._deadline, self._verdict_at]
        times += [
            endpoint.next_try for endpoint in self._endpoints.values() if id(endpoint) not in busy
        ]
        times += [attempt.give_up for attempt in self._attempts]
        times += (
            [now + RESOLVE_POLL]
            if self._lookups
            else [self._resolve_at]
            if self._unresolved
            else []
        )
        ready = clock.wait_io(
            self._selector.select, min(max(0.0, min(times) - now), self._interval)
        )
        proved = [key.data for key, _ in ready if self._advance(key.data)]
        now = clock.monotonic()
        # A process that was stopped finds the hub's answer and its own timeout: the answer counts.
        for attempt in [
            attempt
            for attempt in self._attempts
            if attempt.give_up <= now and attempt not in proved
        ]:
            self._end(attempt, attempt.timeout_problem)
        return proved[0] if proved else None

    def _advance(self, attempt: _Attempt) -> bool:
        """Advance one attempt; return True when its hub has proved itself."""
        if not attempt.started:
            try:
                finish_connect(attempt.sock)
            except OSError as error:  # reset, for example by a listener that closed
                self._end(attempt, error.strerror or str(error), error.errno == errno.ECONNREFUSED)
                return False
            attempt.started = self.connected = True
            attempt.give_up = clock.monotonic() + ANSWER_SECONDS
            self._selector.modify(attempt.sock, selectors.EVENT_READ, attempt)
            return self._apply(attempt, attempt.machine.handle(Start(now=clock.monotonic())))
        try:
            data = attempt.sock.recv(4096)
        except BlockingIOError:
            return False
        except OSError as error:
            self._end(attempt, error.strerror or str(error))
            return False
        if not data:
            attempt.machine.handle(Disconnected(now=clock.monotonic(), reason="closed"))
            self._end(attempt, "the connection was closed without an answer")
            return False
        return self._apply(
            attempt, attempt.machine.handle(Received(now=clock.monotonic(), data=data))
        )

    def _apply(self, attempt: _Attempt, outputs: Sequence[object]) -> bool:
        proved = False
        for output in outputs:
            if isinstance(output, HubProved):
                proved = True
            elif isinstance(output, Send):
                try:
                    sent = attempt.sock.send(output.data)
                    if sent < len(
                        output.data
                    ):  # less than 100 bytes into an empty buffer: the kernel is out of memory
                        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
                except OSError as error:
                    self._end(attempt, error.strerror or str(error))
                    return False
            elif isinstance(output, HubRejected):
                if output.kind != "stranger" and not self._probing and self._verdict is None:
                    self._verdict, self._verdict_at = (
                        (attempt.endpoint.name, output),
                        clock.monotonic() + VERDICT_SECONDS,
                    )
                self._end(attempt, f"not this job: {output.reason}")
                if output.kind != "stranger":
                    attempt.endpoint.rejected = output
                return False
        return proved

    def _end(self, attempt: _Attempt, trouble: str, refused: bool = False) -> None:
        if attempt in self._attempts:
            attempt.endpoint.failed(trouble, refused)
            attempt.endpoint.next_try = clock.monotonic() + attempt.endpoint.pause
            self._attempts.remove(attempt)
            self._selector.unregister(attempt.sock)
            attempt.sock.close()
