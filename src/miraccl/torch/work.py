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

from miraccl.comm.work import Work as OpenWork
from miraccl.errors import CollectiveTimeout, CommunicatorClosed, MiracclError
from miraccl.torch.failures import BackendError

Action = Callable[[], Any]


class Work(dist.Work):
    """An operation of the backend. ``wait`` raises its error; the future holds the tensors that got a result."""

    def __init__(self, name: str, tensors: Sequence[Any]) -> None:
        super().__init__()
        self._name, self._tensors = name, list(tensors)
        self._done = threading.Event()
        self._error: Exception | None = None
        self._future: Any = None
        self._lock = threading.Lock()

    @classmethod
    def finished(cls, name: str, tensors: Sequence[Any]) -> Work:
        self = cls(name, tensors)
        self._done.set()
        return self

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """True when the operation has ended well; ``BackendError`` after its failure or after ``timeout`` (none, or 0: the group's)."""
        if not self._done.wait(_seconds(timeout)):
            raise BackendError(CollectiveTimeout(f"not finished within {timeout}; it goes on in the background", op=self._name))
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done.is_set()

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
            fulfil = fresh and self._done.is_set()
        if fulfil:
            self._fulfil()
        return self._future

    def end(self, error: Exception | None) -> None:
        """From whoever ran it."""
        with self._lock:
            self._error = error
            self._done.set()
            fulfil = self._future is not None
        if fulfil:
            self._fulfil()

    def _fulfil(self) -> None:
        """Callbacks of the future run in here, and may ask for anything: no lock is held."""
        if self._error is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(self._error)


class Lane:
    """One thread for the asynchronous operations of a group, started when it is first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Work, Action] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._turn = threading.RLock()
        self._pending = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        return self._pending == 0

    def run(self, name: str, action: Action) -> None:
        """Run an action after what is pending, and wait for it. The callback of a future, which runs on the lane itself, does not queue."""
        if self.idle or threading.current_thread() is self._thread:
            with self._turn:
                _translated(action)
        else:
            self.submit(Work(name, []), action).wait()

    def submit(self, work: Work, action: Action) -> Work:
        """Run an action in the background, in order."""
        with self._lock:
            if self._closed:
                raise BackendError(CommunicatorClosed("the process group has been destroyed"))
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            self._pending += 1
            self._queue.put((work, action))
        return work

    def try_now(self, action: Action) -> bool:
        """Run a short action unless that would have to wait; whether it ran."""
        if not self.idle or not self._turn.acquire(blocking=False):
            return False
        try:
            _translated(action)
        finally:
            self._turn.release()
        return True

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            work, action = item
            error: Exception | None = None
            try:
                with self._turn:
                    _translated(action)
            except Exception as caught:  # it belongs to whoever waits
                error = caught
            with self._lock:
                self._pending -= 1
            work.end(error)
            del item, work, action

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


class TransferWork(Work):
    """A send or receive. It goes on inside calls of its group, ``wait`` and ``is_completed`` among them.

    ``begin`` starts it in the communicator, ``after`` is what remains when it has ended.
    """

    def __init__(self, name: str, tensors: Sequence[Any], lane: Lane, begin: Callable[[], OpenWork], after: Action) -> None:
        super().__init__(name, tensors)
        self._lane, self._begin, self._after = lane, begin, after
        self._open: OpenWork | None = None
        self._handed_over = False
        lane.run(name, self._start)

    def _start(self) -> None:
        self._open = self._begin()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if not self._done.is_set() and not self._handed_over:
            limit = _seconds(timeout)
            self._lane.run(self._name, lambda: self._settle(limit))
        return super().wait(timeout)

    def is_completed(self) -> bool:
        if not self._done.is_set() and not self._handed_over:
            self._lane.try_now(self._poll)
        return self._done.is_set()

    def get_future(self) -> Any:
        """A future has to end by itself: the lane takes over the waiting."""
        if not self._done.is_set() and not self._handed_over:
            self._handed_over = True
            self._lane.submit(Work(self._name, []), lambda: self._settle(None))
        return super().get_future()

    def _poll(self) -> None:
        if self._open is not None and self._open.done():
            self._settle(None)

    def _settle(self, limit: float | None) -> None:
        if self._done.is_set() or self._open is None:
            return
        try:
            self._open.wait(limit)
            self._after()
        except CollectiveTimeout as error:
            if limit is None:
                self.end(BackendError(error))
            else:
                raise
        except MiracclError as error:
            self.end(BackendError(error))
        else:
            self.end(None)


def _translated(action: Action) -> None:
    try:
        action()
    except MiracclError as error:
        raise BackendError(error) from error


def _seconds(timeout: datetime.timedelta | None) -> float | None:
    """c10d says 0 (``kNoTimeout``) where it means the group's own."""
    return None if timeout is None or timeout <= datetime.timedelta(0) else timeout.total_seconds()
