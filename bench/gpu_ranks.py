"""Shared by the GPU benchmarks: ranks as processes, timing in CUDA graphs and streams.

A benchmark calls ``spawn(module, nranks, arguments)`` in the parent and uses ``Timer`` in the
ranks. NCCL, if compared, runs through torch.distributed in the same processes; NVLink multicast is
off (NCCL_NVLS_ENABLE=0).
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def need_gpus(number: int = 1) -> Any:
    """Return ``tools.gpu_facts.CudaFacts``; exit with a message if there are too few GPUs."""
    sys.path.insert(0, str(ROOT / "src"))
    from miraccl.tools.gpu_facts import read_facts

    facts = read_facts()
    if not facts.gpus:
        sys.exit(f"{facts.problem} ({facts.advice})")
    if len(facts.gpus) < number:
        sys.exit(f"needs {number} GPUs, here is {facts.names}")
    return facts


def need_cupy(number: int) -> Any:
    """Return CuPy for one process with ``number`` GPUs; exit with a message if something is
    missing.
    """
    need_gpus(number)
    try:
        import cupy
    except ImportError:
        sys.exit("CuPy is not installed: pip install cupy-cuda13x, or cupy-cuda12x")
    return cupy


def spawn(script: str, nranks: int, arguments: Sequence[str], timeout: float = 560.0) -> int:
    """Run ``script`` once per rank with torchrun's variables; return the first failure's exit
    status.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with socket.socket() as probe:  # torch.distributed listens at a port of its own
        probe.bind(("127.0.0.1", 0))
        torch_port = probe.getsockname()[1]
    workers = []
    for rank in range(nranks):
        settings = {
            "RANK": rank,
            "WORLD_SIZE": nranks,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": nranks,
            "MASTER_PORT": port,
        }
        environment = {
            **os.environ,
            **{name: str(value) for name, value in settings.items()},
            "MASTER_ADDR": "127.0.0.1",
            "BENCH_TORCH_PORT": str(torch_port),
            "NCCL_NVLS_ENABLE": "0",
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        }
        workers.append(subprocess.Popen([sys.executable, script, *arguments], env=environment))
    try:
        deadline = time.monotonic() + timeout
        while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
            if any(worker.poll() for worker in workers):
                time.sleep(3)  # the others say what they saw
                break
            time.sleep(0.05)
        codes = [worker.poll() if worker.poll() is not None else 1 for worker in workers]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    return next((code for code in codes if code), 0)


def start_nccl(dist: Any, torch: Any, rank: int, nranks: int) -> None:
    """Create a process group of NCCL beside miraccl's communicator."""
    where = f"tcp://127.0.0.1:{os.environ['BENCH_TORCH_PORT']}"
    dist.init_process_group(
        "nccl",
        init_method=where,
        rank=rank,
        world_size=nranks,
        device_id=torch.device("cuda", rank),
    )


class Timer:
    """Times operations on this rank's GPU.

    Ranks are aligned on the GPU by a small collective and ``ALIGN_CYCLES`` of sleep, in which the
    hosts enqueue the measured work. Late processes and the launch time of a graph are therefore not
    included.
    """

    ALIGN_CYCLES = 400_000  # 0.2 ms at 2 GHz

    def __init__(self, torch: Any, comm: Any) -> None:
        self.torch, self.comm, self.session = torch, comm, comm.session
        self.aligner = torch.zeros(4, device="cuda")
        self.stream = torch.cuda.Stream()

    def barrier(self) -> None:
        self.torch.cuda.synchronize()
        self.session.barrier("bench")

    def graph(self, operation: Callable[[], Any], iterations: int, repeats: int = 7) -> list[float]:
        """Return microseconds per operation for each replay of a graph of ``iterations``."""
        torch = self.torch
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                operation()
            self.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                for _ in range(iterations):
                    operation()
            graph.replay()
            return [self._once(graph.replay, iterations) for _ in range(repeats)]

    def plain(self, operation: Callable[[], Any], iterations: int, repeats: int = 7) -> list[float]:
        """Return microseconds per operation, called back to back on a stream."""

        def run() -> None:
            for _ in range(iterations):
                operation()

        with self.torch.cuda.stream(self.stream):
            run()
            return [self._once(run, iterations) for _ in range(repeats)]

    def _once(self, run: Callable[[], Any], iterations: int) -> float:
        torch = self.torch
        self.barrier()
        self.comm.all_reduce(self.aligner, stream=self.stream)
        torch.cuda._sleep(self.ALIGN_CYCLES)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(self.stream)
        run()
        end.record(self.stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / iterations * 1e3

    def slowest(self, times: Sequence[float]) -> float:
        """Return the median over repeats of the slowest rank."""
        rows = self.session.all_gather(",".join(f"{t:.4f}" for t in times).encode(), "times")
        columns = zip(*([float(t) for t in row.decode().split(",")] for row in rows), strict=True)
        return statistics.median(max(column) for column in columns)


def iterations_for(nbytes: int) -> int:
    return (
        200 if nbytes <= 1 << 16 else 50 if nbytes <= 1 << 20 else 20 if nbytes <= 64 << 20 else 5
    )
