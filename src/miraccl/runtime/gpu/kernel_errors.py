"""Errors built from the reports that kernels write to host memory, with the state of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miraccl.diagnosis.error_codec import departure_error
from miraccl.diagnosis.status_report import (
    ORDER_HINT,
    describe_cycle,
    describe_location,
    describe_unresponsive,
    graph_line,
    join_parts,
)
from miraccl.errors import CollectiveMismatch, CollectiveTimeout, MiracclError
from miraccl.executor.cuda import layout
from miraccl.runtime.gpu.flight_recorder import RecorderSnapshot
from miraccl.runtime.gpu.messages import size_mismatch

Answers = Mapping[int, Mapping[str, Any]]
"""Status replies by session rank."""
_SAME_CALL = "collective, dtype, elements, counts, operator, root and window"


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """Error report of a kernel: ``peer`` is a session rank, ``launch`` 0 a message or none."""

    peer: int
    what: int
    launch: int
    signature: int

    @classmethod
    def read(cls, words: Any) -> KernelReport:
        return cls(
            peer=int(words[layout.HOST_PEER]),
            what=int(words[layout.HOST_AWAITED]),
            launch=int(words[layout.HOST_LAUNCH]),
            signature=int(words[layout.HOST_SIGNATURE]),
        )

    @property
    def awaited(self) -> str:
        """Text for the thing that the kernel was waiting for."""
        return layout.AWAIT_TEXT.get(self.what, "something")


class KernelErrors:
    """Builds errors from kernel reports of one communicator.

    Arguments as for ``faults.DeviceFaults``; ``rank`` is the session rank.
    """

    def __init__(
        self,
        words: Any,
        rank: int,
        global_ranks: Sequence[int],
        *,
        read_snapshot: Callable[[], RecorderSnapshot | None],
        describe_launch: Callable[[int, int], str],
        rejected_size: Callable[[int], int | None],
    ) -> None:
        self._words, self._session_rank, self._global_ranks = words, rank, global_ranks
        self._rank = global_ranks[rank]
        self._read_snapshot, self._describe_launch = read_snapshot, describe_launch
        self._rejected_size = rejected_size

    def build(
        self, error: int, answers: Answers, exit_reasons: Mapping[int, str], timeout_s: float
    ) -> MiracclError:
        """Return the error for the report in the words; ``exit_reasons``: by session rank."""
        report = KernelReport.read(self._words)
        op = self._describe_op(report)
        peer = self._global_ranks[report.peer]
        if error == layout.ERROR_SIZES:
            rejected = self._rejected_size(report.peer)
            return size_mismatch(self._words, self._rank, peer, rejected, op)
        if error == layout.ERROR_CROSSED:
            return self._crossed(report, op)
        if error == layout.ERROR_CYCLE:
            text = self._describe_cycle(answers)
            return CollectiveMismatch(text, rank=self._rank, peer=peer, hint=ORDER_HINT)
        if error == layout.ERROR_MISMATCH:
            return self._op_mismatch(report)
        snapshot = self._read_snapshot()
        if snapshot is not None and op is not None:
            found = snapshot.find_mismatch(report.launch)
            if found is not None:
                differing, launch, signature = found
                return self._op_mismatch(
                    KernelReport(
                        peer=differing, what=report.what, launch=launch, signature=signature
                    )
                )
        if error == layout.ERROR_EXITED:
            reason = exit_reasons.get(report.peer, "finalized")
            return departure_error(peer, reason, rank=self._rank, op=op)
        return self._timeout_error(report, op, snapshot, answers, timeout_s)

    def _describe_op(self, report: KernelReport) -> str | None:
        if not report.launch and not report.signature:
            return None
        return self._describe_launch(report.launch, report.signature)

    def _crossed(self, report: KernelReport, op: str | None) -> MiracclError:
        rank, peer = self._rank, self._global_ranks[report.peer]
        text = (
            f"operation order mismatch: rank {rank} waits for {report.awaited} from rank {peer}, "
            f"but rank {peer} has continued to {op} and waits for rank {rank} there"
        )
        hint = "call a send and its receive before or after the same collectives on both ranks"
        return CollectiveMismatch(text, rank=rank, peer=peer, hint=hint)

    def _op_mismatch(self, report: KernelReport) -> MiracclError:
        peer = self._global_ranks[report.peer]
        count = (
            f" (number {report.launch} of this communicator on GPU memory)" if report.launch else ""
        )
        text = f"operation mismatch: rank {peer} called a different operation{count}"
        hint = (
            f"{_SAME_CALL} must be the same on all ranks, in the same order; "
            "results from this operation on are invalid"
        )
        op = self._describe_op(report)
        return CollectiveMismatch(text, rank=self._rank, peer=peer, op=op, hint=hint)

    def _timeout_error(
        self,
        report: KernelReport,
        op: str | None,
        snapshot: RecorderSnapshot | None,
        answers: Answers,
        timeout_s: float,
    ) -> MiracclError:
        rank, peer = self._rank, self._global_ranks[report.peer]
        # The awaited peer of copies inside a graph is unknown: the report then names this rank.
        source = "between ranks" if report.peer == self._session_rank else f"from rank {peer}"
        text = f"rank {rank} timed out: waited {timeout_s:.3g} s for {report.awaited} {source}"
        return CollectiveTimeout(
            text,
            graph=self._wait_graph(report, op, source, snapshot, answers),
            rank=rank,
            peer=peer,
            op=op,
            hint=self._timeout_hint(report, op, snapshot),
        )

    def _timeout_hint(
        self, report: KernelReport, op: str | None, snapshot: RecorderSnapshot | None
    ) -> str:
        peer = self._global_ranks[report.peer]
        if snapshot is None or not op:
            return (
                f"rank {peer} has not arrived at this message, or its stream is blocked before it"
            )
        if report.what == layout.AWAIT_COPY:
            return (
                "all ranks have arrived at the operation; the application of one is blocked before "
                "its copies, or its GPU makes no progress"
            )
        if snapshot.has_begun(report.peer, report.launch):
            return (
                f"rank {peer} has started this operation, too; its GPU makes no progress, or this "
                "is a defect of miraccl: please report it"
            )
        return f"rank {peer} has not arrived at this operation, or its stream is blocked before it"

    def _wait_graph(
        self,
        report: KernelReport,
        op: str | None,
        source: str,
        snapshot: RecorderSnapshot | None,
        answers: Answers,
    ) -> tuple[str, ...]:
        """Return one line per rank: its last operation and the location of its application."""
        states: dict[int, str] = {}
        for peer in snapshot.peers if snapshot is not None else ():
            assert snapshot is not None
            states[peer] = (
                snapshot.describe(peer, report.launch, self._describe_launch)
                if op
                else snapshot.describe_last(peer, self._describe_launch)
            )
        in_op = f" in {op}" if op else ""
        states[self._session_rank] = f"waits for {report.awaited} {source}{in_op}"
        locations = {
            rank: describe_location(answer) or describe_unresponsive(answer)
            for rank, answer in answers.items()
        }
        lines = sorted(
            (self._global_ranks[rank], states.get(rank, ""), locations.get(rank, ""))
            for rank in {*states, *locations}
        )
        return tuple(graph_line(*line) for line in lines)

    def _describe_cycle(self, answers: Answers) -> str:
        """Describe a cycle of message waits, with the location of each application.

        The kernel reports 4 bits per rank: the rank that it waits for; and a bit per rank: set if
        it waits for the receiver's credit, clear if for a message.
        """
        waits_for, credit_waits = (int(self._words[layout.HOST_CYCLE + i]) for i in range(2))
        cycle = [self._session_rank, int(self._words[layout.HOST_PEER])]
        while (next_rank := waits_for >> 4 * cycle[-1] & 15) not in cycle:
            cycle.append(next_rank)
        ranks = [self._global_ranks[rank] for rank in cycle]

        def describe_wait(i: int, j: int) -> str:
            for_credit = credit_waits >> cycle[i] & 1
            awaited = (
                f"rank {ranks[j]} to receive" if for_credit else f"a message from rank {ranks[j]}"
            )
            location = describe_location(answers.get(cycle[i], {}))
            return join_parts(f"rank {ranks[i]} waits for {awaited}", location)

        return describe_cycle(ranks, describe_wait)
