"""Model of double binary trees: source/tree.cuh, with acks and hellos (source/acks.cuh) if one-way.

One thread per rank and tree, since the warps of a launch alternate between the trees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from miraccl.schedule.algos import double_binary_tree
from miraccl.schedule.algos.double_binary_tree import TreePosition
from miraccl.types import Collective

from .chain import await_hellos, send_hellos
from .program import Kind, MemoryCell, ModelSystem, Thread


def trees(
    collective: Collective,
    nranks: int,
    *,
    tiles: int,
    nslots: int,
    lag: int = 0,
    launches: int = 1,
    which: tuple[int, ...] = (0, 1),
    awaits_cleared: bool = True,
    early: int = 0,
    hellos: bool = True,
    halves: int = 2,
) -> ModelSystem:
    """Return the model of the trees ``which``; the options weaken it.

    ``settles``: slots to be reused are seen cleared. ``early``: tiles by which a sender runs ahead
    of its acks.
    """
    system = ModelSystem(nranks)
    places = [double_binary_tree.tree_positions(collective, rank, nranks) for rank in range(nranks)]
    for rank in range(nranks):
        for tree in which:
            thread = system.thread(rank, f"tree {tree}" if len(which) > 1 else "")
            one_way = collective is not Collective.ALL_REDUCE
            greeting = one_way and hellos and tree == which[0]
            for launch in range(launches):
                parity = launch % halves
                thread.begin(launch, parity)
                if greeting:
                    send_hellos(thread, nranks, parity)
                warp = _Warp(
                    thread,
                    tree,
                    [packet_cell[tree] for packet_cell in places],
                    collective,
                    parity,
                    tiles,
                    nslots,
                    lag,
                )
                for j in range(tiles + lag):
                    if one_way and j >= nslots + early:
                        warp.wait_room(j + 1 - nslots - early)
                    warp.send_up(j)
                    warp.send_down(j)
                    if tiles > nslots and j + nslots < tiles + lag:
                        if awaits_cleared:
                            warp.await_cleared(j)
                        if one_way:
                            warp.tell_room(j)
                if one_way and tiles > nslots:
                    warp.clear_acks()
                if greeting:
                    await_hellos(thread, nranks, parity)
                thread.end()
    return system


@dataclass
class _Warp:
    """Warp of a rank in one launch."""

    thread: Thread
    tree: int
    places: list[TreePosition]
    collective: Collective
    parity: int
    tiles: int
    nslots: int
    lag: int

    def __post_init__(self) -> None:
        self.rank = self.thread.rank
        self.up, self.down = self.places[self.rank]
        self.rises, self.falls = (
            self.collective is not Collective.BROADCAST,
            self.collective is not Collective.REDUCE,
        )

    def send_up(self, j: int) -> None:
        """Receive tile ``j`` of the children and send it to the parent."""
        if not self.rises or j >= self.tiles:
            return
        for c, _ in enumerate(self.down):
            self.thread.recv(self.source_place(self.rank, j, f"child {c}"), j)
        if self.up is not None:
            self.thread.store(self.source_place(self.up, j, f"child {self.child}"), j)

    def send_down(self, j: int) -> None:
        """Receive tile ``j - lag`` of the parent and send it to the children; the root reflects
        tile
        ``j``.
        """
        k = j if self.up is None else j - self.lag
        if not self.falls or not 0 <= k < self.tiles:
            return
        if self.up is not None:
            self.thread.recv(self.source_place(self.rank, k, "parent"), k)
        for peer in self.down:
            self.thread.store(self.source_place(peer, k, "parent"), k)

    def await_cleared(self, j: int) -> None:
        if self.rises and j < self.tiles:
            for c, _ in enumerate(self.down):
                self.thread.seen_empty(self.source_place(self.rank, j, f"child {c}"))
        if self.falls and self.up is not None and 0 <= j - self.lag < self.tiles:
            self.thread.seen_empty(self.source_place(self.rank, j - self.lag, "parent"))

    def wait_room(self, taken: int) -> None:
        for ack in self.acks():
            self.thread.reach(ack, taken)

    def clear_acks(self) -> None:
        for ack in self.acks():
            self.thread.clear(ack)

    def tell_room(self, j: int) -> None:
        if self.falls and self.up is not None:
            self.thread.store(self.ack_word(self.up, self.child), j + 1)
        if self.rises:
            for peer in self.down:
                self.thread.store(self.ack_word(peer, 0), j + 1)

    def acks(self) -> Iterator[MemoryCell]:
        """Return the acks of the ranks that this warp sends to."""
        if self.rises and self.up is not None:
            yield self.ack_word(self.rank, 0)
        if self.falls:
            for c, _ in enumerate(self.down):
                yield self.ack_word(self.rank, c)

    @property
    def child(self) -> int:
        """Return the index of this rank among its parent's children."""
        return 0 if self.up is None else self.places[self.up].down.index(self.rank)

    def source_place(self, dst: int, k: int, source: str) -> MemoryCell:
        return MemoryCell(
            f"slot {k % self.nslots} of half {self.parity}, tree {self.tree}, from {source}",
            dst,
            Kind.PACKET,
            self.parity,
        )

    def ack_word(self, dst: int, receiver: int) -> MemoryCell:
        return MemoryCell(
            f"ack {receiver} of half {self.parity}, tree {self.tree}",
            dst,
            Kind.COUNTER,
            self.parity,
        )
