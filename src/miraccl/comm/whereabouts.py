"""Where the program of this process waits, over all its communicators.

A program with one thread is in one place.  If that is a wait of this library, it ends only when certain other processes have come: to the
same operation, to the same meeting, with a message.  ``report`` says which wait it is and how far this process has come in each of its
communicators.  What has come so far only grows; so a wait that is read before the counts is as good as one read together with them: had it
ended meanwhile, the counts of the process that it waits for would say so.

Threads that run none of the user's code do not count, except timers and threads that are inside this library.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from miraccl.bootstrap import Session
from miraccl.bootstrap.host import process_token
from miraccl.bootstrap.stacks import frames, runs_user_code

OPERATION, MESSAGE, MEETING, CREATION = "operation", "message", "meeting", "creation"
ANY = -1  # instead of a rank
#: Creations that this process has come to; as many are remembered.
REMEMBERED = 256


@dataclass(frozen=True, kw_only=True)
class Wait:
    """``awaited``: tokens of processes, of which every one that has not come keeps this one from going on.

    ``number``: of the operation or meeting in the communicator ``key``; of a message, how many have come from the one awaited process.
    ``taken``: how many messages of this one the awaited process must have taken, where the wait is for that; else 0.  ``rank``: this
    process's in the communicator.  ``op``: in words.  ``end(text)`` makes the wait raise ``CollectiveMismatch``.
    """

    kind: str
    key: str
    awaited: tuple[str, ...]
    op: str
    end: Callable[[str], None]
    number: int = 0
    taken: int = 0
    rank: int = 0

    @property
    def ident(self) -> str:
        return f"{self.kind} {self.key} {self.number} {self.taken} {self.op}"

    def as_dict(self) -> dict[str, Any]:
        names = ("kind", "key", "awaited", "op", "number", "taken", "rank", "ident")
        return {name: getattr(self, name) for name in names}


class Seat(Protocol):
    """One rank's place in a communicator."""

    @property
    def key(self) -> str: ...

    @property
    def session(self) -> Session | None:
        """To ask the others over; None once there is no use in that."""

    def wait(self) -> Wait | None:
        """The wait of a thread that is inside, if nothing runs in the background."""

    def come(self) -> dict[str, Any]:
        """How far this process has come: ``operations``, ``meetings``, by rank messages ``sent`` and ``taken``; to and from which ranks it
        ``sends`` and ``receives`` as well; ``aside``: operations that it has called already may be to come."""


class Waiting:
    """A wait that Python knows of. Inside the block the thread is in it, unless it is in another one around this."""

    def __init__(self, where: Callable[[], Wait | None]) -> None:
        self._where = where

    def __enter__(self) -> None:
        self._outermost = _waits.setdefault(threading.get_ident(), self._where) is self._where

    def __exit__(self, *args: object) -> None:
        if self._outermost:
            del _waits[threading.get_ident()]


_seats: weakref.WeakSet[Seat] = weakref.WeakSet()
_waits: dict[int, Callable[[], Wait | None]] = {}
_made: deque[str] = deque(maxlen=REMEMBERED)
_lock = threading.Lock()


def take(seat: Seat) -> None:
    with _lock:
        _seats.add(seat)


def leave(seat: Seat) -> None:
    """What waits in there says nothing of where the program is."""
    with _lock:
        _seats.discard(seat)


def come_to(creation: str) -> None:
    """This process has come to a creation of this name."""
    _made.append(creation)


def seats() -> list[Seat]:
    with _lock:
        return list(_seats)


def forget() -> None:
    """In a forked child: nothing of the parent's."""
    global _lock
    _lock = threading.Lock()
    _seats.clear()
    _waits.clear()
    _made.clear()


def only_thread() -> int | None:
    """The thread of the program, if it has one."""
    names = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = None
    for ident, frame in frames().items():
        thread = names.get(ident)
        ours = thread is not None and thread.name.startswith("miraccl")
        if ident == main or (isinstance(thread, threading.Timer) and not ours) or runs_user_code(frame, also_here=not ours):
            if found is not None:
                return None
            found = ident
    return found


def current() -> Wait | None:
    """What this process's program waits in; None where it waits in nothing of ours, or nobody can say."""
    thread = only_thread()
    if thread is None:
        return None
    known = _waits.get(thread)
    if known is not None:
        return known()
    return next((wait for seat in seats() if (wait := seat.wait()) is not None), None)


def report() -> dict[str, Any]:
    """For other processes."""
    wait = current()  # before the counts
    return {
        "token": process_token().hex(),
        "wait": None if wait is None else wait.as_dict(),
        "come": {seat.key: seat.come() for seat in seats()},
        "made": list(_made),
    }


def holds_up(wait: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether a process with the report ``theirs``, which is in a wait of its own, has not come to ``wait``."""
    if not theirs.get("wait"):
        return False
    if wait["kind"] == CREATION:
        return wait["key"] not in theirs["made"]
    come = theirs["come"].get(wait["key"])
    if come is None:
        return False
    if wait["kind"] == MEETING:
        return bool(come["meetings"] < wait["number"])
    rank = wait["rank"]
    if come["aside"] or (wait["taken"] and come["taken"][rank] >= wait["taken"]):
        return False
    if wait["kind"] == OPERATION:
        return bool(come["operations"] < wait["number"])
    if wait["taken"]:
        return not {rank, ANY} & set(come["receives"])
    return rank not in come["sends"] and bool(come["sent"][rank] == wait["number"])


def find_cycle(start: str, reports: dict[str, dict[str, Any]]) -> list[str]:
    """Processes (tokens), each in a wait for the next one, which has not come, the last one for the first: those that ``start`` waits for,
    or is one of. Empty if there are none."""
    trail: list[str] = []
    seen: set[str] = set()

    def follow(token: str) -> list[str]:
        if token in trail:
            return trail[trail.index(token) :]
        wait = reports[token].get("wait") if token in reports else None
        if token in seen or not wait:
            return []
        seen.add(token)
        trail.append(token)
        for other in wait["awaited"]:
            if other in reports and holds_up(wait, reports[other]) and (cycle := follow(other)):
                return cycle
        trail.pop()
        return []

    return follow(start)
