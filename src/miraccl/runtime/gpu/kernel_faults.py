"""Faults of a communicator on the GPUs of one host: deadlines, mismatches, aborts, deaths.

Kernels poll two words in pinned host memory while they wait: one ends the wait, in the other they
report an error. ``DeviceFaults`` owns these words, receives deaths and peers' faults from the
control plane, notifies peers of its own, and raises the same errors as the CPU communicator.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from miraccl import clock
from miraccl.bootstrap.contract import Session
from miraccl.diagnosis.error_codec import abort_error, decode_error
from miraccl.diagnosis.fault_machine import Closed, FaultFound, FaultOrigin, FinalMismatch
from miraccl.diagnosis.faults import CommunicatorFaults
from miraccl.diagnosis.status_report import query_status
from miraccl.errors import CollectiveMismatch, CommunicatorAborted, MiracclError
from miraccl.executor.cuda import layout
from miraccl.runtime.gpu.flight_recorder import RecorderSnapshot, Straggler
from miraccl.runtime.gpu.kernel_errors import KernelErrors

FAULT_NOTICE = "gpu_abort"
EXIT_NOTICE = "gpu_left"
RELEASE_INTERVAL_S = 0.002
#: interval at which the host polls kernel reports and the age of waiting copies
PROBE_INTERVAL_S = 0.02
#: longest gap between two polls that counts towards a deadline (a stopped process is not late)
MAX_COUNTED_GAP_S = 1.0
#: reports that also explain why the peer has left or aborted since
_ROOT_CAUSES = (
    layout.ERROR_MISMATCH,
    layout.ERROR_SIZES,
    layout.ERROR_CROSSED,
    layout.ERROR_CYCLE,
)


class CopyWaits(Protocol):
    """Copies between ranks whose streams wait for peers (``runtime.gpu.engines``)."""

    def awaited_peer(self) -> int | None: ...
    def release_waits(self) -> None: ...


class DeviceFaults(CommunicatorFaults):
    """Fault of a communicator's operations on the GPUs of one host.

    ``words``: the host words of ``executor.cuda.layout``. ``read_snapshot()`` reads the flight
    recorder of all ranks; ``describe_launch(number, signature)`` names a launch (number 0: a
    collective made of messages); ``rejected_size(peer)`` reads the size of the message that a peer
    rejected; ``stopped()`` returns True if a wait on this GPU has ended unfulfilled.
    ``global_ranks``: rank numbers for errors, by rank of the session.
    """

    notice_key = FAULT_NOTICE

    def __init__(
        self,
        session: Session,
        words: Any,
        timeout_s: float,
        *,
        read_snapshot: Callable[[], RecorderSnapshot | None],
        describe_launch: Callable[[int, int], str],
        rejected_size: Callable[[int], int | None],
        stopped: Callable[[], bool],
        global_ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(session, global_ranks=global_ranks)
        self.rank = self.global_ranks[session.rank]
        self._words, self._timeout = words, timeout_s
        self._describe_launch, self._stopped = describe_launch, stopped
        self._errors = KernelErrors(
            words,
            session.rank,
            self.global_ranks,
            read_snapshot=read_snapshot,
            describe_launch=describe_launch,
            rejected_size=rejected_size,
        )
        self._exit_reasons: dict[int, str] = {}
        self._ended = clock.event()
        self._forward: Callable[[MiracclError], None] | None = None
        self._engines: CopyWaits | None = None
        # held by the monitor and release threads while they use the GPU
        self._probe_lock, self._release_lock = threading.RLock(), threading.RLock()
        self._releasing = False
        session.on_event(self.on_event)

    @property
    def broken(self) -> bool:
        return bool(self._words[layout.HOST_ABORT])

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def forward_findings(self, report: Callable[[MiracclError], None]) -> None:
        """Have ``report`` notify the peers of what kernels find here: there are other hosts."""
        self._forward = report

    def check(self, name: str = "") -> None:
        """Raise the fault recorded so far, if any."""
        self._collect_kernel_report()
        with self._lock:
            fault = self.fault
            if fault is None and self.broken:
                fault = CommunicatorAborted("the communicator was aborted", rank=self.rank)
        if fault is not None:
            self.mark_reported()
            raised = copy.copy(fault)  # every raise gets its own traceback
            raised.op = fault.op or name or None
            raise raised

    def unreported(self, already_reported: bool = False) -> MiracclError | None:
        """Return the fault that invalidates results and that no call has raised, or None.

        See ``FaultMachine.unreported``. The GPU has finished its work.
        """
        self._collect_kernel_report()
        if self._machine.origin is not FaultOrigin.PEER or self._machine.found_by_engine:
            return self._machine.unreported(already_reported=already_reported, stopped=False)
        return self._machine.unreported(already_reported=already_reported, stopped=self._stopped())

    # ---- kernel reports

    def record_mismatch(self, peer: int, number: int, signature: int) -> None:
        """Record that ``peer`` ran another operation as launch ``number`` (0: messages).

        No kernel is running.
        """
        self._write_report(layout.ERROR_MISMATCH, peer, layout.AWAIT_ARRIVAL, number, signature)

    def _write_report(self, error: int, peer: int, what: int, number: int, signature: int) -> None:
        """Write an error report as ``report`` of source/common.cuh does, when no kernel can."""
        with self._lock:
            if self._ended.is_set() or self._words[layout.HOST_CLAIM]:
                return
            self._words[layout.HOST_CLAIM] = 1
            self._words[layout.HOST_PEER], self._words[layout.HOST_AWAITED] = peer, what
            self._words[layout.HOST_LAUNCH], self._words[layout.HOST_SIGNATURE] = number, signature
            self._words[layout.HOST_ERROR] = error
            self._words[layout.HOST_ABORT] = 1

    def record_straggler(self, straggler: Straggler) -> None:
        """Record at finalize that a rank called an operation which another rank did not.

        No rank is waiting; every rank finds the same.
        """
        ahead, behind = (
            self.rank if rank is None else self.global_ranks[rank]
            for rank in (straggler.ahead, straggler.behind)
        )
        op = self._describe_launch(straggler.number, straggler.signature)
        text = (
            f"operation count mismatch: rank {ahead} called {op}, "
            f"but rank {behind} finalized the communicator without it"
        )
        self._set_final_mismatch(behind if ahead == self.rank else ahead, op, text)

    def record_unmatched(self, source: int, signature: int) -> None:
        """Record at finalize an unmatched message from session rank ``source``.

        ``signature``: that of its collective, 0 if unknown.
        """
        peer = self.global_ranks[source]
        op = self._describe_launch(0, signature) if signature else None
        text = (
            f"message count mismatch: rank {peer} sent more in {op or 'a collective'} "
            f"than rank {self.rank} received"
        )
        self._set_final_mismatch(peer, op, text)

    def _set_final_mismatch(self, peer: int, op: str | None, text: str) -> None:
        hint = (
            "call the same collectives with the same root and counts on all ranks; "
            "the results of this one are invalid"
        )
        error = CollectiveMismatch(text, rank=self.rank, peer=peer, op=op, hint=hint)
        self.handle(FinalMismatch(error=error))

    def _collect_kernel_report(self) -> None:
        """Turn a kernel's report into the fault and notify the peers."""
        code = int(self._words[layout.HOST_ERROR])
        if not code or self._machine.found_by_engine:
            return
        needs_status = code in (layout.ERROR_TIMEOUT, layout.ERROR_CYCLE)
        needs_status &= self.fault is None or code in _ROOT_CAUSES
        # Not under the lock: events arrive while the query is pending.
        answers = query_status(self.session) if needs_status else {}
        with self._lock:
            if self._machine.found_by_engine:
                return
            error = self._errors.build(code, answers, self._exit_reasons, self._timeout)
            root_cause = code in _ROOT_CAUSES
            self.handle(
                FaultFound(
                    error=error, origin=FaultOrigin.ENGINE, root_cause=root_cause, counts_late=True
                )
            )

    # ---- ending waits

    def abort(self, reason: str) -> None:
        """End the waits on all ranks' GPUs. Any thread may call it."""
        # A report of a kernel says more than the abort: the next check makes it the fault.
        superseded = bool(self._words[layout.HOST_ERROR]) and not self.ended
        error = abort_error(self.rank, reason)
        self.handle(FaultFound(error=error, superseded=superseded))

    def fail_deadlocked(self, op: str, text: str) -> None:
        """Set a deadlock as the fault and end this rank's waits."""
        self.handle(FaultFound(error=self.deadlock_error(op, text), origin=FaultOrigin.PEER))

    def announce_exit(self) -> None:
        """Notify peers that this rank's GPU has finished for good, ending their waits."""
        with contextlib.suppress(MiracclError):
            self.session.notify({EXIT_NOTICE: True})

    def _notify_peers(self, error: MiracclError) -> None:
        if self._forward is not None and self._machine.origin is FaultOrigin.ENGINE:
            self._forward(error)
        else:
            super()._notify_peers(error)

    def _on_notice(self, source: int, payload: dict[str, Any]) -> None:
        """Handle a notice in the session's watcher thread; waits end within milliseconds."""
        if EXIT_NOTICE in payload:
            self._peer_left(source, "finalized")
        elif FAULT_NOTICE in payload:
            peer = self.global_ranks[source]
            error = decode_error(payload[FAULT_NOTICE], rank=self.rank, source=peer)
            text = "the communicator was aborted"
            self._receive(error or CommunicatorAborted(text, rank=self.rank, peer=peer))

    def _peer_left(self, rank: int, reason: str) -> None:
        # It may have failed after its peers took it for ready: it will store nothing more.
        with self._lock:
            if not self._ended.is_set():
                self._exit_reasons.setdefault(rank, reason)
                self._words[layout.HOST_EXITED] |= 1 << rank

    def monitor_copies(
        self, engines: CopyWaits, pending_copies: Callable[[], tuple[int, int] | None]
    ) -> None:
        """Start the thread that ends stream waits for peers' flags at a deadline or abort.

        ``pending_copies()`` gives number and signature of the launch whose copies wait. No kernel
        polls the abort word or the deadline then, so the thread does.
        """
        self._engines = engines
        if self.broken:
            self._stop_waits()
        else:
            clock.thread(
                target=self._monitor_copies,
                args=(engines, pending_copies),
                name="miraccl gpu monitor",
                daemon=True,
            ).start()

    def _monitor_copies(
        self, engines: CopyWaits, pending_copies: Callable[[], tuple[int, int] | None]
    ) -> None:
        waited, before, last = 0.0, None, clock.monotonic()
        while not self._ended.wait(PROBE_INTERVAL_S):
            with self._probe_lock:  # keeps the memory mapped
                if self._ended.is_set():
                    return
                copies = pending_copies()
                now = clock.monotonic()
                waited = (
                    waited + min(now - last, MAX_COUNTED_GAP_S)
                    if copies is not None and copies == before
                    else 0.0
                )
                before, last = copies, now
                if copies is not None and waited > self._timeout:
                    peer = engines.awaited_peer()
                    self._write_report(
                        layout.ERROR_TIMEOUT,
                        self.session.rank if peer is None else peer,
                        layout.AWAIT_COPY,
                        *copies,
                    )
            with self._lock:  # keeps the words allocated
                if self._ended.is_set() or self._releasing:
                    return
                if self._words[layout.HOST_ERROR]:
                    self._stop_waits()

    def _stop_waits(self) -> None:
        """End all waits: a kernel has reported an error, which the next check makes the fault."""
        with self._lock:
            self._end_waits(None)

    def _end_waits(self, error: MiracclError | None) -> None:
        if self._ended.is_set():
            return
        self._words[layout.HOST_ABORT] = 1
        if self._engines is not None and not self._releasing:
            self._releasing = True
            clock.thread(
                target=self._release_copies,
                args=(self._engines,),
                name="miraccl gpu release",
                daemon=True,
            ).start()

    def _release_copies(self, engines: CopyWaits) -> None:
        """Release waiting streams until they have ended."""
        # Once is not enough: streams reset the words that they wait for.
        while not self._ended.wait(RELEASE_INTERVAL_S):
            with self._release_lock, contextlib.suppress(MiracclError):
                if not self._ended.is_set():
                    engines.release_waits()

    def close(self) -> None:
        """Stop writing to the words, whose memory may be freed; the GPU has finished its work."""
        with self._lock:
            self._ended.set()
            self.handle(Closed())
        with self._probe_lock, self._release_lock:
            pass
