"""Reference interpreter: the definition of a schedule's meaning.

Runs all ranks in one thread. ``run`` is generic in the type of a chunk: it moves opaque values
between cells and calls ``fold`` where a primitive reduces. ``interpret`` runs it on numpy arrays,
tests run it on symbols. Ranks execute one step each in turn until all have finished or none can
continue. A step is atomic: it waits until all its messages and signals have arrived and the FIFO it
sends to has a free slot.

With ``direct``, a message that already lies in the sender's memory is not copied into the FIFO: the
sender posts its location and the receiver reads it there when it receives the message.
``verify.is_direct_safe`` states for which schedules the results are the same.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.schedule.ir import Buffer, Op, Ref, Schedule, Step
from miraccl.schedule.layout import Counts, RankCells, block_counts, part_bounds, rank_cells
from miraccl.schedule.reduction import Array, dtype_of, fold, premultiply, reference
from miraccl.types import Collective, RedOp

#: content of a chunk that has not been written
UNDEFINED: Any = None

Value = Any
Fold = Callable[[list[Value]], Value]
Shuffle = Callable[[list[tuple[int, int]]], None]
#: (value, part, table) -> the value without the rows of the part that the table does not list
Restrict = Callable[[Value, int, int], Value]
Key = tuple[int, int, int]  # (sender, receiver, channel)


@dataclass(frozen=True, slots=True)
class _DirectMessage:
    """Location of a message in the sender's memory (direct runs)."""

    rank: int
    ref: Ref


class InterpreterState:
    """Memory, FIFOs, signals and program counters of all ranks."""

    def __init__(
        self,
        schedule: Schedule,
        memory: list[list[Value]],
        cells: list[RankCells],
        fold: Fold,
        depth: int | None,
        direct: bool,
        restrict: Restrict | None = None,
    ) -> None:
        self.restrict = restrict
        self.schedule, self.memory, self.cells, self.fold, self.depth, self.direct = (
            schedule,
            memory,
            cells,
            fold,
            depth,
            direct,
        )
        self.fifos: defaultdict[Key, deque[list[Value] | _DirectMessage]] = defaultdict(deque)
        self.signals: defaultdict[Key, int] = defaultdict(int)
        self.position = [[0] * schedule.participants for _ in schedule.channels]
        self.barriers_reached = [[0] * schedule.participants for _ in schedule.channels]

    # memory

    def range_of(self, rank: int, ref: Ref) -> range:
        if (
            not 0 <= rank < self.schedule.participants
            or ref.index + ref.chunks > self.schedule.chunks_at(ref.buffer, rank)
        ):
            raise ScheduleError(f"{ref} is out of range on rank {rank}")
        return self.cells[rank].range_of(ref)

    def load(self, rank: int, ref: Ref | None) -> list[Value]:
        assert ref is not None
        values = [self.memory[rank][cell] for cell in self.range_of(rank, ref)]
        if any(value is UNDEFINED for value in values):
            raise ScheduleError(f"{ref} of rank {rank} is read before it is written")
        return self.rows_of(ref, values)

    def rows_of(self, ref: Ref, values: list[Value]) -> list[Value]:
        """Return ``values`` without the rows that the table of ``ref`` does not list."""
        if ref.table is None or self.restrict is None:
            return values
        parts = self.schedule.parts
        return [
            self.restrict(value, chunk % parts, ref.table)
            for chunk, value in zip(ref, values, strict=True)
        ]

    def store(self, rank: int, ref: Ref | None, values: list[Value]) -> None:
        assert ref is not None
        cells = self.range_of(rank, ref)
        if len(cells) != len(values):
            raise ScheduleError(
                f"{ref} of rank {rank} has {len(cells)} chunks, the message {len(values)}"
            )
        for cell, value in zip(cells, self.rows_of(ref, values), strict=True):
            self.memory[rank][cell] = value

    # messages

    def can_run(self, step: Step, channel: int, rank: int) -> bool:
        if not all(self.fifos[peer, rank, channel] for peer in step.senders(rank)):
            return False
        if step.op.sends and self.depth is not None and step.send_peer is not None:
            return len(self.fifos[rank, step.send_peer, channel]) < self.depth
        if step.op is Op.WAIT:
            return all(self.signals[peer, rank, channel] for peer in step.peers)
        if step.op is Op.BARRIER:
            number = self.barriers_before(channel, rank) + 1
            self.barriers_reached[channel][rank] = number
            return all(count >= number for count in self.barriers_reached[channel])
        return True

    def barriers_before(self, channel: int, rank: int) -> int:
        done = self.schedule.channels[channel][rank][: self.position[channel][rank]]
        return sum(step.op is Op.BARRIER for step in done)

    def receive(self, peer: int | None, rank: int, channel: int) -> list[Value]:
        assert peer is not None
        if not self.fifos[peer, rank, channel]:
            raise ScheduleError(f"receives several messages from rank {peer} in one step")
        message = self.fifos[peer, rank, channel].popleft()
        return (
            self.load(message.rank, message.ref) if isinstance(message, _DirectMessage) else message
        )

    def send(
        self, rank: int, peer: int | None, channel: int, values: list[Value], ref: Ref | None
    ) -> None:
        """Append a message; ``ref`` is the location of ``values`` in the sender's memory."""
        assert peer is not None
        message = _DirectMessage(rank, ref) if self.direct and ref is not None else values
        self.fifos[rank, peer, channel].append(message)

    def reduce(self, *operands: list[Value]) -> list[Value]:
        if len({len(values) for values in operands}) != 1:
            raise ScheduleError("operands of a reduction have different numbers of chunks")
        return [self.fold(list(values)) for values in zip(*operands, strict=True)]

    # steps

    def execute(self, step: Step, channel: int, rank: int) -> None:
        """Execute one step that can run. This is the definition of the primitives."""
        src, dst, op = step.src, step.dst, step.op
        match op:
            case Op.SEND:
                self.send(
                    rank, step.send_peer, channel, [] if self.direct else self.load(rank, src), src
                )
            case Op.RECV:
                self.store(rank, dst, self.receive(step.recv_peer, rank, channel))
            case Op.COPY:
                self.store(rank, dst, self.load(rank, src))
            case Op.RECV_REDUCE:
                self.store(
                    rank,
                    dst,
                    self.reduce(self.load(rank, dst), self.receive(step.recv_peer, rank, channel)),
                )
            case Op.RECV_COPY_SEND:
                message = self.receive(step.recv_peer, rank, channel)
                self.store(rank, dst, message)
                self.send(rank, step.send_peer, channel, message, dst)
            case Op.RECV_REDUCE_SEND | Op.RECV_REDUCE_COPY | Op.RECV_REDUCE_COPY_SEND:
                total = self.reduce(
                    self.load(rank, src), self.receive(step.recv_peer, rank, channel)
                )
                if op is not Op.RECV_REDUCE_SEND:
                    self.store(rank, dst, total)
                if op is not Op.RECV_REDUCE_COPY:
                    self.send(rank, step.send_peer, channel, total, dst)
            case Op.RECV_REDUCE_ALL:
                if src is None and rank in step.peers:
                    raise ScheduleError("an aggregator has nothing of its own to add")
                operands = [
                    self.load(rank, src) if peer == rank else self.receive(peer, rank, channel)
                    for peer in step.peers
                ]
                self.store(rank, dst, self.reduce(*operands))
            case Op.PUT:
                assert step.send_peer is not None
                self.store(step.send_peer, dst, self.load(rank, src))
            case Op.GET:
                assert step.recv_peer is not None
                self.store(rank, dst, self.load(step.recv_peer, src))
            case Op.REDUCE_FROM_PEERS:
                self.store(rank, dst, self.reduce(*(self.load(peer, src) for peer in step.peers)))
            case Op.SIGNAL:
                for peer in step.peers:
                    self.signals[rank, peer, channel] += 1
            case Op.WAIT:
                for peer in step.peers:
                    self.signals[peer, rank, channel] -= 1
            case Op.BARRIER:
                pass  # ``can_run`` has checked that all ranks have arrived

    def try_step(self, channel: int, rank: int) -> bool:
        """Execute the next step of ``rank`` on ``channel`` if it can run; return True if it did."""
        steps, position = self.schedule.channels[channel][rank], self.position[channel][rank]
        if position == len(steps) or not self.can_run(steps[position], channel, rank):
            return False
        try:
            self.execute(steps[position], channel, rank)
        except ScheduleError as error:
            where = (
                f"{self.schedule.name}: channel {channel}, rank {rank}, step"
                f" {position} ({steps[position].op.name})"
            )
            raise ScheduleError(f"{where}: {error.message}") from None
        self.position[channel][rank] += 1
        return True

    def describe_unfinished(self) -> str:
        """Describe a blocked rank or an unconsumed message or signal; empty if there is none."""
        for channel, positions in enumerate(self.position):
            for rank, position in enumerate(positions):
                steps = self.schedule.channels[channel][rank]
                if position < len(steps):
                    return (
                        f"deadlock: channel {channel}, rank {rank} waits at step"
                        f" {position} ({steps[position].op.name})"
                    )
        for (sender, receiver, channel), queue in self.fifos.items():
            if queue:
                return (
                    f"channel {channel}: {len(queue)} messages from rank {sender} to rank"
                    f" {receiver} are not received"
                )
        for (sender, receiver, channel), count in self.signals.items():
            if count:
                return (
                    f"channel {channel}: {count} signals from rank {sender} to rank {receiver} are"
                    " not consumed"
                )
        return ""


def run(
    schedule: Schedule,
    memory: list[list[Value]],
    fold: Fold,
    *,
    in_place: bool = False,
    fifo_depth: int | None = None,
    direct: bool = False,
    shuffle: Shuffle | None = None,
    restrict: Restrict | None = None,
) -> list[list[Value]]:
    """Run ``schedule`` on ``memory[rank][cell]`` and return the output chunks of each rank.

    ``memory`` is numbered by ``layout.rank_cells`` and is modified. ``fold`` receives the operands
    of a reduction in order and returns a new value; values are never modified. ``fifo_depth``
    limits the messages in flight between two ranks on a channel. ``shuffle`` may reorder the turns,
    a list of (channel, rank), before each round. ``restrict`` gives tables of rows their meaning.
    Raise ``ScheduleError`` for a schedule that deadlocks, leaves messages unconsumed or reads
    undefined memory.
    """
    cells = [rank_cells(schedule, rank, in_place) for rank in range(schedule.participants)]
    state = InterpreterState(schedule, memory, cells, fold, fifo_depth, direct, restrict)
    turns = [
        (channel, rank)
        for channel in range(schedule.nchannels)
        for rank in range(schedule.participants)
    ]
    while sum(state.try_step(channel, rank) for channel, rank in turns):
        if shuffle is not None:
            shuffle(turns)
    if problem := state.describe_unfinished():
        raise ScheduleError(f"{schedule.name}: {problem}")
    return [
        [
            memory[rank][cells[rank].bases[Buffer.OUTPUT] + chunk]
            for chunk in range(schedule.chunks_at(Buffer.OUTPUT, rank))
        ]
        for rank in range(schedule.nranks)
    ]


def completing_steps(schedule: Schedule) -> frozenset[tuple[int, int, int]]:
    """Return the (channel, rank, position) of steps whose sums hold every rank's contribution.

    An average divides in these steps.
    """
    folded: list[int] = []

    def count(operands: list[Value]) -> int:
        folded.append(sum(operands))
        return folded[-1]

    cells = [rank_cells(schedule, rank, False) for rank in range(schedule.participants)]
    memory: list[list[Value]] = [[UNDEFINED] * row.cells for row in cells]
    for row, cell in zip(memory, cells, strict=True):
        base = cell.bases[Buffer.INPUT]
        row[base : base + cell.sizes[Buffer.INPUT]] = [1] * cell.sizes[Buffer.INPUT]
    state = InterpreterState(schedule, memory, cells, count, None, False)
    turns = [
        (channel, rank)
        for channel in range(schedule.nchannels)
        for rank in range(schedule.participants)
    ]
    whole, going = set(), True
    while going:
        going = False
        for channel, rank in turns:
            folded.clear()
            if state.try_step(channel, rank):
                going = True
                if folded and min(folded) == schedule.nranks:
                    whole.add((channel, rank, state.position[channel][rank] - 1))
    if problem := state.describe_unfinished():
        raise ScheduleError(f"{schedule.name}: {problem}")
    return frozenset(whole)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Elements of a chunk and the number of contributions they hold."""

    data: Array
    folded: int = 1


def _load_input(schedule: Schedule, rank: int, array: Array, lengths: list[int]) -> list[_Chunk]:
    if array.ndim != 1 or array.size != sum(lengths):
        raise InvalidUsage(
            f"the input of rank {rank} has shape {array.shape}, expected ({sum(lengths)},)"
        )
    chunks, start = [], 0
    for length in lengths:
        bounds = [part_bounds(length, part, schedule.parts) for part in range(schedule.parts)]
        chunks += [_Chunk(array[start + low : start + high].copy()) for low, high in bounds]
        start += length
    return chunks


def _guess_count(schedule: Schedule, inputs: Sequence[Array | None]) -> int:
    size = next((array.size for array in inputs if array is not None), 0)
    blocks = max(1, schedule.input_chunks // schedule.parts)
    return size // blocks


def interpret(
    schedule: Schedule,
    inputs: Sequence[Array | None],
    *,
    op: RedOp = RedOp.SUM,
    scalars: Sequence[float] | None = None,
    counts: Counts | None = None,
    in_place: bool = False,
    fifo_depth: int | None = None,
    direct: bool = False,
    shuffle: Shuffle | None = None,
) -> list[Array | None]:
    """Run ``schedule`` on one flat numpy array per rank and return each rank's output.

    ``inputs[rank]`` has as many blocks as the collective defines (``None`` for ranks without an
    input). ``counts`` is that of ``layout.block_counts``, uniform by default. ``scalars`` are the
    factors of ``PREMUL_SUM``. Inputs are not modified: with ``in_place`` chunks overlap, and the
    result is still returned. The other arguments are those of ``run``. Outputs are ``None`` for
    ranks without one.
    """
    nranks = schedule.nranks
    if len(inputs) != nranks:
        raise InvalidUsage(f"{schedule.name} is for {nranks} ranks, got {len(inputs)} inputs")
    if (op is RedOp.PREMUL_SUM) != (scalars is not None):
        raise InvalidUsage("PREMUL_SUM needs one scalar per rank, other operators none")
    counts = _guess_count(schedule, inputs) if counts is None else counts
    divisor = nranks if op is RedOp.AVG else None

    def combine(chunks: list[Value]) -> _Chunk:
        if len({chunk.data.size for chunk in chunks}) != 1:
            raise ScheduleError("operands of a reduction have different sizes")
        folded = sum(chunk.folded for chunk in chunks)
        return _Chunk(
            fold([chunk.data for chunk in chunks], op, divisor if folded == nranks else None),
            folded,
        )

    memory: list[list[Value]] = []
    for rank, array in enumerate(inputs):
        cells = rank_cells(schedule, rank, in_place)
        row: list[Value] = [UNDEFINED] * cells.cells
        if cells.sizes[Buffer.INPUT]:
            if array is None:
                raise InvalidUsage(f"rank {rank} needs an input")
            dtype_of(array)  # raises InvalidUsage
            if scalars is not None:
                array = premultiply(array, scalars[rank])
            base = cells.bases[Buffer.INPUT]
            row[base : base + cells.sizes[Buffer.INPUT]] = _load_input(
                schedule, rank, array, block_counts(schedule, rank, Buffer.INPUT, counts)
            )
        memory.append(row)
    for aggregator in range(nranks, schedule.participants):
        memory.append([UNDEFINED] * rank_cells(schedule, aggregator, in_place).cells)
    chunks = run(
        schedule,
        memory,
        combine,
        in_place=in_place,
        fifo_depth=fifo_depth,
        direct=direct,
        shuffle=shuffle,
    )
    return [_join_chunks(schedule, rank, chunks[rank], counts) for rank in range(nranks)]


def _join_chunks(
    schedule: Schedule, rank: int, chunks: list[Value], counts: Counts
) -> Array | None:
    if not chunks:
        return None
    lengths = block_counts(schedule, rank, Buffer.OUTPUT, counts)
    for number, chunk in enumerate(chunks):
        low, high = part_bounds(
            lengths[number // schedule.parts], number % schedule.parts, schedule.parts
        )
        if chunk is UNDEFINED:
            raise ScheduleError(f"{schedule.name}: output[{number}] of rank {rank} is not written")
        if chunk.data.size != high - low:
            raise ScheduleError(
                f"{schedule.name}: output[{number}] of rank {rank} has {chunk.data.size} elements,"
                f" expected {high - low}"
            )
    return np.concatenate([chunk.data for chunk in chunks])


def expected_outputs(
    collective: Collective,
    inputs: Sequence[Array | None],
    *,
    root: int = 0,
    op: RedOp = RedOp.SUM,
    scalars: Sequence[float] | None = None,
    counts: Counts | None = None,
) -> list[Array | None]:
    """Return the outputs that ``collective`` defines for ``inputs``, without a schedule.

    Reductions add in rank order and round once.
    """
    nranks = len(inputs)
    given = [array for array in inputs if array is not None]
    if collective is Collective.BARRIER:
        return [None] * nranks
    if collective.reduces:
        total = reference(given, op, scalars)
        if collective is Collective.REDUCE:
            return [total if rank == root else None for rank in range(nranks)]
        return (
            [total] * nranks
            if collective is Collective.ALL_REDUCE
            else list(_blocks(total, nranks, counts))
        )
    if collective in (Collective.ALL_GATHER, Collective.GATHER):
        whole = np.concatenate(given)
        return [
            whole if collective is Collective.ALL_GATHER or rank == root else None
            for rank in range(nranks)
        ]
    source = inputs[root]
    if collective is Collective.BROADCAST:
        return [source] * nranks
    if collective is Collective.SCATTER:
        assert source is not None
        return list(_blocks(source, nranks, counts))
    rows = [
        _blocks(array, nranks, counts[rank] if isinstance(counts, Sequence) else counts)
        for rank, array in enumerate(given)
    ]
    return [np.concatenate([row[rank] for row in rows]) for rank in range(nranks)]


def _blocks(array: Array, nranks: int, counts: Any) -> list[Array]:
    if isinstance(counts, Sequence):
        return np.split(array, np.cumsum(counts)[:-1])
    return np.split(array, nranks)
