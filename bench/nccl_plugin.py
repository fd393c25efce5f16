"""NCCL over miraccl's exported network plugin, beside NCCL's own sockets, on one GPU.

Two ranks share the GPU, each with its own NCCL_HOSTID, so that NCCL takes the network between them.
Every collective is checked; the times of all_reduce are medians, the two networks in turns.

Latencies are those of the GPU's time slices, not of the network: only the ratio for large messages
says something.

    python bench/nccl_plugin.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from multiprocessing import get_context
from typing import Any

SIZES = (4, 1 << 20, 1 << 26)
ROUNDS = 3
CALLS = 5
TIMEOUT_S = 60


def check_collectives(dist: Any, torch: Any, rank: int, nranks: int) -> list[str]:
    """Run every collective with several sizes; return the names of those that were right."""
    right = []
    for count in (1, 1000, 300_001):
        x = torch.arange(count, device="cuda", dtype=torch.float32) + rank
        base = torch.arange(count, device="cuda", dtype=torch.float32)

        def expect(name: str, got: Any, wanted: Any) -> None:
            assert torch.equal(got, wanted), (name, got, wanted)
            right.append(name)

        y = x.clone()
        dist.all_reduce(y)
        expect("all_reduce", y, nranks * base + sum(range(nranks)))
        y = x.clone()
        dist.broadcast(y, 1)
        expect("broadcast", y, base + 1)
        y = x.clone()
        dist.reduce(y, 0)
        if rank == 0:
            expect("reduce", y, nranks * base + sum(range(nranks)))
        out = torch.empty(nranks * count, device="cuda")
        dist.all_gather_into_tensor(out, x)
        expect("all_gather", out, torch.cat([base + r for r in range(nranks)]))
        share = torch.empty(count, device="cuda")
        dist.reduce_scatter_tensor(share, x.repeat(nranks))
        expect("reduce_scatter", share, nranks * base + sum(range(nranks)))
        out = torch.empty(nranks * count, device="cuda")
        dist.all_to_all_single(out, x.repeat(nranks))
        expect("all_to_all", out, torch.cat([base + r for r in range(nranks)]))
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            got = torch.empty_like(x)
            dist.recv(got, 0)
            expect("send, recv", got, base)
    torch.cuda.synchronize()
    return right


def run_rank(rank: int, nranks: int, port: int, network: str, queue: Any) -> None:
    os.environ |= {
        "NCCL_HOSTID": f"host{rank}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": f"/tmp/nccl-{network}-{rank}.log",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }
    import torch
    import torch.distributed as dist

    if network == "socket":
        os.environ["NCCL_NET"] = "Socket"
    else:
        from miraccl import nccl_plugin

        os.environ["MIRACCL_NET"] = network
        nccl_plugin.export()
        os.environ["NCCL_NET"] = "miraccl"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=rank, world_size=nranks)
    right = check_collectives(dist, torch, rank, nranks)
    times = {}
    for nbytes in SIZES:
        x = torch.ones(nbytes // 4, device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        taken = []
        for _ in range(CALLS):
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            dist.all_reduce(x)
            torch.cuda.synchronize()
            taken.append((time.perf_counter() - start) * 1e6)
        times[nbytes] = statistics.median(taken)
    dist.destroy_process_group()
    queue.put((rank, len(right), times))


def run(network: str) -> dict[int, float]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    context = get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=run_rank, args=(r, 2, port, network, queue)) for r in range(2)]
    for process in ranks:
        process.start()
    try:
        results = [queue.get(timeout=TIMEOUT_S) for _ in ranks]
    finally:
        for process in ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
    with open(f"/tmp/nccl-{network}-0.log") as log:
        used = [line.split("NET")[-1].strip() for line in log if "Using network" in line]
    print(f"{network}: {sum(n for _, n, _ in results)} checks right; {' '.join(used[:1])}")
    return {size: max(times[size] for _, _, times in results) for size in SIZES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--networks", default="socket,tcp", help="socket, or values of MIRACCL_NET")
    options = parser.parse_args()
    networks = options.networks.split(",")
    rows: dict[str, list[dict[int, float]]] = {name: [] for name in networks}
    for _ in range(ROUNDS):
        for name in networks:
            rows[name].append(run(name))
    result = {
        name: {size: statistics.median(r[size] for r in got) for size in SIZES}
        for name, got in rows.items()
    }
    print("all_reduce, us: " + "  ".join(f"{size:>12}" for size in SIZES))
    for name, times in result.items():
        print(f"{name:>14}: " + "  ".join(f"{times[size]:12.0f}" for size in SIZES))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
