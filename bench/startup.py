"""Start-up time: imports, the command line, a communicator of 1 and of 8 ranks.

    python bench/startup.py
    python bench/startup.py --ranks 8 --rounds 9 --out startup

``run`` rows start every rank as a separate process, as ``miraccl run`` does; ``fork`` rows fork
them from a warm parent, as ``miraccl perf`` does. ``meet`` is the slowest rank's time in
``miraccl.init()`` and a first barrier, ``split`` that of a second communicator.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

import common

from miraccl.tools import launch
from miraccl.tools.spawn import RankContext, Ranks

_PROGRAM = "import miraccl\nwith miraccl.init() as comm: comm.barrier()"


def time_command(*args: str) -> float:
    """Return milliseconds of wall time."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *args], check=True, stdout=subprocess.DEVNULL, timeout=300)
    return (time.perf_counter() - start) * 1e3


def rank_main(context: RankContext) -> list[float]:
    import miraccl

    start = time.perf_counter()
    comm = miraccl.init()
    comm.barrier()
    met = time.perf_counter()
    part = comm.split(0)
    assert part is not None
    part.barrier()
    done = time.perf_counter()
    part.finalize()
    comm.finalize()
    return [(met - start) * 1e3, (done - met) * 1e3]


def time_fork(nranks: int) -> tuple[float, float, float]:
    """Return milliseconds: total, the slowest rank's init, the slowest rank's split."""
    start = time.perf_counter()
    with launch.local_job(nranks) as environ, Ranks(rank_main, nranks, environ=environ) as ranks:
        ranks.wait(time.monotonic() + 300)
        failure = ranks.first_failure()
        if failure:
            raise SystemExit(f"{failure.describe()}\n{failure.error}")
        whole = (time.perf_counter() - start) * 1e3
        meet, split = (
            max(column) for column in zip(*(o.value for o in ranks.outcomes), strict=True)
        )
    return whole, meet, split


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    common.add_output_option(parser)
    args = parser.parse_args()
    machine = common.describe_machine()
    launch.warm_up()  # compiles, if this machine never did
    n = str(args.ranks)
    commands: dict[str, Callable[[], float]] = {
        "python -c pass": lambda: time_command("-c", "pass"),
        "import numpy": lambda: time_command("-c", "import numpy"),
        "import miraccl": lambda: time_command("-c", "import miraccl"),
        "miraccl --help": lambda: time_command("-m", "miraccl", "--help"),
        "init, 1 rank": lambda: time_command("-c", _PROGRAM),
        f"miraccl run -n {n}, init": lambda: time_command(
            "-m", "miraccl", "run", "-n", n, sys.executable, "-c", _PROGRAM
        ),
    }
    times: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name, measure in commands.items():
            times.setdefault(name, []).append(measure())
        whole, meet, split = time_fork(args.ranks)
        for name, value in (
            (f"fork {n} ranks, meet, leave", whole),
            (f"meet, {n} ranks", meet),
            (f"split, {n} ranks", split),
        ):
            times.setdefault(name, []).append(value)
    rows = [
        (name, f"{common.median(values):.0f}", f"{min(values):.0f}")
        for name, values in times.items()
    ]
    note = (
        "\nbytecode is not cached (PYTHONDONTWRITEBYTECODE): imports are slower than users see\n"
        if os.environ.get("PYTHONDONTWRITEBYTECODE")
        else ""
    )
    text = (
        common.heading("How long it takes to begin", machine)
        + note
        + "\n"
        + common.markdown_table(["what", "median ms", "smallest ms"], rows)
    )
    common.save(args.out, {"machine": machine, "ms": times}, text)


if __name__ == "__main__":
    main()
