"""Jumps of the clock by which kernels measure deadlines, also with processes that share a GPU.

    python bench/gpu_clock.py [--processes 4] [--seconds 20]

Needs a GPU and CuPy. In each process all threads of a GPU read ``%globaltimer`` continuously and
record its steps forward and back. With time-sliced processes it steps forward by the time slices of
the others; it must not step back, nor forward by more than these slices (``check_wait`` of
executor/cuda/source/common.cuh tolerates both). The 64 bits are read by one instruction (CS2R,
sm_70 to sm_100); a reading in halves, wrong once in 4.3 s, would be visible as well.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path

from gpu_ranks import need_cupy

MACHINE = Path(__file__).resolve().parents[1] / "src/miraccl/executor/cuda/source/machine.cuh"
READINGS, BLOCKS, THREADS = 1 << 20, 264, 256
KERNEL = """
extern "C" __global__ void read_clock(u64* forward, u64* back, u64* times_back, u32 readings) {
  u64 before = now_ns(), most = 0, least = 0, times = 0;
  for (u32 k = 0; k < readings; k++) {
    u64 now = now_ns();
    i64 step = (i64)(now - before);
    if (step > (i64)most) most = step;
    if (step < 0) { times++; if ((u64)-step > least) least = -step; }
    before = now;
  }
  atomicMax(forward, most);
  atomicMax(back, least);
  atomicAdd(times_back, times);
}
"""


def read_for(seconds: float, ordinal: int) -> tuple[int, int, int, int]:
    """Return (launches, largest step forward, largest step back, steps back), in ns."""
    import cupy
    import numpy as np

    with cupy.cuda.Device(ordinal):
        text = "#define ARCH 90\n" + MACHINE.read_text() + KERNEL
        kernel = cupy.RawModule(code=text, options=("-std=c++17",), backend="nvrtc").get_function(
            "read_clock"
        )
        found, launches, end = cupy.zeros(3, dtype=cupy.uint64), 0, time.monotonic() + seconds
        while time.monotonic() < end:
            pointers = (found.data.ptr, found.data.ptr + 8, found.data.ptr + 16)
            kernel((BLOCKS,), (THREADS,), (*pointers, np.uint32(READINGS)))
            cupy.cuda.Stream.null.synchronize()
            launches += 1
        return (launches, *(int(number) for number in found.get()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=4, help="on the GPU at a time")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each reads")
    parser.add_argument("--gpu", type=int, default=0, help="its number")
    options = parser.parse_args()
    need_cupy(options.gpu + 1)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        rows = pool.starmap(read_for, [(options.seconds, options.gpu)] * options.processes)
    for launches, forward, back, times in rows:
        readings = 1e-9 * launches * READINGS * BLOCKS * THREADS
        print(
            f"{readings:.1f} thousand million readings, at most {forward / 1e3:.3f} us on,"
            f" {times} times back, at most {back} ns"
        )


if __name__ == "__main__":
    main()
