"""Bitmaps and lists of rows, by the compiled scan: from an array to the rows of a run."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from miraccl import native
from miraccl.executor.cpu.context import call_kernel
from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.lower import Rows, Words
from miraccl.schedule.ir import Schedule
from miraccl.schedule.rows import union_table

SCAN = "miraccl.executor.cpu.kernels.row_scan"


@functools.cache
def _kernel(name: str) -> int:
    return native.library(SCAN).address(native.PREFIX + name)


def words_for(rows: int) -> int:
    """Return the words of a bitmap."""
    return -(-rows // 64)


def scan(address: int, nbytes: int, row_bytes: int, bitmap: Words) -> int:
    """Write the bitmap of the rows that are not zero; return their number.

    Args:
        bitmap: At least one word more than the rows need.
    """
    return call_kernel(_kernel("scan"), address, nbytes, row_bytes, int(bitmap.ctypes.data))


def coarsen(bitmap: Words) -> Words:
    """Return the bitmap of rows four times as large."""
    coarse = np.empty(-(-len(bitmap) // 4), np.int64)
    call_kernel(
        _kernel("coarsen"), int(bitmap.ctypes.data), len(bitmap), int(coarse.ctypes.data), 0
    )
    return coarse


def count(bitmap: Words) -> int:
    """Return the number of rows that are set."""
    return call_kernel(_kernel("count"), int(bitmap.ctypes.data), len(bitmap), 0, 0)


def table_bitmaps(schedule: Schedule, bitmaps: Sequence[Words]) -> list[Words]:
    """Return the bitmap of each table of ``schedule`` from those of the ranks."""
    found = []
    for ranks in schedule.tables:
        members = [bitmap for rank, bitmap in enumerate(bitmaps) if ranks >> rank & 1]
        found.append(members[0] if len(members) == 1 else np.bitwise_or.reduce(members))
    return found


def select(
    schedule: Schedule,
    bitmaps: Sequence[Words],
    *,
    row_bytes: int,
    total_bytes: int,
    slot_bytes: int,
    count_elements: int,
    agreed: int,
) -> Rows:
    """Return the rows of a run from the bitmaps of the ranks.

    Args:
        row_bytes, total_bytes: Bytes of a row and of the block.
        slot_bytes: Most bytes of a message, at least those of a row.
        count_elements: Elements of the block.
        agreed: Value that ranks compare in the run's signature.
    """
    tables = table_bitmaps(schedule, bitmaps)
    union = tables[union_table(schedule)]
    total = count(union)
    per_round = max(1, slot_bytes // row_bytes)
    longest = max(
        total * (part + 1) // schedule.parts - total * part // schedule.parts
        for part in range(schedule.parts)
    )
    nrounds = max(1, -(-longest // per_round))
    lists = np.empty(sum(map(count, tables)) + 1, np.int64)
    starts = np.empty(len(tables) * schedule.parts * (nrounds + 1), np.int64)
    addresses = np.array([table.ctypes.data for table in tables], np.int64)
    record = np.zeros(layout.SELECT_SIZE // 8, np.int64)
    for place, value in (
        (layout.SELECT_BITMAPS, addresses.ctypes.data),
        (layout.SELECT_NTABLES, len(tables)),
        (layout.SELECT_UNION, union.ctypes.data),
        (layout.SELECT_WORDS, len(union)),
        (layout.SELECT_TOTAL, total),
        (layout.SELECT_PARTS, schedule.parts),
        (layout.SELECT_PER_ROUND, per_round),
        (layout.SELECT_NROUNDS, nrounds),
        (layout.SELECT_LISTS, lists.ctypes.data),
        (layout.SELECT_STARTS, starts.ctypes.data),
    ):
        record[place // 8] = value
    call_kernel(_kernel("select"), int(record.ctypes.data), 0, 0, 0)
    zero = np.zeros(-(-row_bytes // 8) + 8, np.int64)
    words = np.zeros(layout.ROWS_SIZE // 8, np.int64)
    for place, value in (
        (layout.ROWS_BYTES, row_bytes),
        (layout.ROWS_TOTAL, total_bytes),
        (layout.ROWS_PARTS, schedule.parts),
        (layout.ROWS_NROUNDS, nrounds),
        (layout.ROWS_LISTS, lists.ctypes.data),
        (layout.ROWS_STARTS, starts.ctypes.data),
        (layout.ROWS_ZERO, zero.ctypes.data),
    ):
        words[place // 8] = value
    return Rows(
        words=words,
        nrounds=nrounds,
        count=count_elements,
        agreed=agreed,
        moved_bytes=2 * total * row_bytes,
        owned=(lists, starts, zero),
    )


def merge(lists: Sequence[Words]) -> Words:
    """Return the union of ascending lists without duplicates."""
    union = lists[0] if lists else np.empty(0, np.int64)
    for other in lists[1:]:
        merged = np.empty(len(union) + len(other), np.int64)
        record = np.array(
            [
                union.ctypes.data,
                len(union),
                other.ctypes.data,
                len(other),
                merged.ctypes.data,
            ],
            np.int64,
        )
        union = merged[: call_kernel(_kernel("merge"), int(record.ctypes.data), 0, 0, 0)]
    return union


def locate(union: Words, some: Words) -> Words:
    """Return the positions in ``union`` of the entries of ``some``, an ascending part of it."""
    found = np.empty(len(some), np.int64)
    call_kernel(
        _kernel("locate"),
        int(union.ctypes.data),
        int(some.ctypes.data),
        len(some),
        int(found.ctypes.data),
    )
    return found
