"""The inner search: a depth-first walk over channels, one move of bandwidth at a time.

Owns the walk: choice points, their alternatives, the budget, and what counts as better; ``moves`` and ``order`` hold the rest of it.
All three are ordinary Python over the arrays of ``board`` and are compiled as they stand (see ``channel_search``); a test runs both and
compares.

How it goes on (NCCL 2.28 ``src/graph/search.cc``, whose decisions this reproduces to the last digit)
- A channel is laid GPU by GPU. Each move takes its bandwidth from every link of the path and is taken back when all that follows it was
  tried. A move that a link cannot carry is not made.
- Every GPU reached costs one visit of the budget; with the budget used up, the walk unwinds. So it is deterministic.
- Bandwidths are single-precision floats, rounded to three decimals each time one is taken or given back. That is no exact undo, and what
  a search leaves behind is what the next one finds: nothing here may skip a move because it looks useless.
- NCCL recurses; here each choice point is a frame, since a walk may be thousands of moves deep.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from miraccl.graph.search.kernel.board import (
    BALANCED_TREE,
    BEST,
    CLOSE_RING,
    COLLNET_DIRECT,
    FAN_DIRECT,
    FAN_NVLS,
    FINISH,
    FREE,
    NEXT_CHANNEL,
    NOW,
    NVLS,
    PCI_ORDER,
    PICK_EXIT,
    PICK_FIRST,
    PICK_NET,
    PICK_NEXT,
    REPLAY,
    RING,
    SPLIT_TREE,
    Board,
)
from miraccl.graph.search.kernel.moves import (
    MOVES,
    ONE,
    follow,
    follow_fan_direct,
    follow_fan_nvls,
    follow_to_net,
    reserve_net,
    undo_fan_direct,
    undo_fan_nvls,
)
from miraccl.graph.search.kernel.order import ORDER, list_next_gpus, may_leave, may_start

PCI_ORDER_BUDGET = 1 << 10
"""Visits of the first walk from a net, in PCI order; they do not count."""


# Choice points


def push(board: Board, pick: int, count: int) -> Any:
    """A new frame with ``count`` alternatives, whose row of choices has been filled."""
    state = board.state[0]
    frame = board.frames[state.depth]
    frame.pick = pick
    frame.count = count
    frame.position = 0
    frame.open = 0
    frame.net = -1
    state.depth += 1
    return frame


def open_channel(board: Board) -> None:
    """Push the choice of where the next channel starts."""
    state = board.state[0]
    if state.inter:
        push(board, PICK_NET, state.starts_count)
    else:
        push_first_gpu(board, -1)


def push_first_gpu(board: Board, net: int) -> None:
    """Push the choice of a channel's first GPU, entered from ``net`` (-1 none). Alternatives are pairs of order and GPU."""
    state = board.state[0]
    graph = board.graphs[NOW]
    choices = board.choices[state.depth]
    count = 0
    if graph.pattern == NVLS or (graph.pattern == COLLNET_DIRECT and net >= 0):  # channels are heads
        head = free_head(board, net) if net >= 0 else graph.n_channels
        if head >= 0:
            count = add_first(choices, count, FREE, head)
    elif graph.n_channels > 0 and (net < 0 or graph.same_channels):
        count = add_first(choices, count, REPLAY, replayed_gpu(board, -1))
        if not graph.same_channels:
            count = add_all_gpus(board, choices, count)
    else:
        if net < 0 or (state.nvs < 0 and graph.n_channels == 0):
            count = add_first(choices, count, PCI_ORDER, 0)
        count = add_all_gpus(board, choices, count) if net < 0 else add_near_gpus(board, choices, count, net)
    push(board, PICK_FIRST, count).net = net


def add_all_gpus(board: Board, choices: Any, count: int) -> int:
    for gpu in range(board.state[0].ngpus):
        count = add_first(choices, count, FREE, gpu)
    return count


def add_near_gpus(board: Board, choices: Any, count: int, net: int) -> int:
    """The GPU that counts as closest to the net, then the others at the same distance."""
    local = board.nets[net].local_gpu
    if local >= 0:
        count = add_first(choices, count, FREE, local)
    for i in range(board.nets[net].near_count):
        gpu = board.lists[board.nets[net].near_first + i]
        if gpu != local:
            count = add_first(choices, count, FREE, gpu)
    return count


def add_first(choices: Any, count: int, order: int, gpu: int) -> int:
    choices[2 * count] = order
    choices[2 * count + 1] = gpu
    return count + 1


def free_head(board: Board, net: int) -> int:
    """The GPU closest to a net if it may become the head of one more channel, else -1."""
    graph = board.graphs[NOW]
    gpu = board.nets[net].local_gpu
    if gpu < 0 or graph.n_channels >= board.state[0].starts_count:
        return -1
    for channel in range(graph.n_channels):
        if board.ranks[NOW, channel, 0] == board.gpus[gpu].rank:
            return -1
    return int(gpu)


def replayed_gpu(board: Board, step: int) -> int:
    """The GPU that follows this step in the channel before."""
    rank = board.ranks[NOW, board.graphs[NOW].n_channels - 1, step + 1]
    for gpu in range(board.state[0].ngpus):
        if board.gpus[gpu].rank == rank:
            return gpu
    return -1


def visit(board: Board, gpu: int, step: int, to_net: int, to_first: int, order: int) -> None:
    """Arrive at a GPU: spend a visit and push the choice of where to go on; with the budget used up, nothing is pushed."""
    state = board.state[0]
    if state.budget <= 0:
        return
    state.budget -= 1
    state.visits += 1
    if step == state.ngpus:
        complete_channel(board)
        return
    graph = board.graphs[NOW]
    row = state.depth
    board.ranks[NOW, graph.n_channels, step] = board.gpus[gpu].rank
    count = 1
    if step == to_net:
        pick = PICK_EXIT
        first = board.lists[state.exits_first + 2 * gpu]
        count = board.lists[state.exits_first + 2 * gpu + 1]
        for i in range(count):
            board.choices[row, i] = board.lists[first + i]
    elif graph.pattern == NVLS:
        pick = FAN_NVLS
    elif graph.pattern == COLLNET_DIRECT:
        pick = FAN_DIRECT
    elif step < state.ngpus - 1:
        pick = PICK_NEXT
        if order == PCI_ORDER:
            board.choices[row, 0] = step + 1
        elif order == REPLAY:
            board.choices[row, 0] = replayed_gpu(board, step)
        else:
            sort_net = 0 if to_net == -1 else (1 if to_net == step + 1 else -1)
            count = list_next_gpus(board, gpu, sort_net, row)
    elif step == to_first:
        pick = CLOSE_RING
    else:
        pick = FINISH
    frame = push(board, pick, count)
    frame.gpu = gpu
    frame.step = step
    frame.to_net = to_net
    frame.to_first = to_first
    frame.order = order


def complete_channel(board: Board) -> None:
    """One more channel stands: keep the graph if it is the best so far, and push the try for another."""
    state = board.state[0]
    graph = board.graphs[NOW]
    graph.n_channels += 1
    if is_better(board):
        copy_graph(board, NOW, BEST)
        state.kept += 1
        if graph.n_channels == graph.max_channels:
            state.budget = -1
    push(board, NEXT_CHANNEL, 1 if graph.n_channels < graph.max_channels else 0)


def is_better(board: Board) -> bool:
    graph = board.graphs[NOW]
    best = board.graphs[BEST]
    if graph.n_channels < graph.min_channels:
        return False
    count = np.float32(graph.n_channels)
    best_count = np.float32(best.n_channels)
    if graph.pattern == NVLS:  # channels are GPUs that pull: the more the better
        if graph.n_channels > best.n_channels and graph.n_channels <= board.state[0].ngpus:
            return True
        return bool(count * graph.bw_inter > best_count * best.bw_inter)
    total = count * graph.bw_intra
    best_total = best_count * best.bw_intra
    if total != best_total:
        return bool(total > best_total)
    return bool(graph.pattern == best.pattern and graph.cross_nic == best.cross_nic and graph.n_hops < best.n_hops)


def copy_graph(board: Board, source: int, target: int) -> None:
    board.graphs[target] = board.graphs[source]
    for channel in range(board.graphs[source].n_channels):
        for step in range(board.state[0].ngpus):
            board.ranks[target, channel, step] = board.ranks[source, channel, step]
        board.ends[target, channel, 0] = board.ends[source, channel, 0]
        board.ends[target, channel, 1] = board.ends[source, channel, 1]


# Moves


def search(board: Board) -> None:
    """Walk from the empty graph until everything was tried or the budget of ``state`` is spent."""
    state = board.state[0]
    open_channel(board)
    while state.depth > 0:
        frame = board.frames[state.depth - 1]
        if frame.open:
            undo_move(board, frame)
            frame.open = 0
        if not make_move(board, frame, state.depth - 1):
            state.depth -= 1


def make_move(board: Board, frame: Any, row: int) -> bool:
    """Put the next possible alternative of a frame on the board and arrive where it leads; False when none is left."""
    if frame.pick == NEXT_CHANNEL:
        return make_next_channel(board, frame)
    while frame.position < frame.count:
        choice = board.choices[row, frame.position]
        frame.position += 1
        if frame.pick == PICK_NET:
            made = make_net(board, frame)
        elif frame.pick == PICK_FIRST:
            made = make_first(board, frame, row)
        elif frame.pick == PICK_EXIT:
            made = make_exit(board, frame, choice)
        elif frame.pick == PICK_NEXT:
            made = make_next(board, frame, choice)
        elif frame.pick == CLOSE_RING:
            made = make_ring(board, frame)
        else:
            made = make_end(board, frame)
        if made:
            frame.open = 1
            return True
    return False


def make_next_channel(board: Board, frame: Any) -> bool:
    if frame.position < frame.count:
        frame.position += 1
        open_channel(board)
        return True
    board.graphs[NOW].n_channels -= 1
    return False


def make_net(board: Board, frame: Any) -> bool:
    """Come in by the next net: channel c begins its tries at the c-th."""
    state = board.state[0]
    graph = board.graphs[NOW]
    bw = int(graph.bw_inter)
    turn = (graph.n_channels + frame.position - 1) % frame.count
    net = board.lists[state.starts_first + turn]
    if not may_start(board, net, bw):
        return False
    board.ends[NOW, graph.n_channels, 0] = board.nets[net].id
    graph.latency_inter = board.nets[net].latency
    reserve_net(board, net, bw)
    frame.net = net
    push_first_gpu(board, net)
    if (graph.pattern == NVLS or graph.pattern == COLLNET_DIRECT) and board.frames[state.depth - 1].count > 0:
        frame.position = frame.count  # a head is searched on one net only
    return True


def make_first(board: Board, frame: Any, row: int) -> bool:
    state = board.state[0]
    order = board.choices[row, 2 * (frame.position - 1)]
    gpu = board.choices[row, 2 * (frame.position - 1) + 1]
    if frame.net >= 0 and order == PCI_ORDER:
        frame.budget = state.budget
        state.budget = PCI_ORDER_BUDGET
    frame.order = order
    frame.gpu = gpu
    if frame.net >= 0 and not follow(board, state.ngpus + frame.net, gpu, ONE):
        end_bounded(board, frame)
        return False
    board.used[board.graphs[NOW].n_channels, gpu] = 1
    pattern = board.graphs[NOW].pattern
    to_net = -1
    to_first = -1
    if state.inter:
        to_net = state.ngpus - 1 if pattern == RING else (1 if pattern == SPLIT_TREE else 0)
    elif pattern == RING:
        to_first = state.ngpus - 1
    visit(board, gpu, 0, to_net, to_first, order)
    return True


def end_bounded(board: Board, frame: Any) -> None:
    """Return to the budget of the search around a walk in PCI order; a best possible graph ends that one too."""
    state = board.state[0]
    if frame.net >= 0 and frame.order == PCI_ORDER:
        if state.budget != -1:
            state.budget = frame.budget
        frame.order = FREE


def make_exit(board: Board, frame: Any, net: int) -> bool:
    """Leave by this net; a balanced tree does so once more from its second GPU."""
    graph = board.graphs[NOW]
    if not may_leave(board, net, frame.step) or not follow_to_net(board, frame.gpu, net, ONE):
        return False
    frame.net = net
    board.ends[NOW, graph.n_channels, 1] = board.nets[net].id
    to_net = 1 if graph.pattern == BALANCED_TREE and frame.step == 0 else -1
    visit(board, frame.gpu, frame.step, to_net, frame.to_first, frame.order)
    return True


def make_next(board: Board, frame: Any, gpu: int) -> bool:
    if not follow(board, frame.gpu, gpu, ONE):
        return False
    board.used[board.graphs[NOW].n_channels, gpu] = 1
    visit(board, gpu, frame.step + 1, frame.to_net, frame.to_first, frame.order)
    return True


def make_ring(board: Board, frame: Any) -> bool:
    first = ring_start(board)
    if not follow(board, frame.gpu, first, ONE):
        return False
    visit(board, first, frame.step + 1, frame.to_net, -1, frame.order)
    return True


def ring_start(board: Board) -> int:
    rank = board.ranks[NOW, board.graphs[NOW].n_channels, 0]
    for gpu in range(board.state[0].ngpus):
        if board.gpus[gpu].rank == rank:
            return gpu
    return -1


def make_end(board: Board, frame: Any) -> bool:
    """The remaining picks have one way to go: a fan over all GPUs, or nothing more to lay."""
    if frame.pick == FAN_NVLS and not follow_fan_nvls(board, frame.gpu):
        return False
    if frame.pick == FAN_DIRECT:
        if not follow_fan_direct(board, frame.gpu):
            return False
        step = 1
        for gpu in range(board.state[0].ngpus):
            if gpu != frame.gpu:
                board.ranks[NOW, board.graphs[NOW].n_channels, step] = board.gpus[gpu].rank
                step += 1
    visit(board, frame.gpu, board.state[0].ngpus, -1, -1, frame.order)
    return True


def undo_move(board: Board, frame: Any) -> None:
    """Take the open alternative of a frame off the board."""
    state = board.state[0]
    graph = board.graphs[NOW]
    channel = graph.n_channels
    if frame.pick == PICK_NET:
        reserve_net(board, frame.net, -int(graph.bw_inter))
    elif frame.pick == PICK_FIRST:
        board.used[channel, frame.gpu] = 0
        if frame.net >= 0:
            follow(board, state.ngpus + frame.net, frame.gpu, -ONE)
        end_bounded(board, frame)
    elif frame.pick == PICK_EXIT:
        follow_to_net(board, frame.gpu, frame.net, -ONE)
    elif frame.pick == PICK_NEXT:
        gpu = board.choices[state.depth - 1, frame.position - 1]
        board.used[channel, gpu] = 0
        follow(board, frame.gpu, gpu, -ONE)
    elif frame.pick == CLOSE_RING:
        follow(board, frame.gpu, ring_start(board), -ONE)
    elif frame.pick == FAN_NVLS:
        undo_fan_nvls(board, frame.gpu, state.ngpus, state.ngpus)
    elif frame.pick == FAN_DIRECT:
        undo_fan_direct(board, frame.gpu, state.ngpus, state.ngpus)


WALK = (
    *MOVES,
    *ORDER,
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
    make_next_channel,
    make_net,
    end_bounded,
    make_first,
    make_exit,
    make_next,
    ring_start,
    make_ring,
    make_end,
    undo_move,
    make_move,
    search,
)
"""Everything that is compiled."""
