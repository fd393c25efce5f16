"""Virtual clock whose threads run one at a time, in an order drawn from a seed.

A thread runs until it blocks in a wait of the clock. Then one of the threads that can continue is
drawn; if there is none, time moves to the next event of the fabric or the next timeout. Two runs
with the same seed therefore execute the same instructions in the same order, whatever the
operating system does with the threads.

The idea is that of FoundationDB's simulator (Zhou et al., SIGMOD 2021, section 4) and of madsim.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import random  # noqa: TID251 - seeded: it draws the order of threads
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from miraccl.clock import Thread, VirtualClock
from miraccl.errors import InvalidUsage, MiracclError
from miraccl.sim.fair_share import FairShareNetwork

T = TypeVar("T")
#: Interval in s of virtual time at which ``wait_io`` polls.
POLL_S = 1e-3


@dataclass(eq=False)
class _Baton:
    """State of one thread: when it may continue, and the semaphore that lets it.

    ``error`` is raised in the thread when it continues.
    """

    ready: Callable[[], bool]
    due: float = math.inf
    error: BaseException | None = None
    resume: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


def _always() -> bool:
    return True


class SerialClock(VirtualClock):
    """Clock of a virtual cluster; its time is that of ``fabric``, in seconds.

    Locks that are not the clock's must not be held across a wait of the clock.
    """

    _timers_are_daemons = True  # an unfinished run must not keep the process

    def __init__(self, fabric: FairShareNetwork, *, seed: int = 0, start: float = 1000.0) -> None:
        super().__init__(seed=seed, start=start, autojump_s=None)
        self._fabric, self._start = fabric, start
        self._order = random.Random(f"order of threads {seed}")
        self._batons: dict[Thread, _Baton] = {}
        self._woken = True  # a condition may have changed since the last evaluation
        self._word = (ctypes.c_int64 * 1)(int(start * 1e9))

    def monotonic(self) -> float:
        return self._start + self._fabric.now * 1e-6

    perf_counter = monotonic

    @property
    def now_address(self) -> int:
        """Address of a word with the time in nanoseconds, for compiled code."""
        return ctypes.addressof(self._word)

    def advance(self, seconds: float, *, settle_s: float = 1.0) -> NoReturn:
        """Raise: time of this clock moves by itself."""
        raise InvalidUsage("cannot advance a serial clock: it moves when all threads are blocked")

    # ---- waits

    def block(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        baton = self._batons.get(threading.current_thread())
        if baton is None:
            raise InvalidUsage(
                "cannot wait on a virtual clock in a thread that it does not know",
                hint="start threads with miraccl.clock.thread",
            )
        due = math.inf if timeout is None else self._fabric.now + max(0.0, timeout) * 1e6
        while not ready():
            if self._fabric.now >= due:
                return False
            baton.ready, baton.due = ready, due
            successor = self._choose()
            if successor is not baton:
                successor.resume.release()
                baton.resume.acquire()
            if baton.error is not None:
                error, baton.error = baton.error, None
                raise error
        return True

    def wake(self) -> None:
        """Let the next switch evaluate the conditions of all blocked threads."""
        self._woken = True

    def interrupt(self, thread: Thread, error: BaseException) -> None:
        """Raise ``error`` in a blocked thread; no effect if it has ended."""
        if (baton := self._batons.get(thread)) is not None:
            baton.error = error
            self._woken = True

    def _choose(self) -> _Baton:
        """Return the thread that runs next, after moving time as far as necessary."""
        fabric, batons = self._fabric, self._batons.values()
        next_due = min(baton.due for baton in batons)  # threads block outside of this loop only
        self._woken = True
        while True:
            now = fabric.now
            if self._woken or next_due <= now:
                self._woken = False
                able = [b for b in batons if b.error is not None or b.due <= now or b.ready()]
                if able:
                    return self._order.choice(able)
            then = min(fabric.next_time(), next_due)
            if math.isinf(then):
                first = next(iter(batons))
                first.error = MiracclError(
                    "cannot continue: all threads of the virtual clock wait, and nothing is due"
                )
                return first
            fabric.advance(then)
            self._word[0] = round(self.monotonic() * 1e9)

    def wait_io(self, select: Callable[[float | None], T], timeout: float | None) -> T:
        """Poll ``select`` every ``POLL_S`` of virtual time; real descriptors are not repeatable."""
        end = math.inf if timeout is None else self.monotonic() + timeout
        while not (result := select(0)) and self.monotonic() < end:
            self.sleep(POLL_S)
        return result

    def external_wait(self) -> NoReturn:
        raise InvalidUsage("cannot wait outside a serial clock: no other thread would run")

    # ---- threads

    @contextlib.contextmanager
    def attach(self) -> Iterator[None]:
        me = threading.current_thread()
        new = me not in self._batons
        if new:
            self._batons[me] = _Baton(_always)
        try:
            yield
        finally:
            if new:
                del self._batons[me]

    def _attach_thread(self, thread: Thread) -> None:
        """Add a thread that is about to start and runs when it is drawn."""
        self._batons[thread] = _Baton(_always)

    def _enter_thread(self) -> None:
        """Block an attached thread until it is drawn for the first time."""
        self._batons[threading.current_thread()].resume.acquire()

    def _detach(self, thread: Thread) -> None:
        """Remove a thread that ends or could not start; the ending thread hands over."""
        self._batons.pop(thread, None)
        if thread is threading.current_thread() and self._batons:
            self._choose().resume.release()
