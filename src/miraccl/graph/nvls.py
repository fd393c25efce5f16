"""NVLink SHARP: head ranks and the trees between the heads of different nodes.

The NVSwitch reduces the data that all GPUs of a node write; each *head* owns one share of the data.
Over several nodes the heads of the same share form a double binary tree (NCCL
``src/graph/connect.cc`` connectNvls, ``src/transport/nvls.cc``). The multicast group of head h is
addressed as rank ``nranks + 1 + h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miraccl.graph.plan_settings import ConnectSettings
from miraccl.graph.rank_layout import Int32Array, RankLayout
from miraccl.graph.trees import TREE_ARITY, NodeTree

_CHANNELS_HOPPER = 16
_CHANNELS_BLACKWELL = 32
_CHANNELS_BLACKWELL_ONE_HOST = 24
"""Channels that reach peak bandwidth (NCCL ``NVLS_NCHANNELS_SM90``, ``_SM100``, ``_SM100_NVL``)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NvlsPlan:
    """NVLS connections of a communicator.

    ``head_rank`` [ranks] is the head index of a rank, or -1. With several nodes ``up[t]`` [ranks]
    and ``down[t]`` [ranks, 3] form tree t, used by the channels whose number is t modulo 2; with
    one node they are empty. The first entry of ``down`` is the multicast group of the node.
    """

    heads: int
    head_rank: Int32Array
    up: tuple[Int32Array, ...] = ()
    down: tuple[Int32Array, ...] = ()


def nvls_channel_count(sm: int, hosts: int, settings: ConnectSettings) -> int:
    """Return the number of NVLS channels for compute capability ``sm`` / 10."""
    if settings.nvls_channels:
        count = settings.nvls_channels
    elif sm >= 100:
        count = _CHANNELS_BLACKWELL if hosts > 1 else _CHANNELS_BLACKWELL_ONE_HOST
    else:
        count = _CHANNELS_HOPPER
    return max(settings.min_ctas, min(settings.max_ctas, count))


def unique_heads(orders: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the first rank of each channel without duplicates."""
    return tuple(dict.fromkeys(order[0] for order in orders))


def connect_nvls(
    layout: RankLayout, heads: Sequence[Sequence[int]], trees: tuple[NodeTree, NodeTree]
) -> NvlsPlan:
    """Connect the heads; ``heads[d]`` are the head local ranks of domain d.

    All nodes use as many heads as the node with the fewest.
    """
    count = min(len(h) for h in heads)
    by_node = np.stack(
        [layout.per_node([h[i] for h in heads]) for i in range(count)]
    )  # [heads, nodes]
    head_rank = np.full(layout.nranks, -1, dtype=np.int32)
    for i in range(count):
        head_rank[by_node[i]] = i
    if layout.nnodes == 1:
        return NvlsPlan(heads=count, head_rank=head_rank)
    group = layout.nranks + 1 + head_rank
    connected = [_head_tree(by_node, group, tree) for tree in trees]
    return NvlsPlan(
        heads=count,
        head_rank=head_rank,
        up=tuple(up for up, _ in connected),
        down=tuple(down for _, down in connected),
    )


def _head_tree(
    by_node: Int32Array, group: Int32Array, tree: NodeTree
) -> tuple[Int32Array, Int32Array]:
    up = np.full(len(group), -1, dtype=np.int32)
    down = np.full((len(group), TREE_ARITY), -1, dtype=np.int32)
    down[:, 0] = group
    for ranks in by_node:
        up[ranks] = np.where(tree.up >= 0, ranks[tree.up], -1)
        used = np.ones(len(ranks), dtype=np.int64)
        for below in (tree.down0, tree.down1):
            has = np.flatnonzero(below >= 0)
            down[ranks[has], used[has]] = ranks[below[has]]
            used[has] += 1
    return up, down
