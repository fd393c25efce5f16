"""``one_shot`` and ``two_shot``: source/pieces.cuh where slots are used again, once.cuh and fan.cuh of one piece."""

from __future__ import annotations

from .program import Cell, Kind, System, Thread


def place(dst: int, src: int, bank: int, slot: int, shot: int) -> Cell:
    """``place`` of shots.cuh: a packet from ``src``."""
    return Cell(f"slot {slot} of bank {bank} from rank {src}" + (", second shot" if shot else ""), dst, Kind.PACKET, bank)


def shots(
    nranks: int,
    *,
    pieces: int,
    nslots: int,
    ahead: int,
    rounds: int = 1,
    launches: int = 1,
    settles: bool = True,
    banks: int = 2,
) -> System:
    """``rounds``: 2 for two_shot. ``settles``: whether a thread sees cleared what it cleared before it pushes on."""
    system = System(nranks)
    for rank in range(nranks):
        thread = system.thread(rank)
        for launch in range(launches):
            _launch(thread, nranks, launch % banks, launch, pieces, nslots, ahead, rounds, settles and pieces > nslots)
    return system


def _launch(thread: Thread, nranks: int, bank: int, launch: int, pieces: int, nslots: int, ahead: int, rounds: int, settles: bool) -> None:
    rank = thread.rank
    peers = [peer for peer in range(nranks) if peer != rank]
    after = [(rank + d) % nranks for d in range(1, nranks)]  # rank_after

    def send_piece(k: int) -> None:
        for dst in after:
            thread.store(place(dst, rank, bank, k % nslots, 0), k)

    def take_piece(k: int) -> None:
        for src in peers:
            thread.take(place(rank, src, bank, k % nslots, 0), k)
        if rounds == 2:
            for dst in after:
                thread.store(place(dst, rank, bank, k % nslots, 1), k)

    def collect_piece(k: int) -> None:
        for src in peers:
            thread.take(place(rank, src, bank, k % nslots, 1), k)

    def settle(k: int, shot: int) -> None:
        for src in peers:
            thread.seen_empty(place(rank, src, bank, k % nslots, shot))

    thread.begin(launch, bank)
    pushed = 0
    while pushed <= min(ahead, pieces - 1):
        send_piece(pushed)
        pushed += 1
    for k in range(pieces):
        take_piece(k)
        if rounds == 2 and k > 0:
            collect_piece(k - 1)
            if settles:
                settle(k - 1, 1)
        if settles:
            settle(k, 0)
        if pushed < pieces:
            send_piece(pushed)
            pushed += 1
    if rounds == 2:
        collect_piece(pieces - 1)
    thread.end()


def rooted(nranks: int, *, falls: bool, launches: int = 1, greets: bool = True, banks: int = 2) -> System:
    """One_shot of ``broadcast`` (``falls``) or ``reduce`` from or to rank 0, whose pieces all have room. A rank has two threads; the first
    has packet 0, which goes from all to all (``moves`` of shots.cuh) if ``greets``."""
    system = System(nranks)

    def moves(src: int, dst: int, number: int) -> bool:
        return (src if falls else dst) == 0 or (number == 0 and greets)

    for rank in range(nranks):
        for number in range(2):
            thread = system.thread(rank, f"thread {number}")
            for launch in range(launches):
                bank = launch % banks
                thread.begin(launch, bank)
                for dst in ((rank + d) % nranks for d in range(1, nranks)):
                    if moves(rank, dst, number):
                        thread.store(place(dst, rank, bank, number, 0), 0)
                for src in range(nranks):
                    if src != rank and moves(src, rank, number):
                        thread.take(place(rank, src, bank, number, 0), 0)
                thread.end()
    return system
