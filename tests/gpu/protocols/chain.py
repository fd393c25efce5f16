"""Model of ``chain`` (source/chain.cuh) with acks and hellos (source/acks.cuh): rank 0 to n - 1,
one
warp each.
"""

from __future__ import annotations

from .program import Cell, Kind, System, Thread


def chain(
    nranks: int,
    *,
    pieces: int,
    nslots: int,
    launches: int = 1,
    settles: bool = True,
    early: int = 0,
    all_acks: bool = False,
    greets: bool = True,
    banks: int = 2,
) -> System:
    """Return the model; the options weaken it.

    ``settles``: an ack is sent after its slot has been seen cleared. ``early``: tiles by which a
    sender runs ahead of its acks. ``all_acks``: also send acks that are never awaited.
    """
    system = System(nranks)
    for rank in range(nranks):
        thread, first, last = system.thread(rank), rank == 0, rank == nranks - 1
        for launch in range(launches):
            bank = launch % banks
            ack = ack_place(rank, rank + 1, bank)
            thread.begin(launch, bank)
            if greets:
                greet(thread, nranks, bank)
            for k in range(pieces):
                if not last and k >= nslots + early:
                    thread.reach(ack, k + 1 - nslots - early)
                if not first:
                    thread.take(place(rank, bank, k % nslots), k)
                if not last:
                    thread.store(place(rank + 1, bank, k % nslots), k)
                if not first and (k + nslots < pieces or all_acks):
                    if settles:
                        thread.seen_empty(place(rank, bank, k % nslots))
                    thread.store(ack_place(rank - 1, rank, bank), k + 1)
            if not last and pieces > nslots:
                thread.clear(ack)
            if greets:
                hear_greetings(thread, nranks, bank)
            thread.end()
    return system


def greet(thread: Thread, nranks: int, bank: int) -> None:
    for peer in range(nranks):
        if peer != thread.rank:
            thread.store(hello_place(peer, thread.rank, bank), 0)


def hear_greetings(thread: Thread, nranks: int, bank: int) -> None:
    for peer in range(nranks):
        if peer != thread.rank:
            thread.take(hello_place(thread.rank, peer, bank), 0)


def place(dst: int, bank: int, slot: int) -> Cell:
    return Cell(f"slot {slot} of bank {bank}", dst, Kind.PACKET, bank)


def hello_place(dst: int, src: int, bank: int) -> Cell:
    return Cell(f"hello of bank {bank} from rank {src}", dst, Kind.PACKET, bank)


def ack_place(dst: int, src: int, bank: int) -> Cell:
    return Cell(f"ack of bank {bank} from rank {src}", dst, Kind.COUNTER, bank)
