"""Wait state of a rank's kernels, for the deadlock detector (``diagnosis.blocked_ops``).

Kernels compare their operations with one another and detect cycles of messages themselves. They
cannot detect cycles through other waits: messages against a broadcast, traffic between nodes, calls
on CPU memory. The detector therefore reads the kernels' wait records and progress when a rank has
been blocked for long.
"""

from __future__ import annotations

import abc
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from miraccl.bootstrap import Session
from miraccl.diagnosis import blocked_ops
from miraccl.diagnosis.faults import SEND_RECV
from miraccl.diagnosis.waits import (
    BlockedState,
    RankProgress,
    Wait,
    WaitForOperation,
    WaitForPackets,
    stream_name,
)
from miraccl.runtime.gpu.probe import DeviceProbe

FailFn = Callable[[str, str], None]
"""``end(op, text)`` makes ``CollectiveMismatch`` the communicator's fault."""


class DeviceWaitState(abc.ABC):
    """Wait-state provider of one rank's stream (``blocked_ops.StreamProvider``), until closed."""

    def __init__(self, session: Session, name: str, needs_probe: bool) -> None:
        self._session, self.name, self.needs_probe = session, name, needs_probe
        self._lock = (
            threading.RLock()
        )  # held while reading; reentrant, as a signal handler may finalize
        self._closed = False
        self._last_probe: Mapping[str, BlockedState] = {}  # result of the last ``probe``

    @property
    def session(self) -> Session | None:
        return None if self._closed else self._session

    @abc.abstractmethod
    def _read_states(self, program: Wait | None) -> Mapping[str, BlockedState]:
        """Return the states as ``report`` does.

        Implementations read the waits first, then whether these are all, then the progress.
        """

    def probe(self) -> None:
        program = blocked_ops.current_wait()
        with self._lock:
            if self.session is not None:
                self._last_probe = self._read_states(program)

    def report(self, program: Wait | None) -> Mapping[str, BlockedState]:
        if self.needs_probe:
            return self._last_probe
        with self._lock:
            return self._read_states(program) if self.session is not None else {}

    def close(self) -> None:
        """Stop reporting; the probed memory may be freed afterwards."""
        blocked_ops.stream_providers.remove(self)
        with self._lock:
            self._closed, self._last_probe = True, {}


class KernelWaits:
    """Waits and progress of one rank's kernels.

    ``key``: that of the session of the host's ranks; ``named(rank)``: stream name of such a rank.
    """

    def __init__(
        self, probe: DeviceProbe, key: str, rank: int, named: Callable[[int], str], end: FailFn
    ) -> None:
        self._probe, self._key, self._rank, self._stream_name, self._fail = (
            probe,
            key,
            rank,
            named,
            end,
        )

    def waits(self) -> list[Wait]:
        """Return the wait of the current launch, or those of its messages."""
        found = self._probe.pending_launch()
        if found is not None:
            op = self._probe.describe_launch(found.number, found.signature)
            return [WaitForOperation(number=found.number, **self._wait_fields(found.awaited, op))]
        messages = self._probe.pending_waits()
        rows = (
            self._wait_fields((m.peer,), "send/recv") | {"collective": SEND_RECV, "number": m.count}
            for m in messages
        )
        return [
            WaitForPackets(counter=m.counter, suspended=m.holds, **row)
            for m, row in zip(messages, rows, strict=True)
        ]

    def _wait_fields(self, ranks: tuple[int, ...], op: str) -> dict[str, Any]:
        awaited, end = tuple(map(self._stream_name, ranks)), functools.partial(self._fail, op)
        return {
            "key": self._key,
            "awaited": awaited,
            "op": f"{op} on GPU memory",
            "fail": end,
            "rank": self._rank,
        }

    def progress(self) -> dict[str, RankProgress]:
        """Return the progress of the kernels."""
        counts = self._probe.message_counts()
        return (
            {}
            if counts is None
            else {
                self._key: RankProgress(
                    operations=counts.last_launch,
                    sent=counts.sent,
                    received=counts.received,
                    large=counts.large_received,
                )
            }
        )


class KernelWaitState(DeviceWaitState):
    """Wait-state provider of a one-host communicator."""

    def __init__(
        self, session: Session, probe: DeviceProbe, end: FailFn, is_done: Callable[[], bool]
    ) -> None:
        """``is_done()``: nothing is enqueued, nor can a graph enqueue anything."""
        super().__init__(
            session,
            stream_name(session.tokens[session.rank], session.key, session.rank),
            needs_probe=True,
        )
        self._is_done = is_done
        self.kernels = KernelWaits(probe, session.key, session.rank, self._stream_name, end)

    def _stream_name(self, rank: int) -> str:
        return stream_name(self._session.tokens[rank], self._session.key, rank)

    def _read_states(self, program: Wait | None) -> Mapping[str, BlockedState]:
        waits = self.kernels.waits()
        if not waits and program is not None and self._is_done():
            waits = [blocked_ops.wait_for_host(program, self._session.tokens[self._session.rank])]
        return {self.name: BlockedState(waits, self.kernels.progress())}
