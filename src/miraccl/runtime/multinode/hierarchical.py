"""Hierarchical collectives over nodes with equally many GPUs.

Kernels run inside a node; ranks of equal local rank communicate between nodes. Every element
crosses the network once per node. 16-bit floats are rounded once inside a node and once between
nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from miraccl.runtime.gpu.operations import DeviceTransfer
from miraccl.runtime.multinode.runtime import GPU_REDUCIBLE, MultiNodeRuntime
from miraccl.runtime.multinode.segments import StagedShape, elements_per_segment
from miraccl.types import Collective, DType, RedOp

if TYPE_CHECKING:
    from miraccl.ops.device_arrays import DeviceMemory
    from miraccl.runtime.gpu.communicator import DeviceCommunicator

SUM = RedOp.SUM
HIERARCHICAL = (
    Collective.ALL_REDUCE,
    Collective.REDUCE_SCATTER,
    Collective.ALL_GATHER,
    Collective.ALL_TO_ALL,
    Collective.BROADCAST,
    Collective.REDUCE,
)


class Hierarchical:
    """Hierarchical algorithms of one communicator; ``local`` is its node's.

    Streams are handles.
    """

    def __init__(self, local: DeviceCommunicator, runtime: MultiNodeRuntime) -> None:
        self.local, self.runtime, self.layout = local, runtime, runtime.layout
        self._call_text = ""

    def supports(self, collective: Collective, dtype: DType, op: Any, block_bytes: int) -> bool:
        """Return True if ``run`` can execute the operation."""
        if collective not in HIERARCHICAL or (
            collective is Collective.ALL_TO_ALL and not self.layout.node_major
        ):
            return False
        if collective.reduces:
            return self.may_reduce(dtype, op)
        # With one rank per node as well: then the part inside the node is empty.
        direct = self.runtime.moves_directly(block_bytes) and self.layout.uniform
        return self.layout.hierarchical or (direct and collective is Collective.BROADCAST)

    def run(
        self,
        collective: Collective,
        source: DeviceMemory,
        target: DeviceMemory,
        count: int,
        op: Any,
        root: int,
        stream: int,
        captured: bool,
    ) -> None:
        """Run a supported collective; ``count``: elements per block."""
        self._call_text = self.runtime.describe_call(collective.label, count, source.dtype)
        match collective:
            case Collective.ALL_REDUCE:
                self.all_reduce(source, target, op, stream, captured)
            case Collective.REDUCE_SCATTER:
                self.reduce_scatter(source, target, op, stream, captured)
            case Collective.ALL_GATHER:
                self.all_gather(source, target, stream, captured)
            case Collective.ALL_TO_ALL:
                self.all_to_all(source, target, stream, captured)
            case Collective.BROADCAST:
                self.broadcast(source, root, stream, captured)
            case Collective.REDUCE:
                self.reduce(source, target, op, root, stream, captured)

    def may_reduce(self, dtype: DType, op: Any) -> bool:
        """Return True if a reduction may be split into a part inside nodes and one between nodes.

        Sums of floats then depend on the assignment of ranks to nodes, which ``deterministic``
        excludes.
        """
        averages_integers = op is RedOp.AVG and not dtype.is_float
        ordered = self.local.planner.deterministic and dtype.is_float
        return (
            self.layout.hierarchical
            and isinstance(op, RedOp)
            and dtype in GPU_REDUCIBLE
            and not averages_integers
            and not ordered
        )

    def all_reduce(
        self, source: DeviceMemory, target: DeviceMemory, op: RedOp, stream: int, captured: bool
    ) -> None:
        """Run reduce_scatter in the node, all_reduce between nodes, all_gather in the node.

        The remainder of an uneven division belongs to the last local rank, next to its share.
        """
        width, last = self.layout.local_size, self.layout.local_size - 1
        share, rest = divmod(source.count, width)
        even, shard = share * width, target.slice(self.layout.local_rank * share, share)
        if share:
            self.local.reduce_scatter(source.slice(0, even), shard, op, stream=stream)
        if rest:
            self.local.reduce(
                source.slice(even, rest), last, target.slice(even, rest), op, stream=stream
            )
        mine = target.slice(
            self.layout.local_rank * share, share + (rest if self.layout.local_rank == last else 0)
        )
        if mine.count:
            shape = self._inter_node_shape(Collective.ALL_REDUCE, mine, mine.count)
            self._run_inter_node(
                shape, mine.dtype, op, (mine.address, mine.address), stream, captured
            )
        with self.local.any_window_offset():
            if share:
                self.local.all_gather(shard, target.slice(0, even), stream=stream)
            if rest:
                self.local.broadcast(target.slice(even, rest), last, stream=stream)

    def all_gather(
        self, source: DeviceMemory, target: DeviceMemory, stream: int, captured: bool
    ) -> None:
        """Run all_gather between nodes among ranks of equal local rank, then inside each node."""
        count = source.count
        peers = self.layout.inter_node_ranks()
        blocks = [target.slice(rank * count, count) for rank in peers]
        if self.runtime.moves_directly(source.nbytes):
            own = blocks[self.layout.node]
            if own.address != source.address:
                self.runtime.gpu.copy(own.address, source.address, source.nbytes, stream)
            self._exchange(Collective.ALL_GATHER, [source] * len(peers), blocks, stream, captured)
        else:
            shape = dataclasses.replace(
                self._inter_node_shape(Collective.ALL_GATHER, source, count),
                block_offsets=tuple(rank * count for rank in peers),
            )
            self._run_inter_node(
                shape, source.dtype, SUM, (source.address, target.address), stream, captured
            )
        if self.layout.node_major:
            for node in range(len(self.layout.nodes)):
                part = target.slice(
                    node * self.layout.local_size * count, self.layout.local_size * count
                )
                self.local.all_gather(
                    part.slice(self.layout.local_rank * count, count), part, stream=stream
                )
            return
        for ranks in self.layout.nodes:
            for index, rank in enumerate(ranks):
                self.local.broadcast(target.slice(rank * count, count), index, stream=stream)

    def reduce_scatter(
        self, source: DeviceMemory, target: DeviceMemory, op: RedOp, stream: int, captured: bool
    ) -> None:
        """Reduce each block to its owner's local rank, then reduce_scatter between nodes.

        The kernels write the reduced blocks into that rank's slot.
        """
        count, dtype = target.count, source.dtype
        shape = self._inter_node_shape(Collective.REDUCE_SCATTER, source, count, kernels=True)
        capacity = elements_per_segment(shape, self.runtime.slot_bytes)

        def before(segment: int, slot: int) -> None:
            size = min(capacity, count - segment * capacity)
            for node, ranks in enumerate(self.layout.nodes):
                for index, rank in enumerate(ranks):
                    out = (
                        self.runtime.slot_memory(slot, node * size, size, dtype)
                        if index == self.layout.local_rank
                        else None
                    )
                    self.local.reduce(
                        source.slice(rank * count + segment * capacity, size),
                        index,
                        out,
                        op,
                        stream=stream,
                    )

        self._run_inter_node(shape, dtype, op, (0, target.address), stream, captured, before=before)

    def broadcast(self, memory: DeviceMemory, root: int, stream: int, captured: bool) -> None:
        """Broadcast between nodes among ranks with the root's local rank, then inside each node.

        Both go segment by segment.
        """
        node, index = self.layout.locate(root)
        if self.runtime.moves_directly(memory.nbytes):
            if index == self.layout.local_rank:
                everyone = [memory] * len(self.layout.nodes)
                at_root = node == self.layout.node
                into = [
                    None if at_root or each != node else memory for each in range(len(everyone))
                ]
                out = everyone if at_root else [None] * len(everyone)
                self._exchange(Collective.BROADCAST, out, into, stream, captured, node)
            with self.local.any_window_offset():
                self.local.broadcast(memory, index, stream=stream)
            return
        shape = self._inter_node_shape(
            Collective.BROADCAST, memory, memory.count, node, kernels=True
        )
        capacity = elements_per_segment(shape, self.runtime.slot_bytes)

        def after(segment: int, slot: int) -> None:
            size = min(capacity, memory.count - segment * capacity)
            with self.local.any_window_offset():
                self.local.broadcast(memory.slice(segment * capacity, size), index, stream=stream)

        buffers = (memory.address, memory.address)
        self._run_inter_node(
            shape,
            memory.dtype,
            SUM,
            buffers,
            stream,
            captured,
            participates=index == self.layout.local_rank,
            after=after,
        )

    def reduce(
        self,
        source: DeviceMemory,
        target: DeviceMemory,
        op: RedOp,
        root: int,
        stream: int,
        captured: bool,
    ) -> None:
        """Reduce in each node to the slot of the root's local rank, then between nodes."""
        node, index = self.layout.locate(root)
        shape = self._inter_node_shape(Collective.REDUCE, source, source.count, node, kernels=True)
        capacity = elements_per_segment(shape, self.runtime.slot_bytes)

        def before(segment: int, slot: int) -> None:
            size = min(capacity, source.count - segment * capacity)
            out = (
                self.runtime.slot_memory(slot, 0, size, source.dtype)
                if index == self.layout.local_rank
                else None
            )
            self.local.reduce(source.slice(segment * capacity, size), index, out, op, stream=stream)

        buffers = (0, target.address)
        self._run_inter_node(
            shape,
            source.dtype,
            op,
            buffers,
            stream,
            captured,
            participates=index == self.layout.local_rank,
            before=before,
        )

    def all_to_all(
        self, source: DeviceMemory, target: DeviceMemory, stream: int, captured: bool
    ) -> None:
        """Run all_to_all in the node per destination node, then in place between nodes.

        After the first part a rank holds everything its node sends to ranks with its local rank.
        """
        nnodes = len(self.layout.nodes)
        block = source.count // nnodes
        for node in range(nnodes):
            self.local.all_to_all(
                source.slice(node * block, block), target.slice(node * block, block), stream=stream
            )
        if self.runtime.moves_directly(block * source.dtype.itemsize):
            blocks = [target.slice(node * block, block) for node in range(nnodes)]
            self._exchange(Collective.ALL_TO_ALL, blocks, blocks, stream, captured)
            return
        shape = dataclasses.replace(
            self._inter_node_shape(Collective.ALL_TO_ALL, source, block), keeps_own_block=True
        )
        self._run_inter_node(
            shape, source.dtype, SUM, (target.address, target.address), stream, captured
        )

    def _exchange(
        self,
        collective: Collective,
        out: Sequence[DeviceMemory | None],
        into: Sequence[DeviceMemory | None],
        stream: int,
        captured: bool,
        root: int = 0,
    ) -> None:
        """Send and receive between the ranks of equal local rank, from and to GPU memory.

        ``out``, ``into``: by node; the own node's are left out.
        """
        ranks = self.layout.inter_node_ranks()
        transfers = [
            DeviceTransfer(receives, ranks[node], memory)
            for receives, blocks in ((False, out), (True, into))
            for node, memory in enumerate(blocks)
            if node != self.layout.node and memory is not None and memory.count
        ]
        self.runtime.exchange(transfers, stream, captured, (collective, root), ranks=ranks)

    def _run_inter_node(self, shape: StagedShape, *args: Any, **hooks: Any) -> None:
        self.runtime.enqueue(
            self.runtime.inter_node, shape, *args, call_text=self._call_text, **hooks
        )

    def _inter_node_shape(
        self,
        collective: Collective,
        memory: DeviceMemory,
        count: int,
        root: int = 0,
        *,
        kernels: bool = False,
    ) -> StagedShape:
        """Return the shape of an operation between nodes.

        ``kernels``: kernels are launched for every segment, so segments are not made smaller to
        overlap.
        """
        even = StagedShape.even(
            collective, memory.dtype.itemsize, self.layout.node, len(self.layout.nodes), root, count
        )
        return dataclasses.replace(even, overlaps=False) if kernels else even
