"""Objects kept alive until the GPU has finished with them."""

from __future__ import annotations

from collections import deque
from typing import Any

from miraccl.executor.cuda.gpu import Gpu


class KeepAlive:
    """Keep-alive list of a GPU; objects of captured operations are kept until ``close``."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._waiting: deque[tuple[Any, Any]] = deque()
        self._captured: list[Any] = []

    def retain(self, objects: Any, stream: int) -> None:
        """Keep ``objects`` alive until all work now in ``stream`` has ended."""
        with self.gpu.device_guard():  # the fast path calls this, too
            self._retain(objects, stream)

    def _retain(self, objects: Any, stream: int) -> None:
        while self._waiting and self.gpu.has_completed(self._waiting[0][0]):
            self.gpu.destroy_event(self._waiting.popleft()[0])
        if self.gpu.is_capturing(stream):
            self._captured.append(objects)
            return
        event = self.gpu.make_event()
        self.gpu.record(event, stream)
        self._waiting.append((event, objects))

    def close(self) -> None:
        while self._waiting:
            self.gpu.destroy_event(self._waiting.popleft()[0])
        self._captured.clear()
