"""Where the program of this process waits, over all its communicators, and what the GPU waits for.

A program with one thread is in one place.  If that is a wait of this library, it ends only when certain other processes have come: to the
same operation, to the same meeting, with a message.  ``report`` says which wait it is and how far this process has come in each of its
communicators.  What has come so far only grows; so a wait that is read before the counts is as good as one read together with them: had it
ended meanwhile, the counts of the process that it waits for would say so.

What a communicator does on a GPU goes on beside the program, one operation after another: that is a ``Stream``, which waits as a program
does, perhaps for several others at once.  One that has nothing to do waits for its program; a program may wait for its streams.

Threads that run none of the user's code do not count, except timers and threads that are inside this library.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from miraccl.bootstrap import Session
from miraccl.bootstrap.host import process_token
from miraccl.bootstrap.stacks import frames, runs_user_code
from miraccl.executor.cpu.kernels import layout as at

OPERATION, MESSAGE, MEETING, CREATION = "operation", "message", "meeting", "creation"
ROWS = "rows"  # as a message, where only its holder can tell whether it comes (``executor/cuda/source/p2p.cuh``)
STREAM, CALL = "stream", "call"  # of a program for what a stream of its own has to do, and of a stream that has nothing to do
ANY = -1  # instead of a rank
#: Creations that this process has come to; as many are remembered.
REMEMBERED = 256


@dataclass(frozen=True, kw_only=True)
class Wait:
    """``awaited``: programs (the tokens of their processes) and streams, of which every one that has not come keeps this one from going on.

    ``number``: of the operation or meeting in the communicator ``key``; of a message, how many have come from the one awaited process.
    ``taken``: how many messages of this one the awaited process must have taken, where the wait is for that; else 0.  ``rank``: this
    process's in the communicator.  ``op``: in words; ``collective``: the name of the call, where that is known.  ``end(text)`` makes the
    wait raise ``CollectiveMismatch``.  Of a stream that waits for a call, ``key`` is the ``ident`` of the wait that its program is in.  Of
    ``ROWS``, ``number`` says how many must have come, or (``taken``) must have been taken, and ``holds`` has a bit for each rank for whose
    rows the launch that waits does nothing.
    """

    kind: str
    key: str
    awaited: tuple[str, ...]
    op: str
    end: Callable[[str], None]
    number: int = 0
    taken: int = 0
    rank: int = 0
    collective: str = ""
    holds: int = 0

    @property
    def ident(self) -> str:
        return f"{self.kind} {self.key} {self.number} {self.taken} {self.op}"

    def as_dict(self) -> dict[str, Any]:
        names = ("kind", "key", "awaited", "op", "number", "taken", "rank", "collective", "holds", "ident")
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


Report = tuple[list[Wait], dict[str, dict[str, Any]]]


class Stream(Protocol):
    """What one rank does on a GPU in a communicator, one operation after another."""

    @property
    def name(self) -> str:
        """As ``stream_of`` has it."""

    @property
    def session(self) -> Session | None:
        """As of a ``Seat``; all that it waits for are in it."""

    @property
    def needs_look(self) -> bool:
        """Whether ``report`` gives what ``look`` has found, which may take long: the lookout's thread calls it."""

    def look(self) -> None: ...

    def report(self, program: Wait | None) -> Report:
        """What it waits for, each of which keeps it from going on, and, found out after that, how far it has come: as of a ``Seat``, by
        key. ``program`` is what its program waits in, which was found out before."""


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
_streams: weakref.WeakSet[Stream] = weakref.WeakSet()
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


def stream_of(token: str, key: str, rank: int) -> str:
    """The name of a rank's stream in the communicator ``key``; ranks may be threads of one process."""
    return f"{token}/{key}/{rank}"


def waiting() -> list[Callable[[], Wait | None]]:
    """What threads are in that Python knows of: an object for each wait."""
    return list(_waits.values())


def nothing_come() -> dict[str, Any]:
    """How far somebody has come who has come to nothing."""
    return {"operations": 0, "meetings": 0, "sent": [], "taken": [], "aside": False, "sends": [], "receives": []}


def no_call(program: Wait, token: str) -> Wait:
    """What a stream of this process waits for that has nothing to do while its program is in a wait."""
    return Wait(kind=CALL, key=program.ident, awaited=(token,), op="no operation", end=lambda _: None)


def attend(stream: Stream) -> None:
    """Others are told of a stream."""
    with _lock:
        _streams.add(stream)


def disregard(stream: Stream) -> None:
    """It has ended."""
    with _lock:
        _streams.discard(stream)


def streams() -> list[Stream]:
    with _lock:
        return list(_streams)


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
    _streams.clear()
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


def own_waits(*, look: bool) -> list[tuple[str, Wait, Stream | None]]:
    """What this process's program (without a stream) and its streams wait for, by name; not those that have nothing to do. To
    ``look`` first may take long."""
    for stream in streams() if look else ():
        if stream.needs_look:
            stream.look()
    program = current()
    found: list[tuple[str, Wait, Stream | None]] = [] if program is None else [(process_token().hex(), program, None)]
    for stream in streams():
        found += [(stream.name, wait, stream) for wait in stream.report(None)[0] if wait.kind != CALL]
    return found


def report() -> dict[str, Any]:
    """For other processes."""
    wait = current()  # before the counts
    return {
        "token": process_token().hex(),
        "wait": None if wait is None else wait.as_dict(),
        "come": {seat.key: seat.come() for seat in seats()},
        "made": list(_made),
        "streams": {stream.name: _stream_report(stream, wait) for stream in streams()},
        "looks": needs_look(),
    }


def needs_look() -> bool:
    """Whether some of what this process reports is what its lookout has found when it looked last."""
    return any(stream.needs_look for stream in streams())


def _stream_report(stream: Stream, program: Wait | None) -> dict[str, Any]:
    waits, come = stream.report(program)
    return {"waits": [wait.as_dict() for wait in waits], "come": come, "made": []}


def places(programs: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Programs, and streams beside them, by name."""
    return {**programs, **{name: stream for program in programs.values() for name, stream in program.get("streams", {}).items()}}


def waits_of(place: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of a program or stream."""
    waits: list[dict[str, Any]] = place.get("waits") or ([place["wait"]] if place.get("wait") else [])
    return waits


def holds_up(wait: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether a program or stream with the report ``theirs``, which is in a wait of its own, has not come to ``wait``."""
    inside = waits_of(theirs)
    if not inside:
        return False
    if wait["kind"] == STREAM:
        return bool(inside[0]["kind"] != CALL)
    if wait["kind"] == CALL:
        return bool(inside[0]["ident"] == wait["key"])
    if wait["kind"] == CREATION:
        return wait["key"] not in theirs["made"]
    come = theirs["come"].get(wait["key"])
    if come is None:
        return False
    if wait["kind"] == MEETING:
        return bool(come["meetings"] < wait["number"])
    rank = wait["rank"]
    if wait["kind"] == ROWS:
        in_launch = [other["holds"] for other in inside if other["kind"] == ROWS]
        held = not in_launch or any(holds >> rank & 1 for holds in in_launch)
        return held and bool(come["taken" if wait["taken"] else "sent"][rank] < wait["number"])
    if come["aside"] or (wait["taken"] and come["taken"][rank] >= wait["taken"]):
        return False
    if wait["kind"] == OPERATION:
        return bool(come["operations"] < wait["number"])
    if wait["taken"]:
        return not {rank, ANY} & set(come["receives"])
    return rank not in come["sends"] and bool(come["sent"][rank] == wait["number"])


def called(wait: Mapping[str, Any], reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Sequence[int]]:
    """What streams have called under the number of the operation ``wait``, as (signature, count), as far as they tell."""
    here = {name: place["come"].get(wait["key"], {}).get("called", {}) for name, place in reports.items()}
    number = str(wait["number"] & at.SEQ_MASK)
    return {name: theirs[number] for name, theirs in here.items() if wait["kind"] == OPERATION and number in theirs}


def find_cycle(start: str, reports: Mapping[str, dict[str, Any]]) -> list[str]:
    """Programs and streams (by name), each in a wait for the next one, which has not come, the last one for the first: those that ``start``
    waits for, or is one of. Empty if there are none."""
    return [name for name, _ in find_waits(start, reports)[1]]


def find_waits(start: str, reports: Mapping[str, dict[str, Any]]) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """The wait by which ``start`` gets there, and the circle with these waits. Empty if there is none."""
    trail: list[tuple[str, dict[str, Any]]] = []
    seen: set[str] = set()

    def follow(name: str) -> list[tuple[str, dict[str, Any]]]:
        on_trail = [visited for visited, _ in trail]
        if name in on_trail:
            return trail[on_trail.index(name) :]
        if name in seen or name not in reports:
            return []
        seen.add(name)
        for wait in waits_of(reports[name]):
            trail.append((name, wait))
            for other in wait["awaited"]:
                if other in reports and holds_up(wait, reports[other]) and (cycle := follow(other)):
                    return list(cycle)
            trail.pop()
        return []

    cycle = follow(start)
    return (trail[0][1] if cycle else {}), cycle
