"""Operations on GPU memory inside ``miraccl.group()``: recorded, and run when the group ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miraccl.executor.cuda.message_collectives import op_signature
from miraccl.fastpath.cuda.table import CudaFastPath
from miraccl.ops.spec import RECV, SEND, OpSpec
from miraccl.runtime import group as groups
from miraccl.runtime.gpu.operations import DeviceOperations, bind_result
from miraccl.runtime.gpu.work import resolve_stream
from miraccl.runtime.group import Group
from miraccl.types import Collective


class Recorder:
    """Calls of ``gpu`` in a group.

    All sends and receives run in one launch, then the collectives in call order. Operations in
    several streams run in the first one's stream; the others wait before and after.
    """

    def __init__(self, gpu: DeviceOperations) -> None:
        self._gpu = gpu
        #: (stream, transfer or callable that runs a collective) in call order
        self._items: list[tuple[int, Any]] = []
        self._arrays: list[Any] = []  # callers may drop theirs before the group ends

    def record(self, op: OpSpec, args: Sequence[Any], stream: Any = None) -> Any:
        """Check a call, record it, and return its result."""
        handle = resolve_stream(self._gpu, stream)
        if op.is_message:
            return self._record_messages(op, args, handle, stream)
        result, bound = bind_result(op, args, self._gpu)
        self._items.append((handle, lambda: self._gpu.execute(op, bound, handle)))
        return result

    def _record_messages(self, op: OpSpec, args: Sequence[Any], handle: int, stream: Any) -> Any:
        transfers = self._gpu.transfers(op, args, stream)
        arrays = [args[position] for position in op.array_positions]
        for array, transfer in zip(arrays, transfers, strict=True):
            self._add(handle, array, transfer)
        return op.result(args, self._gpu.rank)

    def add(self, stream: int, messages: Sequence[tuple[Any, int, bool]]) -> None:
        """Add checked sends and receives: (array, peer, receives)."""
        for x, peer, receives in messages:
            (transfer,) = self._gpu.transfers(RECV if receives else SEND, (x, peer), stream)
            self._add(stream, x, transfer)

    def are_collective(self, signature: int, count: int) -> None:
        """Mark the last ``count`` sends and receives as a collective with this signature."""
        items = self._items[-count:]
        del self._items[-count:]
        number, transfers = items[0][0], [transfer for _, transfer in items]
        self._items.append(
            (number, lambda: self._gpu.exchange(transfers, stream=number, signature=signature))
        )

    def _add(self, stream: int, array: Any, transfer: Any) -> None:
        self._items.append((stream, transfer))
        self._arrays.append(array)

    def run(self) -> None:
        """Run the recorded operations."""
        with self._gpu.gpu.device_guard():
            self._run()

    def _run(self) -> None:
        transfers = [(number, item) for number, item in self._items if not callable(item)]
        if transfers:
            streams = list(dict.fromkeys(number for number, _ in transfers))
            first = streams[0]
            for other in streams[1:]:
                self._gpu.gpu.order_streams(other, first)
            self._gpu.exchange([transfer for _, transfer in transfers], stream=first)
            for other in streams[1:]:
                self._gpu.gpu.order_streams(first, other)
        for _, item in self._items:
            if callable(item):
                item()

    def drop(self) -> None:
        """Discard the group after an exception."""


class Groupable(DeviceOperations):
    """Communicator whose calls can be grouped."""

    def recorder(self, group: Group) -> Recorder:
        """Return the recorder of an open group."""
        return group.batch(self, Recorder)


class FastPathGroupable(Groupable):
    """Communicator whose fast path records grouped messages up to an unhandled call."""

    _fast_path: CudaFastPath

    def _hand_over(self, group: Group) -> None:
        """Move the messages that the fast path has recorded to the group."""
        stream, messages, signature = self._fast_path.pop_collected()
        self.recorder(group).add(stream, messages)
        if signature:
            self.recorder(group).are_collective(signature, len(messages))

    def are_collective(
        self, collective: Collective, root: int, counts: Sequence[int], count: int
    ) -> None:
        """Mark the last ``count`` messages of this thread's group as one collective.

        Its blocks are separate arrays, where ``gather`` and others have one. Arguments as for
        ``executor.cuda.message_collectives.op_signature``.
        """
        signature = op_signature(collective, root, counts)
        if not (
            groups.is_single_compiled_block() and self._fast_path.mark_collective(signature, count)
        ):
            whole = groups.current()
            assert whole is not None
            self.recorder(whole).are_collective(signature, count)
