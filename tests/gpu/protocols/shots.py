"""Models of ``one_shot`` and ``two_shot``: source/tiled.cuh with reused slots, single_tile.cuh and
fanout.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence

from .program import Cell, Kind, System, Thread


def place(dst: int, src: int, bank: int, slot: int, shot: int) -> Cell:
    """Return the cell of a packet from ``src`` (``packet_of`` of shots.cuh)."""
    return Cell(
        f"slot {slot} of bank {bank} from rank {src}" + (", second shot" if shot else ""),
        dst,
        Kind.PACKET,
        bank,
    )


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
    """Return the model of tiled shots.

    ``rounds``: 2 for two_shot. ``settles``: a thread sees cleared what it cleared before it sends
    on.
    """
    system = System(nranks)
    for rank in range(nranks):
        thread = system.thread(rank)
        for launch in range(launches):
            _launch(
                thread,
                nranks,
                launch % banks,
                launch,
                pieces,
                nslots,
                ahead,
                rounds,
                settles and pieces > nslots,
            )
    return system


def _launch(
    thread: Thread,
    nranks: int,
    bank: int,
    launch: int,
    pieces: int,
    nslots: int,
    ahead: int,
    rounds: int,
    settles: bool,
) -> None:
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


def rooted(
    nranks: int, *, falls: bool, launches: int = 1, greets: bool = True, banks: int = 2
) -> System:
    """Return the model of a rooted one_shot, whose tiles all have slots, from or to rank 0.

    ``falls``: broadcast, else reduce. A rank has two threads; the first has packet 0, sent between
    all ranks (``carries`` of shots.cuh) if ``greets``.
    """
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


def parts(
    nranks: int,
    counts: Sequence[int],
    *,
    settles: bool = True,
    hears: bool = True,
    uneven: bool = False,
    threads: int = 1,
) -> System:
    """Return the model of double-buffered two_shot, in launches of ``counts`` tiles each.

    A launch of one tile is ``single_tile.cuh``. ``settles``: a thread sees cleared what it cleared
    of a tile before its sums of the next one are sent. ``hears``: it has received the previous tile
    before it sends a tile into the half of the one before that. ``uneven``: thread 1 has no packets
    in the last tile.
    """
    system = System(nranks)
    for rank in range(nranks):
        for number in range(threads):
            thread = system.thread(rank, f"thread {number}" if threads > 1 else "")
            first = 0
            for count in counts:
                mine = count - 1 if uneven and number else count
                _parts(thread, nranks, first, mine, settles, hears, number)
                first += count
                thread.launch = first - 1
                thread.end()
    return system


def _parts(
    thread: Thread, nranks: int, first: int, count: int, settles: bool, hears: bool, slot: int
) -> None:
    rank = thread.rank
    peers = [peer for peer in range(nranks) if peer != rank]
    after = [(rank + d) % nranks for d in range(1, nranks)]

    def at(k: int) -> int:
        """Return the half of tile ``k``, which counts as a launch of its own."""
        thread.launch = first + k
        return (first + k) % 2

    def push(k: int) -> None:
        bank = at(k)
        for dst in after:
            thread.store(place(dst, rank, bank, slot, 0), 0)

    def take(k: int) -> None:
        bank = at(k)
        for src in peers:
            thread.take(place(rank, src, bank, slot, 0), 0)
        for dst in after:
            thread.store(place(dst, rank, bank, slot, 1), 0)

    def collect(k: int) -> None:
        bank = at(k)
        for src in peers:
            thread.take(place(rank, src, bank, slot, 1), 0)

    def settle(k: int) -> None:
        bank = at(k)
        for shot in (0, 1):
            for src in peers:
                thread.seen_empty(place(rank, src, bank, slot, shot))

    thread.begin(first, first % 2)
    if count:
        push(0)
        take(0)
    for k in range(1, count):
        if k == 1:  # this bank, too, may have been used in any way by the launch before
            thread.begin(first + 1, (first + 1) % 2)
        elif hears:
            collect(k - 1)
        push(k)
        if k == 1 or not hears:
            collect(k - 1)
        if settles:
            settle(k - 1)
        take(k)
    if count:
        collect(count - 1)
