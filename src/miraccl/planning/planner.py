"""Choice of algorithm, protocol and round size of an operation, and the runs made from it.

All ranks must choose alike, so a choice depends only on what all of them know: the collective,
block sizes, data type, operator, and what was exchanged when the communicator was created
(constants of rank 0, slot size, overrides). It never depends on a rank's own buffers.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from miraccl.errors import InvalidUsage, MiracclError
from miraccl.executor.cpu.context import fold_kernel, scale_kernel, set_counts
from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.limits import SYNCS, check_limits, check_width
from miraccl.executor.cpu.lower import BlockCounts, Program, Run, lower, signature
from miraccl.executor.cpu.sizes import size_class
from miraccl.ops.request import PlanRequest
from miraccl.planning.cost_model import CommunicatorShape, CpuConstants, predict_us
from miraccl.schedule import catalog
from miraccl.schedule.catalog import Algorithm
from miraccl.schedule.ir import Buffer, Schedule, input_blocks, output_blocks
from miraccl.schedule.layout import in_place_forms
from miraccl.types import Collective, DType, RedOp

WINDOW_ONLY = 1 << 62  # a direct threshold that private memory never reaches
#: Block size in bytes from which window memory is posted by address instead of copied into a slot.
WINDOW_FROM = 32 << 10
#: Collectives that only move data and keep all ranks busy, with the forms (in place or not) that
#: ranks may combine. If peers read private memory, a block is one message of at most
#: ``WHOLE_BLOCK_BYTES``: a system call per slot would cost as much as the single copy gains.
EXCHANGES = {Collective.ALL_GATHER: (False, True), Collective.ALL_TO_ALL: (False,)}
WHOLE_BLOCK_BYTES = 8 << 20
#: Block size in bytes from which ranks first exchange whether all of them passed window memory.
NEGOTIATE_FROM = 96 << 10
#: Non-temporal stores start at this multiple of the cache share: caches serve part of the reads.
STREAM_FACTOR = 1.75
#: Predictions within 5 % count as equal; the order of names below decides, by block size.
TIE_FACTOR = 1.05
LARGE_BLOCK = 128 << 10
PREFERENCE = ("one_shot", "two_shot", "ring", "chain", "pairwise", "recursive_doubling")
# all_reduce: half of the ring's result bypasses the caches; between hosts the first two may run
PREFERENCE_LARGE = ("staggered_ring", "staggered_distance_doubling", "ring", *PREFERENCE)
WINDOW_ALGORITHM = "two_shot_put"
#: Buffers that all ranks divide alike into uneven blocks, so that each knows its peers' offsets.
KNOWN_LAYOUT = {Collective.ALL_GATHER: Buffer.OUTPUT, Collective.REDUCE_SCATTER: Buffer.INPUT}


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Choices that the user has fixed; empty strings leave them to the model.

    ``hints`` (``NCCL_ALGO``) apply unless a rule excludes the algorithm.
    """

    algo: str = ""
    proto: str = ""
    deterministic: bool = False
    hints: Mapping[Collective, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One algorithm for an operation.

    Attributes:
        channels: Number of channels.
        predicted_us: Predicted time in microseconds; infinite if the algorithm cannot run.
        chosen: True for the algorithm that the planner uses.
        reason: Explanation of why it was or was not chosen.
        transports: Transports of this rank's connections and their reasons, such as ``shm to 1-3
            (same host); tcp to 4-7 (addresses of a common family)``.
    """

    algo: str
    proto: str
    channels: int
    predicted_us: float
    chosen: bool
    reason: str
    transports: str = ""


def check_protocol(proto: str) -> None:
    """Raise ``InvalidUsage`` for a protocol that CPU ranks do not support; empty is allowed."""
    if proto and proto.lower() not in ("simple", "ll"):
        raise InvalidUsage(
            f"protocol {proto!r} is not supported on CPU ranks; allowed are simple and ll"
        )


class Planner:
    """Chooses and caches the plans of one communicator on one rank.

    Args:
        single_copy, exchange_copy: Thresholds in bytes, see ``CpuConstants``.
        addressable: True if every rank can read and write the private memory of every other.
        stream_from: Bytes of last-level cache per rank; larger operations write past the caches.
    """

    def __init__(
        self,
        *,
        rank: int,
        shape: CommunicatorShape,
        slot_bytes: int,
        constants: CpuConstants,
        overrides: Overrides,
        single_copy: int = -1,
        exchange_copy: int = -1,
        addressable: bool = True,
        stream_from: int = 1 << 62,
    ) -> None:
        self.rank, self.shape, self.slot_bytes = rank, shape, slot_bytes
        self.constants, self.overrides = constants, overrides
        self.single_copy, self.exchange_copy = single_copy, exchange_copy
        self.addressable = addressable
        self.stream_from = stream_from
        self._programs: dict[tuple[str, Collective, int, bool], Program] = {}
        self._row_programs: dict[Schedule, Program] = {}
        self._choices: dict[tuple[object, ...], tuple[str, list[Algorithm]]] = {}
        #: By address of a run; a ``Candidate`` once it has been queried.
        self._plans: dict[int, Candidate | tuple[str, PlanRequest]] = {}
        if overrides.algo:
            catalog.get(overrides.algo)  # raises for an unknown name

    def candidates(
        self,
        collective: Collective,
        block_bytes: int,
        dtype: DType,
        root: int = 0,
        uneven: bool = False,
    ) -> list[Candidate]:
        """Return all algorithms for an operation, the chosen one first, then by predicted time."""
        requested = self._requested(collective, root, uneven)
        chosen = self._choose(collective, block_bytes, dtype, root, uneven)
        rows = self._rows(
            catalog.algorithms_for(collective, self.shape.nranks, root),
            collective,
            block_bytes,
            dtype,
            root,
            uneven,
        )
        allowed = [row.time for row in rows if not row.excluded]
        fastest, best = min(allowed), next(row.time for row in rows if row.name == chosen)
        result = []
        for row in sorted(rows, key=lambda row: (row.name != chosen, bool(row.excluded), row.time)):
            if row.name == chosen:
                reason = (
                    "requested"
                    if row.name == requested
                    else _choice_reason(row.time, fastest, len(allowed), block_bytes)
                )
            else:
                reason = (
                    row.excluded or f"{row.time / best:.2f} times the predicted time of {chosen}"
                )
                if not row.excluded and row.time <= TIE_FACTOR * fastest:
                    reason += f", which is preferred among equals (within {TIE_FACTOR - 1:.0%})"
            proto = self._protocol(block_bytes)
            result.append(
                Candidate(
                    algo=row.name,
                    proto=proto,
                    channels=1,
                    predicted_us=row.time,
                    chosen=row.name == chosen,
                    reason=reason,
                )
            )
        return result

    def _rows(
        self,
        algorithms: Sequence[Algorithm],
        collective: Collective,
        block_bytes: int,
        dtype: DType,
        root: int,
        uneven: bool,
    ) -> list[_Row]:
        requested = self._requested(collective, root, uneven)
        return [
            self._row(algorithm, collective, block_bytes, dtype, root, uneven, requested)
            for algorithm in algorithms
        ]

    def _row(
        self,
        algorithm: Algorithm,
        collective: Collective,
        block_bytes: int,
        dtype: DType,
        root: int,
        uneven: bool,
        requested: str,
    ) -> _Row:
        if algorithm.name != requested and (
            defect := find_defect(algorithm, collective, self.shape.nranks, root, self.slot_bytes)
        ):
            return _Row(math.inf, algorithm.name, f"excluded: {defect}")
        time = self._predict(algorithm, collective, block_bytes, dtype, root)
        return _Row(
            time,
            algorithm.name,
            self._exclusion(algorithm, collective, dtype, root, uneven, requested),
        )

    def _choose(
        self, collective: Collective, block_bytes: int, dtype: DType, root: int, uneven: bool
    ) -> str:
        """Return the name of the algorithm.

        The best one for the smallest size of a size class is used for the whole class, so that a
        new size costs no predictions.
        """
        algorithms = catalog.algorithms_for(collective, self.shape.nranks, root)
        least = size_class(block_bytes)
        key = (collective, least, dtype, root, uneven, *map(id, algorithms))
        if key not in self._choices:
            rows = self._rows(algorithms, collective, least, dtype, root, uneven)
            allowed = [row for row in rows if not row.excluded]
            if not allowed:
                raise InvalidUsage(
                    f"cannot choose an algorithm for {collective.label} over "
                    f"{self.shape.nranks} ranks: "
                    f"{_exclusions(rows)}"
                )
            fastest = min(row.time for row in allowed)
            equals = [row for row in allowed if row.time <= TIE_FACTOR * fastest]
            best = min(equals, key=lambda row: (_preference(row.name, collective, least), row.time))
            # The key has their ids, so the algorithms must stay alive.
            self._choices[key] = best.name, algorithms
        return self._choices[key][0]

    def _protocol(self, block_bytes: int) -> str:
        """Return ``ll`` for blocks that fit on one cache line with their flag, else ``simple``."""
        return (
            "ll"
            if block_bytes <= layout.INLINE_BYTES and self.overrides.proto != "simple"
            else "simple"
        )

    def _requested(self, collective: Collective, root: int, uneven: bool) -> str:
        """Return the algorithm that the user has requested, or an empty string if it does not
        apply.

        A hint that a rule excludes does not apply.
        """
        requested = self.overrides.algo or self.overrides.hints.get(collective, "")
        if not requested:
            return ""
        algorithm = catalog.get(requested)
        if not algorithm.supports(collective, self.shape.nranks, root) or (
            uneven and collective not in algorithm.uneven
        ):
            return ""
        if not self.overrides.algo:
            unordered = (
                self.overrides.deterministic and collective.reduces and not algorithm.rank_ordered
            )
            if unordered or (algorithm.needs_addressable_memory and not self.addressable):
                return ""
        return requested

    def _is_window_candidate(
        self, algorithm: Algorithm, collective: Collective, requested: str
    ) -> bool:
        free = not (requested or self.overrides.algo)
        return (
            algorithm.name == WINDOW_ALGORITHM
            and free
            and algorithm.supports(collective, self.shape.nranks)
        )

    def _exclusion(
        self,
        algorithm: Algorithm,
        collective: Collective,
        dtype: DType,
        root: int,
        uneven: bool,
        requested: str,
    ) -> str:
        """Return the reason why ``algorithm`` may not be used, or an empty string.

        Args:
            requested: The result of ``_requested``.
        """
        if uneven and collective not in algorithm.uneven:
            return "does not support uneven blocks"
        if uneven:
            schedule = self._schedule(algorithm.name, collective, root, in_place=False)
            if schedule.scratch_chunks:
                return "needs scratch memory, whose size is unknown for uneven blocks"
            if schedule.addressed - {KNOWN_LAYOUT.get(collective)}:
                return "addresses blocks of peers, whose offsets are unknown if they are uneven"
            if schedule.ops & SYNCS and collective not in KNOWN_LAYOUT:
                return "has signals, but rounds differ between ranks if blocks are uneven"
        if algorithm.needs_addressable_memory and collective is not Collective.BARRIER:
            if not self.addressable:
                return "needs memory that peers can address, which some ranks do not have"
            if algorithm.name != requested:
                return (
                    "used when all ranks pass window memory (comm.empty)"
                    if self._is_window_candidate(algorithm, collective, requested)
                    else ("needs memory that peers can address; request it by name")
                )
        if algorithm.network and not self.shape.hosts and algorithm.name != requested:
            return "made for ranks on several hosts"
        if self.overrides.deterministic and collective.reduces and not algorithm.rank_ordered:
            return "does not reduce in rank order (deterministic)"
        if requested and algorithm.name != requested:
            return f"{requested} was requested"
        if (
            collective.reduces
            and dtype.accumulates_in_float32
            and not algorithm.rounds_once
            and algorithm.name != requested
        ):
            return f"rounds {dtype.label} at every hop"
        return ""

    def _predict(
        self,
        algorithm: Algorithm,
        collective: Collective,
        block_bytes: int,
        dtype: DType,
        root: int,
    ) -> float:
        schedule = self._schedule(algorithm.name, collective, root, in_place=False)
        steps, round_bytes = algorithm.latency_steps(schedule), self.round_bytes(schedule.widest)
        return predict_us(
            schedule, steps, block_bytes, dtype, round_bytes, self.shape, self.constants
        )

    def predict(self, algo: str, collective: Collective, block_bytes: int, dtype: DType) -> float:
        """Return the predicted time of an algorithm in microseconds."""
        return self._predict(catalog.get(algo), collective, block_bytes, dtype, 0)

    def window_candidate(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the candidate used when all ranks pass window memory, None if there is none."""
        if self.shape.hosts or self.overrides.algo:
            return None
        return next((way for way in candidates if way.algo == WINDOW_ALGORITHM), None)

    def round_bytes(self, widest: int) -> int:
        return max(64, self.slot_bytes // widest // 64 * 64)

    def _schedule(self, algo: str, collective: Collective, root: int, in_place: bool) -> Schedule:
        """Build the schedule, with neighbours in the machine as neighbours in rings."""
        return catalog.build(
            algo, collective, self.shape.nranks, root, in_place=in_place, order=self.shape.order
        )

    # ---- runs

    def program(
        self, algo: str, collective: Collective, root: int, in_place: bool, opened: bool = False
    ) -> Program:
        schedule = self._schedule(algo, collective, root, in_place)  # verified in this form
        key = (algo, collective, root, opened)
        if key not in self._programs:
            self._programs[key] = lower(schedule, self.rank, signalled=opened)
        return self._programs[key]

    def make_run(self, request: PlanRequest) -> Run:
        """Return the run for a request, without buffer addresses."""
        algo = self._choose(
            request.collective, request.block_bytes, request.dtype, request.root, request.uneven
        )
        run = self._run(algo, request)
        if self._negotiates_window(algo, request):
            other = self._run(WINDOW_ALGORITHM, request, opened=True)
            run.set_window_path(other, [r for r in range(self.shape.nranks) if r != self.rank])
        return run

    def make_row_run(self, schedule: Schedule, dtype: DType, op: RedOp) -> Run:
        """Return the run of a schedule with tables; ``Run.set_rows`` gives it its rows.

        Each row is folded over all ranks at once, so an average divides there.
        """
        if schedule not in self._row_programs:
            self._row_programs[schedule] = lower(schedule, self.rank)
        return Run(
            self._row_programs[schedule],
            dtype=dtype,
            block_bytes=layout.LINE,
            slot_bytes=self.slot_bytes,
            round_bytes=layout.LINE,
            direct=-1,
            template=signature(schedule.collective, dtype, op, schedule.root, 0),
            fold=fold_kernel(dtype, RedOp.SUM if op is RedOp.PREMUL_SUM else op),
        )

    def make_schedule_run(self, schedule: Schedule, dtype: DType, op: RedOp, count: int) -> Run:
        """Return the run of a schedule that folds each element over all ranks at once.

        This rank may be an aggregator of the schedule.

        Args:
            count: Elements of a block.
        """
        if schedule not in self._row_programs:
            self._row_programs[schedule] = lower(schedule, self.rank)
        run = Run(
            self._row_programs[schedule],
            dtype=dtype,
            block_bytes=count * dtype.itemsize,
            slot_bytes=self.slot_bytes,
            round_bytes=self.round_bytes(schedule.widest),
            direct=-1,
            template=signature(schedule.collective, dtype, op, schedule.root, 0),
            fold=fold_kernel(dtype, op) if schedule.collective.reduces else 0,
        )
        blocks = (
            (count,) * input_blocks(schedule.collective, schedule.nranks),
            (count,) * output_blocks(schedule.collective, schedule.nranks),
        )
        set_counts(run, BlockCounts(*blocks, agreed=count, reported=count))
        return run

    def record_plan(self, run: Run, plan: Candidate) -> None:
        """Let ``choice_of`` return ``plan`` for ``run``."""
        if run.address not in self._plans:
            weakref.finalize(run, self._plans.pop, run.address, None)
        self._plans[run.address] = plan

    def _negotiates_window(self, algo: str, request: PlanRequest) -> bool:
        """Return True if ranks exchange buffer addresses before they choose the plan for window
        memory.
        """
        algorithm = catalog.get(WINDOW_ALGORITHM)
        return (
            not self.overrides.algo
            and not self._requested(request.collective, request.root, request.uneven)
            and not self.shape.hosts
            and self.shape.nranks > 1
            and algorithm.supports(request.collective, self.shape.nranks)
            and request.block_bytes >= NEGOTIATE_FROM
            and (not request.uneven or request.collective in algorithm.uneven)
            and algo != WINDOW_ALGORITHM
        )

    def _run(self, algo: str, request: PlanRequest, opened: bool = False) -> Run:
        algorithm = catalog.get(algo)
        program = self.program(algo, request.collective, request.root, request.in_place, opened)
        reduces = request.collective.reduces
        post, folded = 0, RedOp.SUM if request.op is RedOp.PREMUL_SUM else request.op
        if request.op is RedOp.AVG and not (algorithm.rank_ordered and algorithm.builtin):
            folded = RedOp.SUM
            gets_result = request.collective is not Collective.REDUCE or self.rank == request.root
            post = scale_kernel(request.dtype, True) if gets_result and self.shape.nranks > 1 else 0
        run = Run(
            program,
            dtype=request.dtype,
            block_bytes=request.block_bytes,
            slot_bytes=self.slot_bytes,
            round_bytes=WHOLE_BLOCK_BYTES
            if self._reads_whole_blocks(algo, request)
            else self.round_bytes(program.schedule.widest),
            direct=self._direct_threshold(algo, request),
            template=signature(
                request.collective,
                request.dtype,
                request.op if reduces else RedOp.SUM,
                request.root,
                0,
            ),
            fold=fold_kernel(request.dtype, folded) if reduces else 0,
            epilogue=post,
            epilogue_arg=self.shape.nranks if post else 0,
            ll=self.overrides.proto != "simple",
            stream_from=int(STREAM_FACTOR * self.stream_from),
        )
        if not request.uneven:
            set_counts(
                run,
                BlockCounts(
                    request.in_counts,
                    request.out_counts,
                    agreed=request.count,
                    reported=sum(request.in_counts),
                ),
            )
        self._plans[run.address] = algo, request
        weakref.finalize(run, self._plans.pop, run.address, None)
        return run

    def _direct_threshold(self, algo: str, request: PlanRequest) -> int:
        """Return the bytes from which a piece is posted by address.

        -1: never; ``WINDOW_ONLY``: window memory only; else private memory as well.
        """
        if not catalog.supports_direct(
            algo, request.collective, self.shape.nranks, request.root, in_place=request.in_place
        ):
            return -1
        if request.block_bytes < WINDOW_FROM:
            return -1
        if self._reads_whole_blocks(algo, request) or 0 <= self.single_copy <= request.block_bytes:
            return layout.MIN_DIRECT_BYTES
        return WINDOW_ONLY

    def _reads_whole_blocks(self, algo: str, request: PlanRequest) -> bool:
        """Return True if ranks read whole blocks from private memory of their peers.

        All ranks must agree, in place or not, since they have to cut rounds alike.
        """
        in_place_forms = EXCHANGES.get(request.collective, ())
        return (
            bool(in_place_forms)
            and not request.uneven
            and 0 <= self.exchange_copy <= request.block_bytes
            and all(
                catalog.supports_direct(
                    algo, request.collective, self.shape.nranks, request.root, in_place=form
                )
                for form in in_place_forms
            )
        )

    def choice_of(self, run_address: int) -> Candidate | None:
        """Return the plan of a run, or None if it is unknown."""
        plan = self._plans.get(run_address)
        if isinstance(plan, tuple):
            plan = self._plans[run_address] = self._candidate(*plan)
        return plan

    def _candidate(self, algo: str, request: PlanRequest) -> Candidate:
        candidates = self.candidates(
            request.collective, request.block_bytes, request.dtype, request.root, request.uneven
        )
        if algo == WINDOW_ALGORITHM and candidates[0].algo != algo:
            return replace(candidates[0], algo=algo, reason="all ranks passed window memory")
        found = next((way for way in candidates if way.algo == algo), None)
        return found or replace(
            candidates[0], algo=algo, reason="chosen before it was unregistered"
        )


@lru_cache(maxsize=256)
def find_defect(
    algorithm: Algorithm, collective: Collective, nranks: int, root: int, slot_bytes: int
) -> str:
    """Return the reason why an algorithm is never chosen by itself, or an empty string.

    Its code fails, its schedule is wrong in one of the collective's forms, or CPU ranks cannot run
    it. The result is the same on all ranks: it does not depend on buffers.
    """
    if algorithm.builtin:
        return ""
    try:
        for in_place in in_place_forms(collective):
            schedule = catalog.build(algorithm.name, collective, nranks, root, in_place=in_place)
        check_limits(schedule)
        check_width(schedule, slot_bytes)
        algorithm.latency_steps(schedule)
    except MiracclError as error:
        return str(error)
    return ""


class _Row(NamedTuple):
    """Predicted time of an algorithm, and the reason why it is excluded, if any."""

    time: float
    name: str
    excluded: str


def _choice_reason(time: float, fastest: float, allowed: int, block_bytes: int) -> str:
    if allowed == 1:
        return "the only one allowed"
    if time > TIE_FACTOR * fastest:
        return f"best for blocks of {size_class(block_bytes)} bytes, the smallest of its size class"
    return (
        "lowest predicted time"
        if time == fastest
        else f"preferred among equals (within {TIE_FACTOR - 1:.0%} of the lowest predicted time)"
    )


def _preference(name: str, collective: Collective, block_bytes: int) -> int:
    order = (
        PREFERENCE_LARGE
        if collective is Collective.ALL_REDUCE and block_bytes >= LARGE_BLOCK
        else PREFERENCE
    )
    return order.index(name) if name in order else len(order)


def _exclusions(rows: Sequence[_Row]) -> str:
    return "; ".join(f"{row.name} {row.excluded}" for row in rows) or "none is registered"
