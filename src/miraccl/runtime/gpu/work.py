"""Asynchronous operations on GPU memory, on a stream owned by the communicator.

Works with the methods that ``DeviceCommunicator`` and ``MultiNodeCommunicator`` share.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from miraccl import clock
from miraccl.diagnosis.blocked_ops import BlockedScope, Wait
from miraccl.errors import CollectiveTimeout, InvalidUsage, MiracclError
from miraccl.executor.cuda.contexts import WrongDevice
from miraccl.ops.spec import OpSpec
from miraccl.runtime.gpu.call_context import CallContext, StreamGetter
from miraccl.runtime.gpu.keep_alive import KeepAlive
from miraccl.runtime.gpu.operations import DeviceOperations
from miraccl.runtime.work import Work, check_timeout

POLL_S = 50e-6
POLL_TIMEOUT_S = 0.02  # time in which a waiting host has polled twice


class DeviceWork(Work):
    """Handle of an operation started on another stream. Its arrays are in use until ``wait``.

    ``wait()`` makes the current stream wait, not the host; a CUDA graph may capture it. With a
    ``timeout``, and in ``synchronize``, the host waits.
    """

    def __init__(
        self,
        name: str,
        gpu: Any,
        stream: int,
        result: Any,
        keep: Any,
        current: StreamGetter | None = None,
        find_wait: Callable[[], Wait | None] | None = None,
    ) -> None:
        """``current()``: current stream of the arrays' library. ``find_wait()``: wait of a host
        that waits for this operation, which ends after all earlier ones.
        """
        super().__init__(name, find_wait)
        self._polls = 0  # polls that found the operation running
        self._gpu, self._result, self._keep, self._current = gpu, result, keep, current
        self._captured = gpu.gpu.is_capturing(stream)
        self._event: Any = gpu.gpu.make_event()
        gpu.gpu.record(self._event, stream)

    def wait(self, timeout: float | None = None, *, stream: Any = None) -> Any:
        """Return the result for use in ``stream`` (None: the current one); raise a known fault."""
        number, gpu = resolve_stream(self._gpu, stream, self._current), self._gpu.gpu
        try:
            gpu.ensure_current()
            gpu.wait_event(number, self._event)
        except WrongDevice:
            with gpu.device_guard():
                gpu.wait_event(number, self._event)
        if timeout is not None:
            self.synchronize(timeout)
        self._gpu.check(self.name)
        return self._result

    def synchronize(self, timeout: float | None = None) -> Any:
        """Block the host until the operation ends; ``CollectiveTimeout`` after ``timeout`` seconds.

        Kernels end by themselves at the communicator's deadline.
        """
        timeout = check_timeout(timeout)
        known = timeout is None and self._find_wait is not None and not self.done()
        with BlockedScope(self._confirmed_wait) if known else contextlib.nullcontext():
            self._poll(timeout)
        self._gpu.check(self.name)
        self._keep = None
        return self._result

    def _poll(self, timeout: float | None) -> None:
        end = None if timeout is None else clock.monotonic() + timeout
        while not self.done():
            if end is not None and clock.monotonic() >= end:
                raise CollectiveTimeout(
                    f"timed out after {timeout:g} s; it continues on the GPU", op=self.name
                )
            self._polls += 1
            clock.sleep(POLL_S)

    def _confirmed_wait(self) -> Wait | None:
        """Return the wait state of the thread in ``synchronize``; None if it may have ended.

        The caller already knows the GPU's waits, which must belong to this operation and not a
        later one.
        """
        polls, end = self._polls, clock.monotonic() + POLL_TIMEOUT_S
        while self._polls < polls + 2:  # so one poll began after the call
            if clock.monotonic() > end:
                return None
            clock.sleep(POLL_S)
        return self._find_wait() if self._find_wait is not None else None

    def done(self) -> bool:
        """Return True if the GPU has ended the operation, successfully or not."""
        if self._captured:
            raise InvalidUsage(
                f"cannot query {self.name}: it was captured in a graph; query the graph",
                op=self.name,
            )
        return bool(self._gpu.gpu.has_completed(self._event))

    is_completed = done

    def exception(self) -> BaseException | None:
        """Return the known fault, or None."""
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


def resolve_stream(gpu: DeviceOperations, stream: Any, current: StreamGetter | None = None) -> int:
    """Return the handle of a stream argument; None: that of ``current()`` or the current one."""
    if stream is None and current is not None:
        stream = current()
    return gpu.stream_handle(stream)


class BackgroundStream:
    """Stream of a communicator for ``async_op`` calls, which return a ``DeviceWork``.

    An operation begins after the pending work of the current stream. With ``stream`` it runs there,
    in that stream's order.
    """

    def __init__(
        self, gpu: DeviceOperations, wait: Callable[[int], Wait | None] = lambda _: None
    ) -> None:
        """``wait(number)``: the host's ``number``-th wait for the communicator's GPU work."""
        self._gpu, self._wait = gpu, wait
        self._own: int | None = None
        self._keep_alive = KeepAlive(gpu.gpu)
        self._numbers = itertools.count(1)

    def start(self, op: OpSpec, args: Sequence[Any], context: CallContext) -> DeviceWork:
        """Start an operation and return its handle."""
        driver, stream, current = self._gpu.gpu, context.stream, context.current_stream
        with driver.device_guard():
            number = self._fork(current) if stream is None else resolve_stream(self._gpu, stream)
            result = self._gpu.execute(op, args, number)
            keep = (args, result)
            if not driver.is_capturing(number):  # memory of a capture belongs to its graph
                # The caller may drop all references at once.
                self._keep_alive.retain(keep, number)
            return DeviceWork(
                op.name, self._gpu, number, result, keep, current, self._wait_provider(number)
            )

    def _wait_provider(self, stream: int) -> Callable[[], Wait | None] | None:
        """Return the wait state getter of a host that waits for work in ``stream``, or None.

        It exists only if the communicator's last operation is in ``stream`` and hence ends last.
        """
        if self._gpu.stream != stream:
            return None
        return functools.partial(self._wait, next(self._numbers))

    def close(self) -> None:
        """Destroy the stream after the GPU has finished its work. Idempotent."""
        own, self._own = self._own, None
        if own is None or self._gpu.closed:
            return
        with (
            contextlib.suppress(MiracclError),
            self._gpu.gpu.device_guard(),
        ):  # after a kernel failure the context is unusable, with nothing to free
            self._gpu.gpu.synchronize()
            self._keep_alive.close()
            self._gpu.gpu.destroy_stream(own)

    def _fork(self, current: StreamGetter | None) -> int:
        if self._own is None:
            with self._gpu.gpu.relaxed_capture():
                self._own = self._gpu.gpu.make_stream()
        self._gpu.gpu.order_streams(resolve_stream(self._gpu, None, current), self._own)
        return self._own
