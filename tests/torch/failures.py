"""Failures of the backend and their error messages."""

from __future__ import annotations

import datetime
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from miraccl.runtime.progress import progress
from miraccl.torch import BackendError, ProcessGroupMiraccl
from tests.torch.worlds import all_here, refused, world


def rejected_arguments(path: str) -> None:
    """Check that invalid arguments are rejected before anything is sent, and the group stays
    usable.
    """
    with world(path) as (rank, nranks):
        group = dist.group.WORLD
        assert group is not None
        with refused("meta", "cpu and cuda"):
            dist.all_reduce(torch.ones(2, device="meta"))
        with refused("sparse"):
            dist.broadcast(torch.eye(2).to_sparse(), 0)
        with refused("BXOR", "float32", "docs/guide/pytorch-types.md"):
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BXOR)
        with refused("splits", "4 rows"):
            dist.all_to_all_single(torch.ones(4), torch.ones(4), [1] * nranks, [1] * nranks)
        for wrong in ([1.0] * nranks, [4], [4 + nranks] + [-1] * (nranks - 1)):
            with refused("a split", "count"):
                dist.all_to_all_single(torch.ones(4), torch.ones(4), wrong, wrong)
        expanded = torch.ones(1).expand(4)
        for into_shared_memory in (
            dist.all_reduce,
            lambda x: dist.all_gather([x] * nranks, torch.ones(4)),
            lambda x: dist.recv(x, 0),
        ):
            with refused("(4,)", "share memory", "clone()"):
                into_shared_memory(expanded)
        few, many = (
            [torch.zeros(2 * nranks)],
            [torch.zeros(1) for _ in range(2 * nranks)],
        )  # sizes that would do, one after another
        with refused("all_gather", "1 tensors", f"one per rank, {nranks}"):
            dist.all_gather(few, torch.ones(2))
        with refused("reduce_scatter", f"{2 * nranks} tensors", f"one per rank, {nranks}"):
            dist.reduce_scatter(torch.zeros(2), many)
        with refused("all_to_all", f"{2 * nranks} tensors"):
            dist.all_to_all(many, many)
        if rank == 0:
            uneven = [
                torch.zeros(2 * r + 1) for r in range(nranks)
            ]  # as many as equal parts, in all
            with refused("gather", str([2 * r + 1 for r in range(nranks)]), f"must have {nranks}"):
                dist.gather(torch.ones(nranks), uneven)
            with refused("scatter", f"must have {nranks}"):
                dist.scatter(torch.ones(nranks), uneven)
        for message in (group.send, group.recv):
            with refused("tag -1 is not allowed", ">= 0"):
                message([torch.ones(1)], 0, -1)
        two = [torch.ones(1), torch.ones(1)]  # Gloo adds these up as well, NCCL refuses them
        for several in (
            group.allreduce,
            group.broadcast,
            lambda xs: group.allgather([[x] * nranks for x in xs], xs),
        ):
            with refused("got 2 tensors", "pass one per call"):
                several(two)
        with refused("got 2 tensors", "pass one per call"):
            group.reduce_scatter(two, [two * nranks] * 2)
        with refused("got 1 outputs for 2 inputs"):
            group.allgather_into_tensor_coalesced([torch.ones(nranks)], two)
        with refused("output 0 has 3 elements", "input 0 has 1"):
            dist.all_gather_coalesced([[torch.ones(3)] for _ in range(nranks)], two[:1])
        with refused("the list has no tensors"):
            group.allreduce_coalesced([])
        options = c10d.BroadcastOptions()
        options.rootTensor = 1
        with refused("rootTensor is 1", "allowed is 0"):
            group.broadcast([torch.ones(1)], options)
        with refused("got 1 outputs for 2 inputs"):
            dist.all_gather_coalesced([[torch.ones(1)] for _ in range(nranks)], two)
        if nranks > 1:  # wrong on one rank: refused on all, at the call or in wait()
            sizes = [1 if rank == 1 else 2] * nranks
            for asynchronous in (False, True):
                outs = [[torch.zeros(size)] for size in sizes]
                with refused("rank 1: all_gather_coalesced: output 0 has 1", "input 0 has 2"):
                    work = dist.all_gather_coalesced(outs, [torch.ones(2)], None, asynchronous)
                    work.wait()
            outs = [[torch.zeros(2)] for _ in range(nranks)]
            dist.all_gather_coalesced(outs, [torch.full((2,), float(rank))])
            assert [out.tolist() for (out,) in outs] == [[float(r)] * 2 for r in range(nranks)]
        for rooted in (group.broadcast, group.reduce):  # at the call: these do not wait
            with refused(f"root is {nranks}", f"0 to {nranks - 1}"):
                rooted(torch.ones(1), root=nranks)
        dist.all_reduce(x := torch.ones(2))
        assert x.tolist() == [nranks] * 2


def in_turn(path: str, names: list[str]) -> list[str]:
    """Run several checks and return their results."""
    return [globals()[name](f"{path}-{name}") for name in names]


def mismatch(path: str) -> str:
    """Call different operations on different ranks; return the error text."""
    with world(path) as (rank, _):
        try:
            dist.all_reduce(torch.ones(2 + rank))
        except BackendError as error:
            return str(error)
    return ""


def other_splits(path: str) -> str:
    """Send rank 1 fewer elements than it expects; return the error text."""
    with world(path) as (rank, _):
        try:
            dist.all_to_all_single(
                torch.zeros(8), torch.zeros(8 - (rank == 0)), [4, 4], [4, 4 - (rank == 0)]
            )
            dist.barrier()
        except BackendError as error:
            return str(error)
    return ""


def aborted(path: str) -> str:
    """Abort on one rank while the others wait; return their error text."""
    with world(path) as (rank, nranks):
        group = dist.new_group()
        all_here("there", nranks)
        if rank == 0:
            group.abort()
            return ""
        try:
            dist.all_reduce(torch.ones(2), group=group, async_op=True).wait()
        except BackendError as error:
            return str(error)
    return ""


def _late(
    path: str,
    operation: Callable[[], Any],
    *,
    before: Callable[[], Any] = dist.barrier,
    failure: type[Exception] = BackendError,
) -> str:
    """Run an operation on rank 0 only, after one on all ranks; return its error text."""
    with world(path) as (rank, _):
        before()
        group = dist.group.WORLD
        assert isinstance(group, ProcessGroupMiraccl)
        group.set_timeout(
            datetime.timedelta(seconds=1)
        )  # not that of the meeting: ranks may start far apart
        if rank == 0:
            try:
                operation()
            except failure as error:
                Path(f"{path}-told").touch()
                return str(error)
        for _ in range(2000):
            if Path(f"{path}-told").exists():
                break
            time.sleep(0.01)
    return ""


def late_rank(path: str) -> str:
    """Let one rank arrive too late at an operation of another."""
    return _late(path, lambda: dist.all_reduce(torch.ones(2), async_op=True).wait())


def late_backward(path: str) -> str:
    """Let DDP's C++ wait for a gradient that misses its deadline; DDP raises the error as its
    own.
    """
    models: list[Any] = []

    def backward() -> None:
        models[0](torch.ones(1, 2)).sum().backward()

    return _late(
        path,
        backward,
        before=lambda: models.append(DistributedDataParallel(torch.nn.Linear(2, 2))),
        failure=RuntimeError,
    )


def late_future(path: str) -> str:
    """Let a message miss the group's deadline while its future is awaited."""

    def wait() -> None:
        work = dist.irecv(torch.zeros(1), 1, tag=6)
        assert work is not None
        work.get_future().wait()

    return _late(path, wait)


def late_from_anyone(path: str) -> str:
    """Let a receive from any source miss the group's deadline."""
    return _late(path, lambda: dist.recv(torch.zeros(1), tag=6))


def late_message(path: str) -> str:
    """Let a receive miss the group's deadline; return each rank's error text."""
    with world(path) as (rank, nranks):
        group = dist.group.WORLD
        assert isinstance(group, ProcessGroupMiraccl)
        dist.barrier()
        if rank == 0:
            group.set_timeout(datetime.timedelta(seconds=1))
        try:
            dist.recv(torch.zeros(1), (rank + 1) % nranks, tag=6)
        except BackendError as error:
            return str(error)
    return ""


def all_aborted(path: str) -> str:
    """Call ``_abort_process_group`` on one rank; return the error text of the others."""
    with world(path) as (rank, nranks):
        all_here("there", nranks)
        if rank == 0:
            dist.distributed_c10d._abort_process_group()
            return ""
        try:
            dist.recv(torch.ones(2), 0)
        except BackendError as error:
            return str(error)
    return ""


def interrupted(path: str) -> str:
    """Raise from a signal handler while rank 0 waits for a message; return each rank's error
    text.
    """

    with world(path) as (rank, nranks):
        group: Any = dist.group.WORLD
        context = group._matcher.comm._core.context

        def ring(number: int, frame: Any) -> None:
            if context.interrupted:
                raise TimeoutError("from a handler")
            signal.setitimer(
                signal.ITIMER_REAL, 0.002
            )  # where nothing is under way, an exception does no harm

        before = signal.signal(signal.SIGALRM, ring)
        all_here("there", nranks)
        try:
            if rank == 0:
                signal.setitimer(signal.ITIMER_REAL, 0.05)
            dist.recv(torch.ones(2), (rank + 1) % nranks)
        except (BackendError, TimeoutError) as error:
            return str(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    return ""


def interrupted_in_between(path: str) -> str:
    """Raise from a signal handler while rank 0 matches messages in Python."""

    def ring() -> Any:
        raise TimeoutError("from a handler")

    with world(path) as (rank, nranks), pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "watch", lambda post: None)  # else its thread may come to it first
        group: Any = dist.group.WORLD
        all_here("there", nranks)
        if rank == 0:
            group._matcher._match_messages = ring
        try:
            dist.recv(torch.ones(2), (rank + 1) % nranks)
        except (BackendError, TimeoutError) as error:
            return str(error)
    return ""
