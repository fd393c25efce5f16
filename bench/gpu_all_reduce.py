"""all_reduce on GPUs beside NCCL, in the same processes: the table of docs/performance.md.

``python bench/gpu_all_reduce.py --ranks 2 [--dtype bfloat16] [--out gpu-DATE]``: per size the median of the slowest rank, in CUDA graphs
up to 16 MiB and called on a stream above; the ratio NCCL / miraccl; and whether every element is right (compared with the sum in
float64).  NCCL runs through torch.distributed, out of the box but for NVLink multicast, which is off (NCCL_NVLS_ENABLE=0).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

from gpu_ranks import Timer, iterations_for, spawn, start_nccl

KIB, MIB = 1 << 10, 1 << 20
SIZES = [16, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1 << 30]
GRAPH_UP_TO = 16 * MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, comma separated")
    parser.add_argument("--out", help="name of the result files, below bench/results or with a folder; none are written without it")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(spawn(__file__, options.ranks, sys.argv[1:]))
    run(options)


def run(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from miraccl.bootstrap.launch import detect_launch, meet
    from miraccl.comm.device import DeviceCommunicator

    rank, nranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    session = meet(detect_launch(os.environ))
    comm = DeviceCommunicator(session, rank)
    start_nccl(dist, torch, rank, nranks)
    timer = Timer(torch, comm)
    warm_up(torch)
    rows = [measure(torch, dist, comm, timer, int(size), options.dtype) for size in options.sizes.split(",")]
    record = {"machine": describe(torch, nranks), "dtype": options.dtype, "rows": rows, "host_us": host_cost(torch, dist, comm)}
    if rank == 0:
        text = markdown(record)
        print(text, flush=True)
        if options.out:
            base = Path(options.out) if "/" in options.out else Path(__file__).parent / "results" / options.out
            base.parent.mkdir(parents=True, exist_ok=True)
            base.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
            base.with_suffix(".md").write_text(text)
    comm.close()
    session.close()
    dist.destroy_process_group()


def warm_up(torch: Any) -> None:
    """Clocks rise with work."""
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(60):
        x = (x @ x).clamp(-1, 1)
    torch.cuda.synchronize()


def measure(torch: Any, dist: Any, comm: Any, timer: Timer, nbytes: int, dtype: str) -> dict[str, Any]:
    """One row: times and errors of both."""
    from miraccl.types import Collective, DType

    kind = getattr(torch, dtype)
    count = max(1, nbytes // kind.itemsize)
    inputs = []
    for rank in range(comm.nranks):
        torch.manual_seed(rank + 1)
        inputs.append(torch.randn(count, device="cuda", dtype=torch.float32).to(kind) if rank == comm.rank or nbytes <= 64 * MIB else None)
    x, y = inputs[comm.rank], torch.full((count,), float("nan"), device="cuda", dtype=kind)
    iterations, how = iterations_for(nbytes), timer.graph if nbytes <= GRAPH_UP_TO else timer.plain
    ours = timer.slowest(how(lambda: comm.all_reduce(x, y), iterations))
    comm.synchronize()
    wrong = count_wrong(torch, dist, inputs, x, y, comm)
    plan = comm.plan(comm.request(Collective.ALL_REDUCE, DType[dtype.upper()], count))
    theirs = timer.slowest(how(lambda: dist.all_reduce(y), iterations))
    return {
        "bytes": nbytes,
        "graph": nbytes <= GRAPH_UP_TO,
        "miraccl_us": round(ours, 2),
        "nccl_us": round(theirs, 2),
        "ratio": round(theirs / ours, 2),
        "busbw": round(2 * (comm.nranks - 1) / comm.nranks * nbytes / ours / 1e3, 1),
        "wrong": wrong,
        "plan": f"{plan.algo} {plan.proto}, {plan.blocks} x {plan.threads} threads x {plan.unroll}",
    }


def count_wrong(torch: Any, dist: Any, inputs: list[Any], x: Any, y: Any, comm: Any) -> int:
    """Elements that differ from the sum by more than one rounding; for large sizes from NCCL's by more than its rounding at each hop."""
    unit = torch.finfo(y.dtype).eps
    if any(part is None for part in inputs):
        want = x.clone()
        dist.all_reduce(want)
        want, tolerance = want.float(), comm.nranks * unit
        return int(((y.float() - want).abs() > tolerance * want.abs().clamp(min=4)).sum())
    want = torch.zeros(y.shape, device="cuda", dtype=torch.float64)
    for part in inputs:
        want += part.double()
    return int((~((y.double() - want).abs() <= unit * want.abs() + comm.nranks * 2.0**-22)).sum())


def host_cost(torch: Any, dist: Any, comm: Any) -> dict[str, float]:
    """Microseconds of the calling thread for one call whose plan is known."""
    import time

    x = torch.zeros(8, device="cuda")
    result = {}
    for name, call in (("miraccl", lambda: comm.all_reduce(x)), ("nccl through torch", lambda: dist.all_reduce(x))):
        best = float("inf")
        for _ in range(7):
            comm.session.barrier("host cost")
            begin = time.perf_counter()
            for _ in range(200):
                call()
            best = min(best, (time.perf_counter() - begin) / 200 * 1e6)
            torch.cuda.synchronize()
        result[name] = round(best, 2)
    return result


def describe(torch: Any, nranks: int) -> dict[str, Any]:
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpus": f"{nranks} x {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
        "nccl": version,
        "cuda": torch.version.cuda,
    }


def markdown(record: dict[str, Any]) -> str:
    machine = record["machine"]
    lines = [
        f"# all_reduce, {record['dtype']}, {machine['gpus']}",
        "",
        f"{machine['date']}, NCCL {machine['nccl']} (multicast off), torch {machine['torch']}, CUDA {machine['cuda']}."
        " Median of the slowest rank; g: CUDA graph, s: stream.",
        "",
        "| bytes | | NCCL us | miraccl us | NCCL / miraccl | busbw GB/s | wrong | plan |",
        "|---:|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in record["rows"]:
        lines.append(
            f"| {row['bytes']} | {'g' if row['graph'] else 's'} | {row['nccl_us']} | {row['miraccl_us']} | {row['ratio']:.2f}"
            f" | {row['busbw']} | {row['wrong']} | {row['plan']} |"
        )
    lines += ["", "Host time of one call, us: " + ", ".join(f"{name} {us}" for name, us in record["host_us"].items()) + ".", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
