"""Measurement of one case on GPUs, for miraccl and for NCCL, which alternate batch by batch.

    time = median over batches of (maximum over ranks of (GPU time of a batch / operations in it))

A batch is ``iters`` operations back to back in one stream, called one by one or replayed as one
CUDA graph, between two CUDA events. Before each batch the ranks are aligned on the GPU by a small
collective and a pause in which all hosts enqueue the batch. Otherwise the rank that leaves a host
barrier first would measure its wait for the last one, and graph launch time would be included.

``host_us`` is the time the calling thread spends on a call, on the slowest rank, the best of three
rounds; the GPU works concurrently.

Each result is checked before and after the timed calls, with different inputs and a poisoned
output. If a graph is timed and may be repeated, the second check examines the graph's result.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from miraccl import clock
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
_BATCH_US = 50_000.0  # limit of a batch, reached for example by ranks that share a GPU
_HOST_CALLS, _HOST_US = (
    100,
    20_000.0,
)  # calls per round of host time, limit of the GPU time they enqueue
_HOST_ROUNDS = 3
_WARM_UP_CALLS = 2


class CellFailed(MiracclError):
    """A cell has no result; raised on all ranks together, which may continue with the next one."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A case to measure.

    - ``graph``: time it as a CUDA graph.
    - ``forms``: values of ``in_place``.
    """

    case: Case
    graph: bool = False
    forms: tuple[bool, ...] = (False, True)


class GpuTimer(Protocol):
    """Stream and timing operations of a GPU (``gpu_buffers.GpuBuffers``)."""

    def wait(self) -> None: ...
    def pause(self, times: int = 1) -> None: ...
    def time_us(self, run: Callable[[], Any]) -> float: ...
    def drop_graphs(self) -> None: ...


@dataclass(kw_only=True)
class Bench:
    """State of one rank's measurements.

    - ``libraries``: the first is measured, a second one is its peer.
    - ``pauses``: length of the pause in which hosts enqueue (threads of one process take longer).
    - ``wait_for_turn``: called before each stretch of work.
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
        """Wait until all ranks' GPUs are idle and all ranks have arrived."""
        self.gpu.wait()
        self.session.barrier("perf")

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks (plain JSON)."""
        return [
            json.loads(blob)
            for blob in self.session.all_gather(json.dumps(value).encode(), "perf values")
        ]

    def maximum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise maximum over ranks."""
        return [max(column) for column in zip(*self.gather(list(values)), strict=True)]


@dataclass(kw_only=True)
class _Trial:
    """One library measured with one form of a case."""

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
    """Return the rows of a cell, equal on every rank, and the launch of the last form.

    Raise ``InvalidUsage`` on all ranks if any rank rejects the arguments.
    """
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
    """Return a trial of each library that has the form; empty if the first one lacks it."""
    trials: list[_Trial] = []
    for number, library in enumerate(bench.libraries):
        trial = _run_on_all_ranks(bench, partial(_prepare, bench, library, cell, in_place))
        if trial is not None:
            trials.append(trial)
        elif number == 0:
            break
    return [trial for trial in trials if _warm_up(bench, cell, trial)]


def _run_on_all_ranks(bench: Bench, action: Callable[[], _Trial | None]) -> _Trial | None:
    """Run ``action`` on all ranks; if one rejects its arguments, raise on all.

    The communicator stays usable.
    """
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
    trial.launch_info = bound.launch_info()  # before align(), which is an operation too
    return trial


def _check(bench: Bench, case: Case, trial: _Trial, run: Callable[[], Any], seed: int) -> int:
    bound, memory = trial.bound, bench.gpu
    device_check.poison(memory, bound.output)
    device_check.fill_input(memory, case, bound.input, bench.rank, seed)
    bench.barrier()  # no rank may write into memory that a peer still poisons
    run()
    memory.wait()
    trial.library.check()
    wrong = device_check.count_wrong(memory, case, bound.output, bench.rank, seed)
    if not bound.repeatable:
        device_check.fill_neutral(memory, case, bound.input)
        memory.wait()
    return wrong


def _warm_up(bench: Bench, cell: Cell, trial: _Trial) -> bool:
    """Run untimed calls, choose the operations per batch and capture the graph.

    Return False for a peer whose operation cannot be captured.
    """
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
                f"cannot capture {cell.case.op} of {cell.case.nbytes} bytes: {problem}"
            )
        if problem:
            _print_note(
                bench,
                f"{trial.library.name} cannot capture {cell.case.op} of {cell.case.nbytes} bytes:"
                f" {problem}",
            )
            return False
        trial.run()
    bench.gpu.wait()
    trial.library.check()
    return True


def _capture(bench: Bench, trial: _Trial, batch: Callable[[], Any]) -> str:
    """Capture the graph; return the error of any rank, or "". A failed capture leaves the stream
    usable.
    """
    problem = ""
    try:
        trial.run = trial.library.capture(batch)
    except Exception as error:  # the peer may raise any class
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
    """Return the microseconds of one batch on this rank."""
    bench.barrier()
    bench.libraries[0].align()
    bench.gpu.pause(bench.pauses)
    return float(bench.gpu.time_us(run))


def _finish_trial(bench: Bench, cell: Cell, trial: _Trial) -> None:
    """Reduce the times to those of the slowest rank, check again, and measure the host time."""
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
        before = clock.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (clock.perf_counter() - before) / calls * 1e6)
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
            f"{peer.library.name} computed {peer.wrong} wrong values in {case.op} of"
            f" {case.nbytes} bytes"
        )
    ratio = peer.time_us / first.time_us if first.time_us else None
    return replace(
        row,
        peer=peer.library.name,
        peer_time_us=peer.time_us,
        peer_host_us=peer.host_us,
        ratio=ratio,
    )
