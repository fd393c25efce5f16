"""What test ranks do beyond the table: shapes and layouts, uneven splits, handles, groups, objects, training, failures."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from miraccl.torch import BackendError, ProcessGroupMiraccl
from tests.torch.worlds import LIMIT, equal, gloo, world


def in_turn(path: str, names: list[str]) -> None:
    """Several of the checks below, each with groups of its own: importing torch takes longer than most of them."""
    for name in names:
        globals()[name](f"{path}-{name}")


def both(run: Callable[[Any], Any], other: Any) -> Any:
    """The result on miraccl, which is that of Gloo."""
    mine, theirs = run(None), run(other)
    pairs = zip(mine, theirs, strict=True) if isinstance(mine, list | tuple) else [(mine, theirs)]
    for ours, wanted in pairs:
        assert equal(ours, wanted), (ours, wanted)
    return mine


# ---- shapes and layouts


def layouts(path: str) -> None:
    with world(path) as (rank, nranks):
        other = gloo()

        def inputs() -> dict[str, Any]:
            base = torch.arange(24, dtype=torch.float32).reshape(4, 6) + 100 * rank
            return {
                "whole": base,
                "columns": base[:, ::2],
                "transposed": base.t(),
                "offset": base[1:3],
                "scalar": torch.tensor(3.0 + rank),
                "nothing": torch.empty(0, 5),
                "channels_last": base.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
                "leaf": base.clone().requires_grad_(),
            }

        for name in inputs():
            before = inputs()[name]

            def all_reduce(group: Any, name: str = name) -> Any:
                x = inputs()[name]
                dist.all_reduce(x, group=group)
                return x.detach()

            def broadcast(group: Any, name: str = name) -> Any:
                x = inputs()[name]
                dist.broadcast(x, nranks - 1, group=group)
                return x.detach()

            wanted = sum(before.detach() - 100 * rank + 100 * r for r in range(nranks)) if name != "scalar" else None
            got = all_reduce(None)
            assert wanted is None or torch.equal(got, wanted), name
            assert torch.equal(broadcast(None), before.detach() + (nranks - 1 - rank) * (1 if name == "scalar" else 100)), name
            if name not in ("columns", "transposed"):  # Gloo wants dense tensors
                both(all_reduce, other)
        imaginary = torch.tensor([1 + 2j, 3 - 1j]).conj().imag  # torch only notes the minus
        dist.all_gather(outs := [torch.zeros(2) for _ in range(nranks)], imaginary)
        assert [o.tolist() for o in outs] == [[-2.0, 1.0]] * nranks
        with torch.inference_mode():
            frozen = torch.ones(4, 4)[:, 1]
            dist.all_reduce(frozen, async_op=True).wait()
            dist.all_reduce(frozen)
            assert frozen.tolist() == [nranks**2] * 4
        window = torch.zeros(10)
        dist.all_reduce(window[3:6].fill_(1.0))
        assert window.tolist() == [0.0] * 3 + [float(nranks)] * 3 + [0.0] * 4


def uneven(path: str) -> None:
    """Different sizes a rank, also none."""
    with world(path) as (rank, nranks):
        other = gloo()
        sizes = [[(i * 2 + j) % 4 for j in range(nranks)] for i in range(nranks)]
        sends, receives = sizes[rank], [row[rank] for row in sizes]

        def single(group: Any) -> Any:
            out = torch.zeros(sum(receives), 3)
            dist.all_to_all_single(out, torch.arange(sum(sends) * 3.0).reshape(-1, 3) + 1000 * rank, receives, sends, group=group)
            return out

        both(single, other)
        outs = [torch.zeros(n, 2, dtype=torch.int16) for n in receives]  # Gloo's list form wants equal sizes
        dist.all_to_all(outs, [torch.full((n, 2), 10 * rank + j, dtype=torch.int16) for j, n in enumerate(sends)])
        assert all((out == 10 * r + rank).all() for r, out in enumerate(outs))
        outs = [torch.zeros(r + 1) for r in range(nranks)]
        dist.all_gather(outs, torch.full((rank + 1,), float(rank)))
        assert [o.tolist() for o in outs] == [[float(r)] * (r + 1) for r in range(nranks)]
        for op, factor in ((dist.ReduceOp.SUM, nranks), (dist.ReduceOp.BAND, 1)):
            share = torch.zeros(rank, dtype=torch.int32)
            dist.reduce_scatter(share, [torch.full((r,), r, dtype=torch.int32) for r in range(nranks)], op=op)
            assert share.tolist() == [rank * factor] * rank


def handles(path: str) -> None:
    """Asynchronous operations, futures, coalesced calls, the functional collectives."""
    with world(path) as (rank, nranks):
        other = gloo()
        xs = [torch.full((n,), float(rank)) for n in (3, 40000, 1)]
        works = [dist.all_reduce(x, async_op=True) for x in xs]
        last = torch.ones(2)
        dist.all_reduce(last)  # queues up behind the others
        assert last.tolist() == [nranks] * 2
        assert all(w.is_completed() and w.is_success() and w.exception() is None for w in works)
        assert all(w.wait() for w in works)
        assert all((x == sum(range(nranks))).all() for x in xs)
        assert torch.equal(works[0].get_future().wait()[0], xs[0])
        chained = dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda f: f.value()[0] * 10)
        assert chained.wait().tolist() == [10.0 * nranks] * 4
        first, second = torch.zeros(3), torch.ones(3)

        def inside(future: Any) -> Any:
            dist.all_reduce(second)
            return [future.value()[0] + second]

        nested = dist.all_reduce(first, async_op=True).get_future().then(inside)
        assert nested.wait()[0].tolist() == [float(nranks)] * 3
        strided = torch.zeros(4, 4)
        dist.broadcast(strided[:, 1] if rank else strided.fill_(2.0)[:, 1], 0, async_op=True).wait()
        assert strided[:, 1].tolist() == [2.0] * 4

        def coalesced(group: Any) -> list[Any]:
            ins = [torch.full((n,), float(rank + n)) for n in (1, 4)]
            with dist._coalescing_manager(group=group):
                for x in ins:
                    dist.all_reduce(x, group=group)
            return ins

        both(coalesced, other)
        outs = [torch.zeros(nranks * n) for n in (2, 3)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for out, n in zip(outs, (2, 3), strict=True):
                dist.all_gather_into_tensor(out, torch.full((n,), float(rank)))
        manager.wait()
        assert [o.tolist() for o in outs] == [[float(r) for r in range(nranks) for _ in range(n)] for n in (2, 3)]
        lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(nranks)]
        dist.all_gather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((3,), rank + 0.5)])
        assert [[t[0].item() for t in of_rank] for of_rank in lists] == [[r, r + 0.5] for r in range(nranks)]

        group = dist.group.WORLD
        both(lambda g: functional.all_reduce(torch.ones(3) * rank, "sum", g or group) + 0, other)
        both(lambda g: functional.all_gather_tensor(torch.ones(3) * rank, 0, g or group) + 0, other)
        both(lambda g: functional.reduce_scatter_tensor(torch.arange(2.0 * nranks), "sum", 0, g or group) + 0, other)
        both(lambda g: functional.broadcast(torch.ones(3) * rank, 1, g or group) + 0, other)
        both(lambda g: functional.all_to_all_single(torch.arange(1.0 * nranks) + rank, None, None, g or group) + 0, other)


def point_to_point(path: str) -> None:
    with world(path) as (rank, nranks):
        to, fro = (rank + 1) % nranks, (rank - 1) % nranks
        for count in (0, 1, 5, 200000):
            out = torch.empty(count)
            ops = [dist.P2POp(dist.isend, torch.full((count,), float(rank)), to), dist.P2POp(dist.irecv, out, fro)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert (out == fro).all()
        out = torch.zeros(4, 4)
        works = [dist.irecv(out[:, 2], fro), dist.isend(torch.arange(4.0) + rank, to)]
        assert works[0] is not None
        assert works[1] is not None
        works[0].get_future().wait()
        works[1].wait()
        assert out[:, 2].tolist() == [float(i + fro) for i in range(4)]
        assert works[0].is_completed()
        to_self = torch.zeros(3)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(3), rank), dist.P2POp(dist.irecv, to_self, rank)]):
            work.wait()
        assert to_self.tolist() == [1.0] * 3
        if rank == 0:
            for n in range(3):
                dist.send(torch.tensor([n]), 1)
        elif rank == 1:
            got = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
            assert [dist.recv(x, 0) for x in got] == [0, 0, 0]
            assert torch.cat(got).tolist() == [0, 1, 2]
        dist.barrier()
        dist.all_reduce(check := torch.ones(1))
        assert check.item() == nranks


def groups_and_objects(path: str) -> None:
    with world(path) as (rank, nranks):
        assert dist.get_backend() == "miraccl"
        assert isinstance(dist.group.WORLD, ProcessGroupMiraccl)
        everything: list[Any] = [None] * nranks
        dist.all_gather_object(everything, {"rank": rank})
        assert everything == [{"rank": r} for r in range(nranks)]
        box = [f"from {rank}"]
        dist.broadcast_object_list(box, src=nranks - 1)
        assert box == [f"from {nranks - 1}"]
        got: list[Any] = [None]
        dist.scatter_object_list(got, [f"for {r}" for r in range(nranks)] if rank == 0 else None, src=0)
        assert got == [f"for {rank}"]
        here: list[Any] = [None] * nranks
        dist.gather_object(rank, here if rank == 1 else None, dst=1)
        assert rank != 1 or here == list(range(nranks))
        pair = dist.new_group([0, nranks - 1])
        if rank in (0, nranks - 1):
            x = torch.full((3,), float(rank))
            dist.all_reduce(x, group=pair)
            assert x.tolist() == [nranks - 1.0] * 3
            dist.broadcast(x, nranks - 1, group=pair)
            dist.destroy_process_group(pair)
        dist.barrier(async_op=True).wait()
    with world(f"{path}-again", "cpu:miraccl") as (rank, nranks):  # a process may begin anew, and name the device
        dist.all_reduce(x := torch.ones(2))
        assert x.tolist() == [float(nranks)] * 2


def beside_gloo(path: str) -> None:
    """A group of its own for miraccl where the default group is another library's."""
    with world(path, "gloo") as (rank, nranks):
        group = dist.new_group(backend="miraccl", timeout=LIMIT)
        assert isinstance(group, ProcessGroupMiraccl)
        assert (dist.get_rank(group), dist.get_world_size(group), dist.get_backend(group)) == (rank, nranks, "miraccl")
        alone = dist.new_group([rank], backend="miraccl", use_local_synchronization=True, timeout=LIMIT)
        dist.all_reduce(x := torch.ones(2), group=alone)
        assert x.tolist() == [1.0] * 2
        for g in (group, None):
            dist.all_reduce(x := torch.ones(2), group=g)
            assert x.tolist() == [float(nranks)] * 2
        dist.destroy_process_group(group)


def same_file_again(path: str) -> None:
    """A store that outlives the group: the second group must not meet at the first one's id."""
    rank, nranks = int(os.environ["MIRACCL_RANK"]), int(os.environ["MIRACCL_NRANKS"])
    store = dist.FileStore(path, -1)
    for _ in range(2):
        dist.init_process_group("miraccl", store=store, rank=rank, world_size=nranks, timeout=LIMIT)
        dist.all_reduce(x := torch.ones(2))
        assert x.tolist() == [float(nranks)] * 2
        dist.barrier()
        dist.destroy_process_group()


# ---- training


def train(path: str, steps: int) -> dict[str, tuple[list[float], list[float]]]:
    """The losses of the same training on miraccl and on Gloo, by what spreads the model."""
    with world(path) as (rank, _):
        other = gloo()
        wraps = {"ddp": _ddp, "ddp_compressed": _ddp_compressed, "zero": _ddp, "fsdp2": _fsdp2}
        return {name: (_losses(name, wrap, rank, steps, None), _losses(name, wrap, rank, steps, other)) for name, wrap in wraps.items()}


def _ddp(layers: Any, group: Any) -> Any:
    return DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0.001)


def _ddp_compressed(layers: Any, group: Any) -> Any:
    model = _ddp(layers, group)
    model.register_comm_hook(group, fp16_compress_hook)
    return model


def _fsdp2(layers: Any, group: Any) -> Any:
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
    for layer in layers:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(layers, mesh=mesh)


def _losses(name: str, wrap: Callable[[Any, Any], Any], rank: int, steps: int, group: Any) -> list[float]:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model = wrap(layers, group)
    if name == "zero":
        optimizer: Any = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01, process_group=group or dist.group.WORLD
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(7 + rank))
    losses = []
    for _ in range(steps):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- failures


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """The block raises ``BackendError`` whose text has these words."""
    try:
        yield
    except BackendError as error:
        if not isinstance(error, dist.DistBackendError) or not all(w in str(error) for w in words):
            raise AssertionError(f"expected {words}") from error
    else:
        raise AssertionError(f"nothing was raised; expected {words}")


def refusals(path: str) -> None:
    """Arguments that cannot work are refused before anything is sent, so that the group goes on."""
    with world(path) as (rank, nranks):
        with refused("meta", "CPU tensors"):
            dist.all_reduce(torch.ones(2, device="meta"))
        with refused("sparse"):
            dist.all_reduce(torch.eye(2).to_sparse())
        with refused("BXOR", "float32", "docs/torch.md"):
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BXOR)
        with refused("tag", "order"):
            dist.send(torch.ones(1), (rank + 1) % nranks, tag=3)
        with refused("any source"):
            dist.recv(torch.ones(1))
        with refused("splits", "4 rows"):
            dist.all_to_all_single(torch.ones(4), torch.ones(4), [1] * nranks, [1] * nranks)
        dist.all_reduce(x := torch.ones(2))
        assert x.tolist() == [nranks] * 2


def mismatch(path: str) -> str:
    """Ranks that call different things; the text of the error."""
    with world(path) as (rank, _):
        try:
            dist.all_reduce(torch.ones(2 + rank))
        except BackendError as error:
            return str(error)
    return ""


def aborted(path: str) -> str:
    """One rank aborts while the others wait; the text of their error."""
    with world(path) as (rank, _):
        group = dist.new_group()
        if rank == 0:
            group.abort()
            return ""
        try:
            dist.all_reduce(torch.ones(2), group=group, async_op=True).wait()
        except BackendError as error:
            return str(error)
    return ""


def lonely(path: str) -> str:
    """A rank that comes too late to the operation of another one."""
    with world(path, timeout=datetime.timedelta(seconds=1)) as (rank, _):
        if rank == 0:
            try:
                dist.all_reduce(torch.ones(2), async_op=True).wait()
            except BackendError as error:
                Path(f"{path}-told").touch()
                return str(error)
        for _ in range(1000):
            if Path(f"{path}-told").exists():
                break
            time.sleep(0.01)
    return ""
