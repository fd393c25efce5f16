"""Kernel source: sets of ranges (``wire.datagram.ranges``) with a bounded number of ranges."""

from __future__ import annotations

from miraccl.native.intrinsics import inline, load, store
from miraccl.proxy.kernels import flow_layout as layout


@inline
def start_of(ranges: int, i: int) -> int:
    """Start of a range."""
    return load(ranges + layout.RANGES_FIRST + 16 * i)


@inline
def stop_of(ranges: int, i: int) -> int:
    """Stop of a range."""
    return load(ranges + layout.RANGES_FIRST + 16 * i + 8)


@inline
def put(ranges: int, i: int, start: int, stop: int) -> None:
    """Write a range."""
    store(ranges + layout.RANGES_FIRST + 16 * i, start)
    store(ranges + layout.RANGES_FIRST + 16 * i + 8, stop)


@inline
def splice(ranges: int, low: int, high: int, kept: int) -> None:
    """Make place for ``kept`` ranges instead of those from ``low`` to ``high``."""
    count = load(ranges)
    shift = kept - (high - low)
    if shift > 0:
        i = count - 1
        while i >= high:
            put(ranges, i + shift, start_of(ranges, i), stop_of(ranges, i))
            i -= 1
    elif shift < 0:
        for i in range(high, count):
            put(ranges, i + shift, start_of(ranges, i), stop_of(ranges, i))
    store(ranges, count + shift)


@inline
def add(ranges: int, start: int, stop: int, capacity: int) -> int:
    """Add a range; return how many of its integers were new, -1 if the set is full."""
    if start >= stop:
        return 0
    count = load(ranges)
    low = count
    while low > 0 and stop_of(ranges, low - 1) >= start:
        low -= 1
    high, covered = low, 0
    while high < count and start_of(ranges, high) <= stop:
        part = min(stop_of(ranges, high), stop) - max(start_of(ranges, high), start)
        covered += max(0, part)
        high += 1
    first, last = start, stop
    if high > low:
        first, last = min(start_of(ranges, low), start), max(stop_of(ranges, high - 1), stop)
    elif count >= capacity:
        return -1
    splice(ranges, low, high, 1)
    put(ranges, low, first, last)
    return stop - start - covered


@inline
def add_loosely(ranges: int, start: int, stop: int, capacity: int) -> None:
    """Add a range; a full set also takes the gap to a neighbour."""
    if add(ranges, start, stop, capacity) < 0:
        count = load(ranges)
        low = count
        while low > 0 and start_of(ranges, low - 1) > start:
            low -= 1
        if low > 0:
            add(ranges, stop_of(ranges, low - 1), stop, capacity)
        else:
            add(ranges, start, start_of(ranges, 0), capacity)


@inline
def remove(ranges: int, start: int, stop: int, capacity: int) -> None:
    """Remove a range, present or not; a full set keeps one that would be split."""
    count = load(ranges)
    if start >= stop or count == 0:
        return
    low = 0
    while low < count and stop_of(ranges, low) <= start:
        low += 1
    high = low
    while high < count and start_of(ranges, high) < stop:
        high += 1
    if low >= high:
        return
    before, after = start_of(ranges, low), stop_of(ranges, high - 1)
    left, right = before < start, after > stop
    if left and right and high - low == 1 and count >= capacity:
        return
    kept = 0
    if left:
        kept += 1
    if right:
        kept += 1
    splice(ranges, low, high, kept)
    if left:
        put(ranges, low, before, start)
        low += 1
    if right:
        put(ranges, low, stop, after)


@inline
def contains(ranges: int, value: int) -> bool:
    """Return True if an integer is in the set."""
    i = load(ranges) - 1
    while i >= 0:
        if start_of(ranges, i) <= value:
            return value < stop_of(ranges, i)
        i -= 1
    return False


@inline
def next_missing(ranges: int, start: int, stop: int) -> tuple[int, int]:
    """Return the first part of [start, stop) that is not in the set; (stop, stop) if all is."""
    count = load(ranges)
    low = count
    while low > 0 and stop_of(ranges, low - 1) > start:
        low -= 1
    at = start
    while low < count and at < stop:
        if start_of(ranges, low) > at:
            return at, min(start_of(ranges, low), stop)
        at = stop_of(ranges, low)
        low += 1
    return min(at, stop), stop


@inline
def covers(ranges: int, length: int) -> bool:
    """Return True if the set is [0, length)."""
    if length == 0:
        return True
    return load(ranges) == 1 and start_of(ranges, 0) == 0 and stop_of(ranges, 0) == length
