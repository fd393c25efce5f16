"""Transfers under way: their end, their errors, and what they will do."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from miraccl import clock
from miraccl.deadline import Deadline
from miraccl.errors import MiracclError, TransferCancelled, TransferTimeout

if TYPE_CHECKING:
    from miraccl.p2p.extents import Extents
    from miraccl.p2p.transfer_plan import TransferPlan


#: Pause before the background thread continues a transfer, and pauses without one before it sleeps.
GRACE_S, IDLE_GRACES = 200e-6, 20


class Transfer:
    """Transfer of an agent: a future that can also be awaited.

    Attributes:
        number: Number of the transfer at this agent, which the target's notification repeats.
    """

    def __init__(
        self,
        *,
        kind: str,
        peer: str,
        number: int,
        extents: Extents,
        deadline: Deadline,
    ) -> None:
        self.kind, self.peer, self.number = kind, peer, number
        self.extents, self._deadline = extents, deadline
        self._error: MiracclError | None = None
        self._done = False
        #: Object that owns the local memory.
        self.keep: Any = None

    # ---- for subclasses

    def advance(self, wait: bool) -> None:
        """Continue the transfer; with ``wait`` until it has ended or for a while."""
        raise NotImplementedError

    def continue_alone(self) -> None:
        """Continue the transfer on the background thread."""
        self.advance(False)

    def stop(self) -> None:
        """End a transfer early; return when no further byte is moved."""
        raise NotImplementedError

    def explain(self) -> TransferPlan:
        """Return the method, the steps as a schedule, and the predicted time."""
        raise NotImplementedError

    # ---- for callers

    def done(self) -> bool:
        """Return True if the transfer has ended, successfully or not; never blocks."""
        if not self._done:
            self.advance(False)
        return self._done

    def wait(self, timeout: float | None = None) -> None:
        """Return when the transfer has succeeded.

        Args:
            timeout: Seconds after which to return an error, default the transfer's deadline. The
                transfer goes on after this timeout; it ends at its own deadline.

        Raises:
            TransferError: It failed; the subclass and ``reason`` say how.
            TransferTimeout: ``timeout`` or the deadline of the transfer has passed.
        """
        if not self._done:
            until = None if timeout is None else Deadline.after(timeout)
            while not self._done:
                self.advance(True)
                if not self._done and until is not None and not until.left:
                    raise TransferTimeout(
                        f"{self.kind} of {self.extents.total} bytes with agent {self.peer!r} has "
                        f"not ended after {until.seconds:g} s",
                        agent=self.peer,
                        reason="wait",
                        hint="the transfer goes on: wait again, or cancel it",
                    )
        if self._error is not None:
            raise self._error

    def exception(self, timeout: float | None = None) -> MiracclError | None:
        """Wait for the end and return the error, None after a success."""
        try:
            self.wait(timeout)
        except MiracclError as error:
            if not self._done:
                raise
            return error
        return None

    def cancel(self) -> bool:
        """Stop the transfer; no byte is moved after the return.

        Returns:
            True if it was stopped, False if it had ended.

        Raises:
            TransferTimeout, AgentLost: The target does not confirm that it has stopped.
        """
        if self._done:
            return False
        self.stop()
        return isinstance(self._error, TransferCancelled)

    def __await__(self) -> Generator[Any, None, None]:
        if not self.done():
            import asyncio  # 30 ms, which only coroutines need; they have imported it

            loop = asyncio.get_running_loop()
            yield from loop.run_in_executor(None, self.exception).__await__()
        self.wait()

    # ---- common ends

    def _timed_out(self) -> TransferTimeout:
        return TransferTimeout(
            f"{self.kind} of {self.extents.total} bytes with agent {self.peer!r} has not ended by "
            f"its deadline of {self._deadline.seconds:g} s",
            agent=self.peer,
            reason="deadline",
        )

    def _cancelled(self) -> TransferCancelled:
        return TransferCancelled(
            f"{self.kind} of {self.extents.total} bytes with agent {self.peer!r} was cancelled",
            agent=self.peer,
            reason="cancelled",
        )


class Background:
    """Thread that continues transfers that no caller waits for; it starts with the first of them.

    It stays awake for a while after the last one, so that a program with many short transfers does
    not wake it, and wait for it to give the GIL back, with each of them.
    """

    def __init__(self, name: str) -> None:
        self._transfers: deque[Transfer] = deque()
        self._wake = clock.event()
        self._asleep = False
        self._name = name
        self._thread: clock.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def add(self, transfer: Transfer) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closed:
                    self._thread = clock.thread(self._main, name=f"miraccl-p2p-{self._name}")
                    self._thread.start()
        self._transfers.append(transfer)
        if self._asleep:  # written by the thread before it looks at the transfers again
            self._wake.set()

    def close(self) -> None:
        with self._lock:
            thread, self._closed = self._thread, True
        self._wake.set()
        if thread is not None:
            thread.join()

    def _main(self) -> None:
        idle = 0
        while not self._closed or self._transfers:
            # A caller that waits at once makes the steps itself, without a switch of threads: each
            # transfer is left to it for at least this time.
            waiting = len(self._transfers)
            clock.sleep(GRACE_S)
            idle = 0 if waiting else idle + 1
            for _ in range(waiting):
                transfer = self._transfers.popleft()
                while not transfer.done():
                    transfer.continue_alone()
            if idle >= IDLE_GRACES:
                self._sleep()
                idle = 0

    def _sleep(self) -> None:
        """Sleep until a transfer is added or ``close`` is called."""
        self._asleep = True
        if not self._transfers and not self._closed:
            self._wake.wait()
        self._asleep = False
        self._wake.clear()
