"""Control thread of an agent: accepts and proves connections, and notices their end.

It sleeps in epoll and uses no processor while nothing connects or ends. Unproven connections are
bounded in number, bytes and time, so an unauthenticated peer costs a descriptor for some seconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from miraccl import clock, trace
from miraccl.errors import MiracclError, as_system_failure
from miraccl.sockets import is_transient
from miraccl.wire.p2p import AgentWelcome, Introduction, Ready, TargetSide

log = trace.logger("p2p")

HANDSHAKE_TIMEOUT_S = 5.0
MAX_UNPROVEN = 64
#: Bytes read at a time before a peer is proven; the longest message of that phase is shorter.
READ_BYTES = 4096
_END = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class Arrival:
    """Accepted connection in its handshake."""

    def __init__(self, sock: socket.socket, side: TargetSide, due: float) -> None:
        self.sock, self.side, self.due = sock, side, due
        self.token: object = None


class ControlThread:
    """Thread that owns the listener of an agent and watches its connections.

    Args:
        listener: Listening socket; closed with the thread.
        secret: Secret of ``wire.p2p.protocol_secret``.
        welcome: Called with the introduction of a proven initiator and its socket; returns the
            answer and a token for ``arrived``. Raises ``MiracclError`` to reject it.
        arrived: Called with the token, the socket, the last message and the bytes behind it: the
            connection is ready.
        dropped: Called with the token if the handshake fails after ``welcome``.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        *,
        name: str,
        welcome: Callable[[Introduction], tuple[AgentWelcome, object]],
        arrived: Callable[[object, socket.socket, Ready, bytes], None],
        dropped: Callable[[object], None],
    ) -> None:
        self._listener, self._secret = listener, secret
        self._welcome, self._arrived, self._dropped = welcome, arrived, dropped
        self._arrivals: dict[int, Arrival] = {}
        self._watched: dict[int, tuple[socket.socket, Callable[[], None]]] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = False
        self._wake_lock = threading.Lock()
        with as_system_failure("cannot start an agent"), contextlib.ExitStack() as undo:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._wake)
            self._epoll = undo.enter_context(select.epoll())
            listener.setblocking(False)
            self._epoll.register(listener, select.EPOLLIN)
            self._epoll.register(self._wake, select.EPOLLIN)
            self._thread = clock.thread(self._main, name=f"miraccl-agent-{name}")
            self._thread.start()
            undo.pop_all()

    # ---- other threads

    def watch(self, sock: socket.socket, ended: Callable[[], None]) -> None:
        """Call ``ended`` on the control thread when the other side closes or dies."""

        def start() -> None:
            if sock.fileno() >= 0:
                self._watched[sock.fileno()] = sock, ended
                self._epoll.register(sock, _END)

        self._submit(start)

    def forget(self, sock: socket.socket) -> None:
        """Stop watching a socket and close it."""

        def stop() -> None:
            self._unwatch(sock)
            sock.close()

        self._submit(stop)

    def close(self) -> None:
        """Stop the thread; close the listener and all watched sockets. Idempotent."""
        self._closing = True
        self._ring()
        self._thread.join()
        with self._wake_lock:
            wake, self._wake = self._wake, -1
            if wake >= 0:
                os.close(wake)

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._ring()

    def _ring(self) -> None:
        """Wake the thread, unless its eventfd is closed: the number may be another file's."""
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # ---- the thread

    def _main(self) -> None:
        try:
            while not self._closing:
                self._round()
        finally:
            while self._commands:  # sockets that are to be closed
                with contextlib.suppress(OSError):
                    self._commands.popleft()()
            for arrival in self._arrivals.values():
                arrival.sock.close()
            for sock, _ in self._watched.values():
                sock.close()
            self._listener.close()
            self._epoll.close()

    def _round(self) -> None:
        now = clock.monotonic()
        due = min((a.due for a in self._arrivals.values()), default=None)
        timeout = None if due is None else max(0.0, due - now)
        events = clock.wait_io(lambda t: self._epoll.poll(-1 if t is None else t), timeout)
        while self._commands:
            self._commands.popleft()()
        for fd, _ in events:
            if fd == self._wake:
                with contextlib.suppress(OSError):
                    os.eventfd_read(self._wake)
            elif fd == self._listener.fileno():
                self._accept()
            elif fd in self._arrivals:
                self._receive(self._arrivals[fd])
            elif fd in self._watched:
                sock, ended = self._watched[fd]
                self._unwatch(sock)
                ended()
        for arrival in [a for a in self._arrivals.values() if a.due <= clock.monotonic()]:
            self._drop(arrival, "the handshake took too long")

    def _unwatch(self, sock: socket.socket) -> None:
        fd = sock.fileno()
        if self._watched.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if not is_transient(error):
                log.warning("cannot accept a connection: %s", error)
                clock.sleep(0.01)
            return
        unproven = [a for a in self._arrivals.values() if not a.side.proven]
        if len(unproven) >= MAX_UNPROVEN:
            self._drop(min(unproven, key=lambda a: a.due), "too many unproven connections")
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        side = TargetSide(self._secret, clock.random_bytes(32))
        due = clock.monotonic() + HANDSHAKE_TIMEOUT_S
        self._arrivals[sock.fileno()] = Arrival(sock, side, due)
        self._epoll.register(sock, select.EPOLLIN)

    def _receive(self, arrival: Arrival) -> None:
        side = arrival.side
        try:
            data = arrival.sock.recv(READ_BYTES)
            if not data:
                self._drop(arrival, "closed by the peer")
                return
            reply = side.receive(data)
            if side.introduction is not None and arrival.token is None:
                message, arrival.token = self._welcome(side.introduction)
                reply += side.welcome(message)
            if reply:
                arrival.sock.sendall(reply)  # shorter than any socket's buffer
        except MiracclError as error:
            self._drop(arrival, str(error))
            return
        except OSError as error:
            if not is_transient(error):
                self._drop(arrival, str(error))
            return
        if side.ready is not None:
            del self._arrivals[arrival.sock.fileno()]
            self._epoll.unregister(arrival.sock)
            self._arrived(arrival.token, arrival.sock, side.ready, side.rest)

    def _drop(self, arrival: Arrival, reason: str) -> None:
        log.info("connection dropped: %s", reason)
        del self._arrivals[arrival.sock.fileno()]
        with contextlib.suppress(OSError):
            self._epoll.unregister(arrival.sock)
        arrival.sock.close()
        if arrival.token is not None:
            self._dropped(arrival.token)
