"""Commands of other threads to a proxy's thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from miraccl import clock
from miraccl.errors import CommunicatorClosed, MiracclError

#: Seconds within which the thread must answer. A round takes milliseconds; longer means that the
#: thread died or that another one holds the GIL.
COMMAND_TIMEOUT_S = 10.0


@dataclass(eq=False)
class _Command:
    """An action for the thread, and its outcome."""

    action: Callable[[], None]
    done: clock.Event = field(default_factory=clock.event)
    error: Exception | None = None

    def run(self) -> None:
        try:
            self.action()
        except Exception as error:
            self.error = error
        self.done.set()

    def reject(self, error: Exception) -> None:
        self.error = error
        self.done.set()


class CommandQueue:
    """Actions that other threads have run in one thread, and wait for.

    Args:
        name: Name of the thread in errors, such as ``"the proxy"``.
        rank: Rank in errors.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name, self._rank = name, rank
        self._queue: clock.Queue[_Command] = clock.simple_queue()
        self._gate = threading.Lock()  # between ``close`` and commands on their way
        self._closed = False

    @property
    def pending(self) -> bool:
        """True while a command has not begun."""
        return not self._queue.empty()

    def call(self, action: Callable[[], None], notify: Callable[[], None]) -> None:
        """Run ``action`` in the thread and wait for its end; ``notify`` wakes the thread.

        Raises:
            CommunicatorClosed: The thread takes no more commands.
            MiracclError: The thread did not answer within ``COMMAND_TIMEOUT_S``.
            Exception: What ``action`` raised.
        """
        command = _Command(action)
        with self._gate:
            if self._closed:
                raise self._closed_error()
            self._queue.put(command)
            notify()
        if not command.done.wait(COMMAND_TIMEOUT_S):
            raise MiracclError(
                f"{self._name} did not answer within {COMMAND_TIMEOUT_S} s", rank=self._rank
            )
        if command.error:
            raise command.error

    def run_pending(self) -> None:
        """Run all queued commands; called by the thread."""
        with suppress(queue.Empty):
            while self.pending:
                self._queue.get_nowait().run()

    def close(self) -> None:
        """Reject queued and later commands; called by the thread when it ends."""
        with self._gate:
            self._closed = True
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait().reject(self._closed_error())

    def _closed_error(self) -> CommunicatorClosed:
        return CommunicatorClosed(f"{self._name} is closed", rank=self._rank)
