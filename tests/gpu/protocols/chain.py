"""Model of ``chain`` (source/chain.cuh) with acks and hellos (source/acks.cuh): rank 0 to n - 1,
one
warp each.
"""

from __future__ import annotations

from .program import Kind, MemoryCell, ModelSystem, Thread


def chain(
    nranks: int,
    *,
    tiles: int,
    nslots: int,
    launches: int = 1,
    awaits_cleared: bool = True,
    early: int = 0,
    all_acks: bool = False,
    hellos: bool = True,
    halves: int = 2,
) -> ModelSystem:
    """Return the model; the options weaken it.

    ``settles``: an ack is sent after its slot has been seen cleared. ``early``: tiles by which a
    sender runs ahead of its acks. ``all_acks``: also send acks that are never awaited.
    """
    system = ModelSystem(nranks)
    for rank in range(nranks):
        thread, first, last = system.thread(rank), rank == 0, rank == nranks - 1
        for launch in range(launches):
            parity = launch % halves
            ack = ack_word(rank, rank + 1, parity)
            thread.begin(launch, parity)
            if hellos:
                send_hellos(thread, nranks, parity)
            for k in range(tiles):
                if not last and k >= nslots + early:
                    thread.reach(ack, k + 1 - nslots - early)
                if not first:
                    thread.recv(packet_cell(rank, parity, k % nslots), k)
                if not last:
                    thread.store(packet_cell(rank + 1, parity, k % nslots), k)
                if not first and (k + nslots < tiles or all_acks):
                    if awaits_cleared:
                        thread.seen_empty(packet_cell(rank, parity, k % nslots))
                    thread.store(ack_word(rank - 1, rank, parity), k + 1)
            if not last and tiles > nslots:
                thread.clear(ack)
            if hellos:
                await_hellos(thread, nranks, parity)
            thread.end()
    return system


def send_hellos(thread: Thread, nranks: int, parity: int) -> None:
    for peer in range(nranks):
        if peer != thread.rank:
            thread.store(hello_word(peer, thread.rank, parity), 0)


def await_hellos(thread: Thread, nranks: int, parity: int) -> None:
    for peer in range(nranks):
        if peer != thread.rank:
            thread.recv(hello_word(thread.rank, peer, parity), 0)


def packet_cell(dst: int, parity: int, slot: int) -> MemoryCell:
    return MemoryCell(f"slot {slot} of half {parity}", dst, Kind.PACKET, parity)


def hello_word(dst: int, src: int, parity: int) -> MemoryCell:
    return MemoryCell(f"hello of half {parity} from rank {src}", dst, Kind.PACKET, parity)


def ack_word(dst: int, src: int, parity: int) -> MemoryCell:
    return MemoryCell(f"ack of half {parity} from rank {src}", dst, Kind.COUNTER, parity)
