"""Operations of a communicator on its control plane: ``split``, the GPU side, window memory on GPUs; all ranks come to them in one order.

Boards know nothing of these, so a rank that waits in one tells the others after a while.  A rank that waits for it in another operation
then knows, long before its deadline, that the two will never meet: its operation has a later number than the last one of the rank that
waits here (or is a message, and none is on its way), and that rank does nothing else meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

from miraccl.bootstrap import Session
from miraccl.deadline import Deadline
from miraccl.errors import MiracclError
from miraccl.runtime.fabric import Fabric
from miraccl.runtime.setup_phases import SetupPhases

BLOCKED_NOTICE = "waits on the control plane"
FINALIZE = "finalize"
GPU_SETUP = "the first operation on GPU memory"  # the GPU side is made there, by all ranks together
#: Seconds until a rank tells that it waits. All may have to tell all others, which takes the hub some 20 us each.
REPORT_AFTER_S, REPORT_US = 0.1, 20
#: Up to how many ranks it tells as well how many messages it has sent to each, by which ranks of other hosts know that none is on its way.
COUNTED_RANKS = 64


class ControlPlane(Protocol):
    """The control plane, for operations of several stages; the first one is where the ranks meet who may be in another operation."""

    def run_control_op(
        self, name: str, tag: str, data: bytes, deadline: Deadline | None = None, /
    ) -> list[bytes]:
        """Everybody's ``data``."""

    def cancel_on_fault(self, setup: SetupPhases, /) -> AbstractContextManager[None]:
        """Inside the block what breaks the communicator ends ``stages``."""


class NullControlPlane:
    """The plane of ranks that have no faults to share there."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def run_control_op(
        self, name: str, tag: str, data: bytes, deadline: Deadline | None = None
    ) -> list[bytes]:
        return self._session.all_gather(data, tag, deadline)

    def cancel_on_fault(self, setup: SetupPhases) -> AbstractContextManager[None]:
        return nullcontext()


class ControlOps:
    """This rank's operations on the control plane. ``alone`` says whether nothing else of this rank is under way."""

    def __init__(
        self,
        session: Session,
        fabric: Fabric,
        has_no_background_work: Callable[[], bool],
        on_slow: Callable[[], None],
    ) -> None:
        """``long`` is called, on any thread, when an operation takes long."""
        self._session, self._fabric, self._has_no_background_work, self._on_slow = (
            session,
            fabric,
            has_no_background_work,
            on_slow,
        )
        self._lock = threading.Lock()
        self._completed = 0
        self._current: dict[str, Any] = {}
        self._reported: dict[
            int, dict[str, Any]
        ] = {}  # what others have told since this rank's last operation here

    @property
    def current(self) -> dict[str, Any]:
        """The operation that this rank is in, empty if it is in none: ``op``, ``tag``, ``number``, ``alone``."""
        now = self._current
        return {**now, "alone": self._has_no_background_work()} if now else {}

    @property
    def last_started(self) -> int:
        """The number of the last operation that this rank has come to."""
        now = self._current
        return max(self._completed, now["number"] if now and now["op"] != FINALIZE else 0)

    def gather(self, tag: str, data: bytes, deadline: Deadline | None = None) -> list[bytes]:
        """``session.all_gather`` as the operation that this rank is in."""
        parts = self._session.all_gather(data, tag, deadline)
        self._completed += 1
        return parts

    @contextmanager
    def enter(self, name: str, tag: str = "") -> Iterator[None]:
        """Inside the block this rank is in the operation ``name``, and the others are told if that takes long."""
        with self._lock:
            self._current = {"op": name, "tag": tag, "number": self._completed + 1}
            self._fabric.context.control_waits[:] = 0
        after = max(REPORT_AFTER_S, REPORT_US * 1e-6 * self._session.nranks**2)
        over = threading.Event()
        reporter = threading.Thread(
            target=self._report_blocked,
            args=(after, over),
            name="miraccl control plane",
            daemon=True,
        )
        with suppress(
            RuntimeError
        ):  # no thread can be started: the others wait for the deadline, as they do for a rank that is late
            reporter.start()
        try:
            yield
        finally:
            over.set()
            with self._lock:
                self._current, self._reported = {}, {}

    def _report_blocked(self, after: float, over: threading.Event) -> None:
        """On a thread of its own: tell once, as soon as nothing else of this rank is under way."""
        if over.wait(after):
            return
        self._on_slow()
        while not (now := self.current).get("alone"):
            if over.wait(after):
                return
        notice = {"kind": BLOCKED_NOTICE, **now, "seq": self._fabric.board()["seq"]}
        if self._session.nranks <= COUNTED_RANKS:
            notice["sent"] = self._fabric.context.messages_sent()
        with suppress(MiracclError):  # the control plane is gone, and the wait with it
            self._session.notify(notice)

    def on_notice(self, rank: int, notice: dict[str, Any]) -> None:
        """From the watcher: a rank waits."""
        with self._lock:
            number = notice.get("number")
            if not isinstance(number, int) or number <= self._completed:
                return  # it does no longer
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
        """The operation on the control plane in which a rank waits, as far as it has told."""
        return str(self._reported.get(rank, {}).get("op", ""))

    def conflicting_ops(self) -> dict[int, str]:
        """By rank the operations that take the place of the one that this rank is in, if there is one that differs; with this rank's."""
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
