"""Fault state of one communicator on one rank, as a state machine without I/O.

An input says what has happened; the result is a list of actions in the order in which they have to
be done. ``CommunicatorFaults`` (``faults.py``) does them, with a provider for operations on CPUs
(``runtime/engine_faults.py``), on the GPUs of a host (``runtime/gpu/kernel_faults.py``) and on GPUs
of several nodes (``runtime/multinode/faults.py``).

Rules:

- The first fault stays. Only the root cause replaces it, once: an error of the engine (a kernel or
  a staging thread, which cannot be asked at any time) that explains why a peer has left or aborted.
- Peers are notified before anything of the fault is visible here: the application may exit at once.
- Waits end before the fault is visible: an application that sees it and goes on to another
  operation must find that none still runs, or its peers would report a mismatch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from miraccl.errors import CollectiveMismatch, CommunicatorAborted, MiracclError


class FaultState(enum.Enum):
    """State of the communicator."""

    HEALTHY = "operations run"
    BROKEN = "there is a fault, and waits have ended; no call has raised it"
    REPORTED = "a call has raised the fault"
    CLOSED = "the communicator is closed; nothing is done any more"


class FaultOrigin(enum.Enum):
    """Finder of a fault."""

    HOST = "a call or a thread of this rank"
    ENGINE = "a kernel or a staging thread of this rank"
    PEER = "another rank, or the control plane"


# --- inputs ---


@dataclass(frozen=True, kw_only=True)
class FaultFound:
    """This rank has found a fault: an error, an abort, a deadlock. Peers do not know it.

    ``root_cause``: it explains deaths, aborts and departures that may have been noticed first.
    ``counts_late``: it invalidates results even if another fault came first; an error that is only
    a consequence of that fault does not. ``superseded``: the engine has reported an error that says
    more, which follows.
    """

    error: MiracclError
    origin: FaultOrigin = FaultOrigin.HOST
    root_cause: bool = False
    counts_late: bool = False
    superseded: bool = False


@dataclass(frozen=True, kw_only=True)
class FaultReceived:
    """A peer has reported a fault or died; ``origin`` HOST: another part of this rank knows it."""

    error: MiracclError
    origin: FaultOrigin = FaultOrigin.PEER


@dataclass(frozen=True, kw_only=True)
class FinalMismatch:
    """All ranks are in ``finalize``, and each finds that operations did not match."""

    error: MiracclError


@dataclass(frozen=True, kw_only=True)
class Raised:
    """A call has raised the fault."""


@dataclass(frozen=True, kw_only=True)
class Closed:
    """The communicator is closed."""


Input = FaultFound | FaultReceived | FinalMismatch | Raised | Closed

# --- actions ---


@dataclass(frozen=True, kw_only=True)
class NotifyPeers:
    """Report the error to all other ranks."""

    error: MiracclError


@dataclass(frozen=True, kw_only=True)
class EndWaits:
    """End the waits of this rank, now and later; ``error`` None: the engine's error follows."""

    error: MiracclError | None


@dataclass(frozen=True, kw_only=True)
class Publish:
    """Make the error the fault that calls raise."""

    error: MiracclError


Action = NotifyPeers | EndWaits | Publish

#: Events: ``fault`` (the first, or one that is dropped), ``root cause``, ``final mismatch``,
#: ``raised``, ``close``.
FAULT_TRANSITIONS: dict[tuple[FaultState, str], FaultState] = {
    (FaultState.HEALTHY, "fault"): FaultState.BROKEN,
    (FaultState.HEALTHY, "root cause"): FaultState.BROKEN,
    (FaultState.HEALTHY, "final mismatch"): FaultState.BROKEN,
    (FaultState.BROKEN, "fault"): FaultState.BROKEN,
    (FaultState.BROKEN, "root cause"): FaultState.BROKEN,
    (FaultState.BROKEN, "raised"): FaultState.REPORTED,
    (FaultState.REPORTED, "fault"): FaultState.REPORTED,
    (FaultState.REPORTED, "root cause"): FaultState.REPORTED,
    (FaultState.REPORTED, "raised"): FaultState.REPORTED,
    **{(state, "close"): FaultState.CLOSED for state in FaultState},
}


class FaultMachine:
    """Fault state; ``log``, if given, collects the inputs.

    Attributes:
        state: Its state.
        fault: The fault, also before ``Publish`` is done.
        origin: Finder of the fault.
        found_by_engine: The engine has reported an error, as the fault or too late to be it.
        reported: A call has raised the fault; stays true once the communicator is closed.
    """

    def __init__(self, log: list[Any] | None = None) -> None:
        self.state = FaultState.HEALTHY
        self.fault: MiracclError | None = None
        self.origin: FaultOrigin | None = None
        self.found_by_engine = False
        self.reported = False
        self._has_root_cause = False
        self._log = log

    def handle(self, event: Input) -> list[Action]:
        """Take one input; return the actions in order."""
        if self._log is not None:
            self._log.append(event)
        if self.state is FaultState.CLOSED:
            return []
        if isinstance(event, FaultFound):
            return self._found(event)
        if isinstance(event, FaultReceived):
            if self.fault is not None:
                self._advance("fault")
                return []
            self._set(event.error, event.origin, "fault")
            return [EndWaits(error=event.error), Publish(error=event.error)]
        if isinstance(event, FinalMismatch):
            if self.fault is not None:
                return []
            self._set(event.error, FaultOrigin.ENGINE, "final mismatch")
            self.found_by_engine = True
            return [Publish(error=event.error)]
        self.reported |= isinstance(event, Raised)
        self._advance("raised" if isinstance(event, Raised) else "close")
        return []

    def _found(self, event: FaultFound) -> list[Action]:
        if event.superseded:
            return [NotifyPeers(error=event.error), EndWaits(error=None)]
        from_engine = event.origin is FaultOrigin.ENGINE
        # An abort is not a finding: results are invalid because of it, not because of an error.
        counts = from_engine and not isinstance(event.error, CommunicatorAborted)
        counts &= event.counts_late or self.fault is None
        replaces = event.root_cause and not (self.found_by_engine or self._has_root_cause)
        self.found_by_engine |= counts
        if self.fault is not None and not replaces:
            self._advance("fault")
            return []
        self._has_root_cause |= event.root_cause
        self._set(event.error, event.origin, "root cause" if event.root_cause else "fault")
        return [
            NotifyPeers(error=event.error),
            EndWaits(error=event.error),
            Publish(error=event.error),
        ]

    def _set(self, error: MiracclError, origin: FaultOrigin, event: str) -> None:
        self._advance(event)
        self.fault, self.origin = error, origin

    def _advance(self, event: str) -> None:
        self.state = FAULT_TRANSITIONS[self.state, event]

    def unreported(self, *, already_reported: bool, stopped: bool) -> MiracclError | None:
        """Return the fault that invalidates results and that no call has raised, or None.

        That is a fault found by the engine; or, unless the application knows of it by other means
        (``already_reported``), a mismatch found by a peer, or any fault of a peer that has ended a
        wait of this rank without what it waited for (``stopped``).
        """
        if self.fault is None or self.reported:
            return None
        void = self.found_by_engine or (
            self.origin is FaultOrigin.PEER
            and not already_reported
            and (isinstance(self.fault, CollectiveMismatch) or stopped)
        )
        return self.fault if void else None

    def validate_state(self) -> None:
        """Assert the machine's invariants."""
        assert (self.fault is None) == (self.origin is None)
        if self.state in (FaultState.BROKEN, FaultState.REPORTED):
            assert self.fault is not None
        if self.state is not FaultState.CLOSED:
            assert self.reported == (self.state is FaultState.REPORTED)
        if self.state is FaultState.HEALTHY:
            assert self.fault is None
            assert not self.found_by_engine
