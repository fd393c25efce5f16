"""Rank programs in which one rank calls another operation than the rest, on several groups."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from miraccl.torch import BackendError
from tests.torch.worlds import all_here, world

ODD = 1  # the rank that makes another call
LARGE = 1_000_000  # elements of a message that waits to be taken


def _split() -> Any:
    group: Any = dist.group.WORLD
    return group.split_group(list(range(dist.get_world_size())))


def _peer() -> int:
    return (ODD + 1) % dist.get_world_size() if dist.get_rank() == ODD else ODD


#: of the group that both are in, besides the default one
CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda part: dist.all_reduce(torch.ones(3)),
    "async": lambda part: dist.all_reduce(torch.ones(3), async_op=True).wait(),
    "barrier": lambda part: dist.barrier(),
    "recv": lambda part: dist.recv(torch.ones(3), _peer()),
    "any": lambda part: dist.recv(torch.ones(3)),
    "send": lambda part: dist.send(torch.ones(LARGE), _peer()),
    "part": lambda part: dist.all_reduce(torch.ones(3), group=part),
    "async part": lambda part: dist.all_reduce(torch.ones(3), group=part, async_op=True).wait(),
    "new_group": lambda part: dist.new_group(),
    "split_group": lambda part: _split(),
    "destroy": lambda part: dist.destroy_process_group(),
}


def pairs(path: str, names: list[tuple[str, str]], timeout: float) -> list[dict[str, Any]]:
    """Return this rank's outcome for each pair (call of rank ODD, call of the others)."""
    return [one(f"{path}-{number}", *pair, timeout) for number, pair in enumerate(names)]


def one(path: str, first: str, second: str, timeout: float) -> dict[str, Any]:
    store = dist.FileStore(f"{path}-seen", -1)
    with world(path, timeout=datetime.timedelta(seconds=timeout)) as (rank, nranks):
        part = dist.new_group()
        got: dict[str, Any] = {"type": "none", "text": ""}
        dist.barrier()
        start = time.monotonic()
        try:
            CALLS[first if rank == ODD else second](part)
        except BackendError as error:
            got = {"type": type(error.error).__name__, "text": str(error)}
        got["seconds"] = time.monotonic() - start
        all_here("seen", nranks, store)  # for who has not, a rank that goes on has left
        return got
