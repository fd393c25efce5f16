"""What the ranks of the failure tests run; each returns what it saw."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

import miraccl
from miraccl.errors import MiracclError

from tests.comm.sweep_ranks import act_as_hosts


def seen(error: BaseException) -> dict[str, Any]:
    """An exception as plain values."""
    return {
        "type": type(error).__name__,
        "text": str(error),
        "peer": getattr(error, "peer", None),
        "op": getattr(error, "op", None),
        "graph": list(getattr(error, "graph", ())),
    }


def mismatch(field: str, odd: int, count: int, ranks_per_host: int) -> dict[str, Any]:
    """Rank ``odd`` calls something else than the others, in one field."""
    act_as_hosts(ranks_per_host)
    comm = miraccl.init(timeout=5.0)
    comm.barrier()
    me = comm.rank == odd
    dtype = np.int32 if field == "dtype" and me else np.float32
    n = count
    if field == "count" and me:
        n = count + comm.nranks
    if field == "far count" and me:
        n = 100 * count
    n = n // comm.nranks * comm.nranks
    x = np.ones(n, dtype)
    start = time.monotonic()
    try:
        if field == "collective" and me:
            comm.all_gather(x)
        elif field == "root":
            comm.broadcast(x, 1 if me else 0)
        elif field == "operator":
            comm.all_reduce(x, op=miraccl.MAX if me else miraccl.SUM)
        elif field == "barrier":
            if me:
                comm.barrier()
            else:
                comm.all_reduce(x)
        elif field.startswith("broadcast"):
            comm.broadcast(np.ones(100 * n if me else n, dtype), 0)
        else:
            comm.all_reduce(x)
        for _ in range(2):  # whoever got through finds out at the next operation
            comm.barrier()
        return {"type": "none", "text": ""}
    except MiracclError as error:
        return {**seen(error), "seconds": time.monotonic() - start}
    finally:
        comm.finalize()
