"""FSDP2 over miraccl: each rank holds a shard of the weights and gathers layers when needed.

    torchrun --standalone --nproc-per-node 2 examples/15_torch_fsdp2.py

The weights of a layer are gathered (all_gather_into_tensor) before its forward and backward passes
and freed afterwards; its gradients are reduced and sharded (reduce_scatter_tensor) at once.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import miraccl.torch

STEPS, WIDTH = 30, 64


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            torch.nn.LayerNorm(WIDTH),
            torch.nn.Linear(WIDTH, 4 * WIDTH),
            torch.nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


torch.set_num_threads(1)
dist.init_process_group(miraccl.torch.NAME)
rank, nranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = torch.nn.Sequential(*(Layer() for _ in range(3)))
total = sum(p.numel() for p in model.parameters())
mesh = init_device_mesh("cpu", (nranks,))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
held = sum(p.to_local().numel() for p in model.parameters())

optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1 + rank))
losses = []
for _ in range(STEPS):
    loss = (model(x) - x.roll(1, dims=1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

assert losses[-1] < losses[0] / 2
assert held < total or nranks == 1
if rank == 0:
    print(f"rank 0 holds {held} of {total} weights; loss {losses[0]:.4f} to {losses[-1]:.4f}")
dist.destroy_process_group()
