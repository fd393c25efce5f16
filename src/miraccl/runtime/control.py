"""Operations of a communicator on its control plane: ``split``, GPU setup, GPU window memory.

All ranks call these in the same order. They leave no record in the op log, so a rank that is
blocked in one announces itself after ``REPORT_AFTER_S``. A rank that waits for it in another
operation can then conclude, long before its deadline, that the two never match: its operation has a
higher number than the last one of the blocked rank (or is a message that was not sent), and the
blocked rank runs nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

from miraccl import clock
from miraccl.bootstrap.contract import Session
from miraccl.deadline import Deadline
from miraccl.diagnosis.detector import COUNTED_RANKS, REPORT_US
from miraccl.errors import MiracclError
from miraccl.runtime.fabric_contract import Fabric
from miraccl.runtime.setup_phases import SetupPhases

BLOCKED_NOTICE = "waits on the control plane"
FINALIZE = "finalize"
GPU_SETUP = "the first operation on GPU memory"  # it creates the GPU side, collectively
#: Delay until a blocked rank reports itself: at least REPORT_AFTER_S, and REPORT_US per pair of
#: ranks, since all may report to all others, which costs the hub some 20 us each.
REPORT_AFTER_S = 0.1


class ControlPlane(Protocol):
    """Control plane of a communicator, for operations of several phases.

    In the first phase a rank may find that another rank is in a different operation.
    """

    def run_control_op(
        self, name: str, tag: str, data: bytes, deadline: Deadline | None = None, /
    ) -> list[bytes]:
        """Return the ``data`` of all ranks in rank order."""

    def cancel_on_fault(self, setup: SetupPhases, /) -> AbstractContextManager[None]:
        """Cancel ``setup`` when a fault of the communicator occurs inside the block."""


class NullControlPlane:
    """Control plane of ranks that share no faults."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def run_control_op(
        self, name: str, tag: str, data: bytes, deadline: Deadline | None = None
    ) -> list[bytes]:
        return self._session.all_gather(data, tag, deadline)

    def cancel_on_fault(self, setup: SetupPhases) -> AbstractContextManager[None]:
        return nullcontext()


class ControlOps:
    """Control operations of one rank.

    Args:
        has_no_background_work: Returns True if the rank runs nothing besides the control operation.
        on_slow: Called on any thread when an operation takes longer than ``REPORT_AFTER_S``.
    """

    def __init__(
        self,
        session: Session,
        fabric: Fabric,
        has_no_background_work: Callable[[], bool],
        on_slow: Callable[[], None],
    ) -> None:
        self._session, self._fabric, self._has_no_background_work, self._on_slow = (
            session,
            fabric,
            has_no_background_work,
            on_slow,
        )
        self._lock = threading.Lock()
        self._completed = 0
        self._current: dict[str, Any] = {}
        #: Reports of other ranks since the last operation of this rank.
        self._reported: dict[int, dict[str, Any]] = {}

    @property
    def current(self) -> dict[str, Any]:
        """The operation this rank is in: ``op``, ``tag``, ``number``, ``alone``; empty if it is in
        none.
        """
        now = self._current
        return {**now, "alone": self._has_no_background_work()} if now else {}

    @property
    def last_started(self) -> int:
        """Number of the last operation that this rank has started."""
        now = self._current
        return max(self._completed, now["number"] if now and now["op"] != FINALIZE else 0)

    def gather(self, tag: str, data: bytes, deadline: Deadline | None = None) -> list[bytes]:
        """Run ``session.all_gather`` as the current operation."""
        parts = self._session.all_gather(data, tag, deadline)
        self._completed += 1
        return parts

    @contextmanager
    def enter(self, name: str, tag: str = "") -> Iterator[None]:
        """Enter the operation ``name`` for the block and report it to the other ranks if it takes
        long.
        """
        with self._lock:
            self._current = {"op": name, "tag": tag, "number": self._completed + 1}
            self._fabric.context.control_waits[:] = 0
        after = max(REPORT_AFTER_S, REPORT_US * 1e-6 * self._session.nranks**2)
        over = clock.event()
        reporter = clock.thread(
            target=self._report_blocked,
            args=(after, over),
            name="miraccl control plane",
            daemon=True,
        )
        # Without a reporter thread the other ranks wait for their deadline.
        with suppress(RuntimeError):
            reporter.start()
        try:
            yield
        finally:
            over.set()
            with self._lock:
                self._current, self._reported = {}, {}

    def _report_blocked(self, after: float, over: clock.Event) -> None:
        """Report once that this rank is blocked, as soon as it has no background work (reporter
        thread).
        """
        if over.wait(after):
            return
        self._on_slow()
        while not (now := self.current).get("alone"):
            if over.wait(after):
                return
        notice = {"kind": BLOCKED_NOTICE, **now, "seq": self._fabric.board()["seq"]}
        if self._session.nranks <= COUNTED_RANKS:
            notice["sent"] = self._fabric.context.messages_sent()
        with suppress(MiracclError):  # the control plane is closed, which ends the operation
            self._session.notify(notice)

    def on_notice(self, rank: int, notice: dict[str, Any]) -> None:
        """Handle the report of a blocked rank; called on the watcher thread."""
        with self._lock:
            number = notice.get("number")
            if not isinstance(number, int) or number <= self._completed:
                return  # outdated: that operation has ended
            self._reported[rank] = notice
            if not self._current:
                sent = notice.get("sent")
                self._fabric.context.record_control_wait(
                    rank,
                    int(notice["seq"]),
                    int(sent[self._session.rank]) if isinstance(sent, list) else -1,
                )
        self._fabric.wake(self._session.rank)

    def reported_op(self, rank: int) -> str:
        """Return the control operation in which ``rank`` reported to be blocked, or an empty
        string.
        """
        return str(self._reported.get(rank, {}).get("op", ""))

    def conflicting_ops(self) -> dict[int, str]:
        """Return the operations of all ranks, this one included, that run in place of this rank's
        one.

        Keys are ranks. Empty if no rank reports a different operation under the same number.
        """
        with self._lock:
            now = self._current
            ops = {
                rank: str(word.get("op"))
                for rank, word in self._reported.items()
                if now and word.get("number") == now["number"]
            }
        if not now or FINALIZE in (now["op"], *ops.values()) or set(ops.values()) <= {now["op"]}:
            return {}
        return {self._session.rank: now["op"], **ops}
