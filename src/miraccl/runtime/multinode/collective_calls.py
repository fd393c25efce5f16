"""Collectives on GPU memory over several nodes: choice of the algorithm, and its enqueueing."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from miraccl.ops.arguments import resolve_operator
from miraccl.planning.device_candidates import DeviceCandidate
from miraccl.runtime.gpu.operations import (
    SUM,
    CheckedDeviceCall,
    DeviceTransfer,
    sends_and_receives,
)
from miraccl.runtime.multinode.message_calls import MultiNodeMessageCalls
from miraccl.runtime.multinode.segments import StagedShape
from miraccl.types import Collective, DType

if TYPE_CHECKING:
    from miraccl.planning.sparse_planner import SparseCandidate
    from miraccl.runtime.multinode.hierarchical import Hierarchical
    from miraccl.transport.cuda_p2p import Explanation


class MultiNodeCollectiveCalls(MultiNodeMessageCalls):
    """Part of ``MultiNodeCommunicator`` that runs collectives."""

    hierarchical: Hierarchical

    if TYPE_CHECKING:

        def connections(self) -> Explanation: ...

    def _execute(self, call: CheckedDeviceCall, stream: Any) -> None:
        if call.spec.uneven:
            self._run_uneven(call, stream)
            return
        collective, source, target = call.spec.collective, call.source, call.target
        count, op, root = call.count, call.operator, call.root
        if count == 0:
            self.check(collective.label)
            return
        block_bytes = count * source.dtype.itemsize
        hierarchical = self.hierarchical.supports(collective, source.dtype, op, block_bytes)
        direct = self.runtime.moves_directly(block_bytes) and self._uses_messages(collective)
        if direct and not hierarchical:
            self._run_as_messages(call, stream)
            return
        run = self.hierarchical.run if hierarchical else self.runtime.enqueue_staged
        enqueue = functools.partial(run, collective, source, target, count, op, root)
        with self._operation(collective.label, stream, [source, target]) as (handle, captured):
            key = (collective, source.address, target.address, count, source.dtype, op, root)
            if self.graph_cache.run(
                key, max(source.nbytes, target.nbytes), handle, captured, enqueue
            ):
                self.local.stream = handle

    def _run_uneven(self, call: CheckedDeviceCall, stream: Any) -> None:
        op, source, target = call.spec, call.source, call.target
        common = call.common_counts(self.nranks)
        if common and not any(common):
            self.check(op.name)
            return
        if self._uses_messages(op.collective):
            self._run_as_messages(call, stream)
            return
        shape = StagedShape(
            collective=op.collective,
            itemsize=source.dtype.itemsize,
            rank=self.rank,
            nranks=self.nranks,
            root=call.root,
            sends=tuple(call.in_counts(self.rank, self.nranks)),
            receives=tuple(call.out_counts(self.rank, self.nranks)),
            counts=tuple(common),
            uneven=True,
        )
        with self._operation(op.name, stream, [source, target]) as (handle, captured):
            self.runtime.enqueue(
                (self.runtime.world,),
                shape,
                source.dtype,
                call.operator,
                (source.address, target.address),
                handle,
                captured,
            )

    def _run_as_messages(self, call: CheckedDeviceCall, stream: Any) -> None:
        """Run a collective that only moves data as sends and receives."""
        sent, received = sends_and_receives(call, self.rank, self.nranks)
        both = [DeviceTransfer(False, *part) for part in sent]
        both += [DeviceTransfer(True, *part) for part in received]
        self._exchange(both, stream, call.spec.name, call)

    def _reduce_rows(
        self, call: CheckedDeviceCall, block: int | None, density: float | None, stream: Any
    ) -> None:
        source, target = call.source, call.target
        if call.count == 0:
            self.check(call.spec.name)
            return
        with self._operation(call.spec.name, stream, [source, target]) as (handle, captured):
            self.runtime.enqueue_rows(
                source, target, call.operator, block, density, handle, captured
            )

    def explain_rows(self, nbytes: int, dtype: DType, density: float) -> list[SparseCandidate]:
        """Return rows and the dense schedule of the CPU communicator that sums each segment."""
        rows: list[SparseCandidate] = self.runtime.world.explain_sparse(
            min(nbytes, self.runtime.slot_bytes), dtype, density=density
        )
        return rows

    def _uses_messages(self, collective: Collective) -> bool:
        """Return True if an uneven collective runs as sends and receives.

        That is if no block crosses the network twice to the same node.
        """
        once = collective in (Collective.ALL_TO_ALL, Collective.GATHER, Collective.SCATTER)
        alone = (
            collective is Collective.ALL_GATHER
            and self.layout.local_size == 1
            and self.layout.uniform
        )
        return self.runtime.counts_collectives and (once or alone)

    def explain(
        self, collective: Collective, block_bytes: int, dtype: DType, op: Any = SUM
    ) -> list[DeviceCandidate]:
        """Return the plan of ``collective`` on blocks of this size. Nothing is communicated."""
        resolve_operator(op, dtype, collective.label)
        hierarchical = self.hierarchical.supports(collective, dtype, op, block_bytes)
        count = block_bytes // dtype.itemsize
        shape = StagedShape.even(collective, dtype.itemsize, self.rank, self.nranks, 0, count)
        reason = self.runtime.explain_algorithm(hierarchical, shape, dtype, op)
        algo, proto = "hierarchical" if hierarchical else "staged", "staging"
        moves = not collective.reduces and (hierarchical or self._uses_messages(collective))
        if moves and self.runtime.moves_directly(block_bytes):
            algo, proto, reason = "direct", "verbs", self.runtime.gpu_direct_reason
        return [
            DeviceCandidate(
                algo=algo,
                proto=proto,
                chosen=True,
                reason=reason,
                connections=tuple(self.connections()),
            )
        ]
