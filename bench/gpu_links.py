"""Bandwidth of one link between two GPUs by mover: loads, stores, bulk copies, copy engines.

Run ``python bench/gpu_links.py`` (two GPUs, CuPy). It moves 256 MiB and 1 GiB from a plain array of
one GPU to one of the other, through slots of 32 MiB on one side, in GB/s, medians: one direction,
both directions at once, and one direction while the side with the slots also fills them (pull) or
empties them (push) with eight blocks of bulk copies, as an operation on plain arrays does. There is
no synchronisation, so these are upper bounds of any protocol.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from gpu_ranks import need_cupy

cupy = need_cupy(2)

MIB = 1 << 20
SIZES, SLOTS_BYTES, TURNS = (256 * MIB, 1024 * MIB), 32 * MIB, 7
KERNELS = r"""
typedef unsigned long long u64;
// ``n`` vectors; places beyond the end of a window are those at its beginning.
extern "C" __global__ void loads(
    uint4* dst, const uint4* src, u64 n, u64 dst_window, u64 src_window) {
  u64 stride = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 8 * stride) {
    uint4 v[8];
    #pragma unroll
    for (int u = 0; u < 8; u++)
      if (i + u * stride < n) v[u] = __ldcv(src + (i + u * stride) % src_window);
    #pragma unroll
    for (int u = 0; u < 8; u++) if (i + u * stride < n) dst[(i + u * stride) % dst_window] = v[u];
  }
}

// ``n`` bytes by one thread of each block, ``stages`` chunks of ``chunk`` bytes at a time
// (PTX ISA, cp.async.bulk).
extern "C" __global__ void bulk(char* dst, const char* src, u64 n, u64 dst_window, u64 src_window,
                                unsigned chunk, unsigned stages) {
  extern __shared__ __align__(128) char buffers[];
  __shared__ u64 bars[16];
  unsigned b0 = (unsigned)__cvta_generic_to_shared(buffers);
  unsigned m0 = (unsigned)__cvta_generic_to_shared(bars);
  for (unsigned s = 0; s < stages; s++)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(m0 + 8 * s));
  asm volatile("fence.proxy.async;" ::: "memory");
  auto place = [&](u64 k) { return (blockIdx.x + k * gridDim.x) * (u64)chunk; };
  auto load = [&](u64 k) {
    if (place(k) >= n) return;
    unsigned m = m0 + 8 * (k % stages), b = b0 + chunk * (k % stages);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(m), "r"(chunk) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];"
                 :: "r"(b), "l"(src + place(k) % src_window), "r"(chunk), "r"(m) : "memory");
  };
  for (u64 k = 0; k + 1 < stages; k++) load(k);
  for (u64 k = 0; place(k) < n; k++) {
    unsigned m = m0 + 8 * (k % stages), b = b0 + chunk * (k % stages), there = 0;
    while (!there)
      asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                   "selp.u32 %0, 1, 0, p;}"
                   : "=r"(there) : "r"(m), "r"((unsigned)(k / stages & 1)) : "memory");
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(dst + place(k) % dst_window), "r"(b), "r"(chunk) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    // The previous chunk has left its buffer, into which the next one is loaded.
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    load(k + stages - 1);
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
"""
Shape = tuple[str, int, int, int, int]
#: (kernel, blocks, threads, bytes of a chunk, chunks at a time); of a copy engine there is no shape
SHAPES: tuple[Shape, ...] = (
    ("loads", 64, 512, 0, 0), ("loads", 128, 512, 0, 0), ("loads", 264, 512, 0, 0),
    ("bulk", 16, 1, 32768, 6), ("bulk", 64, 1, 32768, 6), ("bulk", 132, 1, 32768, 6),
    ("bulk", 132, 1, 16384, 12),
    ("copy engine", 0, 0, 0, 0),
)  # fmt: skip
BESIDE: Shape = ("bulk", 8, 1, 32768, 6)  # moves 400 GB/s within a GPU


class Gpu:
    """One of the two GPUs, with plain arrays to send and receive, slots, and two streams."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        with cupy.cuda.Device(ordinal):
            cupy.cuda.runtime.deviceEnablePeerAccess(1 - ordinal)
            self.source, self.target = (
                cupy.full(max(SIZES), ordinal + 1, cupy.uint8),
                cupy.zeros(max(SIZES), cupy.uint8),
            )
            self.slots = cupy.zeros(SLOTS_BYTES, cupy.uint8)
            module = cupy.RawModule(code=KERNELS, options=("-std=c++17",), backend="nvrtc")
            self.kernels = {name: module.get_function(name) for name in ("loads", "bulk")}
            self.kernels["bulk"].max_dynamic_shared_size_bytes = 200 * 1024
            self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]

    def move(self, target: Any, source: Any, nbytes: int, shape: Shape, stream: int = 0) -> None:
        """Move ``nbytes`` between arrays; smaller arrays are traversed repeatedly."""
        name, blocks, threads, chunk, stages = shape
        on = self.streams[stream]
        if name == "copy engine":
            step = min(nbytes, target.nbytes, source.nbytes)
            for _ in range(nbytes // step):
                cupy.cuda.runtime.memcpyAsync(
                    target.data.ptr, source.data.ptr, step, cupy.cuda.runtime.memcpyDefault, on.ptr
                )
            return
        sizes = [size if chunk else size // 16 for size in (nbytes, target.nbytes, source.nbytes)]
        numbers = [np.uint64(number) for number in (target.data.ptr, source.data.ptr, *sizes)]
        pipe = [np.uint32(chunk), np.uint32(stages)] if chunk else []
        self.kernels[name](
            (blocks,), (threads,), (*numbers, *pipe), shared_mem=chunk * stages, stream=on
        )


def pull(gpu: Gpu, peer: Gpu, nbytes: int, shape: Shape) -> None:
    gpu.move(gpu.target, peer.slots, nbytes, shape)


def fill(peer: Gpu, nbytes: int) -> None:
    peer.move(peer.slots, peer.source, nbytes, BESIDE, stream=1)


def push(gpu: Gpu, peer: Gpu, nbytes: int, shape: Shape) -> None:
    gpu.move(peer.slots, gpu.source, nbytes, shape)


def empty(peer: Gpu, nbytes: int) -> None:
    peer.move(peer.target, peer.slots, nbytes, BESIDE, stream=1)


def fetch(gpu: Gpu, peer: Gpu, nbytes: int, shape: Shape) -> None:
    gpu.move(gpu.target, peer.source, nbytes, shape)


#: what the first GPU does with the second, and what the second does meanwhile, if anything
WAYS: dict[
    str, tuple[Callable[[Gpu, Gpu, int, Shape], None], Callable[[Gpu, int], None] | None]
] = {
    "pull from slots": (pull, fill),
    "push to slots": (push, empty),
    "pull from the array": (fetch, None),
}


def rate(
    gpus: list[Gpu],
    way: str,
    nbytes: int,
    shape: Shape,
    *,
    both: bool = False,
    beside: bool = False,
) -> float:
    """Return GB/s of one direction: the median of the slower GPU."""
    work, meanwhile = WAYS[way]
    times = []
    for _ in range(TURNS):
        synchronize(gpus)
        if beside and meanwhile is not None:
            with cupy.cuda.Device(1):
                meanwhile(gpus[1], nbytes)
        pairs = []
        for gpu, peer in ((gpus[0], gpus[1]), (gpus[1], gpus[0]))[: 1 + both]:
            with cupy.cuda.Device(gpu.ordinal):
                pairs.append((cupy.cuda.Event(), cupy.cuda.Event()))
                pairs[-1][0].record(gpu.streams[0])
                work(gpu, peer, nbytes, shape)
                pairs[-1][1].record(gpu.streams[0])
        for _, end in pairs:
            end.synchronize()
        times.append(max(cupy.cuda.get_elapsed_time(*pair) for pair in pairs))
    return nbytes / statistics.median(times) / 1e6


def synchronize(gpus: list[Gpu]) -> None:
    for gpu in gpus:
        with cupy.cuda.Device(gpu.ordinal) as device:
            device.synchronize()


def check(gpus: list[Gpu], shape: Shape) -> None:
    """Check that every byte arrives."""
    with cupy.cuda.Device(0):
        gpus[0].target.fill(0)
        cupy.cuda.Device(0).synchronize()
        fetch(gpus[0], gpus[1], max(SIZES), shape)
        cupy.cuda.Device(0).synchronize()
        wrong = int((gpus[0].target != 2).sum())
    if wrong:
        raise SystemExit(f"{wrong} bytes have not come: {shape}")


def main() -> None:
    gpus = [Gpu(0), Gpu(1)]
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(f"{name}, CUDA {cupy.cuda.runtime.runtimeGetVersion()}, CuPy {cupy.__version__}")
    print("GB/s: one way, both ways, one way beside copies into or out of the slots", flush=True)
    for shape in SHAPES:
        check(gpus, shape)
        words = " x ".join(map(str, filter(None, shape)))
        for nbytes in SIZES:
            for way, (_, meanwhile) in WAYS.items():
                rates = [rate(gpus, way, nbytes, shape), rate(gpus, way, nbytes, shape, both=True)]
                if meanwhile is not None:
                    rates.append(rate(gpus, way, nbytes, shape, beside=True))
                print(
                    f"{words:26} {way:20} {nbytes:>11} B "
                    f" {'  '.join(f'{each:6.1f}' for each in rates)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
