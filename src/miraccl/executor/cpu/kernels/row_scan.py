"""Scan of an array for rows that are not zero, and the lists of rows made from bitmaps.

A bitmap has a bit per row, in words. The scan reads memory once and nothing else, so it runs at the
bandwidth of memory. ``schedule.rows.select_rows`` is the specification of ``select``.
"""

from __future__ import annotations

from typing import Any

from numba import types

from miraccl.executor.cpu.kernels import layout
from miraccl.native.intrinsics import any_of_256_bytes, inline, load, memcpy, store

EVERY_2ND, EVERY_4TH, EVERY_8TH = 0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F
FIRST_OF_4 = 0x1111111111111111


@inline
def count_bits(word: int) -> int:
    word -= (word >> 1) & EVERY_2ND
    word = (word & EVERY_4TH) + ((word >> 2) & EVERY_4TH)
    return (((word + (word >> 4)) & EVERY_8TH) * 0x0101010101010101) >> 56


@inline
def is_set(start: int, nbytes: int, spare: int) -> bool:
    """Return True if a bit of a row is set; ``spare`` is the address of a word."""
    held, blocks = 0, nbytes >> 8
    for i in range(blocks):
        held |= any_of_256_bytes(start + 256 * i)
    start, nbytes = start + 256 * blocks, nbytes & 255
    words, left = nbytes >> 3, nbytes & 7
    for i in range(words):
        held |= load(start + 8 * i)
    if left != 0:
        store(spare, 0)
        memcpy(spare, start + 8 * words, left)
        held |= load(spare)
    return held != 0


def scan(source: int, nbytes: int, row_bytes: int, bitmap: int) -> int:
    """Write the bitmap of the rows of ``nbytes`` bytes; return the number of rows that are set.

    The word after the bitmap is scratch.
    """
    rows = (nbytes + row_bytes - 1) // row_bytes
    words, total = (rows + 63) // 64, 0
    spare, blocks, whole = bitmap + 8 * words, row_bytes // 256, 0
    if row_bytes == 256 * blocks:
        whole = nbytes // (64 * row_bytes)
    at = source
    for word in range(whole):
        bits = 0
        for i in range(64):
            held = any_of_256_bytes(at)
            for block in range(1, blocks):
                held |= any_of_256_bytes(at + 256 * block)
            bits |= types.int64(held != 0) << i
            at += row_bytes
        store(bitmap + 8 * word, bits)
        total += count_bits(bits)
    for word in range(whole, words):
        bits, first = 0, word * 64
        for i in range(min(64, rows - first)):
            low = (first + i) * row_bytes
            if is_set(source + low, min(row_bytes, nbytes - low), spare):
                bits |= 1 << i
        store(bitmap + 8 * word, bits)
        total += count_bits(bits)
    return total


def coarsen(bitmap: int, words: int, target: int, unused: int) -> int:
    """Write the bitmap of rows four times as large; return how many of them are set.

    ``target`` may be ``bitmap``.
    """
    total = 0
    for word in range((words + 3) // 4):
        bits = 0
        for part in range(min(4, words - 4 * word)):
            fine = load(bitmap + 8 * (4 * word + part))
            fine |= (fine >> 1) & 0x7FFFFFFFFFFFFFFF
            fine |= (fine >> 2) & 0x3FFFFFFFFFFFFFFF
            fine &= FIRST_OF_4
            for i in range(16):
                bits |= ((fine >> (4 * i)) & 1) << (16 * part + i)
        store(target + 8 * word, bits)
        total += count_bits(bits)
    return total


def count(bitmap: int, words: int, unused: int, also_unused: int) -> int:
    """Return the number of bits that are set."""
    total = 0
    for word in range(words):
        total += count_bits(load(bitmap + 8 * word))
    return total


@inline
def end_part(starts: int, rnd: int, nrounds: int, at: int) -> None:
    """Write the starts of the rounds that a part has no rows for, and its end."""
    for number in range(rnd + 1, nrounds + 1):
        store(starts + 8 * number, at)


@inline
def select_table(record: int, bitmap: int, starts: int, at: int) -> int:
    """Write the list of one table from position ``at`` on, and its starts; return its end."""
    words, parts = load(record + layout.SELECT_WORDS), load(record + layout.SELECT_PARTS)
    per_round, nrounds = (
        load(record + layout.SELECT_PER_ROUND),
        load(record + layout.SELECT_NROUNDS),
    )
    union, total = load(record + layout.SELECT_UNION), load(record + layout.SELECT_TOTAL)
    lists = load(record + layout.SELECT_LISTS)
    part, rnd, low, high, k = 0, 0, 0, total // parts, 0
    store(starts, at)
    for word in range(words):
        left, held = load(union + 8 * word), load(bitmap + 8 * word)
        while left != 0:
            bit = left & -left
            left &= left - 1
            while k == high:
                end_part(starts, rnd, nrounds, at)
                starts += 8 * (nrounds + 1)
                part += 1
                rnd, low, high = 0, k, total * (part + 1) // parts
                store(starts, at)
            if k - low == (rnd + 1) * per_round:
                rnd += 1
                store(starts + 8 * rnd, at)
            if held & bit != 0:
                store(lists + 8 * at, 64 * word + count_bits(bit - 1))
                at += 1
            k += 1
    while part < parts:
        end_part(starts, rnd, nrounds, at)
        starts += 8 * (nrounds + 1)
        part += 1
        rnd = 0
        if part < parts:
            store(starts, at)
    return at


def select(record: int, unused: int, also_unused: int, unused_too: int) -> int:
    """Write lists and starts of all tables (``SELECT_*``); return the length of the lists."""
    at, bitmaps = 0, load(record + layout.SELECT_BITMAPS)
    starts = load(record + layout.SELECT_STARTS)
    stride = 8 * load(record + layout.SELECT_PARTS) * (load(record + layout.SELECT_NROUNDS) + 1)
    for table in range(load(record + layout.SELECT_NTABLES)):
        bitmap = load(bitmaps + 8 * table)
        at = select_table(record, bitmap, starts + table * stride, at)
    return at


def merge(record: int, unused: int, also_unused: int, unused_too: int) -> int:
    """Merge two ascending lists without duplicates (``MERGE_*``); return the union's length."""
    a, b = load(record + layout.MERGE_FIRST), load(record + layout.MERGE_SECOND)
    a_end = a + 8 * load(record + layout.MERGE_FIRST_COUNT)
    b_end = b + 8 * load(record + layout.MERGE_SECOND_COUNT)
    start = load(record + layout.MERGE_UNION)
    to = start
    while a < a_end and b < b_end:
        left, right = load(a), load(b)
        store(to, min(left, right))
        to += 8
        if left <= right:
            a += 8
        if right <= left:
            b += 8
    memcpy(to, a, a_end - a)
    to += a_end - a
    memcpy(to, b, b_end - b)
    return (to + b_end - b - start) // 8


def locate(union: int, some: int, number: int, positions: int) -> int:
    """Write the positions in ``union`` of the entries of an ascending part of it."""
    at = 0
    for i in range(number):
        wanted = load(some + 8 * i)
        while load(union + 8 * at) != wanted:
            at += 1
        store(positions + 8 * i, at)
    return number


EXPORTS: dict[str, Any] = {
    "scan": scan,
    "coarsen": coarsen,
    "count": count,
    "select": select,
    "merge": merge,
    "locate": locate,
}
