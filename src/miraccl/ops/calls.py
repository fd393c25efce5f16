"""From the arguments of a call to something that can be run: checks, buffers, block sizes.

``Call`` is one operation ready to start.  Everything wrong with the arguments is found here, before anything is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miraccl.errors import InvalidUsage, SystemFailure
from miraccl.executor.cpu.context import call_kernel, scale_kernel
from miraccl.executor.cpu.lower import Counts
from miraccl.executor.cpu.sizes import UNKNOWN_BYTES, size_class
from miraccl.native.hashing import mix
from miraccl.ops.arguments import (
    Array,
    Memory,
    counts_of,
    expect_count,
    operator,
    peer_rank,
    same_dtype,
    view,
)
from miraccl.planning.planner import Request
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import Collective, RedOp


@dataclass(kw_only=True)
class Call:
    """An operation with its memory, and its counts if they are uneven. ``before`` runs just before it, ``keep`` is what must stay alive
    until it has run."""

    request: Request
    source: int
    target: int
    result: Any
    counts: Counts | None = None
    before: Callable[[], object] | None = None
    keep: list[Any] = field(default_factory=list)
    cacheable: bool = True
    plan_arg: int = 0


@dataclass(frozen=True)
class Place:
    """Who calls: rank, number of ranks, and the name of the call for error messages."""

    rank: int
    nranks: int
    where: str

    def root(self, value: Any) -> int:
        return peer_rank(value, "root", self.nranks, self.where)


def refuse_overlap(a: Memory, b: Memory, allowed: int | None, place: Place) -> bool:
    """Whether the two are "in place" (``b`` starts ``allowed`` bytes into ``a``); other overlaps are refused."""
    first, second = a.address, b.address
    if a.nbytes == 0 or b.nbytes == 0 or first >= second + b.nbytes or second >= first + a.nbytes:
        return False
    if allowed is not None and second - first == allowed:
        return True
    raise InvalidUsage(
        f"{place.where}: input and output overlap, but not as this operation's in-place form does"
    )


def _result(out: Any, like: Memory, shape: tuple[int, ...], place: Place) -> Memory:
    if out is None:
        array = _new(shape, like.array.dtype, place)
        return Memory(array, like.dtype, array)
    memory = view(out, "out", writes=True, where=place.where)
    same_dtype(like, memory, "input and out", place.where)
    return memory


def _new(shape: tuple[int, ...], dtype: Any, place: Place) -> Array:
    try:
        return np.empty(shape, dtype)
    except ValueError as error:
        raise InvalidUsage(f"{place.where}: there is no array of shape {shape}: {error}") from error
    except MemoryError as error:
        raise SystemFailure(
            f"{place.where}: no memory for a result of shape {shape}", rank=place.rank
        ) from error


def _premultiply(call: Call, memory: Memory, op: RedOp, scalar: float, writes_input: bool) -> Call:
    """For a pre-multiplied sum: scale the input where it lies (in place) or into a buffer of its own, just before the call."""
    if op is not RedOp.PREMUL_SUM:
        return call
    factor = np.array([scalar], np.float64 if memory.dtype.is_float else NUMPY_DTYPE[memory.dtype])
    target = memory.array if writes_input else np.empty_like(memory.array)
    source, count, kernel = memory.address, memory.count, scale_kernel(memory.dtype, False)
    destination = int(target.__array_interface__["data"][0])
    call.before = lambda: call_kernel(kernel, destination, source, int(factor.ctypes.data), count)
    call.source = destination
    call.keep += [factor, target]
    call.cacheable = False
    return call


# ---- results that the library makes, for the quick way; None where only the long way can tell


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


def _uneven_share(memory: Memory, place: Place, other: str) -> InvalidUsage:
    text = f"{place.where}: x has {memory.count} elements, which {place.nranks} ranks cannot share evenly"
    return InvalidUsage(text, hint=f"use {other}")


# ---- one function a collective: (place, arguments) -> Call


def all_reduce(place: Place, x: Any, out: Any, op: Any) -> Call:
    source = view(x, "x", writes=out is None, where=place.where)
    kind, scalar = operator(op, source.dtype, place.where)
    target = source if out is None else _result(out, source, source.array.shape, place)
    expect_count(target, source.count, "out", "as many as x", place.where)
    in_place = out is None or refuse_overlap(source, target, 0, place)
    call = _call(
        Collective.ALL_REDUCE,
        source,
        target,
        [source.count],
        [source.count],
        kind,
        in_place=in_place,
    )
    return _premultiply(call, source, kind, scalar, in_place)


def reduce(place: Place, x: Any, root: Any, out: Any, op: Any) -> Call:
    root = place.root(root)
    source = view(x, "x", writes=out is None and place.rank == root, where=place.where)
    kind, scalar = operator(op, source.dtype, place.where)
    target = (
        source
        if out is None or place.rank != root
        else _result(out, source, source.array.shape, place)
    )
    expect_count(target, source.count, "out", "as many as x", place.where)
    in_place = target is source or refuse_overlap(source, target, 0, place)
    arg = root << 3 | kind  # as the door's
    call = _call(
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
    if place.rank != root:
        call.result = x  # and a schedule has no output there
    return _premultiply(call, source, kind, scalar, in_place and place.rank == root)


def broadcast(place: Place, x: Any, root: Any) -> Call:
    root = place.root(root)
    memory = view(x, "x", writes=place.rank != root, where=place.where)
    return _call(
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


def all_gather(place: Place, x: Any, out: Any) -> Call:
    source = view(x, "x", writes=False, where=place.where)
    target = _result(out, source, _stacked(source.array, place.nranks), place)
    expect_count(target, source.count * place.nranks, "out", f"{place.nranks} times x", place.where)
    in_place = refuse_overlap(target, source, place.rank * source.nbytes, place)
    return _call(
        Collective.ALL_GATHER,
        source,
        target,
        [source.count],
        [source.count] * place.nranks,
        in_place=in_place,
    )


def all_gather_v(place: Place, x: Any, counts: Any, out: Any) -> Call:
    sizes = counts_of(counts, "counts", place.nranks, place.where)
    source = view(x, "x", writes=False, where=place.where)
    expect_count(source, sizes[place.rank], "x", f"counts[{place.rank}]", place.where)
    target = _result(out, source, (sum(sizes),), place)
    expect_count(target, sum(sizes), "out", "the sum of counts", place.where)
    in_place = refuse_overlap(
        target, source, sum(sizes[: place.rank]) * source.dtype.itemsize, place
    )
    return _call(
        Collective.ALL_GATHER,
        source,
        target,
        [source.count],
        sizes,
        agreed=sizes,
        uneven=True,
        in_place=in_place,
    )


def reduce_scatter(place: Place, x: Any, out: Any, op: Any) -> Call:
    source = view(x, "x", writes=False, where=place.where)
    kind, scalar = operator(op, source.dtype, place.where)
    if source.count % place.nranks:
        raise _uneven_share(source, place, "reduce_scatter_v")
    count = source.count // place.nranks
    target = _result(out, source, _share(source.array, place.nranks), place)
    expect_count(target, count, "out", f"x shared by {place.nranks} ranks", place.where)
    in_place = refuse_overlap(source, target, place.rank * target.nbytes, place)
    call = _call(
        Collective.REDUCE_SCATTER,
        source,
        target,
        [count] * place.nranks,
        [count],
        kind,
        in_place=in_place,
    )
    return _premultiply(call, source, kind, scalar, False)


def reduce_scatter_v(place: Place, x: Any, counts: Any, out: Any, op: Any) -> Call:
    sizes = counts_of(counts, "counts", place.nranks, place.where)
    source = view(x, "x", writes=False, where=place.where)
    kind, scalar = operator(op, source.dtype, place.where)
    expect_count(source, sum(sizes), "x", "the sum of counts", place.where)
    target = _result(out, source, (sizes[place.rank],), place)
    expect_count(target, sizes[place.rank], "out", f"counts[{place.rank}]", place.where)
    in_place = refuse_overlap(
        source, target, sum(sizes[: place.rank]) * source.dtype.itemsize, place
    )
    call = _call(
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


def all_to_all(place: Place, x: Any, out: Any) -> Call:
    source = view(x, "x", writes=False, where=place.where)
    if source.count % place.nranks:
        raise _uneven_share(source, place, "all_to_all_v")
    target = _result(out, source, source.array.shape, place)
    expect_count(target, source.count, "out", "as many as x", place.where)
    refuse_overlap(source, target, None, place)
    count = source.count // place.nranks
    return _call(
        Collective.ALL_TO_ALL, source, target, [count] * place.nranks, [count] * place.nranks
    )


def all_to_all_v(place: Place, x: Any, send_counts: Any, recv_counts: Any, out: Any) -> Call:
    sends = counts_of(send_counts, "send_counts", place.nranks, place.where)
    receives = counts_of(recv_counts, "recv_counts", place.nranks, place.where)
    if sends[place.rank] != receives[place.rank]:
        mine = f"send_counts[{place.rank}] is {sends[place.rank]}, recv_counts[{place.rank}] is {receives[place.rank]}"
        raise InvalidUsage(f"{place.where}: a rank sends itself what it receives: {mine}")
    source = view(x, "x", writes=False, where=place.where)
    expect_count(source, sum(sends), "x", "the sum of send_counts", place.where)
    target = _result(out, source, (sum(receives),), place)
    expect_count(target, sum(receives), "out", "the sum of recv_counts", place.where)
    refuse_overlap(source, target, None, place)
    return _call(Collective.ALL_TO_ALL, source, target, sends, receives, agreed=[], uneven=True)


def gather(place: Place, x: Any, root: Any, out: Any, counts: Any = None) -> Call:
    root = place.root(root)
    source = view(x, "x", writes=False, where=place.where)
    sizes = (
        [source.count] * place.nranks
        if counts is None
        else counts_of(counts, "counts", place.nranks, place.where)
    )
    expect_count(source, sizes[place.rank], "x", f"counts[{place.rank}]", place.where)
    shape = _stacked(source.array, place.nranks) if counts is None else (sum(sizes),)
    if place.rank == root:
        target = _result(out, source, shape, place)
        expect_count(target, sum(sizes), "out", "all ranks' elements", place.where)
        refuse_overlap(target, source, sum(sizes[: place.rank]) * source.dtype.itemsize, place)
    else:
        target = source
    mine = sizes if place.rank == root else [0] * place.nranks
    call = _call(
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
    if place.rank != root:
        call.result = None
    return call


def scatter(place: Place, x: Any, root: Any, out: Any, counts: Any = None) -> Call:
    """``x`` counts on the root only; the others give ``out`` (or, in the even form, any array of the right size as ``x``)."""
    root = place.root(root)
    if place.rank == root:
        source = view(x, "x", writes=False, where=place.where)
        if counts is None and source.count % place.nranks:
            raise _uneven_share(source, place, "scatter_v")
        sizes = (
            [source.count // place.nranks] * place.nranks
            if counts is None
            else counts_of(counts, "counts", place.nranks, place.where)
        )
        expect_count(source, sum(sizes), "x", "the sum of counts", place.where)
        shape = _share(source.array, place.nranks) if counts is None else (sizes[place.rank],)
        target = _result(out, source, shape, place)
        expect_count(target, sizes[place.rank], "out", "the rank's share of x", place.where)
        refuse_overlap(source, target, sum(sizes[: place.rank]) * source.dtype.itemsize, place)
    else:
        if out is None:
            raise InvalidUsage(
                f"{place.where}: a rank that is not the root gives out, the array for its share"
            )
        target = view(out, "out", writes=True, where=place.where)
        sizes = (
            [target.count] * place.nranks
            if counts is None
            else counts_of(counts, "counts", place.nranks, place.where)
        )
        expect_count(target, sizes[place.rank], "out", f"counts[{place.rank}]", place.where)
        source = target
    blocks = sizes if place.rank == root else [0] * place.nranks
    return _call(
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


def barrier(place: Place) -> Call:
    nothing = Memory(_NOTHING, _UINT8, None)
    return _call(Collective.BARRIER, nothing, nothing, [], [])


# ---- building


def _call(
    collective: Collective,
    source: Memory,
    target: Memory,
    in_counts: Sequence[int],
    out_counts: Sequence[int],
    op: RedOp = RedOp.SUM,
    root: int = 0,
    *,
    agreed: Sequence[int] | None = None,
    uneven: bool = False,
    in_place: bool = False,
    plan_arg: int | None = None,
) -> Call:
    """``agreed`` are the counts of blocks that all ranks know: None where all blocks are equal, empty where each knows only its own."""
    largest = max([*in_counts, *out_counts] if agreed is None else agreed, default=0)
    # all ranks must choose alike: without counts that all know, every size is planned as if it were the same
    nbytes = UNKNOWN_BYTES if agreed == [] else largest * source.dtype.itemsize
    request = Request(
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
    return Call(
        request=request,
        source=source.address,
        target=target.address,
        result=target.given,
        counts=_counts(in_counts, out_counts, agreed or ()) if uneven else None,
        keep=[source, target],
        plan_arg=int(op) if plan_arg is None else plan_arg,
    )


def _counts(in_counts: Sequence[int], out_counts: Sequence[int], agreed: Sequence[int]) -> Counts:
    return Counts(
        in_counts,
        out_counts,
        agreed=functools.reduce(mix, agreed, 0),
        shown=sum(agreed or in_counts),
    )


def _stacked(array: Array, nranks: int) -> tuple[int, ...]:
    """The shape of ``nranks`` arrays put after one another along the first axis."""
    return (nranks * array.shape[0], *array.shape[1:]) if array.ndim else (nranks,)


def _share(array: Array, nranks: int) -> tuple[int, ...]:
    """The shape of one rank's share along the first axis; flat where that cannot be cut."""
    if array.ndim and array.shape[0] % nranks == 0:
        return (array.shape[0] // nranks, *array.shape[1:])
    return (array.size // nranks,)


_NOTHING = np.empty(0, np.uint8)
_UINT8 = view(_NOTHING, "nothing", writes=False, where="barrier").dtype
