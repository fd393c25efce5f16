"""Virtual cluster: ranks on virtual nodes that run a program in one process, deterministically.

Each rank runs the program in a thread of its own, one thread at a time (``sim.serial_clock``).
Collectives are planned by the planner of CPU ranks and executed step by step on the callers'
arrays, while their messages share the bandwidth of virtual links. Every draw, of the next thread,
of the order of simultaneous events, and of latencies, comes from the seed.
"""

from __future__ import annotations

import contextlib
import hashlib
import random  # noqa: TID251 - seeded
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from miraccl import clock as clocks
from miraccl.api.communicator import Communicator
from miraccl.errors import InvalidUsage, PeerDied
from miraccl.planning.cost_model import CpuConstants
from miraccl.runtime.options import Options
from miraccl.sim.clock import BYTES_PER_US
from miraccl.sim.engine_ranks import EngineRanks
from miraccl.sim.fair_share import FairShareNetwork
from miraccl.sim.group import VirtualGroup
from miraccl.sim.links import Links, cluster
from miraccl.sim.serial_clock import SerialClock
from miraccl.sim.virtual_communicator import VirtualCommunicator

#: What executes the collectives of a world.
ENGINES = ("interpreter", "compiled")
#: default bytes of a FIFO slot: that of shared memory between a few ranks
SLOT_BYTES = 128 << 10
#: Time in us after which the other ranks know that a rank has died.
DETECTION_US = 100.0


@dataclass(frozen=True, slots=True)
class WorldEvent:
    """One event of a world.

    Attributes:
        start_us, end_us: Virtual time; equal for an event without a duration.
        kind: ``start``, ``step`` and ``end`` of a collective on a rank, ``sent``, ``received``,
            ``fault``, ``died`` or ``returned``; ``wait`` of a rank in the compiled engine.
        rank: Rank in ``communicator``; -1 for all of its ranks.
        detail: Channel, round, number and primitive of a step; checksum of a result.
    """

    start_us: float
    end_us: float
    kind: str
    rank: int
    communicator: str
    operation: str
    detail: str


class RankKilled(BaseException):
    """Raised in a virtual rank that ``World.kill`` ends."""


@dataclass(eq=False)
class _VirtualRank:
    """One virtual rank in a run; ``open`` returns its communicator, in its thread."""

    rank: int
    open: Callable[[int], Communicator]
    thread: clocks.Thread | None = None
    result: Any = None
    error: BaseException | None = None


class World:
    """A virtual cluster; ``run`` runs a program on each of its ranks.

    Args:
        nodes, ranks_per_node: Size; rank ``r`` is on node ``r // ranks_per_node``.
        seed: Source of all draws: equal seeds give equal runs.
        links: Links between the ranks; default: ``sim.links.cluster`` of this size.
        jitter: Largest fraction by which the latency of a message grows, drawn for each message.
        slot_bytes: Bytes of a FIFO slot; larger chunks move in rounds.
        constants: Cost model of the planner; default: that of an average machine.
        engine: ``interpreter`` executes schedules step by step over virtual links; ``compiled``
            runs the library's own communicators and compiled engine, whose messages take no time.
        options: Those of ``miraccl.init``: ``timeout``, ``algo``, ``proto``, ``deterministic``.

    Attributes:
        events: What has happened, in order.
        nranks: Number of ranks.
    """

    def __init__(
        self,
        nodes: int = 8,
        ranks_per_node: int = 8,
        *,
        seed: int = 0,
        links: Links | None = None,
        jitter: float = 0.0,
        slot_bytes: int = SLOT_BYTES,
        constants: CpuConstants | None = None,
        engine: str = "interpreter",
        **options: Any,
    ) -> None:
        self.nodes, self.ranks_per_node = nodes, ranks_per_node
        self.nranks = nodes * ranks_per_node
        self.links = cluster(nodes, ranks_per_node) if links is None else links
        if self.links.nranks != self.nranks:
            raise InvalidUsage(
                f"cannot build a world of {nodes} nodes of {ranks_per_node} ranks: the links join"
                f" {self.links.nranks} ranks"
            )
        if not 0 <= jitter < 1e6:
            raise InvalidUsage(f"jitter is {jitter!r}; it must be at least 0")
        if slot_bytes < 64:
            raise InvalidUsage(f"slot_bytes is {slot_bytes}; it must be at least 64")
        if engine not in ENGINES:
            raise InvalidUsage(f"engine is {engine!r}; allowed are {', '.join(ENGINES)}")
        self.engine = engine
        self._engine_ranks: EngineRanks | None = None
        self.seed, self.jitter, self.slot_bytes = seed, jitter, slot_bytes
        self.constants = constants or CpuConstants()
        self.options = Options.create(**options)
        self._random = random.Random(f"events {seed}")
        self.fabric = FairShareNetwork(
            [gbs * BYTES_PER_US for gbs in self.links.bandwidths], self._random.shuffle
        )
        self.clock = SerialClock(self.fabric, seed=seed)
        self.events: list[WorldEvent] = []
        self._groups: dict[str, VirtualGroup] = {}
        self._ranks: list[_VirtualRank] = []
        self._runs = 0

    @property
    def time_us(self) -> float:
        """Virtual time since the world was built."""
        return self.fabric.now

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def run(
        self,
        program: Callable[..., Any],
        *args: Any,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Run ``program(comm, *args)`` on every rank and return the results in rank order.

        Within the program, ``miraccl.clock`` is the clock of the world. Waits that are not of this
        clock (locks, sockets, ``time.sleep``) must not wait for other ranks.

        Args:
            program: Receives the communicator of all ranks; it is finalized afterwards.
            return_exceptions: Return the exception of a rank that fails in place of its result.

        Raises:
            BaseException: The exception of the rank that failed first; a note names the rank.
        """
        if any(rank.thread is threading.current_thread() for rank in self._ranks):
            raise InvalidUsage("cannot run a program from within a virtual rank of this world")
        self._runs += 1
        name = f"run{self._runs}"
        failed: list[_VirtualRank] = []
        with clocks.use(self.clock), self._opener(name) as open_rank:
            self._ranks = [_VirtualRank(r, open_rank) for r in range(self.nranks)]
            for rank in self._ranks:
                rank.thread = clocks.thread(
                    self._run_rank, args=(rank, program, args, failed), name=f"rank {rank.rank}"
                )
                rank.thread.start()
            for rank in self._ranks:
                assert rank.thread is not None
                rank.thread.join()
        if failed and not return_exceptions:
            error = failed[0].error
            assert error is not None
            error.add_note(f"on rank {failed[0].rank} of the virtual cluster, the first to fail")
            raise error
        return [rank.result if rank.error is None else rank.error for rank in self._ranks]

    @contextlib.contextmanager
    def _opener(self, name: str) -> Iterator[Callable[[int], Communicator]]:
        """Yield the function that opens the communicator of a rank."""
        if self.engine == "interpreter":
            group = self.group(name, range(self.nranks), self.options)
            yield lambda rank: VirtualCommunicator(group, rank)
            return
        hosts = [f"node {self.node_of(rank)}" for rank in range(self.nranks)]
        ranks = EngineRanks(self.clock, hosts, self.options, self.constants, self._record_wait)
        self._engine_ranks = ranks
        try:
            yield ranks.open
        finally:
            self._engine_ranks = None
            ranks.close()

    def _record_wait(self, rank: int, place: str) -> None:
        self.record("wait", rank, "", "", place)

    def _run_rank(
        self,
        rank: _VirtualRank,
        program: Callable[..., Any],
        args: tuple[Any, ...],
        failed: list[_VirtualRank],
    ) -> None:
        try:
            communicator = rank.open(rank.rank)
            rank.result = program(communicator, *args)
            communicator.finalize()
        except BaseException as error:  # returned or raised by ``run``
            ranks = self._engine_ranks
            rank.error = (ranks and ranks.stopped(rank.rank)) or error
            failed.append(rank)
            self._end_rank(rank, f"{type(rank.error).__name__}: {rank.error}")
        else:
            self.record("returned", rank.rank, "", "")

    def _end_rank(self, rank: _VirtualRank, reason: str) -> None:
        """Notify the other ranks, after a while, that ``rank`` has died."""
        self.record("died", rank.rank, "", "", reason)
        if self._engine_ranks is not None:
            self._engine_ranks.kill(rank.rank, reason)

        def detect() -> None:
            for group in list(self._groups.values()):
                if rank.rank in group.members:
                    number = group.members.index(rank.rank)
                    if number not in group.left:
                        group.left[number] = reason
                        group.fail(PeerDied(f"rank {number} died: {reason}", peer=number))

        self.fabric.call_at(self.fabric.now + DETECTION_US, detect)

    def kill(self, rank: int, after_us: float = 0.0) -> None:
        """End ``rank`` after ``after_us`` of virtual time, at its next wait.

        The other ranks raise ``PeerDied``. Call it before ``run`` or within the program.
        """
        if not 0 <= rank < self.nranks:
            raise InvalidUsage(f"rank is {rank!r}; allowed are 0 to {self.nranks - 1}")

        def end() -> None:
            if self._ranks and (thread := self._ranks[rank].thread) is not None:
                self.clock.interrupt(thread, RankKilled("killed by World.kill"))

        self.fabric.call_at(self.fabric.now + after_us, end)

    # ---- for communicators

    def group(self, name: str, members: Sequence[int], options: Options) -> VirtualGroup:
        """Return the communicator state called ``name``, created by the first caller."""
        found = self._groups.get(name)
        if found is None:
            found = self._groups[name] = VirtualGroup(self, name, members, options)
        return found

    def draw_latency(self, latency_us: float) -> float:
        """Return the latency of one message from that of its route."""
        if not self.jitter:
            return latency_us
        return latency_us * (1 + self.jitter * self._random.random())

    def record(
        self,
        kind: str,
        rank: int,
        communicator: str,
        operation: str,
        detail: str = "",
        *,
        start: float | None = None,
    ) -> None:
        now = self.fabric.now
        self.events.append(
            WorldEvent(
                now if start is None else start, now, kind, rank, communicator, operation, detail
            )
        )

    # ---- results

    def trace(self) -> dict[str, Any]:
        """Return the run in Chrome's Trace Event Format, for Perfetto and chrome://tracing.

        A process is a rank of the world; thread 0 has the collectives, thread ``1 + c`` the steps
        of channel ``c``.
        """
        started: dict[tuple[str, str, int], float] = {}
        events: list[dict[str, Any]] = []
        for event in self.events:
            key = event.communicator, event.operation, event.rank
            if event.kind == "start":
                started[key] = event.end_us
            elif event.kind in ("step", "end"):
                group = self._groups[event.communicator]
                is_step = event.kind == "step"
                where, _, primitive = event.detail.partition(" ")
                start = event.start_us if is_step else started[key]
                events.append(
                    {
                        "name": primitive if is_step else event.operation,
                        "ph": "X",
                        "pid": group.members[event.rank],
                        "tid": 1 + int(where.partition(".")[0]) if is_step else 0,
                        "ts": start,
                        "dur": event.end_us - start,
                        "args": {"communicator": event.communicator, "detail": event.detail},
                    }
                )
        names = [
            {
                "name": "process_name",
                "ph": "M",
                "pid": rank,
                "args": {"name": f"rank {rank}, node {self.node_of(rank)}"},
            }
            for rank in range(self.nranks)
        ]
        return {"displayTimeUnit": "ns", "traceEvents": [*names, *events]}

    def __repr__(self) -> str:
        return (
            f"<World of {self.nodes} nodes of {self.ranks_per_node} ranks, seed {self.seed},"
            f" {self.time_us:.1f} us>"
        )

    def digest(self) -> str:
        """Return a hash of all events, with times, order and checksums of results."""
        total = hashlib.sha256()
        for event in self.events:
            total.update(repr(event).encode())
        for drawn in self.clock.draws:
            total.update(drawn)
        return total.hexdigest()
