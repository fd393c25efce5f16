"""Point-to-point operations of a multi-node communicator on GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from miraccl.executor.cuda.message_collectives import op_signature
from miraccl.runtime.gpu.operations import (
    CheckedDeviceCall,
    DeviceOperations,
    DeviceTransfer,
)

if TYPE_CHECKING:
    from miraccl.ops.device_arrays import DeviceMemory
    from miraccl.runtime.gpu.communicator import DeviceCommunicator
    from miraccl.runtime.multinode.graph_cache import GraphCache
    from miraccl.runtime.multinode.node_layout import NodeLayout
    from miraccl.runtime.multinode.runtime import MultiNodeRuntime


class MultiNodeMessageCalls(DeviceOperations):
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

    def exchange(
        self,
        transfers: Sequence[DeviceTransfer],
        *,
        stream: Any = None,
        name: str = "group",
        signature: int = 0,
    ) -> None:
        self._exchange(transfers, stream, name)

    def _exchange(
        self,
        transfers: Sequence[DeviceTransfer],
        stream: Any,
        name: str,
        collective: CheckedDeviceCall | None = None,
    ) -> None:
        """Run the transfers inside the node in one kernel, the others through the network.

        With both kinds the kernel runs in a side stream, so that neither waits for the other. If
        they form ``collective``, both kinds count it, also on ranks without messages of
        that kind.
        """
        local_ranks = self.layout.local_ranks
        local = [
            t._replace(peer=local_ranks.index(t.peer)) for t in transfers if t.peer in local_ranks
        ]
        remote = [t for t in transfers if t.peer not in local_ranks and t.memory.count]
        kind, signature = None, 0
        if collective is not None:
            kind = (collective.spec.collective, collective.root)
            signature = op_signature(*kind, collective.common_counts(self.nranks))
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
