"""CollNet: reductions inside the network, reached through head GPUs of each node.

*Chain*: the GPUs of a node form a chain per channel whose first GPU exchanges data with the
network. *Direct*: every GPU exchanges data with every head; it needs an NVSwitch and at most eight
GPUs per node. Source: NCCL ``src/graph/connect.cc`` connectCollNet. The network is addressed as
rank ``nranks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miraccl.graph.nvls import unique_heads
from miraccl.graph.rank_layout import Int32Array, RankLayout

MAX_DIRECT_RANKS = 8
"""Maximum GPUs per node for CollNet (NCCL ``NCCL_MAX_DIRECT_ARITY`` + 1)."""

Orders = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True, eq=False)
class ChainPlan:
    """Peers of one CollNet chain channel.

    ``up`` [ranks] is the network for heads; ``down`` [ranks]; -1 means no peer.
    """

    up: Int32Array
    down: Int32Array


@dataclass(frozen=True, kw_only=True)
class DirectPlan:
    """Peers of CollNet direct, equal for all channels.

    ``shift[rank]`` is the head that a rank sends to first; ``up[rank]`` lists the other heads,
    ``down[rank]`` the ranks that a head serves.
    """

    heads: int
    head_rank: tuple[int, ...]
    shift: tuple[int, ...]
    up: tuple[tuple[int, ...], ...]
    down: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class CollnetPlan:
    """CollNet connections of a communicator.

    ``heads`` is per node, ``chains`` is indexed by searched channel, and ``direct`` is None if a
    node has more than ``MAX_DIRECT_RANKS`` GPUs.
    """

    heads: int
    chains: tuple[ChainPlan, ...]
    direct: DirectPlan | None


def connect_chain(layout: RankLayout, orders: Sequence[Sequence[int]]) -> ChainPlan:
    """Connect one channel; ``orders[d]`` is the chain of domain d, head first."""
    up = np.full(layout.nranks, -1, dtype=np.int32)
    down = np.full(layout.nranks, -1, dtype=np.int32)
    for order in orders:
        ranks = layout.on_all_hosts(order)
        up[ranks[:, :1]] = layout.nranks
        up[ranks[:, 1:]] = ranks[:, :-1]
        down[ranks[:, :-1]] = ranks[:, 1:]
    return ChainPlan(up=up, down=down)


def connect_direct(layout: RankLayout, orders: Sequence[Orders]) -> DirectPlan:
    """Connect all channels; ``orders[d]`` lists the channels of domain d, head first."""
    heads = [unique_heads(channels) for channels in orders]
    count = len(heads[0])
    head_rank = np.full(layout.nranks, -1, dtype=np.int64)
    shift = np.zeros(layout.nranks, dtype=np.int64)
    up: list[tuple[int, ...]] = [()] * layout.nranks
    down: list[tuple[int, ...]] = [()] * layout.nranks
    for d, domain in enumerate(layout.domains):
        for node in layout.nodes_of(d):
            offset = int(layout.node_offset[node])
            for local in domain:
                rank = offset + local
                # Like NCCL, the i-th head serves the ranks in the order of the i-th channel, not of
                # the head's own first channel.
                own = heads[d].index(local) if local in heads[d] else -1
                head_rank[rank] = own
                shift[rank] = rank % len(domain) % max(1, len(heads[d]))
                up[rank] = tuple(offset + h for h in heads[d] if h != local)
                if own >= 0:
                    down[rank] = tuple(offset + r for r in orders[d][own] if r != local)
    return DirectPlan(
        heads=count,
        head_rank=tuple(head_rank.tolist()),
        shift=tuple(shift.tolist()),
        up=tuple(up),
        down=tuple(down),
    )
