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

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.schedule.ir import Op, Schedule, Step
from miraccl.schedule.text import format_location
from miraccl.schedule.verify import FIFO_DEPTH
from miraccl.sim.links import Links

BYTES_PER_US = 1e3  # at 1 GB/s
MAX_STEPS = 1_000_000  # of all ranks and rounds


@dataclass(frozen=True, slots=True)
class StepTime:
    """Times of one step of one round, in us. The step waited from ``ready`` to ``start``."""

    channel: int
    rank: int
    round: int
    number: int
    ready: float
    start: float
    end: float


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
    return _Simulation(
        schedule, links, chunk, rounds, slot_bytes, fifo_depth, memory_bandwidth
    ).run()


@dataclass(eq=False)
class _Flow:
    """A step in progress that moves bytes. ``load`` counts how often each link is crossed."""

    worker: _ChannelRank
    remaining: float
    load: Counter[int]
    rate: float = 0.0


@dataclass(eq=False)
class _ChannelRank:
    """One rank on one channel. ``barrier_times``: when it reached each barrier it has passed."""

    channel: int
    rank: int
    steps: Sequence[Step]
    round: int = 0
    number: int = 0
    ready: float = 0.0
    start: float = 0.0
    busy: bool = False
    barrier_times: list[float] = field(default_factory=list)

    @property
    def step(self) -> Step:
        return self.steps[self.number]


@dataclass
class _InFlight:
    """Arrival times of messages and signals from one rank to another on a channel, in order."""

    messages: deque[float] = field(default_factory=deque)
    signals: deque[float] = field(default_factory=deque)


class _Simulation:
    def __init__(
        self,
        schedule: Schedule,
        links: Links,
        chunk: float,
        rounds: int,
        slot: float,
        depth: int,
        memory_bandwidth: float,
    ) -> None:
        self.schedule, self.links, self.depth = schedule, links, depth
        self.sizes = [
            min(slot, chunk - number * slot) if math.isfinite(slot) else chunk
            for number in range(rounds)
        ]
        self.has_memory = math.isfinite(memory_bandwidth)
        memories = [memory_bandwidth] * schedule.nranks if self.has_memory else []
        self.capacity = [bandwidth * BYTES_PER_US for bandwidth in (*links.bandwidths, *memories)]
        self.carried = [0.0] * len(self.capacity)
        #: (sender, receiver, channel) -> messages and signals in flight
        self.in_flight: defaultdict[tuple[int, int, int], _InFlight] = defaultdict(_InFlight)
        self.workers = [
            [_ChannelRank(channel, rank, steps) for rank, steps in enumerate(ranks)]
            for channel, ranks in enumerate(schedule.channels)
        ]
        self.flows: list[_Flow] = []
        self.arrivals: list[float] = []
        self.now = 0.0
        self.done: list[StepTime] = []

    def run(self) -> SimulationResult:
        waiting = [worker for workers in self.workers for worker in workers if worker.steps]
        while True:
            while self._start_all(waiting):
                pass
            waiting = [worker for worker in waiting if worker.round < len(self.sizes)]
            if not waiting:
                break
            self._advance(waiting)
        return SimulationResult(
            time_us=max((step.end for step in self.done), default=0.0),
            carried=tuple(self.carried[: len(self.links.names)]),
            steps=tuple(self.done),
            rounds=len(self.sizes),
        )

    # ---- steps

    def _start_all(self, waiting: Sequence[_ChannelRank]) -> bool:
        """Start every step that can start; return True if one ended at once, which may unblock
        others.
        """
        ended = False
        for worker in waiting:
            while not worker.busy and worker.round < len(self.sizes) and self._can_start(worker):
                self._start(worker)
                if worker.busy:
                    break
                ended = True
        return ended

    def _can_start(self, worker: _ChannelRank) -> bool:
        step, channel, rank = worker.step, worker.channel, worker.rank
        for peer in step.senders(rank):
            messages = self.in_flight[peer, rank, channel].messages
            if not messages or messages[0] > self.now:
                return False
        if step.op.sends and step.send_peer is not None:
            return len(self.in_flight[rank, step.send_peer, channel].messages) < self.depth
        if step.op is Op.WAIT:
            queues = [self.in_flight[peer, rank, channel].signals for peer in step.peers]
            return all(signals and signals[0] <= self.now for signals in queues)
        if step.op is Op.BARRIER:
            return self._barrier_is_open(worker)
        return True

    def _barrier_is_open(self, worker: _ChannelRank) -> bool:
        """Return True if all ranks have reached this barrier and the notification has arrived."""
        opens, number = 0.0, len(worker.barrier_times)
        for other in self.workers[worker.channel]:
            at_one = (
                not other.busy
                and other.round < len(self.sizes)
                and other.steps
                and other.step.op is Op.BARRIER
            )
            if len(other.barrier_times) <= number and not (
                at_one and len(other.barrier_times) == number
            ):
                return False
            came = other.barrier_times[number] if len(other.barrier_times) > number else other.ready
            opens = max(
                opens,
                came
                + (
                    self.links.route(other.rank, worker.rank).latency_us
                    if other is not worker
                    else 0.0
                ),
            )
        if opens > self.now:
            heapq.heappush(self.arrivals, opens)
        return opens <= self.now

    def _start(self, worker: _ChannelRank) -> None:
        step, worker.start = worker.step, self.now
        nbytes = step.chunks * self.sizes[worker.round]
        load = self._link_load(worker)
        if nbytes > 0 and load:
            worker.busy = True
            self.flows.append(_Flow(worker, nbytes, load))
            for link, times in load.items():
                self.carried[link] += nbytes * times
        else:
            self._end(worker)

    def _link_load(self, worker: _ChannelRank) -> Counter[int]:
        """Return how often the step crosses each link."""
        step, rank, load = worker.step, worker.rank, Counter[int]()
        if step.send_peer is not None:
            load.update(self.links.route(rank, step.send_peer).links)
        if step.op is Op.GET and step.recv_peer is not None:
            load.update(self.links.route(step.recv_peer, rank).links)
        if step.op is Op.REDUCE_FROM_PEERS:
            for peer in step.peers:
                if peer != rank:
                    load.update(self.links.route(peer, rank).links)
        if self.has_memory and step.chunks:
            reads = step.op is Op.RECV_REDUCE or (step.src is not None and step.op is not Op.GET)
            writes = step.dst is not None and step.op is not Op.PUT
            load[len(self.links.names) + rank] = reads + writes + len(step.senders(rank))
        return load

    def _end(self, worker: _ChannelRank) -> None:
        """Consume the step's messages, deliver its output, and advance to the next step."""
        step, channel, rank = worker.step, worker.channel, worker.rank
        for peer in step.senders(rank):
            self.in_flight[peer, rank, channel].messages.popleft()
        if step.op.sends and step.send_peer is not None:
            self._deliver(
                self.in_flight[rank, step.send_peer, channel].messages, rank, step.send_peer
            )
        elif step.op is Op.SIGNAL:
            for peer in step.peers:
                self._deliver(self.in_flight[rank, peer, channel].signals, rank, peer)
        elif step.op is Op.WAIT:
            for peer in step.peers:
                self.in_flight[peer, rank, channel].signals.popleft()
        if step.op is Op.BARRIER:
            worker.barrier_times.append(worker.ready)
        self.done.append(
            StepTime(
                channel, rank, worker.round, worker.number, worker.ready, worker.start, self.now
            )
        )
        worker.busy, worker.ready = False, self.now
        worker.number += 1
        if worker.number == len(worker.steps):
            worker.number, worker.round = 0, worker.round + 1

    def _deliver(self, queue: deque[float], sender: int, receiver: int) -> None:
        arrival = self.now + self.links.route(sender, receiver).latency_us
        queue.append(arrival)
        heapq.heappush(self.arrivals, arrival)

    # ---- time

    def _advance(self, waiting: Sequence[_ChannelRank]) -> None:
        """Advance the clock to the next end of a transfer or arrival."""
        while self.arrivals and self.arrivals[0] <= self.now:
            heapq.heappop(self.arrivals)
        self._share_bandwidth()
        ends = min((self.now + flow.remaining / flow.rate for flow in self.flows), default=math.inf)
        then = min(ends, self.arrivals[0] if self.arrivals else math.inf)
        if math.isinf(then):
            worker = waiting[0]
            where = format_location(self.schedule, worker.channel, worker.rank, worker.number)
            raise ScheduleError(f"{where}: deadlock, no rank can continue")
        passed, self.now = then - self.now, then
        going = []
        for flow in self.flows:
            flow.remaining -= passed * flow.rate
            # Tolerance for rounding of the clock: a picosecond and less.
            if flow.remaining <= flow.rate * max(1e-12 * then, 1e-9):
                self._end(flow.worker)
            else:
                going.append(flow)
        self.flows = going

    def _share_bandwidth(self) -> None:
        """Set max-min fair rates: fix the flows of the most contended link, then repeat with the
        rest.
        """
        left, open_flows = dict(enumerate(self.capacity)), list(self.flows)
        while open_flows:
            demand: Counter[int] = Counter()
            for flow in open_flows:
                demand.update(flow.load)
            level, tightest = min((left[link] / times, link) for link, times in demand.items())
            going = []
            for flow in open_flows:
                if tightest not in flow.load:
                    going.append(flow)
                    continue
                flow.rate = level
                for link, times in flow.load.items():
                    left[link] -= level * times
            open_flows = going
