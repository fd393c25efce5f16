"""Execution of a schedule's steps over a virtual fabric, on one rank after another as they arrive.

``sim.clock`` times schedules with it, ``sim.world`` also moves data.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from miraccl.schedule.ir import Op, Step
from miraccl.sim.fair_share import FairShareNetwork, Flow
from miraccl.sim.links import Route

#: steps of a rank by channel
RankProgram = Sequence[Sequence[Step]]


class RankRoutes(Protocol):
    """Routes between the ranks of a schedule; ``Links`` are those of a whole machine."""

    def route(self, sender: int, receiver: int, /) -> Route: ...


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


@dataclass(eq=False)
class Worker:
    """One rank on one channel. ``barriers``: number of barriers it has passed."""

    channel: int
    rank: int
    steps: Sequence[Step]
    round: int = 0
    number: int = 0
    ready: float = 0.0
    start: float = 0.0
    busy: bool = False
    queued: bool = False
    barriers: int = 0

    @property
    def step(self) -> Step:
        return self.steps[self.number]


@dataclass(slots=True)
class _InFlight:
    """Arrival times of messages and signals from one rank to another on a channel, in order."""

    messages: deque[float] = field(default_factory=deque)
    signals: deque[float] = field(default_factory=deque)


@dataclass(kw_only=True)
class ScheduleExecution:
    """Steps of one schedule in progress on the ranks that have joined.

    Attributes:
        routes: Routes between the ranks of the schedule.
        depth: Messages that a FIFO holds.
        nbytes: Returns the bytes of a worker's current step.
        on_step: Called when a step has ended, before its message leaves.
        on_end: Called with a rank that has ended its last step.
        memory_link: Link of a rank's memory, crossed once per operand; None if memory takes no
            time.
        latency: Returns the latency of one message from the latency of its route, in us.
    """

    fabric: FairShareNetwork
    nranks: int
    routes: RankRoutes
    rounds: int
    depth: int
    nbytes: Callable[[Worker], float]
    on_step: Callable[[Worker], None]
    on_end: Callable[[int], None]
    memory_link: Callable[[int], int] | None = None
    latency: Callable[[float], float] = float

    def __post_init__(self) -> None:
        self.workers: dict[tuple[int, int], Worker] = {}
        #: (sender, receiver, channel) -> messages and signals in flight
        self._in_flight: defaultdict[tuple[int, int, int], _InFlight] = defaultdict(_InFlight)
        self._barriers: defaultdict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        self._left: dict[int, int] = {}  # channels that a rank has not ended
        self._flows: dict[Worker, Flow] = {}
        self._startable: deque[Worker] = deque()
        self._starting = self._stopped = False

    def join(self, rank: int, program: RankProgram) -> None:
        """Start the steps of ``rank`` now."""
        workers = [
            Worker(channel, rank, steps, ready=self.fabric.now)
            for channel, steps in enumerate(program)
            if steps
        ]
        self._left[rank] = len(workers)
        if not workers:
            self.on_end(rank)
            return
        for worker in workers:
            self.workers[worker.channel, rank] = worker
            self._reach(worker)
        self._start_all()

    def stop(self) -> None:
        """Cancel what is in progress."""
        self._stopped = True
        self._startable.clear()
        self.fabric.cancel(list(self._flows.values()))
        self._flows.clear()

    def unfinished(self) -> list[Worker]:
        """Return the workers with steps left, by channel and rank."""
        return [worker for _, worker in sorted(self.workers.items()) if worker.round < self.rounds]

    # ---- start

    def _wake(self, channel: int, rank: int) -> None:
        """Try to start the current step of a worker that may have what it waited for."""
        worker = self.workers.get((channel, rank))
        if worker is not None:
            self._queue(worker)
            self._start_all()

    def _queue(self, worker: Worker) -> None:
        if not (worker.busy or worker.queued or self._stopped):
            worker.queued = True
            self._startable.append(worker)

    def _reach(self, worker: Worker) -> None:
        """Queue a worker whose current step is new; record that it has reached a barrier."""
        if worker.step.op is Op.BARRIER:
            self._reach_barrier(worker)
        self._queue(worker)

    def _reach_barrier(self, worker: Worker) -> None:
        times = self._barriers[worker.channel, worker.barriers]
        times[worker.rank] = worker.ready
        if len(times) == self.nranks:  # the last one: the time at which each rank may go on
            for rank in times:
                opens = max(
                    instant
                    if other == rank
                    else instant + self.routes.route(other, rank).latency_us
                    for other, instant in times.items()
                )
                self._wake_at(opens, worker.channel, rank)

    def _wake_at(self, instant: float, channel: int, rank: int) -> None:
        if instant > self.fabric.now:
            self.fabric.call_at(instant, lambda: self._wake(channel, rank))
        elif (worker := self.workers.get((channel, rank))) is not None:
            self._queue(worker)

    def _start_all(self) -> None:
        if self._starting:  # the outer call continues with what was queued
            return
        self._starting = True
        try:
            while self._startable:
                worker = self._startable.popleft()
                worker.queued = False
                if worker.round < self.rounds and self._can_start(worker):
                    self._start(worker)
        finally:
            self._starting = False

    def _can_start(self, worker: Worker) -> bool:
        step, channel, rank, now = worker.step, worker.channel, worker.rank, self.fabric.now
        for peer in step.senders(rank):
            messages = self._in_flight[peer, rank, channel].messages
            if not messages or messages[0] > now:
                return False
        if step.op.sends and step.send_peer is not None:
            return len(self._in_flight[rank, step.send_peer, channel].messages) < self.depth
        if step.op is Op.WAIT:
            queues = [self._in_flight[peer, rank, channel].signals for peer in step.peers]
            return all(signals and signals[0] <= now for signals in queues)
        if step.op is Op.BARRIER:
            times = self._barriers[channel, worker.barriers]
            return len(times) == self.nranks and all(
                instant + (0.0 if other == rank else self.routes.route(other, rank).latency_us)
                <= now
                for other, instant in times.items()
            )
        return True

    def _start(self, worker: Worker) -> None:
        worker.start = self.fabric.now
        nbytes, load = self.nbytes(worker), self._link_load(worker)
        if nbytes > 0 and load:
            worker.busy = True
            self._flows[worker] = self.fabric.start(nbytes, load, lambda: self._arrive(worker))
        else:
            self._end(worker)

    def _link_load(self, worker: Worker) -> Counter[int]:
        """Return how often the step crosses each link."""
        step, rank, load = worker.step, worker.rank, Counter[int]()
        if step.send_peer is not None:
            load.update(self.routes.route(rank, step.send_peer).links)
        if step.op is Op.GET and step.recv_peer is not None:
            load.update(self.routes.route(step.recv_peer, rank).links)
        if step.op is Op.REDUCE_FROM_PEERS:
            for peer in step.peers:
                if peer != rank:
                    load.update(self.routes.route(peer, rank).links)
        if self.memory_link is not None and step.chunks:
            reads = step.op is Op.RECV_REDUCE or (step.src is not None and step.op is not Op.GET)
            writes = step.dst is not None and step.op is not Op.PUT
            load[self.memory_link(rank)] = reads + writes + len(step.senders(rank))
        return load

    # ---- end

    def _arrive(self, worker: Worker) -> None:
        """End a step whose bytes have been moved."""
        if not self._stopped:
            del self._flows[worker]
            self._end(worker)
            self._start_all()

    def _end(self, worker: Worker) -> None:
        """Consume the step's messages, deliver its output, and advance to the next step."""
        step, channel, rank = worker.step, worker.channel, worker.rank
        self.on_step(worker)
        for peer in step.senders(rank):
            self._in_flight[peer, rank, channel].messages.popleft()
            if (sender := self.workers.get((channel, peer))) is not None:
                self._queue(sender)  # it may have waited for a free slot
        if step.op.sends and step.send_peer is not None:
            messages = self._in_flight[rank, step.send_peer, channel].messages
            self._deliver(messages, channel, rank, step.send_peer)
        elif step.op is Op.SIGNAL:
            for peer in step.peers:
                self._deliver(self._in_flight[rank, peer, channel].signals, channel, rank, peer)
        elif step.op is Op.WAIT:
            for peer in step.peers:
                self._in_flight[peer, rank, channel].signals.popleft()
        if step.op is Op.BARRIER:
            worker.barriers += 1
        worker.busy, worker.ready = False, self.fabric.now
        worker.number += 1
        if worker.number == len(worker.steps):
            worker.number, worker.round = 0, worker.round + 1
        if worker.round < self.rounds:
            self._reach(worker)
            return
        self._left[rank] -= 1
        if not self._left[rank]:
            self.on_end(rank)

    def _deliver(self, queue: deque[float], channel: int, sender: int, receiver: int) -> None:
        arrival = self.fabric.now + self.latency(self.routes.route(sender, receiver).latency_us)
        if queue:  # messages keep their order
            arrival = max(arrival, queue[-1])
        queue.append(arrival)
        self._wake_at(arrival, channel, receiver)
