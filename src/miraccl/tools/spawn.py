"""Ranks of this host, started by forking.

Owns the processes it starts, the socket pair to each of them and their captured output. The parent
should have imported numpy, numba and miraccl before (about 0.5 s); a fork costs 2 ms, so eight
ranks start as fast as one.

Guarantees:

- A rank never outlives its parent (``PR_SET_PDEATHSIG``) nor ``stop()``; the parent reaps every
  process it has started.
- Every wait has a deadline.
- A rank's last message is its result or its traceback; a killed rank is reported by its status.
- Ctrl-C in a terminal reaches the parent only, which stops the ranks.

The parent must have a single thread, which command-line tools and the test server have but an
application need not. The library itself therefore never uses this module.
"""

from __future__ import annotations

import contextlib
import io
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from miraccl import clock
from miraccl.errors import as_system_failure
from miraccl.tools.pipe import ProcessPipe
from miraccl.tools.processes import MAX_WAIT_SECONDS, die_with_parent, restore_sigchld, signal_name

_MAX_OUTPUT = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """First argument of the function that a rank runs."""

    rank: int
    nranks: int
    pipe: ProcessPipe

    def emit(self, message: Any) -> None:
        """Send a message to the parent."""
        self.pipe.send(("message", message))

    def receive(self) -> Any:
        """Return the parent's next message; block until it arrives. Raise ``EOFError`` if it has
        exited.
        """
        return self.pipe.receive()


@dataclass(kw_only=True)
class RankOutcome:
    """Result of a rank.

    - ``status``: exit status, or minus the signal number; None while it runs.
    - ``value``: return value of the rank's function.
    - ``error``: traceback, empty if there was none; ``summary`` is its last line and ``fault`` that
      of a ``MiracclError``.
    - ``output``: captured output.
    - ``order``: position in the order of failures.
    - ``stopped``: the rank was ended by ``Ranks.stop``.
    """

    rank: int
    status: int | None = None
    value: Any = None
    error: str = ""
    summary: str = ""
    fault: str = ""
    output: str = ""
    order: int = -1
    stopped: bool = False

    @property
    def ok(self) -> bool:
        return self.status == 0 and not self.error

    def describe(self) -> str:
        """Describe the end of the rank in one sentence."""
        if self.summary:
            return f"rank {self.rank}: {self.summary}"
        if self.status is None:
            return f"rank {self.rank} did not exit"
        if self.status < 0:
            return f"rank {self.rank} was killed by {signal_name(-self.status)}"
        return f"rank {self.rank} exited with status {self.status}"


@dataclass(kw_only=True)
class _Rank:
    pid: int
    pidfd: int
    pipe: ProcessPipe
    output_fd: int
    outcome: RankOutcome
    output: bytearray = field(default_factory=bytearray)


class Ranks:
    """Forked ranks and their outcomes. A context manager that kills remaining ranks on exit.

    ``target(context, *args)`` runs in every rank with ``environ(rank)`` added to its environment;
    its return value must be picklable. ``capture`` stores the last MiB of a rank's output instead
    of passing it through.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        nranks: int,
        args: Sequence[Any] = (),
        *,
        environ: Callable[[int], Mapping[str, str]] | None = None,
        capture: bool = False,
    ) -> None:
        with as_system_failure("cannot start ranks"):
            self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._ended = 0
        self._closed = False
        restore_sigchld()
        _flush()
        try:
            with _sigint_blocked() as mask:
                for rank in range(nranks):
                    self._ranks.append(
                        self._start(
                            target,
                            rank,
                            nranks,
                            args,
                            environ(rank) if environ else {},
                            capture,
                            mask,
                        )
                    )
        except BaseException:
            self.stop(grace=0)
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop(grace=0)

    @property
    def outcomes(self) -> list[RankOutcome]:
        return [r.outcome for r in self._ranks]

    @property
    def pids(self) -> list[int]:
        return [r.pid for r in self._ranks]

    @property
    def running(self) -> bool:
        return self._ended < len(self._ranks)

    def send(self, rank: int, message: Any) -> None:
        # poll() reports the death of the rank
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            self._ranks[rank].pipe.send(message)

    def poll(self, timeout: float | None) -> list[tuple[int, Any]]:
        """Wait up to ``timeout`` seconds (at most an hour) for an event; return messages as (rank,
        message).

        Exits are recorded in ``outcomes``.
        """
        messages: list[tuple[int, Any]] = []
        for key, _ in self._selector.select(
            timeout if timeout is None else min(timeout, MAX_WAIT_SECONDS)
        ):
            kind, rank = key.data
            if kind == "message":
                self._read_messages(rank, messages)
            elif kind == "output":
                self._read_output(rank)
            else:
                self._reap(rank, messages)
        return messages

    def wait(
        self,
        deadline: float,
        on_message: Callable[[int, Any], None] | None = None,
        grace: float = 2.0,
    ) -> bool:
        """Wait until all ranks have exited; return True if none had to be stopped.

        After the first failure the other ranks have ``grace`` seconds. ``deadline`` is a value of
        ``clock.monotonic()``.
        """
        limit = deadline
        failed = False
        while self.running:
            for rank, message in self.poll(max(0.0, limit - clock.monotonic())):
                if on_message:
                    on_message(rank, message)
            if not failed and any(o.status not in (None, 0) for o in self.outcomes):
                failed, limit = True, min(limit, clock.monotonic() + grace)
            if self.running and clock.monotonic() >= limit:
                self.stop(grace=0.2)
                return False
        return True

    def first_failure(self) -> RankOutcome | None:
        """Return the rank that failed first, or None.

        Ranks that were stopped here or that only report a peer's failure count if there is no
        other.
        """
        failures = [o for o in self.outcomes if o.error or o.status not in (None, 0)]
        # Ranks learn of failures within microseconds, so arrival order does not separate cause and
        # effect.
        return min(
            failures,
            key=lambda o: (o.stopped, o.fault == "peer", o.order if o.order >= 0 else sys.maxsize),
            default=None,
        )

    def stop(self, grace: float = 2.0) -> None:
        """Stop running ranks with SIGTERM, after ``grace`` seconds with SIGKILL, and reap them.

        May be called twice.
        """
        if self._closed:
            return
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
            if number is signal.SIGTERM and not grace:
                continue
            for rank in self._ranks:
                if rank.outcome.status is None:
                    rank.outcome.stopped = True
                    signal.pidfd_send_signal(rank.pidfd, number)
            limit = clock.monotonic() + seconds
            while self.running and clock.monotonic() < limit:
                self.poll(max(0.0, limit - clock.monotonic()))
        for rank in self._ranks:
            self._release(rank)
        self._selector.close()
        self._closed = True

    # ------------------------------------------------------------------ inside

    def _start(
        self,
        target: Callable[..., Any],
        rank: int,
        nranks: int,
        args: Sequence[Any],
        environ: Mapping[str, str],
        capture: bool,
        mask: Iterable[int],
    ) -> _Rank:
        """Fork one rank; ``mask`` is the set of signals that the rank has blocked."""
        parent = os.getpid()
        with (
            as_system_failure(f"cannot start rank {rank}"),
            ExitStack() as child_ends,
            ExitStack() as on_failure,
        ):
            parent_end, child_end = socket.socketpair()
            on_failure.enter_context(parent_end)
            child_ends.enter_context(child_end)
            read_fd, write_fd = os.pipe() if capture else (-1, -1)
            if capture:
                on_failure.callback(os.close, read_fd)
                child_ends.callback(os.close, write_fd)
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                for other in self._ranks:
                    other.pipe.close()
                _become_rank(
                    parent,
                    target,
                    RankContext(rank=rank, nranks=nranks, pipe=ProcessPipe(child_end)),
                    args,
                    environ,
                    write_fd,
                )
            on_failure.callback(_end_child, pid)
            pidfd = os.pidfd_open(pid)
            on_failure.callback(os.close, pidfd)
            channel = ProcessPipe(parent_end)
            if capture:
                os.set_blocking(read_fd, False)
                self._selector.register(read_fd, selectors.EVENT_READ, ("output", rank))
            self._selector.register(channel, selectors.EVENT_READ, ("message", rank))
            self._selector.register(pidfd, selectors.EVENT_READ, ("exit", rank))
            on_failure.pop_all()
        return _Rank(
            pid=pid, pidfd=pidfd, pipe=channel, output_fd=read_fd, outcome=RankOutcome(rank=rank)
        )

    def _read_messages(self, number: int, messages: list[tuple[int, Any]]) -> bool:
        """Read the messages that have arrived; return True if there may be more."""
        rank = self._ranks[number]
        try:
            arrived = rank.pipe.available()
        except EOFError:
            self._unregister(rank.pipe)
            return False
        for kind, body in arrived:
            if kind == "message":
                messages.append((number, body))
            elif kind == "value":
                rank.outcome.value = body
            else:
                rank.outcome.error, rank.outcome.summary, rank.outcome.fault = body
                rank.outcome.order = self._next_order()
        return bool(arrived)

    def _read_output(self, number: int) -> bool:
        """Read printed output; return True if there may be more."""
        rank = self._ranks[number]
        if rank.output_fd < 0:
            return False
        try:
            data = os.read(rank.output_fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._unregister(rank.output_fd)
        rank.output = (rank.output + data)[-_MAX_OUTPUT:]
        return bool(data)

    def _reap(self, number: int, messages: list[tuple[int, Any]]) -> None:
        rank = self._ranks[number]
        self._unregister(rank.pidfd)
        # Processes that a rank has started may hold the pipes open: read what has arrived without
        # waiting for an end of file.
        while self._read_messages(number, messages):
            pass
        while self._read_output(number):
            pass
        _, status = os.waitpid(rank.pid, 0)
        rank.outcome.status = os.waitstatus_to_exitcode(status)
        rank.outcome.output = rank.output.decode(errors="replace")
        if rank.outcome.status != 0 and rank.outcome.order < 0:
            rank.outcome.order = self._next_order()
        self._ended += 1

    def _next_order(self) -> int:
        return 1 + max(r.outcome.order for r in self._ranks)

    def _unregister(self, fileobj: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fileobj)

    def _release(self, rank: _Rank) -> None:
        rank.pipe.close()
        for fd in (rank.pidfd, rank.output_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        rank.pidfd = rank.output_fd = -1


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[Iterable[int]]:
    """Block SIGINT while ranks are forked; yield the signals that were blocked before."""
    # A child interrupted before it has become a rank would continue as its parent does.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _become_rank(
    parent: int,
    target: Callable[..., Any],
    context: RankContext,
    args: Sequence[Any],
    environ: Mapping[str, str],
    output_fd: int,
) -> None:
    """Run ``target`` in a forked child and exit; never returns."""
    status = 1
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if output_fd >= 0:
            os.dup2(output_fd, 1)
            os.dup2(output_fd, 2)
            sys.stdout = io.TextIOWrapper(
                os.fdopen(1, "wb", closefd=False), line_buffering=True, errors="replace"
            )
            sys.stderr = io.TextIOWrapper(
                os.fdopen(2, "wb", closefd=False), line_buffering=True, errors="replace"
            )
        os.environ.update(environ)
        status = _run(target, context, args)
    finally:
        _flush()
        os._exit(status)


def _run(target: Callable[..., Any], context: RankContext, args: Sequence[Any]) -> int:
    try:
        context.pipe.send(("value", target(context, *args)))
        return 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        with contextlib.suppress(OSError):
            body = (
                traceback.format_exc(),
                f"{type(error).__name__}: {error}",
                getattr(error, "fault", ""),
            )
            context.pipe.send(("error", body))
        return 1


def _end_child(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
