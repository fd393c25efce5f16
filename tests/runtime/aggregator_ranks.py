"""Rank functions of the tests of aggregators: the last processes of a job add up for the others."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

import miraccl
from miraccl.api.init import serve_aggregator
from miraccl.errors import MiracclError


def _is_aggregator() -> bool:
    rank, nranks = int(os.environ["MIRACCL_RANK"]), int(os.environ["MIRACCL_NRANKS"])
    return rank >= nranks - int(os.environ["MIRACCL_AGGREGATORS"])


def sums(deterministic: bool, per_host: int = 0) -> Any:
    """Return (plan, sums match) of a rank, the bytes of each sum of an aggregator.

    ``per_host``: ranks that act as if they were on one host; 0 for all.
    """
    if per_host:
        os.environ["MIRACCL_HOSTID"] = f"host{int(os.environ['MIRACCL_RANK']) // per_host}"
    if _is_aggregator():
        served: list[int] = []
        serve_aggregator(served.append)
        return served
    with miraccl.init(deterministic=deterministic) as comm:
        right = True
        algos = set()
        for count in (1, 5, 100_003):
            for op in (miraccl.SUM, miraccl.MAX, miraccl.PreMulSum(2.0)):
                x = (np.arange(count) % 7 + comm.rank).astype(np.float32)
                comm.all_reduce(x, op=op)
                each = [np.arange(count) % 7 + rank for rank in range(comm.nranks)]
                want = np.max(each, axis=0) if op is miraccl.MAX else np.sum(each, axis=0)
                algos.add(comm.last_plan.algo)  # type: ignore[union-attr]
                right &= bool(
                    (x == want * (2 if op not in (miraccl.SUM, miraccl.MAX) else 1)).all()
                )
        half = comm.all_reduce(np.full(9, 1.5, np.float16), op=miraccl.AVG)
        right &= bool((half == 1.5).all())
        work = comm.all_reduce(np.ones(9, np.float32), async_op=True)
        right &= bool((work.wait() == comm.nranks).all())
        plan = comm.last_plan
        assert plan is not None
        gathered = comm.all_gather(np.array([comm.rank]))
        comm.barrier()  # runs without them, as all others do
        return (
            plan.algo if len(algos) == 1 else sorted(algos),
            right,
            gathered.tolist(),
            comm.nranks,
        )


def death() -> Any:
    """Return (error, sum after shrink) of a rank whose aggregator is killed after two sums."""
    if _is_aggregator():
        served: list[int] = []

        def on_sum(nbytes: int) -> None:
            served.append(nbytes)
            if len(served) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        serve_aggregator(on_sum)
        return None
    comm = miraccl.init()
    text = ""
    try:
        for _ in range(100):
            comm.all_reduce(np.ones(1000, np.float32))
    except MiracclError as error:
        text = f"{type(error).__name__}: {error}"
    with comm.shrink() as rest:
        x = rest.all_reduce(np.ones(4, np.float32))
        plan = rest.last_plan
        assert plan is not None
        return text, x.tolist(), plan.algo
