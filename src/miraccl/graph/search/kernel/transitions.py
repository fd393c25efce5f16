"""Transitions of the search: bandwidth reserved on links and released again.

Ordinary Python over the arrays of ``state``, compiled unchanged (see ``walk``). The rules are NCCL
2.28's (``src/graph/search.cc`` followPath, ncclTopoFollowPath): single precision throughout,
rounded to three decimals each time a link is changed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from miraccl.graph.search.kernel.state import BALANCED_TREE, CURRENT, TREE, ChannelSearchState

DISCONNECTED = 11
"""``PathType.DIS`` as a plain number, for compiled code."""

ONE = np.float32(1.0)
TWO = np.float32(2.0)
HALF = np.float32(0.5)
FIVE = np.float32(5.0)
SIX = np.float32(6.0)
THOUSAND = np.float32(1000.0)


def subtract_rounded(a: Any, b: Any) -> Any:
    """Return ``a - b`` in single precision, rounded half away from zero to three decimals."""
    scaled = float((a - b) * THOUSAND)
    if scaled < 0.0:
        return -np.float32(math.floor(0.5 - scaled)) / THOUSAND
    return np.float32(math.floor(scaled + 0.5)) / THOUSAND


def reserve_bandwidth(state: ChannelSearchState, path: Any, steps: int, bw: Any) -> int:
    """Reserve ``bw`` on the first ``steps`` links of a path; a negative ``bw`` releases it.

    Stops before a link with too little bandwidth and returns the number of links done.
    """
    overhead_bw = bw * SIX / FIVE if path.pci_overhead else bw
    for step in range(steps):
        hop = state.hops[path.first + step]
        link = state.links[hop.link]
        forward_bw = overhead_bw if link.pci else bw
        if link.bw < forward_bw:
            return step
        if hop.reverse_share > 0:
            reverse = state.links[hop.reverse_link]
            reverse_bw = forward_bw * hop.reverse_share
            if reverse.bw < reverse_bw:
                return step
            link.bw = subtract_rounded(link.bw, forward_bw)
            reverse.bw = subtract_rounded(reverse.bw, reverse_bw)
        else:
            link.bw = subtract_rounded(link.bw, forward_bw)
    return steps


def follow_path(state: ChannelSearchState, start: int, end: int, times: Any) -> bool:
    """Reserve the path between two vertices with ``times`` the bandwidth of the graph.

    A negative ``times`` releases it. Returns False, with nothing reserved, if the path does not
    exist, is of a worse type than allowed, or lacks bandwidth.
    """
    graph = state.graphs[CURRENT]
    ngpus = state.header[0].ngpus
    nvs = state.header[0].nvs
    path = state.paths[start, end]
    inside = (start < ngpus or start == nvs) and (end < ngpus or end == nvs)
    bw = graph.bw_intra if inside else graph.bw_inter
    worst = graph.type_intra if inside else graph.type_inter
    if path.type >= DISCONNECTED:
        return False
    # Like NCCL, check the path type for a factor of exactly 1 only.
    if times == ONE:
        if path.type > worst:
            return False
        if (
            graph.pattern <= TREE and state.paths[end, start].type > worst
        ):  # trees carry data in both directions
            return False
    bw = bw * times
    done = reserve_bandwidth(state, path, path.count, bw)
    if done < path.count:
        reserve_bandwidth(state, path, done, -bw)
        return False
    graph.n_hops = int(np.float32(graph.n_hops) + times * np.float32(path.count))
    return True


def follow_path_to_net(state: ChannelSearchState, gpu: int, net: int, times: Any) -> bool:
    """Reserve the path from a GPU to a net.

    A balanced tree spreads this traffic over two GPUs, half each.
    """
    graph = state.graphs[CURRENT]
    whole = graph.bw_inter
    if graph.pattern == BALANCED_TREE:
        graph.bw_inter = whole * HALF
    possible = follow_path(state, gpu, state.header[0].ngpus + net, times)
    graph.bw_inter = whole
    return possible


def reserve_fanout_nvls(state: ChannelSearchState, head: int) -> bool:
    """Reserve all GPUs to and from the NVSwitch, the head twice; all or nothing."""
    header = state.header[0]
    for gpu in range(header.ngpus):
        if not follow_path(state, header.nvs, gpu, TWO if gpu == head else ONE):
            release_fanout_nvls(state, head, 0, gpu)
            return False
    for gpu in range(header.ngpus):
        if not follow_path(state, gpu, header.nvs, TWO if gpu == head else ONE):
            release_fanout_nvls(state, head, gpu, header.ngpus)
            return False
    return True


def release_fanout_nvls(state: ChannelSearchState, head: int, ups: int, downs: int) -> None:
    """Release the first ``ups`` paths to the NVSwitch and the first ``downs`` paths from it."""
    header = state.header[0]
    for gpu in range(ups - 1, -1, -1):
        follow_path(state, gpu, header.nvs, -TWO if gpu == head else -ONE)
    for gpu in range(downs - 1, -1, -1):
        follow_path(state, header.nvs, gpu, -TWO if gpu == head else -ONE)


def fanout_share(ngpus: int) -> Any:
    """Return the share of a head's bandwidth that each other GPU carries."""
    return np.float32(1.0 / (ngpus - 1))


def reserve_fanout_direct(state: ChannelSearchState, head: int) -> bool:
    """Reserve the head to and from each GPU with an equal share; all or nothing."""
    ngpus = state.header[0].ngpus
    share = fanout_share(ngpus)
    for gpu in range(ngpus):
        if not follow_path(state, head, gpu, share):
            release_fanout_direct(state, head, 0, gpu)
            return False
    for gpu in range(ngpus):
        if not follow_path(state, gpu, head, share):
            release_fanout_direct(state, head, gpu, ngpus)
            return False
    return True


def release_fanout_direct(state: ChannelSearchState, head: int, ups: int, downs: int) -> None:
    """Release the first ``ups`` paths to the head and the first ``downs`` paths from it."""
    share = fanout_share(state.header[0].ngpus)
    for gpu in range(ups - 1, -1, -1):
        follow_path(state, gpu, head, -share)
    for gpu in range(downs - 1, -1, -1):
        follow_path(state, head, gpu, -share)


def reserve_net(state: ChannelSearchState, net: int, bw: int) -> None:
    """Reserve whole GB/s on all nets that share an adapter's port."""
    for other in range(len(state.nets)):
        if state.nets[other].asic == state.nets[net].asic:
            state.nets[other].bw = state.nets[other].bw - np.float32(bw)


TRANSITIONS = (
    subtract_rounded,
    reserve_bandwidth,
    follow_path,
    follow_path_to_net,
    release_fanout_nvls,
    reserve_fanout_nvls,
    fanout_share,
    release_fanout_direct,
    reserve_fanout_direct,
    reserve_net,
)
"""Compiled functions of this module."""
