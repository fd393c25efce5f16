"""Non-blocking sockets: completion of a connect and classification of transient errors."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Callable
from typing import TypeVar

from miraccl import clock
from miraccl.params import PortRange

T = TypeVar("T")

NO_MEMORY_PAUSE_S = 0.01  # pause after ENOBUFS or ENOMEM


def finish_connect(sock: socket.socket) -> None:
    """Complete a non-blocking connect once the socket is writable.

    Raises:
        OSError: The connection failed, or the socket is connected to itself.
    """
    problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise OSError(problem, os.strerror(problem))
    # TCP simultaneous open: without a listener the kernel may pick the target port as the local
    # one, and the socket connects to itself.
    if sock.getsockname() == sock.getpeername():
        raise OSError(errno.ECONNREFUSED, "connected to itself")


def is_transient(error: OSError) -> bool:
    """Return True if a send or receive on a live socket can be repeated after ``error``.

    Pauses for ``NO_MEMORY_PAUSE_S`` after an out-of-memory error. A transient error has no deadline
    of its own: the caller that awaits the outcome has one.
    """
    if error.errno in (errno.ENOBUFS, errno.ENOMEM):
        # epoll keeps reporting such a socket as ready, so the caller would spin without a pause.
        clock.sleep(NO_MEMORY_PAUSE_S)
        return True
    return isinstance(error, BlockingIOError | InterruptedError)


def open_in_range(open_at: Callable[[int], T], ports: PortRange) -> T:
    """Return ``open_at(port)`` for the first free port of a range.

    Args:
        open_at: Binds, and listens; raises ``OSError`` with EADDRINUSE where the port is in use.
        ports: Value of NET_PORT_RANGE.

    Raises:
        OSError: EADDRINUSE if no port of the range is free, or another error of ``open_at``.
    """
    for port in range(ports.first, ports.last + 1):
        try:
            return open_at(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(
        errno.EADDRINUSE,
        f"all ports of MIRACCL_NET_PORT_RANGE={ports} are in use; each rank of a host needs several"
        if ports.first
        else "the kernel has no free port",
    )


SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B  # linux/sockios.h


def local_networks() -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Return the networks to which interfaces of this host are attached (Linux); first addresses
    only.
    """
    found: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", os.fsencode(name)[:15])
            with contextlib.suppress(OSError, ValueError):
                address = fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24]
                mask = fcntl.ioctl(probe, SIOCGIFNETMASK, request)[20:24]
                text = f"{socket.inet_ntoa(address)}/{socket.inet_ntoa(mask)}"
                found.append(ipaddress.IPv4Network(text, strict=False))
    with contextlib.suppress(OSError, ValueError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, _, prefix, *_ = line.split()
            pair = int(digits, 16), int(prefix, 16)
            found.append(ipaddress.IPv6Network(pair, strict=False))
    return found
