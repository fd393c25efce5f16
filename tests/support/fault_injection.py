"""Fault injection: makes the K-th call of a kind fail with a chosen error, whoever the caller is.

    sweep = FaultSweep(monkeypatch)
    for fault in sweep.faults({"connect": [errno.EADDRNOTAVAIL]}, scenario):
        with fault:
            scenario()

Intercepts calls of Python's ``socket`` (connections themselves are real), ``selectors`` and
``threading``. A first run of the scenario counts them. Threads may run in another order the next
time, so the call that fails may differ, but every kind of call site is hit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import pytest

PARTIAL = 0
"""Instead of an error: the call moves one byte."""


class FaultSweep:
    """Patches the calls for the rest of the test; without a fault they work normally."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._fault: tuple[str, int, int] | None = None
        self._patch(patch)

    def faults(
        self, plan: Mapping[str, Sequence[int]], scenario: Callable[[], object]
    ) -> Iterator[InjectedFault]:
        """Yield one fault for each error and each call of these kinds that ``scenario`` makes."""
        self.set(None)
        scenario()
        counts = Counter(self._counts)
        assert set(plan) <= set(counts), f"not called: {set(plan) - set(counts)}"
        for kind, errors in plan.items():
            for error in errors:
                for number in range(1, counts[kind] + 1):
                    yield InjectedFault(self, kind, number, error)

    def set(self, fault: tuple[str, int, int] | None) -> None:
        with self._lock:
            self._counts.clear()
            self._fault = fault

    def next_fault(self, kind: str) -> int | None:
        """Count a call of this kind; return the error to inject, or None."""
        with self._lock:
            self._counts[kind] += 1
            if self._fault is not None and self._fault[:2] == (kind, self._counts[kind]):
                return self._fault[2]
        return None

    def check(self, kind: str) -> None:
        problem = self.next_fault(kind)
        if problem is not None:
            raise OSError(problem, os.strerror(problem))

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        sweep, start, epoll, eventfd = self, threading.Thread.start, select.epoll, os.eventfd

        class Socket(socket.socket):
            def __init__(
                self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None
            ) -> None:
                if fileno is None:
                    sweep.check("socket")
                super().__init__(family, type, proto, fileno)

            def accept(self) -> tuple[socket.socket, Any]:
                problem = sweep.next_fault("accept")
                if problem is not None:
                    if problem == errno.ECONNABORTED:  # the connection leaves the queue
                        super().accept()[0].close()
                    raise OSError(problem, os.strerror(problem))
                return super().accept()

            def connect_ex(self, address: Any) -> int:
                return sweep.next_fault("connect") or super().connect_ex(address)

            def getpeername(self) -> Any:
                sweep.check("getpeername")
                return super().getpeername()

            def send(self, data: Any, *flags: int) -> int:
                return super().send(memoryview(data)[: self._allowed("send", len(data))], *flags)

            def recv(self, size: int, *flags: int) -> bytes:
                return super().recv(self._allowed("recv", size), *flags)

            def sendmsg(self, *args: Any) -> int:
                sweep.check("sendmsg")
                return super().sendmsg(*args)

            def recv_into(self, *args: Any) -> int:
                sweep.check("recv_into")
                return super().recv_into(*args)

            def recvmsg_into(self, *args: Any) -> Any:
                sweep.check("recvmsg_into")
                return super().recvmsg_into(*args)

            def _allowed(self, kind: str, size: int) -> int:
                """Return the number of bytes that may move."""
                problem = sweep.next_fault(kind)
                if problem == errno.ECONNRESET:
                    self.shutdown(socket.SHUT_RDWR)
                if problem:
                    raise OSError(problem, os.strerror(problem))
                return size if problem is None else 1

        def checked(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def make(*args: Any, **kwargs: Any) -> Any:
                sweep.check(kind)
                return call(*args, **kwargs)

            return make

        def start_thread(thread: threading.Thread) -> None:
            if thread.name.startswith("miraccl") and sweep.next_fault("thread") is not None:
                raise RuntimeError("can't start new thread")
            start(thread)

        patch.setattr(socket, "socket", Socket)
        patch.setattr(os, "eventfd", checked("eventfd", eventfd))
        patch.setattr(
            selectors.EpollSelector, "_selector_cls", staticmethod(checked("epoll", epoll))
        )
        patch.setattr(threading.Thread, "start", start_thread)


class InjectedFault:
    """Context manager in which the fault occurs."""

    def __init__(self, sweep: FaultSweep, kind: str, number: int, error: int) -> None:
        self._sweep, self._what = sweep, (kind, number, error)

    def __repr__(self) -> str:
        kind, number, error = self._what
        return f"{errno.errorcode.get(error, 'one byte')} in call {number} of {kind}"

    def __enter__(self) -> InjectedFault:
        self._sweep.set(self._what)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sweep.set(None)


@contextlib.contextmanager
def limit_descriptors(count: int) -> Iterator[None]:
    """Limit this process to ``count`` more open files inside the block."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(line.split()[0]) for line in open_files()}
    free = [number for number in range(len(used) + count + 1) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def open_files() -> set[str]:
    """Return the open files of this process as "number target"."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:  # the descriptor of the listing itself
            continue
    return found
