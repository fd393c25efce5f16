"""How a communicator over hosts fails: the first fault stays, streams are let go, and every rank is told."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from miraccl.bootstrap import Event, Notice, PeerLost, Session
from miraccl.comm.notices import from_words, of_abort, of_death, to_words
from miraccl.errors import CommunicatorAborted, CommunicatorClosed, MiracclError, SystemFailure

NOTICE = "gpu_fault"


class HostsFaults:
    """The fault of one communicator, if it has one.

    ``let_go(fault)`` ends what streams wait for: lanes answer without running anything, kernels of the host end.  ``abort_network(reason)``
    ends what lanes wait for.
    """

    def __init__(self, session: Session, *, let_go: Callable[[MiracclError], None], abort_network: Callable[[str], None]) -> None:
        self.session, self.rank = session, session.rank
        self.fault: MiracclError | None = None
        self.closed = False
        self.told = False  # a call has raised the fault
        self._found = False  # a lane has found it
        self._let_go, self._abort_network = let_go, abort_network
        self._lock = threading.RLock()  # a signal handler may abort in the middle

    def check(self, name: str = "") -> None:
        """Raise if the communicator is closed or broken. Does not wait."""
        if self.closed:
            raise CommunicatorClosed("the communicator has been finalized", rank=self.rank, op=name or None)
        if self.fault is not None:
            self.told = True
            raise self.fault

    def found(self, error: Exception) -> None:
        """What a lane was to run has failed: the program is told, by ``untold`` if not by a call."""
        self.fail(error, found=True)

    def untold(self) -> MiracclError | None:
        """What lanes found and no call has raised; that another rank has aborted, a call alone tells."""
        return self.fault if self._found and not self.told else None

    def fail(self, error: Exception, told: bool = False, found: bool = False) -> None:
        """The first fault stays. The other ranks are told unless they told us, before the program can see it: that may end at once."""
        with self._lock:
            if self.fault is not None:
                return
            fault = error if isinstance(error, MiracclError) else SystemFailure(f"staging failed: {error!r}", rank=self.rank)
            if not told:
                with contextlib.suppress(MiracclError):  # the control plane may be gone as well
                    self.session.notify({NOTICE: to_words(fault)})
            self.fault = fault
            self._found = found and not isinstance(fault, CommunicatorAborted)
        self._let_go(fault)

    def heard(self, event: Event) -> None:
        """From the control plane."""
        if self.closed:
            return
        if isinstance(event, PeerLost):
            self.fail(of_death(event, rank=self.rank), told=True)
        elif isinstance(event, Notice) and (error := from_words(event.payload.get(NOTICE), rank=self.rank, source=event.from_rank)):
            self.fail(error, told=True)
            self._abort_network(error.message)

    def abort(self, reason: str) -> None:
        """End what waits, on all ranks; later calls raise. Any thread may call it."""
        if not self.closed:
            self.fail(of_abort(self.rank, reason))
            self._abort_network(reason)
