"""Ranks of several nodes whose adapters access GPU memory: threads of one process.

The adapters are simulated, one per rank, and so is the GPU driver. CPU communicators have a fabric
in memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from miraccl import Communicator
from miraccl.bootstrap.memory import InMemoryJob
from miraccl.errors import MiracclError
from miraccl.native import verbs_abi
from miraccl.runtime.gpu.operations import DeviceTransfer
from miraccl.runtime.memory_fabric import MemoryFabric
from miraccl.runtime.multinode import communicator as several
from miraccl.runtime.multinode import runtime
from miraccl.runtime.multinode.communicator import MultiNodeCommunicator
from miraccl.runtime.options import Options
from miraccl.sim.verbs import SimulatedVerbs
from miraccl.transport import verbs_ports
from miraccl.types import Collective, DType
from tests.bootstrap.kit import in_threads
from tests.gpu.fake_cuda import CpuKernels, FakeCuda, Result, place, seen

Work = Callable[[MultiNodeCommunicator, FakeCuda], Any]
BIG = 50_001  # float32: several messages of the smallest slots


def run(hosts: str, work: Work, prepare: Callable[[int, FakeCuda, SimulatedVerbs], None]) -> Any:
    """Return what ``work`` returns on rank 0. ``prepare(rank, driver, adapters)`` runs before."""
    cuda = FakeCuda().install()
    vars(several)["DeviceCommunicator"] = CpuKernels
    verbs = SimulatedVerbs([f"adapter{rank}" for rank in range(len(hosts))], flush=True)

    def begin(rank: int) -> None:
        cuda.home = rank
        cuda.set_current(rank)
        prepare(rank, cuda, verbs)

    result = in_job(hosts, verbs, lambda comm: work(comm, cuda), begin, lambda rank: rank)
    assert not cuda.live, "GPU memory that nobody has freed"
    return result


def in_job(
    hosts: str,
    verbs: SimulatedVerbs,
    work: Callable[[MultiNodeCommunicator], Any],
    begin: Callable[[int], None],
    ordinal: Callable[[int], int],
) -> Any:
    """Run ``work`` on all ranks with their adapters; return the result of rank 0.

    ``begin(rank)`` runs before; ``ordinal(rank)``: GPU of a rank.
    """
    os.environ.update(MIRACCL_GPU_STAGING="64K", MIRACCL_NET_FORCE_FLUSH="1")
    os.environ.setdefault("MIRACCL_NET_GDR_LEVEL", "SYS")
    own = threading.local()
    vars(verbs_abi)["load_library"] = lambda: verbs.library
    vars(verbs_ports)["usable_ports"] = lambda: verbs.ports(f"adapter{own.rank}")
    vars(runtime)["gpu_direct_possible"] = lambda core: True
    options = Options.create(timeout=30.0)
    names = [f"host {letter}" for letter in hosts]

    def rank(session: Any) -> Any:
        own.rank = session.rank
        begin(session.rank)
        comm = MultiNodeCommunicator(
            session,
            ordinal(session.rank),
            names,
            options,
            open_cpu=lambda sub, stages: Communicator.from_session(
                sub, options, setup=stages, open_fabric=MemoryFabric
            ),
        )
        try:
            result = work(comm)
            if not comm.closed:
                comm.synchronize()
            return result
        finally:
            comm.close()

    with InMemoryJob(len(hosts), hosts=names) as job:
        results = in_threads([lambda s=s: rank(s) for s in job.sessions])
    verbs.close()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results[0]


def operations(hosts: str) -> dict[tuple[str, int], str]:
    """Run operations that move data, twice and as graphs; return the algorithm by (name, count)."""
    found: dict[tuple[str, int], str] = run(hosts, _operations, lambda *_: None)
    return found


def _operations(comm: MultiNodeCommunicator, cuda: FakeCuda) -> dict[tuple[str, int], str]:
    n, r, used = comm.nranks, comm.rank, dict[tuple[str, int], str]()

    def check(name: str, got: Any, want: np.ndarray) -> None:
        comm.synchronize()
        assert np.array_equal(seen(got), want), name
        used[name, count] = comm.last_plan.algo if comm.last_plan else ""

    def numbers(rank: int, count: int) -> np.ndarray:
        return np.arange(count, dtype=np.float32) + 1000 * rank

    memory = []

    def put(array: np.ndarray) -> Any:
        memory.append(place(cuda, array))
        return memory[-1]

    for count in (1, 17, BIG):
        each, total = [count + rank for rank in range(n)], n * count
        x, y = put(numbers(r, count)), put(np.zeros(count, np.float32))
        rows, every = put(numbers(r, total)), put(np.zeros(total, np.float32))
        own, uneven = put(numbers(r, each[r])), put(np.zeros(sum(each), np.float32))
        gathered = np.concatenate([numbers(rank, count) for rank in range(n)])
        many = np.concatenate([numbers(rank, each[rank]) for rank in range(n)])
        blocks = [numbers(rank, total).reshape(n, count) for rank in range(n)]
        for again in range(3):  # the last times as a graph
            for target in (y, every, uneven):
                seen(target)[:] = -1
            peers = (r + n // 2) % n, (r - n // 2) % n
            transfers = [DeviceTransfer(False, peers[0], x), DeviceTransfer(True, peers[1], y)]
            comm.exchange(transfers, name="send/recv")
            check("send/recv", y, numbers(peers[1], count))
            comm.all_to_all(rows, every)
            check("all_to_all", every, np.concatenate([b[r] for b in blocks]))
            comm.all_gather(x, every)
            check("all_gather", every, gathered)
            comm.all_gather_v(own, each, uneven)
            check("all_gather_v", uneven, many)
            root = again % n
            seen(y)[:] = numbers(r, count)
            comm.broadcast(y, root)
            check("broadcast", y, numbers(root, count))
            comm.gather(x, root, every if r == root else None)
            check("gather", every, gathered)
            comm.scatter(rows if r == root else None, root, y)
            check("scatter", y, blocks[root][r])
            comm.gather_v(own, each, root, uneven if r == root else None)
            check("gather_v", uneven, many)
            comm.scatter_v(uneven if r == root else None, each, root, own)
            check("scatter_v", own, numbers(r, each[r]))
            comm.all_to_all_v(rows, [count] * n, [count] * n, every)
            check("all_to_all_v", every, np.concatenate([b[r] for b in blocks]))
            comm.all_reduce(x, y)
            check("all_reduce", y, np.sum([numbers(rank, count) for rank in range(n)], 0))
    explained = comm.explain(Collective.ALL_TO_ALL, 1 << 20, DType.FLOAT32)[0]
    assert explained.algo == used["all_to_all", BIG] == "direct"
    explained = comm.explain(Collective.ALL_TO_ALL, 1000, DType.FLOAT32)[0]
    assert explained.algo == used["all_to_all", 17] != "direct"
    paths = [reason for _, kind, reason in comm.connections() if kind == "verbs"]
    assert all("RDMA from and to GPU memory (dma-buf, flush: read)" in path for path in paths)
    assert paths
    assert comm.memory()["device"] >= 4 * (64 << 10)
    for each_memory in memory:
        cuda.cuMemFree(each_memory.address)
    return used


def export_other_memory(cuda: FakeCuda, rank: int, nbytes: int) -> None:
    """Let the driver of a rank export memory that is not its own, of ``nbytes``."""
    export = cuda.cuMemGetHandleForAddressRange

    def other(*args: Any) -> Any:
        if cuda.home != rank:
            return export(*args)
        fd = os.memfd_create("other")
        os.ftruncate(fd, nbytes)
        return Result.CUDA_SUCCESS, fd

    vars(cuda)["cuMemGetHandleForAddressRange"] = other


def refused(case: str) -> str:
    """Return why GPU memory is not accessed if one rank of two cannot."""

    def prepare(rank: int, cuda: FakeCuda, verbs: SimulatedVerbs) -> None:
        if case == "far":
            os.environ.pop("MIRACCL_NET_GDR_LEVEL", None)
        elif rank == 1:
            export_other_memory(cuda, rank, {"unreadable": 1 << 30, "register": 4096}[case])

    def work(comm: MultiNodeCommunicator, cuda: FakeCuda) -> str:
        x, y = (
            place(cuda, np.full(100, comm.rank, np.float32)),
            place(cuda, np.zeros(100, np.float32)),
        )
        comm.exchange(
            [DeviceTransfer(False, 1 - comm.rank, x), DeviceTransfer(True, 1 - comm.rank, y)]
        )
        comm.synchronize()
        assert np.array_equal(seen(y), np.full(100, 1 - comm.rank))
        assert comm.last_plan is not None
        assert comm.last_plan.algo == "staged"
        for memory in (x, y):
            cuda.cuMemFree(memory.address)
        return comm.runtime.gpu_direct_reason

    return str(run("AB", work, prepare))


def exits(hosts: str) -> str:
    """The last rank sends to the first and closes; return the error of the next message."""
    vars(several)["CLOSE_WAIT_S"] = 1.0  # for the first rank, which has a fault and does not answer

    def work(comm: MultiNodeCommunicator, cuda: FakeCuda) -> str:
        last, text = comm.nranks - 1, ""
        x = place(cuda, np.full(BIG, comm.rank, np.float32))
        y = place(cuda, np.zeros(BIG, np.float32))
        try:
            if comm.rank == last:
                comm.exchange([DeviceTransfer(False, 0, x)])
            elif comm.rank == 0:
                comm.exchange([DeviceTransfer(True, last, y)])
                comm.synchronize()
                assert np.array_equal(seen(y), np.full(BIG, last))
                comm.exchange([DeviceTransfer(True, last, y)])
                comm.synchronize()
        except MiracclError as error:
            text = f"{type(error).__name__}: {error}"
        comm.close()
        for memory in (x, y):
            cuda.cuMemFree(memory.address)
        return text

    return str(run(hosts, work, lambda *_: None))
