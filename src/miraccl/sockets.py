"""Non-blocking sockets: completion of a connect and classification of transient errors."""

from __future__ import annotations

import errno
import os
import socket

from miraccl import clock

NO_MEMORY_PAUSE_S = 0.01  # pause after ENOBUFS or ENOMEM


def finish_connect(sock: socket.socket) -> None:
    """Complete a non-blocking connect once the socket is writable.

    Raises:
        OSError: The connection failed, or the socket is connected to itself.
    """
    problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise OSError(problem, os.strerror(problem))
    # TCP simultaneous open: without a listener the kernel may pick the target port as the local one,
    # and the socket connects to itself.
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
