"""Double binary trees over nodes, and the chains inside nodes.

Each of the two trees of a channel carries half of the data: an inner node of one tree is a leaf of
the other (Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction
and scan", 2009). The numbering is NCCL's (``src/graph/trees.cc``): in the first tree node 0 is the
root and a node's height is the number of trailing zero bits of its number. The second tree is the
first one mirrored (even number of nodes) or shifted by one (odd).

Inside a node the GPUs of a channel form a chain in the order that the search found. The pattern
determines which of them exchange data with the parent's and the children's nodes: all by the first
GPU (``TREE``), children by the second (``SPLIT_TREE``), or the second child alone by the second GPU
(``BALANCED_TREE``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miraccl.errors import TopologyError
from miraccl.graph.kinds import Pattern
from miraccl.graph.rank_layout import Int32Array, RankLayout

TREE_ARITY = 3
"""Maximum children of a rank: a GPU of the chain and two nodes (NCCL ``NCCL_MAX_TREE_ARITY``)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeTree:
    """One binary tree over n nodes; all arrays are [n], -1 means no peer.

    ``second_child[i]`` is 1 if node i is the second child of its parent.
    """

    up: Int32Array
    down0: Int32Array
    down1: Int32Array
    second_child: Int32Array


def binary_tree(n: int) -> NodeTree:
    """Build the tree over ``n`` nodes with root 0.

    A node whose lowest set bit is b has the parent ``(node ^ b) | 2b``, or ``node ^ b`` if that is
    not below n.
    """
    node = np.arange(n, dtype=np.int64)
    low = node & -node
    up = (node ^ low) | (low << 1)
    up = np.where(up >= n, node ^ low, up)
    half = low >> 1
    down0 = np.where(half > 0, node - half, -1)
    down1 = np.where(half > 0, node + half, -1)
    # Halve the distance until the child exists: at most log2(n) times.
    while (over := down1 >= n).any():
        down1 = np.where(over, np.where(half > 0, node + half, -1), down1)
        half = np.where(over, half >> 1, half)
    top = 1
    while top < n:
        top <<= 1
    up[0], down0[0], down1[0] = -1, -1, top >> 1 if n > 1 else -1
    second = (node > up).astype(np.int32)
    return NodeTree(up=_i32(up), down0=_i32(down0), down1=_i32(down1), second_child=second)


def double_binary_tree(n: int) -> tuple[NodeTree, NodeTree]:
    """Build both trees over ``n`` nodes."""
    first = binary_tree(n)
    nodes = np.arange(n)
    if n % 2:
        position = (nodes - 1) % n  # [n] the position in the first tree that each node occupies
        node_at = (nodes + 1) % n  # [n] the node at each position
    else:
        position = node_at = n - 1 - nodes

    def image(values: Int32Array) -> Int32Array:
        moved = values[position]
        return _i32(np.where(moved < 0, -1, node_at[moved]))

    second = NodeTree(
        up=image(first.up),
        down0=image(first.down0),
        down1=image(first.down1),
        second_child=first.second_child[position],
    )
    return first, second


def tree_depth(layout: RankLayout) -> int:
    """Return the hops from a leaf to the root: the chain in a node plus the tree over nodes."""
    return layout.ranks_per_node - 1 + (layout.nnodes.bit_length() - 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class RankTree:
    """Tree of one channel over ranks.

    ``up`` [ranks], ``down`` [ranks, 3] with children in order of connection; -1 means no peer.
    """

    up: Int32Array
    down: Int32Array


@dataclass(frozen=True, kw_only=True)
class TreeOrder:
    """Search result of one tree channel on one domain: chain of local ranks and pattern.

    Raises ``TopologyError`` for a pattern that needs more GPUs than the chain has.
    """

    order: tuple[int, ...]
    pattern: Pattern

    def __post_init__(self) -> None:
        if len(self.order) < 2 and self.pattern != Pattern.TREE:
            kind = f"{int(self.pattern)} ({self.pattern.name.lower()})"
            one = f"{int(Pattern.TREE)} ({Pattern.TREE.name.lower()})"
            raise TopologyError(
                f"cannot connect a tree of pattern {kind} on the GPUs {list(self.order)} of a node:"
                f" it needs two or more; allowed is {one}"
            )

    @property
    def to_parent(self) -> int:
        """Local rank connected to the parent's node."""
        return self.order[0]

    @property
    def to_child0(self) -> int:
        """Local rank connected to the first child's node."""
        return self.order[0 if self.pattern == Pattern.TREE else 1]

    @property
    def to_child1(self) -> int:
        """Local rank connected to the second child's node."""
        return self.order[1 if self.pattern == Pattern.SPLIT_TREE else 0]


def connect_tree(
    layout: RankLayout, chains: Sequence[TreeOrder], trees: tuple[NodeTree, NodeTree]
) -> tuple[RankTree, RankTree]:
    """Build the two trees of one channel; ``chains[d]`` is the channel's order on domain d."""
    up, down = _chains(layout, [chain.order for chain in chains])
    parent = layout.per_node([c.to_parent for c in chains])
    child0 = layout.per_node([c.to_child0 for c in chains])
    child1 = layout.per_node([c.to_child1 for c in chains])
    first, second = (
        _attach(up.copy(), down.copy(), tree, parent, child0, child1) for tree in trees
    )
    return first, second


def _chains(layout: RankLayout, orders: Sequence[Sequence[int]]) -> tuple[Int32Array, Int32Array]:
    up = np.full(layout.nranks, -1, dtype=np.int32)
    down = np.full((layout.nranks, TREE_ARITY), -1, dtype=np.int32)
    for order in orders:
        ranks = layout.on_all_hosts(order)
        up[ranks[:, 1:]] = ranks[:, :-1]
        down[ranks[:, :-1], 0] = ranks[:, 1:]
    return up, down


def _attach(
    up: Int32Array,
    down: Int32Array,
    tree: NodeTree,
    parent: Int32Array,
    child0: Int32Array,
    child1: Int32Array,
) -> RankTree:
    """Join the chains of all nodes along ``tree``.

    The GPU connected to the parent's node becomes a child of that node's child GPU.
    """
    has = np.flatnonzero(tree.up >= 0)
    above = tree.up[has]
    up[parent[has]] = np.where(tree.second_child[has] == 0, child0[above], child1[above])
    for below, via in ((tree.down0, child0), (tree.down1, child1)):
        has = np.flatnonzero(below >= 0)
        owners = via[has]
        slot = (down[owners] >= 0).sum(axis=1)  # one owner per node, so no owner occurs twice
        down[owners, slot] = parent[below[has]]
    return RankTree(up=up, down=down)


def _i32(values: NDArray[Any]) -> Int32Array:
    return values.astype(np.int32)
