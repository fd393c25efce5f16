"""``miraccl run``: start ranks of a program, monitor them and stop them together.

Guarantees:

- Every rank leads a process group of its own, so processes a rank has started end with it.
- The first rank that fails determines the exit status. The other ranks get ``--grace`` seconds to
  report the failed peer, then SIGTERM, and SIGKILL after the same time again.
- Signals sent to this process are forwarded to all ranks.
- Ranks never outlive this process.
- Output of several ranks appears by whole lines (``rank_output``).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import IO, Any

import click

from miraccl import clock
from miraccl.address_space import require_address_space
from miraccl.errors import InvalidUsage, SystemFailure, as_system_failure, did_you_mean
from miraccl.tools import launch
from miraccl.tools.completion import complete_files
from miraccl.tools.options import Finite
from miraccl.tools.processes import MAX_WAIT_SECONDS, die_with_parent, restore_sigchld, signal_name
from miraccl.tools.rank_output import RankOutput

_FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: errors of exec that are shortages of the system, not faults of the program
_AGGREGATOR = [sys.executable, "-m", "miraccl", "aggregator"]
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)


@click.command(
    short_help="Start ranks of a program.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "-n",
    "--nproc",
    "nproc",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Ranks to start on this host.",
)
@click.option(
    "--aggregators",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Processes beside the ranks that only add: all_reduce uses them where they are faster.",
)
@click.option("-m", "as_module", is_flag=True, help="PROGRAM is a Python module, as in python -m.")
@click.option("--tag", is_flag=True, help="Prefix every line of output with its rank.")
@click.option(
    "--raw",
    is_flag=True,
    help="Let the ranks write to the terminal themselves.  [default: only with one rank]",
)
@click.option(
    "--nnodes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Hosts; run the same command on each.",
)
@click.option(
    "--node-rank", type=click.IntRange(0), default=0, show_default=True, help="Number of this host."
)
@click.option(
    "--master",
    metavar="HOST:PORT",
    help="Address of rank 0, reachable from all hosts; with --nnodes above 1.",
)
@click.option(
    "--grace",
    type=Finite(0),
    default=3.0,
    show_default=True,
    help="Seconds between the stages of stopping ranks.",
)
@click.argument("program", shell_complete=complete_files())
@click.argument("args", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files())
def run(program: str, args: tuple[str, ...], **options: Any) -> None:
    """Start PROGRAM as several ranks, in which miraccl.init() makes a communicator of all of them.

    PROGRAM is a Python file, a module with -m, or any other program. Ranks receive their numbers in
    MIRACCL_RANK, MIRACCL_NRANKS and MIRACCL_LOCAL_RANK, and in the variables of torchrun (RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), so a PyTorch script runs unchanged, with any
    backend. If one fails, all are stopped, and the exit status is that of the first that failed
    (128 + N for signal N). Standard input goes to rank 0, unless it is a terminal.

    The output of several ranks appears by whole lines; equal tracebacks appear once, with their
    ranks, the first failure before the others.

    On several hosts, run the same command on each with its own --node-rank, all with the same
    MIRACCL_SECRET in the environment and the same --nproc.

    \b
    Examples:
      miraccl run -n 4 train.py --epochs 3
      miraccl run -n 4 --tag -m package.module
      miraccl run -n 2 -- ./program --flag
      MIRACCL_SECRET=... miraccl run -n 8 --nnodes 2 --node-rank 0 --master 10.0.0.1:29500 train.py
    """
    command = build_command(program, args, as_module=options["as_module"])
    if command[0] == sys.executable:
        require_address_space("numpy", "llvmlite", do=f"run {program} as a rank")
    aggregators = options["aggregators"]
    if aggregators and options["nnodes"] > 1:
        raise InvalidUsage(
            "cannot combine --aggregators with --nnodes above 1",
            hint="start `miraccl aggregator` on a host of its own, with MIRACCL_RANK and"
            " MIRACCL_AGGREGATORS",
        )
    nproc = options["nproc"] + aggregators
    if options["raw"] and options["tag"]:
        raise InvalidUsage("cannot combine --raw with --tag: it leaves the output to the ranks")
    with open_job(nproc, options["nnodes"], options["node_rank"], options["master"]) as environ:
        job = LocalJob(
            command,
            nproc,
            environ,
            tag=options["tag"],
            raw=options["raw"],
            grace=options["grace"],
            first=options["node_rank"] * nproc,
            aggregators=aggregators,
        )
        status = job.run()
    sys.exit(status)


def build_command(program: str, args: tuple[str, ...], *, as_module: bool) -> list[str]:
    """Return the command that each rank executes; Python files run under this Python."""
    if as_module:
        return [sys.executable, "-m", program, *args]
    if program.endswith(".py"):
        if not os.path.exists(program):
            raise InvalidUsage(f"cannot run {program}: no such file")
        return [sys.executable, program, *args]
    if found := shutil.which(program):
        return [found, *args]
    if os.path.isfile(program):
        return [sys.executable, program, *args]
    hint = None
    if program.startswith("-"):
        options = [name for option in run.params for name in option.opts]
        close = did_you_mean(program.partition("=")[0], options)
        hint = close or "miraccl run --help lists the options; arguments after -- are the program"
    raise InvalidUsage(
        f"cannot run {program!r}: not an option, a Python file or a program on PATH", hint=hint
    )


def open_job(
    nproc: int, nnodes: int, node_rank: int, master: str | None
) -> contextlib.AbstractContextManager[launch.Environ]:
    """Return a context manager that yields a function from local rank to environment variables."""
    if node_rank >= nnodes:
        raise InvalidUsage(
            f"cannot use --node-rank {node_rank}: with --nnodes {nnodes} it must be"
            f" {f'0 to {nnodes - 1}' if nnodes > 1 else 0}"
        )
    if nnodes == 1 and not master:
        return launch.local_job(nproc, torchrun=True)
    if not master:
        raise InvalidUsage("cannot start a job with --nnodes above 1 without --master HOST:PORT")
    return launch.static_job(nproc, nnodes, node_rank, master, os.environ)


@dataclass(kw_only=True)
class _Process:
    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int = -1


class LocalJob:
    """Ranks of this host. ``run()`` may be called once; it returns the exit status of the job."""

    def __init__(
        self,
        command: list[str],
        nproc: int,
        environ: launch.Environ,
        *,
        tag: bool,
        grace: float,
        raw: bool = False,
        first: int = 0,
        aggregators: int = 0,
    ) -> None:
        self._command = command
        #: local ranks from here on are aggregators
        self._nranks = nproc - aggregators
        self._nproc = nproc
        self._environ = environ
        self._reads_output = tag or (nproc > 1 and not raw)
        self._output = RankOutput(_write_all, tag=tag)
        self._grace = grace
        self._first = first
        with as_system_failure("cannot monitor ranks"):
            self._selector = selectors.DefaultSelector()
        self._processes: list[_Process] = []
        self._running: set[int] = set()
        self._signals: list[int] = []
        self._status = 0
        self._stage = 0  # 0 running, 1 waiting for the others, 2 after SIGTERM, 3 after SIGKILL
        self._limit: float | None = None

    def run(self) -> int:
        restore_sigchld()
        with self._catching_signals():
            try:
                for local_rank in range(self._nproc):
                    self._start(local_rank)
                    self._process_events(wait=False)
                    if self._stage:  # a signal arrived or a rank has failed: start no more
                        break
                while any(local_rank < self._nranks for local_rank in self._running):
                    self._process_events()
            finally:
                self._kill_all()
                self._output.finish()
        return self._status

    # ------------------------------------------------------------------ starting

    def _start(self, local_rank: int) -> None:
        streams: Any = subprocess.PIPE if self._reads_output else None
        stdin = (
            None
            if local_rank == 0 and self._first == 0 and not sys.stdin.isatty()
            else subprocess.DEVNULL
        )
        try:
            process = subprocess.Popen(
                self._command if local_rank < self._nranks else _AGGREGATOR,
                env={
                    **self._python_environ(),
                    **os.environ,
                    **self._environ(local_rank),
                    **self._aggregator_environ(local_rank),
                },
                stdin=stdin,
                stdout=streams,
                stderr=streams,
                process_group=0,
                # safe: this process has a single thread
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        except OSError as error:
            kind = SystemFailure if error.errno in _SHORTAGES else InvalidUsage
            raise kind(f"cannot run {self._command[0]}: {error.strerror}") from None
        entry = _Process(rank=self._first + local_rank, process=process)
        self._processes.append(entry)
        self._running.add(local_rank)
        with as_system_failure(f"cannot monitor rank {entry.rank}"):
            self._watch(entry, local_rank)

    def _python_environ(self) -> dict[str, str]:
        # Python would buffer what it prints to a pipe.
        return {"PYTHONUNBUFFERED": "1"} if self._reads_output else {}

    def _aggregator_environ(self, local_rank: int) -> dict[str, str]:
        if self._nranks == self._nproc:
            return {}
        # PyTorch counts the ranks only.
        sizes = {"WORLD_SIZE": str(self._nranks), "LOCAL_WORLD_SIZE": str(self._nranks)}
        return {**sizes, "MIRACCL_AGGREGATORS": str(self._nproc - self._nranks)}

    def _watch(self, entry: _Process, local_rank: int) -> None:
        process = entry.process
        entry.pidfd = os.pidfd_open(process.pid)
        self._selector.register(entry.pidfd, selectors.EVENT_READ, ("exit", local_rank, None))
        for number, pipe in enumerate((process.stdout, process.stderr), start=1):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ, ("output", local_rank, number))

    @contextlib.contextmanager
    def _catching_signals(self) -> Any:
        """Let signals wake the selector; restore the previous handlers at the end."""
        with self._selector, contextlib.ExitStack() as pair:
            with as_system_failure("cannot catch signals"):
                reader, writer = map(pair.enter_context, socket.socketpair())
                writer.setblocking(False)
                reader.setblocking(False)
                self._selector.register(reader, selectors.EVENT_READ, ("signal", 0, reader))
            old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            old = {
                number: signal.signal(number, lambda n, frame: self._signals.append(n))
                for number in _FORWARDED
            }
            try:
                yield
            finally:
                for number, handler in old.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(old_fd)

    # ------------------------------------------------------------------ watching

    def _process_events(self, *, wait: bool = True) -> None:
        due = [limit for limit in (self._limit, self._output.due()) if limit is not None]
        timeout = None
        if due or not wait:
            left = min(due) - clock.monotonic() if wait else 0.0
            timeout = min(max(0.0, left), MAX_WAIT_SECONDS)
        for key, _ in self._selector.select(timeout):
            kind, local_rank, detail = key.data
            if kind == "signal":
                with contextlib.suppress(BlockingIOError):
                    detail.recv(4096)
            elif kind == "output":
                # The rank's exit may have been handled, and its output drained, in this round.
                if key.fd in self._selector.get_map():
                    self._read(local_rank, detail, key.fileobj)
            else:
                self._handle_exit(local_rank)
        while self._signals:
            self._forward(self._signals.pop(0))
        now = clock.monotonic()
        self._output.poll(now)
        if self._limit is not None and now >= self._limit:
            self._escalate()

    def _handle_exit(self, local_rank: int) -> None:
        entry = self._processes[local_rank]
        self._selector.unregister(entry.pidfd)
        os.close(entry.pidfd)
        self._kill_group(entry)  # before wait(): its number cannot be reused until then
        status = entry.process.wait()
        self._running.discard(local_rank)
        self._drain(local_rank)
        self._output.close(entry.rank, clock.monotonic())
        if local_rank >= self._nranks:
            self._report_aggregator(local_rank, status)
            return
        if status and self._stage < 2:
            self._output.fail(entry.rank)
        if status and not self._status and self._stage == 0:
            self._status = status if status > 0 else 128 - status
            what = (
                f"exited with status {status}"
                if status > 0
                else f"was killed by {signal_name(-status)}"
            )
            others = "; stopping the others" if self._running else ""
            print(f"miraccl run: rank {entry.rank} {what}{others}", file=sys.stderr, flush=True)
            self._stage, self._limit = 1, clock.monotonic() + self._grace

    def _report_aggregator(self, local_rank: int, status: int) -> None:
        """Report an aggregator that failed; its ranks get an error and may go on without it."""
        if status and self._stage == 0:
            what = f"exit status {status}" if status > 0 else signal_name(-status)
            name = f"aggregator {local_rank - self._nranks}"
            print(f"miraccl run: {name} ended ({what})", file=sys.stderr, flush=True)

    def _forward(self, number: int) -> None:
        self._signal_all(number)
        if number in _ENDING and self._stage < 2:
            self._status = self._status or 128 + number
            self._stage, self._limit = 2, clock.monotonic() + self._grace

    def _escalate(self) -> None:
        self._stage += 1
        self._signal_all(signal.SIGTERM if self._stage == 2 else signal.SIGKILL)
        self._limit = clock.monotonic() + self._grace if self._stage == 2 else None

    def _signal_all(self, number: int) -> None:
        for local_rank in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._processes[local_rank].process.pid, number)

    def _kill_all(self) -> None:
        """Kill and reap all ranks that are still running."""
        for local_rank in self._running:
            entry = self._processes[local_rank]
            self._kill_group(entry)
            entry.process.wait()
            if entry.pidfd >= 0:
                os.close(entry.pidfd)

    @staticmethod
    def _kill_group(entry: _Process) -> None:
        """Kill the rank, if it runs, and the processes it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(entry.process.pid, signal.SIGKILL)

    # ------------------------------------------------------------------ output

    def _read(self, local_rank: int, number: int, pipe: Any) -> bool:
        """Read output of a rank; return True if there may be more."""
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self._output.feed(self._processes[local_rank].rank, number, data, clock.monotonic())
        else:
            self._selector.unregister(pipe)
        return bool(data)

    def _drain(self, local_rank: int) -> None:
        entry = self._processes[local_rank]
        for number, pipe in enumerate((entry.process.stdout, entry.process.stderr), start=1):
            while (
                pipe is not None
                and pipe.fileno() in self._selector.get_map()
                and self._read(local_rank, number, pipe)
            ):
                pass


def _write_all(number: int, data: bytes) -> None:
    """Write to standard output (1) or standard error (2)."""
    target: IO[bytes] = sys.stdout.buffer if number == 1 else sys.stderr.buffer
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(target.fileno(), rest) :]
        except BlockingIOError:  # a process that shares the output has made it non-blocking
            select.select([], [target.fileno()], [])
