"""From a broken wait to an error that names the culprit, on every rank.

The rank that finds a fault asks all ranks for their status, makes the error, and notifies the others; these, woken by the abort word,
raise the same error.  The first fault of a communicator stays: later calls raise it again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from miraccl.bootstrap import Event, Notice, PeerLeft, PeerLost, Session
from miraccl.deadline import Deadline
from miraccl.diagnosis import blocked_ops, detector
from miraccl.diagnosis.error_codec import from_words, of_death, of_leave, to_words
from miraccl.diagnosis.mismatch import (
    activity,
    compared,
    describe_message,
    describe_operation,
    differences,
    has_ended,
    in_vain,
    of_another_operation,
    parted,
    unlike_messages,
)
from miraccl.diagnosis.status_report import ask, graph_line, place, silence
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
from miraccl.runtime.control import Control
from miraccl.runtime.fabric import CATCH_UP_S, DEATH_NOTICE_S, NOTICE_FIRST_S, Fabric, after_notice
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.wire.proxy_records import CLOSED_WITHOUT_A_WORD, Loss, LossKind

SEND_RECV = "send_recv"
#: Seconds in which there is news of what is behind an error of the engine. The memory of a process that dies goes before its connections;
#: whoever finds that a stream has ended has waited already.
_BEHIND_S = {layout.ERR_ABORTED: 2.0, layout.ERR_CMA: DEATH_NOTICE_S, layout.ERR_CUT: 0.0}
HEARD_WAIT_S = 0.5  # for others to hear of a fault, before it is raised here
HINT = "this communicator is broken; shrink() makes one of the living ranks"


class Faults:
    """The fault of one communicator on one rank, if it has one."""

    def __init__(self, session: Session, fabric: Fabric, alone: Callable[[], bool]) -> None:
        """``alone``: see ``control``."""
        self.session, self.fabric = session, fabric
        self.rank, self.nranks = session.rank, session.nranks
        self.called: Sequence[int] = range(
            session.nranks
        )  # the numbers of the ranks in errors of operations
        self._alone = alone
        self.fault: MiracclError | None = None
        self.lost: dict[int, str] = {}
        self.left: dict[int, str] = {}
        self.closing = False
        self._unheard = False
        self.raised = False  # the program was told of a fault
        self._silent: set[int] = set()  # did not answer when they were asked last
        self._told = threading.Event()
        self._stages: list[SetupPhases] = []
        self._lock = threading.RLock()  # a signal handler may abort in the middle
        self.control = Control(session, fabric, alone, detector.lookout.call)
        session.status_provider = self.status
        session.on_event(self._on_event)
        for event in list(fabric.early):
            self._on_event(event)

    # ---- what this rank is doing

    def status(self) -> dict[str, Any]:
        history = [
            [number, sig, count] for number, (sig, count) in self.fabric.history(self.rank).items()
        ]
        if blocked_ops.needs_look():
            detector.lookout.call()
        counted = (
            {"sent": self.fabric.context.sent()} if self.nranks <= control.COUNTED_RANKS else {}
        )
        return {
            **self.fabric.board(),
            "history": history,
            "meeting": self.control.now,
            **counted,
            "program": blocked_ops.report(),
        }

    # ---- operations on the control plane

    def meet(
        self, name: str, tag: str, data: bytes, deadline: Deadline | None = None
    ) -> list[bytes]:
        """``session.all_gather`` as an operation ``name`` of the communicator, which its fault ends."""
        with self.control.attend(name, tag):
            try:
                self.check()
                self._compare_meetings()
                return self.control.gather(tag, data, deadline)
            except MiracclError as error:
                raise self._explain_meeting(error, name, tag) from None

    def check(self) -> None:
        """Raise the fault, if there is one."""
        if self.fault is not None:
            self.raised = True
            raise self.fault

    def _explain_meeting(self, error: MiracclError, name: str, tag: str) -> MiracclError:
        self.raised = True
        if isinstance(
            error, BootstrapError | PeerDied
        ):  # a rank is gone, perhaps with a fault of which the notice is under way
            self._await_news(NOTICE_FIRST_S)
        if self.fault is not None:
            self._let_hear()
            return self.fault
        if isinstance(error, CollectiveTimeout):
            if differing := parted(self.statuses()):
                return self.spread(
                    CollectiveMismatch(differing, rank=self.rank, op=name, hint=HINT)
                )
            error.op = f"{tag!r} of {name}"
        return error

    def _await_news(self, seconds: float) -> None:
        """Give the control plane time to tell why something has gone wrong here; what it has told by then is known when this returns."""
        if not self._told.wait(seconds):
            self.session.catch_up(CATCH_UP_S)

    @contextlib.contextmanager
    def ending(self, stages: SetupPhases) -> Iterator[None]:
        """Inside the block a fault ends ``stages``."""
        self._stages.append(stages)
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
            self._stages.remove(stages)

    def _compare_meetings(self) -> None:
        """Another rank is in another operation on the control plane, which is as good as any signature."""
        if ops := self.control.others():
            text = differences({rank: {"collective": op} for rank, op in sorted(ops.items())})
            self.spread(CollectiveMismatch(text, rank=self.rank, op=ops[self.rank], hint=HINT))

    # ---- from the watcher's thread

    def _on_event(self, event: Event) -> None:
        if isinstance(event, PeerLost):
            self._peer_lost(event)
        elif isinstance(event, PeerLeft) and event.rank >= 0:
            self.left[event.rank] = event.reason
            self.fabric.context.gone[event.rank] = 1
            self.fabric.wake(self.rank)
        elif isinstance(event, Notice):
            self._noticed(event.from_rank, event.payload)

    def _peer_lost(self, lost: PeerLost) -> None:
        if self._needs_nobody:
            return
        self.lost[lost.rank] = lost.reason
        error = of_death(lost, rank=self.called[self.rank], called=self.called)
        error.hint = HINT
        self.settle(self._behind(error))

    @property
    def _needs_nobody(self) -> bool:
        """Whether this rank leaves, and nothing of it is under way any more."""
        return self.closing and self._alone() and not self.fabric.context.occupied

    def connection_lost(self, rank: int, loss: Loss) -> None:
        """From a transport: a peer that closed in good order has left; everything else is a fault, unless the control plane tells why."""
        if loss.kind is LossKind.CLOSED:
            self.left.setdefault(rank, str(loss))
            self.fabric.context.gone[rank] = 1
            self.fabric.wake(self.rank)
        else:
            after_notice(self.session, loss, lambda: self._without(rank, loss))

    def _without(self, rank: int, loss: Loss) -> None:
        """There is no connection to a rank any more, which lives for all that is known: those between whom there is one must be told."""
        if not self._needs_nobody and self.fault is None and rank not in self.left:
            self._tell_loss(rank, loss)

    def _tell_loss(self, rank: int, loss: Loss, op: str | None = None) -> MiracclError:
        error = loss.error(rank=self.called[self.rank], peer=self.called[rank])
        error.hint, error.op = HINT, op
        return self.spread(self._behind(error))

    def _noticed(self, source: int, payload: dict[str, Any]) -> None:
        if payload.get("kind") == control.KIND:
            self.control.hear(source, payload)
            self._compare_meetings()
            return
        if payload.get("kind") == detector.KIND:
            detector.hear(payload)
            return
        if (
            error := from_words(payload, rank=self.called[self.rank], source=self._name(source))
        ) is not None:
            error.hint = error.hint or HINT
            self.settle(self._behind(error))

    def settle(self, error: MiracclError) -> MiracclError:
        """Make ``error`` the communicator's fault unless it has one; ends all waits of this rank.

        Waits end first: a program that has seen the fault and goes on to another operation must find that no operation runs any more, or
        others would take it for a mismatch.
        """
        with self._lock:
            self.fabric.set_abort(layout.ERR_ABORTED)
            if self.fault is None:
                self.fault = error
        self._told.set()
        if tag := self.control.now.get("tag"):
            self.session.end_gather(tag, "the communicator is broken")
        for stages in list(self._stages):
            stages.cancel(self.fault)
        return self.fault

    def spread(self, error: MiracclError) -> MiracclError:
        """Settle on a fault found here and tell the others, who have heard of it when this returns: then this rank may end.

        They are told first: a program that another thread wakes here may see the fault and end at once.
        """
        with self._lock:
            first = self.fault is None
            if first:
                self._tell(error)
            settled = self.settle(error)
        if first:
            self._let_hear()
        return settled

    def _tell(self, error: MiracclError) -> None:
        with contextlib.suppress(
            MiracclError
        ):  # the control plane may be gone as well; the others find out by themselves
            self.session.notify(to_words(error))
            self._unheard = True

    def _let_hear(self) -> None:
        """Wait until the others have heard of the fault; the watcher cannot, so whoever it wakes does."""
        if self._unheard:
            with contextlib.suppress(MiracclError):
                self.session.wait_until_heard(HEARD_WAIT_S, without=self._silent)
                self._unheard = False

    def _behind(
        self, error: MiracclError, statuses: dict[int, dict[str, Any]] | None = None
    ) -> MiracclError:
        """What is behind ``error``: a mismatch, where a rank has died, left or aborted after ranks had called different operations.

        The boards of this host's ranks tell, which outlive them, and ``statuses``.
        """
        if self.fault is not None or not isinstance(error, PeerDied | CommunicatorAborted):
            return error
        now = self.fabric.board()["seq"]
        for number in sorted(
            self.fabric.history(self.rank), key=lambda number: (number - now - 1) & layout.SEQ_MASK
        ):  # the oldest first
            if differing := self._compared(number, statuses or {}):
                return CollectiveMismatch(
                    differing, rank=self.called[self.rank], peer=error.peer, op=error.op, hint=HINT
                )
        return error

    # ---- from the thread that was waiting

    def explain(self, code: int) -> MiracclError:
        """The error for an ERR_* of the engine, which is raised then."""
        self.raised = True
        context = self.fabric.context
        peer, step = context.get(layout.CTX_ERR_PEER), context.get(layout.CTX_ERR_STEP)
        want, got = context.get(layout.CTX_ERR_WANT), context.get(layout.CTX_ERR_GOT)
        board = self.fabric.board()
        op, rank, whom = describe_operation(board), self.called[self.rank], self._name(peer)
        if code in _BEHIND_S:
            self._await_news(_BEHIND_S[code])
            if (
                self.fault is not None and self.fault.op is None
            ):  # a death: it is told what it has interrupted
                self.fault.op = op
            self._let_hear()
        if code == layout.ERR_ABORTED:
            error = CommunicatorAborted("the operation was aborted", rank=rank, op=op, hint=HINT)
            return self.fault or self.settle(self._behind(error))
        if self.fault is not None:
            return self.fault
        if code == layout.ERR_TIMEOUT:
            statuses = self.statuses()
            differing = (
                "" if board["p2p_sig"] else self._compared(board["sig"] & layout.SEQ_MASK, statuses)
            )
            if (
                differing := differing
                or parted(statuses)
                or self._waits_in_vain(peer, board, statuses)
            ):
                return self.spread(
                    CollectiveMismatch(differing, rank=rank, peer=whom, op=op, hint=HINT)
                )
            graph = self.wait_for_graph(statuses)
            text = f"rank {rank} passed the deadline of {self.fabric.timeout:g} s while waiting for rank {whom} in step {step}"
            return self.spread(
                CollectiveTimeout(text, graph=graph, rank=rank, peer=whom, op=op, hint=HINT)
            )
        if code == layout.ERR_PARTED and self.control.told_by(peer) != control.FINALIZE:
            return self.spread(self._parted(peer, op))
        if code in (layout.ERR_LEFT, layout.ERR_PARTED) or (
            code == layout.ERR_CUT and peer in self.left
        ):
            left = of_leave(whom, self.left.get(peer, "finalized"), rank=rank, op=op)
            left.hint = HINT
            return self.spread(self._behind(left, self.statuses()))
        if code == layout.ERR_MISMATCH:
            if describe_signature(want)["collective"] == SEND_RECV and not board["p2p_sig"]:
                op = "send/recv"  # of a group that has not waited yet: the board shows what was before it
            return self.spread(
                CollectiveMismatch(
                    self._mismatch(peer, want, got), rank=rank, peer=whom, op=op, hint=HINT
                )
            )
        if code == layout.ERR_SIZE:
            text = f"ranks disagree on the size of a message: rank {rank} expects {want} bytes, rank {whom} sent {got}"
            return self.spread(CollectiveMismatch(text, rank=rank, peer=whom, op=op, hint=HINT))
        if code == layout.ERR_ENDED:
            return self.spread(
                CollectiveMismatch(self._in_vain(peer), rank=rank, peer=whom, op=op, hint=HINT)
            )
        if code == layout.ERR_CUT:
            return self._tell_loss(peer, Loss(LossKind.RESET, CLOSED_WITHOUT_A_WORD), op)
        if code == layout.ERR_CMA:
            text = f"the kernel refused to copy {want} bytes from the memory of rank {whom}"
            hint = "MIRACCL_CMA_DISABLE=1 avoids process_vm_readv"
            return self.spread(SystemFailure(text, rank=rank, peer=whom, op=op, hint=hint))
        return self.spread(MiracclError(f"the engine returned {code}", rank=rank, op=op))

    def _name(self, rank: int) -> int:
        """The number in errors; what is no rank stays as it is."""
        return self.called[rank] if 0 <= rank < self.nranks else rank

    def _in_vain(self, peer: int) -> str:
        return in_vain(self.called[self.rank], self.called[peer])

    def _waits_in_vain(
        self, peer: int, board: dict[str, int], statuses: dict[int, dict[str, Any]]
    ) -> str:
        """Where ``peer`` has ended the operation on ``board``, and nothing of what it sent is under way: so in words; else empty."""
        theirs = statuses.get(peer, {}).get("status")
        if (
            board["p2p_sig"]
            or not isinstance(theirs, dict)
            or "sent" not in theirs
            or not has_ended(board, theirs)
        ):
            return ""
        return (
            self._in_vain(peer)
            if theirs["sent"][self.rank] == self.fabric.context.received(peer)
            else ""
        )

    def _parted(self, peer: int, op: str) -> MiracclError:
        """The error of a wait for a rank that waits on the control plane."""
        statuses, board = self.statuses(), self.fabric.board()
        names = {
            peer: self.control.told_by(peer),
            self.rank: describe_signature(board["p2p_sig"] or board["sig"])["collective"],
        }
        text = parted(statuses) or differences(
            {rank: {"collective": name} for rank, name in sorted(names.items())}
        )
        return CollectiveMismatch(text, rank=self.rank, peer=peer, op=op, hint=HINT)

    def unlike_messages(
        self, peer: int, mine: tuple[int, int], theirs: tuple[int, int], text: str = ""
    ) -> MiracclError:
        """The error of a message that ``peer`` sent and that is not what this rank receives; (signature, elements) of each, and how they
        differ, where not by these."""
        if self.fault is not None:
            return self.fault
        text = text or unlike_messages(self.rank, mine, peer, theirs)
        op = describe_message(*mine)
        return self.spread(CollectiveMismatch(text, rank=self.rank, peer=peer, op=op, hint=HINT))

    def _mismatch(self, peer: int, want: int, got: int) -> str:
        """Which field differs, and which ranks have which value."""
        if SEND_RECV in (
            describe_signature(want)["collective"],
            describe_signature(got)["collective"],
        ):
            return self._unlike(peer, want, got)
        statuses = (
            self.statuses()
        )  # a message of an earlier operation than this: that is where ranks parted
        for number in (got & layout.SEQ_MASK, want & layout.SEQ_MASK):
            if differing := self._compared(number, statuses):
                return differing
        return of_another_operation(
            self.called[self.rank], self.called[peer], want, got
        ) or self._unlike(peer, want, got)

    def _compared(self, number: int, statuses: dict[int, dict[str, Any]]) -> str:
        """How the ranks' operations with this number (``SEQ_MASK``) differ, as far as boards and ``statuses`` tell; else empty."""
        found = {
            rank: entry
            for rank in self.fabric.near
            if (entry := self.fabric.history(rank).get(number))
        }
        for rank, answer in statuses.items():
            status = answer.get("status")
            for entry in status.get("history", ()) if isinstance(status, dict) else ():
                if isinstance(entry, list) and len(entry) == 3 and entry[0] == number:
                    found[rank] = (int(entry[1]), int(entry[2]))
        return compared({self.called[rank]: entry for rank, entry in found.items()})

    def _unlike(self, peer: int, want: int, got: int) -> str:
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
        return unlike_messages(
            self.called[self.rank],
            (want, count),
            self.called[peer],
            (got, count if same_count else -1),
        )

    def statuses(self) -> dict[int, dict[str, Any]]:
        """What all ranks are doing, as ``statuses.ask`` has it."""
        statuses = ask(self.session, self.left)
        self._silent = {rank for rank, answer in statuses.items() if not answer.get("answered")}
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
                    graph_line(self.called[rank], f"left the communicator ({self.left[rank]})")
                )
            elif not answer.get("answered") or not isinstance(board, dict) or "seq" not in board:
                lines.append(graph_line(self.called[rank], silence(answer)))
            else:
                lines.append(
                    graph_line(
                        self.called[rank],
                        activity({**board, "peer": self._name(board["peer"])}, newest),
                        place(answer),
                    )
                )
        return tuple(lines)
