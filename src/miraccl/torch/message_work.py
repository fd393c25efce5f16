"""Work handles of messages in CPU memory, and completion of their futures."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from miraccl import clock
from miraccl.errors import MiracclError, as_system_failure
from miraccl.torch.failures import BackendError, as_backend_errors
from miraccl.torch.matching import SLICE_S, TagMatcher
from miraccl.torch.message import TaggedMessage
from miraccl.torch.work import Action, Work, seconds


class TransferWork(Work):
    """Handle of a send or receive in CPU memory.

    The matcher advances the message inside calls.  ``epilogue`` runs once when it has completed.
    After ``get_future`` a background thread completes it (``FutureCompletion``).
    """

    _done = False
    _error: Exception | None = None
    _future: Any = None
    _in_background = False

    def __init__(
        self,
        name: str,
        tensors: Sequence[Any],
        matcher: TagMatcher,
        message: TaggedMessage,
        futures: FutureCompletion,
        epilogue: Action | None,
    ) -> None:
        dist.Work.__init__(self)
        self._name, self._tensors = name, tensors
        self._matcher, self.message, self._futures, self._epilogue = (
            matcher,
            message,
            futures,
            epilogue,
        )
        self._lock = threading.Lock()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if not self._done:
            try:
                self._matcher.wait(self.message, None if timeout is None else seconds(timeout))
            except MiracclError as error:
                if not self.message.done:
                    raise BackendError(error) from error
            self.complete()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        if not self._done:
            with contextlib.suppress(MiracclError):  # stored in the message
                self._matcher.poll(self.message)
            self.complete()
        return self._done

    def get_future(self) -> Any:
        if not self.is_completed() and not self._in_background:
            self._in_background = True
            self._futures.complete_in_background(self)
        return super().get_future()

    def source_rank(self) -> int:
        """Return the sending rank of a completed receive."""
        return -1 if self.message.peer is None else self.message.peer

    _source_rank = source_rank

    def complete(self) -> None:
        """Take over the message's result once; concurrent callers wait for the first."""
        message = self.message
        if not message.done:
            return
        with self._lock:
            if self._done:
                return
            if message.error is not None:
                self._error = BackendError(message.error)
            elif self._epilogue is not None:
                self._epilogue()
            self._done = True
            fulfil = self._future is not None
        if fulfil:
            self.resolve_future()


class FutureCompletion:
    """Background completion of works whose future was requested, by one thread per group."""

    def __init__(self, name: str, matcher: TagMatcher) -> None:
        self._name, self._matcher = name, matcher
        self._lock = threading.Lock()
        # deadline of each work, in order unless deadlines were changed
        self._open: dict[TransferWork, float] = {}
        self._thread: clock.Thread | None = None

    def complete_in_background(self, work: TransferWork) -> None:
        """Complete ``work`` in the background.

        Called from a callback on the thread itself, complete it at once: the callback may wait for
        it.
        """
        if threading.current_thread() is self._thread:
            self._wait(work, None)
            work.complete()
            return
        with self._lock:
            if self._thread is None:
                thread = clock.thread(target=self._run, name=self._name, daemon=True)
                with (
                    as_backend_errors(),
                    as_system_failure("cannot start the thread of background operations"),
                ):
                    thread.start()
                self._thread = thread
            self._open[work] = clock.monotonic() + self._matcher.timeout

    def _run(self) -> None:
        while works := self._pending():
            self._wait(next(iter(works)), SLICE_S)  # advances all of them
            for work, end in works.items():
                if not work.message.done and clock.monotonic() >= end:
                    self._matcher.expire(work.message)
                if work.message.done:
                    with self._lock:
                        del self._open[work]
                    work.complete()

    def _pending(self) -> dict[TransferWork, float]:
        """Return the open works with their deadlines; without any, the thread ends."""
        with self._lock:
            if not self._open:
                self._thread = None
            return dict(self._open)

    def _wait(self, work: TransferWork, limit: float | None) -> None:
        with contextlib.suppress(MiracclError):  # stored in the message
            self._matcher.wait(work.message, limit)

    def close(self, timeout: float) -> None:
        """Join the thread, after closing the matcher has ended all messages."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
