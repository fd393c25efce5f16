"""Constants of the latency and bandwidth model, and the enums of its combinations.

All values are NCCL 2.28.9's (``src/graph/tuning.cc``, ``src/include/comm.h``,
``src/include/device.h``), measured by NVIDIA on its own machines. Latencies are us, bandwidths
GB/s. Triples are LL, LL128, Simple; columns of bandwidth tables are one node, two nodes, more.
"""

from __future__ import annotations

import enum
from typing import Final

from miraccl.graph.kinds import GraphKind
from miraccl.types import Collective, Protocol

Triple = tuple[float, float, float]


class NcclAlgorithm(enum.IntEnum):
    """Algorithms of NCCL, in the order in which ties are broken."""

    TREE = 0
    RING = 1
    COLLNET_DIRECT = 2
    COLLNET_CHAIN = 3
    NVLS = 4
    NVLS_TREE = 5
    PAT = 6

    @property
    def label(self) -> str:
        """Name as in ``NCCL_ALGO``."""
        return _LABELS[self]

    @property
    def graph(self) -> GraphKind:
        """The search whose channels the algorithm runs on."""
        return _GRAPHS[self]

    @property
    def uses_collnet(self) -> bool:
        return self in (NcclAlgorithm.COLLNET_DIRECT, NcclAlgorithm.COLLNET_CHAIN)

    @property
    def uses_nvls(self) -> bool:
        return self in (NcclAlgorithm.NVLS, NcclAlgorithm.NVLS_TREE)


_LABELS = {
    NcclAlgorithm.TREE: "Tree",
    NcclAlgorithm.RING: "Ring",
    NcclAlgorithm.COLLNET_DIRECT: "CollNetDirect",
    NcclAlgorithm.COLLNET_CHAIN: "CollNetChain",
    NcclAlgorithm.NVLS: "NVLS",
    NcclAlgorithm.NVLS_TREE: "NVLSTree",
    NcclAlgorithm.PAT: "PAT",
}
_GRAPHS = {
    NcclAlgorithm.TREE: GraphKind.TREE,
    NcclAlgorithm.RING: GraphKind.RING,
    NcclAlgorithm.COLLNET_DIRECT: GraphKind.COLLNET_DIRECT,
    NcclAlgorithm.COLLNET_CHAIN: GraphKind.COLLNET_CHAIN,
    NcclAlgorithm.NVLS: GraphKind.NVLS,
    NcclAlgorithm.NVLS_TREE: GraphKind.NVLS,
    NcclAlgorithm.PAT: GraphKind.TREE,
}

PROTOCOL_LABELS: Final = {Protocol.LL: "LL", Protocol.LL128: "LL128", Protocol.SIMPLE: "Simple"}

TUNED: Final = {
    Collective.BROADCAST: "Broadcast",
    Collective.REDUCE: "Reduce",
    Collective.ALL_GATHER: "AllGather",
    Collective.REDUCE_SCATTER: "ReduceScatter",
    Collective.ALL_REDUCE: "AllReduce",
}
"""Collectives that the model covers, in NCCL's order, with NCCL's names."""


class Hardware(enum.IntEnum):
    """Kind of link that one step of an algorithm crosses."""

    NVLINK = 0
    PCI = 1
    NET = 2


_NONE: Triple = (0.0, 0.0, 0.0)

BASE_LATENCY: Final[dict[NcclAlgorithm, Triple]] = {
    NcclAlgorithm.TREE: (6.8, 14.0, 8.4),
    NcclAlgorithm.RING: (6.6, 14.0, 8.4),
    NcclAlgorithm.PAT: (8.0, 8.0, 8.0),
}
"""Start-up latency, us; 0 for algorithms that are not listed."""

STEP_LATENCY: Final[dict[Hardware, dict[NcclAlgorithm, Triple]]] = {
    Hardware.NVLINK: {
        NcclAlgorithm.TREE: (0.6, 1.25, 4.0),
        NcclAlgorithm.RING: (0.6, 1.9, 3.4),
        NcclAlgorithm.COLLNET_DIRECT: (0.0, 0.0, 3.7),
        NcclAlgorithm.COLLNET_CHAIN: (0.0, 0.0, 2.8),
        NcclAlgorithm.NVLS: (0.0, 0.0, 25.0),
        NcclAlgorithm.NVLS_TREE: (0.0, 0.0, 25.0),
        NcclAlgorithm.PAT: (0.0, 0.0, 4.0),
    },
    Hardware.PCI: {
        NcclAlgorithm.TREE: (1.0, 1.9, 4.0),
        NcclAlgorithm.RING: (1.0, 2.5, 5.7),
        NcclAlgorithm.COLLNET_DIRECT: (0.0, 0.0, 3.7),
        NcclAlgorithm.COLLNET_CHAIN: (0.0, 0.0, 2.8),
        NcclAlgorithm.NVLS: _NONE,
        NcclAlgorithm.NVLS_TREE: _NONE,
        NcclAlgorithm.PAT: (0.0, 0.0, 4.0),
    },
    Hardware.NET: {
        NcclAlgorithm.TREE: (5.0, 8.5, 14.0),
        NcclAlgorithm.RING: (2.7, 4.0, 14.0),
        NcclAlgorithm.COLLNET_DIRECT: (0.0, 0.0, 31.0),
        NcclAlgorithm.COLLNET_CHAIN: (0.0, 0.0, 30.0),
        NcclAlgorithm.NVLS: (0.0, 0.0, 18.0),
        NcclAlgorithm.NVLS_TREE: (0.0, 0.0, 20.9),
        NcclAlgorithm.PAT: (0.0, 0.0, 14.0),
    },
}
"""Latency of one step, us."""


class Generation(enum.IntEnum):
    """GPU generations, the rows of the bandwidth tables."""

    VOLTA = 0
    AMPERE = 1
    HOPPER = 2
    BLACKWELL = 3

    @classmethod
    def of(cls, sm: int) -> Generation:
        return (
            cls.BLACKWELL
            if sm >= 100
            else cls.HOPPER
            if sm >= 90
            else cls.AMPERE
            if sm >= 80
            else cls.VOLTA
        )


LL_MAX: Final[tuple[Triple, ...]] = (
    (39.0, 39.0, 20.4),
    (87.7, 22.5, 19.0),
    (141.0, 45.0, 35.0),
    (282.0, 90.0, 70.0),
)
"""Maximum bandwidth of LL. Rows are generations on one node; over several nodes row 1 is AMD hosts
and row 0 all others."""

RING_LL128_PER_CHANNEL: Final[tuple[Triple, ...]] = (
    (20.0,) * 3,
    (20.0,) * 3,
    (36.7,) * 3,
    (73.4, 34.6, 73.4),
)
TREE_LL128_PER_CHANNEL: Final[tuple[Triple, ...]] = (
    (20.0,) * 3,
    (20.0,) * 3,
    (36.7, 36.7, 29.0),
    (55.6, 31.67, 20.0),
)
TREE_PER_CHANNEL: Final[tuple[Triple, ...]] = (
    (26.5, 18.5, 10.0),
    (24.0, 23.6, 17.8),
    (38.7, 41.4, 36.0),
    (70.0, 42.8, 24.0),
)
NVLS_TREE_PER_CHANNEL: Final[tuple[Triple, ...]] = (
    (26.5, 18.5, 10.0),
    (24.0, 23.6, 17.8),
    (0.0, 57.7, 45.5),
    (0.0, 96.0, 43.8),
)
"""Maximum bandwidth of one channel, by generation."""

NVLS_EFFICIENCY: Final = (0.0, 0.0, 0.85, 0.74)
"""Share of the NVLink bandwidth that multicast reaches, by generation."""

TREE_CORRECTION: Final[dict[Protocol, tuple[float, ...]]] = {
    Protocol.LL: (
        1,
        1,
        1,
        1,
        0.9,
        0.8,
        0.7,
        0.7,
        0.7,
        0.7,
        0.6,
        0.5,
        0.4,
        0.4,
        0.5,
        0.6,
        0.7,
        0.8,
        0.9,
        1,
        1,
        1,
        1,
    ),
    Protocol.LL128: (
        1,
        1,
        1,
        1,
        1,
        0.9,
        0.8,
        0.8,
        0.8,
        0.7,
        0.6,
        0.6,
        0.6,
        0.6,
        0.6,
        0.6,
        0.8,
        0.9,
        0.9,
        0.9,
        0.9,
        1,
        1,
    ),
    Protocol.SIMPLE: (0.9,) * 7
    + (0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
}
"""Factor on the bandwidth of a tree all-reduce at 64 B, 128 B, ... 256 MiB."""

WARP: Final = 32
MAX_THREADS: Final = 640
SIMPLE_MAX_THREADS: Final = 512
LL_MAX_THREADS: Final = 512
LL128_MAX_THREADS: Final = 640
SLOW_MACHINE_THREADS: Final = 256
SLOW_MACHINE_BW: Final = 12.0
"""A ring of no more than one PCI Gen3 x16 slot (GB/s) gets fewer threads."""

LL_THRESHOLD: Final = 8
LL128_THRESHOLD: Final = 8
SIMPLE_THRESHOLD: Final = 64
COLLNET_THRESHOLD: Final = 512
"""Bytes per thread below which channels are dropped."""

MAX_NVLS_RANKS: Final = 32
"""Maximum GPUs per node for NVLS operations except all-reduce (NCCL ``NCCL_MAX_NVLS_ARITY``)."""
