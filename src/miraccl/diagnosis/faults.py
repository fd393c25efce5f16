"""From a broken wait to an error that names the culprit, on every rank.

The rank that finds a fault asks all ranks for their status, makes the error, and notifies the
others; these, woken by the abort word, raise the same error.  The first fault of a communicator
stays: later calls raise it again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from miraccl import clock
from miraccl.bootstrap import Event, Notice, PeerLeft, PeerLost, Session
from miraccl.deadline import Deadline
from miraccl.diagnosis import blocked_ops, detector
from miraccl.diagnosis.error_codec import death_error, decode_error, departure_error, encode_error
from miraccl.diagnosis.mismatch import (
    compare_messages,
    compare_ops,
    describe_activity,
    describe_completed_peer,
    describe_differences,
    describe_diverged,
    describe_message,
    describe_operation,
    describe_stray_message,
    has_completed,
)
from miraccl.diagnosis.status_report import (
    describe_location,
    describe_unresponsive,
    graph_line,
    query_status,
)
from miraccl.errors import (
    BootstrapError,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorAborted,
    MiracclError,
    PeerDied,
    SystemFailure,
)
from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.lower import describe_signature
from miraccl.runtime import control
from miraccl.runtime.control import ControlOps
from miraccl.runtime.fabric import (
    CATCH_UP_S,
    DEATH_NOTICE_S,
    NOTICE_FIRST_S,
    Fabric,
    run_after_notice,
)
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.wire.proxy_records import CLOSED_WITHOUT_CLOSE_FRAME, Loss, LossKind

SEND_RECV = "send_recv"
#: Seconds in which there is news of what is behind an error of the engine. The memory of a process
#: that dies goes before its connections; whoever finds that a stream has ended has waited already.
_CAUSE_WAIT_S = {
    layout.ERR_ABORTED: 2.0,
    layout.ERR_CMA: DEATH_NOTICE_S,
    layout.ERR_STREAM_ENDED: 0.0,
}
DELIVERY_WAIT_S = 0.5  # for others to hear of a fault, before it is raised here
HINT = "this communicator is broken; shrink() makes one of the living ranks"


class Faults:
    """The fault of one communicator on one rank, if it has one."""

    def __init__(self, session: Session, fabric: Fabric, alone: Callable[[], bool]) -> None:
        """``alone``: see ``control``."""
        self.session, self.fabric = session, fabric
        self.rank, self.nranks = session.rank, session.nranks
        self.global_ranks: Sequence[int] = range(
            session.nranks
        )  # the numbers of the ranks in errors of operations
        self._alone = alone
        self.fault: MiracclError | None = None
        self.lost: dict[int, str] = {}
        self.left: dict[int, str] = {}
        self.closing = False
        self._undelivered = False
        self.raised = False  # the program was told of a fault
        self._unresponsive: set[int] = set()  # did not answer when they were asked last
        self._fault_known = clock.event()
        self._setups: list[SetupPhases] = []
        self._lock = threading.RLock()  # a signal handler may abort in the middle
        self.control = ControlOps(session, fabric, alone, detector.deadlock_detector.wake)
        session.status_provider = self.status
        session.on_event(self._on_event)
        for event in list(fabric.early_events):
            self._on_event(event)

    # ---- what this rank is doing

    def status(self) -> dict[str, Any]:
        history = [
            [number, sig, count] for number, (sig, count) in self.fabric.history(self.rank).items()
        ]
        if blocked_ops.needs_probe():
            detector.deadlock_detector.wake()
        counted = (
            {"sent": self.fabric.context.messages_sent()}
            if self.nranks <= control.COUNTED_RANKS
            else {}
        )
        return {
            **self.fabric.board(),
            "history": history,
            "control_op": self.control.current,
            **counted,
            "program": blocked_ops.local_report(),
        }

    # ---- operations on the control plane

    def run_control_op(
        self, name: str, tag: str, data: bytes, deadline: Deadline | None = None
    ) -> list[bytes]:
        """``session.all_gather`` as an operation ``name`` of the communicator, which its fault
        ends.
        """
        with self.control.enter(name, tag):
            try:
                self.check()
                self._compare_control_ops()
                return self.control.gather(tag, data, deadline)
            except MiracclError as error:
                raise self._explain_control_op(error, name, tag) from None

    def check(self) -> None:
        """Raise the fault, if there is one."""
        if self.fault is not None:
            self.raised = True
            raise self.fault

    def _explain_control_op(self, error: MiracclError, name: str, tag: str) -> MiracclError:
        self.raised = True
        if isinstance(
            error, BootstrapError | PeerDied
        ):  # a rank is gone, perhaps with a fault of which the notice is under way
            self._await_cause(NOTICE_FIRST_S)
        if self.fault is not None:
            self._await_delivery()
            return self.fault
        if isinstance(error, CollectiveTimeout):
            if differing := describe_diverged(self.query_statuses()):
                return self.propagate(
                    CollectiveMismatch(differing, rank=self.rank, op=name, hint=HINT)
                )
            error.op = f"{tag!r} of {name}"
        return error

    def _await_cause(self, seconds: float) -> None:
        """Give the control plane time to tell why something has gone wrong here; what it has told
        by then is known when this returns.
        """
        if not self._fault_known.wait(seconds):
            self.session.drain(CATCH_UP_S)

    @contextlib.contextmanager
    def cancel_on_fault(self, stages: SetupPhases) -> Iterator[None]:
        """Inside the block a fault ends ``stages``."""
        self._setups.append(stages)
        try:
            self.check()
            yield
        except (
            BootstrapError,
            PeerDied,
        ):  # of a rank that has left because of a fault, which another thread may still be telling here
            self.raised = True
            with self._lock:
                fault = self.fault
            if fault is not None:
                raise fault from None
            raise
        finally:
            self._setups.remove(stages)

    def _compare_control_ops(self) -> None:
        """Another rank is in another operation on the control plane, which is as good as any
        signature.
        """
        if ops := self.control.conflicting_ops():
            text = describe_differences(
                {rank: {"collective": op} for rank, op in sorted(ops.items())}
            )
            self.propagate(CollectiveMismatch(text, rank=self.rank, op=ops[self.rank], hint=HINT))

    # ---- from the watcher's thread

    def _on_event(self, event: Event) -> None:
        if isinstance(event, PeerLost):
            self._peer_lost(event)
        elif isinstance(event, PeerLeft) and event.rank >= 0:
            self.left[event.rank] = event.reason
            self.fabric.context.gone[event.rank] = 1
            self.fabric.wake(self.rank)
        elif isinstance(event, Notice):
            self._handle_notice(event.from_rank, event.payload)

    def _peer_lost(self, lost: PeerLost) -> None:
        if self._is_leaving:
            return
        self.lost[lost.rank] = lost.reason
        error = death_error(lost, rank=self.global_ranks[self.rank], global_ranks=self.global_ranks)
        error.hint = HINT
        self.set_fault(self._root_cause(error))

    @property
    def _is_leaving(self) -> bool:
        """Whether this rank leaves, and nothing of it is under way any more."""
        return self.closing and self._alone() and not self.fabric.context.in_engine

    def connection_lost(self, rank: int, loss: Loss) -> None:
        """From a transport: a peer that closed in good order has left; everything else is a fault,
        unless the control plane tells why.
        """
        if loss.kind is LossKind.CLOSED:
            self.left.setdefault(rank, str(loss))
            self.fabric.context.gone[rank] = 1
            self.fabric.wake(self.rank)
        else:
            run_after_notice(self.session, loss, lambda: self._connection_broken(rank, loss))

    def _connection_broken(self, rank: int, loss: Loss) -> None:
        """There is no connection to a rank any more, which lives for all that is known: those
        between whom there is one must be told.
        """
        if not self._is_leaving and self.fault is None and rank not in self.left:
            self._report_loss(rank, loss)

    def _report_loss(self, rank: int, loss: Loss, op: str | None = None) -> MiracclError:
        error = loss.error(rank=self.global_ranks[self.rank], peer=self.global_ranks[rank])
        error.hint, error.op = HINT, op
        return self.propagate(self._root_cause(error))

    def _handle_notice(self, source: int, payload: dict[str, Any]) -> None:
        if payload.get("kind") == control.BLOCKED_NOTICE:
            self.control.on_notice(source, payload)
            self._compare_control_ops()
            return
        if payload.get("kind") == detector.NOTICE_KIND:
            detector.handle_notice(payload)
            return
        if (
            error := decode_error(
                payload, rank=self.global_ranks[self.rank], source=self._global_rank(source)
            )
        ) is not None:
            error.hint = error.hint or HINT
            self.set_fault(self._root_cause(error))

    def set_fault(self, error: MiracclError) -> MiracclError:
        """Make ``error`` the communicator's fault unless it has one; ends all waits of this rank.

        Waits end first: a program that has seen the fault and goes on to another operation must
        find that no operation runs any more, or others would take it for a mismatch.
        """
        with self._lock:
            self.fabric.set_abort(layout.ERR_ABORTED)
            if self.fault is None:
                self.fault = error
        self._fault_known.set()
        if tag := self.control.current.get("tag"):
            self.session.end_gather(tag, "the communicator is broken")
        for stages in list(self._setups):
            stages.cancel(self.fault)
        return self.fault

    def propagate(self, error: MiracclError) -> MiracclError:
        """Settle on a fault found here and tell the others, who have heard of it when this returns:
        then this rank may end.

        They are told first: a program that another thread wakes here may see the fault and end at
        once.
        """
        with self._lock:
            first = self.fault is None
            if first:
                self._notify(error)
            settled = self.set_fault(error)
        if first:
            self._await_delivery()
        return settled

    def _notify(self, error: MiracclError) -> None:
        with contextlib.suppress(
            MiracclError
        ):  # the control plane may be gone as well; the others find out by themselves
            self.session.notify(encode_error(error))
            self._undelivered = True

    def _await_delivery(self) -> None:
        """Wait until the others have heard of the fault; the watcher cannot, so whoever it wakes
        does.
        """
        if self._undelivered:
            with contextlib.suppress(MiracclError):
                self.session.wait_until_delivered(DELIVERY_WAIT_S, without=self._unresponsive)
                self._undelivered = False

    def _root_cause(
        self, error: MiracclError, statuses: dict[int, dict[str, Any]] | None = None
    ) -> MiracclError:
        """What is behind ``error``: a mismatch, where a rank has died, left or aborted after ranks
        had called different operations.

        The boards of this host's ranks tell, which outlive them, and ``statuses``.
        """
        if self.fault is not None or not isinstance(error, PeerDied | CommunicatorAborted):
            return error
        now = self.fabric.board()["seq"]
        for number in sorted(
            self.fabric.history(self.rank), key=lambda number: (number - now - 1) & layout.SEQ_MASK
        ):  # the oldest first
            if differing := self._compare_op(number, statuses or {}):
                return CollectiveMismatch(
                    differing,
                    rank=self.global_ranks[self.rank],
                    peer=error.peer,
                    op=error.op,
                    hint=HINT,
                )
        return error

    # ---- from the thread that was waiting

    def explain(self, code: int) -> MiracclError:
        """The error for an ERR_* of the engine, which is raised then."""
        self.raised = True
        context = self.fabric.context
        peer, step = context.get(layout.CTX_ERR_PEER), context.get(layout.CTX_ERR_STEP)
        want, got = context.get(layout.CTX_ERR_EXPECTED), context.get(layout.CTX_ERR_ACTUAL)
        board = self.fabric.board()
        op, rank, whom = (
            describe_operation(board),
            self.global_ranks[self.rank],
            self._global_rank(peer),
        )
        if code in _CAUSE_WAIT_S:
            self._await_cause(_CAUSE_WAIT_S[code])
            if (
                self.fault is not None and self.fault.op is None
            ):  # a death: it is told what it has interrupted
                self.fault.op = op
            self._await_delivery()
        if code == layout.ERR_ABORTED:
            error = CommunicatorAborted("the operation was aborted", rank=rank, op=op, hint=HINT)
            return self.fault or self.set_fault(self._root_cause(error))
        if self.fault is not None:
            return self.fault
        if code == layout.ERR_TIMEOUT:
            statuses = self.query_statuses()
            differing = (
                ""
                if board["p2p_sig"]
                else self._compare_op(board["sig"] & layout.SEQ_MASK, statuses)
            )
            if (
                differing := differing
                or describe_diverged(statuses)
                or self._peer_completed(peer, board, statuses)
            ):
                return self.propagate(
                    CollectiveMismatch(differing, rank=rank, peer=whom, op=op, hint=HINT)
                )
            graph = self.wait_for_graph(statuses)
            text = (
                f"rank {rank} timed out: no progress within its timeout of "
                f"{self.fabric.timeout:g} s while waiting for rank {whom} in step {step}"
            )
            return self.propagate(
                CollectiveTimeout(text, graph=graph, rank=rank, peer=whom, op=op, hint=HINT)
            )
        if code == layout.ERR_DIVERGED and self.control.reported_op(peer) != control.FINALIZE:
            return self.propagate(self._diverged_error(peer, op))
        if code in (layout.ERR_LEFT, layout.ERR_DIVERGED) or (
            code == layout.ERR_STREAM_ENDED and peer in self.left
        ):
            left = departure_error(whom, self.left.get(peer, "finalized"), rank=rank, op=op)
            left.hint = HINT
            return self.propagate(self._root_cause(left, self.query_statuses()))
        if code == layout.ERR_MISMATCH:
            if describe_signature(want)["collective"] == SEND_RECV and not board["p2p_sig"]:
                op = "send/recv"  # of a group that has not waited yet: the board shows what was before it
            return self.propagate(
                CollectiveMismatch(
                    self._mismatch(peer, want, got), rank=rank, peer=whom, op=op, hint=HINT
                )
            )
        if code == layout.ERR_SIZE:
            text = f"ranks disagree on the size of a message: rank {rank} expects {want} bytes, rank {whom} sent {got}"
            return self.propagate(CollectiveMismatch(text, rank=rank, peer=whom, op=op, hint=HINT))
        if code == layout.ERR_ENDED:
            return self.propagate(
                CollectiveMismatch(
                    self._completed_peer(peer), rank=rank, peer=whom, op=op, hint=HINT
                )
            )
        if code == layout.ERR_STREAM_ENDED:
            return self._report_loss(peer, Loss(LossKind.RESET, CLOSED_WITHOUT_CLOSE_FRAME), op)
        if code == layout.ERR_CMA:
            text = f"the kernel refused to copy {want} bytes from the memory of rank {whom}"
            hint = "MIRACCL_CMA_DISABLE=1 avoids process_vm_readv"
            return self.propagate(SystemFailure(text, rank=rank, peer=whom, op=op, hint=hint))
        return self.propagate(MiracclError(f"the engine returned {code}", rank=rank, op=op))

    def _global_rank(self, rank: int) -> int:
        """The number in errors; what is no rank stays as it is."""
        return self.global_ranks[rank] if 0 <= rank < self.nranks else rank

    def _completed_peer(self, peer: int) -> str:
        return describe_completed_peer(self.global_ranks[self.rank], self.global_ranks[peer])

    def _peer_completed(
        self, peer: int, board: dict[str, int], statuses: dict[int, dict[str, Any]]
    ) -> str:
        """Where ``peer`` has ended the operation on ``board``, and nothing of what it sent is under
        way: so in words; else empty.
        """
        theirs = statuses.get(peer, {}).get("status")
        if (
            board["p2p_sig"]
            or not isinstance(theirs, dict)
            or "sent" not in theirs
            or not has_completed(board, theirs)
        ):
            return ""
        return (
            self._completed_peer(peer)
            if theirs["sent"][self.rank] == self.fabric.context.messages_received(peer)
            else ""
        )

    def _diverged_error(self, peer: int, op: str) -> MiracclError:
        """The error of a wait for a rank that waits on the control plane."""
        statuses, board = self.query_statuses(), self.fabric.board()
        names = {
            peer: self.control.reported_op(peer),
            self.rank: describe_signature(board["p2p_sig"] or board["sig"])["collective"],
        }
        text = describe_diverged(statuses) or describe_differences(
            {rank: {"collective": name} for rank, name in sorted(names.items())}
        )
        return CollectiveMismatch(text, rank=self.rank, peer=peer, op=op, hint=HINT)

    def message_mismatch(
        self, peer: int, mine: tuple[int, int], theirs: tuple[int, int], text: str = ""
    ) -> MiracclError:
        """The error of a message that ``peer`` sent and that is not what this rank receives;
        (signature, elements) of each, and how they differ, where not by these.
        """
        if self.fault is not None:
            return self.fault
        text = text or compare_messages(self.rank, mine, peer, theirs)
        op = describe_message(*mine)
        return self.propagate(CollectiveMismatch(text, rank=self.rank, peer=peer, op=op, hint=HINT))

    def _mismatch(self, peer: int, want: int, got: int) -> str:
        """Which field differs, and which ranks have which value."""
        if SEND_RECV in (
            describe_signature(want)["collective"],
            describe_signature(got)["collective"],
        ):
            return self._compare_with_peer(peer, want, got)
        statuses = (
            self.query_statuses()
        )  # a message of an earlier operation than this: that is where ranks parted
        for number in (got & layout.SEQ_MASK, want & layout.SEQ_MASK):
            if differing := self._compare_op(number, statuses):
                return differing
        return describe_stray_message(
            self.global_ranks[self.rank], self.global_ranks[peer], want, got
        ) or self._compare_with_peer(peer, want, got)

    def _compare_op(self, number: int, statuses: dict[int, dict[str, Any]]) -> str:
        """How the ranks' operations with this number (``SEQ_MASK``) differ, as far as boards and
        ``statuses`` tell; else empty.
        """
        found = {
            rank: entry
            for rank in self.fabric.shm_ranks
            if (entry := self.fabric.history(rank).get(number))
        }
        for rank, answer in statuses.items():
            status = answer.get("status")
            for entry in status.get("history", ()) if isinstance(status, dict) else ():
                if isinstance(entry, list) and len(entry) == 3 and entry[0] == number:
                    found[rank] = (int(entry[1]), int(entry[2]))
        return compare_ops({self.global_ranks[rank]: entry for rank, entry in found.items()})

    def _compare_with_peer(self, peer: int, want: int, got: int) -> str:
        """Two ranks whose messages do not belong together."""
        board = self.fabric.board()
        count = (
            board["p2p_count"]
            if board["p2p_sig"] == want
            else board["count"]
            if board["sig"] == want
            else -1
        )
        same_count = describe_signature(want)["count"] == describe_signature(got)["count"]
        return compare_messages(
            self.global_ranks[self.rank],
            (want, count),
            self.global_ranks[peer],
            (got, count if same_count else -1),
        )

    def query_statuses(self) -> dict[int, dict[str, Any]]:
        """What all ranks are doing, as ``statuses.ask`` has it."""
        statuses = query_status(self.session, self.left)
        self._unresponsive = {
            rank for rank, answer in statuses.items() if not answer.get("answered")
        }
        return statuses

    def wait_for_graph(self, statuses: dict[int, dict[str, Any]]) -> tuple[str, ...]:
        """One line per rank: what it is doing, for whom it waits, and where its program is."""
        seqs = [
            s["status"]["seq"]
            for s in statuses.values()
            if isinstance(s.get("status"), dict) and "seq" in s["status"]
        ]
        newest = max(seqs, default=0)
        lines = []
        for rank in range(self.nranks):
            answer = statuses.get(rank, {"answered": False, "reason": "no answer"})
            board = answer.get("status")
            if rank in self.left:
                lines.append(
                    graph_line(
                        self.global_ranks[rank], f"left the communicator ({self.left[rank]})"
                    )
                )
            elif not answer.get("answered") or not isinstance(board, dict) or "seq" not in board:
                lines.append(graph_line(self.global_ranks[rank], describe_unresponsive(answer)))
            else:
                lines.append(
                    graph_line(
                        self.global_ranks[rank],
                        describe_activity(
                            {**board, "peer": self._global_rank(board["peer"])}, newest
                        ),
                        describe_location(answer),
                    )
                )
        return tuple(lines)
