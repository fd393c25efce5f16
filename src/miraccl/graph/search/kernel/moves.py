"""Moves of the search: bandwidth taken from links and given back.

Ordinary Python over the arrays of ``board``, compiled as it stands (see ``walk``). The rules are NCCL 2.28's (``src/graph/search.cc``
followPath, ncclTopoFollowPath): single precision throughout, rounded to three decimals each time a link is touched.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from miraccl.graph.search.kernel.state import BALANCED_TREE, NOW, TREE, Board

DISCONNECTED = 11
"""``PathType.DIS`` as a plain number, for compiled code."""

ONE = np.float32(1.0)
TWO = np.float32(2.0)
HALF = np.float32(0.5)
FIVE = np.float32(5.0)
SIX = np.float32(6.0)
THOUSAND = np.float32(1000.0)


def less(a: Any, b: Any) -> Any:
    """``a - b`` in single precision, rounded to three decimals, halves away from zero."""
    scaled = float((a - b) * THOUSAND)
    if scaled < 0.0:
        return -np.float32(math.floor(0.5 - scaled)) / THOUSAND
    return np.float32(math.floor(scaled + 0.5)) / THOUSAND


def take(board: Board, path: Any, steps: int, bw: Any) -> int:
    """Take ``bw`` from the first ``steps`` links of a path; stops before a link that has less and says how many were done."""
    wide = bw * SIX / FIVE if path.wide else bw
    for step in range(steps):
        hop = board.hops[path.first + step]
        link = board.links[hop.link]
        ahead = wide if link.pci else bw
        if link.bw < ahead:
            return step
        if hop.share > 0:
            back = board.links[hop.back]
            aside = ahead * hop.share
            if back.bw < aside:
                return step
            link.bw = less(link.bw, ahead)
            back.bw = less(back.bw, aside)
        else:
            link.bw = less(link.bw, ahead)
    return steps


def follow(board: Board, start: int, end: int, times: Any) -> bool:
    """Move from one vertex to another with ``times`` the bandwidth of the graph; negative gives a move back.

    Only a move with ``times`` exactly 1 is held to the path types allowed, as in NCCL.
    """
    graph = board.graphs[NOW]
    ngpus = board.state[0].ngpus
    nvs = board.state[0].nvs
    path = board.paths[start, end]
    inside = (start < ngpus or start == nvs) and (end < ngpus or end == nvs)
    bw = graph.bw_intra if inside else graph.bw_inter
    worst = graph.type_intra if inside else graph.type_inter
    if path.type >= DISCONNECTED:
        return False
    if times == ONE:
        if path.type > worst:
            return False
        if (
            graph.pattern <= TREE and board.paths[end, start].type > worst
        ):  # trees carry data both ways
            return False
    bw = bw * times
    done = take(board, path, path.count, bw)
    if done < path.count:
        take(board, path, done, -bw)
        return False
    graph.n_hops = int(np.float32(graph.n_hops) + times * np.float32(path.count))
    return True


def follow_to_net(board: Board, gpu: int, net: int, times: Any) -> bool:
    """A move from a GPU to a net. A balanced tree spreads this traffic over two GPUs, half each."""
    graph = board.graphs[NOW]
    whole = graph.bw_inter
    if graph.pattern == BALANCED_TREE:
        graph.bw_inter = whole * HALF
    possible = follow(board, gpu, board.state[0].ngpus + net, times)
    graph.bw_inter = whole
    return possible


def follow_fan_nvls(board: Board, head: int) -> bool:
    """All GPUs to and from the NVSwitch, the head twice; either all of it is on the board or nothing."""
    state = board.state[0]
    for gpu in range(state.ngpus):
        if not follow(board, state.nvs, gpu, TWO if gpu == head else ONE):
            undo_fan_nvls(board, head, 0, gpu)
            return False
    for gpu in range(state.ngpus):
        if not follow(board, gpu, state.nvs, TWO if gpu == head else ONE):
            undo_fan_nvls(board, head, gpu, state.ngpus)
            return False
    return True


def undo_fan_nvls(board: Board, head: int, ups: int, downs: int) -> None:
    state = board.state[0]
    for gpu in range(ups - 1, -1, -1):
        follow(board, gpu, state.nvs, -TWO if gpu == head else -ONE)
    for gpu in range(downs - 1, -1, -1):
        follow(board, state.nvs, gpu, -TWO if gpu == head else -ONE)


def fan_part(ngpus: int) -> Any:
    """Part of a head's bandwidth that each other GPU carries."""
    return np.float32(1.0 / (ngpus - 1))


def follow_fan_direct(board: Board, head: int) -> bool:
    """The head to and from each GPU with an equal part of the bandwidth; either all of it is on the board or nothing."""
    ngpus = board.state[0].ngpus
    part = fan_part(ngpus)
    for gpu in range(ngpus):
        if not follow(board, head, gpu, part):
            undo_fan_direct(board, head, 0, gpu)
            return False
    for gpu in range(ngpus):
        if not follow(board, gpu, head, part):
            undo_fan_direct(board, head, gpu, ngpus)
            return False
    return True


def undo_fan_direct(board: Board, head: int, ups: int, downs: int) -> None:
    part = fan_part(board.state[0].ngpus)
    for gpu in range(ups - 1, -1, -1):
        follow(board, gpu, head, -part)
    for gpu in range(downs - 1, -1, -1):
        follow(board, head, gpu, -part)


def reserve_net(board: Board, net: int, bw: int) -> None:
    """Take whole GB/s from all nets that share an adapter's port."""
    for other in range(len(board.nets)):
        if board.nets[other].asic == board.nets[net].asic:
            board.nets[other].bw = board.nets[other].bw - np.float32(bw)


MOVES = (
    less,
    take,
    follow,
    follow_to_net,
    undo_fan_nvls,
    follow_fan_nvls,
    fan_part,
    undo_fan_direct,
    follow_fan_direct,
    reserve_net,
)
"""Everything here that is compiled."""
