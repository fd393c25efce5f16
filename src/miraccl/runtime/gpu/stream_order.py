"""Order of one communicator's operations over several streams: each waits for the previous one.

``launch_order`` orders the launches of several communicators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from typing import Any

from miraccl.executor.cuda.gpu import Gpu
from miraccl.executor.cuda.launch import driver_addresses
from miraccl.fastpath.cuda.table import CudaFastPath
from miraccl.ops.stream_handles import cupy_stream, find_current_stream, stream_handle

#: stream objects retained, besides those of the last operations
MAX_KEPT_STREAMS = 16


class StreamKeepAlive:
    """Stream objects kept alive because their handles are still in use."""

    # CuPy destroys a stream with its object, and the next operation in another stream queries the
    # last one. Querying a destroyed stream aborts the process (driver 580.159).

    def __init__(self, in_use: Callable[[], Container[int]]) -> None:
        """``in_use()``: handles of the streams of the last operations."""
        self._in_use = in_use
        self._objects: dict[
            tuple[int, type], Any
        ] = {}  # by handle and type: a borrowing object does not replace the owner

    def retain(self, number: int, stream: Any) -> None:
        key = number, type(stream)
        if key not in self._objects and len(self._objects) >= MAX_KEPT_STREAMS:
            used = self._in_use()
            self._objects = {key: kept for key, kept in self._objects.items() if key[0] in used}
        self._objects[key] = stream

    def release(self) -> None:
        self._objects.clear()


class StreamOrder:
    """Stream of a communicator's last operation, and the order of the next one after it."""

    def __init__(self, gpu: Gpu, fast_path: CudaFastPath) -> None:
        """``fast_path`` records the last stream and orders further ones itself if it can."""
        self._gpu, self._fast_path = gpu, fast_path
        self._last_uncaptured = (
            -1
        )  # stream of the last uncaptured operation while captured ones follow
        self._keep_alive = StreamKeepAlive(lambda: (fast_path.stream, self._last_uncaptured))
        self._current: Callable[[int], int] | None = None
        fast_path.set_cupy_stream_query(functools.partial(cupy_stream, self._keep_alive.retain))
        self._event = gpu.make_event()  # with which the fast path orders two streams
        if all(
            calls := driver_addresses(gpu, "cuEventRecord", "cuStreamWaitEvent", "cuCtxGetCurrent")
        ):
            fast_path.enable_stream_switches(int(self._event), calls, gpu.context)

    def handle(self, stream: Any) -> int:
        """Return the CUstream handle of a stream argument; None is the current stream."""
        if stream is None:
            if self._current is None:
                self._current = find_current_stream(self._keep_alive.retain)
                self._fast_path.set_stream_query(self._current)
            return self._current(self._gpu.ordinal)
        number = stream_handle(stream)
        if type(stream) is not int:
            self._keep_alive.retain(number, stream)
        return number

    def follow(self, stream: Any) -> int:
        """Return the handle of ``stream``, whose further work follows the last operation."""
        number = self.handle(stream)
        if number != self._fast_path.stream or self._fast_path.captured:
            self._change(number)
        return number

    def _change(self, number: int) -> None:
        """Order the first call in another stream, or after a capture.

        Outside captures it waits for the last operation outside captures, inside one for the last
        captured operation.
        """
        capture = self._gpu.capture_id(number)
        before = self.last_stream(capture)
        if not self._fast_path.captured:
            self._last_uncaptured = self._fast_path.stream
        self._fast_path.stream, self._fast_path.captured = number, capture != 0
        if before not in (-1, number):
            self._fast_path.release()
            self._gpu.order_streams(before, number)

    def last_stream(self, capture: int) -> int:
        """Return the stream of the last operation in ``capture`` (0: none); -1 if there is none."""
        last = (
            self._last_uncaptured
            if self._fast_path.captured and not capture
            else self._fast_path.stream
        )
        return last if last != -1 and self._gpu.capture_id(last) == capture else -1

    def release_streams(self) -> None:
        """Release the stream objects; the GPU has finished its work."""
        self._keep_alive.release()

    def close(self) -> None:
        self._gpu.destroy_event(self._event)
