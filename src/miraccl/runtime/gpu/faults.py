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
from miraccl.bootstrap import HUB, Event, Notice, PeerLeft, PeerLost, Session
from miraccl.diagnosis import detector
from miraccl.diagnosis.error_codec import (
    abort_error,
    death_error,
    decode_error,
    encode_error,
)
from miraccl.diagnosis.status_report import (
    ORDER_HINT,
    query_status,
)
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


class DeviceFaults:
    """Fault state of one communicator.

    ``words``: the host words of ``executor.cuda.layout``. ``read_snapshot()`` reads the flight
    recorder of all ranks; ``describe_launch(number, signature)`` names a launch (number 0: a
    collective made of messages); ``rejected_size(peer)`` reads the size of the message that a peer
    rejected; ``stopped()`` returns True if a wait on this GPU has ended unfulfilled.
    ``global_ranks``: rank numbers for errors, by rank of the session.
    """

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
        self.session = session
        self._global_ranks = global_ranks or range(session.nranks)
        self.rank = self._global_ranks[session.rank]
        #: notifies the other ranks of a fault found here
        self.propagate: Callable[[MiracclError], None] = self._notify
        self._words, self._timeout = words, timeout_s
        self._describe_launch, self._stopped = describe_launch, stopped
        self._errors = KernelErrors(
            words,
            session.rank,
            self._global_ranks,
            read_snapshot=read_snapshot,
            describe_launch=describe_launch,
            rejected_size=rejected_size,
        )
        self._exit_reasons: dict[int, str] = {}
        self._fault: MiracclError | None = None
        self._found_by_kernel = False  # a kernel has reported, as the fault or too late to be it
        self._from_peer = False  # the fault is another rank's
        self.reported = False  # a call has raised the fault
        self._lock = threading.RLock()  # reentrant: a signal handler may abort
        self._ended = clock.event()
        self._engines: CopyWaits | None = None
        # held by the monitor and release threads while they use the GPU
        self._probe_lock, self._release_lock = threading.RLock(), threading.RLock()
        self._releasing = False
        session.on_event(self._on_event)

    @property
    def broken(self) -> bool:
        return bool(self._words[layout.HOST_ABORT])

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def check(self, name: str = "") -> None:
        """Raise the fault recorded so far, if any."""
        self._collect_kernel_report()
        with self._lock:
            fault = self._fault
            if fault is None and self.broken:
                fault = CommunicatorAborted("the communicator was aborted", rank=self.rank)
        if fault is not None:
            self.reported = True
            raised = copy.copy(fault)  # every raise gets its own traceback
            raised.op = fault.op or name or None
            raise raised

    def unreported(self, already_reported: bool = False) -> MiracclError | None:
        """Return the fault that invalidates results and that no call has raised, or None.

        That is a fault found by a kernel here; or, unless ``already_reported`` by other means, a
        mismatch reported by a peer, or any peer fault that interrupted a wait. The GPU has finished
        its work.
        """
        self._collect_kernel_report()
        fault = self._fault
        if fault is None or self.reported:
            return None
        void = self._found_by_kernel or (
            self._from_peer
            and not already_reported
            and (isinstance(fault, CollectiveMismatch) or self._stopped())
        )
        return fault if void else None

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
            self.rank if rank is None else self._global_ranks[rank]
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
        peer = self._global_ranks[source]
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
        with self._lock:
            if self._fault is None:
                self._found_by_kernel = True
                self._fault = CollectiveMismatch(text, rank=self.rank, peer=peer, op=op, hint=hint)

    def _collect_kernel_report(self) -> None:
        """Turn a kernel's report into the fault and notify the peers."""
        error = int(self._words[layout.HOST_ERROR])
        if not error or self._is_superseded(error):
            return
        needs_status = error in (layout.ERROR_TIMEOUT, layout.ERROR_CYCLE)
        # Not under the lock: events arrive while the query is pending.
        answers = query_status(self.session) if needs_status else {}
        with self._lock:
            if self._is_superseded(error):
                self._found_by_kernel = True
                return
            fault = self._errors.build(error, answers, self._exit_reasons, self._timeout)
            # Notify first: the application may exit as soon as it sees the error.
            self.propagate(fault)
            self._found_by_kernel, self._fault = True, fault

    def _is_superseded(self, error: int) -> bool:
        """Return True if the present fault says at least as much as the kernel's report."""
        with self._lock:
            return self._found_by_kernel or (self._fault is not None and error not in _ROOT_CAUSES)

    # ---- ending waits

    def abort(self, reason: str) -> None:
        """End the waits on all ranks' GPUs. Any thread may call it."""
        error = abort_error(self.rank, reason)
        # Notify first: an application that wakes up here may exit at once.
        self._notify(error)
        self._end_waits(error, found_here=True)

    def fail_deadlocked(self, op: str, text: str) -> None:
        """Set a deadlock as the fault and end this rank's waits."""
        fault = CollectiveMismatch(text, rank=self.rank, op=op, hint=ORDER_HINT)
        self._notify(fault)
        self._end_waits(fault, from_peer=True)

    def set_fault(self, fault: MiracclError) -> None:
        """End the waits on this rank's GPU because of ``fault``, which the peers know.

        Any thread may call it.
        """
        self._end_waits(fault)

    def announce_exit(self) -> None:
        """Notify peers that this rank's GPU has finished for good, ending their waits."""
        with contextlib.suppress(MiracclError):
            self.session.notify({EXIT_NOTICE: True})

    def _notify(self, error: MiracclError) -> None:
        with contextlib.suppress(MiracclError):  # the control plane may have failed, too
            self.session.notify({FAULT_NOTICE: encode_error(error)})

    def _on_event(self, event: Event) -> None:
        """Handle an event in the session's watcher thread; waits end within milliseconds."""
        if isinstance(event, PeerLost):
            self._end_waits(
                death_error(event, rank=self.rank, global_ranks=self._global_ranks), from_peer=True
            )
        elif isinstance(event, Notice) and FAULT_NOTICE in event.payload:
            peer = self._global_ranks[event.from_rank]
            fault = decode_error(event.payload[FAULT_NOTICE], rank=self.rank, source=peer)
            if fault is None:
                text = "the communicator was aborted"
                fault = CommunicatorAborted(text, rank=self.rank, peer=peer)
            self._end_waits(fault, from_peer=True)
        elif isinstance(event, Notice) and event.payload.get("kind") == detector.NOTICE_KIND:
            detector.handle_notice(event.payload)
        elif isinstance(event, Notice) and EXIT_NOTICE in event.payload:
            self._peer_left(event.from_rank, "finalized")
        elif isinstance(event, PeerLeft) and event.rank != HUB:
            # It may have failed after its peers took it for ready.
            self._peer_left(event.rank, event.reason)

    def _peer_left(self, peer: int, reason: str) -> None:
        """Record that ``peer`` will store nothing more."""
        with self._lock:
            if not self._ended.is_set():
                self._exit_reasons.setdefault(peer, reason)
                self._words[layout.HOST_EXITED] |= 1 << peer

    def monitor_copies(
        self, engines: CopyWaits, pending_copies: Callable[[], tuple[int, int] | None]
    ) -> None:
        """Start the thread that ends stream waits for peers' flags at a deadline or abort.

        ``pending_copies()`` gives number and signature of the launch whose copies wait. No kernel
        polls the abort word or the deadline meanwhile, so the thread does.
        """
        self._engines = engines
        if self.broken:
            self._end_waits(None)
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
                    self._end_waits(None)

    def _end_waits(
        self, fault: MiracclError | None, *, found_here: bool = False, from_peer: bool = False
    ) -> None:
        """End all waits, present and future; the first fault stays.

        A kernel's report says more than a fault that was ``found_here`` by the host and replaces
        it.
        """
        with self._lock:
            if self._ended.is_set():
                return
            # Waits end before the fault is visible: an application that sees it and continues with
            # another operation must not run it, or its peers would take that for a mismatch.
            self._words[layout.HOST_ABORT] = 1
            if self._fault is None and not (found_here and self._words[layout.HOST_ERROR]):
                self._fault, self._from_peer = fault, from_peer
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
        with self._probe_lock, self._release_lock:
            pass
