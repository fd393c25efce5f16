"""Rank programs with tensors in GPU memory: streams, memory, graphs, messages, training, deadlines.

Ranks share GPUs if there are too few; comparisons with NCCL need one GPU per rank.
"""

from __future__ import annotations

import datetime
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from miraccl.executor.cuda.driver import check
from miraccl.executor.cuda.gpu import WAIT_VALUE_EQ
from miraccl.executor.cuda.toolkit import bindings
from miraccl.torch import BackendError, ProcessGroupMiraccl
from tests.torch.worlds import LIMIT, equal, refused, world

CYCLES = 200_000_000  # about a tenth of a second of a GPU
LARGE = 1 << 20


def use_gpu(rank: int) -> Any:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def filled(count: int, value: float) -> Any:
    return torch.full((count,), float(value), device="cuda")


# ---- streams


class Gate:
    """Blocks the current stream until the host opens it; opens by itself before a test can hang."""

    def __init__(self) -> None:
        self._word = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._late = threading.Timer(LIMIT.total_seconds(), self.open)

    @property
    def is_closed(self) -> bool:
        return not self._word.item()

    def open(self) -> None:
        self._word.fill_(1)

    def __enter__(self) -> Gate:
        driver = bindings("driver")
        stream = torch.cuda.current_stream().cuda_stream
        check(
            driver.cuStreamWaitValue32(stream, self._word.data_ptr(), 1, WAIT_VALUE_EQ),
            "cuStreamWaitValue32",
        )
        self._late.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._late.cancel()
        self.open()


def order(path: str) -> None:
    """Check that operations follow the current stream, and that ``wait`` blocks the stream, not the
    host.
    """
    with world(path) as (rank, nranks):
        use_gpu(rank)
        total = float(sum(range(nranks)))
        for asynchronous in (
            True,
            False,
        ):  # what is made once is made now: streams, and kernels, whose loading waits for the GPU
            dist.all_reduce(filled(LARGE, 0), async_op=asynchronous)
        assert (torch.zeros(LARGE, device="cuda").fill_(rank) * 2 == 2 * rank).all()
        torch.cuda.synchronize()
        dist.barrier()
        for asynchronous in (True, False):
            x = torch.zeros(LARGE, device="cuda")
            with Gate() as gate:
                x.fill_(rank)
                work = dist.all_reduce(x, async_op=asynchronous)
                marker = torch.cuda.current_stream().record_event()
                if work is not None:
                    assert not work.is_completed()
                    work.wait()
                y = x * 2  # in the current stream, after the operation
                after = torch.cuda.current_stream().record_event()
                assert not after.query()
                assert gate.is_closed, "the host has waited for the GPU"
            assert (y == 2 * total).all()
            assert marker.query()
            assert work is None or work.is_completed()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            z = filled(LARGE, rank)
            work = dist.all_reduce(z, async_op=True)
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        work.wait()  # here, in another stream than where it was called
        assert (z + 1 == total + 1).all()
        works = [dist.all_reduce(filled(n, 1), async_op=True) for n in (1, LARGE, 3)]
        dist.all_reduce(
            last := filled(2, 1)
        )  # in the current stream, after those of the group's own
        assert last.tolist() == [float(nranks)] * 2
        assert all(w.wait(LIMIT) and w.is_success() and w.exception() is None for w in works)


def memory(path: str) -> None:
    """Check that memory in use by an operation is not reused before it ends, waited for or not."""
    with world(path) as (rank, nranks):
        use_gpu(rank)

        def begin(x: Any) -> None:
            dist.all_reduce(x, async_op=True)

        def columns() -> Any:
            return torch.ones(64, 64, device="cuda")[
                :, ::2
            ]  # goes through a temporary, which is let go of at once

        for x in (
            filled(LARGE, 0),
            columns(),
        ):  # what is made once is made now: the streams, the kernels, the memory of two tensors
            begin(x)
        spare = filled(LARGE, 0)
        torch.cuda.synchronize()
        del x, spare
        torch.cuda.synchronize()
        dist.barrier()
        with Gate() as gate:  # no GPU gets past its part of the operation
            begin(x := filled(LARGE, 1))
            address = x.data_ptr()
            del x
            again = filled(LARGE, 7)
            assert again.data_ptr() != address
            strided = columns()
            works = [dist.all_reduce(strided, async_op=True) for _ in range(3)]
            others = [filled(32 * 64, 9) for _ in range(3)]  # of the size of the temporaries
            assert gate.is_closed, "the host has waited for the GPU"
        for work in works:
            work.wait()
        assert (strided == nranks**3).all()
        assert (again == 7).all()
        assert all((other == 9).all() for other in others)


def futures(path: str) -> None:
    with world(path) as (rank, nranks):
        use_gpu(rank)
        torch.cuda._sleep(CYCLES)
        future = dist.all_reduce(filled(LARGE, 1), async_op=True).get_future()
        chained = future.then(lambda f: f.value()[0] * 10).then(lambda f: f.value() + 1)
        assert (chained.wait() == 10 * nranks + 1).all()

        def inside(f: Any) -> Any:
            dist.all_reduce(x := f.value()[0] * 1.0)
            return x

        nested = dist.all_reduce(filled(3, 1), async_op=True).get_future().then(inside)
        assert nested.wait().tolist() == [float(nranks**2)] * 3
        x = functional.all_reduce(filled(3, rank), "sum", dist.group.WORLD)
        assert (x + 0).tolist() == [float(sum(range(nranks)))] * 3
        mine = torch.full((2, 3), float(rank), device="cuda")
        for own in (
            mine,
            mine.t().contiguous().t(),
        ):  # as PyTorch passes most lists, and through temporaries
            outputs = [torch.empty_like(own) for _ in range(nranks)]
            work = dist.all_gather(outputs, own, async_op=True)
            (whole,) = work.get_future().wait()  # one tensor, as with NCCL
            assert whole.shape == (nranks, 2, 3)
            assert work.result()[0] is whole
            assert (whole == torch.stack(outputs)).all()
            assert whole[:, 0, 0].tolist() == list(map(float, range(nranks)))


def graphs(path: str) -> None:
    """Capture synchronous, asynchronous and strided operations in a graph and replay it with new
    values.
    """
    with world(path) as (rank, nranks):
        use_gpu(rank)
        x, y, out = filled(LARGE, 0), torch.zeros(32, 32, device="cuda"), filled(nranks * 8, 0)
        share = x[:8]

        def step() -> Any:
            work = dist.all_reduce(x, async_op=True)
            dist.all_reduce(y.t()[::2])
            work.wait()
            dist.all_gather_into_tensor(out, share * 2)
            return x + out.sum()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()
        for round_ in range(3):
            x.fill_(rank + round_)
            y.fill_(1)
            graph.replay()
            total = float(sum(range(nranks)) + nranks * round_)
            assert (x == total).all()
            assert (y.t()[::2] == nranks).all()
            assert (y.t()[1::2] == 1).all()
            assert (result == total + 2 * total * 8 * nranks).all()
        dist.barrier()


# ---- calls


def shapes(path: str) -> None:
    """Check lists, uneven sizes, coalesced calls, objects, empty and strided tensors."""
    with world(path) as (rank, nranks):
        use_gpu(rank)
        sizes = [[(i * 2 + j) % 4 for j in range(nranks)] for i in range(nranks)]
        sends, receives = sizes[rank], [row[rank] for row in sizes]
        out = torch.zeros(sum(receives), 3, device="cuda")
        given = (
            torch.repeat_interleave(torch.arange(nranks), torch.tensor(sends))
            .float()
            .cuda()[:, None]
            .expand(-1, 3)
            + 100 * rank
        )
        dist.all_to_all_single(out, given.contiguous(), receives, sends)
        assert out[:, 0].tolist() == [
            float(100 * r + rank) for r, n in enumerate(receives) for _ in range(n)
        ]
        outs = [filled(r + 1, 0) for r in range(nranks)]
        dist.all_gather(outs, filled(rank + 1, rank))
        assert [o.tolist() for o in outs] == [[float(r)] * (r + 1) for r in range(nranks)]
        for op, factor in ((dist.ReduceOp.SUM, nranks), (dist.ReduceOp.BOR, 1)):
            share = torch.zeros(rank, dtype=torch.int32, device="cuda")
            dist.reduce_scatter(
                share,
                [torch.full((r,), r, dtype=torch.int32, device="cuda") for r in range(nranks)],
                op=op,
            )
            assert share.tolist() == [rank * factor] * rank
        with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as manager:
            for t in (first := filled(3, 1), second := filled(LARGE, 2)):
                dist.all_reduce(t)
        manager.wait()
        assert (first[0].item(), second[-1].item()) == (nranks, 2 * nranks)
        dist.all_reduce_coalesced(pair := [filled(3, 1), filled(5, 2)])
        assert [t.sum().item() for t in pair] == [3.0 * nranks, 10.0 * nranks]
        dist.all_reduce(torch.empty(0, 3, device="cuda"))
        everything: list[Any] = [None] * nranks
        dist.all_gather_object(everything, {"rank": rank})
        assert everything == [{"rank": r} for r in range(nranks)]
        dist.all_reduce(cpu := torch.ones(3))  # the same group, in CPU memory
        assert cpu.tolist() == [float(nranks)] * 3
        torch.cuda._sleep(CYCLES)
        before = torch.cuda.current_stream().record_event()
        dist.barrier()
        assert before.query()  # a barrier waits for the current stream, as NCCL's
        dist.barrier(device_ids=[torch.cuda.current_device()], async_op=True).wait()
        with refused("name the source rank"):
            dist.recv(filled(1, 0))


def messages(path: str) -> None:
    with world(path) as (rank, nranks):
        use_gpu(rank)
        to, fro = (rank + 1) % nranks, (rank - 1) % nranks
        dist.all_reduce(filled(1, 0))
        for count in (1, 1000, 4 * LARGE):
            out = filled(count, -1)
            ops = [
                dist.P2POp(dist.isend, filled(count, rank), to),
                dist.P2POp(dist.irecv, out, fro),
            ]
            works = dist.batch_isend_irecv(ops)
            assert len(works) == 1
            works[0].wait()
            assert (out == fro).all()
        strided = torch.zeros(8, 8, device="cuda")
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, strided[:, 1], fro),
                dist.P2POp(dist.isend, filled(8, rank), to),
            ]
        ):
            work.wait()
        assert strided[:, 1].tolist() == [float(fro)] * 8
        assert strided[:, 0].tolist() == [0.0] * 8
        if rank < 2:
            for n in range(3):
                if rank == 0:
                    dist.send(filled(LARGE, n), 1)
                else:
                    dist.recv(got := filled(LARGE, -1), 0)
                    assert (got == n).all()
        dist.barrier()


def beside(path: str) -> None:
    """Check other backends for one kind of memory, and a GPU named at the start."""
    with world(path, "cpu:gloo,cuda:miraccl") as (rank, nranks):
        use_gpu(rank)
        for device in ("cpu", "cuda"):
            dist.all_reduce(x := torch.ones(3, device=device))
            assert x.tolist() == [float(nranks)] * 3
    if torch.cuda.device_count() >= nranks:
        with world(f"{path}-nccl", "cpu:miraccl,cuda:nccl") as (rank, nranks):
            use_gpu(rank)
            group = dist.group.WORLD
            assert isinstance(group, ProcessGroupMiraccl)
            assert isinstance(group._get_backend(torch.device("cuda")), dist.ProcessGroupNCCL)
            for device in ("cpu", "cuda"):
                dist.all_reduce(x := torch.ones(3, device=device))
                dist.all_gather_into_tensor(out := torch.zeros(3 * nranks, device=device), x)
                assert (x.tolist(), out.sum().item()) == ([float(nranks)] * 3, 3.0 * nranks**2)
            ops = [
                dist.P2POp(dist.isend, filled(3, rank), (rank + 1) % nranks),
                dist.P2POp(dist.irecv, filled(3, 0), (rank - 1) % nranks),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert group.communicator.last_plan is not None
            assert group._streams is None
            dist.barrier()


def bound(path: str) -> None:
    """Check splits and meshes of a group bound to its GPU, also with another backend for CPU
    memory.
    """
    with world(f"{path}-mixed", "cpu:gloo,cuda:miraccl", device=True) as (_, nranks):
        mesh = init_device_mesh("cuda", (1, nranks), mesh_dim_names=("a", "b"))
        assert isinstance(
            mesh["b"].get_group()._get_backend(torch.device("cpu")), dist.ProcessGroupGloo
        )
        for device in ("cpu", "cuda"):
            dist.all_reduce(x := torch.ones(3, device=device), group=mesh["b"].get_group())
            assert x.tolist() == [float(nranks)] * 3
    with world(path, device=True) as (rank, nranks):
        assert dist.group.WORLD is not None
        assert dist.group.WORLD.bound_device_id == torch.device("cuda", torch.cuda.current_device())
        half = dist.split_group(split_ranks=[[r] for r in range(nranks)])
        assert isinstance(half, ProcessGroupMiraccl)
        dist.all_reduce(x := filled(3, rank), group=half)
        assert x.tolist() == [float(rank)] * 3
        mesh = init_device_mesh("cuda", (1, nranks), mesh_dim_names=("a", "b"))
        dist.all_reduce(y := filled(3, 1), group=mesh["b"].get_group())
        assert y.tolist() == [float(nranks)] * 3
        pair = dist.new_group([0, 1], timeout=LIMIT)
        if rank < 2:
            dist.all_reduce(z := filled(3, 1), group=pair)
            assert z.tolist() == [2.0] * 3
        dist.barrier()


# ---- training


def training(path: str) -> None:
    """Compare DDP and FSDP2 losses bit for bit with NCCL, or with one process on the whole
    batch.
    """
    with world(path) as (rank, nranks):
        device = use_gpu(rank)
        torch.use_deterministic_algorithms(True, warn_only=True)
        other = (
            dist.new_group(backend="nccl", timeout=LIMIT)
            if torch.cuda.device_count() >= nranks
            else None
        )
        alone = _losses(lambda layers, _: layers, 0, 1, None, device, nranks)
        for name, wrap in (("ddp", _ddp), ("fsdp2", _fsdp2)):
            ours = _losses(wrap, rank, nranks, None, device, nranks)
            mean = torch.tensor(ours)
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            assert torch.allclose(mean, torch.tensor(alone), rtol=1e-4), (name, mean, alone)
            if other is not None and nranks == 2:  # the sum of two does not depend on their order
                assert ours == _losses(wrap, rank, nranks, other, device, nranks), name


def quantized(path: str) -> None:
    """Check PyTorch's hooks that send gradients as 8-bit numbers through futures of
    ``all_gather``.
    """
    with world(path) as (rank, nranks):
        device = use_gpu(rank)
        for hook in (quantization_pertensor_hook, quantization_perchannel_hook):
            torch.manual_seed(0)
            layers = torch.nn.Sequential(
                torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
            ).to(device)
            x = torch.randn(4, 8, device=device) * (rank + 1)
            layers(x).square().sum().backward()
            exact = [p.grad.clone() for p in layers.parameters()]
            for grad in exact:
                dist.all_reduce(grad, dist.ReduceOp.AVG)
            layers.zero_grad()
            model = DistributedDataParallel(layers)
            model.register_comm_hook(dist.group.WORLD, hook)
            model(x).square().sum().backward()
            ours = [p.grad for p in layers.parameters()]
            spread = max(float(grad.max() - grad.min()) for grad in exact)
            for mine, right in zip(ours, exact, strict=True):
                assert torch.allclose(mine, right, rtol=0, atol=0.02 * nranks * spread), hook
                first = mine.clone()
                dist.broadcast(first, 0)
                assert torch.equal(first, mine)


def _ddp(layers: Any, group: Any) -> Any:
    return DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0.001)


def _fsdp2(layers: Any, group: Any) -> Any:
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cuda")
    for layer in layers:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(layers, mesh=mesh)


def _losses(wrap: Any, part: int, parts: int, group: Any, device: Any, nranks: int) -> list[float]:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    ).to(device)
    model = wrap(layers, group)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    whole = torch.randn(16 * nranks, 8, generator=torch.Generator().manual_seed(7)).to(device)
    x = whole.chunk(parts)[part]
    losses = []
    for _ in range(5):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def tensors(path: str) -> None:
    """Check DTensor and compiled functional collectives."""
    with world(path) as (rank, nranks):
        use_gpu(rank)
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
        whole = torch.arange(8.0 * nranks, device="cuda").reshape(2 * nranks, 4)
        rows = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal(
            (rows @ rows.redistribute(placements=[Replicate()]).t()).full_tensor(),
            whole @ whole.t(),
        )

        def step(x: Any) -> Any:
            y = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
            return functional.all_gather_tensor(y + rank, 0, dist.group.WORLD) + y.sum()

        x = torch.arange(4.0, device="cuda") + rank
        assert equal(torch.compile(step, backend="aot_eager", fullgraph=True)(x), step(x))


def symmetric(path: str) -> None:
    """Check PyTorch's symmetric memory beside miraccl; it needs a group that PyTorch's C++
    knows.
    """
    with world(path) as (rank, nranks):
        use_gpu(rank)
        if torch.cuda.device_count() < nranks:
            return  # PyTorch refuses ranks that share a GPU
        group = dist.new_group(backend="gloo")
        mine = symmetric_memory.empty(1024, device="cuda")
        with refused("InvalidUsage", "gloo"):
            symmetric_memory.rendezvous(mine, dist.group.WORLD)
        handle = symmetric_memory.rendezvous(mine, group)
        assert (handle.rank, handle.world_size) == (rank, nranks)
        mine.fill_(rank + 1)
        handle.barrier()
        peer = (rank + 1) % nranks
        assert equal(handle.get_buffer(peer, (1024,), torch.float32), filled(1024, peer + 1))
        total = torch.ops.symm_mem.one_shot_all_reduce(mine, "sum", group.group_name)
        assert equal(total, filled(1024, nranks * (nranks + 1) / 2))
        handle.barrier()
        dist.all_reduce(mine)
        assert equal(mine, total)


# ---- failure


def different(path: str) -> list[str]:
    """Check that a barrier reports ranks whose operations differ, although none of them waits
    long.
    """
    said = []
    with world(path) as (rank, nranks):
        use_gpu(rank)
        for last in (
            lambda x, group: dist.all_reduce(x, dist.ReduceOp.MAX, group=group),
            lambda x, group: dist.all_reduce(x[:3], group=group),
            lambda x, group: dist.broadcast(x, 0, group=group),
        ):
            group = dist.new_group(timeout=datetime.timedelta(seconds=20))
            dist.all_reduce(x := filled(4, 1), group=group)
            dist.barrier(group)
            try:
                if rank == nranks - 1:
                    last(x, group)
                else:
                    dist.all_reduce(x, group=group)
                torch.cuda.synchronize()
                dist.barrier(group)
                said.append("no error")
            except RuntimeError as error:
                said.append(str(error))
            dist.destroy_process_group(group)  # everything is told
            dist.barrier()
    return said


def late(path: str) -> str:
    """Check that a kernel ends at the deadline if a rank is missing; return the next call's error
    text.
    """
    with world(path) as (rank, _):
        use_gpu(rank)
        dist.barrier()  # ranks start further apart than the deadline
        group = dist.new_group(timeout=datetime.timedelta(seconds=3))
        dist.all_reduce(filled(8, 1), group=group)
        dist.barrier()
        if rank:
            time.sleep(6)  # longer than the deadline
            return ""
        work = dist.all_reduce(filled(8, 1), group=group, async_op=True)
        try:
            work.wait()
            torch.cuda.synchronize()
            work.synchronize()
        except BackendError as error:
            return str(error)
    return "no error"
