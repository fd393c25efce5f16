"""Operations on GPU memory inside ``miraccl.group()``: recorded, and run when the group ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from miraccl.executor.cuda.message_collectives import op_signature
from miraccl.fastpath.cuda.table import CudaFastPath
from miraccl.runtime import group as groups
from miraccl.runtime.gpu.persistent import bind_result
from miraccl.runtime.gpu.work import resolve_stream
from miraccl.runtime.group import Group
from miraccl.types import Collective

_POINT_TO_POINT = ("send", "recv", "sendrecv")


class Grouped:
    """Recorder for the methods of ``gpu`` in a group.

    All sends and receives run in one launch, then the collectives in call order. Operations in
    several streams run in the first one's stream; the others wait before and after.
    """

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self._items: list[
            tuple[int, Any]
        ] = []  # (stream, transfer or callable that runs a collective) in call order
        self._arrays: list[Any] = []  # callers may drop theirs before the group ends

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _POINT_TO_POINT:
            transferring: Callable[..., Any] = getattr(self, f"_{name}")
            return transferring

        def note(*args: Any, stream: Any = None, **more: Any) -> Any:
            number, method = resolve_stream(self._gpu, stream), getattr(self._gpu, name)
            result, args = bind_result(name, args, self._gpu)
            self._items.append((number, lambda: method(*args, stream=number, **more)))
            return result

        return note

    def _send(self, x: Any, dst: int, *, stream: Any = None) -> None:
        self._add(
            resolve_stream(self._gpu, stream), x, self._gpu.transfer(x, dst, False, "send", stream)
        )

    def _recv(self, x: Any, src: int, *, stream: Any = None) -> Any:
        self._add(
            resolve_stream(self._gpu, stream), x, self._gpu.transfer(x, src, True, "recv", stream)
        )
        return x

    def _sendrecv(self, x: Any, dst: int, out: Any, src: int, *, stream: Any = None) -> Any:
        sent, got = (
            self._gpu.transfer(*part, "sendrecv", stream)
            for part in ((x, dst, False), (out, src, True))
        )
        self._gpu._check_disjoint(sent.memory, got.memory, "sendrecv")
        number = resolve_stream(self._gpu, stream)
        self._add(number, x, sent)
        self._add(number, out, got)
        return out

    def add(self, stream: int, messages: Sequence[tuple[Any, int, bool]]) -> None:
        """Add checked sends and receives: (array, peer, receives)."""
        for x, peer, receives in messages:
            self._add(
                stream,
                x,
                self._gpu.transfer(x, peer, receives, "recv" if receives else "send", stream),
            )

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


class Groupable:
    """Communicator whose calls can be grouped."""

    def grouped(self, group: Group) -> Grouped:
        """Return the recorder of an open group."""
        return group.batch(self, Grouped)


class FastPathGroupable(Groupable):
    """Communicator whose fast path records grouped messages up to an unhandled call."""

    _fast_path: CudaFastPath

    def _hand_over(self, group: Group) -> None:
        """Move the messages that the fast path has recorded to the group."""
        stream, messages, signature = self._fast_path.pop_collected()
        self.grouped(group).add(stream, messages)
        if signature:
            self.grouped(group).are_collective(signature, len(messages))

    def are_collective(
        self, collective: Collective, root: int, counts: Sequence[int], count: int
    ) -> None:
        """Mark the last ``count`` messages of this thread's group as one collective.

        Its blocks are separate arrays, where ``gather`` and others have one. Arguments as for
        ``executor.cuda.moves.op_signature``.
        """
        signature = op_signature(collective, root, counts)
        if not (
            groups.is_single_compiled_block() and self._fast_path.mark_collective(signature, count)
        ):
            whole = groups.current()
            assert whole is not None
            self.grouped(whole).are_collective(signature, count)
