"""Programs that wait for one another in different operations, of whatever communicators, are told so long before a deadline.

Whoever waits long tells this process's lookout, a thread that sleeps otherwise: compiled code writes to a descriptor.  The lookout asks the
other processes where they are (``whereabouts``).  If some wait in a circle, each for the next one to come, none ever will.  The one that
finds that tells the others, and all of them raise ``CollectiveMismatch``.  What communicators do on GPUs waits in the same way, beside the
program (``whereabouts.Stream``).

It asks again after ever longer pauses.  The first time is late enough that ranks which are a little apart are left in peace, and later the
more ranks there are, as all may ask at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from miraccl import trace
from miraccl.bootstrap import Session
from miraccl.bootstrap.host import process_token
from miraccl.diagnosis import blocked_ops, cycles
from miraccl.diagnosis.blocked_ops import StreamStateProvider
from miraccl.diagnosis.cycles import Cycle
from miraccl.diagnosis.mismatch import compare_ops, describe_differences
from miraccl.diagnosis.status_report import describe_cycle as circle_of
from miraccl.diagnosis.status_report import describe_location, join_parts
from miraccl.diagnosis.waits import BlockedState, Wait, WaitForInit
from miraccl.errors import CollectiveMismatch, MiracclError
from miraccl.runtime.control import COUNTED_RANKS, REPORT_US

NOTICE_KIND = "waits in a circle"
#: Seconds from the word that a wait is long until others are asked, by how much longer each pause gets, and what an answer may take.
FIRST_PROBE_S, BACKOFF, QUERY_TIMEOUT_S, DELIVERY_TIMEOUT_S = 0.1, 4.0, 1.0, 0.5
#: The first of these for GPUs, whose host goes on meanwhile: of a rank that is as late as this, nobody is told.
FIRST_STREAM_PROBE_S = 0.4
HOST_POLL_S = 1.0  # where kernels may wait that tell nobody, a program that is longer than this in a wait has somebody look
GPU_PROBE_BUDGET_S = 0.05  # in which who is asked looks at its GPU
MAX_PAUSE_S = 60.0
_log = trace.logger("bootstrap")


class DeadlockDetector:
    """The one of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may finalize in the middle
        self._eventfd = -1

    def start(self) -> int:
        """The descriptor that compiled code writes to; -1 where the host has none left, or no thread: then deadlines tell."""
        with self._lock:
            if self._eventfd < 0:
                with contextlib.suppress(OSError):
                    self._start_thread(os.eventfd(0, os.EFD_CLOEXEC))
            return self._eventfd

    def _start_thread(self, bell: int) -> None:
        try:
            threading.Thread(
                target=self._run, args=(bell,), name="miraccl lookout", daemon=True
            ).start()
        except RuntimeError:
            os.close(bell)
        else:
            self._eventfd = bell

    def wake(self) -> None:
        """A wait is long."""
        if (bell := self.start()) >= 0:
            os.eventfd_write(bell, 1)

    def reset_after_fork(self) -> None:
        """In a forked child, which has none of the parent's threads."""
        self._lock = threading.RLock()
        if self._eventfd >= 0:
            os.close(self._eventfd)
            self._eventfd = -1

    def monitor(self, stream: StreamStateProvider) -> None:
        """Others are told of a stream. Where nobody tells when its waits are long, it is looked whether programs wait for it."""
        blocked_ops.stream_providers.add(stream)
        self.wake()

    def _run(self, bell: int) -> None:
        inside: list[Callable[[], Wait | None]] = []
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        while True:
            if poll.poll(1e3 * HOST_POLL_S if blocked_ops.needs_probe() else None):
                os.eventfd_read(bell)
            else:
                before, inside = inside, blocked_ops.active_waits()
                if not any(one is other for one in before for other in inside):
                    continue
            try:
                self._probe_until_resolved(bell)
            except Exception:  # it must go on for the next one
                _log.exception("the lookout failed")

    def _probe_until_resolved(self, bell: int) -> None:
        """Until this process waits no longer, or what it waits for has been told."""
        looks: dict[str, _ProbeSchedule] = {}
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        while waits := blocked_ops.local_waits(probe=True):
            sessions = {
                name: _widest_session(wait) if stream is None else stream.session
                for name, wait, stream in waits
            }
            looks = {
                name: _ProbeSchedule.for_waits(name, waits, sessions[name], looks.get(name))
                for name in sessions
            }
            for name, look in looks.items():
                if time.monotonic() >= look.due:
                    session = sessions[name]
                    if session is not None and self._check(session, name):
                        return
                    look.back_off()
            rest = min(look.due for look in looks.values()) - time.monotonic()
            if poll.poll(1e3 * max(0.0, rest)):  # another wait is long
                os.eventfd_read(bell)

    def _check(self, session: Session, name: str) -> bool:
        """Whether this process's program or stream of this name is in a circle, or waits for one that is, which has been told to all of
        these."""
        try:
            answers = session.request_status(QUERY_TIMEOUT_S)
            if any(
                program.get("looks") for program in _process_reports(answers).values()
            ):  # now they do
                time.sleep(GPU_PROBE_BUDGET_S)
                answers = session.request_status(QUERY_TIMEOUT_S)
        except (
            MiracclError
        ):  # the communicator was closed meanwhile: where this process is now is to be seen again
            return False
        known = blocked_ops.decode_states(_process_reports(answers))
        _, circle = cycles.find_cycle(name, known)
        text = _describe_mismatch(name, known, session)
        if text:
            waits = {
                one: wait.ident
                for one in known
                for wait in known[one].waits
                if _describe_mismatch(one, known, session)
            }
        elif circle:
            at = {
                answer["status"]["program"]["token"]: describe_location(answer)
                for answer in answers.values()
                if _process_reports({0: answer})
            }
            text = _describe_cycle(circle, at, session)
            waits = {
                one: wait.ident
                for one in known
                if (wait := cycles.find_cycle(one, known)[0]) is not None
            }
        else:
            return False
        with contextlib.suppress(MiracclError):
            session.notify({"kind": NOTICE_KIND, "message": text, "waits": waits})
            fail_waits(
                text, {name: ident for name, ident in waits.items() if "/" in name}
            )  # before others leave, for whom streams wait
            session.wait_until_heard(DELIVERY_TIMEOUT_S)
        fail_waits(text, waits)
        return True


def _process_reports(answers: Mapping[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What programs report, by token."""
    found = [
        program
        for answer in answers.values()
        if (program := answer.get("status", {}).get("program"))
    ]
    return {program["token"]: program for program in found}


@dataclass
class _ProbeSchedule:
    """When others are asked about a wait next."""

    ident: str
    pause: float
    due: float

    @classmethod
    def for_waits(
        cls,
        name: str,
        waits: list[tuple[str, Wait, StreamStateProvider | None]],
        session: Session | None,
        before: _ProbeSchedule | None,
    ) -> _ProbeSchedule:
        """About what a program or stream waits for of all these; ``before``: the last one."""
        ident = " ".join(wait.ident for other, wait, _ in waits if other == name)
        if before is not None and before.ident == ident:
            return before
        first = FIRST_STREAM_PROBE_S if "/" in name else FIRST_PROBE_S
        pause = max(first, REPORT_US * 1e-6 * (session.nranks if session else 1) ** 2)
        return cls(ident, pause, time.monotonic() + pause)

    def back_off(self) -> None:
        self.pause = min(BACKOFF * self.pause, MAX_PAUSE_S)
        self.due = time.monotonic() + self.pause


class PendingCreation:
    """A communicator that this process makes together with others, under a name that all of them know; it is waited for inside the block.

    Whoever waits calls ``look`` every so often, which raises if the others will not come.  ``wake`` ends a wait that cannot.
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
        self._ended = ""
        others = tuple(token for token in awaited if token != process_token().hex())
        wait = WaitForInit(key=key, awaited=others, op=op, fail=self._end, rank=rank)
        self._waiting = blocked_ops.BlockedScope(lambda: wait)
        self._timer = threading.Timer(FIRST_PROBE_S, deadlock_detector.wake)
        self._timer.daemon, self._timer.name = True, "miraccl creation"
        blocked_ops.register_init(key)

    def __enter__(self) -> PendingCreation:
        self._waiting.__enter__()
        with contextlib.suppress(RuntimeError):  # the host has no thread left
            self._timer.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._timer.cancel()
        self._waiting.__exit__()

    def _end(self, text: str) -> None:
        self._ended = text
        self._wake(text)

    def raise_if_failed(self) -> None:
        if self._ended:
            raise CollectiveMismatch(self._ended, rank=self._rank, op=self._op)


def handle_notice(word: dict[str, Any]) -> None:
    """From a watcher: another process has found a circle."""
    fail_waits(str(word.get("message")), word.get("waits", {}))


def fail_waits(text: str, waits: dict[str, Any]) -> None:
    """End those waits of this process that are the ones that ``waits`` has for it, by name."""
    for name, wait, _ in blocked_ops.local_waits(probe=False):
        if waits.get(name) == wait.ident:
            wait.fail(text)


def _widest_session(wait: Wait) -> Session | None:
    """That of the communicator with the most ranks that knows all who are awaited: circles may go through any of them."""
    sessions = [
        (session, seat.key == wait.key)
        for seat in blocked_ops.providers
        if (session := seat.session) is not None
    ]
    fitting = [
        (s.nranks, own, s)
        for s, own in sessions
        if set(wait.awaited) <= set(s.tokens) and s.nranks <= COUNTED_RANKS
    ]
    return max(fitting, key=lambda entry: entry[:2], default=(0, False, None))[2]


def _describe_cycle(circle: Cycle, places: dict[str, str], session: Session) -> str:
    """Who waits for whom, and where its program is. Where two ranks wait for each other on GPU memory: which calls differ."""
    last = [
        (name, wait)
        for (name, wait), then in zip(circle, [*circle[1:], circle[0]], strict=True)
        if not _same_process(name, then[0])
    ]
    ranks = [_rank_of(name, session) for name, _ in last]
    calls = {
        rank: {"collective": wait.collective} for rank, (_, wait) in zip(ranks, last, strict=True)
    }
    if (
        len(last) == 2
        and all("/" in name and wait.collective for name, wait in last)
        and (text := describe_differences(calls))
    ):
        return text

    def says(i: int, j: int) -> str:
        return join_parts(
            f"rank {ranks[i]} waits for rank {ranks[j]} in {last[i][1].op}",
            places.get(last[i][0].partition("/")[0], ""),
        )

    return circle_of(ranks, says)


def _describe_mismatch(name: str, known: dict[str, BlockedState], session: Session) -> str:
    """How the operations differ that ranks have in the place of one that the stream ``name`` waits in; empty if they do not."""
    for wait in known.get(name, BlockedState()).waits:
        found = {
            _rank_of(one, session): (int(sig), int(count))
            for one, (sig, count) in cycles.logged_ops(wait, known).items()
        }
        if text := compare_ops(found):
            return text
    return ""


def _same_process(name: str, other: str) -> bool:
    """Whether these are a program and a stream of one process."""
    return (
        name != other
        and name.partition("/")[0] == other.partition("/")[0]
        and not ("/" in name and "/" in other)
    )


def _rank_of(name: str, session: Session) -> int:
    """The rank of a program or stream. Only streams may be of ranks that are threads of one process."""
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
