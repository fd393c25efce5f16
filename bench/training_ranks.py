"""One rank of ``training.py``: process groups of the arms, wrapped models, steps, collected
results.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_models import SIZES, loss_of, make_batch, make_model

import miraccl.torch  # noqa: F401  (registers the backend)
from miraccl.schedule.catalog import register
from miraccl.schedule.ir import Schedule, Step
from miraccl.schedule.steps import (
    inp,
    one_channel,
    out,
    recv,
    recv_copy_send,
    recv_reduce_copy,
    recv_reduce_copy_send,
    recv_reduce_send,
    send,
)
from miraccl.types import Collective

# ---- orders of additions


@register(
    "down_ring",
    collectives=[Collective.ALL_REDUCE, Collective.REDUCE_SCATTER],
    description="A ring downwards: the order in which Gloo adds.",
)
def build_down_ring(collective: Collective, nranks: int, root: int) -> Schedule:
    """Gloo's ring (``gloo/allreduce.cc: ring``, which sends to rank - 1) as a schedule.

    Chunk c starts at rank c - 1 and moves down to rank c. Gloo's reduce_scatter is its all_reduce,
    of which it keeps a part. Gloo's chunks are whole segments, at least two, of at most 1 MiB. They
    equal this schedule's if the count is a multiple of 2 * nranks elements and of nranks cache
    lines, and below 2 * nranks MiB.
    """

    def steps(rank: int) -> Iterator[Step]:
        before, after = (rank + 1) % nranks, (rank - 1) % nranks
        yield send(inp(before), after)
        for distance in range(2, nranks):
            yield recv_reduce_send(inp((rank + distance) % nranks), before, after)
        if collective is Collective.REDUCE_SCATTER:
            yield recv_reduce_copy(inp(rank), out(0), before)
            return
        yield recv_reduce_copy_send(inp(rank), out(rank), before, after)
        for distance in range(1, nranks - 1):
            yield recv_copy_send(out((rank + distance) % nranks), before, after)
        yield recv(out(after), before)

    parts = nranks if collective is Collective.ALL_REDUCE else 1
    return one_channel("down_ring", collective, map(steps, range(nranks)), parts=parts)


def add_in_rank_order(x: Any, group: Any) -> Any:
    """Return the sum of all ranks' ``x`` (flat), added here: ((x0 + x1) + x2) + ..."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


# Without annotations: DDP rejects any but its own.
def rank_ordered_hook(group, bucket):  # type: ignore[no-untyped-def]
    """Communication hook of DDP that adds in rank order; divides first, as DDP does."""
    x = bucket.buffer().mul_(1.0 / dist.get_world_size(group))
    future: Any = torch.futures.Future(devices=[x.device] if x.is_cuda else None)
    future.set_result(x.copy_(add_in_rank_order(x, group)))
    return future


class RankOrderedReduceScatter:
    """FSDP2's ``ReduceScatter`` (``torch.distributed.fsdp``) with additions in rank order."""

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> None:
        nranks, rank = dist.get_world_size(group), dist.get_rank(group)
        total = add_in_rank_order(input_tensor, group)
        output_tensor.copy_(total.view(nranks, -1)[rank].view_as(output_tensor))
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(nranks)


# ---- arms


@contextmanager
def setting(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    if value:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


@cache
def group_of(arm: str) -> Any:
    """Return the arm's process group of all ranks; its settings apply at creation."""
    backend, _, detail = arm.partition(":")
    if detail.endswith("sms"):
        with setting("MIRACCL_SMS", detail.removesuffix("sms")):
            group = dist.new_group(backend=backend)
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)  # its GPU side is made now
            return group
    with setting("MIRACCL_ALGO", detail if backend == "miraccl" else ""):
        return dist.new_group(backend=backend)


def spread(model: Any, arm: str, parallel: str, device: Any, bucket_mb: float) -> Any:
    """Return the model wrapped in DDP or FSDP2 over the arm's group."""
    if arm == "none":
        return model
    group, ordered = group_of(arm), arm.endswith(":rank_order")
    if parallel == "ddp":
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_mb)
        if ordered:
            ddp.register_comm_hook(group, rank_ordered_hook)
        return ddp
    mesh = DeviceMesh.from_group(group, device.type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if ordered and isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(RankOrderedReduceScatter())
    return model


class Training:
    """One arm's copy of the model, its position and its results."""

    def __init__(
        self, arm: str, name: str, parallel: str, device: Any, options: argparse.Namespace
    ) -> None:
        size = SIZES[options.size]
        self.arm, self.name, self.size, self.device = arm, name, size, device
        model = make_model(name, size).to(device)
        self.model = spread(model, arm, parallel, device, options.bucket_mb)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.losses: list[float] = []
        self.blocks: list[list[float]] = []
        self.processor_s = 0.0

    def turn(self, steps: int) -> None:
        """Run some steps; the first is not timed."""
        begin = time.process_time()
        times = [self.step() for _ in range(steps)]
        self.processor_s += time.process_time() - begin
        self.blocks.append(times[1:] or times)

    def step(self) -> float:
        """Return the milliseconds of one step."""
        inputs, targets = (
            x.to(self.device)
            for x in make_batch(self.name, self.size, dist.get_rank(), len(self.losses))
        )
        begin = time.perf_counter()
        loss = loss_of(self.model(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3

    def digest(self) -> str:
        """Return a hash of this rank's weights (FSDP2: of its shards)."""
        total = hashlib.sha256()
        for parameter in self.model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            total.update(local.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return total.hexdigest()[:16]


def compare(options: argparse.Namespace, name: str, parallel: str) -> dict[str, Any]:
    """Train all arms alternately; return losses, digests and the slowest rank's times by arm."""
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    trainings = [Training(arm, name, parallel, device, options) for arm in options.arms]
    for turn in range(options.rounds):
        for training in trainings if turn % 2 == 0 else reversed(trainings):
            dist.barrier()  # of the default group: nobody is behind in another arm
            training.turn(options.steps)
    mine = {
        t.arm: {
            "losses": t.losses,
            "digest": t.digest(),
            "blocks": t.blocks,
            "processor_ms": t.processor_s * 1e3 / len(t.losses),
        }
        for t in trainings
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    arms = {}
    for arm in options.arms:
        seen = [of_rank[arm] for of_rank in everyone]
        blocks = [
            [max(step) for step in zip(*turns)] for turns in zip(*(s["blocks"] for s in seen))
        ]
        arms[arm] = {
            "losses": [s["losses"] for s in seen],
            "digests": [s["digest"] for s in seen],
            "step_ms": statistics.median(step for block in blocks for step in block),
            "processor_ms": statistics.mean(s["processor_ms"] for s in seen),
            "turns_ms": [statistics.median(block) for block in blocks],
        }
    return {
        "model": name,
        "parallel": parallel,
        "ranks": len(everyone),
        "device": (
            "cpu"
            if options.device == "cpu"
            else (
                f"{torch.cuda.get_device_name()}, NCCL"
                f" {'.'.join(map(str, torch.cuda.nccl.version()))}"
            )
        ),
        "parameters": sum(p.numel() for p in make_model(name, SIZES[options.size]).parameters()),
        "arms": arms,
    }
