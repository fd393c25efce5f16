"""Wait state of a rank's kernels, for the deadlock detector (``diagnosis.blocked_ops``).

Kernels compare their operations and detect cycles of messages themselves. They
cannot detect cycles through other waits: messages against a broadcast, traffic between nodes, calls
on CPU memory. The detector therefore reads the kernels' wait records and progress when a rank has
been blocked for long.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Mapping

from miraccl.bootstrap.contract import Session
from miraccl.diagnosis import blocked_ops
from miraccl.diagnosis.detector import deadlock_detector
from miraccl.diagnosis.stream_states import stream_states, wait_for_host
from miraccl.diagnosis.waits import (
    BlockedState,
    Wait,
    stream_name,
)
from miraccl.runtime.gpu.kernel_waits import FailFn, KernelWaits
from miraccl.runtime.gpu.probe import DeviceProbe


class DeviceWaitState(abc.ABC):
    """Wait-state provider of one rank's stream (``StreamStateProvider``), until closed."""

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
        stream_states.remove(self)
        with self._lock:
            self._closed, self._last_probe = True, {}


class KernelWaitState(DeviceWaitState):
    """Wait-state provider of a one-host communicator."""

    def __init__(
        self, session: Session, probe: DeviceProbe, end: FailFn, is_done: Callable[[], bool]
    ) -> None:
        """``is_done()``: nothing is enqueued, nor can a graph enqueue anything."""
        super().__init__(
            session,
            kernel_stream_name(session),
            needs_probe=True,
        )
        self._is_done = is_done
        self.kernels = KernelWaits(probe, session.key, session.rank, self._stream_name, end)

    def _stream_name(self, rank: int) -> str:
        return stream_name(self._session.tokens[rank], self._session.key, rank)

    def _read_states(self, program: Wait | None) -> Mapping[str, BlockedState]:
        waits = self.kernels.waits()
        if not waits and program is not None and self._is_done():
            waits = [wait_for_host(program, self._session.tokens[self._session.rank])]
        return {self.name: BlockedState(waits, self.kernels.progress())}


def kernel_stream_name(session: Session) -> str:
    """Return the name of this rank's GPU work in the wait-for graph."""
    return stream_name(session.tokens[session.rank], session.key, session.rank)


def monitor_kernels(
    session: Session, probe: DeviceProbe, end: FailFn, is_done: Callable[[], bool]
) -> KernelWaitState:
    """Include a rank's kernels in the wait-for graph; arguments as for ``KernelWaitState``."""
    state = KernelWaitState(session, probe, end, is_done)
    stream_states.add(state)
    deadlock_detector.wake()  # kernels cannot do that
    return state
