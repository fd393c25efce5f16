"""Which shape of launch is fastest at which size: the measurement behind ``executor/cuda/choice.py`` and ``launch_shape.py``.

``python bench/gpu_sweep.py --ranks 2 [--out FILE]`` runs every candidate at every size, next to NCCL, and prints the best few.
``--limits`` first measures what the links give: copy engine, stores and bulk copies of the multiprocessors.  ``--sms 16,24,32,64,128``
measures instead what plans lose with so many multiprocessors: the measurement behind ``comm/device/ctas.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_ranks import Timer, iterations_for, spawn, start_nccl

KIB, MIB = 1 << 10, 1 << 20
SIZES = [16, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1 << 30]

PROBE = """
typedef unsigned long long u64;
extern "C" __global__ void push(uint4* dst, const uint4* src, u64 n, u64 window) {
  u64 stride = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 4 * stride) {
    uint4 v[4];
    #pragma unroll
    for (int u = 0; u < 4; u++) if (i + u * stride < n) v[u] = src[i + u * stride];
    #pragma unroll
    for (int u = 0; u < 4; u++) if (i + u * stride < n) dst[(i + u * stride) % window] = v[u];
  }
}
#define ST 8
#define AHEAD 4
extern "C" __global__ void bulk(char* dst, const char* src, u64 n, u64 window) {
  extern __shared__ __align__(128) char buf[];
  __shared__ __align__(8) u64 bars[ST];
  if (threadIdx.x) return;
  unsigned b0 = (unsigned)__cvta_generic_to_shared(buf), m0 = (unsigned)__cvta_generic_to_shared(bars);
  for (int s = 0; s < ST; s++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(m0 + 8 * s));
  asm volatile("fence.proxy.async;" ::: "memory");
  u64 chunks = n / CHUNK, mine = 0;
  auto load = [&](u64 k) {
    u64 c = blockIdx.x + k * gridDim.x; if (c >= chunks) return;
    unsigned s = k % ST, m = m0 + 8 * s;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(m), "r"(CHUNK) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(b0 + s * CHUNK), "l"(src + c * CHUNK), "r"(CHUNK), "r"(m) : "memory");
  };
  for (u64 k = 0; k < AHEAD; k++) load(k);
  for (u64 k = 0; blockIdx.x + k * gridDim.x < chunks; k++) {
    unsigned s = k % ST, m = m0 + 8 * s, ok = 0, parity = (k / ST) & 1;
    while (!ok) asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                             : "=r"(ok) : "r"(m), "r"(parity) : "memory");
    u64 c = blockIdx.x + k * gridDim.x;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(dst + (c * CHUNK) % window), "r"(b0 + s * CHUNK), "r"(CHUNK) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(ST - AHEAD) : "memory");
    load(k + AHEAD);
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
"""


def plans(nbytes: int, nranks: int) -> Iterator[dict[str, Any]]:
    """Candidates for an all_reduce of ``nbytes`` of a 16-bit float."""
    vectors = -(-nbytes // 16)
    for algo in ("one_shot",) if nranks == 2 else ("one_shot", "two_shot"):
        if (algo == "one_shot" and nranks > 2 and nbytes > MIB) or (algo == "two_shot" and nbytes < 16 * KIB):
            continue
        each = -(-vectors // nranks) if algo == "two_shot" else vectors
        yield from _packets(algo, each, nranks, nbytes)
    if nbytes >= 16 * MIB and nranks > 2:
        yield from _packets("ring", -(-vectors // nranks), nranks, nbytes)
    if 4 * MIB <= nbytes <= 16 * MIB:
        for algo in ("ring", "two_shot") if nranks > 2 else ("one_shot",):
            for blocks, threads, unroll in ((64, 512, 8), (128, 512, 4), (128, 512, 8)):
                yield {"algo": algo, "proto": "simple", "blocks": blocks, "threads": threads, "unroll": unroll, "min_blocks": 1}


def _packets(algo: str, each: int, nranks: int, nbytes: int) -> Iterator[dict[str, Any]]:
    shots = 1 if algo == "one_shot" else 2
    slots = nranks + 2 if algo == "ring" else 4
    largest = 24 * MIB // (shots * (nranks - 1) * 16)  # packets of a piece, if a bank is to hold one
    seen = set()
    for threads, unroll, dense in SHAPES:
        each_block = threads * unroll
        blocks = max(1, min(128 * dense, -(-each // each_block)))
        while blocks > 16 and blocks * each_block * min(slots, -(-each // (blocks * each_block))) > largest:
            blocks -= 4
        fits = blocks * each_block * min(slots, -(-each // (blocks * each_block))) <= largest
        if fits and (blocks, threads, unroll) not in seen and not (nbytes <= 64 * KIB and unroll > 1):
            seen.add((blocks, threads, unroll))
            yield {"algo": algo, "proto": "ll128", "blocks": blocks, "threads": threads, "unroll": unroll, "min_blocks": dense}


SHAPES = (
    (64, 1, 1), (128, 1, 1), (256, 1, 1), (512, 1, 1), (1024, 1, 1), (256, 1, 4), (512, 1, 2), (1024, 1, 2),
    (256, 2, 2), (256, 2, 4), (512, 2, 1), (512, 2, 2), (256, 4, 2), (512, 4, 1),
)  # fmt: skip


def specs(nranks: int) -> list[Any]:
    """Kernels that the sweep needs: compile them beforehand."""
    from miraccl.executor.cuda.plan import DevicePlan, Request, kernel_spec
    from miraccl.types import Collective, DType, RedOp

    found = {}
    for size in SIZES:
        request = Request(collective=Collective.ALL_REDUCE, dtype=DType.BFLOAT16, op=RedOp.SUM, count=size // 2, nranks=nranks)
        for plan in plans(size, nranks):
            found[kernel_spec(DevicePlan(**plan), request)] = None
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="")
    parser.add_argument("--limits", action="store_true")
    parser.add_argument("--sms", default="", help="numbers of multiprocessors")
    parser.add_argument("--no-nccl", action="store_true")
    parser.add_argument("--show", type=int, default=3)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(spawn(__file__, options.ranks, sys.argv[1:]))
    run(options)


def run(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from miraccl.bootstrap.launch import detect_launch, meet
    from miraccl.comm.device.communicator import DeviceCommunicator
    rank, nranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    session = meet(detect_launch(os.environ))
    comm = DeviceCommunicator(session, rank)
    if not options.no_nccl:
        start_nccl(dist, torch, rank, nranks)
    timer = Timer(torch, comm)
    warm = torch.randn(4096, 4096, device="cuda")
    for _ in range(60):  # clocks rise with work
        warm = (warm @ warm).clamp(-1, 1)
    torch.cuda.synchronize()
    if options.limits:
        limits(torch, comm, timer)
    record = []
    sizes = [int(s) for s in options.sizes.split(",")] if options.sizes else SIZES
    for size in sizes if options.sms else ():
        sweep_limits(torch, dist, comm, timer, size, [int(n) for n in options.sms.split(",")])
    for size in () if options.sms else sizes:
        record.append(sweep_size(torch, dist, comm, timer, size, options))
        if rank == 0 and options.out:
            Path(options.out).parent.mkdir(parents=True, exist_ok=True)
            Path(options.out).write_text(json.dumps(record))
    host_cost(torch, comm, timer, dist if not options.no_nccl else None)
    comm.close()
    session.close()
    if not options.no_nccl:
        dist.destroy_process_group()


def sweep_size(torch: Any, dist: Any, comm: Any, timer: Timer, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """All candidates at one size; rank 0 prints the fastest."""
    from miraccl.executor.cuda.plan import DevicePlan
    from miraccl.types import Collective, DType

    x = torch.randn(size // 2, device="cuda").to(torch.bfloat16)
    y, want = torch.empty_like(x), x.clone()
    iterations = iterations_for(size)
    time = timer.graph if size <= 16 * MIB else timer.plain
    nccl = 0.0
    if not options.no_nccl:
        nccl = timer.slowest(time(lambda: dist.all_reduce(y), iterations))
        dist.all_reduce(want)
    want = want.float()
    rows = []
    for plan in plans(size, comm.nranks):
        comm.use_plan(Collective.ALL_REDUCE, DType.BFLOAT16, size // 2, DevicePlan(**plan))
        comm.all_reduce(x, y)
        torch.cuda.synchronize()
        wrong = 0 if options.no_nccl else int(((y.float() - want).abs() > 0.02 * comm.nranks * want.abs().clamp(min=1)).sum())
        us = timer.slowest(time(lambda: comm.all_reduce(x, y), iterations, 5))
        comm.check()
        rows.append((us, wrong, plan))
    rows.sort(key=lambda row: row[0])
    if comm.rank == 0:
        print(f"{size:>11} B  nccl {nccl:9.2f} us", flush=True)
        for us, wrong, p in rows[: options.show]:
            shape = f"{p['algo']} {p['proto']} {p['blocks']}x{p['threads']}u{p['unroll']}b{p['min_blocks']}"
            print(f"      {us:9.2f} us  x{nccl / us:5.2f}  {size / us / 1e3:7.1f} GB/s  {shape} wrong {wrong}", flush=True)
    return {"bytes": size, "nccl_us": nccl, "rows": rows}


def sweep_limits(torch: Any, dist: Any, comm: Any, timer: Timer, size: int, numbers: Sequence[int]) -> None:
    """Microseconds of calls with so many multiprocessors, of tensors of ``size`` bytes in all; rank 0 prints them beside NCCL's."""
    from miraccl.comm.device.ctas import Ctas

    agreed, each = comm.ctas, size // 4 // comm.nranks // 64 * 64
    whole = torch.randn(each * comm.nranks, device="cuda")
    out, part = torch.empty_like(whole), whole[:each].clone()
    pairs = {
        "all_reduce": (lambda: dist.all_reduce(out), lambda: comm.all_reduce(whole, out)),
        "all_gather": (lambda: dist.all_gather_into_tensor(out, part), lambda: comm.all_gather(part, out)),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, whole), lambda: comm.reduce_scatter(whole, part)),
    }
    for name, (theirs, ours) in pairs.items():
        cells = [f"nccl {timer.slowest(timer.plain(theirs, iterations_for(size) // 2, 5)):.1f}"]
        for number in numbers:
            comm.ctas = Ctas(most=min(number, agreed.most), limited=number < agreed.most)
            comm._forget()
            us = timer.slowest(timer.plain(ours, iterations_for(size) // 2, 5))
            plan = comm.last_plan
            cells.append(f"{number}: {us:.1f} ({plan.proto} {plan.blocks}x{plan.threads})")
        comm.check()
        if comm.rank == 0:
            print(f"{name:>14} {size:>11} B  {', '.join(cells)}", flush=True)
    comm.ctas = agreed


def host_cost(torch: Any, comm: Any, timer: Timer, dist: Any) -> None:
    """Microseconds of the calling thread per call (the GPU keeps up or not: few calls, then a pause)."""
    import time

    x = torch.zeros(8, device="cuda")

    def cost(call: Any, number: int = 200) -> float:
        best = 1e9
        for _ in range(5):
            timer.barrier()
            begin = time.perf_counter()
            for _ in range(number):
                call()
            best = min(best, (time.perf_counter() - begin) / number * 1e6)
            torch.cuda.synchronize()
        return best

    comm.all_reduce(x)
    rows = {"all_reduce": cost(lambda: comm.all_reduce(x))}
    launch = comm._launches[next(k for k in comm._launches if k[2] == 8)]
    address = x.data_ptr()
    rows["launch alone"] = cost(lambda: launch.run(address, address, 0))
    rows["arguments alone"] = cost(lambda: comm._stream_number(None))
    if dist is not None:
        rows["torch nccl all_reduce"] = cost(lambda: dist.all_reduce(x))
    if comm.rank == 0:
        print("host cost, us per call:", {name: round(us, 2) for name, us in rows.items()}, flush=True)


def limits(torch: Any, comm: Any, timer: Timer) -> None:
    """What one direction between neighbours gives while all ranks do the same: copy engine, stores, bulk copies."""
    from miraccl.executor.cuda import toolkit
    from miraccl.executor.cuda.driver import check

    gpu, rank, nranks = comm.gpu, comm.rank, comm.nranks
    window = 256 * MIB
    own = gpu.allocate(window)
    handles = comm.session.all_gather(gpu.export(own), "probe")
    peer = gpu.map_peer(handles[(rank + 1) % nranks])
    source = torch.randn(window // 4, device="cuda")
    stream = timer.stream.cuda_stream
    cuda = gpu.cuda
    bases = source.data_ptr()
    rows, total = {}, 256 * MIB
    rows["copy engine"] = timer.slowest(timer.plain(lambda: cuda.cuMemcpyDtoDAsync(peer, bases, total, stream), 8))
    for chunk in (4096, 16384):
        function = gpu.load(toolkit.compile_cubin(f"#define CHUNK {chunk}\n" + PROBE, gpu.arch, "probe"), "bulk")
        attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(cuda.cuFuncSetAttribute(function, attribute, 8 * chunk), "cuFuncSetAttribute")
        for blocks in (16, 32, 64, 128):
            call = launcher(cuda, function, blocks, 32, 8 * chunk, stream, (peer, bases, total, window))
            rows[f"bulk {chunk} x{blocks}"] = timer.slowest(timer.plain(call, 8))
    function = gpu.load(toolkit.compile_cubin("#define CHUNK 4096\n" + PROBE, gpu.arch, "probe"), "push")
    for blocks, threads in ((16, 1024), (32, 1024), (64, 1024), (128, 512), (128, 1024), (256, 1024)):
        call = launcher(cuda, function, blocks, threads, 0, stream, (peer, bases, total // 16, window // 16))
        rows[f"stores {blocks}x{threads}"] = timer.slowest(timer.plain(call, 8))
    if rank == 0:
        print("limits, GB/s:", {name: round(256 * MIB / us / 1e3, 1) for name, us in rows.items()}, flush=True)
    timer.barrier()
    gpu.unmap_peer(peer)
    gpu.free(own)


def launcher(cuda: Any, function: Any, blocks: int, threads: int, shared: int, stream: int, values: tuple[int, ...]) -> Any:
    """A call that launches a kernel of 64-bit arguments."""
    import ctypes

    from miraccl.executor.cuda.driver import check

    words = (ctypes.c_uint64 * len(values))(*values)
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(words) + 8 * i for i in range(len(values))))

    def call() -> None:
        check(cuda.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared, stream, ctypes.addressof(pointers), 0), "launch")
        _ = words

    return call


if __name__ == "__main__":
    main()
