"""One collective of virtual ranks: agreement of the calls, and execution of the chosen schedule."""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Sequence

import numpy as np

from miraccl.diagnosis.error_codec import departure_error
from miraccl.errors import CollectiveMismatch, PlanMismatch
from miraccl.ops.prepare import PreparedOp
from miraccl.schedule import catalog
from miraccl.schedule.interpret import completing_steps
from miraccl.schedule.ir import Buffer, Schedule
from miraccl.schedule.reduction import NUMPY_DTYPE, Array
from miraccl.schedule.verify import FIFO_DEPTH
from miraccl.sim.execution import ScheduleExecution, Worker
from miraccl.sim.group import VirtualGroup, VirtualWork
from miraccl.sim.memory import CallBuffers, DataState, divide
from miraccl.types import RedOp


class VirtualCollective:
    """The n-th collective of a communicator: agreement of the calls, then its execution."""

    def __init__(self, group: VirtualGroup, number: int, call: PreparedOp, rank: int) -> None:
        self.group, self.number = group, number
        self.first_rank, self.signature = rank, _signature(call)
        self.buffers: dict[int, CallBuffers] = {}
        self._works: dict[int, tuple[VirtualWork, PreparedOp]] = {}
        request = self.request = call.request
        self.plan = group.choose(request)
        algorithm = catalog.get(self.plan.algo)
        self._schedules = {request.in_place: self._build(request.in_place)}
        schedule = self._schedules[request.in_place]
        # An average divides in the additions that complete it if their order is fixed, as the
        # executor's kernels do; else afterwards.
        ordered = algorithm.rank_ordered and algorithm.builtin
        averages = request.op is RedOp.AVG
        self._divides_after = averages and not ordered
        op = RedOp.SUM if request.op in (RedOp.AVG, RedOp.PREMUL_SUM) else request.op
        self.data = DataState(
            schedule, op, completing_steps(schedule) if averages and ordered else frozenset()
        )
        self.piece, rounds = self._rounds(schedule)
        self.execution = ScheduleExecution(
            fabric=group.world.fabric,
            nranks=group.nranks,
            routes=group.routes,
            rounds=rounds,
            depth=FIFO_DEPTH,
            nbytes=lambda worker: self.data.nbytes(worker.step, worker.rank, worker.round),
            on_step=self._step,
            on_end=self._end,
            latency=group.world.draw_latency,
        )

    @property
    def name(self) -> str:
        return f"{self.request.collective.label} #{self.number}"

    @property
    def ended(self) -> bool:
        """True once all ranks have ended it."""
        return len(self.buffers) == self.group.nranks and not self._works

    def _build(self, in_place: bool) -> Schedule:
        request = self.request
        return catalog.build(
            self.plan.algo,
            request.collective,
            self.group.nranks,
            request.root,
            in_place=in_place,
            order=self.group.planner.shape.order,
        )

    def _rounds(self, schedule: Schedule) -> tuple[int, int]:
        """Return (elements of a chunk per round, number of rounds).

        Blocks of uneven operations move in one round: each rank knows the counts of its own blocks
        only.
        """
        request = self.request
        if request.uneven:
            return 1 << 62, 1
        piece = self.group.planner.round_bytes(schedule.widest) // request.dtype.itemsize
        return piece, max(1, math.ceil(math.ceil(request.count / schedule.parts) / piece))

    def join(self, rank: int, call: PreparedOp, work: VirtualWork) -> None:
        """Start the part of ``rank``; ``work`` ends with it."""
        group, request = self.group, call.request
        if (mine := _signature(call)) != self.signature:
            group.fail(self._mismatch(rank, mine))
            return
        if (plan := group.choose(request)) != self.plan:
            text = f"rank {rank} chose {plan.algo}, rank {self.first_rank} {self.plan.algo}"
            group.fail(PlanMismatch(text))
            return
        if call.prologue is not None:
            call.prologue()
        if request.in_place not in self._schedules:
            self._schedules[request.in_place] = self._build(request.in_place)
        schedule, dtype = self._schedules[request.in_place], NUMPY_DTYPE[request.dtype]
        in_counts: Sequence[int] = request.in_counts
        out_counts: Sequence[int] = request.out_counts
        if call.counts is not None:
            words = [int(word) for word in call.counts.words[2:]]
            blocks = schedule.input_chunks // schedule.parts
            in_counts, out_counts = words[:blocks], words[blocks:]
        self._works[rank] = work, call
        self.buffers[rank] = self.data.buffers[rank] = CallBuffers(
            schedule=schedule,
            source=_array_at(call.source, sum(in_counts), dtype),
            target=_array_at(call.target, sum(out_counts), dtype),
            in_counts=in_counts,
            out_counts=out_counts,
            piece=self.piece,
        )
        group.world.record("start", rank, group.name, self.name)
        self.execution.join(rank, [channel[rank] for channel in schedule.channels])
        missing = [other for other in group.left if other not in self.buffers]
        if missing and not self.ended:
            group.fail(departure_error(missing[0], group.left[missing[0]], rank=-1, op=None))

    def stop(self) -> None:
        self.execution.stop()

    def describe(self, rank: int) -> list[str]:
        """Return the current step of ``rank`` on each channel."""
        schedule = next(iter(self._schedules.values()))
        return [
            f"{self.name}: channel {worker.channel}, step {worker.number}"
            f" ({worker.step.op.name.lower()})"
            for worker in self.execution.unfinished()
            if worker.rank == rank and schedule
        ]

    def _mismatch(self, rank: int, mine: dict[str, str]) -> CollectiveMismatch:
        theirs = self.signature
        field_name = next(name for name in theirs if theirs[name] != mine[name])
        return CollectiveMismatch(
            f"ranks disagree on the {field_name} of operation {self.number}: rank"
            f" {self.first_rank} passed {theirs[field_name]}, rank {rank} {mine[field_name]}",
            hint="all ranks must call the same operations in the same order",
        )

    def _step(self, worker: Worker) -> None:
        self.data.run_step(worker.step, worker.channel, worker.rank, worker.round, worker.number)
        self.group.world.record(
            "step",
            worker.rank,
            self.group.name,
            self.name,
            f"{worker.channel}.{worker.round}.{worker.number} {worker.step.op.name.lower()}",
            start=worker.start,
        )

    def _end(self, rank: int) -> None:
        """End the part of ``rank``."""
        group = self.group
        work, call = self._works[rank]
        target = self.buffers[rank].target
        has_output = self.data.schedule.chunks_at(Buffer.OUTPUT, rank) > 0
        if self._divides_after and has_output and group.nranks > 1:
            divide(target, group.nranks)
        checksum = zlib.crc32(target.tobytes()) if has_output else 0
        group.world.record("end", rank, group.name, self.name, f"{checksum:08x}")
        del self._works[rank]
        work.finish(call.result)


def _signature(call: PreparedOp) -> dict[str, str]:
    """Return what all ranks must pass alike, by name."""
    request = call.request
    count = str(request.count)
    if call.counts is not None:
        agreed = int(call.counts.words[0])
        count = f"a list with the hash {agreed:x}" if agreed else "a list of its own"
    return {
        "collective": request.collective.label,
        "dtype": request.dtype.label,
        "operator": request.op.name.lower(),
        "root": str(request.root),
        "count": count,
    }


def _array_at(address: int, count: int, dtype: np.dtype[np.generic]) -> Array:
    """Return the flat array at ``address``; the call owns its memory."""
    nbytes = count * dtype.itemsize
    if not nbytes:
        return np.empty(0, dtype)
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    array: Array = np.ctypeslib.as_array(memory).view(dtype)
    return array
