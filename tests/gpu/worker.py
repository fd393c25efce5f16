"""One rank of the GPU tests: runs cases given as JSON and reports differences.

Every rank generates all inputs from a seed, computes the definition
(``schedule.interpret.expected``) on the CPU and compares its own result bit by bit. Run by
``tests.gpu.ranks``.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from typing import Any

import numpy as np

from miraccl.bootstrap.launch import detect_launch, join_launch
from miraccl.executor.cuda.choice import choose
from miraccl.executor.cuda.plan import DevicePlan
from miraccl.runtime.gpu.communicator import DeviceCommunicator
from miraccl.runtime.options import Options
from miraccl.schedule import catalog, passes
from miraccl.schedule.interpret import expected_outputs
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import Collective, DType, Operator, PreMulSum, RedOp

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def make_input(rank: int, count: int, dtype: DType, seed: int) -> Any:
    """Return random elements of a rank, some NaN, infinite or minus zero if the type has these."""
    kind = NUMPY_DTYPE[dtype]
    rng = np.random.default_rng((seed, rank))
    if not dtype.is_float:
        return rng.integers(
            -100 if dtype in (DType.INT8, DType.INT32, DType.INT64) else 0, 100, count
        ).astype(kind)
    values = (rng.standard_normal(count) * 4).astype(kind)
    if count > 64:
        values[rank::61] = np.array(-0.0).astype(kind)
    return values


def to_gpu(torch: Any, array: Any, dtype: DType, offset: int) -> Any:
    """Return a tensor with the bits of ``array``, ``offset`` elements into its allocation."""
    signed = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[dtype.itemsize]
    whole = torch.full(
        (array.size + offset,), 7, dtype=getattr(torch, np.dtype(signed).name), device="cuda"
    )
    whole[offset:] = torch.from_numpy(array.view(signed).copy()).cuda()
    return whole.view(torch_dtype(torch, dtype))[offset:]


def torch_dtype(torch: Any, dtype: DType) -> Any:
    return getattr(torch, {DType.FLOAT8_E4M3: "float8_e4m3fn"}.get(dtype, dtype.label))


def to_cpu(torch: Any, tensor: Any, dtype: DType) -> Any:
    signed = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}[dtype.itemsize]
    return tensor.view(getattr(torch, signed)).cpu().numpy().view(NUMPY_DTYPE[dtype])


class CaseRank:
    """Communicator with its case runner."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        launch = detect_launch(os.environ)
        self.ordinal = launch.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(self.ordinal)
        torch.zeros(1, device="cuda")
        self.session = join_launch(launch)
        self.comm = DeviceCommunicator(
            self.session,
            self.ordinal,
            Options.create(timeout=float(os.environ.get("TEST_TIMEOUT", "60"))),
        )

    def run(self, case: dict[str, Any]) -> str:
        comm, torch = self.comm, self.torch
        if "failure" in case:
            return self.fail(case["failure"])
        if case.get("communicator"):
            return self.through_communicator()
        if "scene" in case:
            scene: str = getattr(self, case["scene"])()
            return scene
        collective, dtype = Collective[case["collective"].upper()], DType[case["dtype"].upper()]
        op, count, root = RedOp[case.get("op", "SUM")], case["count"], case.get("root", 0)
        comm.planner.algo, comm.planner.proto = case.get("algo", ""), case.get("proto", "")
        comm._launches.clear()
        comm.planner.forget_user_plans()
        if "plan" in case:
            comm.use_plan(collective, dtype, count, DevicePlan(**case["plan"]), op)
        blocks = (
            comm.nranks if collective in (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL) else 1
        )
        inputs = [
            make_input(r, count * blocks, dtype, case.get("seed", 1)) for r in range(comm.nranks)
        ]
        whole = [
            i if collective is not Collective.BROADCAST or r == root else None
            for r, i in enumerate(inputs)
        ]
        scalars = [r + 2 if not dtype.is_float else 0.5 - r for r in range(comm.nranks)]
        want = expected_outputs(collective, whole, op=op, root=root, scalars=scalars)[comm.rank]
        x = to_gpu(torch, inputs[comm.rank], dtype, case.get("offset", 0))
        operator = PreMulSum(scalars[comm.rank]) if op is RedOp.PREMUL_SUM else op
        run = self.call(collective, x, dtype, operator, root, case, want)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = run()
            if case.get("graph"):
                stream.synchronize()
                x.copy_(to_gpu(torch, inputs[comm.rank], dtype, 0))
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    result = run()
                for _ in range(case["graph"]):
                    x.copy_(to_gpu(torch, inputs[comm.rank], dtype, 0))
                    graph.replay()
            for _ in range(case.get("repeat", 0)):
                if result is x:
                    x.copy_(to_gpu(torch, inputs[comm.rank], dtype, 0))
                result = run()
        stream.synchronize()
        comm.check()
        got = to_cpu(torch, result, dtype)
        if want is None:
            want = inputs[comm.rank]
        scale = None
        if case.get("close"):
            scale = (
                sum(np.abs(part.astype(np.float64)) for part in inputs)
                if collective.reduces
                else np.abs(want.astype(np.float64))
            )
            if collective is Collective.REDUCE_SCATTER:
                scale = scale[comm.rank * count : (comm.rank + 1) * count]
        return compare(got, want, dtype, scale)

    def fail(self, how: str) -> str:
        """Rank 0 calls alone; return the error of its wait. The communicator is unusable
        afterwards.
        """
        from miraccl.errors import CollectiveMismatch, CollectiveTimeout, CommunicatorAborted

        if how == "mismatch":
            try:
                for _ in range(3):
                    self.comm.all_reduce(self.torch.ones(1000 + self.comm.rank, device="cuda"))
                    self.comm.synchronize()
            except CollectiveMismatch as error:
                return (
                    ""
                    if error.peer != self.comm.rank and self.is_usable()
                    else f"unexpected: {error}"
                )
            return "different sizes were not noticed"
        if how.startswith("death"):
            return self.outlive(working=how == "death while it works")
        if how.startswith("copies stop"):
            return self.stop_before_copies(captured=how == "copies stop in a graph")
        answer = ""
        if self.comm.rank == 0:
            self.comm.all_reduce(self.torch.ones(1000, device="cuda"))
            if how == "abort":
                threading.Timer(0.2, self.comm.abort).start()
            try:
                self.comm.synchronize()
                answer = "the wait ended without an error"
            except CollectiveTimeout as error:
                answer = "" if how == "timeout" and error.peer == 1 else f"unexpected: {error}"
            except CommunicatorAborted as error:
                answer = "" if how == "abort" else f"unexpected: {error}"
        self.session.barrier("told")  # ranks that wait for a leaving rank get that error instead
        return answer

    def is_usable(self) -> bool:
        """Return True if the GPU still computes."""
        return float((self.torch.ones(10, device="cuda") * 2).sum()) == 20

    def outlive(self, working: bool) -> str:
        """Rank 1 is killed before or during an operation; rank 0 gets the error, its GPU works."""
        from miraccl.errors import PeerDied

        x, begin = self.torch.ones(4 << 20, device="cuda"), time.monotonic()
        try:
            for _ in range(300 if working else 0):
                self.comm.all_reduce(x)
            if self.comm.rank == 1:
                print("RESULT " + json.dumps([""]), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            self.comm.all_reduce(x)
            self.comm.synchronize()
        except PeerDied as error:
            waited = time.monotonic() - begin
            return (
                ""
                if error.peer == 1 and self.is_usable() and waited < 30
                else f"unexpected: {error} after {waited:.1f} s"
            )
        return "nobody was missed"

    def stop_before_copies(self, captured: bool) -> str:
        """All ranks pass the barrier of staged copies (MIRACCL_SMS=0); rank 1 stops there."""
        from miraccl.errors import CollectiveTimeout
        from miraccl.executor.cuda.staged_copies import StagedLaunch

        torch, comm = self.torch, self.comm
        x, out, stream = (
            torch.ones(1000, device="cuda"),
            torch.empty(1000 * comm.nranks, device="cuda"),
            torch.cuda.Stream(),
        )
        comm.all_gather(x, out)
        comm.synchronize()
        self.session.barrier("ready")

        def stands(*_: Any) -> None:
            while not comm.faults.broken:
                os.sched_yield()

        if comm.rank == 1:
            vars_of: Any = StagedLaunch
            vars_of._enqueue = stands
        else:
            comm.faults._timeout = 2.0  # its deadline is the first
        begin = time.monotonic()
        try:
            if captured and comm.rank == 0:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    comm.all_gather(x, out)
                graph.replay()
            else:
                comm.all_gather(x, out)
            comm.synchronize()
            answer = "the wait ended without an error"
        except CollectiveTimeout as error:
            waited = time.monotonic() - begin
            whom = (
                "between ranks" if captured else "from rank 1"
            )  # copies in graphs are not counted
            told = comm.rank == 1 or whom in str(error)
            answer = (
                ""
                if told and self.is_usable() and waited < 20
                else f"unexpected: {error} after {waited:.1f} s"
            )
        self.session.barrier("told")
        return answer

    def through_communicator(self) -> str:
        """``Communicator`` dispatches tensors to the GPU side and arrays to the CPU side."""
        from miraccl.api.communicator import Communicator

        torch, session = self.torch, self.session.subgroup(range(self.session.nranks), "public")
        comm = Communicator.from_session(session, Options.create(timeout=60))
        x = torch.full((1000,), float(comm.rank + 1), device="cuda")
        array = np.full(1000, float(comm.rank + 1), np.float32)
        same = comm.all_reduce(x) is x
        comm.all_reduce(array)
        gathered = comm.all_gather(x[:5])
        total = comm.nranks * (comm.nranks + 1) / 2
        right = (
            bool((x == total).all())
            and bool((array == total).all())
            and gathered.numel() == 5 * comm.nranks
            and same
        )
        begin = time.perf_counter()
        for _ in range(200):
            comm.all_reduce(x)
        self.host_us = (time.perf_counter() - begin) / 200 * 1e6
        torch.cuda.synchronize()
        comm.finalize()
        return "" if right else "wrong result"

    def streams(self) -> str:
        """Calls alternating between two streams are ordered without the caller's help."""
        torch, comm = self.torch, self.comm
        a, b = torch.cuda.Stream(), torch.cuda.Stream()
        x = torch.ones(3 << 20, device="cuda")
        torch.cuda.synchronize()
        for turn in range(6):
            if comm.rank == turn % comm.nranks:
                with torch.cuda.stream(a):
                    torch.cuda._sleep(2_000_000)
            comm.all_reduce(x, stream=a)
            comm.all_reduce(x, stream=b)
            x.record_stream(a)
            with torch.cuda.stream(b):
                x.div_(comm.nranks**2)
            a.wait_stream(b)
        comm.synchronize()
        return "" if bool((x == 1).all()) else f"{x[:4]} instead of ones"

    def communicators(self) -> str:
        """Two communicators whose kernels use the whole GPU, started in different orders unless
        prevented.
        """
        torch, first = self.torch, self.comm
        second = DeviceCommunicator(
            self.session.subgroup(range(first.nranks), "second"),
            self.ordinal,
            Options.create(timeout=30),
        )
        a, b = torch.cuda.Stream(), torch.cuda.Stream()
        x, y = torch.ones(8 << 20, device="cuda"), torch.full((8 << 20,), 2.0, device="cuda")
        torch.cuda.synchronize()
        for turn in range(8):
            with torch.cuda.stream(a if (first.rank + turn) % 2 else b):
                torch.cuda._sleep(3_000_000)
            first.all_reduce(x, op=RedOp.AVG, stream=a)
            second.all_reduce(y, op=RedOp.AVG, stream=b)
        first.synchronize()
        second.synchronize()
        second.close()
        return "" if bool((x == 1).all()) and bool((y == 2).all()) else "wrong averages"

    def windows(self) -> str:
        """Copy engines write to windows, in streams and graphs; other operations use windows as
        memory.
        """
        torch, comm = self.torch, self.comm
        count = (48 << 20) // 4 // max(1, comm.nranks - 1) + 5
        whole = comm.empty(count * comm.nranks, torch.float32)
        share = torch.arange(count, device="cuda", dtype=torch.float32) + comm.rank
        comm.all_gather(share, whole)
        comm.synchronize()
        if comm.last_plan is None or comm.last_plan.proto != "copy":
            return f"not done by copy engines: {comm.last_plan}"
        want = torch.cat(
            [
                torch.arange(count, device="cuda", dtype=torch.float32) + r
                for r in range(comm.nranks)
            ]
        )
        if not bool((whole == want).all()):
            return "all_gather is wrong"
        whole.zero_()
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            comm.all_gather(share, whole)
        for _ in range(3):
            whole.zero_()
            torch.cuda.synchronize()
            self.session.barrier("zeroed")
            graph.replay()
            torch.cuda.synchronize()
            if not bool((whole == want).all()):
                return "all_gather in a graph is wrong"
            self.session.barrier("seen")
        exchanged = comm.empty((comm.nranks, count), "float32").torch().view(-1)
        comm.all_to_all(want, exchanged)
        comm.synchronize()
        mine = torch.arange(count, device="cuda", dtype=torch.float32) + comm.rank
        if not bool((exchanged.view(comm.nranks, count) == mine).all()):
            return "all_to_all is wrong"
        comm.all_reduce(whole)
        comm.synchronize()
        return "" if bool((whole == want * comm.nranks).all()) else "all_reduce is wrong"

    def one_sided(self) -> str:
        """Peers read and write windows, in streams and graphs, large and small, with scratch
        memory.
        """
        torch, comm = self.torch, self.comm
        for count in (5, 100_003, 3_000_000):
            x, y = comm.empty(count, torch.float32), comm.empty(count, torch.float32)
            request = comm.request(Collective.ALL_REDUCE, DType.FLOAT32, count)
            comm.use_plan(
                Collective.ALL_REDUCE,
                DType.FLOAT32,
                count,
                choose(replace(request, algo="two_shot_put", proto="simple")),
            )
            want = (torch.arange(count, device="cuda") % 1000 + 1).float() * sum(
                r + 1 for r in range(comm.nranks)
            )
            x.copy_((torch.arange(count, device="cuda") % 1000 + 1).float() * (comm.rank + 1))
            torch.cuda.synchronize()
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with torch.cuda.stream(stream):
                comm.all_reduce(x, y)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                comm.all_reduce(x, y)
            for run in (
                functools.partial(comm.all_reduce, x, y, stream=stream),
                graph.replay,
                graph.replay,
            ):
                y.zero_()
                torch.cuda.synchronize()
                self.session.barrier("zeroed")
                run()
                torch.cuda.synchronize()
                if not bool((y == want).all()):
                    return f"two_shot_put of {count} elements is wrong"
            if comm.last_plan is None or comm.last_plan.algo != "two_shot_put":
                return f"done by {comm.last_plan}"
            request = comm.request(Collective.ALL_GATHER, DType.FLOAT32, count)
            comm.use_plan(
                Collective.ALL_GATHER,
                DType.FLOAT32,
                count,
                choose(replace(request, algo="pat", proto="simple")),
            )
            whole = torch.empty(count * comm.nranks, device="cuda")
            for _ in range(3):
                whole.zero_()
                comm.all_gather(x.clone(), whole)
                ramp = (torch.arange(count, device="cuda") % 1000 + 1).float()
                if not bool(
                    (
                        whole.view(comm.nranks, count)
                        == torch.stack([ramp * (r + 1) for r in range(comm.nranks)])
                    ).all()
                ):
                    return f"pat of {count} elements is wrong"
        return self.many_steps()

    def many_steps(self) -> str:
        """A schedule on 16 channels with more steps than 4 KiB of arguments hold."""
        torch, comm = self.torch, self.comm
        ring = catalog.build("ring", Collective.ALL_REDUCE, comm.nranks)
        schedule = replace(passes.pipeline(passes.split_channels(ring, 16), 4), name="many_steps")
        catalog.register_schedule(schedule)
        try:
            for count in (1000, 5_000_000):
                request = comm.request(Collective.ALL_REDUCE, DType.FLOAT32, count)
                comm.use_plan(
                    Collective.ALL_REDUCE,
                    DType.FLOAT32,
                    count,
                    choose(replace(request, algo=schedule.name, proto="simple")),
                )
                x = torch.full((count,), float(comm.rank + 1), device="cuda")
                comm.all_reduce(x)
                if not bool((x == sum(r + 1 for r in range(comm.nranks))).all()):
                    return f"{count} elements on many channels are wrong"
        finally:
            catalog.unregister(schedule.name)
        return ""

    def call(
        self,
        collective: Collective,
        x: Any,
        dtype: DType,
        op: Operator,
        root: int,
        case: dict[str, Any],
        want: Any,
    ) -> Any:
        comm, torch = self.comm, self.torch
        out = None
        if (
            not case.get("in_place")
            and collective is not Collective.BROADCAST
            and not (collective is Collective.REDUCE and want is None)
        ):
            out = to_gpu(
                torch, np.zeros(want.size, NUMPY_DTYPE[dtype]), dtype, case.get("out_offset", 0)
            )
        match collective:
            case Collective.ALL_REDUCE:
                return lambda: comm.all_reduce(x, out, op)
            case Collective.REDUCE_SCATTER:
                return lambda: comm.reduce_scatter(x, out, op)
            case Collective.ALL_GATHER:
                return lambda: comm.all_gather(x, out)
            case Collective.ALL_TO_ALL:
                return lambda: comm.all_to_all(x, out)
            case Collective.BROADCAST:
                return lambda: comm.broadcast(x, root)
            case Collective.REDUCE:
                return lambda: comm.reduce(x, root, out, op)
        raise ValueError(collective)


def compare(got: Any, want: Any, dtype: DType, scale: Any) -> str:
    """Return the differences: bits (NaNs are equal), or with ``scale`` more than rounding at every
    hop.
    """
    if got.size != want.size:
        return f"{got.size} elements instead of {want.size}"
    bits = _BITS[dtype.itemsize]
    wrong = got.view(bits) != want.view(bits)
    if dtype.is_float:
        with np.errstate(invalid="ignore"):
            a, b = got.astype(np.float64), want.astype(np.float64)
            wrong &= ~(np.isnan(a) & np.isnan(b))
            if scale is not None:
                unit = {1: 2.0**-2, 2: 2.0**-8, 4: 2.0**-23, 8: 2.0**-52}[dtype.itemsize]
                wrong &= ~(np.abs(a - b) <= 4 * unit * scale)
    if not wrong.any():
        return ""
    first = int(np.flatnonzero(wrong)[0])
    return (
        f"{int(wrong.sum())} of {wrong.size} wrong, the first at {first}: "
        f"{got[first]!r} instead of {want[first]!r}"
    )


def main() -> None:
    cases = json.loads(sys.stdin.read())
    rank, answers = CaseRank(), []
    for case in cases:
        try:
            answers.append(rank.run(case))
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
            if rank.comm._host[0]:  # broken: nothing after it can run
                answers += ["not run"] * (len(cases) - len(answers))
                break
    if hasattr(rank, "host_us"):
        print(f"host time of Communicator.all_reduce: {rank.host_us:.2f} us", file=sys.stderr)
    rank.comm.close()
    rank.session.close()
    print("RESULT " + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
