"""Operations on GPU memory, with the stream semantics of c10d's NCCL backend.

- An asynchronous operation runs on the group's own stream, after the work in the current stream at
  the time of the call.  ``Work.wait`` makes the current stream wait, not the host.  A synchronous
  operation runs on the current stream.
- Memory used by the group's stream is reported to the allocator (``record_stream``).
- Futures know their device: callbacks run on streams that wait for the operation.
- Only ``barrier`` and a ``wait`` with a timeout block the host, so a CUDA graph can capture the
  rest.
- Faults that kernels find later (deadline, abort) are raised by the group's next call, ``wait`` or
  ``synchronize``.

``torch.cuda`` is a parameter, so that the order of events can be tested without a GPU.
"""

from __future__ import annotations

import datetime
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from miraccl import clock
from miraccl.errors import CollectiveTimeout, InvalidUsage, MiracclError
from miraccl.runtime.core_access import check_gpu, refresh_gpu_faults
from miraccl.runtime.group import group
from miraccl.torch.failures import BackendError
from miraccl.torch.work import Action, Work, no_action, seconds

if TYPE_CHECKING:
    from miraccl.api.communicator import Communicator

POLL_S = 0.0002
CACHED_STREAMS = 64


class _Cuda:
    """``torch.cuda`` with cached stream objects; creating one per call costs as much as a small
    launch.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[int, int], Any] = {}

    def current_stream(self, ordinal: int) -> Any:
        key = ordinal, torch._C._cuda_getCurrentRawStream(ordinal)
        stream = self._streams.get(key)
        if stream is None:
            if len(self._streams) >= CACHED_STREAMS:
                self._streams.clear()
            stream = self._streams[key] = torch.cuda.current_stream(ordinal)
        return stream

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class GroupStreams:
    """Streams of one group on one GPU; thread-safe.

    All ranks must make calls in the same order.
    """

    def __init__(self, comm: Communicator, device: Any, cuda: Any = None) -> None:
        self.comm, self.device = comm, device
        self.cuda: Any = _Cuda() if cuda is None else cuda
        self.lock = threading.RLock()
        self.events: list[Any] = []  # free events, for reuse
        self._own: Any = None
        self._fork: Any = None  # event that orders it after the current stream
        self._side: Any = None
        self._last: Any = None  # last event of the group's stream
        self._batch: list[tuple[_BatchedWork, Action, Action]] | None = None

    @property
    def own(self) -> Any:
        """Stream of asynchronous operations, created on first use."""
        if self._own is None:
            self._own, self._fork = self.cuda.Stream(self.device), self.cuda.Event()
        return self._own

    def run(
        self,
        name: str,
        tensors: Sequence[Any],
        memory: Iterable[Any],
        action: Action,
        *,
        asynchronous: bool,
    ) -> StreamWork:
        """Enqueue an operation.

        Args:
            tensors: Tensors that receive the result.
            memory: Every tensor that the operation touches.
            action: Enqueues the operation without waiting for it.
            asynchronous: Use the group's stream instead of the current one.
        """
        start = self._start_on_own_stream if asynchronous else self._start_on_current_stream
        with self.lock:
            work: StreamWork = self._on_device(lambda: start(name, tensors, memory, action))
        return work

    def _start_on_current_stream(
        self,
        name: str,
        tensors: Sequence[Any],
        memory: Iterable[Any],
        action: Callable[..., Any],
        *args: Any,
    ) -> StreamWork:
        """Enqueue in the current stream."""
        self._enqueue(action, *args)
        return StreamWork(name, tensors, self, self.cuda.current_stream(self.device.index))

    def _start_on_own_stream(
        self, name: str, tensors: Sequence[Any], memory: Iterable[Any], action: Action
    ) -> StreamWork:
        """Enqueue in the group's stream, after the current stream."""
        own, current = self._fork_own_stream()
        self._in_stream(own, current, lambda: self._enqueue(action))
        return self._record_work(name, tensors, memory)

    def call(
        self,
        name: str,
        tensors: Sequence[Any],
        memory: Iterable[Any],
        operation: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        asynchronous: bool,
    ) -> StreamWork:
        """Enqueue one operation of the communicator; as ``run``, but passes the stream as an
        argument.
        """
        with self.lock:
            if self.cuda.current_device() != self.device.index:
                return self.run(
                    name, tensors, memory, lambda: operation(*args), asynchronous=asynchronous
                )
            if not asynchronous:
                return self._start_on_current_stream(name, tensors, memory, operation, *args)
            own, _ = self._fork_own_stream()
            self._enqueue(operation, *args, stream=own.cuda_stream)
            return self._record_work(name, tensors, memory)

    def _fork_own_stream(self) -> tuple[Any, Any]:
        """Make the group's stream wait for the current stream; return both."""
        own, current = self.own, self.cuda.current_stream(self.device.index)
        own.wait_event(current.record_event(self._fork))
        return own, current

    def _record_work(self, name: str, tensors: Sequence[Any], memory: Iterable[Any]) -> StreamWork:
        """Return the handle of the operations just enqueued in the group's stream."""
        own = self.own
        for tensor in memory:
            tensor.record_stream(own)
        try:
            event = self.events.pop()
        except IndexError:
            event = self.cuda.Event()
        self._last = own.record_event(event)
        return StreamWork(name, tensors, self, own, event)

    # PyTorch's context managers for devices and streams cost as much as a small operation

    def _on_device(self, action: Callable[[], Any]) -> Any:
        if self.cuda.current_device() == self.device.index:
            return action()
        with self.cuda.device(self.device):
            return action()

    def _in_stream(self, stream: Any, current: Any, action: Action) -> None:
        self.cuda.set_stream(stream)
        try:
            action()
        finally:
            self.cuda.set_stream(current)

    def transfer(
        self, name: str, tensors: Sequence[Any], memory: Iterable[Any], begin: Action, after: Action
    ) -> Work:
        """Enqueue a send or receive, or add it to the open batch."""
        if self._batch is None:
            return self.run(name, tensors, memory, lambda: (begin(), after()), asynchronous=True)
        return self._defer(_BatchedWork(name, tensors, memory), begin, after)

    def message(
        self, name: str, tensors: Sequence[Any], operation: Callable[..., Any], peer: int
    ) -> Work:
        """Enqueue a send or receive of one tensor without staging, or add it to the open batch."""
        if self._batch is None:
            return self.call(
                name, tensors, tensors, operation, (tensors[0], peer), asynchronous=True
            )
        return self._defer(
            _BatchedWork(name, tensors, tensors),
            functools.partial(operation, tensors[0], peer),
            no_action,
        )

    def _defer(self, part: _BatchedWork, begin: Action, after: Action) -> _BatchedWork:
        assert self._batch is not None
        self._batch.append((part, begin, after))
        return part

    def open_batch(self) -> None:
        self._batch = []

    def run_batch(self, start: Action) -> Work | None:
        """Run ``start`` and launch its sends and receives as one operation; None if there were
        none.
        """
        self.open_batch()
        try:
            start()
        except BaseException:
            self._batch = None
            raise
        return self.close_batch()

    def close_batch(self) -> Work | None:
        """Launch the sends and receives of the batch as one operation; None if there were none."""
        batch, self._batch = self._batch, None
        if not batch:
            return None

        def action() -> None:
            with group():
                for _, begin, _ in batch:
                    begin()
            for _, _, after in batch:
                after()

        memory = [t for part, _, _ in batch for t in part.memory]
        work = self.run(
            "batch_isend_irecv",
            [t for part, _, _ in batch for t in part.result()],
            memory,
            action,
            asynchronous=True,
        )
        for part, _, _ in batch:
            part.batch_work = work
        return work

    def record_drain_point(self) -> Callable[[], None]:
        """Return a function that blocks the host until all work enqueued so far has run."""
        with self.cuda.device(self.device):
            events = [
                self.cuda.current_stream(self.device.index).record_event(),
                self.own.record_event(),
            ]

        def drain() -> None:
            for event in events:
                event.synchronize()
            refresh_gpu_faults(self.comm)
            self.check("barrier")

        return drain

    def future(self, work: StreamWork) -> Any:
        """Return a future of ``work``, already resolved: its waiters wait on a stream."""
        error = work.exception()
        if error is not None:
            # without devices: with them, PyTorch searches the value for tensors
            failed: Any = torch.futures.Future()
            failed.set_exception(error)
            return failed
        result: Any = torch.futures.Future(devices=[self.device])
        with self.lock:
            self._on_device(lambda: self._fulfil(result, work))
        return result

    def _fulfil(self, result: Any, work: StreamWork) -> None:
        """Resolve the future in a stream that holds nothing after the work's event.

        The group's own stream may already hold later operations.
        """
        stream = work.stream
        if work.event is not None and work.event is not self._last:
            if self._side is None:
                self._side = self.cuda.Stream(self.device)
            stream = self._side
            stream.wait_event(work.event)
        self._in_stream(
            stream,
            self.cuda.current_stream(self.device.index),
            lambda: result.set_result(work.result()),
        )

    def check(self, name: str) -> None:
        """Raise the fault that kernels have reported so far."""
        try:
            check_gpu(self.comm, name)
        except MiracclError as error:
            raise BackendError(error) from error

    def _enqueue(self, action: Callable[..., Any], *args: Any, **named: Any) -> None:
        try:
            action(*args, **named)
        except MiracclError as error:
            raise BackendError(error) from error


class StreamWork(Work):
    """Handle of an operation enqueued in ``stream``.

    ``event`` follows the operation there; with None, the end of the stream stands for it.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[Any],
        streams: GroupStreams,
        stream: Any,
        event: Any = None,
    ) -> None:
        # not ``Work.__init__``: the host never sees the end of this operation
        dist.Work.__init__(self)
        self._name, self._tensors, self._future = name, tensors, None
        self._streams, self.stream, self.event = streams, stream, event

    def __del__(self) -> None:
        if self.event is not None:
            self._streams.events.append(self.event)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Make the current stream wait; with a ``timeout``, block the host at most that long as
        well.
        """
        streams = self._streams
        current = streams.cuda.current_stream(streams.device.index)
        if self.event is not None:
            current.wait_event(self.event)
        elif current is not self.stream and current != self.stream:
            current.wait_stream(self.stream)
        limit = seconds(timeout)
        if limit is not None and not streams.cuda.is_current_stream_capturing():
            self._wait_on_host(limit, timeout)
        streams.check(self._name)
        return True

    def _wait_on_host(self, limit: float, timeout: datetime.timedelta | None) -> None:
        end = clock.monotonic() + limit
        while not self.is_completed():
            if clock.monotonic() >= end:
                raise BackendError(
                    CollectiveTimeout(
                        f"timed out after {timeout}; the operation continues on the GPU",
                        op=self._name,
                    )
                )
            clock.sleep(POLL_S)

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if self.event is None:
            self.event = self.stream.record_event()
        return bool(self.event.query())

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        try:
            self._streams.check(self._name)
        except BackendError as error:
            return error
        return None

    def get_future(self) -> Any:
        with self._streams.lock:
            if self._future is None:
                self._future = self._streams.future(self)
            return self._future


class _BatchedWork(Work):
    """Handle of a send or receive in a batch; ``batch_work`` is set once the batch has started."""

    batch_work: StreamWork | None = None

    def __init__(self, name: str, tensors: Sequence[Any], memory: Iterable[Any]) -> None:
        dist.Work.__init__(self)  # not ``Work.__init__``: it completes with ``batch_work``
        self._name, self._tensors, self.memory = name, tensors, memory

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        return self._require_started().wait(timeout)

    def is_completed(self) -> bool:
        return self.batch_work is not None and self.batch_work.is_completed()

    def is_success(self) -> bool:
        return self.batch_work is not None and self.batch_work.is_success()

    def exception(self) -> Exception | None:
        return None if self.batch_work is None else self.batch_work.exception()

    def get_future(self) -> Any:
        return self._require_started().get_future()

    def _require_started(self) -> StreamWork:
        if self.batch_work is None:
            raise BackendError(
                InvalidUsage(
                    f"{self._name}: the batch is still open",
                    hint="wait after _coalescing_manager has closed",
                )
            )
        return self.batch_work
