"""torch's handles of operations, and the order in which a process group runs them.

``Lane`` runs what is asynchronous on one thread, in the order of the calls; what is synchronous runs on the caller's thread while
the lane is empty, else behind what is pending.  One thread at a time is inside the communicator, whoever it is.
"""

from __future__ import annotations

import datetime
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from miraccl import params
from miraccl.diagnosis.blocked_ops import BlockedScope, Wait
from miraccl.errors import CollectiveTimeout, CommunicatorClosed, MiracclError, as_system_failure
from miraccl.torch.failures import BackendError, as_backend_errors

Action = Callable[[], Any]


class Work(dist.Work):
    """An operation of the backend. ``wait`` raises its error; the future holds the tensors that got a result."""

    _tensors: Sequence[Any]

    def __init__(self, name: str, tensors: Sequence[Any]) -> None:
        super().__init__()
        self._name, self._tensors = name, list(tensors)
        self._done = False
        self._running = (
            threading.Lock()
        )  # until it has ended; an Event is made in the time of a small operation
        self._running.acquire()
        self.wait_reason: Callable[[], Wait | None] | None = (
            None  # what whoever waits for it waits in
        )
        self._error: Exception | None = None
        self._future: Any = None
        self._lock = threading.Lock()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """True when the operation has ended well; ``BackendError`` after its failure or after ``timeout`` (none, or 0: the group's)."""
        if not self._done:
            limit = seconds(timeout)
            if limit is None and self.wait_reason is not None:
                with BlockedScope(self.wait_reason):
                    self._running.acquire()
            elif not self._running.acquire(timeout=-1 if limit is None else limit):
                raise BackendError(
                    CollectiveTimeout(
                        f"not finished within {timeout}; it goes on in the background",
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
        """From whoever ran it."""
        if self.mark_done(error):
            self.resolve_future()

    def mark_done(self, error: Exception | None) -> bool:
        """Mark it as ended; whether somebody has a future of it, which is still to be fulfilled."""
        with self._lock:
            self._error, self._done = error, True
            self._running.release()
            return self._future is not None

    def resolve_future(self) -> None:
        """Callbacks of the future run in here, and may ask for anything: no lock is held."""
        if self._error is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(self._error)


class FinishedWork(Work):
    """What has ended before its caller gets it: nobody can wait, so it has no locks, whose making takes as long as a small operation."""

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
    """One thread for the asynchronous operations of a group, started when it is first needed."""

    def __init__(
        self,
        name: str,
        set_busy: Callable[[bool], None] = lambda _: None,
        wait_reason: Callable[[], Wait | None] | None = None,
    ) -> None:
        """``beside`` is called with True before the first pending operation and with False after the last; ``where``: what the lane waits
        in."""
        self._name, self._set_busy, self._wait_reason = name, set_busy, wait_reason
        self._queue: queue.SimpleQueue[tuple[Work, Action] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a signal handler may destroy the group in the middle
        self._run_lock = threading.RLock()
        self._pending = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        return self._pending == 0

    def run(self, name: str, action: Action) -> None:
        """Run an action after what is pending, and wait for it. The callback of a future, which runs on the lane itself, does not queue."""
        if self.idle or threading.current_thread() is self._thread:
            with self._run_lock:
                run_translated(action)
        else:
            self.submit(Work(name, []), action).wait()

    def submit(self, work: Work, action: Action) -> Work:
        """Run an action in the background, in order; from a callback that runs on the lane, at once: it may be waited for there."""
        with self._lock:
            own = threading.current_thread() is self._thread
            if not own:
                self._check()
                self._enqueue(work, action)
                self._check()  # again: in the middle, that is
        if own:
            work.end(self._run(action))
        return work

    def _check(self) -> None:
        if self._closed:
            raise BackendError(CommunicatorClosed("the process group has been destroyed"))

    def _enqueue(self, work: Work, action: Action) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            with (
                as_backend_errors(),
                as_system_failure("there can be no operation in the background"),
            ):
                thread.start()
            self._thread = thread
        self._count(1)
        work.wait_reason = self._wait_reason
        self._queue.put((work, action))

    def _run(self, action: Action) -> Exception | None:
        """The error of an action belongs to whoever waits for it."""
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
        """The lane is idle only after its last operation has ended and the callbacks of its future have run: what they call comes
        before whatever others call next, on every rank."""
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
        """End the thread after what is pending; False if that takes longer than ``timeout`` seconds."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        self._queue.put(None)
        thread.join(timeout)
        return not thread.is_alive()


def no_action() -> None:
    """The action that is none."""


def run_translated(action: Action) -> None:
    """Run an action whose errors leave as those of the backend."""
    try:
        action()
    except MiracclError as error:
        raise BackendError(error) from error


def seconds(timeout: datetime.timedelta | None) -> float | None:
    """c10d says 0 (``kNoTimeout``) where it means the group's own. A wait takes no more than ``params.FOREVER``."""
    return (
        None
        if timeout is None or timeout <= datetime.timedelta(0)
        else min(timeout.total_seconds(), params.FOREVER)
    )
