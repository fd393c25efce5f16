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
from miraccl.diagnosis.blocked_ops import Stream
from miraccl.diagnosis.cycles import Circle
from miraccl.diagnosis.mismatch import compared, differences
from miraccl.diagnosis.status_report import circle as circle_of
from miraccl.diagnosis.status_report import place, together
from miraccl.diagnosis.waits import ForCreation, Place, Wait
from miraccl.errors import CollectiveMismatch, MiracclError
from miraccl.runtime.control import COUNTED_RANKS, TELL_US

KIND = "waits in a circle"
#: Seconds from the word that a wait is long until others are asked, by how much longer each pause gets, and what an answer may take.
LOOK_AFTER_S, LONGER, ANSWER_S, HEARD_S = 0.1, 4.0, 1.0, 0.5
#: The first of these for GPUs, whose host goes on meanwhile: of a rank that is as late as this, nobody is told.
LOOK_AT_STREAMS_AFTER_S = 0.4
TICK_S = 1.0  # where kernels may wait that tell nobody, a program that is longer than this in a wait has somebody look
LOOKED_S = 0.05  # in which who is asked looks at its GPU
LONGEST_PAUSE_S = 60.0
_log = trace.logger("bootstrap")


class Lookout:
    """The one of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may finalize in the middle
        self._bell = -1

    def open(self) -> int:
        """The descriptor that compiled code writes to; -1 where the host has none left, or no thread: then deadlines tell."""
        with self._lock:
            if self._bell < 0:
                with contextlib.suppress(OSError):
                    self._begin(os.eventfd(0, os.EFD_CLOEXEC))
            return self._bell

    def _begin(self, bell: int) -> None:
        try:
            threading.Thread(
                target=self._watch, args=(bell,), name="miraccl lookout", daemon=True
            ).start()
        except RuntimeError:
            os.close(bell)
        else:
            self._bell = bell

    def call(self) -> None:
        """A wait is long."""
        if (bell := self.open()) >= 0:
            os.eventfd_write(bell, 1)

    def forked(self) -> None:
        """In a forked child, which has none of the parent's threads."""
        self._lock = threading.RLock()
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1

    def attend(self, stream: Stream) -> None:
        """Others are told of a stream. Where nobody tells when its waits are long, it is looked whether programs wait for it."""
        blocked_ops.streams.take(stream)
        self.call()

    def _watch(self, bell: int) -> None:
        inside: list[Callable[[], Wait | None]] = []
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        while True:
            if poll.poll(1e3 * TICK_S if blocked_ops.needs_look() else None):
                os.eventfd_read(bell)
            else:
                before, inside = inside, blocked_ops.waiting()
                if not any(one is other for one in before for other in inside):
                    continue
            try:
                self._look(bell)
            except Exception:  # it must go on for the next one
                _log.exception("the lookout failed")

    def _look(self, bell: int) -> None:
        """Until this process waits no longer, or what it waits for has been told."""
        looks: dict[str, _Look] = {}
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        while waits := blocked_ops.own_waits(look=True):
            sessions = {
                name: _session_with(wait) if stream is None else stream.session
                for name, wait, stream in waits
            }
            looks = {
                name: _Look.at(name, waits, sessions[name], looks.get(name)) for name in sessions
            }
            for name, look in looks.items():
                if time.monotonic() >= look.due:
                    session = sessions[name]
                    if session is not None and self._ask(session, name):
                        return
                    look.later()
            rest = min(look.due for look in looks.values()) - time.monotonic()
            if poll.poll(1e3 * max(0.0, rest)):  # another wait is long
                os.eventfd_read(bell)

    def _ask(self, session: Session, name: str) -> bool:
        """Whether this process's program or stream of this name is in a circle, or waits for one that is, which has been told to all of
        these."""
        try:
            answers = session.request_status(ANSWER_S)
            if any(program.get("looks") for program in _programs(answers).values()):  # now they do
                time.sleep(LOOKED_S)
                answers = session.request_status(ANSWER_S)
        except (
            MiracclError
        ):  # the communicator was closed meanwhile: where this process is now is to be seen again
            return False
        known = blocked_ops.places(_programs(answers))
        _, circle = cycles.find_circle(name, known)
        text = _unlike(name, known, session)
        if text:
            waits = {
                one: wait.ident
                for one in known
                for wait in known[one].waits
                if _unlike(one, known, session)
            }
        elif circle:
            at = {
                answer["status"]["program"]["token"]: place(answer)
                for answer in answers.values()
                if _programs({0: answer})
            }
            text = _describe(circle, at, session)
            waits = {
                one: wait.ident
                for one in known
                if (wait := cycles.find_circle(one, known)[0]) is not None
            }
        else:
            return False
        with contextlib.suppress(MiracclError):
            session.notify({"kind": KIND, "message": text, "waits": waits})
            end(
                text, {name: ident for name, ident in waits.items() if "/" in name}
            )  # before others leave, for whom streams wait
            session.wait_until_heard(HEARD_S)
        end(text, waits)
        return True


def _programs(answers: Mapping[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What programs report, by token."""
    found = [
        program
        for answer in answers.values()
        if (program := answer.get("status", {}).get("program"))
    ]
    return {program["token"]: program for program in found}


@dataclass
class _Look:
    """When others are asked about a wait next."""

    ident: str
    pause: float
    due: float

    @classmethod
    def at(
        cls,
        name: str,
        waits: list[tuple[str, Wait, Stream | None]],
        session: Session | None,
        before: _Look | None,
    ) -> _Look:
        """About what a program or stream waits for of all these; ``before``: the last one."""
        ident = " ".join(wait.ident for other, wait, _ in waits if other == name)
        if before is not None and before.ident == ident:
            return before
        first = LOOK_AT_STREAMS_AFTER_S if "/" in name else LOOK_AFTER_S
        pause = max(first, TELL_US * 1e-6 * (session.nranks if session else 1) ** 2)
        return cls(ident, pause, time.monotonic() + pause)

    def later(self) -> None:
        self.pause = min(LONGER * self.pause, LONGEST_PAUSE_S)
        self.due = time.monotonic() + self.pause


class Creation:
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
        wait = ForCreation(key=key, awaited=others, op=op, end=self._end, rank=rank)
        self._waiting = blocked_ops.Waiting(lambda: wait)
        self._timer = threading.Timer(LOOK_AFTER_S, lookout.call)
        self._timer.daemon, self._timer.name = True, "miraccl creation"
        blocked_ops.come_to(key)

    def __enter__(self) -> Creation:
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

    def look(self) -> None:
        if self._ended:
            raise CollectiveMismatch(self._ended, rank=self._rank, op=self._op)


def hear(word: dict[str, Any]) -> None:
    """From a watcher: another process has found a circle."""
    end(str(word.get("message")), word.get("waits", {}))


def end(text: str, waits: dict[str, Any]) -> None:
    """End those waits of this process that are the ones that ``waits`` has for it, by name."""
    for name, wait, _ in blocked_ops.own_waits(look=False):
        if waits.get(name) == wait.ident:
            wait.end(text)


def _session_with(wait: Wait) -> Session | None:
    """That of the communicator with the most ranks that knows all who are awaited: circles may go through any of them."""
    sessions = [
        (session, seat.key == wait.key)
        for seat in blocked_ops.seats
        if (session := seat.session) is not None
    ]
    fitting = [
        (s.nranks, own, s)
        for s, own in sessions
        if set(wait.awaited) <= set(s.tokens) and s.nranks <= COUNTED_RANKS
    ]
    return max(fitting, key=lambda entry: entry[:2], default=(0, False, None))[2]


def _describe(circle: Circle, places: dict[str, str], session: Session) -> str:
    """Who waits for whom, and where its program is. Where two ranks wait for each other on GPU memory: which calls differ."""
    last = [
        (name, wait)
        for (name, wait), then in zip(circle, [*circle[1:], circle[0]], strict=True)
        if not _same(name, then[0])
    ]
    ranks = [_rank_of(name, session) for name, _ in last]
    calls = {
        rank: {"collective": wait.collective} for rank, (_, wait) in zip(ranks, last, strict=True)
    }
    if (
        len(last) == 2
        and all("/" in name and wait.collective for name, wait in last)
        and (text := differences(calls))
    ):
        return text

    def says(i: int, j: int) -> str:
        return together(
            f"rank {ranks[i]} waits for rank {ranks[j]} in {last[i][1].op}",
            places.get(last[i][0].partition("/")[0], ""),
        )

    return circle_of(ranks, says)


def _unlike(name: str, known: dict[str, Place], session: Session) -> str:
    """How the operations differ that ranks have in the place of one that the stream ``name`` waits in; empty if they do not."""
    for wait in known.get(name, Place()).waits:
        found = {
            _rank_of(one, session): (int(sig), int(count))
            for one, (sig, count) in cycles.called(wait, known).items()
        }
        if text := compared(found):
            return text
    return ""


def _same(name: str, other: str) -> bool:
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


lookout = Lookout()


def _after_fork() -> None:
    lookout.forked()
    blocked_ops.forget()


os.register_at_fork(after_in_child=_after_fork)
