"""Choice of the sparse all-reduce: block size, and rows or the dense schedule.

A block is sent if any bit of it is set on the sending rank, and returned if any rank sent it, so
the bytes on the wire follow the density of each rank and of the union of all. All ranks know both
from the exchanged bitmaps and choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from miraccl.planning.planner import Candidate, Planner
from miraccl.schedule import row_schedules
from miraccl.types import Collective, DType

#: Sizes of the blocks that one scan counts, in bytes, unless the caller fixes the size.
BLOCK_BYTES = (256, 1024, 4096, 16384)
#: Cost of gathering, folding and scattering one row beside its bytes, per rank that holds it, in
#: microseconds. An estimate of its loads and calls, not measured.
ROW_US = 0.03
#: A scan reads once what a copy reads and writes.
SCAN_FACTOR = 2.0
#: Rows sampled before the scan, in groups of 64, and rows from which sampling pays.
SAMPLE_GROUPS = 16
SAMPLE_FROM = 1 << 14
CACHED = 256


@dataclass(frozen=True, kw_only=True)
class SparseCandidate(Candidate):
    """Rows or the dense schedule for a sparse all-reduce.

    Attributes:
        block: Elements of a block; 0 if the array was not scanned for blocks.
        density: Share of blocks that are not zero on a rank, the mean of all; None if unknown.
        union: Share of blocks that are not zero on any rank; None if unknown.
        break_even: Density of the union from which the dense schedule is predicted to be faster.
    """

    block: int = 0
    density: float | None = None
    union: float | None = None
    break_even: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """Blocks of one size that are not zero: their bytes, number, and those held by ranks.

    Attributes:
        held: Blocks that are not zero on each rank.
        union: Blocks that are not zero on any rank.
    """

    row_bytes: int
    rows: int
    held: Sequence[int]
    union: int

    @property
    def density(self) -> float:
        return sum(self.held) / max(1, len(self.held) * self.rows)

    @property
    def union_density(self) -> float:
        return self.union / max(1, self.rows)

    @classmethod
    def total(cls, pieces: Sequence[RowCounts]) -> RowCounts:
        """Return the counts of pieces with blocks of one size as those of one array."""
        return cls(
            row_bytes=pieces[0].row_bytes,
            rows=sum(piece.rows for piece in pieces),
            held=[sum(held) for held in zip(*(piece.held for piece in pieces), strict=True)],
            union=sum(piece.union for piece in pieces),
        )


class SparseModel:
    """Predicted times of the sparse all-reduce of one communicator, in microseconds."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        # The same sizes come again with every step of a training; a prediction takes 0.1 ms.
        self.dense = lru_cache(maxsize=CACHED)(self._dense)
        self.before = lru_cache(maxsize=CACHED)(self._before)
        self.break_even = lru_cache(maxsize=CACHED)(self._break_even)

    def _dense(self, nbytes: int, dtype: DType, in_window: bool) -> Candidate:
        """Return the dense candidate for ``nbytes``; ``in_window``: all ranks use window memory."""
        candidates = self._planner.candidates(Collective.ALL_REDUCE, nbytes, dtype)
        if in_window and (window := self._planner.window_candidate(candidates)) is not None:
            return window
        return candidates[0]

    def _before(self, nbytes: int, row_bytes: int, dtype: DType) -> float:
        """Return the time of the scan and of the exchange of bitmaps."""
        constants = self._planner.constants
        scan = nbytes / (SCAN_FACTOR * constants.at(constants.copy, nbytes))
        scan *= max(1.0, self._planner.shape.ranks_per_core)
        bitmap = max(8, nbytes // row_bytes // 8)
        gathered = self._planner.candidates(Collective.ALL_GATHER, bitmap, DType.INT64)
        return scan + gathered[0].predicted_us

    def rows(self, counts: RowCounts, dtype: DType) -> float:
        """Return the time of the schedule of rows, without scan and bitmaps."""
        moved = self._planner.predict(
            row_schedules.DENSE_FORM, Collective.ALL_REDUCE, counts.union * counts.row_bytes, dtype
        )
        return moved + ROW_US * (sum(counts.held) / max(1, len(counts.held)) + counts.union)

    def _break_even(
        self, nbytes: int, row_bytes: int, dtype: DType, in_window: bool, scanned: bool = False
    ) -> float:
        """Return the density of the union from which dense is faster: 0 always, 1 never.

        The ranks' blocks are assumed to be disjoint, the sparse schedule's best case of a union.
        """
        limit = self.dense(nbytes, dtype, in_window).predicted_us
        if not scanned:
            limit -= self.before(nbytes, row_bytes, dtype)
        rows, nranks = max(1, nbytes // row_bytes), self._planner.shape.nranks
        low, high = 0.0, 1.0
        for _ in range(20):
            middle = (low + high) / 2
            union = int(rows * middle)
            held = [max(1, union // nranks)] * nranks
            counts = RowCounts(row_bytes=row_bytes, rows=rows, held=held, union=union)
            low, high = (middle, high) if self.rows(counts, dtype) <= limit else (low, middle)
        return low if low > 1e-5 else 0.0

    def candidate(
        self,
        counts: RowCounts | None,
        dense: Candidate,
        *,
        sparse_us: float,
        itemsize: int,
        break_even: float,
        chosen: bool,
        reason: str,
    ) -> SparseCandidate:
        """Return the record of the rows (``chosen``) or of ``dense`` in their place."""
        return SparseCandidate(
            algo=row_schedules.NAME if chosen else dense.algo,
            proto="simple" if chosen else dense.proto,
            channels=1,
            predicted_us=sparse_us if chosen else dense.predicted_us,
            chosen=True,
            reason=reason,
            block=0 if counts is None else counts.row_bytes // itemsize,
            density=None if counts is None else counts.density,
            union=None if counts is None else counts.union_density,
            break_even=break_even,
        )

    def choose_block(self, sizes: Sequence[RowCounts], dtype: DType) -> int:
        """Return the index of the block size with the lowest predicted time."""
        times = [self.rows(counts, dtype) for counts in sizes]
        return times.index(min(times))

    def explain(
        self, nbytes: int, dtype: DType, density: float, row_bytes: int, in_window: bool
    ) -> list[SparseCandidate]:
        """Return rows and the dense schedule for blocks of which ``density`` are not zero.

        The ranks' blocks are independent of each other. The chosen one comes first.
        """
        nranks, rows = self._planner.shape.nranks, max(1, nbytes // row_bytes)
        union = 1 - (1 - density) ** nranks
        counts = RowCounts(
            row_bytes=row_bytes,
            rows=rows,
            held=[round(rows * density)] * nranks,
            union=round(rows * union),
        )
        dense = self.dense(nbytes, dtype, in_window)
        time = self.before(nbytes, row_bytes, dtype) + self.rows(counts, dtype)
        limit = self.break_even(nbytes, row_bytes, dtype, in_window)
        better = time < dense.predicted_us
        why = (
            f"a union of {union:.2%} is below the break-even density of {limit:.1%}"
            if better
            else f"dense: a union of {union:.2%} reaches the break-even density of {limit:.1%}"
        )
        found = [
            replace(
                self.candidate(
                    counts,
                    dense,
                    sparse_us=time,
                    itemsize=dtype.itemsize,
                    break_even=limit,
                    chosen=is_rows,
                    reason=why,
                ),
                chosen=is_rows == better,
            )
            for is_rows in (True, False)
        ]
        return sorted(found, key=lambda row: not row.chosen)
