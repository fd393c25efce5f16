"""The proxy: one thread per rank of a communicator that moves messages between FIFOs in memory and network streams.

It owns the sockets given to it.  It sleeps in epoll on all of them and on its bell, an eventfd, and uses no processor while nothing moves:
before it sleeps it sets the word ``asleep`` (sequentially consistent) and looks at all FIFOs once more; an executor that published
something looks at ``asleep`` after a full fence and rings only if it is set, so that a busy proxy costs the executor no system call.
Everything else is done by the drivers; commands of other threads are run between two rounds.

The split between the thread that computes and a proxy that drives the network is NCCL's (``src/proxy.cc``).
"""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from miraccl import clock, trace
from miraccl.errors import CommunicatorClosed, MiracclError, as_system_failure
from miraccl.proxy.driver import Driver
from miraccl.transport.base import NetConnection, OnLost, Wake
from miraccl.transport.fifo import PAGE_BYTES, Atomics, PrivateMemory, native_atomics
from miraccl.wire import proxy_records as wire

log = trace.logger("proxy")

SEGMENT_BYTES = 1 << 22
"""Pieces of large messages: a frame costs some 50 us of Python; the kernel's buffer delays what is queued behind as much."""
COMMAND_TIMEOUT_S = 10.0
"""A round of the thread takes milliseconds; longer means that it died or that somebody keeps the interpreter's lock."""
_EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


class Proxy:
    """Moves messages for ``rank``.

    ``wake(rank)`` is called after flags or tails were published, ``on_lost(peer, loss)`` once per lost peer; both run in the proxy's
    thread.  ``close`` ends the thread; until it or ``abort`` or ``detach`` has returned, memory given to FIFOs may still be touched.
    ``rounds`` counts the rounds of the thread, for whoever asks why it is busy.  The constructor raises ``SystemFailure``.
    """

    def __init__(
        self,
        *,
        rank: int,
        wake: Wake,
        on_lost: OnLost,
        atomics: Atomics | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.rank = rank
        self.rounds = 0
        self._wake = wake
        self._on_lost = on_lost
        self._atomics = atomics or native_atomics()
        self._segment_bytes = segment_bytes
        self._drivers: dict[int, Driver] = {}
        self._by_fd: dict[int, tuple[Driver, int]] = {}
        self._closers: list[tuple[list[Driver], clock.Event]] = []
        self._commands: clock.Queue[_Command] = clock.simple_queue()
        self._words = PrivateMemory(PAGE_BYTES)
        self._stopping = False
        self._ended = False  # the thread takes no more commands
        self._gate = threading.Lock()  # between that and commands on their way
        self._closed = False
        self._thread = clock.thread(target=self._main, name=f"miraccl-proxy-{rank}", daemon=True)
        with (
            as_system_failure("the proxy cannot be started", rank=rank),
            ExitStack() as unless_it_runs,
        ):
            self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            unless_it_runs.callback(os.close, self._doorbell)
            self._epoll = unless_it_runs.enter_context(select.epoll())
            self._epoll.register(self._doorbell, select.EPOLLIN)
            self._thread.start()
            unless_it_runs.pop_all()

    # --- other threads' side

    @property
    def doorbell(self) -> int:
        """The eventfd; written by executors that find ``asleep`` set."""
        return self._doorbell

    @property
    def asleep(self) -> int:
        """Address of the word that is 1 while the thread sleeps."""
        return self._words.address

    def attach(self, connections: Sequence[NetConnection]) -> None:
        """Take over sockets and start to move messages: those of all connections, or none, which the caller closes."""
        self._call(lambda: self._attach(connections))

    def detach(self, peers: Sequence[int], *, linger: float) -> None:
        """Send what is posted for at most ``linger`` seconds, then close these links. Nothing is left to do once the thread has ended."""
        deadline = clock.monotonic() + linger
        done = clock.event()
        with suppress(CommunicatorClosed):
            self._call(lambda: self._start_closing(peers, done))
            done.wait(max(0.0, deadline - clock.monotonic()))
            self._call(lambda: self._remove(peers))

    def abort(self, text: str) -> None:
        """Close all links at once; peers that listen are told ``text``."""
        with suppress(CommunicatorClosed):
            self._call(lambda: self._abort(text))

    def close(self, *, linger: float = 0.0) -> None:
        """Close all links and end the thread; may be called twice."""
        if self._closed:
            return
        self.detach(list(self._drivers), linger=linger)
        with suppress(CommunicatorClosed):  # it has ended by a fault of its own
            self._call(self._stop)
        self._closed = True
        self._thread.join(COMMAND_TIMEOUT_S)
        self._epoll.close()
        os.close(self._doorbell)

    def _call(self, action: Callable[[], None]) -> None:
        """Run ``action`` in the thread and wait for its end."""
        if threading.current_thread() is self._thread:
            return action()
        command = _Command(action)
        with self._gate:
            if self._ended:
                raise CommunicatorClosed("the proxy is closed", rank=self.rank)
            self._commands.put(command)
            os.eventfd_write(self._doorbell, 1)
        if not command.done.wait(COMMAND_TIMEOUT_S):
            raise MiracclError(
                f"the proxy did not answer for {COMMAND_TIMEOUT_S} s", rank=self.rank
            )
        if command.error:
            raise command.error

    # --- the thread

    def _main(self) -> None:
        try:
            while True:
                busy = self._round()
                if self._stopping:
                    return
                if busy:
                    self._poll(0)
                else:
                    self._sleep()
        except Exception as error:  # a bug of ours: nobody must wait for a proxy that is gone
            log.exception("the proxy failed")
            for driver in self._drivers.values():
                driver.handle(wire.InternalError(f"has no proxy: {error!r}"))
            self._wake(self.rank)
        finally:
            self._end()

    def _end(self) -> None:
        """Close what is open, and let nobody wait for this thread."""
        self._remove(list(self._drivers))
        with self._gate:
            self._ended = True
        with suppress(queue.Empty):
            while True:
                self._commands.get_nowait().reject(
                    CommunicatorClosed("the proxy is closed", rank=self.rank)
                )
        for _, done in self._closers:
            done.set()

    def _round(self) -> bool:
        """Some calls per stream and direction (``driver.CALLS``); True when some stream is ready for more."""
        self.rounds += 1
        self._run_commands()
        busy = False
        for driver in self._drivers.values():
            if driver.link.alive:
                busy |= driver.advance()
            if driver.dirty:
                driver.dirty = False
                self._wake(self.rank)
        if self._closers:
            self._notify_closers()
        return busy

    def _notify_closers(self) -> None:
        for closer in [c for c in self._closers if not any(driver.link.alive for driver in c[0])]:
            self._closers.remove(closer)
            closer[1].set()

    def _sleep(self) -> None:
        self._atomics.exchange(self.asleep, 1)
        news = not self._commands.empty() or any(
            driver.scan() or driver.dirty for driver in self._drivers.values()
        )
        if not news:
            self._poll(None)
        self._atomics.exchange(self.asleep, 0)

    def _poll(self, timeout: float | None) -> None:
        for fd, events in clock.wait_io(self._epoll.poll, timeout):
            if fd == self._doorbell:
                _drain(fd)
                continue
            found = self._by_fd.get(fd)
            if found:
                found[0].streams[found[1]].on_edge(events)

    def _run_commands(self) -> None:
        with suppress(queue.Empty):
            while not self._commands.empty():
                self._commands.get_nowait().run()

    def _attach(self, connections: Sequence[NetConnection]) -> None:
        attached: list[int] = []
        try:
            for connection in connections:
                if connection.peer in self._drivers:
                    raise MiracclError(
                        f"rank {connection.peer} is attached already", rank=self.rank
                    )
                driver = Driver(
                    connection,
                    atomics=self._atomics,
                    on_lost=self._on_lost,
                    segment_bytes=self._segment_bytes,
                )
                self._drivers[connection.peer] = driver
                attached.append(connection.peer)
                for stream in driver.streams:
                    self._by_fd[stream.fd] = (driver, stream.index)
                    self._epoll.register(stream.fd, _EDGES)
        except BaseException:
            self._remove(attached)
            raise

    def _start_closing(self, peers: Sequence[int], done: clock.Event) -> None:
        waiting = [self._drivers[peer] for peer in peers if peer in self._drivers]
        for driver in waiting:
            driver.scan()
            driver.handle(wire.CloseRequested())
        self._closers.append((waiting, done))

    def _remove(self, peers: Sequence[int]) -> None:
        for peer in peers:
            driver = self._drivers.pop(peer, None)
            if driver:
                self._by_fd = {
                    fd: entry for fd, entry in self._by_fd.items() if entry[0] is not driver
                }
                driver.close()

    def _abort(self, text: str) -> None:
        for driver in self._drivers.values():
            driver.handle(wire.AbortRequested(text))
        self._remove(list(self._drivers))

    def _stop(self) -> None:
        self._stopping = True


class _Command:
    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self.done = clock.event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._action()
        except Exception as error:
            self.error = error
        self.done.set()

    def reject(self, error: Exception) -> None:
        self.error = error
        self.done.set()


def _drain(fd: int) -> None:
    with suppress(BlockingIOError):
        os.eventfd_read(fd)
