"""Time to the first all_reduce on a machine that has compiled nothing.

    python bench/first_call.py                          # 2 CPU ranks
    python bench/first_call.py --devices cuda:0,1       # ranks on GPUs
    python bench/first_call.py --compile-only           # what a GPU rank compiles; needs no GPU

Every round has an empty cache folder. ``call`` is the wall time of ``miraccl perf all_reduce`` from
its start to the end of the process; ``again`` is the same command with the cache of the round, so
the difference is what the first use costs. ``--compile-only`` compiles, one after another and in
this process, the modules and the kernels of the sizes that perf has by default, for sm_90.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from common import add_output_option, describe_machine, heading, markdown_table, median, save

HOST_MODULES = ("miraccl.executor.cpu.kernels.engine", "miraccl.fastpath.cuda.call")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile-only", action="store_true")
    add_output_option(parser)
    options = parser.parse_args()
    machine = describe_machine()
    if options.compile_only:
        rows = compile_all(options.ranks)
        title = f"What the first all_reduce of {options.ranks} GPU ranks compiles"
        columns = ["module or kernel", "processor s", "wall s"]
    else:
        rows = [
            [kind, f"{median(times):.1f}", f"{min(times):.1f} to {max(times):.1f}"]
            for kind, times in first_calls(options).items()
        ]
        title = f"First use, perf all_reduce --devices {options.devices}"
        columns = ["", "median s", "range"]
    text = f"{heading(title, machine)}\n{markdown_table(columns, rows)}\n"
    save(options.out, {"machine": machine, "rows": rows}, text)


def first_calls(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return seconds of each round, without and with the cache."""
    command = [sys.executable, "-m", "miraccl", "perf", "all_reduce", "-d", "float32"]
    command += ["--devices", options.devices, "--batches", "1"]
    command += ["--ranks", str(options.ranks)] if options.devices == "cpu" else []
    times: dict[str, list[float]] = {"call": [], "again": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="miraccl-first-call-") as folder:
            for kind in times:
                start = time.perf_counter()
                subprocess.run(
                    command,
                    check=True,
                    timeout=600,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "MIRACCL_CACHE_DIR": folder},
                )
                times[kind].append(time.perf_counter() - start)
    return times


def compile_all(nranks: int) -> list[list[str]]:
    """Compile the host modules and the kernels; return a row for each and one for the sum."""
    with tempfile.TemporaryDirectory(prefix="miraccl-first-call-") as folder:
        os.environ["MIRACCL_CACHE_DIR"] = folder
        from miraccl import native
        from miraccl.executor.cuda import toolkit

        measured = [(m, *timed(lambda m=m: native.library(m))) for m in HOST_MODULES]
        for name, source in kernels(nranks).items():
            measured.append(
                (name, *timed(lambda n=name, s=source: toolkit.compile_cubin(s, 90, n)))
            )
    measured.append(("sum", sum(m[1] for m in measured), sum(m[2] for m in measured)))
    return [[name, f"{processor:.2f}", f"{wall:.2f}"] for name, processor, wall in measured]


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Return seconds of processor and of wall time."""
    wall, processor = time.perf_counter(), time.process_time()
    action()
    return time.process_time() - processor, time.perf_counter() - wall


def kernels(nranks: int) -> dict[str, str]:
    """Return the kernels of perf's default sizes: name -> source."""
    from miraccl.executor.cuda.choice import choose
    from miraccl.executor.cuda.plan import Request, kernel_spec
    from miraccl.executor.cuda.source import write_source
    from miraccl.tools.options import Sizes
    from miraccl.tools.perf import gpu_buffers
    from miraccl.tools.perf.request import DEFAULT_SIZES
    from miraccl.types import Collective, DType, RedOp

    sources = {"perf-patterns-4": gpu_buffers.source(4)}
    for size in Sizes().convert(DEFAULT_SIZES, None, None):
        request = Request(
            collective=Collective.ALL_REDUCE,
            dtype=DType.FLOAT32,
            op=RedOp.SUM,
            count=max(1, size // 4),
            nranks=nranks,
            multiprocessors=132,
        )
        spec = kernel_spec(choose(request), request)
        sources[spec.name] = write_source(spec, 90)
    return sources


if __name__ == "__main__":
    main()
