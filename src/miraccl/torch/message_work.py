"""Handles of messages of CPU memory, and what sees to their futures."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from miraccl.errors import MiracclError, as_system_failure
from miraccl.torch.failures import BackendError, as_backend_errors
from miraccl.torch.matching import SLICE_S, TagMatcher
from miraccl.torch.message import TaggedMessage
from miraccl.torch.work import Action, Work, seconds


class TransferWork(Work):
    """A send or receive of CPU memory. Its ``post`` goes on with it; ``after`` is what remains when it has ended.

    ``futures`` see to it that it ends by itself once somebody has its future.
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
            with contextlib.suppress(MiracclError):  # it becomes the message's
                self._matcher.poll(self.message)
            self.complete()
        return self._done

    def get_future(self) -> Any:
        if not self.is_completed() and not self._in_background:
            self._in_background = True
            self._futures.complete_in_background(self)
        return super().get_future()

    def source_rank(self) -> int:
        """The rank that sent, of a receive that has ended."""
        return -1 if self.message.peer is None else self.message.peer

    _source_rank = source_rank

    def complete(self) -> None:
        """End as the message has ended; whoever comes second waits for the first."""
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
    """Works whose futures somebody has end by themselves, each when its message has ended: one thread of the group waits for them all,
    while there are any."""

    def __init__(self, name: str, matcher: TagMatcher) -> None:
        self._name, self._matcher = name, matcher
        self._lock = threading.Lock()
        self._open: dict[
            TransferWork, float
        ] = {}  # in the order of their deadlines, unless these have been changed
        self._thread: threading.Thread | None = None

    def complete_in_background(self, work: TransferWork) -> None:
        """Have a work end; from a callback, which runs on the thread itself and may wait for it there, at once."""
        if threading.current_thread() is self._thread:
            self._wait(work, None)
            work.complete()
            return
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                with (
                    as_backend_errors(),
                    as_system_failure("there can be no operation in the background"),
                ):
                    thread.start()
                self._thread = thread
            self._open[work] = time.monotonic() + self._matcher.timeout

    def _run(self) -> None:
        while works := self._pending():
            self._wait(next(iter(works)), SLICE_S)  # in which the others go on as well
            for work, end in works.items():
                if not work.message.done and time.monotonic() >= end:
                    self._matcher.expire(work.message)
                if work.message.done:
                    with self._lock:
                        del self._open[work]
                    work.complete()

    def _pending(self) -> dict[TransferWork, float]:
        """What has not ended; with nothing left the thread ends."""
        with self._lock:
            if not self._open:
                self._thread = None
            return dict(self._open)

    def _wait(self, work: TransferWork, limit: float | None) -> None:
        with contextlib.suppress(MiracclError):  # it becomes the message's
            self._matcher.wait(work.message, limit)

    def close(self, timeout: float) -> None:
        """Wait for the thread, after the post was closed, which ends all messages."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
