"""Memory of a communicator: growth of each rank at creation and after operations.

    python bench/memory.py
    python bench/memory.py --ranks 2,4,8,16 --out memory

``private`` is memory of this rank alone, ``share`` its part of shared memory (the kernel's PSS
minus private pages), both as growth since before ``miraccl.init()``, with the library loaded; the
maximum over ranks. Pages of the parent that a forked rank writes to move from share to private,
about 5 MiB of the interpreter. ``told`` is the result of ``comm.memory()``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import common
import numpy as np

import miraccl
from miraccl.tools import launch
from miraccl.tools.spawn import RankContext, Ranks

Sample = tuple[int, int, int]


def read_memory() -> tuple[int, int]:
    """Return (private, proportional share of shared) in KiB, from smaps_rollup (Linux 4.14)."""
    values = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0])
    private = values["Private_Clean"] + values["Private_Dirty"]
    return private, values["Pss"] - private


def rank_main(context: RankContext, nbytes: int) -> dict[str, Sample]:
    """Return the growth in KiB by phase: private, share, and ``comm.memory()``."""
    x = np.ones(nbytes // 4, np.float32)
    private, share = read_memory()

    def sample(comm: miraccl.Communicator) -> Sample:
        comm.barrier()  # the share depends on who has mapped what
        now_private, now_share = read_memory()
        return now_private - private, now_share - share, sum(comm.memory().values()) >> 10

    with miraccl.init() as comm:
        stages = {"communicator": sample(comm)}
        comm.all_reduce(np.ones(2, np.float32))
        stages["after 8 B"] = sample(comm)
        comm.all_reduce(x)
        stages[f"after {nbytes >> 20} MiB"] = sample(comm)
        comm.barrier()
    return stages


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--bytes", type=int, default=16 << 20)
    common.add_output_option(parser)
    args = parser.parse_args()
    machine = common.describe_machine()
    launch.warm_up()
    rows, record = [], {}
    for nranks in (int(n) for n in args.ranks.split(",")):
        with (
            launch.local_job(nranks) as environ,
            Ranks(rank_main, nranks, (args.bytes,), environ=environ) as ranks,
        ):
            ranks.wait(time.monotonic() + 300)
            if failure := ranks.first_failure():
                raise SystemExit(f"{failure.describe()}\n{failure.error}")
            samples = [o.value for o in ranks.outcomes]
        record[str(nranks)] = samples
        for stage in samples[0]:
            largest = [max(sample[stage][i] for sample in samples) for i in range(3)]
            rows.append([nranks, stage, *(f"{kib / 1024:.2f}" for kib in largest)])
    table = common.markdown_table(["ranks", "stage", "private MiB", "share MiB", "told MiB"], rows)
    common.save(
        args.out,
        {"machine": machine, "kib": record},
        common.heading("What a communicator holds", machine) + "\n" + table,
    )


if __name__ == "__main__":
    main()
