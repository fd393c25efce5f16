"""Rendezvous handler ``miraccl://`` for ``init_process_group`` under every supported launcher.

PyTorch's ``env://`` reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which ``mpirun`` and
``srun`` do not set.  With ``miraccl://`` the ranks meet as for a communicator, and rank 0 announces
the address of the group's store.  Under torchrun the handler is ``env://``, with torchrun's store.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from miraccl import trace
from miraccl.bootstrap.launch import Launch, detect_launch, join_launch
from miraccl.deadline import Deadline
from miraccl.errors import InvalidUsage
from miraccl.torch.failures import as_backend_errors

SCHEME = "miraccl"


def handle(
    url: str, timeout: datetime.timedelta = dist.default_pg_timeout, **kwargs: Any
) -> Iterator[tuple[Any, int, int]]:
    """Yield the store, this rank and the number of ranks; collective, within ``timeout``."""
    if "?" in url:
        with as_backend_errors():
            raise InvalidUsage(
                f"{url}: rank and world_size come from the launcher",
                hint=f"omit them with {SCHEME}://",
            )
    trace.configure()
    with as_backend_errors():
        launch = detect_launch(os.environ)
    if launch.launcher == "torchrun":
        yield from dist.rendezvous("env://", timeout=timeout, **kwargs)
        return
    yield _store(launch, timeout), launch.rank, launch.nranks
    # PyTorch's own handlers raise here as well
    raise RuntimeError(f"{SCHEME}:// does not support a second rendezvous after a failure")


def _store(launch: Launch, timeout: datetime.timedelta) -> Any:
    if launch.nranks == 1:
        return dist.HashStore()
    deadline = Deadline.after(timeout.total_seconds())
    with as_backend_errors(), join_launch(launch, deadline, deadline.seconds) as session:
        host = session.addresses[0]
        own = (
            dist.TCPStore(host, 0, launch.nranks, True, timeout, wait_for_workers=False)
            if launch.rank == 0
            else None
        )
        port = session.all_gather(
            str(own.port).encode() if own else b"", "store of torch", deadline
        )[0]
    return own or dist.TCPStore(
        host, int(port), launch.nranks, False, timeout, wait_for_workers=False
    )
