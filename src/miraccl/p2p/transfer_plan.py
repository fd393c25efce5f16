"""Plan of a transfer: method, calls, predicted time, and the schedule that they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from miraccl.p2p.extents import Extents

if TYPE_CHECKING:
    from miraccl.schedule.transfer_schedule import TransferSchedule

#: Steps that ``str()`` of a plan lists.
SHOWN_STEPS = 12


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured constants of a method, in us.

    Attributes:
        start_us: From the start to the completion of an empty transfer.
        call_us, extent_us: Time of a call, and of each of its extents.
        us_byte: Time of a byte.
        copy_us: Time of a byte to or from pinned memory; 0 where nothing is staged.
    """

    start_us: float
    call_us: float
    extent_us: float
    us_byte: float
    copy_us: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """Explanation of a transfer.

    Attributes:
        method: ``window``, ``process`` or ``tcp``; ``kernel``, ``engine`` and ``staged`` on GPUs.
        reason: Why this method.
        blocks: Blocks of the caller's lists.
        extents: Extents after merging.
        counts: Chunks of each call, by stream.
        table: int64 array: source, target and bytes of each chunk, in the order of the calls.
        rates: Constants of the prediction.
    """

    method: str
    reason: str
    kind: str
    peer: str
    nbytes: int
    blocks: int
    extents: int
    counts: tuple[tuple[int, ...], ...]
    table: Any
    rates: Rates

    @property
    def calls(self) -> int:
        """Number of steps of copies, system calls, frames or kernels."""
        return sum(len(calls) for calls in self.counts)

    @property
    def predicted_us(self) -> float:
        """Time that the constants of the method predict; ``sim.transfer_time`` gets the same."""
        rates = self.rates
        moved = (rates.us_byte + rates.copy_us) * self.nbytes
        return (
            rates.start_us + rates.call_us * self.calls + rates.extent_us * len(self.table) + moved
        )

    @cached_property
    def schedule(self) -> TransferSchedule:
        """The transfer as a schedule of two ranks; for no bytes raises ``InvalidUsage``."""
        from miraccl.schedule.transfer_schedule import build  # 20 ms, for explanations only

        kind = "write" if self.kind.startswith("write") else "read"
        return build(kind, self.table, self.counts, staged=self.rates.copy_us > 0)

    def verify(self) -> None:
        """Prove that each byte of the target is written at most once, from its source.

        Raises:
            ScheduleError: Two extents overlap in the target.
        """
        if self.nbytes:
            self.schedule.verify()

    def __str__(self) -> str:
        lines = [
            f"{self.kind} of {self.nbytes} bytes with {self.peer!r}: {self.method} "
            f"({self.reason}); {self.blocks} blocks in {self.extents} extents, {self.calls} "
            f"calls, about {self.predicted_us:.1f} us"
        ]
        first = 0
        for stream, calls in enumerate(self.counts):
            for count in calls:
                if len(lines) <= SHOWN_STEPS:
                    nbytes = int(self.table[first : first + count, 2].sum())
                    where = f"stream {stream}: " if len(self.counts) > 1 else ""
                    span = (
                        f"extents {first} to {first + count - 1}"
                        if count > 1
                        else (f"extent {first}")
                    )
                    lines.append(f"  {where}{self.method}: {span}, {nbytes} bytes")
                first += count
        if self.calls > SHOWN_STEPS:
            lines.append(f"  and {self.calls - SHOWN_STEPS} more calls")
        return "\n".join(lines)


def make_plan(
    extents: Extents,
    parts: Sequence[Extents],
    *,
    writes: bool,
    max_bytes: int,
    max_extents: int,
    **fields: Any,
) -> TransferPlan:
    """Return the plan of a transfer whose calls have at most so many bytes and extents.

    Args:
        parts: Extents of each stream.
        fields: ``method``, ``reason``, ``kind``, ``peer`` and ``rates``.
    """
    made = [cut_calls(part.table, max_bytes, max_extents) for part in parts]
    table = np.concatenate([table for table, _ in made])
    return TransferPlan(
        nbytes=extents.total,
        blocks=extents.blocks,
        extents=extents.count,
        counts=tuple(counts for _, counts in made),
        table=table if writes else table[:, (1, 0, 2)],
        **fields,
    )


def cut_calls(table: Any, max_bytes: int, max_extents: int) -> tuple[Any, tuple[int, ...]]:
    """Cut extents into calls as the kernels do: each has as many bytes as its limits permit.

    Args:
        table: int64 rows (local, remote, bytes), none empty.

    Returns:
        The rows, cut where a call ends, and the number of rows of each call.
    """
    if not len(table):
        return table, ()
    ends = np.cumsum(table[:, 2])
    bounds, position, total = [], 0, int(ends[-1])
    while position < total:
        first = int(np.searchsorted(ends, position, side="right"))
        last = int(ends[min(first + max_extents, len(ends)) - 1])
        position = min(position + max_bytes, last)
        bounds.append(position)
    points = np.union1d(ends, bounds)
    starts = np.concatenate([[0], points[:-1]])
    index = np.searchsorted(ends, starts, side="right")
    rows = table[index].copy()
    skip = starts - (ends - table[:, 2])[index]
    rows[:, 0] += skip
    rows[:, 1] += skip
    rows[:, 2] = points - starts
    counts = np.diff(np.searchsorted(points, [0, *bounds], side="right"))
    return rows, tuple(counts.tolist())
