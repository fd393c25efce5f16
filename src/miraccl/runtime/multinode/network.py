"""The network's part of a piece of GPU data: operations of CPU communicators on slots of pinned memory.

Where a collective can be prepared (``comm.persistent``) it is, once per lane and slot: the proxy's loop then starts it without Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from miraccl.runtime.multinode.direct import DirectOperation, DirectStreams
from miraccl.runtime.multinode.segments import StagedSegment, StagedShape
from miraccl.runtime.multinode.staging import PinnedSlots, PreparedOp, SegmentNetwork
from miraccl.types import Collective, DType, RedOp


class CpuCommunicator(Protocol):
    """What staged operations need of a CPU communicator (``comm.communicator``)."""

    rank: int
    nranks: int
    _core: Any

    def all_reduce(self, x: Any, out: Any = None, op: Any = ...) -> Any: ...
    def all_reduce_init(self, x: Any, out: Any = None, op: Any = ...) -> Any: ...
    def all_gather_init(self, x: Any, out: Any = None) -> Any: ...
    def reduce_scatter_init(self, x: Any, out: Any = None, op: Any = ...) -> Any: ...
    def broadcast_init(self, x: Any, root: int = 0) -> Any: ...
    def reduce_init(self, x: Any, root: int = 0, out: Any = None, op: Any = ...) -> Any: ...
    def all_to_all_init(self, x: Any, out: Any = None) -> Any: ...
    def gather_init(self, x: Any, root: int = 0, out: Any = None) -> Any: ...
    def scatter_init(self, x: Any = None, root: int = 0, out: Any = None) -> Any: ...
    def all_gather_v(self, x: Any, counts: Sequence[int], out: Any = None) -> Any: ...
    def reduce_scatter_v(
        self, x: Any, counts: Sequence[int], out: Any = None, op: Any = ...
    ) -> Any: ...
    def all_to_all_v(
        self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int], out: Any = None
    ) -> Any: ...
    def gather_v(self, x: Any, counts: Sequence[int], root: int = 0, out: Any = None) -> Any: ...
    def scatter_v(self, x: Any, counts: Sequence[int], root: int = 0, out: Any = None) -> Any: ...
    def send(self, x: Any, dst: int, *, async_op: bool = False) -> Any: ...
    def recv(self, x: Any, src: int, *, async_op: bool = False) -> Any: ...
    def barrier(self) -> Any: ...
    def abort(self, reason: str = ...) -> None: ...
    def finalize(self) -> None: ...


class PythonStaging:
    """Pieces that Python runs: ``run(piece, number, slot)``."""

    def __init__(self, run: Callable[[StagedSegment, int, int], None]) -> None:
        self.run = run

    def prepare(self, piece: StagedSegment, number: int, slot: int) -> None: ...


class StagedCollective:
    """Runs pieces of ``shape`` on CPU communicators of ``shape.nranks`` ranks, one for each lane that the job takes; ``direct`` are their
    own streams, where they have some."""

    def __init__(
        self,
        cpus: Sequence[CpuCommunicator],
        shape: StagedShape,
        dtype: DType,
        op: Any,
        slots: PinnedSlots,
        direct: Sequence[DirectStreams] = (),
    ) -> None:
        self._cpus, self._shape, self._dtype, self._op, self._slots = cpus, shape, dtype, op, slots
        self._direct = direct
        self._prepared: dict[tuple[object, ...], PreparedOp] = {}

    def prepare(self, piece: StagedSegment, number: int, slot: int) -> PreparedOp | None:
        """The operation, ready to be called; None for uneven blocks. Pieces of equal size share those of their slot."""
        if self._shape.uneven:
            return None
        key = (slot, piece.source, piece.source_counts, piece.target, piece.target_counts)
        if key not in self._prepared:
            self._prepared[key] = self._make(piece, number, slot)
        return self._prepared[key]

    def _make(self, piece: StagedSegment, number: int, slot: int) -> PreparedOp:
        if self._direct:
            streams = self._direct[number % len(self._direct)]
            if streams.accepts(self._shape, piece, self._op):
                return DirectOperation(
                    streams, self._shape, self._dtype, self._op, *self._arrays(piece, slot)
                )
        prepared: PreparedOp = _prepare(
            self._cpu(number), self._shape, *self._arrays(piece, slot), self._op
        )
        return prepared

    def run(self, piece: StagedSegment, number: int, slot: int) -> None:
        prepared = self.prepare(piece, number, slot)
        if prepared is not None:
            prepared()
        else:
            _run_uneven(self._cpu(number), self._shape, piece, *self._arrays(piece, slot), self._op)

    def _cpu(self, number: int) -> CpuCommunicator:
        return self._cpus[number % len(self._cpus)]

    def _arrays(self, piece: StagedSegment, slot: int) -> tuple[np.ndarray, np.ndarray]:
        source = self._slots.view(slot, piece.source, sum(piece.source_counts), self._dtype)
        return source, self._slots.view(slot, piece.target, sum(piece.target_counts), self._dtype)


def _prepare(
    cpu: CpuCommunicator, shape: StagedShape, x: np.ndarray, out: np.ndarray, op: Any
) -> Any:
    """The ``Prepared`` of even blocks."""
    root, chief = shape.root, shape.rank == shape.root
    match shape.collective:
        case Collective.ALL_REDUCE:
            return cpu.all_reduce_init(x, None, op)
        case Collective.BROADCAST:
            return cpu.broadcast_init(x, root)
        case Collective.REDUCE:
            return cpu.reduce_init(x, root, None, op)
        case Collective.ALL_GATHER:
            return cpu.all_gather_init(x, out)
        case Collective.REDUCE_SCATTER:
            return cpu.reduce_scatter_init(x, out, op)
        case Collective.ALL_TO_ALL:
            return cpu.all_to_all_init(x, out)
        case Collective.GATHER:
            return cpu.gather_init(x, root, out if chief else None)
        case Collective.SCATTER:
            return cpu.scatter_init(x if chief else None, root, out)
    raise ValueError(f"{shape.collective.label} is not cut into pieces")


def _run_uneven(
    cpu: CpuCommunicator,
    shape: StagedShape,
    piece: StagedSegment,
    x: np.ndarray,
    out: np.ndarray,
    op: Any,
) -> None:
    root, chief = shape.root, shape.rank == shape.root
    match shape.collective:
        case Collective.ALL_GATHER:
            cpu.all_gather_v(x, piece.counts, out)
        case Collective.REDUCE_SCATTER:
            cpu.reduce_scatter_v(x, piece.counts, out, op)
        case Collective.ALL_TO_ALL:
            cpu.all_to_all_v(x, piece.source_counts, piece.target_counts, out)
        case Collective.GATHER:
            cpu.gather_v(x, piece.counts, root, out if chief else None)
        case Collective.SCATTER:
            cpu.scatter_v(x if chief else None, piece.counts, root, out)
        case _:
            raise ValueError(f"{shape.collective.label} has no uneven form")


def with_agreed_count(
    cpu: CpuCommunicator, pieces: tuple[StagedSegment, ...], network: SegmentNetwork
) -> tuple[tuple[StagedSegment, ...], SegmentNetwork]:
    """For counts that each rank knows only of itself: the proxies agree on the number of pieces, and who has fewer takes part emptily."""
    nothing, none = np.empty(0, np.uint8), (0,) * cpu.nranks
    mine = pieces or (StagedSegment(source_counts=none, target_counts=none),)
    agreed = len(mine)

    def run(piece: StagedSegment, number: int, slot: int) -> None:
        nonlocal agreed
        if number == 0:
            agreed = int(cpu.all_reduce(np.array([len(mine)], np.int64), None, RedOp.MAX)[0])
        network.run(piece, number, slot)
        if number == len(mine) - 1:
            for _ in range(agreed - len(mine)):
                cpu.all_to_all_v(nothing, none, none, nothing)

    return mine, PythonStaging(run)
