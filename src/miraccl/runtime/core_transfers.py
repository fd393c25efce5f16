"""Sends and receives of a communicator on one rank, now and in the background."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from miraccl.errors import InvalidUsage, MiracclError
from miraccl.executor.cpu.kernels import layout
from miraccl.runtime.exchange import Transfer, TransferEntry, TransferTable
from miraccl.runtime.p2p_work import P2pWork
from miraccl.runtime.progress import progress
from miraccl.types import Collective

if TYPE_CHECKING:
    from miraccl.executor.cpu.context import Context
    from miraccl.runtime.engine_faults import CpuFaults
    from miraccl.runtime.work import BackgroundWorker, Work


class CoreTransfers(abc.ABC):
    """The part of ``CommunicatorCore`` that runs sends and receives.

    Attributes:
        watched: Set while the progress thread polls this object.
    """

    rank: int
    context: Context
    faults: CpuFaults
    closed: bool
    watched = False
    _worker: BackgroundWorker
    _in_background_advance = False  # the progress thread is inside

    @abc.abstractmethod
    def check(self, code: int, name: str) -> None:
        """Raise if the communicator cannot run ``name``."""

    @abc.abstractmethod
    def check_result(self, code: int, name: str) -> None:
        """Raise the error of a code of the engine."""

    @abc.abstractmethod
    def update_busy(self) -> None:
        """Set the context's busy word from the current state."""

    @abc.abstractmethod
    def _raise_fault(self, code: int, name: str) -> NoReturn:
        """Raise the error for a fault code of the engine."""

    def _open_transfers(self) -> None:
        self._exchange = TransferTable(
            self.rank,
            self.context.connections,
            self.context.fast_call("exchange", Collective.SEND_RECV),
        )

    def exchange(
        self, transfers: Sequence[Transfer], result: Any, name: str, async_op: bool
    ) -> Any:
        """Run sends and receives as one group and return ``result``, or a ``Work`` with
        ``async_op``.

        Background transfers start at once as far as possible. They advance inside later calls of
        this communicator and on the progress thread, and complete before the next collective, which
        uses the same connections.
        """
        if not async_op:
            self._exchange.reject_unmatched_self(transfers)
        entries = self._exchange.add(transfers)
        self.update_busy()
        try:
            if not async_op:
                self.complete(entries, name)
                return result
            if not self._worker.pending:
                self._advance([], name)
            else:
                self._watch_open_transfers()
        except InvalidUsage:
            self._cancel(entries)
            raise
        return P2pWork(name, self, entries, result)

    def start_exchange(self, transfers: Sequence[Transfer], name: str) -> Work:
        """Run sends and receives as one group on the background thread."""
        self._exchange.reject_unmatched_self(transfers)
        entries = self._exchange.add(transfers)
        self.update_busy()

        def run() -> None:
            try:
                self._advance(entries, name)
            except InvalidUsage:
                self._cancel(entries)
                raise

        return self._worker.submit(name, run)

    def _cancel(self, entries: Sequence[TransferEntry]) -> None:
        """Remove transfers of a rejected call, so that they are not sent later."""
        self._exchange.cancel(entries)
        self.update_busy()

    def complete(self, entries: Sequence[TransferEntry], name: str) -> bool:
        """Block until ``entries`` have ended; returns True."""
        self.check(0, name)
        self._exchange.check_can_complete(entries)
        if self._worker.pending:
            self._worker.submit(name, lambda: self._advance(entries, name)).wait()
        elif not all(e.done for e in entries):
            self._advance(entries, name)
        return True

    def _advance(
        self, must: Sequence[TransferEntry], name: str, among: Sequence[TransferEntry] | None = None
    ) -> None:
        code = self._exchange.advance([e for e in must if not e.done], among)
        self._watch_open_transfers()
        self.update_busy()
        self.check_result(code, name)

    def progress(self, entries: Sequence[TransferEntry], name: str) -> bool:
        """Advance transfers without blocking; return True once ``entries`` have ended."""
        if not self._worker.pending and not all(e.done for e in entries):
            self.check(0, name)
            self._advance([], name)
        return all(e.done for e in entries)

    def _watch_open_transfers(self) -> None:
        # The application may make no further call for a while.
        if not self.watched and self._exchange.has_in_flight:
            progress.watch(self)

    def advance_in_background(self) -> bool | None:
        """Advance open transfers without blocking (``progress.Progressable``)."""
        # Set before ``closed`` is read: ``finalize`` sets ``closed``, then waits for this flag.
        self._in_background_advance = True
        try:
            if self.closed or self.faults.fault is not None or not self._exchange.has_in_flight:
                return None
            if self._worker.pending:  # the worker runs open transfers, or before them
                return False
            code, moved = self._exchange.try_advance()
            self.update_busy()
            if code not in (layout.OK, layout.BUSY):
                with contextlib.suppress(
                    MiracclError
                ):  # the next call of the application raises it
                    self._raise_fault(code, "send/recv")
            return moved
        finally:
            self._in_background_advance = False

    def flush(self, background: bool = False) -> None:
        """Complete all open sends and receives, now or (``background``) before the next queued
        operation.
        """
        if not self._exchange.in_flight:
            return
        entries = self._exchange.in_flight
        if background or self._worker.pending:
            # Transfers added until this runs come after the operation that is being queued.
            self._worker.submit("send/recv", lambda: self._advance(entries, "send/recv", entries))
        else:
            self._advance(entries, "send/recv")

    @property
    def transfers(self) -> list[Transfer]:
        """Sends and receives that have started and not ended."""
        return [entry.transfer for entry in self._exchange.in_flight]
