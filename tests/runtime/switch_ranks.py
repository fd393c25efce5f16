"""Rank functions of the tests of software switches."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

import miraccl
from miraccl import clock
from miraccl.errors import MiracclError


def plan_of(comm: Any) -> str:
    return str(comm.last_plan.algo)


def operations() -> list[str]:
    """Run all operations of a switch on two communicators in turns; return their algorithms."""
    found = []
    comm = miraccl.init()
    child = comm.split(0, -comm.rank)
    assert child is not None
    with comm, child as other:
        other.use_switch(os.environ["MIRACCL_SWITCH"], "always")
        for count in (1, 1000, 70_001):
            for group in (comm, other):
                n, rank = group.nranks, group.rank
                for dtype, op in (
                    (np.float32, miraccl.SUM),
                    (np.float32, miraccl.AVG),
                    (np.int32, miraccl.MAX),
                    (np.float16, miraccl.PreMulSum(2.0)),
                ):
                    base = np.arange(count * n) % 5
                    total: Any = n * base + sum(range(n))
                    if op is miraccl.AVG:
                        total = total / n
                    elif op is miraccl.MAX:
                        total = base + n - 1
                    elif op is not miraccl.SUM:
                        total = 2 * total
                    x = (base + rank).astype(dtype)
                    block = group.reduce_scatter(x, op=op)
                    want = total[rank * count : (rank + 1) * count]
                    assert np.array_equal(block, want.astype(dtype)), (count, op)
                    algo = plan_of(group)
                    assert np.array_equal(group.all_reduce(x, op=op), total.astype(dtype))
                    found += [algo, plan_of(group)]
                gathered = group.all_gather(np.full(count, rank, np.int64))
                assert np.array_equal(gathered, np.repeat(np.arange(n), count))
                found.append(plan_of(group))
        check_fairness(comm, other)
    return sorted(set(found))


def collnet() -> list[tuple[str, str]]:
    """Run operations for which NCCL_ALGO names CollNet, and one for which it does not."""
    found = []
    with miraccl.init() as comm:

        def plan() -> tuple[str, str]:
            last: Any = comm.last_plan
            return last.algo, last.reason

        x = np.arange(5000, dtype=np.float32)
        assert np.array_equal(comm.all_reduce(x.copy()), comm.nranks * x)
        found.append(plan())
        assert np.array_equal(comm.all_gather(x), np.tile(x, comm.nranks))
        found.append(plan())
    return found


def check_fairness(first: Any, second: Any) -> None:
    """Check that neither of two communicators gets all of the switch."""
    works = [
        [group.all_reduce(np.ones(1 << 16, np.float32), async_op=True) for _ in range(20)]
        for group in (first, second)
    ]
    while not any(group[-1].done() for group in works):
        clock.sleep(0.001)
    done = [sum(work.done() for work in group) for group in works]
    assert min(done) >= 4, done
    for group in works:
        for work in group:
            assert (work.wait() == first.nranks).all()


def death(pid_file: str) -> tuple[str, str, list[float], str]:
    """Return (plan before, error, sum after shrink, plan after) of a switch that is killed."""
    comm = miraccl.init()
    x = comm.all_reduce(np.ones(5000, np.float32))
    assert (x == comm.nranks).all()
    before = plan_of(comm)
    comm.barrier()
    if comm.rank == 0:
        os.kill(int(Path(pid_file).read_text()), signal.SIGKILL)
    text = ""
    try:
        for _ in range(10000):
            comm.all_reduce(np.ones(5000, np.float32))
    except MiracclError as error:
        text = f"{type(error).__name__}: {error}"
    with comm.shrink() as rest:
        total = rest.all_reduce(np.ones(3, np.float32)).tolist()
        return before, text, total, plan_of(rest)


def refused(secret: str) -> str:
    """Return the error of a rank; ``secret`` replaces the job's for the switch."""
    if secret:
        os.environ["MIRACCL_SECRET"] = secret
    try:
        miraccl.init().finalize()
    except MiracclError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def full() -> str:
    """Return the error of a second communicator on a switch that serves one."""
    comm = miraccl.init()
    child = comm.split(0, 0)
    assert child is not None
    with comm, child as other:
        try:
            other.use_switch(os.environ["MIRACCL_SWITCH"])
        except MiracclError as error:
            assert (other.all_reduce(np.ones(2)) == comm.nranks).all()
            return str(error)
    return ""
