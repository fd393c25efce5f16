"""Faults of operations on CPUs: provider of ``CommunicatorFaults``.

The rank that finds a fault queries the status of all ranks, makes the error, and notifies the
others; these, woken by the abort word, raise the same error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from miraccl import clock
from miraccl.bootstrap.events import Event, PeerLost
from miraccl.diagnosis import blocked_ops, detector
from miraccl.diagnosis.faults import CommunicatorFaults, name_world_ranks
from miraccl.diagnosis.mismatch import describe_differences, describe_diverged
from miraccl.errors import (
    BootstrapError,
    CollectiveMismatch,
    CollectiveTimeout,
    MiracclError,
    PeerDied,
)
from miraccl.executor.cpu.kernels import layout
from miraccl.runtime import control
from miraccl.runtime.control import ControlOps
from miraccl.runtime.engine_errors import HINT, SEND_RECV, EngineErrors
from miraccl.runtime.loss_notice import (
    CATCH_UP_S,
    DEATH_NOTICE_S,
    NOTICE_FIRST_S,
    run_after_notice,
)
from miraccl.transport.base import Capability, unreachable_peers
from miraccl.wire.proxy_records import Loss, LossKind

if TYPE_CHECKING:
    from miraccl.bootstrap.contract import Session
    from miraccl.deadline import Deadline
    from miraccl.runtime.fabric_contract import Fabric
    from miraccl.runtime.setup_phases import SetupPhases

__all__ = ["HINT", "SEND_RECV", "CpuFaults"]

#: Time (seconds) for the reason behind an error code of the engine to arrive on the control plane.
#: The memory of a process that dies goes before its connections; a stream that has ended has been
#: waited for already.
_CAUSE_WAIT_S = {
    layout.ERR_ABORTED: 2.0,
    layout.ERR_CMA: DEATH_NOTICE_S,
    layout.ERR_STREAM_ENDED: 0.0,
}
#: Time for the connection of a peer that has left to end, after all that it had sent.
STREAM_END_WAIT_S = 2.0
DELIVERY_WAIT_S = 0.5  # for the others to receive a fault before it is raised here


class CpuFaults(CommunicatorFaults):
    """Fault of a communicator's operations on CPU memory.

    ``alone()``: no operation of this rank is in progress beside its program.

    Attributes:
        lost: Reason by rank of the peers that have died.
        left: Reason by rank of the peers that have left.
        closing: This rank is in ``finalize``.
    """

    def __init__(self, session: Session, fabric: Fabric, alone: Callable[[], bool]) -> None:
        self.lost: dict[int, str] = {}
        self.left: dict[int, str] = {}
        self._unlinked: set[int] = set()  # peers whose network connection has ended
        self.control = ControlOps(session, fabric, alone, detector.deadlock_detector.wake)
        self._errors = EngineErrors(session, fabric, self.control, self.left)
        super().__init__(session)
        self.fabric = fabric
        self.rank, self.nranks = session.rank, session.nranks
        self._alone = alone
        self.closing = False
        self.raised = False  # a call has raised an error: the application knows that it failed
        self._undelivered = False  # peers may not have received this rank's fault yet
        self._fault_known = clock.event()
        self._setups: list[SetupPhases] = []
        session.status_provider = self.status
        session.on_event(self.on_event)
        for event in list(fabric.early_events):
            self.on_event(event)

    @property
    def global_ranks(self) -> Sequence[int]:
        """Rank numbers for errors of operations, by rank of the session."""
        return self._errors.global_ranks

    @global_ranks.setter
    def global_ranks(self, numbers: Sequence[int]) -> None:
        self._errors.global_ranks = numbers

    # ---- status

    def status(self) -> dict[str, Any]:
        """Return this rank's part of the replies to status queries."""
        history = [
            [number, sig, count] for number, (sig, count) in self.fabric.history(self.rank).items()
        ]
        if blocked_ops.needs_probe():
            detector.deadlock_detector.wake()
        counted = (
            {"sent": self.fabric.context.messages_sent()}
            if self.nranks <= detector.COUNTED_RANKS
            else {}
        )
        return {
            **self.fabric.board(),
            "history": history,
            "control_op": self.control.current,
            "unreachable": self._unreachable(),
            **counted,
            "program": blocked_ops.local_report(),
        }

    def _unreachable(self) -> list[tuple[int, list[str]]]:
        """Return the peers to which no network path is open, with the states of the paths."""
        with contextlib.suppress(OSError, MiracclError):  # connections are being closed
            return list(unreachable_peers(self.fabric.paths()).items())
        return []

    def query_statuses(self) -> dict[int, dict[str, Any]]:
        """Query the status of all ranks."""
        return self._errors.query_statuses()

    def wait_for_graph(self, statuses: dict[int, dict[str, Any]]) -> tuple[str, ...]:
        """Return the lines of the wait-for graph."""
        return self._errors.wait_for_graph(statuses)

    # ---- control-plane operations

    def run_control_op(
        self, name: str, tag: str, data: bytes, deadline: Deadline | None = None
    ) -> list[bytes]:
        """Run ``session.all_gather`` as operation ``name``; the communicator's fault ends it."""
        with self.control.enter(name, tag):
            try:
                self.check()
                self._compare_control_ops()
                return self.control.gather(tag, data, deadline)
            except MiracclError as error:
                raise self._explain_control_op(error, name, tag) from None

    def check(self, name: str | None = None) -> None:
        """Raise the fault, if there is one, as that of operation ``name`` if it has none."""
        if self.fault is not None:
            self.fault.op = self.fault.op or name
            raise self._raised(self.fault)

    def _explain_control_op(self, error: MiracclError, name: str, tag: str) -> MiracclError:
        self.raised = True
        if isinstance(error, BootstrapError | PeerDied):
            # A rank is gone, perhaps because of a fault whose notice is in flight.
            self._await_cause(NOTICE_FIRST_S)
        if self.fault is not None:
            self._await_delivery()
            return self._raised(self.fault)
        if isinstance(error, CollectiveTimeout):
            if text := describe_diverged(self.query_statuses()):
                found = CollectiveMismatch(text, rank=self.rank, op=name, hint=HINT)
                return self._raised(self.propagate(found))
            error.op = f"{tag!r} of {name}"
        return error

    def _await_cause(self, seconds: float) -> None:
        """Wait for the control plane to deliver the reason behind an error noticed here.

        Everything that it has delivered by then has been handled on return.
        """
        if not self._fault_known.wait(seconds):
            self.session.drain(CATCH_UP_S)

    @contextlib.contextmanager
    def cancel_on_fault(self, setup: SetupPhases) -> Iterator[None]:
        """Context in which a fault cancels ``setup``."""
        self._setups.append(setup)
        try:
            self.check()
            yield
        except (BootstrapError, PeerDied):
            # A rank has left because of a fault, which another thread may be setting now.
            self.raised = True
            with self._lock:
                fault = self.fault
            if fault is not None:
                raise self._raised(fault) from None
            raise
        finally:
            self._setups.remove(setup)

    def _compare_control_ops(self) -> None:
        """Set a mismatch if another rank is in another control-plane operation."""
        if ops := self.control.conflicting_ops():
            text = describe_differences(
                {rank: {"collective": op} for rank, op in sorted(ops.items())}
            )
            self.propagate(CollectiveMismatch(text, rank=self.rank, op=ops[self.rank], hint=HINT))

    # ---- provider

    def _ignores(self, event: Event) -> bool:
        return isinstance(event, PeerLost) and self._is_leaving

    def _end_waits(self, error: MiracclError | None) -> None:
        self.fabric.set_abort(layout.ERR_ABORTED)

    def _waits_ended(self, error: MiracclError) -> None:
        self._fault_known.set()
        if tag := self.control.current.get("tag"):
            self.session.end_gather(tag, "the communicator is broken")
        for setup in list(self._setups):
            setup.cancel(error)

    def _root_cause(self, error: MiracclError) -> MiracclError:
        error.hint = error.hint or HINT
        return self._named(error if self.fault is not None else self._errors.root_cause(error))

    def _named(self, error: MiracclError) -> MiracclError:
        """Add the numbers in the whole job, unless errors have other numbers than the session."""
        if self.global_ranks == range(self.nranks):
            name_world_ranks(error, self.session)
        return error

    def _peer_left(self, rank: int, reason: str) -> None:
        self.left[rank] = reason
        pair = self.fabric.pairs.get(rank)
        if (
            pair is None
            or Capability.NEEDS_PROGRESS not in pair.capabilities
            or rank in self._unlinked
            or self.closing
        ):
            self._wake_for_departure(rank)
            return
        # The notice may overtake messages of the peer: its connection is read to the end.
        timer = clock.timer(STREAM_END_WAIT_S, lambda: self._wake_for_departure(rank))
        timer.daemon, timer.name = True, "miraccl departure"
        try:
            timer.start()
        except RuntimeError:  # cannot start a thread
            self._wake_for_departure(rank)

    def _wake_for_departure(self, rank: int) -> None:
        self.fabric.context.gone[rank] = 1
        self.fabric.wake(self.rank)

    def _notify_peers(self, error: MiracclError) -> None:
        super()._notify_peers(error)
        self._undelivered = True

    def on_event(self, event: Event) -> None:
        if isinstance(event, PeerLost) and not self._is_leaving:
            self.lost[event.rank] = event.reason
        super().on_event(event)

    def _on_notice(self, source: int, payload: dict[str, Any]) -> None:
        if payload.get("kind") == control.BLOCKED_NOTICE:
            self.control.on_notice(source, payload)
            self._compare_control_ops()
        else:
            super()._on_notice(source, payload)

    @property
    def _is_leaving(self) -> bool:
        """True if this rank leaves and has no operation in progress."""
        return self.closing and self._alone() and not self.fabric.context.in_engine

    # ---- connections

    def connection_lost(self, rank: int, loss: Loss) -> None:
        """Handle the end of a connection; called by a transport.

        A peer that closed in good order has left. Everything else is a fault, unless the control
        plane delivers the reason.
        """
        self._unlinked.add(rank)
        if loss.kind is LossKind.CLOSED:
            self.left.setdefault(rank, str(loss))
        if rank in self.left:
            self._wake_for_departure(rank)
        else:
            run_after_notice(self.session, loss, lambda: self._connection_broken(rank, loss))

    def _connection_broken(self, rank: int, loss: Loss) -> None:
        # The peer lives for all that is known, so the others must learn which two it concerns.
        if not self._is_leaving and self.fault is None and rank not in self.left:
            self.propagate(self._errors.loss(rank, loss))

    # ---- faults found here

    def propagate(self, error: MiracclError) -> MiracclError:
        """Set a fault found here, unless there is one, and notify the peers.

        They have received it when this returns: then this rank may exit.
        """
        settled = super().propagate(self._named(error))
        if settled is error:
            self._await_delivery()
        return settled

    def _await_delivery(self) -> None:
        """Wait until the peers have received the fault.

        The watcher cannot wait, so the threads that it wakes do.
        """
        if self._undelivered:
            with contextlib.suppress(MiracclError):
                self.session.wait_until_delivered(
                    DELIVERY_WAIT_S, without=self._errors.unresponsive
                )
                self._undelivered = False

    def _raised(self, error: MiracclError) -> MiracclError:
        """Note that the caller raises the fault ``error``."""
        self.raised = True
        self.mark_reported()
        return error

    def explain(self, code: int, name: str) -> MiracclError:
        """Return the error for an ERR_* code of operation ``name``; the caller raises it."""
        self.raised = True
        op = self._errors.current_op(name)
        if code in _CAUSE_WAIT_S:
            self._await_cause(_CAUSE_WAIT_S[code])
            if self.fault is not None and self.fault.op is None:
                self.fault.op = op  # a death: the operation that it has interrupted
            self._await_delivery()
        if code == layout.ERR_ABORTED:
            if self.fault is None:
                self.set_fault(self._root_cause(self._errors.aborted(op)))
        elif self.fault is None:
            self.propagate(self._errors.build(code))
        assert self.fault is not None
        return self._raised(self.fault)

    def message_mismatch(
        self, peer: int, mine: tuple[int, int], theirs: tuple[int, int], text: str = ""
    ) -> MiracclError:
        """Return the error of a message of ``peer`` that does not match the posted receive.

        (signature, elements) of each; ``text``: how they differ, where not by these.
        """
        if self.fault is not None:
            return self.fault
        return self.propagate(self._errors.messages(peer, mine, theirs, text))
