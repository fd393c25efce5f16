"""Runs a schedule over virtual links on a virtual clock.

What a run is here
- A block has ``block_bytes``; it moves in rounds, of at most ``slot_bytes`` of every chunk each, as executors do.  Ranks go through their
  steps round by round, with nothing between the rounds but the messages themselves.
- A step begins when the step before it (same rank and channel) has ended, its messages and signals have arrived, and the FIFO that it
  sends to has room: at most ``fifo_depth`` messages that have not been taken.
- A step that sends, puts or gets moves its bytes over the links of the route while it lasts; all that crosses a link at a time shares its
  bandwidth, max-min fair (Bertsekas and Gallager, "Data Networks", 6.5.2).  Its message arrives when it has ended and the route's latency
  has passed.  With ``memory_bandwidth`` a rank's memory is one more link, which a step crosses once for every operand that it reads or
  writes there; without it copies and additions take no time.
- Nothing else takes time: no launch, no polling, no rounding to packets.  So this is a bound on what the schedule can do on such links,
  and exact where bandwidth and latency are all there is.
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

BYTES_PER_US = 1e3  # of 1 GB/s
MAX_STEPS = 1_000_000  # of all ranks and rounds


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of one round: it waited from ``ready`` (the step before had ended) to ``start``; times in us."""

    channel: int
    rank: int
    round: int
    number: int
    ready: float
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """``time_us`` until the last rank has ended; ``carried[l]`` bytes over link l; ``steps`` in the order in which they ended."""

    time_us: float
    carried: tuple[float, ...]
    steps: tuple[StepTime, ...]
    rounds: int

    def link_utilisation(self, links: Links) -> list[tuple[float, str]]:
        """For each link the part of the time that its bytes need at full speed, the busiest first, with its name."""
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
    """The course of ``schedule`` over ``links``; raises ``ScheduleError`` where it gets stuck.

    ``block_bytes``: of a block as ``schedule.ir`` defines it (all_reduce: the whole buffer, all_gather: the input).  ``memory_bandwidth``:
    GB/s of a rank's reads and writes together.
    """
    if links.nranks != schedule.nranks:
        raise InvalidUsage(
            f"the schedule is for {schedule.nranks} ranks, the links are for {links.nranks}"
        )
    if not 0 <= block_bytes < math.inf:
        raise InvalidUsage(f"a block has {block_bytes} bytes; it is a finite number, 0 or more")
    if slot_bytes <= 0 or fifo_depth < 1 or memory_bandwidth <= 0:
        raise InvalidUsage("slots, FIFOs and the bandwidth of memory are greater than 0")
    chunk = block_bytes / schedule.parts
    rounds = max(1, math.ceil(chunk / slot_bytes))
    steps = rounds * sum(len(steps) for channel in schedule.channels for steps in channel)
    if steps > MAX_STEPS:
        raise InvalidUsage(
            f"{rounds} rounds are {steps} steps of all ranks, at most {MAX_STEPS} are simulated: take larger slots"
        )
    return _Simulation(
        schedule, links, chunk, rounds, slot_bytes, fifo_depth, memory_bandwidth
    ).run()


@dataclass(eq=False)
class _Flow:
    """A step in progress that moves bytes. ``load``: how often each link is crossed."""

    worker: _ChannelRank
    remaining: float
    load: Counter[int]
    rate: float = 0.0


@dataclass(eq=False)
class _ChannelRank:
    """One rank on one channel."""

    channel: int
    rank: int
    steps: Sequence[Step]
    round: int = 0
    number: int = 0
    ready: float = 0.0
    start: float = 0.0
    busy: bool = False
    barrier_times: list[float] = field(
        default_factory=list
    )  # when to each barrier that it has passed

    @property
    def step(self) -> Step:
        return self.steps[self.number]


@dataclass
class _InFlight:
    """What is under way from one rank to another on a channel: arrival times, in order."""

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
        self.in_flight: defaultdict[tuple[int, int, int], _InFlight] = defaultdict(
            _InFlight
        )  # (sender, receiver, channel)
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
        """Begin every step that can begin now; those without bytes end at once, which may let others begin: then True."""
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
        """All ranks are at this barrier of the channel or past it, and the news of that has come."""
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
        """The links that the step crosses, and how often."""
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
        """Take the messages, deliver what is sent, and go to the next step."""
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
        """Go to the next moment at which something ends or arrives."""
        while self.arrivals and self.arrivals[0] <= self.now:
            heapq.heappop(self.arrivals)
        self._share_bandwidth()
        ends = min((self.now + flow.remaining / flow.rate for flow in self.flows), default=math.inf)
        then = min(ends, self.arrivals[0] if self.arrivals else math.inf)
        if math.isinf(then):
            worker = waiting[0]
            where = format_location(self.schedule, worker.channel, worker.rank, worker.number)
            raise ScheduleError(
                f"{where}: waits for ever, and all others that have not ended as well"
            )
        passed, self.now = then - self.now, then
        going = []
        for flow in self.flows:
            flow.remaining -= passed * flow.rate
            if flow.remaining <= flow.rate * max(
                1e-12 * then, 1e-9
            ):  # rounding of the clock: a picosecond and less
                self._end(flow.worker)
            else:
                going.append(flow)
        self.flows = going

    def _share_bandwidth(self) -> None:
        """Max-min fair rates: the most contended link decides for all that cross it, then the next one among the rest."""
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
