"""Waits of ranks that share a core with a busy process."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl.tools.processes import die_with_parent
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

OPERATIONS = 200


@contextlib.contextmanager
def _busy_process() -> Iterator[None]:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(parent)
        while True:
            pass
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def sleeps() -> list[int]:
    """Return how often this rank slept during waits in a collective, and in sends and receives."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    company: Any = (
        _busy_process() if os.environ["MIRACCL_RANK"] == "0" else contextlib.nullcontext()
    )
    with company, miraccl.init() as comm:
        x, y = np.zeros(2, np.float32), np.zeros(2, np.float32)
        peer = 1 - comm.rank
        actions: list[Callable[[], Any]] = [
            lambda: comm.all_reduce(x),
            lambda: comm.sendrecv(x, peer, y, peer),
        ]
        slept = []
        for action in actions:
            comm.barrier()
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            for _ in range(OPERATIONS):
                action()
            slept.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)
        return slept


def test_ranks_sleep_instead_of_yielding_to_a_busy_process() -> None:
    """A yield would hand over the core for a whole time slice: milliseconds per operation."""
    for of_kind in zip(*run_ranks(sleeps, 2), strict=True):
        assert sum(of_kind) > OPERATIONS / 4
