"""Fault of one communicator on one rank: the driver of ``FaultMachine``.

A subclass provides what differs between operations on CPUs, on the GPUs of a host and on GPUs of
several nodes: how waits end, and what lies behind an error.
"""

from __future__ import annotations

import abc
import contextlib
import re
import threading
from collections.abc import Sequence
from typing import Any

from miraccl.bootstrap.contract import Session
from miraccl.bootstrap.events import Event, Notice, PeerLeft, PeerLost
from miraccl.diagnosis import detector
from miraccl.diagnosis.error_codec import abort_error, death_error, decode_error, encode_error
from miraccl.diagnosis.fault_machine import (
    EndWaits,
    FaultFound,
    FaultMachine,
    FaultOrigin,
    FaultReceived,
    Input,
    NotifyPeers,
    Publish,
    Raised,
)
from miraccl.diagnosis.status_report import ORDER_HINT
from miraccl.errors import CollectiveMismatch, MiracclError


class CommunicatorFaults(abc.ABC):
    """Fault of one communicator on one rank.

    ``global_ranks``: rank numbers for errors, by rank of the session; default the same numbers.
    """

    #: Key of fault notices in the payload, empty if the payload is the error itself.
    notice_key = ""
    #: False if another communicator of the same session handles the notices of the detector.
    handles_deadlock_notices = True

    def __init__(self, session: Session, *, global_ranks: Sequence[int] = ()) -> None:
        self.session = session
        self.global_ranks: Sequence[int] = global_ranks or range(session.nranks)
        #: The fault that calls raise; None as long as there is none.
        self.fault: MiracclError | None = None
        self._machine = FaultMachine()
        self._lock = threading.RLock()  # reentrant: a signal handler may abort

    # ---- contract of the providers

    @abc.abstractmethod
    def _end_waits(self, error: MiracclError | None) -> None:
        """End the waits of this rank, now and later. Called with the lock."""

    def _waits_ended(self, error: MiracclError) -> None:  # noqa: B027  # optional
        """Do the rest, without the lock; the fault is visible."""

    def _root_cause(self, error: MiracclError) -> MiracclError:
        """Return what lies behind an error from a peer, ``error`` itself if nothing is known."""
        return error

    def _ignores(self, event: Event) -> bool:
        """Return True if an event does not concern this rank now."""
        return False

    def _peer_left(self, rank: int, reason: str) -> None:  # noqa: B027  # optional
        """Record that a peer has left in good order."""

    # ---- inputs

    @property
    def reported(self) -> bool:
        """True once a call has raised the fault."""
        return self._machine.reported

    def handle(self, event: Input) -> MiracclError | None:
        """Pass an input to the machine and do what follows; return the fault, if there is one.

        Any thread. When it returns, peers have been notified and waits have ended.
        """
        ended: MiracclError | None = None
        with self._lock:
            for action in self._machine.handle(event):
                if isinstance(action, NotifyPeers):
                    self._notify_peers(action.error)
                elif isinstance(action, EndWaits):
                    self._end_waits(action.error)
                    ended = action.error
                else:
                    assert isinstance(action, Publish)
                    self.fault = action.error
            fault = self._machine.fault
        if ended is not None:
            self._waits_ended(ended)
        return fault

    def mark_reported(self) -> None:
        """Note that a call raises the fault."""
        if self.fault is not None:
            self.handle(Raised())

    def set_fault(self, error: MiracclError) -> MiracclError:
        """Set a fault that the peers know, unless there is one; return the one that stays."""
        return self.handle(FaultReceived(error=error, origin=FaultOrigin.HOST)) or error

    def propagate(self, error: MiracclError) -> MiracclError:
        """Set a fault found here, unless there is one, and notify the peers."""
        return self.handle(FaultFound(error=error)) or error

    def abort(self, reason: str) -> None:
        """End the waits on all ranks; later calls raise. Any thread may call it."""
        self.propagate(abort_error(self.global_ranks[self.session.rank], reason))

    def deadlock_error(self, op: str, text: str) -> MiracclError:
        """Return the error for a wait that is part of a deadlock."""
        rank = self.global_ranks[self.session.rank]
        return CollectiveMismatch(text, rank=rank, op=op, hint=ORDER_HINT)

    # ---- peers

    def _notify_peers(self, error: MiracclError) -> None:
        payload = encode_error(error)
        with contextlib.suppress(MiracclError):  # the control plane may have failed as well
            self.session.notify({self.notice_key: payload} if self.notice_key else payload)

    def on_event(self, event: Event) -> None:
        """Handle an event of the control plane; called by the watcher."""
        if self._ignores(event):
            return
        if isinstance(event, PeerLost):
            rank = self.global_ranks[self.session.rank]
            self._receive(death_error(event, rank=rank, global_ranks=self.global_ranks))
        elif isinstance(event, PeerLeft):
            if event.rank >= 0:
                self._peer_left(event.rank, event.reason)
        elif isinstance(event, Notice):
            if event.payload.get("kind") == detector.NOTICE_KIND:
                if not self.handles_deadlock_notices:
                    return
                detector.handle_notice(event.payload)
            else:
                self._on_notice(event.from_rank, event.payload)

    def _on_notice(self, source: int, payload: dict[str, Any]) -> None:
        body = payload.get(self.notice_key) if self.notice_key else payload
        own = self.global_ranks[self.session.rank]
        error = decode_error(body, rank=own, source=self.global_ranks[source])
        if error is not None:
            self._receive(error)

    def _receive(self, error: MiracclError) -> None:
        self.handle(FaultReceived(error=self._root_cause(error)))


_RANKS = re.compile(r"\branks? ((?:\d+(?:, | and |-)?)+)")


def name_world_ranks(error: MiracclError, session: Session) -> MiracclError:
    """Add to an error of a split communicator the numbers that its ranks have in the whole job.

    ``rank``, ``peer`` and the numbers in the text stay those of the communicator.
    """
    world = session.world_ranks
    if world == tuple(range(len(world))) or " of the job]" in error.message:
        return error
    named = {int(n) for found in _RANKS.findall(error.message) for n in re.findall(r"\d+", found)}
    named |= {rank for rank in (error.rank, error.peer) if rank is not None}
    pairs = [f"{rank} is rank {world[rank]}" for rank in sorted(named) if 0 <= rank < len(world)]
    if pairs:
        error.message += f" [{session.name}: rank {', rank '.join(pairs)} of the job]"
    return error
