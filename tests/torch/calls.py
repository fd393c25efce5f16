"""Layouts, uneven splits, handles, futures, coalesced and functional calls, compared with Gloo."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import DTensor, init_device_mesh

from tests.torch.worlds import LIMIT, both, gloo, refused, world

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
                "channels_last": base.reshape(1, 2, 3, 4).contiguous(
                    memory_format=torch.channels_last
                ),
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

            wanted = (
                sum(before.detach() - 100 * rank + 100 * r for r in range(nranks))
                if name != "scalar"
                else None
            )
            got = all_reduce(None)
            assert wanted is None or torch.equal(got, wanted), name
            assert torch.equal(
                broadcast(None),
                before.detach() + (nranks - 1 - rank) * (1 if name == "scalar" else 100),
            ), name
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
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
            resized = torch.ones(4, dtype=dtype)
            dist.broadcast(resized, 0)
            assert resized.resize_(8).numel() == 8  # the storage is still its owner's
        window = torch.zeros(10)
        dist.all_reduce(window[3:6].fill_(1.0))
        assert window.tolist() == [0.0] * 3 + [float(nranks)] * 3 + [0.0] * 4


def uneven(path: str) -> None:
    """Check sizes that differ between ranks, including zero."""
    with world(path) as (rank, nranks):
        other = gloo()
        sizes = [[(i * 2 + j) % 4 for j in range(nranks)] for i in range(nranks)]
        sends, receives = sizes[rank], [row[rank] for row in sizes]

        def single(group: Any) -> Any:
            out = torch.zeros(sum(receives), 3)
            dist.all_to_all_single(
                out,
                torch.arange(sum(sends) * 3.0).reshape(-1, 3) + 1000 * rank,
                receives,
                sends,
                group=group,
            )
            return out

        both(single, other)
        kinds: list[Any] = [
            tuple,
            np.array,
            lambda c: list(np.array(c)),
            lambda c: [torch.tensor(n) for n in c],
        ]
        for turn, kind in enumerate(kinds):
            out = torch.zeros(sum(receives), 3)
            dist.all_to_all_single(
                out, torch.full((sum(sends), 3), float(rank + turn)), kind(receives), kind(sends)
            )
            assert out[:, 0].tolist() == [
                float(r + turn) for r, n in enumerate(receives) for _ in range(n)
            ]
        rng, works = np.random.default_rng(2), []
        for turn in range(
            20
        ):  # splits that no call before had, while those of other calls are still to be run
            table = rng.integers(0, 50, (nranks, nranks)) * (
                rng.random((nranks, nranks)) < 0.7 if turn else 0
            )
            rows, columns = table[rank].tolist(), table[:, rank].tolist()
            out, x = (
                torch.zeros(sum(columns), dtype=torch.int64),
                torch.full((sum(rows),), rank + turn),
            )
            work = dist.all_to_all_single(out, x, columns, rows, async_op=bool(turn % 3))
            works.append((work, out, [r + turn for r, n in enumerate(columns) for _ in range(n)]))
        for work, out, want in works:
            assert work is None or work.wait()
            assert out.tolist() == want
        outs = [
            torch.zeros(n, 2, dtype=torch.int16) for n in receives
        ]  # Gloo's list form wants equal sizes
        dist.all_to_all(
            outs,
            [torch.full((n, 2), 10 * rank + j, dtype=torch.int16) for j, n in enumerate(sends)],
        )
        assert all((out == 10 * r + rank).all() for r, out in enumerate(outs))
        outs = [torch.zeros(r + 1) for r in range(nranks)]
        dist.all_gather(outs, torch.full((rank + 1,), float(rank)))
        assert [o.tolist() for o in outs] == [[float(r)] * (r + 1) for r in range(nranks)]
        for op, factor in ((dist.ReduceOp.SUM, nranks), (dist.ReduceOp.BAND, 1)):
            share = torch.zeros(rank, dtype=torch.int32)
            dist.reduce_scatter(
                share, [torch.full((r,), r, dtype=torch.int32) for r in range(nranks)], op=op
            )
            assert share.tolist() == [rank * factor] * rank


def gathered_out(x: Any, group: Any) -> Any:
    """Run the functional collective that Inductor's passes build; its work must outlive this
    frame.
    """
    out = torch.zeros(group.size() * x.numel(), dtype=x.dtype)
    result = torch.ops._c10d_functional.all_gather_into_tensor_out(
        x, group.size(), group.group_name, out=out
    )
    gc.collect()
    assert torch.ops._c10d_functional.wait_tensor(result).data_ptr() == out.data_ptr()
    return out


def exchanged(rank: int, group: Any) -> list[Any]:
    """Run ``batch_isend_irecv`` as ``torch.compile`` rewrites it: to the next rank, from the
    previous.
    """
    if not hasattr(torch.ops._c10d_functional, "batch_p2p_ops"):  # PyTorch 2.11 and 2.12
        return []
    to, frm = (rank + 1) % group.size(), (rank - 1) % group.size()
    sent, received = torch.full((2000,), float(rank)), torch.zeros(2000)
    results = torch.ops._c10d_functional.batch_p2p_ops(
        ["isend", "irecv"], [to, frm], [3, 3], [sent, received], group.group_name
    )
    gc.collect()
    waited = [torch.ops._c10d_functional.wait_tensor(result) for result in results]
    assert received.tolist() == [float(frm)] * 2000
    return waited


def handles(path: str) -> None:
    """Check asynchronous operations, futures, coalesced calls and functional collectives."""
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
        chained = (
            dist.all_reduce(torch.ones(4), async_op=True)
            .get_future()
            .then(lambda f: f.value()[0] * 10)
        )
        assert chained.wait().tolist() == [10.0 * nranks] * 4
        first, second = torch.zeros(3), torch.ones(3)

        def inside(future: Any) -> Any:
            dist.all_reduce(second)
            return [future.value()[0] + second]

        nested = dist.all_reduce(first, async_op=True).get_future().then(inside)
        assert nested.wait()[0].tolist() == [float(nranks)] * 3
        for x in (
            torch.ones(300, 300),
            torch.ones(300, 300)[:, ::2],
            torch.ones(40_000, dtype=torch.int16),
        ):  # two have temporaries
            works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
            parts = [torch.zeros_like(x) for _ in range(nranks)]
            works += [
                dist.all_gather(parts, x, async_op=True),
                dist.reduce_scatter(x, parts, async_op=True),
            ]
            for work in works:
                work.wait()
            assert (x == nranks**4).all()  # each saw what the ones before it had written
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
        assert [o.tolist() for o in outs] == [
            [float(r) for r in range(nranks) for _ in range(n)] for n in (2, 3)
        ]
        lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(nranks)]
        dist.all_gather_coalesced(
            lists, [torch.full((2,), float(rank)), torch.full((3,), rank + 0.5)]
        )
        assert [[t[0].item() for t in of_rank] for of_rank in lists] == [
            [r, r + 0.5] for r in range(nranks)
        ]

        group, last_rank = dist.group.WORLD, nranks - 1
        assert group is not None
        options = dist.distributed_c10d.GatherOptions()
        options.rootRank = last_rank
        rows = torch.zeros(nranks, 2) if rank == last_rank else torch.empty(0)
        group.gather_single(
            rows, torch.full((2,), float(rank)), options
        ).wait()  # dist.gather_single of PyTorch 2.15
        assert rows.tolist() == ([[r, r] for r in range(nranks)] if rank == last_rank else [])
        both(lambda g: functional.all_reduce(torch.ones(3) * rank, "sum", g or group) + 0, other)
        both(lambda g: functional.all_gather_tensor(torch.ones(3) * rank, 0, g or group) + 0, other)
        both(
            lambda g: (
                functional.reduce_scatter_tensor(torch.arange(2.0 * nranks), "sum", 0, g or group)
                + 0
            ),
            other,
        )
        both(lambda g: functional.broadcast(torch.ones(3) * rank, 1, g or group) + 0, other)
        both(
            lambda g: (
                functional.all_to_all_single(
                    torch.arange(1.0 * nranks) + rank, None, None, g or group
                )
                + 0
            ),
            other,
        )
        both(lambda g: gathered_out(torch.full((3,), float(rank)), g or group), other)
        both(lambda g: exchanged(rank, g or group), other)


def profiled(path: str) -> None:
    """Check that torch.profiler shows operations under the names other backends use."""
    with world(path) as (rank, nranks):
        x, right, left = torch.ones(40000), (rank + 1) % nranks, (rank - 1) % nranks
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dist.all_reduce(x)
            for work in [dist.all_reduce(x, async_op=True), dist.broadcast(x, 0, async_op=True)]:
                work.wait()
            received = dist.irecv(y := torch.zeros(40000), left)
            dist.send(torch.full((40000,), float(rank)), right)
            assert received is not None
            received.wait()
            dist.barrier()
        assert (x[0].item(), y[0].item()) == (nranks**2, left)
        shown = {
            event.key: event.count
            for event in profile.key_averages()
            if event.key.startswith("miraccl:")
        }
        wanted = {"all_reduce": 2, "broadcast": 1, "send": 1, "recv": 1, "barrier": 1}
        assert shown == {f"miraccl:{name}": count for name, count in wanted.items()}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            chained = (
                dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
            )
            assert chained.wait()[0].item() == 2 * nranks**3
        assert [
            event.count for event in profile.key_averages() if event.key == "miraccl:all_reduce"
        ] == [1]
        with torch.autograd.profiler.profile(record_shapes=True) as recorded:
            dist.all_reduce(x)
            dist.all_gather(
                [torch.zeros(3) for _ in range(nranks)], torch.ones(3), async_op=True
            ).wait()
            dist.broadcast(x[:2], 0)
        events = [e for e in recorded.function_events if e.name.startswith("miraccl:")]
        assert all(e.is_async for e in events), "as those of Gloo"
        assert {e.name: e.input_shapes for e in events} == {
            "miraccl:all_reduce": [[40000]],
            "miraccl:all_gather": [[3]],
            "miraccl:broadcast": [[2]],
        }


def pending(path: str) -> None:
    """Check that an unwaited result of a functional collective is accepted as an argument."""
    with world(path) as (rank, nranks):
        other = gloo()

        def run(group: Any) -> list[Any]:
            def sums() -> Any:
                result = functional.all_reduce(
                    torch.full((3,), rank + 1.0), "sum", group or dist.group.WORLD
                )
                assert isinstance(result, functional.AsyncCollectiveTensor)
                return result

            total, outs = sums(), [torch.zeros(3) for _ in range(nranks)]
            dist.all_reduce(total, group=group)
            dist.all_gather(outs, sums(), group=group)
            others = [torch.zeros(3) for _ in range(nranks)]
            if group is None or torch.__version__ >= "2.13":  # Gloo of 2.11 has no such thing
                dist.all_to_all(others, [sums() for _ in range(nranks)], group=group)
            return [total + 0, *outs, *(others if torch.__version__ >= "2.13" else [])]

        assert both(run, other)[0].tolist() == [nranks * nranks * (nranks + 1) / 2] * 3
        spread = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (nranks,)))
        with refused("InvalidUsage", "a DTensor has no memory of its own", "to_local"):
            dist.all_gather([torch.zeros(3) for _ in range(nranks)], spread)


# ---- the methods of a group


def short_forms(path: str) -> None:
    """Check the short forms (tensor for list; op, root, timeout for options) against PyTorch's
    groups.
    """
    with world(path) as (rank, nranks):
        other = gloo()
        last, product = nranks - 1, dist.ReduceOp.PRODUCT

        def mine(count: int = 2) -> Any:
            return torch.arange(1.0, count + 1) + 10 * rank

        def row() -> list[Any]:
            return [torch.zeros(2) for _ in range(nranks)]

        def run(g: Any) -> list[Any]:
            group = g or dist.group.WORLD
            xs, out, outs, gathered = (
                [mine() for _ in range(7)],
                torch.zeros(2),
                row(),
                row() if rank == last else [],
            )
            parts, mixed = list(mine(2 * nranks).chunk(nranks)), torch.zeros(nranks)
            works = [
                group.allreduce(xs[0]),
                group.allreduce(xs[1], product),
                group.allreduce([xs[2]], op=product, timeout=LIMIT),
                group.broadcast(xs[3], last),
                group.broadcast(xs[4], root=last, timeout=LIMIT),
                group.reduce(xs[5], last, product),
                group.allgather(outs, mine()),
                group.gather(gathered, mine(), root=last),
                group.scatter(xs[6], parts if rank == last else [], last, LIMIT),
                group.reduce_scatter(out, parts, op=dist.ReduceOp.SUM),
                group.alltoall_base(mixed, mine(nranks), [], [], LIMIT),
                group.barrier(LIMIT),
            ]
            for work in works:
                work.wait()
            return [
                *xs[:5],
                *(xs[5:6] if rank == last else []),
                xs[6],
                out,
                *outs,
                *gathered,
                mixed,
            ]

        both(run, other)
        group = dist.group.WORLD
        assert group is not None
        with pytest.raises(TypeError, match="broadcast takes root, timeout or opts"):
            group.broadcast(mine(), root=0, op=product)
