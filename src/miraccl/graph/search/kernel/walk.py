"""The inner search: a depth-first walk over channels, one move of bandwidth at a time.

Owns the walk: which alternative of a choice point is made, and how it is taken back.  ``choices`` has the choice points, ``order`` the
order of their alternatives, ``moves`` the bandwidth of links.  All are ordinary Python over the arrays of ``board`` and are compiled as
they stand (see ``channel_search``); a test runs both and compares.

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

from miraccl.graph.search.kernel.choices import CHOICES, open_channel, push_first_gpu, visit
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
from miraccl.graph.search.kernel.order import ORDER, may_leave, may_start
from miraccl.graph.search.kernel.state import (
    BALANCED_TREE,
    CLOSE_RING,
    COLLNET_DIRECT,
    FAN_DIRECT,
    FAN_NVLS,
    FREE,
    NEXT_CHANNEL,
    NOW,
    NVLS,
    PCI_ORDER,
    PICK_EXIT,
    PICK_FIRST,
    PICK_NET,
    PICK_NEXT,
    RING,
    SPLIT_TREE,
    Board,
)

PCI_ORDER_BUDGET = 1 << 10
"""Visits of the first walk from a net, in PCI order; they do not count."""


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
    if (graph.pattern == NVLS or graph.pattern == COLLNET_DIRECT) and board.frames[
        state.depth - 1
    ].count > 0:
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
    *CHOICES,
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
