"""PyTorch's DistributedDataParallel over miraccl: a training script changes one word.

    torchrun --standalone --nproc-per-node 2 examples/14_torch_ddp.py

The same model is trained a second time over Gloo. On two ranks the losses have equal bits; for more
ranks see docs/guide/reproducibility.md.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import miraccl.torch  # registers the backend

STEPS = 40


def train(group):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    model = DistributedDataParallel(layers, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        x = torch.randn(64, 16, generator=data)
        loss = (model(x) - x.square().sum(1, keepdim=True) / 16).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.set_num_threads(1)
dist.init_process_group(miraccl.torch.NAME)  # "miraccl", instead of "gloo"
ours = train(None)
theirs = train(dist.new_group(backend="gloo"))
assert ours[-1] < ours[0] / 2
assert dist.get_world_size() > 2 or ours == theirs
if dist.get_rank() == 0:
    print(
        f"loss {ours[0]:.4f} to {ours[-1]:.4f}; over Gloo "
        f"{'the same bits' if ours == theirs else f'{theirs[-1]:.4f}'}"
    )
dist.destroy_process_group()
