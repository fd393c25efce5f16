"""Records of a channel search.

SearchResult                       the five graphs of a node
 └─ SearchReport                   one graph: Origin states where it came from
     ├─ Try, Try, ...              one walk each
     │    Phase, Reason            the pass, and the change since the previous try
     │    Attempt (``passes``)     the request: pattern, bandwidths, path types, channels
     │    End                      the outcome: perfect, budget used up, complete
     ├─ Stop                       the reason why pass 1 ran no further try
     ├─ Duplication                channels doubled between pass 1 and pass 2
     └─ SaturatedLink, ...         the links that have no capacity for one more channel
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from miraccl.graph.channel_graph import ChannelGraph
from miraccl.graph.kinds import GraphKind, Pattern
from miraccl.topo.records import LinkType, PathType


class Phase(enum.IntEnum):
    """Pass of the search: find a graph, then look for faster channels."""

    FIND = 1
    IMPROVE = 2


class Reason(enum.Enum):
    """Change that a try makes to the request of the previous try."""

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
    """Outcome of a try."""

    PERFECT = "perfect"  # as many channels as allowed
    BUDGET = "budget"  # visits used up
    COMPLETE = "complete"  # all alternatives were tried


class Stop(enum.Enum):
    """Reason why the first pass ended."""

    PERFECT = "perfect"
    SATURATED = "saturated"  # channels times bandwidth reach the capacity of a GPU
    BUDGET = "budget"  # the visits of all tries are used up
    SPEEDS = "speeds"  # a slower channel would be less than half as fast, or none is listed


class Origin(enum.Enum):
    """Source of a graph."""

    SEARCH = "search"
    FILE = "file"
    FALLBACK = "fallback"  # no graph was found: one channel in the order of the GPUs
    NO_NVSWITCH = "no_nvswitch"  # NVLS needs an NVSwitch and GPUs from Hopper on
    NOT_RUN = "not_run"


@dataclass(frozen=True, kw_only=True)
class Try:
    """One walk: its request (first group of fields, GB/s per channel) and its outcome (second
    group).

    ``budget`` is the number of visits allowed. ``visits`` counts all visits made, including those
    of bounded initial walks, which are not charged to the budget. ``improved`` is True if this walk
    found a better graph; ``found_*`` describe the best graph after it.
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
    """Doubling of channels, applied where one channel cannot drive its links.

    ``before`` and ``after`` are channel counts; bandwidths are GB/s per channel before.
    """

    before: int
    after: int
    bw_intra: float
    bw_inter: float


@dataclass(frozen=True, kw_only=True)
class SaturatedLink:
    """A link without capacity for one more channel; ``bw`` is its capacity, ``left`` the rest
    (GB/s).
    """

    source: str
    target: str
    type: LinkType
    bw: float
    left: float


@dataclass(frozen=True, kw_only=True)
class SearchReport:
    """Course and result of the search of one graph.

    ``inter`` is True if channels enter and leave the node. ``max_bw`` and ``total_bw`` are the GB/s
    that the search used. ``next_bw`` is the next lower bandwidth per channel (GB/s), 0 if none is
    listed. ``duplication`` is None if channels were not doubled.
    """

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
        """Visits of all tries."""
        return sum(t.visits for t in self.tries)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The five graphs in the order of ``GraphKind``, with their reports."""

    graphs: tuple[ChannelGraph, ...]
    reports: tuple[SearchReport, ...]

    def graph(self, kind: GraphKind) -> ChannelGraph:
        """Return the graph of a kind."""
        return self.graphs[kind]
