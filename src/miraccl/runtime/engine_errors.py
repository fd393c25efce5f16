"""Errors of the CPU engine: from its error code to an error that names the culprit.

Sources are the progress pages and op logs of this host's ranks, which outlive their processes, and
the status replies of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miraccl.bootstrap.contract import Session
from miraccl.diagnosis.error_codec import departure_error
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
from miraccl.runtime.fabric_contract import Fabric
from miraccl.wire.proxy_records import CLOSED_WITHOUT_CLOSE_FRAME, Loss, LossKind

SEND_RECV = "send_recv"
HINT = "this communicator is broken; shrink() makes one of the living ranks"
Statuses = Mapping[int, dict[str, Any]]
"""Status replies by rank, as ``query_status`` gives them."""


class EngineErrors:
    """Makes the errors of one communicator.

    ``left``: reason by rank of the peers that have left, which the caller updates.
    """

    def __init__(
        self, session: Session, fabric: Fabric, control_ops: ControlOps, left: Mapping[int, str]
    ) -> None:
        self._session, self._fabric, self._control, self._left = session, fabric, control_ops, left
        self._rank, self._nranks = session.rank, session.nranks
        #: rank numbers for errors of operations, by rank of the session
        self.global_ranks: Sequence[int] = range(session.nranks)
        #: ranks without a reply to the last status query
        self.unresponsive: set[int] = set()

    @property
    def rank(self) -> int:
        """Number of this rank in errors."""
        return self.global_ranks[self._rank]

    def global_rank(self, rank: int) -> int:
        """Return the number of a rank in errors; other numbers (any peer) stay as they are."""
        return self.global_ranks[rank] if 0 <= rank < self._nranks else rank

    # ---- engine codes

    def current_op(self, name: str) -> str:
        """Describe the operation ``name`` that this rank is in or has just left."""
        board = self._fabric.board()
        if ("send" in name or "recv" in name) and not board["p2p_sig"]:
            return name  # it has left the message: the page shows the collective before it
        return describe_operation(board)

    def aborted(self, op: str) -> MiracclError:
        """Return the error of an operation that was aborted without a known reason."""
        return CommunicatorAborted("the operation was aborted", rank=self.rank, op=op, hint=HINT)

    def build(self, code: int) -> MiracclError:
        """Return the error for an ERR_* code. May query the other ranks."""
        context, board = self._fabric.context, self._fabric.board()
        peer = context.get(layout.CTX_ERR_PEER)
        want, got = context.get(layout.CTX_ERR_EXPECTED), context.get(layout.CTX_ERR_ACTUAL)
        op, whom = describe_operation(board), self.global_rank(peer)
        if code == layout.ERR_TIMEOUT:
            return self._timeout(peer, board, context.get(layout.CTX_ERR_STEP))
        if code == layout.ERR_DIVERGED and self._control.reported_op(peer) != control.FINALIZE:
            return self._diverged(peer, op)
        if code in (layout.ERR_LEFT, layout.ERR_DIVERGED) or (
            code == layout.ERR_STREAM_ENDED and peer in self._left
        ):
            left = departure_error(whom, self._left.get(peer, "finalized"), rank=self.rank, op=op)
            left.hint = HINT
            return self.root_cause(left, self.query_statuses())
        if code == layout.ERR_MISMATCH:
            if describe_signature(want)["collective"] == SEND_RECV and not board["p2p_sig"]:
                # A group that has not waited yet: the page shows the operation before it.
                op = "send/recv"
            return self._mismatch(self._compare_signatures(peer, want, got), whom, op)
        if code == layout.ERR_SIZE:
            text = (
                f"message size mismatch: rank {self.rank} expects {want} bytes, "
                f"rank {whom} sent {got}"
            )
            return self._mismatch(text, whom, op)
        if code == layout.ERR_ENDED:
            return self._mismatch(describe_completed_peer(self.rank, whom), whom, op)
        if code == layout.ERR_STREAM_ENDED:
            return self.loss(peer, Loss(LossKind.RESET, CLOSED_WITHOUT_CLOSE_FRAME), op)
        if code == layout.ERR_CMA:
            return SystemFailure(
                f"cannot copy {want} bytes from the memory of rank {whom}: the kernel refused it",
                rank=self.rank,
                peer=whom,
                op=op,
                hint="MIRACCL_CMA_DISABLE=1 avoids process_vm_readv",
            )
        return MiracclError(f"the engine returned {code}", rank=self.rank, op=op)

    def _mismatch(self, text: str, peer: int | None, op: str | None) -> MiracclError:
        return CollectiveMismatch(text, rank=self.rank, peer=peer, op=op, hint=HINT)

    def _timeout(self, peer: int, board: dict[str, int], step: int) -> MiracclError:
        statuses, whom, op = (
            self.query_statuses(),
            self.global_rank(peer),
            describe_operation(board),
        )
        text = (
            "" if board["p2p_sig"] else self._compare_op(board["sig"] & layout.SEQ_MASK, statuses)
        )
        text = text or describe_diverged(dict(statuses))
        text = text or self._describe_completed(peer, board, statuses)
        if text:
            return self._mismatch(text, whom, op)
        return CollectiveTimeout(
            f"rank {self.rank} timed out: no progress within its timeout of "
            f"{self._fabric.timeout:g} s while waiting for rank {whom} in step {step}",
            graph=self.wait_for_graph(statuses),
            rank=self.rank,
            peer=whom,
            op=op,
            hint=HINT,
        )

    def loss(self, peer: int, loss: Loss, op: str | None = None) -> MiracclError:
        """Return the error of a connection that broke between live ranks."""
        error = loss.error(rank=self.rank, peer=self.global_ranks[peer])
        error.hint, error.op = HINT, op
        return self.root_cause(error)

    def root_cause(self, error: MiracclError, statuses: Statuses | None = None) -> MiracclError:
        """Return the mismatch behind a death, departure or abort, ``error`` if there is none.

        A rank may have died or left because the ranks had called different operations.
        """
        if not isinstance(error, PeerDied | CommunicatorAborted):
            return error
        now = self._fabric.board()["seq"]
        oldest_first = sorted(
            self._fabric.history(self._rank),
            key=lambda number: (number - now - 1) & layout.SEQ_MASK,
        )
        for number in oldest_first:
            if text := self._compare_op(number, statuses or {}):
                return self._mismatch(text, error.peer, error.op)
        return error

    # ---- comparisons

    def _describe_completed(self, peer: int, board: dict[str, int], statuses: Statuses) -> str:
        """Return the text for a peer that has completed the operation on ``board``.

        Empty if it has not, or if some of its data may still be in flight.
        """
        theirs = statuses.get(peer, {}).get("status")
        if (
            board["p2p_sig"]
            or not isinstance(theirs, dict)
            or "sent" not in theirs
            or not has_completed(board, theirs)
            or theirs["sent"][self._rank] != self._fabric.context.messages_received(peer)
        ):
            return ""
        return describe_completed_peer(self.rank, self.global_ranks[peer])

    def _diverged(self, peer: int, op: str) -> MiracclError:
        """Return the error of a wait for a rank that waits in a control-plane operation."""
        statuses, board = self.query_statuses(), self._fabric.board()
        names = {
            peer: self._control.reported_op(peer),
            self._rank: describe_signature(board["p2p_sig"] or board["sig"])["collective"],
        }
        text = describe_diverged(dict(statuses)) or describe_differences(
            {rank: {"collective": name} for rank, name in sorted(names.items())}
        )
        return CollectiveMismatch(text, rank=self._rank, peer=peer, op=op, hint=HINT)

    def messages(
        self, peer: int, mine: tuple[int, int], theirs: tuple[int, int], text: str = ""
    ) -> MiracclError:
        """Return the error of a message of ``peer`` that does not match the posted receive.

        (signature, elements) of each; ``text``: how they differ, where not by these.
        """
        text = text or compare_messages(self._rank, mine, peer, theirs)
        op = describe_message(*mine)
        return CollectiveMismatch(text, rank=self._rank, peer=peer, op=op, hint=HINT)

    def _compare_signatures(self, peer: int, want: int, got: int) -> str:
        """Describe which field differs, and which ranks have which value."""
        if SEND_RECV in (
            describe_signature(want)["collective"],
            describe_signature(got)["collective"],
        ):
            return self._compare_with_peer(peer, want, got)
        statuses = self.query_statuses()
        # A message of an earlier operation than this one: there the ranks diverged.
        for number in (got & layout.SEQ_MASK, want & layout.SEQ_MASK):
            if text := self._compare_op(number, statuses):
                return text
        return describe_stray_message(
            self.rank, self.global_ranks[peer], want, got
        ) or self._compare_with_peer(peer, want, got)

    def _compare_op(self, number: int, statuses: Statuses) -> str:
        """Describe how the ranks' operations of a number (``SEQ_MASK``) differ; empty if not."""
        found = {
            rank: entry
            for rank in self._fabric.shm_ranks
            if (entry := self._fabric.history(rank).get(number))
        }
        for rank, answer in statuses.items():
            status = answer.get("status")
            for entry in status.get("history", ()) if isinstance(status, dict) else ():
                if isinstance(entry, list) and len(entry) == 3 and entry[0] == number:
                    found[rank] = (int(entry[1]), int(entry[2]))
        return compare_ops({self.global_ranks[rank]: entry for rank, entry in found.items()})

    def _compare_with_peer(self, peer: int, want: int, got: int) -> str:
        """Describe how messages of two ranks differ."""
        board = self._fabric.board()
        count = (
            board["p2p_count"]
            if board["p2p_sig"] == want
            else board["count"]
            if board["sig"] == want
            else -1
        )
        same_count = describe_signature(want)["count"] == describe_signature(got)["count"]
        return compare_messages(
            self.rank,
            (want, count),
            self.global_ranks[peer],
            (got, count if same_count else -1),
        )

    # ---- reports

    def query_statuses(self) -> dict[int, dict[str, Any]]:
        """Query the status of all ranks; see ``query_status``."""
        statuses = query_status(self._session, self._left)
        self.unresponsive = {
            rank for rank, answer in statuses.items() if not answer.get("answered")
        }
        return statuses

    def wait_for_graph(self, statuses: Statuses) -> tuple[str, ...]:
        """Return a line per rank: its operation, the peer it waits for, its source line."""
        seqs = [
            s["status"]["seq"]
            for s in statuses.values()
            if isinstance(s.get("status"), dict) and "seq" in s["status"]
        ]
        newest = max(seqs, default=0)
        return tuple(
            graph_line(self.global_ranks[rank], *self._activity(rank, statuses, newest))
            for rank in range(self._nranks)
        )

    def _activity(self, rank: int, statuses: Statuses, newest: int) -> tuple[str, ...]:
        answer = statuses.get(rank, {"answered": False, "reason": "no answer"})
        board = answer.get("status")
        if rank in self._left:
            return (f"left the communicator ({self._left[rank]})",)
        if not answer.get("answered") or not isinstance(board, dict) or "seq" not in board:
            return (describe_unresponsive(answer),)
        named = {**board, "peer": self.global_rank(board["peer"])}
        networks = [
            f"no network path to rank {self.global_rank(peer)} is open ({', '.join(states)})"
            for peer, states in board.get("unreachable", ())
        ]
        return describe_activity(named, newest), *networks[:3], describe_location(answer)
