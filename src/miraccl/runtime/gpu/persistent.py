"""Prepared operations on GPU memory, and the binding of results before an operation runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from miraccl.executor.cuda.contexts import WrongDevice
from miraccl.runtime.gpu.checks import ArgumentChecks
from miraccl.runtime.gpu.stream import library_stream_getter
from miraccl.runtime.gpu.work import StreamBound

#: operations that allocate a result if none is passed: position of `out` in the public arguments
_OUT_POSITION = {
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "gather": 2,
    "scatter": 2,
    "all_gather_v": 2,
    "reduce_scatter_v": 2,
    "all_to_all_v": 3,
    "gather_v": 3,
    "scatter_v": 3,
}


def bind_result(name: str, args: Sequence[Any], gpu: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return (result, arguments with a result array) of an operation that has not run yet.

    ``args``: all arguments in the order of the public method. Invalid arguments raise now. Groups
    use this as well.
    """
    if name == "barrier":
        return None, ()
    given = [list(x) if isinstance(x, Iterator) else x for x in args]  # counts are read twice
    result = getattr(ArgumentChecks(gpu), name)(*given)
    place = _OUT_POSITION.get(name)
    if place is not None and given[place] is None:
        given[place] = result
    return result, tuple(given)


class DevicePersistent:
    """Prepared operation on GPU memory with bound buffers.

    ``op()`` enqueues it in the current stream, ``op(stream=...)`` in another one.
    """

    def __init__(self, gpu: Any, name: str, args: Sequence[Any], cpu_plan: Any) -> None:
        """``cpu_plan``: word that identifies the last plan on CPU memory."""
        self.name, self._gpu = name, gpu
        self.result, bound = bind_result(name, args, gpu)
        current = next((own for x in args if (own := library_stream_getter(x)) is not None), None)
        method = getattr(gpu if current is None else StreamBound(gpu, current), name)
        self._method, self._args, self._cpu_plan = method, bound, cpu_plan

    def __call__(self, *, stream: Any = None) -> Any:
        self._cpu_plan[0] = 0
        try:
            self._method(*self._args, stream=stream)
        except WrongDevice:
            with self._gpu.gpu.device_guard():
                self._method(*self._args, stream=stream)
        return self.result

    def __repr__(self) -> str:
        return f"<DevicePersistent {self.name}>"
