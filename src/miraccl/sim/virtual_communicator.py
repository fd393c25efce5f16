"""Communicator of a virtual rank: the public operations over virtual links."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from miraccl.api.communicator import Communicator
from miraccl.deadline import Deadline
from miraccl.errors import CommunicatorClosed, InvalidUsage, MiracclError
from miraccl.fastpath.fast_calls import FastCalls
from miraccl.ops.arguments import data_type, reject_stream
from miraccl.ops.device_arrays import is_gpu_array
from miraccl.ops.host_arrays import HostReader
from miraccl.ops.prepare import PreparedOp, prepare
from miraccl.runtime.explain_request import explain_planned, parse_explain_request
from miraccl.runtime.forks import closed_reason
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.sim.collective import VirtualCollective
from miraccl.sim.group import ControlExchange, VirtualGroup, VirtualWork
from miraccl.sim.transfer_queue import Half, TransferQueue
from miraccl.types import Collective, DType, RedOp

if TYPE_CHECKING:
    from miraccl.ops.spec import OpSpec
    from miraccl.planning.planner import Candidate
    from miraccl.runtime.core import CommunicatorCore
    from miraccl.runtime.exchange import Transfer


class VirtualCore:
    """One rank's half of a virtual communicator.

    It has the methods of ``runtime.core.CommunicatorCore`` that ``api`` and ``runtime.group`` call.
    Collectives of a rank run one after the other, in the order of the calls.
    """

    in_forked_child = False

    def __init__(self, group: VirtualGroup, rank: int) -> None:
        self.group, self.rank, self.nranks = group, rank, group.nranks
        self.reader = HostReader(rank, group.nranks)
        self.options, self.planner, self.constants = (
            group.options,
            group.planner,
            group.world.constants,
        )
        self.closed = False
        self.last_plan: Candidate | None = None
        self._collectives = self._exchanges = 0  # numbers of the last ones
        self._queue: deque[tuple[VirtualWork, Callable[[], None]]] = deque()

    # ---- admission

    def check(self, code: int, name: str) -> None:
        """Raise if the communicator cannot run ``name``."""
        self.check_open(name)
        if self.group.fault is not None:
            raise self.group.error_for(self.rank, name)

    def check_open(self, name: str) -> None:
        if self.closed:
            raise CommunicatorClosed(closed_reason(False), rank=self.rank, op=name)

    # ---- collectives

    def run(self, call: PreparedOp, name: str) -> Any:
        """Run a collective and return its result."""
        return self.submit(call, name).wait()

    def submit(self, call: PreparedOp, name: str) -> VirtualWork:
        """Queue a collective behind those of this rank that have not ended."""
        self._collectives += 1
        number, group = self._collectives, self.group
        work = group.begin(self.rank, f"{name} #{number}")

        def start() -> None:
            if number > len(group.collectives):
                group.collectives.append(VirtualCollective(group, number, call, self.rank))
            collective = group.collectives[number - 1]
            self.last_plan = collective.plan
            collective.join(self.rank, call, work)

        leave_group = work._then

        def proceed() -> None:
            leave_group()
            self._queue.popleft()
            self._start_next()

        work.then(proceed)
        self._queue.append((work, start))
        if len(self._queue) == 1:
            self._start_next()
        return work

    def _start_next(self) -> None:
        if self._queue and self.group.fault is None:
            self._queue[0][1]()

    # ---- sends and receives

    def exchange(
        self, transfers: Sequence[Transfer], result: Any, name: str, async_op: bool
    ) -> Any:
        """Run sends and receives as one group and return ``result``, or a work."""
        self._reject_unmatched_self(transfers)
        work = self._start(transfers, result, name)
        return work if async_op else work.wait()

    def start_exchange(self, transfers: Sequence[Transfer], name: str) -> VirtualWork:
        """Start sends and receives as one group."""
        self._reject_unmatched_self(transfers)
        return self._start(transfers, None, name)

    def _reject_unmatched_self(self, transfers: Sequence[Transfer]) -> None:
        mine = [t.receives for t in transfers if t.peer == self.rank]
        if 2 * sum(mine) != len(mine):
            raise InvalidUsage(
                "a rank can send to itself only together with the receive, in one group",
                rank=self.rank,
            )

    def _start(self, transfers: Sequence[Transfer], result: Any, name: str) -> VirtualWork:
        group = self.group
        work = group.begin(self.rank, name)
        left = len(transfers)

        def end_one() -> None:
            nonlocal left
            left -= 1
            if not left:
                work.finish(result)

        if not transfers:
            work.finish(result)
        for transfer in transfers:
            part = VirtualWork(name, group.world.clock, group.options.timeout)
            part.then(end_one)
            pair = (transfer.peer, self.rank) if transfer.receives else (self.rank, transfer.peer)
            if pair not in group.transfers:
                group.transfers[pair] = TransferQueue(group, *pair)
            group.transfers[pair].add(Half(transfer, part))
        return work

    # ---- control operations

    def exchange_control(self, name: str, data: Any, members: Sequence[int]) -> dict[int, Any]:
        """Return the data of ``members`` by rank; collective over them."""
        group = self.group
        self._exchanges += 1
        if self._exchanges > len(group.exchanges):
            group.exchanges.append(ControlExchange(group, name))
        work = VirtualWork(name, group.world.clock, group.options.timeout)
        if group.fault is None:
            work = group.begin(self.rank, name)
        group.exchanges[self._exchanges - 1].join(self.rank, data, work, members)
        gathered: dict[int, Any] = work.wait()
        return gathered

    def parse_explain_request(
        self, collective: str | Collective, nbytes: int, dtype: Any
    ) -> tuple[Collective, int, DType]:
        """Validate the arguments of ``explain``; return (collective, block bytes, dtype)."""
        return parse_explain_request(collective, nbytes, dtype, self.nranks)

    def abort(self, reason: str) -> None:
        if not self.closed:
            self.group.abort(self.rank, reason)

    def finalize(self) -> None:
        if self.closed:
            return
        with contextlib.suppress(MiracclError):  # reported by the work of the failed operation
            for rank, work in list(self.group.open):
                if rank == self.rank:
                    work.wait()
        self.closed = True
        self.group.leave(self.rank, "finalized")


class VirtualPersistent:
    """A prepared operation of a virtual rank; ``op()`` runs it and returns the result array."""

    def __init__(self, core: VirtualCore, call: PreparedOp, name: str) -> None:
        self._core, self._call, self.name = core, call, name
        self.result = call.result

    def __call__(self, stream: Any = None) -> Any:
        reject_stream(stream, self._core.rank, self.name)
        self._core.check(0, self.name)
        return self._core.run(self._call, self.name)


class VirtualCommunicator(Communicator):
    """A communicator whose ranks are the virtual ranks of a ``World``.

    Arguments are checked, algorithms chosen and errors named as in ``Communicator``. Schedules are
    executed step by step by the interpreter's primitives, over virtual links; computing takes no
    time. Arrays must be in CPU memory.
    """

    _core: Any

    def __init__(self, group: VirtualGroup, rank: int) -> None:
        self.rank, self.nranks = rank, group.nranks
        self._virtual = VirtualCore(group, rank)
        self._core = cast("CommunicatorCore", self._virtual)
        self._device = self._background = None
        self._fast = FastCalls()
        self._splits = 0

    @property
    def world(self) -> Any:
        """The ``World`` of this rank."""
        return self._virtual.group.world

    def _run_on_gpu(
        self, op: OpSpec, args: Sequence[Any], async_op: bool, stream: Any, array: Any = None
    ) -> NoReturn:
        raise InvalidUsage(
            "cannot use GPU memory or streams: the ranks of this communicator are virtual",
            rank=self.rank,
        )

    def _gpu_by_name(self, device: Any, name: str) -> NoReturn:
        raise InvalidUsage(
            f"{name}: device is {device!r}; virtual ranks have cpu only", rank=self.rank
        )

    def _make_persistent(self, spec: OpSpec, args: Sequence[Any]) -> Any:
        self._core.check(0, spec.name)
        if any(is_gpu_array(x) for x in args):
            self._run_on_gpu(spec, args, False, None)
        return VirtualPersistent(
            self._virtual, prepare(spec, self._virtual.reader, args), spec.name
        )

    def empty(self, shape: Any, dtype: Any = "float32", device: str = "cpu") -> Any:
        if str(device) != "cpu":
            self._gpu_by_name(device, "empty")
        return np.empty(shape, NUMPY_DTYPE[data_type(dtype)])

    def memory(self) -> dict[str, int]:
        """Return no bytes: a virtual communicator has no FIFOs of its own."""
        return {"total": 0}

    def explain(
        self,
        collective: str | Collective,
        nbytes: int,
        dtype: Any = DType.FLOAT32,
        op: Any = RedOp.SUM,
        *,
        device: Any = "cpu",
        density: float = 0.01,
        block: int = 256,
    ) -> list[Candidate]:
        """Return all algorithms for ``collective`` on a buffer of ``nbytes``, the chosen one first.

        The arguments are those of ``Communicator.explain``.
        """
        if str(device) != "cpu":
            self._gpu_by_name(device, "explain")
        return explain_planned(
            self._virtual.planner,
            self.nranks,
            collective,
            nbytes,
            dtype,
            density=density,
            block=block,
        )

    def summary(self) -> str:
        """Describe the place of this rank."""
        group = self._virtual.group
        return (
            f"rank {self.rank} of {self.nranks} on virtual node {group.nodes[self.rank]}"
            f" ({group.name})"
        )

    @property
    def last_plan(self) -> Candidate | None:
        """Plan of the last collective."""
        return self._virtual.last_plan

    @property
    def local_rank(self) -> int:
        """Number of this rank among the ranks of its node, from 0."""
        nodes = self._virtual.group.nodes
        return sum(node == nodes[self.rank] for node in nodes[: self.rank])

    def split_within(
        self, deadline: Deadline, color: int | None, key: int = 0
    ) -> VirtualCommunicator | None:
        self._core.check(0, "split")
        for name, value in (("color", 0 if color is None else color), ("key", key)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise InvalidUsage(f"split: {name} is {value!r}; it must be a whole number")
        self._splits += 1
        number = self._splits
        colors = self._virtual.exchange_control(
            f"split #{number}", (color, int(key)), range(self.nranks)
        )
        if color is None:
            return None
        chosen = sorted((k, rank) for rank, (c, k) in colors.items() if c == color)
        return self._child(f"{number}:{color}", [rank for _, rank in chosen])

    def split(self, color: int | None, key: int = 0) -> VirtualCommunicator | None:
        return self.split_within(Deadline.after(self._core.options.timeout), color, key)

    def shrink(self) -> VirtualCommunicator:
        """Create a communicator of the ranks that have neither died nor left."""
        self._core.check_open("shrink")
        self._splits += 1
        alive = [rank for rank in range(self.nranks) if rank not in self._virtual.group.left]
        self._virtual.exchange_control(f"shrink #{self._splits}", None, alive)
        return self._child(f"shrink{self._splits}", alive)

    def _child(self, name: str, ranks: Sequence[int]) -> VirtualCommunicator:
        """Return the communicator of ``ranks``, which all call this with the same arguments."""
        group = self._virtual.group
        child = group.world.group(
            f"{group.name}/{name}", [group.members[rank] for rank in ranks], group.options
        )
        return VirtualCommunicator(child, list(ranks).index(self.rank))

    def abort(self, reason: str = "abort() was called") -> None:
        self._core.abort(reason)

    def finalize(self) -> None:
        self._core.finalize()
