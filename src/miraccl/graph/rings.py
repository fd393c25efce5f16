"""Global rings: the rings of all nodes, concatenated.

A channel's order inside a node starts at the GPU that receives from the network and ends at the one
that sends. The last GPU of node n is followed by the first of node n + 1, and the last node by node
0 (NCCL ``src/graph/connect.cc`` connectRings).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miraccl.errors import MiracclError
from miraccl.graph.rank_layout import Int32Array, RankLayout

Orders = Sequence[Sequence[int]]
"""Per channel the local ranks of one domain in ring order."""


def build_rings(
    layout: RankLayout, orders: Sequence[Orders], alternate: Sequence[bool], channels: int
) -> Int32Array:
    """Return [channels, ranks]: every ring, starting at rank 0. ``orders[d]`` belongs to domain d.

    ``alternate[d]`` states that the search found channels in pairs that enter by one NIC and leave
    by the other (``cross_nic`` 2). Odd nodes then swap the two channels of a pair, so that traffic
    stays on its rail.
    """
    rings = np.empty((channels, layout.nranks), dtype=np.int32)
    sizes = np.array([len(domain) for domain in layout.domains])[layout.node_domain]
    begin = np.cumsum(sizes) - sizes  # column where each node's part starts
    for d, domain in enumerate(layout.domains):
        nodes = layout.nodes_of(d)
        columns = begin[nodes][:, None] + np.arange(len(domain))
        for c in range(channels):
            even = np.asarray(orders[d][c], dtype=np.int32)
            odd = np.asarray(orders[d][c ^ 1 if alternate[d] else c], dtype=np.int32)
            local = np.where((nodes % 2 == 1)[:, None], odd, even)
            rings[c, columns] = local + layout.node_offset[nodes][:, None]
    for c, start in enumerate(np.argmin(rings, axis=1)):
        rings[c] = np.roll(rings[c], -start)
    _check(rings)
    return rings


def _check(rings: Int32Array) -> None:
    ranks = np.arange(rings.shape[1])
    for c, ring in enumerate(rings):
        if not np.array_equal(np.sort(ring), ranks):
            missing = np.setdiff1d(ranks, ring)
            raise MiracclError(
                f"cannot build the ring of channel {c}: rank {missing[0]} is missing"
            )
