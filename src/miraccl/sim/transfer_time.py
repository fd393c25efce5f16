"""Time of a transfer between agents, by the execution that also times collectives.

The initiator's copies are one link: the streams of a transfer share it. A call and an extent count
as the bytes that move in their time, so a step takes what the method's constants say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from miraccl.errors import ScheduleError
from miraccl.schedule.ir import Op
from miraccl.schedule.transfer_schedule import TransferSchedule
from miraccl.schedule.verify import FIFO_DEPTH
from miraccl.sim.execution import ScheduleExecution, StepTime, Worker
from miraccl.sim.fair_share import FairShareNetwork
from miraccl.sim.links import Links, Route


@dataclass(frozen=True, kw_only=True)
class TransferTimes:
    """Result: time until the target has the last signal, in us, and the times of all steps."""

    time_us: float
    steps: tuple[StepTime, ...]


def simulate_transfer(
    transfer: TransferSchedule,
    *,
    start_us: float,
    call_us: float,
    extent_us: float,
    us_byte: float,
    copy_us: float = 0.0,
) -> TransferTimes:
    """Time a transfer from the constants of its method (``p2p.transfer.Rates``).

    Args:
        start_us: Latency of the last signal.
        call_us, extent_us, us_byte: Time of a call, of an extent, and of a byte.
        copy_us: Time of a byte that a COPY moves within the initiator.

    Raises:
        ScheduleError: The schedule deadlocks.
    """
    fabric = FairShareNetwork([1 / us_byte])
    links = Links(
        nranks=2,
        names=("copies of the initiator",),
        bandwidths=(1 / us_byte,),
        routes={(0, 1): Route((0,), start_us), (1, 0): Route((0,), 0.0)},
    )
    done: list[StepTime] = []

    def nbytes(worker: Worker) -> float:
        step = worker.step
        size = transfer.step_bytes(step)
        if step.op is Op.COPY:  # crosses the link twice
            return size * copy_us / us_byte / 2
        overhead = call_us + extent_us * step.chunks if step.chunks else 0.0
        return size + overhead / us_byte

    def record(worker: Worker) -> None:
        times = (worker.ready, worker.start, fabric.now)
        done.append(StepTime(worker.channel, worker.rank, worker.round, worker.number, *times))

    execution = ScheduleExecution(
        fabric=fabric,
        nranks=2,
        routes=links,
        rounds=1,
        depth=FIFO_DEPTH,
        nbytes=nbytes,
        on_step=record,
        on_end=lambda rank: None,
        memory_link=lambda rank: 0,
    )
    for rank in (0, 1):
        execution.join(rank, [channel[rank] for channel in transfer.schedule.channels])
    while math.isfinite(then := fabric.next_time()):
        fabric.advance(then)
    if execution.unfinished():
        raise ScheduleError(f"{transfer.schedule.name}: deadlock, no rank can continue")
    return TransferTimes(time_us=max((s.end for s in done), default=0.0), steps=tuple(done))
