"""Training with DDP and FSDP2 on miraccl, Gloo (CPU) or NCCL (GPU): equal losses and step times.

    python bench/training.py --ranks 2,4 --out training-DATE
    python bench/training.py --ranks 2 --device cuda --size large
    python bench/training.py --ranks 2 --device cuda --model mlp --parallel ddp --bucket-mb 0.3

Starts its own ranks; under ``torchrun`` it is one of them. Several variants ("arms") of summing the
same gradients train their own copy of the same model from the same weights on the same batches.
They alternate every few steps, so that a busy machine affects all.

================== ========================================================================
gloo, nccl         with their defaults
miraccl            with its defaults: on the CPU the algorithm, and with it the order of
                   additions on more than two ranks, depends on the size
miraccl:NAME       only the algorithm NAME (MIRACCL_ALGO); one_shot and two_shot add in
                   rank order
miraccl:NNsms      with at most NN multiprocessors for communication (MIRACCL_SMS), on GPUs
miraccl:down_ring  Gloo's ring as a schedule: see ``build_down_ring``
gloo:rank_order    Gloo moves the gradients (all_gather), each rank adds them in rank
                   order; nccl:rank_order likewise
none               no communication: every rank trains alone
================== ========================================================================

Arms that must be equal: all arms on two ranks (a + b = b + a); the arms that add in rank order;
``miraccl:down_ring`` and ``gloo``. The losses of all ranks in all steps and a hash of the final
weights are compared.

A step is forward, backward, optimizer and ``loss.item()``; its time is that of the slowest rank;
the first step after every change of arms is not counted. Figures are medians over steps; the ratio
is the median over turns of the quotient of their medians. Processor time is that of all threads of
a rank, the mean over steps and ranks.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import os
import statistics
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import add_output_option, describe_machine, heading, markdown_table, save
from gpu_ranks import need_gpus, spawn

LIMIT_S = 120.0
RANK_ORDER = ("one_shot", "two_shot", "rank_order")
CPU_ARMS = (
    "gloo",
    "miraccl",
    "miraccl:two_shot",
    "miraccl:one_shot",
    "gloo:rank_order",
    "miraccl:down_ring",
    "none",
)
GPU_ARMS = ("nccl", "miraccl", "nccl:rank_order", "none")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt,resnet", help="of gpt, resnet, mlp")
    parser.add_argument("--parallel", default="ddp,fsdp2", help="ddp, fsdp2 or both")
    parser.add_argument(
        "--ranks",
        default="2",
        help="numbers of ranks, such as 2,4; taken from the launcher where there is one",
    )
    parser.add_argument(
        "--backend", help="arms, separated by commas; the first is the one to compare with"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=("small", "base", "large"), default="base")
    parser.add_argument(
        "--steps", type=int, default=6, help="steps in a row before the next arm has its turn"
    )
    parser.add_argument("--bucket-mb", type=float, default=4, help="size of DDP's buckets, in MB")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every arm")
    parser.add_argument("--json", help="file for the raw record")
    add_output_option(parser)
    options = parser.parse_args()
    options.arms = (
        options.backend or ",".join(GPU_ARMS if options.device == "cuda" else CPU_ARMS)
    ).split(",")
    if "RANK" in os.environ:
        train_here(options)
    else:
        if options.device == "cuda":
            need_gpus()
        machine = describe_machine()
        machine["versions"]["torch"] = importlib.metadata.version("torch")
        report(
            options,
            machine,
            [
                record
                for nranks in options.ranks.split(",")
                for record in train_on(options, int(nranks))
            ],
        )


def train_on(options: argparse.Namespace, nranks: int) -> list[dict[str, Any]]:
    """Start the ranks and return the results of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        status = spawn(__file__, nranks, [*sys.argv[1:], "--json", str(path)], timeout=3000)
        if status:
            sys.exit(status)
        records: list[dict[str, Any]] = json.loads(path.read_text())
        return records


# ---- in a rank


def train_here(options: argparse.Namespace) -> None:
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # cuBLAS adds in one order only with it
    import torch
    import torch.distributed as dist
    import training_ranks as ranks

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=LIMIT_S))
    records = [
        ranks.compare(options, model, way)
        for model in options.model.split(",")
        for way in options.parallel.split(",")
    ]
    if dist.get_rank() == 0:
        if options.json:
            Path(options.json).write_text(json.dumps(records))
        else:
            print(tables(records))
    dist.destroy_process_group()


# ---- what it means


def family(arm: str, record: dict[str, Any]) -> str:
    """Return the family of an arm, whose arms must give the same bits."""
    order = arm.partition(":")[2]
    if arm == "none":
        return arm
    if record["ranks"] == 2:
        return "two ranks"
    if order in RANK_ORDER or (arm == "miraccl" and record["device"] != "cpu"):
        return "rank order"
    return "Gloo's ring" if arm in ("gloo", "miraccl:down_ring") else arm


def ulps(a: dict[str, Any], b: dict[str, Any]) -> int:
    """Return the largest difference of two losses in units of the last place of float32."""
    pairs = [
        (x, y)
        for xs, ys in zip(a["losses"], b["losses"], strict=True)
        for x, y in zip(xs, ys, strict=True)
    ]
    return max(abs(_ordinal(x) - _ordinal(y)) for x, y in pairs)


def _ordinal(x: float) -> int:
    (bits,) = struct.unpack("<i", struct.pack("<f", x))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return bool(a["losses"] == b["losses"] and a["digests"] == b["digests"])


def broken(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the arms that should be equal and differ."""
    found = []
    for record in records:
        first: dict[str, str] = {}
        for arm in record["arms"]:
            other = first.setdefault(family(arm, record), arm)
            if not same(record["arms"][arm], record["arms"][other]):
                found.append(f"{title(record)}: {arm} differs from {other}")
    return found


def title(record: dict[str, Any]) -> str:
    return f"{record['model']} {record['parallel']}, {record['ranks']} ranks"


def tables(records: Sequence[dict[str, Any]]) -> str:
    """Return markdown: agreement of the losses, and step times."""
    peer = next(iter(records[0]["arms"]))
    arms = [arm for arm in records[0]["arms"] if arm != "none"]
    alike, times = [], []
    for record in records:
        by_arm, row = record["arms"], [title(record)]
        for arm in arms[1:]:
            equal = next(
                (other for other in arms if other != arm and same(by_arm[arm], by_arm[other])), ""
            )
            distance = ulps(by_arm[arm], by_arm[peer])
            row.append(
                f"= {peer}"
                if same(by_arm[arm], by_arm[peer])
                else f"{distance} ulp" + (f", = {equal}" if equal else "")
            )
        first, last = (
            sum(losses[i] for losses in by_arm[peer]["losses"]) / record["ranks"] for i in (0, -1)
        )
        alike.append([*row, f"{first:.3f} to {last:.3f}"])
        times.append(
            [title(record), f"{record['parameters'] / 1e6:.2f} M", *_times(record, peer, "miraccl")]
        )
    shown = (
        f"## Losses and final weights beside {peer}\n\n",
        markdown_table(["", *arms[1:], f"mean loss ({peer})"], alike),
    )
    columns = [
        "",
        "parameters",
        peer,
        "miraccl",
        f"miraccl / {peer}",
        "turns",
        "no communication",
        f"processor: {peer}, miraccl, none",
    ]
    return "".join(
        (
            *shown,
            "\n\n## Milliseconds per step, slowest rank, median\n\n",
            markdown_table(columns, times),
        )
    )


def _times(record: dict[str, Any], peer: str, ours: str) -> list[str]:
    arms = record["arms"]
    if ours not in arms or peer == ours:
        return [f"{arms[peer]['step_ms']:.2f}", "", "", "", "", ""]
    ratios = [b / a for a, b in zip(arms[peer]["turns_ms"], arms[ours]["turns_ms"], strict=True)]
    alone = f"{arms['none']['step_ms']:.2f}" if "none" in arms else ""
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    busy = ", ".join(
        f"{arms[arm]['processor_ms']:.1f}" for arm in (peer, ours, "none") if arm in arms
    )
    return [
        f"{arms[peer]['step_ms']:.2f}",
        f"{arms[ours]['step_ms']:.2f}",
        f"**{statistics.median(ratios):.2f}**",
        spread,
        alone,
        busy,
    ]


def shortened(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with a hash and the last values instead of all losses."""
    arms = {}
    for name, arm in record["arms"].items():
        digest = hashlib.sha256(json.dumps(arm["losses"]).encode()).hexdigest()[:16]
        arms[name] = {
            **arm,
            "losses": digest,
            "last_losses": [losses[-1] for losses in arm["losses"]],
        }
    return {**record, "arms": arms}


def report(
    options: argparse.Namespace, machine: dict[str, Any], records: Sequence[dict[str, Any]]
) -> None:
    """Print and save the results; exit with 1 if arms that should be equal differ."""
    wrong = broken(records)
    words = (
        f"Size {options.size} on {records[0]['device']}, {options.rounds} turns of"
        f" {options.steps} steps."
    )
    text = f"{heading('Training', machine)}\n{words}\n\n{tables(records)}\n"
    record = {"machine": machine, "records": list(records), "broken": wrong}
    if options.json:
        Path(options.json).write_text(json.dumps(record))
    save(options.out, {**record, "records": [shortened(one) for one in records]}, text)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
