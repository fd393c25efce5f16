"""Ranks of the tests of unmatched messages, and of correct programs that resemble them, on one host
and several.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from miraccl.api.communicator import Communicator
from miraccl.bootstrap import Session
from miraccl.errors import MiracclError
from miraccl.runtime.options import Options
from miraccl.types import RedOp
from tests.gpu.emulated_cuda import EmulatedCuda
from tests.gpu.fake_cuda import FakeArray, FakeCuda
from tests.gpu.fake_ranks import session


class UnmatchedRank:
    """Communicator and calls of the tests.

    ``hosts``: a letter per rank, empty for one host; kernels are emulated where ranks share a host.
    """

    def __init__(self, world: Session, hosts: str, timeout: float = 60.0) -> None:
        if hosts:
            os.environ["MIRACCL_HOSTID"] = f"host {hosts[world.rank]}"
        self.cuda: FakeCuda = (
            FakeCuda(home=world.rank)
            if len(set(hosts)) == len(hosts) > 0
            else EmulatedCuda(home=world.rank)
        )
        self.cuda.install()
        self.world = world
        self.comm = Communicator.from_session(world, Options.create(timeout=timeout))
        self.rank, self.nranks = world.rank, world.nranks
        self.one, self.every = (
            self.put(np.full(1, float(self.rank))),
            self.put(np.zeros(self.nranks)),
        )
        self.comm.barrier(stream=0)
        self.comm.synchronize()

    def put(self, values: Any) -> FakeArray:
        return FakeArray(self.cuda, np.asarray(values, np.float32))

    def exchange(self, sends: list[int], receives: list[int], stream: int = 0) -> None:
        source, target = self.put(np.zeros(sum(sends))), self.put(np.zeros(sum(receives)))
        self.comm.all_to_all_v(source, sends, receives, target, stream=stream)

    def scatter(self, root: int, stream: int = 0) -> None:
        self.comm.scatter_v(
            self.every if self.rank == root else None,
            [1] * self.nranks,
            root,
            self.one,
            stream=stream,
        )

    def gather(self, root: int, stream: int = 0) -> None:
        self.comm.gather_v(
            self.one,
            [1] * self.nranks,
            root,
            self.every if self.rank == root else None,
            stream=stream,
        )

    def right(self, times: int) -> None:
        for number in range(times):
            self.scatter(number % self.nranks)
            self.gather(number % self.nranks)
            self.exchange(list(range(self.nranks)), [self.rank] * self.nranks)

    def captured(self, call: Callable[[int], None]) -> Any:
        """Return a graph of ``call(stream)``."""
        self.comm.synchronize()
        stream = self.cuda.make_stream()
        self.cuda.begin_capture(stream)
        call(stream)
        graph = self.cuda.end_capture(stream)
        return lambda: self.cuda.streams[stream].replay(graph)

    def leave_unmatched(self, case: str) -> None:
        """Leave one or more messages unmatched, without blocking any rank."""
        first, last, n = self.rank == 0, self.rank == self.nranks - 1, self.nranks
        if case == "counts":
            self.exchange([0] * (n - 1) + [5 * first], [0] * n)
        elif case == "counts in a row":
            for count in (3, 4):
                self.exchange([0] * (n - 1) + [count * first], [0] * n)
        elif case == "counts inside a host":
            self.exchange([0, 5 * first] + [0] * (n - 2), [0] * n)
        elif case == "roots of scatter":
            self.scatter(0 if first else 1)
        elif case == "roots of gather":
            self.gather(1 if first else 0)
        elif case == "gather alone":
            self.gather(0) if last else None
        elif case == "graph":
            replay = self.captured(lambda stream: self.scatter(0, stream))
            replay() if first else None
        elif first:
            assert case in ("scatter alone", "a plain send before")
            self.comm.send(self.one, n - 1, stream=0) if case == "a plain send before" else None
            self.scatter(0)

    def wait_for_all(self) -> None:
        """Wait for all ranks, whose GPUs have finished."""
        self.cuda.cuCtxSynchronize()
        self.world.barrier("stay")


@contextmanager
def rank(hosts: str, timeout: float = 60.0) -> Iterator[UnmatchedRank]:
    with session() as world:
        yield UnmatchedRank(world, hosts, timeout)


def error_of(call: Callable[[], Any]) -> str:
    """Return the error of ``call`` as text."""
    try:
        call()
    except MiracclError as error:
        return f"{type(error).__name__}: {error.message}"
    return ""


def errors_at_finalize(hosts: str, case: str, before: int) -> tuple[str, str]:
    """Return the errors of ``finalize`` and of a second ``finalize``."""
    with rank(hosts) as me:
        me.right(before)
        me.comm.synchronize()
        me.world.barrier("before they differ")
        me.leave_unmatched(case)
        return error_of(me.comm.finalize), error_of(me.comm.finalize)


def errors_at_synchronize(hosts: str, case: str) -> tuple[str, str]:
    """Return the errors of ``synchronize``, for messages that have arrived, and of ``finalize``."""
    with rank(hosts) as me:
        me.right(2)
        me.world.barrier("before they differ")
        me.leave_unmatched(case)
        me.wait_for_all()
        pause = threading.Event()
        for _ in range(1000):  # another rank may find it and notify this one
            if text := error_of(me.comm.synchronize):
                break
            pause.wait(0.01)
        return text, error_of(me.comm.finalize)


def correct_programs(hosts: str) -> None:
    """Early messages, graphs, streams and late or missing receives of plain sends raise nothing."""
    with rank(hosts) as me:
        comm, n, first, last = me.comm, me.nranks, me.rank == 0, me.rank == me.nranks - 1
        streams = [me.cuda.make_stream() for _ in range(2)]

        def several(stream: int) -> None:
            me.gather(0, stream)
            me.scatter(n - 1, stream)
            me.exchange([1] * n, [1] * n, stream)

        replay = me.captured(several)
        for number in range(8):
            if first:
                me.scatter(0, streams[number % 2])
                me.wait_for_all()
            else:  # it has arrived, but is not received yet
                me.wait_for_all()
                comm.synchronize()
                me.scatter(0, streams[number % 2])
            me.exchange([0] * (n - 1) + [2 * first], [2 * last] + [0] * (n - 1))
            comm.synchronize()  # graphs are ordered by their streams
            replay()
            comm.synchronize()
            me.right(2)
            comm.synchronize()
            comm.send(me.put(np.arange(3)), n - 1, stream=0) if first else None
            me.wait_for_all()
            comm.synchronize()
            comm.recv(me.put(np.zeros(3)), 0, stream=0) if last else None
        comm.send(me.one, n - 1, stream=0) if first else None  # never received, as on CPU memory
        comm.finalize()


def found_by_staging_thread(how: str) -> tuple[str, str]:
    """``finalize`` reports a multinode operation that failed without a later call."""
    with rank("AB", timeout=2.0 if how == "deadline" else 60.0) as me:
        x, said = me.put(np.ones(1000)), ""
        me.world.barrier("before")
        if how in ("mismatch", "told"):
            me.comm.all_reduce(x, op=RedOp.MAX if me.rank else RedOp.SUM, stream=0)
        elif me.rank == 0:
            me.comm.all_reduce(x, stream=0)
        if how == "aborted" and me.rank == 0:
            me.comm.abort("for a test")
        if how != "mismatch":
            me.cuda.cuCtxSynchronize()
        me.world.barrier("after")
        while how == "told" and not said:
            said = error_of(me.comm.synchronize)
        return error_of(me.comm.finalize), said
