"""What a call costs: an all_reduce of one rank (no communication), of two ranks, prepared operations, and their yardsticks.

    python bench/call_overhead.py
    python bench/call_overhead.py --rounds 30 --out call-overhead

``one rank`` is the cost of the call itself: arguments read, plan looked up, compiled code entered.  The ranks run on their own cores
if there are enough.  Medians over rounds; the smallest is beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import common
import numpy as np

import miraccl
from miraccl.tools import launch
from miraccl.tools.spawn import Context, Ranks


def time_calls(call: Callable[[], Any], calls: int) -> float:
    """Microseconds per call; the loop's own cost (about 0.01 us) is in it."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def subjects(comm: Any) -> dict[str, Callable[[], Any]]:
    """What is called, by name; 8 bytes of float32 unless the name says otherwise."""
    x, y = np.zeros(2, np.float32), np.zeros(2, np.float32)
    large = np.zeros(4096, np.float32)
    prepared, barrier = comm.all_reduce_init(x), comm.barrier
    all_reduce, add = comm.all_reduce, np.add
    return {
        "empty function": lambda: None,
        "numpy.add, two elements": lambda: add(x, y, out=y),
        "barrier": lambda: barrier(),
        "all_reduce in place": lambda: all_reduce(x),
        "all_reduce out of place": lambda: all_reduce(x, out=y),
        "prepared all_reduce": prepared,
        "all_reduce, 16 KiB": lambda: all_reduce(large),
    }


def rank_main(context: Context, rounds: int, calls: int) -> dict[str, list[float]]:
    with miraccl.init() as comm:
        times: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, call in subjects(comm).items():
                comm.barrier()
                times.setdefault(name, []).append(time_calls(call, calls))
        return times


def measure(nranks: int, rounds: int, calls: int) -> dict[str, list[float]]:
    with launch.local_job(nranks) as environ, Ranks(rank_main, nranks, (rounds, calls), environ=environ) as ranks:
        ranks.wait(time.monotonic() + 600)
        failure = ranks.first_failure()
        if failure:
            raise SystemExit(f"{failure.describe()}\n{failure.error}")
        result: dict[str, list[float]] = ranks.outcomes[0].value
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=20000, help="in a row, in a round")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks")
    common.add_output_option(parser)
    args = parser.parse_args()
    machine = common.describe_machine()
    launch.warm_up()
    counts = [int(n) for n in args.ranks.split(",")]
    results = {n: measure(n, args.rounds, args.calls) for n in counts}
    columns = ["call", *(f"{n} rank{'s' * (n > 1)}: median (smallest) us" for n in counts)]
    rows = [
        [name, *(f"{common.median(results[n][name]):.3f} ({min(results[n][name]):.3f})" for n in counts)] for name in results[counts[0]]
    ]
    text = common.heading("What a call costs", machine) + "\n" + common.markdown_table(columns, rows)
    common.save(args.out, {"machine": machine, "us": {str(n): r for n, r in results.items()}}, text)


if __name__ == "__main__":
    main()
