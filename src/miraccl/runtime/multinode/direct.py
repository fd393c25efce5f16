"""Direct exchange of GPU data by a staging thread over TCP streams of its own: the lowest latency.

Every rank sends each peer the block it needs and reduces the received blocks in rank order
(``executor.cpu.kernels.nogil``): one message per direction, no other thread involved. Algorithms
that move fewer bytes exist for all_reduce, broadcast and reduce of more than two ranks, so those
use this exchange for small segments only. The operations belong to a CPU communicator: they are
numbered, signed and recorded on its progress page with its others, and its faults explain theirs.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miraccl.executor.cpu.context import fold_kernel
from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.nogil import offsets
from miraccl.executor.cpu.lower import signature
from miraccl.runtime.core_access import CoreAccess
from miraccl.runtime.multinode.segments import StagedSegment, StagedShape
from miraccl.runtime.multinode.streams import (
    StagingStreams,
    StreamOperation,
    streams_possible,
    write_words,
)
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.types import Collective, DType, RedOp

MAX_PEERS = 7  # as many sends in sequence take no longer than the rounds of a tree
SMALL_BYTES = 64 << 10
_MINIMAL_TRAFFIC = (
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.ALL_TO_ALL,
    Collective.GATHER,
    Collective.SCATTER,
)


class DirectStreams:
    """One stream to each other rank of a CPU communicator with one rank per node.

    Created collectively; used by one thread at a time.
    """

    def __init__(self, stages: SetupPhases, core: CoreAccess) -> None:
        self.core, self._session = core, stages.session
        self._streams = StagingStreams(
            stages, core, [rank for rank in range(core.nranks) if rank != core.rank], "direct"
        )
        self._receive_buffers: list[np.ndarray] = []
        self.peers = self._streams.peers

    @staticmethod
    def applicable(core: CoreAccess) -> bool:
        """Return True if the ranks of a communicator create such streams; all ranks agree."""
        one_per_host = len(set(core.hosts)) == core.nranks
        few = 1 < core.nranks <= MAX_PEERS + 1
        return one_per_host and few and not core.required_algorithm and streams_possible(core)

    def accepts(self, shape: StagedShape, segment: StagedSegment, op: Any) -> bool:
        """Return True if a segment runs as a direct exchange; all ranks agree."""
        if shape.uneven or (shape.collective.reduces and not isinstance(op, RedOp)):
            return False
        largest = max((*segment.source_counts, *segment.target_counts)) * shape.itemsize
        return shape.collective in _MINIMAL_TRAFFIC or shape.nranks == 2 or largest <= SMALL_BYTES

    @property
    def sockets(self) -> Mapping[int, socket.socket]:
        """Streams by peer."""
        return self._streams.sockets

    def descriptor(self, peer: int) -> int:
        return self._streams.descriptor(peer)

    def receive_buffer(self, nbytes: int, number: int) -> np.ndarray:
        """Return the buffer for data of the ``number``-th peer, shared by all operations.

        Only one operation runs at a time. A larger request replaces the buffer, so operations keep
        a reference to theirs.
        """
        while len(self._receive_buffers) <= number:
            self._receive_buffers.append(np.empty(0, np.uint8))
        if self._receive_buffers[number].nbytes < nbytes:
            self._receive_buffers[number] = np.empty(nbytes, np.uint8)
        return self._receive_buffers[number]

    def shutdown_writes(self) -> None:
        self._streams.shutdown_writes()

    def close(self) -> None:
        """Close the streams. May be called twice."""
        self._streams.close()
        self._session.close()


class DirectOperation(StreamOperation):
    """Collective of even blocks in one slot; ``x`` and ``out`` lie in the slot's memory."""

    kernel = "exchange_nogil"

    def __init__(
        self,
        streams: DirectStreams,
        shape: StagedShape,
        dtype: DType,
        op: Any,
        x: np.ndarray,
        out: np.ndarray,
    ) -> None:
        super().__init__(streams.core, shape.collective.label)
        self._keep: list[Any] = [x, out]
        source, target = int(x.ctypes.data), int(out.ctypes.data)
        block = _block_bytes(shape, x, out)
        folds = shape.collective.reduces and (
            shape.collective is not Collective.REDUCE or shape.rank == shape.root
        )
        own = source + (shape.rank * block if shape.collective is Collective.REDUCE_SCATTER else 0)
        sources = {shape.rank: own}
        rows = []
        for number, peer in enumerate(streams.peers):
            send_block, recv_block = _block_indices(shape, peer)
            if send_block is None and recv_block is None:
                continue
            buffer = target + (recv_block or 0) * block
            if folds:
                self._keep.append(streams.receive_buffer(block, number))
                buffer = sources[peer] = int(self._keep[-1].ctypes.data)
            row = np.zeros(offsets.ROW_BYTES // 8, np.int64)
            write_words(row, (offsets.PEER, peer), (offsets.DESCRIPTOR, streams.descriptor(peer)))
            for direction, address, block_number in (
                (offsets.OUT, source + (send_block or 0) * block, send_block),
                (offsets.IN, buffer, recv_block),
            ):
                write_words(
                    row,
                    (direction + offsets.BUFFER, address),
                    (
                        direction + offsets.BYTES,
                        offsets.HEADER_BYTES + (0 if block_number is None else block),
                    ),
                )
            rows.append(row)
        self._set_rows(np.array(rows))
        kind = op if shape.collective.reduces else RedOp.SUM
        template = signature(shape.collective, dtype, kind, shape.root, block // dtype.itemsize)
        write_words(
            self._words,
            (offsets.TEMPLATE, template),
            (offsets.COUNT, block // dtype.itemsize),
            (offsets.ITEMSIZE, dtype.itemsize),
        )
        if folds:
            self._fold(
                [sources[rank] for rank in sorted(sources)], own, block, fold_kernel(dtype, op)
            )
        if shape.collective is Collective.ALL_TO_ALL and not shape.keeps_own_block:
            place = shape.rank * block
            write_words(
                self._words,
                (offsets.COPY_FROM, source + place),
                (offsets.COPY_TO, target + place),
                (offsets.COPY_BYTES, block),
            )

    def _fold(self, sources: Sequence[int], to: int, nbytes: int, kernel: int) -> None:
        self._accumulators = np.zeros(layout.FOLD_BLOCK, np.int64)
        self._bases = np.array(sources, np.int64)
        self._sources = np.array([self._accumulators.ctypes.data, *sources], np.int64)
        write_words(
            self._words,
            (offsets.FOLD, kernel),
            (offsets.FOLD_TO, to),
            (offsets.FOLD_BYTES, nbytes),
            (offsets.NSOURCES, len(sources)),
        )
        write_words(
            self._words,
            (offsets.SOURCES, self._sources.ctypes.data),
            (offsets.BASES, self._bases.ctypes.data),
        )


def _block_bytes(shape: StagedShape, x: np.ndarray, out: np.ndarray) -> int:
    """Return the bytes of one message."""
    match shape.collective:
        case Collective.REDUCE_SCATTER | Collective.SCATTER:
            return out.nbytes
        case Collective.ALL_TO_ALL:
            return x.nbytes // shape.nranks
    return x.nbytes


def _block_indices(shape: StagedShape, peer: int) -> tuple[int | None, int | None]:
    """Return the index of the block sent to ``peer`` and of the block received; None: no block."""
    is_root, peer_is_root = shape.rank == shape.root, peer == shape.root
    match shape.collective:
        case Collective.ALL_REDUCE:
            return 0, 0
        case Collective.ALL_GATHER:
            return 0, peer
        case Collective.REDUCE_SCATTER:
            return peer, 0
        case Collective.ALL_TO_ALL:
            return peer, peer
        case Collective.BROADCAST:
            return 0 if is_root else None, 0 if peer_is_root else None
        case Collective.REDUCE:
            return 0 if peer_is_root else None, 0 if is_root else None
        case Collective.GATHER:
            return 0 if peer_is_root else None, peer if is_root else None
        case Collective.SCATTER:
            return peer if is_root else None, 0 if peer_is_root else None
    raise ValueError(f"{shape.collective.label} cannot be segmented")
