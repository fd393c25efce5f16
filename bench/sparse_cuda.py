"""GPU part of bench/sparse.py: kernels on rows of one GPU, and sparse sums of two or more.

    python bench/sparse.py --device cuda --gpus 2 --out sparse/MACHINE-DATE

A rank per GPU sums the same arrays by ``all_reduce`` and ``all_reduce_sparse`` in turns. Ranks are
aligned on the GPU by a small sum and a sleep, in which the host enqueues the measured call; a time
is the median over the repeats of the slowest rank. Every sum is compared with the dense one, bit by
bit if there are two ranks. ``send``, ``sum`` and ``gate`` are the launches of a call.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_ranks
import numpy as np

BLOCK = 256
LAUNCHES = 50  # of a kernel between two reads of the clock
ALIGN_CYCLES = 400_000  # 0.2 ms at 2 GHz
DENSITIES = "0,0.001,0.01,0.1,0.3,0.5,1.0"


def sparse_array(rank: int, count: int, density: float, contiguous: bool = False) -> np.ndarray:
    """Return float32 with ``density`` of its blocks not zero: others for each rank, or one run."""
    rng = np.random.default_rng(rank + 1)
    x = np.zeros(count, np.float32)
    blocks = x[: count // BLOCK * BLOCK].reshape(-1, BLOCK)
    if contiguous:
        held = np.arange(int(len(blocks) * density)) + len(blocks) // 4
    else:
        held = np.flatnonzero(rng.random(len(blocks)) < density)
    blocks[held] = rng.standard_normal((len(held), BLOCK)).astype(np.float32)
    return x


def measure_kernels(mib: int, repeats: int, density: float) -> list[dict[str, Any]]:
    """Time scan, list, gather and scatter of one array on a GPU, each over many launches."""
    from miraccl.executor.cpu import row_lists
    from miraccl.executor.cuda.gpu import Gpu
    from miraccl.executor.cuda.launch import KernelLaunch, Kernels
    from miraccl.executor.cuda.plan import DevicePlan
    from miraccl.executor.cuda.row_lowering import RowKernel, kernel_spec, pack_args
    from miraccl.types import DType

    gpu = Gpu(0)
    kernels, stream = Kernels(gpu), gpu.make_stream()
    x = sparse_array(0, (mib << 20) // 4, density)
    row, words = 4 * BLOCK, row_lists.words_for(x.nbytes // (4 * BLOCK))
    rows = np.flatnonzero(x.reshape(-1, BLOCK).any(axis=1)).astype(np.int64)
    array, message, target = (
        gpu.allocate(n) for n in (x.nbytes, max(1, rows.size) * row, x.nbytes)
    )
    bitmap, listed, found = (gpu.allocate(n) for n in (8 * words, 512 * words, 8))
    gpu.copy_from_host(array, x.ctypes.data, x.nbytes, stream)
    shared = {"row_bytes": row, "total_bytes": x.nbytes, "bitmap": (bitmap, words), "found": found}

    def launch(kernel: RowKernel, blocks: int) -> Any:
        spec = kernel_spec(kernel, 2, DType.FLOAT32)
        plan = DevicePlan(
            algo="rows", proto="", blocks=blocks, threads=spec.threads, unroll=1, reason="bench"
        )
        count = 0 if kernel is RowKernel.LIST else len(rows)
        args = bytearray(pack_args(2, rows=(listed, count), **shared))
        return KernelLaunch(gpu, kernels.function(spec), plan, blocks, args)

    measured = []
    for kernel, source, out in (
        (RowKernel.SCAN, array, 0),
        (RowKernel.LIST, 0, 0),
        (RowKernel.GATHER, array, message),
        (RowKernel.SCATTER, message, target),
    ):
        for per_sm in (1,) if kernel is RowKernel.LIST else (1, 4, 8):
            blocks = 1 if kernel is RowKernel.LIST else per_sm * gpu.multiprocessors
            run = launch(kernel, blocks)
            times = []
            for _ in range(repeats + 1):
                run.run(source, out, stream)
                gpu.synchronize()
                start = time.perf_counter()
                for _ in range(LAUNCHES):
                    run.run(source, out, stream)
                gpu.synchronize()
                times.append((time.perf_counter() - start) / LAUNCHES * 1e6)
            right = True
            if kernel is RowKernel.LIST:
                got = np.frombuffer(gpu.read(listed, rows.nbytes), np.int64)
                count = int(np.frombuffer(gpu.read(found, 8), np.int64)[0])
                right = count == len(rows) and bool((got == rows).all())
            elif kernel is RowKernel.GATHER:
                want = x.reshape(-1, BLOCK)[rows].tobytes()
                right = gpu.read(message, len(want)) == want
            measured.append(
                {"kernel": kernel.value, "blocks": blocks, "us": statistics.median(times[1:]),
                 "right": right}
            )  # fmt: skip
    gpu.close()
    return measured


# ---- on a rank


class RankTimer:
    """Times calls on this rank's GPU, in microseconds."""

    def __init__(self, torch: Any, comm: Any) -> None:
        self.torch, self.comm = torch, comm
        self.aligner = torch.zeros(4, device="cuda")

    def time(self, prepare: Callable[[], Any], calls: list[Callable[[], Any]]) -> list[float]:
        """Return the time of each of ``calls``, enqueued one after another."""
        torch = self.torch
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        prepare()
        self.comm.all_reduce(self.aligner)
        torch.cuda._sleep(ALIGN_CYCLES)
        marks[0].record()
        for call, mark in zip(calls, marks[1:], strict=True):
            call()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)]

    def slowest(self, microseconds: float) -> float:
        import miraccl

        return float(self.comm.all_reduce(np.array([microseconds]), op=miraccl.MAX)[0])


def measure_density(
    timer: RankTimer, count: int, density: float, repeats: int, contiguous: bool
) -> dict[str, Any]:
    torch, comm = timer.torch, timer.comm
    original = torch.from_numpy(sparse_array(comm.rank, count, density, contiguous)).cuda()
    x = torch.empty_like(original)
    subjects: dict[str, Callable[[], Any]] = {
        "dense": lambda: comm.all_reduce(x),
        "sparse": lambda: comm.all_reduce_sparse(x),
    }
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(repeats + 2):
        for name, call in subjects.items():
            (took,) = timer.time(lambda: x.copy_(original), [call])
            took = timer.slowest(took)
            if turn > 1:
                times[name].append(took)
    want, got = original.clone(), original.clone()
    comm.all_reduce(want)
    comm.all_reduce_sparse(got)
    torch.cuda.synchronize()
    plan = comm.last_plan
    right = bool(
        torch.equal(got.view(torch.int32), want.view(torch.int32))
        if comm.nranks == 2
        else torch.allclose(got, want, rtol=1e-5, atol=1e-5)
    )
    row: dict[str, Any] = {
        "density": f"{density:.1%}",
        "rows": "one run" if contiguous else "random",
    }
    row |= {f"{name} us": statistics.median(found) for name, found in times.items()}
    row["ratio"] = row["dense us"] / row["sparse us"]
    return row | measure_parts(timer, original, x, repeats) | {"right": right, "plan": plan.reason}


def measure_parts(timer: RankTimer, original: Any, x: Any, repeats: int) -> dict[str, float]:
    """Return the median times of the launches of a sparse sum, empty if it has one launch."""
    comm, torch = timer.comm, timer.torch
    last = comm._device._row_sums.launches()[-1][1]
    if not hasattr(last, "_workspace"):
        return {}
    parts = {"send": last._launch._launches[0], "sum": last._launch._launches[1]}
    parts["gate"] = last._launch._dense
    stream = torch.cuda.current_stream().cuda_stream
    found: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(repeats):
        calls = [
            lambda part=part: part.run(x.data_ptr(), x.data_ptr(), stream)  # type: ignore[misc]
            for part in parts.values()
        ]
        for name, took in zip(parts, timer.time(lambda: x.copy_(original), calls), strict=True):
            found[name].append(took)
    return {f"{name} us": timer.slowest(statistics.median(each)) for name, each in found.items()}


def run_as_rank(options: dict[str, Any]) -> None:
    import torch

    import miraccl

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    with miraccl.init() as comm:
        timer = RankTimer(torch, comm)
        count = (options["mib"] << 20) // 4
        cases = [(density, False) for density in options["densities"]] + [(0.01, True)]
        rows = [
            measure_density(timer, count, density, options["repeats"], contiguous)
            for density, contiguous in cases
        ]
        found = {"rows": rows, "gpu": torch.cuda.get_device_name(), "memory": comm.memory()}
    if rank == 0:
        Path(options["result"]).write_text(json.dumps(found))


# ---- start of ranks


def measure_ranks(mib: int, repeats: int, densities: list[float], gpus: int) -> dict[str, Any]:
    """Return what the ranks have measured on ``gpus`` GPUs."""
    gpu_ranks.need_gpus(gpus)
    with tempfile.TemporaryDirectory() as folder:
        result = f"{folder}/result.json"
        options = {"mib": mib, "repeats": repeats, "densities": densities, "result": result}
        status = gpu_ranks.spawn(__file__, gpus, [json.dumps(options)])
        if status:
            sys.exit(status)
        found: dict[str, Any] = json.loads(Path(result).read_text())
    return found


if __name__ == "__main__":
    run_as_rank(json.loads(sys.argv[1]))
