"""Point-to-point messages of a group, and coalesced blocks.

Messages in CPU memory carry tags and go through the tag matcher, outside the work queue.  Messages
between GPUs are matched by order, as in NCCL, and run on the group's streams.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from miraccl.errors import InvalidUsage, MiracclError
from miraccl.torch.collectives import single_item
from miraccl.torch.failures import BackendError, as_backend_errors
from miraccl.torch.message import SENT
from miraccl.torch.message_work import FutureCompletion, TransferWork
from miraccl.torch.profiled import profiling, shown_as
from miraccl.torch.routing import by_device
from miraccl.torch.tensors import NAME, check_result, is_plain_cpu_tensor, stage, with_loads
from miraccl.torch.work import FinishedWork, Work, no_action

if TYPE_CHECKING:
    from miraccl.api.communicator import Communicator
    from miraccl.torch.matching import TagMatcher
    from miraccl.torch.mixed_backends import OtherBackends
    from miraccl.torch.streams import GroupStreams


class Transfers:
    """Sends, receives and coalesced calls of a process group."""

    communicator: Communicator
    _other_backends: OtherBackends | None
    _streams: GroupStreams | None
    _batch: list[Work] | None
    _matcher: TagMatcher
    _futures: FutureCompletion

    def _streams_of(self, device: Any) -> GroupStreams:
        raise NotImplementedError

    @property
    def _gpu_streams(self) -> GroupStreams:
        raise NotImplementedError

    def _eligible_on_gpu(self, tensors: Sequence[Any]) -> bool:
        """Return True if the GPU fast path can take these tensors."""
        raise NotImplementedError

    # ---- one message

    def send(self, tensors: Sequence[Any], dst: int, tag: int = 0) -> Work:
        if self._eligible_on_cpu(tensors):
            return self._send(tensors, tensors[0], dst, tag)
        if self._eligible_on_gpu(tensors) and len(tensors) == 1:
            return self._gpu_streams.message("send", tensors, self.communicator.send, dst)
        return self._send_any(tensors, dst, tag)

    def recv(self, tensors: Sequence[Any], src: int, tag: int = 0) -> Work:
        if self._eligible_on_cpu(tensors):
            return self._receive(tensors, tensors[0], src, tag)
        if self._eligible_on_gpu(tensors) and len(tensors) == 1:
            return self._gpu_streams.message("recv", tensors, self.communicator.recv, src)
        return self._receive_any(tensors, src, tag)

    def _eligible_on_cpu(self, tensors: Sequence[Any]) -> bool:
        """Return True if the message is one plain CPU tensor and no other backend or profiler is
        active.
        """
        return (
            len(tensors) == 1
            and is_plain_cpu_tensor(tensors[0])
            and self._other_backends is None
            and not profiling()
        )

    @by_device("send")
    @shown_as(f"{NAME}:send")
    def _send_any(self, tensors: Sequence[Any], dst: int, tag: int) -> Work:
        with as_backend_errors():
            staged = stage(single_item(tensors, "send"), "send")
            if staged.device.type != "cpu":
                begin = with_loads([staged], lambda: self.communicator.send(staged.array, dst))
                return self._streams_of(staged.device).transfer(
                    "send", tensors, staged.memory, begin, no_action
                )
            staged.load()
        return self._send(tensors, staged.plain, dst, tag)

    def _send(self, tensors: Sequence[Any], memory: Any, dst: int, tag: int) -> Work:
        try:
            message = self._matcher.send(memory, dst, _tag(tag, "send"))
        except MiracclError as error:
            raise BackendError(error) from error
        if message is SENT:
            return self._transfer(FinishedWork("send", tensors))
        return self._transfer(
            TransferWork("send", tensors, self._matcher, message, self._futures, None)
        )

    @by_device("recv")
    @shown_as(f"{NAME}:recv")
    def _receive_any(self, tensors: Sequence[Any], src: int, tag: int) -> Work:
        with as_backend_errors():
            staged = stage(single_item(tensors, "recv"), "recv")
            check_result(tensors[0], "recv")
            if staged.device.type != "cpu":
                begin = lambda: self.communicator.recv(staged.array, src)  # noqa: E731
                return self._streams_of(staged.device).transfer(
                    "recv", tensors, staged.memory, begin, staged.store
                )
        return self._receive(tensors, staged.plain, src, tag, staged.store)

    def recv_anysource(self, tensors: Sequence[Any], tag: int = 0) -> Work:
        """Receive from any rank; ``source_rank`` of the work returns the sender."""
        if self._eligible_on_cpu(tensors):
            return self._receive(tensors, tensors[0], None, tag)
        return self._receive_any_source(tensors, tag)

    @by_device("recv_anysource")
    @shown_as(f"{NAME}:recv")
    def _receive_any_source(self, tensors: Sequence[Any], tag: int) -> Work:
        with as_backend_errors():
            staged = stage(single_item(tensors, "recv"), "recv")
            check_result(tensors[0], "recv")
            if staged.device.type != "cpu":
                raise InvalidUsage(
                    "recv: cannot receive from any source into GPU memory; name the source rank",
                    hint="NCCL has the same rule",
                )
        return self._receive(tensors, staged.plain, None, tag, staged.store)

    def _receive(
        self,
        tensors: Sequence[Any],
        memory: Any,
        source: int | None,
        tag: int,
        after: Callable[[], Any] | None = None,
    ) -> Work:
        try:
            message = self._matcher.receive(memory, source, _tag(tag, "recv"))
        except MiracclError as error:
            raise BackendError(error) from error
        return self._transfer(
            TransferWork("recv", tensors, self._matcher, message, self._futures, after)
        )

    def _transfer(self, work: Work) -> Work:
        if self._batch is not None:
            self._batch.append(work)
        return work

    # ---- several at once

    def _start_coalescing(self, device: Any) -> None:
        """Open a block in which calls are asynchronous and GPU sends and receives form one
        operation.
        """
        device = torch.device(device)
        if self._other_backends is not None and device.type in self._other_backends.devices:
            self._other_backends.group._start_coalescing(device)
            return
        self._batch = []
        # a CUDA build may run without a GPU
        if device.type == "cuda" and (self._streams is not None or torch.cuda.is_available()):
            self._streams_of(device).open_batch()

    def _end_coalescing(self, device: Any) -> Any:
        device = torch.device(device)
        if self._other_backends is not None and device.type in self._other_backends.devices:
            return self._other_backends.group._end_coalescing(device)
        batch, self._batch = self._batch or [], None
        transfers = (
            self._streams.close_batch()
            if device.type == "cuda" and self._streams is not None
            else None
        )
        return _CoalescedWork(batch if transfers is None else [*batch, transfers])

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    def run_batch(self, device: Any, start: Callable[[], Any]) -> list[Work]:
        """Run ``start`` with its GPU sends and receives as one operation; return its works."""
        work = self._streams_of(device).run_batch(start)
        return [] if work is None else [work]


class _CoalescedWork(Work):
    """Handle of all operations of a coalesced block."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__("coalesced", [t for work in works for t in work.result()])
        self._works = list(works)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        return not [
            work for work in self._works if not work.wait(timeout)
        ]  # the list waits for every work

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        return next(
            (error for work in self._works if (error := work.exception()) is not None), None
        )

    def get_future(self) -> Any:
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(
            lambda done: [t for f in done.value() for t in f.value()]
        )


def _tag(tag: int, name: str) -> int:
    if tag < 0:  # negative tags are reserved for the group
        raise InvalidUsage(f"{name}: tag {tag} is not allowed; tags are >= 0")
    return tag
