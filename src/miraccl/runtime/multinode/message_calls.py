"""Point-to-point operations of a multi-node communicator on GPU memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda.message_collectives import op_signature
from miraccl.ops.arguments import peer_rank
from miraccl.runtime.gpu.communicator import DeviceCommunicator
from miraccl.runtime.gpu.memory import DeviceMemory, device_view
from miraccl.runtime.gpu.transfer import DeviceTransfer
from miraccl.runtime.gpu.uneven import UnevenCollectives, UnevenRequest
from miraccl.runtime.multinode.graph_cache import GraphCache
from miraccl.runtime.multinode.node_layout import NodeLayout
from miraccl.runtime.multinode.runtime import MultiNodeRuntime


class MultiNodeMessageCalls(UnevenCollectives):
    """Sends and receives of ``MultiNodeCommunicator``.

    The mixin owns the side stream; everything else belongs to the communicator.
    """

    layout: NodeLayout
    local: DeviceCommunicator
    runtime: MultiNodeRuntime
    graph_cache: GraphCache
    _side_stream: int | None

    if TYPE_CHECKING:

        def _operation(
            self, name: str, stream: Any, views: Sequence[DeviceMemory]
        ) -> AbstractContextManager[tuple[int, bool]]: ...

    def send(self, x: Any, dst: int, *, stream: Any = None) -> None:
        """Send ``x`` to rank ``dst``; matches one ``recv`` of equal count and dtype, in order."""
        self.exchange([self.transfer(x, dst, False, "send", stream)], stream=stream, name="send")

    def recv(self, x: Any, src: int, *, stream: Any = None) -> Any:
        """Receive from rank ``src`` into ``x``."""
        self.exchange([self.transfer(x, src, True, "recv", stream)], stream=stream, name="recv")
        return x

    def sendrecv(self, x: Any, dst: int, out: Any, src: int, *, stream: Any = None) -> Any:
        """Send ``x`` to ``dst`` and receive ``out`` from ``src`` at the same time."""
        pair = [
            self.transfer(x, dst, False, "sendrecv", stream),
            self.transfer(out, src, True, "sendrecv", stream),
        ]
        self._check_disjoint(pair[0].memory, pair[1].memory, "sendrecv")
        self.exchange(pair, stream=stream, name="sendrecv")
        return out

    def transfer(
        self, x: Any, peer: Any, receives: bool, where: str, stream: Any = None
    ) -> DeviceTransfer:
        """Return one checked argument of ``exchange``."""
        memory = device_view(x, "x", where, stream, self.gpu)
        if receives and memory.read_only:
            raise InvalidUsage(
                f"{where}: cannot receive into {type(x).__name__}: the array is read-only",
                rank=self.rank,
            )
        return DeviceTransfer(
            receives=receives,
            peer=peer_rank(peer, "src" if receives else "dst", self.nranks, where),
            memory=memory,
        )

    def exchange(
        self, transfers: Sequence[DeviceTransfer], *, stream: Any = None, name: str = "group"
    ) -> None:
        """Run sends and receives concurrently; between two ranks they match in order."""
        self._exchange(transfers, stream, name)

    def _exchange(
        self,
        transfers: Sequence[DeviceTransfer],
        stream: Any,
        name: str,
        request: UnevenRequest | None = None,
    ) -> None:
        """Run the transfers inside the node in one kernel, the others through the network.

        With both kinds the kernel runs in a side stream, so that neither waits for the other. If
        they form the collective ``request``, both kinds count it, also on ranks without messages of
        that kind.
        """
        local_ranks = self.layout.local_ranks
        local = [
            dataclasses.replace(t, peer=local_ranks.index(t.peer))
            for t in transfers
            if t.peer in local_ranks
        ]
        remote = [t for t in transfers if t.peer not in local_ranks and t.memory.count]
        kind = None if request is None else (request.collective, request.root)
        signature = (
            0 if request is None else op_signature(request.collective, request.root, request.counts)
        )
        has_local, has_remote = (
            bool(local) or (kind is not None and self.layout.local_size > 1),
            bool(remote) or kind is not None,
        )

        def enqueue(handle: int, captured: bool) -> None:
            if has_local and has_remote:
                self.gpu.order_streams(handle, self._open_side_stream())
                self.local.exchange(
                    local, stream=self._open_side_stream(), name=name, signature=signature
                )
                self.runtime.exchange(remote, handle, captured, kind, concurrent=True)
                self.gpu.order_streams(self._open_side_stream(), handle)
                self.local.stream = handle
            elif has_local:
                self.local.exchange(local, stream=handle, name=name)
            elif has_remote:
                self.runtime.exchange(remote, handle, captured, kind)

        with self._operation(name, stream, [t.memory for t in transfers]) as (handle, captured):
            each = [
                (t.receives, t.peer, t.memory.address, t.memory.count, t.memory.dtype)
                for t in transfers
            ]
            key = ("exchange", kind, signature, *each)
            if self.graph_cache.run(
                key, sum(t.memory.nbytes for t in transfers), handle, captured, enqueue
            ):
                self.local.stream = handle

    def _open_side_stream(self) -> int:
        """Return the communicator's own stream, created on first use."""
        if self._side_stream is None:
            with self.gpu.relaxed_capture():
                self._side_stream = self.gpu.make_stream()
        return self._side_stream
