"""Bounded sets of integers as sorted, disjoint, half-open ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class RangeSet:
    """Sorted, disjoint, non-adjacent half-open ranges ``[start, stop)``.

    Used for acknowledged bytes of a frame, bytes to retransmit, and packet numbers received.
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __len__(self) -> int:
        return len(self._starts)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._stops, strict=True)))

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self._starts, value) - 1
        return at >= 0 and value < self._stops[at]

    @property
    def first(self) -> tuple[int, int]:
        """Lowest range; ``IndexError`` if empty."""
        return self._starts[0], self._stops[0]

    @property
    def total(self) -> int:
        """Number of integers in the set."""
        return sum(self._stops) - sum(self._starts)

    def add(self, start: int, stop: int) -> int:
        """Add a range; return how many of its integers were new."""
        if start >= stop:
            return 0
        starts, stops = self._starts, self._stops
        low = bisect_left(stops, start)  # first range that touches or follows ``start``
        high = bisect_right(starts, stop)  # first range strictly beyond ``stop``
        covered = sum(max(0, min(stops[i], stop) - max(starts[i], start)) for i in range(low, high))
        if low < high:
            merged = min(starts[low], start), max(stops[high - 1], stop)
        else:
            merged = start, stop
        starts[low:high], stops[low:high] = [merged[0]], [merged[1]]
        return stop - start - covered

    def remove(self, start: int, stop: int) -> None:
        """Remove a range, present or not."""
        if start >= stop:
            return
        starts, stops = self._starts, self._stops
        low = bisect_right(stops, start)
        high = bisect_left(starts, stop)
        kept = []
        if low < high:
            if starts[low] < start:
                kept.append((starts[low], start))
            if stops[high - 1] > stop:
                kept.append((stop, stops[high - 1]))
            starts[low:high] = [low_ for low_, _ in kept]
            stops[low:high] = [high_ for _, high_ in kept]

    def missing(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of ``[start, stop)`` that are not in the set, in order."""
        for low, high in self:
            if high <= start:
                continue
            if low >= stop:
                break
            if low > start:
                yield start, low
            start = max(start, high)
        if start < stop:
            yield start, stop

    def drop_below(self, floor: int) -> None:
        """Remove every integer below ``floor``."""
        self.remove(self._starts[0] if self._starts else floor, floor)
