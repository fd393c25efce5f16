"""miraccl as an engine of the measurement, through the public functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import miraccl
from miraccl.tools.perf.data import Array, numpy_dtype, premul_scalar
from miraccl.tools.perf.engine import BoundOperation, place_buffers
from miraccl.tools.perf.spec import Case
from miraccl.types import PreMulSum

_REDOPS = {"none": "SUM", "sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX", "avg": "AVG"}
_ONE_FORM = (
    "broadcast",
    "all_to_all",
    "sendrecv",
    "barrier",
)  # broadcast: in place only, the others: out of place only


class MiracclEngine:
    """miraccl on one rank.

    ``window`` takes buffers from ``comm.empty``, ``persistent`` uses the ``*_init`` operations.
    """

    name = "miraccl"

    def __init__(self, comm: Any, *, window: bool = False, persistent: bool = False) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.nranks: int = comm.nranks
        self._window = window
        self._persistent = persistent

    def barrier(self) -> None:
        self.comm.barrier()

    def reduce_list(self, values: list[float], *, how: str) -> list[float]:
        """Reduce through all_gather, because the algorithm under test may support no reduction."""
        array = self.comm.all_gather(np.array(values, np.float64)).reshape(self.nranks, len(values))
        return [float(v) for v in (array.max(axis=0) if how == "max" else array.sum(axis=0))]

    def bind(self, case: Case, in_place: bool) -> BoundOperation | None:
        if in_place is not (case.op == "broadcast") and case.op in _ONE_FORM:
            return None
        x, y = place_buffers(
            case, self.rank, in_place, lambda count: self._allocate(count, numpy_dtype(case.dtype))
        )
        call = self._call(case, x, y)
        if case.op in ("sendrecv", "barrier"):  # without a plan
            return BoundOperation(call=call, input=x, output=y)
        return BoundOperation(call=call, input=x, output=y, plan_names=self._plan_names)

    def close(self) -> None:
        self.comm.finalize()

    def _allocate(self, count: int, dtype: np.dtype[Any]) -> Array:
        if not self._window:
            return np.zeros(count, dtype)
        array: Array = self.comm.empty(count, dtype)
        array[:] = np.zeros(1, dtype)
        return array

    def _plan_names(self) -> tuple[str, str, int]:
        plan = self.comm.last_plan
        return (plan.algo, plan.proto, plan.channels) if plan is not None else ("", "", 0)

    def _call(self, case: Case, x: Array, y: Array) -> Callable[[], Any]:
        """Return the call in the form in which a user writes it."""
        # Direct calls: collecting arguments in a tuple and a dictionary costs 0.1 us per call.
        if case.op == "barrier":
            barrier = self.comm.barrier
            return lambda: barrier()
        args, options = self._arguments(case, x, y)
        if self._persistent:
            operation: Callable[[], Any] = getattr(self.comm, case.op + "_init")(*args, **options)
            return operation
        function, op, root = getattr(self.comm, case.op), options.get("op"), case.root
        if case.op == "all_reduce":
            if x is y:
                return (lambda: function(x)) if op is miraccl.SUM else lambda: function(x, op=op)
            return (
                (lambda: function(x, out=y))
                if op is miraccl.SUM
                else lambda: function(x, out=y, op=op)
            )
        if case.op == "reduce_scatter":
            return (
                (lambda: function(x, out=y))
                if op is miraccl.SUM
                else lambda: function(x, out=y, op=op)
            )
        if case.op in ("all_gather", "all_to_all"):
            return lambda: function(x, out=y)
        if case.op == "broadcast":
            return lambda: function(y, root=root)
        return lambda: function(*args, **options)

    def _arguments(self, case: Case, x: Array, y: Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        op, at_root = case.op, self.rank == case.root
        if op == "sendrecv":
            return (x,), {
                "dst": (self.rank + 1) % self.nranks,
                "out": y,
                "src": (self.rank - 1) % self.nranks,
            }
        if op == "broadcast":
            return (y,), {"root": case.root}
        has_output = (at_root or op not in ("reduce", "gather")) and not (
            op in ("all_reduce", "reduce") and x is y
        )
        options: dict[str, Any] = {"out": y} if has_output else {}
        if case.redop != "none":
            options["op"] = (
                PreMulSum(premul_scalar(self.rank))
                if case.redop == "premul_sum"
                else getattr(miraccl, _REDOPS[case.redop])
            )
        if case.root >= 0:
            options["root"] = case.root
        return (None if op == "scatter" and not at_root else x,), options
