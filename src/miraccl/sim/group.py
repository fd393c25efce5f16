"""Shared state of one virtual communicator: its ranks, their operations, and its first fault."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miraccl.clock import VirtualClock
from miraccl.diagnosis.error_codec import abort_error, departure_error
from miraccl.errors import CollectiveTimeout, MiracclError
from miraccl.ops.request import PlanRequest
from miraccl.planning.cost_model import CommunicatorShape
from miraccl.planning.planner import Candidate, Overrides, Planner
from miraccl.runtime.work import Work, check_timeout
from miraccl.sim.links import Route

if TYPE_CHECKING:
    from miraccl.runtime.options import Options
    from miraccl.sim.collective import VirtualCollective
    from miraccl.sim.transfer_queue import TransferQueue
    from miraccl.sim.world import World

POLL_S = 1e-6  # virtual time that a query of an unfinished operation takes


class VirtualWork(Work):
    """Handle of an operation on virtual ranks; ``wait`` is a wait of the virtual clock."""

    def __init__(self, name: str, clock: VirtualClock, timeout: float) -> None:
        super().__init__(name)
        self._clock, self._timeout = clock, timeout
        self._then: Callable[[], None] = lambda: None
        #: Called if the operation passes its deadline; ends it with an error.
        self.on_timeout: Callable[[], None] = lambda: None

    def then(self, action: Callable[[], None]) -> None:
        """Call ``action`` when the operation has ended."""
        self._then = action

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """End the operation; later calls have no effect."""
        if not self.is_over:
            self._finish(result, error)
            self._then()

    def wait(self, timeout: float | None = None, *, stream: Any = None) -> Any:
        seconds = check_timeout(timeout)
        if not self._clock.block(self._done.is_set, self._timeout if seconds is None else seconds):
            if seconds is not None:
                raise CollectiveTimeout(
                    f"not finished within {seconds:g} s; the operation continues", op=self.name
                )
            self.on_timeout()
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def is_over(self) -> bool:
        """True once the operation has ended, read without a query's passing of time."""
        return self._done.is_set()

    def done(self) -> bool:
        # A query takes time: a loop around it would otherwise never end.
        return self._clock.block(self._done.is_set, POLL_S)

    is_completed = done


@dataclass(frozen=True)
class _MemberRoutes:
    """Routes between the ranks of a communicator."""

    world: World
    members: tuple[int, ...]

    def route(self, sender: int, receiver: int) -> Route:
        return self.world.links.route(self.members[sender], self.members[receiver])


class VirtualGroup:
    """State of a communicator that its virtual ranks share.

    Args:
        members: World rank of each rank.
    """

    def __init__(self, world: World, name: str, members: Sequence[int], options: Options) -> None:
        self.world, self.name, self.members, self.options = world, name, tuple(members), options
        self.nranks = len(self.members)
        self.routes = _MemberRoutes(world, self.members)
        nodes = tuple(world.node_of(member) for member in self.members)
        self.nodes = nodes
        self.planner = Planner(
            rank=0,  # a choice does not depend on it
            shape=CommunicatorShape(nranks=self.nranks, hosts=nodes if len(set(nodes)) > 1 else ()),
            slot_bytes=world.slot_bytes,
            constants=world.constants,
            overrides=Overrides(
                algo=options.algo,
                proto=options.proto,
                deterministic=options.deterministic,
                hints=dict(options.algo_hints),
            ),
        )
        self._choices: dict[PlanRequest, Candidate] = {}
        self.collectives: list[VirtualCollective] = []
        self.exchanges: list[ControlExchange] = []
        self.transfers: dict[tuple[int, int], TransferQueue] = {}  # (sender, receiver) ->
        self.left: dict[int, str] = {}  # rank -> reason
        self.fault: MiracclError | None = None
        self.open: list[tuple[int, VirtualWork]] = []  # operations in progress, with their rank

    def choose(self, request: PlanRequest) -> Candidate:
        """Return the plan of an operation."""
        found = self._choices.get(request)
        if found is None:
            found = self._choices[request] = self.planner.candidates(
                request.collective, request.block_bytes, request.dtype, request.root, request.uneven
            )[0]
        return found

    def begin(self, rank: int, name: str) -> VirtualWork:
        """Return the handle of an operation that ``rank`` begins."""
        work = VirtualWork(name, self.world.clock, self.options.timeout)
        entry = (rank, work)
        self.open.append(entry)
        work.then(lambda: self.open.remove(entry))
        work.on_timeout = lambda: self._time_out(rank, work)
        return work

    def abort(self, rank: int, reason: str) -> None:
        """Break the communicator on behalf of ``rank``."""
        self.fail(abort_error(rank, reason))

    def fail(self, error: MiracclError) -> None:
        """Break the communicator: operations in progress and later ones raise ``error``."""
        if self.fault is not None:
            return
        self.fault = error
        self.world.record("fault", -1, self.name, "", f"{type(error).__name__}: {error}")
        for collective in self.collectives:
            collective.stop()
        for rank, work in list(self.open):
            work.finish(error=self.error_for(rank, work.name))

    def error_for(self, rank: int, name: str) -> MiracclError:
        """Return the fault as ``rank`` raises it in operation ``name``."""
        error = copy.copy(self.fault)
        assert error is not None
        error.rank, error.op = rank, name
        return error

    def leave(self, rank: int, reason: str) -> None:
        """Let ``rank`` leave: operations in progress that it has not joined fail."""
        if rank in self.left:
            return
        self.left[rank] = reason
        for collective in self.collectives:
            if rank not in collective.buffers and not collective.ended:
                self.fail(departure_error(rank, reason, rank=-1, op=None))
        for exchange in self.exchanges:
            if rank not in exchange.data and exchange.data:
                self.fail(departure_error(rank, reason, rank=-1, op=None))
        for queue in self.transfers.values():
            queue.check_departures()

    def _time_out(self, rank: int, work: VirtualWork) -> None:
        text = f"rank {rank} passed the deadline of {self.options.timeout:g} s"
        self.fail(CollectiveTimeout(text, graph=self.describe_waits()))

    def describe_waits(self) -> tuple[str, ...]:
        """Return one line per rank: what it waits for, or that it waits for nothing."""
        lines = []
        for rank in range(self.nranks):
            names = [work.name for other, work in self.open if other == rank]
            where = "; ".join(
                part
                for collective in self.collectives
                if not collective.ended
                for part in collective.describe(rank)
            )
            if names:
                lines.append(f"rank {rank} is in {', '.join(names)}" + (f": {where}" * bool(where)))
            elif rank in self.left:
                lines.append(f"rank {rank} has left ({self.left[rank]})")
            else:
                lines.append(f"rank {rank} is outside the communicator")
        return tuple(lines)


class ControlExchange:
    """The n-th exchange of a communicator on its control plane, such as that of a split."""

    def __init__(self, group: VirtualGroup, name: str) -> None:
        self.group, self.name = group, name
        self.data: dict[int, Any] = {}
        self._works: list[VirtualWork] = []

    def join(self, rank: int, data: Any, work: VirtualWork, members: Sequence[int]) -> None:
        """Add the data of ``rank``; all works end once ``members`` have joined."""
        self.data[rank] = data
        self._works.append(work)
        if all(member in self.data for member in members):
            latest = max(
                (
                    self.group.routes.route(a, b).latency_us
                    for a in members
                    for b in members
                    if a != b
                ),
                default=0.0,
            )
            fabric = self.group.world.fabric
            # To a hub and back.
            fabric.call_at(fabric.now + 2 * latest, self._finish)

    def _finish(self) -> None:
        for work in self._works:
            work.finish(dict(self.data))
