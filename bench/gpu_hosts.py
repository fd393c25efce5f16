"""GPUs of one machine as two hosts, compared with NCCL's socket transport under the same split.

    python bench/gpu_hosts.py --ranks 2 [--collectives all_reduce,all_gather] [--sizes 1024,...]
    [--out NAME]

The ranks are split in the middle: 2 ranks are 2 hosts with one GPU each, 4 are 2 hosts with two.
Per size: the median of the slowest rank on a stream, the ratio NCCL / miraccl, and the host time of
a call (host us). Every element of miraccl's results is checked; elements differ by position and
rank. After ``--seconds`` no further row is started.

miraccl has peer access inside a host. NCCL gets ``NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1``, so that
it uses sockets inside a host as well; ``--nccl-p2p`` enables both, which is NCCL's best. Hosts are
split by ``MIRACCL_HOSTID`` and ``NCCL_HOSTID``; InfiniBand and NVLink multicast are off
(NCCL_IB_DISABLE=1, NCCL_NVLS_ENABLE=0).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_ranks import Timer, need_gpus, spawn, start_nccl

KIB, MIB = 1 << 10, 1 << 20
SIZES = [KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
COLLECTIVES = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="an even number")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--sizes",
        default=",".join(map(str, SIZES)),
        help="bytes of the larger of input and output, comma separated",
    )
    parser.add_argument(
        "--collectives", default="all_reduce", help=f"comma separated, of {', '.join(COLLECTIVES)}"
    )
    parser.add_argument(
        "--nccl-p2p",
        action="store_true",
        help="NCCL may use NVLink and shared memory inside a host",
    )
    parser.add_argument(
        "--graph", action="store_true", help="ours in CUDA graphs, too, up to 4 MiB"
    )
    parser.add_argument("--no-nccl", action="store_true")
    parser.add_argument(
        "--lanes", type=int, help="lanes of the proxy, instead of the library's number"
    )
    parser.add_argument(
        "--seconds", type=float, default=70.0, help="for all rows, from the start of the ranks"
    )
    parser.add_argument(
        "--out",
        help=(
            "name of the result files, below bench/results or with a folder; none are written"
            " without it"
        ),
    )
    options = parser.parse_args()
    if "RANK" not in os.environ:
        need_gpus()
        sys.exit(spawn(__file__, options.ranks, sys.argv[1:], timeout=options.seconds + 60))
    run(options)


def run(options: argparse.Namespace) -> None:
    start = time.monotonic()
    rank, nranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host = f"bench-host-{rank * 2 // nranks}"
    os.environ["MIRACCL_HOSTID"] = host

    import torch
    import torch.distributed as dist

    from miraccl.api.communicator import Communicator
    from miraccl.bootstrap.launch import detect_launch, join_launch
    from miraccl.runtime.multinode import staging

    if options.lanes:  # before other modules read them
        staging.STAGING_THREADS, staging.NSLOTS = options.lanes, 2 * options.lanes
    from miraccl.runtime.multinode.communicator import make_device_communicator
    from miraccl.runtime.options import Options

    torch.cuda.set_device(rank)
    session = join_launch(detect_launch(os.environ))
    choices = Options.create()

    def open_cpu(sub: Any, stages: Any) -> Communicator:
        return Communicator.from_session(sub, choices, setup=stages)

    comm: Any = make_device_communicator(session, rank, choices, open_cpu=open_cpu)
    nccl = None if options.no_nccl else dist
    if nccl is not None:  # read when NCCL starts, which is after ours
        os.environ.update(
            {
                "NCCL_HOSTID": host,
                "NCCL_IB_DISABLE": "1",
                "NCCL_NVLS_ENABLE": "0",
                "NCCL_NET": "Socket",
            }
        )
        if not options.nccl_p2p:
            os.environ.update({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"})
        start_nccl(dist, torch, rank, nranks)
    timer, rows = Timer(torch, comm), []
    for collective, size in itertools.product(
        options.collectives.split(","), map(int, options.sizes.split(","))
    ):
        late = str(int(time.monotonic() - start > options.seconds)).encode()
        if b"1" in session.all_gather(late, "time"):
            if rank == 0:
                print(
                    f"no time is left for {collective} of {size} bytes and what follows", flush=True
                )
            break
        row = measure(torch, nccl, comm, timer, collective, size, options)
        rows.append(row)
        if rank == 0:
            print(line(row), flush=True)
    if rank == 0:
        record = {"machine": describe(torch, nranks, options), "dtype": options.dtype, "rows": rows}
        text = markdown(record)
        print("\n" + text, flush=True)
        if options.out:
            base = (
                Path(options.out)
                if "/" in options.out
                else Path(__file__).parent / "results" / options.out
            )
            base.parent.mkdir(parents=True, exist_ok=True)
            base.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
            base.with_suffix(".md").write_text(text)
    comm.close()
    session.close()
    if nccl is not None:
        dist.destroy_process_group()


def measure(
    torch: Any,
    dist: Any,
    comm: Any,
    timer: Timer,
    collective: str,
    nbytes: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Measure one row."""
    dtype, n, rank = getattr(torch, options.dtype), comm.nranks, comm.rank
    count = max(n, nbytes // dtype.itemsize // n * n)
    x = given(torch, rank, count // n if collective == "all_gather" else count).to(dtype)
    out = torch.zeros(
        count // n if collective == "reduce_scatter" else count, device="cuda", dtype=dtype
    )
    ours, theirs = operations(torch, dist, comm, collective, x, out)
    iterations, repeats = (
        (30, 5)
        if nbytes <= 256 * KIB
        else (10, 5)
        if nbytes <= 4 * MIB
        else (3, 3)
        if nbytes <= 64 * MIB
        else (1, 3)
    )
    row: dict[str, Any] = {"collective": collective, "bytes": nbytes}
    row["miraccl_us"] = round(timer.slowest(timer.plain(ours, iterations, repeats)), 1)
    row["host_us"] = host_us(timer, ours, iterations)
    out.zero_()
    ours()
    comm.synchronize()
    found = wrong(torch, collective, out, n, rank)
    row["wrong"] = sum(int(part) for part in comm.session.all_gather(str(found).encode(), "wrong"))
    row["plan"] = f"{comm.last_plan.algo}, {comm.last_plan.pieces} pieces"
    if options.graph and nbytes <= 4 * MIB:
        row["graph_us"] = round(timer.slowest(timer.graph(ours, iterations, repeats)), 1)
    if theirs is not None:
        row["nccl_us"] = round(timer.slowest(timer.plain(theirs, iterations, repeats)), 1)
        row["ratio"] = round(row["nccl_us"] / row["miraccl_us"], 2)
        row["nccl_host_us"] = host_us(timer, theirs, iterations)
    row["algbw"] = round(nbytes / row["miraccl_us"] / 1e3, 2)
    return row


def operations(
    torch: Any, dist: Any, comm: Any, collective: str, x: Any, out: Any
) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    to, frm = (comm.rank + 1) % comm.nranks, (comm.rank - 1) % comm.nranks
    ours: Callable[[], Any] = {
        "all_reduce": lambda: comm.all_reduce(x, out),
        "all_gather": lambda: comm.all_gather(x, out),
        "reduce_scatter": lambda: comm.reduce_scatter(x, out),
        "all_to_all": lambda: comm.all_to_all(x, out),
        "broadcast": lambda: comm.broadcast(out if comm.rank else x, 0),
        "sendrecv": lambda: comm.sendrecv(x, to, out, frm),
    }[collective]
    if dist is None:
        return ours, None

    def exchange() -> None:
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, to), dist.P2POp(dist.irecv, out, frm)]
        ):
            work.wait()

    theirs: Callable[[], Any] = {
        "all_reduce": lambda: dist.all_reduce(out),
        "all_gather": lambda: dist.all_gather_into_tensor(out, x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x),
        "all_to_all": lambda: dist.all_to_all_single(out, x),
        "broadcast": lambda: dist.broadcast(out if comm.rank else x, 0),
        "sendrecv": exchange,
    }[collective]
    return ours, theirs


def host_us(timer: Timer, operation: Callable[[], Any], calls: int) -> float:
    """Return the slowest rank's microseconds until a call returns while the GPU is still busy."""
    timer.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        operation()
    found = (time.perf_counter() - start) / calls * 1e6
    timer.barrier()
    return round(timer.slowest([found]), 1)


def given(torch: Any, rank: int, count: int, first: int = 0) -> Any:
    """Return the input of a rank from element ``first`` on; sums are exact in 16-bit floats."""
    return torch.arange(first, first + count, device="cuda") % 5 + rank


def wrong(torch: Any, collective: str, out: Any, n: int, rank: int) -> int:
    """Count the elements that differ from the expected ones."""
    share = out.numel() // n
    match collective:
        case "all_reduce":
            want = n * given(torch, 0, out.numel()) + n * (n - 1) // 2
        case "reduce_scatter":
            want = n * given(torch, 0, out.numel(), rank * out.numel()) + n * (n - 1) // 2
        case "sendrecv":
            want = given(torch, (rank - 1) % n, out.numel())
        case "broadcast":
            want = given(torch, 0, out.numel()) if rank else out
        case "all_gather":
            want = torch.cat([given(torch, peer, share) for peer in range(n)])
        case _:
            want = torch.cat([given(torch, peer, share, rank * share) for peer in range(n)])
    return int((out != want.to(out.dtype)).sum())


def describe(torch: Any, nranks: int, options: argparse.Namespace) -> dict[str, Any]:
    import datetime

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpus": f"2 hosts x {nranks // 2} {torch.cuda.get_device_name()}, one machine",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "nccl_inside_a_host": "its choice" if options.nccl_p2p else "sockets",
        "cores": os.cpu_count(),
        "lanes": options.lanes,
        "staging": os.environ.get("MIRACCL_GPU_STAGING"),
    }


def line(row: dict[str, Any]) -> str:
    graph = f"{row['graph_us']:.1f}" if "graph_us" in row else ""
    theirs = (f"{row['nccl_us']:.1f}", f"{row['ratio']:.2f}") if "nccl_us" in row else ("", "")
    host = f"{row['host_us']} / {row.get('nccl_host_us', '')}"
    cells = (
        row["collective"],
        row["bytes"],
        f"{row['miraccl_us']:.1f}",
        graph,
        *theirs,
        host,
        row["algbw"],
        row["wrong"],
        row["plan"],
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def markdown(record: dict[str, Any]) -> str:
    machine = record["machine"]
    head = (
        f"{machine['date']}, {machine['gpus']}, {machine['cores']} cores, {record['dtype']}; NCCL"
        f" {machine['nccl']}: sockets between hosts"
    )
    inside = (
        f"and {machine['nccl_inside_a_host']} inside a host; torch {machine['torch']}. Median of"
        " the slowest rank."
    )
    names = (
        "collective | bytes | miraccl us | in a graph | NCCL us | NCCL / miraccl | host us, miraccl"
        " / NCCL | GB/s | wrong | plan"
    )
    table = [f"| {names} |", "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|"]
    return "\n".join([f"{head} {inside}", "", *table, *map(line, record["rows"]), ""])


if __name__ == "__main__":
    main()
