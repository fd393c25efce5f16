"""One rank of ``test_transports``: cases of ``worker`` over given connections, and several hosts.

The first case sets up the communicator: {"kinds": [...]} of connections, or {"hosts": "AABB"}.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from miraccl import PreMulSum
from miraccl.api.communicator import Communicator
from miraccl.bootstrap import Session
from miraccl.bootstrap.launch import detect_launch, join_launch
from miraccl.errors import CollectiveTimeout, CommunicatorAborted, MiracclError, PeerDied
from miraccl.executor.cuda.gpu import Gpu
from miraccl.runtime.gpu.communicator import DeviceCommunicator
from miraccl.runtime.multinode.communicator import MultiNodeCommunicator, make_device_communicator
from miraccl.runtime.options import Options
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.schedule.interpret import expected_outputs
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.transport.cuda_p2p import SymmetricMemory
from miraccl.transport.cuda_pairs import P2pSettings
from miraccl.types import Collective, DType, RedOp
from tests.gpu import worker
from tests.gpu.thread_rendezvous import ThreadRendezvous
from tests.gpu.worker import compare, make_input, to_cpu, to_gpu, torch_dtype

TIMEOUT = float(os.environ.get("TEST_TIMEOUT", "60"))


class OneHost(worker.CaseRank):
    """Cases of ``worker``, and queries about the connections."""

    def run(self, case: dict[str, Any]) -> str:
        if "kinds" in case:
            got = [
                kind
                for rank, kind in enumerate(self.comm.symmetric.kinds)
                if rank != self.comm.rank
            ]
            return (
                ""
                if set(got) == set(case["kinds"])
                else f"the ways are {self.comm.symmetric.explain()}"
            )
        if "window" in case:
            return self.window(case["window"])
        return super().run(case)

    def window(self, nbytes: int) -> str:
        """Further allocations are visible to all ranks; two, so the second has other addresses."""
        memory, torch = self.comm.symmetric, self.torch
        first, second = (memory.window(nbytes, SetupPhases(self.session)) for _ in range(2))
        if not second.addressable:
            first.close()
            second.close()
            return (
                "" if self.comm.symmetric.kinds.count("host") else "the window is not addressable"
            )
        stream = torch.cuda.current_stream().cuda_stream
        mine = torch.full((4,), self.comm.rank + 1, dtype=torch.int32, device="cuda")
        for address in second.addresses:
            self.comm.gpu.copy(address + 16 * self.comm.rank, mine.data_ptr(), 16, stream)
        torch.cuda.synchronize()
        self.session.barrier("window written")
        got = torch.empty(4 * self.comm.nranks, dtype=torch.int32, device="cuda")
        self.comm.gpu.copy(got.data_ptr(), second.own, 16 * self.comm.nranks, stream)
        want = torch.arange(
            1, self.comm.nranks + 1, dtype=torch.int32, device="cuda"
        ).repeat_interleave(4)
        wrong = "" if torch.equal(got, want) else f"got {got.tolist()}"
        torch.cuda.synchronize()
        self.session.barrier("window read")
        second.close()
        first.close()
        return wrong


class Threads:
    """Two ranks as threads of one process, with symmetric memory by plain pointers."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.session = join_launch(detect_launch(os.environ))
        self.comm: Any = None

    def run(self, case: dict[str, Any]) -> str:
        if "threads" not in case or self.session.rank != 0:
            return ""
        torch, n = self.torch, 2
        room, found = ThreadRendezvous(n), [""] * n

        def run(rank: int) -> None:
            try:
                ordinal = rank % torch.cuda.device_count()
                torch.cuda.set_device(ordinal)
                torch.zeros(1, device="cuda")
                gpu, stages = Gpu(ordinal), room.stages(rank)
                memory = SymmetricMemory(
                    gpu, rank, n, 1 << 20, ((4096, 4096, 7),), stages=stages, settings=P2pSettings()
                )
                mine = torch.full((16,), rank + 1, dtype=torch.int32, device="cuda")
                gpu.copy(memory.outboxes[1 - rank], mine.data_ptr(), 64, 0)
                torch.cuda.synchronize()
                stages.gather("written")
                got = torch.empty(2048, dtype=torch.int32, device="cuda")
                gpu.copy(got.data_ptr(), memory.inboxes[1 - rank], 8192, 0)
                right = (
                    bool((got[:16] == 2 - rank).all())
                    and bool((got[16:1024] == 0).all())
                    and bool((got[1024:] == 7).all())
                )
                found[rank] = (
                    ""
                    if right and memory.kinds[1 - rank] == "process"
                    else f"{memory.explain()} {got[:20].tolist()}"
                )
                stages.gather("read")
                memory.close()
            except Exception:
                found[rank] = traceback.format_exc()
                room.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return "".join(found)


def open_cpu(session: Session, stages: SetupPhases) -> Communicator:
    return Communicator.from_session(session, Options.create(timeout=TIMEOUT), setup=stages)


class ManyHosts:
    """Operations of the multinode communicator, on small integers with exact sums."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        launch = detect_launch(os.environ)
        self.ordinal = launch.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(self.ordinal)
        torch.zeros(1, device="cuda")
        self.session = join_launch(launch)
        comm = make_device_communicator(
            self.session, self.ordinal, Options.create(timeout=TIMEOUT), open_cpu=open_cpu
        )
        assert isinstance(comm, MultiNodeCommunicator)
        self.comm = comm

    def run(self, case: dict[str, Any]) -> str:
        if "hosts" in case:
            names = "".join(
                chr(ord("A") + next(h for h, ranks in enumerate(self.comm.nodes) if r in ranks))
                for r in range(self.comm.nranks)
            )
            return "" if names == case["hosts"] else f"the hosts are {self.comm.nodes}"
        if "failure" in case:
            return self.fail(case["failure"])
        if case.get("communicator"):
            return self.through_communicator()
        if case.get("transfers"):
            return self.transfers(case["transfers"])
        return self.collective(case)

    def input(self, rank: int, count: int, dtype: DType, reduces: bool) -> Any:
        if not reduces:
            return make_input(rank, count, dtype, 1)
        return np.random.default_rng((3, rank)).integers(0, 4, count).astype(NUMPY_DTYPE[dtype])

    def collective(self, case: dict[str, Any]) -> str:
        comm, torch = self.comm, self.torch
        collective, dtype = Collective[case["collective"].upper()], DType[case["dtype"].upper()]
        op, count, root = RedOp[case.get("op", "SUM")], case["count"], case.get("root", 0)
        blocks = (
            comm.nranks
            if collective in (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL, Collective.SCATTER)
            else 1
        )
        inputs = [
            self.input(r, count * blocks, dtype, collective.reduces) for r in range(comm.nranks)
        ]
        want = expected_outputs(collective, list(inputs), op=op, root=root)[comm.rank]
        x = to_gpu(torch, inputs[comm.rank], dtype, case.get("offset", 0))
        out = (
            None
            if want is None or case.get("in_place")
            else to_gpu(torch, np.zeros(want.size, NUMPY_DTYPE[dtype]), dtype, 0)
        )
        run = self.call(collective, x, out, op, root)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = run()
            if case.get("graph"):
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    result = run()
                for _ in range(case["graph"]):
                    x.copy_(to_gpu(torch, inputs[comm.rank], dtype, 0))
                    graph.replay()
            for _ in range(case.get("repeat", 0)):
                x.copy_(to_gpu(torch, inputs[comm.rank], dtype, 0))
                result = run()
        stream.synchronize()
        comm.check()
        if "algo" in case and (comm.last_plan is None or comm.last_plan.algo != case["algo"]):
            return f"the plan is {comm.last_plan}"
        return (
            ""
            if want is None or result is None
            else compare(to_cpu(torch, result, dtype), want, dtype, None)
        )

    def call(
        self, collective: Collective, x: Any, out: Any, op: RedOp, root: int
    ) -> Callable[[], Any]:
        comm = self.comm
        return {
            Collective.ALL_REDUCE: lambda: comm.all_reduce(x, out, op),
            Collective.REDUCE_SCATTER: lambda: comm.reduce_scatter(x, out, op),
            Collective.ALL_GATHER: lambda: comm.all_gather(x, out),
            Collective.ALL_TO_ALL: lambda: comm.all_to_all(x, out),
            Collective.BROADCAST: lambda: comm.broadcast(x, root),
            Collective.REDUCE: lambda: comm.reduce(x, root, out, op),
            Collective.GATHER: lambda: comm.gather(x, root, out),
            Collective.SCATTER: lambda: comm.scatter(x, root, out),
        }[collective]

    def transfers(self, count: int) -> str:
        """Messages around the ring and back, uneven collectives, CPU-only operators."""
        comm, torch = self.comm, self.torch
        n, r = comm.nranks, comm.rank
        x = torch.arange(count, device="cuda", dtype=torch.float32) + r
        out = torch.zeros_like(x)
        comm.sendrecv(x, (r + 1) % n, out, (r - 1) % n)
        torch.cuda.synchronize()
        if not torch.equal(
            out, torch.arange(count, device="cuda", dtype=torch.float32) + (r - 1) % n
        ):
            return "sendrecv"
        counts = [count // (i + 1) for i in range(n)]
        gathered = comm.all_gather_v(x[: counts[r]], counts)
        scaled = comm.all_reduce(torch.ones(count, device="cuda"), None, PreMulSum(r + 1.0))
        averaged = comm.all_reduce(
            torch.full((7,), 4 * r, device="cuda", dtype=torch.int32), None, RedOp.AVG
        )
        comm.barrier()
        torch.cuda.synchronize()
        comm.check()
        want = torch.cat(
            [torch.arange(c, device="cuda", dtype=torch.float32) + i for i, c in enumerate(counts)]
        )
        right = (
            torch.equal(gathered, want)
            and bool((scaled == n * (n + 1) / 2).all())
            and bool((averaged == 2 * (n - 1)).all())
        )
        return "" if right else "all_gather_v, PreMulSum or average"

    def through_communicator(self) -> str:
        torch, session = self.torch, self.session.subgroup(range(self.session.nranks), "public")
        comm = Communicator.from_session(session, Options.create(timeout=TIMEOUT))
        x = torch.full(
            (100_000,),
            float(comm.rank + 1),
            device="cuda",
            dtype=torch_dtype(torch, DType.BFLOAT16),
        )
        cpu = np.full(1000, float(comm.rank + 1), np.float32)
        comm.all_reduce(x)
        comm.all_reduce(cpu)
        total = comm.nranks * (comm.nranks + 1) / 2
        torch.cuda.synchronize()
        right = bool((x == total).all()) and bool((cpu == total).all())
        comm.finalize()
        return "" if right else "wrong result"

    def fail(self, how: str) -> str:
        """Return the error that ends a waiting stream; the GPU stays usable."""
        comm, torch = self.comm, self.torch
        kinds: dict[str, type[MiracclError]] = {
            "timeout": CollectiveTimeout,
            "abort": CommunicatorAborted,
            "death": PeerDied,
        }
        x = torch.ones(1 << 20, device="cuda")
        if how == "death" and comm.rank == comm.nranks - 1:
            print("RESULT " + json.dumps([""] * int(os.environ["TEST_CASES"])), flush=True)
            os._exit(0)
        if comm.rank == 0 or how == "death":
            comm.all_reduce(x)
            if how == "abort":
                threading.Timer(0.2, comm.abort).start()
        torch.cuda.synchronize()
        told = threading.Event()
        for _ in range(2000):
            try:
                comm.check()
            except kinds[how]:
                return (
                    ""
                    if float(torch.ones(5, device="cuda").sum()) == 5
                    else "the GPU is not usable"
                )
            except MiracclError as error:
                return f"unexpected: {error}"
            told.wait(0.005)
        return "no error"


def main() -> None:
    cases = json.loads(sys.stdin.read())
    os.environ["TEST_CASES"] = str(len(cases))
    if "hosts" in cases[0]:
        os.environ["MIRACCL_HOSTID"] = f"host {cases[0]['hosts'][int(os.environ['RANK'])]}"
        rank: Any = ManyHosts()
    else:
        rank = Threads() if "threads" in cases[0] else OneHost()
    answers: list[str] = []
    for case in cases:
        try:
            answers.append(rank.run(case))
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
            if broken(rank.comm):
                answers += ["not run"] * (len(cases) - len(answers))
                break
    if rank.comm is not None:
        rank.comm.close()
    rank.session.close()
    print("RESULT " + json.dumps(answers), flush=True)


def broken(comm: DeviceCommunicator | MultiNodeCommunicator | None) -> bool:
    try:
        if comm is not None:
            comm.check()
    except MiracclError:
        return True
    return False


if __name__ == "__main__":
    main()
