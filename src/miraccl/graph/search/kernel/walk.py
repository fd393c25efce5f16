"""The inner search: a depth-first walk over channels, one transition at a time.

This module applies and undoes the alternatives of choice points. ``choices`` has the choice points,
``order`` the order of their alternatives, ``transitions`` the bandwidth of links. All are ordinary
Python over the arrays of ``state`` and are compiled unchanged (see ``channel_search``); a test runs
both and compares the results.

The decisions are those of NCCL 2.28 (``src/graph/search.cc``), to the last digit:

- A channel is built GPU by GPU. Each transition reserves bandwidth on every link of its path and is
  undone after all its continuations were tried. A transition that a link cannot carry is skipped.
- Every GPU reached costs one visit of the budget. Once it is used up, the walk unwinds, so the
  result is deterministic.
- Bandwidths are single precision, rounded to three decimals at each reservation and release. A
  release does not restore the exact value, and the rest is the input of the next search: no
  transition may be skipped because it looks useless.
- NCCL recurses; here each choice point is a frame, because a walk can be thousands of transitions
  deep.
"""

from __future__ import annotations

from typing import Any

from miraccl.graph.search.kernel.choices import CHOICES, open_channel, push_first_gpu, visit
from miraccl.graph.search.kernel.order import ORDER, can_enter_by, can_leave_by
from miraccl.graph.search.kernel.state import (
    BALANCED_TREE,
    CLOSE_RING,
    COLLNET_DIRECT,
    CURRENT,
    FANOUT_DIRECT,
    FANOUT_NVLS,
    FREE,
    NEXT_CHANNEL,
    NVLS,
    PCI_ORDER,
    PICK_EXIT,
    PICK_FIRST,
    PICK_NET,
    PICK_NEXT,
    RING,
    SPLIT_TREE,
    ChannelSearchState,
)
from miraccl.graph.search.kernel.transitions import (
    ONE,
    TRANSITIONS,
    follow_path,
    follow_path_to_net,
    release_fanout_direct,
    release_fanout_nvls,
    reserve_fanout_direct,
    reserve_fanout_nvls,
    reserve_net,
)

PCI_ORDER_BUDGET = 1 << 10
"""Visits of the first walk from a net, in PCI order; they are not charged to the budget."""


def search(state: ChannelSearchState) -> None:
    """Walk from the empty graph until all alternatives were tried or the budget is used up."""
    header = state.header[0]
    open_channel(state)
    while header.depth > 0:
        frame = state.frames[header.depth - 1]
        if frame.open:
            undo_choice(state, frame)
            frame.open = 0
        if not apply_next_choice(state, frame, header.depth - 1):
            header.depth -= 1


def apply_next_choice(state: ChannelSearchState, frame: Any, row: int) -> bool:
    """Apply the next possible alternative of a frame; return False if none remains."""
    if frame.pick == NEXT_CHANNEL:
        return begin_next_channel(state, frame)
    while frame.position < frame.count:
        choice = state.choices[row, frame.position]
        frame.position += 1
        if frame.pick == PICK_NET:
            applied = enter_by_net(state, frame)
        elif frame.pick == PICK_FIRST:
            applied = enter_first_gpu(state, frame, row)
        elif frame.pick == PICK_EXIT:
            applied = leave_by_net(state, frame, choice)
        elif frame.pick == PICK_NEXT:
            applied = advance_to_gpu(state, frame, choice)
        elif frame.pick == CLOSE_RING:
            applied = close_ring(state, frame)
        else:
            applied = finish_channel(state, frame)
        if applied:
            frame.open = 1
            return True
    return False


def begin_next_channel(state: ChannelSearchState, frame: Any) -> bool:
    """Open one more channel, or drop the last one and return False."""
    if frame.position < frame.count:
        frame.position += 1
        open_channel(state)
        return True
    state.graphs[CURRENT].n_channels -= 1
    return False


def enter_by_net(state: ChannelSearchState, frame: Any) -> bool:
    """Enter by the next net; channel c starts its tries at the c-th net."""
    header = state.header[0]
    graph = state.graphs[CURRENT]
    bw = int(graph.bw_inter)
    turn = (graph.n_channels + frame.position - 1) % frame.count
    net = state.lists[header.starts_first + turn]
    if not can_enter_by(state, net, bw):
        return False
    state.ends[CURRENT, graph.n_channels, 0] = state.nets[net].id
    graph.latency_inter = state.nets[net].latency
    reserve_net(state, net, bw)
    frame.net = net
    push_first_gpu(state, net)
    if (graph.pattern == NVLS or graph.pattern == COLLNET_DIRECT) and state.frames[
        header.depth - 1
    ].count > 0:
        frame.position = frame.count  # a head is searched on one net only
    return True


def enter_first_gpu(state: ChannelSearchState, frame: Any, row: int) -> bool:
    """Start the channel at the next alternative for its first GPU."""
    header = state.header[0]
    order = state.choices[row, 2 * (frame.position - 1)]
    gpu = state.choices[row, 2 * (frame.position - 1) + 1]
    if frame.net >= 0 and order == PCI_ORDER:
        frame.budget = header.budget
        header.budget = PCI_ORDER_BUDGET
    frame.order = order
    frame.gpu = gpu
    if frame.net >= 0 and not follow_path(state, header.ngpus + frame.net, gpu, ONE):
        restore_budget(state, frame)
        return False
    state.used[state.graphs[CURRENT].n_channels, gpu] = 1
    pattern = state.graphs[CURRENT].pattern
    to_net = -1
    to_first = -1
    if header.inter:
        to_net = header.ngpus - 1 if pattern == RING else (1 if pattern == SPLIT_TREE else 0)
    elif pattern == RING:
        to_first = header.ngpus - 1
    visit(state, gpu, 0, to_net, to_first, order)
    return True


def restore_budget(state: ChannelSearchState, frame: Any) -> None:
    """Restore the budget after a bounded walk in PCI order.

    A best possible graph ends the outer walk, too: its budget stays -1.
    """
    header = state.header[0]
    if frame.net >= 0 and frame.order == PCI_ORDER:
        if header.budget != -1:
            header.budget = frame.budget
        frame.order = FREE


def leave_by_net(state: ChannelSearchState, frame: Any, net: int) -> bool:
    """Leave by this net; a balanced tree leaves once more from its second GPU."""
    graph = state.graphs[CURRENT]
    if not can_leave_by(state, net, frame.step) or not follow_path_to_net(
        state, frame.gpu, net, ONE
    ):
        return False
    frame.net = net
    state.ends[CURRENT, graph.n_channels, 1] = state.nets[net].id
    to_net = 1 if graph.pattern == BALANCED_TREE and frame.step == 0 else -1
    visit(state, frame.gpu, frame.step, to_net, frame.to_first, frame.order)
    return True


def advance_to_gpu(state: ChannelSearchState, frame: Any, gpu: int) -> bool:
    """Extend the channel to ``gpu``."""
    if not follow_path(state, frame.gpu, gpu, ONE):
        return False
    state.used[state.graphs[CURRENT].n_channels, gpu] = 1
    visit(state, gpu, frame.step + 1, frame.to_net, frame.to_first, frame.order)
    return True


def close_ring(state: ChannelSearchState, frame: Any) -> bool:
    """Return to the first GPU of the channel."""
    first = ring_start(state)
    if not follow_path(state, frame.gpu, first, ONE):
        return False
    visit(state, first, frame.step + 1, frame.to_net, -1, frame.order)
    return True


def ring_start(state: ChannelSearchState) -> int:
    """Return the first GPU of the current channel."""
    rank = state.ranks[CURRENT, state.graphs[CURRENT].n_channels, 0]
    for gpu in range(state.header[0].ngpus):
        if state.gpus[gpu].rank == rank:
            return gpu
    return -1


def finish_channel(state: ChannelSearchState, frame: Any) -> bool:
    """Apply a pick with a single alternative: a fan-out over all GPUs, or FINISH."""
    if frame.pick == FANOUT_NVLS and not reserve_fanout_nvls(state, frame.gpu):
        return False
    if frame.pick == FANOUT_DIRECT:
        if not reserve_fanout_direct(state, frame.gpu):
            return False
        step = 1
        for gpu in range(state.header[0].ngpus):
            if gpu != frame.gpu:
                state.ranks[CURRENT, state.graphs[CURRENT].n_channels, step] = state.gpus[gpu].rank
                step += 1
    visit(state, frame.gpu, state.header[0].ngpus, -1, -1, frame.order)
    return True


def undo_choice(state: ChannelSearchState, frame: Any) -> None:
    """Undo the open alternative of a frame."""
    header = state.header[0]
    graph = state.graphs[CURRENT]
    channel = graph.n_channels
    if frame.pick == PICK_NET:
        reserve_net(state, frame.net, -int(graph.bw_inter))
    elif frame.pick == PICK_FIRST:
        state.used[channel, frame.gpu] = 0
        if frame.net >= 0:
            follow_path(state, header.ngpus + frame.net, frame.gpu, -ONE)
        restore_budget(state, frame)
    elif frame.pick == PICK_EXIT:
        follow_path_to_net(state, frame.gpu, frame.net, -ONE)
    elif frame.pick == PICK_NEXT:
        gpu = state.choices[header.depth - 1, frame.position - 1]
        state.used[channel, gpu] = 0
        follow_path(state, frame.gpu, gpu, -ONE)
    elif frame.pick == CLOSE_RING:
        follow_path(state, frame.gpu, ring_start(state), -ONE)
    elif frame.pick == FANOUT_NVLS:
        release_fanout_nvls(state, frame.gpu, header.ngpus, header.ngpus)
    elif frame.pick == FANOUT_DIRECT:
        release_fanout_direct(state, frame.gpu, header.ngpus, header.ngpus)


WALK = (
    *TRANSITIONS,
    *ORDER,
    *CHOICES,
    begin_next_channel,
    enter_by_net,
    restore_budget,
    enter_first_gpu,
    leave_by_net,
    advance_to_gpu,
    ring_start,
    close_ring,
    finish_channel,
    undo_choice,
    apply_next_choice,
    search,
)
"""All compiled functions of the kernel."""
