"""Non-blocking sockets: how a call that has begun ends, and one that the kernel had no memory for."""

from __future__ import annotations

import errno
import os
import socket
import time

NO_MEMORY_PAUSE_S = 0.01


def finish_connect(sock: socket.socket) -> None:
    """For a socket that has become ready for writing. Raises ``OSError`` where it is not connected to somebody else."""
    problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise OSError(problem, os.strerror(problem))
    if (
        sock.getsockname() == sock.getpeername()
    ):  # TCP's simultaneous open: nobody listens, and the kernel took the same port for the call
        raise OSError(errno.ECONNREFUSED, "connected to itself")


def is_transient(error: OSError) -> bool:
    """Whether a send or receive can be made again, on a socket that lives. Where the kernel had no memory for it, that is after a pause, as
    epoll calls such a socket ready all the while. Who waits for the outcome has a deadline; a call that passes has none."""
    if error.errno in (errno.ENOBUFS, errno.ENOMEM):
        time.sleep(NO_MEMORY_PAUSE_S)
        return True
    return isinstance(error, BlockingIOError | InterruptedError)
