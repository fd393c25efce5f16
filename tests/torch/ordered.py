"""``MIRACCL_DETERMINISTIC``: sums in rank order whatever the size, so losses do not depend on
buckets.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tests.torch.worlds import equal, gloo, world

# more than 1 MB: the chosen algorithm splits data by rank and adds each part in another order
COUNT = 300_000
STEPS = 3


def deterministic(path: str) -> None:
    os.environ["MIRACCL_DETERMINISTIC"] = "1"
    try:
        with world(path) as (rank, nranks):
            _sums(rank, nranks)
            other = gloo()
            small, large = (
                _losses(rank, allreduce_hook, megabytes, None) for megabytes in (0.001, 25)
            )
            assert small == large
            assert large == _losses(
                rank, lambda group, bucket: _in_order(group, bucket), 25, other
            )  # DDP looks at annotations
            assert large[-1] < large[0]
    finally:
        del os.environ["MIRACCL_DETERMINISTIC"]


def _sums(rank: int, nranks: int) -> None:
    parts = [torch.randn(COUNT, generator=torch.Generator().manual_seed(r)) for r in range(nranks)]
    mine = parts[rank].clone()
    dist.all_reduce(mine)
    assert equal(mine, (parts[0] + parts[1]) + parts[2])
    assert not equal(mine, (parts[1] + parts[2]) + parts[0])


def _in_order(group: Any, bucket: Any) -> Any:
    """DDP's average with gradients added as x0 + x1 + x2, over Gloo, whose order differs."""
    mine = bucket.buffer().div_(dist.get_world_size(group))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    future: Any = torch.futures.Future()
    future.set_result(sum(parts[1:], start=parts[0]))
    return future


def _losses(rank: int, hook: Any, megabytes: float, group: Any) -> list[float]:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(8, 16384), torch.nn.ReLU(), torch.nn.Linear(16384, 4)
    )
    model: Any = DistributedDataParallel(layers, process_group=group, bucket_cap_mb=megabytes)
    model.register_comm_hook(group, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, foreach=False)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(7 + rank))
    losses = []
    for _ in range(STEPS):
        loss = (model(x) - x[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
