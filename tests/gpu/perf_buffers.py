"""``tools.perf.gpu_buffers`` on a real GPU: ``python -m tests.gpu.perf_buffers`` prints ``fine`` or
fails.

A process of its own, because of its CUDA context.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from miraccl.executor.cuda.gpu import Gpu
from miraccl.tools.perf import data, device_check
from miraccl.tools.perf.device_array import Arena
from miraccl.tools.perf.gpu_buffers import GpuBuffers
from miraccl.tools.perf.spec import ITEMSIZES, build_case

NBYTES = 64 << 20


def patterns(buffers: GpuBuffers, arena: Arena) -> None:
    """GPU and CPU agree on patterns, and the GPU finds exactly the changed elements."""
    for dtype, itemsize in ITEMSIZES.items():
        arena.reset()
        case = build_case("all_gather", 6 << 20, nranks=3, dtype=dtype)
        array = arena.allocate(case.output_count, dtype)
        device_check.poison(buffers, array)
        assert device_check.count_wrong(buffers, case, array, 1, 7) == array.count, dtype
        for rank in range(3):
            device_check.fill_input(
                buffers, case, array[rank * case.count : (rank + 1) * case.count], rank, 7
            )
        host: Any = np.empty(array.count, array.dtype)
        buffers.read(array.address, host)
        assert data.count_wrong(case, host, data.expected_output(case, 1, 7)) == 0, dtype
        assert device_check.count_wrong(buffers, case, array, 1, 7) == 0, dtype
        for element in (0, case.count, array.count - 1):
            host.view(np.uint8)[element * itemsize] ^= 1
        buffers.write(array.address, host)
        assert device_check.count_wrong(buffers, case, array, 1, 7) == 3, dtype


def graphs(buffers: GpuBuffers, arena: Arena) -> None:
    """A captured stream runs at each replay; a failed capture leaves the stream usable."""
    arena.reset()
    array, host = arena.allocate(16, "uint8"), np.empty(16, np.uint8)
    buffers.set_bytes(array.address, 16, 1)
    replay = buffers.capture(lambda: buffers.set_bytes(array.address, 8, 9))
    buffers.read(array.address, host)
    assert host.tolist() == [1] * 16
    for _ in range(3):
        buffers.set_bytes(array.address, 16, 1)
        assert buffers.time_us(replay) > 0
        buffers.read(array.address, host)
        assert host.tolist() == [9] * 8 + [1] * 8
    with contextlib.suppress(ZeroDivisionError):
        buffers.capture(lambda: 1 // 0)
    buffers.set_bytes(array.address, 16, 2)
    buffers.read(array.address, host)
    assert host.tolist() == [2] * 16
    buffers.drop_graphs()


def clock(buffers: GpuBuffers) -> None:
    """A pause takes time on the GPU: 400 000 cycles are 0.1 to 2 ms at 0.2 to 4 GHz; ten take
    longer.
    """
    buffers.pause()
    one, ten = buffers.time_us(buffers.pause), buffers.time_us(lambda: buffers.pause(10))
    assert 50 < one < 5000
    assert ten > 3 * one


def main() -> None:
    gpu = Gpu(0)
    card, arena = GpuBuffers(gpu), Arena(gpu.allocate(NBYTES), NBYTES, 0)
    assert card.free_bytes() > 0
    for check in (patterns, graphs):
        check(card, arena)
    clock(card)
    card.close()
    gpu.close()
    print("fine")


if __name__ == "__main__":
    main()
