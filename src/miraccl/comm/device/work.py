"""Operations on GPU memory that are not simply enqueued in the caller's stream: in the background, prepared.

All of it is written against the methods that ``comm.device.DeviceCommunicator`` and ``comm.device.hosts.HostsCommunicator`` share.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from miraccl.comm.device.memory import device_view, empty_like, lies_on_gpu
from miraccl.comm.work import Work, patience
from miraccl.errors import CollectiveTimeout, InvalidUsage, MiracclError
from miraccl.executor.cuda.driver import Gpu

POLL_S = 50e-6


class Kept:
    """Objects that must live until the GPU has come past where they were handed in; what was captured is kept to the end."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._waiting: deque[tuple[Any, Any]] = deque()
        self._captured: list[Any] = []

    def hold(self, objects: Any, stream: int) -> None:
        """Until everything that is in ``stream`` now has ended."""
        while self._waiting and self.gpu.has_passed(self._waiting[0][0]):
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


class DeviceWork(Work):
    """An operation that was started on a stream of its own. Its arrays belong to the library until ``wait`` has been called.

    ``wait()`` makes the current stream wait, never the host; a CUDA graph may capture it.  With a ``timeout``, and in ``synchronize``,
    the host waits.
    """

    def __init__(self, name: str, gpu: Any, stream: int, result: Any, keep: Any) -> None:
        super().__init__(name)
        self._gpu, self._result, self._keep = gpu, result, keep
        self._captured = gpu.gpu.is_capturing(stream)
        self._event: Any = gpu.gpu.make_event()
        gpu.gpu.record(self._event, stream)

    def wait(self, timeout: float | None = None, *, stream: Any = None) -> Any:
        """The result, for use in ``stream`` (None: the current one); raises what is known to have failed by now."""
        number = stream_of(self._gpu, stream)
        self._gpu.gpu.wait_event(number, self._event)
        if timeout is not None:
            self.synchronize(timeout)
        self._gpu.check(self.name)
        return self._result

    def synchronize(self, timeout: float | None = None) -> Any:
        """Wait on the host, ``CollectiveTimeout`` after ``timeout`` seconds; kernels end by themselves at the communicator's deadline."""
        timeout = patience(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            if end is not None and time.monotonic() >= end:
                raise CollectiveTimeout(f"not finished within {timeout:g} s; it goes on on the GPU", op=self.name)
            time.sleep(POLL_S)
        self._gpu.check(self.name)
        self._keep = None
        return self._result

    def done(self) -> bool:
        """Whether the GPU has ended the operation, in success or not."""
        if self._captured:
            raise InvalidUsage(f"{self.name} was captured in a graph; whether it has ended is asked of the graph", op=self.name)
        return bool(self._gpu.gpu.has_passed(self._event))

    is_completed = done

    def exception(self) -> BaseException | None:
        """What is known to have failed by now, or None."""
        try:
            self._gpu.check(self.name)
        except Exception as error:
            return error
        return None

    def __repr__(self) -> str:
        return f"<DeviceWork {self.name}>"

    def __del__(self) -> None:
        event, self._event = getattr(self, "_event", None), None
        if event is not None and not self._gpu.closed:
            self._gpu.gpu.destroy_event(event)


def stream_of(gpu: Any, stream: Any) -> int:
    """A stream of the user's as a number."""
    number: int = getattr(gpu, "local", gpu)._stream_number(stream)
    return number


class Background:
    """The methods of ``gpu``, each started on a stream of the communicator's own; they return a ``DeviceWork``.

    The operation begins after what the current stream holds.  With ``stream`` it runs there, in that stream's order.
    """

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self._own: int | None = None
        self._kept = Kept(gpu.gpu)

    def __getattr__(self, name: str) -> Callable[..., DeviceWork]:
        method = getattr(self._gpu, name)

        def start(*args: Any, stream: Any = None, **more: Any) -> DeviceWork:
            driver: Gpu = self._gpu.gpu
            driver.make_current()
            number = self._fork() if stream is None else stream_of(self._gpu, stream)
            result = method(*args, stream=number, **more)
            keep = (args, more, result)
            if not driver.is_capturing(number):  # memory of captures belongs to their graphs
                self._kept.hold(keep, number)  # the user may let go of everything at once
            return DeviceWork(name, self._gpu, number, result, keep)

        return start

    def close(self) -> None:
        """Give the stream back, after the GPU has ended its work; may be called twice."""
        own, self._own = self._own, None
        if own is None or self._gpu.closed:
            return
        with contextlib.suppress(MiracclError):  # a context that a failed kernel broke needs nothing given back
            self._gpu.gpu.make_current()
            self._gpu.gpu.synchronize()
            self._kept.close()
            self._gpu.gpu.destroy_stream(own)

    def _fork(self) -> int:
        if self._own is None:
            with self._gpu.gpu.outside_of_capture():
                self._own = self._gpu.gpu.make_stream()
        self._gpu.gpu.order_streams(stream_of(self._gpu, None), self._own)
        return self._own


def result_of(name: str, args: Sequence[Any], gpu: Any) -> tuple[Any, tuple[Any, ...]]:
    """(what an operation of ``gpu`` returns, its arguments with an array for the result), where the operation has not run yet.

    ``args`` are in the order of the public methods, all of them.  Arrays that cannot be used are refused now.
    """
    rank, nranks = gpu.rank, gpu.nranks
    unused = None  # by ranks that are not the root
    if name in _PLACE_OF_ROOT and args[_PLACE_OF_ROOT[name]] != rank:
        unused = 0 if name.startswith("scatter") else _PLACE_OF_OUT[name]
    for place, x in enumerate(args):
        if place != unused and lies_on_gpu(x):
            device_view(x, "out" if place == _PLACE_OF_OUT.get(name) else "x", name, gpu=gpu.gpu)
    if name == "barrier":
        return None, ()
    given = list(args)
    at, root = _PLACE_OF_OUT.get(name), given[_PLACE_OF_ROOT[name]] if name in _PLACE_OF_ROOT else rank
    if at is None:  # broadcast
        return given[0], tuple(given)
    if name in ("all_reduce", "reduce"):
        return given[0] if given[at] is None or rank != root else given[at], tuple(given)
    if name in ("gather", "gather_v") and rank != root:
        return None, tuple(given)
    if given[at] is None and given[0] is not None:
        count = _count_of(name, device_view(given[0], "x", name).count, given, rank, nranks)
        given[at] = empty_like(given[0], count, name)
    return given[at], tuple(given)


def _count_of(name: str, count: int, given: Sequence[Any], rank: int, nranks: int) -> int:
    """Elements of the result for an input of ``count``."""
    match name:
        case "all_gather" | "gather":
            return count * nranks
        case "reduce_scatter" | "scatter":
            return count // nranks
        case "all_gather_v" | "gather_v":
            return sum(given[1])
        case "reduce_scatter_v" | "scatter_v":
            return int(given[1][rank])
        case "all_to_all_v":
            return sum(given[2])
    return count


_PLACE_OF_OUT = {
    "all_reduce": 1,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "reduce": 2,
    "gather": 2,
    "scatter": 2,
    "all_gather_v": 2,
    "reduce_scatter_v": 2,
    "all_to_all_v": 3,
    "gather_v": 3,
    "scatter_v": 3,
}
_PLACE_OF_ROOT = {"reduce": 1, "gather": 1, "scatter": 1, "gather_v": 2, "scatter_v": 2}


class DevicePersistent:
    """A prepared operation on GPU memory: ``op()`` enqueues it in the current stream, ``op(stream=...)`` in another. Buffers are bound."""

    def __init__(self, gpu: Any, name: str, args: Sequence[Any], cpu_plan: Any) -> None:
        """``cpu_plan`` is the word that names the last plan on CPU memory."""
        self.name, self._gpu = name, gpu
        self.result, bound = result_of(name, args, gpu)
        self._method, self._args, self._cpu_plan = getattr(gpu, name), bound, cpu_plan

    def __call__(self, *, stream: Any = None) -> Any:
        self._cpu_plan[0] = 0
        self._method(*self._args, stream=stream)
        return self.result

    def __repr__(self) -> str:
        return f"<DevicePersistent {self.name}>"
