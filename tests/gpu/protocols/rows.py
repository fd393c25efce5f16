"""Model of messages in rows: a warp queue from rank 0 to rank 1 (source/p2p.cuh), one warp each."""

from __future__ import annotations

from collections.abc import Sequence

from .program import Kind, MemoryCell, ModelSystem


def warp_queue(
    counts: Sequence[int], *, fifo: int, quarter: int, early: int = 0, credit_first: bool = False
) -> ModelSystem:
    """Return the model; launches make no difference, since all counts persist.

    ``counts``: rows that a warp handles at a time. Options that weaken it: ``early``: rows by which
    the sender runs ahead of its credit; ``credit_first``: the receiver sends credit before it has
    read the rows.
    """
    system = ModelSystem(2)
    sender, receiver = system.thread(0), system.thread(1)
    credit = MemoryCell("credit", 0, Kind.COUNTER, None)
    places = [MemoryCell(f"row {number}", 1, Kind.FLAGGED, None) for number in range(fifo)]
    row = 0
    for count in counts:
        peers_after = row + count
        if peers_after > fifo + early:
            sender.reach(credit, peers_after - fifo - early)
        for number in range(row, peers_after):
            sender.store(places[number % fifo], number)
        tells = peers_after // quarter != row // quarter
        if tells and credit_first:
            receiver.store(credit, peers_after)
        for number in range(row, peers_after):
            receiver.wait_for(places[number % fifo], number)
        if tells and not credit_first:
            receiver.store(credit, peers_after)
        row = peers_after
    return system
