"""Model of large messages: blocks copy chunks through a pool of slots (source/bulk.cuh), to rank 0.

A queue has sender and receiver blocks, one thread each. The receiver block that finishes last
grants the next message; any block may be the last, so a separate thread, which sees that all have
finished, does it. A chunk is two cells, whose stores land in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .program import Kind, MemoryCell, ModelSystem, Thread

HALVES = range(2)


@dataclass(frozen=True)
class ChunkQueue:
    """Large messages of a launch from ``sender``, as chunks, and their share of the receiver's
    pool.
    """

    sender: int
    messages: Sequence[int]
    slot: int
    slots: int


@dataclass(frozen=True)
class ChunkRules:
    """Options that weaken the model.

    ``fences``: fence before a chunk is marked arrived. ``waits_freed``: wait for a reused slot.
    ``waits_grant``: wait for the receiver to begin a message. ``all_freed``: also free slots that
    the message does not reuse.
    """

    fences: bool = True
    waits_freed: bool = True
    waits_grant: bool = True
    all_freed: bool = False


def chunks(
    launches: Sequence[Sequence[ChunkQueue]],
    rules: ChunkRules,
    *,
    blocks: int,
    taking: int,
    ordered: bool = False,
) -> ModelSystem:
    """Return the model; a queue has ``blocks`` sender blocks and ``taking`` receiver blocks."""
    senders = sorted({queue.sender for queues in launches for queue in queues})
    system = ModelSystem(1 + len(senders), ordered=ordered)
    for src in senders:
        sending = [system.thread(src, f"block {block}") for block in range(blocks)]
        receiving = [system.thread(0, f"block {block} for rank {src}") for block in range(taking)]
        last = system.thread(0, f"the last block for rank {src}")
        number = 0
        for launch, queues in enumerate(launches):
            queue = next(
                (queue for queue in queues if queue.sender == src), ChunkQueue(src, (), 0, 1)
            )
            for thread in (*sending, *receiving, last):
                thread.begin(launch, -1)
            for m, count in enumerate(queue.messages):
                if m == 0:
                    receiving[0].store(grant_of(src), number)
                for block, thread in enumerate(sending):
                    _send(thread, queue, rules, number, range(block, count, blocks))
                for block, thread in enumerate(receiving):
                    _receive(thread, queue, rules, number, range(block, count, taking), count)
                    for other in range(taking):
                        if number:
                            thread.reach(ended_of(src, other), number)
                    thread.store(ended_of(src, block), number + 1)
                number += 1
                if m + 1 < len(queue.messages):
                    for block in range(taking):
                        last.reach(ended_of(src, block), number)
                    last.store(grant_of(src), number)
            for thread in (*sending, *receiving, last):
                thread.end()
    return system


def _send(
    thread: Thread, queue: ChunkQueue, rules: ChunkRules, number: int, own_count: range
) -> None:
    """Model one message of ``send_bulk``."""
    if rules.waits_grant:
        thread.wait_for(grant_of(queue.sender), number)
    for k in own_count:
        packet_cell, tag = k % queue.slots, chunk_tag(queue.sender, number, k)
        if k >= queue.slots and rules.waits_freed:
            thread.wait_for(
                freed_of(queue.sender, packet_cell),
                chunk_tag(queue.sender, number, k - queue.slots),
            )
        for cell in slot_at(queue.slot + packet_cell):
            thread.store(cell, tag)
        if rules.fences:
            thread.fence()
        thread.store(arrived_of(queue.slot + packet_cell), tag)


def _receive(
    thread: Thread, queue: ChunkQueue, rules: ChunkRules, number: int, own_count: range, count: int
) -> None:
    """Model one message of ``recv_bulk``."""
    for k in own_count:
        packet_cell, tag = k % queue.slots, chunk_tag(queue.sender, number, k)
        thread.wait_for(arrived_of(queue.slot + packet_cell), tag)
        for cell in slot_at(queue.slot + packet_cell):
            thread.read(cell, tag)
        if rules.all_freed or k + queue.slots < count:
            thread.store(freed_of(queue.sender, packet_cell), tag)


def chunk_tag(src: int, number: int, chunk: int) -> int:
    return (src * 10 + number) * 10 + chunk


def slot_at(slot: int) -> list[MemoryCell]:
    return [MemoryCell(f"slot {slot}, half {half}", 0, Kind.BUFFER, None) for half in HALVES]


def arrived_of(slot: int) -> MemoryCell:
    return MemoryCell(f"arrived in slot {slot}", 0, Kind.WORD, None)


def freed_of(src: int, packet_cell: int) -> MemoryCell:
    return MemoryCell(f"freed {packet_cell}", src, Kind.WORD, None)


def grant_of(src: int) -> MemoryCell:
    return MemoryCell("grant", src, Kind.WORD, None)


def ended_of(src: int, block: int) -> MemoryCell:
    return MemoryCell(
        f"messages from rank {src} that block {block} has ended", 0, Kind.COUNTER, None
    )
