"""Registry of the blocked operations of this process, over all its communicators.

A host program with a single thread is blocked in at most one place. If that is a wait of this
library, it ends only when certain other processes arrive: at the same operation, at the same
control-plane operation, with a message. ``local_report`` says which wait it is and how far this
process has come in each of its communicators.

Other things of a process may block beside its host program: GPU streams (``stream_states``). They
are further nodes of the wait-for graph, known by their providers.

Whether the host program has a single thread is decided from stack samples. Threads that run no
application code do not count, except timers, event loops (asyncio, for example), threads that are
about to start, and threads inside this library. A signal handler that runs inside a wait makes the
position of the program uncertain, so nothing is reported then.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

from miraccl import clock
from miraccl.bootstrap.contract import Session
from miraccl.bootstrap.stacks import (
    SampledFrames,
    is_called_back,
    may_call_user_code,
    runs_user_code,
)
from miraccl.diagnosis.waits import BlockedState, RankProgress
from miraccl.diagnosis.waits import Wait as Wait
from miraccl.host import process_token

#: Length of the record of communicator creations that this process has started.
MAX_REMEMBERED_INITS = 256


class WaitStateProvider(Protocol):
    """Wait state of one rank in one communicator, for operations that the host runs."""

    @property
    def key(self) -> str: ...

    @property
    def session(self) -> Session | None:
        """Session over which the peers can be queried; None once the communicator is broken."""

    def current_wait(self) -> Wait | None:
        """Return the wait of the thread inside the communicator, None with background work."""

    def progress(self) -> RankProgress: ...


class StateProvider(Protocol):
    """Further nodes of the wait-for graph beside the host program (``stream_states``)."""

    @property
    def needs_probe(self) -> bool:
        """True if ``report`` contains states that are as old as the last ``probe``."""

    def probe(self) -> None:
        """Read the states. May block: the detector's thread calls it."""

    def local_waits(self) -> list[LocalWait]:
        """Return the waits of the nodes that are not idle."""

    def report(self, program: Wait | None) -> Mapping[str, BlockedState]:
        """Return states by name; ``program``: wait of the host, which was read before."""

    def clear(self) -> None:
        """Drop everything in a forked child."""


LocalWait = tuple[str, Wait, Session | None]
"""(name, wait, session over which to query the peers); None for the host program's own wait."""

Registered = TypeVar("Registered")


class WeakRegistry(Generic[Registered]):
    """Set of live objects, held by weak references.

    Lock-free: any thread may use it, and so may a signal handler that interrupts such a use.
    """

    def __init__(self) -> None:
        self._items: weakref.WeakValueDictionary[int, Registered] = weakref.WeakValueDictionary()

    def add(self, item: Registered) -> None:
        self._items[id(item)] = item

    def remove(self, item: Registered) -> None:
        """May be called twice."""
        self._items.pop(id(item), None)

    def __iter__(self) -> Iterator[Registered]:
        return iter(
            [item for reference in self._items.valuerefs() if (item := reference()) is not None]
        )

    def clear(self) -> None:
        self._items.clear()


class BlockedScope:
    """Context manager around a wait that Python code runs (others wait in compiled code).

    ``describe()`` gives the wait. Of nested scopes of one thread the outermost counts.
    """

    def __init__(self, describe: Callable[[], Wait | None]) -> None:
        self._describe = describe

    def __enter__(self) -> None:
        self._outermost = (
            _blocked.setdefault(threading.get_ident(), self._describe) is self._describe
        )

    def __exit__(self, *args: object) -> None:
        if self._outermost:
            del _blocked[threading.get_ident()]


#: Providers of open communicators. Of a closed one no wait is reported.
providers: WeakRegistry[WaitStateProvider] = WeakRegistry()
extra_states: set[StateProvider] = set()
_blocked: dict[int, Callable[[], Wait | None]] = {}  # by thread
_inits: deque[str] = deque(maxlen=MAX_REMEMBERED_INITS)


def active_waits() -> list[Callable[[], Wait | None]]:
    """Return the open ``BlockedScope`` waits of all threads, a distinct object for each."""
    return list(_blocked.values())


def register_init(name: str) -> None:
    """Record that this process has started to create the communicator ``name``."""
    _inits.append(name)


def clear() -> None:
    """Drop the parent's records in a forked child."""
    providers.clear()
    _blocked.clear()
    _inits.clear()
    for provider in extra_states:
        provider.clear()


def only_application_thread() -> int | None:
    """Return the ident of the application's only thread.

    None if there are several, or if the thread is not blocked in the call that registered it.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    with SampledFrames() as innermost:
        found = {
            ident: not is_called_back(frame)
            for ident, frame in innermost.items()
            if ident == main or _may_run_application(threads.get(ident), frame)
        }
    if len(found) != 1:
        return None
    return next((ident for ident, inside in found.items() if inside), None)


def _may_run_application(thread: clock.Thread | None, frame: FrameType) -> bool:
    ours = thread is not None and thread.name.startswith("miraccl")
    if runs_user_code(frame, also_here=not ours):
        return True
    return not ours and (isinstance(thread, clock.Timer) or may_call_user_code(frame, thread))


def current_wait() -> Wait | None:
    """Return the wait in which the host program is blocked, None if it is not or is uncertain."""
    thread = only_application_thread()
    if thread is None:
        return None
    scope = _blocked.get(thread)
    if scope is not None:
        return scope()
    waits = [wait for each in providers if (wait := each.current_wait()) is not None]
    return waits[0] if len(waits) == 1 else None


def local_waits(*, probe: bool) -> list[LocalWait]:
    """Return the waits of the host program and of further nodes that are not idle.

    ``probe``: read the states of these nodes first, which may block.
    """
    for provider in extra_states if probe else ():
        provider.probe()
    program = current_wait()
    found: list[LocalWait] = [] if program is None else [(process_token().hex(), program, None)]
    for provider in extra_states:
        found += provider.local_waits()
    return found


def local_report() -> dict[str, Any]:
    """Return the states of this process's nodes of the wait-for graph for other processes."""
    wait, states = current_wait(), dict[str, BlockedState]()
    for provider in extra_states:
        states |= provider.report(wait)
    # Read again after the other nodes: the host may have continued and be blocked in a later wait.
    # Read before the counters: they only grow, so a wait that ended in between shows there.
    wait = current_wait()
    states[process_token().hex()] = BlockedState(
        [] if wait is None else [wait], _progress(), list(_inits)
    )
    return {
        "token": process_token().hex(),
        "states": {name: state.to_json() for name, state in states.items()},
        "needs_probe": needs_probe(),
    }


def _progress() -> dict[str, RankProgress]:
    """Return the progress by communicator key.

    Communicators with several ranks in this process are left out: their ranks share one name.
    """
    found: dict[str, list[WaitStateProvider]] = {}
    for each in providers:
        found.setdefault(each.key, []).append(each)
    return {key: alike[0].progress() for key, alike in found.items() if len(alike) == 1}


def decode_states(reports: Mapping[str, dict[str, Any]]) -> dict[str, BlockedState]:
    """Decode the reports of processes into the nodes of the wait-for graph, by name."""
    return {
        name: BlockedState.from_json(state)
        for report in reports.values()
        for name, state in report["states"].items()
    }


def needs_probe() -> bool:
    """Return True if ``local_report`` contains states that are as old as the last probe."""
    return any(provider.needs_probe for provider in extra_states)
