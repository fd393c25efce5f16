"""Kernel source: copies between two processes of one host.

An initiator announces each access in its line of the pair segment before it reads the generation of
the region; the owner raises the generation before it reads the lines. With a full fence on both
sides at least one of them sees the other (Dekker), so no access begins after ``deregister`` has
found all lines free of the region. The lines name regions as hazard pointers name objects (Michael,
"Hazard Pointers", 2004).
"""

from __future__ import annotations

from typing import Any

from miraccl.native.copies import copy_apart
from miraccl.native.intrinsics import (
    PyEval_RestoreThread,
    PyEval_SaveThread,
    PyLong_AsLong,
    PyLong_FromLong,
    errno_location,
    exchange,
    fence,
    inline,
    load,
    load32,
    load_acquire,
    memcpy,
    process_vm_readv,
    process_vm_writev,
    store,
    store_release,
    stream_line,
)
from miraccl.p2p import segment_layout as layout

#: A step on more bytes releases the GIL: it takes longer than two switches of threads.
RELEASE_GIL_BYTES = 1 << 14
#: Transfers from this size on are copied past the caches, in parts of at least so many bytes.
STREAM_BYTES, STREAM_PART_BYTES = 8 << 20, 4096


@inline
def begin_access(job: int) -> bool:
    """Announce an access; return False if the region is not the one that was described."""
    exchange(load(job + layout.JOB_ACCESS), load(job + layout.JOB_REGION))
    if load_acquire(load(job + layout.JOB_ENTRY) + layout.ENTRY_GENERATION) == load(
        job + layout.JOB_GENERATION
    ):
        return True
    store_release(load(job + layout.JOB_ACCESS), 0)
    return False


@inline
def copy_past_caches(target: int, source: int, nbytes: int) -> None:
    """Copy without reading the target's lines first, for data larger than the caches."""
    head = min(nbytes, -target & 63)
    memcpy(target, source, head)
    lines = (nbytes - head) // 64
    for i in range(lines):
        stream_line(target + head + 64 * i, source + head + 64 * i)
    done = head + 64 * lines
    memcpy(target + done, source + done, nbytes - done)


@inline
def move_window(job: int, budget: int) -> int:
    """Copy extents between local memory and a mapped window; return the bytes copied."""
    extents, count = load(job + layout.JOB_EXTENTS), load(job + layout.JOB_COUNT)
    base, reads = load(job + layout.JOB_BASE), load(job + layout.JOB_METHOD) == layout.WINDOW_READ
    index, offset = load(job + layout.JOB_INDEX), load(job + layout.JOB_OFFSET)
    moved, large = 0, load(job + layout.JOB_TOTAL) >= STREAM_BYTES
    while index < count and moved < budget:
        extent = extents + index * layout.EXTENT_BYTES
        nbytes = load(extent + 16)
        part = min(nbytes - offset, budget - moved)
        local, remote = load(extent) + offset, base + load(extent + 8) + offset
        source, target = local, remote
        if reads:
            source, target = remote, local
        if large and part >= STREAM_PART_BYTES:
            copy_past_caches(target, source, part)
        else:
            copy_apart(target, source, part)
        moved += part
        offset += part
        if offset == nbytes:
            index += 1
            offset = 0
    if large:
        fence()  # stores past the caches are ordered by a fence only
    store(job + layout.JOB_INDEX, index)
    store(job + layout.JOB_OFFSET, offset)
    return moved


@inline
def add_range(vectors: int, count: int, address: int, nbytes: int) -> int:
    """Append an iovec, or extend the last one if it ends at ``address``; return how many there are.

    Each remote iovec costs the kernel a lock and a lookup of pages (``mm/process_vm_access.c``).
    """
    last = vectors + 16 * (count - 1)
    if count > 0 and load(last) + load(last + 8) == address:
        store(last + 8, load(last + 8) + nbytes)
        return count
    store(vectors + 16 * count, address)
    store(vectors + 16 * count + 8, nbytes)
    return count + 1


@inline
def move_process(job: int, budget: int) -> int:
    """Move extents by one system call; return the bytes moved, or -1 with ``JOB_ERRNO``."""
    extents, count = load(job + layout.JOB_EXTENTS), load(job + layout.JOB_COUNT)
    base = load(load(job + layout.JOB_ENTRY) + layout.ENTRY_ADDRESS)
    vectors = load(job + layout.JOB_VECTORS)
    limit = load(job + layout.JOB_NVECTORS)
    remote_vectors = vectors + 16 * limit
    index, offset = load(job + layout.JOB_INDEX), load(job + layout.JOB_OFFSET)
    nlocal, nremote, total, skip, number = 0, 0, 0, offset, index
    while number < count and nlocal < limit and nremote < limit and total < budget:
        extent = extents + number * layout.EXTENT_BYTES
        part = min(load(extent + 16) - skip, budget - total)
        nlocal = add_range(vectors, nlocal, load(extent) + skip, part)
        nremote = add_range(remote_vectors, nremote, base + load(extent + 8) + skip, part)
        total += part
        number += 1
        skip = 0
    pid = load(job + layout.JOB_PID)
    if load(job + layout.JOB_METHOD) == layout.PROCESS_READ:
        moved = process_vm_readv(pid, vectors, nlocal, remote_vectors, nremote, 0)
    else:
        moved = process_vm_writev(pid, vectors, nlocal, remote_vectors, nremote, 0)
    if moved < 0:
        store(job + layout.JOB_ERRNO, load32(errno_location()))
        return -1
    rest, going = moved, True
    while going and index < count:
        left = load(extents + index * layout.EXTENT_BYTES + 16) - offset
        going = left <= rest
        if going:
            rest -= left
            index += 1
            offset = 0
    store(job + layout.JOB_INDEX, index)
    store(job + layout.JOB_OFFSET, offset + rest)
    return moved


@inline
def step(job: int, budget: int) -> int:
    """Move up to ``budget`` bytes of a job; return a ``STEP_`` result."""
    if load(job + layout.JOB_INDEX) >= load(job + layout.JOB_COUNT):
        return layout.STEP_DONE
    if not begin_access(job):
        return layout.STEP_STALE
    if load(job + layout.JOB_METHOD) <= layout.WINDOW_READ:
        moved = move_window(job, budget)
    else:
        moved = move_process(job, budget)
    store_release(load(job + layout.JOB_ACCESS), 0)
    if moved < 0:
        return layout.STEP_FAILED
    store(job + layout.JOB_DONE, load(job + layout.JOB_DONE) + moved)
    if load(job + layout.JOB_INDEX) >= load(job + layout.JOB_COUNT):
        return layout.STEP_DONE
    return layout.STEP_MORE


@inline
def restart(job: int) -> None:
    store(job + layout.JOB_INDEX, 0)
    store(job + layout.JOB_OFFSET, 0)
    store(job + layout.JOB_DONE, 0)
    store(job + layout.JOB_CANCEL, 0)


@inline
def steps(job: int, budget: int) -> int:
    """Move up to ``budget`` bytes in steps of ``STEP_BYTES``, each an access of its own."""
    result, moved = layout.STEP_MORE, 0
    while result == layout.STEP_MORE and moved < budget:
        before = load(job + layout.JOB_DONE)
        result = step(job, min(budget - moved, layout.STEP_BYTES))
        moved += load(job + layout.JOB_DONE) - before
        if load_acquire(job + layout.JOB_CANCEL) != 0:
            return result
    return result


def step_job(self: int, args: int, nargs: int) -> int:
    """``step_job(job, budget)``: move part of a job and return a ``STEP_`` result; a cancelled one
    ends after a step.
    """
    job, budget = PyLong_AsLong(load(args)), PyLong_AsLong(load(args + 8))
    left = load(job + layout.JOB_TOTAL) - load(job + layout.JOB_DONE)
    if min(left, budget) <= RELEASE_GIL_BYTES:
        return PyLong_FromLong(steps(job, budget))
    state = PyEval_SaveThread()
    result = steps(job, budget)
    PyEval_RestoreThread(state)
    return PyLong_FromLong(result)


def run_job(self: int, args: int, nargs: int) -> int:
    """``run_job(job, line)``: restart a job and move its first ``START_BYTES``."""
    job = PyLong_AsLong(load(args))
    store(job + layout.JOB_ACCESS, PyLong_AsLong(load(args + 8)))
    restart(job)
    if load(job + layout.JOB_TOTAL) <= RELEASE_GIL_BYTES:
        return PyLong_FromLong(step(job, layout.START_BYTES))
    state = PyEval_SaveThread()
    result = steps(job, layout.START_BYTES)
    PyEval_RestoreThread(state)
    return PyLong_FromLong(result)


EXPORTS: dict[str, Any] = {"step_job": step_job, "run_job": run_job}
