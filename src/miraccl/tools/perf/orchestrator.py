"""Runs measurements on own ranks, alone or alternating with a peer.

Compared libraries are alive for the whole run, and one of them works while all ranks of the other
one block in a system call. Batches alternate, so other activity of the machine affects both.

A rank that fails ends the run, and its error is printed once. Every wait has a deadline. All
processes are ended before the functions here return.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from miraccl import clock
from miraccl.errors import Fault, InvalidUsage, MiracclError
from miraccl.tools import launch
from miraccl.tools.perf.measure import BarrierWarmup, MeasureOptions, bind_to_core, measure
from miraccl.tools.perf.spec import Case, PerfRow
from miraccl.tools.spawn import RankContext, RankOutcome, Ranks

#: faults reported without a traceback
_SELF_EXPLANATORY: tuple[Fault, ...] = ("usage", "peer", "system")
_GRACE = 3.0  # seconds in which the other ranks may exit after a failure


class RunFailed(MiracclError):
    """The measurement could not be completed.

    ``fault`` is that of the rank that failed first, ``details`` its traceback if the message is not
    sufficient.
    """

    def __init__(
        self, message: str, *, details: str = "", fault: Fault = "system", **where: Any
    ) -> None:
        super().__init__(message, **where)
        self.details = details
        self.fault = fault


@dataclass(frozen=True, kw_only=True)
class PerfJob:
    """Work of each rank. ``hosts``: number of virtual hosts over which the ranks are spread in
    blocks.
    """

    cases: tuple[Case, ...]
    options: MeasureOptions
    init: dict[str, Any]
    window: bool = False
    persistent: bool = False
    explain: bool = False
    alternating: bool = False
    hosts: int = 1


@dataclass(frozen=True, kw_only=True)
class ResultLine:
    """Result of one size, a line of the table. ``failure`` is the reason for a missing result."""

    number: int
    out_of_place: PerfRow | None
    in_place: PerfRow | None
    explanation: tuple[dict[str, Any], ...] = ()
    failure: str = ""

    @property
    def rows(self) -> list[PerfRow]:
        return [r for r in (self.out_of_place, self.in_place) if r is not None]


class RankGroup(Protocol):
    """The ranks of one library, as seen by the orchestrator."""

    name: str

    @property
    def paused(self) -> bool:
        """True if every rank waits for its turn."""
        ...

    @property
    def finished(self) -> bool: ...

    def resume(self) -> None: ...

    def process_events(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for an event and process it. Raise ``RunFailed``."""
        ...

    def stop(self) -> None: ...


def run_cases(
    job: PerfJob,
    engine: Any,
    wait_for_turn: Callable[[], None],
    report: Callable[[ResultLine], None],
) -> None:
    """Measure all cases on one rank; ``report`` is called on every rank with the same line."""
    for number, case in enumerate(job.cases):
        try:
            out_of_place = measure(engine, case, False, job.options, wait_for_turn)
            in_place = measure(engine, case, True, job.options, wait_for_turn)
        except MemoryError as error:
            text = (
                f"cannot measure {case.op} of {case.nbytes} bytes on {case.nranks} ranks: out of"
                f" memory: {error}"
            )
            raise InvalidUsage(text) from None
        explanation = tuple(explain(engine.comm, case)) if job.explain else ()
        report(
            ResultLine(
                number=number, out_of_place=out_of_place, in_place=in_place, explanation=explanation
            )
        )


def explain(comm: Any, case: Case) -> list[dict[str, Any]]:
    """Return the candidates for a case as plain dictionaries."""
    redop = "sum" if case.redop == "none" else case.redop
    records = comm.explain(case.op, case.nbytes, case.dtype, redop)
    names = ("algo", "proto", "channels", "predicted_us", "chosen", "reason")
    return [{name: getattr(record, name) for name in names} for record in records]


def rank_main(context: RankContext, job: PerfJob) -> None:
    """Main function of a forked rank."""
    os.dup2(2, 1)  # standard output is the parent's table
    import miraccl
    from miraccl.tools.perf.engine_miraccl import MiracclEngine

    with miraccl.init(**job.init) as comm:
        engine = MiracclEngine(comm, window=job.window, persistent=job.persistent)
        if job.options.bind:
            bind_to_core(engine)
        pace = BarrierWarmup(engine)
        pace.run(0.3 if job.alternating else 0.1, 1.0)

        def turn() -> None:
            if job.alternating:
                context.emit("ready")
                context.receive()
                pace.run()

        run_cases(job, engine, turn, context.emit if comm.rank == 0 else lambda line: None)


def virtual_host_environ(rank: int, nranks: int, hosts: int) -> dict[str, str]:
    """Return the variables that place a rank on one of ``hosts`` virtual hosts; empty for one host.

    They apply to miraccl and NCCL.
    """
    name = f"perf-host-{rank * hosts // nranks}"
    return {"MIRACCL_HOSTID": name, "NCCL_HOSTID": name} if hosts > 1 else {}


class OwnGroup:
    """Ranks forked from this process.

    Each process runs ``main(context, job, *args)``: one per rank, or ``processes`` whose threads
    are the ranks. Their messages, other than "ready", are passed to ``on_line``.
    """

    def __init__(
        self,
        job: Any,
        nranks: int,
        on_line: Callable[[Any], None],
        name: str = "miraccl",
        *,
        main: Callable[..., None] | None = None,
        processes: int = 0,
        args: tuple[Any, ...] = (),
    ) -> None:
        self.name = name
        self._stack = contextlib.ExitStack()
        environ_of = self._stack.enter_context(launch.local_job(nranks))
        self._processes = processes or nranks

        def environ(rank: int) -> dict[str, str]:
            return {**environ_of(rank), **virtual_host_environ(rank, nranks, job.hosts)}

        ranks = Ranks(main or rank_main, self._processes, (job, *args), environ=environ)
        self._ranks = self._stack.enter_context(ranks)
        self._ready: set[int] = set()
        self._on_line = on_line

    @property
    def paused(self) -> bool:
        return len(self._ready) == self._processes

    @property
    def finished(self) -> bool:
        return not self._ranks.running

    def resume(self) -> None:
        self._ready.clear()
        for rank in range(self._processes):
            self._ranks.send(rank, "go")

    def process_events(self, timeout: float) -> None:
        for rank, message in self._ranks.poll(timeout):
            if message == "ready":
                self._ready.add(rank)
            else:
                self._on_line(message)
        if any(not o.ok and o.status is not None for o in self._ranks.outcomes):
            self._ranks.wait(clock.monotonic() + _GRACE)
            failure = self._ranks.first_failure()
            assert failure is not None
            for fault in _SELF_EXPLANATORY:
                if failure.fault == fault:
                    raise RunFailed(_describe_failure(failure), fault=fault)
            raise RunFailed(_describe_failure(failure), details=failure.error)

    def stop(self) -> None:
        self._stack.close()


def _describe_failure(failure: RankOutcome) -> str:
    text = failure.describe()
    if failure.summary:
        return text
    why = (
        "; the kernel kills processes when memory runs out"
        if failure.status == -signal.SIGKILL
        else ""
    )
    return f"{text} without reporting an error{why}"


def run_alternating(
    groups: list[RankGroup], timeout: float, message_timeout: float | None = None
) -> Iterator[None]:
    """Resume the groups in turn until all have finished; yield when messages may have arrived.

    ``timeout`` limits the whole run, ``message_timeout`` the time between two messages, in seconds.
    The caller stops the groups.
    """
    deadline = clock.monotonic() + timeout
    while not all(g.finished for g in groups):
        for group in groups:
            yield from _process_until_idle(group, deadline, message_timeout)
            if not group.finished:
                group.resume()
                yield from _process_until_idle(group, deadline, message_timeout)
        yield


def _process_until_idle(
    group: RankGroup, deadline: float, message_timeout: float | None
) -> Iterator[None]:
    while not (group.paused or group.finished):
        now = clock.monotonic()
        left = deadline - now
        if left <= 0:
            raise RunFailed(f"{group.name} did not finish in time", hint="increase --timeout")
        group.process_events(left if message_timeout is None else min(left, message_timeout))
        if message_timeout is not None and clock.monotonic() - now >= message_timeout:
            raise RunFailed(f"{group.name} sent no message for {message_timeout:g} s")
        yield


def join_peer_times(
    line: ResultLine, times: dict[tuple[int, bool], float], peer: str
) -> ResultLine:
    """Return the line with the times of the peer added."""

    def joined(row: PerfRow | None) -> PerfRow | None:
        if row is None:
            return None
        time_us = times.get((line.number, row.in_place))
        return replace(
            row, peer=peer, peer_time_us=time_us, ratio=time_us / row.time_us if time_us else None
        )

    return replace(line, out_of_place=joined(line.out_of_place), in_place=joined(line.in_place))
