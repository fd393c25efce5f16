"""Model of ``ring`` (source/ring.cuh)."""

from __future__ import annotations

from .program import Cell, Kind, System


def hop_place(dst: int, bank: int, slot: int, hop: int) -> Cell:
    return Cell(f"slot {slot} of bank {bank}, hop {hop}", dst, Kind.PACKET, bank)


def ring(
    nranks: int,
    *,
    pieces: int,
    nslots: int,
    launches: int = 1,
    settles: bool = True,
    banks: int = 2,
) -> System:
    """Return the model: an iteration receives hop t of tile j - 1 - t, for all t, and sends hop t +
    1;
    then hop 0 of tile j.
    """
    system, hops = System(nranks), 2 * (nranks - 1)
    for rank in range(nranks):
        thread, after = system.thread(rank), (rank + 1) % nranks
        for launch in range(launches):
            bank = launch % banks
            thread.begin(launch, bank)
            for j in range(pieces + hops):
                coming = [(t, j - 1 - t) for t in range(hops) if 0 <= j - 1 - t < pieces]
                for t, m in coming:
                    thread.take(hop_place(rank, bank, m % nslots, t), m)
                    if t + 1 < hops:
                        thread.store(hop_place(after, bank, m % nslots, t + 1), m)
                if j < pieces:
                    thread.store(hop_place(after, bank, j % nslots, 0), j)
                if settles and pieces > nslots:
                    for t, m in coming:
                        thread.seen_empty(hop_place(rank, bank, m % nslots, t))
            thread.end()
    return system
