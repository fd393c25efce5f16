"""Wait states of GPU streams: provider of the deadlock detector for GPUs and multi-node jobs.

Work on a GPU runs beside the host program, one operation after another. Such a stream blocks as a
host program does, possibly on several peers at once. An idle stream waits for its host; the host
may wait for its streams. A job without GPUs never loads this module, and its wait-for graph has the
nodes of host programs only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from miraccl.bootstrap.contract import Session
from miraccl.diagnosis import blocked_ops
from miraccl.diagnosis.blocked_ops import LocalWait, WeakRegistry
from miraccl.diagnosis.waits import BlockedState, Wait, WaitForHost


class StreamStateProvider(Protocol):
    """Wait state of the GPU work of one rank in one communicator."""

    @property
    def name(self) -> str:
        """Name made by ``waits.stream_name``."""

    @property
    def session(self) -> Session | None:
        """Session over which the peers can be queried; it contains every rank the stream can wait
        for.
        """

    @property
    def needs_probe(self) -> bool:
        """True if ``report`` returns the result of the last ``probe``."""

    def probe(self) -> None:
        """Read the state of the GPU. May block in the driver: the detector's thread calls it."""

    def report(self, program: Wait | None) -> Mapping[str, BlockedState]:
        """Return states by name. ``program`` is the wait of the host, which was read before."""


class StreamStates:
    """The monitored streams of this process; see ``blocked_ops.StateProvider``."""

    def __init__(self) -> None:
        self._streams: WeakRegistry[StreamStateProvider] = WeakRegistry()

    def add(self, stream: StreamStateProvider) -> None:
        """Include a stream in the wait-for graph, until it is removed."""
        blocked_ops.extra_states.add(self)
        self._streams.add(stream)

    def remove(self, stream: StreamStateProvider) -> None:
        """May be called twice."""
        self._streams.remove(stream)

    @property
    def needs_probe(self) -> bool:
        return any(stream.needs_probe for stream in self._streams)

    def probe(self) -> None:
        for stream in self._streams:
            if stream.needs_probe:
                stream.probe()

    def local_waits(self) -> list[LocalWait]:
        found: list[LocalWait] = []
        for stream in self._streams:
            waits = stream.report(None).get(stream.name, BlockedState()).waits
            found += [
                (stream.name, wait, stream.session)
                for wait in waits
                if not isinstance(wait, WaitForHost)
            ]
        return found

    def report(self, program: Wait | None) -> Mapping[str, BlockedState]:
        states: dict[str, BlockedState] = {}
        for stream in self._streams:
            states |= stream.report(program)
        return states

    def clear(self) -> None:
        """Drop the parent's streams in a forked child."""
        self._streams.clear()


def wait_for_host(program: Wait, token: str) -> Wait:
    """Return the wait of an idle stream whose host is blocked in ``program``."""
    return WaitForHost(key=program.ident, awaited=(token,), op="no operation")


stream_states = StreamStates()
