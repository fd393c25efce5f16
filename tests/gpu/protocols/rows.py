"""Model of messages in rows: a warp queue from rank 0 to rank 1 (source/p2p.cuh), one warp each."""

from __future__ import annotations

from collections.abc import Sequence

from .program import Cell, Kind, System


def lane(
    counts: Sequence[int], *, ring: int, quarter: int, early: int = 0, credit_first: bool = False
) -> System:
    """Return the model; launches make no difference, since all counts persist.

    ``counts``: rows that a warp handles at a time. Options that weaken it: ``early``: rows by which
    the sender runs ahead of its credit; ``credit_first``: the receiver sends credit before it has
    read the rows.
    """
    system = System(2)
    sender, receiver = system.thread(0), system.thread(1)
    credit = Cell("credit", 0, Kind.COUNTER, None)
    places = [Cell(f"row {number}", 1, Kind.FLAGGED, None) for number in range(ring)]
    row = 0
    for count in counts:
        after = row + count
        if after > ring + early:
            sender.reach(credit, after - ring - early)
        for number in range(row, after):
            sender.store(places[number % ring], number)
        tells = after // quarter != row // quarter
        if tells and credit_first:
            receiver.store(credit, after)
        for number in range(row, after):
            receiver.wait_for(places[number % ring], number)
        if tells and not credit_first:
            receiver.store(credit, after)
        row = after
    return system
