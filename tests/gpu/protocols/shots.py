"""Models of ``one_shot`` and ``two_shot``: source/tiled.cuh with reused slots, single_tile.cuh and
fanout.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence

from .program import Kind, MemoryCell, ModelSystem, Thread


def packet_cell(dst: int, src: int, parity: int, slot: int, shot: int) -> MemoryCell:
    """Return the cell of a packet from ``src`` (``packet_of`` of shots.cuh)."""
    return MemoryCell(
        f"slot {slot} of half {parity} from rank {src}" + (", second shot" if shot else ""),
        dst,
        Kind.PACKET,
        parity,
    )


def shots(
    nranks: int,
    *,
    tiles: int,
    nslots: int,
    lookahead: int,
    rounds: int = 1,
    launches: int = 1,
    awaits_cleared: bool = True,
    halves: int = 2,
) -> ModelSystem:
    """Return the model of tiled shots.

    ``rounds``: 2 for two_shot. ``settles``: a thread sees cleared what it cleared before it sends
    on.
    """
    system = ModelSystem(nranks)
    for rank in range(nranks):
        thread = system.thread(rank)
        for launch in range(launches):
            _launch(
                thread,
                nranks,
                launch % halves,
                launch,
                tiles,
                nslots,
                lookahead,
                rounds,
                awaits_cleared and tiles > nslots,
            )
    return system


def _launch(
    thread: Thread,
    nranks: int,
    parity: int,
    launch: int,
    tiles: int,
    nslots: int,
    lookahead: int,
    rounds: int,
    awaits_cleared: bool,
) -> None:
    rank = thread.rank
    peers = [peer for peer in range(nranks) if peer != rank]
    peers_after = [(rank + d) % nranks for d in range(1, nranks)]  # rank_after

    def send_tile(k: int) -> None:
        for dst in peers_after:
            thread.store(packet_cell(dst, rank, parity, k % nslots, 0), k)

    def recv_tile(k: int) -> None:
        for src in peers:
            thread.recv(packet_cell(rank, src, parity, k % nslots, 0), k)
        if rounds == 2:
            for dst in peers_after:
                thread.store(packet_cell(dst, rank, parity, k % nslots, 1), k)

    def recv_results(k: int) -> None:
        for src in peers:
            thread.recv(packet_cell(rank, src, parity, k % nslots, 1), k)

    def await_cleared(k: int, shot: int) -> None:
        for src in peers:
            thread.seen_empty(packet_cell(rank, src, parity, k % nslots, shot))

    thread.begin(launch, parity)
    sent = 0
    while sent <= min(lookahead, tiles - 1):
        send_tile(sent)
        sent += 1
    for k in range(tiles):
        recv_tile(k)
        if rounds == 2 and k > 0:
            recv_results(k - 1)
            if awaits_cleared:
                await_cleared(k - 1, 1)
        if awaits_cleared:
            await_cleared(k, 0)
        if sent < tiles:
            send_tile(sent)
            sent += 1
    if rounds == 2:
        recv_results(tiles - 1)
    thread.end()


def rooted(
    nranks: int, *, broadcasts: bool, launches: int = 1, hellos: bool = True, halves: int = 2
) -> ModelSystem:
    """Return the model of a rooted one_shot, whose tiles all have slots, from or to rank 0.

    ``falls``: broadcast, else reduce. A rank has two threads; the first has packet 0, sent between
    all ranks (``carries`` of shots.cuh) if ``greets``.
    """
    system = ModelSystem(nranks)

    def moves(src: int, dst: int, number: int) -> bool:
        return (src if broadcasts else dst) == 0 or (number == 0 and hellos)

    for rank in range(nranks):
        for number in range(2):
            thread = system.thread(rank, f"thread {number}")
            for launch in range(launches):
                parity = launch % halves
                thread.begin(launch, parity)
                for dst in ((rank + d) % nranks for d in range(1, nranks)):
                    if moves(rank, dst, number):
                        thread.store(packet_cell(dst, rank, parity, number, 0), 0)
                for src in range(nranks):
                    if src != rank and moves(src, rank, number):
                        thread.recv(packet_cell(rank, src, parity, number, 0), 0)
                thread.end()
    return system


def parts(
    nranks: int,
    counts: Sequence[int],
    *,
    awaits_cleared: bool = True,
    awaits_peers: bool = True,
    uneven: bool = False,
    threads: int = 1,
) -> ModelSystem:
    """Return the model of double-buffered two_shot, in launches of ``counts`` tiles each.

    A launch of one tile is ``single_tile.cuh``. ``settles``: a thread sees cleared what it cleared
    of a tile before its sums of the next one are sent. ``hears``: it has received the previous tile
    before it sends a tile into the half of the one before that. ``uneven``: thread 1 has no packets
    in the last tile.
    """
    system = ModelSystem(nranks)
    for rank in range(nranks):
        for number in range(threads):
            thread = system.thread(rank, f"thread {number}" if threads > 1 else "")
            first = 0
            for count in counts:
                own_count = count - 1 if uneven and number else count
                _parts(thread, nranks, first, own_count, awaits_cleared, awaits_peers, number)
                first += count
                thread.launch = first - 1
                thread.end()
    return system


def _parts(
    thread: Thread,
    nranks: int,
    first: int,
    count: int,
    awaits_cleared: bool,
    awaits_peers: bool,
    slot: int,
) -> None:
    rank = thread.rank
    peers = [peer for peer in range(nranks) if peer != rank]
    peers_after = [(rank + d) % nranks for d in range(1, nranks)]

    def at(k: int) -> int:
        """Return the half of tile ``k``, which counts as a launch of its own."""
        thread.launch = first + k
        return (first + k) % 2

    def push(k: int) -> None:
        parity = at(k)
        for dst in peers_after:
            thread.store(packet_cell(dst, rank, parity, slot, 0), 0)

    def receive(k: int) -> None:
        parity = at(k)
        for src in peers:
            thread.recv(packet_cell(rank, src, parity, slot, 0), 0)
        for dst in peers_after:
            thread.store(packet_cell(dst, rank, parity, slot, 1), 0)

    def collect(k: int) -> None:
        parity = at(k)
        for src in peers:
            thread.recv(packet_cell(rank, src, parity, slot, 1), 0)

    def await_cleared(k: int) -> None:
        parity = at(k)
        for shot in (0, 1):
            for src in peers:
                thread.seen_empty(packet_cell(rank, src, parity, slot, shot))

    thread.begin(first, first % 2)
    if count:
        push(0)
        receive(0)
    for k in range(1, count):
        if k == 1:  # the launch before may have used this half in any way
            thread.begin(first + 1, (first + 1) % 2)
        elif awaits_peers:
            collect(k - 1)
        push(k)
        if k == 1 or not awaits_peers:
            collect(k - 1)
        if awaits_cleared:
            await_cleared(k - 1)
        receive(k)
    if count:
        collect(count - 1)
