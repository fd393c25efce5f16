"""Source of time, sleep, threads and randomness for the whole library.

No other module reads a clock, sleeps, starts a thread or a timer, or draws random bytes by itself
(ruff rule TID251 bans it). By default every function here is the operating system's; within
``with use(VirtualClock())`` it belongs to a simulation: time moves only when all threads of the
clock are blocked, so a timeout of five minutes passes in a millisecond and a run with the same
seed draws the same numbers.

Compiled code does not go through this module: proxies, the GPU, and CPU kernels without a
``VirtualSleeper`` (``executor.cpu.context``) read the system's CLOCK_MONOTONIC.

The rules of the virtual clock are those of trio's ``MockClock`` (``trio/_core/_mock_clock.py``),
applied to threads.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import os
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
Thread: TypeAlias = threading.Thread
"""Type of what ``thread`` returns, for annotations."""
Timer: TypeAlias = threading.Timer
"""Type of what ``timer`` returns on the system clock, for ``isinstance``."""


class Event(Protocol):
    """``threading.Event``, or its counterpart on a virtual clock."""

    def is_set(self) -> bool: ...
    def set(self) -> None: ...
    def clear(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Condition(Protocol):
    """``threading.Condition``, or its counterpart on a virtual clock."""

    def acquire(self) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> bool: ...
    def __exit__(self, *args: Any) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any: ...
    def notify(self, n: int = 1) -> None: ...
    def notify_all(self) -> None: ...


class Queue(Protocol[T]):
    """``queue.SimpleQueue``, or its counterpart on a virtual clock."""

    def put(self, item: T) -> None: ...
    def get(self, block: bool = True, timeout: float | None = None) -> T: ...
    def get_nowait(self) -> T: ...
    def empty(self) -> bool: ...


class TimerHandle(Protocol):
    """A timer that was made by ``timer``; ``cancel`` after it has fired has no effect."""

    daemon: bool
    name: str

    def start(self) -> None: ...
    def cancel(self) -> None: ...
    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class Clock(abc.ABC):
    """Contract of a clock; the functions of this module call that of the current context."""

    @abc.abstractmethod
    def monotonic(self) -> float:
        """Return seconds since an arbitrary origin; never decreases."""

    @abc.abstractmethod
    def perf_counter(self) -> float:
        """Return seconds since an arbitrary origin at the highest resolution, for measurements."""

    @abc.abstractmethod
    def sleep(self, seconds: float) -> None:
        """Block the calling thread for ``seconds``."""

    @abc.abstractmethod
    def thread(
        self,
        target: Callable[..., Any],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
        daemon: bool = True,
    ) -> Thread:
        """Return a thread that has not started."""

    @abc.abstractmethod
    def timer(self, seconds: float, function: Callable[[], Any]) -> TimerHandle:
        """Return a timer, not started, that calls ``function`` in a thread of its own."""

    @abc.abstractmethod
    def event(self) -> Event: ...

    @abc.abstractmethod
    def condition(self, lock: Any = None) -> Condition: ...

    @abc.abstractmethod
    def queue(self) -> Queue[Any]:
        """Return an unbounded FIFO queue whose ``put`` is reentrant."""

    @abc.abstractmethod
    def wait_io(self, select: Callable[[float | None], T], timeout: float | None) -> T:
        """Call ``select(timeout)``, a wait for file descriptors; ``timeout`` in seconds."""

    @abc.abstractmethod
    def external_wait(self) -> contextlib.AbstractContextManager[None]:
        """Context of a wait that only other threads can end and that is not one of the above."""

    @abc.abstractmethod
    def random_bytes(self, nbytes: int) -> bytes:
        """Return random bytes, fit for secrets on the system clock."""


class SystemClock(Clock):
    """The operating system's clocks, threads and random numbers."""

    monotonic = staticmethod(time.monotonic)
    perf_counter = staticmethod(time.perf_counter)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def random_bytes(self, nbytes: int) -> bytes:
        return os.urandom(nbytes)

    def thread(
        self,
        target: Callable[..., Any],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
        daemon: bool = True,
    ) -> Thread:
        return threading.Thread(target=target, args=args, kwargs=kwargs, name=name, daemon=daemon)

    def timer(self, seconds: float, function: Callable[[], Any]) -> TimerHandle:
        return threading.Timer(seconds, function)

    def event(self) -> Event:
        return threading.Event()

    def condition(self, lock: Any = None) -> Condition:
        return threading.Condition(lock)

    def queue(self) -> Queue[Any]:
        return queue.SimpleQueue()

    def wait_io(self, select: Callable[[float | None], T], timeout: float | None) -> T:
        return select(timeout)

    def external_wait(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _BlockedThread:
    """One blocked thread: it continues when ``ready()`` holds or time has reached ``due``."""

    __slots__ = ("due", "ready")

    def __init__(self, due: float, ready: Callable[[], bool]) -> None:
        self.due, self.ready = due, ready


def _never() -> bool:
    return False


class VirtualClock(Clock):
    """Simulated time for the threads of one process.

    The threads of the clock are the one that entered ``use`` and those made by ``thread`` and
    ``timer``. When all of them are blocked in waits of the clock, and nothing has happened for
    ``autojump_s`` seconds of real time, time jumps to the earliest instant that one waits for.
    ``autojump_s`` None: only ``advance`` moves time.

    A thread that blocks outside the clock (a lock, a socket, compiled code) counts as running, so
    time stands still until it returns; ``wait_io`` and ``external_wait`` make such waits known.

    Attributes:
        draws: Every value that ``random_bytes`` returned, in order; equal for runs that are alike.
        jumps: How often time has jumped.
    """

    _timers_are_daemons: ClassVar[bool] = False

    def __init__(
        self, *, seed: int = 0, start: float = 1000.0, autojump_s: float | None = 0.002
    ) -> None:
        self.draws: list[bytes] = []
        self.jumps = 0
        self._random = random.Random(seed)
        self._now = start
        self._autojump_s = autojump_s
        self._changed = threading.Condition()
        self._threads: set[Thread] = set()
        self._blocked: dict[Thread, _BlockedThread] = {}
        self._activity = 0

    # ---- time

    def monotonic(self) -> float:
        return self._now

    def perf_counter(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            self.block(_never, seconds)
        else:
            time.sleep(0)

    def advance(self, seconds: float, *, settle_s: float = 1.0) -> None:
        """Move time by ``seconds``, stopping at each instant for which a thread waits.

        At each stop the call waits until all other threads of the clock are blocked again, for at
        most ``settle_s`` seconds of real time.
        """
        with self._changed:
            target = self._now + seconds
            while True:
                due = min((b.due for b in self._blocked.values()), default=target)
                if due > target:
                    break
                self._jump_to(max(due, self._now))
                if not self._changed.wait_for(self._settled, settle_s) or due >= target:
                    break
            self._jump_to(target)

    def block(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Block the calling thread until ``ready()`` or for ``timeout`` seconds.

        ``ready`` is called with the clock's lock held, from any thread, any number of times; call
        ``wake`` after changing what it reads. Returns its last value.
        """
        me = threading.current_thread()
        with self._changed:
            outer = self._blocked.get(me)
            due = float("inf") if timeout is None else self._now + max(0.0, timeout)
            self._blocked[me] = _BlockedThread(due, ready)
            self._note()
            try:
                while not ready():
                    if self._now >= due:
                        return False
                    seen = self._activity
                    self._changed.wait(self._autojump_s)
                    if self._activity == seen:
                        self._try_jump()
                return True
            finally:
                self._unblock(me, outer)

    def wake(self) -> None:
        """Let blocked threads look at what they wait for."""
        with self._changed:
            self._note()

    def _note(self) -> None:
        self._activity += 1
        self._changed.notify_all()

    def _unblock(self, me: Thread, outer: _BlockedThread | None) -> None:
        if outer is None:
            self._blocked.pop(me, None)
        else:
            self._blocked[me] = outer
        self._note()

    def _settled(self) -> bool:
        """Return True if no thread but the caller's can run."""
        running = self._threads - set(self._blocked) - {threading.current_thread()}
        return not running and not self._runnable()

    def _runnable(self) -> bool:
        return any(b.due <= self._now or b.ready() for b in self._blocked.values())

    def _try_jump(self) -> None:
        if self._autojump_s is None or self._threads - set(self._blocked) or self._runnable():
            return
        due = min((b.due for b in self._blocked.values()), default=float("inf"))
        if due < float("inf"):
            self._jump_to(due)

    def _jump_to(self, instant: float) -> None:
        if instant > self._now:
            self._now = instant
            self.jumps += 1
        self._note()

    # ---- threads

    @contextlib.contextmanager
    def attach(self) -> Iterator[None]:
        """Count the calling thread among those of the clock."""
        me = threading.current_thread()
        with self._changed:
            new = me not in self._threads
            self._threads.add(me)
        try:
            yield
        finally:
            if new:
                self._detach(me)

    def _detach(self, thread: Thread) -> None:
        with self._changed:
            self._threads.discard(thread)
            self._note()

    def _attach_thread(self, thread: Thread) -> None:
        """Add a thread that is about to start."""
        with self._changed:
            self._threads.add(thread)
            self._note()

    def _enter_thread(self) -> None:
        """Called by an attached thread when it begins to run."""

    def thread(
        self,
        target: Callable[..., Any],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
        daemon: bool = True,
    ) -> Thread:
        run = contextvars.copy_context().run
        return _VirtualThread(
            self, lambda: run(target, *args, **(kwargs or {})), name=name, daemon=daemon
        )

    def timer(self, seconds: float, function: Callable[[], Any]) -> TimerHandle:
        return _VirtualTimer(self, seconds, function, daemon=self._timers_are_daemons)

    def event(self) -> Event:
        return _VirtualEvent(self)

    def condition(self, lock: Any = None) -> Condition:
        return _VirtualCondition(self, threading.RLock() if lock is None else lock)

    def queue(self) -> Queue[Any]:
        return _VirtualQueue(self)

    # ---- other waits

    def wait_io(self, select: Callable[[float | None], T], timeout: float | None) -> T:
        """Poll ``select`` in slices of real time until it returns something true or time is up."""
        if timeout is not None and timeout <= 0:
            return select(0)
        me, slice_s = threading.current_thread(), max(self._autojump_s or 0.0, 0.005)
        with self._changed:
            outer = self._blocked.get(me)
            due = float("inf") if timeout is None else self._now + timeout
            self._blocked[me] = _BlockedThread(due, _never)
            self._note()
            seen = self._activity
        try:
            while True:
                result = select(slice_s)
                with self._changed:
                    if result or self._now >= due:
                        return result
                    if self._activity == seen:
                        self._try_jump()
                    seen = self._activity
        finally:
            with self._changed:
                self._unblock(me, outer)

    @contextlib.contextmanager
    def external_wait(self) -> Iterator[None]:
        me = threading.current_thread()
        with self._changed:
            outer = self._blocked.get(me)
            self._blocked[me] = _BlockedThread(float("inf"), _never)
            self._note()
        try:
            yield
        finally:
            with self._changed:
                self._unblock(me, outer)

    def random_bytes(self, nbytes: int) -> bytes:
        with self._changed:
            drawn = self._random.randbytes(nbytes)
            self.draws.append(drawn)
        return drawn


class _VirtualThread(threading.Thread):
    """Thread of a virtual clock; ``join`` is a wait of the clock."""

    def __init__(
        self, clock: VirtualClock, target: Callable[[], Any], *, name: str | None, daemon: bool
    ) -> None:
        super().__init__(target=target, name=name, daemon=daemon)
        self._clock = clock
        self._over = False

    def start(self) -> None:
        # Attached here, not in ``run``: time must not jump before the new thread has begun.
        self._clock._attach_thread(self)
        try:
            super().start()
        except BaseException:
            self._clock._detach(self)
            raise

    def run(self) -> None:
        self._clock._enter_thread()
        try:
            super().run()
        finally:
            self._over = True
            self._clock._detach(self)

    def join(self, timeout: float | None = None) -> None:
        if self.ident is None or threading.current_thread() is self:
            super().join(timeout)  # raises
        elif self._clock.block(lambda: self._over, timeout):
            super().join()


class _VirtualTimer(_VirtualThread):
    """Timer of a virtual clock."""

    def __init__(
        self, clock: VirtualClock, seconds: float, function: Callable[[], Any], *, daemon: bool
    ) -> None:
        self._cancelled = _VirtualEvent(clock)
        run = contextvars.copy_context().run

        def fire() -> None:
            if not self._cancelled.wait(seconds):
                run(function)

        super().__init__(clock, fire, name=None, daemon=daemon)

    def cancel(self) -> None:
        self._cancelled.set()


class _VirtualEvent:
    """``threading.Event`` whose ``wait`` is a wait of the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock, self._flag = clock, False

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        self._clock.wake()

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._clock.block(self.is_set, timeout)


class _VirtualCondition:
    """``threading.Condition`` whose ``wait`` is a wait of the clock."""

    def __init__(self, clock: VirtualClock, lock: Any) -> None:
        self._clock, self._lock = clock, lock
        self._waiters: deque[list[bool]] = deque()

    def acquire(self) -> bool:
        return bool(self._lock.acquire())

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return bool(self._lock.__enter__())

    def __exit__(self, *args: Any) -> None:
        self._lock.__exit__(*args)

    def wait(self, timeout: float | None = None) -> bool:
        notified = [False]
        self._waiters.append(notified)
        self._lock.release()
        try:
            return self._clock.block(lambda: notified[0], timeout)
        finally:
            self._lock.acquire()
            with contextlib.suppress(ValueError):
                self._waiters.remove(notified)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self._clock.monotonic() + timeout
        while not (result := predicate()):
            left = None if end is None else end - self._clock.monotonic()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiters))):
            self._waiters.popleft()[0] = True
        self._clock.wake()

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class _VirtualQueue:
    """``queue.SimpleQueue`` whose ``get`` is a wait of the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._clock.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        end = None if timeout is None else self._clock.monotonic() + timeout
        while True:
            with contextlib.suppress(IndexError):
                return self._items.popleft()
            left = None if end is None else end - self._clock.monotonic()
            if not block or not self._clock.block(lambda: bool(self._items), left):
                raise queue.Empty

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items


SYSTEM = SystemClock()
_current: contextvars.ContextVar[Clock] = contextvars.ContextVar("miraccl_clock", default=SYSTEM)


def current() -> Clock:
    """Return the clock of this context."""
    return _current.get()


@contextlib.contextmanager
def use(clock: VirtualClock) -> Iterator[VirtualClock]:
    """Make ``clock`` that of this context, and of threads that are made in it."""
    token = _current.set(clock)
    try:
        with clock.attach():
            yield clock
    finally:
        _current.reset(token)


def monotonic() -> float:
    """Return seconds since an arbitrary origin; never decreases."""
    return _current.get().monotonic()


def perf_counter() -> float:
    """Return seconds since an arbitrary origin at the highest resolution, for measurements."""
    return _current.get().perf_counter()


def sleep(seconds: float) -> None:
    """Block the calling thread for ``seconds``."""
    _current.get().sleep(seconds)


def thread(
    target: Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    daemon: bool = True,
) -> Thread:
    """Return a thread that has not started; its owner waits for it."""
    return _current.get().thread(target, args=args, kwargs=kwargs, name=name, daemon=daemon)


def timer(seconds: float, function: Callable[[], Any]) -> TimerHandle:
    """Return a timer, not started, that calls ``function`` in a thread of its own."""
    return _current.get().timer(seconds, function)


def event() -> Event:
    """Return an event of this context's clock."""
    return _current.get().event()


def condition(lock: Any = None) -> Condition:
    """Return a condition variable of this context's clock, over ``lock`` or a lock of its own."""
    return _current.get().condition(lock)


def simple_queue() -> Queue[Any]:
    """Return an unbounded FIFO queue of this context's clock."""
    return _current.get().queue()


def wait_io(select: Callable[[float | None], T], timeout: float | None) -> T:
    """Call ``select(timeout)``, a wait for file descriptors; ``timeout`` in seconds, None: none."""
    return _current.get().wait_io(select, timeout)


def external_wait() -> contextlib.AbstractContextManager[None]:
    """Context of a wait that only other threads can end and that is not one of the above."""
    return _current.get().external_wait()


def random_bytes(nbytes: int) -> bytes:
    """Return ``nbytes`` random bytes, fit for secrets on the system clock."""
    return _current.get().random_bytes(nbytes)


def random_hex(nbytes: int) -> str:
    """Return ``nbytes`` random bytes as text of twice as many hexadecimal digits."""
    return random_bytes(nbytes).hex()
