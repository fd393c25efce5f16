"""Connections of all ranks of a communicator, built from the channel graphs of one machine.

The parts are in ``rank_layout``, ``rings``, ``trees``, ``nvls``, ``collnet``, ``channel_count`` and
``p2p_channels``. This module combines them in the order of NCCL 2.28 (``src/init.cc``
initTransportsRank, ``src/graph/connect.cc`` ncclTopoPostset) and owns the record ``Connections``
with its JSON, section ``comm`` of the reference results.

Every rank first searches on the GPUs that it reaches without the network (its *domain*). Then all
ranks agree on the fewest channels, the lowest bandwidths and the worst path types; only the agreed
values reach the tuning model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from miraccl.errors import InvalidUsage
from miraccl.graph.channel_count import ChannelCount, ChannelCountInputs, count_channels
from miraccl.graph.channel_graph import ChannelGraph
from miraccl.graph.collnet import MAX_DIRECT_RANKS, CollnetPlan, connect_chain, connect_direct
from miraccl.graph.kinds import GraphKind, Pattern
from miraccl.graph.nvls import NvlsPlan, connect_nvls, nvls_channel_count, unique_heads
from miraccl.graph.p2p_channels import P2pChannels, count_p2p_channels
from miraccl.graph.plan_settings import ConnectSettings
from miraccl.graph.rank_layout import Int32Array, RankLayout
from miraccl.graph.rings import build_rings
from miraccl.graph.trees import RankTree, TreeOrder, connect_tree, double_binary_tree, tree_depth
from miraccl.topo.records import PathTable, PathType, System

Graphs = Mapping[GraphKind, ChannelGraph]


@dataclass(frozen=True, kw_only=True)
class SearchedDomain:
    """GPUs of a host that reach each other without the network, with their search results.

    ``ranks`` are local to the host.
    """

    system: System
    paths: PathTable
    graphs: Graphs

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(gpu.rank for gpu in self.system.gpus))


@dataclass(frozen=True, kw_only=True, eq=False)
class Connections:
    """Connections that all ranks of a communicator agree on.

    ``graphs`` are the agreed graphs as rank 0 holds them. ``rings`` is [channels, ranks], each
    starting at rank 0; ``trees[c]`` belongs to channel c. ``search_rings`` and ``search_trees`` are
    those of the searched channels, before they were copied. ``max_sm`` and ``min_sm`` are compute
    capabilities times ten over all ranks.
    """

    layout: RankLayout
    graphs: Graphs
    count: ChannelCount
    nvls_support: bool
    nvls_channels: int
    collnet_enabled: bool
    p2p: P2pChannels
    per_domain: tuple[tuple[int, int, int, int], ...]
    all_nvlink: bool
    max_tree_pattern: int
    tree_depth: int
    min_sm: int
    max_sm: int
    search_rings: Int32Array
    search_trees: tuple[tuple[RankTree, RankTree], ...]
    nvls: NvlsPlan | None
    collnet: CollnetPlan | None

    @property
    def channels(self) -> int:
        return self.count.total

    @cached_property
    def rings(self) -> Int32Array:
        return self.search_rings[list(self.count.source)]

    @cached_property
    def trees(self) -> tuple[RankTree, ...]:
        return tuple(self.search_trees[c][t] for c, t in zip(self.count.source, self.count.tree))


def agree_graphs(domains: Sequence[SearchedDomain]) -> dict[GraphKind, ChannelGraph]:
    """Return the graphs of the first domain, reduced to the properties that all domains share."""
    agreed = {}
    for kind in GraphKind:
        all_graphs = [domain.graphs[kind] for domain in domains]
        channels = min(graph.n_channels for graph in all_graphs)
        agreed[kind] = replace(
            all_graphs[0],
            bw_intra=min(graph.bw_intra for graph in all_graphs),
            bw_inter=min(graph.bw_inter for graph in all_graphs),
            type_intra=max(graph.type_intra for graph in all_graphs),
            type_inter=max(graph.type_inter for graph in all_graphs),
            same_channels=min(graph.same_channels for graph in all_graphs),
            cross_nic=max(graph.cross_nic for graph in all_graphs),
            intra=all_graphs[0].intra[:channels],
            inter=all_graphs[0].inter[:channels],
        )
    both = min(agreed[GraphKind.RING].n_channels, agreed[GraphKind.TREE].n_channels)
    for kind in (GraphKind.RING, GraphKind.TREE):
        agreed[kind] = replace(
            agreed[kind], intra=agreed[kind].intra[:both], inter=agreed[kind].inter[:both]
        )
    return agreed


def connect(
    domains: Sequence[SearchedDomain],
    *,
    hosts: int,
    gpus_per_host: int,
    collnet: bool = False,
    settings: ConnectSettings | None = None,
) -> Connections:
    """Connect ``hosts`` copies of a machine whose GPUs form ``domains``.

    ``collnet`` states that a CollNet plugin is present and enabled. Raises ``InvalidUsage`` if a
    domain has no ring.
    """
    settings = settings or ConnectSettings()
    if not domains or any(domain.graphs[GraphKind.RING].n_channels == 0 for domain in domains):
        raise InvalidUsage("cannot connect the ranks: a domain has no ring")
    # Plans of thousands of ranks: nothing below loops over ranks in Python except CollNet direct,
    # and channels that are copies of each other share their arrays.
    layout = RankLayout(
        hosts=hosts, gpus_per_host=gpus_per_host, domains=tuple(domain.ranks for domain in domains)
    )
    graphs = agree_graphs(domains)
    sms = [gpu.sm for domain in domains for gpu in domain.system.gpus]
    collnet = (
        collnet
        and graphs[GraphKind.COLLNET_CHAIN].n_channels > 0
        and layout.nnodes >= settings.collnet_node_threshold
    )
    chain = graphs[GraphKind.COLLNET_CHAIN]
    searched = graphs[GraphKind.RING].n_channels
    inputs = ChannelCountInputs(
        searched=searched,
        nnodes=layout.nnodes,
        nranks=layout.nranks,
        min_sm=min(sms),
        ring_bw_intra=graphs[GraphKind.RING].bw_intra,
        collnet=(chain.bw_intra, chain.bw_inter) if collnet else None,
    )
    count = count_channels(inputs, settings)
    trees = double_binary_tree(layout.nnodes)
    nvls_support = graphs[GraphKind.NVLS].n_channels > 0
    nvls = (
        connect_nvls(layout, [unique_heads(d.graphs[GraphKind.NVLS].intra) for d in domains], trees)
        if nvls_support
        else None
    )
    nvls_channels = [
        nvls_channel_count(min(g.sm for g in d.system.gpus), hosts, settings) if nvls_support else 0
        for d in domains
    ]
    p2p = [
        count_p2p_channels(
            d.system, d.paths, channels=count.total, nranks=layout.nranks, settings=settings
        )
        for d in domains
    ]
    alternate = [d.graphs[GraphKind.RING].cross_nic == 2 and searched % 2 == 0 for d in domains]
    return Connections(
        layout=layout,
        graphs=graphs,
        count=count,
        nvls_support=nvls_support,
        nvls_channels=nvls_channels[0],
        collnet_enabled=collnet,
        p2p=p2p[0],
        per_domain=tuple((count.total, n, p.total, p.per_peer) for n, p in zip(nvls_channels, p2p)),
        all_nvlink=_all_nvlink(domains[0].paths, len(domains[0].system.gpus)),
        max_tree_pattern=max(domain.graphs[GraphKind.TREE].pattern for domain in domains),
        tree_depth=tree_depth(layout),
        min_sm=min(sms),
        max_sm=max(sms),
        search_rings=build_rings(
            layout, [d.graphs[GraphKind.RING].intra for d in domains], alternate, searched
        ),
        search_trees=tuple(
            connect_tree(
                layout,
                [
                    TreeOrder(order=g.intra[c], pattern=Pattern(g.pattern))
                    for g in _tree_graphs(domains)
                ],
                trees,
            )
            for c in range(searched)
        ),
        nvls=nvls,
        collnet=_connect_collnet(layout, domains, searched, nvls) if collnet else None,
    )


def _tree_graphs(domains: Sequence[SearchedDomain]) -> list[ChannelGraph]:
    return [domain.graphs[GraphKind.TREE] for domain in domains]


def _all_nvlink(paths: PathTable, gpus: int) -> bool:
    return all(
        paths.gpu_gpu(i, j).type < PathType.PIX for i in range(gpus) for j in range(gpus) if i != j
    )


def _connect_collnet(
    layout: RankLayout, domains: Sequence[SearchedDomain], searched: int, nvls: NvlsPlan | None
) -> CollnetPlan:
    chains = tuple(
        connect_chain(
            layout,
            [
                g.intra[c] if c < g.n_channels else ()
                for g in (d.graphs[GraphKind.COLLNET_CHAIN] for d in domains)
            ],
        )
        for c in range(searched)
    )
    orders = [domain.graphs[GraphKind.COLLNET_DIRECT].intra for domain in domains]
    heads = nvls.heads if nvls else len(unique_heads(orders[0]))
    direct = connect_direct(layout, orders) if layout.max_local_ranks <= MAX_DIRECT_RANKS else None
    return CollnetPlan(heads=heads, chains=chains, direct=direct)


def connections_to_json(plan: Connections) -> dict[str, Any]:
    """Return section ``comm`` of the reference results."""
    layout = plan.layout
    result: dict[str, Any] = {
        "nNodes": layout.nnodes,
        "rankToNode": layout.rank_to_node.tolist(),
        "nChannels": plan.channels,
        "nvlsChannels": plan.nvls_channels,
        "nvlsSupport": int(plan.nvls_support),
        "collnetEnable": int(plan.collnet_enabled),
        "p2pnChannels": plan.p2p.total,
        "p2pnChannelsPerPeer": plan.p2p.per_peer,
        "isAllNvlink": int(plan.all_nvlink),
        "maxTreePattern": int(plan.max_tree_pattern),
        "rings": plan.rings.tolist(),
        "trees": [
            {"depth": plan.tree_depth, "up": tree.up.tolist(), "down": tree.down.tolist()}
            for tree in plan.trees
        ],
    }
    if plan.nvls:
        result["nvls"] = _nvls_to_json(plan.nvls)
    if plan.collnet:
        result["collnet"] = _collnet_to_json(plan.collnet, plan.count)
    if len(set(plan.per_domain)) > 1:
        domain_of_rank = layout.node_domain[layout.rank_to_node]
        result["perRank"] = np.asarray(plan.per_domain)[domain_of_rank].tolist()
    return result


def _nvls_to_json(nvls: NvlsPlan) -> dict[str, Any]:
    result: dict[str, Any] = {"nHeads": nvls.heads, "headRank": nvls.head_rank.tolist()}
    for t, (up, down) in enumerate(zip(nvls.up, nvls.down)):
        result[f"treeUp{t}"] = up.tolist()
        result[f"treeDown{t}"] = down.tolist()
    return result


def _collnet_to_json(collnet: CollnetPlan, count: ChannelCount) -> dict[str, Any]:
    chains = [{"up": chain.up.tolist(), "down": chain.down.tolist()} for chain in collnet.chains]
    result: dict[str, Any] = {"headsNum": collnet.heads, "chain": [chains[c] for c in count.source]}
    if collnet.direct:
        direct = collnet.direct
        result["direct"] = {
            "nHeads": direct.heads,
            "headRank": list(direct.head_rank),
            "shift": list(direct.shift),
            "up": [_padded(up) for up in direct.up],
            "down": [_padded(down) for down in direct.down],
        }
    return result


def _padded(peers: Sequence[int]) -> list[int]:
    return [*peers, *[-1] * (MAX_DIRECT_RANKS - 1 - len(peers))]
