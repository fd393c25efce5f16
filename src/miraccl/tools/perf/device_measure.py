"""How one case is measured on GPUs; the same code for miraccl and for NCCL, which take turns batch by batch.

    time = median over batches of (maximum over ranks of (GPU time of a batch / operations in it))

A batch is ``iters`` operations back to back in one stream, called one by one or replayed as one CUDA graph, between two CUDA events.
Ranks are aligned on the GPU before: a small collective, then a pause in which all hosts enqueue what is measured.  Without it the rank
that leaves a barrier of hosts first would count the time it waits for the last, and the time to launch a graph would be in the figures.

``host_us`` is what the calling thread spends on a call, of the slowest rank, the best of three rounds: the GPU works meanwhile.

Each result is checked before and after the timed calls, with other inputs and a poisoned output; where a graph is timed and may be
repeated, the second check looks at what the graph computes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from miraccl.errors import InvalidUsage, MiracclError
from miraccl.tools.perf import device_check
from miraccl.tools.perf.device_array import Arena
from miraccl.tools.perf.device_miraccl import (
    BoundDeviceOperation,
    DeviceLibrary,
    LaunchInfo,
    MiracclDevice,
)
from miraccl.tools.perf.measure import MeasureOptions
from miraccl.tools.perf.spec import Case, PerfRow, build_row

#: operations in a batch by size (bytes up to, operations)
_ITERS = ((1 << 16, 200), (1 << 20, 50), (64 << 20, 20), (1 << 62, 5))
_BATCH_US = 50_000.0  # a batch is cut to about this, such as where ranks share a GPU
_HOST_CALLS, _HOST_US = (
    100,
    20_000.0,
)  # calls of a round of host time, and the GPU time they may pile up
_HOST_ROUNDS = 3
_WARM_UP_CALLS = 2


class CellFailed(MiracclError):
    """A cell has no figures; raised on all ranks together, which may go on with the next one."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A case, whether it is timed as a CUDA graph, and its forms (False out of place, True in place)."""

    case: Case
    graph: bool = False
    forms: tuple[bool, ...] = (False, True)


class GpuTimer(Protocol):
    """What is needed of a GPU beside memory (``card.Card``)."""

    def wait(self) -> None: ...
    def pause(self, times: int = 1) -> None: ...
    def time_us(self, run: Callable[[], Any]) -> float: ...
    def drop_graphs(self) -> None: ...


@dataclass(kw_only=True)
class Bench:
    """One rank's place of measurement. ``libraries``: the first is the one measured, a second is its peer.

    ``pauses``: how long hosts have to enqueue (threads of one process take longer).  ``turn`` is called before each stretch of work.
    """

    gpu: Any
    arena: Arena
    session: Any
    libraries: Sequence[DeviceLibrary]
    options: MeasureOptions
    device: str
    wait_for_turn: Callable[[], None] = lambda: None
    pauses: int = 1

    @property
    def rank(self) -> int:
        return int(self.session.rank)

    def barrier(self) -> None:
        """All ranks, with nothing left to do on their GPUs."""
        self.gpu.wait()
        self.session.barrier("perf")

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value (plain JSON)."""
        return [
            json.loads(blob)
            for blob in self.session.all_gather(json.dumps(value).encode(), "perf values")
        ]

    def maximum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """The maximum over ranks, one by one."""
        return [max(column) for column in zip(*self.gather(list(values)), strict=True)]


@dataclass(kw_only=True)
class _Trial:
    """One library at one form of a case."""

    library: DeviceLibrary
    bound: BoundDeviceOperation
    iters: int = 1
    run: Callable[[], Any] = lambda: None
    wrong: int = 0
    times: list[float] = field(default_factory=list)
    host_us: float = 0.0
    launch_info: LaunchInfo = field(default_factory=LaunchInfo)

    @property
    def time_us(self) -> float:
        return statistics.median(self.times)


def measure_cell(bench: Bench, cell: Cell) -> tuple[list[PerfRow], LaunchInfo]:
    """The rows of a cell, the same on every rank, and how the last form ran. Raises ``InvalidUsage`` on all ranks for what is refused."""
    rows, chosen = [], LaunchInfo()
    for in_place in cell.forms:
        found = _measure_form(bench, cell, in_place)
        if found is not None:
            rows.append(found[0])
            chosen = found[1]
    return rows, chosen


def _measure_form(bench: Bench, cell: Cell, in_place: bool) -> tuple[PerfRow, LaunchInfo] | None:
    batches = bench.options.batches
    bench.wait_for_turn()
    bench.gpu.drop_graphs()
    bench.arena.reset()
    trials = _prepare_all(bench, cell, in_place)
    for _ in range(batches):
        bench.wait_for_turn()
        for trial in trials:
            trial.times.append(_time_once(bench, trial.run) / trial.iters)
    bench.wait_for_turn()
    if not trials:
        return None
    for trial in trials:
        _finish_trial(bench, cell, trial)
    return _row(bench, cell, in_place, trials), trials[0].launch_info


def _prepare_all(bench: Bench, cell: Cell, in_place: bool) -> list[_Trial]:
    """A trial of each library that has the form; none if the first lacks it."""
    trials: list[_Trial] = []
    for number, library in enumerate(bench.libraries):
        trial = _run_on_all_ranks(bench, partial(_prepare, bench, library, cell, in_place))
        if trial is not None:
            trials.append(trial)
        elif number == 0:
            break
    return [trial for trial in trials if _warm_up(bench, cell, trial)]


def _run_on_all_ranks(bench: Bench, action: Callable[[], _Trial | None]) -> _Trial | None:
    """Do it on all ranks; if one of them refuses its arguments, all raise, and the communicator is as good as before."""
    trial, refusal = None, ""
    try:
        trial = action()
    except MiracclError as error:
        if error.fault != "usage":
            raise
        refusal = str(error)
    refusals = [text for text in bench.gather(refusal) if text]
    if refusals:
        raise InvalidUsage(refusals[0])
    return trial


def _prepare(bench: Bench, library: DeviceLibrary, cell: Cell, in_place: bool) -> _Trial | None:
    bound = library.bind(cell.case, in_place)
    if bound is None:
        return None
    trial = _Trial(library=library, bound=bound)
    if bench.options.check:
        trial.wrong = _check(bench, cell.case, trial, bound.call, seed=1)
    else:
        device_check.fill_neutral(bench.gpu, cell.case, bound.input)
        bench.barrier()
        bound.call()
    trial.launch_info = bound.launch_info()  # now: aligning the ranks is an operation, too
    return trial


def _check(bench: Bench, case: Case, trial: _Trial, run: Callable[[], Any], seed: int) -> int:
    bound, memory = trial.bound, bench.gpu
    device_check.poison(memory, bound.output)
    device_check.fill_input(memory, case, bound.input, bench.rank, seed)
    bench.barrier()  # no rank writes into memory that another one still poisons
    run()
    memory.wait()
    trial.library.check()
    wrong = device_check.count_wrong(memory, case, bound.output, bench.rank, seed)
    if not bound.repeatable:
        device_check.fill_neutral(memory, case, bound.input)
        memory.wait()
    return wrong


def _warm_up(bench: Bench, cell: Cell, trial: _Trial) -> bool:
    """Untimed calls, how many operations a batch has, and its graph. False for a peer that cannot be captured here."""
    options, call = bench.options, trial.bound.call
    bench.barrier()
    for _ in range(_WARM_UP_CALLS if options.warmup is None else options.warmup):
        call()
    trial.iters = options.iters or _choose_iters(bench, cell.case, trial)

    def batch() -> None:
        for _ in range(trial.iters):
            call()

    trial.run = batch
    if cell.graph:
        bench.barrier()
        problem = _capture(bench, trial, batch)
        if problem and trial.library.name == MiracclDevice.name:
            raise CellFailed(
                f"{cell.case.op} of {cell.case.nbytes} bytes cannot be captured: {problem}"
            )
        if problem:
            _print_note(
                bench,
                f"{trial.library.name}: {cell.case.op} of {cell.case.nbytes} bytes cannot be captured: {problem}",
            )
            return False
        trial.run()
    bench.gpu.wait()
    trial.library.check()
    return True


def _capture(bench: Bench, trial: _Trial, batch: Callable[[], Any]) -> str:
    """Make the graph; what went wrong on any rank. A capture that fails leaves the stream as it was."""
    problem = ""
    try:
        trial.run = trial.library.capture(batch)
    except Exception as error:  # the peer's errors are of any kind
        problem = f"{type(error).__name__}: {error}"
    return next((text for text in bench.gather(problem) if text), "")


def _print_note(bench: Bench, text: str) -> None:
    if bench.rank == 0:
        print(f"note: {text}", file=sys.stderr, flush=True)


def _choose_iters(bench: Bench, case: Case, trial: _Trial) -> int:
    usual = next(iters for limit, iters in _ITERS if case.nbytes <= limit)
    (estimate,) = bench.maximum_over_ranks([_time_once(bench, trial.bound.call)])
    return max(1, min(usual, int(_BATCH_US / max(estimate, 0.1))))


def _time_once(bench: Bench, run: Callable[[], Any]) -> float:
    """Microseconds of one batch on this rank."""
    bench.barrier()
    bench.libraries[0].align()
    bench.gpu.pause(bench.pauses)
    return float(bench.gpu.time_us(run))


def _finish_trial(bench: Bench, cell: Cell, trial: _Trial) -> None:
    """The slowest rank's times, the second check, the host's time."""
    bench.gpu.wait()
    trial.library.check()
    trial.times = bench.maximum_over_ranks(trial.times)
    if bench.options.check:
        run = trial.run if cell.graph and trial.bound.repeatable else trial.bound.call
        trial.wrong += _check(bench, cell.case, trial, run, seed=2)
        trial.wrong = sum(bench.gather(trial.wrong))
    trial.host_us = _host_time_us(bench, trial)


def _host_time_us(bench: Bench, trial: _Trial) -> float:
    call = trial.bound.call
    calls = max(2, min(_HOST_CALLS, int(_HOST_US / max(trial.time_us, 0.1))))
    best = float("inf")
    for _ in range(_HOST_ROUNDS):
        bench.barrier()
        before = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - before) / calls * 1e6)
    bench.barrier()
    return bench.maximum_over_ranks([best])[0]


def _row(bench: Bench, cell: Cell, in_place: bool, trials: Sequence[_Trial]) -> PerfRow:
    case, first = cell.case, trials[0]
    chosen = first.launch_info
    row = build_row(
        case,
        first.times,
        in_place=in_place,
        wrong=first.wrong if bench.options.check else None,
        iters=first.iters,
        algo=chosen.algo,
        proto=chosen.proto,
        channels=chosen.blocks,
        threads=chosen.threads,
        device=bench.device,
        graph=cell.graph,
        host_us=first.host_us,
    )
    if len(trials) == 1:
        return row
    peer = trials[1]
    if peer.wrong:
        raise CellFailed(
            f"{peer.library.name} computed {peer.wrong} wrong values in {case.op} of {case.nbytes} bytes"
        )
    ratio = peer.time_us / first.time_us if first.time_us else None
    return replace(
        row,
        peer=peer.library.name,
        peer_time_us=peer.time_us,
        peer_host_us=peer.host_us,
        ratio=ratio,
    )
