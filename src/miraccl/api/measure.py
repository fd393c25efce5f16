"""Measurement of this machine: the constants of ``planning.cost_model``, in one or two seconds.

``python -m miraccl.api.measure`` starts two ranks that run real operations, prints the constants
after each step, a line of JSON each, and writes the last ones to the cache; the first communicator
of a machine runs it. Each figure is
the least disturbed of several repetitions. A repetition in which a rank waited for a core does not
count, so a busy machine gets more of them (at most ``RETRY_FACTOR`` times as many).
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from miraccl import clock
from miraccl.api.communicator import Communicator
from miraccl.bootstrap.hub import create_hub
from miraccl.bootstrap.unique_id import UniqueId
from miraccl.executor.cpu.context import call_kernel, fold_kernel
from miraccl.executor.cpu.kernels import layout
from miraccl.native import cache
from miraccl.planning.cost_model import CpuConstants
from miraccl.planning.tuning import CACHE_FILE, MEASURED_FOLD, MEASURING_VARIABLE
from miraccl.runtime.engine_state import SHARED_CORES

SINGLE_COPY_SIZES = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
RETRY_FACTOR = 6
TURNS = 3  # turns of each compared variant
#: Pairs of buffers to average over: the placement of their pages decides how they fit the caches.
PLACEMENTS = 4
#: Share of a repetition spent waiting for a core from which it counts as disturbed.
MAX_WAIT_SHARE = 0.02
#: A single copy must take less than this share of the time of two copies.
CLEAR_GAIN = 0.9
EXCHANGE_SIZES = tuple(128 << 10 << i for i in range(6))  # bytes of a block
EXCHANGE_GAIN = 0.95  # CLEAR_GAIN for blocks that are read whole
PAGE = 4096  # bytes
LOOP_BYTES = 64 << 10  # bytes of a copy in the comparison of positions in a page
ALIAS_COST = 2.0  # an unfavourable position takes this many times as long
SWAP_SIZES = (8 << 10, 128 << 10)  # bytes of a block
SWAP_GAIN = 0.97  # CLEAR_GAIN for slots that change hands


def runqueue_wait_s() -> float:
    """Return the seconds this thread was runnable without a core, since its start; 0 if unknown."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def timed(action: Callable[[], None]) -> tuple[float, bool]:
    """Return (seconds that ``action`` took, True if other processes took the core during it)."""
    waited, start = runqueue_wait_s(), clock.perf_counter()
    action()
    seconds = clock.perf_counter() - start
    return seconds, runqueue_wait_s() - waited > MAX_WAIT_SHARE * seconds


def best_us(action: Callable[[], None], budget_s: float) -> float:
    """Return the shortest time of one call in microseconds.

    Undisturbed calls count towards ``budget_s``; at least three are made.
    """
    action()
    best, spent, begun, least = float("inf"), 0.0, clock.perf_counter(), 3
    while (
        least > 0 or spent < budget_s
    ) and clock.perf_counter() < begun + RETRY_FACTOR * budget_s:
        seconds, disturbed = timed(action)
        best = min(best, seconds)
        if not disturbed:
            spent += seconds
            least -= 1
    return best * 1e6


def measure_folds(constants: CpuConstants) -> CpuConstants:
    """Measure the bandwidth of reducing two vectors into one of them, capped by that of copies."""
    fold = fold_kernel(*MEASURED_FOLD)
    keep = np.zeros(layout.FOLD_BLOCK, np.int64)
    folds = []
    for size, copy in zip(constants.sizes, constants.copy, strict=True):
        count = size // 2 // 4  # the working set is two vectors
        a, b = np.zeros(count, np.float32), np.zeros(count, np.float32)
        sources = np.array([keep.ctypes.data, a.ctypes.data, b.ctypes.data], np.int64)
        action = partial(call_kernel, fold, b.ctypes.data, sources.ctypes.data, 2)
        calls = max(1, min(100, (1 << 20) // a.nbytes))
        overhead = best_us(partial(_repeat, action, 0, calls), 0.005)
        time_us = best_us(partial(_repeat, action, count, calls), 0.02) - overhead
        folds.append(round(min(copy, calls * a.nbytes / max(time_us, 0.01)), 1))
    return replace(constants, fold=tuple(folds))


def _repeat(action: Callable[[int], object], n: int, calls: int) -> None:
    for _ in range(calls):
        action(n)


def _stream(comm: Communicator, x: np.ndarray, count: int) -> None:
    """Send the same message ``count`` times from rank 0 to rank 1."""
    for _ in range(count):
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            comm.recv(x, 0)


def _round_trips(comm: Communicator, x: np.ndarray, count: int) -> Callable[[], None]:
    def trips() -> None:
        for _ in range(count):
            if comm.rank == 0:
                comm.send(x, 1)
                comm.recv(x, 1)
            else:
                comm.recv(x, 0)
                comm.send(x, 0)

    return trips


def _maximum(comm: Communicator, values: np.ndarray) -> np.ndarray:
    """Return the largest of each value over the ranks."""
    # A gather and not a reduction: a reduction of another type and operator would be compiled
    # first, which takes 0.6 s.
    gathered = np.zeros((comm.nranks, len(values)), values.dtype)
    comm.all_gather(values, gathered)
    return np.asarray(gathered.max(axis=0))


def _best_collective_us(comm: Communicator, action: Callable[[], None], repeats: int) -> float:
    """Return the shortest time of ``repeats`` undisturbed runs of an action on both ranks."""
    best = float("inf")
    for _ in range(RETRY_FACTOR * repeats):
        comm.barrier()
        seconds, disturbed = timed(action)
        best = min(best, seconds)
        repeats -= not _maximum(comm, np.array([disturbed], np.int64))[0]
        if not repeats:
            break
    return best * 1e6


def measure_ranks(
    comm: Communicator, constants: CpuConstants, report: Callable[[CpuConstants], None]
) -> CpuConstants:
    """Measure bandwidth and latency between two ranks, and when a single copy is faster.

    ``report`` is called after each step, the ones with the largest effect on plans first.
    """
    comm._core.context.set(layout.CTX_LOOP_COPY, int(constants.loop_copy))
    constants = replace(constants, single_copy_from=_single_copy_from(comm))
    report(constants)
    swaps = _swapping_slots_pays(comm)
    constants = replace(
        constants, swap_slots=swaps, exchange_copy_from=_exchange_copy_from(comm, swaps)
    )
    report(constants)
    copies = []
    for size in constants.sizes:
        x = np.zeros(size // 2 // 4, np.float32)  # the working set is one vector on each side
        count = max(1, min(200, (8 << 20) // x.nbytes))
        copies.append(
            round(
                count * x.nbytes / _best_collective_us(comm, partial(_stream, comm, x, count), 6), 1
            )
        )
    small = np.zeros(1, np.float32)
    latency = _best_collective_us(comm, _round_trips(comm, small, 200), 8) / 400
    constants = replace(constants, copy=tuple(copies), latency_us=round(latency, 4))
    report(constants)
    return replace(constants, switch_us=round(_switch_us(comm, small), 3))


def _switch_us(comm: Communicator, small: np.ndarray) -> float:
    """Return the time until a rank runs that waits for the core of the other one."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    for word, value in (
        (layout.CTX_SPIN, SHARED_CORES.spin),
        (layout.CTX_YIELDS, SHARED_CORES.yields),
        (layout.CTX_MIGRATE, 0),
    ):
        comm._core.context.set(word, value)
    try:
        return _best_collective_us(comm, _round_trips(comm, small, 50), 5) / 100
    finally:
        os.sched_setaffinity(0, cores)


def _single_copy_from(comm: Communicator) -> int:
    core = comm._core
    if not core.fabric.addressable:  # the same on all ranks, unlike the permissions of one pair
        return -1
    verdict = np.array([-1], np.int64)
    for size in reversed(SINGLE_COPY_SIZES):
        x = np.zeros(size // 4, np.float32)
        repeats = 3 if size > 4 << 20 else 5
        two = _best_collective_us(comm, _round_trips(comm, x, 1), repeats)
        core.context.set(layout.CTX_P2P_DIRECT, 1)
        one = _best_collective_us(comm, _round_trips(comm, x, 1), repeats)
        core.context.set(layout.CTX_P2P_DIRECT, -1)
        faster = np.array([int(one < CLEAR_GAIN * two)], np.int64)
        comm.broadcast(faster)
        if not faster[0]:
            break
        verdict[0] = size
    return int(verdict[0])


def _compare_in_turns(
    comm: Communicator,
    variants: Sequence[Callable[[], None]],
    before: Callable[[], None] = lambda: None,
) -> list[float]:
    """Return the shortest time of the slowest rank for each variant.

    The variants take turns, with three undisturbed repetitions per turn.
    """
    best = [float("inf")] * len(variants)
    for _ in range(TURNS):
        for index, variant in enumerate(variants):
            variant()  # warms up caches and slots
            repeats = 3
            for _ in range(RETRY_FACTOR * repeats):
                before()
                comm.barrier()
                worst = _maximum(comm, np.array(timed(variant)))
                best[index] = min(best[index], float(worst[0]))
                repeats -= worst[1] == 0
                if not repeats:
                    break
    return best


def _exchange_copy_from(comm: Communicator, swaps: bool) -> int:
    """Return the block size from which reading private memory speeds up exchanges of fresh data; or
    -1.
    """
    core = comm._core
    if not core.fabric.addressable:
        return -1
    shares = []

    def copying(single_copy: str) -> Communicator:
        session = core.session.subgroup(range(comm.nranks), f"single copy {single_copy}")
        return Communicator.from_session(
            session, replace(core.options, single_copy=single_copy), parent=comm
        )

    with copying("never") as twice, copying("1") as once:
        twice._core.context.set(layout.CTX_SWAP, int(swaps))
        for each in (twice, once):
            each._core.context.set(
                layout.CTX_LOOP_COPY, comm._core.context.get(layout.CTX_LOOP_COPY)
            )
        for size in EXCHANGE_SIZES:
            times, places = np.zeros(2), []
            for _ in range(PLACEMENTS):
                x = np.zeros(comm.nranks * size // 4, np.float32)
                out = np.zeros_like(x)
                places.append((x, out))  # kept alive: the next buffers get other pages
                times += _compare_in_turns(
                    comm,
                    [partial(each.all_to_all, x, out) for each in (twice, once)],
                    partial(x.fill, 0),
                )
            shares.append(float(times[1] / times[0]))
    verdict = np.array([_first_gain(EXCHANGE_SIZES, shares)], np.int64)
    comm.broadcast(verdict)
    return int(verdict[0])


def _first_gain(sizes: Sequence[int], shares: Sequence[float]) -> int:
    """Return the smallest size with a clear gain that the larger sizes keep on average; or -1."""
    for index, size in enumerate(sizes):
        rest = shares[index:]
        if shares[index] < EXCHANGE_GAIN and math.prod(rest) < EXCHANGE_GAIN ** len(rest):
            return size
    return -1


def copies_alias_pages() -> bool:
    """Return True if glibc's ``memcpy`` is slow for a destination 16 bytes further into its page.

    ``rep movsb`` of AMD's Zen 3 and 4 then copies 2 to 3 instead of 30 GB/s; glibc uses it up to
    the size of the second-level cache, until 2.39 (glibc bug 30994). It is the common case: large
    arrays of malloc begin 16 bytes into a page, FIFO slots at its start.
    """
    source, target = (np.ones(LOOP_BYTES + 2 * PAGE, np.uint8) for _ in range(2))
    src, page = source.ctypes.data, -(-target.ctypes.data // PAGE) * PAGE
    aliased, clear = page + (src + 16) % PAGE, page + (src + PAGE // 2) % PAGE
    times = [float("inf")] * 2
    for _ in range(50):
        for index, dst in enumerate((aliased, clear)):
            start = clock.perf_counter()
            ctypes.memmove(dst, src, LOOP_BYTES)
            times[index] = min(times[index], clock.perf_counter() - start)
    return times[0] > ALIAS_COST * times[1]


def _swapping_slots_pays(comm: Communicator) -> bool:
    """Return True if exchanges are clearly faster with slots that change hands."""
    verdict = np.ones(1, np.int64)

    def exchanges(x: np.ndarray, out: np.ndarray, on: int) -> None:
        comm._core.context.set(layout.CTX_SWAP, on)
        for _ in range(30):
            comm.all_gather(x, out)

    for size in SWAP_SIZES:
        x = np.zeros(size // 4, np.float32)
        out = np.zeros(2 * len(x), np.float32)
        off, on = _compare_in_turns(comm, [partial(exchanges, x, out, on) for on in (0, 1)])
        verdict &= on < SWAP_GAIN * off
    comm.broadcast(verdict)
    return bool(verdict[0])


def main() -> None:
    """Fork a second rank, measure with it, store and print the constants."""
    _die_with_parent(int(os.environ.get(MEASURING_VARIABLE, os.getppid())))
    constants = CpuConstants(loop_copy=copies_alias_pages())
    _print(constants)
    fold_kernel(*MEASURED_FOLD)  # while the parent compiles the engine
    unique_id, root = create_hub()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        try:
            _die_with_parent(parent)
            _rank(unique_id, 1, constants)
        finally:
            os._exit(0)
    try:
        constants = measure_folds(_rank(unique_id, 0, constants))
        cache.write(CACHE_FILE, constants.to_json().encode())
        _print(constants)
    finally:
        root.close()
        os.waitpid(child, 0)


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent exits; exit now if it has exited."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _rank(unique_id: UniqueId, rank: int, constants: CpuConstants) -> CpuConstants:
    with Communicator(2, unique_id, rank, timeout=20.0, algo="", proto="") as comm:
        return measure_ranks(comm, constants, _print if rank == 0 else lambda _: None)


def _print(constants: CpuConstants) -> None:
    sys.stdout.write(constants.to_json() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
