"""The process group: one communicator as a ``torch.distributed`` group.

PyTorch lets Python subclass ``ProcessGroup`` but not ``Backend`` (``PyProcessGroup.hpp``), so the
object made here *is* the group that ``init_process_group`` returns, for all devices.  C++ callers
(DDP's reducer, the functional collectives) reach the methods that ``PyProcessGroup`` forwards;
Python callers reach them all.

Calls continue in one of three places: collectives in CPU memory in the work queue, in call order;
messages in CPU memory in the tag matcher; GPU memory on the group's streams.  Calls with tensors of
a device that another backend serves are forwarded to it (``mixed_backends``).
"""

from __future__ import annotations

import datetime
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from miraccl import clock
from miraccl.errors import CollectiveTimeout, InvalidUsage
from miraccl.runtime.core_access import core_access
from miraccl.torch import monitored
from miraccl.torch.failures import as_backend_errors
from miraccl.torch.fast_path import FastPathCollectives
from miraccl.torch.forms import short_form
from miraccl.torch.matching import TagMatcher
from miraccl.torch.message_work import FutureCompletion
from miraccl.torch.point_to_point import Transfers
from miraccl.torch.profiled import profiled, profiling, shown_as
from miraccl.torch.routing import first_tensor
from miraccl.torch.streams import GroupStreams
from miraccl.torch.tensors import DEVICES, NAME, Staged, check_result, with_loads
from miraccl.torch.work import FinishedWork, Work, WorkQueue, no_action, seconds

if TYPE_CHECKING:
    from miraccl.api.communicator import Communicator
    from miraccl.torch.mixed_backends import OtherBackends

CLOSE_WAIT_S = 10.0
_BARRIER = c10d.BarrierOptions()


class ProcessGroupMiraccl(FastPathCollectives, Transfers, dist.ProcessGroup):
    """A ``torch.distributed`` group over one communicator.

    ``communicator`` is public, for ``explain`` and ``last_plan``.

    Args:
        store: The store of the group; shared with groups split from it.
        communicator: Runs the collectives.
        p2p_comm: A communicator of the same ranks for messages only.
        other_backends: Backends of other libraries for other devices.
    """

    supports_splitting = True
    supports_coalescing = True
    supports_shrinking = False
    supports_time_estimate = False

    def __init__(
        self,
        store: Any,
        communicator: Communicator,
        p2p_comm: Communicator,
        other_backends: OtherBackends | None = None,
    ) -> None:
        # the constructor with a store creates an object whose methods cannot be overridden
        dist.ProcessGroup.__init__(self, communicator.rank, communicator.nranks)
        self._store = store
        self._group_name = self._group_desc = ""
        self.communicator = communicator
        self._other_backends = other_backends
        self._access = core_access(communicator)
        self._work_queue = WorkQueue(
            f"{NAME}-torch-{communicator.rank}",
            self._access.set_background,
            self._access.wait_inside,
        )
        self._matcher = TagMatcher(p2p_comm)
        self._futures = FutureCompletion(f"{NAME}-torch-mail-{communicator.rank}", self._matcher)
        self._streams: GroupStreams | None = None
        self._batch: list[Work] | None = None
        self._on_one_host = self._access.on_one_host
        self._sequence = 0
        self._splits = 0
        self._barriers = 0
        self._aborted = False
        # a group that is collected without destroy_process_group leaves, so that its peers notice
        self._leave = weakref.finalize(
            self,
            _leave_later,
            self._work_queue,
            communicator,
            self._matcher,
            self._futures,
            other_backends,
        )
        self._leave.atexit = False

    # ---- names: the base class keeps its own in backends, of which this group has none

    def name(self) -> str:
        return NAME

    getBackendName = _get_backend_name = name  # noqa: N815  (the trampoline asks under C++'s names)

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, text: str) -> None:
        self._group_desc = text

    @property
    def group_name(self) -> str:
        return self._group_name

    @property
    def group_desc(self) -> str:
        return self._group_desc

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_desc

    def get_group_store(self) -> Any:
        return self._store

    @property
    def options(self) -> Any:
        """Options that callers copy to ``split_group`` and read the timeout from."""
        return types.SimpleNamespace(_timeout=datetime.timedelta(seconds=self._matcher.timeout))

    # ---- devices

    @property
    def _device_types(self) -> list[Any]:
        others = self._other_backends.devices if self._other_backends else {}
        return [torch.device(d) for d in dict.fromkeys((*DEVICES, *others))]

    def _get_backend(self, device: Any) -> Any:
        """Return the backend of a device: this group, or another library's backend."""
        kind = torch.device(device).type
        if self._other_backends is not None and kind in self._other_backends.devices:
            return self._other_backends.group._get_backend(torch.device(device))
        if kind not in DEVICES:
            raise RuntimeError(f"no backend for device type {kind}")
        return self

    def other_group_for(self, arguments: Any) -> Any:
        """Return the inner PyTorch group that serves these arguments, or None for this group."""
        if self._other_backends is None:
            return None
        tensor = first_tensor(arguments)
        return (
            self._other_backends.group
            if tensor is not None and tensor.device.type in self._other_backends.devices
            else None
        )

    def eager_connect_single_device(self, device: Any) -> None:
        """Set up the GPU side now, on all ranks (``init_process_group(device_id=...)``)."""
        self.bound_device_id = device
        x = torch.zeros(1, device=device)
        self._streams_of(device).run(
            "connect", [], [x], lambda: self.communicator.all_reduce(x), asynchronous=False
        )

    def perform_nocolor_split(self, device: Any) -> None:
        """Do nothing: a new group's ranks meet through the store, without the other ranks."""

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    def _backend_id(self, kind: Any) -> int:
        return id(self)

    def _has_hooks(self) -> bool:
        return False

    def _enable_collectives_timing(self) -> None:
        """Do nothing: collectives are not timed."""

    def _streams_of(self, device: Any) -> GroupStreams:
        if self._streams is None:
            ordinal = torch.cuda.current_device() if device.index is None else device.index
            self._streams = GroupStreams(self.communicator, torch.device(device.type, ordinal))
        elif device.index not in (None, self._streams.device.index):
            with as_backend_errors():
                raise InvalidUsage(
                    f"the tensor is on {device}, but this group uses {self._streams.device}; "
                    "a group uses one GPU per rank"
                )
        return self._streams

    # ---- running

    def _start(
        self,
        name: str,
        tensors: Sequence[Any],
        staged: Sequence[Staged],
        action: Callable[[], Any],
        opts: Any,
        value: Callable[[], Sequence[Any]] | None = None,
        inputs: Sequence[Any] | None = None,
    ) -> Work:
        # a generator expression costs as much as a small operation
        if not all([place.temporary is None for place in staged]):  # noqa: C419
            with as_backend_errors():
                for tensor in tensors:
                    check_result(tensor, name)
            action = with_loads(staged, action)
        self._sequence += 1
        on_gpu = bool(staged) and staged[0].device.type != "cpu"
        if on_gpu and value is not None:
            tensors = value()
        start = self._on_gpu_stream if on_gpu else self._on_cpu
        if profiling():
            work = profiled(
                f"{NAME}:{name}",
                lambda: start(name, tensors, staged, action, opts),
                on_gpu,
                inputs if inputs is not None else staged[0].tensors if staged else tensors,
            )
        else:
            work = start(name, tensors, staged, action, opts)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _on_gpu_stream(
        self,
        name: str,
        tensors: Sequence[Any],
        staged: Sequence[Staged],
        action: Callable[[], Any],
        opts: Any,
    ) -> Work:
        # a generator: only asynchronous operations read it
        memory = (t for place in staged for t in place.memory)
        return self._streams_of(staged[0].device).run(
            name, tensors, memory, action, asynchronous=opts.asyncOp
        )

    def _on_cpu(
        self,
        name: str,
        tensors: Sequence[Any],
        staged: Sequence[Staged],
        action: Callable[[], Any],
        opts: Any,
    ) -> Work:
        return self._on_work_queue(
            name, tensors, action, seconds(opts.timeout), opts.asyncOp or self._batch is not None
        )

    def _on_work_queue(
        self,
        name: str,
        tensors: Sequence[Any],
        action: Callable[[], Any],
        limit: float | None,
        asynchronous: bool,
    ) -> Work:
        if limit is not None:
            action = self._limited(limit, action)
        if asynchronous:
            return self._work_queue.submit(Work(name, tensors), action)
        self._work_queue.run(name, action)
        return FinishedWork(name, tensors)

    def _limited(self, limit: float, action: Callable[[], Any]) -> Callable[[], None]:
        """Wrap ``action`` with a deadline of its own, in seconds."""

        def run() -> None:
            self._access.set_timeout(limit)
            try:
                action()
            except CollectiveTimeout as error:  # watchdogs look for the words of Gloo
                error.message = f"Timed out waiting {limit * 1e3:.0f}ms: {error.message}"
                error.args = (error.message,)
                raise
            finally:
                # the application may have changed the deadline while the action ran
                self._access.set_timeout(self._matcher.timeout)

        return run

    @short_form(c10d.BarrierOptions, "timeout", lead=0)
    @shown_as(f"{NAME}:barrier")
    def barrier(self, opts: Any = _BARRIER) -> Work:
        device = opts.device
        if (
            self._other_backends is not None
            and device is not None
            and device.type in self._other_backends.devices
        ):
            other: Work = self._other_backends.group.barrier(opts)
            return other
        self._sequence += 1
        streams = (
            self._streams_of(device)
            if device is not None and device.type == "cuda"
            else self._streams
        )
        drain = streams.record_drain_point() if streams is not None else None

        def action() -> None:
            if drain is not None:
                drain()
            try:
                self.communicator.barrier()
            finally:
                # raises the faults of kernels, also the reason why other ranks have left
                if streams is not None:
                    streams.check("barrier")

        return self._on_work_queue("barrier", [], action, seconds(opts.timeout), opts.asyncOp)

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks; raise an error that names the missing ranks and where they are.

        A timeout of 0 returns the state at once, as on Gloo.
        """
        limit = self._matcher.timeout if timeout is None else timeout.total_seconds()
        self._barriers += 1
        with as_backend_errors():
            monitored.barrier(self._matcher, self._barriers, limit, wait_all_ranks)

    # ---- sequence numbers, timeouts, other groups

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that this rank has called."""
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: numbers start at 0 on all ranks."""

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the deadline of later operations, including those of other backends.

        The GPU deadline is fixed at the group's first use of a GPU.
        """
        # first: operations with their own deadline restore this value (``_limited``)
        self._matcher.set_timeout(timeout.total_seconds())
        self._access.set_timeout(timeout.total_seconds())
        if self._other_backends is not None:
            self._other_backends.group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: datetime.timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroupMiraccl | None:
        """Create a group of some of this group's ranks; collective over all of them.

        Each rank passes the ranks of its own new group, in their new order.

        Returns:
            The new group, or None on a rank that is not in ``ranks``.
        """
        number = self.count_split()
        member = self.rank() in ranks
        with as_backend_errors():
            color, key = (min(ranks), list(ranks).index(self.rank())) if member else (None, 0)
            part, p2p_comm = (
                self.communicator.split(color, key),
                self._matcher.comm.split(color, key),
            )
        if part is None or p2p_comm is None:
            return None
        name = group_name or self.name_of_split(number, ranks)
        store = dist.PrefixStore(f"{name}/", self._store)
        place = dist.PrefixStore(f"{number}-{min(ranks)}/{NAME}/elsewhere/", store)
        try:
            other_backends = self._split_other_backends(
                place, ranks, timeout, opts, name, device_types
            )
        except BaseException:
            p2p_comm.finalize()
            part.finalize()
            raise
        group = ProcessGroupMiraccl(store, part, p2p_comm, other_backends)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self._group_desc}:split:{number}")
        if timeout is not None:
            group.set_timeout(timeout)
        return group

    def _split_other_backends(
        self,
        store: Any,
        ranks: Sequence[int],
        timeout: datetime.timedelta | None,
        opts: Any,
        name: str,
        devices: Any,
    ) -> OtherBackends | None:
        """Create the other libraries' backends for a subset of the ranks.

        ``opts`` may be a copy of this group's own options, which do not apply to them.
        """
        if self._other_backends is None:
            return None
        limit = self.options._timeout if timeout is None else timeout
        given = None if isinstance(opts, types.SimpleNamespace) else opts
        with as_backend_errors():
            return self._other_backends.split(
                store,
                list(ranks),
                self.rank(),
                timeout=limit,
                options=given,
                name=name,
                devices=devices,
            )

    def count_split(self) -> int:
        """Return the number of the split that starts now, equal on all ranks."""
        self._splits += 1
        return self._splits

    def name_of_split(self, number: int, ranks: Sequence[int]) -> str:
        """Return the group name under which the ranks of a split meet."""
        return f"{self._group_name}:split{number}:{min(ranks)}"

    def comm_split_count(self) -> int:
        return self._splits

    # ---- life

    def _wait_for_pending_works(self) -> None:
        self._work_queue.run("wait_for_pending_works", no_action)

    def shutdown(self) -> None:
        """Finish pending work and leave (``destroy_process_group``)."""
        self._leave.detach()
        if not self._work_queue.close(CLOSE_WAIT_S):
            self.communicator.abort(
                "the process group was destroyed while an operation was pending"
            )
            self._work_queue.close(CLOSE_WAIT_S)
        self._matcher.close()
        self._futures.close(CLOSE_WAIT_S)
        try:
            self.communicator.finalize()
        finally:
            if self._other_backends is not None and not self._aborted:
                self._other_backends.close()

    def abort(self) -> None:
        """Abort the group on all ranks."""
        self._aborted = True
        for comm in (self.communicator, self._matcher.comm):
            comm.abort("the process group was aborted")
        if self._other_backends is not None:
            self._other_backends.abort()
        self.shutdown()


def _leave_later(
    queue: WorkQueue,
    communicator: Communicator,
    matcher: TagMatcher,
    futures: FutureCompletion,
    other_backends: OtherBackends | None,
) -> None:
    """Leave in the background: the garbage collector may run inside any call of this library."""

    def leave() -> None:
        if not queue.close(CLOSE_WAIT_S):
            communicator.abort("the process group was dropped while an operation was pending")
            queue.close(CLOSE_WAIT_S)
        matcher.close()
        futures.close(CLOSE_WAIT_S)
        communicator.finalize()
        if other_backends is not None:
            other_backends.close()

    clock.thread(leave, name=f"{NAME}-torch-leave").start()
