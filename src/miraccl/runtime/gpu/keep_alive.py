"""What must live until the GPU has come past it."""

from __future__ import annotations

from collections import deque
from typing import Any

from miraccl.executor.cuda.gpu import Gpu


class KeepAlive:
    """Objects that must live until the GPU has come past where they were handed in; what was captured is kept to the end."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._waiting: deque[tuple[Any, Any]] = deque()
        self._captured: list[Any] = []

    def retain(self, objects: Any, stream: int) -> None:
        """Until everything that is in ``stream`` now has ended."""
        with self.gpu.device_guard():  # doors come here as well
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
