"""Proxy in Python: one thread per rank that moves messages between FIFOs in memory and networks.

It runs any ``proxy.driver.Driver``. TCP between hosts uses the compiled ``proxy.stream_engine``
instead; this one is its reference, and the proxy of networks that have no compiled driver.

The thread sleeps in epoll on all descriptors of its drivers and on its doorbell, an eventfd, and
uses no processor while nothing moves. Before it sleeps it sets the word ``asleep`` (sequentially
consistent) and scans all FIFOs once more; an executor that published something reads ``asleep``
after a full fence and rings the doorbell only if it is set, so that a busy proxy costs the executor
no system call. Commands of other threads are run between two rounds.

The split between the thread that computes and a proxy that drives the network is NCCL's
(``src/proxy.cc``).
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from miraccl import clock, trace
from miraccl.errors import CommunicatorClosed, MiracclError, as_system_failure
from miraccl.proxy.commands import COMMAND_TIMEOUT_S, CommandQueue
from miraccl.proxy.datagram_driver import DatagramDriver, DatagramSockets
from miraccl.proxy.driver import NO_TIMER, Driver
from miraccl.proxy.plugin_driver import PluginDriver
from miraccl.proxy.stream_driver import StreamDriver
from miraccl.transport.base import DatagramConnection, NetConnection, OnLost, PathStatus, Wake
from miraccl.transport.fifo import PAGE_BYTES, Atomics, PrivateMemory, native_atomics
from miraccl.transport.net_plugin import PluginConnection
from miraccl.wire import proxy_records as wire

log = trace.logger("proxy")

#: Largest segment of a message: a frame costs some 50 us of Python; the kernel's buffer delays what
#: is queued behind by as much.
SEGMENT_BYTES = 1 << 22
_EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


class Proxy:
    """Moves messages for one rank.

    Until ``close``, ``abort`` or ``detach`` has returned, memory given to FIFOs may still be
    touched.

    Args:
        wake: Called with the rank after flags or tails were published, on the proxy's thread.
        on_lost: Called with (peer, loss) once per lost peer, on the proxy's thread.
        control: Ignored; ``wake`` wakes the executor.
        segment_bytes: Largest segment of a message on streams.

    Attributes:
        rounds: Number of rounds of the thread.

    Raises:
        SystemFailure: A descriptor or the thread cannot be created.
    """

    def __init__(
        self,
        *,
        rank: int,
        wake: Wake,
        on_lost: OnLost,
        control: int = 0,
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
        self._by_fd: dict[int, Driver] = {}
        self._sockets: dict[int, DatagramSockets] = {}
        self._closers: list[tuple[list[Driver], clock.Event]] = []
        self._commands = CommandQueue("the proxy", rank)
        self._words = PrivateMemory(PAGE_BYTES)
        self._stopping = False
        self._closed = False
        self._thread = clock.thread(target=self._main, name=f"miraccl-proxy-{rank}", daemon=True)
        with (
            as_system_failure("cannot start the proxy", rank=rank),
            ExitStack() as undo,
        ):
            self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._doorbell)
            self._epoll = undo.enter_context(select.epoll())
            self._epoll.register(self._doorbell, select.EPOLLIN)
            self._thread.start()
            undo.pop_all()

    # --- other threads

    @property
    def doorbell(self) -> int:
        """Eventfd that executors write when ``asleep`` is set."""
        return self._doorbell

    @property
    def asleep(self) -> int:
        """Address of the word that is 1 while the thread sleeps."""
        return self._words.address

    def attach(self, connections: Sequence[NetConnection]) -> None:
        """Take over the streams of all connections and start to move messages.

        On failure of one, the caller closes all of them.
        """
        self.attach_drivers([partial(self._open_driver, c) for c in connections])

    def _open_driver(self, connection: NetConnection) -> Driver:
        shared: dict[str, Any] = {
            "atomics": self._atomics,
            "on_lost": self._on_lost,
            "segment_bytes": self._segment_bytes,
        }
        if isinstance(connection, DatagramConnection):
            first = connection.streams[0].fileno()
            sockets = self._sockets.setdefault(first, DatagramSockets(connection.streams))
            return DatagramDriver(connection, sockets=sockets, **shared)
        if isinstance(connection, PluginConnection):
            return PluginDriver(connection, **shared)
        return StreamDriver(connection, **shared)

    def reached(self, peer: int) -> bool:
        """Return True once a path to a peer over datagrams has answered."""
        driver = self._drivers.get(peer)
        return isinstance(driver, DatagramDriver) and driver.reached

    def paths(self) -> list[PathStatus]:
        """Return nothing: only the compiled engine reports its paths."""
        return []

    def attach_drivers(self, factories: Sequence[Callable[[], Driver]]) -> None:
        """Make drivers on the proxy's thread and run all of them, or none."""
        self._call(lambda: self._attach(factories))

    def detach(self, peers: Sequence[int], *, linger: float) -> None:
        """Send what is posted for at most ``linger`` seconds, then close these links.

        Without effect once the thread has ended.
        """
        deadline = clock.monotonic() + linger
        done = clock.event()
        with suppress(CommunicatorClosed):
            self._call(lambda: self._start_closing(peers, done))
            done.wait(max(0.0, deadline - clock.monotonic()))
            self._call(lambda: self._remove(peers))

    def abort(self, text: str) -> None:
        """Close all links at once; peers that still read receive ``text``."""
        with suppress(CommunicatorClosed):
            self._call(lambda: self._abort(text))

    def close(self, *, linger: float = 0.0) -> None:
        """Close all links and end the thread; idempotent."""
        if self._closed:
            return
        self.detach(list(self._drivers), linger=linger)
        with suppress(CommunicatorClosed):  # the thread failed
            self._call(self._stop)
        self._closed = True
        self._thread.join(COMMAND_TIMEOUT_S)
        self._epoll.close()
        os.close(self._doorbell)

    def _call(self, action: Callable[[], None]) -> None:
        """Run ``action`` in the thread and wait for its end."""
        if threading.current_thread() is self._thread:
            return action()
        self._commands.call(action, lambda: os.eventfd_write(self._doorbell, 1))

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
        except Exception as error:  # a bug of ours: no rank may wait for a proxy that is gone
            log.exception("the proxy failed")
            for driver in self._drivers.values():
                driver.handle(wire.InternalError(f"has no proxy: {error!r}"))
            self._wake(self.rank)
        finally:
            self._end()

    def _end(self) -> None:
        """Close everything and release the threads that wait for this one."""
        self._remove(list(self._drivers))
        self._commands.close()
        for _, done in self._closers:
            done.set()

    def _round(self) -> bool:
        """Poll all drivers; return True if one can move more at once."""
        self.rounds += 1
        self._commands.run_pending()
        busy = False
        for driver in self._drivers.values():
            if driver.alive:
                busy |= driver.poll()
            if driver.dirty:
                driver.dirty = False
                self._wake(self.rank)
        if self._closers:
            self._notify_closers()
        return busy

    def _notify_closers(self) -> None:
        for closer in [c for c in self._closers if not any(driver.alive for driver in c[0])]:
            self._closers.remove(closer)
            closer[1].set()

    def _sleep(self) -> None:
        self._atomics.exchange(self.asleep, 1)
        timeout = min((driver.arm() for driver in self._drivers.values()), default=NO_TIMER)
        if not self._commands.pending and timeout > 0:
            self._poll(None if timeout == NO_TIMER else timeout)
        self._atomics.exchange(self.asleep, 0)

    def _poll(self, timeout: float | None) -> None:
        for fd, events in clock.wait_io(self._epoll.poll, timeout):
            if fd == self._doorbell:
                _drain(fd)
            elif fd in self._by_fd:
                self._by_fd[fd].ready(fd, events)

    def _attach(self, factories: Sequence[Callable[[], Driver]]) -> None:
        attached: list[int] = []
        try:
            for factory in factories:
                driver = factory()
                if driver.peer in self._drivers:
                    raise MiracclError(
                        f"cannot attach rank {driver.peer}: it is attached already", rank=self.rank
                    )
                self._drivers[driver.peer] = driver
                attached.append(driver.peer)
                for fd in driver.descriptors():
                    self._by_fd[fd] = driver
                    self._epoll.register(fd, _EDGES)
        except BaseException:
            self._remove(attached)
            raise

    def _start_closing(self, peers: Sequence[int], done: clock.Event) -> None:
        waiting = [self._drivers[peer] for peer in peers if peer in self._drivers]
        for driver in waiting:
            driver.arm()  # what the executor posted before must be sent
            driver.handle(wire.CloseRequested())
        self._closers.append((waiting, done))

    def _remove(self, peers: Sequence[int]) -> None:
        for peer in peers:
            driver = self._drivers.pop(peer, None)
            if driver:
                self._by_fd = {fd: d for fd, d in self._by_fd.items() if d is not driver}
                driver.close()

    def _abort(self, text: str) -> None:
        for driver in self._drivers.values():
            driver.handle(wire.AbortRequested(text))
        self._remove(list(self._drivers))

    def _stop(self) -> None:
        self._stopping = True


def _drain(fd: int) -> None:
    with suppress(BlockingIOError):
        os.eventfd_read(fd)
