"""Process groups for test ranks: a miraccl group of all ranks and a Gloo group to compare with."""

from __future__ import annotations

import datetime
import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import miraccl.torch
from miraccl.diagnosis import status_report

LIMIT = datetime.timedelta(seconds=20)


@contextmanager
def world(
    path: str,
    backend: str = miraccl.torch.NAME,
    timeout: datetime.timedelta = LIMIT,
    *,
    device: bool = False,
) -> Iterator[tuple[int, int]]:
    """Yield (rank, nranks) of a default group that meets at a file; ``device`` binds its GPU."""
    torch.set_num_threads(1)
    status_report.STATUS_TIMEOUT_S = (
        LIMIT.total_seconds() / 2
    )  # who is asked where it is may be late to say so
    rank, nranks = int(os.environ["MIRACCL_RANK"]), int(os.environ["MIRACCL_NRANKS"])
    gpu = torch.device("cuda", rank % torch.cuda.device_count()) if device else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        backend,
        init_method=f"file://{path}",
        rank=rank,
        world_size=nranks,
        timeout=timeout,
        device_id=gpu,
    )
    try:
        yield rank, nranks
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def in_turn(path: str, names: list[tuple[str, str]]) -> None:
    """Run several checks (module, function), each with groups of its own, after one import of
    torch.
    """
    for module, function in names:
        getattr(importlib.import_module(module), function)(f"{path}-{function}")


def all_here(name: str, nranks: int, store: Any = None) -> None:
    """Return once this many ranks are outside of any operation of a group."""
    store = dist.distributed_c10d._get_default_store() if store is None else store
    store.add(name, 1)
    while store.add(name, 0) < nranks:
        time.sleep(0.002)


def gloo() -> Any:
    return dist.new_group(backend="gloo", timeout=LIMIT)


def values(dtype: Any, rank: int, count: int = 32) -> Any:
    """Return integers that the type holds exactly, different per rank; two bytes for wide
    integers.
    """
    source = torch.Generator().manual_seed(1000 + rank)
    real = not dtype.is_floating_point and not dtype.is_complex
    low = (
        0
        if dtype is torch.bool or (real and not dtype.is_signed)
        else -300
        if real and dtype.itemsize > 1
        else -3
    )
    high = 2 if dtype is torch.bool else 300 if real and dtype.itemsize > 1 else 4
    numbers = torch.randint(low, high, (count,), generator=source)
    if dtype.is_complex:
        return torch.complex(numbers.double(), numbers.flip(0).double()).to(dtype)
    return numbers.to(torch.float32).to(dtype) if dtype.is_floating_point else numbers.to(dtype)


def equal(a: Any, b: Any) -> bool:
    """Compare dtype, shape and values; bytes for types that torch cannot compare."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    return bool(
        (
            a.contiguous().view(-1).view(torch.uint8) == b.contiguous().view(-1).view(torch.uint8)
        ).all()
    )


def both(run: Callable[[Any], Any], other: Any) -> Any:
    """Return the result on miraccl after comparing it with Gloo."""
    mine, theirs = run(None), run(other)
    pairs = zip(mine, theirs, strict=True) if isinstance(mine, list | tuple) else [(mine, theirs)]
    for ours, wanted in pairs:
        assert equal(ours, wanted), (ours, wanted)
    return mine


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """Expect ``BackendError`` with this text."""
    try:
        yield
    except miraccl.torch.BackendError as error:
        if not isinstance(error, dist.DistBackendError) or not all(w in str(error) for w in words):
            raise AssertionError(f"expected {words}") from error
    else:
        raise AssertionError(f"nothing was raised; expected {words}")
