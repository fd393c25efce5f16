"""Faults of a multi-node communicator: the first one stays, waits end, all ranks are notified."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from miraccl.bootstrap import Event, Notice, PeerLost, Session
from miraccl.diagnosis.error_codec import abort_error, death_error, decode_error, encode_error
from miraccl.diagnosis.status_report import ORDER_HINT
from miraccl.errors import (
    CollectiveMismatch,
    CommunicatorAborted,
    CommunicatorClosed,
    MiracclError,
    SystemFailure,
)

FAULT_NOTICE = "gpu_fault"


class MultiNodeFaults:
    """Fault state of one communicator.

    ``release_waits(fault)`` ends the waits of streams: staging threads answer without running
    anything, kernels of the node end. ``abort_network(reason)`` ends the waits of staging threads.
    """

    def __init__(
        self,
        session: Session,
        *,
        release_waits: Callable[[MiracclError], None],
        abort_network: Callable[[str], None],
    ) -> None:
        self.session, self.rank = session, session.rank
        self.fault: MiracclError | None = None
        self.closed = False
        self.reported = False  # a call has raised the fault
        self._found_here = self._from_peer = False  # by a staging thread; by a peer
        self._release_waits, self._abort_network = release_waits, abort_network
        self._lock = threading.RLock()  # reentrant: a signal handler may abort

    def check(self, name: str = "") -> None:
        """Raise if the communicator is closed or has a fault. Does not wait."""
        if self.closed:
            raise CommunicatorClosed(
                "the communicator has been finalized", rank=self.rank, op=name or None
            )
        if self.fault is not None:
            self.reported = True
            raise self.fault

    def fail_staging(self, error: Exception) -> None:
        """Record the error of a staging thread; a call raises it, or ``unreported`` returns it."""
        self.fail(error, found_here=True)

    def unreported(
        self, stopped: Callable[[], bool], already_reported: bool
    ) -> MiracclError | None:
        """Return the fault that invalidates results and that no call has raised, or None.

        That is (a) a fault found by a staging thread here; or, unless ``already_reported`` by other
        means, (b) a mismatch reported by a peer or (c) a peer's fault that interrupted a wait
        (``stopped()``).
        """
        void = self._found_here or (
            self._from_peer
            and not already_reported
            and (isinstance(self.fault, CollectiveMismatch) or stopped())
        )
        return self.fault if void and not self.reported else None

    def fail(self, error: Exception, from_peer: bool = False, found_here: bool = False) -> None:
        """Set the fault if there is none, and notify the peers unless it came from one."""
        with self._lock:
            if self.fault is not None:
                return
            fault = (
                error
                if isinstance(error, MiracclError)
                else SystemFailure(f"staging failed: {error!r}", rank=self.rank)
            )
            # Notify before the fault is visible: the application may exit at once.
            if not from_peer:
                with contextlib.suppress(MiracclError):  # the control plane may have failed, too
                    self.session.notify({FAULT_NOTICE: encode_error(fault)})
            self.fault, self._from_peer = fault, from_peer
            self._found_here = found_here and not isinstance(fault, CommunicatorAborted)
        self._release_waits(fault)

    def on_event(self, event: Event) -> None:
        """Handle an event of the control plane."""
        if self.closed:
            return
        if isinstance(event, PeerLost):
            self.fail(death := death_error(event, rank=self.rank), from_peer=True)
            self._abort_network(
                death.message
            )  # staging threads may wait for live ranks that will not arrive
        elif isinstance(event, Notice) and (
            error := decode_error(
                event.payload.get(FAULT_NOTICE), rank=self.rank, source=event.from_rank
            )
        ):
            self.fail(error, from_peer=True)
            self._abort_network(error.message)

    def fail_deadlocked(self, op: str, text: str) -> None:
        """Set a deadlock as the fault."""
        if not self.closed:
            self.fail(
                CollectiveMismatch(text, rank=self.rank, op=op, hint=ORDER_HINT), found_here=True
            )
            self._abort_network(text)

    def abort(self, reason: str) -> None:
        """End the waits on all ranks; later calls raise. Any thread may call it."""
        if not self.closed:
            self.fail(abort_error(self.rank, reason))
            self._abort_network(reason)
