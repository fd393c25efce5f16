"""Outgoing connections of an agent: dials the target and opens the path to its memory."""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from miraccl import clock, params, trace
from miraccl.deadline import Deadline
from miraccl.errors import AgentLost, BootstrapError, InvalidUsage, MiracclError, SystemFailure
from miraccl.host import network_fingerprint
from miraccl.p2p.dial import dial
from miraccl.p2p.local_path import LocalPath
from miraccl.p2p.stream_path import StreamPath
from miraccl.p2p.transfer import Background
from miraccl.wire.auth import SECRET_BYTES
from miraccl.wire.p2p import AgentWelcome, Introduction, protocol_secret

log = trace.logger("p2p")


class PeerPath(Protocol):
    """Path to the memory of another agent (``local_path``, ``stream_path``).

    Attributes:
        name: Name of the other agent.
        lost: Reason why it can no longer be reached, or None.
    """

    name: str
    lost: MiracclError | None

    def sockets(self) -> Sequence[socket.socket]:
        """Return the connections whose end shows that the agent has ended."""

    def uses(self, sock: socket.socket) -> bool:
        """Return False for a connection that this side has replaced."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Name, random identifier and address of an agent, and where it runs.

    Attributes:
        host: Fingerprint of the network namespace and host.
    """

    name: str
    agent: bytes
    address: str
    host: str = field(default_factory=network_fingerprint)
    pid: int = field(default_factory=os.getpid)


class Connector:
    """Connecting side of an agent.

    Args:
        secret: Secret of the protocol.
        background: Thread for transfers within the host.
        trusting: Memory of agents of this host may be mapped.
        timeout: Seconds, for paths over TCP.
        watch: Called with every new connection of a path that replaces lost ones.
    """

    def __init__(
        self,
        identity: Identity,
        secret: bytes,
        *,
        background: Background,
        trusting: bool,
        timeout: float,
        watch: Callable[[PeerPath, socket.socket], None],
    ) -> None:
        self._identity, self._secret, self._background = identity, secret, background
        self._trusting, self._timeout, self._watch = trusting, timeout, watch

    def connect(self, address: str, deadline: Deadline) -> tuple[AgentWelcome, PeerPath]:
        """Connect to an agent; errors as for ``Agent.connect``."""
        connection = int.from_bytes(clock.random_bytes(7), "little")
        sock, side = dial(address, self._secret, self._introduction(connection, 0), deadline)
        assert side.welcome is not None
        local = self._open_local(side.welcome)
        try:
            sock.sendall(side.ready(local is not None))
            if local is not None:
                local.sock = sock
                return side.welcome, local
            sockets = [sock, *self._dial_more(address, connection, 1, deadline)]
            return side.welcome, self._open_streams(address, connection, side.welcome, sockets)
        except (OSError, MiracclError) as error:
            sock.close()
            if isinstance(error, MiracclError):
                raise
            raise BootstrapError(f"cannot connect to {address}: {error}") from error

    def _introduction(self, connection: int, stream: int, attempt: int = 0) -> Introduction:
        return Introduction(
            name=self._identity.name,
            agent=self._identity.agent,
            address=self._identity.address,
            host=self._identity.host,
            pid=self._identity.pid,
            connection=connection,
            stream=stream,
            attempt=attempt,
        )

    def _open_local(self, welcome: AgentWelcome) -> LocalPath | None:
        """Return the path to an agent of this host, None if its memory cannot be reached."""
        if not welcome.pair_inode or welcome.host != self._identity.host or not self._trusting:
            return None
        try:
            return LocalPath(welcome, self._background)
        except SystemFailure as error:
            log.info("agent %s is not mapped: %s", welcome.name, error)
            return None

    def _dial_more(
        self,
        address: str,
        connection: int,
        first: int,
        deadline: Deadline,
        agent: bytes = b"",
        attempt: int = 0,
    ) -> list[socket.socket]:
        """Open further streams of a connection.

        Args:
            agent: Identifier that the target must have; empty for any.
        """
        sockets: list[socket.socket] = []
        for stream in range(first, max(1, params.P2P_STREAMS.read())):
            introduction = self._introduction(connection, stream, attempt)
            sock, side = dial(address, self._secret, introduction, deadline)
            sockets.append(sock)
            assert side.welcome is not None
            if agent and side.welcome.agent != agent:
                for opened in sockets:
                    opened.close()
                raise AgentLost(
                    f"agent {side.welcome.name!r} at {address} has restarted",
                    agent=side.welcome.name,
                    reason="other agent",
                    hint="connect again, and get new descriptors",
                )
            sock.sendall(side.ready(False))
        return sockets

    def _open_streams(
        self, address: str, connection: int, welcome: AgentWelcome, sockets: list[socket.socket]
    ) -> StreamPath:
        attempts = itertools.count(1)

        def redial(deadline: Deadline) -> list[socket.socket]:
            attempt = next(attempts)
            opened = self._dial_more(address, connection, 0, deadline, welcome.agent, attempt)
            for sock in opened:
                self._watch(path, sock)
            return opened

        path = StreamPath(
            welcome.name,
            sockets,
            timeout=self._timeout,
            label=self._identity.name,
            redial=redial,
        )
        return path


def agent_secret(secret: bytes | str | None) -> bytes:
    """Return the secret of the protocol; a text is hashed, as MIRACCL_SECRET is.

    Raises:
        InvalidUsage: There is none, or bytes of another length.
    """
    given = params.SECRET.read() if secret is None else secret
    if isinstance(given, str) and given:
        return protocol_secret(hashlib.sha256(given.encode()).digest())
    if not isinstance(given, bytes) or len(given) != SECRET_BYTES:
        raise InvalidUsage(
            f"cannot make an agent: the secret must be a text or {SECRET_BYTES} bytes",
            hint="pass secret=, or set MIRACCL_SECRET",
        )
    return protocol_secret(given)
