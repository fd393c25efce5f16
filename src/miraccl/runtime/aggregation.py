"""All-reduce over aggregators: processes that only add, for the ranks of one communicator.

The ranks and the aggregators form a communicator of their own, whose last members are the
aggregators. Before each sum rank 0 sends every aggregator a command, five words, ahead of the data;
an aggregator waits for commands and runs its part of the same schedule (``schedule.aggregation``).

Whether the aggregators pay depends on links that no table knows, so the ranks measure two sizes
both ways before the first sum, and choose by a line through them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from miraccl import clock, trace
from miraccl.errors import MiracclError, PeerDied
from miraccl.executor.cpu.lower import Run
from miraccl.ops import spec
from miraccl.ops.check import Transfer
from miraccl.ops.prepare import PreparedOp, prepare
from miraccl.planning.planner import Candidate
from miraccl.schedule.aggregation import star
from miraccl.types import DType, RedOp

if TYPE_CHECKING:
    from miraccl.runtime.core import CommunicatorCore
    from miraccl.runtime.engine_faults import CpuFaults

_log = trace.logger("aggregation")
NAME = "all_reduce"
#: Words of a command: elements, dtype, operator; two are spare.
COMMAND_WORDS = 5
#: Sizes in bytes of the measurement, and its repetitions, of which the fastest counts.
PROBES, REPEATS = (64 << 10, 2 << 20), 3
#: The aggregators are used if they are predicted to be faster by this factor.
ADVANTAGE = 1.05
MAX_RUNS = 64


@dataclass(frozen=True, kw_only=True)
class Line:
    """Time of an all_reduce by its bytes: ``latency_us + nbytes / rate``.

    Attributes:
        rate: Bytes per microsecond.
    """

    latency_us: float
    rate: float

    def predict_us(self, nbytes: int) -> float:
        return self.latency_us + nbytes / self.rate


def fit(small: float, large: float) -> Line:
    """Return the line through the times of the two ``PROBES``, in microseconds."""
    low, high = PROBES
    rate = (high - low) / max(large - small, 1e-3)
    return Line(latency_us=max(0.0, small - low / rate), rate=rate)


class StarRuns:
    """Runs of the star over the members of a communicator whose last ones are aggregators."""

    def __init__(self, core: CommunicatorCore, aggregators: int) -> None:
        self.core, self.aggregators = core, aggregators
        self.schedule = star(core.nranks - aggregators, aggregators)
        self._runs: dict[tuple[int, DType, RedOp], Run] = {}

    def run_for(self, count: int, dtype: DType, op: RedOp) -> Run:
        key = (count, dtype, op)
        if key not in self._runs:
            if len(self._runs) >= MAX_RUNS:
                self._runs.clear()
            self._runs[key] = self.core.planner.make_schedule_run(self.schedule, dtype, op, count)
        return self._runs[key]


class Aggregation:
    """The aggregators of a communicator, on one of its ranks.

    Args:
        core: The communicator of the ranks.
        wide: The communicator of ranks and aggregators; owned by this object.
        aggregators: Number of aggregators, the last members of ``wide``.
        mode: ``auto``, ``always`` or ``never``.
    """

    def __init__(
        self, core: CommunicatorCore, wide: CommunicatorCore, aggregators: int, mode: str
    ) -> None:
        self._core, self._wide, self._mode = core, wide, mode
        self._star = StarRuns(wide, aggregators)
        self._lines: tuple[Line, Line] | None = None  # of the aggregators, of the other plans

    def accepts(self, call: PreparedOp) -> bool:
        """Return True if the aggregators run ``call``, which is an all_reduce."""
        if self._mode == "never" or call.request.count == 0 or self._core.nranks == 1:
            return False
        if self._mode == "always":
            return True
        nbytes = call.request.count * call.request.dtype.itemsize
        through, direct = self.lines()
        return through.predict_us(nbytes) * ADVANTAGE < direct.predict_us(nbytes)

    def lines(self) -> tuple[Line, Line]:
        """Return the times through the aggregators and without; measures once, collectively."""
        if self._lines is None:
            times = np.array(
                [[self._time(size, through) for size in PROBES] for through in (True, False)]
            )
            # The slowest rank counts, so all ranks choose alike.
            worst = prepare(spec.ALL_REDUCE, self._core.reader, (times, None, RedOp.MAX))
            self._core.run_now(worst, self._core.planner.make_run(worst.request), NAME)
            self._lines = (fit(*times[0].tolist()), fit(*times[1].tolist()))
            _log.info("all_reduce: through aggregators %s, without %s", *self._lines)
        return self._lines

    def _time(self, nbytes: int, through: bool) -> float:
        """Return the microseconds of the fastest of a few sums."""
        data = np.zeros(nbytes // 4, np.float32)
        call = prepare(spec.ALL_REDUCE, self._core.reader, (data, None, RedOp.SUM))
        plan = self._core.planner.make_run(call.request)
        best = float("inf")
        for _ in range(REPEATS):
            start = clock.monotonic()
            if through:
                self._sum(call)
            else:
                self._core.run_now(call, plan, NAME)
            best = min(best, (clock.monotonic() - start) * 1e6)
        return best

    def run(self, call: PreparedOp) -> Any:
        """Run an all_reduce through the aggregators."""
        if call.prologue is not None:
            call.prologue()
            call.prologue = None
        result = self._sum(call)
        self._core.note_plan(self._run_of(call), self._plan(call))
        return result

    def _sum(self, call: PreparedOp) -> Any:
        wide, run = self._wide, self._run_of(call)
        try:
            wide.check(0, NAME)
            if wide.rank == 0:
                self._command(call.request.count, call.request.dtype, _folded(call.request.op))
            return wide.run_now(call, run, NAME)
        except MiracclError as error:
            raise self._core.faults.propagate(self._named(error)) from error

    def _run_of(self, call: PreparedOp) -> Run:
        request = call.request
        return self._star.run_for(request.count, request.dtype, _folded(request.op))

    def _command(self, count: int, dtype: DType, op: RedOp) -> None:
        words = np.array([count, dtype, op, 0, 0], np.int64)
        memory = self._wide.reader.view(words, "command", NAME, None, False)
        transfers = [
            Transfer(False, peer, memory) for peer in range(self._core.nranks, self._wide.nranks)
        ]
        self._wide.exchange(transfers, None, NAME, False)

    def _named(self, error: MiracclError) -> MiracclError:
        """Return the error with an aggregator under its name."""
        number = -1 if error.peer is None else error.peer - self._core.nranks
        if number < 0:
            return error
        text = f"aggregator {number} ended: {error.message}"
        return PeerDied(
            text,
            rank=self._core.rank,
            op=NAME,
            hint="shrink() gives a communicator of the ranks, without aggregators",
        )

    def _plan(self, call: PreparedOp) -> Candidate:
        nbytes = call.request.count * call.request.dtype.itemsize
        if self._lines is None:
            time, reason = 0.0, "aggregators were requested (MIRACCL_AGGREGATION=always)"
        else:
            time, other = (line.predict_us(nbytes) for line in self._lines)
            reason = f"{other / time:.2f} times faster than without aggregators, by measurement"
        return Candidate(
            algo="star",
            proto="simple",
            channels=1,
            predicted_us=time,
            chosen=True,
            reason=reason,
            transports=f"{self._star.aggregators} aggregators",
        )

    def close(self) -> None:
        """Leave the communicator with the aggregators, which end when all ranks have left."""
        self._wide.finalize()


def _folded(op: RedOp) -> RedOp:
    """Return the operator of the aggregators; ranks have scaled their inputs already."""
    return RedOp.SUM if op is RedOp.PREMUL_SUM else op


def serve(core: CommunicatorCore, aggregators: int, on_sum: Callable[[int], None]) -> None:
    """Add up for the ranks of ``core`` until they leave; this member is an aggregator.

    ``on_sum`` is called with the bytes of each sum. Raises the error of a rank that died.
    """
    runs = StarRuns(core, aggregators)
    words = np.zeros(COMMAND_WORDS, np.int64)
    memory = core.reader.view(words, "command", NAME, None, True)
    nothing = np.zeros(1, np.int64)
    address = int(nothing.ctypes.data)
    while not _ranks_left(core.faults, core.nranks - aggregators):
        try:
            core.exchange([Transfer(True, 0, memory)], None, NAME, False)
        except MiracclError:
            if _ranks_left(core.faults, core.nranks - aggregators):
                return
            raise
        count, dtype, op = int(words[0]), DType(int(words[1])), RedOp(int(words[2]))
        run = runs.run_for(count, dtype, op)
        core.check_result(core.context.launch(run.address, address, address, 0), NAME)
        on_sum(count * dtype.itemsize)


def _ranks_left(faults: CpuFaults, nranks: int) -> bool:
    """Return True if a rank has left in an orderly way, which ends the job of an aggregator."""
    return any(rank in faults.left for rank in range(nranks))
