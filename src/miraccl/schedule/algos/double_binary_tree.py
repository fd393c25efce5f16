"""Double binary tree: two complementary trees, each for half of the data.

Source: Sanders, Speck, Träff, "Two-tree Algorithms for Full Bandwidth Broadcast, Reduction and
Scan", Parallel Computing 35(12), 2009; NCCL ``src/graph/trees.cc``.

A binary tree has logarithmic latency, but its leaves, half of the ranks, send little. In the second
tree the leaves of the first are inner nodes, so every link is used. All-reduce reduces up and
broadcasts down NCCL's pair of trees. Broadcast and reduce use two trees with the same root. Each
tree is a channel; its half of the block is cut into ``PARTS`` chunks, which move up and down at the
same time.

=================== =================== ==================
collective          latency steps       blocks on the wire
=================== =================== ==================
all_reduce          2 ceil(log2 n)      2 (see ``wire``)
broadcast           ceil(log2 n)        1 (see ``wire``)
reduce              ceil(log2 n)        1 (0 for n = 1)
=================== =================== ==================

Small trees are unbalanced; ``wire`` counts the edges exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from miraccl.schedule.catalog import register
from miraccl.schedule.ir import Schedule, Step
from miraccl.schedule.steps import (
    copy,
    inp,
    out,
    recv,
    recv_copy_send,
    recv_reduce_copy,
    recv_reduce_copy_send,
    recv_reduce_send,
    scratch,
    send,
)
from miraccl.types import Collective

#: chunks of each tree's half; at most twice the depth of the shallowest FIFO, because a rank's
#: reduce and broadcast steps share its program
PARTS = 4

COLLECTIVES = (Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE)


class TreePosition(NamedTuple):
    """Parent and children of a rank in a tree; the root's parent is None."""

    up: int | None
    down: tuple[int, ...]


def binary_tree(rank: int, nranks: int) -> TreePosition:
    """Return the position of ``rank`` in NCCL's binary tree (``ncclGetBtree``).

    Rank 0 is the root with one child, odd ranks are leaves; the lowest set bit gives the height.
    """
    bit = 1
    while bit < nranks and not rank & bit:
        bit <<= 1
    if rank == 0:
        return TreePosition(None, (bit >> 1,) if nranks > 1 else ())
    up = (rank ^ bit) | (bit << 1)
    if up >= nranks:
        up = rank ^ bit
    low = bit >> 1
    if low == 0:
        return TreePosition(up, ())
    left, right = rank - low, rank + low
    while right >= nranks and low:
        low >>= 1
        right = rank + low
    return TreePosition(up, (left, right) if low else (left,))


def _relabelled_position(
    rank: int, nranks: int, into: Callable[[int], int], back: Callable[[int], int]
) -> TreePosition:
    place = binary_tree(into(rank), nranks)
    return TreePosition(
        None if place.up is None else back(place.up), tuple(back(child) for child in place.down)
    )


def double_tree(rank: int, nranks: int) -> tuple[TreePosition, TreePosition]:
    """Return the positions of ``rank`` in NCCL's pair of trees (``ncclGetDtree``).

    The second tree is the mirror image for an even number of ranks, else the first one shifted by
    one.
    """
    if nranks % 2 == 0:
        second = _relabelled_position(
            rank, nranks, lambda r: nranks - 1 - r, lambda r: nranks - 1 - r
        )
    else:
        second = _relabelled_position(
            rank, nranks, lambda r: (r - 1) % nranks, lambda r: (r + 1) % nranks
        )
    return binary_tree(rank, nranks), second


def rooted_double_tree(rank: int, nranks: int, root: int) -> tuple[TreePosition, TreePosition]:
    """Return the positions of ``rank`` in two trees that are both rooted at ``root``.

    In the second tree the other ranks are mirrored (odd ``nranks``) or shifted by one (even).
    """

    def first(r: int) -> int:
        return (r - root) % nranks

    def first_back(label: int) -> int:
        return (label + root) % nranks

    def second(r: int) -> int:
        label = first(r)
        if label == 0:
            return 0
        return nranks - label if nranks % 2 else label % (nranks - 1) + 1

    def second_back(label: int) -> int:
        if label == 0:
            return root
        return first_back(nranks - label if nranks % 2 else (label - 2) % (nranks - 1) + 1)

    return _relabelled_position(rank, nranks, first, first_back), _relabelled_position(
        rank, nranks, second, second_back
    )


def tree_positions(
    collective: Collective, rank: int, nranks: int, root: int = 0
) -> tuple[TreePosition, TreePosition]:
    """Return the positions of a rank in the two trees of a collective."""
    return (
        double_tree(rank, nranks)
        if collective is Collective.ALL_REDUCE
        else rooted_double_tree(rank, nranks, root)
    )


@lru_cache(maxsize=64)
def wire(collective: Collective, nranks: int) -> Fraction:
    """Return the blocks sent by the busiest rank: half a block per edge it sends on."""
    trees_of_ranks = [tree_positions(collective, rank, nranks) for rank in range(nranks)]
    if collective is Collective.ALL_REDUCE:
        sent = (sum((p.up is not None) + len(p.down) for p in trees) for trees in trees_of_ranks)
    elif collective is Collective.BROADCAST:
        sent = (sum(len(p.down) for p in trees) for trees in trees_of_ranks)
    else:
        sent = (sum(p.up is not None for p in trees) for trees in trees_of_ranks)
    return Fraction(max(sent), 2)


def latency(collective: Collective, nranks: int) -> int:
    return (2 if collective is Collective.ALL_REDUCE else 1) * (nranks - 1).bit_length()


@register(
    "double_binary_tree",
    collectives=COLLECTIVES,
    description=(
        "Two complementary binary trees, each for half of the data: logarithmic latency, nearly the"
        " bytes of a ring."
    ),
    direct=COLLECTIVES,
    direct_in_place=COLLECTIVES,
    latency=latency,
    wire=wire,
)
def build(collective: Collective, nranks: int, root: int) -> Schedule:
    phases = {
        Collective.ALL_REDUCE: _all_reduce,
        Collective.BROADCAST: _broadcast,
        Collective.REDUCE: _reduce,
    }[collective]
    trees = [tree_positions(collective, rank, nranks, root) for rank in range(nranks)]
    channels = tuple(
        tuple(
            tuple(phases(trees[rank][tree], range(tree * PARTS, (tree + 1) * PARTS)))
            for rank in range(nranks)
        )
        for tree in range(2)
    )
    return Schedule(
        name="double_binary_tree",
        collective=collective,
        nranks=nranks,
        parts=2 * PARTS,
        channels=channels,
        root=root,
        scratch_chunks=2 * PARTS if collective is Collective.REDUCE else 0,
    )


def _all_reduce(place: TreePosition, parts: range) -> Iterator[Step]:
    """Yield the steps of one tree: all parts up, then all parts down.

    The root turns each part around. Partial sums are stored in the output.
    """
    up, down = place
    if up is None:
        for part in parts:
            yield (
                recv_reduce_copy_send(inp(part), out(part), down[0], down[0])
                if down
                else copy(inp(part), out(part))
            )
        return
    for part in parts:
        if not down:
            yield send(inp(part), up)
            continue
        if len(down) == 2:
            yield recv_reduce_copy(inp(part), out(part), down[0])
        yield recv_reduce_send(out(part) if len(down) == 2 else inp(part), down[-1], up)
    for part in parts:
        yield from _forward(up, down, part)


def _forward(up: int, down: tuple[int, ...], part: int) -> Iterator[Step]:
    """Receive a part from the parent and send it to the children."""
    yield recv_copy_send(out(part), up, down[0]) if down else recv(out(part), up)
    for child in down[1:]:
        yield send(out(part), child)


def _broadcast(place: TreePosition, parts: range) -> Iterator[Step]:
    up, down = place
    for part in parts:
        if up is not None:
            yield from _forward(up, down, part)
            continue
        for child in down:
            yield send(inp(part), child)
        yield copy(inp(part), out(part))


def _reduce(place: TreePosition, parts: range) -> Iterator[Step]:
    """Yield the steps of one tree.

    A node with two children stores the sum with the first child in scratch, since only the root has
    an output.
    """
    up, down = place
    for part in parts:
        if up is None:
            yield (
                recv_reduce_copy(inp(part), out(part), down[0])
                if down
                else copy(inp(part), out(part))
            )
        elif not down:
            yield send(inp(part), up)
        else:
            if len(down) == 2:
                yield recv_reduce_copy(inp(part), scratch(part), down[0])
            yield recv_reduce_send(scratch(part) if len(down) == 2 else inp(part), down[-1], up)
