"""Command line of the package."""

from __future__ import annotations

import argparse
import sys
import time

from tests.gpu.gpus import need_gpus
from tests.gpu.programs.draw import draw
from tests.gpu.programs.orchestrator import ProgramJob, run_programs


def main() -> int:
    ask = argparse.ArgumentParser(
        prog="python -m tests.gpu.programs", description="Random programs, every result compared."
    )
    ask.add_argument("--ranks", type=int, default=2)
    ask.add_argument("--device", choices=("cuda", "cpu", "emulated"), default="cuda")
    ask.add_argument(
        "--api",
        choices=("own", "torch", "both"),
        help="both in turns, if not given; with --device emulated own alone",
    )
    ask.add_argument(
        "--backend", default="miraccl", help="of PyTorch: gloo and nccl try the tester itself"
    )
    ask.add_argument("--first", type=int, default=0, help="the first seed")
    ask.add_argument("--seeds", type=int, default=100, help="how many")
    ask.add_argument("--steps", type=int, default=40, help="of a program")
    ask.add_argument(
        "--ranks-per-host", type=int, default=0, help="ranks say that they are on several hosts"
    )
    ask.add_argument(
        "--dtypes", default="", help="of these alone: float32,bfloat16 (fewer kernels to compile)"
    )
    ask.add_argument("--huge", action="store_true", help="also buffers of some million elements")
    ask.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds after which no program is begun"
    )
    ask.add_argument(
        "--limit",
        type=float,
        default=150.0,
        help="seconds for one program; the first ones compile kernels",
    )
    ask.add_argument("--show", action="store_true", help="print the steps instead of running them")
    given = ask.parse_args()
    if given.device == "emulated" and given.api not in (None, "own"):
        ask.error(
            f"--api {given.api} needs tensors of PyTorch, which has no emulated GPUs; "
            "allowed with --device emulated is --api own"
        )
    api = given.api or ("own" if given.device == "emulated" else "both")
    plain = given.backend != "miraccl"
    job = ProgramJob(
        seeds=range(given.first, given.first + given.seeds),
        nranks=given.ranks,
        device=given.device,
        apis=("own", "torch") if api == "both" else (api,),
        backend=given.backend,
        ranks_per_host=given.ranks_per_host,
        limit_s=given.limit,
        budget_s=given.budget,
        options={
            "nsteps": given.steps,
            "huge": given.huge,
            "plain": plain,
            "dtypes": [d for d in given.dtypes.split(",") if d],
        },
    )
    if given.show:
        for seed in job.seeds:
            program = draw(seed, job.api(seed), job.nranks, job.device, **job.options)
            print(
                f"seed {seed}, {program.api}, {program.options}",
                *program.buffers,
                *(f"{i}: {s}" for i, s in enumerate(program.steps)),
                sep="\n",
            )
        return 0
    if given.device == "cuda":
        need_gpus()
    begin = time.monotonic()
    outcome = run_programs(job, lambda text: print(text, flush=True))
    seconds = time.monotonic() - begin
    print(
        f"{outcome.passed} programs right, "
        f"{len(outcome.failed)} wrong {sorted(outcome.failed)}, {seconds:.0f} s"
    )
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
