"""Where the program of this process waits, over all its communicators, and what the GPU waits for.

A program with one thread is in one place.  If that is a wait of this library, it ends only when certain other processes have come: to the
same operation, to the same meeting, with a message.  ``report`` says which wait it is and how far this process has come in each of its
communicators.  What has come so far only grows; so a wait that is read before the counts is as good as one read together with them: had it
ended meanwhile, the counts of the process that it waits for would say so.

What a communicator does on a GPU goes on beside the program, one operation after another: that is a ``Stream``, which waits as a program
does, perhaps for several others at once.  One that has nothing to do waits for its program; a program may wait for its streams.

Threads that run none of the user's code do not count, except timers, those that serve events (asyncio, say) or are about to begin, and
threads that are inside this library.  Nor is a program in one place while a signal handler runs inside a wait.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

from miraccl.bootstrap import Session
from miraccl.bootstrap.host import process_token
from miraccl.bootstrap.stacks import Frames, is_called_back, may_call_user_code, runs_user_code
from miraccl.diagnosis.waits import BlockedState, RankProgress, WaitForHost
from miraccl.diagnosis.waits import Wait as Wait

#: Creations that this process has come to; as many are remembered.
MAX_REMEMBERED_INITS = 256


class WaitStateProvider(Protocol):
    """One rank's place in a communicator."""

    @property
    def key(self) -> str: ...

    @property
    def session(self) -> Session | None:
        """To ask the others over; None once there is no use in that."""

    def current_wait(self) -> Wait | None:
        """The wait of a thread that is inside, if nothing runs in the background."""

    def progress(self) -> RankProgress: ...


class StreamStateProvider(Protocol):
    """What one rank does on a GPU in a communicator, one operation after another."""

    @property
    def name(self) -> str:
        """As ``waits.stream_of`` has it."""

    @property
    def session(self) -> Session | None:
        """As of a ``Seat``; all that it waits for are in it."""

    @property
    def needs_probe(self) -> bool:
        """Whether ``report`` gives what ``look`` has found, which may take long: the lookout's thread calls it."""

    def probe(self) -> None: ...

    def report(self, program: Wait | None) -> Mapping[str, BlockedState]:
        """Where it is, by name. ``program`` is what its program waits in, which was found out before."""


Registered = TypeVar("Known")


class WeakRegistry(Generic[Registered]):
    """Those of whom others are told, as long as they live. There is no lock: any thread comes here, and so may a signal handler in the
    middle of it."""

    def __init__(self) -> None:
        self._items: weakref.WeakValueDictionary[int, Registered] = weakref.WeakValueDictionary()

    def add(self, one: Registered) -> None:
        self._items[id(one)] = one

    def remove(self, one: Registered) -> None:
        """May be called twice."""
        self._items.pop(id(one), None)

    def __iter__(self) -> Iterator[Registered]:
        return iter(
            [one for reference in self._items.valuerefs() if (one := reference()) is not None]
        )

    def clear(self) -> None:
        self._items.clear()


class BlockedScope:
    """A wait that Python knows of. Inside the block the thread is in it, unless it is in another one around this."""

    def __init__(self, where: Callable[[], Wait | None]) -> None:
        self._where = where

    def __enter__(self) -> None:
        self._outermost = _blocked.setdefault(threading.get_ident(), self._where) is self._where

    def __exit__(self, *args: object) -> None:
        if self._outermost:
            del _blocked[threading.get_ident()]


#: What waits in a seat that has left says nothing of where the program is.
providers: WeakRegistry[WaitStateProvider] = WeakRegistry()
stream_providers: WeakRegistry[StreamStateProvider] = WeakRegistry()
_blocked: dict[int, Callable[[], Wait | None]] = {}
_inits: deque[str] = deque(maxlen=MAX_REMEMBERED_INITS)


def active_waits() -> list[Callable[[], Wait | None]]:
    """What threads are in that Python knows of: an object for each wait."""
    return list(_blocked.values())


def wait_for_host(program: Wait, token: str) -> Wait:
    """What a stream of this process waits for that has nothing to do while its program is in a wait."""
    return WaitForHost(key=program.ident, awaited=(token,), op="no operation")


def register_init(creation: str) -> None:
    """This process has come to a creation of this name."""
    _inits.append(creation)


def clear() -> None:
    """In a forked child: nothing of the parent's."""
    for register in (providers, stream_providers, _blocked, _inits):
        register.clear()


def only_application_thread() -> int | None:
    """The thread of the program, if it has one, and that is where it was when it called us."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    with Frames() as innermost:
        found = {
            ident: not is_called_back(frame)
            for ident, frame in innermost.items()
            if ident == main or _may_run_application(threads.get(ident), frame)
        }
    return (
        next((ident for ident, inside in found.items() if inside), None)
        if len(found) == 1
        else None
    )


def _may_run_application(thread: threading.Thread | None, frame: FrameType) -> bool:
    ours = thread is not None and thread.name.startswith("miraccl")
    if runs_user_code(frame, also_here=not ours):
        return True
    return not ours and (isinstance(thread, threading.Timer) or may_call_user_code(frame, thread))


def current_wait() -> Wait | None:
    """What this process's program waits in; None where it waits in nothing of ours, or nobody can say."""
    thread = only_application_thread()
    if thread is None:
        return None
    known = _blocked.get(thread)
    if known is not None:
        return known()
    waits = [wait for seat in providers if (wait := seat.current_wait()) is not None]
    return waits[0] if len(waits) == 1 else None


def local_waits(*, probe: bool) -> list[tuple[str, Wait, StreamStateProvider | None]]:
    """What this process's program (without a stream) and its streams wait for, by name; not those that have nothing to do. To
    ``look`` first may take long."""
    for stream in stream_providers if probe else ():
        if stream.needs_probe:
            stream.probe()
    program = current_wait()
    found: list[tuple[str, Wait, StreamStateProvider | None]] = (
        [] if program is None else [(process_token().hex(), program, None)]
    )
    for stream in stream_providers:
        waits = stream.report(None).get(stream.name, BlockedState()).waits
        found += [
            (stream.name, wait, stream) for wait in waits if not isinstance(wait, WaitForHost)
        ]
    return found


def local_report() -> dict[str, Any]:
    """For other processes (``places``)."""
    wait, known = current_wait(), dict[str, BlockedState]()
    for stream in stream_providers:
        known |= stream.report(wait)
    wait = current_wait()  # after the streams, as it may be for something that one of them has done since; before the counts
    known[process_token().hex()] = BlockedState(
        [] if wait is None else [wait], _progress(), list(_inits)
    )
    return {
        "token": process_token().hex(),
        "places": {name: place.to_json() for name, place in known.items()},
        "looks": needs_probe(),
    }


def _progress() -> dict[str, RankProgress]:
    """How far this process has come. Ranks of one communicator that are threads of one process have no place of their own."""
    found: dict[str, list[WaitStateProvider]] = {}
    for seat in providers:
        found.setdefault(seat.key, []).append(seat)
    return {key: alike[0].progress() for key, alike in found.items() if len(alike) == 1}


def decode_states(reports: Mapping[str, dict[str, Any]]) -> dict[str, BlockedState]:
    """Where programs and streams are, by name."""
    return {
        name: BlockedState.from_json(place)
        for report in reports.values()
        for name, place in report["places"].items()
    }


def needs_probe() -> bool:
    """Whether some of what this process reports is what its lookout has found when it looked last."""
    return any(stream.needs_probe for stream in stream_providers)
