"""miraccl on GPU memory as a library of the measurement: calls on device arrays in a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import miraccl
from miraccl.tools.perf.data import numpy_dtype, premul_scalar
from miraccl.tools.perf.device_array import Arena, PerfDeviceArray, as_device_array
from miraccl.tools.perf.engine import place_buffers
from miraccl.tools.perf.spec import REDUCING, Case
from miraccl.types import PreMulSum

_REDOPS = {"none": "SUM", "sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX", "avg": "AVG"}
_ONE_FORM = (
    "broadcast",
    "all_to_all",
    "sendrecv",
)  # broadcast: in place only, the others: out of place only


@dataclass(frozen=True, kw_only=True)
class LaunchInfo:
    """Plan and launch of an operation.

    - ``blocks``, ``threads``: launch shape, 0 without a kernel.
    - ``unroll``: vectors a thread handles at a time.
    - ``reason``: explanation of the choice.
    """

    algo: str = ""
    proto: str = ""
    blocks: int = 0
    threads: int = 0
    unroll: int = 0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class BoundDeviceOperation:
    """An operation with its buffers; ``call`` enqueues it.

    - ``repeatable``: repeated calls give the same result.
    """

    call: Callable[[], Any]
    input: PerfDeviceArray
    output: PerfDeviceArray
    repeatable: bool
    launch_info: Callable[[], LaunchInfo] = LaunchInfo
    owner: Any = field(default=None, repr=False)


class DeviceLibrary(Protocol):
    """A library on one rank that works on the stream of the measurement."""

    name: str

    def bind(self, case: Case, in_place: bool) -> BoundDeviceOperation | None:
        """Allocate buffers and prepare; return None if the library does not have this form."""
        ...

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Capture a CUDA graph of the work that ``run`` enqueues; return a function that replays
        it.
        """
        ...

    def align(self) -> None:
        """Enqueue a small operation that ends on all ranks at nearly the same time."""
        ...

    def check(self) -> None:
        """Raise errors that occurred on the GPU."""
        ...

    def close(self) -> None: ...


def is_repeatable(case: Case, x: PerfDeviceArray, y: PerfDeviceArray) -> bool:
    """Return False for a reduction whose output overlaps its input."""
    end = y.address + y.nbytes
    overlap = x.nbytes > 0 and y.nbytes > 0 and x.address < end and y.address < x.address + x.nbytes
    return not (overlap and case.op in REDUCING)


class MiracclDevice:
    """miraccl on one GPU.

    ``comm`` is a communicator made by ``make_device_communicator``; with ``window`` buffers come
    from ``comm.empty``.
    """

    name = "miraccl"

    def __init__(
        self,
        comm: Any,
        stream: int,
        arena: Arena,
        capture: Callable[..., Any],
        *,
        window: bool = False,
    ) -> None:
        self.comm, self.rank, self.nranks = comm, comm.rank, comm.nranks
        self._stream, self._arena, self.capture = stream, arena, capture
        self._ordinal: int = comm.gpu.ordinal
        self._window = window
        self._keep_alive: list[Any] = []

    def bind(self, case: Case, in_place: bool) -> BoundDeviceOperation | None:
        if not hasattr(self.comm, case.op) or (
            in_place is not (case.op == "broadcast") and case.op in _ONE_FORM
        ):
            return None
        self._keep_alive = []
        x, y = place_buffers(
            case, self.rank, in_place, lambda count: self._allocate(count, case.dtype)
        )
        call = self._call(case, x, y)
        return BoundDeviceOperation(
            call=call,
            input=x,
            output=y,
            repeatable=is_repeatable(case, x, y),
            launch_info=self._launch_info,
            owner=tuple(self._keep_alive),
        )

    def align(self) -> None:
        self.comm.barrier(stream=self._stream)  # independent of the requested algorithm

    def check(self) -> None:
        self.comm.check()

    def close(self) -> None:
        """Do nothing: the creator of the communicator closes it."""

    def _allocate(self, count: int, name: str) -> PerfDeviceArray:
        if not self._window or not count:
            return self._arena.allocate(count, name)
        memory = self.comm.empty(count, numpy_dtype(name))
        self._keep_alive.append(memory)
        return as_device_array(memory, name, self._ordinal)

    def _launch_info(self) -> LaunchInfo:
        plan = self.comm.last_plan
        if plan is None or self.nranks == 1:
            return LaunchInfo()
        return LaunchInfo(
            algo=plan.algo,
            proto=plan.proto,
            blocks=getattr(plan, "blocks", 0),
            threads=getattr(plan, "threads", 0),
            unroll=getattr(plan, "unroll", 0),
            reason=getattr(plan, "reason", ""),
        )

    def _call(self, case: Case, x: PerfDeviceArray, y: PerfDeviceArray) -> Callable[[], Any]:
        """Return the call in the form in which a user writes it."""
        function, stream, op = getattr(self.comm, case.op), self._stream, self._operator(case)
        source, target = x.argument, y.argument
        same = x is y
        match case.op:
            case "all_reduce":
                return (
                    (lambda: function(source, op=op, stream=stream))
                    if same
                    else lambda: function(source, target, op, stream=stream)
                )
            case "reduce_scatter":
                return lambda: function(source, target, op, stream=stream)
            case "all_gather" | "all_to_all":
                return lambda: function(source, target, stream=stream)
            case "broadcast":
                return lambda: function(target, case.root, stream=stream)
            case "reduce":
                out = None if same or self.rank != case.root else target
                return lambda: function(source, case.root, out, op, stream=stream)
            case "gather":
                out = target if self.rank == case.root else None
                return lambda: function(source, root=case.root, out=out, stream=stream)
            case "scatter":
                given = source if self.rank == case.root else None
                return lambda: function(given, root=case.root, out=target, stream=stream)
        following, previous = (self.rank + 1) % self.nranks, (self.rank - 1) % self.nranks
        return lambda: function(source, out=target, dst=following, src=previous, stream=stream)

    def _operator(self, case: Case) -> Any:
        if case.redop == "premul_sum":
            return PreMulSum(premul_scalar(self.rank))
        return getattr(miraccl, _REDOPS[case.redop])
