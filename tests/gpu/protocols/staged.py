"""Model of copies through staging memory (executor/cuda/staged_copies.py) between two device
barriers.

One thread per stream: that of the operation, and one per direction of a communicating pair. Copies
of a stream are visible before the words it writes behind them (cuStreamWriteValue has a barrier). A
chunk is two cells, whose stores land in any order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from miraccl.executor.cuda import layout
from miraccl.executor.cuda.staged_copies import (
    ChunkCopy,
    StagingLayout,
    interleave,
    rank_copies,
    split_chunks,
)
from miraccl.schedule.ir import Schedule

from .program import Kind, MemoryCell, ModelSystem, Thread

HALVES = range(2)
CHUNK = layout.KIB  # bytes; how many are of no matter


@dataclass(frozen=True)
class StagedRules:
    """Options that weaken the model.

    ``early``: chunks by which a sender runs ahead of the slots. ``fences``: fence before a word is
    written. ``all_free``: also free slots that are not reused. ``meets``: barrier at the end as
    well.
    """

    early: int = 0
    fences: bool = True
    all_free: bool = False
    barriers: bool = True


def staged(
    schedule: Schedule, rules: StagedRules, *, chunks: int, operations: int = 1
) -> ModelSystem:
    """Return the model of ``operations`` with ``chunks`` of a block.

    Each barrier is a launch; staged data belong to the half of the first one.
    """
    system, stage = (
        ModelSystem(schedule.nranks),
        StagingLayout.of(schedule, layout.COPY_SLOTS * schedule.nranks * CHUNK),
    )
    for rank in range(schedule.nranks):
        moves = [
            chunk
            for move in rank_copies(schedule, rank, chunks * CHUNK)
            for chunk in split_chunks(move, CHUNK)
        ]
        streams = _StagedStreams(system, system.thread(rank), stage, rules)
        for chunk in moves:
            streams.add(chunk)
        for operation in range(operations):
            streams.run(moves, 2 * operation)
    return system


@dataclass
class _StagedStreams:
    """Streams of a rank."""

    system: ModelSystem
    main: Thread
    stage: StagingLayout
    rules: StagedRules
    totals: Counter[int] = field(default_factory=Counter)  # received chunks by peer
    directions: dict[tuple[int, bool], Thread] = field(
        default_factory=dict
    )  # by (peer, data come from it)
    done: Counter[tuple[int, bool]] = field(default_factory=Counter)  # chunks of each direction
    slots: dict[MemoryCell, int] = field(
        default_factory=dict
    )  # that have been filled, and the last chunk in each

    def add(self, chunk: ChunkCopy) -> None:
        if chunk.source_rank is not None:
            self.totals[chunk.source_rank] += 1
        for peer, comes in ((chunk.source_rank, True), (chunk.target_rank, False)):
            if peer is not None and (peer, comes) not in self.directions:
                name = f"{'from' if comes else 'to'} rank {peer}"
                self.directions[peer, comes] = self.system.thread(self.main.rank, name)

    def run(self, moves: list[ChunkCopy], launch: int) -> None:
        self.barrier(launch)
        self.done.clear()
        self.slots.clear()
        for number, chunk in enumerate(interleave(moves)):
            if chunk.source_rank is not None:
                self.recv(chunk.source_rank)
                if chunk.target_rank is not None:  # the other stream waits for an event of this one
                    event = MemoryCell("an event", self.main.rank, Kind.COUNTER, None)
                    self.directions[chunk.source_rank, True].fence()
                    self.directions[chunk.source_rank, True].store(
                        event, launch * len(moves) + number
                    )
                    self.directions[chunk.target_rank, False].reach(
                        event, launch * len(moves) + number
                    )
            if chunk.target_rank is not None:
                self.send_chunk(chunk.target_rank)
        for key, thread in self.directions.items():
            joined = MemoryCell(
                f"the end of the stream {'from' if key[1] else 'to'} rank {key[0]}",
                self.main.rank,
                Kind.COUNTER,
                None,
            )
            thread.fence()
            thread.store(joined, launch)
            self.main.reach(joined, launch)
        for cell, number in self.slots.items():  # set_words
            self.main.clear(cell, number)
        self.main.fence()
        self.barrier(launch + 1)

    def barrier(self, launch: int) -> None:
        """Model ``device_barrier``: a launch whose end all streams wait for."""
        rank, nranks = self.main.rank, self.system.nranks
        self.main.begin(launch, launch % 2)
        for thread in self.directions.values():
            thread.begin(launch, -1)
        if self.rules.barriers or launch % 2 == 0:
            self.main.fence()
            for peer in (peer for peer in range(nranks) if peer != rank):
                self.main.store(self.op_record(peer, rank, launch), launch)
            for peer in (peer for peer in range(nranks) if peer != rank):
                self.main.wait_for(self.op_record(rank, peer, launch), launch)
        for thread in (self.main, *self.directions.values()):
            thread.end()

    def send_chunk(self, peer: int) -> None:
        thread, rank, k = self.directions[peer, False], self.main.rank, self.done[peer, False]
        if k >= self.stage.nslots + self.rules.early:
            thread.recv(self.word("free", rank, peer, k), k - self.stage.nslots - self.rules.early)
        for cell in self.slot(rank, peer, k):
            thread.store(cell, k)
        if self.rules.fences:
            thread.fence()
        thread.store(self.word("ready", peer, rank, k), k)
        self.done[peer, False] += 1

    def recv(self, peer: int) -> None:
        thread, rank, k = self.directions[peer, True], self.main.rank, self.done[peer, True]
        thread.recv(self.word("ready", rank, peer, k), k)
        for cell in self.slot(peer, rank, k):
            thread.read(cell, k)
            self.slots[cell] = k
        if k + self.stage.nslots < self.totals[peer] or self.rules.all_free:
            thread.fence()
            thread.store(self.word("free", peer, rank, k), k)
        self.done[peer, True] += 1

    def slot(self, src: int, dst: int, k: int) -> list[MemoryCell]:
        return [
            MemoryCell(
                f"slot {k % self.stage.nslots} from rank {src}, half {half}", dst, Kind.BUFFER, 0
            )
            for half in HALVES
        ]

    def word(self, what: str, dst: int, src: int, k: int) -> MemoryCell:
        return MemoryCell(f"{what} {k % self.stage.nslots} of rank {src}", dst, Kind.PACKET, None)

    def op_record(self, dst: int, src: int, launch: int) -> MemoryCell:
        return MemoryCell(
            f"entry {launch % layout.OP_LOG_ENTRIES} of the op log for rank {src}",
            dst,
            Kind.WORD,
            None,
        )
