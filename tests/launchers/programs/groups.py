"""Communication of the rank programs: ``miraccl.init()`` or ``torch.distributed``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

DEADLINE_S = 60.0
SumFunction = Callable[[int], int]


@contextmanager
def connect(kind: str) -> Iterator[tuple[int, int, SumFunction]]:
    """Yield rank, nranks and a function that sums a number over all ranks.

    ``kind`` is ``init``, ``torch`` or an ``init_method`` of torch.
    """
    if kind != "init":
        yield from _torch(None if kind == "torch" else kind)
        return
    import miraccl

    with miraccl.init(timeout=DEADLINE_S) as comm:
        yield (
            comm.rank,
            comm.nranks,
            lambda number: int(comm.all_reduce(np.array([number], np.int64))[0]),
        )


def _torch(method: str | None) -> Iterator[tuple[int, int, SumFunction]]:
    import datetime

    import torch
    import torch.distributed as dist

    import miraccl.torch

    dist.init_process_group(
        miraccl.torch.NAME, method, timeout=datetime.timedelta(seconds=DEADLINE_S)
    )

    def add_up(number: int) -> int:
        x = torch.tensor([number])
        dist.all_reduce(x)
        return int(x.item())

    yield dist.get_rank(), dist.get_world_size(), add_up
    dist.destroy_process_group()


def write_line(folder: str, **what: Any) -> None:
    """Append a line of JSON for the test to a file of this rank."""
    with (Path(folder) / f"rank-{os.environ['RANK']}.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\n")
