"""Kernel source: block lists to extents, sorted by target, merged and checked in one pass.

A block list names blocks of one size in a source and a target. The result is a table of extents
(``layout.EXTENT_BYTES``), in which blocks that continue each other on both sides are one.
"""

from __future__ import annotations

from typing import Any

from miraccl.native.intrinsics import (
    PyEval_RestoreThread,
    PyEval_SaveThread,
    PyLong_AsLong,
    PyLong_FromLong,
    inline,
    load,
    load32,
    store,
)
from miraccl.p2p import segment_layout as layout
from miraccl.p2p.kernels.extents_layout import OVERLAP, RADIX, RADIX_BITS

RELEASE_GIL_BLOCKS = 256


@inline
def sort_pass(source: int, target: int, count: int, counters: int, shift: int) -> None:
    """Sort (key, other) pairs by one digit of the key, stably."""
    for i in range(RADIX):
        store(counters + 8 * i, 0)
    for i in range(count):
        digit = (load(source + 16 * i) >> shift) & (RADIX - 1)
        store(counters + 8 * digit, load(counters + 8 * digit) + 1)
    total = 0
    for i in range(RADIX):
        number = load(counters + 8 * i)
        store(counters + 8 * i, total)
        total += number
    for i in range(count):
        key = load(source + 16 * i)
        digit = (key >> shift) & (RADIX - 1)
        place = load(counters + 8 * digit)
        store(counters + 8 * digit, place + 1)
        store(target + 16 * place, key)
        store(target + 16 * place + 8, load(source + 16 * i + 8))


@inline
def read_pairs(keys: int, others: int, count: int, pairs: int) -> int:
    """Write (key, other) pairs; return the largest key, or -1 if the keys are not sorted."""
    last, is_sorted = -1, True
    largest = 0
    for i in range(count):
        key = load32(keys + 4 * i)
        store(pairs + 16 * i, key)
        store(pairs + 16 * i + 8, load32(others + 4 * i))
        if key < last:
            is_sorted = False
        last = key
        largest = max(largest, key)
    return largest if not is_sorted else -1 - largest


@inline
def find_outside(blocks: int, count: int, nblocks: int) -> int:
    """Return the index of the first block outside 0 <= b < nblocks, or -1."""
    for i in range(count):
        block = load32(blocks + 4 * i)
        if block < 0 or block >= nblocks:
            return i
    return -1


@inline
def merge(pairs: int, count: int, block: int, by_remote: bool, local: int, out: int) -> int:
    """Write the extents of sorted pairs; return their number, or ``OVERLAP - i``.

    Pairs are (target block, source block) and targets are remote for a write.
    """
    made, last_key, last_other = 0, -2, -2
    for i in range(count):
        key, other = load(pairs + 16 * i), load(pairs + 16 * i + 8)
        if key == last_key:
            return OVERLAP - key
        if key == last_key + 1 and other == last_other + 1 and made > 0:
            extent = out + (made - 1) * layout.EXTENT_BYTES
            store(extent + 16, load(extent + 16) + block)
        else:
            extent = out + made * layout.EXTENT_BYTES
            store(extent, local + block * (other if by_remote else key))
            store(extent + 8, block * (key if by_remote else other))
            store(extent + 16, block)
            made += 1
        last_key, last_other = key, other
    return made


@inline
def build(words: int) -> int:
    """Build the extents of the request in ``words`` (``extents.REQUEST``)."""
    local_blocks, remote_blocks = load(words), load(words + 8)
    count, block = load(words + 16), load(words + 24)
    outside = find_outside(local_blocks, count, load(words + 32))
    if outside >= 0:
        return -1 - 2 * outside
    outside = find_outside(remote_blocks, count, load(words + 40))
    if outside >= 0:
        return -2 - 2 * outside
    writes = load(words + 64) != 0
    pairs, other = load(words + 72), load(words + 80)
    if writes:
        largest = read_pairs(remote_blocks, local_blocks, count, pairs)
    else:
        largest = read_pairs(local_blocks, remote_blocks, count, pairs)
    shift = 0
    while largest >= 0 and largest >> shift != 0:
        sort_pass(pairs, other, count, load(words + 88), shift)
        pairs, other = other, pairs
        shift += RADIX_BITS
    return merge(pairs, count, block, writes, load(words + 48), load(words + 56))


def build_extents(self: int, args: int, nargs: int) -> int:
    """``build_extents(words)``: number of extents, or a negative error."""
    words = PyLong_AsLong(load(args))
    if load(words + 16) < RELEASE_GIL_BLOCKS:
        return PyLong_FromLong(build(words))
    state = PyEval_SaveThread()
    result = build(words)
    PyEval_RestoreThread(state)
    return PyLong_FromLong(result)


EXPORTS: dict[str, Any] = {"build_extents": build_extents}
