"""Mismatching calls of one rank, over several communicators; each rank returns what it observed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import miraccl
from miraccl.bootstrap import Session, StatusRequest
from miraccl.diagnosis import detector, status_report
from miraccl.errors import MiracclError
from tests.diagnosis.fault_ranks import seen
from tests.runtime.sweep_ranks import act_as_hosts

ODD = 1  # the rank that makes another call
LARGE = 400_000  # more elements than slots take


class Rank:
    """A rank of a communicator, and of a split of it with the same ranks."""

    def __init__(self, world: miraccl.Communicator, timeout: float) -> None:
        made = str(miraccl.get_unique_id()) if world.rank == 0 else ""
        ident = world._core.session.all_gather(made.encode(), "id")[0].decode()
        self.comm = miraccl.Communicator(world.nranks, ident, world.rank, timeout=timeout)
        part = self.comm.split(0)
        assert part is not None
        self.part = part
        for comm in (self.comm, self.part):
            comm.all_reduce(np.ones(3))
            comm._core.session.timeout = timeout
        self.rank, self.nranks = world.rank, world.nranks
        self.peer = (ODD + 1) % self.nranks if self.rank == ODD else ODD

    def ring(self) -> None:
        with miraccl.group():
            self.comm.send(np.ones(3), (self.rank + 1) % self.nranks)
            self.comm.recv(np.ones(3), (self.rank - 1) % self.nranks)

    def close(self) -> None:
        for comm in (self.part, self.comm):
            with contextlib.suppress(MiracclError):
                comm.finalize()


CALLS: dict[str, Callable[[Rank], Any]] = {
    "all_reduce": lambda me: me.comm.all_reduce(np.ones(3)),
    "large": lambda me: me.comm.all_reduce(np.ones(LARGE)),
    "async": lambda me: me.comm.all_reduce(np.ones(3), async_op=True).wait(),
    "barrier": lambda me: me.comm.barrier(),
    "broadcast": lambda me: me.comm.broadcast(np.ones(3), ODD),
    "recv": lambda me: me.comm.recv(np.ones(3), me.peer),
    "irecv": lambda me: me.comm.recv(np.ones(3), me.peer, async_op=True).wait(),
    "send": lambda me: me.comm.send(np.ones(LARGE), me.peer),
    "ring": lambda me: me.ring(),
    "split": lambda me: me.comm.split(0),
    "shrink": lambda me: me.comm.shrink(),
    "part": lambda me: me.part.all_reduce(np.ones(3)),
    "send in a part": lambda me: me.part.send(np.ones(LARGE), me.peer),
    "finalize": lambda me: me.comm.finalize(),
}


def pairs(
    names: list[tuple[str, str]], timeout: float, ranks_per_host: int, answer_s: float | None = None
) -> list[dict[str, Any]]:
    """Run each pair (call of rank ODD, call of the others) and return this rank's observations.

    ``answer_s`` is the time that ranks wait for answers of others.
    """
    if answer_s is not None:
        detector.QUERY_TIMEOUT_S = status_report.STATUS_TIMEOUT_S = answer_s
    act_as_hosts(ranks_per_host)
    with miraccl.init(timeout=60) as world:
        return [one(world, *pair, timeout) for pair in names]


def one(world: miraccl.Communicator, first: str, second: str, timeout: float) -> dict[str, Any]:
    session = world._core.session
    me = Rank(world, timeout)
    name = first if me.rank == ODD else second
    got: dict[str, Any] = {"type": "none", "text": ""}
    session.barrier("ready")
    start = time.monotonic()
    try:
        CALLS[name](me)
        if name != "finalize":
            me.comm.barrier()
    except MiracclError as error:
        got = seen(error)
    got["seconds"] = time.monotonic() - start
    session.barrier("seen")
    me.close()
    return got


def threads() -> float:
    """Wait across two communicators, until a thread of rank 0 calls the operation that rank 1
    awaits.

    It does so once rank 1 has queried the others twice.
    """
    with miraccl.init(timeout=60) as world:
        me = Rank(world, 60)
        x, y = np.ones(3), np.ones(3)
        helper = threading.Thread(
            target=come_late, args=(me, y, status_queries(me.part._core.session))
        )
        if me.rank == 0:
            helper.start()
            me.comm.all_reduce(x)
            helper.join()
        else:
            me.part.all_reduce(y)
            me.comm.all_reduce(x)
        me.close()
        return float(x[0] + y[0])


def come_late(me: Rank, y: Any, asked: threading.Semaphore) -> None:
    await_two(asked)
    me.part.all_reduce(y)


def status_queries(session: Session) -> threading.Semaphore:
    """Return a semaphore released at each status query; called by all ranks.

    The pauses between queries grow.
    """
    asked = threading.Semaphore(0)
    session.on_event(lambda event: asked.release() if isinstance(event, StatusRequest) else None)
    session.barrier("questions")
    return asked


def await_two(asked: threading.Semaphore) -> None:
    for _ in range(2):
        assert asked.acquire(timeout=30)


def late_rank() -> float:
    """Compute on rank 0 while the others wait for it, until they have queried it twice."""
    with miraccl.init(timeout=60) as comm:
        x, asked = np.ones(3), status_queries(comm._core.session)
        if comm.rank == 0:
            await_two(asked)
        comm.all_reduce(x)
        return float(x[0])
