"""GPU access of the measurement: stream, timing, graphs, copies, and kernels for patterns.

Uses the CUDA driver and NVRTC through the package that miraccl uses. All work goes to one stream;
``address`` is a number in the GPU's address space, counts are elements. Inputs are generated and
results compared on the GPU, because copying a gigabyte would dominate the run time;
``device_check.py`` decides when the CPU compares.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from miraccl.executor.cuda import toolkit
from miraccl.executor.cuda.driver import check
from miraccl.executor.cuda.gpu import Gpu
from miraccl.tools.perf.data import PERIOD, Array

PAUSE_CYCLES = 400_000  # 0.2 ms at 2 GHz, in which hosts enqueue the batch
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_BLOCKS, _THREADS = 1024, 256
WIDTHS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}

_SOURCE = """
typedef unsigned long long u64;
extern "C" __global__ void tile(T* x, const T* table, u64 count, u64 phase) {
  u64 step = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
    x[i] = table[(i + phase) % PERIOD];
}
extern "C" __global__ void count_different(
    const T* x, const T* table, u64 count, u64 phase, u64* wrong) {
  u64 step = (u64)gridDim.x * blockDim.x, mine = 0;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
    mine += x[i] != table[(i + phase) % PERIOD];
  if (mine) atomicAdd(wrong, mine);
}
extern "C" __global__ void spin(u64 cycles) {
  long long begin = clock64();
  while ((u64)(clock64() - begin) < cycles) {}
}
"""


def source(itemsize: int) -> str:
    """Return the source of the kernels for elements of ``itemsize`` bytes."""
    return f"#define T {WIDTHS[itemsize]}\n#define PERIOD {PERIOD}ull\n{_SOURCE}"


class GpuBuffers:
    """One GPU with the stream of the measurement.

    ``stream`` is a stream handle, None to create one.
    """

    def __init__(self, gpu: Gpu, stream: int | None = None) -> None:
        self.gpu, self._cuda = gpu, gpu.cuda
        self._own_stream: Any = None
        if stream is None:
            self._own_stream = check(self._cuda.cuStreamCreate(_NON_BLOCKING), "cuStreamCreate")
        self.stream: int = int(self._own_stream) if stream is None else stream
        self._begin = check(self._cuda.cuEventCreate(0), "cuEventCreate")
        self._end = check(self._cuda.cuEventCreate(0), "cuEventCreate")
        # One period of the widest type, then the count of differences.
        self._tables = gpu.allocate(8 * PERIOD + 8)
        self._functions: dict[tuple[str, int], Any] = {}
        self._graphs: list[Any] = []

    # ---- memory

    def write(self, address: int, host: Array) -> None:
        """Copy a contiguous array to the GPU."""
        host = np.ascontiguousarray(host)
        check(
            self._cuda.cuMemcpyHtoDAsync(address, host.ctypes.data, host.nbytes, self.stream),
            "cuMemcpyHtoDAsync",
        )
        self.wait()

    def read(self, address: int, host: Array) -> None:
        """Copy from the GPU into a contiguous array."""
        check(
            self._cuda.cuMemcpyDtoHAsync(host.ctypes.data, address, host.nbytes, self.stream),
            "cuMemcpyDtoHAsync",
        )
        self.wait()

    def set_bytes(self, address: int, nbytes: int, value: int) -> None:
        if nbytes:
            check(
                self._cuda.cuMemsetD8Async(address, value, nbytes, self.stream), "cuMemsetD8Async"
            )

    def tile(self, address: int, count: int, table: Array, phase: int) -> None:
        """Set ``x[i] = table[(i + phase) % PERIOD]`` for ``count`` elements; the table has
        ``PERIOD``.
        """
        if count:
            self.write(self._tables, table)
            self._launch("tile", table.itemsize, (address, self._tables, count, phase % PERIOD))

    def count_different(self, address: int, count: int, table: Array, phase: int) -> int:
        """Count the elements whose bits differ from ``table[(i + phase) % PERIOD]``."""
        if not count:
            return 0
        self.write(self._tables, table)
        wrong = self._tables + 8 * PERIOD
        self.set_bytes(wrong, 8, 0)
        self._launch(
            "count_different", table.itemsize, (address, self._tables, count, phase % PERIOD, wrong)
        )
        found = np.zeros(1, np.uint64)
        self.read(wrong, found)
        return int(found[0])

    def free_bytes(self) -> int:
        """Return the free memory of the GPU."""
        return int(check(self._cuda.cuMemGetInfo(), "cuMemGetInfo")[0])

    # ---- time

    def wait(self) -> None:
        """Wait until all work of the stream has ended."""
        check(self._cuda.cuStreamSynchronize(self.stream), "cuStreamSynchronize")

    def pause(self, times: int = 1) -> None:
        """Keep the stream busy for ``times * PAUSE_CYCLES`` clock cycles."""
        self._launch("spin", 1, (times * PAUSE_CYCLES,), blocks=1, threads=1)

    def time_us(self, run: Callable[[], Any]) -> float:
        """Return the GPU time of the work that ``run`` enqueues, in microseconds; wait for it."""
        check(self._cuda.cuEventRecord(self._begin, self.stream), "cuEventRecord")
        run()
        check(self._cuda.cuEventRecord(self._end, self.stream), "cuEventRecord")
        check(self._cuda.cuEventSynchronize(self._end), "cuEventSynchronize")
        return (
            float(
                check(self._cuda.cuEventElapsedTime(self._begin, self._end), "cuEventElapsedTime")
            )
            * 1e3
        )

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Capture a CUDA graph of the work that ``run`` enqueues; return a function that replays
        it.

        The graph is valid until ``drop_graphs``.
        """
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(self._cuda.cuStreamBeginCapture(self.stream, mode), "cuStreamBeginCapture")
        try:
            run()
        except BaseException:
            # The stream is usable again whatever this returns.
            self._cuda.cuStreamEndCapture(self.stream)
            raise
        graph = check(self._cuda.cuStreamEndCapture(self.stream), "cuStreamEndCapture")
        try:
            replayed = check(self._cuda.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
        finally:
            self._cuda.cuGraphDestroy(graph)
        self._graphs.append(replayed)
        launch, stream = self._cuda.cuGraphLaunch, self.stream

        def replay() -> None:
            check(launch(replayed, stream), "cuGraphLaunch")

        return replay

    def drop_graphs(self) -> None:
        """Destroy the captured graphs, which must have ended."""
        graphs, self._graphs = self._graphs, []
        for graph in graphs:
            self._cuda.cuGraphExecDestroy(graph)

    def close(self) -> None:
        """Free the resources made here; the GPU stays open. May be called twice."""
        tables, self._tables = self._tables, 0
        if not tables:
            return
        self.drop_graphs()
        self.gpu.free(tables)
        # A context broken by a failed kernel frees everything itself.
        with contextlib.suppress(Exception):
            self._cuda.cuEventDestroy(self._begin)
            self._cuda.cuEventDestroy(self._end)
            if self._own_stream is not None:
                self._cuda.cuStreamDestroy(self._own_stream)

    # ---- kernels

    def _function(self, name: str, itemsize: int) -> Any:
        key = (name, itemsize)
        if key not in self._functions:
            cubin = toolkit.compile_cubin(
                source(itemsize), self.gpu.arch, f"perf-patterns-{itemsize}"
            )
            self._functions[key] = self.gpu.load(cubin, name)
        return self._functions[key]

    def _launch(
        self,
        name: str,
        itemsize: int,
        values: tuple[int, ...],
        blocks: int = _BLOCKS,
        threads: int = _THREADS,
    ) -> None:
        """Launch a kernel; every argument is a 64-bit number or pointer."""
        words = (ctypes.c_uint64 * len(values))(*values)
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.addressof(words) + 8 * i for i in range(len(values)))
        )
        function = self._function(name, itemsize)
        where = ctypes.addressof(pointers)  # the driver copies the arguments before it returns
        check(
            self._cuda.cuLaunchKernel(
                function, blocks, 1, 1, threads, 1, 1, 0, self.stream, where, 0
            ),
            f"cuLaunchKernel({name})",
        )
