"""Gradients through collectives of ``torch.distributed.nn`` and functional ones, and unused
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.nn.parallel import DistributedDataParallel

from tests.torch.worlds import both, gloo, world

Group = Any
CALLS: dict[str, Callable[[Any, Any, Group], Any]] = {
    "all_reduce": lambda x, y, group: differentiable.all_reduce(x, group=group),
    "all_gather": lambda x, y, group: torch.stack(differentiable.all_gather(x, group)),
    "reduce_scatter": lambda x, y, group: differentiable.reduce_scatter(
        torch.empty(3), [x, 2 * x], group=group
    ),
    "broadcast": lambda x, y, group: differentiable.broadcast(x, 1, group),
    "reduce": lambda x, y, group: differentiable.reduce(x, 1, group=group),
    "gather": lambda x, y, group: torch.stack(differentiable.gather(x, 1, group)),
    "scatter": lambda x, y, group: differentiable.scatter([x, 5 * x], 0, group),
    "all_to_all": lambda x, y, group: torch.stack(
        differentiable.all_to_all(list(y.view(2, 3)), [x, 3 * x], group)
    ),
    "all_to_all_single": lambda x, y, group: differentiable.all_to_all_single(
        y, torch.cat([x, 2 * x]), group=group
    ),
    "all_gather_tensor": lambda x, y, group: functional.all_gather_tensor_autograd(2 * x, 0, group),
    "reduce_scatter_tensor": lambda x, y, group: functional.reduce_scatter_tensor_autograd(
        torch.cat([x, 2 * x]), "sum", 0, group
    ),
    "all_to_all_tensor": lambda x, y, group: functional.all_to_all_single_autograd(
        torch.cat([x, 3 * x]), None, None, group
    ),
}


def differentiated(path: str) -> None:
    """Return the gradient at a collective's input for a loss that differs between ranks."""
    with world(path) as (rank, _):
        other = gloo()
        for name, call in CALLS.items():

            def gradient(group: Group, call: Callable[[Any, Any, Group], Any] = call) -> Any:
                x = (torch.arange(3.0) + rank).requires_grad_()
                result = call(x, torch.zeros(6), group or dist.group.WORLD)
                (
                    result.flatten() * torch.arange(1.0, result.numel() + 1) * (rank + 1)
                ).sum().backward()
                return x.grad

            dist.all_reduce(size := both(gradient, other).abs().sum())
            assert size > 0, name


class _Sometimes(torch.nn.Module):  # type: ignore[misc]
    """A model that skips one layer every other step, in different steps on different ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.always, self.sometimes = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

    def forward(self, x: Any, step: int) -> Any:
        return self.always(x) + self.sometimes(x) if step % 2 else self.always(x)


def unused(path: str) -> None:
    """Check gradients of parameters used by some ranks, and of parameters used by none."""
    with world(path) as (rank, _):
        other = gloo()

        def gradients(group: Group) -> list[Any]:
            model = DistributedDataParallel(
                _Sometimes(),
                process_group=group,
                find_unused_parameters=True,
                gradient_as_bucket_view=True,
                bucket_cap_mb=1e-5,
            )
            seen = []
            for step in (rank, rank + 1, 0, 1):
                model.zero_grad()
                model(torch.full((1, 3), 1.0 + rank), step).sum().backward()
                seen += [
                    torch.zeros(0) if p.grad is None else p.grad.clone() for p in model.parameters()
                ]
            return seen

        assert {g.numel() for g in both(gradients, other)} == {0, 2, 6}
