"""Kinds and patterns of channel graphs, with NCCL's numbers (2.28, ``src/include/graph.h``)."""

from __future__ import annotations

import enum


class GraphKind(enum.IntEnum):
    """The five searches of a communicator, numbered by NCCL's graph id."""

    RING = 0
    TREE = 1
    COLLNET_CHAIN = 2
    NVLS = 3
    COLLNET_DIRECT = 4

    @property
    def label(self) -> str:
        return self.name.lower()

    @property
    def uses_collnet(self) -> bool:
        return self in (GraphKind.COLLNET_CHAIN, GraphKind.COLLNET_DIRECT)


class Pattern(enum.IntEnum):
    """Shape of a channel inside a node.

    The three tree patterns differ in which GPUs exchange data with the network.
    """

    BALANCED_TREE = 1  # parent and one child on the first GPU, the other child on the second
    SPLIT_TREE = 2  # parent on the first GPU, children on the second
    TREE = 3  # parent and children on the first GPU
    RING = 4
    NVLS = 5
    COLLNET_DIRECT = 6
