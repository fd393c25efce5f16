"""Cost of new counts, as in mixture-of-experts layers: uneven collectives with repeated and new
counts.

    python bench/uneven_counts.py
    python bench/uneven_counts.py --ranks 2,4 --mean 1024 --out uneven-counts

Every rank knows all counts in advance; blocks have ``--mean`` elements of float32 on average. Time
of a call, and processor time of all threads of a rank's process (relevant if ranks share cores),
medians over rounds of the slowest rank. With PyTorch, its ``all_to_all_single`` over this backend
and over Gloo, alternating in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import common
import numpy as np

import miraccl
from miraccl.tools import launch
from miraccl.tools.spawn import RankContext, Ranks

SAME, NEW = "same counts", "new counts"
Calls = Sequence[tuple[Any, ...]]
Subject = tuple[Callable[..., Any], Calls]


class Counts:
    """Tables of counts, [from][to], the same on all ranks and never repeated.

    Round ``r`` begins at table ``r * calls``.
    """

    def __init__(self, nranks: int, mean: int, number: int) -> None:
        self.tables = np.random.default_rng(0).integers(0, 2 * mean + 1, (number, nranks, nranks))
        self.most = 2 * mean * nranks

    def all_to_all(self, rank: int, table: int) -> tuple[list[int], list[int]]:
        return self.tables[table, rank].tolist(), self.tables[table, :, rank].tolist()

    def of_ranks(self, table: int) -> list[int]:
        counts: list[int] = self.tables[table, 0].tolist()
        return counts


def own_subjects(comm: Any, counts: Counts) -> dict[str, Subject]:
    """Return miraccl's calls and the arguments of each call."""
    x, y = np.ones(counts.most, np.float32), np.empty(counts.most, np.float32)
    number, rank = len(counts.tables), comm.rank
    pairs = [counts.all_to_all(rank, i) for i in range(number)]
    lists = [counts.of_ranks(i) for i in range(number)]
    totals = [sum(c) for c in lists]
    return {
        "all_to_all_v": (comm.all_to_all_v, [(x[: sum(s)], s, r, y[: sum(r)]) for s, r in pairs]),
        "all_gather_v": (
            comm.all_gather_v,
            [(x[: c[rank]], c, y[:t]) for c, t in zip(lists, totals, strict=True)],
        ),
        "reduce_scatter_v": (
            comm.reduce_scatter_v,
            [(x[:t], c, y[: c[rank]]) for c, t in zip(lists, totals, strict=True)],
        ),
        "gather_v": (
            comm.gather_v,
            [(x[: c[rank]], c, 0, y[:t]) for c, t in zip(lists, totals, strict=True)],
        ),
        "scatter_v": (
            comm.scatter_v,
            [(x[:t], c, 0, y[: c[rank]]) for c, t in zip(lists, totals, strict=True)],
        ),
    }


def torch_subjects(counts: Counts, rank: int, nranks: int, port: int) -> dict[str, Subject]:
    """Return ``all_to_all_single`` over both backends, with splits in rows."""
    import torch
    import torch.distributed as dist

    import miraccl.torch  # noqa: F401  (registers the backend)

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=nranks
    )
    groups = {"Gloo": dist.group.WORLD, "miraccl": dist.new_group(backend="miraccl")}
    x, y = torch.ones(counts.most), torch.empty(counts.most)
    pairs = [counts.all_to_all(rank, i) for i in range(len(counts.tables))]
    return {
        f"PyTorch, {name}: all_to_all_single": (
            dist.all_to_all_single,
            [(y[: sum(r)], x[: sum(s)], r, s, group) for s, r in pairs],
        )
        for name, group in groups.items()
    }


def time_calls(call: Callable[..., Any], calls: Calls) -> tuple[float, float]:
    """Return microseconds per call: time, and processor time of the process."""
    start, used = time.perf_counter(), time.process_time()
    for arguments in calls:
        call(*arguments)
    return (time.perf_counter() - start) / len(calls) * 1e6, (time.process_time() - used) / len(
        calls
    ) * 1e6


def rank_main(
    context: RankContext, mean: int, rounds: int, calls: int, port: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the results of each round by subject."""
    found: dict[str, list[tuple[float, float]]] = {}
    with miraccl.init() as comm:
        counts = Counts(comm.nranks, mean, (rounds + 1) * calls)
        subjects = own_subjects(comm, counts) | (
            torch_subjects(counts, comm.rank, comm.nranks, port) if port else {}
        )
        for number in range(rounds + 1):
            for name, (call, arguments) in subjects.items():
                fresh = arguments[number * calls : (number + 1) * calls]
                for which, chosen in ((SAME, [arguments[0]] * calls), (NEW, fresh)):
                    call(*arguments[0])
                    comm.barrier()
                    figures = time_calls(call, chosen)
                    if number:  # the first round warms up
                        found.setdefault(f"{name}, {which}", []).append(figures)
    return found


def measure(
    nranks: int, mean: int, rounds: int, calls: int, with_torch: bool
) -> dict[str, tuple[float, float]]:
    """Return (time, processor time) of a call on the slowest rank by subject, as medians."""
    port = free_port() if with_torch else 0
    with (
        launch.local_job(nranks) as environ,
        Ranks(rank_main, nranks, (mean, rounds, calls, port), environ=environ) as ranks,
    ):
        ranks.wait(time.monotonic() + 900)
        failure = ranks.first_failure()
        if failure:
            raise SystemExit(f"{failure.describe()}\n{failure.error}")
        of_ranks: list[dict[str, list[tuple[float, float]]]] = [
            outcome.value for outcome in ranks.outcomes
        ]
    names = of_ranks[0]
    return {
        name: tuple(
            max(common.median(figures[which] for figures in found[name]) for found in of_ranks)
            for which in (0, 1)
        )  # type: ignore[misc]
        for name in names
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def has_torch() -> bool:
    with contextlib.suppress(ImportError):
        import torch.distributed

        return bool(torch.distributed.is_gloo_available())
    return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks")
    parser.add_argument("--mean", type=int, default=64, help="elements of a block on average")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=500, help="in a row, in a round")
    common.add_output_option(parser)
    args = parser.parse_args()
    machine = common.describe_machine()
    launch.warm_up()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    counts = [int(n) for n in args.ranks.split(",")]
    results = {n: measure(n, args.mean, args.rounds, args.calls, has_torch()) for n in counts}
    columns = ["call", *(f"{n} ranks: us (processor)" for n in counts)]
    rows = [
        [name, *("{:.1f} ({:.1f})".format(*results[n][name]) for n in counts)]
        for name in results[counts[0]]
    ]
    title = f"Uneven collectives with counts that are new, blocks of {args.mean} float32 on average"
    text = common.heading(title, machine) + "\n" + common.markdown_table(columns, rows)
    common.save(args.out, {"machine": machine, "us": {str(n): r for n, r in results.items()}}, text)


if __name__ == "__main__":
    main()
