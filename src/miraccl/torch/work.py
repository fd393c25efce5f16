"""Work handles of torch, and the queue that runs the operations of a group.

``WorkQueue`` runs asynchronous operations on one thread, in call order.  A synchronous operation
runs on the caller's thread if the queue is empty, else behind the pending ones.  At most one thread
is inside the communicator.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from miraccl import clock, params
from miraccl.diagnosis.blocked_ops import BlockedScope, Wait
from miraccl.errors import CollectiveTimeout, CommunicatorClosed, MiracclError, as_system_failure
from miraccl.torch.failures import BackendError, as_backend_errors

Action = Callable[[], Any]


class Work(dist.Work):
    """Handle of an operation; ``wait`` raises its error, the future holds the result tensors."""

    _tensors: Sequence[Any]

    def __init__(self, name: str, tensors: Sequence[Any]) -> None:
        super().__init__()
        self._name, self._tensors = name, list(tensors)
        self._done = False
        # held until the operation ends; creating an Event costs as much as a small operation
        self._running = threading.Lock()
        self._running.acquire()
        # wait-for record of a thread that waits for this work
        self.wait_reason: Callable[[], Wait | None] | None = None
        self._error: Exception | None = None
        self._future: Any = None
        self._lock = threading.Lock()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for the operation to complete.

        Args:
            timeout: None or 0 mean the group's own deadline.

        Returns:
            True.

        Raises:
            BackendError: The operation failed, or did not finish within ``timeout``.
        """
        if not self._done:
            limit = seconds(timeout)
            if limit is None and self.wait_reason is not None:
                with BlockedScope(self.wait_reason):
                    self._running.acquire()
            elif not self._running.acquire(timeout=-1 if limit is None else limit):
                raise BackendError(
                    CollectiveTimeout(
                        f"timed out after {timeout}; the operation continues in the background",
                        op=self._name,
                    )
                )
            self._running.release()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Any]:
        return list(self._tensors)

    def get_future(self) -> Any:
        with self._lock:
            fresh = self._future is None
            if fresh:
                self._future = torch.futures.Future()
            fulfil = fresh and self._done
        if fulfil:
            self.resolve_future()
        return self._future

    def end(self, error: Exception | None) -> None:
        """Complete the work and resolve its future."""
        if self.mark_done(error):
            self.resolve_future()

    def mark_done(self, error: Exception | None) -> bool:
        """Mark the work as done; return True if a future is waiting to be resolved."""
        with self._lock:
            self._error, self._done = error, True
            self._running.release()
            return self._future is not None

    def resolve_future(self) -> None:
        """Resolve the future.  Its callbacks run here and may call anything, so no lock is held."""
        if self._error is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(self._error)


class FinishedWork(Work):
    """Handle of an operation that completed before the call returned.

    It has no locks: creating them takes as long as a small operation.
    """

    _done = True
    _error: Exception | None = None
    _future: Any = None

    def __init__(self, name: str, tensors: Sequence[Any]) -> None:
        dist.Work.__init__(self)
        self._name, self._tensors = name, tensors

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        return True

    def get_future(self) -> Any:
        if self._future is None:
            self._future = torch.futures.Future()
            self.resolve_future()
        return self._future


class WorkQueue:
    """Queue and thread of a group's asynchronous operations; the thread starts on first use."""

    def __init__(
        self,
        name: str,
        set_busy: Callable[[bool], None] = lambda _: None,
        wait_reason: Callable[[], Wait | None] | None = None,
    ) -> None:
        """Create the queue.

        Args:
            name: Thread name.
            set_busy: Called with True before the first pending operation and with False after the
                last.
            wait_reason: Wait-for record of the operation that the thread runs.
        """
        self._name, self._set_busy, self._wait_reason = name, set_busy, wait_reason
        self._queue: clock.Queue[tuple[Work, Action] | None] = clock.simple_queue()
        self._lock = threading.RLock()  # reentrant: a signal handler may destroy the group here
        self._run_lock = threading.RLock()
        self._pending = 0
        self._closed = False
        self._thread: clock.Thread | None = None

    @property
    def idle(self) -> bool:
        return self._pending == 0

    def run(self, name: str, action: Action) -> None:
        """Run an action after the pending ones and wait for it.

        A future's callback, which runs on the queue's own thread, is run directly.
        """
        if self.idle or threading.current_thread() is self._thread:
            with self._run_lock:
                run_translated(action)
        else:
            self.submit(Work(name, []), action).wait()

    def submit(self, work: Work, action: Action) -> Work:
        """Run an action in the background, in order.

        Submitted from a callback on the queue's thread, it runs at once: the callback may wait for
        it.
        """
        with self._lock:
            own = threading.current_thread() is self._thread
            if not own:
                self._check()
                self._enqueue(work, action)
                self._check()  # a signal handler may have closed it since
        if own:
            work.end(self._run(action))
        return work

    def _check(self) -> None:
        if self._closed:
            raise BackendError(CommunicatorClosed("the process group has been destroyed"))

    def _enqueue(self, work: Work, action: Action) -> None:
        if self._thread is None:
            thread = clock.thread(target=self._loop, name=self._name, daemon=True)
            with (
                as_backend_errors(),
                as_system_failure("cannot start the thread of background operations"),
            ):
                thread.start()
            self._thread = thread
        self._count(1)
        work.wait_reason = self._wait_reason
        self._queue.put((work, action))

    def _run(self, action: Action) -> Exception | None:
        """Run an action; return its error, for the caller that waits for the work."""
        try:
            with self._run_lock:
                run_translated(action)
        except Exception as error:
            return error
        return None

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            work, action = item
            error = self._run(action)
            self._end(work, error)
            del item, work, action

    def _end(self, work: Work, error: Exception | None) -> None:
        """Complete a work.

        The queue counts as idle only after the callbacks of the last future have run: operations
        that they submit precede any submitted later, on every rank.
        """
        with self._lock:
            fulfil = work.mark_done(error)
            if not fulfil:
                self._count(-1)
        if fulfil:
            work.resolve_future()
            with self._lock:
                self._count(-1)

    def _count(self, more: int) -> None:
        self._pending += more
        if self._pending == 0 or self._pending == more:
            self._set_busy(self._pending > 0)

    def close(self, timeout: float) -> bool:
        """Stop the thread after pending work; False if that takes over ``timeout`` seconds."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        self._queue.put(None)
        thread.join(timeout)
        return not thread.is_alive()


def no_action() -> None:
    """Do nothing."""


def run_translated(action: Action) -> None:
    """Run an action, translating miraccl errors to ``BackendError``."""
    try:
        action()
    except MiracclError as error:
        raise BackendError(error) from error


def seconds(timeout: datetime.timedelta | None) -> float | None:
    """Convert a timeout to seconds; None for c10d's 0 (``kNoTimeout``), which means the group's
    own.

    Clamped to ``params.FOREVER``.
    """
    return (
        None
        if timeout is None or timeout <= datetime.timedelta(0)
        else min(timeout.total_seconds(), params.FOREVER)
    )
