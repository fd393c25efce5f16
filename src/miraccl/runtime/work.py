"""Handles of background operations, and the thread that runs these in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from miraccl import clock, params
from miraccl.diagnosis.blocked_ops import BlockedScope, Wait
from miraccl.errors import CollectiveTimeout, InvalidUsage, as_system_failure


def check_timeout(timeout: float | None) -> float | None:
    """Return the timeout of a ``wait`` in seconds; None means the operation's own deadline.

    Raises:
        InvalidUsage: ``timeout`` is not a number.
    """
    if timeout is None:
        return None
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or timeout != timeout:  # NaN; isnan() overflows on large ints
        raise InvalidUsage(f"wait: timeout is {timeout!r}; it must be a number of seconds, or None")
    return float(min(timeout, params.FOREVER))


class Work:
    """Handle of an operation started with ``async_op=True``.

    The operation's buffers belong to the library until ``wait`` has returned.

    Args:
        name: Name of the operation.
        find_wait: Returns the wait of the thread that runs it, for deadlock detection.
    """

    def __init__(self, name: str, find_wait: Callable[[], Wait | None] | None = None) -> None:
        self.name, self._find_wait = name, find_wait
        self._done = clock.event()
        self._result: Any = None
        self._error: BaseException | None = None

    def wait(self, timeout: float | None = None, *, stream: Any = None) -> Any:
        """Block until the operation has ended and return its result.

        Args:
            timeout: Seconds to wait; None waits for the operation's own deadline.
            stream: Ignored for CPU memory: the result is valid for every stream.

        Returns:
            The array with the result, as the operation would return it.

        Raises:
            CollectiveTimeout: Not finished within ``timeout``; the operation continues.
            MiracclError: The operation failed.
        """
        if timeout is None and self._find_wait is not None and not self._done.is_set():
            with BlockedScope(self._find_wait):
                self._done.wait()
        if not self._done.wait(check_timeout(timeout)):
            raise CollectiveTimeout(
                f"timed out after {timeout:g} s; the operation continues", op=self.name
            )
        if self._error is not None:
            raise self._error
        return self._result

    def synchronize(self, timeout: float | None = None) -> Any:
        """Block the host until the operation has ended; on GPU memory ``wait`` only makes a stream
        wait.

        Raises:
            CollectiveTimeout: Not finished within ``timeout`` seconds; the operation continues.
            MiracclError: The operation failed.
        """
        return self.wait(timeout)

    def done(self) -> bool:
        """Return True if the operation has ended, successfully or not.

        Raises:
            MiracclError: Never; ``wait`` raises the error of the operation.
        """
        return self._done.is_set()

    is_completed = done

    def exception(self) -> BaseException | None:
        """Return the error of a finished operation, or None.

        Raises:
            MiracclError: Never; the error is returned.
        """
        return self._error

    def _finish(self, result: Any, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self._done.set()

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.done() else "running"
        return f"<Work {self.name} {state}>"


class BackgroundWorker:
    """Thread that runs operations of one communicator in order; started on first use.

    Args:
        name: Name of the thread.
        on_pending_change: Called before the first pending operation and after the last one:
            in between every call of the communicator queues up.
        find_wait: Returns the wait of the thread, for deadlock detection.
    """

    def __init__(
        self,
        name: str,
        on_pending_change: Callable[[], None],
        find_wait: Callable[[], Wait | None],
    ) -> None:
        self._name, self._on_pending_change, self._find_wait = name, on_pending_change, find_wait
        self._queue: clock.Queue[tuple[Work, Callable[[], Any]] | None] = clock.simple_queue()
        self._lock = threading.RLock()  # reentrant: a signal handler may finalize here
        self._pending = 0
        self._thread: clock.Thread | None = None
        self._closed = False

    @property
    def pending(self) -> int:
        return self._pending

    def submit(self, name: str, action: Callable[[], Any]) -> Work:
        work = Work(name, self._find_wait)
        with self._lock:
            if self._closed:
                raise InvalidUsage(
                    "cannot start the operation: the communicator is closed", op=name
                )
            if self._thread is None:
                thread = clock.thread(target=self._loop, name=self._name, daemon=True)
                with as_system_failure("cannot start the background thread", op=name):
                    thread.start()
                self._thread = thread
            self._pending += 1
            if self._pending == 1:
                self._on_pending_change()
            # Under the lock: an item queued after ``close`` would never run.
            self._queue.put((work, action))
        return work

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            work, action = item
            result, error = None, None
            try:
                result = action()
            except BaseException as caught:  # raised by Work.wait
                error = caught
            with self._lock:
                self._pending -= 1
                if self._pending == 0:
                    self._on_pending_change()
            work._finish(result, error)
            del item, work, action, result

    def close(self, timeout: float) -> bool:
        """Stop the thread after pending work; return False if that takes longer than ``timeout``
        seconds.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        self._queue.put(None)
        deadline = clock.monotonic() + timeout
        thread.join(max(0.0, deadline - clock.monotonic()))
        return not thread.is_alive()
