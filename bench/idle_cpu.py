"""Cost of waiting: processor time of ranks that wait for a late one.

    python bench/idle_cpu.py
    python bench/idle_cpu.py --ranks 4 --seconds 2 --out idle-cpu

Rank 0 is late by some seconds while the others wait in an operation. A library that polls uses a
core per rank, one that sleeps almost nothing. The share is processor time of the waiting rank /
time waited, in percent; the maximum over ranks.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import common
import numpy as np

import miraccl
from miraccl.tools import launch
from miraccl.tools.perf.orchestrator import virtual_host_environ
from miraccl.tools.spawn import RankContext, Ranks


def waits(comm: Any) -> dict[str, Callable[[], Any]]:
    """Return the operations in which the ranks wait; rank 0 is late."""
    small, large = np.zeros(2, np.float32), np.zeros(1 << 20, np.float32)

    def receive() -> None:
        if comm.rank == 0:
            for peer in range(1, comm.nranks):
                comm.send(small, dst=peer)
        else:
            comm.recv(small, src=0)

    return {
        "barrier": comm.barrier,
        "all_reduce, 8 B": lambda: comm.all_reduce(small),
        "all_reduce, 4 MiB": lambda: comm.all_reduce(large),
        "broadcast, 4 MiB": lambda: comm.broadcast(large, root=0),
        "recv, 8 B": receive,
    }


def rank_main(context: RankContext, seconds: float) -> dict[str, float]:
    """Return the percentage of a core by operation (0 for rank 0, which does not wait)."""
    shares = {}
    with miraccl.init() as comm:
        for name, wait in waits(comm).items():
            wait()
            comm.barrier()
            started, used = time.monotonic(), _cpu_seconds()
            if comm.rank == 0:
                time.sleep(seconds)
            wait()
            shares[name] = (
                0.0
                if comm.rank == 0
                else 100 * (_cpu_seconds() - used) / (time.monotonic() - started)
            )
    return shares


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument(
        "--hosts", type=int, default=1, help="let ranks behave as if on so many hosts (sockets)"
    )
    common.add_output_option(parser)
    args = parser.parse_args()
    machine = common.describe_machine()
    launch.warm_up()

    def environ(rank: int) -> dict[str, str]:
        return {**of_rank(rank), **virtual_host_environ(rank, args.ranks, args.hosts)}

    with (
        launch.local_job(args.ranks) as of_rank,
        Ranks(rank_main, args.ranks, (args.seconds,), environ=environ) as ranks,
    ):
        ranks.wait(time.monotonic() + 60 + 10 * args.seconds)
        if failure := ranks.first_failure():
            raise SystemExit(f"{failure.describe()}\n{failure.error}")
        shares = [o.value for o in ranks.outcomes]
    worst = {name: max(share[name] for share in shares) for name in shares[0]}
    table = common.markdown_table(
        ["waiting in", "percent of a core"],
        [(name, f"{value:.2f}") for name, value in worst.items()],
    )
    text = (
        common.heading(
            f"What waiting {args.seconds:g} s costs, {args.ranks} ranks, {args.hosts} host(s)",
            machine,
        )
        + "\n"
        + table
    )
    common.save(args.out, {"machine": machine, "percent": worst}, text)


if __name__ == "__main__":
    main()
