"""Base of the proxies: the thread of a rank that owns the network connections to its peers.

Other threads attach and detach peers by commands that run in the thread between two rounds. The
thread sleeps in epoll; its doorbell, an eventfd, wakes it. Before it sleeps it sets the word
``asleep`` (sequentially consistent) and scans all FIFOs once more; an executor that published
something reads ``asleep`` after a full fence and rings the doorbell only if it is set, so that a
busy proxy costs the executor no system call.

The split between the thread that computes and a proxy that drives the network is NCCL's
(``src/proxy.cc``).
"""

from __future__ import annotations

import abc
import os
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Generic, Protocol, TypeVar

from miraccl import clock, trace
from miraccl.errors import CommunicatorClosed, MiracclError, as_system_failure
from miraccl.proxy.commands import COMMAND_TIMEOUT_S, CommandQueue
from miraccl.transport.base import Driving, OnLost, Wake
from miraccl.transport.fifo import Atomics, native_atomics
from miraccl.wire.proxy_records import Loss


class ThreadPeer(Protocol):
    """Connection of the thread to one peer."""

    @property
    def alive(self) -> bool:
        """True until the connection has ended; memory is not touched afterwards."""


PeerT = TypeVar("PeerT", bound=ThreadPeer)


class ProgressThread(abc.ABC, Generic[PeerT]):
    """Moves messages for one rank.

    Until ``close``, ``abort`` or ``detach`` has returned, memory given to FIFOs may still be
    touched.

    Args:
        rank: This rank, for errors and the thread's name.
        wake: Called with the rank after flags or tails were published.
        on_lost: Called with (peer, loss) once per lost peer, from the thread.

    Raises:
        SystemFailure: A descriptor or the thread cannot be created.
    """

    #: Noun in errors and logs, and the middle of the thread's name.
    noun = "proxy"
    thread_name = "proxy"
    log = trace.logger("proxy")

    def __init__(
        self, *, rank: int, wake: Wake, on_lost: OnLost, atomics: Atomics | None = None
    ) -> None:
        self.rank = rank
        self._wake, self._on_lost = wake, on_lost
        self._atomics = atomics or native_atomics()
        self._peers: dict[int, PeerT] = {}
        self._closers: list[tuple[list[PeerT], clock.Event]] = []
        self._commands = CommandQueue(f"the {self.noun}", rank)
        self._stopping = self._closed = False
        self._thread = clock.thread(
            target=self._main, name=f"miraccl-{self.thread_name}-{rank}", daemon=True
        )
        with as_system_failure(f"cannot start the {self.noun}", rank=rank), ExitStack() as undo:
            self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._doorbell)
            self._epoll = undo.enter_context(select.epoll())
            self._prepare()
            self._thread.start()
            undo.pop_all()

    # --- what a subclass defines; all but ``asleep`` run in the thread

    @property
    @abc.abstractmethod
    def asleep(self) -> int:
        """Address of the word that is 1 while the thread sleeps."""

    @abc.abstractmethod
    def _prepare(self) -> None:
        """Allocate memory and watch the doorbell; called before the thread starts."""

    @abc.abstractmethod
    def _advance(self) -> None:
        """Run commands and move messages once; sleep if nothing can move."""

    @abc.abstractmethod
    def _begin_close(self, peer: PeerT) -> None:
        """Begin to end a connection after everything posted before has been sent."""

    @abc.abstractmethod
    def _remove(self, peers: Sequence[int]) -> None:
        """Close connections at once; ranks without one have no effect."""

    @abc.abstractmethod
    def _send_aborts(self, text: str) -> None:
        """Send ``text`` on all connections that are alive, without waiting."""

    @abc.abstractmethod
    def _fail(self, error: Exception) -> None:
        """Report all peers as lost after a failure of the thread itself."""

    # --- other threads

    @property
    def doorbell(self) -> int:
        """Eventfd that executors write when ``asleep`` is set."""
        return self._doorbell

    def driver(self, *, overlap: bool) -> Driving:
        """Return how a waiting executor advances the connections itself.

        Args:
            overlap: There is a core for the thread beside that of the executor.
        """
        return Driving()

    def detach(self, peers: Sequence[int], *, linger: float) -> None:
        """Send what is posted for at most ``linger`` seconds, then close these connections.

        Without effect once the thread has ended.
        """
        deadline = clock.monotonic() + linger
        done = clock.event()
        with suppress(CommunicatorClosed):
            self._call(lambda: self._start_closing(peers, done))
            done.wait(max(0.0, deadline - clock.monotonic()))
            self._call(lambda: self._remove(peers))

    def abort(self, text: str) -> None:
        """Close all connections at once; peers that still read receive ``text``."""
        with suppress(CommunicatorClosed):
            self._call(lambda: self._abort(text))

    def close(self, *, linger: float = 0.0) -> None:
        """Close all connections and end the thread; idempotent."""
        if self._closed:
            return
        self.detach(list(self._peers), linger=linger)
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
        self._commands.call(action, self._request_attention)

    def _request_attention(self) -> None:
        """Make the thread look for commands; any thread may call it."""
        os.eventfd_write(self._doorbell, 1)

    # --- the thread

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._advance()
        except Exception as error:  # a bug of ours: no rank may wait for a thread that is gone
            self.log.exception("the %s failed", self.noun)
            self._fail(error)
            self._wake(self.rank)
        finally:
            self._end()

    def _end(self) -> None:
        """Close everything and release the threads that wait for this one."""
        try:
            self._remove(list(self._peers))
        finally:
            self._commands.close()
            for _, done in self._closers:
                done.set()

    def _check_new(self, peer: int) -> None:
        if peer in self._peers:
            raise MiracclError(f"cannot attach rank {peer}: it is attached already", rank=self.rank)

    def _start_closing(self, peers: Sequence[int], done: clock.Event) -> None:
        closing = [self._peers[peer] for peer in peers if peer in self._peers]
        for peer in closing:
            self._begin_close(peer)
        self._closers.append((closing, done))

    def _notify_closers(self) -> None:
        """Release the threads in ``detach`` whose connections have ended."""
        for closer in [c for c in self._closers if not any(peer.alive for peer in c[0])]:
            self._closers.remove(closer)
            closer[1].set()

    def _report(self, peer: int, loss: Loss) -> None:
        self.log.info("rank %d is lost (%s): %s", peer, loss.kind.value, loss)
        try:
            self._on_lost(peer, loss)
        except Exception:
            self.log.exception("on_lost failed")

    def _abort(self, text: str) -> None:
        self._send_aborts(text)
        self._remove(list(self._peers))

    def _stop(self) -> None:
        self._stopping = True
