"""Model of ``ring`` (source/ring.cuh)."""

from __future__ import annotations

from .program import Kind, MemoryCell, ModelSystem


def hop_packet(dst: int, parity: int, slot: int, hop: int) -> MemoryCell:
    return MemoryCell(f"slot {slot} of half {parity}, hop {hop}", dst, Kind.PACKET, parity)


def ring(
    nranks: int,
    *,
    tiles: int,
    nslots: int,
    launches: int = 1,
    awaits_cleared: bool = True,
    halves: int = 2,
) -> ModelSystem:
    """Return the model: an iteration receives hop t of tile j - 1 - t, for all t, and sends hop t +
    1;
    then hop 0 of tile j.
    """
    system, hops = ModelSystem(nranks), 2 * (nranks - 1)
    for rank in range(nranks):
        thread, peers_after = system.thread(rank), (rank + 1) % nranks
        for launch in range(launches):
            parity = launch % halves
            thread.begin(launch, parity)
            for j in range(tiles + hops):
                coming = [(t, j - 1 - t) for t in range(hops) if 0 <= j - 1 - t < tiles]
                for t, m in coming:
                    thread.recv(hop_packet(rank, parity, m % nslots, t), m)
                    if t + 1 < hops:
                        thread.store(hop_packet(peers_after, parity, m % nslots, t + 1), m)
                if j < tiles:
                    thread.store(hop_packet(peers_after, parity, j % nslots, 0), j)
                if awaits_cleared and tiles > nslots:
                    for t, m in coming:
                        thread.seen_empty(hop_packet(rank, parity, m % nslots, t))
            thread.end()
    return system
