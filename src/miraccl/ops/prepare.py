"""Operations on CPU memory that are ready to run, made from checked arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miraccl.executor.cpu.context import call_kernel, scale_kernel
from miraccl.executor.cpu.lower import BlockCounts
from miraccl.executor.cpu.sizes import UNKNOWN_BYTES, size_class
from miraccl.native.hashing import mix
from miraccl.ops.arguments import resolve_operator
from miraccl.ops.check import CheckedCall, check
from miraccl.ops.host_arrays import Array, HostMemory, HostReader
from miraccl.ops.request import PlanRequest
from miraccl.ops.spec import OpSpec
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import Collective, DType, RedOp

#: Rooted data movement: its plans are the same in place or not.
_ONE_FORM = (Collective.GATHER, Collective.SCATTER)


@dataclass(kw_only=True)
class PreparedOp:
    """An operation with its buffers, ready to run.

    Attributes:
        request: What the plan depends on.
        source, target: Addresses of input and output.
        result: Return value of the call.
        counts: Counts of an uneven operation.
        prologue: Called just before the operation runs.
        keep_alive: Objects that own the buffers.
        cacheable: True if the fast path may run equal calls with the same plan.
        plan_arg: Operator and root, as the fast path encodes them in its key.
    """

    request: PlanRequest
    source: int
    target: int
    result: Any
    counts: BlockCounts | None = None
    prologue: Callable[[], object] | None = None
    keep_alive: list[Any] = field(default_factory=list)
    cacheable: bool = True
    plan_arg: int = 0


def prepare(spec: OpSpec, reader: HostReader, args: Sequence[Any]) -> PreparedOp:
    """Check the arguments of a collective, in the order of ``spec.arguments``, and prepare it.

    Raises:
        InvalidUsage: An argument is not allowed.
        SystemFailure: No memory for the result.
    """
    call = check(spec, reader, args)
    op, scalar = RedOp.SUM, 1.0
    if spec.op_at:
        op, scalar = resolve_operator(call.operator, call.source.dtype, spec.name)
    prepared = _prepared(call, op, reader.rank, reader.nranks)
    if op is RedOp.PREMUL_SUM:
        _premultiply(prepared, call, scalar, reader.rank)
    return prepared


def barrier() -> PreparedOp:
    """Prepare a barrier."""
    request = PlanRequest(
        collective=Collective.BARRIER,
        dtype=DType.UINT8,
        op=RedOp.SUM,
        root=0,
        in_counts=(),
        out_counts=(),
        block_bytes=0,
        count=0,
    )
    address = int(_NOTHING.ctypes.data)
    return PreparedOp(request=request, source=address, target=address, result=None)


def _prepared(call: CheckedCall[HostMemory], op: RedOp, rank: int, nranks: int) -> PreparedOp:
    spec, source, target, uneven = call.spec, call.source, call.target, call.spec.uneven
    absent = (0,) * nranks  # blocks of a buffer that this rank does not have
    in_counts = call.in_counts(rank, nranks) or absent
    out_counts = call.out_counts(rank, nranks) or absent
    common = call.common_counts(nranks)
    largest = max(common, default=0)
    # All ranks must choose alike: if each knows only its own counts, one plan serves every size.
    nbytes = largest * source.dtype.itemsize if common else UNKNOWN_BYTES
    request = PlanRequest(
        collective=spec.collective,
        dtype=source.dtype,
        op=op,
        root=call.root,
        in_counts=() if uneven else tuple(in_counts),
        out_counts=() if uneven else tuple(out_counts),
        block_bytes=size_class(nbytes) if uneven else nbytes,
        count=0 if uneven else largest,
        in_place=call.in_place and spec.collective not in _ONE_FORM,
        uneven=uneven,
    )
    plan_arg = int(op) if spec.op_at else call.root
    if spec.op_at and spec.root_at:
        plan_arg |= call.root << 3
    return PreparedOp(
        request=request,
        source=source.address,
        target=target.address,
        result=call.result,
        counts=_counts(in_counts, out_counts, common) if uneven else None,
        keep_alive=[source, target],
        plan_arg=plan_arg,
    )


def _counts(
    in_counts: Sequence[int], out_counts: Sequence[int], common: Sequence[int]
) -> BlockCounts:
    return BlockCounts(
        in_counts,
        out_counts,
        agreed=functools.reduce(mix, common, 0),
        reported=sum(common or in_counts),
    )


def _premultiply(
    prepared: PreparedOp, call: CheckedCall[HostMemory], scalar: float, rank: int
) -> None:
    """Scale the input of a pre-multiplied sum just before it runs, in place or into a temporary."""
    memory = call.source
    factor = np.array([scalar], np.float64 if memory.dtype.is_float else NUMPY_DTYPE[memory.dtype])
    # The input may be overwritten if it is the result; on a non-root rank it has to stay.
    writes_input = call.spec.defaults_to_x and call.in_place
    writes_input = writes_input and (not call.spec.root_at or rank == call.root)
    target = memory.array if writes_input else np.empty_like(memory.array)
    source, count, kernel = memory.address, memory.count, scale_kernel(memory.dtype, False)
    destination = int(target.ctypes.data)
    prepared.prologue = lambda: call_kernel(
        kernel, destination, source, int(factor.ctypes.data), count
    )
    prepared.source = destination
    prepared.keep_alive += [factor, target]
    prepared.cacheable = False


# ---- result arrays for the fast path; None if the arguments need the slow path


def new_stacked(x: Any, nranks: int) -> Array | None:
    if type(x) is not np.ndarray or not x.ndim:
        return None
    try:
        return np.empty((nranks * x.shape[0], *x.shape[1:]), x.dtype)
    except (ValueError, MemoryError):
        return None


def new_share(x: Any, nranks: int) -> Array | None:
    if type(x) is not np.ndarray or not x.ndim or x.shape[0] % nranks:
        return None
    try:
        return np.empty((x.shape[0] // nranks, *x.shape[1:]), x.dtype)
    except MemoryError:
        return None


def new_like(x: Any) -> Array | None:
    try:
        return np.empty(x.shape, x.dtype) if type(x) is np.ndarray else None
    except MemoryError:
        return None


def new_flat(x: Any, counts: Any) -> Array | None:
    if type(x) is not np.ndarray or type(counts) is not list:
        return None
    try:
        return np.empty(sum(counts), x.dtype)
    except (TypeError, ValueError, MemoryError):
        return None


_NOTHING = np.empty(0, np.uint8)
