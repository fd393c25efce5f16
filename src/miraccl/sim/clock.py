"""Simulation of a schedule over virtual links on a virtual clock.

The model:

- A block has ``block_bytes`` and moves in rounds of at most ``slot_bytes`` of every chunk, as in
  the executors. Ranks execute their steps round by round; rounds are ordered by messages only.
- A step starts when the previous step (same rank and channel) has ended, its messages and signals
  have arrived, and the FIFO it sends to has fewer than ``fifo_depth`` unconsumed messages.
- A step that sends, puts or gets moves its bytes over the links of the route for its whole
  duration. Transfers that share a link share its bandwidth, max-min fair (Bertsekas and Gallager,
  "Data Networks", 6.5.2). The message arrives at the end of the step plus the route's latency. With
  ``memory_bandwidth`` a rank's memory is one more link, crossed once for each operand read or
  written; without it copies and additions take no time.
- Nothing else takes time: no launch, no polling, no rounding to packets. The result is a bound on
  the schedule's performance over such links, and exact where bandwidth and latency are the only
  costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.schedule.ir import Schedule
from miraccl.schedule.text import format_location
from miraccl.schedule.verify import FIFO_DEPTH
from miraccl.sim.execution import ScheduleExecution, StepTime, Worker
from miraccl.sim.fair_share import FairShareNetwork
from miraccl.sim.links import Links

BYTES_PER_US = 1e3  # at 1 GB/s
MAX_STEPS = 1_000_000  # of all ranks and rounds


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """Result of a simulation.

    - ``time_us``: time until the last rank has finished.
    - ``carried``: bytes carried by each link.
    - ``steps``: step times in the order in which the steps ended.
    - ``rounds``: number of rounds.
    """

    time_us: float
    carried: tuple[float, ...]
    steps: tuple[StepTime, ...]
    rounds: int

    def link_utilisation(self, links: Links) -> list[tuple[float, str]]:
        """Return (utilisation, name) of each link, the busiest first.

        Utilisation is the fraction of the total time that the link's bytes take at full bandwidth.
        """
        full = [
            (nbytes / (bandwidth * BYTES_PER_US) / self.time_us if self.time_us else 0.0, name)
            for nbytes, bandwidth, name in zip(
                self.carried, links.bandwidths, links.names, strict=True
            )
        ]
        return sorted(full, key=lambda item: -item[0])


def simulate(
    schedule: Schedule,
    links: Links,
    block_bytes: float,
    *,
    slot_bytes: float = math.inf,
    fifo_depth: int = FIFO_DEPTH,
    memory_bandwidth: float = math.inf,
) -> SimulationResult:
    """Simulate ``schedule`` over ``links``; raise ``ScheduleError`` if it deadlocks.

    - ``block_bytes``: size of a block as ``schedule.ir`` defines it (all_reduce: the whole buffer,
      all_gather: the input).
    - ``slot_bytes``: bytes of each chunk that move in one round.
    - ``memory_bandwidth``: GB/s of a rank's reads and writes together.
    """
    if links.nranks != schedule.nranks:
        raise InvalidUsage(
            f"cannot simulate a schedule of {schedule.nranks} ranks over links of {links.nranks}"
        )
    if not 0 <= block_bytes < math.inf:
        raise InvalidUsage(f"block_bytes is {block_bytes}; it must be finite and at least 0")
    if slot_bytes <= 0 or fifo_depth < 1 or memory_bandwidth <= 0:
        raise InvalidUsage("slot_bytes, fifo_depth and memory_bandwidth must be greater than 0")
    chunk = block_bytes / schedule.parts
    rounds = max(1, math.ceil(chunk / slot_bytes))
    steps = rounds * sum(len(steps) for channel in schedule.channels for steps in channel)
    if steps > MAX_STEPS:
        raise InvalidUsage(
            f"cannot simulate {steps} steps in {rounds} rounds: at most {MAX_STEPS} are allowed;"
            " use larger slots"
        )
    sizes = [
        min(slot_bytes, chunk - number * slot_bytes) if math.isfinite(slot_bytes) else chunk
        for number in range(rounds)
    ]
    has_memory, nlinks = math.isfinite(memory_bandwidth), len(links.names)
    memories = [memory_bandwidth] * schedule.nranks if has_memory else []
    fabric = FairShareNetwork([gbs * BYTES_PER_US for gbs in (*links.bandwidths, *memories)])
    done: list[StepTime] = []

    def record(worker: Worker) -> None:
        done.append(
            StepTime(
                worker.channel,
                worker.rank,
                worker.round,
                worker.number,
                worker.ready,
                worker.start,
                fabric.now,
            )
        )

    execution = ScheduleExecution(
        fabric=fabric,
        nranks=schedule.nranks,
        routes=links,
        rounds=rounds,
        depth=fifo_depth,
        nbytes=lambda worker: worker.step.chunks * sizes[worker.round],
        on_step=record,
        on_end=lambda rank: None,
        memory_link=(lambda rank: nlinks + rank) if has_memory else None,
    )
    for rank in range(schedule.nranks):
        execution.join(rank, [channel[rank] for channel in schedule.channels])
    while math.isfinite(then := fabric.next_time()):
        fabric.advance(then)
    if blocked := execution.unfinished():
        worker = blocked[0]
        where = format_location(schedule, worker.channel, worker.rank, worker.number)
        raise ScheduleError(f"{where}: deadlock, no rank can continue")
    return SimulationResult(
        time_us=max((step.end for step in done), default=0.0),
        carried=tuple(fabric.carried[:nlinks]),
        steps=tuple(done),
        rounds=rounds,
    )
