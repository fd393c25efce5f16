"""One-shot all_reduce in Triton and in miraccl, the reason for CUDA C++ through NVRTC.

    python bench/gpu_triton.py --ranks 2 --out gpu-DATE-triton

The Triton kernel uses LL (8 bytes hold 4 of data and a flag): every rank stores its words into its
peers' slots, waits for theirs and adds, in memory of PyTorch's symmetric allocator. It is as short
as Triton allows: a block waits as a whole, because a loop's condition is one value per block.
Compared: time in a CUDA graph (median of the slowest rank), time of a call from Python, time of the
first call with an empty cache, and of the first call in a second process. Every result is checked.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from typing import Any

from common import add_output_option, describe_machine, heading, markdown_table, save
from gpu_ranks import Timer, iterations_for, need_gpus, spawn, start_nccl

SIZES = (16, 1 << 10, 16 << 10, 64 << 10, 256 << 10)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    add_output_option(parser)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(options)
        return
    need_gpus()
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITON_CACHE_DIR"], os.environ["MIRACCL_CACHE_DIR"] = (
            f"{empty}/triton",
            f"{empty}/miraccl",
        )
        for _ in range(2):  # the second finds everything in the caches
            code = spawn(__file__, options.ranks, sys.argv[1:])
            if code:
                sys.exit(code)
            os.environ["BENCH_SECOND"] = "1"


def rank_main(options: Any) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric
    from triton_one_shot import one_shot

    from miraccl.bootstrap.launch import detect_launch, join_launch
    from miraccl.runtime.gpu.communicator import DeviceCommunicator

    rank, nranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    start_nccl(dist, torch, rank, nranks)
    session = join_launch(detect_launch(os.environ))
    comm = DeviceCommunicator(session, rank)
    largest = max(SIZES) // 4
    box = symmetric.empty(2 * nranks * largest, dtype=torch.int64, device="cuda").zero_()
    peers = torch.tensor(
        symmetric.rendezvous(box, dist.group.WORLD).buffer_ptrs, dtype=torch.int64, device="cuda"
    )
    torch.cuda.synchronize()
    dist.barrier()
    kernel, timer, rows, first = one_shot, Timer(torch, comm), [], {}
    with torch.cuda.stream(timer.stream):
        for nbytes in SIZES:
            n = nbytes // 4
            block = min(256, max(32, n))
            grid = (-(-n // block),)
            epochs = torch.zeros(grid[0], dtype=torch.int32, device="cuda")
            box.zero_()
            torch.cuda.synchronize()
            dist.barrier()
            x, out = torch.full((n,), float(rank + 1), device="cuda"), torch.zeros(n, device="cuda")

            def triton_call(grid=grid, x=x, out=out, epochs=epochs, n=n, block=block) -> None:
                kernel[grid](
                    x,
                    out,
                    peers,
                    epochs,
                    rank,
                    n,
                    WORLD=nranks,
                    BLOCK=block,
                    num_warps=max(1, block // 64),
                )

            def our_call(x=x, out=out) -> None:
                comm.all_reduce(x, out)

            row: dict[str, Any] = {"bytes": nbytes}
            for name, call in (
                calls := (("triton", triton_call), ("miraccl", our_call))
            ):  # both before the clock calls one of them
                out.zero_()
                begin = time.perf_counter()
                call()
                timer.stream.synchronize()
                first.setdefault(name, time.perf_counter() - begin)
                assert bool((out == nranks * (nranks + 1) / 2).all()), (
                    f"{name}, {nbytes} bytes: wrong"
                )
            for name, call in calls:
                out.zero_()
                row[f"{name}_graph_us"] = timer.slowest(timer.graph(call, iterations_for(nbytes)))
                begin = time.perf_counter()
                for _ in range(100):
                    call()
                row[f"{name}_host_us"] = (time.perf_counter() - begin) * 1e4
                timer.stream.synchronize()
                assert bool((out == nranks * (nranks + 1) / 2).all()), (
                    f"{name}, {nbytes} bytes: wrong after timing"
                )
            rows.append(row)
    if rank == 0:
        again = "second" if os.environ.get("BENCH_SECOND") else "first"
        print(
            f"{again} process: first call with Triton {first['triton']:.3f} s, with miraccl"
            f" {first['miraccl']:.3f} s",
            flush=True,
        )
        if again == "second":
            table = markdown_table(
                (
                    "bytes",
                    "Triton us",
                    "miraccl us",
                    "Triton / miraccl",
                    "call, Triton us",
                    "call, miraccl us",
                ),
                [
                    (
                        row["bytes"],
                        f"{row['triton_graph_us']:.2f}",
                        f"{row['miraccl_graph_us']:.2f}",
                        f"{row['triton_graph_us'] / row['miraccl_graph_us']:.2f}",
                        f"{row['triton_host_us']:.1f}",
                        f"{row['miraccl_host_us']:.1f}",
                    )
                    for row in rows
                ],
            )
            machine = describe_machine() | {
                "gpu": torch.cuda.get_device_name(),
                "versions": versions(torch),
            }
            text = (
                heading(
                    f"One-shot all_reduce in float32: Triton and miraccl, {nranks} x"
                    f" {machine['gpu']}",
                    machine,
                )
                + "\n"
                + table
            )
            save(options.out, {"machine": machine, "rows": rows, "first_call_s": first}, text)
    comm.close()
    session.close()
    dist.destroy_process_group()


def versions(torch: Any) -> dict[str, str]:
    import triton

    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "CUDA": str(torch.version.cuda),
    }


if __name__ == "__main__":
    main()
