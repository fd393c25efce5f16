"""Connecting side of the handshake between agents, on a blocking socket with a deadline."""

from __future__ import annotations

import socket

from miraccl import clock
from miraccl.deadline import Deadline
from miraccl.errors import AuthenticationError, BootstrapError, InvalidUsage, MiracclError
from miraccl.wire.p2p import InitiatorSide, Introduction

#: Pause between two attempts at an address that refuses, and their total time.
RETRY_S, REFUSED_S = 0.05, 3.0


def parse_address(address: str) -> tuple[str, int]:
    """Return (host, port) of ``host:port`` or ``[host]:port``. Raises ``InvalidUsage``."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidUsage(f"cannot connect to {address!r}: it must be host:port")
    return host, int(port)


def dial(
    address: str, secret: bytes, introduction: Introduction, deadline: Deadline
) -> tuple[socket.socket, InitiatorSide]:
    """Connect and prove the secret; return the socket and the handshake with the welcome.

    A target that refuses is tried again until the deadline: it may be restarting.

    Raises:
        AuthenticationError: The target has another secret.
        BootstrapError: It cannot be reached by the deadline.
    """
    host, port = parse_address(address)
    attempts = deadline.within(REFUSED_S)
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=max(deadline.left, 1e-3))
            break
        except OSError as error:
            if attempts.left <= RETRY_S or not isinstance(error, ConnectionRefusedError):
                raise BootstrapError(
                    f"cannot connect to the agent at {address}: {error}"
                ) from error
            clock.sleep(RETRY_S)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        side = InitiatorSide(secret, clock.random_bytes(32), introduction)
        sock.sendall(side.start())
        while side.welcome is None:
            sock.settimeout(max(deadline.left, 1e-3))
            data = sock.recv(4096)
            if not data:
                raise AuthenticationError(
                    f"cannot connect to the agent at {address}: it closed the connection during "
                    "the proof of the secret",
                    hint="all agents of a job have the same secret",
                )
            reply = side.receive(data)
            if reply:
                sock.sendall(reply)
        sock.settimeout(None)
        return sock, side
    except TimeoutError as error:
        sock.close()
        raise BootstrapError(
            f"cannot connect to the agent at {address}: no answer for {deadline.seconds:g} s"
        ) from error
    except OSError as error:
        sock.close()
        if isinstance(error, MiracclError):
            raise
        raise BootstrapError(f"cannot connect to the agent at {address}: {error}") from error
    except MiracclError:
        sock.close()
        raise
