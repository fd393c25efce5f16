"""Sparse all-reduce on CPU memory: sample, scan, exchange of bitmaps, then rows or the dense sum.

All parts are operations of the communicator: an ``all_gather`` of what ranks must agree on and of a
sample, then for each piece of the array an ``all_gather`` of bitmaps and a run of rows or of the
dense plan. Their order is the same on all ranks because each decision uses only what the ranks have
exchanged. At the same time a thread scans the next pieces.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from miraccl import clock
from miraccl.errors import CollectiveMismatch, InvalidUsage, SystemFailure
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
#: Pieces of an array over networks, and bytes of which fewer cost more than they overlap.
MAX_PIECES, MIN_PIECE_BYTES = 4, 16 << 20


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

    @property
    def smallest_row(self) -> int:
        """Bytes of the smallest block that a scan counts."""
        return self.block * self.dtype.itemsize or BLOCK_BYTES[0]

    def part(self, start: int, count: int) -> SparseCall:
        """Return the call on at most ``count`` elements from ``start`` on."""
        count = min(count, self.count - start)
        offset, nbytes = start * self.dtype.itemsize, count * self.dtype.itemsize
        request = replace(
            self.dense.request,
            in_counts=(count,),
            out_counts=(count,),
            block_bytes=nbytes,
            count=count,
        )
        dense = replace(
            self.dense,
            request=request,
            source=self.dense.source + offset,
            target=self.dense.target + offset,
        )
        return replace(self, dense=dense)

    def clear_target(self) -> None:
        """Fill the output with zeros if it is not the input: rows write only what is not zero."""
        if self.dense.source != self.dense.target:
            ctypes.memset(self.dense.target, 0, self.nbytes)


@dataclass(frozen=True, kw_only=True)
class PieceSum:
    """Sum of a piece of an array.

    Attributes:
        level: Number of the block size, from the smallest.
        limit: Break-even density after the scan.
        predicted_us: Predicted time of the rows; None if the piece was sent whole.
    """

    run: Run
    level: int
    counts: RowCounts
    limit: float
    predicted_us: float | None


class PieceScanner:
    """Scan of the pieces of an array in their order, by a thread if there are several."""

    def __init__(self, pieces: Sequence[SparseCall]) -> None:
        self._pieces = pieces
        self._words = [
            row_lists.words_for(-(-piece.nbytes // piece.smallest_row)) for piece in pieces
        ]
        # one word more than the rows need: scratch of the scan
        self._bitmaps = [np.empty(words + 1, np.int64) for words in self._words]
        self._done = [clock.event() for _ in pieces]
        self._ended, self._thread = False, None
        self._error: BaseException | None = None
        if len(pieces) > 1:
            self._thread = clock.thread(self._scan_all, name="miraccl sparse scan")
            self._thread.start()

    def bitmap(self, number: int) -> Words:
        """Return the bitmap of a piece when it has been scanned.

        Raises:
            SystemFailure: The scan failed in its thread.
        """
        if self._thread is None:
            self._scan(number)
        self._done[number].wait()
        if self._error is not None:
            raise SystemFailure(
                f"cannot run {NAME}: the scan of the array failed: {self._error!r}", op=NAME
            ) from self._error
        return self._bitmaps[number][: self._words[number]]

    def _scan(self, number: int) -> None:
        piece = self._pieces[number]
        row_lists.scan(piece.dense.source, piece.nbytes, piece.smallest_row, self._bitmaps[number])
        self._done[number].set()

    def _scan_all(self) -> None:
        try:
            for number in range(len(self._pieces)):
                if not self._ended:
                    self._scan(number)
        except BaseException as error:
            self._error = error  # the caller raises it
            for done in self._done:
                done.set()

    def __enter__(self) -> PieceScanner:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended = True
        if self._thread is not None:
            self._thread.join()


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
            return self._run_dense(call, 0.0, "one rank" if nbytes else "no elements")
        row = (call.block or BLOCK_BYTES[1] // call.dtype.itemsize) * call.dtype.itemsize
        in_window, sampled = self._agree(call, row)
        limit = self.model.break_even(nbytes, row, call.dtype, in_window)
        expected = call.density if call.density is not None else sampled
        where = " for window memory" if in_window else ""
        if limit == 0.0 or (expected is not None and expected > limit):
            share = "" if expected is None else f"about {expected:.1%} of the blocks are not zero; "
            why = f"dense: {share}the break-even density{where} is {limit:.1%}"
            return self._run_dense(call, limit, why)
        pieces = self._pieces(call)
        sums: list[PieceSum] = []
        with PieceScanner(pieces) as scanner:
            for number, piece in enumerate(pieces):
                level = sums[0].level if sums else None
                try:
                    bitmap = scanner.bitmap(number)
                except SystemFailure as error:
                    raise core.faults.propagate(error) from error.__cause__
                sums.append(self._sum(piece, bitmap, in_window, level))
        self._report(call, sums, where)
        return call.dense.result

    def _pieces(self, call: SparseCall) -> list[SparseCall]:
        """Return the array in pieces, of which one is scanned while another is exchanged.

        On one host both wait for the same memory, so it is one piece.
        """
        number = min(MAX_PIECES, call.nbytes // MIN_PIECE_BYTES)
        if number < 2 or not self._core.planner.shape.hosts:
            return [call]
        unit = call.block or max(1, BLOCK_BYTES[-1] // call.dtype.itemsize)
        size = -(-call.count // number // unit) * unit
        return [call.part(start, size) for start in range(0, call.count, size)]

    def _sum(self, call: SparseCall, bitmap: Words, in_window: bool, level: int | None) -> PieceSum:
        """Exchange the bitmaps of a piece, and sum it by rows or whole.

        Args:
            level: Number of the block size; None chooses the fastest.
        """
        sizes, bitmaps = self._union(call, bitmap)
        level = self.model.choose_block(sizes, call.dtype) if level is None else level
        counts, nbytes = sizes[level], call.nbytes
        limit = self.model.break_even(nbytes, counts.row_bytes, call.dtype, in_window, scanned=True)
        dense = self.model.dense(nbytes, call.dtype, in_window)
        predicted = self.model.rows(counts, call.dtype)
        by_rows = predicted < dense.predicted_us
        if by_rows:
            for _ in range(level):
                bitmaps = [row_lists.coarsen(each) for each in bitmaps]
            run = self._row_run(call, counts, bitmaps)
            call.clear_target()
        else:
            run = self._dense_run(call)
        self._core.run_now(call.dense, run, NAME)
        return PieceSum(
            run=run,
            level=level,
            counts=counts,
            limit=limit,
            predicted_us=predicted if by_rows else None,
        )

    def _report(self, call: SparseCall, sums: Sequence[PieceSum], where: str) -> None:
        """Make one plan of all pieces that of the last operation."""
        counts, limit = RowCounts.total([each.counts for each in sums]), sums[0].limit
        times = [each.predicted_us for each in sums if each.predicted_us is not None]
        if times:
            why = (
                f"{counts.density:.2%} of the blocks of"
                f" {counts.row_bytes // call.dtype.itemsize} elements are not zero on a rank,"
                f" {counts.union_density:.2%} on some rank; the break-even density after the scan"
                f" is {limit:.1%}"
            )
            if len(times) < len(sums):
                why += f"; {len(sums) - len(times)} of {len(sums)} pieces were sent whole"
        else:
            why = (
                f"dense: {counts.union_density:.1%} of the blocks are not zero on some rank; the"
                f" break-even density{where} after the scan is {limit:.1%}"
            )
        self._record(sums[-1].run, call, counts, limit, why, sum(times) if times else None)

    def check_options(self, block: Any, density: Any) -> None:
        """Check the options of a call on GPU memory; raise ``InvalidUsage`` if not allowed."""
        check_options(block, density, DType.UINT8, self._core.planner.slot_bytes)

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

    def _union(self, call: SparseCall, bitmap: Words) -> tuple[list[RowCounts], list[Words]]:
        """Return the counts of all block sizes, and each rank's bitmap of the smallest one."""
        core, nranks = self._core, self._core.nranks
        row, words = call.smallest_row, len(bitmap)
        gathered = self._gather(bitmap)
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

    def _row_run(self, call: SparseCall, counts: RowCounts, bitmaps: Sequence[Words]) -> Run:
        """Return the run of the rows of a piece."""
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
        return run

    def _dense_run(self, call: SparseCall) -> Run:
        request = call.dense.request
        if request not in self._dense_runs:
            if len(self._dense_runs) >= MAX_RUNS:
                self._dense_runs.clear()
            # Not the run of all_reduce, whose plan has another reason.
            self._dense_runs[request] = self._core.planner.make_run(request)
        return self._dense_runs[request]

    def _run_dense(self, call: SparseCall, limit: float, why: str) -> Any:
        run = self._dense_run(call)
        self._record(run, call, None, limit, why, None)
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
        plan = self.model.candidate(
            counts,
            dense,
            sparse_us=predicted or 0.0,
            itemsize=call.dtype.itemsize,
            break_even=limit,
            chosen=predicted is not None,
            reason=why,
        )
        for each in (run, run.window_run):
            if each is not None:
                planner.record_plan(each, plan)


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
