"""two_shot in one piece, in pieces and in parts (source/double_buffered.cuh), by buffer size.

    python bench/gpu_parts.py [--bank 3.29] [--sizes 2M,4M]

Needs two GPUs. With a seventh of the default buffer two ranks have the slots, pieces and threads of
eight, but a seventh of the traffic; the remaining time is the cost of waiting. With the default
buffer the links dominate. The median of three rounds of CUDA graphs, of the slowest rank; results
that change between calls are reported.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from gpu_ranks import Timer, need_gpus, spawn

from miraccl import params

MIB = 1 << 20
#: blocks, threads, unroll, in parts
SHAPES = (
    (128, 512, 1, True),
    (128, 512, 1, False),
    (105, 256, 1, False),
    (128, 256, 1, True),
    (128, 512, 4, True),
    (128, 512, 4, False),
)
CALLS = 60


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bank", type=float, default=23.0, help="MiB of a bank, of which kernels and ranks know"
    )
    parser.add_argument("--sizes", default="8M,16M,32M", help="of the array")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        need_gpus()
        sys.exit(spawn(__file__, 2, sys.argv[1:]))
    from miraccl.executor.cuda import layout

    layout.HALF_BYTES = int(options.bank * MIB) // 1024 * 1024
    layout.INITIAL_FILL = ((layout.PACKETS_OFFSET, 2 * layout.HALF_BYTES, 0xFFFFFFFF),)
    import torch

    from miraccl.bootstrap.launch import detect_launch, join_launch
    from miraccl.runtime.gpu.communicator import DeviceCommunicator
    from miraccl.types import DType

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    comm = DeviceCommunicator(join_launch(detect_launch(os.environ)), rank)
    timer = Timer(torch, comm)
    warm = torch.randn(4096, 4096, device="cuda")
    for _ in range(60):  # clocks rise with work
        warm = (warm @ warm).clamp(-1, 1)
    for name in ("bfloat16", "int32"):
        for size in map(params.parse_size, options.sizes.split(",")):
            dtype = DType[name.upper()]
            x = torch.randint(-1000, 1000, (size // dtype.itemsize,), device="cuda").to(
                getattr(torch, name)
            )
            cells = [measure(torch, comm, timer, dtype, x, shape) for shape in SHAPES]
            if rank == 0:
                print(f"{name:>8} {size:>9}  {' | '.join(filter(None, cells))}", flush=True)
    comm.close()


def measure(
    torch: Any, comm: Any, timer: Timer, dtype: Any, x: Any, shape: tuple[int, int, int, bool]
) -> str:
    from miraccl.errors import InvalidUsage
    from miraccl.executor.cuda.plan import DevicePlan
    from miraccl.types import Collective

    blocks, threads, unroll, double_buffered = shape
    plan = DevicePlan(
        algo="two_shot",
        proto="ll128",
        blocks=blocks,
        threads=threads,
        unroll=unroll,
        double_buffered=double_buffered,
    )
    y = torch.empty_like(x)
    comm.use_plan(Collective.ALL_REDUCE, dtype, x.numel(), plan)
    try:
        comm.all_reduce(x, y)
    except InvalidUsage:  # no room
        return ""
    torch.cuda.synchronize()
    first = y.clone()
    times = sorted(
        timer.slowest(timer.graph(lambda: comm.all_reduce(x, y), CALLS)) for _ in range(3)
    )
    comm.check()
    changed = "" if torch.equal(first, y) else " CHANGES"
    return (
        f"{blocks} x {threads} x"
        f" {unroll}{' in parts' if double_buffered else ''} {times[1]:.2f}{changed}"
    )


if __name__ == "__main__":
    main()
