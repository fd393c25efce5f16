"""Inputs and result checks in GPU memory, with the patterns of ``data.py``; every element is
checked.

Results of up to ``HOST_BYTES``, and averages that may round, are copied back and compared by the
CPU code. Larger results are compared bit by bit on the GPU with one period computed on the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from miraccl.tools.perf import data
from miraccl.tools.perf.data import Array, ExpectedSegment
from miraccl.tools.perf.device_array import PerfDeviceArray
from miraccl.tools.perf.spec import Case

HOST_BYTES = 1 << 20
_CHUNK = data.PERIOD << 12  # elements copied back at a time


class PatternMemory(Protocol):
    """Memory operations of a GPU (``gpu_buffers.GpuBuffers``)."""

    def write(self, address: int, host: Array) -> None: ...
    def read(self, address: int, host: Array) -> None: ...
    def set_bytes(self, address: int, nbytes: int, value: int) -> None: ...
    def tile(self, address: int, count: int, table: Array, phase: int) -> None: ...
    def count_different(self, address: int, count: int, table: Array, phase: int) -> int: ...


def fill_input(
    memory: PatternMemory, case: Case, array: PerfDeviceArray, rank: int, seed: int
) -> None:
    """Write the input of ``rank``; ``array`` is the whole input of the operation."""
    table = data.input_table(case, rank, seed).astype(array.dtype)
    memory.tile(array.address, array.count, table, 0)


def poison(memory: PatternMemory, array: PerfDeviceArray) -> None:
    """Fill with bytes 0xFF, as ``data.poison``."""
    memory.set_bytes(array.address, array.nbytes, 0xFF)


def fill_neutral(memory: PatternMemory, case: Case, array: PerfDeviceArray) -> None:
    """Fill with the neutral element, as ``data.fill_neutral``."""
    if case.redop == "prod":
        memory.tile(array.address, array.count, np.ones(data.PERIOD).astype(array.dtype), 0)
    else:
        memory.set_bytes(array.address, array.nbytes, 0)


def count_wrong(
    memory: PatternMemory, case: Case, output: PerfDeviceArray, rank: int, seed: int
) -> int:
    """Count the elements of ``output`` that differ from the expected ones."""
    on_cpu = output.nbytes <= HOST_BYTES or data.relative_tolerance(case) > 0
    compare = _compare_on_cpu if on_cpu else _compare_on_gpu
    return sum(
        compare(memory, case, output, segment) for segment in data.expected_output(case, rank, seed)
    )


def _compare_on_gpu(
    memory: PatternMemory, case: Case, output: PerfDeviceArray, segment: ExpectedSegment
) -> int:
    address = output.address + segment.start * output.dtype.itemsize
    return memory.count_different(
        address, segment.length, segment.table.astype(output.dtype), segment.phase
    )


def _compare_on_cpu(
    memory: PatternMemory, case: Case, output: PerfDeviceArray, segment: ExpectedSegment
) -> int:
    wrong = 0
    for begin in range(0, segment.length, _CHUNK):
        part = np.empty(min(_CHUNK, segment.length - begin), output.dtype)
        memory.read(output.address + (segment.start + begin) * output.dtype.itemsize, part)
        piece = replace(segment, start=0, length=part.size, phase=segment.phase + begin)
        wrong += data.count_wrong(case, part, [piece])
    return wrong
