"""Fastest launch shape by size, the measurement behind ``executor/cuda/choice.py`` and
``launch_shape.py``.

    python bench/gpu_sweep.py --ranks 2 [--out FILE]

Runs every candidate at every size, next to NCCL, and prints the best ones. ``--sms
16,24,32,64,128`` measures instead the loss of plans limited to so many multiprocessors, the
measurement behind ``planning/cta_limits.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_ranks import Timer, iterations_for, need_gpus, spawn, start_nccl

KIB, MIB = 1 << 10, 1 << 20
SIZES = [
    16,
    KIB,
    4 * KIB,
    16 * KIB,
    64 * KIB,
    256 * KIB,
    MIB,
    4 * MIB,
    16 * MIB,
    64 * MIB,
    256 * MIB,
    1 << 30,
]


def plans(nbytes: int, nranks: int) -> Iterator[dict[str, Any]]:
    """Return the candidates for an all_reduce of ``nbytes`` of a 16-bit float."""
    vectors = -(-nbytes // 16)
    for algo in ("one_shot",) if nranks == 2 else ("one_shot", "two_shot"):
        if (algo == "one_shot" and nranks > 2 and nbytes > MIB) or (
            algo == "two_shot" and nbytes < 16 * KIB
        ):
            continue
        each = -(-vectors // nranks) if algo == "two_shot" else vectors
        yield from _packets(algo, each, nranks, nbytes)
    if nbytes >= 16 * MIB and nranks > 2:
        yield from _packets("ring", -(-vectors // nranks), nranks, nbytes)
    if 4 * MIB <= nbytes <= 16 * MIB:
        for algo in ("ring", "two_shot") if nranks > 2 else ("one_shot",):
            for blocks, threads, unroll in ((64, 512, 8), (128, 512, 4), (128, 512, 8)):
                yield {
                    "algo": algo,
                    "proto": "simple",
                    "blocks": blocks,
                    "threads": threads,
                    "unroll": unroll,
                    "min_blocks": 1,
                }


def _packets(algo: str, each: int, nranks: int, nbytes: int) -> Iterator[dict[str, Any]]:
    shots = 1 if algo == "one_shot" else 2
    slots = nranks + 2 if algo == "ring" else 4
    largest = (
        24 * MIB // (shots * (nranks - 1) * 16)
    )  # packets of a piece, if a bank is to hold one
    seen = set()
    for threads, unroll, dense in SHAPES:
        each_block = threads * unroll
        blocks = max(1, min(128 * dense, -(-each // each_block)))
        while (
            blocks > 16
            and blocks * each_block * min(slots, -(-each // (blocks * each_block))) > largest
        ):
            blocks -= 4
        fits = blocks * each_block * min(slots, -(-each // (blocks * each_block))) <= largest
        if (
            fits
            and (blocks, threads, unroll) not in seen
            and not (nbytes <= 64 * KIB and unroll > 1)
        ):
            seen.add((blocks, threads, unroll))
            yield {
                "algo": algo,
                "proto": "ll128",
                "blocks": blocks,
                "threads": threads,
                "unroll": unroll,
                "min_blocks": dense,
            }


SHAPES = (
    (64, 1, 1), (128, 1, 1), (256, 1, 1), (512, 1, 1), (1024, 1, 1),
    (256, 1, 4), (512, 1, 2), (1024, 1, 2),
    (256, 2, 2), (256, 2, 4), (512, 2, 1), (512, 2, 2), (256, 4, 2), (512, 4, 1),
)  # fmt: skip


def specs(nranks: int) -> list[Any]:
    """Return the kernels of the sweep, to compile them in advance."""
    from miraccl.executor.cuda.plan import DevicePlan, Request, kernel_spec
    from miraccl.types import Collective, DType, RedOp

    found = {}
    for size in SIZES:
        request = Request(
            collective=Collective.ALL_REDUCE,
            dtype=DType.BFLOAT16,
            op=RedOp.SUM,
            count=size // 2,
            nranks=nranks,
        )
        for plan in plans(size, nranks):
            found[kernel_spec(DevicePlan(**plan), request)] = None
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="")
    parser.add_argument("--sms", default="", help="numbers of multiprocessors")
    parser.add_argument("--no-nccl", action="store_true")
    parser.add_argument("--show", type=int, default=3)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        need_gpus()
        sys.exit(spawn(__file__, options.ranks, sys.argv[1:]))
    run(options)


def run(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from miraccl.bootstrap.launch import detect_launch, join_launch
    from miraccl.runtime.gpu.communicator import DeviceCommunicator

    rank, nranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    session = join_launch(detect_launch(os.environ))
    comm = DeviceCommunicator(session, rank)
    if not options.no_nccl:
        start_nccl(dist, torch, rank, nranks)
    timer = Timer(torch, comm)
    warm = torch.randn(4096, 4096, device="cuda")
    for _ in range(60):  # clocks rise with work
        warm = (warm @ warm).clamp(-1, 1)
    torch.cuda.synchronize()
    record = []
    sizes = [int(s) for s in options.sizes.split(",")] if options.sizes else SIZES
    for size in sizes if options.sms else ():
        sweep_limits(torch, dist, comm, timer, size, [int(n) for n in options.sms.split(",")])
    for size in () if options.sms else sizes:
        record.append(sweep_size(torch, dist, comm, timer, size, options))
        if rank == 0 and options.out:
            Path(options.out).parent.mkdir(parents=True, exist_ok=True)
            Path(options.out).write_text(json.dumps(record))
    host_cost(torch, comm, timer, dist if not options.no_nccl else None)
    comm.close()
    session.close()
    if not options.no_nccl:
        dist.destroy_process_group()


def sweep_size(
    torch: Any, dist: Any, comm: Any, timer: Timer, size: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure all candidates at one size; rank 0 prints the fastest."""
    from miraccl.executor.cuda.plan import DevicePlan
    from miraccl.types import Collective, DType

    x = torch.randn(size // 2, device="cuda").to(torch.bfloat16)
    y, want = torch.empty_like(x), x.clone()
    iterations = iterations_for(size)
    time = timer.graph if size <= 16 * MIB else timer.plain
    nccl = 0.0
    if not options.no_nccl:
        nccl = timer.slowest(time(lambda: dist.all_reduce(y), iterations))
        dist.all_reduce(want)
    want = want.float()
    rows = []
    for plan in plans(size, comm.nranks):
        comm.use_plan(Collective.ALL_REDUCE, DType.BFLOAT16, size // 2, DevicePlan(**plan))
        comm.all_reduce(x, y)
        torch.cuda.synchronize()
        wrong = (
            0
            if options.no_nccl
            else int(
                ((y.float() - want).abs() > 0.02 * comm.nranks * want.abs().clamp(min=1)).sum()
            )
        )
        us = timer.slowest(time(lambda: comm.all_reduce(x, y), iterations, 5))
        comm.check()
        rows.append((us, wrong, plan))
    rows.sort(key=lambda row: row[0])
    if comm.rank == 0:
        print(f"{size:>11} B  nccl {nccl:9.2f} us", flush=True)
        for us, wrong, p in rows[: options.show]:
            launch = f"{p['blocks']}x{p['threads']}u{p['unroll']}b{p['min_blocks']}"
            shape = f"{p['algo']} {p['proto']} {launch}"
            print(
                f"      {us:9.2f} us  x{nccl / us:5.2f}  {size / us / 1e3:7.1f} GB/s  {shape} wrong"
                f" {wrong}",
                flush=True,
            )
    return {"bytes": size, "nccl_us": nccl, "rows": rows}


def sweep_limits(
    torch: Any, dist: Any, comm: Any, timer: Timer, size: int, numbers: Sequence[int]
) -> None:
    """Measure calls with limited multiprocessors on tensors of ``size`` bytes."""
    from miraccl.planning.cta_limits import CtaLimits

    agreed, each = comm.ctas, size // 4 // comm.nranks // 64 * 64
    whole = torch.randn(each * comm.nranks, device="cuda")
    out, part = torch.empty_like(whole), whole[:each].clone()
    pairs = {
        "all_reduce": (lambda: dist.all_reduce(out), lambda: comm.all_reduce(whole, out)),
        "all_gather": (
            lambda: dist.all_gather_into_tensor(out, part),
            lambda: comm.all_gather(part, out),
        ),
        "reduce_scatter": (
            lambda: dist.reduce_scatter_tensor(part, whole),
            lambda: comm.reduce_scatter(whole, part),
        ),
    }
    for name, (theirs, ours) in pairs.items():
        cells = [f"nccl {timer.slowest(timer.plain(theirs, iterations_for(size) // 2, 5)):.1f}"]
        for number in numbers:
            comm.ctas = CtaLimits(
                max_sms=min(number, agreed.max_sms), fixed=number < agreed.max_sms
            )
            comm._forget()
            us = timer.slowest(timer.plain(ours, iterations_for(size) // 2, 5))
            plan = comm.last_plan
            cells.append(f"{number}: {us:.1f} ({plan.proto} {plan.blocks}x{plan.threads})")
        comm.check()
        if comm.rank == 0:
            print(f"{name:>14} {size:>11} B  {', '.join(cells)}", flush=True)
    comm.ctas = agreed


def host_cost(torch: Any, comm: Any, timer: Timer, dist: Any) -> None:
    """Return the microseconds of the calling thread per call, in short bursts with pauses."""
    import time

    x = torch.zeros(8, device="cuda")

    def cost(call: Any, number: int = 200) -> float:
        best = 1e9
        for _ in range(5):
            timer.barrier()
            begin = time.perf_counter()
            for _ in range(number):
                call()
            best = min(best, (time.perf_counter() - begin) / number * 1e6)
            torch.cuda.synchronize()
        return best

    comm.all_reduce(x)
    rows = {"all_reduce": cost(lambda: comm.all_reduce(x))}
    launch = comm._launches[next(k for k in comm._launches if k[2] == 8)]
    address = x.data_ptr()
    rows["launch alone"] = cost(lambda: launch.run(address, address, 0))
    rows["arguments alone"] = cost(lambda: comm._stream_number(None))
    if dist is not None:
        rows["torch nccl all_reduce"] = cost(lambda: dist.all_reduce(x))
    if comm.rank == 0:
        print(
            "host cost, us per call:", {name: round(us, 2) for name, us in rows.items()}, flush=True
        )


if __name__ == "__main__":
    main()
