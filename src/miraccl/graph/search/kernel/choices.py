"""Choice points of the search: alternatives, arrivals, and acceptance of a graph.

Ordinary Python over the arrays of ``state``, compiled unchanged (see ``walk``). The rules are NCCL
2.28's (``src/graph/search.cc`` ncclTopoSearchRecGpu, ncclTopoSearchRec, ncclTopoCompareGraphs).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from miraccl.graph.search.kernel.order import list_next_gpus
from miraccl.graph.search.kernel.state import (
    BEST,
    CLOSE_RING,
    COLLNET_DIRECT,
    CURRENT,
    FANOUT_DIRECT,
    FANOUT_NVLS,
    FINISH,
    FREE,
    NEXT_CHANNEL,
    NVLS,
    PCI_ORDER,
    PICK_EXIT,
    PICK_FIRST,
    PICK_NET,
    PICK_NEXT,
    REPLAY,
    ChannelSearchState,
)


def push(state: ChannelSearchState, pick: int, count: int) -> Any:
    """Push a frame with ``count`` alternatives; the caller has filled its row of choices."""
    header = state.header[0]
    frame = state.frames[header.depth]
    frame.pick = pick
    frame.count = count
    frame.position = 0
    frame.open = 0
    frame.net = -1
    header.depth += 1
    return frame


def open_channel(state: ChannelSearchState) -> None:
    """Push the choice of the next channel's start."""
    header = state.header[0]
    if header.inter:
        push(state, PICK_NET, header.starts_count)
    else:
        push_first_gpu(state, -1)


def push_first_gpu(state: ChannelSearchState, net: int) -> None:
    """Push the choice of a channel's first GPU, entered from ``net`` (-1 for none).

    Alternatives are pairs of order and GPU.
    """
    header = state.header[0]
    graph = state.graphs[CURRENT]
    choices = state.choices[header.depth]
    count = 0
    if graph.pattern == NVLS or (
        graph.pattern == COLLNET_DIRECT and net >= 0
    ):  # channels are heads
        head = free_head(state, net) if net >= 0 else graph.n_channels
        if head >= 0:
            count = add_first(choices, count, FREE, head)
    elif graph.n_channels > 0 and (net < 0 or graph.same_channels):
        count = add_first(choices, count, REPLAY, replayed_gpu(state, -1))
        if not graph.same_channels:
            count = add_all_gpus(state, choices, count)
    else:
        if net < 0 or (header.nvs < 0 and graph.n_channels == 0):
            count = add_first(choices, count, PCI_ORDER, 0)
        count = (
            add_all_gpus(state, choices, count)
            if net < 0
            else add_near_gpus(state, choices, count, net)
        )
    push(state, PICK_FIRST, count).net = net


def add_all_gpus(state: ChannelSearchState, choices: Any, count: int) -> int:
    """Add every GPU as a first GPU; return the new count."""
    for gpu in range(state.header[0].ngpus):
        count = add_first(choices, count, FREE, gpu)
    return count


def add_near_gpus(state: ChannelSearchState, choices: Any, count: int, net: int) -> int:
    """Add the GPU that is local to the net, then the others at the same distance."""
    local = state.nets[net].local_gpu
    if local >= 0:
        count = add_first(choices, count, FREE, local)
    for i in range(state.nets[net].near_count):
        gpu = state.lists[state.nets[net].near_first + i]
        if gpu != local:
            count = add_first(choices, count, FREE, gpu)
    return count


def add_first(choices: Any, count: int, order: int, gpu: int) -> int:
    """Add one alternative for the first GPU; return the new count."""
    choices[2 * count] = order
    choices[2 * count + 1] = gpu
    return count + 1


def free_head(state: ChannelSearchState, net: int) -> int:
    """Return the GPU closest to a net if it may head one more channel, else -1."""
    graph = state.graphs[CURRENT]
    gpu = state.nets[net].local_gpu
    if gpu < 0 or graph.n_channels >= state.header[0].starts_count:
        return -1
    for channel in range(graph.n_channels):
        if state.ranks[CURRENT, channel, 0] == state.gpus[gpu].rank:
            return -1
    return int(gpu)


def replayed_gpu(state: ChannelSearchState, step: int) -> int:
    """Return the GPU that follows this step in the previous channel."""
    rank = state.ranks[CURRENT, state.graphs[CURRENT].n_channels - 1, step + 1]
    for gpu in range(state.header[0].ngpus):
        if state.gpus[gpu].rank == rank:
            return gpu
    return -1


def visit(
    state: ChannelSearchState, gpu: int, step: int, to_net: int, to_first: int, order: int
) -> None:
    """Arrive at a GPU: charge one visit and push the choice of the next vertex.

    Nothing is pushed once the budget is used up.
    """
    header = state.header[0]
    if header.budget <= 0:
        return
    header.budget -= 1
    header.visits += 1
    if step == header.ngpus:
        complete_channel(state)
        return
    graph = state.graphs[CURRENT]
    row = header.depth
    state.ranks[CURRENT, graph.n_channels, step] = state.gpus[gpu].rank
    count = 1
    if step == to_net:
        pick = PICK_EXIT
        first = state.lists[header.exits_first + 2 * gpu]
        count = state.lists[header.exits_first + 2 * gpu + 1]
        for i in range(count):
            state.choices[row, i] = state.lists[first + i]
    elif graph.pattern == NVLS:
        pick = FANOUT_NVLS
    elif graph.pattern == COLLNET_DIRECT:
        pick = FANOUT_DIRECT
    elif step < header.ngpus - 1:
        pick = PICK_NEXT
        if order == PCI_ORDER:
            state.choices[row, 0] = step + 1
        elif order == REPLAY:
            state.choices[row, 0] = replayed_gpu(state, step)
        else:
            sort_net = 0 if to_net == -1 else (1 if to_net == step + 1 else -1)
            count = list_next_gpus(state, gpu, sort_net, row)
    elif step == to_first:
        pick = CLOSE_RING
    else:
        pick = FINISH
    frame = push(state, pick, count)
    frame.gpu = gpu
    frame.step = step
    frame.to_net = to_net
    frame.to_first = to_first
    frame.order = order


def complete_channel(state: ChannelSearchState) -> None:
    """Count the channel, save the graph if it is the best so far, and push the next channel."""
    header = state.header[0]
    graph = state.graphs[CURRENT]
    graph.n_channels += 1
    if is_better(state):
        copy_graph(state, CURRENT, BEST)
        header.improvements += 1
        if graph.n_channels == graph.max_channels:
            header.budget = -1
    push(state, NEXT_CHANNEL, 1 if graph.n_channels < graph.max_channels else 0)


def is_better(state: ChannelSearchState) -> bool:
    """Return True if the current graph is better than the best one."""
    graph = state.graphs[CURRENT]
    best = state.graphs[BEST]
    if graph.n_channels < graph.min_channels:
        return False
    count = np.float32(graph.n_channels)
    best_count = np.float32(best.n_channels)
    if graph.pattern == NVLS:  # a channel is a GPU that pulls: more are better
        if graph.n_channels > best.n_channels and graph.n_channels <= state.header[0].ngpus:
            return True
        return bool(count * graph.bw_inter > best_count * best.bw_inter)
    total = count * graph.bw_intra
    best_total = best_count * best.bw_intra
    if total != best_total:
        return bool(total > best_total)
    return bool(
        graph.pattern == best.pattern
        and graph.cross_nic == best.cross_nic
        and graph.n_hops < best.n_hops
    )


def copy_graph(state: ChannelSearchState, source: int, target: int) -> None:
    """Copy one graph with its channels over the other."""
    state.graphs[target] = state.graphs[source]
    for channel in range(state.graphs[source].n_channels):
        for step in range(state.header[0].ngpus):
            state.ranks[target, channel, step] = state.ranks[source, channel, step]
        state.ends[target, channel, 0] = state.ends[source, channel, 0]
        state.ends[target, channel, 1] = state.ends[source, channel, 1]


CHOICES = (
    push,
    add_first,
    free_head,
    replayed_gpu,
    add_all_gpus,
    add_near_gpus,
    push_first_gpu,
    open_channel,
    copy_graph,
    is_better,
    complete_channel,
    visit,
)
"""Compiled functions of this module."""
