"""One rank of the GPU tests of messages: runs cases by name and reports differences
(``tests.gpu.ranks``).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from typing import Any

import numpy as np

import miraccl
from miraccl.api.communicator import Communicator
from miraccl.bootstrap.launch import detect_launch, join_launch
from miraccl.errors import CollectiveMismatch, CollectiveTimeout, CommunicatorAborted, MiracclError
from miraccl.runtime.gpu.work import DeviceWork
from miraccl.runtime.options import Options

SIZES = (0, 1, 15, 16, 17, 448, 449, 1792, 1793, 1984, 3776, 5000, 100_003, 3_000_001, 40_000_007)
UNLIKE = (
    "roots of scatter",
    "roots of gather",
    "gather and all_reduce",
    "gather and send",
    "recv and all_reduce",
    "recv and broadcast",
    "circle of recv",
    "circle of send",
    "circle of large sends",
)
BROKEN = ("mismatch", "timeout", "abort", *UNLIKE)


class OnlyDlpack:
    """Tensor that offers only DLPack."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.streams: list[int] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self.tensor.__dlpack_device__()
        return int(kind), int(number)

    def __dlpack__(self, *, stream: int, **more: Any) -> Any:
        capsule = self.tensor.__dlpack__(stream=stream, **more)
        self.streams.append(stream)
        return capsule


class MessageRank:
    """Communicator with its cases."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        launch = detect_launch(os.environ)
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
        torch.zeros(1, device="cuda")
        self.session = join_launch(launch)
        self.timeout = float(os.environ.get("TEST_TIMEOUT", "60"))
        self.comm = Communicator.from_session(self.session, Options.create(timeout=self.timeout))
        self.rank, self.nranks = self.comm.rank, self.comm.nranks
        self.right, self.left = (self.rank + 1) % self.nranks, (self.rank - 1) % self.nranks
        self.comm.barrier(stream=torch.cuda.current_stream())

    @property
    def device(self) -> Any:
        assert self.comm._device is not None
        return self.comm._device

    def bytes_of(self, rank: int, nbytes: int, seed: int = 0, offset: int = 0) -> Any:
        """Return bytes determined by rank and seed, ``offset`` bytes into their allocation."""
        torch = self.torch
        generator = torch.Generator(device="cuda").manual_seed(1000 * seed + rank)
        whole = torch.zeros(nbytes + offset, dtype=torch.uint8, device="cuda")
        whole[offset:] = torch.randint(
            0, 256, (nbytes,), dtype=torch.uint8, device="cuda", generator=generator
        )
        return whole[offset:]

    def zeros(self, nbytes: int, offset: int = 0) -> Any:
        return self.torch.full((nbytes + offset,), 0x5A, dtype=self.torch.uint8, device="cuda")[
            offset:
        ]

    def same(self, got: Any, want: Any, what: str) -> None:
        self.device.check()
        wrong = int((got != want).sum()) if got.numel() == want.numel() else -1
        assert wrong == 0, f"{what}: {wrong} of {want.numel()} bytes are wrong"

    # ---- cases

    def sizes(self) -> None:
        """sendrecv around a ring for every size and several alignments."""
        for size in SIZES:
            for offset, out_offset in (
                ((0, 0), (1, 0), (2, 4), (8, 3)) if size < 1_000_000 else ((0, 0), (8, 4))
            ):
                x, out = self.bytes_of(self.rank, size, size, offset), self.zeros(size, out_offset)
                self.comm.sendrecv(x, self.right, out, self.left)
                self.same(
                    out,
                    self.bytes_of(self.left, size, size),
                    f"{size} bytes at {offset} and {out_offset}",
                )

    def all_pairs(self) -> None:
        """All pairs at once in one launch, sends first; repeated, so row FIFOs wrap around."""
        n = self.nranks
        for size in (1, 10_000, 2_000_003):
            for seed in range(3):
                xs = [self.bytes_of(self.rank * n + r, size + r, seed) for r in range(n)]
                outs = [self.zeros(size + self.rank) for _ in range(n)]
                with miraccl.group():
                    for r in range(n):
                        self.comm.send(xs[r], r)
                    for r in range(n):
                        self.comm.recv(outs[r], r)
                for r in range(n):
                    self.same(
                        outs[r],
                        self.bytes_of(r * n + self.rank, size + self.rank, seed),
                        f"{size} bytes from {r}",
                    )

    def many(self) -> None:
        """More messages than the arguments hold, twice without waiting, and from a graph."""
        torch, count = self.torch, 400
        xs = [self.bytes_of(self.rank, 1 + i % 700, i) for i in range(count)]
        outs = [self.zeros(1 + i % 700) for i in range(count)]

        def run() -> None:
            with miraccl.group():
                for x, out in zip(xs, outs):
                    self.comm.sendrecv(x, self.right, out, self.left)

        run()
        run()
        for i, out in enumerate(outs):
            self.same(out, self.bytes_of(self.left, 1 + i % 700, i), f"message {i}")
            out.zero_()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(graph, stream=stream):
            run()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        for i, out in enumerate(outs):
            self.same(out, self.bytes_of(self.left, 1 + i % 700, i), f"message {i} of a graph")

    def graphs(self) -> None:
        """Captured sends and receives of several sizes, replayed with new contents, among other
        calls.
        """
        torch = self.torch
        stream = torch.cuda.Stream()
        for size in (16, 5000, 8_000_001):
            x, out, other = self.bytes_of(self.rank, size), self.zeros(size), self.zeros(size)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.comm.sendrecv(x, self.right, out, self.left)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    self.comm.sendrecv(x, self.right, out, self.left)
                    self.comm.sendrecv(out, self.left, other, self.right)
                for seed in range(5):
                    x.copy_(self.bytes_of(self.rank, size, seed))
                    graph.replay()
                    self.comm.sendrecv(x, self.right, out, self.left)
            stream.synchronize()
            self.same(out, self.bytes_of(self.left, size, 4), f"{size} bytes")
            self.same(other, self.bytes_of(self.rank, size, 4), f"{size} bytes there and back")

    def large(self) -> None:
        """Messages in chunks, beside short ones and unaligned; all ranks to one; from a graph."""
        torch, comm, big = self.torch, self.comm, (64 << 20) + 5
        for size, offset, out_offset in ((big, 0, 0), (big + 100_000, 4, 8), (big, 0, 1)):
            x, out = self.bytes_of(self.rank, size, size, offset), self.zeros(size, out_offset)
            short, got = self.bytes_of(self.rank, 1000, 1), self.zeros(1000)
            with miraccl.group():
                for source, target in ((short, got), (x, out), (short, got)):
                    comm.send(source, self.right)
                    comm.recv(target, self.left)
            self.same(
                out,
                self.bytes_of(self.left, size, size),
                f"{size} bytes at {offset} and {out_offset}",
            )
            self.same(got, self.bytes_of(self.left, 1000, 1), "1000 bytes beside")
        x, outs = (
            self.bytes_of(self.rank, big),
            [self.zeros(big) for _ in range(self.nranks if self.rank == 0 else 0)],
        )
        with miraccl.group():
            comm.send(x, 0)
            for r, out in enumerate(outs):
                comm.recv(out, r)
        for r, out in enumerate(outs):
            self.same(out, self.bytes_of(r, big), f"from {r}")
        out, graph, stream = self.zeros(big), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(graph, stream=stream):
            comm.sendrecv(x, self.right, out, self.left)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        self.same(out, self.bytes_of(self.left, big), "of a graph")

    def mixed(self) -> None:
        """Messages among collectives, without waiting on the host."""
        torch, n = self.torch, self.nranks
        x = torch.full((5000,), float(self.rank + 1), device="cuda")
        out = torch.empty_like(x)
        for _ in range(50):
            self.comm.sendrecv(x, self.right, out, self.left)
            self.comm.all_reduce(out)
        torch.cuda.synchronize()
        self.same(out, torch.full_like(out, n * (n + 1) / 2), "sums of what was received")

    def uneven(self) -> None:
        """Uneven and rooted collectives; the library allocates results that the caller does not
        pass.
        """
        torch, comm, n = self.torch, self.comm, self.nranks
        for base in (0, 7, 40_001):
            counts = [base * (r % 3) + r for r in range(n)]
            mine, begin, total = counts[self.rank], sum(counts[: self.rank]), sum(counts)
            every = torch.cat([self.bytes_of(r, c, base) for r, c in enumerate(counts)])
            x = self.bytes_of(self.rank, mine, base)
            self.same(comm.all_gather_v(x, counts), every, "all_gather_v")
            placed = self.zeros(total)
            placed[begin : begin + mine] = x
            self.same(
                comm.all_gather_v(placed[begin : begin + mine], counts, placed),
                every,
                "all_gather_v in place",
            )
            for root in {0, n - 1}:
                found = comm.gather_v(x, counts, root)
                assert (found is None) == (self.rank != root)
                if found is not None:
                    self.same(found, every, "gather_v")
                share = comm.scatter_v(
                    every if self.rank == root else None,
                    counts,
                    root,
                    None if self.rank == root else self.zeros(mine),
                )
                self.same(share, x, "scatter_v")
            values = torch.arange(total, device="cuda", dtype=torch.float32) + self.rank
            share = comm.reduce_scatter_v(values, counts)
            want = n * torch.arange(total, device="cuda", dtype=torch.float32) + n * (n - 1) / 2
            self.same(share, want[begin : begin + mine], "reduce_scatter_v")
        sends = [1000 * self.rank + r for r in range(n)]
        receives = [1000 * r + self.rank for r in range(n)]
        x = torch.cat(
            [
                torch.full((c,), 10 * self.rank + r, dtype=torch.int32, device="cuda")
                for r, c in enumerate(sends)
            ]
        )
        want = torch.cat(
            [
                torch.full((c,), 10 * r + self.rank, dtype=torch.int32, device="cuda")
                for r, c in enumerate(receives)
            ]
        )
        self.same(comm.all_to_all_v(x, sends, receives), want, "all_to_all_v")
        gathered = comm.gather(torch.full((4,), self.rank, device="cuda"), 1)
        shares = torch.arange(4 * n, device="cuda") if self.rank == 0 else None
        share = comm.scatter(shares, 0, torch.empty(4, dtype=torch.int64, device="cuda"))
        self.same(share, torch.arange(4, device="cuda") + 4 * self.rank, "scatter")
        assert (gathered is None) == (self.rank != 1)
        if gathered is not None:
            self.same(gathered, torch.arange(n, device="cuda").repeat_interleave(4), "gather")

    def captured_by_some(self) -> None:
        """Message collectives are numbered when they run: rank 0 replays what the others call."""
        torch, comm, out = self.torch, self.comm, self.torch.zeros(3, device="cuda")
        every = torch.zeros(3 * self.nranks, device="cuda") if self.rank == 0 else None

        def once() -> None:
            comm.scatter(every, 0, out)
            comm.gather(out, 0, every)

        once()
        self.device.synchronize()
        replay, times = once, 5
        if self.rank == 0:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                once()
            every.copy_(torch.arange(3 * self.nranks))  # type: ignore[union-attr]
            replay = graph.replay
        for _ in range(times):
            replay()
        self.device.synchronize()
        self.same(out, torch.arange(3, device="cuda") + 3.0 * self.rank, "scatter")

    def background(self) -> None:
        """async_op beside other work, ordered after the current stream, which is ordered after
        ``wait``.
        """
        torch, comm, n = self.torch, self.comm, self.nranks
        for _ in range(20):
            x = torch.zeros(1 << 20, device="cuda")
            torch.cuda._sleep(100_000)
            x += self.rank + 1
            work = comm.all_reduce(x, async_op=True)
            assert isinstance(work, DeviceWork)
            other = torch.ones(1000, device="cuda").cumsum(0)
            assert work.wait() is x
            y = x * 2
            self.same(y, torch.full_like(y, n * (n + 1)), "all_reduce in the background")
            del other
        a, b = (
            torch.full((3,), self.rank, device="cuda"),
            torch.empty(3, dtype=torch.int64, device="cuda"),
        )
        works = [comm.send(a, self.right, async_op=True), comm.recv(b, self.left, async_op=True)]
        assert works[1].synchronize(self.timeout) is b
        assert works[1].done()
        self.same(b, torch.full_like(b, self.left), "recv in the background")
        for kind in ("all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "gather"):
            x = torch.ones(4 * n, device="cuda")
            getattr(comm, kind)(x, async_op=True).wait()
        works[0].wait()
        del works
        graph, stream, x = (
            torch.cuda.CUDAGraph(),
            torch.cuda.Stream(),
            torch.zeros(1000, device="cuda"),
        )
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(graph, stream=stream):
            x += 1
            work = comm.all_reduce(x, async_op=True)
            y = torch.ones_like(x)
            work.wait()
            y += x
        graph.replay()
        torch.cuda.synchronize()
        self.same(y, torch.full_like(y, n + 1), "all_reduce in the background of a graph")

    def groups(self) -> None:
        """Collectives and messages of one group, in several streams."""
        torch, comm, n = self.torch, self.comm, self.nranks
        one, two = torch.cuda.Stream(), torch.cuda.Stream()
        x, y = torch.full((100,), float(self.rank), device="cuda"), torch.empty(100, device="cuda")
        z = torch.full((50,), float(self.rank + 1), device="cuda")
        torch.cuda.synchronize()
        with miraccl.group():
            comm.send(x, self.right, stream=one)
            comm.recv(y, self.left, stream=two)
            comm.all_reduce(z, stream=two)
            gathered = comm.all_gather(z, stream=two)
        torch.cuda.synchronize()
        self.same(y, torch.full_like(y, self.left), "recv")
        self.same(z, torch.full_like(z, n * (n + 1) / 2), "all_reduce")
        self.same(gathered, torch.full_like(gathered, n * (n + 1) / 2), "all_gather")

    def prepared(self) -> None:
        torch, comm, n = self.torch, self.comm, self.nranks
        x = torch.ones(1000, device="cuda")
        op = comm.all_reduce_init(x, op=miraccl.SUM)
        for step in range(3):
            assert op() is x
            self.same(x, torch.full_like(x, n ** (step + 1)), "prepared all_reduce")
        gather = comm.all_gather_init(x[:5])
        self.same(gather(), torch.full((5 * n,), float(n**3), device="cuda"), "prepared all_gather")

    def dlpack(self) -> None:
        torch, n = self.torch, self.nranks
        x, stream = OnlyDlpack(torch.ones(77, device="cuda")), torch.cuda.Stream()
        self.comm.all_reduce(x)
        self.same(x.tensor, torch.full_like(x.tensor, n), "an array with nothing but DLPack")
        torch.cuda.synchronize()
        self.comm.all_reduce(x, stream=stream)
        torch.cuda.synchronize()
        self.same(x.tensor, torch.full_like(x.tensor, n * n), "in another stream")
        assert x.streams == [torch.cuda.current_stream().cuda_stream or 1, stream.cuda_stream]

    def speed(self) -> str:
        """Measure sendrecv around a ring, in a graph and plain; not a test."""
        torch, lines = self.torch, []
        for size in (16, 16 << 10, 256 << 10, 4 << 20, 64 << 20, 1 << 30):
            x, out = (
                torch.zeros(size, dtype=torch.uint8, device="cuda"),
                torch.zeros(size, dtype=torch.uint8, device="cuda"),
            )
            repeat = 50 if size <= 4 << 20 else 5
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            self.comm.sendrecv(x, self.right, out, self.left)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(repeat):
                    self.comm.sendrecv(x, self.right, out, self.left)
            times = []
            for _ in range(5):
                self.session.barrier("speed")
                begin = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                with torch.cuda.stream(stream):
                    begin.record()
                    graph.replay()
                    end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end) * 1e3 / repeat)
            us = sorted(times)[2]
            begin_s = time.perf_counter()
            for _ in range(repeat):
                self.comm.sendrecv(x, self.right, out, self.left)
            host = (time.perf_counter() - begin_s) / repeat * 1e6
            torch.cuda.synchronize()
            plan = self.device.last_plan
            assert plan is not None
            shape = f"{plan.proto} {plan.blocks} x {getattr(plan, 'threads', 0)}"
            lines.append(
                f"sendrecv {size:>11} bytes: {us:9.2f} us {size / us / 1e3:7.1f} GB/s, "
                f"host {host:.2f} us, {shape}"
            )
        return "\n".join(lines)

    # ---- cases that break the communicator

    def mismatch(self) -> None:
        torch = self.torch
        if self.rank == 0:
            self.comm.send(torch.zeros(10_000_000, device="cuda"), 1)
        elif self.rank == 1:
            self.comm.recv(torch.zeros(100, dtype=torch.bfloat16, device="cuda"), 0)
        if self.rank < 2:
            error = self.failure()
            assert isinstance(error, CollectiveMismatch)
            assert "10000000 x float32" in str(error)
            assert "100 x bfloat16" in str(error)

    def unlike(self, case: str) -> None:
        """Ranks call different operations, one of them messages; the next one does not match stale
        messages.
        """
        torch, comm, mine = self.torch, self.comm, self.rank
        one, many = torch.ones(1, device="cuda"), torch.ones(3, device="cuda")

        def scatter(value: float, root: int) -> None:
            comm.scatter(
                torch.full((self.nranks,), float(value), device="cuda") if mine == root else None,
                root,
                one,
            )

        def gather(root: int) -> None:
            comm.gather(one, root)

        scatter(1, 1)
        comm.all_reduce(many)
        self.device.synchronize()
        match case:
            case "roots of scatter":
                scatter(mine + 100, 1 if mine == 1 else 0)
            case "roots of gather":
                gather(mine)
            case "gather and all_reduce":
                gather(0) if mine == 1 else comm.all_reduce(many)
            case "gather and send":
                comm.send(one, 0) if mine == 1 else gather(0)
            case "recv and all_reduce":
                comm.recv(one, 1) if mine == 0 else comm.all_reduce(many)
            case "recv and broadcast":
                comm.recv(one, 1) if mine == 0 else comm.broadcast(many, 0)
            case "circle of recv":
                comm.recv(one, self.left)
            case "circle of send":
                comm.send(self.zeros(16 << 20), self.right)
            case "circle of large sends":
                comm.send(self.zeros(80 << 20), self.right)
        try:
            for value in (200, 300):
                scatter(value, 1)
            error = self.failure()
        except MiracclError as found:
            error = found
        self.session.barrier("told")
        assert isinstance(error or self.failure(), CollectiveMismatch), error

    def failure(self) -> MiracclError | None:
        """Return the error that ends the GPU's work."""
        try:
            self.device.synchronize()
        except MiracclError as error:
            return error
        return None

    def alone(self, how: str) -> None:
        if self.rank == 1:
            self.comm.recv(self.zeros(1000), 0)
            if how == "abort":
                threading.Timer(0.2, self.device.abort).start()
            error = self.failure()
        self.session.barrier("told")  # ranks that wait for a leaving rank get that error instead
        if self.rank == 1:
            assert isinstance(error, CollectiveTimeout if how == "timeout" else CommunicatorAborted)
            assert how == "abort" or error.peer == 0

    def run(self, name: str) -> str:
        if name in ("timeout", "abort"):
            self.alone(name)
            return ""
        if name in UNLIKE:
            self.unlike(name)
            return ""
        return getattr(self, name)() or ""


def main() -> None:
    cases = [case["case"] for case in json.loads(sys.stdin.read())]
    rank, answers = MessageRank(), []
    for name in cases:
        try:
            answer = rank.run(name)
            if name not in BROKEN:
                rank.device.synchronize()
            answers.append(answer)
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}")
        if name not in BROKEN and rank.device._host[0]:  # nothing after it can run
            answers += ["not run"] * (len(cases) - len(answers))
            break
    rank.comm.finalize()
    print("RESULT " + json.dumps(answers), flush=True)


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
