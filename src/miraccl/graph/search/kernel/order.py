"""What the search tries next: the order of GPUs, and which nets are allowed where.

Ordinary Python over the arrays of ``board``, compiled as it stands (see ``walk``). The rules are NCCL 2.28's (``src/graph/search.cc``
ncclTopoSearchNextGpuSort, ncclTopoSearchRecNet, ncclTopoSearchCheckNet).
"""

from __future__ import annotations

from miraccl.graph.search.kernel.state import BALANCED_TREE, NOW, RING, SPLIT_TREE, TREE, Board


def gpu_pci_bw(board: Board, gpu: int) -> int:
    """What a GPU's PCI link has left, whole GB/s of the worse direction; -1 without one."""
    if board.gpus[gpu].pci_link < 0:
        return -1
    up = board.links[board.gpus[gpu].pci_link].bw
    down = board.links[board.gpus[gpu].pci_back].bw
    return int(min(up, down))


def before(board: Board, here: int, net: int, a: int, b: int) -> int:
    """Below 0 if GPU a is tried before GPU b, above 0 if after, 0 if their scores are equal; ``net`` -1 leaves the network out.

    More bandwidth to the net, on PCI, fewer hops to the net, more bandwidth from here, fewer hops from here. Scores are whole numbers.
    """
    ngpus = board.state[0].ngpus
    if net >= 0:
        net_a = board.paths[ngpus + net, a]
        net_b = board.paths[ngpus + net, b]
        if int(net_a.bw) != int(net_b.bw):
            return int(net_b.bw) - int(net_a.bw)
        pci_a = gpu_pci_bw(board, a)
        pci_b = gpu_pci_bw(board, b)
        if pci_a != pci_b:
            return pci_b - pci_a
        if net_a.count != net_b.count:
            return int(net_a.count - net_b.count)
    path_a = board.paths[here, a]
    path_b = board.paths[here, b]
    if int(path_a.bw) != int(path_b.bw):
        return int(path_b.bw) - int(path_a.bw)
    return int(path_a.count - path_b.count)


def list_next_gpus(board: Board, here: int, sort_net: int, row: int) -> int:
    """Write the GPUs to try after this one into a row of choices, best first; returns how many.

    ``sort_net``: 1 if the next GPU goes to the network, -1 if a later one does, 0 if none will.
    """
    state = board.state[0]
    channel = board.graphs[NOW].n_channels
    choices = board.choices[row]
    net = -1
    if sort_net != 0:
        net = find_net(board, board.ends[NOW, channel, 0])
    count = 0
    for offset in range(1, state.ngpus):
        gpu = (here + offset) % state.ngpus
        if board.paths[here, gpu].count == 0 or board.used[channel, gpu]:
            continue
        at = count  # insertion sort; equal scores keep the order of the ring of indices
        while at > 0 and before(board, here, net, gpu, choices[at - 1]) < 0:
            choices[at] = choices[at - 1]
            at -= 1
        choices[at] = gpu
        count += 1
    if sort_net == -1 and same_distance(board, here, row, count):
        for i in range(count // 2):
            other = choices[count - 1 - i]
            choices[count - 1 - i] = choices[i]
            choices[i] = other
    return neighbours_first(board, here, row, count) if state.nvs >= 0 else count


def same_distance(board: Board, here: int, row: int, count: int) -> bool:
    """All these GPUs are equally far from here."""
    for i in range(1, count):
        first = board.paths[here, board.choices[row, 0]]
        other = board.paths[here, board.choices[row, i]]
        if int(first.bw) != int(other.bw) or first.count != other.count:
            return False
    return True


def neighbours_first(board: Board, here: int, row: int, count: int) -> int:
    """With an NVSwitch only the neighbours by index are tried: it prefers traffic among few peers. Returns how many remain."""
    ngpus = board.state[0].ngpus
    pattern = board.graphs[NOW].pattern
    following = (here + 1) % ngpus
    preceding = (here - 1 + ngpus) % ngpus
    kept = 0
    if pattern == RING:
        kept += move_to_front(board, row, count, following)
        if preceding != following:
            kept += move_to_front(board, row, count, preceding)
    elif pattern in (SPLIT_TREE, BALANCED_TREE):
        kept += move_to_front(board, row, count, preceding)
        if preceding != following:
            kept += move_to_front(board, row, count, following)
    else:
        kept += move_to_front(board, row, count, following)
    return kept


def move_to_front(board: Board, row: int, count: int, gpu: int) -> int:
    """1 if the GPU was among the choices."""
    choices = board.choices[row]
    for i in range(count):
        if choices[i] == gpu:
            for j in range(i, 0, -1):
                choices[j] = choices[j - 1]
            choices[0] = gpu
            return 1
    return 0


# Which net may be used


def find_net(board: Board, id: int) -> int:
    """The first net of this id."""
    for net in range(len(board.nets)):
        if board.nets[net].id == id:
            return net
    return -1


def may_start(board: Board, net: int, bw: int) -> bool:
    """The next channel may come in by this net."""
    graph = board.graphs[NOW]
    if graph.collnet and board.nets[net].collnet == 0:
        return False
    if board.nets[net].bw < bw:
        return False
    if (
        graph.pattern == RING and graph.cross_nic == 2 and graph.n_channels % 2 == 1
    ):  # odd channels mirror the one before
        return bool(board.nets[net].id == board.ends[NOW, graph.n_channels - 1, 1])
    return True


def may_leave(board: Board, net: int, step: int) -> bool:
    """The channel may leave by this net, at this step."""
    graph = board.graphs[NOW]
    channel = graph.n_channels
    id = board.nets[net].id
    start = find_net(board, board.ends[NOW, channel, 0])
    if graph.pattern == TREE and id != board.nets[start].id:  # its traffic is symmetric
        return False
    if graph.pattern == RING and graph.cross_nic == 2:
        if channel % 2 == 1 and id != board.ends[NOW, channel - 1, 0]:
            return False
    elif graph.cross_nic == 0 and board.nets[net].asic != board.nets[start].asic:
        return False
    return not (graph.pattern == BALANCED_TREE and step != 0 and id != board.ends[NOW, channel, 1])


ORDER = (
    gpu_pci_bw,
    before,
    find_net,
    same_distance,
    move_to_front,
    neighbours_first,
    list_next_gpus,
    may_start,
    may_leave,
)
"""Everything here that is compiled."""
