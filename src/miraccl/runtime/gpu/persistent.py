"""Prepared operations on GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miraccl.executor.cuda.contexts import WrongDevice
from miraccl.ops.spec import OpSpec
from miraccl.ops.stream_handles import library_stream_getter
from miraccl.runtime.gpu.operations import DeviceOperations, bind_result


class DevicePersistent:
    """Prepared operation on GPU memory with bound buffers.

    ``op()`` enqueues it in the current stream, ``op(stream=...)`` in another one.
    """

    def __init__(
        self, gpu: DeviceOperations, op: OpSpec, args: Sequence[Any], cpu_plan: Any
    ) -> None:
        """``cpu_plan``: word that identifies the last plan on CPU memory."""
        self.name, self._gpu, self._op = op.name, gpu, op
        self.result, self._args = bind_result(op, args, gpu)
        self._current_stream = next(
            (own for x in args if (own := library_stream_getter(x)) is not None), None
        )
        self._fast_call, self._cpu_plan = gpu.fast.entry(op.name), cpu_plan

    def __call__(self, *, stream: Any = None) -> Any:
        self._cpu_plan[0] = 0
        if stream is None and self._current_stream is not None:
            stream = self._current_stream()
        if not self._fast_call(*self._op.fast_call_arguments(self._args, False, stream)):
            return self.result
        try:
            self._gpu.execute(self._op, self._args, stream)
        except WrongDevice:
            with self._gpu.gpu.device_guard():
                self._gpu.execute(self._op, self._args, stream)
        return self.result

    def __repr__(self) -> str:
        return f"<DevicePersistent {self.name}>"
