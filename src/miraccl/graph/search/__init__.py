"""Channel search: the rings, trees, NVLS and CollNet channels of NCCL 2.28.9 on a machine.

``search_channels`` is the only entry point, a pure function of its arguments. ``passes`` decides
which walks to run, ``kernel`` runs one walk on the arrays that ``state_builder`` allocates,
``nets`` lists candidate nets, ``saturation`` and ``explain`` give the reasons of a result.
"""

from __future__ import annotations

from miraccl.graph.channel_graph import ChannelGraph, graphs_from_xml, start_graph
from miraccl.graph.kinds import GraphKind
from miraccl.graph.search.passes import SearchContext, search_graph
from miraccl.graph.search.report import (
    End,
    Origin,
    Phase,
    Reason,
    SearchReport,
    SearchResult,
    Stop,
    Try,
)
from miraccl.graph.search.run import Walk, walk_compiled
from miraccl.graph.search.settings import NVLS_AUTO, NVLS_OFF, SearchSettings
from miraccl.graph.search.state_builder import build_state
from miraccl.topo.queries import NearestDevices
from miraccl.topo.records import PathTable, System

__all__ = [
    "End",
    "Origin",
    "Phase",
    "Reason",
    "SearchReport",
    "SearchResult",
    "SearchSettings",
    "Stop",
    "Try",
    "search_channels",
]

_ORDER = (
    GraphKind.RING,
    GraphKind.TREE,
    GraphKind.COLLNET_CHAIN,
    GraphKind.COLLNET_DIRECT,
    GraphKind.NVLS,
)
"""Order of the searches (NCCL ``initTransportsRank``); each one starts from the bandwidths that the
previous one left."""


def search_channels(
    system: System,
    paths: PathTable,
    settings: SearchSettings | None = None,
    *,
    walk: Walk = walk_compiled,
) -> SearchResult:
    """Search the five channel graphs of a node and report how each one was found.

    ``paths`` are those of ``system`` after all corrections. ``walk`` runs the inner search; tests
    pass the interpreted version. Raises ``TopologyError`` for a system without a GPU or a graph
    file that cannot be used.
    """
    settings = settings or SearchSettings()
    nearest = NearestDevices(system, paths, settings.net_per_gpu)
    context = SearchContext(
        nearest=nearest,
        settings=settings,
        state=build_state(nearest),
        walk=walk,
        from_file=graphs_from_xml(settings.graph_xml, system) if settings.graph_xml else {},
    )
    reports: dict[GraphKind, SearchReport] = {}
    for kind in _ORDER:
        ring_channels = reports[GraphKind.RING].graph.n_channels if reports else 0
        if _is_run(kind, context):
            reports[kind] = search_graph(context, kind, ring_channels)
        else:
            reports[kind] = _not_run(context, start_graph(kind, ring_channels))
    return SearchResult(
        graphs=tuple(reports[kind].graph for kind in GraphKind),
        reports=tuple(reports[kind] for kind in GraphKind),
    )


def _is_run(kind: GraphKind, context: SearchContext) -> bool:
    if kind is GraphKind.NVLS:
        return supports_nvls(context.system, context.settings)
    return context.settings.collnet if kind.uses_collnet else True


def supports_nvls(system: System, settings: SearchSettings) -> bool:
    """Return True if the NVLS search runs: two GPUs or more, with multicast (NCCL ncclNvlsInit)."""
    if settings.nvls == NVLS_OFF or len(system.gpus) < 2:
        return False
    # NCCL asks the driver for multicast support; GPUs from Hopper on are assumed to have it.
    return settings.nvls != NVLS_AUTO or min(system.gpus, key=lambda gpu: gpu.rank).sm >= 90


def _not_run(context: SearchContext, graph: ChannelGraph) -> SearchReport:
    system = context.system
    return SearchReport(
        kind=graph.kind,
        origin=Origin.NOT_RUN,
        inter=context.inter,
        max_bw=system.max_bw,
        total_bw=system.total_bw,
        sm=context.sm,
        graph=graph,
    )
