"""Deadlock detector: one background thread per process that reports cycles long before a deadline.

A rank that has been blocked for some time wakes the detector's thread; compiled code does so by
writing to an eventfd. The thread queries the state of all processes (``blocked_ops``) and searches
the wait-for graph of host programs and GPU streams for a cycle, over all communicators. A cycle
never ends by itself, so the detector that finds one notifies the others, and every blocked
operation of the cycle raises ``CollectiveMismatch``.

Queries are repeated with exponentially growing pauses. The first one comes late enough to leave
alone ranks that are merely a little apart, and later the more ranks there are, since all of them
may query at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from miraccl import clock, trace
from miraccl.bootstrap.contract import Session
from miraccl.diagnosis import blocked_ops, cycles
from miraccl.diagnosis.blocked_ops import LocalWait
from miraccl.diagnosis.cycles import Cycle
from miraccl.diagnosis.mismatch import compare_ops, describe_differences
from miraccl.diagnosis.status_report import describe_cycle, describe_location, join_parts
from miraccl.diagnosis.waits import BlockedState, Wait, WaitForInit
from miraccl.errors import CollectiveMismatch, MiracclError
from miraccl.host import process_token

#: Largest communicator whose ranks query each other, and report message counts per peer, which
#: show ranks of other hosts that no message is in flight.
COUNTED_RANKS = 64
#: Time (microseconds) that a query of one rank by another takes at the hub.
REPORT_US = 20
#: ``kind`` of the notice that reports a cycle.
NOTICE_KIND = "deadlock"
FIRST_PROBE_S = 0.1  # from the wake-up to the first query about a wait
#: First query about a GPU stream. Longer than for host waits because the host keeps running; a
#: rank that is merely this late is not reported.
FIRST_STREAM_PROBE_S = 0.4
BACKOFF = 4.0  # growth of the pause between queries
MAX_PAUSE_S = 60.0
QUERY_TIMEOUT_S = 1.0
DELIVERY_TIMEOUT_S = 0.5  # for the others to receive the notice
#: Kernels cannot wake the detector, so a host wait longer than this triggers a GPU probe.
HOST_POLL_S = 1.0
GPU_PROBE_BUDGET_S = 0.05  # for a queried process to read the state of its GPUs
_log = trace.logger("bootstrap")


class DeadlockDetector:
    """The detector of this process; its thread starts with the first communicator."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may finalize in the middle
        self._eventfd = -1

    def start(self) -> int:
        """Return the eventfd that wakes the detector, and start its thread if there is none.

        -1 if the host has no descriptor or thread left: then only deadlines end a deadlock. So it
        is within a virtual clock, whose deadlines cost no time.
        """
        if clock.current() is not clock.SYSTEM:
            return -1
        with self._lock:
            if self._eventfd < 0:
                with contextlib.suppress(OSError):
                    self._start_thread(os.eventfd(0, os.EFD_CLOEXEC))
            return self._eventfd

    def _start_thread(self, eventfd: int) -> None:
        thread = clock.thread(
            target=self._run, args=(eventfd,), name="miraccl deadlock detector", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            os.close(eventfd)
        else:
            self._eventfd = eventfd

    def wake(self) -> None:
        """Report that some wait of this process is long."""
        if (eventfd := self.start()) >= 0:
            os.eventfd_write(eventfd, 1)

    def reset_after_fork(self) -> None:
        """Drop the parent's thread in a forked child."""
        self._lock = threading.RLock()
        if self._eventfd >= 0:
            os.close(self._eventfd)
            self._eventfd = -1

    def _run(self, eventfd: int) -> None:
        inside: list[Callable[[], Wait | None]] = []
        poll = select.poll()
        poll.register(eventfd, select.POLLIN)
        while True:
            if _poll(poll, HOST_POLL_S if blocked_ops.needs_probe() else None):
                os.eventfd_read(eventfd)
            else:
                before, inside = inside, blocked_ops.active_waits()
                if not any(one is other for one in before for other in inside):
                    continue
            try:
                self._probe_until_resolved(eventfd)
            except Exception:  # the thread serves the next wait all the same
                _log.exception("the deadlock detector failed")

    def _probe_until_resolved(self, eventfd: int) -> None:
        """Query the others until this process is no longer blocked or its waits have failed."""
        schedules: dict[str, _ProbeSchedule] = {}
        poll = select.poll()
        poll.register(eventfd, select.POLLIN)
        while waits := blocked_ops.local_waits(probe=True):
            sessions = {
                name: _widest_session(wait) if "/" not in name else session
                for name, wait, session in waits
            }
            schedules = {
                name: _ProbeSchedule.for_waits(name, waits, sessions[name], schedules.get(name))
                for name in sessions
            }
            for name, schedule in schedules.items():
                if clock.monotonic() >= schedule.due:
                    session = sessions[name]
                    if session is not None and self._check(session, name):
                        return
                    schedule.back_off()
            pause = min(schedule.due for schedule in schedules.values()) - clock.monotonic()
            if _poll(poll, max(0.0, pause)):  # another wait is long
                os.eventfd_read(eventfd)

    def _check(self, session: Session, name: str) -> bool:
        """Query all ranks of ``session`` about the node ``name`` of this process.

        Returns True if the node is in a cycle or waits for one, or if operations of one number
        differ; then all ranks concerned have been notified.
        """
        try:
            answers = session.request_status(QUERY_TIMEOUT_S)
            if any(report.get("needs_probe") for report in _process_reports(answers).values()):
                # The first query made those processes probe their GPUs; the second one reads that.
                clock.sleep(GPU_PROBE_BUDGET_S)
                answers = session.request_status(QUERY_TIMEOUT_S)
        except MiracclError:  # the communicator was closed: look anew at what this process waits in
            return False
        states = blocked_ops.decode_states(_process_reports(answers))
        _, cycle = cycles.find_cycle(name, states)
        text = _describe_mismatch(name, states, session)
        if text:
            waits = {
                one: wait.ident
                for one in states
                for wait in states[one].waits
                if _describe_mismatch(one, states, session)
            }
        elif cycle:
            locations = {
                answer["status"]["program"]["token"]: describe_location(answer)
                for answer in answers.values()
                if _process_reports({0: answer})
            }
            text = _describe_cycle(cycle, locations, session)
            waits = {
                one: wait.ident
                for one in states
                if (wait := cycles.find_cycle(one, states)[0]) is not None
            }
        else:
            return False
        with contextlib.suppress(MiracclError):
            session.notify({"kind": NOTICE_KIND, "message": text, "waits": waits})
            # Streams first: peers that received the notice may leave while streams wait for them.
            fail_waits(text, {name: ident for name, ident in waits.items() if "/" in name})
            session.wait_until_delivered(DELIVERY_TIMEOUT_S)
        fail_waits(text, waits)
        return True


def _process_reports(answers: Mapping[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the reports of ``blocked_ops.local_report`` in the answers, by process token."""
    found = [
        report for answer in answers.values() if (report := answer.get("status", {}).get("program"))
    ]
    return {report["token"]: report for report in found}


@dataclass
class _ProbeSchedule:
    """Times of the queries about the waits of one node; ``ident`` changes with the waits."""

    ident: str
    pause: float
    due: float

    @classmethod
    def for_waits(
        cls,
        name: str,
        waits: list[LocalWait],
        session: Session | None,
        before: _ProbeSchedule | None,
    ) -> _ProbeSchedule:
        """Return the schedule for the node ``name``: ``before``, if its waits are the same."""
        ident = " ".join(wait.ident for other, wait, _ in waits if other == name)
        if before is not None and before.ident == ident:
            return before
        first = FIRST_STREAM_PROBE_S if "/" in name else FIRST_PROBE_S
        # All ranks may query all others at once, which takes the hub some REPORT_US each.
        pause = max(first, REPORT_US * 1e-6 * (session.nranks if session else 1) ** 2)
        return cls(ident, pause, clock.monotonic() + pause)

    def back_off(self) -> None:
        self.pause = min(BACKOFF * self.pause, MAX_PAUSE_S)
        self.due = clock.monotonic() + self.pause


class PendingCreation:
    """Context manager: this process creates a communicator under a name that all members know.

    Inside the block the process counts as blocked in the creation. The waiting code calls
    ``raise_if_failed`` every so often; ``wake(text)`` ends a wait that cannot do so.
    """

    def __init__(
        self,
        key: str,
        awaited: Iterable[str],
        op: str,
        rank: int,
        wake: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._rank, self._op, self._wake = rank, op, wake
        self._failure = ""
        others = tuple(token for token in awaited if token != process_token().hex())
        wait = WaitForInit(key=key, awaited=others, op=op, fail=self._fail, rank=rank)
        self._scope = blocked_ops.BlockedScope(lambda: wait)
        blocked_ops.register_init(key)

    def __enter__(self) -> PendingCreation:
        self._scope.__enter__()
        deadlock_detector.wake()
        return self

    def __exit__(self, *args: object) -> None:
        self._scope.__exit__()

    def _fail(self, text: str) -> None:
        self._failure = text
        self._wake(text)

    def raise_if_failed(self) -> None:
        if self._failure:
            raise CollectiveMismatch(self._failure, rank=self._rank, op=self._op)


def handle_notice(payload: dict[str, Any]) -> None:
    """Act on the notice of another process that found a cycle; called by a watcher."""
    fail_waits(str(payload.get("message")), payload.get("waits", {}))


def fail_waits(text: str, waits: dict[str, Any]) -> None:
    """Fail the current waits of this process whose ident ``waits`` has under their name."""
    for name, wait, _ in blocked_ops.local_waits(probe=False):
        if waits.get(name) == wait.ident:
            wait.fail(text)


def _widest_session(wait: Wait) -> Session | None:
    """Return the largest session that contains all awaited processes.

    A cycle may run through any of its ranks. Sessions above ``COUNTED_RANKS`` are not queried.
    """
    sessions = [
        (session, each.key == wait.key)
        for each in blocked_ops.providers
        if (session := each.session) is not None
    ]
    fitting = [
        (session.nranks, own, session)
        for session, own in sessions
        if set(wait.awaited) <= set(session.tokens) and session.nranks <= COUNTED_RANKS
    ]
    return max(fitting, key=lambda entry: entry[:2], default=(0, False, None))[2]


def _describe_cycle(cycle: Cycle, locations: dict[str, str], session: Session) -> str:
    """Describe each wait of a cycle with the source line of its program.

    ``locations``: by process token. Where two ranks block each other on GPU memory, the calls that
    differ are named instead.
    """
    edges = [
        (name, wait)
        for (name, wait), following in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        if not _same_process(name, following[0])
    ]
    ranks = [_rank_of(name, session) for name, _ in edges]
    calls = {
        rank: {"collective": wait.collective} for rank, (_, wait) in zip(ranks, edges, strict=True)
    }
    if (
        len(edges) == 2
        and all("/" in name and wait.collective for name, wait in edges)
        and (text := describe_differences(calls))
    ):
        return text

    def describe(i: int, j: int) -> str:
        return join_parts(
            f"rank {ranks[i]} waits for rank {ranks[j]} in {edges[i][1].op}",
            locations.get(edges[i][0].partition("/")[0], ""),
        )

    return describe_cycle(ranks, describe)


def _describe_mismatch(name: str, states: dict[str, BlockedState], session: Session) -> str:
    """Describe how the ranks' operations differ that have the number of a wait of ``name``.

    Empty if they do not differ.
    """
    for wait in states.get(name, BlockedState()).waits:
        found = {
            _rank_of(one, session): (int(sig), int(count))
            for one, (sig, count) in cycles.logged_ops(wait, states).items()
        }
        if text := compare_ops(found):
            return text
    return ""


def _same_process(name: str, other: str) -> bool:
    """Return True for a host program and a stream of one process."""
    return (
        name != other
        and name.partition("/")[0] == other.partition("/")[0]
        and not ("/" in name and "/" in other)
    )


def _rank_of(name: str, session: Session) -> int:
    """Return the rank of a node.

    Only streams may belong to ranks that share a process; their names end with the rank.
    """
    token, _, stream = name.partition("/")
    return (
        session.tokens.index(token)
        if session.tokens.count(token) == 1
        else int(stream.rpartition("/")[2])
    )


deadlock_detector = DeadlockDetector()


def _after_fork() -> None:
    deadlock_detector.reset_after_fork()
    blocked_ops.clear()


os.register_at_fork(after_in_child=_after_fork)


def _poll(poll: select.poll, timeout: float | None) -> list[tuple[int, int]]:
    """Return the descriptors that are ready within ``timeout`` seconds."""
    return clock.wait_io(lambda s: poll.poll(None if s is None else 1e3 * s), timeout)
