"""Conversion of a call's arguments to an operation that is ready to run.

All argument errors are raised here, before any data is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miraccl.errors import InvalidUsage, SystemFailure
from miraccl.executor.cpu.context import call_kernel, scale_kernel
from miraccl.executor.cpu.lower import BlockCounts
from miraccl.executor.cpu.sizes import UNKNOWN_BYTES, size_class
from miraccl.native.hashing import mix
from miraccl.ops.arguments import (
    Array,
    HostMemory,
    counts_of,
    expect_count,
    peer_rank,
    resolve_operator,
    same_dtype,
    view,
)
from miraccl.planning.planner import PlanRequest
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import Collective, RedOp


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


@dataclass(frozen=True)
class CallSite:
    """Caller of an operation: rank, number of ranks, and the operation's name for errors."""

    rank: int
    nranks: int
    op: str

    def root(self, value: Any) -> int:
        return peer_rank(value, "root", self.nranks, self.op)


def check_overlap(a: HostMemory, b: HostMemory, allowed: int | None, site: CallSite) -> bool:
    """Return True if ``b`` starts ``allowed`` bytes into ``a``, the in-place form of the operation.

    Raises:
        InvalidUsage: The buffers overlap otherwise.
    """
    first, second = a.address, b.address
    if a.nbytes == 0 or b.nbytes == 0 or first >= second + b.nbytes or second >= first + a.nbytes:
        return False
    if allowed is not None and second - first == allowed:
        return True
    raise InvalidUsage(f"{site.op}: input and output overlap in another way than its in-place form")


def _output(out: Any, like: HostMemory, shape: tuple[int, ...], site: CallSite) -> HostMemory:
    if out is None:
        array = _new(shape, like.array.dtype, site)
        return HostMemory(array, like.dtype, array)
    memory = view(out, "out", writes=True, where=site.op)
    same_dtype(like, memory, "input and out", site.op)
    return memory


def _new(shape: tuple[int, ...], dtype: Any, site: CallSite) -> Array:
    try:
        return np.empty(shape, dtype)
    except ValueError as error:
        raise InvalidUsage(
            f"{site.op}: cannot allocate a result of shape {shape}: {error}"
        ) from error
    except MemoryError as error:
        raise SystemFailure(
            f"{site.op}: cannot allocate a result of shape {shape}: out of memory", rank=site.rank
        ) from error


def _premultiply(
    call: PreparedOp, memory: HostMemory, op: RedOp, scalar: float, writes_input: bool
) -> PreparedOp:
    """Scale the input of a pre-multiplied sum just before it runs, in place or into a temporary."""
    if op is not RedOp.PREMUL_SUM:
        return call
    factor = np.array([scalar], np.float64 if memory.dtype.is_float else NUMPY_DTYPE[memory.dtype])
    target = memory.array if writes_input else np.empty_like(memory.array)
    source, count, kernel = memory.address, memory.count, scale_kernel(memory.dtype, False)
    destination = int(target.__array_interface__["data"][0])
    call.prologue = lambda: call_kernel(kernel, destination, source, int(factor.ctypes.data), count)
    call.source = destination
    call.keep_alive += [factor, target]
    call.cacheable = False
    return call


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


def _uneven_error(memory: HostMemory, site: CallSite, other: str) -> InvalidUsage:
    text = f"{site.op}: x has {memory.count} elements, not divisible by {site.nranks} ranks"
    return InvalidUsage(text, hint=f"use {other}")


# ---- one function per collective: (site, arguments) -> PreparedOp


def all_reduce(site: CallSite, x: Any, out: Any, op: Any) -> PreparedOp:
    source = view(x, "x", writes=out is None, where=site.op)
    kind, scalar = resolve_operator(op, source.dtype, site.op)
    target = source if out is None else _output(out, source, source.array.shape, site)
    expect_count(target, source.count, "out", "as many as x", site.op)
    in_place = out is None or check_overlap(source, target, 0, site)
    call = _prepared(
        Collective.ALL_REDUCE,
        source,
        target,
        [source.count],
        [source.count],
        kind,
        in_place=in_place,
    )
    return _premultiply(call, source, kind, scalar, in_place)


def reduce(site: CallSite, x: Any, root: Any, out: Any, op: Any) -> PreparedOp:
    root = site.root(root)
    source = view(x, "x", writes=out is None and site.rank == root, where=site.op)
    kind, scalar = resolve_operator(op, source.dtype, site.op)
    target = (
        source
        if out is None or site.rank != root
        else _output(out, source, source.array.shape, site)
    )
    expect_count(target, source.count, "out", "as many as x", site.op)
    in_place = target is source or check_overlap(source, target, 0, site)
    arg = root << 3 | kind  # as the fast path encodes it
    call = _prepared(
        Collective.REDUCE,
        source,
        target,
        [source.count],
        [source.count],
        kind,
        root,
        in_place=in_place,
        plan_arg=arg,
    )
    if site.rank != root:
        call.result = x  # a schedule has no output on the other ranks
    return _premultiply(call, source, kind, scalar, in_place and site.rank == root)


def broadcast(site: CallSite, x: Any, root: Any) -> PreparedOp:
    root = site.root(root)
    memory = view(x, "x", writes=site.rank != root, where=site.op)
    return _prepared(
        Collective.BROADCAST,
        memory,
        memory,
        [memory.count],
        [memory.count],
        RedOp.SUM,
        root,
        in_place=True,
        plan_arg=root,
    )


def all_gather(site: CallSite, x: Any, out: Any) -> PreparedOp:
    source = view(x, "x", writes=False, where=site.op)
    target = _output(out, source, _stacked_shape(source.array, site.nranks), site)
    expect_count(target, source.count * site.nranks, "out", f"{site.nranks} times x", site.op)
    in_place = check_overlap(target, source, site.rank * source.nbytes, site)
    return _prepared(
        Collective.ALL_GATHER,
        source,
        target,
        [source.count],
        [source.count] * site.nranks,
        in_place=in_place,
    )


def all_gather_v(site: CallSite, x: Any, counts: Any, out: Any) -> PreparedOp:
    sizes = counts_of(counts, "counts", site.nranks, site.op)
    source = view(x, "x", writes=False, where=site.op)
    expect_count(source, sizes[site.rank], "x", f"counts[{site.rank}]", site.op)
    target = _output(out, source, (sum(sizes),), site)
    expect_count(target, sum(sizes), "out", "the sum of counts", site.op)
    in_place = check_overlap(target, source, sum(sizes[: site.rank]) * source.dtype.itemsize, site)
    return _prepared(
        Collective.ALL_GATHER,
        source,
        target,
        [source.count],
        sizes,
        agreed=sizes,
        uneven=True,
        in_place=in_place,
    )


def reduce_scatter(site: CallSite, x: Any, out: Any, op: Any) -> PreparedOp:
    source = view(x, "x", writes=False, where=site.op)
    kind, scalar = resolve_operator(op, source.dtype, site.op)
    if source.count % site.nranks:
        raise _uneven_error(source, site, "reduce_scatter_v")
    count = source.count // site.nranks
    target = _output(out, source, _share_shape(source.array, site.nranks), site)
    expect_count(target, count, "out", f"x shared by {site.nranks} ranks", site.op)
    in_place = check_overlap(source, target, site.rank * target.nbytes, site)
    call = _prepared(
        Collective.REDUCE_SCATTER,
        source,
        target,
        [count] * site.nranks,
        [count],
        kind,
        in_place=in_place,
    )
    return _premultiply(call, source, kind, scalar, False)


def reduce_scatter_v(site: CallSite, x: Any, counts: Any, out: Any, op: Any) -> PreparedOp:
    sizes = counts_of(counts, "counts", site.nranks, site.op)
    source = view(x, "x", writes=False, where=site.op)
    kind, scalar = resolve_operator(op, source.dtype, site.op)
    expect_count(source, sum(sizes), "x", "the sum of counts", site.op)
    target = _output(out, source, (sizes[site.rank],), site)
    expect_count(target, sizes[site.rank], "out", f"counts[{site.rank}]", site.op)
    in_place = check_overlap(source, target, sum(sizes[: site.rank]) * source.dtype.itemsize, site)
    call = _prepared(
        Collective.REDUCE_SCATTER,
        source,
        target,
        sizes,
        [target.count],
        kind,
        agreed=sizes,
        uneven=True,
        in_place=in_place,
    )
    return _premultiply(call, source, kind, scalar, False)


def all_to_all(site: CallSite, x: Any, out: Any) -> PreparedOp:
    source = view(x, "x", writes=False, where=site.op)
    if source.count % site.nranks:
        raise _uneven_error(source, site, "all_to_all_v")
    target = _output(out, source, source.array.shape, site)
    expect_count(target, source.count, "out", "as many as x", site.op)
    check_overlap(source, target, None, site)
    count = source.count // site.nranks
    return _prepared(
        Collective.ALL_TO_ALL, source, target, [count] * site.nranks, [count] * site.nranks
    )


def all_to_all_v(
    site: CallSite, x: Any, send_counts: Any, recv_counts: Any, out: Any
) -> PreparedOp:
    sends = counts_of(send_counts, "send_counts", site.nranks, site.op)
    receives = counts_of(recv_counts, "recv_counts", site.nranks, site.op)
    if sends[site.rank] != receives[site.rank]:
        mine = (
            f"send_counts[{site.rank}] is {sends[site.rank]}, "
            f"recv_counts[{site.rank}] is {receives[site.rank]}"
        )
        raise InvalidUsage(f"{site.op}: counts of a rank to itself differ: {mine}")
    source = view(x, "x", writes=False, where=site.op)
    expect_count(source, sum(sends), "x", "the sum of send_counts", site.op)
    target = _output(out, source, (sum(receives),), site)
    expect_count(target, sum(receives), "out", "the sum of recv_counts", site.op)
    check_overlap(source, target, None, site)
    return _prepared(Collective.ALL_TO_ALL, source, target, sends, receives, agreed=[], uneven=True)


def gather(site: CallSite, x: Any, root: Any, out: Any, counts: Any = None) -> PreparedOp:
    root = site.root(root)
    source = view(x, "x", writes=False, where=site.op)
    sizes = (
        [source.count] * site.nranks
        if counts is None
        else counts_of(counts, "counts", site.nranks, site.op)
    )
    expect_count(source, sizes[site.rank], "x", f"counts[{site.rank}]", site.op)
    shape = _stacked_shape(source.array, site.nranks) if counts is None else (sum(sizes),)
    if site.rank == root:
        target = _output(out, source, shape, site)
        expect_count(target, sum(sizes), "out", "all ranks' elements", site.op)
        check_overlap(target, source, sum(sizes[: site.rank]) * source.dtype.itemsize, site)
    else:
        target = source
    mine = sizes if site.rank == root else [0] * site.nranks
    call = _prepared(
        Collective.GATHER,
        source,
        target,
        [source.count],
        mine,
        root=root,
        agreed=sizes,
        uneven=counts is not None,
        plan_arg=root,
    )
    if site.rank != root:
        call.result = None
    return call


def scatter(site: CallSite, x: Any, root: Any, out: Any, counts: Any = None) -> PreparedOp:
    """Prepare a scatter. ``x`` is used on the root only; the other ranks pass ``out``."""
    root = site.root(root)
    if site.rank == root:
        source = view(x, "x", writes=False, where=site.op)
        if counts is None and source.count % site.nranks:
            raise _uneven_error(source, site, "scatter_v")
        sizes = (
            [source.count // site.nranks] * site.nranks
            if counts is None
            else counts_of(counts, "counts", site.nranks, site.op)
        )
        expect_count(source, sum(sizes), "x", "the sum of counts", site.op)
        shape = _share_shape(source.array, site.nranks) if counts is None else (sizes[site.rank],)
        target = _output(out, source, shape, site)
        expect_count(target, sizes[site.rank], "out", "the rank's share of x", site.op)
        check_overlap(source, target, sum(sizes[: site.rank]) * source.dtype.itemsize, site)
    else:
        if out is None:
            raise InvalidUsage(
                f"{site.op}: non-root ranks must pass out, the array for their share"
            )
        target = view(out, "out", writes=True, where=site.op)
        sizes = (
            [target.count] * site.nranks
            if counts is None
            else counts_of(counts, "counts", site.nranks, site.op)
        )
        expect_count(target, sizes[site.rank], "out", f"counts[{site.rank}]", site.op)
        source = target
    blocks = sizes if site.rank == root else [0] * site.nranks
    return _prepared(
        Collective.SCATTER,
        source,
        target,
        blocks,
        [target.count],
        root=root,
        agreed=sizes,
        uneven=counts is not None,
        plan_arg=root,
    )


def barrier(site: CallSite) -> PreparedOp:
    nothing = HostMemory(_NOTHING, _UINT8, None)
    return _prepared(Collective.BARRIER, nothing, nothing, [], [])


# ---- building


def _prepared(
    collective: Collective,
    source: HostMemory,
    target: HostMemory,
    in_counts: Sequence[int],
    out_counts: Sequence[int],
    op: RedOp = RedOp.SUM,
    root: int = 0,
    *,
    agreed: Sequence[int] | None = None,
    uneven: bool = False,
    in_place: bool = False,
    plan_arg: int | None = None,
) -> PreparedOp:
    """Build the ``PreparedOp``.

    Args:
        agreed: Block counts that all ranks know: None if all blocks are equal, empty if each rank
            knows only its own.
    """
    largest = max([*in_counts, *out_counts] if agreed is None else agreed, default=0)
    # All ranks must choose alike: if each knows only its own counts, one plan serves every size.
    nbytes = UNKNOWN_BYTES if agreed == [] else largest * source.dtype.itemsize
    request = PlanRequest(
        collective=collective,
        dtype=source.dtype,
        op=op,
        root=root,
        in_counts=() if uneven else tuple(in_counts),
        out_counts=() if uneven else tuple(out_counts),
        block_bytes=size_class(nbytes) if uneven else nbytes,
        count=0 if uneven else largest,
        in_place=in_place,
        uneven=uneven,
    )
    return PreparedOp(
        request=request,
        source=source.address,
        target=target.address,
        result=target.given,
        counts=_counts(in_counts, out_counts, agreed or ()) if uneven else None,
        keep_alive=[source, target],
        plan_arg=int(op) if plan_arg is None else plan_arg,
    )


def _counts(
    in_counts: Sequence[int], out_counts: Sequence[int], agreed: Sequence[int]
) -> BlockCounts:
    return BlockCounts(
        in_counts,
        out_counts,
        agreed=functools.reduce(mix, agreed, 0),
        reported=sum(agreed or in_counts),
    )


def _stacked_shape(array: Array, nranks: int) -> tuple[int, ...]:
    """Shape of ``nranks`` arrays concatenated along the first axis."""
    return (nranks * array.shape[0], *array.shape[1:]) if array.ndim else (nranks,)


def _share_shape(array: Array, nranks: int) -> tuple[int, ...]:
    """Shape of one rank's share along the first axis; flat if that axis is not divisible."""
    if array.ndim and array.shape[0] % nranks == 0:
        return (array.shape[0] // nranks, *array.shape[1:])
    return (array.size // nranks,)


_NOTHING = np.empty(0, np.uint8)
_UINT8 = view(_NOTHING, "nothing", writes=False, where="barrier").dtype
