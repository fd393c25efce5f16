"""One rank of a job under a real launcher: ``python job.py SCENARIO FOLDER``.

The result goes to FOLDER/rank.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import miraccl
from miraccl.bootstrap.launch import detect_launch


def world() -> dict[str, Any]:
    """Two communicators after one another from the environment alone: the second meeting must not
    find the first one's traces.
    """
    launch = detect_launch(os.environ)
    assert "mpi4py" not in sys.modules
    sums = []
    for turn in range(2):
        with miraccl.init(timeout=60.0) as comm:
            sums.append(float(comm.all_reduce(np.full(1000, comm.rank + 10.0 * turn))[999]))
            ranks = comm.all_gather(np.array([comm.rank])).tolist()
            mine = {"rank": comm.rank, "nranks": comm.nranks, "local_rank": comm.local_rank}
    return {
        **mine,
        "launcher": launch.launcher,
        "point": type(launch.rendezvous).__name__,
        "sums": sums,
        "ranks": ranks,
    }


def over_udp() -> dict[str, Any]:
    """Ranks that name hosts of their own: all data goes over UDP."""
    os.environ["MIRACCL_HOSTID"] = str(os.getpid())
    os.environ["MIRACCL_NET"] = "udp"
    with miraccl.init(timeout=60.0) as comm:
        total = comm.all_reduce(np.full(100_000, comm.rank + 1.0, np.float32))
        return {
            "rank": comm.rank,
            "totals": np.unique(total).tolist(),
            "transports": comm.explain("all_reduce", 8)[0].transports,
        }


def death() -> dict[str, Any]:
    """Rank 1 ends in the middle; with status 0, so that the launcher leaves the others alone."""
    with miraccl.init(timeout=60.0) as comm:
        comm.barrier()
        if comm.rank == 1:
            os._exit(0)
        try:
            comm.all_reduce(np.ones(4))
        except miraccl.PeerDied as error:
            comm.abort("the test is over")
            return {"rank": comm.rank, "peer": error.peer, "error": type(error).__name__}
    raise AssertionError("nobody noticed")


def over_mpi() -> dict[str, Any]:
    """``init(mpi_comm)`` over the world, its halves at the same time, and the world turned
    round.
    """
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    half = comm.Split(comm.rank % 2, comm.rank)
    turned = comm.Split(0, -comm.rank)
    with (
        miraccl.init(comm, timeout=60.0) as world,
        miraccl.init(half, timeout=60.0) as mine,
        miraccl.init(turned, timeout=60.0) as back,
    ):
        numbers = {
            "rank": world.rank,
            "nranks": world.nranks,
            "sum": float(world.all_reduce(np.full(7, comm.rank, np.float32))[0]),
            "half": mine.all_gather(np.array([comm.rank])).tolist(),
            "turned": back.all_gather(np.array([comm.rank])).tolist(),
        }
        theirs = np.zeros(7, np.float32)
        comm.Allreduce(np.full(7, comm.rank, np.float32), theirs)
        numbers["mpi_sum"] = float(theirs[0])
    for wrong in (MPI.COMM_NULL, object()):
        try:
            miraccl.init(wrong)
        except miraccl.InvalidUsage as error:
            numbers.setdefault("refused", []).append(str(error))
    comm.Barrier()
    return numbers


if __name__ == "__main__":
    result = {"world": world, "over_udp": over_udp, "death": death, "over_mpi": over_mpi}[
        sys.argv[1]
    ]()
    Path(sys.argv[2], f"{result['rank']}.json").write_text(json.dumps(result))
