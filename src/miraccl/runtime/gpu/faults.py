"""Faults of a communicator on the GPUs of one host: deadlines, mismatches, aborts, deaths.

Kernels poll two words in pinned host memory while they wait: one ends the wait, in the other they
report an error. ``DeviceFaults`` owns these words, receives deaths and peers' faults from the
control plane, notifies peers of its own, and raises the same errors as the CPU communicator.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from miraccl.bootstrap import HUB, Event, Notice, PeerLeft, PeerLost, Session
from miraccl.diagnosis import detector
from miraccl.diagnosis.error_codec import (
    abort_error,
    death_error,
    decode_error,
    departure_error,
    encode_error,
)
from miraccl.diagnosis.status_report import (
    ORDER_HINT,
    describe_cycle,
    describe_location,
    describe_unresponsive,
    graph_line,
    join_parts,
    query_status,
)
from miraccl.errors import CollectiveMismatch, CollectiveTimeout, CommunicatorAborted, MiracclError
from miraccl.executor.cuda import layout
from miraccl.runtime.gpu.flight_recorder import RecorderSnapshot, Straggler
from miraccl.runtime.gpu.messages import size_mismatch

FAULT_NOTICE = "gpu_abort"
EXIT_NOTICE = "gpu_left"
RELEASE_INTERVAL_S = 0.002
PROBE_INTERVAL_S = (
    0.02  # at what kernels found and how long copies take, where streams wait for words
)
MAX_COUNTED_GAP_S = 1.0  # what counts of the time between two looks, as for kernels
#: also why the peer has left or aborted since
_ROOT_CAUSES = (
    layout.ERROR_MISMATCH,
    layout.ERROR_SIZES,
    layout.ERROR_CROSSED,
    layout.ERROR_CIRCLE,
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
        #: how other ranks are told of a fault that was found here
        self.propagate: Callable[[MiracclError], None] = self._notify
        self._words, self._timeout = words, timeout_s
        self._read_snapshot, self._describe_launch, self._rejected_size, self._stopped = (
            read_snapshot,
            describe_launch,
            rejected_size,
            stopped,
        )
        self._exit_reasons: dict[int, str] = {}
        self._fault: MiracclError | None = None
        self._found_by_kernel = False  # what kernels wrote is the fault, or came too late to be
        self._from_peer = False  # another rank's is the fault
        self.reported = False  # a call has raised the fault
        self._lock = threading.RLock()  # a signal handler may abort in the middle
        self._ended = threading.Event()
        self._engines: CopyWaits | None = None  # whose streams wait for peers
        self._probe_lock, self._release_lock = (
            threading.RLock(),
            threading.RLock(),
        )  # held while a thread is at the GPU
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
            raised = copy.copy(fault)  # each has a traceback of its own
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

    # ---- what kernels found

    def record_mismatch(self, peer: int, number: int, signature: int) -> None:
        """Record that ``peer`` ran another operation as launch ``number`` (0: messages); no kernel
        runs.
        """
        self._write_report(layout.ERROR_MISMATCH, peer, layout.WHAT_MEETING, number, signature)

    def _write_report(self, error: int, peer: int, what: int, number: int, signature: int) -> None:
        """Write an error report as ``report`` of source/common.cuh does, when no kernel can."""
        with self._lock:
            if self._ended.is_set() or self._words[layout.HOST_CLAIM]:
                return
            self._words[layout.HOST_CLAIM] = 1
            self._words[layout.HOST_PEER], self._words[layout.HOST_WHAT] = peer, what
            self._words[layout.HOST_LAUNCH], self._words[layout.HOST_SIGNATURE] = number, signature
            self._words[layout.HOST_ERROR] = error
            self._words[layout.HOST_ABORT] = 1

    def record_straggler(self, what: Straggler) -> None:
        """Record at finalize that a rank called an operation which another rank did not.

        No rank waits any more; every rank finds the same.
        """
        who, behind = (
            self.rank if rank is None else self._global_ranks[rank]
            for rank in (what.ahead, what.behind)
        )
        op = self._describe_launch(what.number, what.signature)
        text = f"rank {who} has called {op}, and rank {behind} has finalized the communicator without it"
        self._set_final_mismatch(behind if who == self.rank else who, op, text)

    def record_unmatched(self, there: int, signature: int) -> None:
        """Record at finalize an unmatched message from session rank ``source``.

        ``signature``: that of its collective, 0 if unknown.
        """
        peer, op = (
            self._global_ranks[there],
            self._describe_launch(0, signature) if signature else None,
        )
        text = f"message count mismatch: rank {peer} sent more in {op or 'a collective'} than rank {self.rank} took"
        self._set_final_mismatch(peer, op, text)

    def _set_final_mismatch(self, peer: int, op: str | None, text: str) -> None:
        hint = "all ranks call the same collectives, and agree on root and counts; results of that one are void"
        with self._lock:
            if self._fault is None:
                self._found_by_kernel, self._fault = (
                    True,
                    CollectiveMismatch(text, rank=self.rank, peer=peer, op=op, hint=hint),
                )

    def _collect_kernel_report(self) -> None:
        """Turn a kernel's report into the fault and notify the peers."""
        error = int(self._words[layout.HOST_ERROR])
        if not error or self._is_superseded(error):
            return
        asks = error in (layout.ERROR_TIMEOUT, layout.ERROR_CIRCLE)
        answers = (
            query_status(self.session) if asks else {}
        )  # without the lock: answers come meanwhile
        with self._lock:
            if self._is_superseded(error):
                self._found_by_kernel = True
                return
            fault = self._kernel_error(error, answers)
            self.propagate(fault)  # before the program sees it, which may end at once
            self._found_by_kernel, self._fault = True, fault

    def _is_superseded(self, error: int) -> bool:
        """Return True if the present fault says at least as much as the kernel's report."""
        with self._lock:
            return self._found_by_kernel or (self._fault is not None and error not in _ROOT_CAUSES)

    def _kernel_error(self, error: int, answers: Mapping[int, Mapping[str, Any]]) -> MiracclError:
        """Return the error for a kernel's report; ``answers``: status replies of the ranks."""
        words, rank, there = self._words, self.rank, int(self._words[layout.HOST_PEER])
        number, signature = int(words[layout.HOST_LAUNCH]), int(words[layout.HOST_SIGNATURE])
        peer, op = (
            self._global_ranks[there],
            self._describe_launch(number, signature) if number or signature else None,
        )
        if error == layout.ERROR_SIZES:
            return size_mismatch(words, rank, peer, self._rejected_size(there), op)
        what = layout.WHAT_TEXT.get(int(words[layout.HOST_WHAT]), "something")
        if error == layout.ERROR_CROSSED:
            text = f"rank {rank} waits for {what} from rank {peer}, which has gone on to {op} and waits for rank {rank} there"
            hint = "a send and its receive come before or after the same collectives on both ranks"
            return CollectiveMismatch(text, rank=rank, peer=peer, hint=hint)
        if error == layout.ERROR_CIRCLE:
            return CollectiveMismatch(
                self._describe_cycle(answers), rank=rank, peer=peer, hint=ORDER_HINT
            )
        boards = self._read_snapshot()
        unlike = (
            boards.find_mismatch(number)
            if boards is not None and op is not None and error != layout.ERROR_MISMATCH
            else None
        )
        if unlike is not None:
            there, number, signature = unlike
            peer, op = self._global_ranks[there], self._describe_launch(number, signature)
        if unlike is not None or error == layout.ERROR_MISMATCH:
            count = f" (number {number} of this communicator on GPU memory)" if number else ""
            text = f"rank {peer} called another operation in the same place{count}"
            same = "collective, dtype, elements, counts, operator, root and window"
            hint = f"{same} must be the same on all ranks, in the same order; results since then are void"
            return CollectiveMismatch(text, rank=rank, peer=peer, op=op, hint=hint)
        if error == layout.ERROR_LEFT:
            return departure_error(
                peer, self._exit_reasons.get(there, "finalized"), rank=rank, op=op
            )
        copies = int(words[layout.HOST_WHAT]) == layout.WHAT_COPY
        whom = (
            "between ranks" if there == self.session.rank else f"from rank {peer}"
        )  # of copies in graphs it is not known
        text = f"rank {rank} waited longer than {self._timeout:.3g} s for {what} {whom}"
        does = (
            {
                r: boards.describe(r, number, self._describe_launch)
                if op
                else boards.describe_last(r, self._describe_launch)
                for r in boards.peers
            }
            if boards
            else {}
        )
        does[self.session.rank] = f"waits for {what} {whom}{f' in {op}' if op else ''}"
        if boards is None or not op:
            hint = f"rank {peer} has not come to this message, or is stuck before it on its stream"
        elif copies:
            hint = "all ranks have met for it; the program of one stands before its copies, or its GPU does not go on"
        elif boards.has_begun(there, number):
            hint = f"rank {peer} has begun this operation, too; its GPU did not go on, or this is a defect of miraccl: please report it"
        else:
            hint = (
                f"rank {peer} has not come to this operation, or is stuck before it on its stream"
            )
        where = {
            r: describe_location(answer) or describe_unresponsive(answer)
            for r, answer in answers.items()
        }
        graph = sorted(
            (self._global_ranks[r], does.get(r, ""), where.get(r, "")) for r in {*does, *where}
        )
        return CollectiveTimeout(
            text,
            graph=tuple(graph_line(*line) for line in graph),
            rank=rank,
            peer=peer,
            op=op,
            hint=hint,
        )

    def _describe_cycle(self, answers: Mapping[int, Mapping[str, Any]]) -> str:
        """Describe a cycle of message waits, with the location of each application."""
        waits_for, rooms = (
            int(self._words[layout.HOST_CIRCLE]),
            int(self._words[layout.HOST_CIRCLE + 1]),
        )
        found = [self.session.rank, int(self._words[layout.HOST_PEER])]
        while (following := waits_for >> 4 * found[-1] & 15) not in found:
            found.append(following)
        ranks = [self._global_ranks[there] for there in found]

        def says(i: int, j: int) -> str:
            what = (
                f"rank {ranks[j]} to receive"
                if rooms >> found[i] & 1
                else f"a message from rank {ranks[j]}"
            )
            return join_parts(
                f"rank {ranks[i]} waits for {what}", describe_location(answers.get(found[i], {}))
            )

        return describe_cycle(ranks, says)

    # ---- ending waits

    def abort(self, reason: str) -> None:
        """End the waits on all ranks' GPUs. Any thread may call it."""
        error = abort_error(self.rank, reason)
        self._notify(error)
        self._end_waits(error, found_here=True)

    def fail_deadlocked(self, op: str, text: str) -> None:
        """Set a deadlock as the fault and end this rank's waits."""
        fault = CollectiveMismatch(text, rank=self.rank, op=op, hint=ORDER_HINT)
        self._notify(fault)
        self._end_waits(fault, from_peer=True)

    def set_fault(self, fault: MiracclError) -> None:
        """End the waits on this rank's GPU because of ``fault``, which peers know. Any thread may
        call
        it.
        """
        self._end_waits(fault)

    def announce_exit(self) -> None:
        """Notify peers that this rank's GPU has finished for good; their kernels stop waiting for
        it.
        """
        with contextlib.suppress(MiracclError):
            self.session.notify({EXIT_NOTICE: True})

    def _notify(self, error: MiracclError) -> None:
        with contextlib.suppress(MiracclError):  # the control plane may be gone as well
            self.session.notify({FAULT_NOTICE: encode_error(error)})

    def _on_event(self, event: Event) -> None:
        """Handle an event in the session's watcher thread; kernels stop waiting within
        milliseconds.
        """
        if isinstance(event, PeerLost):
            self._end_waits(
                death_error(event, rank=self.rank, global_ranks=self._global_ranks), from_peer=True
            )
        elif isinstance(event, Notice) and FAULT_NOTICE in event.payload:
            peer = self._global_ranks[event.from_rank]
            told = decode_error(event.payload[FAULT_NOTICE], rank=self.rank, source=peer)
            self._end_waits(
                told
                or CommunicatorAborted("the communicator was aborted", rank=self.rank, peer=peer),
                from_peer=True,
            )
        elif isinstance(event, Notice) and event.payload.get("kind") == detector.NOTICE_KIND:
            detector.handle_notice(event.payload)
        elif isinstance(event, Notice) and EXIT_NOTICE in event.payload:
            self._peer_left(event.from_rank, "finalized")
        elif (
            isinstance(event, PeerLeft) and event.rank != HUB
        ):  # it may have failed when others took it for ready
            self._peer_left(event.rank, event.reason)

    def _peer_left(self, peer: int, why: str) -> None:
        """Record that ``peer`` will store nothing more."""
        with self._lock:
            if not self._ended.is_set():
                self._exit_reasons.setdefault(peer, why)
                self._words[layout.HOST_LEFT] |= 1 << peer

    def monitor_copies(
        self, engines: CopyWaits, pending_copies: Callable[[], tuple[int, int] | None]
    ) -> None:
        """Start the thread that applies deadlines and aborts to streams that wait for flags of
        peers.

        ``pending_copies()`` gives number and signature of the launch whose copies wait. No kernel
        polls the abort word or the deadline meanwhile, so the thread does.
        """
        self._engines = engines
        if self.broken:
            self._end_waits(None)
        else:
            threading.Thread(
                target=self._monitor_copies,
                args=(engines, pending_copies),
                name="miraccl gpu look",
                daemon=True,
            ).start()

    def _monitor_copies(
        self, engines: CopyWaits, pending_copies: Callable[[], tuple[int, int] | None]
    ) -> None:
        waited, before, last = 0.0, None, time.monotonic()
        while not self._ended.wait(PROBE_INTERVAL_S):
            with self._probe_lock:  # the memory is there until the end
                if self._ended.is_set():
                    return
                copies = pending_copies()
                now = time.monotonic()
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
                        layout.WHAT_COPY,
                        *copies,
                    )
            with self._lock:  # the words are there until the end
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
            self._words[layout.HOST_ABORT] = 1
            if self._fault is None and not (found_here and self._words[layout.HOST_ERROR]):
                self._fault, self._from_peer = fault, from_peer
            if self._engines is not None and not self._releasing:
                self._releasing = True
                threading.Thread(
                    target=self._release_copies,
                    args=(self._engines,),
                    name="miraccl gpu release",
                    daemon=True,
                ).start()

    def _release_copies(self, engines: CopyWaits) -> None:
        """Release waiting streams repeatedly."""
        while not self._ended.wait(RELEASE_INTERVAL_S):
            with self._release_lock, contextlib.suppress(MiracclError):  # whatever a look waits for
                if not self._ended.is_set():
                    engines.release_waits()

    def close(self) -> None:
        """Stop writing to the words, whose memory may be freed; the GPU has finished its work."""
        with self._lock:
            self._ended.set()
        with self._probe_lock, self._release_lock:
            pass
