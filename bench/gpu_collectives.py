"""The other collectives on GPUs beside NCCL, in the same processes: all_gather, reduce_scatter, all_to_all, broadcast, reduce.

``python bench/gpu_collectives.py --ranks 2 [--out gpu-DATE]``: sizes are those of the larger of input and output.  Timing as in
``gpu_all_reduce.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from gpu_all_reduce import GRAPH_UP_TO, describe, warm_up
from gpu_ranks import Timer, iterations_for, spawn, start_nccl

KIB, MIB = 1 << 10, 1 << 20
SIZES = [KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 256 * MIB]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
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
    rows = []
    for name in ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"):
        rows += [measure(torch, dist, comm, timer, name, nbytes) for nbytes in SIZES]
    if rank == 0:
        text = markdown(describe(torch, nranks), rows)
        print(text, flush=True)
        if options.out:
            base = Path(options.out) if "/" in options.out else Path(__file__).parent / "results" / options.out
            base.with_suffix(".json").write_text(json.dumps({"machine": describe(torch, nranks), "rows": rows}, indent=1) + "\n")
            base.with_suffix(".md").write_text(text)
    comm.close()
    session.close()
    dist.destroy_process_group()


def measure(torch: Any, dist: Any, comm: Any, timer: Timer, name: str, nbytes: int) -> dict[str, Any]:
    whole = torch.randn(nbytes // 4, device="cuda")
    share = torch.randn(nbytes // 4 // comm.nranks, device="cuda")
    result, small = torch.empty_like(whole), torch.empty_like(share)
    ours, theirs, mine, other = {
        "all_gather": (lambda: comm.all_gather(share, result), lambda: dist.all_gather_into_tensor(whole, share), result, whole),
        "reduce_scatter": (lambda: comm.reduce_scatter(whole, small), lambda: dist.reduce_scatter_tensor(share, whole), small, share),
        "all_to_all": (lambda: comm.all_to_all(whole, result), lambda: dist.all_to_all_single(result, whole), result, result),
        "broadcast": (lambda: comm.broadcast(whole, 0), lambda: dist.broadcast(result, 0), whole, result),
        "reduce": (lambda: comm.reduce(whole, 0, result), lambda: dist.reduce(result, 0), result, result),
    }[name]
    ours()
    comm.synchronize()
    got = mine.clone()
    if name == "reduce":
        result.copy_(whole)
    if name == "broadcast":
        result.copy_(whole if comm.rank == 0 else torch.zeros_like(whole))
    theirs()
    torch.cuda.synchronize()
    checked = name != "reduce" or comm.rank == 0
    wrong = int(((got - other).abs() > 1e-5 * other.abs().clamp(min=4)).sum()) if checked else 0
    how, iterations = (timer.graph if nbytes <= GRAPH_UP_TO else timer.plain), iterations_for(nbytes)
    us, nccl = timer.slowest(how(ours, iterations, 5)), timer.slowest(how(theirs, iterations, 5))
    plan = comm.last_plan
    return {"collective": name, "bytes": nbytes, "miraccl_us": us, "nccl_us": nccl, "wrong": wrong, "plan": f"{plan.algo} {plan.proto}"}


def markdown(machine: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [
        f"# Collectives, float32, {machine['gpus']}",
        "",
        f"{machine['date']}, NCCL {machine['nccl']} (multicast off), torch {machine['torch']}, CUDA {machine['cuda']}.",
        "",
        "| collective | bytes | NCCL us | miraccl us | NCCL / miraccl | wrong |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        ratio = row["nccl_us"] / row["miraccl_us"]
        times = f"{row['nccl_us']:.1f} | {row['miraccl_us']:.1f} | {ratio:.2f}"
        lines.append(f"| {row['collective']} | {row['bytes']} | {times} | {row['wrong']} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
