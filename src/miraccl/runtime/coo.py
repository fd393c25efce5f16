"""Sum of rows named by indices (COO): sort, exchange by ranges of indices, add, gather.

Each rank sorts its indices and adds its duplicates. Ranges of the index space are given to the
ranks so that each gets about as many rows: the split points are quantiles of samples that all ranks
have exchanged. The owner of a range adds the rows of all ranks in the order of ranks, and an
``all_gather`` returns the union to all. Nothing has the size of the index space, which may be 2^40.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from miraccl.errors import CollectiveMismatch, InvalidUsage
from miraccl.executor.cpu import row_lists
from miraccl.executor.cpu.lower import Words
from miraccl.ops import spec
from miraccl.ops.prepare import prepare
from miraccl.ops.spec import OpSpec
from miraccl.schedule.reduction import Array, accumulator
from miraccl.types import DType

if TYPE_CHECKING:
    from miraccl.runtime.core import CommunicatorCore

NAME = spec.ALL_REDUCE_COO.name
MAX_SIZE = 1 << 62
#: Words that ranks compare before they exchange rows.
AGREED = ("size", "elements per row", "dtype", "dtype of indices")
SAMPLES = 32  # indices that each rank shows of its list


@dataclass(frozen=True, kw_only=True)
class CooCall:
    """A checked call: ``values[i]`` is to be added to row ``indices[i]`` of ``size`` rows."""

    indices: Array
    values: Array
    size: int
    dtype: DType

    @property
    def per_row(self) -> int:
        return int(np.prod(self.values.shape[1:], dtype=np.int64))


def check(core: CommunicatorCore, indices: Any, values: Any, size: Any) -> CooCall:
    """Check the arguments. Raises ``InvalidUsage``; nothing was sent."""
    where = core.reader.view(indices, "indices", NAME, None, False)
    rows = core.reader.view(values, "values", NAME, None, False)
    if where.dtype not in (DType.INT32, DType.INT64) or where.array.ndim != 1:
        raise InvalidUsage(
            f"{NAME}: indices have dtype {where.dtype.label} and {where.array.ndim} dimensions;"
            " allowed are int32 and int64 with one dimension"
        )
    if rows.array.ndim < 1 or len(rows.array) != len(where.array):
        raise InvalidUsage(
            f"{NAME}: values have shape {rows.array.shape}; they need one row for each of the"
            f" {len(where.array)} indices"
        )
    if (
        isinstance(size, bool)
        or not isinstance(size, int | np.integer)
        or not 0 <= size <= MAX_SIZE
    ):
        raise InvalidUsage(f"{NAME}: size is {size!r}; allowed are 0 to 2^62 rows")
    wrong = np.flatnonzero((where.array < 0) | (where.array >= size))
    if len(wrong):
        raise InvalidUsage(
            f"{NAME}: indices[{wrong[0]}] is {where.array[wrong[0]]}; allowed are 0 to {size - 1}"
        )
    return CooCall(indices=where.array, values=rows.array, size=int(size), dtype=rows.dtype)


def sorted_rows(indices: Array, values: Array) -> tuple[Words, Array]:
    """Return (ascending indices without duplicates, their rows), duplicates added in their order.

    16- and 8-bit floats are added in float32, which is also what is returned then.
    """
    keys = indices.astype(np.int64, copy=False)
    if (keys[1:] > keys[:-1]).all():
        return np.ascontiguousarray(keys), np.ascontiguousarray(values)
    order = np.argsort(keys, kind="stable")
    keys, rows = keys[order], values[order]
    first = np.r_[True, keys[1:] != keys[:-1]]
    if first.all():
        return keys, rows
    total = np.zeros((int(first.sum()), *values.shape[1:]), accumulator(values.dtype))
    np.add.at(total, np.cumsum(first) - 1, rows.astype(total.dtype, copy=False))
    return keys[first], total.astype(values.dtype, copy=False)


def split_points(samples: Words, counts: Words, nranks: int) -> Words:
    """Return the first index of each range but the first.

    Args:
        samples: ``samples[rank]``, evenly spaced indices of a rank's list; -1 for none.
        counts: Rows of each rank.
    """
    weights = np.repeat(counts / SAMPLES, SAMPLES)
    flat = samples.ravel()
    order = np.argsort(flat, kind="stable")
    flat, weights = flat[order], weights[order] * (flat[order] >= 0)
    reached = np.cumsum(weights)
    goals = reached[-1] * np.arange(1, nranks) / nranks
    places: Words = np.minimum(np.searchsorted(reached, goals), len(flat) - 1)
    points: Words = flat[places]
    return points


def add_in_rank_order(keys: Sequence[Words], rows: Sequence[Array]) -> tuple[Words, Array]:
    """Return the union of ascending lists and the sums of their rows, added in the order given."""
    union = row_lists.merge(keys)
    if not len(union):
        return union, rows[0][:0]
    wide = accumulator(rows[0].dtype)
    total = np.empty((len(union), *rows[0].shape[1:]), wide)
    fresh = np.ones(len(union), bool)
    for indices, values in zip(keys, rows, strict=True):
        places = row_lists.locate(union, indices)
        new = fresh[places]
        if new.all():
            total[places] = values
        else:
            total[places[new]] = values[new]
            total[places[~new]] += values[~new]
        fresh[places] = False
    return union, total.astype(rows[0].dtype, copy=False)


class CooReducer:
    """Sums of rows of one communicator."""

    def __init__(self, core: CommunicatorCore) -> None:
        self._core = core

    def reduce(self, indices: Any, values: Any, size: Any, async_op: bool) -> Any:
        """Check the arguments and run the operation."""
        self._core.check(0, NAME)
        call = check(self._core, indices, values, size)
        return self._core.execute(lambda: self._reduce(call), NAME, async_op)

    def _reduce(self, call: CooCall) -> tuple[Array, Array]:
        core = self._core
        keys, rows = sorted_rows(call.indices, call.values)
        rows = rows.reshape(len(keys), call.per_row)
        points, counts = self._agree(call, keys)
        if core.nranks > 1 and counts.sum():
            keys, rows = self._exchange(keys, rows, points)
            keys, rows = self._collect(keys, rows)
        shape = (len(keys), *call.values.shape[1:])
        return keys.astype(call.indices.dtype, copy=False), rows.reshape(shape)

    def _agree(self, call: CooCall, keys: Words) -> tuple[Words, Words]:
        """Compare the arguments; return (split points, rows of each rank)."""
        core, given = self._core, len(AGREED)
        message = np.full(given + 1 + SAMPLES, -1, np.int64)
        wide = call.indices.dtype.itemsize
        message[: given + 1] = (call.size, call.per_row, call.dtype, 8 * wide, len(keys))
        if len(keys):
            places = (np.arange(SAMPLES) * 2 + 1) * len(keys) // (2 * SAMPLES)
            message[given + 1 :] = keys[places]
        table = np.empty((core.nranks, len(message)), np.int64)
        self._run(spec.ALL_GATHER, (message, table.reshape(-1)))
        for position, field in enumerate(AGREED):
            held = table[:, position].tolist()
            if len(set(held)) > 1:
                shown = ", ".join(f"{_show(field, v)} on rank {r}" for r, v in enumerate(held))
                text = f"{NAME}: ranks passed different values of {field}: {shown[:500]}"
                raise core.faults.propagate(CollectiveMismatch(text, rank=core.rank, op=NAME))
        counts = table[:, given]
        return split_points(table[:, given + 1 :], counts, core.nranks), counts

    def _exchange(self, keys: Words, rows: Array, points: Words) -> tuple[Words, Array]:
        """Send each range to its owner; return the sums of this rank's range."""
        nranks, per_row = self._core.nranks, rows.shape[1]
        ends = np.concatenate([[0], np.searchsorted(keys, points), [len(keys)]])
        sends = np.diff(ends)
        receives = np.empty(nranks, np.int64)
        self._run(spec.ALL_TO_ALL, (sends, receives))
        theirs = np.empty(int(receives.sum()), np.int64)
        given, got = sends.tolist(), receives.tolist()
        self._run(spec.ALL_TO_ALL_V, (keys, given, got, theirs))
        values = np.empty((len(theirs), per_row), rows.dtype)
        self._run(
            spec.ALL_TO_ALL_V,
            (
                np.ascontiguousarray(rows).reshape(-1),
                [n * per_row for n in given],
                [n * per_row for n in got],
                values.reshape(-1),
            ),
        )
        starts = np.concatenate([[0], np.cumsum(receives)])
        cuts = [slice(a, b) for a, b in pairwise(starts.tolist())]
        return add_in_rank_order([theirs[cut] for cut in cuts], [values[cut] for cut in cuts])

    def _collect(self, keys: Words, rows: Array) -> tuple[Words, Array]:
        """Return the ranges of all ranks, one after another."""
        per_row = rows.shape[1]
        lengths = np.empty(self._core.nranks, np.int64)
        self._run(spec.ALL_GATHER, (np.array([len(keys)], np.int64), lengths))
        counts = lengths.tolist()
        union = np.empty(sum(counts), np.int64)
        self._run(spec.ALL_GATHER_V, (np.ascontiguousarray(keys), counts, union))
        values = np.empty((len(union), per_row), rows.dtype)
        self._run(
            spec.ALL_GATHER_V,
            (
                np.ascontiguousarray(rows).reshape(-1),
                [n * per_row for n in counts],
                values.reshape(-1),
            ),
        )
        return union, values

    def _run(self, op: OpSpec, args: tuple[Any, ...]) -> None:
        call = prepare(op, self._core.reader, args)
        self._core.run_now(call, self._core.plan(call), NAME)


def _show(field: str, value: int) -> str:
    if field == "dtype":
        return DType(value).label
    return f"int{value}" if field == "dtype of indices" else str(value)
