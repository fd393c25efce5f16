"""Training compared bit for bit with Gloo: DDP and hooks, FSDP2, ZeRO, DTensor, pipelines,
compile.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

from miraccl.torch import sparse_hook
from tests.torch.worlds import both, equal, gloo, refused, world

Group = Any
STEPS = 5


def losses(path: str) -> None:
    """Compare losses of the same training on miraccl and Gloo, however the model is sharded."""
    with world(path) as (rank, _):
        other = gloo()
        for name, wrap in WRAPS.items():
            ours, theirs = (_losses(name, wrap, rank, STEPS, group) for group in (None, other))
            assert ours == theirs, name
            assert ours[-1] < ours[0], name


def joined(path: str) -> None:
    """Train with different numbers of batches per rank under ``join``."""
    with world(path) as (rank, _):
        other = gloo()

        def gradients(group: Group) -> list[Any]:
            torch.manual_seed(1)
            model = _ddp(torch.nn.Linear(3, 2), group)
            seen = []
            with model.join(divide_by_initial_world_size=False):
                for step in range(2 + 2 * rank):
                    model.zero_grad()
                    model(torch.full((1, 3), 1.0 + step + rank)).sum().backward()
                    seen += [p.grad.clone() for p in model.parameters()]
            return seen

        both(gradients, other)


def _ddp(layers: Any, group: Group) -> Any:
    return DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0.001)


def _hooked(hook: Any) -> Callable[[Any, Group], Any]:
    def wrap(layers: Any, group: Group) -> Any:
        model = _ddp(layers, group)
        model.register_comm_hook(group, hook)
        return model

    return wrap


def _builtin_fp16(layers: Any, group: Group) -> Any:
    model = _ddp(layers, group)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return model


def _power_sgd(layers: Any, group: Group) -> Any:
    model = _ddp(layers, group)
    state = PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    model.register_comm_hook(state, powerSGD_hook)
    return model


def _fsdp2(layers: Any, group: Group) -> Any:
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
    for layer in layers:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(layers, mesh=mesh)


def _static(layers: Any, group: Group) -> Any:
    return DistributedDataParallel(
        layers, process_group=group, static_graph=True, gradient_as_bucket_view=True
    )


def _compiled(layers: Any, group: Group) -> Any:
    torch._dynamo.reset()
    return torch.compile(DistributedDataParallel(layers, process_group=group), backend="aot_eager")


def _fsdp2_offloaded(layers: Any, group: Group) -> Any:
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
    return fully_shard(layers, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


def _fsdp1_mixed(layers: Any, group: Group) -> Any:
    """FSDP1 with mixed precision, which resizes storages of tensors it has communicated."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(
        layers, process_group=group, device_id=cpu, use_orig_params=True, mixed_precision=precision
    )


def _fsdp2_mixed(layers: Any, group: Group) -> Any:
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
    return fully_shard(
        layers,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )


def _tensor_parallel(layers: Any, group: Group) -> Any:
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
    return parallelize_module(
        layers,
        mesh,
        {
            "0": ColwiseParallel(output_layouts=Replicate()),
            "3": RowwiseParallel(input_layouts=Replicate()),
        },
    )


WRAPS = {
    "ddp": _ddp,
    "ddp_allreduce_hook": _hooked(allreduce_hook),
    "ddp_fp16": _hooked(fp16_compress_hook),
    "ddp_builtin_fp16": _builtin_fp16,
    "ddp_power_sgd": _power_sgd,
    "zero": _ddp,
    "ddp_static": _static,
    "ddp_compiled": _compiled,
    "fsdp1_mixed": _fsdp1_mixed,
    "fsdp2": _fsdp2,
    "fsdp2_mixed": _fsdp2_mixed,
    "fsdp2_offloaded": _fsdp2_offloaded,
    "tensor_parallel": _tensor_parallel,
}


def _losses(
    name: str, wrap: Callable[[Any, Group], Any], rank: int, steps: int, group: Group
) -> list[float]:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    )
    model = wrap(layers, group)
    if name == "zero":
        optimizer: Any = ZeroRedundancyOptimizer(
            model.parameters(),
            optimizer_class=torch.optim.AdamW,
            lr=0.01,
            process_group=group or dist.group.WORLD,
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
    seed = 7 if name == "tensor_parallel" else 7 + rank  # there all ranks work on the same batch
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    losses = []
    for _ in range(steps):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sparse(path: str) -> None:
    """Compare sparse sums with Gloo, alone and as embedding gradients under DDP."""
    with world(path) as (rank, nranks):
        other = gloo()
        with warnings.catch_warnings():
            # PyTorch says once in a process what it has to say of sparse tensors; 2.11 whatever it
            # is told
            warnings.simplefilter("error" if torch.__version__ >= "2.13" else "default")
            dist.all_reduce(torch.eye(2).to_sparse())

        def summed(group: Group) -> list[Any]:
            results = []
            for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int64):
                for entries in (0, rank, 3):  # none, none on some ranks, and the same place twice
                    places = torch.arange(2 * entries).reshape(2, entries) % 3
                    x = torch.sparse_coo_tensor(
                        places,
                        (torch.arange(2 * entries).reshape(entries, 2) + rank).to(dtype),
                        (4, 4, 2),
                    )
                    dist.all_reduce(x, group=group)
                    results.append(x.to_dense())
            torch.manual_seed(0)
            table = torch.nn.Embedding(10, 3, sparse=True)
            model = DistributedDataParallel(table, process_group=group)
            for _ in range(2):
                model(torch.tensor([1, rank, rank])).square().sum().backward()
            assert table.weight.grad is not None
            assert table.weight.grad.is_sparse
            return [*results, table.weight.grad.to_dense()]

        both(summed, other)
        dense = torch.nn.Embedding(4096, 64)
        hooked = DistributedDataParallel(dense)
        hooked.register_comm_hook(None, sparse_hook)
        hooked(torch.tensor([7, 9 + rank])).sum().backward()
        assert dense.weight.grad is not None
        assert dense.weight.grad[7].tolist() == [1.0] * 64
        assert dense.weight.grad[9].tolist() == [1.0 / nranks] * 64
        x = torch.eye(2).to_sparse()
        with torch.device("meta"):  # where a program has its own tensors by default, ours are not
            dist.all_reduce(x)
        assert x.to_dense().tolist() == [[nranks, 0], [0, nranks]]
        with refused("all_reduce", "ReduceOp.SUM", "to_dense"):
            dist.all_reduce(torch.eye(2).to_sparse(), op=dist.ReduceOp.MAX)
        assert rank < nranks


# ---- DTensor


def dtensor(path: str) -> None:
    """Redistribute between all placements, and run an operation that needs it."""
    with world(path) as (_, nranks):
        other = gloo()
        whole = torch.arange(8.0 * nranks).reshape(2 * nranks, 4)

        def moves(group: Group) -> list[Any]:
            mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
            rows = distribute_tensor(whole, mesh, [Shard(0)])
            columns = rows.redistribute(placements=[Shard(1)]) if 4 % nranks == 0 else rows
            product = columns @ columns.t()
            uneven = distribute_tensor(whole[: nranks + 1], mesh, [Shard(0)])
            summed = rows.sum()
            assert isinstance(summed, DTensor)
            return [
                columns.full_tensor(),
                product.full_tensor(),
                uneven.full_tensor(),
                summed.full_tensor(),
                rows.to_local(),
            ]

        got = both(moves, other)
        assert torch.equal(got[0], whole)
        assert torch.equal(got[1], whole @ whole.t())


# ---- pipelines


def pipelines(path: str) -> None:
    """Compare GPipe, 1F1B and interleaved 1F1B with Gloo: outputs, losses and gradients."""
    with world(path) as (rank, nranks):
        other = gloo()
        for schedule, chunks in (
            (ScheduleGPipe, 1),
            (Schedule1F1B, 1),
            (ScheduleInterleaved1F1B, 2),
        ):
            ours, theirs = (
                _pipeline(schedule, chunks, rank, nranks, group) for group in (None, other)
            )
            assert len(ours) == len(theirs)
            assert all(equal(a, b) for a, b in zip(ours, theirs, strict=True)), schedule


def _pipeline(schedule: Any, stages_here: int, rank: int, nranks: int, group: Group) -> list[Any]:
    torch.manual_seed(0)
    total = nranks * stages_here
    modules = [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(total)]
    indices = [rank + i * nranks for i in range(stages_here)]
    stages = [
        PipelineStage(modules[i], i, total, torch.device("cpu"), group=group) for i in indices
    ]
    run = schedule(
        stages[0] if stages_here == 1 else stages,
        n_microbatches=2 * nranks,
        loss_fn=torch.nn.functional.mse_loss,
    )
    x = torch.randn(4 * nranks, 6, generator=torch.Generator().manual_seed(1))
    losses: list[Any] = []
    last = rank == nranks - 1
    run.step(*([x] if rank == 0 else []), **({"target": x * 2, "losses": losses} if last else {}))
    return [
        *(loss.detach() for loss in losses),
        *(p.grad for i in indices for p in modules[i].parameters()),
    ]


# ---- compiled code


def compiled(path: str) -> None:
    """Trace functional and rewritten collectives with ``torch.compile`` and run the graph."""
    _compiled_with(path, "aot_eager")


def compiled_by_inductor(path: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{path}-inductor"
    _compiled_with(path, "inductor")


def _compiled_with(path: str, backend: str) -> None:
    with world(path) as (rank, nranks):
        other = gloo()

        def step(x: Any, group: Group) -> Any:
            y = functional.all_reduce(x * 2, "sum", group)
            z = functional.all_gather_tensor(y + rank, 0, group)
            return functional.reduce_scatter_tensor(z, "sum", 0, group).sum() + y

        def in_place(x: Any, group: Group) -> Any:
            y = x + 1
            dist.all_reduce(y, group=group)
            out = torch.empty(nranks * x.numel())
            dist.all_gather_into_tensor(out, y * (rank + 1), group=group)
            return out

        for function in (step, in_place):
            run = torch.compile(function, backend=backend, fullgraph=True)
            x = torch.arange(4.0) + rank
            both(lambda g: run(x.clone(), g or dist.group.WORLD), other)  # noqa: B023
            assert equal(run(x.clone(), dist.group.WORLD), function(x.clone(), dist.group.WORLD))
        torch._dynamo.reset()
        for whole in (False, True):
            if not hasattr(torch._dynamo.config, "enable_p2p_compilation"):  # PyTorch 2.11
                break
            with torch._dynamo.config.patch(enable_p2p_compilation=whole):
                x = torch.arange(4.0) + rank
                both(
                    lambda g: torch.compile(_around, backend=backend, fullgraph=whole)(  # noqa: B023
                        x,  # noqa: B023
                        rank,
                        g or dist.group.WORLD,
                    ),
                    other,
                )
            torch._dynamo.reset()


def recorded(path: str) -> None:
    """Record functional collectives with ``make_fx``; other calls and fake tensors are rejected."""
    with world(path) as (rank, nranks):
        graph = make_fx(lambda x: functional.all_reduce(x, "sum", dist.group.WORLD) + 1)(
            torch.ones(2)
        )
        assert graph(torch.full((2,), float(rank))).tolist() == [sum(range(nranks)) + 1.0] * 2
        with refused("broadcast", "make_fx", "_functional_collectives"):
            make_fx(lambda x: dist.broadcast(x, 0))(torch.ones(2))
        with refused("send", "make_fx"):
            make_fx(lambda x: (x + 1, dist.send(x, 1 - rank))[0])(torch.ones(2))
        with FakeTensorMode(), refused("all_reduce", "a FakeTensor has no values"):
            dist.all_reduce(torch.ones(2))


def _around(x: Any, rank: int, group: Group) -> Any:
    """Send and receive in compiled code, rewritten to one functional collective or outside the
    graph.
    """
    nranks, received = dist.get_world_size(group), torch.zeros_like(x)
    sends = dist.P2POp(dist.isend, x * 2, (rank + 1) % nranks, group)
    receives = dist.P2POp(dist.irecv, received, (rank - 1) % nranks, group)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()
    return received + x


def sharded(path: str) -> None:
    """Gather a ``ShardedTensor`` on one rank."""
    with world(path) as (rank, nranks):
        spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in range(nranks)])
        tensor = sharded_tensor.ones(spec, 2 * nranks, 3)
        tensor.local_tensor().mul_(rank + 1)

        def gathered(out: Any) -> Any:
            tensor.gather(dst=nranks - 1, out=out)
            return out

        whole = gathered(torch.zeros(2 * nranks, 3) if rank == nranks - 1 else None)
        assert whole is None or whole[:, 0].tolist() == [1 + row // 2 for row in range(2 * nranks)]


def checkpoint(path: str) -> None:
    """Save and load a distributed checkpoint of a sharded tensor."""
    from torch.distributed import checkpoint as dcp

    with world(path) as (rank, nranks):
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        whole = torch.arange(6.0 * nranks).reshape(2 * nranks, 3)
        state = {"weights": distribute_tensor(whole, mesh, [Shard(0)]), "step": 7}
        dcp.save(state, checkpoint_id=f"{path}-saved")
        again = {"weights": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]), "step": 0}
        dcp.load(again, checkpoint_id=f"{path}-saved")
        assert again["step"] == 7
        assert torch.equal(again["weights"].full_tensor(), whole)
        assert rank < nranks
