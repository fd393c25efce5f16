"""Proxy in Python: one thread per rank that moves messages between FIFOs in memory and networks.

It runs any ``proxy.driver.Driver``. TCP between hosts uses the compiled ``proxy.stream_engine``
instead; this one is its reference, and the proxy of networks that have no compiled driver. It uses
no processor while nothing moves.
"""

from __future__ import annotations

import importlib
import os
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from miraccl import clock
from miraccl.proxy.driver import NO_TIMER, Driver, DriverContext
from miraccl.proxy.progress_thread import ProgressThread
from miraccl.transport.base import NetConnection, OnLost, PathStatus, Wake
from miraccl.transport.fifo import PAGE_BYTES, Atomics, PrivateMemory
from miraccl.wire import proxy_records as wire
from miraccl.wire.datagram.seal import AES_128_GCM

#: Largest segment of a message: a frame costs some 50 us of Python; the kernel's buffer delays what
#: is queued behind by as much.
SEGMENT_BYTES = 1 << 22
_EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


class Proxy(ProgressThread[Driver]):
    """Moves messages for one rank; see ``ProgressThread``.

    Args:
        control: Ignored; ``wake`` wakes the executor.
        segment_bytes: Largest segment of a message on streams.

    Attributes:
        rounds: Number of rounds of the thread.
        ciphers: Ciphers of ``packet_codec``; see ``transport.base.DatagramPort``.
    """

    ciphers = (AES_128_GCM,)

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
        self.rounds = 0
        self._segment_bytes = segment_bytes
        self._by_fd: dict[int, Driver] = {}
        super().__init__(rank=rank, wake=wake, on_lost=on_lost, atomics=atomics)

    def _prepare(self) -> None:
        self._words = PrivateMemory(PAGE_BYTES)
        self._context = DriverContext(
            atomics=self._atomics, on_lost=self._on_lost, segment_bytes=self._segment_bytes
        )
        self._epoll.register(self._doorbell, select.EPOLLIN)

    # --- other threads

    @property
    def asleep(self) -> int:
        return self._words.address

    def attach(self, connections: Sequence[NetConnection]) -> None:
        """Take over the streams of all connections and start to move messages.

        On failure of one, the caller closes all of them.
        """
        self.attach_drivers([partial(self._open_driver, c) for c in connections])

    def _open_driver(self, connection: NetConnection) -> Driver:
        module = importlib.import_module(connection.driver)
        driver: Driver = module.open_driver(connection, self._context)
        return driver

    def reached(self, peer: int) -> bool:
        """Return True once a path to the peer is known to work in both directions."""
        driver = self._peers.get(peer)
        return driver is not None and driver.reached

    def paths(self) -> list[PathStatus]:
        """Return nothing: only the compiled engine reports its paths."""
        return []

    def attach_drivers(self, factories: Sequence[Callable[[], Driver]]) -> None:
        """Make drivers on the proxy's thread and run all of them, or none."""
        self._call(lambda: self._attach(factories))

    # --- the thread

    def _advance(self) -> None:
        busy = self._round()
        if self._stopping:
            return
        if busy:
            self._poll(0)
        else:
            self._sleep()

    def _fail(self, error: Exception) -> None:
        for driver in self._peers.values():
            driver.handle(wire.InternalError(f"has no {self.noun}: {error!r}"))

    def _round(self) -> bool:
        """Poll all drivers; return True if one can move more at once."""
        self.rounds += 1
        self._commands.run_pending()
        busy = False
        for driver in self._peers.values():
            if driver.alive:
                busy |= driver.poll()
            if driver.dirty:
                driver.dirty = False
                self._wake(self.rank)
        if self._closers:
            self._notify_closers()
        return busy

    def _sleep(self) -> None:
        self._atomics.exchange(self.asleep, 1)
        timeout = min((driver.arm() for driver in self._peers.values()), default=NO_TIMER)
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
                self._check_new(driver.peer)
                self._peers[driver.peer] = driver
                attached.append(driver.peer)
                for fd in driver.descriptors():
                    self._by_fd[fd] = driver
                    self._epoll.register(fd, _EDGES)
        except BaseException:
            self._remove(attached)
            raise

    def _begin_close(self, peer: Driver) -> None:
        peer.arm()  # what the executor posted before must be sent
        peer.handle(wire.CloseRequested())

    def _remove(self, peers: Sequence[int]) -> None:
        for peer in peers:
            driver = self._peers.pop(peer, None)
            if driver:
                self._by_fd = {fd: d for fd, d in self._by_fd.items() if d is not driver}
                driver.close()

    def _send_aborts(self, text: str) -> None:
        for driver in self._peers.values():
            driver.handle(wire.AbortRequested(text))


def _drain(fd: int) -> None:
    with suppress(BlockingIOError):
        os.eventfd_read(fd)
