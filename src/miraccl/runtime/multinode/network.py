"""Network part of a segment of GPU data: CPU collectives on slots of pinned memory.

A collective that can be prepared (``runtime.persistent``) is prepared once per staging thread and
slot; the thread's loop then starts it without Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from miraccl.runtime.multinode.direct import DirectOperation, DirectStreams
from miraccl.runtime.multinode.segments import StagedSegment, StagedShape
from miraccl.runtime.multinode.staging import PinnedSlots, PreparedSegment, SegmentNetwork
from miraccl.types import Collective, DType, RedOp

if TYPE_CHECKING:
    from miraccl.runtime.core import CommunicatorCore


class CpuCommunicator(Protocol):
    """CPU communicator as staged operations use it (``api.communicator``)."""

    rank: int
    nranks: int

    @property
    def _core(self) -> CommunicatorCore:
        """Core, for ``core_access``."""

    def all_reduce(self, x: Any, out: Any = None, op: Any = ...) -> Any: ...
    def all_reduce_sparse(
        self, x: Any, op: Any = ..., *, block: int | None = None, density: float | None = None
    ) -> Any: ...
    def explain_sparse(self, nbytes: int, dtype: Any = ..., *, density: float = ...) -> Any: ...
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
    def send(self, x: Any, dst: int, *, async_op: Literal[True]) -> Any: ...
    def recv(self, x: Any, src: int, *, async_op: Literal[True]) -> Any: ...
    def barrier(self) -> Any: ...
    def abort(self, reason: str = ...) -> None: ...
    def finalize(self) -> None: ...


class PythonStaging:
    """Segments run by Python: ``run(segment, number, slot)``."""

    def __init__(self, run: Callable[[StagedSegment, int, int], None]) -> None:
        self.run = run

    def prepare(self, segment: StagedSegment, number: int, slot: int) -> None: ...


class StagedCollective:
    """Runs segments of ``shape`` on CPU communicators, one per staging thread of the job.

    ``direct``: streams of the communicators, if they have any.
    """

    def __init__(
        self,
        communicators: Sequence[CpuCommunicator],
        shape: StagedShape,
        dtype: DType,
        op: Any,
        slots: PinnedSlots,
        direct: Sequence[DirectStreams] = (),
    ) -> None:
        self._communicators, self._shape, self._dtype, self._op, self._slots = (
            communicators,
            shape,
            dtype,
            op,
            slots,
        )
        self._direct = direct
        self._prepared: dict[tuple[object, ...], PreparedSegment] = {}

    def prepare(self, segment: StagedSegment, number: int, slot: int) -> PreparedSegment | None:
        """Return the prepared operation; None for uneven blocks.

        Segments of equal size share one operation per slot.
        """
        if self._shape.uneven:
            return None
        key = (slot, segment.source, segment.source_counts, segment.target, segment.target_counts)
        if key not in self._prepared:
            self._prepared[key] = self._make(segment, number, slot)
        return self._prepared[key]

    def _make(self, segment: StagedSegment, number: int, slot: int) -> PreparedSegment:
        if self._direct:
            streams = self._direct[number % len(self._direct)]
            if streams.accepts(self._shape, segment, self._op):
                return DirectOperation(
                    streams, self._shape, self._dtype, self._op, *self._arrays(segment, slot)
                )
        prepared: PreparedSegment = _prepare(
            self._communicator(number), self._shape, *self._arrays(segment, slot), self._op
        )
        return prepared

    def run(self, segment: StagedSegment, number: int, slot: int) -> None:
        prepared = self.prepare(segment, number, slot)
        if prepared is not None:
            prepared()
        else:
            _run_uneven(
                self._communicator(number),
                self._shape,
                segment,
                *self._arrays(segment, slot),
                self._op,
            )

    def _communicator(self, number: int) -> CpuCommunicator:
        return self._communicators[number % len(self._communicators)]

    def _arrays(self, segment: StagedSegment, slot: int) -> tuple[np.ndarray, np.ndarray]:
        source = self._slots.view(slot, segment.source, sum(segment.source_counts), self._dtype)
        return source, self._slots.view(
            slot, segment.target, sum(segment.target_counts), self._dtype
        )


def _prepare(
    communicator: CpuCommunicator, shape: StagedShape, x: np.ndarray, out: np.ndarray, op: Any
) -> Any:
    """Prepare a collective of even blocks."""
    root, is_root = shape.root, shape.rank == shape.root
    match shape.collective:
        case Collective.ALL_REDUCE:
            return communicator.all_reduce_init(x, None, op)
        case Collective.BROADCAST:
            return communicator.broadcast_init(x, root)
        case Collective.REDUCE:
            return communicator.reduce_init(x, root, None, op)
        case Collective.ALL_GATHER:
            return communicator.all_gather_init(x, out)
        case Collective.REDUCE_SCATTER:
            return communicator.reduce_scatter_init(x, out, op)
        case Collective.ALL_TO_ALL:
            return communicator.all_to_all_init(x, out)
        case Collective.GATHER:
            return communicator.gather_init(x, root, out if is_root else None)
        case Collective.SCATTER:
            return communicator.scatter_init(x if is_root else None, root, out)
    raise ValueError(f"{shape.collective.label} cannot be segmented")


def _run_uneven(
    communicator: CpuCommunicator,
    shape: StagedShape,
    segment: StagedSegment,
    x: np.ndarray,
    out: np.ndarray,
    op: Any,
) -> None:
    root, is_root = shape.root, shape.rank == shape.root
    match shape.collective:
        case Collective.ALL_GATHER:
            communicator.all_gather_v(x, segment.counts, out)
        case Collective.REDUCE_SCATTER:
            communicator.reduce_scatter_v(x, segment.counts, out, op)
        case Collective.ALL_TO_ALL:
            communicator.all_to_all_v(x, segment.source_counts, segment.target_counts, out)
        case Collective.GATHER:
            communicator.gather_v(x, segment.counts, root, out if is_root else None)
        case Collective.SCATTER:
            communicator.scatter_v(x if is_root else None, segment.counts, root, out)
        case _:
            raise ValueError(f"{shape.collective.label} has no uneven form")


def with_agreed_count(
    communicator: CpuCommunicator, segments: tuple[StagedSegment, ...], network: SegmentNetwork
) -> tuple[tuple[StagedSegment, ...], SegmentNetwork]:
    """Return segments and network for counts that each rank knows only for itself.

    The staging threads agree on the number of segments; ranks with fewer take part with empty ones.
    """
    nothing, none = np.empty(0, np.uint8), (0,) * communicator.nranks
    own = segments or (StagedSegment(source_counts=none, target_counts=none),)
    agreed = len(own)

    def run(segment: StagedSegment, number: int, slot: int) -> None:
        nonlocal agreed
        if number == 0:
            agreed = int(
                communicator.all_reduce(np.array([len(own)], np.int64), None, RedOp.MAX)[0]
            )
        network.run(segment, number, slot)
        if number == len(own) - 1:
            for _ in range(agreed - len(own)):
                communicator.all_to_all_v(nothing, none, none, nothing)

    return own, PythonStaging(run)
