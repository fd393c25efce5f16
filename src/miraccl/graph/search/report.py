"""What a channel search did, as records: every try with its question, its answer and the reason it was made."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from miraccl.graph.channel_graph import ChannelGraph, GraphKind, Pattern
from miraccl.topo.records import LinkType, PathType


class Phase(enum.IntEnum):
    """NCCL's two passes: find a graph, then see whether its channels can be faster."""

    FIND = 1
    IMPROVE = 2


class Reason(enum.Enum):
    """Why a try was made: what was changed since the try before."""

    START = "start"
    DIFFERENT_CHANNELS = "different_channels"
    SIMPLER_TREE = "simpler_tree"
    FARTHER_GPUS = "farther_gpus"
    FARTHER_NETS = "farther_nets"
    CROSS_NIC = "cross_nic"
    SLOWER = "slower"
    FASTER = "faster"
    FASTER_INSIDE = "faster_inside"
    FASTER_NETWORK = "faster_network"


class End(enum.Enum):
    """How a try ended."""

    PERFECT = "perfect"  # as many channels as allowed
    BUDGET = "budget"  # visits used up
    COMPLETE = "complete"  # everything was tried


class Stop(enum.Enum):
    """Why the first pass made no further try."""

    PERFECT = "perfect"
    SATURATED = "saturated"  # channels times bandwidth reach what a GPU can carry
    BUDGET = "budget"  # the visits of all tries are used up
    SPEEDS = "speeds"  # a slower channel would be less than half as fast, or none is listed


class Origin(enum.Enum):
    """Where a graph comes from."""

    SEARCH = "search"
    FILE = "file"
    FALLBACK = "fallback"  # nothing was found: one channel in the order of the GPUs
    NO_NVSWITCH = "no_nvswitch"  # NVLS needs an NVSwitch and GPUs from Hopper on
    NOT_RUN = "not_run"


@dataclass(frozen=True, kw_only=True)
class Try:
    """One walk. The first group of fields is what was asked for (GB/s per channel), the second what came of it.

    ``budget``: visits allowed, ``visits``: made, including those of bounded first walks, which do not count against it.
    ``improved``: this walk found a better graph than before; ``found_*`` describe the best graph after it.
    """

    phase: Phase
    reason: Reason
    pattern: Pattern
    bw_intra: float
    bw_inter: float
    type_intra: PathType
    type_inter: PathType
    same_channels: int
    cross_nic: int
    min_channels: int
    max_channels: int
    budget: int

    visits: int
    end: End
    improved: bool
    found_channels: int
    found_bw_intra: float
    found_bw_inter: float


@dataclass(frozen=True, kw_only=True)
class Duplication:
    """Channels doubled because one channel cannot drive its links: ``before`` and ``after`` in number, GB/s per channel before."""

    before: int
    after: int
    bw_intra: float
    bw_inter: float


@dataclass(frozen=True, kw_only=True)
class SaturatedLink:
    """A link without room for one more channel: from, to, GB/s in all and left."""

    source: str
    target: str
    type: LinkType
    bw: float
    left: float


@dataclass(frozen=True, kw_only=True)
class SearchReport:
    """How one graph came about. ``inter``: channels enter and leave the node; ``max_bw``, ``total_bw`` GB/s as the search used them;
    ``next_bw``: GB/s of the next slower channel it could have asked for, 0 if there is none listed; ``duplication`` is None where
    channels stayed as found."""

    kind: GraphKind
    origin: Origin
    inter: bool
    max_bw: float
    total_bw: float
    sm: int
    tries: tuple[Try, ...] = ()
    stop: Stop | None = None
    next_bw: float = 0.0
    duplication: Duplication | None = None
    saturated_links: tuple[SaturatedLink, ...] = ()
    graph: ChannelGraph

    @property
    def visits(self) -> int:
        return sum(t.visits for t in self.tries)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The five graphs in the order of ``GraphKind`` and how each came about."""

    graphs: tuple[ChannelGraph, ...]
    reports: tuple[SearchReport, ...]

    def graph(self, kind: GraphKind) -> ChannelGraph:
        return self.graphs[kind]
