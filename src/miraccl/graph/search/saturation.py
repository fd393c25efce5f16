"""Links that the channels of a graph saturate: the reason why there is not one channel more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from miraccl.graph.channel_graph import ChannelGraph
from miraccl.graph.kinds import Pattern
from miraccl.graph.search.report import SaturatedLink
from miraccl.topo.records import Path, PathTable, System


def find_saturated_links(
    system: System, paths: PathTable, graph: ChannelGraph
) -> tuple[SaturatedLink, ...]:
    """Return the links whose rest is less than one more channel would need, fullest first.

    Counts the traffic in the direction of the search (rings and trees; none for NVLS and CollNet
    heads). The extra cost of peer-to-peer traffic through Intel host bridges and on GPUs before
    Ampere is not included.
    """
    if graph.pattern in (Pattern.NVLS, Pattern.COLLNET_DIRECT):
        return ()
    used: dict[int, float] = defaultdict(float)
    most: dict[int, float] = defaultdict(float)
    for path, bw in _traffic(system, paths, graph):
        for hop in path.hops:
            used[hop] += bw
            most[hop] = max(most[hop], bw)
    full = []
    for number, bw in used.items():
        link = system.links[number]
        left = link.bw - bw
        if left < most[number]:
            source, target = (
                system.nodes[system.link_source[number]].name,
                system.nodes[link.target].name,
            )
            full.append(
                SaturatedLink(
                    source=source,
                    target=target,
                    type=link.type,
                    bw=link.bw,
                    left=max(0.0, round(left, 3)),
                )
            )
    return tuple(sorted(full, key=lambda link: link.left / link.bw))


def _traffic(system: System, paths: PathTable, graph: ChannelGraph) -> Iterator[tuple[Path, float]]:
    """Yield the paths of all channels with the bandwidth of each."""
    position = {gpu.rank: i for i, gpu in enumerate(system.gpus)}
    nets = {net.id: i for i, net in reversed(list(enumerate(system.nets)))}
    for c, ranks in enumerate(graph.intra):
        order = [position[rank] for rank in ranks]
        for a, b in pairwise(order):
            yield paths.gpu_gpu(a, b), graph.bw_intra
        if not graph.inter:
            if graph.pattern is Pattern.RING:
                yield paths.gpu_gpu(order[-1], order[0]), graph.bw_intra
            continue
        first, last = (nets[id] for id in graph.inter[c])
        yield paths.net_gpu(first, order[0]), graph.bw_inter
        for gpu, part in _exits(graph.pattern, order):
            yield paths.gpu_net(gpu, last), graph.bw_inter * part


def _exits(pattern: Pattern, order: list[int]) -> list[tuple[int, float]]:
    """Return the GPUs that send to the network, with their share."""
    if pattern is Pattern.RING:
        return [(order[-1], 1.0)]
    if pattern is Pattern.BALANCED_TREE and len(order) > 1:
        return [(order[0], 0.5), (order[1], 0.5)]
    return [(order[min(1, len(order) - 1)] if pattern is Pattern.SPLIT_TREE else order[0], 1.0)]
