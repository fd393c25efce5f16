"""Data of a collective on virtual ranks: the interpreter's primitives on the callers' arrays.

Chunks are slices of the arrays that the ranks passed, so input and output overlap in place as they
do for an executor. Scratch memory holds whatever its steps store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from miraccl.schedule.interpret import InterpreterState, Value
from miraccl.schedule.ir import Buffer, Op, Ref, Schedule, Step
from miraccl.schedule.layout import part_bounds
from miraccl.schedule.reduction import Array, divide_towards_zero, fold
from miraccl.types import RedOp


@dataclass(kw_only=True)
class CallBuffers:
    """Arrays of one rank's call, flat, and the elements of their blocks.

    Attributes:
        schedule: Schedule in the form (in place or not) of this rank.
        piece: Elements of a chunk that move in one round.
    """

    schedule: Schedule
    source: Array
    target: Array
    in_counts: Sequence[int]
    out_counts: Sequence[int]
    piece: int
    scratch: dict[tuple[int, int], Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._starts = {
            Buffer.INPUT: [0, *accumulate(self.in_counts)],
            Buffer.OUTPUT: [0, *accumulate(self.out_counts)],
        }

    def view(self, buffer: Buffer, chunk: int, number: int) -> Array:
        """Return the elements of a chunk of the input or output in round ``number``."""
        parts = self.schedule.parts
        array, counts = (
            (self.source, self.in_counts)
            if buffer is Buffer.INPUT
            else (self.target, self.out_counts)
        )
        start = self._starts[buffer][chunk // parts]
        low, high = part_bounds(counts[chunk // parts], chunk % parts, parts)
        first = min(high, low + number * self.piece)
        return array[start + first : start + min(high, first + self.piece)]


class DataState(InterpreterState):
    """Messages and arrays of one collective.

    Args:
        schedule: Schedule out of place.
        op: Operator of the reduction.
        completing: Steps whose sums hold all contributions, for an average that divides there.
    """

    def __init__(
        self,
        schedule: Schedule,
        op: RedOp,
        completing: frozenset[tuple[int, int, int]] = frozenset(),
    ) -> None:
        super().__init__(schedule, [], [], self._fold, None, False)
        self.buffers: dict[int, CallBuffers] = {}
        self._op, self._completing = op, completing
        self._round, self._divisor = 0, None

    _divisor: int | None

    def run_step(self, step: Step, channel: int, rank: int, number: int, position: int) -> None:
        """Execute a step, at ``position`` in its channel, in round ``number``."""
        self._round = number
        complete = (channel, rank, position) in self._completing
        self._divisor = self.schedule.nranks if complete else None
        self.execute(step, channel, rank)

    def nbytes(self, step: Step, rank: int, number: int) -> int:
        """Return the bytes that a step moves in round ``number``."""
        local = step.dst if step.src is None or step.op in _REMOTE_SOURCE else step.src
        if local is None:
            return 0
        buffers = self.buffers[rank]
        if local.buffer is Buffer.SCRATCH:
            # Scratch needs even blocks: its chunk i has the size of part i % parts of any block.
            block = Buffer.INPUT if buffers.in_counts else Buffer.OUTPUT
            parts = [chunk % self.schedule.parts for chunk in local]
            return sum(int(buffers.view(block, part, number).nbytes) for part in parts)
        chunks = range(local.index, local.index + local.chunks)
        return sum(int(buffers.view(local.buffer, chunk, number).nbytes) for chunk in chunks)

    def load(self, rank: int, ref: Ref | None) -> list[Value]:
        assert ref is not None
        buffers, chunks = self.buffers[rank], range(ref.index, ref.index + ref.chunks)
        if ref.buffer is Buffer.SCRATCH:
            return [buffers.scratch[chunk, self._round] for chunk in chunks]
        return [buffers.view(ref.buffer, chunk, self._round).copy() for chunk in chunks]

    def store(self, rank: int, ref: Ref | None, values: list[Value]) -> None:
        assert ref is not None
        buffers = self.buffers[rank]
        for chunk, value in zip(range(ref.index, ref.index + ref.chunks), values, strict=True):
            if ref.buffer is Buffer.SCRATCH:
                buffers.scratch[chunk, self._round] = value
            else:
                buffers.view(ref.buffer, chunk, self._round)[:] = value

    def _fold(self, values: list[Value]) -> Value:
        return fold(values, self._op, self._divisor)


#: Primitives whose ``src`` is in the memory of peers.
_REMOTE_SOURCE = (Op.GET, Op.REDUCE_FROM_PEERS)


def divide(array: Array, divisor: int) -> None:
    """Divide an array in place as an average does: integers truncate towards zero."""
    if array.dtype.kind in "iu":
        array[:] = divide_towards_zero(array, divisor)
    else:
        array[:] = fold([array], RedOp.SUM, divisor)
