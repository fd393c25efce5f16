"""Cost of small calls of ``torch.distributed``: miraccl compared with Gloo, or NCCL on GPUs.

    python bench/torch_calls.py --ranks 2,4 --out torch-calls-DATE
    python bench/torch_calls.py --ranks 2 --only all_gather --rounds 31
    python bench/torch_calls.py --ranks 2 --device cuda --out torch-calls-DATE-2xH200

Starts its own ranks; the backends alternate in the same processes. Every call is one row: a turn is
``--calls`` calls in a row with one backend, then the other. ``call`` is the time of a call on the
slowest rank, ``processor`` that of all threads of a rank, the mean over ranks; medians over turns,
and the minimum in parentheses, which a busy machine affects less. Waiting is in both: a waiting
rank spins a while, then yields the processor. The ratio is the median over turns of the other
backend's figure divided by miraccl's; above 1 miraccl is cheaper. On GPUs the clock stops when all
calls have been enqueued, so ``call`` is host time, unless the GPU is so far behind that a call
waits for it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import add_output_option, describe_machine, heading, markdown_table, median, save
from gpu_ranks import need_gpus, spawn

OTHERS = {"cpu": "gloo", "cuda": "nccl"}
OURS = "miraccl"
NAMES = {"gloo": "Gloo", "nccl": "NCCL"}
WARM = 30
SEVERAL = 10  # operations before the first wait, as DDP has its buckets


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument(
        "--device",
        choices=list(OTHERS),
        default="cpu",
        help="where the tensors are; cuda: a GPU for each rank",
    )
    parser.add_argument("--elements", type=int, default=8, help="float32 in the block of a rank")
    parser.add_argument("--rounds", type=int, default=15, help="turns of every backend")
    parser.add_argument("--calls", type=int, default=300, help="in a turn")
    parser.add_argument(
        "--only",
        default="",
        help="rows whose name contains one of these words, separated by commas",
    )
    parser.add_argument("--json", help=argparse.SUPPRESS)
    add_output_option(parser)
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure_here(options)
        return
    if options.device == "cuda":
        need_gpus()
    machine = describe_machine()
    machine["versions"]["torch"] = importlib.metadata.version("torch")
    records = {nranks: measure_on(int(nranks)) for nranks in options.ranks.split(",")}
    where = next(iter(records.values()))["where"]
    words = (
        f"{where}{options.elements} float32 per block, {options.rounds} turns of"
        f" {options.calls} calls."
    )
    tables = "\n\n".join(
        f"## {nranks} ranks\n\n{table(record['us'], OTHERS[options.device])}"
        for nranks, record in records.items()
    )
    place = "CPU memory" if options.device == "cpu" else "GPU memory"
    text = (
        f"{heading(f'Small calls of torch.distributed on {place}', machine)}\n{words}\n\n{tables}\n"
    )
    save(
        options.out,
        {
            "machine": machine,
            "where": where,
            "us": {nranks: record["us"] for nranks, record in records.items()},
        },
        text,
    )


def measure_on(nranks: int) -> dict[str, Any]:
    """Start the ranks and return the results of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        status = spawn(__file__, nranks, [*sys.argv[1:], "--json", str(path)], timeout=1800)
        if status:
            sys.exit(status)
        record: dict[str, Any] = json.loads(path.read_text())
        return record


def table(record: dict[str, Any], other: str) -> str:
    rows = []
    for name, times in record.items():
        row = [name]
        for kind in ("wall", "processor"):
            theirs, ours = times[other][kind], times[OURS][kind]
            ratio = median(a / b for a, b in zip(theirs, ours, strict=True))
            row += [
                *(f"{median(figures):.1f} ({min(figures):.1f})" for figures in (theirs, ours)),
                f"**{ratio:.2f}**",
            ]
        rows.append(row)
    return markdown_table(
        ["us", f"call: {NAMES[other]}", OURS, "ratio", f"processor: {NAMES[other]}", OURS, "ratio"],
        rows,
    )


# ---- in a rank


def measure_here(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import miraccl.torch  # noqa: F401  (registers the backend)

    torch.set_num_threads(1)
    other = OTHERS[options.device]
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(other)
    groups = {other: dist.group.WORLD, OURS: dist.new_group(backend=OURS)}
    calls = {backend: subjects(group, options) for backend, group in groups.items()}
    wanted = [
        name
        for name in calls[other]
        if not options.only or any(word in name for word in options.only.split(","))
    ]
    mine: dict[str, Any] = {
        name: {backend: {"wall": [], "processor": []} for backend in groups} for name in wanted
    }
    for name in wanted:
        for turn in range(options.rounds):
            for backend in list(groups)[:: 1 if turn % 2 else -1]:
                wall, processor = one_turn(dist, calls[backend][name], options.calls)
                mine[name][backend]["wall"].append(wall)
                mine[name][backend]["processor"].append(processor)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        version = ".".join(map(str, torch.cuda.nccl.version())) if options.device == "cuda" else ""
        where = (
            f"{torch.cuda.get_device_name()}, NCCL {version}. " if options.device == "cuda" else ""
        )
        rows = {name: together([one[name] for one in everyone]) for name in wanted}
        Path(options.json).write_text(json.dumps({"where": where, "us": rows}))
    dist.destroy_process_group()


def one_turn(dist: Any, call: Callable[[], Any], times: int) -> tuple[float, float]:
    """Return microseconds per call on this rank: wall clock, processor time of its threads."""
    for _ in range(WARM):
        call()
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(times):
        call()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    dist.barrier()
    return wall / times * 1e6, processor / times * 1e6


def together(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the slowest rank's time of every turn, and the mean of the processor times."""
    result = {}
    for backend in ranks[0]:
        walls = zip(*(rank[backend]["wall"] for rank in ranks), strict=True)
        processors = zip(*(rank[backend]["processor"] for rank in ranks), strict=True)
        result[backend] = {
            "wall": [max(turn) for turn in walls],
            "processor": [sum(turn) / len(turn) for turn in processors],
        }
    return result


def subjects(group: Any, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Return the measured calls by name."""
    import torch
    import torch.distributed as dist

    elements, on_gpu = options.elements, options.device == "cuda"
    rank, nranks = dist.get_rank(group), dist.get_world_size(group)
    zeros = functools.partial(
        torch.zeros, device=options.device
    )  # a default device would be asked in every call of PyTorch
    block, other, whole, target = (
        zeros(elements),
        zeros(elements),
        zeros(elements * nranks),
        zeros(elements * nranks),
    )
    blocks, others = ([zeros(elements) for _ in range(nranks)] for _ in range(2))
    buckets = [zeros(elements) for _ in range(SEVERAL)]
    rows = [elements] * nranks
    right, left, partner = (rank + 1) % nranks, (rank - 1) % nranks, rank ^ 1
    on_root = rank == 0

    def several() -> None:
        for work in [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]:
            work.wait()

    def several_futures() -> None:
        for future in [
            dist.all_reduce(bucket, group=group, async_op=True).get_future() for bucket in buckets
        ]:
            future.wait()

    def future_and_wait() -> None:
        work = dist.all_reduce(block, group=group, async_op=True)
        work.get_future()
        work.wait()

    def there_and_back(source: int | None) -> None:
        if rank % 2:
            dist.recv(block, source, group)
            dist.send(block, partner, group)
        elif partner < nranks:
            dist.send(block, partner, group)
            dist.recv(block, source, group)

    def neighbours() -> None:
        works = [dist.irecv(blocks[0], left, group, 1), dist.irecv(other, right, group, 2)]
        works += [dist.isend(block, right, group, 1), dist.isend(block, left, group, 2)]
        for work in works:
            work.wait()

    def ring() -> None:
        for work in (dist.isend(block, right, group), dist.irecv(other, left, group)):
            work.wait()

    def batch() -> None:
        pair = [
            dist.P2POp(dist.isend, block, right, group),
            dist.P2POp(dist.irecv, other, left, group),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    def objects() -> None:
        dist.all_gather_object([None] * nranks, {"step": rank}, group)

    here = torch.cuda.current_stream() if on_gpu else None
    beside = torch.cuda.Stream() if on_gpu else None

    def two_streams() -> None:
        torch.cuda.set_stream(beside)
        dist.all_gather_into_tensor(whole, block, group=group)
        torch.cuda.set_stream(here)
        dist.reduce_scatter_tensor(other, target, group=group)

    common = {
        "all_reduce": lambda: dist.all_reduce(block, group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, block, group=group),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(block, whole, group=group),
        "broadcast": lambda: dist.broadcast(block, 0, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(target, whole, group=group),
        "all_to_all_single with splits": lambda: dist.all_to_all_single(
            target, whole, rows, rows, group=group
        ),
        "all_gather of a list": lambda: dist.all_gather(blocks, block, group=group),
        "reduce_scatter of a list": lambda: dist.reduce_scatter(block, blocks, group=group),
        "all_to_all of lists": lambda: dist.all_to_all(others, blocks, group=group),
        "reduce": lambda: dist.reduce(block, 0, group=group),
        "gather": lambda: dist.gather(block, blocks if on_root else None, 0, group=group),
        "scatter": lambda: dist.scatter(block, blocks if on_root else None, 0, group=group),
        "barrier": lambda: dist.barrier(group=group),
        "send, recv and back": lambda: there_and_back(partner),
        "batch_isend_irecv in a ring": batch,
        "all_gather_object": objects,
        "broadcast_object_list": lambda: dist.broadcast_object_list(
            [{"step": 1}, "x"], 0, group=group
        ),
        "all_reduce, async_op": lambda: dist.all_reduce(block, group=group, async_op=True).wait(),
        "all_gather_into_tensor, async_op": lambda: dist.all_gather_into_tensor(
            whole, block, group=group, async_op=True
        ).wait(),
        "broadcast, async_op": lambda: dist.broadcast(block, 0, group=group, async_op=True).wait(),
        f"{SEVERAL} all_reduce, async_op, then waits": several,
        "all_reduce, async_op, future and wait": future_and_wait,
        f"{SEVERAL} all_reduce, async_op, then futures": several_futures,
    }
    if on_gpu:
        return {**common, "all_gather and reduce_scatter of tensors on two streams": two_streams}
    # NCCL has no receive from any source, and its messages without a batch wait for each other.
    only_here = {
        "send, recv from anyone and back": lambda: there_and_back(None),
        "isend and irecv in a ring": ring,
        "isend and irecv, both neighbours": neighbours,
    }
    return {**common, **only_here}


if __name__ == "__main__":
    main()
