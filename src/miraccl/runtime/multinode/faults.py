"""Faults of operations on GPUs of several nodes: provider of ``CommunicatorFaults``."""

from __future__ import annotations

from collections.abc import Callable

from miraccl.bootstrap.contract import Session
from miraccl.bootstrap.events import Event
from miraccl.diagnosis.fault_machine import FaultFound, FaultOrigin, FaultReceived
from miraccl.diagnosis.faults import CommunicatorFaults
from miraccl.errors import CommunicatorClosed, MiracclError, SystemFailure

FAULT_NOTICE = "gpu_fault"


class MultiNodeFaults(CommunicatorFaults):
    """Fault of a communicator's operations on the GPUs of several nodes.

    ``release_waits(fault)`` ends the waits of streams: staging threads answer without running
    anything, kernels of the node end. ``abort_network(reason)`` ends the waits of staging threads.
    """

    notice_key = FAULT_NOTICE
    handles_deadlock_notices = False  # those of the CPU communicator of the same session do

    def __init__(
        self,
        session: Session,
        *,
        release_waits: Callable[[MiracclError], None],
        abort_network: Callable[[str], None],
    ) -> None:
        super().__init__(session)
        self.rank = session.rank
        self.closed = False
        self._release_waits, self._abort_network = release_waits, abort_network

    def check(self, name: str = "") -> None:
        """Raise if the communicator is closed or has a fault. Does not wait."""
        if self.closed:
            raise CommunicatorClosed(
                "the communicator has been finalized", rank=self.rank, op=name or None
            )
        if self.fault is not None:
            self.mark_reported()
            raise self.fault

    def fail_staging(self, error: Exception) -> None:
        """Record the error of a staging thread; a call raises it, or ``unreported`` returns it."""
        self.handle(FaultFound(error=self._as_fault(error), origin=FaultOrigin.ENGINE))

    def fail(self, error: Exception) -> None:
        """Set a fault found here by other means, unless there is one, and notify the peers."""
        self.handle(FaultFound(error=self._as_fault(error)))

    def _as_fault(self, error: Exception) -> MiracclError:
        if isinstance(error, MiracclError):
            return error
        return SystemFailure(f"staging failed: {error!r}", rank=self.rank)

    def unreported(
        self, stopped: Callable[[], bool], already_reported: bool
    ) -> MiracclError | None:
        """Return the fault that invalidates results and that no call has raised, or None.

        See ``FaultMachine.unreported``.
        """
        if self._machine.origin is not FaultOrigin.PEER:
            return self._machine.unreported(already_reported=already_reported, stopped=False)
        return self._machine.unreported(already_reported=already_reported, stopped=stopped())

    # ---- provider

    def _ignores(self, event: Event) -> bool:
        return self.closed

    def _end_waits(self, error: MiracclError | None) -> None:
        """Streams are released in ``_waits_ended``: that takes the lock of the node's faults."""

    def _waits_ended(self, error: MiracclError) -> None:
        self._release_waits(error)

    def _receive(self, error: MiracclError) -> None:
        self.handle(FaultReceived(error=error))
        # Staging threads may wait for live ranks that will not arrive.
        self._abort_network(error.message)

    def fail_deadlocked(self, op: str, text: str) -> None:
        """Set a deadlock as the fault."""
        if not self.closed:
            self.handle(FaultFound(error=self.deadlock_error(op, text), origin=FaultOrigin.ENGINE))
            self._abort_network(text)

    def abort(self, reason: str) -> None:
        """End the waits on all ranks; later calls raise. Any thread may call it."""
        if not self.closed:
            super().abort(reason)
            self._abort_network(reason)
