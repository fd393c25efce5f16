"""Memory and streams of an emulated GPU (``tests.gpu.emulated_cuda``): the same kernels, slowly."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from miraccl.executor.cuda.driver import check
from miraccl.ops.device_arrays import DeviceMemory
from miraccl.runtime.gpu.windows import DeviceArray
from tests.gpu.emulated_cuda import EmulatedCuda
from tests.gpu.fake_cuda import place, seen
from tests.gpu.programs import records
from tests.gpu.programs.draw_calls import NSTREAMS
from tests.gpu.programs.memory import BufferMemory, GpuBuffersMemory
from tests.runtime.reference import DTYPES


class Emulated(GpuBuffersMemory):
    """Emulated memory and streams.

    Streams are handles; fills and copies are work of a stream like kernels. Only the default stream
    is ever current, so calls name theirs.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._cuda = EmulatedCuda(home=rank).install()
        self._context = self._cuda.set_current(self._cuda.home)
        self._streams = [0, *(self._cuda.make_stream() for _ in range(NSTREAMS - 1))]
        self._now = 0  # the stream of fills and copies

    def enter_thread(self) -> None:
        self._cuda.cuCtxSetCurrent(self._context)

    def _enqueue(self, stream: int, work: Callable[[], None]) -> None:
        check(self._cuda._put(stream, work), "work of a program")

    def allocate(self, buffer: records.Buffer, rank: int, empty: Callable[..., Any] | None) -> None:
        if not buffer.on_gpu:
            super().allocate(buffer, rank, empty)
            return
        count, skew = buffer.count + buffer.skews[rank], buffer.skews[rank]
        if empty is None:
            whole = place(self._cuda, np.zeros(count, DTYPES[buffer.dtype]))
        else:
            whole = empty(count, DTYPES[buffer.dtype], device="cuda").miraccl_view
        memory: DeviceMemory = whole.slice(skew, buffer.count)
        self.memory[buffer.number] = BufferMemory(
            memory, seen(memory).view(f"i{buffer.dtype.itemsize}")
        )

    def part(self, view: records.View, index: int) -> Any:
        memory = self.memory[view.buffer].array
        if not isinstance(memory, DeviceMemory):
            return super().part(view, index)
        first, count = view.spans[index]
        part = memory.slice(first, count)
        return DeviceArray(part.address, (count,), part.dtype, self)

    def fill(self, buffer: records.Buffer, kind: str, rank: int, salt: int) -> None:
        if buffer.on_gpu:
            self._enqueue(self._now, lambda: super(Emulated, self).fill(buffer, kind, rank, salt))
        else:
            super().fill(buffer, kind, rank, salt)

    def copy(self, source: records.View, target: records.View, rank: int) -> None:
        on_gpu = [isinstance(self.memory[v.buffer].array, DeviceMemory) for v in (source, target)]
        if any(on_gpu):
            self._enqueue(self._now, lambda: super(Emulated, self).copy(source, target, rank))
        else:
            super().copy(source, target, rank)
        if on_gpu[0] != on_gpu[1]:
            check(self._cuda.cuStreamSynchronize(self._now), "cuStreamSynchronize")

    def _event_in(self, stream: Any) -> Any:
        event = check(self._cuda.cuEventCreate(0), "cuEventCreate")
        check(self._cuda.cuEventRecord(event, stream), "cuEventRecord")
        return event

    def _wait(self, stream: Any, event: Any) -> None:
        check(self._cuda.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent")

    @contextlib.contextmanager
    def _current(self, stream: Any) -> Iterator[None]:
        before, self._now = self._now, stream
        yield
        self._now = before

    def _captured(self, stream: Any, body: Callable[[], None]) -> Callable[[], None]:
        self._cuda.begin_capture(stream)
        try:
            body()
        finally:
            graph = self._cuda.end_capture(stream)
        return lambda: self._cuda.streams[self._now].replay(graph)

    def stall(self, stream: int, milliseconds: float) -> None:
        self._enqueue(self._stream(stream), lambda: time.sleep(milliseconds / 1000))

    def synchronize(self) -> None:
        check(self._cuda.cuCtxSynchronize(), "cuCtxSynchronize")
        super().synchronize()
