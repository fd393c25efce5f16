"""Ordering of a peer's packets after local stores to the same address, and the cost of ensuring it.

Run ``python bench/gpu_litmus.py`` (two GPUs, CuPy). Packets go back and forth between two GPUs,
every thread through one address on each side: it consumes a packet, stores ones there, ensures that
they have landed in one of three ways, and replies, upon which the peer stores the next packet at
the same address. If the ones landed after that packet, the packet would be lost and the thread
would wait forever. Other warps keep the queue to the link full. Kernels rely on the first way
("Slots" of docs/design/kernels.md): loads until the ones are visible; the second is PTX's fence,
the third nothing, for comparison.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gpu_ranks import need_cupy

cupy = need_cupy(2)

MACHINE = Path(__file__).resolve().parents[1] / "src/miraccl/executor/cuda/source/machine.cuh"
KERNEL = """
#define EMPTY 0xffffffffu
extern "C" __global__ void litmus(
    uint4* here, uint4* there, uint4* noise, u64 noise_packets, u32 begins, u32 rounds, u32 way,
    u32 warps, u32* words) {
  volatile u32 *lost = words, *wrong = words + 1, *stop = words + 2, *done = words + 3;
  u32 warp = threadIdx.x / 32;
  if (warp >= warps) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; !*stop;
         i += (u64)gridDim.x * blockDim.x)
      store_packet(noise + i % noise_packets, make_uint4(i, i, i, i));
    return;
  }
  u32 place = (blockIdx.x * warps + warp) * 32 + threadIdx.x % 32;
  uint4 *q = here + place, *to = there + place;
  for (u32 k = 1; k <= rounds; k++) {
    if (begins) store_packet(to, make_uint4(k, k, k, k));
    u32 spins = 0;
    uint4 p = load_packet(q);
    while (p.x == EMPTY || p.y == EMPTY || p.z == EMPTY || p.w == EMPTY) {
      if (++spins > 1u << 21 || *lost) { atomicAdd((u32*)lost, 1u); *stop = 1; return; }
      p = load_packet(q);
    }
    if (p.x != k || p.w != k) atomicAdd((u32*)wrong, 1u);
    *q = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
    if (way == 0) do p = load_packet(q); while ((p.x & p.y & p.z & p.w) != EMPTY);
    if (way == 1) fence();
    if (!begins) store_packet(to, make_uint4(k, k, k, k));
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0 && atomicAdd((u32*)done, 1u) == gridDim.x * warps - 1) *stop = 1;
}
"""
WAYS = ("seen", "fence", "neither")
SHAPES = (
    (1, 64, 1),
    (132, 64, 2),
    (132, 256, 1),
    (132, 512, 4),
    (132, 1024, 16),
    (264, 1024, 8),
)  # blocks, threads, warps of packets
ROUNDS, NOISE_BYTES = 20_000, 64 << 20


def prepare(ordinal: int) -> dict[str, Any]:
    """Allocate and compile for GPU ``ordinal``, which must be current."""
    cupy.cuda.runtime.deviceEnablePeerAccess(1 - ordinal)
    text = "#define ARCH 90\n" + MACHINE.read_text() + KERNEL
    return {
        "kernel": cupy.RawModule(code=text, options=("-std=c++17",), backend="nvrtc").get_function(
            "litmus"
        ),
        "packets": cupy.zeros(4 * 32 * 264 * 8, dtype=cupy.uint32),
        "noise": cupy.zeros(NOISE_BYTES // 4, dtype=cupy.uint32),
        "words": cupy.zeros(4, dtype=cupy.uint32),
        "stream": cupy.cuda.Stream(non_blocking=True),
    }


def run(
    gpus: list[dict[str, Any]], way: int, blocks: int, threads: int, warps: int
) -> tuple[int, int, float]:
    """Return (packets lost, wrong packets, microseconds per round)."""
    for ordinal, gpu in enumerate(gpus):
        with cupy.cuda.Device(ordinal) as device:
            gpu["packets"].fill(0xFFFFFFFF)
            gpu["words"].fill(0)
            device.synchronize()
    events = []
    for ordinal, (gpu, peer) in enumerate(zip(gpus, reversed(gpus), strict=True)):
        numbers = (
            NOISE_BYTES // 16,
            *(np.uint32(number) for number in (ordinal == 0, ROUNDS, way, warps)),
        )
        pointers = (gpu["packets"].data.ptr, peer["packets"].data.ptr, peer["noise"].data.ptr)
        with cupy.cuda.Device(ordinal):
            events.append([cupy.cuda.Event(), cupy.cuda.Event()])
            events[-1][0].record(gpu["stream"])
            gpu["kernel"](
                (blocks,),
                (threads,),
                (*pointers, *numbers, gpu["words"].data.ptr),
                stream=gpu["stream"],
            )
            events[-1][1].record(gpu["stream"])
    counts = []
    for ordinal, gpu in enumerate(gpus):
        with cupy.cuda.Device(ordinal):
            gpu["stream"].synchronize()
            counts.append(gpu["words"].get()[:2].tolist())
    lost, wrong = (sum(column) for column in zip(*counts, strict=True))
    return lost, wrong, max(cupy.cuda.get_elapsed_time(*pair) for pair in events) / ROUNDS * 1e3


def main() -> None:
    gpus = []
    for ordinal in (0, 1):
        with cupy.cuda.Device(ordinal):
            gpus.append(prepare(ordinal))
    for way, name in enumerate(WAYS):
        for blocks, threads, warps in SHAPES:
            lost, wrong, us = run(gpus, way, blocks, threads, warps)
            packets = 2e-6 * 32 * warps * blocks * ROUNDS
            found = f"{lost} lost, {wrong} wrong of {packets:.0f} M, {us:.2f} us a round"
            print(f"{name:8} {blocks} x {threads}, {warps} warps of packets: {found}", flush=True)


if __name__ == "__main__":
    main()
