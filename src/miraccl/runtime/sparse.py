"""Sparse all-reduce on CPU memory: sample, scan, exchange of bitmaps, then rows or the dense sum.

All parts are operations of the communicator: an ``all_gather`` of what ranks must agree on and of a
sample, an ``all_gather`` of bitmaps, and a run of rows or of the dense plan. Their order is the
same on all ranks because each decision uses only what the ranks have exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from miraccl.errors import CollectiveMismatch, InvalidUsage
from miraccl.executor.cpu import row_lists
from miraccl.executor.cpu.lower import Run, Words
from miraccl.native.hashing import mix
from miraccl.ops import spec
from miraccl.ops.host_arrays import HostReader
from miraccl.ops.prepare import PreparedOp, prepare
from miraccl.planning.planner import Candidate
from miraccl.planning.sparse_planner import (
    BLOCK_BYTES,
    SAMPLE_FROM,
    SAMPLE_GROUPS,
    RowCounts,
    SparseCandidate,
    SparseModel,
)
from miraccl.schedule import row_schedules
from miraccl.types import DType, RedOp

if TYPE_CHECKING:
    from miraccl.runtime.core import CommunicatorCore

SPEC = spec.ALL_REDUCE_SPARSE
NAME = SPEC.name
#: Words that ranks compare before they scan.
AGREED = ("count", "dtype", "operator", "block", "density")
HEADER_WORDS = len(AGREED) + 2  # then: in window memory, sampled rows
MAX_RUNS = 64


@dataclass(frozen=True, kw_only=True)
class SparseCall:
    """A checked call.

    Attributes:
        dense: The dense all_reduce of the same arguments.
        block: Elements of a block; 0 chooses.
        density: Expected share of blocks that are not zero; None if unknown.
    """

    dense: PreparedOp
    block: int
    density: float | None

    @property
    def dtype(self) -> DType:
        return self.dense.request.dtype

    @property
    def op(self) -> RedOp:
        return self.dense.request.op

    @property
    def count(self) -> int:
        return self.dense.request.count

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


def check(reader: HostReader, args: Sequence[Any], slot_bytes: int) -> SparseCall:
    """Check the arguments, in the order of the operation's spec.

    Raises:
        InvalidUsage: An argument is not allowed; nothing was sent.
    """
    dense = prepare(SPEC, reader, args)
    size, share = check_options(
        SPEC.get(args, "block"), SPEC.get(args, "density"), dense.request.dtype, slot_bytes
    )
    return SparseCall(dense=dense, block=size, density=share)


def check_options(
    block: Any, density: Any, dtype: DType, slot_bytes: int
) -> tuple[int, float | None]:
    """Return (elements of a block or 0, density or None); raise ``InvalidUsage`` if not allowed."""
    most = slot_bytes // dtype.itemsize
    if block is not None and (
        isinstance(block, bool) or not isinstance(block, int | np.integer) or not 1 <= block <= most
    ):
        raise InvalidUsage(
            f"{NAME}: block is {block!r}; allowed are 1 to {most} elements, what a FIFO slot of"
            f" {slot_bytes} bytes holds"
        )
    if density is not None and (
        isinstance(density, bool)
        or not isinstance(density, int | float | np.number)
        or not 0 <= density <= 1
    ):
        raise InvalidUsage(f"{NAME}: density is {density!r}; allowed are 0.0 to 1.0, or None")
    return int(block or 0), None if density is None else float(density)


class SparseReducer:
    """Runs of the sparse all-reduce of one communicator."""

    def __init__(self, core: CommunicatorCore) -> None:
        self._core = core
        self.model = SparseModel(core.planner)
        self._runs: dict[tuple[int, DType, RedOp], Run] = {}
        self._dense_runs: dict[Any, Run] = {}

    def reduce(self, args: Sequence[Any], async_op: bool) -> Any:
        """Check the arguments, in the order of the spec, and run the operation."""
        core = self._core
        core.check(0, NAME)
        call = check(core.reader, args, core.planner.slot_bytes)
        return core.execute(lambda: self._reduce(call), NAME, async_op)

    def _reduce(self, call: SparseCall) -> Any:
        if call.dense.prologue is not None:
            # A block is judged by its scaled values: -1.0 turns zeros into -0.0.
            call.dense.prologue()
            call.dense.prologue = None
        core, nbytes = self._core, call.nbytes
        if core.nranks == 1 or nbytes == 0:
            return self._run_dense(call, None, 0.0, "one rank" if nbytes else "no elements")
        row = (call.block or BLOCK_BYTES[1] // call.dtype.itemsize) * call.dtype.itemsize
        in_window, sampled = self._agree(call, row)
        limit = self.model.break_even(nbytes, row, call.dtype, in_window)
        expected = call.density if call.density is not None else sampled
        where = " for window memory" if in_window else ""
        if limit == 0.0 or (expected is not None and expected > limit):
            told = "" if expected is None else f"about {expected:.1%} of the blocks are not zero; "
            why = f"dense: {told}the break-even density{where} is {limit:.1%}"
            return self._run_dense(call, None, limit, why)
        sizes, bitmaps = self._scan(call)
        best = self.model.choose_block(sizes, call.dtype)
        counts = sizes[best]
        limit = self.model.break_even(nbytes, counts.row_bytes, call.dtype, in_window, scanned=True)
        dense = self.model.dense(nbytes, call.dtype, in_window)
        predicted = self.model.rows(counts, call.dtype)
        if predicted >= dense.predicted_us:
            why = (
                f"dense: {counts.union_density:.1%} of the blocks are not zero on some rank; the"
                f" break-even density{where} after the scan is {limit:.1%}"
            )
            return self._run_dense(call, counts, limit, why)
        for _ in range(best):
            bitmaps = [row_lists.coarsen(bitmap) for bitmap in bitmaps]
        return self._run_rows(call, counts, bitmaps, limit, predicted)

    def explain(
        self, nbytes: int, dtype: Any, density: float, block: int, in_window: bool
    ) -> list[SparseCandidate]:
        """Check the arguments of ``explain_sparse`` and return its candidates."""
        core = self._core
        _, nbytes, element = core.parse_explain_request("all_reduce", nbytes, dtype)
        size, share = check_options(block, density, element, core.planner.slot_bytes)
        return self.model.explain(nbytes, element, share or 0.0, size * element.itemsize, in_window)

    # ---- agreement

    def _agree(self, call: SparseCall, row: int) -> tuple[bool, float | None]:
        """Compare the arguments of all ranks.

        Returns (all ranks use window memory, sampled density of the union or None).
        """
        core = self._core
        message = np.zeros(HEADER_WORDS + SAMPLE_GROUPS, np.int64)
        share = -1 if call.density is None else round(call.density * 1e6)
        message[: len(AGREED)] = (call.count, call.dtype, call.op, call.block, share)
        message[len(AGREED)] = self._is_window(call)
        rows = -(-call.nbytes // row)
        if rows >= SAMPLE_FROM and call.density is None:
            message[len(AGREED) + 1] = 64 * SAMPLE_GROUPS
            self._sample(call, row, rows, message[HEADER_WORDS:])
        table = self._gather(message).reshape(core.nranks, -1)
        self._compare(table)
        sampled = int(table[0, len(AGREED) + 1])
        union = np.bitwise_or.reduce(table[:, HEADER_WORDS:])
        share_of_union = row_lists.count(np.ascontiguousarray(union)) / max(1, sampled)
        return bool(table[:, len(AGREED)].all()), share_of_union if sampled else None

    def _is_window(self, call: SparseCall) -> bool:
        window = self._core.fabric.window
        return all(
            window.contains(address, call.nbytes)
            for address in (call.dense.source, call.dense.target)
        )

    @staticmethod
    def _sample(call: SparseCall, row: int, rows: int, into: Words) -> None:
        """Scan groups of 64 rows that are spread evenly over the array."""
        spare = np.zeros(2, np.int64)
        for group in range(SAMPLE_GROUPS):
            start = rows // SAMPLE_GROUPS * group * row
            row_lists.scan(call.dense.source + start, 64 * row, row, spare)
            into[group] = spare[0]

    def _compare(self, table: Words) -> None:
        """Raise on all ranks if the ranks called with different arguments."""
        for position, field in enumerate(AGREED):
            values = table[:, position].tolist()
            if len(set(values)) > 1:
                shown = ", ".join(
                    f"{_show(field, value)} on rank {rank}" for rank, value in enumerate(values)
                )
                text = f"{NAME}: ranks passed different values of {field}: {shown[:500]}"
                raise self._core.faults.propagate(
                    CollectiveMismatch(text, rank=self._core.rank, op=NAME)
                )

    def _gather(self, words: Words) -> Words:
        core = self._core
        gathered = np.empty(core.nranks * len(words), np.int64)
        call = prepare(spec.ALL_GATHER, core.reader, (words, gathered))
        core.run_now(call, core.plan(call), NAME)
        return gathered

    # ---- scan and union

    def _scan(self, call: SparseCall) -> tuple[list[RowCounts], list[Words]]:
        """Return the counts of all block sizes, and each rank's bitmap of the smallest one."""
        core, nranks = self._core, self._core.nranks
        row = call.block * call.dtype.itemsize or BLOCK_BYTES[0]
        rows = -(-call.nbytes // row)
        words = row_lists.words_for(rows)
        bitmap = np.empty(words + 1, np.int64)
        row_lists.scan(call.dense.source, call.nbytes, row, bitmap)
        gathered = self._gather(bitmap[:words])
        bitmaps = [gathered[rank * words : (rank + 1) * words] for rank in range(nranks)]
        sizes, current = [], bitmaps
        for level in range(1 if call.block else len(BLOCK_BYTES)):
            if level:
                current = [row_lists.coarsen(each) for each in current]
            size = row << 2 * level
            if level and size > core.planner.slot_bytes:
                break
            sizes.append(
                RowCounts(
                    row_bytes=size,
                    rows=-(-call.nbytes // size),
                    held=[row_lists.count(each) for each in current],
                    union=row_lists.count(np.bitwise_or.reduce(current)),
                )
            )
        return sizes, bitmaps

    # ---- runs

    def _run_rows(
        self,
        call: SparseCall,
        counts: RowCounts,
        bitmaps: Sequence[Words],
        limit: float,
        predicted: float,
    ) -> Any:
        core = self._core
        segments = row_schedules.count_segments(core.nranks, counts.union * counts.row_bytes)
        schedule = row_schedules.build(core.nranks, segments)
        key = (segments, call.dtype, call.op)
        if key not in self._runs:
            if len(self._runs) >= MAX_RUNS:
                self._runs.clear()
            self._runs[key] = core.planner.make_row_run(schedule, call.dtype, call.op)
        run = self._runs[key]
        run.set_rows(
            row_lists.select(
                schedule,
                bitmaps,
                row_bytes=counts.row_bytes,
                total_bytes=call.nbytes,
                slot_bytes=core.planner.slot_bytes,
                count_elements=call.count,
                agreed=mix(mix(call.count, counts.row_bytes), counts.union),
            )
        )
        why = (
            f"{counts.density:.2%} of the blocks of {counts.row_bytes // call.dtype.itemsize}"
            f" elements are not zero on a rank, {counts.union_density:.2%} on some rank; the"
            f" break-even density after the scan is {limit:.1%}"
        )
        self._record(run, call, counts, limit, why, predicted)
        if call.dense.source != call.dense.target:
            call.dense.keep_alive[1].array.view(np.uint8).reshape(-1)[:] = 0
        return core.run_now(call.dense, run, NAME)

    def _run_dense(self, call: SparseCall, counts: RowCounts | None, limit: float, why: str) -> Any:
        request = call.dense.request
        if request not in self._dense_runs:
            if len(self._dense_runs) >= MAX_RUNS:
                self._dense_runs.clear()
            # Not the run of all_reduce, whose plan has another reason.
            self._dense_runs[request] = self._core.planner.make_run(request)
        run = self._dense_runs[request]
        self._record(run, call, counts, limit, why, None)
        if run.window_run is not None:
            self._record(run.window_run, call, counts, limit, why, None)
        return self._core.run_now(call.dense, run, NAME)

    def _record(
        self,
        run: Run,
        call: SparseCall,
        counts: RowCounts | None,
        limit: float,
        why: str,
        predicted: float | None,
    ) -> None:
        planner = self._core.planner
        dense: Candidate = self.model.dense(call.nbytes, call.dtype, False)
        planner.record_plan(
            run,
            self.model.candidate(
                counts,
                dense,
                sparse_us=predicted or 0.0,
                itemsize=call.dtype.itemsize,
                break_even=limit,
                chosen=predicted is not None,
                reason=why,
            ),
        )


def _show(field: str, value: int) -> str:
    if field == "dtype":
        return DType(value).label
    if field == "operator":
        return RedOp(value).name.lower()
    if field == "density":
        return "None" if value < 0 else f"{value / 1e6:g}"
    if field == "block":
        return str(value or None)
    return str(value)
