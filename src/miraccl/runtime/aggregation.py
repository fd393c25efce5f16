"""Collectives over aggregators: processes that only add, for the ranks of one communicator.

The ranks and the aggregators form a communicator of their own, whose last members are the
aggregators. Before each operation rank 0 sends every aggregator a command, five words, ahead of
the data; an aggregator waits for commands and runs its part of the same schedule
(``schedule.aggregation``).

Whether the aggregators pay depends on links that no table knows, so the ranks measure two sizes
with each form and without before the first operation, and choose by lines through them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from miraccl import clock, trace
from miraccl.errors import InvalidUsage, MiracclError, PeerDied
from miraccl.executor.cpu.lower import Run
from miraccl.ops import spec
from miraccl.ops.check import CheckedTransfer
from miraccl.ops.prepare import PreparedOp, prepare
from miraccl.ops.request import PlanRequest
from miraccl.ops.spec import ALL_REDUCE, OpSpec
from miraccl.planning.planner import Candidate
from miraccl.schedule.aggregation import count_slices, forms
from miraccl.schedule.ir import Schedule
from miraccl.types import Collective, DType, RedOp

if TYPE_CHECKING:
    from miraccl.runtime.core import CommunicatorCore
    from miraccl.runtime.engine_faults import CpuFaults

_log = trace.logger("aggregation")
NAME = "all_reduce"
#: Operations that aggregators run.
AGGREGATED = (spec.ALL_REDUCE, spec.REDUCE_SCATTER, spec.ALL_GATHER)
#: Words of a command: elements of a block, dtype, operator, collective, number of the form.
COMMAND_WORDS = 5
#: Bytes of the smaller probe, and the first and last of the larger one, which is the first that
#: takes ``PROBE_US``: a shaped link sends its first 256 KiB at once, so short probes say little.
PROBE_BYTES, PROBE_US = (64 << 10, 2 << 20, 32 << 20), 50_000.0
#: Turns, of which the fastest counts.
REPEATS = 2
#: The aggregators are used if they are predicted to be faster by this factor.
ADVANTAGE = 1.05
#: Modes that name a schedule.
FORMS = ("star", "two_level", "rail_trees")
MAX_RUNS = 64
#: NCCL's algorithm in which every local rank sends a share to the network, and its counterpart
COLLNET_DIRECT, COLLNET_DIRECT_FORM = "CollNetDirect", "rail_trees"
NO_REQUEST: Mapping[Collective, str] = {}


@dataclass(frozen=True, kw_only=True)
class Line:
    """Time of a collective by the bytes of a block: ``latency_us + nbytes / rate``.

    Attributes:
        rate: Bytes per microsecond.
    """

    latency_us: float
    rate: float

    def predict_us(self, nbytes: int) -> float:
        return self.latency_us + nbytes / self.rate


def fit(probes: Sequence[float]) -> Line:
    """Return the line through two measurements: bytes and us of the smaller, then the larger."""
    low, small, high, large = map(float, probes)
    rate = (high - low) / max(large - small, 1e-3)
    return Line(latency_us=max(0.0, small - low / rate), rate=rate)


class AggregatorRuns:
    """Runs over the members of a communicator whose last ones are aggregators.

    Args:
        hosts: Hosts of the ranks if each has the ranks of one range of equal length, else 1.
    """

    def __init__(self, core: CommunicatorCore, aggregators: int) -> None:
        self.core, self.aggregators = core, aggregators
        self.nranks = core.nranks - aggregators
        self.hosts = count_hosts(core.session.hosts[: self.nranks])
        self._runs: dict[tuple[Collective, int, int, DType, RedOp], Run] = {}

    def forms(self, collective: Collective, block_bytes: int = 0) -> tuple[Schedule, ...]:
        """Return the schedules of a collective, the same on all members."""
        slices = count_slices(block_bytes, self.aggregators)
        return forms(collective, self.nranks, self.aggregators, self.hosts, slices)

    def run_for(
        self, collective: Collective, form: int, count: int, dtype: DType, op: RedOp
    ) -> Run:
        """Return the run of a form of a collective over blocks of ``count`` elements."""
        key = (collective, form, count, dtype, op)
        if key not in self._runs:
            if len(self._runs) >= MAX_RUNS:
                self._runs.clear()
            schedule = self.forms(collective, count * dtype.itemsize)[form]
            self._runs[key] = self.core.planner.make_schedule_run(schedule, dtype, op, count)
        return self._runs[key]


def count_hosts(hosts: Sequence[str]) -> int:
    """Return the number of hosts if each has the ranks of one range of equal length, else 1."""
    distinct = list(dict.fromkeys(hosts))
    local = len(hosts) // len(distinct)
    regular = [name for name in distinct for _ in range(local)]
    return len(distinct) if list(hosts) == regular else 1


class Aggregation:
    """The aggregators of a communicator, on one of its ranks.

    Args:
        core: The communicator of the ranks.
        wide: The communicator of ranks and aggregators; owned by this object.
        aggregators: Number of aggregators, the last members of ``wide``.
        mode: One of ``params.AGGREGATIONS``.
        requested: Collectives that the mode ``auto`` hands to the aggregators without measuring,
            and NCCL's name of the algorithm that was asked for; the same on all ranks.

    Raises:
        InvalidUsage: The mode names a schedule that does not fit the ranks and aggregators.
    """

    def __init__(
        self,
        core: CommunicatorCore,
        wide: CommunicatorCore,
        aggregators: int,
        mode: str,
        requested: Mapping[Collective, str] = NO_REQUEST,
    ) -> None:
        self._core, self._wide, self._mode, self._requested = core, wide, mode, requested
        self._runs = AggregatorRuns(wide, aggregators)
        names = [form.name for form in self._runs.forms(Collective.ALL_REDUCE)]
        if mode in FORMS and mode not in names:
            raise InvalidUsage(
                f"cannot use MIRACCL_AGGREGATION={mode} with {core.nranks} ranks on"
                f" {self._runs.hosts} hosts and {aggregators} aggregators: possible are"
                f" {', '.join(names)}"
            )
        #: number of the form of all_reduce that the mode names
        self._form = names.index(mode) if mode in FORMS else 0
        if requested.get(Collective.ALL_REDUCE) == COLLNET_DIRECT and COLLNET_DIRECT_FORM in names:
            self._form = names.index(COLLNET_DIRECT_FORM)
        #: by collective, the times without the aggregators and of each form with them
        self._lines: dict[Collective, list[Line]] = {}

    @staticmethod
    def handles(spec: OpSpec) -> bool:
        """Return True for operations that aggregators can run."""
        return spec in AGGREGATED

    def accepts(self, spec: OpSpec, call: PreparedOp) -> bool:
        """Return True if the aggregators run ``call``, an operation of ``spec``."""
        if self._mode == "never" or call.request.count == 0 or self._core.nranks == 1:
            return False
        if not self.handles(spec):
            return False
        if self._mode != "auto" or spec.collective in self._requested:
            return True
        nbytes = call.request.count * call.request.dtype.itemsize
        lines = self.lines(spec)
        through = lines[1 + self._best_form(call.request)]
        return through.predict_us(nbytes) * ADVANTAGE < lines[0].predict_us(nbytes)

    def lines(self, spec: OpSpec = spec.ALL_REDUCE) -> list[Line]:
        """Return the times by bytes of a block: without the aggregators, and of each form.

        The first call measures, collectively.
        """
        if spec.collective not in self._lines:
            self._lines[spec.collective] = self._measure(spec)
            _log.info("%s: without aggregators and by form %s", spec.name, self._lines)
        return self._lines[spec.collective]

    def _measure(self, spec: OpSpec) -> list[Line]:
        """Time a small and a large block with each candidate, in turns, without the first turn."""
        blocks = 1 if spec is ALL_REDUCE else self._core.nranks
        small, large, last = (nbytes // blocks // 8 * 8 for nbytes in PROBE_BYTES)
        # The first run of a size connects and compiles; by its time the probe stayed at 2 MiB, of
        # which a shaped link sends much at once, and predicted 16 MiB in 56 ms that took 265.
        while min(self._time(spec, large, -1) for _ in range(REPEATS)) < PROBE_US:
            if 4 * large > last:
                break
            large *= 4
        forms = range(-1, len(self._runs.forms(spec.collective)))
        turns = [
            [[self._time(spec, nbytes, form) for nbytes in (small, large)] for form in forms]
            for _ in range(REPEATS + 1)
        ]
        best = np.min(turns[1:], axis=0)
        return [fit((small, low, large, high)) for low, high in best]

    def _time(self, spec: OpSpec, nbytes: int, form: int) -> float:
        """Return the microseconds of the slowest rank for a block of ``nbytes``, the same on all.

        Args:
            form: Number of the form; -1 is without aggregators.
        """
        data, more = (np.ones(nbytes // 4 * n, np.float32) for n in (1, self._core.nranks))
        arguments: dict[str, tuple[Any, ...]] = {
            "all_reduce": (data, None, RedOp.SUM),
            "reduce_scatter": (more, data, RedOp.SUM),
            "all_gather": (data, more),
        }
        call = prepare(spec, self._core.reader, arguments[spec.name])
        plan = self._core.planner.make_run(call.request)  # not cached: the choice is still open
        start = clock.monotonic()
        if form >= 0:
            self._run(call, form, spec.name)
        else:
            self._core.run_now(call, plan, spec.name)
        took = np.array([(clock.monotonic() - start) * 1e6])
        worst = prepare(ALL_REDUCE, self._core.reader, (took, None, RedOp.MAX))
        self._core.run_now(worst, self._core.planner.make_run(worst.request), spec.name)
        return float(took[0])

    def _best_form(self, request: PlanRequest) -> int:
        if (
            request.collective is not Collective.ALL_REDUCE
            or request.op is RedOp.AVG
            or request.dtype.accumulates_in_float32
            or self._core.options.deterministic
        ):
            return 0  # trees divide and round at each level, in an order that follows the hosts
        lines = self._lines.get(request.collective)
        if lines is None or self._mode != "auto":
            return self._form
        times = [line.predict_us(request.count * request.dtype.itemsize) for line in lines[1:]]
        return times.index(min(times))

    def run(self, call: PreparedOp, name: str) -> Any:
        """Run an operation through the aggregators."""
        if call.prologue is not None:
            call.prologue()
            call.prologue = None
        form = self._best_form(call.request)
        result = self._run(call, form, name)
        self._core.note_plan(self._run_of(call.request, form), self._plan(call.request, form))
        return result

    def _run(self, call: PreparedOp, form: int, name: str) -> Any:
        wide, run = self._wide, self._run_of(call.request, form)
        try:
            wide.check(0, name)
            if wide.rank == 0:
                self._command(call.request, form, name)
            return wide.run_now(call, run, name)
        except MiracclError as error:
            raise self._core.faults.propagate(self._named(error, name)) from error

    def _run_of(self, request: PlanRequest, form: int) -> Run:
        return self._runs.run_for(
            request.collective, form, request.count, request.dtype, _folded(request.op)
        )

    def _command(self, request: PlanRequest, form: int, name: str) -> None:
        """Send the aggregators the operation that follows."""
        command = [request.count, request.dtype, _folded(request.op), request.collective, form]
        words = np.array(command, np.int64)
        memory = self._wide.reader.view(words, "command", name, None, False)
        transfers = [
            CheckedTransfer(False, peer, memory)
            for peer in range(self._core.nranks, self._wide.nranks)
        ]
        self._wide.exchange(transfers, None, name, False)

    def _named(self, error: MiracclError, name: str) -> MiracclError:
        """Return the error with an aggregator under its name."""
        number = -1 if error.peer is None else error.peer - self._core.nranks
        if number < 0:
            return error
        return PeerDied(
            f"aggregator {number} ended: {error.message}",
            rank=self._core.rank,
            op=name,
            hint="shrink() gives a communicator of the ranks, without aggregators",
        )

    def _plan(self, request: PlanRequest, form: int) -> Candidate:
        nbytes = request.count * request.dtype.itemsize
        lines = self._lines.get(request.collective)
        if lines is None:
            setting = f"MIRACCL_AGGREGATION={self._mode}"
            if self._mode == "auto":
                setting = f"NCCL_ALGO={self._requested[request.collective]}"
            time, reason = 0.0, f"aggregators were requested ({setting})"
        else:
            other, time = (lines[number].predict_us(nbytes) for number in (0, form + 1))
            reason = f"{other / time:.2f} times faster than without aggregators, by measurement"
        return Candidate(
            algo=self._runs.forms(request.collective)[form].name,
            proto="simple",
            channels=1,
            predicted_us=time,
            chosen=True,
            reason=reason,
            transports=f"{self._runs.aggregators} aggregators",
        )

    def abort(self, reason: str) -> None:
        """End the communicator with the aggregators."""
        self._wide.abort(reason)

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
    runs = AggregatorRuns(core, aggregators)
    words = np.zeros(COMMAND_WORDS, np.int64)
    memory = core.reader.view(words, "command", NAME, None, True)
    nothing = np.zeros(1, np.int64)
    address = int(nothing.ctypes.data)
    while not _ranks_left(core.faults, core.nranks - aggregators):
        try:
            core.exchange([CheckedTransfer(True, 0, memory)], None, NAME, False)
        except MiracclError:
            if _ranks_left(core.faults, core.nranks - aggregators):
                return
            raise
        count, dtype, op = int(words[0]), DType(int(words[1])), RedOp(int(words[2]))
        collective, form = Collective(int(words[3])), int(words[4])
        run = runs.run_for(collective, form, count, dtype, op)
        core.check_result(core.context.launch(run.address, address, address, 0), NAME)
        on_sum(count * dtype.itemsize)


def _ranks_left(faults: CpuFaults, nranks: int) -> bool:
    """Return True if a rank has left in an orderly way, which ends the job of an aggregator."""
    return any(rank in faults.left for rank in range(nranks))
