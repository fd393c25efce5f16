"""Memory and streams of one rank: on a GPU with PyTorch, or in CPU memory with a single stream.

``emulated`` has a third kind. Accesses to a buffer are ordered, by events between streams;
different buffers are independent. The library orders the operations of a communicator except in
graphs, whose replays it does not see: a replay runs ``alone``, between the earlier and later work
of all streams.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miraccl.types import DType
from tests.gpu.programs import records
from tests.gpu.programs.draw_calls import NSTREAMS
from tests.gpu.programs.values import KINDS, parts, pool
from tests.runtime.reference import DTYPES

_SIGNED = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


@dataclass(frozen=True)
class BufferMemory:
    """Buffer memory: ``array`` provides parts for calls, ``bits`` the same memory as integers."""

    array: Any
    bits: Any


def torch_dtype(dtype: DType) -> Any:
    import torch

    return getattr(torch, {DType.FLOAT8_E4M3: "float8_e4m3fn"}.get(dtype, dtype.label))


def on_host(count: int, dtype: DType, skew: int, as_torch: bool, whole: Any = None) -> BufferMemory:
    """Return memory in the host; ``whole``: in place, else a copy."""
    kind = DTYPES[dtype]
    whole = np.empty(count + skew, kind) if whole is None else whole
    bits = whole[skew:].view(_SIGNED[dtype.itemsize])
    bits[:] = 0
    if not as_torch:
        return BufferMemory(whole[skew:], bits)
    import torch

    return BufferMemory(torch.from_numpy(bits).view(torch_dtype(dtype)), bits)


class CpuMemory:
    """Memory of a program on the CPU; ``memory`` by buffer."""

    on_gpu = False

    def __init__(self) -> None:
        self.memory: dict[int, BufferMemory] = {}

    def allocate(self, buffer: records.Buffer, rank: int, empty: Callable[..., Any] | None) -> None:
        """Allocate a buffer; ``empty`` allocates window memory."""
        skew = buffer.skews[rank]
        whole = None if empty is None else empty(buffer.count + skew, DTYPES[buffer.dtype])
        self.memory[buffer.number] = on_host(
            buffer.count, buffer.dtype, skew, buffer.as_torch, whole
        )

    def part(self, view: records.View, index: int) -> Any:
        return self.memory[view.buffer].array[view.of(index)]

    def fill(self, buffer: records.Buffer, kind: str, rank: int, salt: int) -> None:
        bits = self.memory[buffer.number].bits
        values = pool(buffer.dtype, kind).view(bits.dtype)
        for place, first, count in parts(buffer.count, rank, salt):
            bits[place : place + count] = values[first : first + count]

    def copy(self, source: records.View, target: records.View, rank: int) -> None:
        self.memory[target.buffer].bits[target.of(rank)] = self.memory[source.buffer].bits[
            source.of(rank)
        ]

    @contextlib.contextmanager
    def using(
        self, stream: int, buffers: Sequence[int], *, names_stream: bool = False
    ) -> Iterator[Any]:
        """Order work inside the block after earlier work on these buffers; yield the stream to
        name,
        if any.
        """
        yield None

    @contextlib.contextmanager
    def alone(self, stream: int) -> Iterator[None]:
        """Order work of a stream inside the block after all earlier and before all later work."""
        yield

    def enter_thread(self) -> None:
        """Prepare another thread."""

    def capture(self, stream: int, body: Callable[[], None]) -> Callable[[], None]:
        """Return a function that replays ``body``."""
        return body

    def stall(self, stream: int, milliseconds: float) -> None:
        """Delay a stream."""

    def synchronize(self) -> None:
        """Wait for all streams."""

    def read(self, thing: Any) -> Any:
        """Return the bits of a result."""
        return bits_of(thing)

    def close(self) -> None:
        self.memory.clear()


def bits_of(thing: Any) -> Any:
    """Return the elements of a CPU array as integers of their size."""
    if isinstance(thing, np.ndarray):
        return np.ascontiguousarray(thing).reshape(-1).view(_SIGNED[thing.dtype.itemsize])
    import torch

    flat = thing.detach().contiguous().view(-1)
    return flat.view(getattr(torch, _SIGNED[flat.element_size()])).numpy()


class GpuBuffersMemory(CpuMemory):
    """Memory with GPU streams, whose kind a subclass defines. ``_streams[0]`` is the default
    stream.
    """

    on_gpu = True
    _streams: Sequence[Any]

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[
            int, tuple[Any, Any]
        ] = {}  # stream and event of the last access to a buffer
        self._capturing: int | None = None

    def _event_in(self, stream: Any) -> Any:
        """Record and return an event in a stream."""
        raise NotImplementedError

    def _wait(self, stream: Any, event: Any) -> None:
        raise NotImplementedError

    def _current(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Make this stream current inside the block."""
        raise NotImplementedError

    def _captured(self, stream: Any, body: Callable[[], None]) -> Callable[[], None]:
        """Return a function that replays ``body`` in the current stream."""
        raise NotImplementedError

    def _stream(self, number: int) -> Any:
        """Return a stream; a capture must not use the default one."""
        return self._streams[
            self._capturing if self._capturing is not None and number == 0 else number
        ]

    @contextlib.contextmanager
    def using(
        self, stream: int, buffers: Sequence[int], *, names_stream: bool = False
    ) -> Iterator[Any]:
        chosen = self._stream(stream)
        for buffer in buffers:
            last = self._last.get(buffer)
            if last is not None and last[0] is not chosen:
                self._wait(chosen, last[1])
        if names_stream:
            yield chosen
        else:
            with self._current(chosen):
                yield None
        self._last |= dict.fromkeys(buffers, (chosen, self._event_in(chosen)))

    @contextlib.contextmanager
    def alone(self, stream: int) -> Iterator[None]:
        chosen = self._stream(stream)
        with self._between(chosen), self._current(chosen):
            yield

    @contextlib.contextmanager
    def _between(self, chosen: Any) -> Iterator[None]:
        """Order work of a stream after earlier and before later work of all streams."""
        others = [s for s in self._streams[self._capturing is not None :] if s is not chosen]
        for other in others:
            self._wait(chosen, self._event_in(other))
        yield
        for other in others:
            self._wait(other, self._event_in(chosen))

    def capture(self, stream: int, body: Callable[[], None]) -> Callable[[], None]:
        self.synchronize()
        main, others = (
            self._streams[stream],
            [s for i, s in enumerate(self._streams) if i not in (0, stream)],
        )

        def whole() -> None:
            for other in others:
                self._wait(other, self._event_in(main))
            body()
            for other in others:
                self._wait(main, self._event_in(other))

        self._capturing = stream
        try:
            return self._captured(main, whole)
        finally:
            self._capturing = None
            self._last.clear()  # events of a capture are no events outside

    def synchronize(self) -> None:
        self._last.clear()


class Cuda(GpuBuffersMemory):
    def __init__(self, ordinal: int) -> None:
        import torch

        super().__init__()
        self._torch, self._ordinal = torch, ordinal
        self.enter_thread()
        self._streams = [
            torch.cuda.current_stream(),
            *(torch.cuda.Stream() for _ in range(NSTREAMS - 1)),
        ]

    def enter_thread(self) -> None:
        self._torch.cuda.set_device(self._ordinal)

    def allocate(self, buffer: records.Buffer, rank: int, empty: Callable[..., Any] | None) -> None:
        if not buffer.on_gpu:
            super().allocate(buffer, rank, empty)
            return
        dtype, skew = torch_dtype(buffer.dtype), buffer.skews[rank]
        if empty is None:
            whole = self._torch.zeros(
                (buffer.count + skew) * buffer.dtype.itemsize,
                dtype=self._torch.uint8,
                device="cuda",
            ).view(dtype)
        else:
            whole = empty(buffer.count + skew, dtype, device="cuda")
        bits = getattr(self._torch, _SIGNED[buffer.dtype.itemsize])
        self.memory[buffer.number] = BufferMemory(whole[skew:], whole.view(bits)[skew:])
        for kind in KINDS:
            on_device(buffer.dtype, kind)  # now, not inside of a capture

    def fill(self, buffer: records.Buffer, kind: str, rank: int, salt: int) -> None:
        if not buffer.on_gpu:
            super().fill(buffer, kind, rank, salt)
            return
        bits, values = self.memory[buffer.number].bits, on_device(buffer.dtype, kind)
        for place, first, count in parts(buffer.count, rank, salt):
            bits[place : place + count].copy_(values[first : first + count])

    def copy(self, source: records.View, target: records.View, rank: int) -> None:
        here, there = (self.memory[v.buffer].bits[v.of(rank)] for v in (source, target))
        if isinstance(here, np.ndarray) and isinstance(there, np.ndarray):
            there[:] = here
        else:
            here, there = (
                self._torch.from_numpy(b) if isinstance(b, np.ndarray) else b for b in (here, there)
            )
            there.copy_(here)

    def _event_in(self, stream: Any) -> Any:
        return stream.record_event()

    def _wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def _current(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self._torch.cuda.stream(stream)
        return context

    def _captured(self, stream: Any, body: Callable[[], None]) -> Callable[[], None]:
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=stream):
            body()
        replay: Callable[[], None] = graph.replay
        return replay

    def stall(self, stream: int, milliseconds: float) -> None:
        with self._current(self._stream(stream)):
            self._torch.cuda._sleep(int(milliseconds * 1_500_000))  # cycles

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()
        super().synchronize()

    def read(self, thing: Any) -> Any:
        if isinstance(thing, self._torch.Tensor):
            bits = getattr(self._torch, _SIGNED[thing.element_size()])
            return bits_of(thing.detach().contiguous().view(-1).view(bits).cpu())
        return bits_of(thing)


@functools.cache
def on_device(dtype: DType, kind: str) -> Any:
    """Return the bits of ``values.pool`` on the GPU."""
    import torch

    return torch.from_numpy(pool(dtype, kind).view(_SIGNED[dtype.itemsize]).copy()).cuda()
