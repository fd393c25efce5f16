"""Measurement of one case, by the same code in every rank of miraccl and of its peers.

    time = median over batches of (maximum over ranks of (time of a batch / calls in it))

A batch starts with a barrier. nccl-tests has one batch and averages over ranks by default; the
maximum is the time an application waits for, and the median removes other activity of the machine.
Each result is checked element by element before and after the timed calls, with different inputs
and a poisoned output.

Imports numpy only; processes of a peer load this file by its path.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from miraccl import clock
from miraccl.tools.perf import data
from miraccl.tools.perf.engine import BoundOperation, Engine
from miraccl.tools.perf.spec import REDUCING, Case, PerfRow, build_row

_BATCH_SECONDS = 0.02
_MAX_CALLS = 5000
_BARRIERS = 20
_AS_QUICK = 2.0
_SMALL_BYTES = 4 << 20  # up to this size the cost of a longer warm-up is negligible


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Options of a measurement.

    - ``iters``, ``warmup``: numbers of calls; None chooses (batches of about 20 ms).
    - ``fresh``: rewrite the input before each call.
    - ``bind``: bind each rank to a core, if there are enough.
    """

    iters: int | None = None
    warmup: int | None = None
    batches: int = 5
    check: bool = True
    fresh: bool = False
    bind: bool = False


def measure(
    engine: Engine,
    case: Case,
    in_place: bool,
    options: MeasureOptions,
    wait_for_turn: Callable[[], None],
) -> PerfRow | None:
    """Measure one form of one case; return the same row on every rank.

    Return None if the library does not have the form. ``wait_for_turn`` is called before each
    stretch of work and may block, so that compared libraries alternate.
    """
    wait_for_turn()
    bound = engine.bind(case, in_place)
    if bound is None:
        for _ in range(options.batches + 1):  # as many turns as the other library
            wait_for_turn()
        return None
    wrong = _check(engine, case, bound, in_place, seed=1) if options.check else 0
    iters = _warm_up(engine, case, bound, options)
    times = []
    for _ in range(options.batches):
        wait_for_turn()
        times.append(_time_batch(engine, case, bound, iters, options.fresh))
    chosen = bound.plan_names()  # before the next turn, which may use the communicator
    wait_for_turn()
    wrong += _check(engine, case, bound, in_place, seed=2) if options.check else 0
    times = engine.reduce_list(times, how="max")
    (total_wrong,) = engine.reduce_list([float(wrong)], how="sum")
    return _row(case, in_place, options, times, iters, int(total_wrong), chosen)


def bind_to_core(engine: Engine) -> None:
    """Bind the calling thread to one core.

    Called after start-up, so that threads of the library stay unbound.
    """
    cores = sorted(os.sched_getaffinity(0))
    fits = engine.nranks <= len(cores)
    # All or none: a launcher may have bound some ranks already.
    if engine.reduce_list([0.0 if fits else 1.0], how="max")[0] == 0.0:
        os.sched_setaffinity(0, {cores[engine.rank]})


class BarrierWarmup:
    """Barriers until they are as fast as before, after ranks were asleep.

    The scheduler needs up to 100 ms to spread polling ranks over cores; until then a barrier takes
    a time slice instead of a microsecond. Ranks decide together, from the times of the slowest one.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._best = float("inf")

    def run(self, least: float = 0.005, most: float = 0.25) -> None:
        """Run barriers for ``least`` to ``most`` seconds."""
        start = clock.perf_counter()
        while True:
            before = clock.perf_counter()
            for _ in range(_BARRIERS):
                self._engine.barrier()
            now = clock.perf_counter()
            slowest, elapsed = self._engine.reduce_list([now - before, now - start], how="max")
            self._best = min(self._best, slowest)
            if elapsed >= most or (elapsed >= least and slowest <= _AS_QUICK * self._best):
                return


def _check(engine: Engine, case: Case, bound: BoundOperation, in_place: bool, seed: int) -> int:
    data.poison(bound.output)
    data.fill_input(case, bound.input, engine.rank, seed)
    engine.barrier()  # no rank may write into memory that a peer still poisons
    bound.call()
    wrong = data.count_wrong(case, bound.output, data.expected_output(case, engine.rank, seed))
    if in_place and case.op in REDUCING:
        data.fill_neutral(case, bound.input)
    return wrong


def _warm_up(engine: Engine, case: Case, bound: BoundOperation, options: MeasureOptions) -> int:
    """Run untimed calls; return the number of calls per batch."""
    calls = (
        options.warmup if options.warmup is not None else 3 if case.nbytes <= _SMALL_BYTES else 1
    )
    for _ in range(calls):
        bound.call()
    if options.fresh and options.iters is None:
        return 1
    if options.iters is not None:
        return options.iters
    estimate = _estimate(engine, bound, 2)
    for _ in range(2 if case.nbytes <= _SMALL_BYTES else 0):
        estimate = min(
            estimate, _estimate(engine, bound, max(1, min(200, int(_BATCH_SECONDS / estimate))))
        )
    return max(1, min(_MAX_CALLS, int(_BATCH_SECONDS / estimate)))


def _estimate(engine: Engine, bound: BoundOperation, calls: int) -> float:
    """Return the seconds per call, equal on every rank."""
    engine.barrier()
    start = clock.perf_counter()
    for _ in range(calls):
        bound.call()
    return max(1e-9, engine.reduce_list([(clock.perf_counter() - start) / calls], how="max")[0])


def _time_batch(
    engine: Engine, case: Case, bound: BoundOperation, iters: int, fresh: bool
) -> float:
    """Return the seconds per call on this rank."""
    call = bound.call
    if fresh:
        return sum(_time_fresh(engine, case, bound) for _ in range(iters)) / iters
    engine.barrier()
    start = clock.perf_counter()
    for _ in range(iters):
        call()
    return (clock.perf_counter() - start) / iters


def _time_fresh(engine: Engine, case: Case, bound: BoundOperation) -> float:
    """Time one call on an input that this rank has just written."""
    data.fill_neutral(case, bound.input)
    engine.barrier()
    start = clock.perf_counter()
    bound.call()
    return clock.perf_counter() - start


def _row(
    case: Case,
    in_place: bool,
    options: MeasureOptions,
    times: list[float],
    iters: int,
    wrong: int,
    chosen: tuple[str, str, int],
) -> PerfRow:
    algo, proto, channels = chosen
    return build_row(
        case,
        [seconds * 1e6 for seconds in times],
        in_place=in_place,
        wrong=wrong if options.check and case.nbytes else None,
        iters=iters,
        algo=algo,
        proto=proto,
        channels=channels,
    )
