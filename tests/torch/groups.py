"""Groups: creation, split, several backends, objects, coalescing, monitored barriers, timeouts."""

from __future__ import annotations

import contextlib
import datetime
import gc
import inspect
import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import miraccl.torch
from miraccl.errors import BootstrapError
from miraccl.runtime.core_access import core_access
from miraccl.torch import BackendError, ProcessGroupMiraccl, store_join
from miraccl.torch import monitored as monitored_barrier
from tests.torch.calls import exchanged, gathered_out
from tests.torch.worlds import LIMIT, all_here, both, gloo, refused, world

SHORT = datetime.timedelta(seconds=0.3)  # for what never comes


def objects_and_groups(path: str) -> None:
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
        dist.scatter_object_list(
            got, [f"for {r}" for r in range(nranks)] if rank == 0 else None, src=0
        )
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
    with world(f"{path}-again", "cpu:miraccl") as (
        rank,
        nranks,
    ):  # a process may begin anew, and name the device
        dist.all_reduce(x := torch.ones(2))
        assert x.tolist() == [float(nranks)] * 2


def beside_gloo(path: str) -> None:
    """Create a miraccl group beside a default group of another library."""
    with world(path, "gloo") as (rank, nranks):
        group = dist.new_group(backend="miraccl", timeout=LIMIT)
        assert isinstance(group, ProcessGroupMiraccl)
        assert (dist.get_rank(group), dist.get_world_size(group), dist.get_backend(group)) == (
            rank,
            nranks,
            "miraccl",
        )
        alone = dist.new_group(
            [rank], backend="miraccl", use_local_synchronization=True, timeout=LIMIT
        )
        dist.all_reduce(x := torch.ones(2), group=alone)
        assert x.tolist() == [1.0] * 2
        for g in (group, None):
            dist.all_reduce(x := torch.ones(2), group=g)
            assert x.tolist() == [float(nranks)] * 2
        dist.destroy_process_group(group)


def same_file_again(path: str) -> None:
    """Reuse a store that outlives its group: the second group must not use the first one's id."""
    rank, nranks = int(os.environ["MIRACCL_RANK"]), int(os.environ["MIRACCL_NRANKS"])
    store = dist.FileStore(path, -1)
    for _ in range(2):
        dist.init_process_group("miraccl", store=store, rank=rank, world_size=nranks, timeout=LIMIT)
        dist.all_reduce(x := torch.ones(2))
        assert x.tolist() == [float(nranks)] * 2
        dist.barrier()
        dist.destroy_process_group()


def same_file_at_once(path: str) -> None:
    """Reuse a store before rank 0 has withdrawn the first group's id."""
    rank, nranks = int(os.environ["MIRACCL_RANK"]), int(os.environ["MIRACCL_NRANKS"])
    store, put = dist.FileStore(path, -1), dist.PrefixStore.set

    def late(prefix: Any, key: str, value: str) -> None:
        if value == store_join._NONE:
            time.sleep(0.2)
        put(prefix, key, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.PrefixStore, "set", late)
        for _ in range(2):
            dist.init_process_group(
                "miraccl", store=store, rank=rank, world_size=nranks, timeout=LIMIT
            )
            dist.destroy_process_group()


def several_backends(path: str) -> None:
    """Check that tensors go to the backend that the group string names for their device."""
    with world(path, "cpu:gloo,cuda:miraccl") as (rank, nranks):
        group = dist.group.WORLD
        assert isinstance(group, ProcessGroupMiraccl)
        assert dist.get_backend_config() == "cpu:gloo,cuda:miraccl"
        assert isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
        assert group._get_backend(torch.device("cuda")) is group
        before = group.communicator.last_plan
        dist.all_reduce(x := torch.ones(3))
        dist.all_gather_into_tensor(gathered := torch.zeros(nranks), torch.full((1,), float(rank)))
        dist.reduce_scatter_tensor(share := torch.zeros(1), torch.arange(1.0 * nranks))
        dist.all_to_all_single(mixed := torch.zeros(nranks), torch.full((nranks,), float(rank)))
        dist.barrier()
        assert group.communicator.last_plan is before  # Gloo did it all
        assert (x.tolist(), share.tolist()) == ([float(nranks)] * 3, [float(nranks * rank)])
        assert gathered.tolist() == mixed.tolist() == [float(r) for r in range(nranks)]
        received = dist.irecv(torch.zeros(1), tag=2)
        dist.send(torch.ones(1), (rank + 1) % nranks, tag=2)
        assert received is not None
        assert received.wait()
        everything: list[Any] = [None] * nranks
        dist.all_gather_object(everything, rank)
        assert everything == list(range(nranks))
        y = functional.all_reduce(
            torch.ones(3) * rank, "sum", group
        )  # these two reach the group from C++
        assert (y + 0).tolist() == [float(sum(range(nranks)))] * 3
        assert gathered_out(torch.full((1,), float(rank)), group).tolist() == gathered.tolist()
        exchanged(rank, group)
        layer = torch.nn.Linear(3, 1)
        model = DistributedDataParallel(layer)
        model(torch.full((1, 3), float(rank))).sum().backward()
        assert layer.weight.grad is not None
        assert torch.allclose(layer.weight.grad, torch.full((1, 3), sum(range(nranks)) / nranks))
        pair = dist.new_group([0, 1], backend="cpu:miraccl,cuda:gloo")
        if rank < 2:
            dist.all_reduce(y := torch.ones(2), group=pair)
            assert (y.tolist(), pair.communicator.last_plan is not None) == ([2.0] * 2, True)
            assert isinstance(pair._get_backend(torch.device("cuda")), dist.ProcessGroupGloo)
            turned = pair.split_group([1, 0])
            assert isinstance(turned._get_backend(torch.device("cuda")), dist.ProcessGroupGloo)
            assert turned.rank() == turned._get_backend(torch.device("cuda")).rank() == 1 - rank
        for turn in range(
            2
        ):  # under one name, which PyTorch gives again when the first group has gone
            part = group.split_group(
                [0, nranks - 1] if rank in (0, nranks - 1) else [*range(1, nranks - 1)],
                group_name="ends",
            )
            assert isinstance(part._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
            part.allreduce([z := torch.full((2,), float(rank + turn))]).wait()
            assert (
                z.tolist()
                == [
                    float(
                        nranks - 1 + 2 * turn
                        if rank in (0, nranks - 1)
                        else sum(range(1, nranks - 1)) + turn
                    )
                ]
                * 2
            )
            assert part.communicator.last_plan is None
            part.shutdown()
        part = group.split_group([*range(nranks)], device_types=[torch.device("cuda")])
        assert part._get_backend(torch.device("cpu")) is part
        part.shutdown()
        if not dist.is_nccl_available():
            before = _open_files()
            with refused("this build of PyTorch has no NCCL"):
                dist.new_group(backend="cpu:miraccl,cuda:nccl")
            _wait_until_closed(before)  # what had been made of the group
        with refused("meta", "init_process_group"):
            dist.all_reduce(torch.ones(1, device="meta"))


def descriptors(path: str) -> None:
    """Check that a group holds one control connection, no shared-memory descriptors, and leaks
    none.
    """
    with world(path) as (rank, _):
        before = _open_files()
        several = [dist.new_group() for _ in range(3)]
        for group in several:
            dist.all_reduce(torch.ones(2), group=group)
        during = _open_files()
        assert not [name for name in during if "memfd" in name], during
        assert len(during) - len(before) <= len(several) * (
            4 if rank else 32
        )  # rank 0 has the control plane
        for group in several:
            dist.destroy_process_group(group)
        _wait_until_closed(before)


def dropped(path: str) -> None:
    """Check that a group which is collected without being destroyed leaves, and frees
    everything.
    """
    with world(path) as (rank, nranks):
        before, threads = _open_files(), threading.active_count()
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store = dist.PrefixStore("dropped", dist.group.WORLD.get_group_store())
        options.group_rank, options.group_size = rank, nranks
        options.timeout, options.group_id = LIMIT, "dropped"
        options.global_ranks_in_group = list(range(nranks))
        group = miraccl.torch.create(options)
        x = torch.ones(2)
        group.allreduce([x]).wait()
        assert x[0] == nranks
        del group
        gc.collect()
        _wait_until_closed(before)
        limit = time.monotonic() + LIMIT.total_seconds()
        while threading.active_count() > threads:
            assert time.monotonic() < limit, threading.enumerate()
            time.sleep(0.001)
        dist.barrier()


def _wait_until_closed(before: list[str]) -> None:
    """Wait until the control plane has closed, which happens once all ranks have left."""
    limit = time.monotonic() + LIMIT.total_seconds()
    while len(_open_files()) > len(before):
        assert time.monotonic() < limit, (before, _open_files())
        time.sleep(0.001)


def _open_files() -> list[str]:
    """Return the targets of this process's file descriptors."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(
            FileNotFoundError
        ):  # that of the listing itself, and those that another thread closes meanwhile
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return names


def split(path: str) -> None:
    with world(path) as (rank, nranks):
        world_group = dist.group.WORLD
        assert isinstance(world_group, ProcessGroupMiraccl)
        part = world_group.split_group(
            [nranks - 1, 0] if rank in (0, nranks - 1) else [0, nranks - 1],
            timeout=LIMIT,
            group_name="ends",
        )
        assert (part is not None) == (rank in (0, nranks - 1))
        if part is not None:
            assert part.communicator._core.options.cta_policy == "efficiency"
            assert (part.rank(), part.size(), part.group_name) == (0 if rank else 1, 2, "ends")
            part.allreduce([x := torch.full((2,), float(rank))]).wait()
            assert x.tolist() == [nranks - 1.0] * 2
            part.send([x], 1 - part.rank(), 3).wait()
            part.recv([y := torch.zeros(2)], 1 - part.rank(), 3).wait()
            assert y.tolist() == x.tolist()
            part.shutdown()
        half = dist.split_group(split_ranks=[list(range(nranks - 1)), [nranks - 1]], timeout=LIMIT)
        dist.all_reduce(y := torch.ones(2), group=half)
        assert y.tolist() == [nranks - 1.0 if rank < nranks - 1 else 1.0] * 2
        assert dist.split_group(split_ranks=[[0]]) is None or rank == 0
        ends = dist.split_group(
            None, [[nranks - 1, 0], [*range(1, nranks - 1)]], LIMIT
        )  # which are not in as many groups
        dist.all_reduce(y := torch.ones(2), group=ends)
        assert y.tolist() == [2.0 if rank in (0, nranks - 1) else nranks - 2.0] * 2
        for parts in ([[0], [0, 1]], [[0, 0]], [[0], []], [[nranks]]):
            with pytest.raises(ValueError, match=f"subsets of ranks 0 to {nranks - 1}"):
                dist.split_group(split_ranks=parts)
        if "sort_ranks" in inspect.signature(dist.new_group).parameters:
            turned = dist.new_group([*range(1, nranks), 0], sort_ranks=False, timeout=LIMIT)
            assert dist.get_process_group_ranks(
                dist.split_group(turned, [[*range(nranks)]], LIMIT)
            ) == [*range(1, nranks), 0]
        assert world_group.comm_split_count() == 4
        dist.barrier()


def by_hand(path: str) -> None:
    """Check group methods that callers use directly: coalescing, sequence numbers, backends,
    options.
    """
    with world(path) as (rank, nranks):
        group = dist.group.WORLD
        assert isinstance(group, ProcessGroupMiraccl)
        other = gloo()
        group._start_coalescing(torch.device("cpu"))
        group.allreduce([x := torch.ones(3)])
        group.broadcast([y := torch.full((2,), float(rank))])
        group.send([torch.full((2,), float(rank))], (rank + 1) % nranks, 0)
        group.recv([z := torch.zeros(2)], (rank - 1) % nranks, 0)
        work = group._end_coalescing(torch.device("cpu"))
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert (x.tolist(), y.tolist(), z.tolist()) == (
            [nranks] * 3,
            [0.0] * 2,
            [(rank - 1) % nranks] * 2,
        )
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.all_reduce(first := torch.ones(2), op=dist.ReduceOp.MAX)
            dist.all_reduce(second := torch.full((2,), float(rank)), op=dist.ReduceOp.MAX)
        manager.wait()
        assert (first.tolist(), second.tolist()) == ([1.0] * 2, [nranks - 1.0] * 2)
        before = group._get_sequence_number_for_group()
        dist.all_reduce(torch.ones(1))
        dist.barrier(device_ids=[0])
        assert group._get_sequence_number_for_group() == before + 2
        assert [device.type for device in group._device_types] == ["cpu", "cuda"]
        assert group.options._timeout == LIMIT
        group.set_timeout(2 * LIMIT)
        assert group._get_backend(torch.device("cpu")).options._timeout == 2 * LIMIT
        assert group._get_backend(torch.device("cpu")).name() == dist.get_backend() == "miraccl"
        outs = [[torch.zeros(2)] for _ in range(nranks)]
        both(lambda g: _gathered(outs, rank, g), other)
        rows = [1] * nranks

        def some_splits(g: Any) -> Any:
            given = (rows, rows) if rank % 2 else (None, None)
            dist.all_to_all_single(
                out := torch.zeros(nranks), torch.arange(1.0 * nranks) + rank, *given, group=g
            )
            return out

        both(some_splits, other)
        dist.all_reduce_coalesced(pair := [torch.ones(2), torch.ones(3)])
        assert [t.sum().item() for t in pair] == [2.0 * nranks, 3.0 * nranks]
        subgroup, _ = dist.new_subgroups(1)
        dist.all_reduce(alone := torch.ones(1), group=subgroup)
        assert alone.item() == 1.0


def _gathered(outs: list[list[Any]], rank: int, group: Any) -> list[Any]:
    dist.all_gather_coalesced(outs, [torch.full((2,), float(rank))], group=group)
    return [of_rank[0].clone() for of_rank in outs]


def monitored(path: str) -> None:
    """Check that a monitored barrier names the missing ranks and their location, and the group
    survives.
    """
    with world(path) as (rank, nranks), pytest.MonkeyPatch.context() as patch:
        group = dist.group.WORLD
        assert isinstance(group, ProcessGroupMiraccl)
        patch.setattr(monitored_barrier, "OUTCOME_S", LIMIT.total_seconds())
        group.monitored_barrier(LIMIT)
        with torch.device("meta"):  # where a program has its own tensors by default, ours are not
            dist.monitored_barrier()
        _reports_before_rank_0(group, "all", nranks)
        group.monitored_barrier(datetime.timedelta(microseconds=1))
        last = nranks - 1
        if rank != last:
            _reports_before_rank_0(group, "all but one", last)
            with refused(
                "CollectiveTimeout",
                "monitored_barrier",
                f"Rank {last} failed to pass monitoredBarrier",
                f"rank {last}:",
                "groups.py",
            ):
                group.monitored_barrier(SHORT)
        dist.barrier()
        if rank == last:
            with refused(
                "monitored_barrier",
                f"Rank {last} successfully reached monitoredBarrier, but received errors",
                f"Rank {last} failed to pass monitoredBarrier in 300 ms",
            ):
                group.monitored_barrier(SHORT)
        dist.barrier()
        if not rank:
            everybody = (
                "Rank 1" if nranks == 2 else f"Ranks {', '.join(str(r) for r in range(1, nranks))}"
            )
            with refused(f"{everybody} failed to pass monitoredBarrier"):
                dist.monitored_barrier(timeout=SHORT, wait_all_ranks=True)
            with refused(
                "Rank 1 failed to pass monitoredBarrier in 0 ms"
            ):  # and not within the group's own timeout, which 0 means elsewhere
                dist.monitored_barrier(timeout=datetime.timedelta(0))
        else:
            dist.barrier(async_op=True)
        if not rank:
            dist.barrier()
        dist.all_reduce(x := torch.ones(1))
        assert x.item() == nranks


def _reports_before_rank_0(group: ProcessGroupMiraccl, name: str, nranks: int) -> None:
    """Delay rank 0 until the others have reported to its barrier: their reports count as in
    time.
    """
    post: Any = group._matcher
    if not post.comm.rank:
        all_here(name, nranks)
        return
    send = post.send

    def report(*args: Any) -> Any:
        post.send = send
        message = send(*args)
        all_here(name, nranks)
        return message

    post.send = report


def monitored_at_the_last_moment(path: str) -> None:
    """Check that rank 0's outcome is accepted if it arrives just after the deadline."""
    with world(path) as (rank, _), pytest.MonkeyPatch.context() as patch:
        group = dist.group.WORLD
        assert isinstance(group, ProcessGroupMiraccl)
        post = group._matcher
        withdraw = post.cancel

        def withdraw_late(message: Any) -> bool:
            post.wait(message)
            return withdraw(message)

        if rank:
            patch.setattr(monitored_barrier, "OUTCOME_S", -LIMIT.total_seconds())
            patch.setattr(post, "cancel", withdraw_late)
        group.monitored_barrier(LIMIT)


def deadlines(path: str) -> None:
    """Check timeouts of one operation and of one wait; neither affects other operations."""
    with world(path) as (rank, nranks):
        group = dist.group.WORLD
        assert isinstance(group, ProcessGroupMiraccl)
        options = dist.distributed_c10d.AllreduceOptions()
        options.timeout = LIMIT
        group.allreduce([x := torch.ones(2)], options).wait()
        assert x.tolist() == [float(nranks)] * 2
        if rank:
            work = dist.all_reduce(torch.ones(2), async_op=True)
            with refused("CollectiveTimeout", "timed out after"):
                work.wait(datetime.timedelta(milliseconds=20))
            assert not work.is_success()
            dist.send(torch.ones(1), 0)
            work.wait()
        else:
            for peer in range(1, nranks):
                dist.recv(torch.zeros(1), peer)
            dist.all_reduce(torch.ones(2))
        other = dist.new_group(timeout=LIMIT)
        if not rank:
            options.timeout = SHORT
            with refused("CollectiveTimeout", "timeout of 0.3 s", "rank 1:", "groups.py"):
                other.allreduce([torch.ones(2)], options).wait()
            dist.send(torch.ones(1), 1)
        elif rank == 1:
            dist.recv(torch.ones(1), 0)
        dist.barrier()
        third = dist.new_group(timeout=LIMIT)
        dist.distributed_c10d._set_pg_timeout(SHORT, third)
        if not rank:
            with refused("CollectiveTimeout", "timeout of 0.3 s"):
                dist.all_reduce(torch.ones(2), group=third)
            dist.send(torch.ones(1), 1)
        elif rank == 1:
            dist.recv(torch.ones(1), 0)
        if not rank:  # the others do not come to this group
            with pytest.raises(BackendError) as caught:
                dist.new_group([0, 1], timeout=SHORT, use_local_synchronization=True)
            assert isinstance(
                caught.value.error, BootstrapError
            )  # in words that hang on how far the thread of the hub has come
        dist.barrier()


def deadlines_during_operations(path: str) -> None:
    """Check that a group timeout set during an operation with its own timeout is kept."""
    with world(path) as (rank, nranks):
        group = dist.group.WORLD
        assert isinstance(group, ProcessGroupMiraccl)
        if not rank:
            options = dist.distributed_c10d.AllreduceOptions()
            options.timeout, options.asyncOp = 2 * LIMIT, True
            work = group.allreduce([torch.ones(2)], options)
            while core_access(group.communicator).timeout != options.timeout.total_seconds():
                time.sleep(0.001)
            group.set_timeout(3 * LIMIT)
            assert group.options._timeout == 3 * LIMIT
            for peer in range(1, nranks):
                dist.send(torch.ones(1), peer)
            work.wait()
            dist.barrier()
            assert core_access(group.communicator).timeout == 3 * LIMIT.total_seconds()
        else:
            dist.recv(torch.ones(1), 0)
            dist.all_reduce(torch.ones(2))
            dist.barrier()


def callbacks_in_order(path: str) -> None:
    """Check that operations of a future's callback precede those of another thread on every
    rank.
    """
    with world(path) as (rank, _):
        for _ in range(20):
            entered = threading.Event()

            def inside(future: Any, entered: threading.Event = entered) -> Any:
                entered.set()
                dist.all_reduce(future.value()[0])
                return future.value()

            work = dist.all_reduce(torch.ones(2), async_op=True)
            chained = work.get_future().then(inside)
            if rank == 0:
                entered.wait(LIMIT.total_seconds())
            dist.broadcast(x := torch.ones(5), 0)
            chained.wait()
            assert x.tolist() == [1.0] * 5
