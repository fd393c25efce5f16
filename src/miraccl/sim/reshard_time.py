"""Time of a re-sharding, by the execution that also times collectives.

Each source rank has a link out, each target rank a link in. The start of a transfer counts as the
bytes that move in its time.
"""

from __future__ import annotations

import math

from miraccl.errors import ScheduleError
from miraccl.schedule.ir import Op
from miraccl.schedule.reshard_schedule import ReshardSchedule
from miraccl.schedule.verify import FIFO_DEPTH
from miraccl.sim.execution import ScheduleExecution, StepTime, Worker
from miraccl.sim.fair_share import FairShareNetwork
from miraccl.sim.links import switch
from miraccl.sim.transfer_time import TransferTimes


def simulate_reshard(
    reshard: ReshardSchedule, *, gb_s: float, transfer_us: float = 0.0
) -> TransferTimes:
    """Time a re-sharding on ranks that send and receive at ``gb_s``.

    Args:
        gb_s: GB/s of a rank in one direction.
        transfer_us: Time that the start of a transfer takes on the links of its two ranks, in us.

    Raises:
        ScheduleError: The schedule deadlocks.
    """
    schedule = reshard.schedule
    links = switch(schedule.nranks, gb_s, 0.0)
    bytes_us = gb_s * 1e3
    fabric = FairShareNetwork([bytes_us] * len(links.bandwidths))
    done: list[StepTime] = []

    def nbytes(worker: Worker) -> float:
        if worker.step.op is not Op.PUT:
            return 0.0
        begins = worker.steps[worker.number - 1].op is Op.WAIT
        return reshard.step_bytes(worker.step) + (transfer_us * bytes_us if begins else 0.0)

    def record(worker: Worker) -> None:
        times = (worker.ready, worker.start, fabric.now)
        done.append(StepTime(worker.channel, worker.rank, worker.round, worker.number, *times))

    execution = ScheduleExecution(
        fabric=fabric,
        nranks=schedule.nranks,
        routes=links,
        rounds=1,
        depth=FIFO_DEPTH,
        nbytes=nbytes,
        on_step=record,
        on_end=lambda rank: None,
    )
    for rank in range(schedule.nranks):
        execution.join(rank, [channel[rank] for channel in schedule.channels])
    while math.isfinite(then := fabric.next_time()):
        fabric.advance(then)
    if execution.unfinished():
        raise ScheduleError(f"{schedule.name}: deadlock, no rank can continue")
    return TransferTimes(time_us=max((s.end for s in done), default=0.0), steps=tuple(done))
