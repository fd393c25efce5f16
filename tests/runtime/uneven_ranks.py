"""Rank functions of the tests of uneven collectives."""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import miraccl
from miraccl import Communicator
from miraccl.errors import MiracclError
from tests.diagnosis.fault_ranks import nobody_left, seen, together, wait_until
from tests.runtime.sweep_ranks import act_as_hosts

# per collective, type and root: four for each power of two of the largest block
PLANS = 100


def count_table(seed: int, nranks: int, most: int) -> np.ndarray:
    """Return a table of counts from (row) to (column), some of them 0."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, most + 1, (nranks, nranks)) * (rng.random((nranks, nranks)) < 0.8)


def count_forms(number: int, counts: Sequence[int]) -> Any:
    """Return the counts in seven forms; the first three need no Python code in repeated calls."""
    array = np.array(counts)
    ways = (
        list(counts),
        tuple(counts),
        array,
        array.astype(np.int32),
        array.astype(np.uint8),
        list(array),
        np.array([array]).T[:, 0],
    )
    return ways[number]


def all_to_all(
    comm: Communicator, table: np.ndarray, say: Callable[[list[int]], Any] = list, out: bool = True
) -> None:
    """Run ``all_to_all_v``; element k from rank a to rank b is 1000 a + 10 b + k."""
    me, n = comm.rank, comm.nranks
    sends, receives = table[me].tolist(), table[:, me].tolist()
    x = np.concatenate(
        [1000 * me + 10 * b + np.arange(c, dtype=np.int32) for b, c in enumerate(sends)]
    )
    want = np.concatenate(
        [1000 * a + 10 * me + np.arange(c, dtype=np.int32) for a, c in enumerate(receives)]
    )
    y = np.full(want.size, -1, np.int32) if out else None
    got = comm.all_to_all_v(x, say(sends), say(receives), y)
    assert y is None or got is y
    assert np.array_equal(got, want), (n, me, table)


def known_counts(
    comm: Communicator, counts: list[int], say: Callable[[list[int]], Any] = list
) -> None:
    """Run the collectives whose counts all ranks know."""
    me, root = comm.rank, len(counts) - 1
    firsts = np.cumsum([0, *counts])
    whole = np.arange(sum(counts), dtype=np.float32) + 1
    part = whole[firsts[me] : firsts[me + 1]].copy()
    assert np.array_equal(comm.all_gather_v(part, say(counts)), whole)
    into = np.zeros_like(whole)
    into[firsts[me] : firsts[me + 1]] = part
    assert np.array_equal(
        comm.all_gather_v(into[firsts[me] : firsts[me + 1]], say(counts), into), whole
    )
    share = np.zeros_like(part)
    assert np.array_equal(
        comm.reduce_scatter_v(whole * (me + 1), say(counts), share),
        part * sum(range(1, comm.nranks + 1)),
    )
    assert np.array_equal(comm.reduce_scatter_v(whole, say(counts), op=miraccl.MAX), part)
    got = comm.gather_v(part, say(counts), root, np.zeros_like(whole) if me == root else None)
    assert np.array_equal(got, whole) if me == root else got is None
    share[:] = 0
    assert np.array_equal(
        comm.scatter_v(whole if me == root else None, say(counts), root, share), part
    )


def shapes() -> None:
    """Run every corner-case table, in every form of counts."""
    with miraccl.init() as comm:
        n = comm.nranks
        alone, to_one, turn = (np.zeros((n, n), np.int64) for _ in range(3))
        alone[0] = np.arange(n) + 1  # one rank sends everything
        to_one[:, n - 1] = 7
        for a in range(n):
            turn[a, (a + 1) % n] = 5
        for table in (
            np.zeros((n, n), np.int64),
            alone,
            to_one,
            turn,
            count_table(1, n, 200),
            count_table(2, n, 40),
        ):
            for number in range(7):
                say = functools.partial(count_forms, number)
                all_to_all(comm, table, say, out=bool(number % 2))
                known_counts(comm, table[0].tolist(), say)
        before = np.arange(n, dtype=np.int64)
        work = [comm.all_to_all_v(before, [1] * n, [1] * n, np.empty(n, np.int64), async_op=True)]
        for seed in range(6):  # the plan is one, and each has counts of its own
            table = count_table(seed, n, 30)
            sends, receives = table[comm.rank].tolist(), table[:, comm.rank].tolist()
            x = np.full(sum(sends), comm.rank, np.int64)
            work.append(
                comm.all_to_all_v(x, sends, receives, np.full(sum(receives), -1), async_op=True)
            )
            all_to_all(comm, count_table(seed + 100, n, 30))
        assert work[0].wait().tolist() == [comm.rank] * n
        for seed, each in enumerate(work[1:]):
            assert np.array_equal(
                each.wait(), np.repeat(np.arange(n), count_table(seed, n, 30)[:, comm.rank])
            )
        with miraccl.group():
            results = [
                comm.all_gather_v(np.full(comm.rank + k, k, np.int32), [r + k for r in range(n)])
                for k in range(3)
            ]
        assert [r.tolist() for r in results] == [
            [k] * sum(r + k for r in range(n)) for k in range(3)
        ]


def rounds(ranks_per_host: int) -> None:
    """Run blocks of many slots next to empty ones, in private and in window memory."""
    act_as_hosts(ranks_per_host)
    with miraccl.init(buffsize=1) as comm:
        for seed in range(5):
            all_to_all(comm, count_table(seed, comm.nranks, 30_000))
            known_counts(comm, count_table(seed, comm.nranks, 30_000)[0].tolist())
        counts = count_table(9, comm.nranks, 60_000)[0].tolist()
        for whole in (comm.empty(sum(counts), np.float32), np.empty(sum(counts), np.float32)):
            part = comm.empty(counts[comm.rank], np.float32)
            part[:] = comm.rank
            comm.all_gather_v(part, counts, whole)
            assert np.array_equal(
                whole, np.repeat(np.arange(comm.nranks, dtype=np.float32), counts)
            )


def new_counts(calls: int) -> dict[str, Any]:
    """Run with new counts in every call and return the number of cached entries."""
    with miraccl.init() as comm:
        n, me, member = comm.nranks, comm.rank, comm._core
        rng = np.random.default_rng(3)
        tables = rng.integers(0, 400, (calls, n, n))
        x, y = np.zeros(400 * n, np.float32), np.zeros(400 * n, np.float32)
        long_ways = [0]
        plan = member.plan

        def counted(call: Any) -> Any:
            long_ways[0] += 1
            return plan(call)

        member.plan = counted  # type: ignore[method-assign]
        found = []
        for number, table in enumerate(tables):
            sends, receives = table[me].tolist(), table[:, me].tolist()
            if number % 10 == 9:  # the long way
                sends, receives = list(table[me]), list(table[:, me])
            comm.all_to_all_v(x[: sum(sends)], sends, receives, y[: sum(receives)])
            counts = table[0].tolist()
            comm.all_gather_v(x[: counts[me]], counts, y[: sum(counts)])
            comm.reduce_scatter_v(x[: sum(counts)], counts, y[: counts[me]])
            comm.gather_v(x[: counts[me]], counts, 0, y[: sum(counts)])
            comm.scatter_v(x[: sum(counts)], counts, 0, y[: counts[me]])
            if number in (calls // 4, calls - 1):
                found.append(resident_bytes())
        kept = {
            "runs": len(member._runs),
            "plans": len(member.planner._plans),
            "private": comm.memory()["private"],
        }
        return {"long ways": long_ways[0], **kept, "grown": found[1] - found[0]}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def until_mismatch(comm: miraccl.Communicator, what: str, then: str) -> None:
    """Run mismatching counts: rank 1 does not expect what rank 0 sends, or the lists differ.

    ``then``: barriers follow, the same again, or nothing.
    """
    n, me = comm.nranks, comm.rank
    sends, receives, counts = [4] * n, [4] * n, [4] * n
    if what in ("less", "nothing") and me == 0:
        sends[1] = 3 if what == "less" else 0
    if what == "not expected" and me == 1:
        receives[0] = 0
    if what == "slots" and me == 0:
        sends[1] = 40_000
    if what.startswith("list") and me == 2:
        counts = [4, 3, 5] if what == "list of the same sum" else [4, 4, 6]

    def call() -> None:
        if what.startswith("list"):
            comm.all_gather_v(np.ones(counts[me], np.float32), counts)
        else:
            comm.all_to_all_v(np.ones(sum(sends), np.float32), sends, receives)

    call()
    if then == "nothing":
        wait_until(lambda: comm._core.faults.fault is not None)
    for _ in range(12):  # a rank that got through fails at its next message or slot
        call() if then == "again" else comm.barrier()


def mismatching_counts(
    what: str, then: str, ranks_per_host: int, timeout: float = 4.0
) -> dict[str, Any]:
    """``until_mismatch`` between processes."""
    act_as_hosts(ranks_per_host)
    comm = miraccl.init(timeout=timeout)
    together(comm)
    start = time.monotonic()
    try:
        until_mismatch(comm, what, then)
        return {"type": "none", "text": ""}
    except MiracclError as error:
        return {**seen(error), "seconds": time.monotonic() - start}
    finally:
        nobody_left(comm)
        comm.finalize()
